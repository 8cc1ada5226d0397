"""Run operations that make, copy, add and exchange buffers. Move tensors outside of device programs."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from convoy.comm.group import Group, Message, Pending
from convoy.layout.collectives import Schedule
from convoy.layout.collectives import schedule as schedule_of
from convoy.layout.comm_dtype import CommDtype, comm_dtype_of, narrow_dtype
from convoy.layout.layout import Layout, Shape, box, local_shape
from convoy.plan.device_program import Add, Copy, ExchangeRound, Make, Merge, Operation, Part, View, WaitRound
from convoy.plan.exchange_program import MoveSpec, finish

Buffers = dict[str, Any]
"""Tensors by name; for a layer with several outputs, tuples or (as its gradient) a dict index -> gradient."""


class Slots:
    """A cache of receive buffers for sums. Every step reuses them, because allocating new memory pages is slow."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def at(self, name: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer of `count` entries, valid until the next call with the same name."""
        held = self._held.get(name)
        if held is None or held.numel() < count or held.dtype != dtype or held.device != device:
            held = self._held[name] = torch.empty(count, dtype=dtype, device=device)
        return held[:count]


class Lane:
    """A runner of exchange operations on one lane of a group."""

    def __init__(self, group: Group, number: int, slots: Slots) -> None:
        self.group, self.number, self.slots = group, number, slots
        self.pending: dict[tuple[int, int], Pending] = {}

    def run(self, operations: Iterable[Operation], buffers: Buffers, dtype: torch.dtype) -> None:
        """Run operations of one step.

        Args:
            dtype: dtype of new buffers, unless the operation says otherwise (`narrow`, `like`).

        Raises:
            DeviceLostError: another device did not send or receive.
        """
        for operation in operations:
            match operation:
                case Copy():
                    source, target = cut(buffers, operation.source), cut(buffers, operation.target)
                    target.copy_(source if source.shape == target.shape else source.reshape(target.shape))
                case Add():
                    cut(buffers, operation.target).add_(cut(buffers, operation.source))
                case ExchangeRound():
                    # Cut a part once, even if several devices receive it.
                    parts = {m.part: cut(buffers, m.part).contiguous() for m in operation.sends}
                    sends = [Message(m.peer, parts[m.part]) for m in operation.sends]
                    receives = [Message(m.peer, cut(buffers, m.part)) for m in operation.receives]
                    self.pending[operation.step, operation.number] = self.group.start(sends, receives, self.number)
                case WaitRound():
                    self.pending.pop((operation.begun, operation.number)).wait()
                case View():
                    part = cut(buffers, operation.of)
                    buffers[operation.buffer] = part if part.shape == operation.shape else part.view(operation.shape)
                case Make():
                    buffers[operation.buffer] = self._made(operation, buffers, dtype)
                case Merge():
                    buffers[operation.buffer] = functools.reduce(_added, (buffers[name] for name in operation.parts))

    def _made(self, operation: Make, buffers: Buffers, dtype: torch.dtype) -> Tensor:
        kind, device = buffers[operation.like].dtype if operation.like else dtype, self.group.torch_device
        if operation.narrow:
            kind = getattr(torch, narrow_dtype(str(kind).removeprefix("torch.")))
        if operation.slot is not None:
            return self.slots.at(operation.buffer, operation.shape[0], kind, device)
        make = torch.zeros if operation.zeros else torch.empty
        return make(operation.shape, dtype=kind, device=device)


def _added(one: Any, other: Any) -> Any:
    """Add two gradients, each a tensor, or a dict for a layer with several outputs."""
    if not isinstance(one, dict):
        return one + other
    return one | {item: one[item] + g if item in one else g for item, g in other.items()}


def cut(buffers: Mapping[str, Any], part: Part) -> Tensor:
    """Return a view of a part of a buffer."""
    tensor: Tensor = buffers[part.buffer]
    if part.box is None:
        return tensor
    for axis, (start, stop) in enumerate(part.box):
        if stop - start != tensor.shape[axis]:
            tensor = tensor.narrow(axis, start, stop - start)
    return tensor


# --- moves outside of programs: checkpoints, reshards, initial weights -------------------------------------------------


class StartedMove:
    """An asynchronous move of a tensor from layout `src` to layout `dst`. Do not change `shard` before `land`.

    Only an all-reduce in several rounds is not asynchronous: the constructor waits for it.

    Args:
        shard: the local shard under `src`, or an empty tensor of the right dtype.
        wire: number format of the messages. If several devices get copies, all have the same rounded values; else only
            received entries are rounded.
    """

    def __init__(
        self, group: Group, schedule: Schedule, shard: Tensor, src: Layout, dst: Layout, shape: Shape,
        wire: CommDtype = "exact",
    ) -> None:  # fmt: skip
        me, self._lane = group.device, Lane(group, 0, Slots())
        kind = comm_dtype_of(str(shard.dtype).removeprefix("torch."), wire)
        found = MoveSpec(0, schedule, me, src, dst, shape, kind, "shard", "result").operations()
        self._buffers: Buffers = {"shard": shard}
        self._lane.run(found.begin, self._buffers, shard.dtype)
        self._started = found.started
        self._result: Tensor | None = self._buffers.get("result")
        if self._result is None or box(dst, me, shape) is None:
            self._result = shard.new_empty(local_shape(dst, me, shape))

    def land(self) -> Tensor:
        """Wait for all messages. Return the local shard under `dst`: a view of `shard` if nothing is received or rounded."""
        started, self._started = self._started, ()
        assert self._result is not None
        self._lane.run(finish(started, 0), self._buffers, self._result.dtype)
        return self._result


def redistribute(group: Group, shard: Tensor, src: Layout, dst: Layout, shape: Shape) -> Tensor:
    """Return the shard under `dst` of a tensor. On a device without a shard under `src`, `shard` only gives the dtype."""
    held = shard if box(src, group.device, shape) is not None else shard.new_empty((0, *shape[1:]))
    return StartedMove(group, schedule_of(src, dst, shape), held, src, dst, shape).land()
