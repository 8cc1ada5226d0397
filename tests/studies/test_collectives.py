"""Formulas of collectives: against numbers worked by hand, and against the schedules that training runs."""

import numpy as np
import pytest

from convoy.layout.collectives import Reduce, Schedule, schedule
from convoy.layout.layout import Partial, Replicated, entries
from studies import collectives as c

ALPHA_S, BETA, GAMMA = 1.0, 0.01, 0.001

HAND = [
    # 1000 bytes: n beta = 10 s, n gamma = 1 s.
    (c.ring_allreduce, 4, 6 * 1 + 2 * 7.5 + 0.75),
    (c.ring_allreduce, 3, 4 * 1 + 2 * 20 / 3 + 2 / 3),
    (c.recursive_doubling_allreduce, 4, 2 * (1 + 10 + 1)),
    (c.halving_doubling_allreduce, 4, 4 * 1 + 2 * 7.5 + 0.75),
    (c.halving_doubling_allreduce, 6, 6 * 1 + (10 / 6 + 2) * 10 + (1 + 5 / 6) * 1),
    (c.butterfly_allreduce, 8, 6 * 1 + 2 * 8.75 + 0.875),
    (c.butterfly_allreduce, 6, 6 * 1 + (1.5 + 2) * 10 + 1.75),
    (c.direct_allreduce, 4, 2 * 1 + 2 * 7.5 + 0.75),
    (c.star_allreduce, 4, 2 * 1 + 3 * 2 * 10 + 3 * 1),
]

WITHOUT_ADDING = [
    (c.binomial_broadcast, 8, 3 * (1 + 10)),
    (c.binomial_broadcast, 5, 3 * (1 + 10)),  # the third round is not full
    (c.scatter_allgather_broadcast, 4, 4 * 1 + 2 * 7.5),
    (c.pairwise_all_to_all, 4, 3 * 1 + 10),
]


@pytest.mark.parametrize(("formula", "p", "seconds"), HAND)
def test_all_reduces_by_hand(formula, p, seconds):
    assert formula(p, 1000, ALPHA_S, BETA, GAMMA) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(("formula", "p", "seconds"), WITHOUT_ADDING)
def test_copies_by_hand(formula, p, seconds):
    assert formula(p, 1000, ALPHA_S, BETA) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("formula", {row[0]: None for row in HAND + WITHOUT_ADDING})
def test_arrays_match_scalars(formula):
    p, n = np.arange(1, 20), np.array([[1e3], [1e6]])
    whole = formula(p, n, ALPHA_S, BETA)
    assert whole.shape == (2, 19)
    assert whole.tolist() == [[formula(int(q), float(m), ALPHA_S, BETA) for q in p] for (m,) in n]


def priced_s(plan: Schedule, devices: int) -> float:
    """Round by round: a latency, the bytes of the fullest NIC in either direction, the bytes that one device adds."""
    total_s = 0.0
    for transfers in plan.rounds:
        sent, received, added = (np.zeros(devices) for _ in range(3))
        for t in transfers:
            assert t.sender != t.receiver
            size = entries(t.box)
            sent[t.sender] += size
            received[t.receiver] += size
            added[t.receiver] += size * t.adds
        total_s += ALPHA_S + max(sent.max(), received.max()) * BETA + added.max() * GAMMA
    return total_s


def sum_schedule(devices: int, size: int, reduce: Reduce) -> Schedule:
    everyone = tuple(range(devices))
    return schedule(Partial(everyone), Replicated(everyone), (size,), reduce)


@pytest.mark.parametrize("p", range(2, 10))
def test_ring_schedule_matches_the_formula(p):
    size = 360 * p
    assert priced_s(sum_schedule(p, size, "ring"), p) == pytest.approx(c.ring_allreduce(p, size, ALPHA_S, BETA, GAMMA))


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_butterfly_schedule_of_powers_of_two(p):
    seconds = priced_s(sum_schedule(p, 1024, "butterfly"), p)
    assert seconds == pytest.approx(c.halving_doubling_allreduce(p, 1024, ALPHA_S, BETA, GAMMA))
    assert seconds == pytest.approx(c.butterfly_allreduce(p, 1024, ALPHA_S, BETA, GAMMA))


@pytest.mark.parametrize("p", [3, 5, 6, 7, 9, 12])
def test_butterfly_schedule_of_other_device_counts(p):
    """The published formula has p where the inner exchange is among p' < p devices: a little more than the rounds take."""
    seconds = priced_s(sum_schedule(p, 1024, "butterfly"), p)
    assert seconds == pytest.approx(c.butterfly_allreduce(p, 1024, ALPHA_S, BETA, GAMMA))
    published = c.halving_doubling_allreduce(p, 1024, ALPHA_S, BETA, GAMMA)
    assert seconds < published <= seconds * (1 + 1 / 9)


@pytest.mark.parametrize("p", range(2, 10))
def test_direct_schedule_matches_the_formula(p):
    size = 36_000 * p
    assert priced_s(sum_schedule(p, size, "direct"), p) == pytest.approx(
        c.direct_allreduce(p, size, ALPHA_S, BETA, GAMMA)
    )


@pytest.mark.parametrize("p", [2, 3, 5])
def test_star_schedule_matches_the_formula(p):
    assert priced_s(sum_schedule(p, 1000, "star"), p) == pytest.approx(c.star_allreduce(p, 1000, ALPHA_S, BETA, GAMMA))
