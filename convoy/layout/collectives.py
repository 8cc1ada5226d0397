"""Plan the rounds of transfers that move a tensor from one layout to another: redistribution and collectives.

A schedule is data. Device programs are compiled from it, and tests compare its bytes with those sent over the network.
Backward needs no extra rules: the gradient of a move `src -> dst` is moved `dual(dst) -> dual(src)`.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, get_args

from convoy.errors import PlanError
from convoy.layout.layout import (
    Box,
    Layout,
    OnOne,
    Partial,
    Replicated,
    Shape,
    Split,
    Tiles,
    Windows,
    box,
    entries,
    holders,
    intersection,
    whole,
)
from convoy.layout.shares import Shares, ranges

Reduce = Literal["ring", "butterfly", "direct", "star"]
"""Algorithms of an all-reduce."""
SUMS: tuple[str, ...] = get_args(Reduce)

ONE_ROUND_ENTRIES = 16384
"""Most entries that a device may send or receive for `direct` to send all partial sums to all readers in one round.
64 KiB of float32 take half a millisecond at 1 Gbit/s, less than the latency of a second round."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box that one device sends to another, which writes it or, if `adds`, adds it. If both are the same, nothing is sent."""

    sender: int
    receiver: int
    box: Box
    adds: bool = False


Round = tuple[Transfer, ...]


@dataclass(frozen=True)
class Schedule:
    """Consecutive rounds of transfers; the transfers of one round are independent.

    Attributes:
        rounds: the transfers of each round, with boxes in the coordinates of `shape`. The rounds of a sum depend on each other.
        shape: the tensor's shape; if `in_place`, its flat length.
        in_place: True for collectives, which work on one flat buffer per device; False for a direct move, in one round
            from source shards to target shards.
        window: number of rounds of a sum that overlap: round i waits for round i - `window`.
    """

    rounds: tuple[Round, ...]
    shape: Shape
    in_place: bool
    window: int = 1

    def __hash__(self) -> int:
        # Schedules are cache keys of device programs, and hashing every transfer would be slow.
        return hash((self.shape, len(self.rounds), self.in_place))

    def involving(self, device: int) -> tuple[Round, ...]:
        """For each round, return the transfers that a device sends, receives or keeps."""
        return self._by_device.get(device) or ((),) * len(self.rounds)

    @cached_property
    def _by_device(self) -> dict[int, tuple[Round, ...]]:
        found: dict[int, list[list[Transfer]]] = {}
        for number, transfers in enumerate(self.rounds):
            for t in transfers:
                for device in {t.sender, t.receiver}:
                    found.setdefault(device, [[] for _ in self.rounds])[number].append(t)
        return {device: tuple(map(tuple, rows)) for device, rows in found.items()}


@lru_cache(maxsize=16384)
def schedule(src: Layout, dst: Layout, shape: Shape, reduce: Reduce = "ring") -> Schedule:
    """Return the rounds that move a tensor of `shape` from layout `src` to layout `dst`.

    `reduce` chooses the algorithm of an all-reduce: `ring`, `butterfly` (recursive halving and doubling, any number of
    devices), `direct` (each device sums a chunk, or all of a small tensor), `star` (through the first device). All other
    moves are direct: each shard is sent to its readers.
    """
    if src == dst:
        return Schedule((), shape, in_place=False)
    n = math.prod(shape)
    if isinstance(src, Partial) and isinstance(dst, Replicated) and is_collective(src, dst, n, reduce):
        return Schedule((*_SUMS[reduce](src.devices, n), *_deliver(src.devices, dst.devices, n)), (n,), in_place=True)
    return Schedule((tuple(_direct(src, dst, shape)),), shape, in_place=False)


def is_collective(src: Partial, dst: Replicated, n: int, reduce: Reduce) -> bool:
    """Return whether a sum of `n` entries takes several rounds. Else every device sends its partial sum to all readers."""
    senders, readers = set(src.devices), set(dst.devices)
    peers = max(len(readers) - (senders <= readers), len(senders) - (readers <= senders))
    return len(src.devices) > 1 and (reduce != "direct" or n * peers > ONE_ROUND_ENTRIES)


@lru_cache(maxsize=1024)
def sum_in_segments(devices: tuple[int, ...], n: int, reduce: Reduce, segments: int) -> Schedule:
    """Split a sum of `n` entries into segments with interleaved rounds, to add one segment while another is sent.

    It sends the same bytes in more, smaller messages.
    """
    parts = []
    for start, stop in chunks(n, segments):
        rounds = _SUMS[reduce](devices, stop - start)
        boxes = [[replace(t, box=((t.box[0][0] + start, t.box[0][1] + start),)) for t in row] for row in rounds]
        parts.append([tuple(row) for row in boxes])
    turns = zip(*parts, strict=True)
    return Schedule(tuple(itertools.chain.from_iterable(turns)), (n,), in_place=True, window=segments)


@lru_cache(maxsize=1024)
def in_chunks(plan: Schedule, count: int) -> Schedule:
    """Split a direct move into `count` independent rounds by rows. Its boxes must span the first axis.

    Raises:
        PlanError: a sum, or a move that splits the first axis over devices.
    """
    (transfers,) = plan.rounds
    rows = plan.shape[0]
    if plan.in_place or any(t.box[0] != (0, rows) for t in transfers):
        raise PlanError(
            f"a move of {plan.shape} cannot be split into {count} rounds: it must be a direct move between layouts that do "
            "not split the first axis; use 1 round"
        )
    cuts = [chunk for chunk in chunks(rows, count) if chunk[0] < chunk[1]]
    return replace(plan, rounds=tuple(tuple(replace(t, box=(cut, *t.box[1:])) for t in transfers) for cut in cuts))


def traffic(plan: Schedule, itemsize: int) -> Counter[tuple[int, int]]:
    """Return the bytes sent, by (sender, receiver)."""
    sent: Counter[tuple[int, int]] = Counter()
    for transfers in plan.rounds:
        for t in transfers:
            if t.sender != t.receiver and (n := entries(t.box)):
                sent[t.sender, t.receiver] += n * itemsize
    return sent


@lru_cache(maxsize=1024)
def sum_into_shares(devices: tuple[int, ...], shares: Shares) -> Schedule:
    """Reduce-scatter in one round: device d gets the sum of its `shares[d]` entries over `devices`."""
    kept = list(enumerate(ranges(shares)))
    moved = _round(((i, owner, span) for owner, span in kept for i in devices if i != owner), adds=True)
    return Schedule((moved,), (sum(shares),), in_place=True)


@lru_cache(maxsize=1024)
def gather_shares(shares: Shares, devices: tuple[int, ...]) -> Schedule:
    """All-gather in one round: all `devices` get the `shares[d]` entries of each device d, in one flat buffer."""
    kept = list(enumerate(ranges(shares)))
    moved = _round(((owner, d, span) for owner, span in kept for d in devices if d != owner), adds=False)
    return Schedule((moved,), (sum(shares),), in_place=True)


def _keeper(device: int, devices: tuple[int, ...]) -> int:
    """Return which of `devices` sends to `device`: itself if possible, else one chosen to balance the load."""
    return device if device in devices else devices[device % len(devices)]


def _direct(src: Layout, dst: Layout, shape: Shape) -> Iterable[Transfer]:
    full = whole(shape)
    assert not isinstance(src, Windows) or src.sums, "only gradients leave windows"
    if isinstance(dst, Partial):
        yield from _onto_sum(src, dst, shape)
        return
    for receiver in holders(dst):
        wanted = box(dst, receiver, shape)
        assert wanted is not None
        match src:
            case Partial(devices):
                for sender in devices:
                    yield Transfer(sender, receiver, wanted, adds=True)
            case Replicated(devices):
                yield Transfer(_keeper(receiver, devices), receiver, wanted)
            case OnOne(owner):
                yield Transfer(owner, receiver, wanted)
            case Split() | Tiles() | Windows():
                for sender in holders(src):
                    common = intersection(box(src, sender, shape) or full, wanted)
                    if common is not None:
                        yield Transfer(sender, receiver, common, adds=isinstance(src, Windows))


def _onto_sum(src: Layout, dst: Partial, shape: Shape) -> Iterable[Transfer]:
    """Add every entry to exactly one device's partial sum. Partial sums start as zeros."""
    match src:
        case Replicated(devices):
            common = [d for d in devices if d in dst.devices]
            sender, receiver = (common[0], common[0]) if common else (devices[0], dst.devices[0])
            yield Transfer(sender, receiver, whole(shape), adds=True)
        case Partial(devices):
            for sender in devices:
                yield Transfer(sender, _keeper(sender, dst.devices), whole(shape), adds=True)
        case Split() | OnOne() | Tiles() | Windows():
            for sender in holders(src):
                held = box(src, sender, shape)
                assert held is not None
                yield Transfer(sender, _keeper(sender, dst.devices), held, adds=True)


def chunks(n: int, parts: int) -> list[tuple[int, int]]:
    """Return `parts` consecutive ranges of 0..n, as equal as possible."""
    edges = [n * i // parts for i in range(parts + 1)]
    return list(itertools.pairwise(edges))


def _round(transfers: Iterable[tuple[int, int, tuple[int, int]]], *, adds: bool) -> Round:
    return tuple(Transfer(s, r, (span,), adds) for s, r, span in transfers if span[0] < span[1])


def _ring(devices: tuple[int, ...], n: int) -> list[Round]:
    """Ring: p-1 rounds that add and p-1 that copy. Cost: 2(p-1) latencies, and 2 n (p-1)/p entries sent per device."""
    p, chunk = len(devices), chunks(n, len(devices))
    rounds = []
    for adds, shift in ((True, 0), (False, 1)):
        for step in range(p - 1):
            hop = ((devices[i], devices[(i + 1) % p], chunk[(i + shift - step) % p]) for i in range(p))
            rounds.append(_round(hop, adds=adds))
    return rounds


def _butterfly(devices: tuple[int, ...], n: int) -> list[Round]:
    """Recursive halving, then doubling (Rabenseifner). Cost for p a power of two: 2 log2(p) latencies, 2 n (p-1)/p entries.

    Otherwise the devices beyond the largest power of two first send their tensor to a neighbour, and at the end receive the
    sum from it: two more rounds and 2 n more entries.
    """
    p = len(devices)
    core = 1 << (p.bit_length() - 1)
    extra = p - core
    # Of the first 2*extra devices, each odd one sends its tensor to the even one before it.
    inner = [devices[2 * i] for i in range(extra)] + list(devices[2 * extra :])
    folded = [(devices[2 * i + 1], devices[2 * i], (0, n)) for i in range(extra)]
    rounds = [_round(folded, adds=True)] if extra else []
    span = [(0, n)] * core
    history = []
    distance = core // 2
    while distance:
        halves = []
        for i in range(core):
            lo, hi = span[i]
            middle = (lo + hi) // 2
            halves.append(((lo, middle), (middle, hi)) if not i & distance else ((middle, hi), (lo, middle)))
        rounds.append(_round(((inner[i], inner[i ^ distance], halves[i][1]) for i in range(core)), adds=True))
        history.append((distance, [kept for kept, _ in halves]))
        span = [kept for kept, _ in halves]
        distance //= 2
    for distance, kept in reversed(history):
        # The half that i kept at this level is now complete; its partner needs it.
        rounds.append(_round(((inner[i], inner[i ^ distance], kept[i]) for i in range(core)), adds=False))
    if extra:
        rounds.append(_round(((even, odd, span) for odd, even, span in folded), adds=False))
    return rounds


def _direct_sum(devices: tuple[int, ...], n: int) -> list[Round]:
    """Each device sums one chunk and sends it to all: the bytes of a ring in 2 rounds instead of 2(p-1)."""
    parts = list(zip(devices, chunks(n, len(devices)), strict=True))
    pairs = [(i, owner, span) for owner, span in parts for i in devices if i != owner]
    return [_round(pairs, adds=True), _round(((owner, i, span) for i, owner, span in pairs), adds=False)]


def _star(devices: tuple[int, ...], n: int) -> list[Round]:
    """Parameter server: the first device receives all tensors to sum, and sends the sum to all."""
    root, *others = devices
    gather = _round(((d, root, (0, n)) for d in others), adds=True)
    return [gather, _round(((root, d, (0, n)) for d in others), adds=False)]


_SUMS: dict[str, Callable[[tuple[int, ...], int], list[Round]]] = {
    "ring": _ring,
    "butterfly": _butterfly,
    "direct": _direct_sum,
    "star": _star,
}


def _deliver(have: tuple[int, ...], want: tuple[int, ...], n: int) -> list[Round]:
    """Send the finished sum to devices that did not take part in it. Each device that did sends one chunk."""
    missing = [d for d in want if d not in have]
    if not missing:
        return []
    senders = list(zip(have, chunks(n, len(have)), strict=True))
    return [_round(((sender, d, span) for d in missing for sender, span in senders), adds=False)]


def forget_schedules() -> None:
    """Clear the caches of schedules."""
    for known in (schedule, sum_in_segments, in_chunks, sum_into_shares, gather_shares):
        known.cache_clear()
