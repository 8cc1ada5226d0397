"""Measures what synchronisation costs devices that compute, and the noise model of devices under a CPU quota.

A link is measured at rest. In a step both ends compute before they exchange: the earlier one waits for the later one, and the
calls find cold caches. So the devices compute tasks of equal length, first alone, then with an exchange after each. What an
exchange takes beyond its price is jitter. Its processor time divided by that of an exchange at rest is the call factor.

Emulated hosts and containers with a CPU limit also get a noise model (`convoy.simulate.noise`). Elsewhere there is none.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace

import torch

from convoy.comm.collectives import gather
from convoy.comm.group import Group, Message
from convoy.measure.link_probe import WireTimes
from convoy.measure.other_load import quota_cores
from convoy.measure.timing import SLICE_S, Now, device_now, plain_torch, typical
from convoy.runtime.clock import Clock
from convoy.runtime.gradients import SUM_LANE
from convoy.simulate.costs import Overheads
from convoy.simulate.network import SHARE
from convoy.simulate.noise import QuotaNoise

TASK_SLICES = 2
"""Length of a task: 40 ms with the usual slice, about as long as a layer of the benchmark nets."""

BLOCKS, TASKS, CALIBRATIONS, RESTED_TASKS, RINGS = 12, 5, 2, 2, 4
SIDE = 96
"""Side of the multiplied matrices: small, so that a task ends soon after its time."""

MESSAGE_BYTES = 256

RING_S, RING_BYTES = 0.01, 1 << 20
"""A round in a ring has the bytes of this many seconds of the slowest NIC, and at most this many."""


@dataclass(frozen=True, slots=True)
class Quota:
    """The CPU quota of this device: its share of one processor, and whether it computes in its bursts."""

    share: float
    limited: bool

    def clock(self, slowdown: float) -> Now | None:
        """Return the clock that layers are timed by: processor time over the share. None: the wall clock.

        A short call meets a whole pause of a quota or none, by chance; its processor time is steady. That of several threads
        would be their sum, and a slow-down that sleeps is not in it.
        """
        if not self.limited or torch.get_num_threads() > 1 or slowdown > 1:
            return None
        return lambda: time.process_time() / self.share

    def contention(self, wall_s: float, processor_s: float, others: float) -> float:
        """Return the factor by which layers take longer because all devices of a machine compute at once; at least 1.

        Args:
            wall_s, processor_s: of all timed rounds together.
            others: the factor by which other programs slowed this device.
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
        calls_s, rest_calls_s: of this process's processor for an exchange, after computing and at rest.
        rested_s: of a task after a rest; only with a quota, as the following.
        ring_s, overlapped_ring_s: of a round in a ring, at rest and while all devices compute.
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
        """Processor time of an exchange after computing over that of one at rest, at least 1."""
        rest_s = statistics.median(self.rest_calls_s) if self.rest_calls_s else 0.0
        return max(1.0, statistics.median(self.calls_s) / rest_s) if rest_s > 0 else 1.0


@dataclass(frozen=True, slots=True)
class SyncOverhead:
    """What synchronisation costs each device.

    Attributes:
        jitter_s: seconds by which it delays an exchange beyond its price.
        overheads: with the calls of exchanges as they are after computing.
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
    """Measure what synchronisation costs. All devices call it and get the same value.

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
    """Return what follows from the seconds of all devices."""
    costs = [
        replace(own, round_s=own.round_s * each.call_factor, message_s=own.message_s * each.call_factor)
        for own, each in zip(overheads, devices, strict=True)
    ]
    # The prices of both exchanges as the simulator has them. A device that computes moves bytes with half of its processor.
    calls_s = max(each.calls_s(2 * (len(costs) - 1)) for each in costs)
    exchange_s = calls_s + max((link.latency_s for link in wire.pairs), default=0.0)
    moving_s = max(ring_bytes * (each.send_s_per_byte + each.receive_s_per_byte) / SHARE for each in wire.traffic)
    ring_s = max(each.round_s + each.message_s for each in costs) + max(moving_s, ring_bytes / _slowest_nic(wire))

    alone_s = max(typical(each.alone_s) for each in devices)
    jitter_s = _charged(_slowest([each.together_s for each in devices]) - alone_s - exchange_s, devices)
    delays_s = (0.0,) * len(devices)
    if all(each.ring_s for each in devices):
        ring_s = max(ring_s, _slowest([each.ring_s for each in devices]))
        delays_s = _charged(_slowest([each.overlapped_ring_s for each in devices]) - ring_s, devices)
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
    """Return the typical seconds of the slowest device in each block."""
    return typical([max(block) for block in zip(*blocks_s, strict=True)])


def _charged(late_s: float, devices: Sequence[Blocks]) -> tuple[float, ...]:
    """Return the delay charged to each device: all of it to the one whose tasks vary most, to others in proportion.

    Of two steady devices and one that is often interrupted, the steady ones exchange in time.
    """
    deviations_s = [statistics.pstdev(each.own_s) for each in devices]
    most_s = max(deviations_s)
    return tuple(late_s * each / most_s if late_s > 0 and most_s > 0 else 0.0 for each in deviations_s)


def _time_block(group: Group, found: Blocks, task: Callable[[], None], now: Now, block: int) -> None:
    others = [peer for peer in range(group.devices) if peer != group.device]
    out = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=group.torch_device)
    sends, receives = [Message(d, out) for d in others], [Message(d, torch.zeros_like(out)) for d in others]
    # Where one thread computes, its own time leaves out the threads that move messages.
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
        # On a thread of their own, as gradient sums. Every wait in it has the group's time limit.
        with ThreadPoolExecutor(1, thread_name_prefix="convoy-rings") as pool:
            future = pool.submit(rounds_s)
            while computes and not future.done():
                task()
            rings_s.append(future.result())


def _task(group: Group, clock: Clock, now: Now, slice_s: float) -> Callable[[], None]:
    """Return a computation of about `TASK_SLICES`, measured while all devices compute."""
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
    # A device under a quota needs a while to show its speed, and a longer task than the others' would hide how those vary.
    for attempt in range(CALIBRATIONS):
        group.agree(f"length of a task, attempt {attempt}", "")
        start_s = now()
        for _ in range(4 * TASKS):
            products(count)
        count = max(1, round(count * 4 * TASKS * TASK_SLICES * slice_s / max(now() - start_s, 1e-9)))
    return lambda: products(count)
