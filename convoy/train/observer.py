"""Observers of a training: progress bars, the log, loggers of other projects."""

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step of the optimizer, counted from 0; its loss over the global batch, the samples of that batch, the learning rate
    that it was made with, and when it ended (`time.perf_counter()`)."""

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
    """One epoch, counted from 0; mean training loss over its samples, accuracy of the test at its end (0 to 1; None without a
    test), seconds of training, and the learning rate of the next step."""

    epoch: int
    loss: float
    accuracy: float | None
    train_s: float
    samples_per_s: float
    lr: float


class Observer:
    """A listener to the results of a training. Derive from it, and write the methods of interest; the others do nothing.

    Every device has its observers, and a test comes after the step it follows and before the epoch that it ends. What is to be
    written once belongs on device 0 (`convoy.is_first()`); what talks to a network belongs into a
    :class:`convoy.runlog.loggers.Logger`, which never delays a step.
    """

    def on_step_end(self, step: int, samples: int) -> None:
        """At the end of every step of the optimizer (from 0), at once: its loss may not be known yet."""

    def on_step(self, result: StepResult) -> None:
        """After every step of the optimizer, once its loss is read: where an accelerator computes, up to two steps later, but
        before every test and the end of an epoch."""

    def on_evaluation(self, result: Evaluation) -> None:
        """After every test."""

    def on_epoch(self, result: EpochResult) -> None:
        """After every epoch."""


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
