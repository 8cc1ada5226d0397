"""Interprets the operations of a device program that make, copy, add, send and receive; and moves that belong to no program."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from convoy.comm.group import Group, Message, Pending
from convoy.layout.comm_dtype import CommDtype, comm_dtype_of, narrow_dtype
from convoy.layout.layout import Layout, Partial, Replicated, Shape, box, local_shape
from convoy.layout.redistribute import Schedule
from convoy.layout.redistribute import schedule as schedule_of
from convoy.plan.device_program import Add, Copy, Event, Make, Merge, Operation, Part, Receive, Send, View, Wait
from convoy.plan.exchange_program import Landing, MoveOf, landing

Buffers = dict[str, Any]
"""Tensors by name; for a layer with several outputs, tuples or (as its gradient) a dict index -> gradient."""


@dataclass(frozen=True, slots=True)
class Messages:
    """The sends and receives of a round, started in one call."""

    event: Event
    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]


Bound = Operation | Messages


def with_messages(operations: Iterable[Operation]) -> list[Bound]:
    """The operations, with the sends and receives of each round joined."""
    found: list[Bound] = []
    for operation in operations:
        if not isinstance(operation, Send | Receive):
            found.append(operation)
            continue
        event = ("round", operation.step, operation.number)
        last = found[-1] if found else None
        if not isinstance(last, Messages) or last.event != event:
            found.append(last := Messages(event, (), ()))
        sends = (*last.sends, operation) if isinstance(operation, Send) else last.sends
        receives = (*last.receives, operation) if isinstance(operation, Receive) else last.receives
        found[-1] = Messages(event, sends, receives)
    return found


class Slots:
    """Memory that every step uses again for the summands that arrive: allocating fresh pages each round is slow."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def at(self, name: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """`count` entries that are nobody else's as long as their name is not asked for again."""
        held = self._held.get(name)
        if held is None or held.numel() < count or held.dtype != dtype or held.device != device:
            held = self._held[name] = torch.empty(count, dtype=dtype, device=device)
        return held[:count]


class Lane:
    """Runs exchange operations on one lane of a group.

    Args:
        number: of the group's lane, see `Group.start`.
    """

    def __init__(self, group: Group, number: int, slots: Slots) -> None:
        self.group, self.number, self.slots = group, number, slots
        self.pending: dict[Event, Pending] = {}
        self._handlers: Mapping[type, Callable[[Any, Buffers, torch.dtype], None]] = {
            Make: self._make,
            View: self._view,
            Copy: self._copy,
            Add: self._add,
            Merge: self._merge,
            Messages: self._start,
            Wait: self._wait,
        }

    def run(self, operations: Iterable[Bound], buffers: Buffers, dtype: torch.dtype) -> None:
        """Run operations of one step.

        Args:
            dtype: of the buffers that they make, where those are not narrow.

        Raises:
            DeviceLostError: a device that had to send or receive did not.
        """
        for operation in operations:
            self._handlers[type(operation)](operation, buffers, dtype)

    def _make(self, operation: Make, buffers: Buffers, dtype: torch.dtype) -> None:
        kind, device = _narrow(dtype) if operation.narrow else dtype, self.group.torch_device
        if operation.reused:
            buffers[operation.buffer] = self.slots.at(operation.buffer, operation.shape[0], kind, device)
        else:
            make = torch.zeros if operation.zeros else torch.empty
            buffers[operation.buffer] = make(operation.shape, dtype=kind, device=device)

    def _view(self, operation: View, buffers: Buffers, _dtype: torch.dtype) -> None:
        part = cut(buffers, operation.of)
        buffers[operation.buffer] = part if part.shape == operation.shape else part.view(operation.shape)

    def _copy(self, operation: Copy, buffers: Buffers, _dtype: torch.dtype) -> None:
        source, target = cut(buffers, operation.source), cut(buffers, operation.target)
        target.copy_(source if source.shape == target.shape else source.reshape(target.shape))

    def _add(self, operation: Add, buffers: Buffers, _dtype: torch.dtype) -> None:
        cut(buffers, operation.target).add_(cut(buffers, operation.source))

    def _merge(self, operation: Merge, buffers: Buffers, _dtype: torch.dtype) -> None:
        first, *others = (buffers[name] for name in operation.parts)
        for other in others:
            first = _merged(first, other) if isinstance(first, dict) else first + other
        buffers[operation.buffer] = first

    def _start(self, messages: Messages, buffers: Buffers, _dtype: torch.dtype) -> None:
        # What goes to several devices is cut once.
        parts = {s.part: cut(buffers, s.part).contiguous() for s in messages.sends}
        sends = [Message(s.peer, parts[s.part]) for s in messages.sends]
        receives = [Message(r.peer, cut(buffers, r.part)) for r in messages.receives]
        self.pending[messages.event] = self.group.start(sends, receives, self.number)

    def _wait(self, operation: Wait, _buffers: Buffers, _dtype: torch.dtype) -> None:
        for event in operation.events:
            if event in self.pending:
                self.pending.pop(event).wait()


def cut(buffers: Mapping[str, Any], part: Part) -> Tensor:
    """The tensor of a part of a buffer."""
    tensor: Tensor = buffers[part.buffer]
    if part.box is None:
        return tensor
    for axis, (start, stop) in enumerate(part.box):
        if stop - start != tensor.shape[axis]:
            tensor = tensor.narrow(axis, start, stop - start)
    return tensor


def _merged(a: dict[Any, Tensor], b: dict[Any, Tensor]) -> dict[Any, Tensor]:
    """Gradients for the outputs of one layer, by output."""
    return a | {item: a[item] + g if item in a else g for item, g in b.items()}


def _narrow(dtype: torch.dtype) -> torch.dtype:
    narrow: torch.dtype = getattr(torch, narrow_dtype(str(dtype).removeprefix("torch.")))
    return narrow


# --- moves that belong to no program: checkpoints, other shares, the model's first weights -----------------------------


@dataclass
class Moving:
    """A move under way on this device.

    Attributes:
        result: what this device will hold; complete once `land` has returned.
    """

    result: Tensor
    _lane: Lane
    _landings: Sequence[Landing] = ()
    _buffers: Buffers = field(default_factory=dict)

    def land(self) -> Tensor:
        """Wait for all messages, and finish the result. A second call returns it at once."""
        landings, self._landings = self._landings, ()
        self._lane.run(with_messages(landing(landings, 0)), self._buffers, self.result.dtype)
        return self.result


def start_move(
    group: Group,
    schedule: Schedule,
    piece: Tensor,
    src: Layout,
    dst: Layout,
    shape: Shape,
    wire: CommDtype = "exact",
) -> Moving:
    """As `run_move`, but messages are only begun. Neither `piece` nor a result that shows already may change meanwhile.

    A sum in rounds that wait for each other is done when this returns.
    """
    me, lane = group.device, Lane(group, 0, Slots())
    kind = comm_dtype_of(str(piece.dtype).removeprefix("torch."), wire)
    move = MoveOf(0, schedule, me, src, dst, shape, kind, "piece", "result")
    found = move.operations()
    buffers: Buffers = {"piece": piece}
    lane.run(with_messages(found.begin), buffers, piece.dtype)
    result = buffers.get("result")
    if result is None or box(dst, me, shape) is None:
        result = piece.new_empty(local_shape(dst, me, shape))
    return Moving(result, lane, found.landings, buffers)


def run_move(
    group: Group,
    schedule: Schedule,
    piece: Tensor,
    src: Layout,
    dst: Layout,
    shape: Shape,
    wire: CommDtype = "exact",
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


def redistribute(group: Group, piece: Tensor, src: Layout, dst: Layout, shape: Shape) -> Tensor:
    """As `run_move`, by the schedule for these layouts. Of a device that holds nothing under `src`, `piece` tells the dtype."""
    held = piece if box(src, group.device, shape) is not None else piece.new_empty((0, *shape[1:]))
    return run_move(group, schedule_of(src, dst, shape), held, src, dst, shape)


def gather_whole(group: Group, piece: Tensor, src: Layout, dst: Layout, shape: Shape, *, differ: bool) -> Tensor:
    """As `redistribute`; where copies `differ`, because a plan mixes inexactly, it is their average."""
    if differ and isinstance(src, Replicated) and piece.is_floating_point():
        piece, src = piece / len(src.devices), Partial(src.devices)
    return redistribute(group, piece, src, dst, shape)
