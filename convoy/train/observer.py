"""Observers of a training: progress bars, the log, loggers of other projects."""

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step, counted from 0: loss and samples of the global batch, learning rate, end (`time.perf_counter()`)."""

    step: int
    epoch: int
    loss: float
    samples: int
    lr: float
    ended_s: float = field(default_factory=time.perf_counter, compare=False)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One test after a number of steps: accuracy (0 to 1), whether it ends its epoch, and whether it is the best so far."""

    epoch: int
    step: int
    accuracy: float
    ends_epoch: bool
    is_best: bool


@dataclass(frozen=True, slots=True)
class EpochResult:
    """One epoch, counted from 0: mean training loss over its samples, accuracy at its end (0 to 1; None without a test),
    seconds of training, and the learning rate of the next step."""

    epoch: int
    loss: float
    accuracy: float | None
    train_s: float
    samples_per_s: float
    lr: float


class Observer:
    """The base class of observers of a training. Override the methods of interest; the others do nothing.

    Every device has its own observers. A test is reported after its step and before the epoch that it ends. Write files on
    device 0 only (`convoy.is_first()`). For network access use a :class:`convoy.runlog.loggers.Logger`, which never delays a
    step.
    """

    def on_step_end(self, step: int, samples: int) -> None:
        """Called at the end of every optimizer step (from 0). Its loss may not be known yet."""

    def on_step(self, result: StepResult) -> None:
        """Called after every optimizer step when its loss is read. On accelerators this is up to two steps later, but before
        every test and the end of an epoch."""

    def on_evaluation(self, result: Evaluation) -> None:
        """Called after every test."""

    def on_epoch(self, result: EpochResult) -> None:
        """Called after every epoch."""


class Observers(Observer):
    """Several observers as one, called in their order."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    def on_step_end(self, step: int, samples: int) -> None:
        for observer in self.observers:
            observer.on_step_end(step, samples)

    def on_step(self, result: StepResult) -> None:
        for observer in self.observers:
            observer.on_step(result)

    def on_evaluation(self, result: Evaluation) -> None:
        for observer in self.observers:
            observer.on_evaluation(result)

    def on_epoch(self, result: EpochResult) -> None:
        for observer in self.observers:
            observer.on_epoch(result)
