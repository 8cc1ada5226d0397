"""How often the state is kept where nothing was measured before: by what it takes in the first steps."""

from itertools import pairwise

import pytest

from convoy.elastic import snapshot as pace
from convoy.elastic.snapshot import TIMED, SnapshotInterval, interval_of


@pytest.mark.parametrize(("kept_s", "every"), [(0.0, 1), (0.02, 1), (0.021, 2), (0.1, 5), (1.0, 50)])
def test_so_seldom_that_it_costs_two_per_cent(kept_s: float, every: int) -> None:
    assert interval_of(kept_s, 1.0) == every


def test_the_median_of_the_first_steps_decides_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(pace.time, "perf_counter", lambda: now_s[0])
    found = SnapshotInterval()
    wishes = []
    for kept_s in (9.0, 0.11, 0.11, 5.0, 0.11, 0.11, 7.0):
        found.begins()
        now_s[0] += 1.0
        found.ended()
        with found.keeping():
            now_s[0] += kept_s
        wishes.append(found.wish)
    assert wishes == [None] * TIMED + [6] * 2, "the first memory is new, and one copy was held up"
    assert all(a <= b for a, b in pairwise(w or 0 for w in wishes))
