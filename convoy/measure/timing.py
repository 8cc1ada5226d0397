"""Timing one piece of a layer: repeated until the pauses of a processor quota are spread evenly."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from convoy.machine.accelerator import finish, queued
from convoy.runtime.clock import Clock
from convoy.runtime.kernels import Arithmetic

Now = Callable[[], float]

STRETCH_S = 0.02
"""Twice the usual period of a quota. A device runs in bursts; one short call meets a whole pause, or none."""

ROUNDS = 5
TURN_ROUNDS = 2
"""Of a piece that is timed in several turns, with others in between: what disturbs for a second is then in one turn of many."""

KNOWN_TO = 0.02
"""Standard error of a piece's seconds, as a part of them, at which they are known; from `LEAST_KNOWN` rounds on."""

LEAST_KNOWN = 6
MOST_ROUNDS = 50
MOST_CALLS = 10_000
LONG = 15.0
"""A call that is so many stretches long holds enough periods of a quota, hardly feels its allocations, and runs twice."""

HELD_BYTES, ACCELERATOR_HELD_BYTES = 64 << 20, 1 << 30

FRESH_BYTES, MOST_FRESH = 4 << 20, 3
"""A round in which the process grew by so much memory does not count, but for more than so many: the kernel fills pages with
zeros that no step fills again. Of layers with large outputs such a round took up to ten times as long."""


@contextmanager
def plain_torch(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Compute with gradients and without anomaly mode, whatever the caller has set; afterwards all is as it was.

    Args:
        dtype: the default type of new tensors; None: the caller's.
    """
    before = torch.get_default_dtype()
    with torch.inference_mode(False), torch.enable_grad(), torch.autograd.set_detect_anomaly(False):
        try:
            torch.set_default_dtype(dtype or before)
            yield
        finally:
            torch.set_default_dtype(before)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one call forward and backward, and (slowest - fastest) / typical of the rounds."""

    forward_s: float
    backward_s: float
    spread: float

    @property
    def both_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class Piece:
    """A layer's arithmetic at one size, with random numbers to run it on.

    Attributes:
        gradient: of the output (index -> gradient for a layer with several outputs); None where no backward runs.
        held_bytes: inputs and outputs together, which backward may keep.
    """

    name: str
    run: Arithmetic
    inputs: Sequence[Any]
    samples: int
    wants: Sequence[bool]
    gradient: Any
    held_bytes: int


@dataclass(slots=True)
class Repetition:
    """One thing that is repeated, such as forward or backward.

    Attributes:
        each_s: seconds of one call in each round so far.
        total_s, total_calls: over all rounds.
    """

    most_calls: int
    each_s: list[float]
    total_s: float = 0.0
    total_calls: int = 0

    def note(self, stretch_s: float, calls: int) -> None:
        self.each_s.append(stretch_s / calls)
        self.total_s += stretch_s
        self.total_calls += calls

    def calls(self, stretch_s: float, once_s: float, fill_s: float = 0.0) -> int:
        """So many fit into a stretch, with what goes on beside each."""
        # By the mean so far: a single call may have met no pause of a quota, or a whole one.
        mean_s = self.total_s / self.total_calls if self.total_calls else once_s
        return max(1, min(self.most_calls, round(stretch_s / max(mean_s + fill_s, 1e-7))))


@dataclass(slots=True)
class Sample:
    """What was timed of one piece so far, in one turn or several."""

    forward: Repetition
    backward: Repetition

    def times(self, *, steady: bool = False) -> Times:
        """Return the seconds of a call by these rounds, with the spread of five rounds that would tell as much.

        Args:
            steady: the clock leaves out the pauses of a quota. Then longer rounds were disturbed, and the median tells most. A
                wall clock has a pause or none in each round; the mean has them as a step has.
        """
        estimate = statistics.median if steady else typical
        both = [f + b for f, b in zip(self.forward.each_s, self.backward.each_s, strict=True)]
        spread = median_error(both) / ERROR_OF_SPREAD if steady else spread_of(both)
        return Times(estimate(self.forward.each_s), estimate(self.backward.each_s), spread)

    @property
    def is_known(self) -> bool:
        """Whether further rounds would change little; a call as long as many stretches needs but two."""
        both = [f + b for f, b in zip(self.forward.each_s, self.backward.each_s, strict=True)]
        return len(both) >= MOST_ROUNDS or (len(both) >= LEAST_KNOWN and median_error(both) <= KNOWN_TO)


COLD_ROUNDS = 9
CORE_BYTES, LAYERS_BYTES, PROCESSOR_BYTES = 4 << 20, 16 << 20, 32 << 20
"""More than the caches of a core hold; what other layers leave of those of a processor; and about what those hold."""


class Cold:
    """Fills the caches with other bytes, as a step's layers do; its clock stands still meanwhile.

    What a step does once between layers that take tens of milliseconds finds neither its code nor its data in a cache. Called
    again and again it finds both: on an EPYC copies took 2.2 times as long with cold caches, additions 1.6, the optimizer 1.8.

    Args:
        now: reads seconds.
        filled_bytes: so much memory is read and written; nothing for an accelerator, which has caches of its own.

    Attributes:
        filled_s: seconds that this has taken so far.
    """

    def __init__(self, device: torch.device, now: Now, filled_bytes: int) -> None:
        self._clock, self.filled_s = now, 0.0
        self._bytes = torch.zeros(filled_bytes // 4) if device.type == "cpu" else torch.zeros(0)

    def fill(self, made: Iterable[Any] = ()) -> None:
        """Let the caches hold nothing of what was used before, but for what the layer before has just `made`."""
        start_s = self._clock()
        self._bytes.add_(1.0)
        for tensor in made:
            if isinstance(tensor, torch.Tensor):
                tensor.sum()  # reads it
        self.filled_s += self._clock() - start_s

    def now(self) -> float:
        """Seconds in which it has not filled."""
        return self._clock() - self.filled_s

    def seconds(self, work: Callable[[], object], stretch_s: float = STRETCH_S) -> list[float]:
        """Seconds of single calls, each with cold caches; of as many as fit into five stretches, `COLD_ROUNDS` at least.

        An accelerator's calls are queued one behind the other, a stretch of them each time: to wait for each would count.
        """
        work()  # allocates, and chooses kernels
        each_s: list[float] = []
        begin_s, count = self._clock(), 1
        if not len(self._bytes):
            work()
            count = max(1, min(MOST_CALLS, round(stretch_s / max(self._clock() - begin_s, 1e-7))))
            begin_s = self._clock()
        while len(each_s) < COLD_ROUNDS or (len(each_s) < MOST_ROUNDS and self._clock() - begin_s < ROUNDS * stretch_s):
            self.fill()
            start_s = self.now()
            for _ in range(count):
                work()
            each_s.append((self.now() - start_s) / count)
        return each_s


def sampled(
    piece: Piece,
    clock: Clock,
    now: Now,
    stretch_s: float = STRETCH_S,
    before: Sample | None = None,
    rounds: int = ROUNDS,
    cold: Cold | None = None,
) -> Sample:
    """Rounds of a piece, so many at least, beside those of turns before.

    A round is a stretch of forward calls and a stretch of backward calls, each timed as a whole, so that pauses fall on
    what they interrupt.

    Args:
        clock: its slow-down counts.
        now: reads seconds, after the device has finished what it was given.
        stretch_s: seconds of one stretch.
        before: is added to.
        cold: fills the caches before each call; None: a call finds there what the one before has left. So does a piece that a
            core's caches hold: its Python would be cold each time, which in a step follows that of the layer before it.
    """
    if piece.held_bytes < CORE_BYTES:
        cold = None
    most_bytes = HELD_BYTES if clock.device.type == "cpu" else ACCELERATOR_HELD_BYTES
    held = 1 if piece.gradient is None else max(1, most_bytes // max(1, piece.held_bytes))
    sample = before or Sample(Repetition(MOST_CALLS, []), Repetition(held, []))
    forward, backward = sample.forward, sample.backward
    had, had_s = len(forward.each_s), forward.total_s + backward.total_s
    resident_bytes, fresh, filled_s = _resident_bytes(), 0, cold.filled_s if cold else 0.0
    once = run_round(piece, clock, now, 1, 1, cold)
    fill_s = (cold.filled_s - filled_s) / 2 if cold else 0.0
    grew = _resident_bytes() - resident_bytes >= FRESH_BYTES
    if sum(once) >= LONG * stretch_s and not grew:
        forward.note(once[0], 1)
        backward.note(once[1], 1)
    else:
        # The first call allocates and chooses kernels: the second tells how long one takes.
        once = run_round(piece, clock, now, 1, 1, cold)
    while not _enough(forward, backward, stretch_s, had, had_s - (cold.filled_s - filled_s if cold else 0.0), rounds):
        calls = forward.calls(stretch_s, once[0], fill_s), backward.calls(stretch_s, once[1], fill_s)
        resident_bytes = _resident_bytes()
        forward_s, backward_s = run_round(piece, clock, now, *calls, cold)
        if fresh < MOST_FRESH and _resident_bytes() - resident_bytes >= FRESH_BYTES:
            fresh += 1
            continue
        forward.note(forward_s, calls[0])
        backward.note(backward_s, calls[1])
    return sample


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _enough(forward: Repetition, backward: Repetition, stretch_s: float, had: int, had_s: float, wanted: int) -> bool:
    rounds, total_s = len(forward.each_s) - had, forward.total_s + backward.total_s - had_s
    if rounds >= MOST_ROUNDS:
        return True
    if rounds >= wanted:
        return total_s >= wanted * stretch_s
    is_long = backward.total_calls == len(backward.each_s) and total_s >= LONG * stretch_s
    return is_long and len(forward.each_s) >= 2 and rounds >= 1


def run_round(
    piece: Piece, clock: Clock, now: Now, calls: int, backward_calls: int, cold: Cold | None = None
) -> tuple[float, float]:
    """Seconds of so many calls forward, and of so many backward."""
    if clock.device.type != "cpu" and clock.slowdown == 1:
        return _run_queued_round(piece, clock.device, calls, backward_calls)
    look = cold.now if cold else now
    saved: list[Any] = []
    start_s = look()
    for _ in range(calls):
        if cold:
            cold.fill(piece.inputs)
        with clock.compute(piece.name, "measure"):
            kept = piece.run.forward(piece.inputs, piece.samples, True, piece.wants)[1]
        if len(saved) < backward_calls:
            saved.append(kept)
    forward_s = look() - start_s
    if piece.gradient is None:
        return forward_s, 0.0
    while len(saved) < backward_calls:
        saved.append(piece.run.forward(piece.inputs, piece.samples, True, piece.wants)[1])
    start_s = look()
    while saved:
        if cold:
            cold.fill(piece.gradient.values() if isinstance(piece.gradient, dict) else (piece.gradient,))
        with clock.compute(piece.name, "measure"):
            piece.run.backward(saved.pop(), piece.gradient, piece.wants)
    return forward_s, look() - start_s


def _run_queued_round(piece: Piece, device: torch.device, calls: int, backward_calls: int) -> tuple[float, float]:
    """As `run_round` on an accelerator: the seconds of the device alone.

    In a step the host runs ahead of the device. Awaiting a call here would add the host's time to the device's: a ResNet-18 on
    an H200 was predicted three times too long. So calls are queued behind other work, and the device's seconds are read from
    events. The host's are `Overheads.queue_s`.
    """
    saved: list[Any] = []

    def forward() -> None:
        kept = piece.run.forward(piece.inputs, piece.samples, True, piece.wants)[1]
        if len(saved) < backward_count:
            saved.append(kept)

    def backward() -> None:
        piece.run.backward(saved.pop(), piece.gradient, piece.wants)

    count, backward_count = min(calls, MOST_QUEUED), min(backward_calls, MOST_QUEUED)
    _, host_s = queued_seconds(device, 1, forward)
    forward_s, host_s = queued_seconds(device, count, forward, 2 * host_s * count)
    forward_s *= calls / count
    if piece.gradient is None:
        return forward_s, 0.0
    while len(saved) < backward_count:
        forward()
    # Alone, a backward takes the host much longer to queue than in a step: autograd hands each to the device's own thread.
    _, host_s = queued_seconds(device, 1, backward)
    forward()
    backward_s, _ = queued_seconds(device, backward_count, backward, min(1.5 * host_s * backward_count, MOST_PLUG_S))
    return forward_s, backward_s * backward_calls / backward_count


PLUG_SIDE, MOST_PLUG_SIDE, PLUG_S, MOST_PLUG_S = 512, 8192, 3e-4, 0.02
"""Sides of the matrices to try; seconds that one product should take (launching it takes the host 1e-5); and seconds
of all products at most."""

MOST_QUEUED = 100
"""So many calls are queued at once: an accelerator's queue holds about a thousand kernels."""


@cache
def _plug(device: torch.device) -> tuple[torch.Tensor, float]:
    """Return a square matrix whose product with itself takes the device longer than the host, and the seconds it takes."""
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
    """Return the device's seconds of some calls, and the host's to queue them.

    Args:
        plug_s: the device has other work for these seconds first, so that it does not wait for the host between calls.
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


def typical(values: Sequence[float]) -> float:
    """The faster of two, the median of a few; of five or more, the mean without the highest and lowest quarter.

    Under a quota a stretch holds either one pause or one more. A median falls on either of the two, their mean between.
    """
    if len(values) < 3:
        return min(values)
    if len(values) < 5:
        return statistics.median(values)
    cut = len(values) // 4
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


ERROR_OF_SPREAD = 0.21
"""The standard error of the typical of five values, as a part of their range. `convoy.simulate.interval` takes 1.65 times as
much for nine of ten."""


def median_error(values: Sequence[float]) -> float:
    """Its standard error as a part of it, whatever the distribution: of n values, n / 2 lie below it, give or take
    sqrt(n * 1/2 * 1/2)."""
    rows, count = sorted(values), len(values)
    middle, off = (count - 1) / 2, count**0.5 / 2
    return (_at(rows, middle + off) - _at(rows, middle - off)) / 2 / max(_at(rows, middle), 1e-12)


def _at(rows: Sequence[float], place: float) -> float:
    """Between two of some values in order."""
    low = int(max(0.0, min(place, len(rows) - 1)))
    high = min(low + 1, len(rows) - 1)
    part = max(0.0, min(place - low, 1.0))
    return rows[low] + part * (rows[high] - rows[low])


def device_now(device: torch.device) -> Now:
    """Reads the clock of this process once `device` has finished what it was given."""

    def now() -> float:
        finish(device)
        return time.perf_counter()

    return now


@plain_torch(torch.float32)
def time_update(
    device: torch.device, now: Now, stretch_s: float = STRETCH_S, entries: int = 1 << 20
) -> tuple[float, float]:
    """Seconds per parameter entry of SGD with momentum, and their spread; on `entries` numbers (4 MiB by default)."""
    parameter = torch.nn.Parameter(torch.zeros(entries, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=0.01, momentum=0.9)

    optimizer.step()  # makes the momentum
    each_s = Cold(device, now, PROCESSOR_BYTES).seconds(optimizer.step, stretch_s)
    return statistics.median(each_s) / entries, spread_of(each_s)


def spread_of(values: Sequence[float]) -> float:
    """(slowest - fastest) / median."""
    return (max(values) - min(values)) / max(statistics.median(values), 1e-12)
