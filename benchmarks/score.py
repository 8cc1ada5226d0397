"""Score predictions and choices with pure functions of measured rows."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.configurations import ALONE, AUTO, IN_TURN, PLAN_NAMES
from benchmarks.results import Row

NEAR = 0.03
"""A choice is right when it is within three per cent of the best plan that was measured."""

TUNED = "ddp-tuned"

KNOWN_TO = 0.02
"""`auto` and tuned DDP get further rounds until the standard error of their ratio is below this part of it."""

STEADY = 0.05
"""A row is steady when the middle half of its rounds lies within five per cent of their median."""


def error(row: Row) -> float:
    """(predicted - measured) / measured: above 0 where the run was faster than predicted."""
    if row.predicted_s is None:
        raise ValueError(f"{row.plan} of {row.net} on {row.fleet} has no prediction: ask only rows that have one")
    return row.predicted_s / row.median_s - 1


def error_at_measured_speed(row: Row) -> float:
    """Return the error with each round scaled to the machine's speed during measuring."""
    if row.predicted_s is None:
        raise ValueError(f"{row.plan} of {row.net} on {row.fleet} has no prediction: ask only rows that have one")
    return row.predicted_s / row.at_measured_speed_s - 1


def full_spread(seconds: Sequence[float]) -> float:
    """(slowest - fastest) / median."""
    return (max(seconds) - min(seconds)) / statistics.median(seconds)


def middle_spread(seconds: Sequence[float]) -> float:
    """(third quartile - first quartile) / median; 0 for a single round. Quartiles lie on the rounds or between two."""
    if len(seconds) < 2:
        return 0.0
    first, _, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return (third - first) / statistics.median(seconds)


def standard_error(seconds: Sequence[float]) -> float:
    """Return the standard error of the median relative to it: sqrt(pi / 2) * s / sqrt(n) / median (normal noise)."""
    if len(seconds) < 2:
        return math.inf
    deviation = statistics.stdev(seconds) / math.sqrt(len(seconds))
    return math.sqrt(math.pi / 2) * deviation / statistics.median(seconds)


def ratio_of_pairs(slower_s: Sequence[float], faster_s: Sequence[float]) -> tuple[float, float]:
    """Return how many times as fast the second is, and its standard error: the median over pairs of one round.

    The two of a pair have their turns one after the other, so that what slows the machine for longer than a turn slows both.
    """
    ratios = [a / b for a, b in zip(slower_s, faster_s, strict=False)]
    ratio = statistics.median(ratios)
    return ratio, ratio * standard_error(ratios)


def steady(row: Row) -> bool:
    """Return whether the noise of a row is low enough to judge a prediction to a few per cent."""
    return middle_spread(row.rounds_s) <= STEADY


def splits_filters(row: Row) -> bool:
    """Return whether a row counts as filter-split: `master`, `model`, or an `auto` with a filter split."""
    by_filter = any(text.startswith("filter") for text in row.strategies.values())
    return row.plan in ("master", "model") or (row.plan == AUTO and by_filter)


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Absolute errors of some rows relative to the measured time; `mean_signed` keeps the sign."""

    count: int
    mean: float
    median: float
    worst: float
    mean_signed: float


def summarise(rows: Iterable[Row], of: Callable[[Row], float] = error) -> ErrorSummary | None:
    """Summarise the errors of the predicted rows; None if there is none."""
    signed = [of(row) for row in rows if row.predicted_s is not None]
    if not signed:
        return None
    sizes = [abs(each) for each in signed]
    return ErrorSummary(
        len(sizes), statistics.fmean(sizes), statistics.median(sizes), max(sizes), statistics.fmean(signed)
    )


_T = TypeVar("_T")


def by(rows: Iterable[_T], key: Callable[[_T], str]) -> dict[str, list[_T]]:
    """Group rows by key, in order of first appearance."""
    found: dict[str, list[_T]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice of `auto` for one (fleet, net, batch), compared with the best measured Convoy plan.

    Attributes:
        best: name of the fastest plan when measured, `auto` included.
        behind: measured time of `auto` over that of the best, less 1.
        noise: standard error of `behind`, from the rounds of both.
    """

    fleet: str
    net: str
    batch: int
    best: str
    behind: float
    noise: float

    @property
    def near(self) -> bool:
        """Return whether the choice is within three per cent of the best."""
        return self.behind <= NEAR

    @property
    def near_within_noise(self) -> bool:
        """Return whether the choice is near, allowing for twice the noise."""
        return self.behind - 2 * self.noise <= NEAR


def choices(rows: Iterable[Row]) -> list[Choice]:
    """Return a choice for every (fleet, net, batch) with `auto` and another measured plan."""
    found = []
    for group in by(rows, lambda r: f"{r.fleet} {r.net} {r.batch}").values():
        plans = {row.plan: row for row in group if row.plan in PLAN_NAMES}
        if AUTO not in plans or len(plans) < 2:
            continue
        auto = plans[AUTO]
        best = min(plans.values(), key=lambda row: (row.median_s, row.plan != AUTO))
        noise = 0.0
        if best is not auto:
            noise = math.hypot(standard_error(auto.rounds_s), standard_error(best.rounds_s))
        found.append(Choice(auto.fleet, auto.net, auto.batch, best.plan, auto.median_s / best.median_s - 1, noise))
    return found


def efficiency(row: Row, rows: Iterable[Row]) -> float | None:
    """Return samples/s divided by the sum of solo throughputs at the same batch; None if those were not measured."""
    solo = alone(row, rows)
    return 1 / row.median_s / sum(1 / r.median_s for r in solo) if solo else None


def efficiency_noise(row: Row, rows: Iterable[Row]) -> float:
    """Return the standard error of the efficiency, from the independent rounds of the row and of the solo devices."""
    solo = alone(row, rows)
    limit = sum(1 / r.median_s for r in solo)
    parts = [standard_error(r.rounds_s) / r.median_s / limit for r in solo]
    return math.hypot(standard_error(row.rounds_s), *parts) / row.median_s / limit


def alone(row: Row, rows: Iterable[Row]) -> list[Row]:
    """Return the solo rows of this row's case, preferring those measured in turn."""
    case = [r for r in rows if (r.fleet, r.net, r.batch) == (row.fleet, row.net, row.batch)]
    return [r for r in case if r.plan == IN_TURN] or [r for r in case if r.plan == ALONE]


def cases_of(rows: Iterable[Row]) -> list[list[Row]]:
    """Return the rows of each (fleet, net, batch)."""
    return list(by(rows, name_of).values())


def name_of(row: Row) -> str:
    """Return fleet, net and batch as text."""
    return f"{row.fleet}, {row.net}, batch {row.batch}"


def fastest_alone(case: Sequence[Row]) -> Row | None:
    """Return the row of the fastest device alone, measured while the others were idle if there is such a row."""
    return min(alone(case[0], case), key=lambda row: row.median_s, default=None)


def relative_range(values: Sequence[float]) -> float:
    """(largest - smallest) / size of the largest; 0 where all are 0."""
    return (max(values) - min(values)) / max(max(map(abs, values)), 1e-300)


def percentile(values: Sequence[float], part: float) -> float:
    """Return the linearly interpolated percentile."""
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


# --- intervals -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Residual:
    """One predicted and measured quantity.

    Attributes:
        known: the factor that its known causes explain: how devices err of which nothing was measured, repetitions, other load.
    """

    what: str
    group: str
    predicted: float
    measured: float
    known: float = 1.0

    @property
    def size(self) -> float:
        """Return the part of the error that known causes leave; causes add as squares."""
        off, known = abs(math.log(self.predicted / self.measured)), math.log(self.known)
        return math.sqrt(max(0.0, off * off - known * known))


def spread_of(residuals: Iterable[Residual]) -> float:
    """Return the factor that covers nine of ten: the (n + 1) * 0.9-th size in order, or the largest if n is small."""
    sizes = sorted(each.size for each in residuals)
    return math.exp(sizes[min(len(sizes), math.ceil((len(sizes) + 1) * 0.9)) - 1])


def held(residuals: Sequence[Residual], others: bool = True) -> float:
    """Return the fraction of residuals within a spread derived from all other groups."""
    inside = 0
    for each in residuals:
        rest = [other for other in residuals if not others or other.group != each.group]
        inside += math.exp(each.size) <= spread_of(rest) * (1 + 1e-12)
    return inside / len(residuals)


def inside(residuals: Sequence[Residual], constant: float) -> float:
    """Return the fraction of residuals within Convoy's stated interval."""
    return sum(each.size <= math.log(constant) for each in residuals) / len(residuals)
