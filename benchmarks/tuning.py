"""The search for DistributedDataParallel's best shares and options, as an expert would do it by hand.

It sees the world through one function that tries a setting and tells what all devices agreed it took, so every device makes
the same decisions. What the search costs is not counted to DDP.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from convoy.sharding.shares import Shares, apportion, even

BUCKETS_MB = (25, 5, 100)
"""Sizes of gradient buckets to try; the first is PyTorch's own."""

MOST_SHARINGS = 5
MOST_NEIGHBOURS = 12


@dataclass(frozen=True, slots=True)
class Setting:
    """Samples of each rank, DistributedDataParallel's options, and whether ZeroRedundancyOptimizer shares out its updates."""

    shares: Shares
    bucket_mb: int = BUCKETS_MB[0]
    static_graph: bool = False
    zero: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """What a setting took.

    Attributes:
        step_s: seconds of a step.
        compute_s: of each rank, seconds of forward and backward without communication.
        cost_s: seconds that the trial itself took.
    """

    step_s: float
    compute_s: tuple[float, ...]
    cost_s: float


Try = Callable[[Setting], Trial]


class Search:
    """Settings tried so far, the best of them, and the seconds that are left."""

    def __init__(self, attempt: Try, budget_s: float) -> None:
        self._attempt, self.left_s = attempt, budget_s
        self.trials: dict[Setting, Trial] = {}

    def attempt(self, setting: Setting) -> Trial:
        """The trial of a setting; each is made once."""
        if setting not in self.trials:
            trial = self.trials[setting] = self._attempt(setting)
            self.left_s -= trial.cost_s
        return self.trials[setting]

    @property
    def best(self) -> Setting:
        """The setting with the shortest step."""
        return min(self.trials, key=lambda setting: self.trials[setting].step_s)


def tune_even(
    attempt: Try, batch: int, ranks: int, budget_s: float, known: Setting | None = None
) -> tuple[Setting, Trial]:
    """Even shares with the best options.

    Args:
        known: the best at another batch of the same net: its options are taken over, because the gradients are the same.
    """
    search = Search(attempt, budget_s)
    if known is None:
        search.attempt(Setting(even(batch, ranks)))
        _try_options(search)
    else:
        search.attempt(replace(known, shares=even(batch, ranks)))
    return search.best, search.trials[search.best]


def tune(
    attempt: Try, batch: int, speeds: Sequence[float], budget_s: float, known: Setting | None = None
) -> tuple[Setting, Trial]:
    """The best shares and options found.

    First shares by speed, corrected by what each rank's computing really takes at its share; then the options; then
    samples are moved from the slowest rank to others, as long as that helps. The first correction and the options are
    tried in any case, the rest as long as the budget lasts.

    Args:
        batch: global batch, in samples.
        speeds: samples/s of each rank alone.
        budget_s: about the seconds of the trials.
        known: see `tune_even`.
    """
    search = Search(attempt, budget_s)
    now = list(speeds)
    options = known if known is not None else Setting(())
    setting = replace(options, shares=apportion(batch, now))
    for number in range(MOST_SHARINGS):
        trial = search.attempt(setting)
        now = _corrected(now, setting.shares, trial.compute_s)
        setting = replace(options, shares=apportion(batch, now))
        if setting in search.trials or (number > 0 and search.left_s <= 0):
            break
    if known is None:
        _try_options(search)
    _try_neighbours(search, batch)
    return search.best, search.trials[search.best]


def _corrected(speeds: Sequence[float], shares: Shares, compute_s: Sequence[float]) -> list[float]:
    """Samples/s of each rank at its share; a rank without samples keeps what was known of it."""
    rows = zip(speeds, shares, compute_s, strict=True)
    return [share / seconds if share and seconds > 0 else speed for speed, share, seconds in rows]


def _try_options(search: Search) -> None:
    shares = search.best
    for bucket_mb in BUCKETS_MB[1:]:
        search.attempt(replace(shares, bucket_mb=bucket_mb))
    search.attempt(replace(search.best, static_graph=True))
    search.attempt(replace(search.best, zero=True))


def _try_neighbours(search: Search, batch: int) -> None:
    """Move some samples from the rank that computes longest to each other one; ever fewer."""
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
            search.attempt(replace(best, shares=_shifted(best.shares, source, target, moved)))
        if search.best == best:
            moved //= 2


def _shifted(shares: Shares, source: int, target: int, count: int) -> Shares:
    changed = list(shares)
    changed[source] -= count
    changed[target] += count
    return tuple(changed)
