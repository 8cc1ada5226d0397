"""Times repeated calls: in rounds, so that the pauses of a CPU quota are spread evenly, with caches as a step leaves them."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from convoy.machine.accelerator import finish, queued
from convoy.runtime.clock import Clock
from convoy.runtime.kernels import Arithmetic

Now = Callable[[], float]
Progress = Callable[[str], object]
"""Called with the name of the current stage."""

SLICE_S = 0.02
"""Seconds of calls timed together: twice a quota's usual period, since a short call contains a whole pause or none."""

ROUNDS, TURN_ROUNDS = 5, 2
"""Rounds of a workload that is timed once, and per turn if it is timed in several turns."""

KNOWN_TO, LEAST_KNOWN = 0.02, 6
"""Times count as known at this relative standard error and this number of rounds."""

MOST_ROUNDS, MOST_CALLS = 50, 10_000
LONG = 15.0  # a call of this many slices spans enough periods of a quota and runs only twice
HELD_BYTES, ACCELERATOR_HELD_BYTES = 64 << 20, 1 << 30  # that forward calls may keep for their backward calls

FRESH_BYTES, MOST_FRESH = 4 << 20, 3
"""A round is dropped if the process grew by this much, at most this often: the kernel clears new pages only once, which
made layers with large outputs up to ten times slower."""


@contextmanager
def plain_torch(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Turn gradients on and anomaly mode off, and make `dtype` the default; restore the caller's settings on exit."""
    before = torch.get_default_dtype()
    with torch.inference_mode(False), torch.enable_grad(), torch.autograd.set_detect_anomaly(False):
        try:
            torch.set_default_dtype(dtype or before)
            yield
        finally:
            torch.set_default_dtype(before)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one call, forward and backward, and (slowest - fastest) / typical of the rounds."""

    forward_s: float
    backward_s: float
    spread: float


@dataclass(frozen=True, slots=True)
class Workload:
    """The arithmetic of a layer at one size, with random inputs.

    Attributes:
        gradient: of the output (index -> gradient for a layer with several outputs); None: no backward.
        held_bytes: of inputs and outputs, which backward may keep.
    """

    name: str
    run: Arithmetic
    inputs: Sequence[Any]
    samples: int
    wants: Sequence[bool]
    gradient: Any
    held_bytes: int

    def forward(self) -> Any:
        """Run forward and return what it keeps for backward."""
        return self.run.forward(self.inputs, self.samples, True, self.wants)[1]


@dataclass(slots=True)
class Timing:
    """The timed rounds of one workload: seconds of one call by round, and the totals. Pairs are (forward, backward)."""

    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    total_s: tuple[float, float] = (0.0, 0.0)
    calls: tuple[int, int] = (0, 0)

    def add(self, round_s: tuple[float, float], calls: tuple[int, int]) -> None:
        for each, seconds, count in zip(self.seconds, round_s, calls, strict=True):
            each.append(seconds / count)
        self.total_s = self.total_s[0] + round_s[0], self.total_s[1] + round_s[1]
        self.calls = self.calls[0] + calls[0], self.calls[1] + calls[1]

    @property
    def rounds_s(self) -> list[float]:
        """Seconds of a forward and a backward call, by round."""
        return [forward + backward for forward, backward in zip(*self.seconds, strict=True)]

    def times(self, *, steady: bool = False) -> Times:
        """Return the seconds of a call, with the spread that five rounds of the same error would have.

        Args:
            steady: the clock leaves out a quota's pauses. Then a longer round was disturbed, and the median is best. A wall
                clock includes pauses, as a step does, so the mean is best.
        """
        estimate = statistics.median if steady else typical
        spread = median_error(self.rounds_s) / ERROR_OF_SPREAD if steady else spread_of(self.rounds_s)
        return Times(estimate(self.seconds[0]), estimate(self.seconds[1]), spread)

    @property
    def is_known(self) -> bool:
        """Whether further rounds would change little."""
        rounds_s = self.rounds_s
        return len(rounds_s) >= MOST_ROUNDS or (len(rounds_s) >= LEAST_KNOWN and median_error(rounds_s) <= KNOWN_TO)


COLD_ROUNDS = 9
CORE_BYTES, LAYERS_BYTES, PROCESSOR_BYTES = 4 << 20, 16 << 20, 32 << 20
"""More than a core's caches; the part of a processor's caches that other layers replace; about all of those caches."""


class ColdCaches:
    """A cache filler that acts like the other layers of a step. Its clock stops while it fills.

    A step calls most things once, between layers that take milliseconds, and finds neither code nor data in a cache. On an
    EPYC, cold copies took 2.2 times as long, additions 1.6 times, the optimizer 1.8 times. Accelerators need no filling.
    """

    def __init__(self, device: torch.device, now: Now, filled_bytes: int) -> None:
        self._clock, self.filled_s = now, 0.0
        self._bytes = torch.zeros(filled_bytes // 4) if device.type == "cpu" else torch.zeros(0)

    def fill(self, made: Iterable[Any] = ()) -> None:
        """Replace the contents of the caches, except tensors that the previous layer has just `made`."""
        start_s = self._clock()
        self._bytes.add_(1.0)
        for tensor in made:
            if isinstance(tensor, torch.Tensor):
                tensor.sum()  # reads it
        self.filled_s += self._clock() - start_s

    def now(self) -> float:
        return self._clock() - self.filled_s

    def seconds(self, work: Callable[[], object], slice_s: float = SLICE_S) -> list[float]:
        """Time single calls, each with cold caches: as many as fit into five slices, at least `COLD_ROUNDS`.

        On an accelerator, a slice of queued calls is timed as a whole, because waiting for each call would add time.
        """
        work()  # allocates, and chooses kernels
        each_s: list[float] = []
        begin_s, count = self._clock(), 1
        if not len(self._bytes):
            work()
            count = max(1, min(MOST_CALLS, round(slice_s / max(self._clock() - begin_s, 1e-7))))
            begin_s = self._clock()
        while len(each_s) < COLD_ROUNDS or (len(each_s) < MOST_ROUNDS and self._clock() - begin_s < ROUNDS * slice_s):
            self.fill()
            start_s = self.now()
            for _ in range(count):
                work()
            each_s.append((self.now() - start_s) / count)
        return each_s


class RoundTimer:
    """A timer of workloads on one device, round by round.

    Args:
        clock: of the device; its slow-down counts.
        now: reads seconds once the device has finished its work. None: the wall clock.
        slice_s: seconds of one slice.
        steady: see `Timing.times`.
        cold: fill the caches before each call of a workload that a core's caches do not hold. (A smaller one would find even
            Python cold each time, unlike in a step.)
    """

    def __init__(
        self,
        clock: Clock,
        now: Now | None = None,
        slice_s: float = SLICE_S,
        *,
        steady: bool = False,
        cold: bool = False,
    ) -> None:
        self.clock, self.slice_s, self.steady = clock, slice_s, steady
        self.now = now or device_now(clock.device)
        # An accelerator's calls are queued, and a filling would have to wait for each.
        self.cold = ColdCaches(clock.device, self.now, LAYERS_BYTES) if cold and clock.device.type == "cpu" else None

    def time(self, work: Workload, timing: Timing | None = None, rounds: int = ROUNDS) -> Timing:
        """Time at least this many rounds of a workload, and add them to `timing`."""
        timing, slice_s = timing or Timing(), self.slice_s
        cold = self.cold if work.held_bytes >= CORE_BYTES else None
        most_bytes = HELD_BYTES if self.clock.device.type == "cpu" else ACCELERATOR_HELD_BYTES
        most_calls = MOST_CALLS, 1 if work.gradient is None else max(1, most_bytes // max(1, work.held_bytes))
        had, had_s = len(timing.rounds_s), sum(timing.total_s)
        resident_bytes, fresh, filled_s = _resident_bytes(), 0, cold.filled_s if cold else 0.0
        once_s = self._round(work, (1, 1), cold)
        fill_s = (cold.filled_s - filled_s) / 2 if cold else 0.0
        if sum(once_s) >= LONG * slice_s and _resident_bytes() - resident_bytes < FRESH_BYTES:
            timing.add(once_s, (1, 1))
        else:
            once_s = self._round(work, (1, 1), cold)  # the first call allocated and chose kernels

        def count(phase: int) -> int:
            # By the mean so far: a single call may have met no pause of a quota, or a whole one.
            calls = timing.calls[phase]
            mean_s = timing.total_s[phase] / calls if calls else once_s[phase]
            return max(1, min(most_calls[phase], round(slice_s / max(mean_s + fill_s, 1e-7))))

        def enough() -> bool:
            done = len(timing.rounds_s) - had
            spent_s = sum(timing.total_s) - had_s + (cold.filled_s - filled_s if cold else 0.0)
            is_long = timing.calls[1] == len(timing.rounds_s) and spent_s >= LONG * slice_s
            return (
                done >= MOST_ROUNDS
                or (done >= rounds and spent_s >= rounds * slice_s)
                or (is_long and done >= 1 and len(timing.rounds_s) >= 2)
            )

        while not enough():
            calls = count(0), count(1)
            resident_bytes = _resident_bytes()
            round_s = self._round(work, calls, cold)
            if fresh < MOST_FRESH and _resident_bytes() - resident_bytes >= FRESH_BYTES:
                fresh += 1
            else:
                timing.add(round_s, calls)
        return timing

    def _round(self, work: Workload, calls: tuple[int, int], cold: ColdCaches | None) -> tuple[float, float]:
        """Return the seconds of a slice of forward calls and of a slice of backward calls."""
        if self.clock.device.type != "cpu" and self.clock.slowdown == 1:
            return _queued_round(work, self.clock.device, calls)
        now = cold.now if cold else self.now
        kept: list[Any] = []
        start_s = now()
        for _ in range(calls[0]):
            if cold:
                cold.fill(work.inputs)
            with self.clock.compute(work.name, "measure"):
                saved = work.forward()
            if len(kept) < calls[1]:
                kept.append(saved)
        forward_s = now() - start_s
        if work.gradient is None:
            return forward_s, 0.0
        while len(kept) < calls[1]:
            kept.append(work.forward())
        start_s = now()
        while kept:
            if cold:
                cold.fill(work.gradient.values() if isinstance(work.gradient, dict) else (work.gradient,))
            with self.clock.compute(work.name, "measure"):
                work.run.backward(kept.pop(), work.gradient, work.wants)
        return forward_s, now() - start_s


# --- accelerators ------------------------------------------------------------------------------------------------------


MOST_QUEUED = 100
"""The most calls queued together: an accelerator's queue holds about a thousand kernels."""

PLUG_SIDE, MOST_PLUG_SIDE, PLUG_S, MOST_PLUG_S = 512, 8192, 3e-4, 0.02
"""Matrix sides to try; seconds that one product should take (launching it takes the host 1e-5); most seconds of products."""


def _queued_round(work: Workload, device: torch.device, calls: tuple[int, int]) -> tuple[float, float]:
    """Return the device's own seconds of a round.

    In a step the host runs ahead of the device. Waiting for each call would add the host's time: a ResNet-18 on an H200 was
    predicted three times too long. So calls are queued behind other work and timed by events; see also `Overheads.queue_s`.
    """
    forwards, backwards = min(calls[0], MOST_QUEUED), min(calls[1], MOST_QUEUED)
    kept: list[Any] = []

    def forward() -> None:
        saved = work.forward()
        if len(kept) < backwards:
            kept.append(saved)

    def backward() -> None:
        work.run.backward(kept.pop(), work.gradient, work.wants)

    _, host_s = queued_seconds(device, 1, forward)
    forward_s, _ = queued_seconds(device, forwards, forward, 2 * host_s * forwards)
    forward_s *= calls[0] / forwards
    if work.gradient is None:
        return forward_s, 0.0
    while len(kept) < backwards:
        forward()
    # Alone, a backward takes the host longer to queue than in a step: autograd passes each to the device's own thread.
    _, host_s = queued_seconds(device, 1, backward)
    forward()
    backward_s, _ = queued_seconds(device, backwards, backward, min(1.5 * host_s * backwards, MOST_PLUG_S))
    return forward_s, backward_s * calls[1] / backwards


@cache
def _plug(device: torch.device) -> tuple[torch.Tensor, float]:
    """Return a square matrix and the seconds of its product with itself, which take longer on the device than on the host."""
    side, each_s = PLUG_SIDE, 0.0
    while each_s < PLUG_S and side <= MOST_PLUG_SIDE:
        matrix = torch.ones(side, side, device=device)
        for count in (1, 3):
            finish(device)
            begin_s = time.perf_counter()
            for _ in range(count):
                matrix @ matrix
            finish(device)
        each_s = (time.perf_counter() - begin_s) / 3
        side *= 2
    return matrix, each_s


def queued_seconds(
    device: torch.device, calls: int, work: Callable[[], object], plug_s: float = 0.0
) -> tuple[float, float]:
    """Return the device's seconds of `calls` calls, and the host's seconds to queue them.

    The device has other work for `plug_s` first, so that it does not wait for the host between calls.
    """
    matrix, each_s = _plug(device)
    finish(device)
    for _ in range(math.ceil(plug_s / each_s)):
        matrix @ matrix
    start = queued(device, timed=True)
    begin_s = time.perf_counter()
    for _ in range(calls):
        work()
    host_s = time.perf_counter() - begin_s
    end = queued(device, timed=True)
    end.synchronize()
    return start.elapsed_time(end) / 1e3, host_s


def device_now(device: torch.device) -> Now:
    """Return a clock that waits until `device` has finished its work."""

    def now() -> float:
        finish(device)
        return time.perf_counter()

    return now


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


# --- statistics --------------------------------------------------------------------------------------------------------


ERROR_OF_SPREAD = 0.21
"""The standard error of the typical of five values, relative to their range (see `convoy.simulate.interval`)."""


def typical(values: Sequence[float]) -> float:
    """Return the faster of two, the median of three or four, the mean of the middle half of five or more.

    Under a quota a slice holds one of two numbers of pauses, and a median would fall on one of them.
    """
    if len(values) < 3:
        return min(values)
    if len(values) < 5:
        return statistics.median(values)
    cut = len(values) // 4
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def median_error(values: Sequence[float]) -> float:
    """Return the relative standard error of the median: n / 2 values are below it, plus or minus sqrt(n) / 2."""
    rows, middle, away = sorted(values), (len(values) - 1) / 2, len(values) ** 0.5 / 2

    def at(place: float) -> float:
        place = max(0.0, min(place, len(rows) - 1.0))
        low = int(place)
        high = min(low + 1, len(rows) - 1)
        return rows[low] + (place - low) * (rows[high] - rows[low])

    return (at(middle + away) - at(middle - away)) / 2 / max(at(middle), 1e-12)


def spread_of(values: Sequence[float]) -> float:
    """Return (slowest - fastest) / median."""
    return (max(values) - min(values)) / max(statistics.median(values), 1e-12)
