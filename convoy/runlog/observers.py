"""Observers of a training: how long its steps take, where each device's time goes, curves for TensorBoard."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from convoy.comm.agreement import gather
from convoy.comm.group import Group
from convoy.runlog.metrics import LEAST_STEPS
from convoy.runlog.schema import UtilizationLine
from convoy.runlog.writer import RunLog
from convoy.runtime.clock import Clock
from convoy.train.loop import EpochResult, Evaluation, Observer


class Observers:
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    def step(self, epoch: int, loss: float, samples: int) -> None:
        for observer in self.observers:
            observer.step(epoch, loss, samples)

    def on_evaluation(self, result: Evaluation, is_best: bool) -> None:
        for observer in self.observers:
            observer.on_evaluation(result, is_best)

    def epoch(self, epoch: int, result: EpochResult) -> None:
        for observer in self.observers:
            observer.epoch(epoch, result)


class StepTimer:
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

    def step(self, epoch: int, loss: float, samples: int) -> None:  # noqa: ARG002
        now_s = time.perf_counter()
        if self.last_s is not None and samples == self.batch:
            self.seconds.append(now_s - self.last_s)
        self.last_s = now_s

    def restart(self) -> None:
        """From here on it is another plan, or other shares; the step in which they arrive does not count."""
        self._since = len(self.seconds)
        self.last_s = None

    def on_evaluation(self, result: Evaluation, is_best: bool) -> None:  # noqa: ARG002
        self.last_s = None

    def epoch(self, epoch: int, result: EpochResult) -> None:  # noqa: ARG002
        self.last_s = None

    def beside(self, predicted_s: float) -> str:
        """Predicted and measured, in words."""
        if self.step_s is None:
            return f"Predicted: {predicted_s:.4g} s a step; too few steps of {self.batch} samples to compare."
        off = predicted_s / self.step_s - 1
        return (
            f"Predicted: {predicted_s:.4g} s a step; measured: {self.step_s:.4g} s, the median of {len(self.counted_s)} steps; "
            f"the prediction is {off:+.1%} off."
        )


class Utilization:
    """Sums where this device's time goes; at the end of an epoch the devices exchange their sums, and one logs them.

    Seconds count from the end of one step to the end of the next; tests are left out, and so is the first step after each.
    """

    def __init__(self, group: Group, clock: Clock, log: RunLog | None) -> None:
        self.group, self.clock, self.log = group, clock, log
        self.last: tuple[float, float, float] | None = None
        self.steps, self.sums_s = 0, [0.0, 0.0, 0.0]

    def step(self, epoch: int, loss: float, samples: int) -> None:  # noqa: ARG002
        now = (time.perf_counter(), self.clock.compute_s, self.clock.exchange_s)
        if self.last is not None:
            self.steps += 1
            passed = (new - old for new, old in zip(now, self.last, strict=True))
            self.sums_s = [total + each for total, each in zip(self.sums_s, passed, strict=True)]
        self.last = now

    def on_evaluation(self, result: Evaluation, is_best: bool) -> None:  # noqa: ARG002
        self.last = None

    def epoch(self, epoch: int, result: EpochResult) -> None:  # noqa: ARG002
        rows = gather(self.group, f"busy in epoch {epoch}", self.sums_s)
        if self.log is not None:
            wall_s, compute_s, exchange_s = zip(*rows, strict=True)
            self.log.write(
                UtilizationLine(
                    epoch=epoch, steps=self.steps, wall_s=wall_s, compute_s=compute_s, exchange_s=exchange_s
                )
            )
        self.last, self.steps, self.sums_s = None, 0, [0.0, 0.0, 0.0]


class TensorBoard:
    """Writes TensorBoard's events: loss, learning rate and samples/s of every step, accuracy of every test.

    Args:
        folder: is made where it does not exist.
        step: the steps that the run has done before; what TensorBoard has of later ones is dropped.
        lr: returns the learning rate of the next step.
    """

    def __init__(self, folder: Path, step: int, lr: Callable[[], float]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # tensorboard is optional

        self.writer = SummaryWriter(folder, purge_step=step or None)
        self.count, self.lr, self.next_lr = step, lr, lr()
        self.last_s: float | None = None

    def step(self, epoch: int, loss: float, samples: int) -> None:  # noqa: ARG002
        now_s = time.perf_counter()
        self._write("loss", loss)
        self._write("learning rate", self.next_lr)
        if self.last_s is not None:
            self._write("samples per s", samples / (now_s - self.last_s))
        self.count, self.last_s, self.next_lr = self.count + 1, now_s, self.lr()

    def on_evaluation(self, result: Evaluation, is_best: bool) -> None:  # noqa: ARG002
        self._write("accuracy", result.accuracy)
        self.last_s = None

    def epoch(self, epoch: int, result: EpochResult) -> None:  # noqa: ARG002
        self.last_s = None

    def _write(self, name: str, value: float) -> None:
        self.writer.add_scalar(name, value, self.count)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.writer.close()
