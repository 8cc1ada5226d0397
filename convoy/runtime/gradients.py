"""Gradients of copied parameters: summed over the devices, never averaged. And the norm of all gradients together."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from convoy.comm.agreement import share_number
from convoy.comm.group import Group
from convoy.layout.shares import Shares
from convoy.machine.accelerator import in_float64, queued
from convoy.model.graph import Graph
from convoy.plan.device_program import Compute, Fused, Operation, Pack, Signal, Unpack, Wait
from convoy.runtime.exchange import Bound, Buffers, Lane, Slots, with_messages

SUM_LANE = 1

IDLE_S = 1.0
"""The thread of sums waits so long for the next one, of this step or another."""

Found = dict[str, Tensor | None]
"""Gradients that backward reached, by `state_dict` key. None: reached, but this device has no part in it.
A key that is missing was reached on no device: the loss does not depend on that parameter."""


@dataclass(frozen=True)
class SumLane:
    """The second lane of a program, as it runs.

    Attributes:
        sums: the operations of each gradient sum, by its step, in the order in which they run.
        behind: what is left when all have run: waits for messages that arrive where they belong.
    """

    sums: Mapping[int, list[Bound]]
    behind: list[Bound]

    @classmethod
    def of(cls, lane: Sequence[Operation]) -> Self:
        """That of a program."""
        sums: dict[int, list[Operation]] = {}
        behind: list[Operation] = []
        last = -1
        for operation in lane:
            if isinstance(operation, Wait) and operation.events[0][0] == "ready":
                last = operation.step
                sums[last] = []
            elif not isinstance(operation, Signal):
                (sums[last] if operation.step == last else behind).append(operation)
        return cls({step: with_messages(row) for step, row in sums.items()}, with_messages(behind))


class Worker:
    """A thread that does one thing after the other, step after step. It ends when there was nothing to do for `IDLE_S`.

    A thread of its own for each step took 0.1 to 0.3 ms of a processor to start. It is a daemon: where a process ends with an
    error, no message that cannot come any more keeps it from telling the others.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._works = False
        self._lock = threading.Lock()
        self._stream: torch.Stream | None = None

    def stream(self, device: torch.device) -> torch.Stream:
        """Return the stream of an accelerator that the thread works on."""
        if self._stream is None or self._stream.device != device:
            self._stream = torch.Stream(device)
        return self._stream

    def add(self, order: Callable[[], None]) -> None:
        """Something to do, behind what is to be done already. It must not raise."""
        with self._lock:
            self._orders.put(order)
            starts, self._works = not self._works, True
        if starts:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while (order := self._next()) is not None:
            order()
            del order  # it has a whole gradient

    def _next(self) -> Callable[[], None] | None:
        while True:
            try:
                return self._orders.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    self._works = not self._orders.empty()
                    if not self._works:
                        return None


class Sums:
    """The gradient sums of one backward. Each begins as soon as its gradients are there, and runs while backward goes on.

    A thread takes them one after the other, in the order of the program, on a lane of the group that is its own. It waits for
    the network, without a processor, and adds. Where a group has a single lane, sums are made at once. Every device begins its
    sums in the same order: one whose gradients are there early waits for those before it. What was begun is made also where
    backward ends with an error: the other devices make it, too, and messages of the next step go behind it.

    Args:
        lane: of the program.
        slots: where summands arrive, step after step.
        worker: the thread, and on an accelerator its stream.

    Attributes:
        shares: what this device keeps of sums that come to shares, as buffers.
    """

    def __init__(self, group: Group, lane: SumLane, slots: Slots, worker: Worker) -> None:
        self.group = group
        self._sums, self._behind, self._worker = lane.sums, lane.behind, worker
        self._lane = Lane(group, 0 if group.lanes == 1 else SUM_LANE, slots)
        self._order = list(lane.sums)
        self._ready: dict[int, Tensor] = {}
        self._error: BaseException | None = None
        self._done: dict[int, threading.Event] = {}
        self._ends: dict[int, torch.Event] = {}
        self.shares: Buffers = {}

    def begin(self, step: int, flat: Tensor) -> None:
        """The summands of one sum are there: it is made in place, in its turn."""
        self._ready[step] = flat
        while self._order and self._order[0] in self._ready:
            turn = self._order.pop(0)
            self._start(turn, self._ready.pop(turn))

    def _start(self, step: int, flat: Tensor) -> None:
        if self.group.lanes == 1:
            self._run(step, flat)
            return
        self._done[step] = threading.Event()
        begins = None if flat.device.type == "cpu" else queued(flat.device)
        self._worker.add(partial(self._in_thread, step, flat, begins))

    def _run(self, step: int, flat: Tensor) -> None:
        buffers: Buffers = {f"sum {step}": flat}
        self._lane.run(self._sums[step], buffers, flat.dtype)
        self.shares.update((name, buffer) for name, buffer in buffers.items() if name.startswith("share "))

    def _in_thread(self, step: int, flat: Tensor, begins: torch.Event | None) -> None:
        try:
            with torch.no_grad():  # a thread of its own starts with autograd on
                if begins is None:
                    self._run(step, flat)
                else:
                    self._run_on_stream(step, flat, begins)
        except BaseException as error:
            self._error = self._error or error
        self._done[step].set()

    def _run_on_stream(self, step: int, flat: Tensor, begins: torch.Event) -> None:
        """Make a sum on the thread's stream, which does not wait for what backward queues on its own stream meanwhile."""
        stream = self._worker.stream(flat.device)
        begins.wait(stream)
        flat.record_stream(stream)
        with stream:
            self._run(step, flat)
            self._ends[step] = queued(flat.device)

    def wait(self, step: int) -> None:
        """Wait for one sum. On an accelerator the current stream waits for it; the host waits for messages only.

        Raises:
            DeviceLostError: a device did not send its part.
        """
        if step in self._done:
            self._done[step].wait()  # every wait in it has the group's own limit
        if self._error is not None:
            raise self._error
        if (ends := self._ends.get(step)) is not None:
            current = torch.accelerator.current_stream(self.group.torch_device)
            ends.wait(current)
            for share in self.shares.values():
                share.record_stream(current)

    def finish(self) -> None:
        """Wait for all sums.

        Raises:
            DeviceLostError: a device did not send its part.
        """
        assert not self._ready, "a gradient sum was never begun"
        for step in self._done:
            self.wait(step)
        self._lane.run(self._behind, {}, torch.float32)  # which makes nothing


class StretchSums:
    """The gradient sums that begin while autograd is in a fused stretch: each as soon as its last gradient is there.

    Args:
        end_lap: called before a sum begins, so that its time is not taken for that of a layer.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        fused: Fused,
        buffers: Buffers,
        found: Found,
        sums: Sums,
        end_lap: Callable[[], None],
    ) -> None:
        self._model, self._buffers, self._found, self._sums, self._end_lap = model, buffers, found, sums, end_lap
        self._missing: dict[int, set[str]] = {}
        self._packs: dict[int, Pack] = {}
        self._collected: set[str] = set()
        computed: set[str] = set()
        for op in fused.operations:
            if isinstance(op, Compute) and op.part != "input":
                computed.update(p.key for p in graph[op.layer].trainable)
            elif isinstance(op, Pack):
                self._packs[op.step] = op
                self._missing[op.step] = computed.intersection(op.keys)

    @contextmanager
    def watching(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """While autograd runs, it tells of every gradient of these that a sum waits for."""
        waited = set().union(*self._missing.values())
        hooks = [p.register_hook(self._hook(k)) for k, p in parameters.items() if k in waited]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, key: str) -> Any:
        def arrived(gradient: Tensor) -> None:
            self.collect(key, gradient.detach())

        return arrived

    def collect(self, key: str, gradient: Tensor | None) -> None:
        """A parameter's gradient of this stretch is there."""
        if key in self._collected:
            return
        self._collected.add(key)
        collect(self._found, key, gradient)
        for step, missing in list(self._missing.items()):
            missing.discard(key)
            if not missing:
                self._begin(step)

    def finish(self) -> None:
        """Begin the sums that waited for nothing of this stretch."""
        for step in list(self._missing):
            self._begin(step)

    def _begin(self, step: int) -> None:
        del self._missing[step]
        pack = self._packs[step]
        self._end_lap()
        flat = packed(pack, self._found, self._model, self._sums.group)
        if not pack.into:
            self._buffers[pack.buffer] = flat
        self._sums.begin(step, flat)


def packed(operation: Pack, found: Found, model: nn.Module, group: Group) -> Tensor:
    """The flat buffer that gradients are summed in."""
    rows = zip(operation.keys, operation.sizes, strict=True)
    parts = [_flat(found.get(key), size, model, key) for key, size in rows]
    if operation.mixed_over:
        weights = [model.get_parameter(key) for key in operation.keys]
        parts = [w.detach().view(-1) / operation.mixed_over for w in weights] + parts
    if operation.flags:
        # Counts of devices: no wire format rounds one of them to zero.
        used = [float(found.get(key) is not None) for key in operation.keys]
        parts.append(torch.tensor(used, device=group.torch_device).to(parts[0]))
    if operation.into:
        found.update(dict.fromkeys(operation.keys))  # the whole gradients are in the sum from now on
    if operation.alone:
        return parts[0]
    return torch.cat(by_device(parts, operation.into) if operation.into else parts)


def by_device(flats: Sequence[Tensor], shares: Sequence[Shares]) -> list[Tensor]:
    """Pieces of flat tensors: the share of device 0 of each of them, then that of device 1, and so on."""
    pieces = [torch.split(flat, list(entries)) for flat, entries in zip(flats, shares, strict=True)]
    return [piece for row in zip(*pieces, strict=True) for piece in row]


def unpack(operation: Unpack, flat: Tensor, found: Found, model: nn.Module) -> None:
    """Put sums in the place of what they were made of."""
    if operation.mixed_over:
        flat = _unmixed(operation, flat, model)
    used = flat[-operation.flags :].tolist() if operation.flags else [1.0] * len(operation.keys)
    start = 0
    for key, size, flag in zip(operation.keys, operation.sizes, used, strict=True):
        # No device used it (control flow): then it has no gradient, as on one device.
        found[key] = flat[start : start + size] if flag else None
        start += size


def _unmixed(operation: Unpack, flat: Tensor, model: nn.Module) -> Tensor:
    """INEXACT. One stage of butterfly mixing: this device and one partner average their weights and their gradients.

    Zhao & Canny interleave each gradient step with one stage of the butterfly instead of a full reduction. The copies of
    a parameter are then no longer equal, and training no longer follows the single-device trajectory.
    """
    count = sum(operation.sizes)
    for key, mixed in zip(operation.keys, torch.split(flat[:count], list(operation.sizes)), strict=True):
        weight = model.get_parameter(key).detach()
        weight.copy_(mixed.view_as(weight))
    flat[count : 2 * count] *= operation.scale
    return flat[count:]


def _flat(gradient: Tensor | None, size: int, model: nn.Module, key: str) -> Tensor:
    return model.get_parameter(key).detach().new_zeros(size) if gradient is None else gradient.reshape(-1)


def collect(found: Found, key: str, gradient: Tensor | None) -> None:
    """Add a gradient to what was found of a parameter's."""
    before = found.get(key)
    found[key] = gradient if before is None else before if gradient is None else before + gradient


def own_memory(parameter: nn.Parameter, gradient: Tensor, taken: set[int]) -> Tensor:
    """A gradient in memory of its own, of which autograd may make `.grad`.

    Args:
        taken: storages in use. The gradient of `a + b` is one tensor for both, but no two .grad may be the same memory.
    """
    gradient = gradient.view_as(parameter)
    storage = gradient.untyped_storage()
    own = storage.data_ptr() not in taken and storage.nbytes() == gradient.numel() * gradient.element_size()
    result = gradient if own or parameter.grad is not None else gradient.clone()  # to a .grad it is only added
    taken.add(result.untyped_storage().data_ptr())
    return result


def global_norm(group: Group, gradients: Iterable[tuple[Tensor, bool]], norm_type: float = 2.0) -> float:
    """Norm of all gradients together, of pieces and copies. The same number on every device.

    Args:
        gradients: each gradient held here, with whether this device is the one to count it (copies count once).
        norm_type: the p of the p-norm; infinity for the largest entry.
    """
    own = [g for g, counts in gradients if counts and g.numel()]
    powers = [torch.linalg.vector_norm(in_float64(g), norm_type) for g in own]
    if norm_type == float("inf"):
        # Not Python's max: it would lose what is not a number.
        here = float(torch.stack(powers).max()) if powers else 0.0
        return float(torch.tensor(share_number(group, here), dtype=torch.float64).max())
    here = float(sum(p**norm_type for p in powers)) if powers else 0.0
    return float(sum(share_number(group, here)) ** (1.0 / norm_type))
