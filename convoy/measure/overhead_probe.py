"""Measures what a training step costs a device in addition to its layers: executor, copies, additions, optimizer, loss.

A whole step runs on one device (fetching a batch, executor, loss, optimizer), over nets whose layers compute almost nothing,
and the seconds of the layers are subtracted. Copies and additions are timed through torch's own functions, as the executor
calls them. The caches are cold, because a step does each of these once, between layers (see `ColdCaches`).
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from convoy.comm.group import Arrived, Group, Message, Pending
from convoy.layout.layout import Split, everywhere
from convoy.measure.layer_timer import workload
from convoy.measure.timing import (
    CORE_BYTES,
    PROCESSOR_BYTES,
    SLICE_S,
    ColdCaches,
    Now,
    RoundTimer,
    Workload,
    plain_torch,
    queued_seconds,
    spread_of,
)
from convoy.model.graph import Graph
from convoy.model.tracing import trace
from convoy.plan.device_program import whole_size
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.steps import Move, Value
from convoy.runtime.clock import Clock, Computing
from convoy.runtime.exchange import run_move
from convoy.runtime.module import Distributed
from convoy.simulate.costs import FRESH_BYTES, Overheads

LAYERS, TENSORS, PEERS = (1, 9), (1, 33), (1, 5)
"""Linear layers, parameters and peers of the two cases whose difference is the cost of one more."""

COPIED_BYTES = 4 << 20
"""More than a core's cache holds, and less than what the system must provide anew each time."""

BATCH, QUEUED = 2, 100

LOSS_ENTRIES = 1 << 22
"""Most entries of the outputs that a loss is timed on; at least one sample."""


@plain_torch(torch.float32)
def measure_overheads(
    device: torch.device,
    now: Now,
    slice_s: float,
    message_s: float = 0.0,
    share: float = 1.0,
    outputs: Sequence[Sequence[int]] = (),
) -> Overheads:
    """Time everything but messages, a few seconds with the usual slice.

    Args:
        message_s: seconds of this device's processor for one small message, at its share of a processor.
        share: of a processor that this device has. A measured latency contains one message's processor time at full speed,
            since its devices mostly wait and no quota holds them back; so that is subtracted from a round.
        outputs: shapes of the model's outputs that a loss is computed of, samples first.
    """
    timer = RoundTimer(Clock(device), now, slice_s)
    core, processor = (ColdCaches(device, now, each) for each in (CORE_BYTES, PROCESSOR_BYTES))

    def seconds(work: Callable[[], object], cold: ColdCaches = processor) -> float:
        # In longer slices than the layers', since differences are taken.
        return statistics.median(cold.seconds(work, 2 * slice_s))

    def line(counts: tuple[int, int], build: Callable[[int], Callable[[], object]]) -> tuple[float, float]:
        """Return the seconds of one more and of none."""
        few_s, many_s = (seconds(build(count), core) for count in counts)
        each_s = (many_s - few_s) / (counts[1] - counts[0])
        return each_s, few_s - counts[0] * each_s

    tensor_s, _ = line(TENSORS, lambda count: _optimizer([2] * count, device).step)
    step_each_s, step_none_s = line(LAYERS, lambda count: _training(count, device, core))
    peer_s, round_s = line(PEERS, lambda count: _round(count, device))
    flatten_s, linear_s = (_layer_s(kind, timer) for kind in ("flatten", "linear"))
    # Each Linear has a round before it, one after it, and two parameters.
    layer_s = max(0.0, step_each_s - linear_s - 2 * (round_s + peer_s) - 2 * tensor_s)
    each_message_s = message_s + max(0.0, peer_s) / 2  # each peer is sent a message and sends one
    x, y = (torch.zeros(COPIED_BYTES // 4, device=device) for _ in range(2))
    x_NCF = torch.zeros(16, 2, COPIED_BYTES // 64, device=device)
    large = torch.zeros(FRESH_BYTES // 4 + 4096, device=device)
    fresh_s = seconds(lambda: large.new_zeros(len(large))) - seconds(large.zero_)
    # What the model's loss takes longer than the one that is in `step_s` already.
    loss_bytes = 4 * (sum(map(math.prod, outputs)) - 2 * BATCH)
    loss_s = 0.0
    if loss_bytes > 0:
        least_s = seconds(_loss((BATCH, 2), device))
        loss_s = sum(seconds(_loss(shape, device)) - least_s for shape in outputs)
    return Overheads(
        step_s=max(0.0, step_none_s - flatten_s - layer_s),
        layer_s=layer_s,
        round_s=max(0.0, round_s + each_message_s - message_s * share),
        message_s=each_message_s,
        copy_s_per_byte=seconds(lambda: x_NCF.narrow(1, 0, 1).contiguous()) / COPIED_BYTES,
        add_s_per_byte=seconds(lambda: x.add_(y)) / COPIED_BYTES,
        fresh_s_per_byte=max(0.0, fresh_s) / (4 * len(large)),
        update_s_per_tensor=max(0.0, tensor_s),
        loss_s_per_byte=max(0.0, loss_s) / loss_bytes if loss_bytes > 0 else 0.0,
        queue_s=0.0 if device.type == "cpu" else _queue_s(device),
    )


@plain_torch(torch.float32)
def time_update(
    device: torch.device, now: Now, slice_s: float = SLICE_S, entries: int = 1 << 20
) -> tuple[float, float]:
    """Return the seconds per parameter entry of SGD with momentum, and their spread."""
    optimizer = _optimizer([entries], device)
    optimizer.step()  # makes the momentum
    each_s = ColdCaches(device, now, PROCESSOR_BYTES).seconds(optimizer.step, slice_s)
    return statistics.median(each_s) / entries, spread_of(each_s)


def loss_shapes(graph: Graph, batch: int) -> list[tuple[int, ...]]:
    """Return the shapes of the outputs that have values for each sample, with at most `LOSS_ENTRIES`."""
    each = [graph[name].shape for name in graph.outputs if graph[name].batched and graph[name].shape]
    samples = max(1, min(batch, LOSS_ENTRIES // max(1, sum(map(math.prod, each)))))
    return [(samples, *shape) for shape in each]


# --- what is timed -------------------------------------------------------------------------------------------------------


def _optimizer(sizes: Sequence[int], device: torch.device) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.zeros(size, device=device)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _loss(shape: Sequence[int], device: torch.device) -> Callable[[], object]:
    """Return a cross-entropy over the second axis, forward and backward."""
    x = torch.zeros(tuple(shape), device=device, requires_grad=True)
    y = torch.zeros(shape[0], *shape[2:], dtype=torch.int64, device=device)

    def work() -> None:
        F.cross_entropy(x, y).backward()  # type: ignore[no-untyped-call]
        x.grad = None

    return work


def _chain(layers: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *(nn.Linear(4, 4) for _ in range(layers)))


class _FillingClock(Clock):
    """A clock that fills the caches after each layer."""

    def __init__(self, device: torch.device, cold: ColdCaches) -> None:
        super().__init__(device)
        self.cold = cold

    def stretch(self, expected_s: Mapping[str, float], phase: str) -> "_Filling":
        return _Filling(self, expected_s, phase)


class _Filling(Computing):
    _clock: _FillingClock

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        super().__exit__(kind, *others)
        self._clock.cold.fill()


def _training(layers: int, device: torch.device, cold: ColdCaches) -> Callable[[], object]:
    """Return a step of `convoy.train.loop` on one of two devices that have half of each layer's outputs.

    It copies images, normalises them, and reads the loss (on a CPU immediately). Each layer leaves the caches cold.
    """
    images = torch.zeros(1024 * BATCH, 4, 1, 1, dtype=torch.uint8)
    labels = torch.zeros(len(images), dtype=torch.int64)
    mean, deviation = (torch.full((4, 1, 1), 0.5) for _ in range(2))
    model, example = _chain(layers), torch.zeros(1, 4, 1, 1)
    plan = named_plan("model", trace(model, example).graph, BATCH, Speeds((1.0, 1.0)))
    part = Distributed(model, plan, _SilentGroup(0, 2, device, 1.0), example)
    if device.type == "cpu":
        part.use_clock(_FillingClock(device, cold))
    optimizer = torch.optim.SGD(part.parameters(), lr=0.0, momentum=0.9)

    def step() -> None:
        rows = torch.randint(len(images), (BATCH,))
        x = images[rows].float().div_(255).sub_(mean).div_(deviation).to(device)
        loss = F.cross_entropy(part(x, whole=True), labels[rows].to(device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if device.type == "cpu":  # a step does not wait for an accelerator
            loss.item()

    return step


class _SilentGroup(Group):
    """A group whose messages arrive immediately, so that only the executor's own time of a round remains."""

    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int = 0) -> Pending:
        self._admit(sends, receives, lane)
        return Arrived()

    def agree(self, topic: str, text: str) -> tuple[str, ...]:  # noqa: ARG002
        return (text,) * self.devices

    def close(self, error: BaseException | None = None) -> None:
        pass


def _round(peers: int, device: torch.device) -> Callable[[], object]:
    """Return a round in which every device sends its sample to every other one."""
    devices = peers + 1
    src, dst, shape = Split(0, (1,) * devices), everywhere(devices), (devices, 2)
    move = Move(0, "forward", Value("x", shape, src), Value("y", shape, dst), "ring")
    group, x = _SilentGroup(0, devices, device, 1.0), torch.zeros(1, 2, device=device)
    return lambda: run_move(group, move.schedule, x, src, dst, shape)


@contextmanager
def _chain_layer(kind: str, device: torch.device) -> Iterator[Workload]:
    """Give the last layer of this kind in a chain."""
    model = _chain(1).to(device)
    traced = trace(model, torch.zeros(1, 4, 1, 1, device=device))
    layer = [layer for layer in traced.graph.layers.values() if layer.kind == kind][-1]
    size = whole_size(layer, BATCH)
    with torch.no_grad(), workload(model, traced, layer, size, (False,), backward=kind != "flatten") as work:
        yield work


def _layer_s(kind: str, timer: RoundTimer) -> float:
    with _chain_layer(kind, timer.clock.device) as work:
        return timer.time(work).times(steady=True).both_s


def _queue_s(device: torch.device) -> float:
    """Return the host's seconds to queue a layer's forward; autograd takes about as long for its backward."""
    with _chain_layer("linear", device) as work:
        return statistics.median(queued_seconds(device, QUEUED, work.forward)[1] for _ in range(5)) / QUEUED
