"""docs/benchmarks.md: targets, throughput and efficiency of Convoy and its peers. Sentences with numbers are made from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.configurations import ALONE, AUTO, EQUAL, IN_TURN, SETS, Case
from benchmarks.limits_page import bound_line, bound_section, search_section
from benchmarks.overhead_page import OverheadFile, overhead_section
from benchmarks.page import hardware, how_timed, quietness, seconds, table
from benchmarks.planning_page import Planning, planning_section
from benchmarks.rebalance_page import Rebalanced, rebalance_lines, rebalance_section
from benchmarks.results import FleetResult, Row
from benchmarks.scaling import scaling_section
from benchmarks.score import alone, efficiency, error, full_spread, middle_spread
from benchmarks.targets import TUNED, cases_of, fastest_alone, name_of
from benchmarks.targets_page import in_turn_line, targets_section, unmeasured
from convoy.planner.predict import TRIED


@dataclass(frozen=True, slots=True)
class Sources:
    """What the page is made of.

    Attributes:
        figure, scaling: where the figures lie, as the page links them; None where there is none.
        timelines: of cases with a missed target, by the name of the case.
        rebalanced, planning, overhead: what `benchmarks.rebalance`, `benchmarks.planning` and `benchmarks.overhead` wrote; None
            where they have not run.
    """

    results: Sequence[FleetResult]
    figure: str | None = None
    scaling: str | None = None
    timelines: Mapping[str, str] = field(default_factory=dict)
    rebalanced: Rebalanced | None = None
    planning: Planning | None = None
    overhead: OverheadFile | None = None


def bench_page(sources: Sources) -> str:
    """The whole page."""
    rows = [row for result in sources.results for row in result.measured_rows()]
    compared = [row for row in rows if not row.fleet.startswith(EQUAL)]
    parts = [
        "<!-- Made by `python -m benchmarks.bench`; do not edit. -->",
        "# Benchmarks",
        "## In short",
        "\n".join(
            f"- {line}"
            for line in [*_in_short(compared), *bound_line(compared), *in_turn_line(rows), quietness(sources.results)]
        ),
        _HOW + how_timed(),
        *targets_section(compared, sources.timelines, rebalance_lines(sources.rebalanced)),
        *([lacking] if (lacking := unmeasured(_asked(), compared)) else []),
        *([f"![Efficiency]({sources.figure})"] if sources.figure else []),
        "## Efficiency",
        _efficiency_table(compared),
        *bound_section(compared),
        *_trials_section(compared),
        *search_section(compared),
        *scaling_section(rows, sources.scaling),
        *rebalance_section(sources.rebalanced),
        *overhead_section(sources.overhead),
        *planning_section(sources.planning),
        "## Every measurement",
        "Spread: (slowest - fastest) / median of the rounds; middle: that of the middle half. Error: (predicted - measured) "
        "/ measured; DDP is not predicted.",
        _full_table(rows, dates_of(sources.results)),
        "## Machines and commands",
        hardware(sources.results),
    ]
    return "\n\n".join(parts) + "\n"


_HOW = (
    f"`{IN_TURN}` is plain PyTorch on each device in turn, with the global batch, while the other devices are idle. "
    f"`{ALONE}` is the same on all devices at once. `ddp-even` and `ddp-tuned` are PyTorch's DistributedDataParallel on "
    "gloo with the same batches and the same gradient. The shares of `ddp-tuned` are corrected by the measured computing "
    "time of each rank and then searched. For both, bucket size, `static_graph` and `ZeroRedundancyOptimizer` are "
    "searched; the searches are not counted. `fsdp` is FSDP2 with even shards, each layer gathered by itself, and the "
    "batch split by solo speeds. `auto` is the result of `convoy train --plan auto`: the planner's choice, or another plan "
    "that was faster in the trial, then rebalanced for 9 to 18 steps that are not counted. Its prediction is that of the "
    "plan that continues. The outputs of a U-Net stay with their samples. Efficiency: samples/s divided by the sum of the "
    f"devices' solo throughputs in the same run (`{IN_TURN}`, or `{ALONE}` where it is missing).\n\n"
    "Before 25 November 2026 Convoy's traffic was encrypted ([decision 77](decisions/077-the-wire-rests-less.md)) and most "
    "units were dead ([decision 75](decisions/075-crowded-processors-and-dead-units.md)). Before 26 November Convoy used "
    "gloo.\n\n"
)


def _asked() -> list[Case]:
    """What the page should show one day."""
    names = ("targets", "targets-rest", "deep", "lab", "named")
    return [case for name in names for series in SETS[name] for case in series.cases()]


def dates_of(results: Sequence[FleetResult]) -> Mapping[str, str]:
    """The day on which each case was measured, by its name for people."""
    return {
        name_of(row): net.finished[:10]
        for result in results
        for net in result.nets.values()
        for row in net.rows
        if net.finished
    }


def _in_short(rows: Sequence[Row]) -> list[str]:
    lines = []
    for name, other in (("`auto` and tuned DDP", TUNED), ("`auto` and even DDP", "ddp-even")):
        ratios = []
        for case in cases_of(rows):
            plans = {row.plan: row for row in case}
            if AUTO in plans and other in plans:
                ratios.append(plans[other].median_s / plans[AUTO].median_s)
        if ratios:
            faster = sum(ratio > 1 for ratio in ratios)
            lines.append(
                f"{name}: `auto` was faster in {faster} of {len(ratios)} cases; its speed was {min(ratios):.2f} to "
                f"{max(ratios):.2f} times that of `{other}`."
            )
    found = [value for row in rows if row.plan == AUTO and (value := efficiency(row, rows)) is not None]
    if found:
        lines.append(f"Efficiency of `auto`: {min(found):.2f} to {max(found):.2f} in {len(found)} cases.")
    return lines


def _efficiency_table(rows: Sequence[Row]) -> str:
    plans = [*dict.fromkeys(row.plan for row in rows if row.device is None)]
    body = []
    for case in cases_of(rows):
        best = fastest_alone(case)
        if best is None:
            continue
        found = [best, *(next((row for row in case if row.plan == plan), None) for plan in plans)]
        values = [None if row is None else efficiency(row, case) for row in found]
        limit = best.batch * sum(1 / row.median_s for row in alone(best, case))
        cells = ["" if value is None else f"{value:.2f}" for value in values]
        body.append([best.fleet, best.net, str(best.batch), f"{limit:.3g}", *cells])
    head = ["fleet", "net", "batch", "samples/s of all alone", "fastest alone", *(f"`{plan}`" for plan in plans)]
    return table(head, body)


def _trials_section(rows: Sequence[Row]) -> list[str]:
    """The trials of plans; nothing where no row tells of one."""
    tried = [row for row in rows if len(row.tried) > 1]
    if not tried:
        return []
    body = []
    for row in tried:
        cells = [f"{seconds(predicted_s)}, {seconds(step_s)}" for predicted_s, step_s in row.tried]
        ahead = min(step_s for _, step_s in row.tried) / row.tried[0][1] - 1
        body.append([row.fleet, row.net, str(row.batch), *cells, *[""] * (TRIED + 1 - len(cells)), f"{ahead:+.1%}"])
    head = ["fleet", "net", "batch", "the planner's choice", *(f"plan {i}" for i in range(2, TRIED + 2))]
    return [
        "## The trial of plans",
        "Where plans are predicted to be close, `auto` trains some steps with each and continues with the fastest "
        "([decision 19](decisions/019-trial-of-plans.md)). For each plan: the predicted step, then the step in the trial. "
        "Last: the fastest over the planner's choice. Cases that are missing had one plan only, or are older.",
        table([*head, "fastest"], body),
    ]


def _full_table(rows: Sequence[Row], dates: Mapping[str, str]) -> str:
    body = []
    for case in cases_of(rows):
        for row in case:
            name = f"`{row.plan}`" + ("" if row.device is None else f" {row.device}")
            part = efficiency(row, case)
            body.append(
                [row.fleet, row.net, str(row.batch), name, seconds(row.median_s), f"{row.batch / row.median_s:.3g}",
                 "" if part is None else f"{part:.2f}", seconds(row.predicted_s),
                 "" if row.predicted_s is None else f"{error(row):+.1%}", f"{full_spread(row.rounds_s):.1%}",
                 f"{middle_spread(row.rounds_s):.1%}", f"{len(row.rounds_s)} x {row.steps}", dates[name_of(row)]]
            )  # fmt: skip
    head = [
        "fleet",
        "net",
        "batch",
        "plan",
        "step",
        "samples/s",
        "efficiency",
        "predicted",
        "error",
        "spread",
        "middle",
    ]
    return table([*head, "rounds x steps", "measured on"], body)
