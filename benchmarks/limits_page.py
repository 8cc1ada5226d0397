"""On docs/benchmarks.md: steps of `auto` beside what no plan can take less than, and what the search for tuned DDP came to."""

import statistics
from collections.abc import Sequence

from benchmarks.configurations import AUTO
from benchmarks.page import seconds, table
from benchmarks.results import Row
from benchmarks.targets import name_of

WITHIN, FAR = 0.10, 0.25
"""A step should be within the first of the lower bound in the median case, and beyond the second in none."""


def bound_line(rows: Sequence[Row]) -> list[str]:
    """In short; nothing where no bound was kept."""
    above = [_above(row) for row in _bounded(rows)]
    if not above:
        return []
    median = statistics.median(above)
    verdict = "met" if median <= WITHIN else "missed"
    far = sum(each > FAR for each in above)
    return [
        f"A step of `auto` beside the lower bound: {median:+.1%} in the median of {len(above)} cases; the target of "
        f"{WITHIN:.0%} is {verdict}. {far} of them are beyond {FAR:.0%}."
    ]


def bound_section(rows: Sequence[Row]) -> list[str]:
    """A row for each case of which the bound is known; empty where there is none."""
    found = _bounded(rows)
    if not found:
        return []
    body = [
        [row.fleet, row.net, str(row.batch), seconds(row.least_s), seconds(row.predicted_s), seconds(row.median_s),
         f"{_above(row):+.1%}"]
        for row in found
    ]  # fmt: skip
    return [
        "## Beside the lower bound",
        "No exact plan can be predicted to take less time than the bound ([decision 40](decisions/040-lower-bound.md)). "
        "It holds for the measured costs; the measured step contains everything else too. Older cases have no bound.",
        table(["fleet", "net", "batch", "lower bound", "predicted", "measured", "above the bound"], body),
    ]


def _bounded(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.plan == AUTO and row.least_s]


def _above(row: Row) -> float:
    assert row.least_s
    return row.median_s / row.least_s - 1


def search_section(rows: Sequence[Row]) -> list[str]:
    """What each search for DDP's settings tried, and what it did not, and why; empty where no row tells of one."""
    searched = [row for row in rows if row.considered]
    if not searched:
        return []
    parts = [
        "## The search for tuned DDP",
        "What a setting cannot take less than: its gradients' way over the wire by gloo's ring, at the measured rates, behind "
        "the computing that they wait for, measured too (`benchmarks/wire.py`). A setting is tried if that is below 97 % of "
        "the best so far. Where steps take a second or more, a setting is given up if its first step takes 1.3 times that of "
        "the best, and no new one is begun for which the seconds of the search do not last; the three best are tried twice.",
    ]
    for row in searched:
        tried = sum(each.step_s is not None for each in row.considered)
        open_ = [each.least_s for each in row.considered if each.end == "no time left" and each.least_s is not None]
        words = f"**{name_of(row)}, `{row.plan}`**: {tried} of {len(row.considered)} settings tried."
        if open_:
            best_s = min(each.step_s for each in row.considered if each.step_s is not None)
            words += f" Those for which no time was left could be faster by {best_s / min(open_) - 1:.1%} at most."
        body = [[each.setting, seconds(each.least_s), seconds(each.step_s), each.end] for each in row.considered]
        parts += [words, table(["setting", "at least", "measured", "end"], body)]
    return parts
