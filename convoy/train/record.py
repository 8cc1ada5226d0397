"""Records the results of a training run, with rollback to an earlier step, and reads losses some steps late.

On an accelerator a loss is read `LATE_STEPS` after its step, so that no step waits for the accelerator.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convoy.comm.control_messages import gather
from convoy.comm.group import Group
from convoy.machine.accelerator import in_host_memory, queued
from convoy.train.observer import EpochResult, Evaluation

LATE_STEPS = 2
"""How many steps late losses are read on an accelerator; by then they are in host memory."""


class UnreadNumber:
    """A sum of numbers that are being copied to the host.

    Args:
        parts: one per micro-batch of the step. They are copied from an accelerator after its queued work, without waiting.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        row = torch.stack([part.detach().reshape(()) for part in parts])
        self._row = row
        self._copied: torch.Event | None = None
        if row.device.type != "cpu":
            self._row = in_host_memory(row)
            self._row.copy_(row, non_blocking=True)
            self._copied = queued(row.device)

    def read(self) -> float:
        """Return the sum, after waiting for the copy if necessary."""
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        return float(sum(self._row.tolist()))


@dataclass
class Unread:
    """A step with an unread loss; fields as in `StepResult`."""

    step: int
    epoch: int
    loss: UnreadNumber | float
    samples: int
    lr: float
    ended_s: float = 0.0

    def read(self) -> tuple["Unread", float]:
        return self, self.loss if isinstance(self.loss, float) else self.loss.read()


class LateLosses:
    """A queue of steps with unread losses.

    Args:
        late: after how many steps a loss is read.
    """

    def __init__(self, late: int) -> None:
        self.late = late
        self._unread: deque[Unread] = deque()

    def add(self, step: Unread) -> None:
        self._unread.append(step)

    def due(self) -> Iterator[tuple[Unread, float]]:
        """Yield all steps except the latest `late`, with their losses."""
        while len(self._unread) > self.late:
            yield self._unread.popleft().read()

    def rest(self) -> Iterator[tuple[Unread, float]]:
        """Yield all steps with their losses."""
        while self._unread:
            yield self._unread.popleft().read()

    def known(self) -> list[tuple[Unread, float]]:
        """Return all steps with their losses, and keep them."""
        return [each.read() for each in self._unread]

    def drop_from(self, step: int) -> None:
        """Drop this step and those after it: they are repeated."""
        while self._unread and self._unread[-1].step >= step:
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
        begun: the step of the first loss.
        samples: the epoch and the number of samples of every step in the history.
        undone: loss and samples of rolled-back steps, by step.
        tests, epochs: all results, by step and by epoch, including rolled-back ones.
        diverged: as in the history, also after a rollback.
    """

    history: History = field(default_factory=History)
    begun: int = 0
    samples: list[tuple[int, int]] = field(default_factory=list)
    undone: dict[int, tuple[float, tuple[int, int]]] = field(default_factory=dict)
    tests: dict[int, Evaluation] = field(default_factory=dict)
    epochs: dict[int, EpochResult] = field(default_factory=dict)
    diverged: int | None = None

    def step(self, loss: float, epoch: int, samples: int) -> None:
        """Add the next step."""
        row, before = (epoch, samples), self.samples[-1:]
        self.undone.pop(self.begun + len(self.samples), None)
        self.history.losses.append(loss)
        self.samples.append(before[0] if before == [row] else row)  # equal steps share one tuple

    def rows_of(self, epoch: int) -> list[tuple[float, int]]:
        """Return losses and samples of the steps of an epoch."""
        first, end = bisect_left(self.samples, (epoch,)), bisect_left(self.samples, (epoch + 1,))
        rows = zip(self.history.losses[first:end], self.samples[first:end], strict=True)
        return [(loss, count) for loss, (_, count) in rows]

    def test(self, epoch: int, step: int, accuracy: float, *, ends_epoch: bool) -> Evaluation:
        """Add the next test."""
        best = self.history.best
        made = Evaluation(epoch, step, accuracy, ends_epoch, is_best=best is None or accuracy > best.accuracy)
        self.history.evaluations.append(made)
        self.tests[step] = made
        if made.is_best:
            self.history.best = made
        return made

    def epoch(self, result: EpochResult) -> None:
        """Add the next epoch."""
        self.history.epochs.append(result)
        self.epochs[result.epoch] = result

    def diverge(self, step: int) -> None:
        """Note that the loss of a step, counted from 1, is NaN or infinite."""
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

    def run_state(self, unread: Sequence[tuple[Unread, float]]) -> dict[str, Any]:
        """Return the results and the losses of the current epoch, as JSON.

        Args:
            unread: steps after the history, with their losses.
        """
        epoch = unread[-1][0].epoch if unread else self.samples[-1][0] if self.samples else 0
        first = bisect_left(self.samples, (epoch,))
        rows = [*zip(self.history.losses[first:], self.samples[first:], strict=True)]
        rows += [(loss, (each.epoch, each.samples)) for each, loss in unread if each.epoch == epoch]
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
        """Continue from the `run_state` of another device; `go_back` to its place must follow."""
        self.begun = run_state["begun"]
        self.samples = [(int(epoch), int(count)) for epoch, count in run_state["samples"]]
        self.history.losses, self.diverged = list(run_state["losses"]), run_state["diverged"]
        self.epochs = {row["epoch"]: EpochResult(**row) for row in run_state["epochs"]}
        self.tests = {row["step"]: Evaluation(**row) for row in run_state["evaluations"]}
