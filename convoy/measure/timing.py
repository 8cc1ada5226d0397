"""Times repeated calls in rounds, which spreads the pauses of a CPU quota evenly, with cold caches as in a training step."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]
import torch
from torch import nn

from convoy.machine.accelerator import finish, queued
from convoy.model.graph import Layer
from convoy.runtime.clock import Clock
from convoy.runtime.kernels import Arithmetic

Now = Callable[[], float]
Progress = Callable[[str], object]
"""Called with the name of the current stage."""

SLICE_S = 0.02
"""Seconds of calls timed together: twice a quota's usual period, since a short call contains a whole pause or none."""

ROUNDS, TURN_ROUNDS = 5, 2  # rounds of a workload that is timed once, and per turn if it is timed in several turns

KNOWN_TO, LEAST_KNOWN = 0.02, 6  # times are precise enough at this relative standard error and number of rounds

MOST_ROUNDS, MOST_CALLS = 50, 10_000
LONG = 15.0  # a call of this many slices spans enough periods of a quota and runs only twice
HELD_BYTES, ACCELERATOR_HELD_BYTES = 64 << 20, 1 << 30  # the most that forward calls keep for backward calls
FRESH_BYTES, MOST_FRESH = 4 << 20, 3  # a round is repeated if the process grew by this much, at most this often

COLD_ROUNDS = 9
CORE_BYTES, LAYERS_BYTES, PROCESSOR_BYTES = 4 << 20, 16 << 20, 32 << 20
"""Sizes: more than a core's caches; the part of a processor's caches that other layers overwrite; about all its caches."""


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
class Workload:
    """The arithmetic of a layer at one size, with random inputs.

    Attributes:
        gradient: gradient of the output (index -> gradient for a layer with several outputs); None: no backward.
        held_bytes: bytes of inputs and outputs, which forward may save for backward.
    """

    name: str
    run: Arithmetic
    inputs: Sequence[Any]
    samples: int
    wants: Sequence[bool]
    gradient: Any
    held_bytes: int

    def forward(self) -> Any:
        """Run forward, and return the values it saves for backward."""
        return self.run.forward(self.inputs, self.samples, True, self.wants)[1]


class Times(NamedTuple):
    """Seconds of one call, forward and backward, and (slowest - fastest) / typical of the rounds."""

    forward_s: float
    backward_s: float
    spread: float

    @property
    def both_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(slots=True)
class Timing:
    """The timed rounds of one workload: the seconds of one forward and one backward call in each."""

    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)

    @property
    def rounds_s(self) -> list[float]:
        """Seconds of a forward and a backward call, by round."""
        return [forward + backward for forward, backward in zip(self.forward_s, self.backward_s, strict=True)]

    def times(self, *, steady: bool = False) -> Times:
        """Return the seconds of a call, with the spread that five rounds with the same standard error would have.

        Args:
            steady: the clock excludes a quota's pauses. Then a longer round was disturbed, and the median is best. A wall
                clock includes pauses, as a step does, so the mean is best.
        """
        estimate = statistics.median if steady else typical
        spread = median_error(self.rounds_s) / ERROR_OF_SPREAD if steady else spread_of(self.rounds_s)
        return Times(estimate(self.forward_s), estimate(self.backward_s), spread)

    @property
    def is_known(self) -> bool:
        """Whether the times are precise enough, or no more rounds are allowed."""
        rounds_s = self.rounds_s
        return len(rounds_s) >= MOST_ROUNDS or (len(rounds_s) >= LEAST_KNOWN and median_error(rounds_s) <= KNOWN_TO)


class ColdCaches:
    """A cache filler that acts like the other layers of a step. Its clock stops while it fills.

    A step calls most functions once, between layers that take milliseconds, so neither code nor data are in a cache. On an
    EPYC, cold copies took 2.2 times as long, additions 1.6 times, the optimizer 1.8 times. Accelerators need no filling.
    """

    def __init__(self, device: torch.device, now: Now, filled_bytes: int) -> None:
        self._clock, self.filled_s, self.fill_s = now, 0.0, 0.0
        self._bytes = torch.zeros(filled_bytes // 4) if device.type == "cpu" else torch.zeros(0)

    def fill(self, made: Iterable[Any] = ()) -> None:
        """Overwrite the caches, then load the tensors `made`, which the previous layer would have left there."""
        start_s = self._clock()
        self._bytes.add_(1.0)
        for tensor in made:
            if isinstance(tensor, torch.Tensor):
                tensor.sum()  # reads it
        self.fill_s = self._clock() - start_s
        self.filled_s += self.fill_s

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
        clock: the device's clock, which also applies its slowdown.
        now: returns seconds after the device has finished its work. None: the wall clock.
        slice_s: seconds of one slice.
        steady: see `Timing.times`.
        cold: overwrite the caches before each call of a workload larger than a core's caches. (A smaller one would find even
            Python's own data cold each time, unlike in a step.)
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
        # In a step the host runs ahead of an accelerator. Waiting for each call would add the host's time, which made the
        # predicted step of a ResNet-18 on an H200 three times too long. See also `Overheads.queue_s`.
        self._queues = clock.device.type != "cpu"
        self._empty_s: tuple[float, float] | None = None if self._queues else (0.0, 0.0)
        self.cold = ColdCaches(clock.device, self.now, LAYERS_BYTES) if cold and clock.device.type == "cpu" else None

    def time(self, work: Workload, timing: Timing | None = None, rounds: int = ROUNDS) -> Timing:
        """Time at least this many rounds of a workload, and add them to `timing`."""
        timing, slice_s = timing or Timing(), self.slice_s
        if self._empty_s is None:
            # The host enters autograd once a layer here, and once a segment in a step. A waiting device would show it.
            self._empty_s = 0.0, 0.0
            rows = [self._round(_empty_layer(self.clock.device), MOST_QUEUED, MOST_QUEUED, None) for _ in range(ROUNDS)]
            self._empty_s = statistics.median(row[0] for row in rows), statistics.median(row[1] for row in rows)
        cold = self.cold if work.held_bytes >= CORE_BYTES else None
        held_bytes = HELD_BYTES if self.clock.device.type == "cpu" else ACCELERATOR_HELD_BYTES
        most = MOST_QUEUED if self._queues else MOST_CALLS
        most_backward = 1 if work.gradient is None else max(1, min(most, held_bytes // max(1, work.held_bytes)))
        first = self._round(work, 1, 1, cold)
        if sum(first) < LONG * slice_s:
            first = self._round(work, 1, 1, cold)  # the first call allocated and chose kernels
        else:
            timing.forward_s.append(first[0])
            timing.backward_s.append(first[1])
        fill_s = cold.fill_s if cold else 0.0
        done, spent_s = 0, sum(first)

        def calls(row_s: Sequence[float], first_s: float, most: int) -> int:
            # Use the mean so far: a single call contains a whole pause of a quota or none.
            mean_s = statistics.fmean(row_s) if row_s else first_s
            return max(1, min(most, round(slice_s / max(mean_s + fill_s, 1e-7))))

        while True:
            forwards = calls(timing.forward_s, first[0], most)
            backwards = calls(timing.backward_s, first[1], most_backward)
            begin_s = self.now()
            forward_s, backward_s = self._round(work, forwards, backwards, cold)
            timing.forward_s.append(forward_s)
            timing.backward_s.append(backward_s)
            done += 1
            spent_s += self.now() - begin_s  # on an accelerator mostly the work before the timed calls
            is_long = spent_s >= LONG * slice_s and len(timing.rounds_s) >= 2
            if is_long or done >= MOST_ROUNDS or (done >= rounds and spent_s >= rounds * slice_s):
                return timing

    def _round(self, work: Workload, forwards: int, backwards: int, cold: ColdCaches | None) -> tuple[float, float]:
        """Return the mean seconds of forward calls and of backward calls.

        If the process grew, the calls are repeated. The kernel clears new pages only once, which made layers with large
        outputs up to ten times slower.
        """
        kept: list[Any] = []
        # One more on an accelerator, because one call is timed before the queued calls.
        keeps = 0 if work.gradient is None else backwards + self._queues

        def forward() -> None:
            saved = work.forward()
            if len(kept) < keeps:
                kept.append(saved)

        def backward() -> None:
            work.run.backward(kept.pop(), work.gradient, work.wants)

        gradients = work.gradient.values() if isinstance(work.gradient, dict) else (work.gradient,)
        for attempt in range(1 + MOST_FRESH):
            resident_bytes, backward_s = _resident_bytes(), 0.0
            forward_s = self._mean_s(work.name, forward, forwards, work.inputs, cold)
            while len(kept) < keeps:
                forward()
            if keeps:
                backward_s = self._mean_s(work.name, backward, backwards, gradients, cold)
            if attempt == MOST_FRESH or _resident_bytes() - resident_bytes < FRESH_BYTES:
                break
        assert self._empty_s is not None
        return max(0.0, forward_s - self._empty_s[0]), max(0.0, backward_s - self._empty_s[1])

    def _mean_s(
        self, name: str, call: Callable[[], None], count: int, made: Iterable[Any], cold: ColdCaches | None
    ) -> float:
        if self._queues:
            _, host_s = queued_seconds(self.clock.device, 1, call)
            device_s, _ = queued_seconds(self.clock.device, count, call, min(2 * host_s * count, MOST_PLUG_S))
            # As in a step, a slowed device is idle in between: other processes may use the same accelerator.
            time.sleep((self.clock.slowdown - 1) * device_s)
            return self.clock.slowdown * device_s / count
        now = cold.now if cold else self.now
        start_s = now()
        for _ in range(count):
            if cold:
                cold.fill(made)
            with self.clock.compute(name, "measure"):
                call()
        return (now() - start_s) / count


def _empty_layer(device: torch.device) -> Workload:
    """Return a layer without kernels."""
    x = torch.zeros(1, device=device)
    run = Arithmetic(nn.Module(), Layer("empty", "flatten", (), (1,)), lambda inputs, _: inputs[0].view(1))
    return Workload("empty", run, [x], 1, (True,), x, 0)


MOST_QUEUED = 30  # calls queued together, at most: with the work before them they take the host three times as long

PLUG_SIDE, MOST_PLUG_SIDE, PLUG_S, MOST_PLUG_S = 512, 8192, 3e-4, 0.05
"""Matrix sides to try; seconds that one product should take (launching it takes the host 1e-5); most seconds of products."""


@cache
def _plug(device: torch.device) -> tuple[torch.Tensor, float]:
    """Return a matrix and the device seconds of its product with itself, which are longer than the host's launch of it."""
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

    First the device gets other work for `plug_s`, so that it does not wait for the host between calls.
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


ERROR_OF_SPREAD = 0.21
"""The standard error of `typical` of five values, as a fraction of their range (see `convoy.simulate.interval`)."""


def typical(values: Sequence[float]) -> float:
    """Return the smaller of two values, the median of three or four, or the mean of the middle half of five or more.

    Under a quota a slice holds one of two numbers of pauses, and a median would fall on one of them.
    """
    if len(values) < 3:
        return min(values)
    if len(values) < 5:
        return statistics.median(values)
    cut = len(values) // 4
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def median_error(values: Sequence[float]) -> float:
    """Return the standard error of the median, divided by the median. (It is found from values near the median's rank.)"""
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
