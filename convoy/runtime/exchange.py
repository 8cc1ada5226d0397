"""Running a schedule: the pieces that a move sends, receives, keeps and adds, on one device."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from convoy.comm.group import Group, Message, Pending
from convoy.runtime.clock import Clock
from convoy.sharding.comm_dtype import CommDtype, comm_dtype_of, rounds_own_copy
from convoy.sharding.layout import Box, Layout, Partial, Shape, box, covers, local_shape
from convoy.sharding.redistribute import Round, Schedule, Transfer


def run_move(
    group: Group, schedule: Schedule, piece: Tensor, src: Layout, dst: Layout, shape: Shape, wire: CommDtype = "exact"
) -> Tensor:
    """Bring this device's piece of a tensor of `shape` from layout `src` to layout `dst`.

    Args:
        piece: what this device holds under `src`; an empty tensor of the right dtype where it holds nothing.
        wire: in which numbers it travels. Copies are equal to the last bit also where they are rounded; what only one
            device holds afterwards is rounded where it has travelled.

    Returns:
        what it holds under `dst`; where nothing has to arrive and nothing is rounded, a view of `piece`.

    Raises:
        DeviceLostError: a device that had to send or receive did not.
    """
    return start_move(group, schedule, piece, src, dst, shape, wire).land()


def start_move(
    group: Group, schedule: Schedule, piece: Tensor, src: Layout, dst: Layout, shape: Shape, wire: CommDtype = "exact"
) -> "Moving":
    """As `run_move`, but messages are only begun. Neither `piece` nor a result that shows already may change meanwhile.

    A sum in rounds that wait for each other is done when this returns.
    """
    if not schedule.rounds:
        return Moving(piece)
    if schedule.in_place:
        return Moving(_run_sum(group, schedule, piece, dst, shape, wire))
    return _start_direct(group, schedule, piece, src, dst, shape, wire)


@dataclass
class Arrival:
    """One round of a move under way.

    Attributes:
        pending: the messages; None where there are none.
        parts: what lies ready or arrives beside the result, and has to be added to it or copied into it, as
            (transfer, where it goes, what), in the order of the senders.
    """

    pending: Pending | None
    parts: list[tuple[Transfer, Tensor, Tensor]]

    def land(self) -> None:
        if self.pending is not None:
            self.pending.wait()
        # Summands in the order of the devices: the same bits in every run.
        for t, target, part in self.parts:
            if t.adds:
                target.add_(part)
            elif target.data_ptr() != part.data_ptr():
                target.copy_(part)


@dataclass
class Moving:
    """A move under way on this device.

    Attributes:
        result: what this device will hold; complete once `land` has returned.
        arrivals: its rounds that have not landed yet.
    """

    result: Tensor
    arrivals: list[Arrival] = field(default_factory=list)

    def land(self) -> Tensor:
        """Wait for all messages, and finish the result. A second call returns it at once."""
        while self.arrivals:
            self.arrivals.pop(0).land()
        return self.result

    def land_next(self) -> None:
        """Wait for the next round alone: the next rows of the result are complete."""
        if self.arrivals:
            self.arrivals.pop(0).land()


class Flights:
    """The moves that a device has begun, by the ids of their steps.

    Args:
        clock: its exchange time is what the device waits here.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[int, Moving] = {}

    def add(self, step: int, moving: Moving) -> Tensor:
        """The tensor that the move fills; complete once it has landed."""
        self._open[step] = moving
        return moving.result

    def land(self, steps: Iterable[int]) -> None:
        """Wait for those of these steps that are moves under way."""
        for moving in [self._open.pop(step) for step in steps if step in self._open]:
            with self._clock.exchange():
                moving.land()

    def land_next(self, steps: Iterable[int]) -> None:
        """Wait for the next pieces of those of these steps that are moves under way."""
        for moving in [self._open[step] for step in steps if step in self._open]:
            with self._clock.exchange():
                moving.land_next()

    def land_all(self) -> None:
        """Wait for all moves under way."""
        self.land(list(self._open))


class Landing:
    """Memory where summands arrive before they are added, used again by every round: new memory is slow to come by."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, int], Tensor] = {}

    def at(self, slot: tuple[int, int], count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """`count` entries that are nobody else's as long as their slot is not asked for again."""
        held = self._slots.get(slot)
        if held is None or held.numel() < count or held.dtype != dtype or held.device != device:
            held = self._slots[slot] = torch.empty(count, dtype=dtype, device=device)
        return held[:count]


def run_rounds(
    group: Group,
    schedule: Schedule,
    flat: Tensor,
    lane: int = 0,
    wire: CommDtype = "exact",
    landing: Landing | None = None,
) -> None:
    """Run the rounds of a summing collective in place on a flat buffer that this device owns.

    Args:
        lane: of the group, see `Group.start`.
        wire: in which numbers summands and sums travel; they are added in those of `flat`.
        landing: where summands arrive; by default, memory of this call's own.
    """
    landing = landing or Landing()
    under_way: deque[Arrival] = deque()
    for number, transfers in enumerate(schedule.rounds):
        if len(under_way) == schedule.window:
            under_way.popleft().land()
        under_way.append(_start_sum(group, transfers, flat, lane, wire, landing, number % schedule.window))
    for arrival in under_way:
        arrival.land()


def _start_sum(
    group: Group, transfers: Round, flat: Tensor, lane: int, wire: CommDtype, landing: Landing, turn: int
) -> Arrival:
    """Begin one round of a sum. `turn` tells rounds that are under way together apart."""
    dtype = _on_wire(flat.dtype, wire)
    sends = [t for t in transfers if t.sender == group.device]
    receives = sorted((t for t in transfers if t.receiver == group.device), key=lambda t: t.sender)
    if not sends and not receives:
        return Arrival(None, [])
    sent = {t.box: t for t in sends}  # a part that goes to several is made ready once
    ready = {span: _span_on_wire(flat, t, dtype) for span, t in sent.items()}
    parts = []
    for place, t in enumerate(receives):
        span = _span(flat, t)
        straight = not t.adds and dtype == flat.dtype
        parts.append((t, span, span if straight else landing.at((turn, place), span.numel(), dtype, flat.device)))
    pending = group.start(
        [Message(t.receiver, ready[t.box]) for t in sends], [Message(t.sender, part) for t, _, part in parts], lane
    )
    return Arrival(pending, parts)


def _span(flat: Tensor, t: Transfer) -> Tensor:
    ((start, stop),) = t.box
    return flat[start:stop]


def _span_on_wire(flat: Tensor, t: Transfer, dtype: torch.dtype) -> Tensor:
    span = _span(flat, t)
    sent = span.to(dtype)
    if not t.adds and dtype != flat.dtype:
        span.copy_(sent)  # what the others get as the sum is the sum here, too
    return sent


def _run_sum(group: Group, schedule: Schedule, piece: Tensor, dst: Layout, shape: Shape, wire: CommDtype) -> Tensor:
    """A pending sum becomes copies. Every copy is computed once and then copied, so all are equal to the last bit."""
    reads = any(group.device in (t.sender, t.receiver) for transfers in schedule.rounds for t in transfers)
    if not reads:
        return piece.new_empty(local_shape(dst, group.device, shape))
    flat = piece.reshape(-1).clone() if piece.numel() else piece.new_empty(schedule.shape)
    run_rounds(group, schedule, flat, wire=wire)
    held = box(dst, group.device, shape) is not None
    return flat.view(shape) if held else flat.new_empty(local_shape(dst, group.device, shape))


def _start_direct(
    group: Group, schedule: Schedule, piece: Tensor, src: Layout, dst: Layout, shape: Shape, wire: CommDtype
) -> Moving:
    me, held_dtype, dtype = group.device, piece.dtype, _on_wire(piece.dtype, wire)
    own, wanted = box(src, me, shape), box(dst, me, shape)
    transfers = [t for transfers in schedule.rounds for t in transfers]
    kept = [t for t in transfers if t.sender == t.receiver == me]
    arrives = any(t.receiver == me != t.sender for t in transfers)
    if rounds_own_copy(wire, schedule, dst) and any(t.sender == me for t in transfers):
        piece = piece.to(dtype)  # what is kept is then made of the same numbers as what is sent
    if wanted is not None and not arrives and covers([t.box for t in kept], wanted):
        result, here = _cut(piece, wanted, own).to(held_dtype), True
    else:
        # From zero where only a part of the box is written: a pending sum, or a box that nobody fills.
        summed = isinstance(dst, Partial) or any(t.adds for t in transfers if t.receiver == me)
        fresh = piece.new_zeros if summed else piece.new_empty
        result, here = fresh(local_shape(dst, me, shape), dtype=held_dtype), False
    rounds = [_start_round(group, each, piece, result, own, wanted, dtype, here=here) for each in schedule.rounds]
    return Moving(result, rounds)


def _start_round(
    group: Group,
    transfers: Round,
    piece: Tensor,
    result: Tensor,
    own: Box | None,
    wanted: Box | None,
    dtype: torch.dtype,
    *,
    here: bool,
) -> Arrival:
    """`dtype`: of the messages; `here`: the result is there already, from what this device holds."""
    me = group.device
    leaving = [t for t in transfers if t.sender == me != t.receiver]
    arriving = [t for t in transfers if t.receiver == me != t.sender]
    kept = [] if here else [t for t in transfers if t.sender == t.receiver == me]
    sends = [Message(t.receiver, _cut(piece, t.box, own).to(dtype).contiguous()) for t in leaving]
    landing = [_landing(_cut(result, t.box, wanted), t, dtype) for t in arriving]
    receives = [Message(t.sender, buffer) for t, buffer in zip(arriving, landing, strict=True)]
    pending = group.start(sends, receives) if sends or receives else None
    for t in kept:
        if not t.adds:
            _cut(result, t.box, wanted).copy_(_cut(piece, t.box, own))
    parts = [(t, _cut(piece, t.box, own)) for t in kept if t.adds] + list(zip(arriving, landing, strict=True))
    ordered = sorted(parts, key=lambda pair: pair[0].sender)
    return Arrival(pending, [(t, _cut(result, t.box, wanted), part) for t, part in ordered])


def _landing(target: Tensor, t: Transfer, dtype: torch.dtype) -> Tensor:
    """Where a message arrives: in its place, or beside it where that is no block of memory, or of wider numbers.

    What is added arrives beside it too: a summand must not be overwritten while it is being sent.
    """
    straight = target.is_contiguous() and not t.adds and dtype == target.dtype
    return target if straight else torch.empty(target.shape, dtype=dtype, device=target.device)


def _on_wire(dtype: torch.dtype, wire: CommDtype) -> torch.dtype:
    return dtype if comm_dtype_of(str(dtype).removeprefix("torch."), wire) == "exact" else torch.bfloat16


def _cut(piece: Tensor, wanted: Box, own: Box | None) -> Tensor:
    """The part of this device's piece that covers `wanted`, both in the coordinates of the whole tensor."""
    assert own is not None
    for axis, ((start, stop), (origin, end)) in enumerate(zip(wanted, own, strict=True)):
        if (start, stop) != (origin, end):
            piece = piece.narrow(axis, start - origin, stop - start)
    return piece
