"""Compile the operations of one exchange on one device: a move between two layouts, or the rounds of a sum.

A contiguous part of a tensor is sent and received without a copy; other parts are copied into or out of a contiguous buffer.
Summands are received into separate memory, because a buffer must not change while it is being sent. They are added in the
order of their senders, so that every run gives the same bits.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from convoy.layout.collectives import Round, Schedule, Transfer, forget_schedules
from convoy.layout.comm_dtype import CommDtype, rounds_own_copy
from convoy.layout.layout import Box, Layout, Partial, Replicated, Shape, Windows, box, covers, entries, local_shape
from convoy.layout.shares import ranges
from convoy.plan import device_program as ops
from convoy.plan.device_program import Operation, Part, PlannedMessage
from convoy.plan.steps import GatherStatistics


class StartedRound(NamedTuple):
    """A round that has started.

    Attributes:
        step: id in the step list.
        number: number of the round to wait for; None: this device has no message in it.
        after: operations on the received parts, after the wait.
    """

    step: int
    number: int | None
    after: Sequence[Operation]


class ExchangeOperations(NamedTuple):
    """One device's operations of an exchange: those before the first wait, and the rounds to finish later."""

    begin: Sequence[Operation] = ()
    started: Sequence[StartedRound] = ()


def finish(started: Iterable[StartedRound], at: int) -> Iterator[Operation]:
    """Yield the operations that finish rounds. `at`: the step that waits for them."""
    for step, number, after in started:
        if number is not None:
            yield ops.WaitRound(at, step, number)
        yield from after


@dataclass(frozen=True, slots=True)
class MoveSpec:
    """One device's part of a move of a tensor of `shape` from layout `src` to layout `dst`.

    Attributes:
        step: id in the step list.
        source, result: the buffers with this device's shard before and after the move.
        in_place: add received parts into the source. No sent part may overlap what this device keeps.
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
    in_place: bool = False

    def operations(self) -> ExchangeOperations:
        own, wanted = (box(layout, self.device, self.shape) for layout in (self.src, self.dst))
        if not self.schedule.rounds:
            here = local_shape(self.dst, self.device, self.shape)
            view = ops.View(self.step, self.result, Part(self.source), here)
            return ExchangeOperations([view] if wanted is not None else [])
        if not any(self.schedule.involving(self.device)) and wanted is None:
            return ExchangeOperations()
        if not self.schedule.in_place:
            return _DirectMove(self, own, wanted).operations()
        # Each entry of a sum is computed once and then copied, so all copies are bit-identical.
        flat = f"message {self.step}.flat"
        operations: list[Operation] = [ops.Make(self.step, flat, self.schedule.shape, flat=True)]
        if own is not None:
            operations.append(ops.Copy(self.step, Part(self.source), Part(flat), math.prod(self.shape)))
        operations += sum_operations(self.step, self.schedule, self.device, flat, self.wire, lane=0)
        if wanted is not None:
            operations.append(ops.View(self.step, self.result, Part(flat), self.shape))
        return ExchangeOperations(operations)


@lru_cache(maxsize=8192)
def operations_of(move: MoveSpec) -> ExchangeOperations:
    """Return the operations of a move. Cached, because the plans that a planner compares have most moves in common."""
    return move.operations()


def clear_move_cache() -> None:
    """Clear cached moves and schedules. Call it after the devices have changed."""
    operations_of.cache_clear()
    forget_schedules()


class _DirectMove:
    """A move that sends each box directly to its readers."""

    def __init__(self, move: MoveSpec, own: Box | None, wanted: Box | None) -> None:
        self.move, self.own, self.wanted = move, own, wanted
        self.step, self.device, self.narrow = move.step, move.device, move.wire != "exact"
        self.rounds_own = rounds_own_copy(move.wire, move.schedule, move.dst)
        self.shard = move.source
        self.begin: list[Operation] = []
        self.started: list[StartedRound] = []

    def operations(self) -> ExchangeOperations:
        own, wanted, step, result = self.own, self.wanted, self.step, self.move.result
        rounds = self.move.schedule.involving(self.device)
        transfers = [t for each in rounds for t in each]
        keeps = [t for t in transfers if t.sender == t.receiver]
        arrives = any(t.receiver == self.device != t.sender for t in transfers)
        if self.rounds_own and own is not None and any(t.sender == self.device for t in transfers):
            # Round the kept part too, so that it equals the sent part.
            self.shard = f"message {step}.own"
            self.begin.append(ops.Make(step, self.shard, _extent(own), narrow=True))
            self.begin.append(ops.Copy(step, Part(self.move.source), Part(self.shard), entries(own)))
        in_place = self.move.in_place and not self.narrow and [t.box for t in keeps] == [wanted]
        if wanted is not None and (in_place or (not arrives and covers([t.box for t in keeps], wanted))):
            here = Part(self.shard, _local_box(wanted, own))
            if self.rounds_own:
                self.begin.append(ops.Make(step, result, _extent(wanted), result=True))
                self.begin.append(ops.Copy(step, here, Part(result), entries(wanted)))
            else:
                self.begin.append(ops.View(step, result, here, _extent(wanted)))
            keeps = []
        elif wanted is not None:
            # Start with zeros if only a part of the box is written: a pending sum, or a box without a sender.
            zeros = isinstance(self.move.dst, Partial) or isinstance(self.move.src, Windows)
            zeros = zeros or any(t.adds for t in transfers if t.receiver == self.device)
            self.begin.append(ops.Make(step, result, _extent(wanted), zeros=zeros, result=True))
        for number, each in enumerate(rounds):
            self._round(number, each, bool(keeps))
        return ExchangeOperations(self.begin, self.started)

    def _round(self, number: int, transfers: Round, keeps: bool) -> None:
        leaving = [t for t in transfers if t.sender == self.device != t.receiver and entries(t.box)]
        arriving = [t for t in transfers if t.receiver == self.device != t.sender and entries(t.box)]
        kept = {t: self._source(t) for t in transfers if keeps and t.sender == t.receiver}
        sent: dict[Box, Part] = {}
        for place, t in enumerate(leaving):
            sent[t.box] = self._source(t)
            if not is_block(t.box, self.own) or (self.narrow and not self.rounds_own):
                name = f"message {self.step}.{number}>{place}"
                self.begin.append(ops.Make(self.step, name, _extent(t.box), narrow=self.narrow))
                self.begin.append(ops.Copy(self.step, self._source(t), Part(name), entries(t.box)))
                sent[t.box] = Part(name)
        sends = tuple(PlannedMessage(t.receiver, sent[t.box], entries(t.box), self.narrow) for t in leaving)
        receives = []
        parts: dict[Transfer, Part] = {}
        for place, t in enumerate(arriving):
            target = Part(self.move.result, _local_box(t.box, self.wanted))
            if t.adds or self.narrow or not is_block(t.box, self.wanted):
                target = parts[t] = Part(f"message {self.step}.{number}<{place}")
                self.begin.append(ops.Make(self.step, target.buffer, _extent(t.box), narrow=self.narrow))
            receives.append(PlannedMessage(t.sender, target, entries(t.box), self.narrow))
        if sends or receives:
            self.begin.append(ops.ExchangeRound(self.step, number, sends, tuple(receives)))
        self.begin += [self._into(t, part) for t, part in kept.items() if not t.adds]
        parts |= {t: part for t, part in kept.items() if t.adds}
        after = [self._into(t, parts[t]) for t in sorted(parts, key=lambda t: t.sender)]
        if sends or receives:
            self.started.append(StartedRound(self.step, number, after))
        else:
            self.begin += after

    def _source(self, t: Transfer) -> Part:
        return Part(self.shard, _local_box(t.box, self.own))

    def _into(self, t: Transfer, part: Part) -> Operation:
        target = Part(self.move.result, _local_box(t.box, self.wanted))
        if t.adds:
            return ops.Add(self.step, part, target, entries(t.box), self.narrow and t.sender != self.device)
        return ops.Copy(self.step, part, target, entries(t.box))


def sum_operations(
    step: int, schedule: Schedule, device: int, flat: str, wire: CommDtype, lane: int
) -> Iterator[Operation]:
    """Yield the rounds of a collective, in place on a flat buffer. Steps reuse the receive buffers."""
    in_flight: deque[StartedRound] = deque()
    for number, transfers in enumerate(schedule.involving(device)):
        if len(in_flight) == schedule.window:
            yield from finish([in_flight.popleft()], step)
        slot = (lane, number % schedule.window)
        begin, started = _flat_round((step, number), transfers, device, flat, wire != "exact", slot)
        yield from begin
        in_flight.append(started)
    yield from finish(in_flight, step)


def gather_operations(step: int, schedule: Schedule, device: int, flat: str, *, own_only: bool) -> ExchangeOperations:
    """Return the round that gathers shards in place on a flat buffer, without copies.

    Args:
        own_only: this device only sends, so the buffer has only its own shards.
    """
    (transfers,) = schedule.involving(device)
    begin, started = _flat_round((step, 0), transfers, device, flat, narrow=False, slot=(0, 0))
    if own_only:
        rounds = [op for op in begin if isinstance(op, ops.ExchangeRound)]
        begin = [replace(op, sends=tuple(replace(m, part=Part(flat)) for m in op.sends)) for op in rounds]
    return ExchangeOperations(begin, [started])


def _flat_round(
    of: tuple[int, int], transfers: Round, device: int, flat: str, narrow: bool, slot: tuple[int, int]
) -> tuple[list[Operation], StartedRound]:
    """Return the operations that start a round on a flat buffer, and the started round.

    Args:
        of: step id and number of the round.
        slot: lane and number of the receive buffers.
    """
    (step, number), begin = of, list[Operation]()
    leaving = [t for t in transfers if t.sender == device and entries(t.box)]
    arriving = sorted((t for t in transfers if t.receiver == device and entries(t.box)), key=lambda t: t.sender)
    ready: dict[Box, Part] = {}
    for place, (span, adds) in enumerate({t.box: t.adds for t in leaving}.items()):
        ready[span] = Part(flat, span)
        if narrow:
            ready[span] = Part(f"message {step}.{number}>{place}")
            begin.append(ops.Make(step, ready[span].buffer, _extent(span), narrow=True, like=flat))
            begin.append(ops.Copy(step, Part(flat, span), ready[span], entries(span)))
            if not adds:  # this device keeps the same rounded sum as the devices that receive it
                begin.append(ops.Copy(step, ready[span], Part(flat, span), entries(span)))
    after: list[Operation] = []
    receives = []
    for place, t in enumerate(arriving):
        target, size = Part(flat, t.box), entries(t.box)
        if t.adds or narrow:
            received = Part(f"slot {slot[0]}.{slot[1]}.{place}")
            begin.append(ops.Make(step, received.buffer, _extent(t.box), narrow=narrow, like=flat, slot=slot[1]))
            after.append(
                ops.Add(step, received, target, size, narrow) if t.adds else ops.Copy(step, received, target, size)
            )
            target = received
        receives.append(PlannedMessage(t.sender, target, size, narrow))
    if not leaving and not receives:
        return begin, StartedRound(step, None, after)
    sends = tuple(PlannedMessage(t.receiver, ready[t.box], entries(t.box), narrow) for t in leaving)
    begin.append(ops.ExchangeRound(step, number, sends, tuple(receives)))
    return begin, StartedRound(step, number, after)


def shared_rows(step: GatherStatistics, device: int, of: Sequence[str]) -> Iterator[Operation]:
    """Yield the all-gather of batch norm sums, one row per device. Several norms share one message.

    Args:
        of: for each norm, the prefix of its buffer names "... row" and "... rows".
    """
    row, rows = (f"{of[0]} row", f"{of[0]} rows") if len(of) == 1 else (f"sums {step.id}", f"sums {step.id} of all")
    spans = list(ranges(step.sizes))
    if len(of) > 1:
        yield ops.Make(step.id, row, (1, step.entries))
        for each, size, span in zip(of, step.sizes, spans, strict=True):
            yield ops.Copy(step.id, Part(f"{each} row"), Part(row, ((0, 1), span)), size)
    everyone = Replicated(step.members)
    move = MoveSpec(step.id, step.schedule, device, step.layout, everyone, step.shape, "exact", row, rows)
    found = operations_of(move)
    yield from found.begin
    yield from finish(found.started, step.id)
    if len(of) > 1:
        members = len(step.members)
        for each, size, span in zip(of, step.sizes, spans, strict=True):
            yield ops.View(step.id, f"{each} rows", Part(rows, ((0, members), span)), (members, size))


def _local_box(part: Box, of: Box | None) -> Box | None:
    """Return a box in the coordinates of the shard `of`; None for the whole shard."""
    assert of is not None
    if part == of:
        return None
    return tuple((start - origin, stop - origin) for (start, stop), (origin, _) in zip(part, of, strict=True))


def _extent(of: Box) -> Shape:
    return tuple(stop - start for start, stop in of)


def is_block(part: Box, of: Box | None) -> bool:
    """Return whether a part of a tensor is contiguous in memory, if the tensor `of` is."""
    if of is None:
        return True
    extents = [(stop - start, end - origin) for (start, stop), (origin, end) in zip(part, of, strict=True)]
    if math.prod(n for n, _ in extents) <= 1:
        return True
    last = max((axis for axis, (n, whole) in enumerate(extents) if n < whole), default=0)
    return all(n == 1 for n, _ in extents[:last])
