"""Timing one piece of a layer: repeated until the pauses of a processor quota are spread evenly."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from convoy.comm.accelerator import finish
from convoy.runtime.clock import Clock
from convoy.runtime.kernels import Arithmetic

Now = Callable[[], float]

STRETCH_S = 0.02
"""Twice the usual period of a quota. A device runs in bursts; one short call meets a whole pause, or none."""

ROUNDS = 5
MOST_ROUNDS = 50
MOST_CALLS = 10_000
LONG = 15.0
"""A call that is so many stretches long holds enough periods of a quota, hardly feels its allocations, and runs twice."""

HELD_BYTES = 64 << 20


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

    def calls(self, stretch_s: float, once_s: float) -> int:
        # By the mean so far: a single call may have met no pause of a quota, or a whole one.
        mean_s = self.total_s / self.total_calls if self.total_calls else once_s
        return max(1, min(self.most_calls, round(stretch_s / max(mean_s, 1e-7))))


def time_piece(piece: Piece, clock: Clock, now: Now, stretch_s: float = STRETCH_S) -> Times:
    """Seconds of a piece, from several rounds; 10 stretches in total where a call is short.

    A round is a stretch of forward calls and a stretch of backward calls, each timed as a whole, so that pauses fall on
    what they interrupt.

    Args:
        clock: its slow-down counts.
        now: reads seconds, after the device has finished what it was given.
        stretch_s: seconds of one stretch.
    """
    held = 1 if piece.gradient is None else max(1, HELD_BYTES // max(1, piece.held_bytes))
    forward, backward = Repetition(MOST_CALLS, []), Repetition(held, [])
    once = run_round(piece, clock, now, 1, 1)
    if sum(once) >= LONG * stretch_s:
        forward.note(once[0], 1)
        backward.note(once[1], 1)
    else:
        # The first call allocates and chooses kernels: the second tells how long one takes.
        once = run_round(piece, clock, now, 1, 1)
    while not _enough(forward, backward, stretch_s):
        calls = forward.calls(stretch_s, once[0]), backward.calls(stretch_s, once[1])
        forward_s, backward_s = run_round(piece, clock, now, *calls)
        forward.note(forward_s, calls[0])
        backward.note(backward_s, calls[1])
    both = [f + b for f, b in zip(forward.each_s, backward.each_s, strict=True)]
    return Times(typical(forward.each_s), typical(backward.each_s), spread_of(both))


def _enough(forward: Repetition, backward: Repetition, stretch_s: float) -> bool:
    rounds = len(forward.each_s)
    if rounds >= MOST_ROUNDS:
        return True
    if rounds >= ROUNDS:
        return forward.total_s + backward.total_s >= ROUNDS * stretch_s
    total_s = forward.total_s + backward.total_s
    return rounds >= 2 and backward.total_calls == rounds and total_s >= LONG * stretch_s


def run_round(piece: Piece, clock: Clock, now: Now, calls: int, backward_calls: int) -> tuple[float, float]:
    """Seconds of so many calls forward, and of so many backward."""
    saved: list[Any] = []
    start_s = now()
    for _ in range(calls):
        with clock.compute(piece.name, "measure"):
            kept = piece.run.forward(piece.inputs, piece.samples, True, piece.wants)[1]
        if len(saved) < backward_calls:
            saved.append(kept)
    forward_s = now() - start_s
    if piece.gradient is None:
        return forward_s, 0.0
    while len(saved) < backward_calls:
        saved.append(piece.run.forward(piece.inputs, piece.samples, True, piece.wants)[1])
    start_s = now()
    while saved:
        with clock.compute(piece.name, "measure"):
            piece.run.backward(saved.pop(), piece.gradient, piece.wants)
    return forward_s, now() - start_s


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


def device_now(device: torch.device) -> Now:
    """Reads the clock of this process once `device` has finished what it was given."""

    def now() -> float:
        finish(device)
        return time.perf_counter()

    return now


def quota_now(device: torch.device, share: float, slowdown: float = 1.0) -> Now:
    """Reads seconds as `device_now` does, without the pauses of a quota: processor time over the share of a processor.

    A device under a quota computes in slices of a few milliseconds, and a short call meets a whole pause or none; how often
    is chance. Its processor time is not. For one-threaded CPU devices only: of several threads it would be the sum, and a
    slow-down that is slept is not in it.

    Args:
        share: see `convoy.profile.load.measure_share`.
        slowdown: of the device's clock.
    """
    if device.type != "cpu" or torch.get_num_threads() > 1 or slowdown > 1:
        return device_now(device)
    return lambda: time.process_time() / share


def time_update(
    device: torch.device, now: Now, stretch_s: float = STRETCH_S, entries: int = 1 << 20
) -> tuple[float, float]:
    """Seconds per parameter entry of SGD with momentum, and their spread; on `entries` numbers (4 MiB by default)."""
    parameter = torch.nn.Parameter(torch.zeros(entries, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=0.01, momentum=0.9)

    optimizer.step()  # makes the momentum
    found = repeated(optimizer.step, now, stretch_s)
    return typical(found.each_s) / entries, spread_of(found.each_s)


def repeated(work: Callable[[], object], now: Now, stretch_s: float = STRETCH_S) -> Repetition:
    """Call something in stretches, 5 or more, until the pauses of a quota are spread evenly."""

    def run(calls: int) -> float:
        start_s = now()
        for _ in range(calls):
            work()
        return now() - start_s

    run(1)  # allocates, and chooses kernels
    once_s, found = run(1), Repetition(MOST_CALLS, [])
    while len(found.each_s) < ROUNDS or (
        found.total_s < ROUNDS * stretch_s and found.total_calls < ROUNDS * MOST_CALLS
    ):
        calls = found.calls(stretch_s, once_s)
        found.note(run(calls), calls)
    return found


def spread_of(values: Sequence[float]) -> float:
    """(slowest - fastest) / median."""
    return (max(values) - min(values)) / max(statistics.median(values), 1e-12)
