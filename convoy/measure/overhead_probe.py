"""Measures the costs of a training step in addition to its layers.

- Overheads: the executor, copies, additions, the optimizer, the loss. One device runs whole steps of networks with tiny layers,
  and the layers' seconds are subtracted. Copies and additions call the same torch functions as the executor. The caches are
  cold, because a step does each of these once, between layers. On an accelerator, the seconds of tiny layers are those of its
  host, which queues them. The host runs ahead of the device, so the simulator takes the longer of both.
- Synchronisation. A link is measured at rest. In a step both ends compute before they exchange: the earlier one waits for the
  later one, and the calls find cold caches. So the devices compute tasks of equal length, first alone, then with an exchange
  after each. Jitter is the extra time of such an exchange over one at rest. The call factor is the ratio of their processor
  times. It is measured with one compute thread only: idle threads of OpenMP use processor time after each computation.
- The forward of a model that runs live: what it computes outside of the split submodules, which every device does.
"""

import math
import statistics
import time
import timeit
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.comm.control_messages import gather
from convoy.comm.group import Arrived, Group, Message, Pending
from convoy.layout.layout import Split, everywhere
from convoy.machine.accelerator import bring, to_device
from convoy.measure.device_info import quota_cores
from convoy.measure.layer_timer import LayerTimer, workload
from convoy.measure.link_probe import WireTimes
from convoy.measure.timing import (
    CORE_BYTES,
    PROCESSOR_BYTES,
    ROUNDS,
    SLICE_S,
    ColdCaches,
    Now,
    RoundTimer,
    device_now,
    plain_torch,
    typical,
)
from convoy.model.graph import Graph
from convoy.model.nested import arguments_of, map_tensors, tensors_of
from convoy.model.tracing import samples_in, trace, without_hooks
from convoy.plan.device_program import whole_size
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.steps import Move, Value
from convoy.runtime.clock import Clock
from convoy.runtime.exchange import StartedMove
from convoy.runtime.module import Distributed
from convoy.runtime.precision import dtype_named
from convoy.simulate.costs import FRESH_BYTES, Overheads

LAYERS, TENSORS, PEERS = (1, 9), (1, 33), (1, 5)
"""Numbers of layers, parameters and peers in two timed cases. Their difference gives the cost of one more."""

COPIED_BYTES = 4 << 20
"""Bytes of a timed copy: more than a core's cache, but too few for the allocator to request new pages each time."""

BATCH, UPDATED, ACCELERATOR_UPDATED = 2, 1 << 20, 1 << 24
"""Samples, and entries of a timed optimizer step. On an accelerator they take the device longer than its host."""

LOSS_ENTRIES = 1 << 22  # the most output entries that a loss is timed on; at least one sample


@plain_torch(torch.float32)
def measure_overheads(
    device: torch.device,
    now: Now,
    slice_s: float,
    message_s: float = 0.0,
    share: float = 1.0,
    outputs: Sequence[Sequence[int]] = (),
) -> tuple[Overheads, float]:
    """Return all overheads except messages, and the optimizer's seconds per parameter entry (SGD with momentum).

    Args:
        message_s: processor seconds of this device for one small message, divided by `share`.
        share: this device's share of a processor. A measured latency already contains one message's processor time at
            full speed (its devices mostly wait, so no quota limits them); a round's time excludes it.
        outputs: shapes of the model's outputs that the loss reads, samples first.
    """
    timer = RoundTimer(Clock(device), now, slice_s)
    core, processor = (ColdCaches(device, now, each) for each in (CORE_BYTES, PROCESSOR_BYTES))

    def seconds(work: Callable[[], object], cold: ColdCaches = processor) -> float:
        # Slices are longer than for layers, because differences are taken.
        return statistics.median(cold.seconds(work, 2 * slice_s))

    def line(counts: tuple[int, int], build: Callable[[int], Callable[[], object]]) -> tuple[float, float]:
        """Return the seconds of one more item, and of none (extrapolated)."""
        few_s, many_s = (seconds(build(count), core) for count in counts)
        each_s = (many_s - few_s) / (counts[1] - counts[0])
        return each_s, few_s - counts[0] * each_s

    tensor_s, update_none_s = line(TENSORS, lambda count: _optimizer([2] * count, device))
    step_each_s, step_none_s = line(LAYERS, lambda count: _training(count, device, core))
    peer_s, round_s = line(PEERS, lambda count: _round(count, device))
    layer_s = queue_s = 0.0
    if device.type == "cpu":
        flatten_s, linear_s = (_layer_s(kind, timer) for kind in ("flatten", "linear"))
        # Each Linear has a round before it, one after it, and two parameters.
        layer_s = max(0.0, step_each_s - linear_s - 2 * (round_s + peer_s) - 2 * tensor_s)
        step_none_s -= flatten_s + layer_s
    else:
        queue_s = max(0.0, step_each_s - 3 * tensor_s) / 6  # three layers and parameters, forward and backward
    each_message_s = message_s + max(0.0, peer_s) / 2  # each peer is sent a message and sends one
    x, y = (torch.zeros(COPIED_BYTES // 4, device=device) for _ in range(2))
    x_NCF = torch.zeros(16, 2, COPIED_BYTES // 64, device=device)
    large = torch.zeros(FRESH_BYTES // 4 + 4096, device=device)
    fresh_s = seconds(lambda: large.new_zeros(len(large))) - seconds(large.zero_)
    # Only the difference to the small loss that `step_s` already contains.
    loss_bytes, loss_s = 4 * (sum(map(math.prod, outputs)) - 2 * BATCH), 0.0
    if loss_bytes > 0:
        least_s = seconds(_loss((BATCH, 2), device))
        loss_s = max(0.0, sum(seconds(_loss(shape, device)) - least_s for shape in outputs)) / loss_bytes
    found = Overheads(
        step_s=max(0.0, step_none_s),
        layer_s=layer_s,
        round_s=max(0.0, round_s + each_message_s - message_s * share),
        message_s=each_message_s,
        copy_s_per_byte=seconds(lambda: x_NCF.narrow(1, 0, 1).contiguous()) / COPIED_BYTES,
        add_s_per_byte=seconds(lambda: x.add_(y)) / COPIED_BYTES,
        fresh_s_per_byte=max(0.0, fresh_s) / (4 * len(large)),
        update_s_per_tensor=max(0.0, tensor_s),
        loss_s_per_byte=loss_s,
        queue_s=queue_s,
    )
    updated = UPDATED if device.type == "cpu" else ACCELERATOR_UPDATED
    # `step_s` and `update_s_per_tensor` contain the seconds of the call.
    update_s = max(0.0, seconds(_optimizer([updated], device)) - update_none_s - tensor_s)
    return found, update_s / updated


@plain_torch()
def measure_live(overheads: Overheads, layers: LayerTimer) -> Overheads:
    """Return the overheads with those of a live model: what it computes outside of its split submodules.

    The example is repeated to the batch. So are the results of the submodules, which compute only once.
    """
    if not layers.traced.live:
        return overheads
    device, dtype = layers.timer.clock.device, dtype_named(layers.precision)
    local = to_device(without_hooks(layers.model, True), device)
    optimizer = torch.optim.SGD(local.parameters(), lr=0.0, momentum=0.9)
    results, given = dict[str, tuple[int, Any]](), list[Tensor]()

    def split(path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensors = tensors_of([args, kwargs])
        if path not in results:
            made = map_tensors(forward(*args, **kwargs), lambda t: t.detach().requires_grad_(t.requires_grad))
            results[path] = len(tensors[0]), made
        given.extend(t for t in tensors if t.requires_grad)  # backward continues there
        rows, made = results[path]
        return _repeated(made, rows, len(tensors[0]) // rows)

    for module, part in ((local.get_submodule(part.path), part) for part in layers.traced.live):
        module.forward = partial(split, part.path, module.forward)

    def work() -> None:
        optimizer.zero_grad()
        torch.manual_seed(0)  # random sizes must be those of the results
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            result = local(*args, **kwargs)
        roots = [t.square().mean() for t in tensors_of(result) if t.requires_grad] + given
        torch.autograd.backward(roots, [torch.zeros_like(t) for t in roots])
        optimizer.step()
        given.clear()

    args, kwargs = map_tensors(arguments_of(layers.traced.example), lambda t: t.to(device))
    work()
    values = [*args, *kwargs.values()]
    samples, lists = max(1, samples_in(values)), isinstance(values[0], list | tuple)
    repeat = partial(_repeated, rows=samples, times=max(1, layers.batch // samples), lists=lists)
    args, kwargs = [*map(repeat, args)], {key: repeat(value) for key, value in kwargs.items()}
    each_s = timeit.repeat(work, timer=layers.timer.now, repeat=1 + ROUNDS, number=1)[1:]
    seconds = typical(each_s) / max(1, samples_in([*args, *kwargs.values()]))
    sent = [p.nbytes for p in local.parameters() if p.grad is not None]
    return replace(overheads, live_s_per_sample=seconds, live_bytes=sum(sent))


def _repeated(value: Any, rows: int, times: int, lists: bool = False) -> Any:
    """Repeat the samples of a batch: the entries of lists, or the rows of tensors."""
    if lists and isinstance(value, list | tuple) and len(value) == rows:
        return value * times
    return map_tensors(value, lambda t: torch.cat([t] * times) if t.shape[:1] == (rows,) else t.clone())


def loss_shapes(graph: Graph, batch: int) -> list[tuple[int, ...]]:
    """Return the shapes of batched outputs, for as many samples as fit into `LOSS_ENTRIES` entries."""
    each = [graph[name].shape for name in graph.outputs if graph[name].batched and graph[name].shape]
    samples = max(1, min(batch, LOSS_ENTRIES // max(1, sum(map(math.prod, each)))))
    return [(samples, *shape) for shape in each]


def _optimizer(sizes: Sequence[int], device: torch.device) -> Callable[[], object]:
    """Return a function that runs an optimizer step, over parameters with these numbers of entries."""
    parameters = [nn.Parameter(torch.zeros(size, device=device)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9).step


def _loss(shape: Sequence[int], device: torch.device) -> Callable[[], object]:
    """Return a function that runs cross-entropy over the second axis, forward and backward."""
    x = torch.zeros(tuple(shape), device=device, requires_grad=True)
    y = torch.zeros(shape[0], *shape[2:], dtype=torch.int64, device=device)

    def work() -> None:
        F.cross_entropy(x, y).backward()  # type: ignore[no-untyped-call]
        x.grad = None

    return work


def _chain(layers: int, device: torch.device) -> nn.Module:
    if device.type == "cpu":
        return nn.Sequential(nn.Flatten(), *(nn.Linear(4, 4) for _ in range(layers)))
    # A host takes longer to queue a convolution or a batch norm than a Linear.
    units = ((nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(layers))
    return nn.Sequential(*(layer for unit in units for layer in unit), nn.Flatten())


class _FillingClock(Clock):
    """A clock that fills the caches after each segment of layers."""

    def __init__(self, device: torch.device, cold: ColdCaches) -> None:
        super().__init__(device)
        self.cold = cold

    def add(self, elapsed_s: float, expected_s: Mapping[str, float], phase: str) -> None:
        super().add(elapsed_s, expected_s, phase)
        self.cold.fill()


def _training(layers: int, device: torch.device, cold: ColdCaches) -> Callable[[], object]:
    """Return a step of `convoy.train.loop` on a CPU, one of two devices with half of every layer's outputs each.

    It copies images, normalises them, and reads the loss (on a CPU immediately). Each layer leaves the caches cold. An
    accelerator has the whole model in one segment.
    """
    images = torch.zeros(1024 * BATCH, 4, 1, 1, dtype=torch.uint8)
    labels = torch.zeros(len(images), dtype=torch.int64)
    mean, deviation = (torch.full((4, 1, 1), 0.5) for _ in range(2))
    model, example = _chain(layers, device), torch.zeros(1, 4, 1, 1)
    name, devices = ("model", 2) if device.type == "cpu" else ("data", 1)
    plan = named_plan(name, trace(model, example).graph, BATCH, Speeds((1.0,) * devices))
    part = Distributed(model, plan, _SilentGroup(0, devices, device, 1.0), example)
    if device.type == "cpu":
        part.use_clock(_FillingClock(device, cold))
    optimizer = torch.optim.SGD(part.parameters(), lr=0.0, momentum=0.9)

    def step() -> None:
        rows = torch.randint(len(images), (BATCH,))
        x = bring(images[rows].float().div_(255).sub_(mean).div_(deviation), device)
        loss = F.cross_entropy(part(x, whole=True), bring(labels[rows], device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if device.type == "cpu":  # a step does not wait for an accelerator
            loss.item()

    return step


class _SilentGroup(Group):
    """A group that sends nothing, so that only the executor's work in a communication round is timed."""

    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int = 0) -> Pending:
        self._admit(sends, receives, lane)
        return Arrived()

    def agree(self, topic: str, text: str) -> tuple[str, ...]:  # noqa: ARG002
        return (text,) * self.devices

    def close(self, error: BaseException | None = None) -> None:
        pass


def _round(peers: int, device: torch.device) -> Callable[[], object]:
    """Return a function that runs a round in which every device sends its sample to every other one."""
    devices = peers + 1
    src, dst, shape = Split(0, (1,) * devices), everywhere(devices), (devices, 2)
    move = Move(0, "forward", Value("x", shape, src), Value("y", shape, dst), "ring")
    group, x = _SilentGroup(0, devices, device, 1.0), torch.zeros(1, 2, device=device)
    return lambda: StartedMove(group, move.schedule, x, src, dst, shape).land()


def _layer_s(kind: str, timer: RoundTimer) -> float:
    """Return the forward + backward seconds of the last layer of this kind in a chain."""
    model = _chain(1, timer.clock.device)
    traced = trace(model, torch.zeros(1, 4, 1, 1))
    layer = [layer for layer in traced.graph.layers.values() if layer.kind == kind][-1]
    size = whole_size(layer, BATCH)
    with torch.no_grad(), workload(model, traced, layer, size, (False,), backward=kind != "flatten") as work:
        return timer.time(work).times(steady=True).both_s


TASK_SLICES = 2  # length of a task: 40 ms by default, about as long as a layer of the benchmark nets
BLOCKS, TASKS, CALIBRATIONS = 12, 5, 2
SIDE = 96  # of the multiplied matrices; small, so that the number of products sets a task's length accurately
MESSAGE_BYTES = 256


@dataclass(frozen=True, slots=True)
class Quota:
    """A device's share of one processor, and whether a CPU quota limits it."""

    share: float = 1.0
    limited: bool = False

    def clock(self, slowdown: float) -> Now | None:
        """Return the clock for timing layers: processor time divided by the share. None: the wall clock.

        By chance, a short call contains a whole pause of the quota or none; its processor time is steady. Processor time is
        wrong for several threads (it adds them up) and for a slow-down that sleeps (it leaves it out).
        """
        if not self.limited or torch.get_num_threads() > 1 or slowdown > 1:
            return None
        return lambda: time.process_time() / self.share

    def contention(self, wall_s: float, processor_s: float, others: float) -> float:
        """Return the slowdown of layers when all devices of a machine compute at once; at least 1.

        `others` is the factor by which other programs slowed the timed rounds.
        """
        return max(1.0, self.share * wall_s / processor_s / others) if processor_s > 0 else 1.0


def find_quota(group: Group) -> Quota | None:
    """Return the quota of this device; None if no device of the job has one. All devices call it."""
    cores = quota_cores() if group.torch_device.type == "cpu" else None
    if not any(gather(group, "CPU quotas", cores is not None)):
        return None
    return Quota(min(1.0, cores or 1.0), cores is not None)


class SyncOverhead(NamedTuple):
    """The synchronisation costs of each device.

    Attributes:
        jitter_s: seconds by which the device delays an exchange.
        overheads: the overheads, with round and message times scaled to exchanges that follow computation.
    """

    jitter_s: tuple[float, ...]
    overheads: tuple[Overheads, ...]


Blocks = defaultdict[str, list[float]]
"""One device's measurements, one value per block. Seconds of a task ("alone"), of a task and its exchange ("together"), of each
task before an exchange ("tasks"); processor seconds of an exchange after computing ("calls") and at rest ("rest_calls")."""


@plain_torch(torch.float32)
def measure_sync(
    group: Group, clock: Clock, wire: WireTimes, overheads: Sequence[Overheads], slice_s: float = SLICE_S
) -> SyncOverhead:
    """Measure the cost of synchronisation. All devices call it and get the same value.

    Args:
        clock: this device's clock, whose slowdown also slows the tasks.
        overheads: each device's overheads at rest.

    Raises:
        DeviceLostError: a device did not answer within the group's time limit.
    """
    if group.devices == 1:
        return SyncOverhead((0.0,), tuple(overheads))
    now, found = device_now(group.torch_device), Blocks(list)
    task = _task(group, clock, now, slice_s)
    for block in range(BLOCKS):
        _time_block(group, found, task, now, block)
    latency_s = max((link.latency_s for link in wire.pairs), default=0.0)
    return sync_overhead(gather(group, "synchronisation", found), latency_s, overheads)


def sync_overhead(
    devices: Sequence[Mapping[str, list[float]]], latency_s: float, overheads: Sequence[Overheads]
) -> SyncOverhead:
    """Compute the synchronisation costs of all devices from their measured blocks.

    The delay of an exchange is charged to the device whose task times vary most, and less to others in proportion: steady
    devices exchange in time, and a device that is often interrupted delays the others.
    """
    costs = []
    for own, each in zip(overheads, devices, strict=True):
        rest_s = statistics.median(each.get("rest_calls", [0.0]))
        factor = max(1.0, statistics.median(each["calls"]) / rest_s) if rest_s > 0 else 1.0
        costs.append(replace(own, round_s=own.round_s * factor, message_s=own.message_s * factor))
    exchange_s = max(each.calls_s(2 * (len(costs) - 1)) for each in costs) + latency_s  # as simulated
    together_s = typical([max(block) for block in zip(*(each["together"] for each in devices), strict=True)])
    late_s = together_s - max(typical(each["alone"]) for each in devices) - exchange_s
    deviations_s = [statistics.pstdev(each["tasks"]) for each in devices]
    most_s = max(deviations_s)
    jitter_s = (late_s * each / most_s if late_s > 0 and most_s > 0 else 0.0 for each in deviations_s)
    return SyncOverhead(tuple(jitter_s), tuple(costs))


def _mean_s(now: Now, work: Callable[[], object], count: int) -> float:
    start_s = now()
    for _ in range(count):
        work()
    return (now() - start_s) / count


def _time_block(group: Group, found: Blocks, task: Callable[[], None], now: Now, block: int) -> None:
    others = [peer for peer in range(group.devices) if peer != group.device]
    out = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=group.torch_device)
    sends, receives = [Message(d, out) for d in others], [Message(d, torch.zeros_like(out)) for d in others]
    computed_s = 0.0

    def task_and_exchange() -> None:
        nonlocal computed_s
        begin_s, processor_s = now(), time.thread_time()
        task()
        computed_s += time.thread_time() - processor_s
        found["tasks"].append(now() - begin_s)
        group.exchange(sends, receives)

    group.agree(f"tasks {block}", "")
    found["alone"].append(_mean_s(now, task, TASKS))
    group.agree(f"tasks with exchanges {block}", "")
    processor_s = time.process_time()
    found["together"].append(_mean_s(now, task_and_exchange, TASKS))
    calls_s = (time.process_time() - processor_s - computed_s) / TASKS
    group.agree(f"exchanges {block}", "")
    rest_s = _mean_s(time.process_time, lambda: group.exchange(sends, receives), TASKS)
    if group.torch_device.type == "cpu" and torch.get_num_threads() == 1:
        found["calls"].append(calls_s)
        found["rest_calls"].append(rest_s)


def _task(group: Group, clock: Clock, now: Now, slice_s: float) -> Callable[[], None]:
    """Return a function that computes for about `TASK_SLICES` slices, calibrated while all devices compute."""
    a = torch.ones(SIDE, SIDE, device=group.torch_device)
    out, count, tasks = torch.empty_like(a), 10, 1

    def products() -> None:
        with clock.compute("jitter", "measure"):
            for _ in range(count):
                torch.mm(a, a, out=out)

    products()  # allocates, and chooses kernels
    # A device under a quota shows its mean speed only after a while, and unequal tasks would hide how devices vary.
    for attempt in range(1 + CALIBRATIONS):
        group.agree(f"length of a task, attempt {attempt}", "")
        count = max(1, round(count * TASK_SLICES * slice_s / max(_mean_s(now, products, tasks), 1e-9)))
        tasks = 4 * TASKS
    return products
