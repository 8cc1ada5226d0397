"""The targets of the benchmark, as values, and whether what was measured meets them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.configurations import ALONE, AUTO, IN_TURN
from benchmarks.results import Row
from benchmarks.score import by, efficiency, efficiency_noise, ratio_of_pairs

TUNED = "ddp-tuned"
NETWORKED_AT_1_GBIT = ("even4", "mixed4", "straggler2")
LEAST_SPEEDUP_OF_MASTER = 3.5
LEAST_OF_TUNED = {("mixed4", "two-conv:150:800", 16): 1.4, ("mixed4", "alexnet:4096", 64): 4.0}
"""How many times the speed of tuned DDP is asked for, on the fleet of the prototypes; anywhere else: not below it."""

KNOWN_TO = 0.02
"""The standard error to which the speed of `auto` over tuned DDP is to be known, as a part of it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of the table of targets.

    Attributes:
        what: is measured; a number without unit, where more is better.
        case: fleet, net and batch, or which cases.
        least: the target.
        value: measured.
        noise: standard error of the value.
        lenient: the target is not to fall short by more than the noise, of which twice counts; else nothing is allowed.
        row: of the plan it is about; None where it is about several.
    """

    what: str
    case: str
    least: float
    value: float
    noise: float
    lenient: bool = False
    row: Row | None = None

    @property
    def known(self) -> bool:
        """Whether the noise is small enough for a ratio."""
        return self.noise <= KNOWN_TO * self.value

    @property
    def met(self) -> bool:
        # Of a single round the noise is not known, and excuses nothing.
        return self.value >= self.least - (2 * self.noise if self.lenient and math.isfinite(self.noise) else 0.0)


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """A verdict on every target that something was measured for."""
    cases = cases_of(rows)
    found = [verdict for case in cases for verdict in (*_efficiency(case), *_beside_ddp(case), *_speedup(case))]
    order = list(dict.fromkeys(each.what for each in found))
    return [*sorted(found, key=lambda each: order.index(each.what)), *_beside_fastest(cases)]


def missed(rows: Sequence[Row]) -> bool:
    """Whether any of the targets of these rows is."""
    return not all(verdict.met for verdict in verdicts(rows))


def cases_of(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of each (fleet, net, batch)."""
    return list(by(rows, name_of).values())


def name_of(row: Row) -> str:
    """Fleet, net and batch, for people."""
    return f"{row.fleet}, {row.net}, batch {row.batch}"


def least_efficiency(fleet: str, net: str, batch: int) -> float | None:
    """What is asked of `auto`; None where nothing is."""
    kind = net.partition(":")[0]
    if kind not in ("two-conv", "alexnet"):
        return None
    if fleet == "many8":
        return 0.85
    if fleet not in NETWORKED_AT_1_GBIT:
        return None
    wide = {"two-conv": {16: 0.85, 64: 0.93, 256: 0.93}, "alexnet": {64: 0.85, 256: 0.93}}
    return wide[kind].get(batch)


def _plan(case: Sequence[Row], name: str) -> Row | None:
    return next((row for row in case if row.plan == name), None)


def _efficiency(case: Sequence[Row]) -> list[Verdict]:
    auto = _plan(case, AUTO)
    if auto is None or (least := least_efficiency(auto.fleet, auto.net, auto.batch)) is None:
        return []
    value = efficiency(auto, case)
    if value is None:
        return []
    return [Verdict("efficiency of `auto`", name_of(auto), least, value, efficiency_noise(auto, case), row=auto)]


def _beside_ddp(case: Sequence[Row]) -> list[Verdict]:
    auto, tuned = _plan(case, AUTO), _plan(case, TUNED)
    if auto is None or tuned is None:
        return []
    ratio, noise = _ratio(tuned, auto)
    found = [Verdict("speed of `auto` over tuned DDP", name_of(auto), 1.0, ratio, noise, lenient=True, row=auto)]
    least = LEAST_OF_TUNED.get((auto.fleet, auto.net, auto.batch))
    if least is not None:
        found.append(Verdict("times tuned DDP", name_of(auto), least, ratio, noise, row=auto))
    return found


def _speedup(case: Sequence[Row]) -> list[Verdict]:
    master = _plan(case, "master")
    alone = fastest_alone(case)
    if master is None or alone is None or (master.fleet, master.net) != ("even4", "two-conv:500:1500"):
        return []
    value, noise = _ratio(alone, master)
    what = "speedup of `master` over one device"
    return [Verdict(what, name_of(master), LEAST_SPEEDUP_OF_MASTER, value, noise, row=master)]


def _beside_fastest(cases: Sequence[Sequence[Row]]) -> list[Verdict]:
    """`auto` beside the fastest device alone: the worst of all cases."""
    pairs = [(auto, alone) for case in cases if (auto := _plan(case, AUTO)) and (alone := fastest_alone(case))]
    if not pairs:
        return []
    auto, alone = min(pairs, key=lambda pair: pair[1].median_s / pair[0].median_s)
    value, noise = _ratio(alone, auto)
    what, where = "speed of `auto` over the fastest device alone", f"the worst of {len(pairs)} cases: {name_of(auto)}"
    return [Verdict(what, where, 1.0, value, noise, row=auto)]


def fastest_alone(case: Sequence[Row]) -> Row | None:
    """The row of the device that is fastest alone: while the others rest, where that was measured."""
    alone = [row for row in case if row.plan == IN_TURN] or [row for row in case if row.plan == ALONE]
    return min(alone, key=lambda row: row.median_s, default=None)


def _ratio(slower: Row, faster: Row) -> tuple[float, float]:
    """How many times as fast the second is, and the standard error of that."""
    return ratio_of_pairs(slower.rounds_s, faster.rounds_s)
