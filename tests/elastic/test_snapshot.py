"""Snapshot holders and transfers, compared with arrays entry by entry."""

import random

import numpy as np
import pytest

from convoy.elastic.snapshot import TIMED, interval_of, newest_whole, transfers, uncovered, without
from convoy.layout.layout import Box, Layout, OnOne, Replicated, Split, box, entries, whole


def random_box(dice: random.Random, shape: tuple[int, ...]) -> Box:
    spans = (sorted(dice.sample(range(extent + 1), 2)) for extent in shape)
    return tuple((a, b) for a, b in spans)


def filled(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    counts = np.zeros(shape, dtype=int)
    for each in boxes:
        counts[tuple(slice(*span) for span in each)] += 1
    return counts


@pytest.mark.parametrize("seed", range(30))
def test_box_difference_covers_the_rest_once(seed: int) -> None:
    dice = random.Random(seed)
    shape = tuple(dice.randint(2, 5) for _ in range(dice.randint(1, 3)))
    mine, taken = random_box(dice, shape), [random_box(dice, shape) for _ in range(dice.randint(0, 3))]
    expected = filled(shape, [mine]) * (filled(shape, taken) == 0)
    assert (filled(shape, uncovered(mine, taken)) == expected).all()


def test_a_number_is_a_box_without_axes() -> None:
    assert without((), ()) == []
    assert uncovered((), []) == [()]


def layout(dice: random.Random, devices: int, extent: int) -> Layout:
    kind = dice.choice(["split", "copies", "one"])
    if kind == "one":
        return OnOne(dice.randrange(devices))
    if kind == "copies":
        return Replicated(tuple(range(devices)))
    cuts = sorted(dice.randint(0, extent) for _ in range(devices - 1))
    return Split(0, tuple(b - a for a, b in zip([0, *cuts], [*cuts, extent], strict=True)))


@pytest.mark.parametrize("seed", range(40))
def test_every_entry_is_sent_once_by_a_holder(seed: int) -> None:
    dice = random.Random(seed)
    shapes: dict[str, tuple[int, ...]] = {"a": (7, 3), "b": (12,), "c": ()}
    before, now = dice.randint(1, 4), dice.randint(1, 4)
    old = {k: layout(dice, before, s[0]) if s else Replicated(tuple(range(before))) for k, s in shapes.items()}
    new = {k: layout(dice, now, s[0]) if s else Replicated(tuple(range(now))) for k, s in shapes.items()}
    held: list[dict[str, list[Box]]] = [{} for _ in range(now)]
    for device in range(before):  # what the old devices had lies with any of the new ones
        for key, shape in shapes.items():
            if (here := box(old[key], device, shape)) is not None:
                held[dice.randrange(now)].setdefault(key, []).append(here)
    wanted = [
        {k: b for k, s in shapes.items() if (b := box(new[k], d, s)) is not None and entries(b)} for d in range(now)
    ]
    found = transfers(held, wanted, {"a": 4, "b": 8, "c": 8})
    for device, boxes in enumerate(wanted):
        for key, shape in shapes.items():
            got = [t.box for t in found if t.receiver == device and t.key == key]
            expected = filled(shape, [boxes[key]] if key in boxes else [])
            assert (filled(shape, got) == expected).all()
    for each in found:
        assert not uncovered(each.box, held[each.sender][each.key])
        if each.sender != each.receiver:  # nothing travels that is there
            assert all(uncovered(each.box, [b]) == [each.box] for b in held[each.receiver].get(each.key, []))


@pytest.mark.parametrize(
    ("kept", "step"),
    [
        ([{3: {"a": [((0, 4),)]}}, {3: {}}], 3),
        ([{3: {"a": [((0, 2),)]}, 4: {"a": [((0, 2),)]}}, {3: {"a": [((2, 4),)]}}], 3),
        ([{3: {"a": [((0, 2),)]}, 4: {"a": [((0, 3),)]}}, {4: {"a": [((2, 4),)]}}], 4),
        ([{3: {"a": [((0, 2),)]}}, {4: {"a": [((2, 4),)]}}], None),
        ([{}, {}], None),
    ],
)
def test_last_complete_snapshot_is_found(kept: list[dict[int, dict[str, list[Box]]]], step: int | None) -> None:
    assert newest_whole(kept, {"a": whole((4,))}) == step


@pytest.mark.parametrize(("kept_s", "every"), [(0.0, 1), (0.02, 1), (0.021, 2), (0.1, 5), (1.0, 50)])
def test_snapshot_interval_costs_two_per_cent(kept_s: float, every: int) -> None:
    assert interval_of([kept_s] * TIMED, [1.0] * TIMED) == every


def test_median_of_first_steps_sets_the_interval_once() -> None:
    """The first snapshot allocates its memory, and one copy was held up."""
    snapshots_s, steps_s = [9.0, 0.11, 0.11, 5.0, 0.11, 7.0, 7.0], [1.0] * 7
    found = [interval_of(snapshots_s[:count], steps_s[:count]) for count in range(8)]
    assert found == [1] * TIMED + [6] * 3
