"""Write docs/benchmarks.md: one line per measured case, with sentences generated from the results."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.configurations import ALONE, AUTO, EQUAL, IN_TURN, PLAN_NAMES
from benchmarks.page import machines, quietness, seconds, table
from benchmarks.results import FleetResult, Row
from benchmarks.score import TUNED, alone, cases_of, efficiency, error, fastest_alone, name_of, ratio_of_pairs


@dataclass(frozen=True, slots=True)
class Sources:
    """The results on the page, and the link of its figure (None: no figure)."""

    results: Sequence[FleetResult]
    figure: str | None = None


def bench_page(sources: Sources) -> str:
    rows = [row for result in sources.results for row in result.measured_rows()]
    compared = [row for row in rows if not row.fleet.startswith(EQUAL)]
    equal = [row for row in rows if row.fleet.startswith(EQUAL)]
    parts = [
        "<!-- Made by `python -m benchmarks.bench`; do not edit. -->",
        "# Benchmarks",
        "\n".join(f"- {line}" for line in [*_in_short(compared), quietness(sources.results)]),
        "## The planner's choice",
        "Each row compares the step of `auto` predicted before the run with the measured step. *Times tuned DDP*: speed of "
        "`auto` divided by that of DDP tuned by search (median ratio of the rounds, and its standard error). *Efficiency*: "
        "throughput divided by the sum of the devices' solo throughputs.",
        _auto_table(compared, sources.results),
        *([f"![Efficiency]({sources.figure})"] if sources.figure else []),
        "## All plans",
        "Time of one step.",
        _plan_table(compared),
        *(
            ["## Equal devices", "Time of one step on fleets of 1 to 8 equal devices.", _plan_table(equal)]
            if equal
            else []
        ),
        "## How it was measured",
        _HOW,
        "\n".join(f"- {line}" for line in machines(sources.results)),
    ]
    return "\n\n".join(parts) + "\n"


_HOW = (
    "All devices start a round of steps together; the time until the slowest device ends, divided by the number of steps, is "
    "the time of one step. It includes loading, the loss and the optimizer. All plans of a case take turns, round after "
    "round.\n\n"
    f"`{IN_TURN}` is plain PyTorch on each device in turn, with the global batch; `{ALONE}` is the same on all devices at "
    "once. `ddp-even` and `ddp-tuned` are PyTorch's DistributedDataParallel on gloo, with the same batches and gradients. "
    "For `ddp-tuned`, a search (not counted) chooses shares, bucket size, `static_graph` and `ZeroRedundancyOptimizer`. "
    "`fsdp` is FSDP2 with even shards and the batch split by solo speeds. `auto` is the plan that `convoy train --plan auto` "
    "finally uses. Since 25 November 2026 nothing is encrypted "
    "([decision 77](decisions/077-messages-as-fast-as-ddp.md)).\n\n"
    "Each file in `benchmarks/results/bench` holds one case: all rounds, the search for tuned DDP, the lower bound, the "
    "machine, the revision of the code, the date and the command."
)


def _in_short(rows: Sequence[Row]) -> list[str]:
    lines = []
    for name, other in (("tuned DDP", TUNED), ("even DDP", "ddp-even")):
        ratios = []
        for case in cases_of(rows):
            plans = {row.plan: row for row in case}
            if AUTO in plans and other in plans:
                ratios.append(plans[other].median_s / plans[AUTO].median_s)
        if ratios:
            faster = sum(ratio > 1 for ratio in ratios)
            lines.append(
                f"`auto` was faster than {name} in {faster} of {len(ratios)} cases; its speed was {min(ratios):.2f} to "
                f"{max(ratios):.2f} times that of {name}."
            )
    found = [value for row in rows if row.plan == AUTO and (value := efficiency(row, rows)) is not None]
    if found:
        lines.append(f"Efficiency of `auto`: {min(found):.2f} to {max(found):.2f} in {len(found)} cases.")
    relative = [
        best.median_s / auto.median_s
        for case in cases_of(rows)
        if (best := fastest_alone(case)) and (auto := next((row for row in case if row.plan == AUTO), None))
    ]
    if relative:
        lines.append(f"In the worst case `auto` has {min(relative):.2f} times the speed of the fastest device alone.")
    return lines


def _auto_table(rows: Sequence[Row], results: Sequence[FleetResult]) -> str:
    dates = {
        name_of(row): net.finished[:10]
        for result in results
        for net in result.nets.values()
        for row in net.rows
        if net.finished
    }
    body = []
    for case in cases_of(rows):
        plans = {row.plan: row for row in case if row.device is None}
        auto, tuned = plans.get(AUTO), plans.get(TUNED)
        if auto is None:
            continue
        ratio, ratio_error = ratio_of_pairs(tuned.rounds_s, auto.rounds_s) if tuned else (None, None)
        part = efficiency(auto, case)
        body.append(
            [
                auto.fleet,
                auto.net,
                str(auto.batch),
                seconds(auto.predicted_s),
                seconds(auto.median_s),
                "" if auto.predicted_s is None else f"{error(auto):+.1%}",
                "" if ratio is None else f"{ratio:.2f}",
                "" if ratio_error is None else f"{ratio_error:.2f}",
                "" if part is None else f"{part:.2f}",
                str(len(auto.rounds_s)),
                dates[name_of(auto)],
            ]
        )
    head = ["fleet", "net", "batch", "predicted", "measured", "error", "times tuned DDP", "its error", "efficiency"]
    return table([*head, "rounds", "measured on"], body)


def _plan_table(rows: Sequence[Row]) -> str:
    present = {row.plan for row in rows if row.device is None}
    names = [name for name in ("ddp-even", TUNED, "fsdp", *PLAN_NAMES) if name in present]
    body = []
    for case in cases_of(rows):
        first, plans = case[0], {row.plan: row for row in case if row.device is None}
        solo_s = ", ".join(seconds(row.median_s) for row in alone(first, case))
        steps = [seconds(plans[name].median_s) if name in plans else "" for name in names]
        body.append([first.fleet, first.net, str(first.batch), solo_s, *steps])
    return table(["fleet", "net", "batch", "each device alone", *(f"`{name}`" for name in names)], body)
