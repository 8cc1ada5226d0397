"""Where each device's time went, epoch by epoch: computing, exchanging and waiting, everything else."""

import time
from dataclasses import dataclass

from convoy.comm.agreement import gather
from convoy.comm.group import Group
from convoy.runlog.writer import RunLog
from convoy.runtime.clock import Clock
from convoy.train.loop import EpochResult, Evaluation


@dataclass(frozen=True, slots=True)
class _Reading:
    wall_s: float
    compute_s: float
    exchange_s: float


class Busy:
    """Every device has one. At the end of an epoch they tell each other; the one with a log writes it down.

    Seconds count from the end of one step to the end of the next; tests are left out, and so is the first step after each.
    """

    def __init__(self, group: Group, clock: Clock, log: RunLog | None) -> None:
        self.group, self.clock, self.log = group, clock, log
        self.last: _Reading | None = None
        self._clear()

    def step(self, epoch: int, loss: float, samples: int) -> None:  # noqa: ARG002
        now = _Reading(time.perf_counter(), self.clock.compute_s, self.clock.exchange_s)
        if self.last is not None:
            self.steps += 1
            self.wall_s += now.wall_s - self.last.wall_s
            self.compute_s += now.compute_s - self.last.compute_s
            self.exchange_s += now.exchange_s - self.last.exchange_s
        self.last = now

    def on_evaluation(self, result: Evaluation, is_best: bool) -> None:  # noqa: ARG002
        self.last = None

    def epoch(self, epoch: int, result: EpochResult) -> None:  # noqa: ARG002
        rows = gather(self.group, f"busy in epoch {epoch}", [self.wall_s, self.compute_s, self.exchange_s])
        if self.log is not None:
            wall_s, compute_s, exchange_s = zip(*rows, strict=True)
            self.log.write(
                "busy", epoch=epoch, steps=self.steps, wall_s=wall_s, compute_s=compute_s, exchange_s=exchange_s
            )
        self.last = None
        self._clear()

    def _clear(self) -> None:
        self.steps = 0
        self.wall_s = self.compute_s = self.exchange_s = 0.0
