"""docs/benchmarks.md: throughput and efficiency of Convoy and its peers. Sentences with numbers are made from them."""

from collections.abc import Sequence

from benchmarks.configurations import AUTO
from benchmarks.page import Paper, hardware, how_timed, quietness, seconds, table
from benchmarks.results import Row
from benchmarks.score import by, efficiency, error, full_spread, middle_spread

ONE_TO_BEAT = "ddp-tuned"


def bench_page(paper: Paper) -> str:
    """The whole page."""
    rows = paper.rows
    parts = [
        "# Benchmarks",
        "Made by `python -m benchmarks.bench`; do not edit.",
        hardware(paper.results),
        "`one-device` is plain PyTorch on each device in turn while the others do nothing. `ddp-even` and `ddp-tuned` are "
        "PyTorch's DistributedDataParallel on gloo with the same batches and the same gradient; `ddp-tuned` has shares "
        "corrected by what each rank's computing takes and then searched, both have the bucket size and `static_graph` "
        "searched; the searches are not counted. Efficiency: samples/s over the sum of what every device reached alone at the "
        "same global batch, measured in the same run. " + how_timed(),
        "## In short",
        "\n".join(f"- {line}" for line in [*_in_short(rows), quietness(paper.results)]),
        *([f"![Efficiency]({paper.figure})"] if paper.figure else []),
        "## Efficiency",
        _efficiency_table(rows),
        "## Every measurement",
        "Spread: (slowest - fastest) / median of the rounds; middle: that of the middle half. Error: (predicted - measured) "
        "/ measured; DDP is not predicted.",
        _full_table(rows),
    ]
    return "\n\n".join(parts) + "\n"


def cases(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each (fleet, net, batch)."""
    return list(by(rows, lambda r: f"{r.fleet} {r.net} {r.batch}").values())


def _in_short(rows: Sequence[Row]) -> list[str]:
    lines = []
    for name, other in (("`auto` and tuned DDP", ONE_TO_BEAT), ("`auto` and even DDP", "ddp-even")):
        ratios = []
        for case in cases(rows):
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


def fastest_alone(case: Sequence[Row]) -> Row | None:
    """The row of the device that is fastest alone."""
    return min((row for row in case if row.plan == "one-device"), key=lambda row: row.median_s, default=None)


def _efficiency_table(rows: Sequence[Row]) -> str:
    plans = ["one-device", *dict.fromkeys(row.plan for row in rows if row.plan != "one-device")]
    body = []
    for case in cases(rows):
        best = fastest_alone(case)
        if best is None:
            continue
        cells = []
        for plan in plans:
            row = best if plan == "one-device" else next((r for r in case if r.plan == plan), None)
            value = None if row is None else efficiency(row, case)
            cells.append("" if value is None else f"{value:.2f}")
        limit = best.batch * sum(1 / row.median_s for row in case if row.plan == "one-device")
        body.append([best.fleet, best.net, str(best.batch), f"{limit:.3g}", *cells])
    return table(["fleet", "net", "batch", "samples/s of all alone", *(f"`{plan}`" for plan in plans)], body)


def _full_table(rows: Sequence[Row]) -> str:
    body = []
    for case in cases(rows):
        for row in case:
            name = f"`{row.plan}`" + ("" if row.device is None else f" {row.device}")
            part = efficiency(row, case)
            body.append(
                [row.fleet, row.net, str(row.batch), name, seconds(row.median_s), f"{row.batch / row.median_s:.3g}",
                 "" if part is None else f"{part:.2f}", seconds(row.predicted_s),
                 "" if row.predicted_s is None else f"{error(row):+.1%}", f"{full_spread(row.rounds_s):.1%}",
                 f"{middle_spread(row.rounds_s):.1%}", f"{len(row.rounds_s)} x {row.steps}"]
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
    return table([*head, "rounds x steps"], body)
