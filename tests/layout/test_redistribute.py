"""Schedules: hand-written transfers, an interpreter independent of the executor, formulas of the collectives.

Schedules are written here as text, one round a line: `+` adds at the receiver, `=` writes; `0>2 4:8` brings entries 4
to 7 from device 0 to device 2, `1>1` keeps them; several axes are `0:1,0:3`.
"""

import math
import re
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from convoy.layout.collectives import Reduce, Round, Schedule, Transfer, schedule, traffic
from convoy.layout.layout import Layout, OnOne, Partial, Replicated, Shape, Split, dual
from tests.support.local_shards import (
    DEVICES,
    Array,
    Shards,
    check_shards,
    every_layout,
    integers,
    local_shards,
)

REDUCES: tuple[Reduce, ...] = ("ring", "butterfly", "direct", "star")
ALWAYS_IN_ROUNDS: tuple[Reduce, ...] = ("ring", "butterfly", "star")


def rounds(text: str) -> list[set[Transfer]]:
    """Parse a text like those below into rounds; order within a round does not matter."""
    return [
        {
            Transfer(int(sender), int(receiver), _box(spans), line.strip().startswith("+"))
            for sender, receiver, spans in re.findall(r"(\d+)>(\d+) ([\d:,]+)", line)
        }
        for line in text.strip().splitlines()
    ]


def _box(text: str) -> tuple[tuple[int, int], ...]:
    return tuple((int(start), int(stop)) for start, stop in (span.split(":") for span in text.split(",")))


def as_sets(plan: Schedule | list[Round]) -> list[set[Transfer]]:
    given_rounds = plan.rounds if isinstance(plan, Schedule) else plan
    found = [set(transfers) for transfers in given_rounds]
    assert [len(s) for s in found] == [len(transfers) for transfers in given_rounds], "a transfer twice in one round"
    return found


# --- by hand ---------------------------------------------------------------------------------------------------------

DIRECT: list[tuple[Layout, Layout, Shape, str]] = [
    (OnOne(0), Replicated((0, 1, 2)), (6,), "= 0>0 0:6  0>1 0:6  0>2 0:6"),
    (OnOne(1), Split(0, (3, 0, 2)), (5,), "= 1>0 0:3  1>2 3:5"),
    (Split(0, (3, 0, 2)), OnOne(1), (5,), "= 0>1 0:3  2>1 3:5"),
    (OnOne(2), OnOne(0), (2, 3), "= 2>0 0:2,0:3"),
    (Split(0, (2, 2)), Replicated((0, 1)), (4,), "= 0>0 0:2  0>1 0:2  1>0 2:4  1>1 2:4"),
    (Split(1, (2, 1)), Replicated((1,)), (2, 3), "= 0>1 0:2,0:2  1>1 0:2,2:3"),
    (Split(0, (4, 2)), Split(0, (1, 5)), (6,), "= 0>0 0:1  0>1 1:4  1>1 4:6"),
    (Split(0, (4, 0, 2)), Split(0, (0, 5, 1)), (6,), "= 0>1 0:4  2>1 4:5  2>2 5:6"),
    (
        # From shares of the batch to shares of the channels.
        Split(0, (1, 2)),
        Split(1, (3, 1)),
        (3, 4),
        "= 0>0 0:1,0:3  0>1 0:1,3:4  1>0 1:3,0:3  1>1 1:3,3:4",
    ),
    # Copies serve themselves; who has none is served by the copy of index (device modulo number of copies).
    (Replicated((0, 1)), Split(0, (1, 1, 2)), (4,), "= 0>0 0:1  1>1 1:2  0>2 2:4"),
    (Replicated((1, 2)), OnOne(0), (4,), "= 1>0 0:4"),
    (Replicated((0, 1)), Replicated((1, 2, 3)), (4,), "= 1>1 0:4  0>2 0:4  1>3 0:4"),
    # Pending sums: every summand goes to whoever reads that part.
    (Partial((0, 1)), OnOne(1), (4,), "+ 0>1 0:4  1>1 0:4"),
    (Partial((0, 2)), Split(0, (2, 0, 3)), (5,), "+ 0>0 0:2  2>0 0:2  0>2 2:5  2>2 2:5"),
    (Partial((0, 1)), Split(1, (0, 0, 2)), (3, 2), "+ 0>2 0:3,0:2  1>2 0:3,0:2"),
    # A sum of one summand is that summand.
    (Partial((2,)), Replicated((0, 2)), (3,), "+ 2>0 0:3  2>2 0:3"),
    # Into a pending sum: every entry lands on one summand, at home where possible.
    (Split(0, (3, 2)), Partial((0, 1)), (5,), "+ 0>0 0:3  1>1 3:5"),
    (Split(0, (1, 1, 2)), Partial((1,)), (4,), "+ 0>1 0:1  1>1 1:2  2>1 2:4"),
    (OnOne(2), Partial((0, 1)), (4,), "+ 2>0 0:4"),
    (Replicated((0, 1, 2)), Partial((1, 2)), (4,), "+ 1>1 0:4"),
    (Replicated((0,)), Partial((1, 2)), (4,), "+ 0>1 0:4"),
    (Partial((0, 1)), Partial((1, 2)), (4,), "+ 0>1 0:4  1>1 0:4"),
    (Partial((0, 1, 2)), Partial((2, 1)), (4,), "+ 0>2 0:4  1>1 0:4  2>2 0:4"),
]

SUMS: list[tuple[Reduce, tuple[int, ...], int, str]] = [
    ("ring", (0, 1), 4, "+ 0>1 0:2  1>0 2:4 \n = 0>1 2:4  1>0 0:2"),
    (
        "ring",
        (0, 1, 2),
        6,
        """
        + 0>1 0:2  1>2 2:4  2>0 4:6
        + 0>1 4:6  1>2 0:2  2>0 2:4
        = 0>1 2:4  1>2 4:6  2>0 0:2
        = 0>1 0:2  1>2 2:4  2>0 4:6
        """,
    ),
    # Two entries for three devices: the chunks are 0:0, 0:1 and 1:2, and what is empty does not travel.
    (
        "ring",
        (0, 1, 2),
        2,
        """
        + 1>2 0:1  2>0 1:2
        + 0>1 1:2  2>0 0:1
        = 0>1 0:1  1>2 1:2
        = 1>2 0:1  2>0 1:2
        """,
    ),
    ("butterfly", (0, 1), 4, "+ 0>1 2:4  1>0 0:2 \n = 0>1 0:2  1>0 2:4"),
    (
        # Device 1 first hands its summand to device 0, and gets the sum from it at the end.
        "butterfly",
        (0, 1, 2),
        4,
        """
        + 1>0 0:4
        + 0>2 2:4  2>0 0:2
        = 0>2 0:2  2>0 2:4
        = 0>1 0:4
        """,
    ),
    # 24,000 entries for three devices: every device adds up a third.
    (
        "direct",
        (2, 0, 1),
        24_000,
        """
        + 0>2 0:8000  1>2 0:8000  2>0 8000:16000  1>0 8000:16000  2>1 16000:24000  0>1 16000:24000
        = 2>0 0:8000  2>1 0:8000  0>2 8000:16000  0>1 8000:16000  1>2 16000:24000  1>0 16000:24000
        """,
    ),
    ("star", (0, 1, 2), 4, "+ 1>0 0:4  2>0 0:4 \n = 0>1 0:4  0>2 0:4"),
    ("star", (3, 1), 4, "+ 1>3 0:4 \n = 3>1 0:4"),
]


@pytest.mark.parametrize(("src", "dst", "shape", "text"), DIRECT)
def test_direct_moves_by_hand(src: Layout, dst: Layout, shape: Shape, text: str) -> None:
    plan = schedule(src, dst, shape)
    assert not plan.in_place
    assert plan.shape == shape
    assert as_sets(plan) == rounds(text)


@pytest.mark.parametrize(("reduce", "devices", "n", "text"), SUMS, ids=[f"{s[0]}-{s[1]}-{s[2]}" for s in SUMS])
def test_all_reduces_by_hand(reduce: Reduce, devices: tuple[int, ...], n: int, text: str) -> None:
    plan = schedule(Partial(devices), Replicated(devices), (n,), reduce)
    assert plan.in_place
    assert as_sets(plan) == rounds(text)


def test_equal_layouts_move_nothing() -> None:
    for layout in every_layout((10, 6)):
        assert schedule(layout, layout, (10, 6)).rounds == ()


@pytest.mark.parametrize(
    ("src", "dst", "shape", "itemsize", "sent"),
    [
        (OnOne(0), Replicated((0, 1, 2)), (6, 2), 4, {(0, 1): 48, (0, 2): 48}),
        (Split(0, (1, 2)), Split(1, (3, 1)), (3, 4), 2, {(0, 1): 2, (1, 0): 12}),
        (Partial((0, 2)), Split(0, (2, 0, 3)), (5, 10), 4, {(0, 2): 120, (2, 0): 80}),
        (Replicated((0,)), OnOne(1), (0, 3), 4, {}),  # pairs that send nothing are not named
    ],
)
def test_traffic_by_hand(
    src: Layout, dst: Layout, shape: Shape, itemsize: int, sent: dict[tuple[int, int], int]
) -> None:
    assert dict(traffic(schedule(src, dst, shape), itemsize)) == sent


# --- an interpreter --------------------------------------------------------------------------------------------------
#
# Every device has a canvas of the tensor's whole shape; NaN is "nothing here". The rules are those of the words: the
# transfers of a round are independent (all of them read what was there before the round), a transfer brings what its
# sender really holds, and where it does not add it writes each entry once.


def interpret(plan: Schedule, src: Layout, dst: Layout, held: Shards, whole: Array) -> Shards:
    """Return the shards by device that a schedule produces."""
    if not plan.rounds:
        return held
    canvases = {device: np.full(plan.shape, np.nan) for device in range(DEVICES)}
    for device, shard in held.items():
        # In place, every device works on its summand as one flat buffer.
        positions = np.arange(whole.size) if plan.in_place else _positions(src, whole.shape)[device]
        canvases[device].flat[positions.ravel()] = shard.ravel()
    if plan.in_place:
        for transfers in plan.rounds:
            canvases = _after_round(transfers, before=canvases, into=canvases, in_place=True)
        keep = dst.devices if isinstance(dst, Replicated) else ()
        return {device: canvases[device].reshape(whole.shape) for device in keep}
    assert len(plan.rounds) == 1
    start = {device: np.full(plan.shape, np.nan) for device in range(DEVICES)}
    if isinstance(dst, Partial):
        start |= {device: np.zeros(plan.shape) for device in dst.devices}
    done = _after_round(plan.rounds[0], before=canvases, into=start, in_place=False)
    return _taken_off(done, _positions(dst, whole.shape))


def _after_round(
    transfers: Round, before: dict[int, Array], into: dict[int, Array], *, in_place: bool
) -> dict[int, Array]:
    after = {device: canvas.copy() for device, canvas in into.items()}
    touched = {device: np.zeros(canvas.shape, dtype=bool) for device, canvas in into.items()}
    for t in transfers:
        here = tuple(slice(start, stop) for start, stop in t.box)
        brought = before[t.sender][here]
        assert not np.isnan(brought).any(), f"{t}: the sender does not hold this"
        target = after[t.receiver][here]
        if t.adds:
            after[t.receiver][here] = np.where(np.isnan(target), 0, target) + brought
        else:
            assert not touched[t.receiver][here].any(), f"{t}: written twice"
            assert in_place or np.isnan(target).all()
            after[t.receiver][here] = brought
            touched[t.receiver][here] = True
    if in_place:
        for t in transfers:
            # Copies are received where they belong, so nothing that leaves in this round may lie there.
            here = tuple(slice(start, stop) for start, stop in t.box)
            assert not touched[t.sender][here].any(), f"{t}: overwritten while it is being sent"
    return after


def _positions(layout: Layout, shape: Shape) -> dict[int, NDArray[np.int64]]:
    """Return the tensor positions of each holder's shard entries, counted from its first entry."""
    if isinstance(layout, Partial):
        layout = Replicated(layout.devices)
    numbered = np.arange(math.prod(shape), dtype=np.float64).reshape(shape)
    return {d: shard.astype(np.int64) for d, shard in local_shards(layout, numbered, np.random.default_rng()).items()}


def _taken_off(canvases: dict[int, Array], positions: dict[int, NDArray[np.int64]]) -> Shards:
    """Return the shards from the canvases, checking that they are complete and contain all that was written."""
    for device, canvas in canvases.items():
        written = np.flatnonzero(~np.isnan(canvas))
        wanted = positions[device] if device in positions else np.empty(0)
        assert written.tolist() == sorted(wanted.ravel()), f"device {device} was sent too much or too little"
    return {device: canvases[device].flat[where.ravel()].reshape(where.shape) for device, where in positions.items()}


def check_meaning(src: Layout, dst: Layout, shape: Shape, reduce: Reduce) -> None:
    whole = integers(shape, seed=1)
    held = local_shards(src, whole, np.random.default_rng(7))
    check_shards(dst, whole, interpret(schedule(src, dst, shape, reduce), src, dst, held, whole))


@pytest.mark.parametrize("shape", [(10,), (10, 6), (4, 5, 3, 2), (0, 5), (3, 0)], ids=str)
def test_every_move_reaches_its_layout(shape: Shape) -> None:
    for src, dst in product(every_layout(shape), repeat=2):
        try:
            check_meaning(src, dst, shape, "ring")
        except AssertionError as error:
            error.add_note(f"the move from {src} to {dst}")
            raise


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 7, 8])
def test_every_sum_over_subsets(reduce: Reduce, n: int) -> None:
    """The readers are the same devices, fewer, more, others, some of both; the tensor may be smaller than the group."""
    sets = [(0, 1, 2, 3), (3, 1, 0), (1, 2), (0, 3), (2, 3), (0,), (3,)]
    for have, want in product(sets, repeat=2):
        check_meaning(Partial(have), Replicated(want), (n,), reduce)


@pytest.mark.parametrize("shape", [(10, 6), (4, 5, 3, 2)], ids=str)
def test_adjoint_sends_the_same_bytes_in_reverse(shape: Shape) -> None:
    """Except where a pending sum becomes copies: that is a collective, and its adjoint is one too."""
    for src, dst in product(every_layout(shape), repeat=2):
        if isinstance(src, Partial) and isinstance(dst, Replicated):
            continue
        there, back = schedule(src, dst, shape), schedule(dual(dst), dual(src), shape)
        turned = {(receiver, sender): n for (sender, receiver), n in traffic(there, 4).items()}
        assert turned == traffic(back, 4), f"{src} to {dst}"


# --- the formulas of the collectives ---------------------------------------------------------------------------------
#
# ring: 2(p-1) rounds and 2 n (p-1)/p entries from and to every device. Halving and doubling: 2 lg p rounds and as many
# entries; where p is no power of two, two rounds and 2 n entries more along the longest path. Star: all through one.

N = 5040  # divisible by 1 to 9 and by 16


def sum_of(reduce: Reduce, p: int, n: int) -> Schedule:
    devices = tuple(range(p))
    return schedule(Partial(devices), Replicated(devices), (n,), reduce)


def per_device(plan: Schedule, p: int) -> tuple[list[int], list[int]]:
    """Return the entries that each device sends, and receives."""
    sent = traffic(plan, 1)
    return (
        [sum(n for (sender, _), n in sent.items() if sender == d) for d in range(p)],
        [sum(n for (_, receiver), n in sent.items() if receiver == d) for d in range(p)],
    )


def longest_path(plan: Schedule) -> int:
    """Sum over rounds the entries that the busiest device sends or receives."""
    total = 0
    for transfers in plan.rounds:
        sent, received = per_device(Schedule((transfers,), plan.shape, in_place=True), 9)
        total += max(*sent, *received)
    return total


@pytest.mark.parametrize("p", range(2, 10))
def test_ring_cost_matches_the_formula(p: int) -> None:
    plan = sum_of("ring", p, N)
    assert len(plan.rounds) == 2 * (p - 1)
    assert per_device(plan, p) == ([2 * N * (p - 1) // p] * p,) * 2
    assert longest_path(plan) == 2 * N * (p - 1) // p


@pytest.mark.parametrize("p", [2, 4, 8])
def test_butterfly_cost_matches_the_formula_for_powers_of_two(p: int) -> None:
    plan = sum_of("butterfly", p, N)
    assert len(plan.rounds) == 2 * int(math.log2(p))
    assert per_device(plan, p) == ([2 * N * (p - 1) // p] * p,) * 2
    assert longest_path(plan) == 2 * N * (p - 1) // p


@pytest.mark.parametrize(("p", "core"), [(3, 2), (5, 4), (6, 4), (7, 4), (9, 8)])
def test_butterfly_costs_two_rounds_more_for_other_numbers(p: int, core: int) -> None:
    plan = sum_of("butterfly", p, N)
    assert len(plan.rounds) == 2 * int(math.log2(p)) + 2
    assert longest_path(plan) == 2 * N + 2 * N * (core - 1) // core
    assert longest_path(plan) <= (2 * (p - 1) / p + 2) * N


@pytest.mark.parametrize("p", range(2, 10))
def test_star_sends_everything_through_the_first_device(p: int) -> None:
    plan = sum_of("star", p, N)
    assert len(plan.rounds) == 2
    assert per_device(plan, p) == ([N * (p - 1)] + [N] * (p - 1),) * 2


@pytest.mark.parametrize("reduce", ALWAYS_IN_ROUNDS)
@pytest.mark.parametrize("n", [1, 2, 5, 8, 11, 100])
def test_every_sum_sends_the_least_in_total(reduce: Reduce, n: int) -> None:
    """2 (p-1) n entries, whether n divides or not, and also for tensors with fewer entries than there are devices."""
    for p in range(1, 10):
        assert sum(traffic(sum_of(reduce, p, n), 1).values()) == 2 * (p - 1) * n


@pytest.mark.parametrize("p", range(2, 10))
@pytest.mark.parametrize("n", [16_385, 20_000])
def test_a_large_direct_sum_sends_the_least_in_two_rounds(n: int, p: int) -> None:
    plan = sum_of("direct", p, n)
    assert len(plan.rounds) == 2
    assert sum(traffic(plan, 1).values()) == 2 * (p - 1) * n
    sent, received = per_device(plan, p)
    assert max(*sent, *received) - min(*sent, *received) <= p  # some parts are one entry longer


@pytest.mark.parametrize(("p", "n", "rounds"), [(2, 16_384, 1), (2, 16_385, 2), (5, 4096, 1), (5, 4097, 2)])
def test_a_small_direct_sum_takes_one_round(p: int, n: int, rounds: int) -> None:
    """Where no device sends more than 16,384 entries, every device adds up everything, in the same order."""
    plan = sum_of("direct", p, n)
    assert len(plan.rounds) == rounds
    assert plan.in_place == (rounds == 2)
    if rounds == 1:
        everyone = {Transfer(i, j, ((0, n),), adds=True) for i in range(p) for j in range(p)}
        assert as_sets(plan) == [everyone]
