"""What a training run showed, and how far it is. Devices that go back to an earlier step forget what came behind it."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from convoy.train.late_losses import Unread
from convoy.train.observer import EpochResult, Evaluation


@dataclass
class History:
    """What a training run showed.

    Attributes:
        losses: of every step, over the whole batch.
        epochs: one result per epoch.
        evaluations: all tests, in order.
        best: the first test of the highest accuracy.
        diverged: the first step whose loss was NaN or infinite, counted from 1.
    """

    losses: list[float] = field(default_factory=list)
    epochs: list[EpochResult] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    best: Evaluation | None = None
    diverged: int | None = None


class Place(NamedTuple):
    """How far a training is: steps, the epoch, and steps of that. Where an epoch begins, the one before has been tested."""

    step: int
    epoch: int
    batch: int


@dataclass
class Record:
    """The history of one training, which can go back, and forward again to a checkpoint of a step that was undone.

    Attributes:
        begun: the step of the first loss.
        samples: of every step in the history: its epoch, and how many.
        undone: by step, losses and samples that devices went back behind.
        tests, epochs: all that were ever made, also those that were undone: by step, and by epoch.
        diverged: the same of `History.diverged`.
    """

    history: History = field(default_factory=History)
    begun: int = 0
    samples: list[tuple[int, int]] = field(default_factory=list)
    undone: dict[int, tuple[float, tuple[int, int]]] = field(default_factory=dict)
    tests: dict[int, Evaluation] = field(default_factory=dict)
    epochs: dict[int, EpochResult] = field(default_factory=dict)
    diverged: int | None = None

    def step(self, loss: float, epoch: int, samples: int) -> None:
        """The next step."""
        row, before = (epoch, samples), self.samples[-1:]
        self.undone.pop(self.begun + len(self.samples), None)
        self.history.losses.append(loss)
        self.samples.append(
            before[0] if before == [row] else row
        )  # one value for all like it: a long training has many steps

    def rows_of(self, epoch: int) -> list[tuple[float, int]]:
        """Losses and samples of the steps of an epoch."""
        first, end = bisect_left(self.samples, (epoch,)), bisect_left(self.samples, (epoch + 1,))
        return [
            (loss, count)
            for loss, (_, count) in zip(self.history.losses[first:end], self.samples[first:end], strict=True)
        ]

    def test(self, epoch: int, step: int, accuracy: float, *, ends_epoch: bool) -> Evaluation:
        """The next test."""
        best = self.history.best
        made = Evaluation(epoch, step, accuracy, ends_epoch, is_best=best is None or accuracy > best.accuracy)
        self.history.evaluations.append(made)
        self.tests[step] = made
        if made.is_best:
            self.history.best = made
        return made

    def epoch(self, result: EpochResult) -> None:
        """The next epoch is over."""
        self.history.epochs.append(result)
        self.epochs[result.epoch] = result

    def diverge(self, step: int) -> None:
        """The loss of a step, counted from 1, is no number."""
        self.history.diverged = self.diverged = step

    def go_back(self, place: Place) -> None:
        """Let the history end at a place: before its present end or, at a checkpoint of a step that was undone, behind it.

        What was undone and is not done again was seen in the same numbers.
        """
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
        """What is known of the steps from one on, up to another, without a gap."""
        found = []
        while step in self.undone and (end is None or step < end):
            found.append(self.undone[step])
            step += 1
        return found

    def run_state(self, unread: Sequence[tuple[Unread, float]]) -> dict[str, Any]:
        """What has happened, as JSON: results, and losses from the beginning of the present epoch on.

        Args:
            unread: steps behind the history, with their losses.
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
        """What has happened before this device came; `go_back` to its place must follow."""
        self.begun, self.samples = (
            run_state["begun"],
            [(int(epoch), int(count)) for epoch, count in run_state["samples"]],
        )
        self.history.losses, self.diverged = list(run_state["losses"]), run_state["diverged"]
        self.epochs = {row["epoch"]: EpochResult(**row) for row in run_state["epochs"]}
        self.tests = {row["step"]: Evaluation(**row) for row in run_state["evaluations"]}
