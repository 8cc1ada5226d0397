"""The operations of one exchange on one device: a move between two layouts, or the rounds of a sum.

A part that is one block of memory is sent, and received into, without a copy; any other is copied into a block or out of one.
Summands arrive in memory of their own, because a summand must not be overwritten while it is being sent. They are added in the
order of the devices that sent them, so that every run gives the same bits.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from convoy.layout.comm_dtype import CommDtype, rounds_own_copy
from convoy.layout.layout import Box, Layout, Partial, Replicated, Shape, box, covers, entries, local_shape
from convoy.layout.redistribute import Round, Schedule, Transfer, forget_schedules
from convoy.layout.shares import ranges
from convoy.plan.device_program import (
    Add,
    Copy,
    ExchangeRound,
    Make,
    Operation,
    Part,
    PlannedMessage,
    View,
    WaitRound,
)
from convoy.plan.steps import GatherStatistics


class StartedRound(NamedTuple):
    """What finishes a round that has started.

    Attributes:
        step: id in the step list.
        number: of the round to wait for; None where this device has no message in it.
        after: what is done with what has arrived.
    """

    step: int
    number: int | None
    after: Sequence[Operation]


@dataclass(frozen=True, slots=True)
class ExchangeOperations:
    """One device's part of an exchange.

    Attributes:
        begin: up to the last round that can be started without waiting.
        started: what finishes each of these rounds.
    """

    begin: Sequence[Operation] = ()
    started: Sequence[StartedRound] = ()


def finish(started: Iterable[StartedRound], at: int) -> Iterator[Operation]:
    """The operations that finish rounds, for the step `at` that waits for them."""
    for step, number, after in started:
        if number is not None:
            yield WaitRound(at, step, number)
        yield from after


@dataclass(frozen=True, slots=True)
class MoveSpec:
    """One device's part of a move of a tensor of `shape` from layout `src` to layout `dst`.

    Attributes:
        step: id in the step list.
        source, result: the buffers with what the device holds before and afterwards.
    """

    step: int
    schedule: Schedule
    device: int
    src: Layout
    dst: Layout
    shape: Shape
    wire: CommDtype
    source: str
    result: str

    @property
    def own(self) -> Box | None:
        """What the device holds before."""
        return box(self.src, self.device, self.shape)

    @property
    def wanted(self) -> Box | None:
        """What the device holds afterwards."""
        return box(self.dst, self.device, self.shape)

    @property
    def rounds(self) -> Sequence[Round]:
        """What the device sends, receives or keeps."""
        return self.schedule.involving(self.device)

    def operations(self) -> ExchangeOperations:
        """The operations of the move."""
        if not self.schedule.rounds:
            here = local_shape(self.dst, self.device, self.shape)
            view = View(self.step, self.result, Part(self.source), here)
            return ExchangeOperations([view] if self.wanted is not None else [])
        if not any(self.rounds) and self.wanted is None:
            return ExchangeOperations()
        return ExchangeOperations(self._sum()) if self.schedule.in_place else self._direct()

    def _sum(self) -> list[Operation]:
        """A pending sum becomes copies. Every copy is computed once and then copied, so all are equal to the last bit."""
        flat = f"message {self.step}.flat"
        operations: list[Operation] = [Make(self.step, flat, self.schedule.shape, flat=True)]
        if self.own is not None:
            operations.append(Copy(self.step, Part(self.source), Part(flat), math.prod(self.shape)))
        operations += sum_operations(self.step, self.schedule, self.device, flat, self.wire, lane=0)
        if self.wanted is not None:
            operations.append(View(self.step, self.result, Part(flat), self.shape))
        return operations

    def _direct(self) -> ExchangeOperations:
        own, wanted, step = self.own, self.wanted, self.step
        transfers = [t for each in self.rounds for t in each]
        kept = [t for t in transfers if t.sender == t.receiver]
        arrives = any(t.receiver == self.device != t.sender for t in transfers)
        rounds_own = rounds_own_copy(self.wire, self.schedule, self.dst)
        begin: list[Operation] = []
        started: list[StartedRound] = []
        piece = self.source
        if rounds_own and own is not None and any(t.sender == self.device for t in transfers):
            # What is kept is then made of the same numbers as what is sent.
            piece = f"message {step}.own"
            narrow = Make(step, piece, _extent(own), narrow=True)
            begin += [narrow, Copy(step, Part(self.source), Part(piece), entries(own))]
        if wanted is not None and not arrives and covers([t.box for t in kept], wanted):
            here = Part(piece, local_box(wanted, own))
            if rounds_own:
                made = Make(step, self.result, _extent(wanted), result=True)
                begin += [made, Copy(step, here, Part(self.result), entries(wanted))]
            else:
                begin.append(View(step, self.result, here, _extent(wanted)))
            kept = []
        elif wanted is not None:
            # From zero where only a part of the box is written: a pending sum, or a box that nobody fills.
            zeros = isinstance(self.dst, Partial) or any(t.adds for t in transfers if t.receiver == self.device)
            begin.append(Make(step, self.result, _extent(wanted), zeros=zeros, result=True))
        writer = _DirectRound(step, self.device, own, wanted, piece, self.result, self.wire != "exact", rounds_own)
        for number, each in enumerate(self.rounds):
            writer.write(number, each, bool(kept), begin, started)
        return ExchangeOperations(begin, started)


@lru_cache(maxsize=8192)
def operations_of(move: MoveSpec) -> ExchangeOperations:
    """The operations of a move, worked out once: the plans that a planner compares have most moves in common."""
    return move.operations()


def clear_move_cache() -> None:
    """Forget what was worked out for moves, after the devices have changed: nobody asks for those of before again."""
    operations_of.cache_clear()
    forget_schedules()


@dataclass(slots=True)
class _DirectRound:
    """Writes the rounds of a direct move."""

    step: int
    device: int
    own: Box | None
    wanted: Box | None
    piece: str
    result: str
    narrow: bool
    rounds_own: bool

    def write(
        self, number: int, transfers: Round, keeps: bool, begin: list[Operation], started: list[StartedRound]
    ) -> None:
        leaving = [t for t in transfers if t.sender == self.device != t.receiver and entries(t.box)]
        arriving = [t for t in transfers if t.receiver == self.device != t.sender and entries(t.box)]
        kept = [t for t in transfers if t.sender == t.receiver] if keeps else []
        sent = {t.box: self._packed(number, place, t, begin) for place, t in enumerate(leaving)}
        sends = tuple(PlannedMessage(t.receiver, sent[t.box], entries(t.box), self.narrow) for t in leaving)
        receives = []
        landed: dict[Transfer, Part] = {}
        for place, t in enumerate(arriving):
            target = Part(self.result, local_box(t.box, self.wanted))
            if t.adds or self.narrow or not is_block(t.box, self.wanted):
                landed[t] = Part(f"message {self.step}.{number}<{place}")
                begin.append(Make(self.step, landed[t].buffer, _extent(t.box), narrow=self.narrow))
                target = landed[t]
            receives.append(PlannedMessage(t.sender, target, entries(t.box), self.narrow))
        if sends or receives:
            begin.append(ExchangeRound(self.step, number, sends, tuple(receives)))
        begin += [self._into(t, Part(self.piece, local_box(t.box, self.own))) for t in kept if not t.adds]
        parts = landed | {t: Part(self.piece, local_box(t.box, self.own)) for t in kept if t.adds}
        after = [self._into(t, parts[t]) for t in sorted(parts, key=lambda t: t.sender)]
        if sends or receives:
            started.append(StartedRound(self.step, number, after))
        else:
            begin += after

    def _packed(self, number: int, place: int, t: Transfer, begin: list[Operation]) -> Part:
        """What is sent: the cut where it is one block of the numbers that travel, else a copy."""
        cut = Part(self.piece, local_box(t.box, self.own))
        if is_block(t.box, self.own) and (self.rounds_own or not self.narrow):
            return cut
        ready = f"message {self.step}.{number}>{place}"
        begin += [
            Make(self.step, ready, _extent(t.box), narrow=self.narrow),
            Copy(self.step, cut, Part(ready), entries(t.box)),
        ]
        return Part(ready)

    def _into(self, t: Transfer, part: Part) -> Operation:
        target = Part(self.result, local_box(t.box, self.wanted))
        if t.adds:
            return Add(self.step, part, target, entries(t.box), self.narrow and t.sender != self.device)
        return Copy(self.step, part, target, entries(t.box))


def sum_operations(
    step: int, schedule: Schedule, device: int, flat: str, wire: CommDtype, lane: int
) -> Iterator[Operation]:
    """Yield the rounds of a collective, in place on a flat buffer. Every step reuses the memory where summands arrive."""
    under_way: deque[StartedRound] = deque()
    for number, transfers in enumerate(schedule.involving(device)):
        if len(under_way) == schedule.window:
            yield from finish([under_way.popleft()], step)
        yield from _begun(_FlatRound(step, number, device, flat, wire != "exact"), transfers, lane, schedule, under_way)
    yield from finish(under_way, step)


def gather_operations(step: int, schedule: Schedule, device: int, flat: str, *, own_only: bool) -> ExchangeOperations:
    """Return the one round that gathers shards, in place on a flat buffer: nothing is copied or made.

    Args:
        own_only: the buffer has this device's shards alone, which it sends.
    """
    (transfers,) = schedule.involving(device)
    started: deque[StartedRound] = deque()
    begin = list(_begun(_FlatRound(step, 0, device, flat, narrow=False), transfers, 0, schedule, started))
    if own_only:
        rounds = [op for op in begin if isinstance(op, ExchangeRound)]
        begin = [replace(op, sends=tuple(replace(m, part=Part(flat)) for m in op.sends)) for op in rounds]
    return ExchangeOperations(begin, started)


@dataclass(frozen=True, slots=True)
class _FlatRound:
    step: int
    number: int
    device: int
    flat: str
    narrow: bool


def _begun(
    of: _FlatRound, transfers: Round, lane: int, schedule: Schedule, under_way: deque[StartedRound]
) -> Iterator[Operation]:
    """Yield what starts a round on a flat buffer, and note in `under_way` what finishes it."""
    step, flat, narrow = of.step, of.flat, of.narrow
    leaving = [t for t in transfers if t.sender == of.device and entries(t.box)]
    arriving = sorted((t for t in transfers if t.receiver == of.device and entries(t.box)), key=lambda t: t.sender)
    ready: dict[Box, Part] = {}
    for place, (span, adds) in enumerate({t.box: t.adds for t in leaving}.items()):
        ready[span] = Part(flat, span)
        if narrow:
            ready[span] = Part(f"message {step}.{of.number}>{place}")
            yield Make(step, ready[span].buffer, _extent(span), narrow=True, like=flat)
            yield Copy(step, Part(flat, span), ready[span], entries(span))
            if not adds:  # this device keeps the same rounded sum as the devices that receive it
                yield Copy(step, ready[span], Part(flat, span), entries(span))
    after: list[Operation] = []
    receives = []
    for place, t in enumerate(arriving):
        target, size = Part(flat, t.box), entries(t.box)
        if t.adds or narrow:
            slot = of.number % schedule.window
            landed = Part(f"slot {lane}.{slot}.{place}")
            yield Make(step, landed.buffer, _extent(t.box), narrow=narrow, like=flat, slot=slot)
            after.append(Add(step, landed, target, size, narrow) if t.adds else Copy(step, landed, target, size))
            target = landed
        receives.append(PlannedMessage(t.sender, target, size, narrow))
    if leaving or receives:
        sends = tuple(PlannedMessage(t.receiver, ready[t.box], entries(t.box), narrow) for t in leaving)
        yield ExchangeRound(step, of.number, sends, tuple(receives))
    under_way.append(StartedRound(step, of.number if leaving or receives else None, after))


def shared_rows(step: GatherStatistics, device: int, of: Sequence[str]) -> Iterator[Operation]:
    """This device's row of each norm's sums, and then those of all devices. Rows of several norms travel in one message.

    Args:
        of: names of the buffers of each norm, in front of "row" and "rows".
    """
    row, rows = (f"{of[0]} row", f"{of[0]} rows") if len(of) == 1 else (f"sums {step.id}", f"sums {step.id} of all")
    spans = list(ranges(step.sizes))
    if len(of) > 1:
        yield Make(step.id, row, (1, step.entries))
        for each, size, span in zip(of, step.sizes, spans, strict=True):
            yield Copy(step.id, Part(f"{each} row"), Part(row, ((0, 1), span)), size)
    everyone = Replicated(step.members)
    move = MoveSpec(step.id, step.schedule, device, step.layout, everyone, step.shape, "exact", row, rows)
    found = operations_of(move)
    yield from found.begin
    yield from finish(found.started, step.id)
    if len(of) > 1:
        members = len(step.members)
        for each, size, span in zip(of, step.sizes, spans, strict=True):
            yield View(step.id, f"{each} rows", Part(rows, ((0, members), span)), (members, size))


def local_box(part: Box, of: Box | None) -> Box | None:
    """A box in the coordinates of a piece; None where it is the whole piece."""
    assert of is not None
    if part == of:
        return None
    return tuple((start - origin, stop - origin) for (start, stop), (origin, _) in zip(part, of, strict=True))


def _extent(of: Box) -> Shape:
    return tuple(stop - start for start, stop in of)


def is_block(part: Box, of: Box | None) -> bool:
    """Whether a part of a tensor is one block of memory, where the tensor itself is one."""
    if of is None:
        return True
    extents = [(stop - start, end - origin) for (start, stop), (origin, end) in zip(part, of, strict=True)]
    if math.prod(n for n, _ in extents) <= 1:
        return True
    last = max((axis for axis, (n, whole) in enumerate(extents) if n < whole), default=0)
    return all(n == 1 for n, _ in extents[:last])
