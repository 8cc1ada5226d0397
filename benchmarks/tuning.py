"""Search for DistributedDataParallel's best shares and options as an expert would.

It sees the world through one function that tries a setting and tells what all devices agreed it took, so every device makes
the same decisions. What the search costs is not counted to DDP.

A setting is tried only where it can win: its step cannot take less than its gradients' way over the wire behind the
computing that they wait for (`wire.py`), both as measured. What is not tried is told, with that number. Where steps are long,
a setting is given up after its first step if that is far behind, and no new one is begun for which no seconds are left. The
three best are tried once more before one of them is chosen.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.wire import Gradients, Wire
from convoy.layout.shares import Shares, apportion, even

BUCKETS_MB = (25, 5, 100)
"""Sizes of gradient buckets to try; the first is PyTorch's own, whose first bucket is closed at 1 MB."""

MOST_SHARINGS = 5
MOST_NEIGHBOURS = 12

WORTH = 0.97
"""A setting is tried if its step could take less than this part of the best."""

LONG_S = 1.0
"""From here on a step is long: one that is not counted is enough, and no noise of a few milliseconds decides."""

GIVEN_UP = 1.3
"""A setting whose first step takes so many times that of the best has no second one, where steps are long."""

FINALISTS, NEAR = 3, 1.1
"""So many of the best are tried once more, those within this factor of the best."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Samples per rank, DistributedDataParallel's options, and whether ZeroRedundancyOptimizer distributes the
    updates."""

    shares: Shares
    bucket_mb: int = BUCKETS_MB[0]
    static_graph: bool = False
    zero: bool = False

    @property
    def cap_mb(self) -> float | None:
        """Return the cap as DistributedDataParallel takes it; None: its default."""
        return None if self.bucket_mb == BUCKETS_MB[0] else self.bucket_mb

    @property
    def caps_bytes(self) -> tuple[float, float]:
        """Return the sizes at which a bucket closes: the first one, and every other."""
        return ((1 if self.cap_mb is None else self.bucket_mb) << 20, self.bucket_mb << 20)

    def __str__(self) -> str:
        options = [f"{self.bucket_mb} MB"] + ["static graph"] * self.static_graph + ["shared updates"] * self.zero
        return f"batch({','.join(map(str, self.shares))}), {', '.join(options)}"


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of trying a setting.

    Attributes:
        step_s: seconds of a step; of the first one where the setting was given up.
        compute_s: of each rank, seconds of forward and backward without communication.
        cost_s: seconds that the trial itself took.
        first_s: seconds of the first step, which is not counted.
        given_up: whether it had no other step.
        gradients: when each was ready.
    """

    step_s: float
    compute_s: tuple[float, ...]
    cost_s: float
    first_s: float = 0.0
    given_up: bool = False
    gradients: Gradients | None = None


@dataclass(frozen=True)
class Considered:
    """A setting that the search reached, as shown on the page.

    Attributes:
        least_s: what its step cannot take less than; None: not known before its trial.
        step_s: measured; None: it was not tried.
        end: "tried", "given up after its first step", "cannot win", "no time left".
    """

    setting: str
    least_s: float | None
    step_s: float | None
    end: str


Try = Callable[[Setting, float], Trial]
"""Tries a setting; the second argument is how long its first step may take, else it is given up."""


class Search:
    """The settings tried so far, the best of them, and the remaining seconds.

    Args:
        wire: None: nothing is known of it, and every setting may win.
    """

    def __init__(self, attempt: Try, budget_s: float, wire: Wire | None = None) -> None:
        self._attempt, self.left_s, self.wire = attempt, budget_s, wire
        self.trials: dict[Setting, Trial] = {}
        self.considered: dict[Setting, Considered] = {}

    def attempt(self, setting: Setting) -> Trial:
        """Try a setting once and cache its trial."""
        if setting not in self.trials:
            least_s = self.least_s(setting)
            limit_s = self.trials[self.best].first_s * GIVEN_UP if self.trials and self.is_long else math.inf
            trial = self.trials[setting] = self._attempt(setting, limit_s)
            self.left_s -= trial.cost_s
            end = "given up after its first step" if trial.given_up else "tried"
            self.considered[setting] = Considered(str(setting), least_s, trial.step_s, end)
        return self.trials[setting]

    def consider(self, setting: Setting, *, in_any_case: bool = False) -> None:
        """Try a setting if it can win and there is time.

        Args:
            in_any_case: also where a trial takes more seconds than are left.
        """
        if setting in self.trials:
            return
        least_s = self.least_s(setting)
        if least_s is not None and least_s >= WORTH * self.trials[self.best].step_s:
            self.considered[setting] = Considered(str(setting), least_s, None, "cannot win")
        elif self.left_s <= self._needed_s(in_any_case):
            self.considered[setting] = Considered(str(setting), least_s, None, "no time left")
        else:
            self.attempt(setting)

    def least_s(self, setting: Setting) -> float | None:
        """Return a lower bound of the step from the trial with the nearest shares; None before the first."""
        known = [(s, t) for s, t in self.trials.items() if t.gradients is not None]
        if self.wire is None or not known:
            return None
        near, trial = min(
            known, key=lambda row: sum(abs(a - b) for a, b in zip(row[0].shares, setting.shares, strict=True))
        )
        assert trial.gradients is not None
        ready = trial.gradients.scaled(near.shares, setting.shares)
        return self.wire.least_s(ready, setting.caps_bytes, broadcasts=setting.zero)

    def choose(self) -> tuple[Setting, Trial]:
        """Return the best setting after another trial of those that are about as fast."""
        best_s = self.trials[self.best].step_s
        near = sorted((t.step_s, n) for n, t in enumerate(self.trials.values()) if t.step_s <= NEAR * best_s)
        rows = [list(self.trials.items())[n] for _, n in near[:FINALISTS]]
        if len(rows) == 1 or (self.is_long and self.left_s <= len(rows) * self._cost_s):
            return self.best, self.trials[self.best]
        again = [(setting, trial, self._attempt(setting, math.inf)) for setting, trial in rows]
        means = [(statistics.fmean((trial.step_s, other.step_s)), n) for n, (_, trial, other) in enumerate(again)]
        for (mean_s, _), (setting, _, _) in zip(means, again, strict=True):
            self.considered[setting] = replace(self.considered[setting], step_s=mean_s)
        mean_s, n = min(means)
        return again[n][0], replace(again[n][1], step_s=mean_s)

    @property
    def best(self) -> Setting:
        return min((s for s, t in self.trials.items() if not t.given_up), key=lambda s: self.trials[s].step_s)

    @property
    def is_long(self) -> bool:
        return self.trials[self.best].step_s >= LONG_S

    def _needed_s(self, in_any_case: bool) -> float:
        """Return the seconds that must remain for another trial; short steps need few."""
        if self.is_long:
            return 0.0 if in_any_case else self._cost_s
        return -math.inf if in_any_case else 0.0

    @property
    def _cost_s(self) -> float:
        return self.trials[self.best].cost_s


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result of the search and every setting it reached."""

    setting: Setting
    trial: Trial
    considered: tuple[Considered, ...]

    @classmethod
    def of(cls, search: Search) -> "Tuned":
        setting, trial = search.choose()
        return cls(setting, trial, tuple(search.considered.values()))


def tune_even(
    attempt: Try, batch: int, ranks: int, budget_s: float, known: Setting | None = None, wire: Wire | None = None
) -> Tuned:
    """Search the best options for even shares.

    Args:
        known: the best at another batch of the same net: its options are taken over, because the gradients are the same.
    """
    search = Search(attempt, budget_s, wire)
    if known is None:
        search.attempt(Setting(even(batch, ranks)))
        _try_options(search)
    else:
        search.attempt(replace(known, shares=even(batch, ranks)))
    return Tuned.of(search)


def tune(
    attempt: Try,
    batch: int,
    speeds: Sequence[float],
    budget_s: float,
    known: Setting | None = None,
    wire: Wire | None = None,
) -> Tuned:
    """Search the best shares and options.

    First shares by speed, corrected by what each rank's computing really takes at its share; then the options; then
    samples are moved from the slowest rank to others, as long as that helps. Where steps are short, the first correction and
    the options are tried in any case if they can win, the rest as long as the budget lasts.

    Args:
        batch: global batch, in samples.
        speeds: samples/s of each rank alone.
        budget_s: about the seconds of the trials.
        known: see `tune_even`.
        wire: what gradients have to cross.
    """
    search = Search(attempt, budget_s, wire)
    now = list(speeds)
    options = known if known is not None else Setting(())
    setting = replace(options, shares=apportion(batch, now))
    search.attempt(setting)
    for number in range(MOST_SHARINGS - 1):
        if setting not in search.trials or search.trials[setting].given_up:
            break
        now = _corrected(now, setting.shares, search.trials[setting].compute_s)
        setting = replace(options, shares=apportion(batch, now))
        if setting in search.trials:
            break
        search.consider(setting, in_any_case=number == 0)
    if known is None:
        _try_options(search)
    _try_neighbours(search, batch)
    return Tuned.of(search)


def _corrected(speeds: Sequence[float], shares: Shares, compute_s: Sequence[float]) -> list[float]:
    """Return samples/s of each rank at its share; a rank without samples keeps its known speed."""
    rows = zip(speeds, shares, compute_s, strict=True)
    return [share / seconds if share and seconds > 0 else speed for speed, share, seconds in rows]


def _try_options(search: Search) -> None:
    """Try the options; short steps ignore the budget."""
    shares, in_any_case = search.best, not search.is_long
    for bucket_mb in BUCKETS_MB[1:]:
        search.consider(replace(shares, bucket_mb=bucket_mb), in_any_case=in_any_case)
    search.consider(replace(search.best, static_graph=True), in_any_case=in_any_case)
    search.consider(replace(search.best, zero=True), in_any_case=in_any_case)


def _try_neighbours(search: Search, batch: int) -> None:
    """Move samples from the slowest rank to each other rank, in decreasing amounts."""
    moved, tries = max(1, batch // 16), 0
    while moved and search.left_s > 0 and tries < MOST_NEIGHBOURS:
        best = search.best
        compute_s = search.trials[best].compute_s
        source = compute_s.index(max(compute_s))
        if best.shares[source] < moved:
            moved //= 2
            continue
        others = sorted((r for r in range(len(compute_s)) if r != source), key=lambda r: compute_s[r])
        for target in others[:2]:
            tries += 1
            search.consider(replace(best, shares=_shifted(best.shares, source, target, moved)))
        if search.best == best:
            moved //= 2


def _shifted(shares: Shares, source: int, target: int, count: int) -> Shares:
    changed = list(shares)
    changed[source] -= count
    changed[target] += count
    return tuple(changed)
