"""The targets on docs/benchmarks.md: a table, and for what was missed where the time goes and what bounds it."""

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.configurations import ALONE, AUTO, IN_TURN, PLAN_NAMES, Case
from benchmarks.page import seconds, table
from benchmarks.results import Row
from benchmarks.score import alone, error, full_spread
from benchmarks.targets import KNOWN_TO, Verdict, cases_of, name_of, verdicts

FEWEST = 5
"""Rounds; where there are fewer, the page says so."""

BOUNDED = "desktop4"
"""The fleet for which no efficiency is asked, but the best plan that is found and what bounds it."""


def targets_section(
    rows: Sequence[Row], timelines: Mapping[str, str], further: Sequence[Sequence[str]] = ()
) -> list[str]:
    """Parts of the page; empty where no target has been measured.

    Args:
        timelines: figures of `auto` as predicted, by the name of their case.
        further: rows of the table of targets that are not about cases.
    """
    found = verdicts(rows)
    if not found and not further:
        return []
    missed = [each for each in found if not each.met]
    parts = [
        "## Targets",
        "Value: of the medians of the rounds, one plan beside another: the median of the ratios in each round; with it the "
        "standard error. Spread: (slowest - fastest) / median of the rounds of the "
        'plan. "Not below" allows twice the standard error, every other line nothing.',
        table(["target", "case", "asked", "measured", "spread", "verdict"], [*map(_line, found), *further]),
    ]
    worst: dict[str, Row] = {}
    for each in missed:
        if each.row is not None:
            worst.setdefault(name_of(each.row), each.row)
    if worst:
        parts += ["### Where the time goes, where a target is missed", _WHERE]
        parts += [text for row in worst.values() for text in _where(row, _case_of(row, rows), timelines)]
    return [*parts, *_bounded(rows)]


def _line(verdict: Verdict) -> list[str]:
    short = verdict.least - verdict.value
    asked = f"not below {verdict.least:g}" if verdict.lenient else f"{verdict.least:g}"
    words = "met" if verdict.met else f"missed by {short:.3f} ({short / verdict.least:.1%})"
    if verdict.lenient and not verdict.known:
        words += f"; not known to {KNOWN_TO:.0%}"
    spread = ""
    if verdict.row is not None:
        rounds = len(verdict.row.rounds_s)
        spread = f"{full_spread(verdict.row.rounds_s):.0%}" + ("" if rounds >= FEWEST else f" of {rounds} rounds only")
    return [verdict.what, verdict.case, asked, f"{verdict.value:.3f} ± {verdict.noise:.3f}", spread, words]


_WHERE = (
    "Predicted: from the simulator's timeline, with the optimizer, the loss and the processing of messages. Measured: by "
    "the devices' clocks, medians of the rounds; the rest contains the optimizer, the loss and loading. Waiting is for "
    "messages and sums that no computing hides."
)


def _where(row: Row, case: Sequence[Row], timelines: Mapping[str, str]) -> list[str]:
    words = [f"**{name_of(row)}, `{row.plan}`.**"]
    ideal_s = _ideal_s(case)
    if ideal_s is not None:
        words.append(f"All devices alone: {seconds(ideal_s)}.")
    if row.predicted_s is not None:
        words.append(f"Predicted: {seconds(row.predicted_s)}, measured: {seconds(row.median_s)} ({error(row):+.1%}).")
    if row.card_s is not None and row.predicted_s:
        words.append(
            f"The busiest card works for {seconds(row.card_s)} ({row.card_s / row.predicted_s:.0%} of the step)."
        )
    if row.bound:
        words.append(f"By the simulator it is bound by {row.bound}.")
    if lost := _lost(row, case):
        words.append(lost)
    parts = [" ".join(words)]
    if row.foreseen is not None:
        parts.append(_devices(row))
    figure = timelines.get(Case(row.fleet, row.net, row.batch, ()).name)
    if figure is not None and row.plan == AUTO:
        parts.append(f"![Timeline of {name_of(row)}]({figure})")
    return parts


def _lost(row: Row, case: Sequence[Row]) -> str:
    """What takes the part of the step that efficiency lacks, in the mean over the devices; each counts by its speed alone."""
    solo = {each.device: each.median_s for each in alone(row, case)}
    ideal_s, seen = _ideal_s(case), row.seen
    if ideal_s is None or seen is None or len(solo) < len(seen.compute_s):
        return ""
    weights = [ideal_s / solo[device] for device in range(len(seen.compute_s))]
    computing, waiting = (
        sum(w * each_s for w, each_s in zip(weights, seconds_, strict=True)) / row.median_s
        for seconds_ in (seen.compute_s, seen.exchange_s)
    )
    reached = ideal_s / row.median_s
    return (
        f"Of the {1 - reached:.1%} that are lacking, waiting for others is {waiting:.1%}, computing beyond what the devices "
        f"take alone {computing - reached:+.1%}, and the optimizer, the loss, loading and calls {1 - computing - waiting:+.1%}."
    )


def unmeasured(asked: Iterable[Case], rows: Sequence[Row]) -> str:
    """The cases that were not measured, and the plans that others lack, in one sentence; empty where there are none."""
    wanted: dict[str, tuple[Case, list[str]]] = {}
    for case in asked:
        name = f"{case.fleet}, {case.net}, batch {case.batch}"
        wanted.setdefault(name, (case, []))[1].extend(case.plans)
    lacking = []
    for name, (case, plans) in wanted.items():
        known = {row.plan for row in rows if name_of(row) == name}
        missing = [plan for plan in dict.fromkeys(plans) if plan not in known]
        if missing:
            by = f" by {', '.join(f'`{plan}`' for plan in missing)}" if known else ""
            lacking.append(f"{case.fleet} {case.net} at {case.batch}{by}")
    return f"Not measured, for want of time: {'; '.join(lacking)}." if lacking else ""


def _devices(row: Row) -> str:
    """Of each device, parts of the step: computing and waiting, predicted and measured."""
    foreseen, seen = row.foreseen, row.seen
    assert foreseen is not None
    assert row.predicted_s
    body = []
    for device, (compute_s, exchange_s) in enumerate(zip(foreseen.compute_s, foreseen.exchange_s, strict=True)):
        measured = ["", "", ""]
        if seen is not None:
            computed, waited = seen.compute_s[device] / row.median_s, seen.exchange_s[device] / row.median_s
            measured = [f"{computed:.0%}", f"{waited:.0%}", f"{max(0.0, 1 - computed - waited):.0%}"]
        body.append(
            [str(device), f"{compute_s / row.predicted_s:.0%}", f"{exchange_s / row.predicted_s:.0%}", *measured]
        )
    head = [
        "device",
        "computes, predicted",
        "waits, predicted",
        "computes, measured",
        "waits, measured",
        "is left, measured",
    ]
    return table(head, body)


def _bounded(rows: Sequence[Row]) -> list[str]:
    parts = []
    for case in cases_of([row for row in rows if row.fleet == BOUNDED]):
        plans = [row for row in case if row.plan in PLAN_NAMES]
        auto = next((row for row in plans if row.plan == AUTO), None)
        ideal_s = _ideal_s(case)
        if auto is None or ideal_s is None or auto.predicted_s is None:
            continue
        best = min(plans, key=lambda row: row.median_s)
        layers = ", ".join(f"{name} {text}" for name, text in auto.strategies.items())
        parts.append(
            f"{name_of(auto)}: the best plan that was found is `auto` ({layers}), {seconds(auto.predicted_s)} predicted; of "
            f"{len(plans)} measured, `{best.plan}` is the fastest with {seconds(best.median_s)}, efficiency "
            f"{ideal_s / best.median_s:.2f}. Devices that all compute without a pause, as alone, would take "
            f"{seconds(ideal_s)}: no plan can take much less. Of this plan's step the busiest device computes "
            f"{seconds(_busiest_s(auto))}, the busiest card works {seconds(auto.card_s)}; by the simulator it is bound by "
            f"{auto.bound}."
        )
    return [f"### The best plan on {BOUNDED}, and its bound", *parts] if parts else []


def _busiest_s(row: Row) -> float | None:
    return None if row.foreseen is None else max(row.foreseen.compute_s)


def _ideal_s(case: Sequence[Row]) -> float | None:
    """Seconds of a step at the speed of all devices alone."""
    solo = alone(case[0], case)
    return 1 / sum(1 / row.median_s for row in solo) if solo else None


def _case_of(row: Row, rows: Sequence[Row]) -> list[Row]:
    return [each for each in rows if name_of(each) == name_of(row)]


def in_turn_line(rows: Sequence[Row]) -> list[str]:
    """How much more devices alone reach while the others rest, where both were measured."""
    lines = []
    for case in cases_of(rows):
        beside = {row.device: row.median_s for row in case if row.plan == ALONE}
        resting = {row.device: row.median_s for row in case if row.plan == IN_TURN}
        if beside and beside.keys() == resting.keys():
            more = sum(1 / each_s for each_s in resting.values()) / sum(1 / each_s for each_s in beside.values()) - 1
            lines.append(
                f"Devices alone, in turn while the others rest, reach {more:+.1%} in the sum, beside all at once "
                f"({name_of(case[0])})."
            )
    return lines
