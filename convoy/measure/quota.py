"""Measures the noise model of devices under a CPU quota (`convoy.simulate.noise`).

Emulated hosts have such quotas, and so have containers with a CPU limit. Where no device has one, there is no probe: layers are
timed by the wall clock, and nothing here runs.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from convoy.comm.collectives import gather
from convoy.comm.group import Group, Message
from convoy.measure.load import NOTICED, quota_cores, read, slowed_by_others, use_since, wanted_cores
from convoy.measure.sync_overhead import PIECE_STRETCHES, SyncOverhead, charged
from convoy.measure.timing import Now, device_now, typical
from convoy.runtime.gradients import SUM_LANE
from convoy.simulate.noise import QuotaNoise

TRIES = 3
"""How often the share of a processor is measured at most while other programs disturb it."""

NEARLY = 0.1
"""A measured share this near to the described number of cores is taken to be that: measuring again then finds the same."""

RESTED_PIECES, RINGS = 2, 4
"""Pieces after a rest each, and rounds in a ring, of a block."""


@dataclass(frozen=True, slots=True)
class ProcessorClock:
    """A clock without the pauses of a quota: this process's processor time over its share of a processor."""

    share: float

    def __call__(self) -> float:
        return time.process_time() / self.share


@dataclass(slots=True)
class QuotaProbe:
    """Measures the noise model of a job in which at least one device has a CPU quota. Every device makes one.

    Attributes:
        limited: whether each device has a quota.
        share: of one processor that this device gets.
        slowed: how many times as long other programs made each device's work while the share was measured.
        rested_s: of a piece after a rest, in each block.
        ring_s, overlapped_ring_s: of a round in a ring in each block, at rest and while all devices compute.
    """

    group: Group
    limited: tuple[bool, ...]
    share: float
    slowed: tuple[float, ...]
    rested_s: list[float] = field(default_factory=list)
    ring_s: list[float] = field(default_factory=list)
    overlapped_ring_s: list[float] = field(default_factory=list)

    @classmethod
    def of(
        cls, group: Group, seconds: float, cores: float | None, tell: Callable[[str], object] = lambda _: None
    ) -> "QuotaProbe | None":
        """Return the probe of this job, or None where no device has a CPU quota. All devices call it.

        Args:
            seconds: of one attempt to measure the share of a processor.
            cores: the number of cores that the fleet file gives this device.
        """
        limited = gather(group, "CPU quotas", group.torch_device.type == "cpu" and quota_cores() is not None)
        if not any(limited):
            return None
        return cls(group, tuple(limited), *measure_share(group, seconds, tell, cores))

    def clock(self, slowdown: float) -> Now:
        """Return the clock that layers of this device are timed by.

        A device under a quota computes in slices of a few milliseconds: a short call meets a whole pause or none, by chance.
        Its processor time does not vary so. That of several threads would be their sum, and a slow-down that is slept is not
        in it: such devices are timed by the wall clock.
        """
        device = self.group.torch_device
        if not self.limited[self.group.device] or torch.get_num_threads() > 1 or slowdown > 1:
            return device_now(device)
        return ProcessorClock(self.share)

    def time_block(self, compute: Callable[[], None], now: Now, stretch_s: float, ring_bytes: int) -> None:
        """Time pieces after rests and rounds in a ring. All devices call it, after each block of `measure_sync_overhead`."""
        self.group.agree("pieces after rests", "")
        total_s = 0.0
        for _ in range(RESTED_PIECES):
            time.sleep(PIECE_STRETCHES * stretch_s)
            start_s = now()
            compute()
            total_s += now() - start_s
        self.rested_s.append(total_s / RESTED_PIECES)
        if self.group.lanes > SUM_LANE:
            turn = _ring(self.group, ring_bytes)
            for found, work in ((self.ring_s, None), (self.overlapped_ring_s, compute)):
                self.group.agree("rounds in a ring", "")
                found.append(rings_s(turn, work))

    def noise(self, sync: SyncOverhead, ring_s: float) -> tuple[QuotaNoise | None, ...]:
        """Return the noise model of every device. All devices call it.

        Args:
            ring_s: the predicted seconds of a round in a ring while all devices compute.
        """
        rows = gather(self.group, "noise", [self.share, self.rested_s, self.ring_s, self.overlapped_ring_s])
        delays_s: Sequence[float] = (0.0,) * len(rows)
        if all(row[2] for row in rows):
            at_rest_s, overlapped_s = (
                typical([max(block) for block in zip(*(row[column] for row in rows), strict=True)]) for column in (2, 3)
            )
            delays_s = charged(overlapped_s - max(at_rest_s, ring_s), sync.deviation_s)
        return tuple(
            QuotaNoise(delay_s, max(0.0, piece_s - typical(rested_s)) if rested_s else 0.0, 1 / share)
            if limited
            else None
            for limited, delay_s, piece_s, (share, rested_s, *_) in zip(
                self.limited, delays_s, sync.piece_s or (0.0,) * len(rows), rows, strict=True
            )
        )


def contention(now: Now, wall_s: float, processor_s: float, others: float) -> float:
    """Return how many times as long layers take because all devices of a machine compute at the same time; at least 1.

    Processor time is divided by the share that a device may have; while all devices compute it may get less.

    Args:
        now: the clock of the layers. The seconds of a wall clock hold the waiting already.
        wall_s, processor_s: of all timed rounds together.
        others: how many times as long other programs made the work meanwhile: that is not the device's own speed.
    """
    if not isinstance(now, ProcessorClock) or processor_s <= 0:
        return 1.0
    return max(1.0, now.share * wall_s / processor_s / others)


def measure_share(
    group: Group, seconds: float, tell: Callable[[str], object] = lambda _: None, cores: float | None = None
) -> tuple[float, tuple[float, ...]]:
    """Return the share of a processor that this device has, and how many times as long others made each device's work.

    All devices call it. While other programs disturb, the share is measured again, and the quietest attempt counts: beside
    others a device would seem slower than it is.
    """
    wants = wanted_cores(group.torch_device)
    found: list[tuple[float, tuple[float, ...]]] = []
    while not found or (len(found) < TRIES and max(found[-1][1]) > NOTICED):
        if found:
            tell("the processors again, since other programs use them")
        begin = read()
        share = processor_share(seconds)
        found.append((share, slowed_by_others(group, f"load {len(found)}", use_since(begin, wants))))
    share, slowed = min(found, key=lambda each: max(each[1]))
    share = min(1.0, quota_cores() or 1.0, share * slowed[group.device])
    described = min(1.0, cores or math.inf)
    return described if cores is not None and abs(share / described - 1) <= NEARLY else share, slowed


def processor_share(seconds: float = 0.2) -> float:
    """Return how much of one processor this process gets while it computes: a fifth under such a quota, at most 1."""
    start_s, start_processor_s = time.perf_counter(), time.process_time()
    while time.perf_counter() - start_s < seconds:
        sum(range(1000))
    return min(1.0, max(1e-3, (time.process_time() - start_processor_s) / (time.perf_counter() - start_s)))


def _ring(group: Group, size: int) -> Callable[[], None]:
    """Return a round in which each device sends `size` bytes to the next one, on the lane of gradient sums."""
    out, into = (torch.zeros(max(1, size), dtype=torch.uint8, device=group.torch_device) for _ in range(2))
    onward = [Message((group.device + 1) % group.devices, out)]
    arriving = [Message((group.device - 1) % group.devices, into)]
    return lambda: group.start(onward, arriving, SUM_LANE).wait()


def rings_s(turn: Callable[[], None], compute: Callable[[], None] | None) -> float:
    """Return the seconds of a round in a ring, on a thread of its own as in training; this thread computes meanwhile.

    Raises:
        ConvoyError: what a round raised.
    """
    took_s: list[float] = []
    errors: list[BaseException] = []

    def rounds() -> None:
        try:
            start_s = time.perf_counter()
            for _ in range(RINGS):
                turn()
            took_s.append((time.perf_counter() - start_s) / RINGS)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=rounds, name="convoy-rings", daemon=True)
    thread.start()
    while compute is not None and thread.is_alive():
        compute()
    thread.join()  # every wait in it has the group's own limit
    if errors:
        raise errors[0]
    return took_s[0]
