"""Score rebalancing from four trainings: response time, later share changes, and effect on the loss."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.score import middle_spread

ANSWER = 10
"""Steps that rebalancing has for its answer; what moves later is a swing."""

BACK = 0.05
"""Throughput is back when it is within five per cent of that of the best split."""

WINDOW = 5
"""Steps whose median tells the step time at one point of a run."""

LATE = 20
"""Steps whose median counts as the step time of a run."""


@dataclass
class Run:
    """The record of one training.

    Attributes:
        step_s: wall-clock seconds of each step from a common start to the end of the slowest device, the rebalancer's part
            included.
        compute_s: of each step, the slowest device's seconds of computing.
        losses: of each step.
        shares: of each step, the shares of all coupled axes of the plan.
        reshards: (step, what and why).
    """

    step_s: list[float] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    shares: list[dict[str, list[int]]] = field(default_factory=list)
    reshards: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Summary:
    """The scores of the four runs.

    Attributes:
        step_s, compute_s: medians of the last steps of each run.
        back_after: steps after the slow-down until shares have changed and the throughput is within 5 % of that of the best
            split in the same steps; None: never.
        of_best: throughput over that of the best split in the same steps, after the steps for the answer.
        left_alone: the same of the run whose shares stay. Where that is within 5 % too, nothing can be told.
        last_change: steps after the slow-down until the last change of shares within those; None where there was none.
        swing: the largest change of a share later, as a part of the whole.
        noise: middle half of the computing times of a run whose shares stay, over their median, times the largest share: so
            much would a share move that followed each time.
        later_steps: over how many steps swings were looked for.
        losses_apart: the largest difference of the loss from the undisturbed run's.
        losses_apart_by_rounding: the same of the run that had the best split from the start: another order of additions.
        reshards: (step, what and why).
    """

    step_s: Mapping[str, float]
    compute_s: Mapping[str, float]
    back_after: int | None
    of_best: float
    left_alone: float
    last_change: int | None
    swing: float
    noise: float
    later_steps: int
    losses_apart: float
    losses_apart_by_rounding: float
    reshards: Sequence[tuple[int, str]]

    @property
    def is_back(self) -> bool:
        """Return whether throughput is within 5 % of the best split after at most ten steps and stays there."""
        soon = self.back_after is not None and self.back_after <= ANSWER
        return soon and self.of_best >= 1 - BACK > self.left_alone

    @property
    def is_calm(self) -> bool:
        return self.swing <= self.noise

    @property
    def is_same_curve(self) -> bool:
        """Return whether the loss differs at most twice as much as another split's rounding makes it."""
        return self.losses_apart <= 2 * self.losses_apart_by_rounding


def summarise(runs: Mapping[str, Run], slow_at: int) -> Summary:
    """Score the four runs of `benchmarks.rebalance`, given by name."""
    undisturbed, other, best = runs["undisturbed"], runs["rebalanced"], runs["best split"]
    # In the same turns, the machine was in the same mood.
    of_best, alone = (
        [best_s / each_s for best_s, each_s in zip(best.step_s, run.step_s, strict=True)]
        for run in (other, runs["left alone"])
    )
    settled = slow_at + ANSWER
    changes = [step + 1 - slow_at for step, _ in other.reshards if step >= slow_at]
    largest = max(part / sum(shares) for shares in other.shares[settled].values() for part in shares)
    return Summary(
        step_s={name: statistics.median(run.step_s[-LATE:]) for name, run in runs.items()},
        compute_s={name: statistics.median(run.compute_s[-LATE:]) for name, run in runs.items()},
        back_after=_back_after(of_best[slow_at:], min(changes)) if changes else None,
        of_best=statistics.median(of_best[settled : settled + LATE]),
        left_alone=statistics.median(alone[settled : settled + LATE]),
        last_change=max((change for change in changes if change <= ANSWER), default=None),
        swing=_swing(other.shares[settled - 1 :]),
        noise=middle_spread(runs["left alone"].compute_s[settled:]) * largest,
        later_steps=len(other.shares) - settled,
        losses_apart=_apart(undisturbed, other),
        losses_apart_by_rounding=_apart(undisturbed, best),
        reshards=other.reshards,
    )


def _back_after(of_best: Sequence[float], changed: int) -> int | None:
    places = range(changed, len(of_best) - WINDOW + 1)
    return next((n for n in places if statistics.median(of_best[n : n + WINDOW]) >= 1 - BACK), None)


def _swing(shares: Sequence[Mapping[str, Sequence[int]]]) -> float:
    first = shares[0]
    return max(
        abs(now - before) / sum(first[name])
        for each in shares
        for name in first
        for now, before in zip(each[name], first[name], strict=True)
    )


def _apart(one: Run, other: Run) -> float:
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def as_json(summary: Summary) -> dict[str, object]:
    """Return the scores with their verdicts."""
    return asdict(summary) | {"back": summary.is_back, "calm": summary.is_calm, "same_curve": summary.is_same_curve}
