"""Sum gradients over the devices (without averaging), and compute the norm of all gradients."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from convoy.comm.control_messages import share_number
from convoy.comm.group import Group
from convoy.layout.shares import Shares
from convoy.machine.accelerator import in_float64, queued
from convoy.model.graph import Graph
from convoy.plan.device_program import Compute, EndSum, Fused, Operation, Pack, TakeSum, Unpack
from convoy.runtime.exchange import Buffers, Lane, Slots

SUM_LANE = 1

IDLE_S = 1.0
"""Seconds that an idle sum thread waits before it ends."""

Found = dict[str, Tensor | None]
"""Gradients by `state_dict` key. None: backward reached the parameter, but this device contributes nothing to its gradient.
A key is missing if backward reached the parameter on no device: the loss does not depend on it."""


@dataclass(slots=True)
class OneSum:
    """One gradient sum: operations that work on `buffer` in place, and the buffer with this device's `result`."""

    buffer: str
    result: str
    operations: list[Operation] = field(default_factory=list)


@dataclass(frozen=True)
class SumLane:
    """The gradient sums of a program in order, by step, and the waits for messages that end after them (`behind`)."""

    sums: Mapping[int, OneSum]
    behind: list[Operation]

    @classmethod
    def of(cls, lane: Sequence[Operation]) -> Self:
        sums: dict[int, OneSum] = {}
        behind: list[Operation] = []
        last = -1
        for operation in lane:
            match operation:
                case TakeSum(step=last, buffer=buffer):
                    sums[last] = OneSum(buffer, buffer)
                case EndSum(step=step, result=result):
                    sums[step].result = result
                case _:
                    (sums[last].operations if operation.step == last else behind).append(operation)
        return cls(sums, behind)


class Worker:
    """A queue and a thread that runs its tasks. The thread ends after `IDLE_S` without a task; the next task restarts it.

    A new thread for each step would take 0.1 to 0.3 ms of processor time. It is a daemon thread, so that a failed process can
    exit and report its error even if a message never arrives.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running = False
        self._lock = threading.Lock()
        self._stream: torch.Stream | None = None

    def stream(self, device: torch.device) -> torch.Stream:
        if self._stream is None or self._stream.device != device:
            self._stream = torch.Stream(device)
        return self._stream

    def add(self, task: Callable[[], None]) -> None:
        """Queue a task. It must not raise."""
        with self._lock:
            self._tasks.put(task)
            starts, self._running = not self._running, True
        if starts:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    self._running = not self._tasks.empty()
                    if not self._running:
                        return
                continue
            task()
            del task  # it holds a whole gradient


class Sums:
    """The gradient sums of one backward. They overlap with it: each starts when its local gradients are ready.

    A thread runs them one after another on its own lane of the group; it mostly waits for the network. A group with a single
    lane runs each sum immediately instead. Every device runs its sums in program order: a sum that is ready early waits for
    earlier ones. A started sum is completed even if backward fails, because the other devices complete it too and messages of
    the next step follow it.

    Attributes:
        shares: this device's shards of sums into sharded parameters, as buffers.
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
        """Sum `flat` over the devices in place, after all earlier sums have started. Its local gradients are complete."""
        self._ready[step] = flat
        while self._order and self._order[0] in self._ready:
            turn = self._order.pop(0)
            flat = self._ready.pop(turn)
            if self.group.lanes == 1:
                self._run(turn, flat)
                continue
            self._done[turn] = threading.Event()
            begins = None if flat.device.type == "cpu" else queued(flat.device)
            self._worker.add(partial(self._in_thread, turn, flat, begins))

    def _run(self, step: int, flat: Tensor) -> None:
        one = self._sums[step]
        buffers: Buffers = {one.buffer: flat}
        self._lane.run(one.operations, buffers, flat.dtype)
        if one.result != one.buffer:
            self.shares[one.result] = buffers[one.result]

    def _in_thread(self, step: int, flat: Tensor, begins: torch.Event | None) -> None:
        try:
            with torch.no_grad():  # a new thread starts with autograd enabled
                if begins is None:
                    self._run(step, flat)
                else:
                    stream = self._worker.stream(flat.device)
                    begins.wait(stream)
                    flat.record_stream(stream)
                    with stream:
                        self._run(step, flat)
                        self._ends[step] = queued(flat.device)
        except BaseException as error:
            self._error = self._error or error
        self._done[step].set()

    def wait(self, step: int) -> None:
        """Wait for one sum. On an accelerator the current stream waits for it, the host only for its messages."""
        if step in self._done:
            self._done[step].wait()  # the group's timeout limits every wait inside
        if self._error is not None:
            raise self._error
        if (ends := self._ends.get(step)) is not None:
            current = torch.accelerator.current_stream(self.group.torch_device)
            ends.wait(current)
            if (share := self.shares.get(self._sums[step].result)) is not None:  # the worker adds others meanwhile
                share.record_stream(current)

    def finish(self) -> None:
        assert not self._ready, "a gradient sum never started"
        for step in self._done:
            self.wait(step)
        self._lane.run(self._behind, {}, torch.float32)  # makes no buffers, so the dtype does not matter


class SegmentSums:
    """The gradient sums that start while autograd runs a segment, each when its last gradient is ready.

    Args:
        end_lap: called before a sum starts, so that a slowed device sleeps before it sends.
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
        self._packs = {op.step: op for op in fused.operations if isinstance(op, Pack)}
        self._missing: dict[int, set[str]] = {}
        self._collected: set[str] = set()
        computed: set[str] = set()
        for op in fused.operations if self._packs else ():
            if isinstance(op, Compute) and op.part != "input":
                computed.update(p.key for p in graph[op.layer].trainable)
            elif isinstance(op, Pack):
                self._missing[op.step] = computed.intersection(op.keys)

    @contextmanager
    def watching(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Inside the block, collect by hooks the gradients of these parameters that a sum waits for."""
        waited = set().union(*self._missing.values())
        hooks: list[Any] = [
            p.register_hook(lambda g, key=key: self.collect(key, g.detach()))  # type: ignore[no-untyped-call]
            for key, p in parameters.items()
            if key in waited
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def collect(self, key: str, gradient: Tensor | None) -> None:
        """Add this segment's gradient of a parameter, and start the sums that it completes."""
        if key in self._collected:
            return
        self._collected.add(key)
        collect(self._found, key, gradient)
        for step, missing in list(self._missing.items()):
            missing.discard(key)
            if not missing:
                self._begin(step)

    def finish(self) -> None:
        """Start the remaining sums, which need no gradient of this segment."""
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
    rows = zip(operation.keys, operation.sizes, strict=True)
    gradients = [(found.get(key), size, key) for key, size in rows]
    parts = [
        model.get_parameter(key).detach().new_zeros(size) if g is None else g.reshape(-1) for g, size, key in gradients
    ]
    if operation.flags:
        # A flag (0 or 1) per parameter becomes the number of devices that used it. No wire format rounds 1 to zero.
        used = [float(found.get(key) is not None) for key in operation.keys]
        parts.append(torch.tensor(used, device=group.torch_device).to(parts[0]))
    if operation.into:
        found.update(dict.fromkeys(operation.keys))  # drop the whole gradients: the buffer contains them
    if operation.alone:
        return parts[0]
    return torch.cat(by_device(parts, operation.into) if operation.into else parts)


def by_device(flats: Sequence[Tensor], shares: Sequence[Shares]) -> list[Tensor]:
    """Split flat tensors into shards: device 0's of each tensor, then device 1's, and so on."""
    shards = [torch.split(flat, list(entries)) for flat, entries in zip(flats, shares, strict=True)]
    return [shard for row in zip(*shards, strict=True) for shard in row]


def unpack(operation: Unpack, flat: Tensor, found: Found) -> None:
    """Replace gradients by their sums over the devices."""
    used = flat[-operation.flags :].tolist() if operation.flags else [1.0] * len(operation.keys)
    start = 0
    for key, size, flag in zip(operation.keys, operation.sizes, used, strict=True):
        # A parameter that no device used (control flow) has no gradient, as on one device.
        found[key] = flat[start : start + size] if flag else None
        start += size


def collect(found: Found, key: str, gradient: Tensor | None) -> None:
    before = found.get(key)
    found[key] = gradient if before is None else before if gradient is None else before + gradient


def own_memory(parameter: nn.Parameter, gradient: Tensor, taken: set[int]) -> Tensor:
    """Return a gradient that autograd may use as `.grad`: a copy if it shares its storage (see `taken`).

    For example, `a` and `b` in `a + b` get the same gradient tensor.
    """
    if gradient.shape != parameter.shape:
        gradient = gradient.view_as(parameter)
    storage = gradient.untyped_storage()
    address = storage.data_ptr()
    if (address in taken or storage.nbytes() != gradient.nbytes) and parameter.grad is None:  # else autograd adds
        gradient = gradient.clone()
        address = gradient.untyped_storage().data_ptr()
    taken.add(address)
    return gradient


def global_norm(group: Group, gradients: Iterable[tuple[Tensor, bool]], norm_type: float = 2.0) -> float:
    """Return the norm over all devices. `gradients`: local ones, and whether to count each (only one device counts a copy)."""
    own = [g for g, counts in gradients if counts and g.numel()]
    powers = [torch.linalg.vector_norm(in_float64(g), norm_type) for g in own]
    if norm_type == float("inf"):
        # Python's max may lose a NaN.
        here = float(torch.stack(powers).max()) if powers else 0.0
        return float(torch.tensor(share_number(group, here), dtype=torch.float64).max())
    here = float(sum(p**norm_type for p in powers)) if powers else 0.0
    return float(sum(share_number(group, here)) ** (1.0 / norm_type))
