"""Results of a training run: observers, losses that are read some steps late, and a record with rollback.

On an accelerator a loss is read `LATE_STEPS` after its step, so that no step waits for the accelerator.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convoy.comm.control_messages import gather
from convoy.comm.group import Group
from convoy.machine.accelerator import in_host_memory, queued

LATE_STEPS = 2
"""How many steps late losses are read on an accelerator; by then they are in host memory."""


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


class UnreadStep:
    """A step whose loss, the sum of `parts`, is being copied from an accelerator without waiting."""

    def __init__(self, result: StepResult, parts: Sequence[Tensor]) -> None:
        row = torch.stack([part.detach().reshape(()) for part in parts])
        self.result, self.ended_s, self._row = result, result.ended_s, row
        self._copied: torch.Event | None = None
        if row.device.type != "cpu":
            self._row = in_host_memory(row)
            self._row.copy_(row, non_blocking=True)
            self._copied = queued(row.device)

    def read(self) -> StepResult:
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        return replace(self.result, loss=float(sum(self._row.tolist())), ended_s=self.ended_s)


class LateLosses:
    """A queue of steps with losses that are read `late` steps later."""

    def __init__(self, late: int) -> None:
        self.late = late
        self._unread: deque[UnreadStep] = deque()

    def add(self, result: StepResult, parts: Sequence[Tensor]) -> UnreadStep:
        """Add a step; its loss is the sum of the parts, one per micro-batch."""
        self._unread.append(UnreadStep(result, parts))
        return self._unread[-1]

    def due(self, late: int | None = None) -> Iterator[StepResult]:
        """Yield all steps except the latest `late`."""
        while len(self._unread) > (self.late if late is None else late):
            yield self._unread.popleft().read()

    def known(self) -> list[StepResult]:
        return [each.read() for each in self._unread]

    def drop_from(self, step: int) -> None:
        """Drop this step and those after it: they are repeated."""
        while self._unread and self._unread[-1].result.step >= step:
            self._unread.pop()


def lateness(device: torch.device, group: Group | None = None) -> int:
    """Return how many steps late losses are read. Every device of a group calls it and gets the same number.

    So a NaN ends the training at the same step on all devices.
    """
    kinds = [device.type] if group is None else gather(group, "device types", device.type)
    return LATE_STEPS if any(kind != "cpu" for kind in kinds) else 0


@dataclass
class History:
    """The results of a training run.

    Attributes:
        losses: of every step, over the global batch.
        epochs: one result per epoch.
        evaluations: all tests, in order.
        best: the first test of the highest accuracy.
        diverged: the first step with a NaN or infinite loss, counted from 1.
    """

    losses: list[float] = field(default_factory=list)
    epochs: list[EpochResult] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    best: Evaluation | None = None
    diverged: int | None = None


class Place(NamedTuple):
    """A position in a training: steps, epoch, steps of that epoch. At its start the previous epoch has been tested."""

    step: int
    epoch: int
    batch: int


@dataclass
class TrainingRecord:
    """The history of one training, with rollback to a snapshot, and forward again to a later checkpoint.

    Attributes:
        begun: the step number of the first loss.
        samples: the epoch and the number of samples of every step in the history.
        undone: loss and samples of rolled-back steps, by step.
        tests, epochs, diverged: also those that were rolled back.
    """

    history: History = field(default_factory=History)
    begun: int = 0
    samples: list[tuple[int, int]] = field(default_factory=list)
    undone: dict[int, tuple[float, tuple[int, int]]] = field(default_factory=dict)
    tests: dict[int, Evaluation] = field(default_factory=dict)
    epochs: dict[int, EpochResult] = field(default_factory=dict)
    diverged: int | None = None

    def step(self, loss: float, epoch: int, samples: int) -> None:
        row, before = (epoch, samples), self.samples[-1:]
        self.undone.pop(self.begun + len(self.samples), None)
        self.history.losses.append(loss)
        self.samples.append(before[0] if before == [row] else row)  # equal steps share one tuple

    def rows_of(self, epoch: int) -> list[tuple[float, int]]:
        first, end = bisect_left(self.samples, (epoch,)), bisect_left(self.samples, (epoch + 1,))
        rows = zip(self.history.losses[first:end], self.samples[first:end], strict=True)
        return [(loss, count) for loss, (_, count) in rows]

    def test(self, epoch: int, step: int, accuracy: float, *, ends_epoch: bool) -> Evaluation:
        best = self.history.best
        made = Evaluation(epoch, step, accuracy, ends_epoch, is_best=best is None or accuracy > best.accuracy)
        self.history.evaluations.append(made)
        self.tests[step] = made
        if made.is_best:
            self.history.best = made
        return made

    def epoch(self, result: EpochResult) -> None:
        self.history.epochs.append(result)
        self.epochs[result.epoch] = result

    def diverge(self, step: int) -> None:
        self.history.diverged = self.diverged = step

    def go_back(self, place: Place) -> None:
        """End the history at a place: an earlier one, or a later one if its steps were rolled back before."""
        history, begun = self.history, self.begun
        self.begun = min(begun, place.step)
        kept = max(0, place.step - begun)
        self.undone.update(enumerate(zip(history.losses[kept:], self.samples[kept:], strict=True), begun + kept))
        del history.losses[kept:], self.samples[kept:]
        for loss, (epoch, count) in self._undone_from(begun + len(history.losses), place.step):
            self.step(loss, epoch, count)
        history.epochs = [self.epochs[epoch] for epoch in sorted(self.epochs) if epoch < place.epoch]
        tests = (self.tests[step] for step in sorted(self.tests))
        history.evaluations = [each for each in tests if each.step < place.step or each.epoch < place.epoch]
        history.best = next((each for each in reversed(history.evaluations) if each.is_best), None)
        history.diverged = self.diverged if self.diverged is not None and self.diverged <= place.step else None

    def _undone_from(self, step: int, end: int | None = None) -> list[tuple[float, tuple[int, int]]]:
        """Return the consecutive rolled-back steps from `step`, up to `end`."""
        found = []
        while step in self.undone and (end is None or step < end):
            found.append(self.undone[step])
            step += 1
        return found

    def run_state(self, unread: Sequence[StepResult]) -> dict[str, Any]:
        """Return the results, and the losses of the current epoch, as JSON. `unread`: steps whose losses are not read yet."""
        epoch = unread[-1].epoch if unread else self.samples[-1][0] if self.samples else 0
        first = bisect_left(self.samples, (epoch,))
        rows = [*zip(self.history.losses[first:], self.samples[first:], strict=True)]
        rows += [(each.loss, (each.epoch, each.samples)) for each in unread if each.epoch == epoch]
        end = self.begun + len(self.samples) + len(unread)
        begun = end - len(rows)
        rows += self._undone_from(end)
        return {
            "begun": begun, "losses": [loss for loss, _ in rows],
            "samples": [each for _, each in rows], "diverged": self.diverged,
            "epochs": [asdict(each) for each in self.epochs.values()],
            "evaluations": [asdict(each) for each in self.tests.values()],
        }  # fmt: skip

    def take_over(self, run_state: dict[str, Any]) -> None:
        """Continue from the `run_state` of another device. Call `go_back` to its place afterwards."""
        self.begun = run_state["begun"]
        self.samples = [(int(epoch), int(count)) for epoch, count in run_state["samples"]]
        self.history.losses, self.diverged = list(run_state["losses"]), run_state["diverged"]
        self.epochs = {row["epoch"]: EpochResult(**row) for row in run_state["epochs"]}
        self.tests = {row["step"]: Evaluation(**row) for row in run_state["evaluations"]}
