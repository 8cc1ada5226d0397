"""Measures what a training step costs a device in addition to its layers.

- Overheads: the executor, copies, additions, the optimizer, the loss. A whole step runs on one device, over nets whose layers
  compute almost nothing, and the seconds of the layers are subtracted. Copies and additions are timed through torch's own
  functions, as the executor calls them. The caches are cold, because a step does each of these once, between layers.
- Synchronisation. A link is measured at rest. In a step both ends compute before they exchange: the earlier one waits for the
  later one, and the calls find cold caches. So the devices compute tasks of equal length, first alone, then with an exchange
  after each. Jitter is the time of such an exchange beyond its cost at rest. The call factor is its processor time divided
  by that of an exchange at rest.
- The noise model of devices under a CPU quota (`convoy.simulate.noise`): emulated hosts, and containers with a CPU limit.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import nn

from convoy.comm.control_messages import gather
from convoy.comm.group import Arrived, Group, Message, Pending
from convoy.layout.layout import Split, everywhere
from convoy.measure.layer_timer import workload
from convoy.measure.link_probe import WireTimes
from convoy.measure.other_load import quota_cores
from convoy.measure.timing import (
    CORE_BYTES,
    PROCESSOR_BYTES,
    SLICE_S,
    ColdCaches,
    Now,
    RoundTimer,
    Workload,
    device_now,
    plain_torch,
    queued_seconds,
    typical,
)
from convoy.model.graph import Graph
from convoy.model.tracing import trace
from convoy.plan.device_program import whole_size
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.steps import Move, Value
from convoy.runtime.clock import Clock, Computing
from convoy.runtime.exchange import StartedMove
from convoy.runtime.gradients import SUM_LANE
from convoy.runtime.module import Distributed
from convoy.simulate.costs import FRESH_BYTES, Overheads
from convoy.simulate.network import SHARE
from convoy.simulate.noise import QuotaNoise

LAYERS, TENSORS, PEERS = (1, 9), (1, 33), (1, 5)
"""Numbers of Linear layers, parameters and peers in two timed cases. Their difference gives the cost of one more."""

COPIED_BYTES = 4 << 20
"""More than a core's cache, and less than the size from which the system provides new memory each time."""

BATCH, QUEUED, UPDATED = 2, 100, 1 << 20

LOSS_ENTRIES = 1 << 22
"""The most output entries that a loss is timed on; at least one sample."""


@plain_torch(torch.float32)
def measure_overheads(
    device: torch.device,
    now: Now,
    slice_s: float,
    message_s: float = 0.0,
    share: float = 1.0,
    outputs: Sequence[Sequence[int]] = (),
) -> Overheads:
    """Time all overheads except messages. Takes a few seconds with the default slice.

    Args:
        message_s: seconds of this device's processor for one small message, at its share of a processor.
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
    # Only the difference to the small loss that `step_s` already contains.
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
def time_update(device: torch.device, now: Now, slice_s: float) -> float:
    """Return the seconds per parameter entry of SGD with momentum."""
    optimizer = _optimizer([UPDATED], device)
    optimizer.step()  # makes the momentum
    return statistics.median(ColdCaches(device, now, PROCESSOR_BYTES).seconds(optimizer.step, slice_s)) / UPDATED


def loss_shapes(graph: Graph, batch: int) -> list[tuple[int, ...]]:
    """Return the shapes of batched outputs, with at most `LOSS_ENTRIES` entries."""
    each = [graph[name].shape for name in graph.outputs if graph[name].batched and graph[name].shape]
    samples = max(1, min(batch, LOSS_ENTRIES // max(1, sum(map(math.prod, each)))))
    return [(samples, *shape) for shape in each]


# --- timed work ----------------------------------------------------------------------------------------------------------


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

    def segment(self, expected_s: Mapping[str, float], phase: str) -> "_Filling":
        return _Filling(self, expected_s, phase)


class _Filling(Computing):
    _clock: _FillingClock

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        super().__exit__(kind, *others)
        self._clock.cold.fill()


def _training(layers: int, device: torch.device, cold: ColdCaches) -> Callable[[], object]:
    """Return a step of `convoy.train.loop` on one of two devices, each with half of every layer's outputs.

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
    """A group with messages that arrive immediately, to time only the executor's work of a round."""

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
    return lambda: StartedMove(group, move.schedule, x, src, dst, shape).land()


@contextmanager
def _chain_layer(kind: str, device: torch.device) -> Iterator[Workload]:
    """Yield the last layer of this kind in a chain."""
    model = _chain(1).to(device)
    traced = trace(model, torch.zeros(1, 4, 1, 1, device=device))
    layer = [layer for layer in traced.graph.layers.values() if layer.kind == kind][-1]
    size = whole_size(layer, BATCH)
    with torch.no_grad(), workload(model, traced, layer, size, (False,), backward=kind != "flatten") as work:
        yield work


def _layer_s(kind: str, timer: RoundTimer) -> float:
    with _chain_layer(kind, timer.clock.device) as work:
        times = timer.time(work).times(steady=True)
    return times.forward_s + times.backward_s


def _queue_s(device: torch.device) -> float:
    """Return the host's seconds to queue a layer's forward; autograd takes about as long for its backward."""
    with _chain_layer("linear", device) as work:
        return statistics.median(queued_seconds(device, QUEUED, work.forward)[1] for _ in range(5)) / QUEUED


# --- synchronisation and CPU quotas ------------------------------------------------------------------------------------


TASK_SLICES = 2  # 40 ms with the usual slice, about as long as a layer of the benchmark nets
BLOCKS, TASKS, CALIBRATIONS, RESTED_TASKS, RINGS = 12, 5, 2, 2, 4
SIDE = 96  # of the multiplied matrices: small, so that a task ends soon after its time
MESSAGE_BYTES = 256
RING_S, RING_BYTES = 0.01, 1 << 20  # bytes of a ring round: those of the slowest NIC in RING_S, at most RING_BYTES


@dataclass(frozen=True, slots=True)
class Quota:
    """The CPU quota of this device: its share of one processor, and whether a quota limits it."""

    share: float
    limited: bool

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


@dataclass(frozen=True, slots=True)
class Blocks:
    """The seconds that one device measured; one value per block, except `own_s`.

    Attributes:
        share, limited: see `Quota`.
        alone_s: of a task without exchanges.
        together_s: of a task and its exchange.
        own_s: of each task before an exchange.
        calls_s, rest_calls_s: processor seconds of an exchange, after computing and at rest.
        rested_s: of a task after a rest; only with a quota.
        ring_s, overlapped_ring_s: of a round in a ring, at rest and while all devices compute; only with a quota.
    """

    share: float = 1.0
    limited: bool = False
    alone_s: list[float] = field(default_factory=list)
    together_s: list[float] = field(default_factory=list)
    own_s: list[float] = field(default_factory=list)
    calls_s: list[float] = field(default_factory=list)
    rest_calls_s: list[float] = field(default_factory=list)
    rested_s: list[float] = field(default_factory=list)
    ring_s: list[float] = field(default_factory=list)
    overlapped_ring_s: list[float] = field(default_factory=list)

    @property
    def call_factor(self) -> float:
        """Processor time of an exchange after computing, divided by that at rest; at least 1."""
        rest_s = statistics.median(self.rest_calls_s) if self.rest_calls_s else 0.0
        return max(1.0, statistics.median(self.calls_s) / rest_s) if rest_s > 0 else 1.0


@dataclass(frozen=True, slots=True)
class SyncOverhead:
    """The synchronisation costs of each device.

    Attributes:
        jitter_s: seconds by which the device delays an exchange.
        overheads: overheads with the call times of exchanges after computing.
        noise: of a device under a quota; None for every other one.
    """

    jitter_s: tuple[float, ...]
    overheads: tuple[Overheads, ...]
    noise: tuple[QuotaNoise | None, ...]


@plain_torch(torch.float32)
def measure_sync(
    group: Group,
    clock: Clock,
    wire: WireTimes,
    overheads: Sequence[Overheads],
    slice_s: float = SLICE_S,
    quota: Quota | None = None,
) -> SyncOverhead:
    """Measure the cost of synchronisation. All devices call it and get the same value.

    Args:
        clock: of this device; its slow-down counts.
        overheads: of each device at rest.
        quota: with it, tasks after rests and rounds in a ring are timed too.

    Raises:
        DeviceLostError: a device did not answer within the group's time limit.
    """
    own = Blocks() if quota is None else Blocks(quota.share, quota.limited)
    now, ring_bytes = device_now(group.torch_device), int(min(RING_BYTES, RING_S * _slowest_nic(wire)))
    if group.devices == 1:
        return SyncOverhead((0.0,), tuple(overheads), (None,))
    task = _task(group, clock, now, slice_s)
    for block in range(BLOCKS):
        _time_block(group, own, task, now, block)
        if quota is not None:
            _time_noise(group, own, task, now, TASK_SLICES * slice_s, ring_bytes)
    rows = [Blocks(**row) for row in gather(group, "synchronisation", asdict(own))]
    return sync_overhead(rows, wire, overheads, ring_bytes)


def sync_overhead(
    devices: Sequence[Blocks], wire: WireTimes, overheads: Sequence[Overheads], ring_bytes: int
) -> SyncOverhead:
    """Compute the synchronisation costs from the times of all devices."""
    costs = [
        replace(own, round_s=own.round_s * each.call_factor, message_s=own.message_s * each.call_factor)
        for own, each in zip(overheads, devices, strict=True)
    ]
    # The simulator's costs of both exchanges. A device that computes moves bytes with half of its processor.
    calls_s = max(each.calls_s(2 * (len(costs) - 1)) for each in costs)
    exchange_s = calls_s + max((link.latency_s for link in wire.pairs), default=0.0)
    moving_s = max(ring_bytes * (each.send_s_per_byte + each.receive_s_per_byte) / SHARE for each in wire.traffic)
    ring_s = max(each.round_s + each.message_s for each in costs) + max(moving_s, ring_bytes / _slowest_nic(wire))

    alone_s = max(typical(each.alone_s) for each in devices)
    jitter_s = _delays(_slowest([each.together_s for each in devices]) - alone_s - exchange_s, devices)
    delays_s = (0.0,) * len(devices)
    if all(each.ring_s for each in devices):
        ring_s = max(ring_s, _slowest([each.ring_s for each in devices]))
        delays_s = _delays(_slowest([each.overlapped_ring_s for each in devices]) - ring_s, devices)
    noise = (
        QuotaNoise(delay_s, max(0.0, typical(each.alone_s) - typical(each.rested_s)), 1 / each.share)
        if each.limited
        else None
        for each, delay_s in zip(devices, delays_s, strict=True)
    )
    return SyncOverhead(jitter_s, tuple(costs), tuple(noise))


def _slowest_nic(wire: WireTimes) -> float:
    return min((min(nic.send_bytes_per_s, nic.receive_bytes_per_s) for nic in wire.nics), default=math.inf)


def _slowest(blocks_s: Sequence[Sequence[float]]) -> float:
    """Return the typical value, over blocks, of the slowest device's seconds."""
    return typical([max(block) for block in zip(*blocks_s, strict=True)])


def _delays(late_s: float, devices: Sequence[Blocks]) -> tuple[float, ...]:
    """Charge the delay to the device whose task times vary most, and less to others in proportion.

    Steady devices exchange in time; a device that is often interrupted delays the others.
    """
    deviations_s = [statistics.pstdev(each.own_s) for each in devices]
    most_s = max(deviations_s)
    return tuple(late_s * each / most_s if late_s > 0 and most_s > 0 else 0.0 for each in deviations_s)


def _time_block(group: Group, found: Blocks, task: Callable[[], None], now: Now, block: int) -> None:
    others = [peer for peer in range(group.devices) if peer != group.device]
    out = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=group.torch_device)
    sends, receives = [Message(d, out) for d in others], [Message(d, torch.zeros_like(out)) for d in others]
    # With one compute thread, thread time excludes the threads that move messages.
    computing = time.thread_time if torch.get_num_threads() == 1 else time.process_time
    group.agree(f"tasks {block}", "")
    start_s = now()
    for _ in range(TASKS):
        task()
    found.alone_s.append((now() - start_s) / TASKS)
    group.agree(f"tasks with exchanges {block}", "")
    computed_s, processor_s = 0.0, time.process_time()
    start_s = now()
    for _ in range(TASKS):
        begin_s, own_processor_s = now(), computing()
        task()
        computed_s += computing() - own_processor_s
        found.own_s.append(now() - begin_s)
        group.exchange(sends, receives)
    found.together_s.append((now() - start_s) / TASKS)
    found.calls_s.append((time.process_time() - processor_s - computed_s) / TASKS)
    group.agree(f"exchanges {block}", "")
    processor_s = time.process_time()
    for _ in range(TASKS):
        group.exchange(sends, receives)
    found.rest_calls_s.append((time.process_time() - processor_s) / TASKS)


def _time_noise(
    group: Group, found: Blocks, task: Callable[[], None], now: Now, rest_s: float, ring_bytes: int
) -> None:
    group.agree("tasks after rests", "")
    total_s = 0.0
    for _ in range(RESTED_TASKS):
        time.sleep(rest_s)
        start_s = now()
        task()
        total_s += now() - start_s
    found.rested_s.append(total_s / RESTED_TASKS)
    if group.lanes <= SUM_LANE:
        return
    out, into = (torch.zeros(max(1, ring_bytes), dtype=torch.uint8, device=group.torch_device) for _ in range(2))
    sends = [Message((group.device + 1) % group.devices, out)]
    receives = [Message((group.device - 1) % group.devices, into)]

    def rounds_s() -> float:
        start_s = time.perf_counter()
        for _ in range(RINGS):
            group.start(sends, receives, SUM_LANE).wait()
        return (time.perf_counter() - start_s) / RINGS

    for rings_s, computes in ((found.ring_s, False), (found.overlapped_ring_s, True)):
        group.agree("rounds in a ring", "")
        # In a separate thread, like gradient sums. Every wait in it has the group's time limit.
        with ThreadPoolExecutor(1, thread_name_prefix="convoy-rings") as pool:
            future = pool.submit(rounds_s)
            while computes and not future.done():
                task()
            rings_s.append(future.result())


def _task(group: Group, clock: Clock, now: Now, slice_s: float) -> Callable[[], None]:
    """Return a computation of about `TASK_SLICES` slices, calibrated while all devices compute."""
    a = torch.ones(SIDE, SIDE, device=group.torch_device)
    out = torch.empty_like(a)

    def products(count: int) -> None:
        with clock.compute("jitter", "measure"):
            for _ in range(count):
                torch.mm(a, a, out=out)

    products(1)  # allocates, and chooses kernels
    start_s = now()
    products(10)
    count = max(1, math.ceil(10 * TASK_SLICES * slice_s / max(now() - start_s, 1e-9)))
    # A device under a quota shows its mean speed only after a while, and unequal tasks would hide how devices vary.
    for attempt in range(CALIBRATIONS):
        group.agree(f"length of a task, attempt {attempt}", "")
        start_s = now()
        for _ in range(4 * TASKS):
            products(count)
        count = max(1, round(count * 4 * TASKS * TASK_SLICES * slice_s / max(now() - start_s, 1e-9)))
    return lambda: products(count)
