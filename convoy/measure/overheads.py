"""Measures what a training step costs a device beside its layers: the executor on it (host overhead).

A whole step runs on one device (fetching a batch, executor, loss, optimizer), over nets whose layers compute almost nothing;
the seconds of the layers themselves are subtracted. Copies and additions are timed through torch's own functions, as the
executor calls them. The caches are cold, because a step does each of these once, between layers (see `Cold`).
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
from convoy.measure.layers import piece
from convoy.measure.timing import CORE_BYTES, PROCESSOR_BYTES, Cold, Now, Piece, plain_torch, queued_seconds, sampled
from convoy.model.graph import Graph
from convoy.model.tracing import trace
from convoy.plan.device_program import whole_size
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.steps import Move, Value
from convoy.runtime.clock import Clock, Computing
from convoy.runtime.exchange import run_move
from convoy.runtime.module import Distributed
from convoy.simulate.costs import FRESH_BYTES, Overheads

LAYERS = (1, 9)
"""Linear layers in the two nets whose difference is the cost of a layer."""

TENSORS = (1, 33)
PEERS = (1, 5)
COPIED_BYTES = 4 << 20
"""More than a cache of one core holds, and less than what the system must provide anew each time."""

BATCH = 2


QUEUED = 100

LOSS_ENTRIES = 1 << 22
"""Of the outputs that a loss is timed of, at most; one sample of each at least."""


@plain_torch(torch.float32)
def measure_overheads(
    device: torch.device,
    now: Now,
    stretch_s: float,
    message_s: float = 0.0,
    share: float = 1.0,
    outputs: Sequence[Sequence[int]] = (),
) -> Overheads:
    """Time everything but messages, a few seconds with the usual stretch.

    Args:
        message_s: seconds of this device's processor for one small message, as its share of one allows.
        share: of a processor that this device has. A latency is timed on devices that wait most of the time and so are not
            held back by a quota: it holds one message's processor time at full speed, which is taken off a round.
        outputs: shapes of the model's outputs that a loss is computed of, samples first.
    """
    clock = Clock(device)
    core, processor = (Cold(device, now, each) for each in (CORE_BYTES, PROCESSOR_BYTES))
    per_tensor_s = _line(TENSORS, lambda count: _median(_optimizer(count, device), core, stretch_s))[0]
    step_each_s, step_none_s = _line(LAYERS, lambda count: _median(_training(count, device, core), core, stretch_s))
    peer_s, round_s = _line(PEERS, lambda count: _median(_round(count, device), core, stretch_s))
    flatten_s, linear_s = (_layer_s(kind, clock, now, stretch_s) for kind in ("flatten", "linear"))
    # Each Linear brings a round before it, one behind it, and two parameters.
    layer_s = max(0.0, step_each_s - linear_s - 2 * (round_s + peer_s) - 2 * per_tensor_s)
    step_s = max(0.0, step_none_s - flatten_s - layer_s)
    held_s = message_s * share
    each_message_s = message_s + max(0.0, peer_s) / 2  # each peer is sent a message and sends one
    return Overheads(
        step_s=step_s,
        layer_s=layer_s,
        round_s=max(0.0, round_s + each_message_s - held_s),
        message_s=each_message_s,
        copy_s_per_byte=_median(_copy(device), processor, stretch_s) / COPIED_BYTES,
        add_s_per_byte=_median(_add(device), processor, stretch_s) / COPIED_BYTES,
        fresh_s_per_byte=_fresh_s_per_byte(device, processor, stretch_s),
        update_s_per_tensor=max(0.0, per_tensor_s),
        loss_s_per_byte=_loss_s_per_byte(outputs, device, processor, stretch_s),
        queue_s=0.0 if device.type == "cpu" else _queue_s(clock),
    )


def _line(counts: tuple[int, int], seconds: Callable[[int], float]) -> tuple[float, float]:
    """Seconds of each more, and of none, by the seconds at two counts."""
    few, many = counts
    few_s, many_s = seconds(few), seconds(many)
    each_s = (many_s - few_s) / (many - few)
    return each_s, few_s - few * each_s


def _median(work: Callable[[], object], cold: Cold, stretch_s: float) -> float:
    """Seconds of one call. In longer stretches than the layers', since differences are taken."""
    return statistics.median(cold.seconds(work, 2 * stretch_s))


def _chain(layers: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *(nn.Linear(4, 4) for _ in range(layers)))


class _FillingClock(Clock):
    """Fills the caches after each layer."""

    def __init__(self, device: torch.device, cold: Cold) -> None:
        super().__init__(device)
        self.cold = cold

    def stretch(self, expected_s: Mapping[str, float], phase: str) -> "_Filling":
        return _Filling(self, expected_s, phase)


class _Filling(Computing):
    _clock: _FillingClock

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        super().__exit__(kind, *others)
        self._clock.cold.fill()


def _training(layers: int, device: torch.device, cold: Cold) -> Callable[[], object]:
    """Return a step of a training loop, on one of two devices that have half of each layer's outputs.

    It does what `convoy.train.loop` does for each batch: copy images, normalise them, and read the loss, on a CPU at once.
    Each layer leaves the caches cold.
    """
    images = torch.zeros(1024 * BATCH, 4, 1, 1, dtype=torch.uint8)
    labels = torch.zeros(len(images), dtype=torch.int64)
    mean, deviation = (torch.full((4, 1, 1), 0.5) for _ in range(2))
    model, example = _chain(layers), torch.zeros(1, 4, 1, 1)
    plan = named_plan("model", trace(model, example).graph, BATCH, Speeds((1.0, 1.0)))
    part = Distributed(model, plan, _Silent(0, 2, device, 1.0), example)
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


@contextmanager
def _chain_piece(kind: str, device: torch.device) -> Iterator[Piece]:
    """One layer of the chain."""
    model = _chain(1).to(device)
    traced = trace(model, torch.zeros(1, 4, 1, 1, device=device))
    layer = [layer for layer in traced.graph.layers.values() if layer.kind == kind][-1]
    size = whole_size(layer, BATCH)
    with torch.no_grad(), piece(model, traced, layer, size, (False,), backward=kind != "flatten") as part:
        yield part


def _layer_s(kind: str, clock: Clock, now: Now, stretch_s: float) -> float:
    """The arithmetic of one layer of the chain, forward and backward."""
    with _chain_piece(kind, clock.device) as part:
        return sampled(part, clock, now, stretch_s).times(steady=True).both_s


def _queue_s(clock: Clock) -> float:
    """Seconds of the host to queue a layer's forward; autograd takes about as long for its backward."""
    with _chain_piece("linear", clock.device) as part:
        rounds = [
            queued_seconds(clock.device, QUEUED, lambda: part.run.forward(part.inputs, part.samples, True, part.wants))[
                1
            ]
            for _ in range(5)
        ]
    return statistics.median(rounds) / QUEUED


def _optimizer(tensors: int, device: torch.device) -> Callable[[], object]:
    parameters = [nn.Parameter(torch.zeros(2, device=device)) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9).step


class _Silent(Group):
    """A group whose messages are there at once: what is left of a round is the executor's own."""

    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int = 0) -> Pending:
        self._admit(sends, receives, lane)
        return Arrived()

    def agree(self, topic: str, text: str) -> tuple[str, ...]:  # noqa: ARG002
        return (text,) * self.devices

    def close(self, error: BaseException | None = None) -> None:
        pass


def _round(peers: int, device: torch.device) -> Callable[[], object]:
    """A round in which every device sends its sample to every other one."""
    devices = peers + 1
    src, dst, shape = Split(0, (1,) * devices), everywhere(devices), (devices, 2)
    move = Move(0, "forward", Value("x", shape, src), Value("y", shape, dst), "ring")
    group, x = _Silent(0, devices, device, 1.0), torch.zeros(1, 2, device=device)
    return lambda: run_move(group, move.schedule, x, src, dst, shape)


def _copy(device: torch.device) -> Callable[[], object]:
    x_NCF = torch.zeros(16, 2, COPIED_BYTES // 64, device=device)
    return lambda: x_NCF.narrow(1, 0, 1).contiguous()


def _fresh_s_per_byte(device: torch.device, cold: Cold, stretch_s: float) -> float:
    """What zeros in new memory take longer than zeros written to a tensor that is there."""
    count = FRESH_BYTES // 4 + 4096
    x = torch.zeros(count, device=device)
    new_s, old_s = (_median(work, cold, stretch_s) for work in (lambda: x.new_zeros(count), x.zero_))
    return max(0.0, new_s - old_s) / (4 * count)


def loss_shapes(graph: Graph, batch: int) -> list[tuple[int, ...]]:
    """Shapes of the outputs that have values for each sample, of as many samples as a loss is timed of."""
    each = [graph[name].shape for name in graph.outputs if graph[name].batched and graph[name].shape]
    samples = max(1, min(batch, LOSS_ENTRIES // max(1, sum(map(math.prod, each)))))
    return [(samples, *shape) for shape in each]


def _loss_s_per_byte(shapes: Sequence[Sequence[int]], device: torch.device, cold: Cold, stretch_s: float) -> float:
    """What a cross-entropy over the second axis takes longer, forward and backward, than the one in `step_s`."""
    size = sum(map(math.prod, shapes)) - BATCH * 2
    if size <= 0:
        return 0.0
    least_s = _median(_loss((BATCH, 2), device), cold, stretch_s)
    seconds = sum(_median(_loss(shape, device), cold, stretch_s) - least_s for shape in shapes)
    return max(0.0, seconds) / (4 * size)


def _loss(shape: Sequence[int], device: torch.device) -> Callable[[], object]:
    x = torch.zeros(tuple(shape), device=device, requires_grad=True)
    y = torch.zeros(shape[0], *shape[2:], dtype=torch.int64, device=device)

    def work() -> None:
        F.cross_entropy(x, y).backward()  # type: ignore[no-untyped-call]
        x.grad = None

    return work


def _add(device: torch.device) -> Callable[[], object]:
    a, b = (torch.zeros(COPIED_BYTES // 4, device=device) for _ in range(2))
    return lambda: a.add_(b)
