"""Observers of a training: how long its steps take, where each device's time goes."""

import statistics
import time

from convoy.comm.agreement import gather
from convoy.comm.group import Group
from convoy.cost.interval import Interval
from convoy.runlog.metrics import LEAST_STEPS
from convoy.runlog.schema import UtilizationLine
from convoy.runlog.writer import RunLog
from convoy.runtime.clock import Clock
from convoy.train.observer import EpochResult, Evaluation, Observer


class StepTimer(Observer):
    """Times each step of a whole batch, from the end of the one before. The first after a test does not count.

    Args:
        batch: samples of a whole batch.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.seconds: list[float] = []
        self.last_s: float | None = None
        self._since = 0

    @property
    def counted_s(self) -> list[float]:
        """Seconds of the steps since the plan last changed, where enough came after that; else of all."""
        late = self.seconds[self._since :]
        return late if len(late) >= LEAST_STEPS else self.seconds

    @property
    def step_s(self) -> float | None:
        """Median seconds of a step; None where there were too few."""
        return statistics.median(self.counted_s) if self.seconds else None

    def on_step_end(self, step: int, samples: int) -> None:  # noqa: ARG002
        now_s = time.perf_counter()
        if self.last_s is not None and samples == self.batch:
            self.seconds.append(now_s - self.last_s)
        self.last_s = now_s

    def restart(self) -> None:
        """From here on it is another plan, or other shares; the step in which they arrive does not count."""
        self._since = len(self.seconds)
        self.last_s = None

    def on_evaluation(self, result: Evaluation) -> None:  # noqa: ARG002
        self.last_s = None

    def on_epoch(self, result: EpochResult) -> None:  # noqa: ARG002
        self.last_s = None

    def beside(self, pass_s: float, within: Interval, passes: int = 1) -> str:
        """Predicted and measured, in words.

        Args:
            pass_s: predicted, of one pass of the batch.
            within: what nine of ten passes lie between.
        """
        low_s, step_s, high_s = (passes * s for s in (within.low, pass_s, within.high))
        predicted = f"Predicted: {step_s:.3g} s a step (nine of ten: {low_s:.3g} - {high_s:.3g} s)"
        if self.step_s is None:
            return f"{predicted}; too few steps of {self.batch} samples to compare."
        off, held = step_s / self.step_s - 1, "inside" if low_s <= self.step_s <= high_s else "outside"
        return (
            f"{predicted}; measured: {self.step_s:.3g} s, the median of {len(self.counted_s)} steps, {held} the interval; "
            f"the prediction is {off:+.1%} off."
        )


class Utilization(Observer):
    """Sums where this device's time goes; at the end of an epoch the devices exchange their sums, and one logs them.

    Seconds count from the end of one step to the end of the next; tests are left out, and so is the first step after each.
    """

    def __init__(self, group: Group, clock: Clock, log: RunLog | None) -> None:
        self.group, self.clock, self.log = group, clock, log
        self.last: tuple[float, float, float] | None = None
        self.steps, self.sums_s = 0, [0.0, 0.0, 0.0]

    def restart(self) -> None:
        """Begin anew, on other devices."""
        self.last, self.steps, self.sums_s = None, 0, [0.0, 0.0, 0.0]

    def on_step_end(self, step: int, samples: int) -> None:  # noqa: ARG002
        now = (time.perf_counter(), self.clock.compute_s, self.clock.exchange_s)
        if self.last is not None:
            self.steps += 1
            wall_s, compute_s, exchange_s = (new - old for new, old in zip(now, self.last, strict=True))
            if self.group.torch_device.type != "cpu":  # an exchange waits for kernels, too, which are computing
                exchange_s = max(0.0, min(exchange_s, wall_s - compute_s))
            self.sums_s = [a + b for a, b in zip(self.sums_s, (wall_s, compute_s, exchange_s), strict=True)]
        self.last = now

    def on_evaluation(self, result: Evaluation) -> None:  # noqa: ARG002
        self.last = None

    def on_epoch(self, result: EpochResult) -> None:
        rows = gather(self.group, f"busy in epoch {result.epoch}", self.sums_s)
        if self.log is not None:
            wall_s, compute_s, exchange_s = zip(*rows, strict=True)
            self.log.write(
                UtilizationLine(
                    epoch=result.epoch,
                    steps=self.steps,
                    wall_s=wall_s,
                    compute_s=compute_s,
                    exchange_s=exchange_s,
                    ids=tuple(self.group.ids),
                )
            )
        self.last, self.steps, self.sums_s = None, 0, [0.0, 0.0, 0.0]
