"""Timing one piece of a layer: repeated until the pauses of a processor quota are spread evenly."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from convoy.execute.clock import Clock
from convoy.measure.pieces import Piece

Now = Callable[[], float]

STRETCH_S = 0.02
"""Twice the usual period of a quota. A device runs in bursts; one short call meets a whole pause, or none."""

ROUNDS = 5
MOST_ROUNDS = 50
LONG = 15.0
"""A call so many stretches long holds enough periods of a quota; it is hardly touched by its allocations, and runs twice."""

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


def time_piece(piece: Piece, clock: Clock, now: Now, stretch_s: float = STRETCH_S) -> Times:
    """Seconds of a piece, from several rounds; 10 stretches in total where a call is short.

    A round is a stretch of forward calls and a stretch of backward calls, each timed as a whole, so that pauses fall on
    what they interrupt.

    Args:
        clock: its slow-down counts.
        now: reads seconds, after the device has finished what it was given.
        stretch_s: seconds of one stretch.
    """
    first = _round(piece, clock, now, 1)
    found = [first] if sum(first) >= LONG * stretch_s else []
    # The first call allocates and chooses kernels: the second tells how long one takes.
    once_s = sum(first if found else _round(piece, clock, now, 1))
    calls = max(1, min(round(2 * stretch_s / max(once_s, 1e-7)), HELD_BYTES // max(1, piece.held_bytes)))
    while not _enough(found, calls, stretch_s):
        found.append(_round(piece, clock, now, calls))
    both = [f + b for f, b in found]
    return Times(typical([f for f, _ in found]), typical([b for _, b in found]), spread_of(both))


def _enough(found: Sequence[tuple[float, float]], calls: int, stretch_s: float) -> bool:
    total_s = sum(f + b for f, b in found) * calls
    if len(found) >= ROUNDS:
        return total_s >= ROUNDS * stretch_s or len(found) >= MOST_ROUNDS
    return calls == 1 and len(found) >= 2 and total_s >= LONG * stretch_s


def _round(piece: Piece, clock: Clock, now: Now, calls: int) -> tuple[float, float]:
    """Mean seconds of one call forward and one backward."""
    saved = []
    start_s = now()
    for _ in range(calls):
        with clock.compute(piece.name, "measure"):
            saved.append(piece.run.forward(piece.inputs, piece.samples, True, piece.wants)[1])
    middle_s = now()
    if piece.gradient is None:
        return (middle_s - start_s) / calls, 0.0
    for _ in range(calls):
        with clock.compute(piece.name, "measure"):
            piece.run.backward(saved.pop(), piece.gradient, piece.wants)
    return (middle_s - start_s) / calls, (now() - middle_s) / calls


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
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def time_update(
    device: torch.device, now: Now, stretch_s: float = STRETCH_S, entries: int = 1 << 20
) -> tuple[float, float]:
    """Seconds per parameter entry of SGD with momentum, and their spread; on `entries` numbers (4 MiB by default)."""
    parameter = torch.nn.Parameter(torch.zeros(entries, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=0.01, momentum=0.9)

    def steps(count: int) -> float:
        start_s = now()
        for _ in range(count):
            optimizer.step()
        return (now() - start_s) / count

    steps(1)  # makes the momentum
    count = max(1, round(stretch_s / max(steps(1), 1e-7)))
    found = [steps(count) for _ in range(ROUNDS)]
    return typical(found) / entries, spread_of(found)


def spread_of(values: Sequence[float]) -> float:
    """(slowest - fastest) / median."""
    return (max(values) - min(values)) / max(statistics.median(values), 1e-12)
