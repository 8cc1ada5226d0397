"""Write the result pages. Every sentence with a number is generated from the numbers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.configurations import PLAN_NAMES
from benchmarks.results import FleetResult, Row
from benchmarks.score import (
    Choice,
    Residual,
    by,
    choices,
    error,
    error_at_measured_speed,
    full_spread,
    held,
    inside,
    middle_spread,
    percentile,
    relative_range,
    splits_filters,
    standard_error,
    steady,
    summarise,
)
from convoy.simulate.interval import SIMULATION

MEAN_TARGET = 0.05
FILTER_TARGET = 0.08
CHOICE_TARGET = 0.95
INTERVAL_TARGET = 0.9


@dataclass(frozen=True, slots=True)
class Paper:
    """The content of a page: results of some fleets, and the location of its figure."""

    results: Sequence[FleetResult]
    figure: str | None

    @property
    def rows(self) -> list[Row]:
        return [row for result in self.results for row in result.measured_rows()]


def validation_page(paper: Paper) -> str:
    rows = [row for row in paper.rows if row.plan in PLAN_NAMES]
    short = [*_verdicts(rows), *_intervals(rows), *_choice_verdicts(choices(rows)), *_noise(rows)]
    short += [quietness(paper.results), *_losses(rows)]
    parts = [
        "<!-- Made by `python -m benchmarks.validate`; do not edit. -->",
        "# Predicted and measured",
        "## In short",
        "\n".join(f"- {line}" for line in short),
        "Every prediction was written to the results file before the first run of its net, from measured layers and links of "
        "that fleet. No number was fitted to a run. The end of the page lists the machines.",
        "## Error by plan",
        "The error is (predicted - measured) / measured; measured is the median of the rounds. In steady rows, the middle half "
        "of the rounds is within 5 % of the median. Filter-split rows are `master`, `model`, and `auto` if it splits a layer "
        "by filter.",
        _error_table(rows, error),
        *_drifted(rows),
        *([f"![Predicted against measured]({paper.figure})"] if paper.figure else []),
        "## What `auto` chose",
        "*Behind*: how much longer the measured step of `auto` is than that of the best measured plan. The best of several "
        "noisy medians is slightly too fast, so even a perfect planner would not reach 0. *Noise*: the standard error.",
        _choice_table(choices(rows)),
        "## Every configuration",
        "*Spread*: (slowest - fastest) / median of the rounds; *middle*: the same for their middle half. "
        + how_timed(),
        _full_table(rows),
        "## Machines",
        "Each file in `benchmarks/results/validation` contains its command.",
        "\n".join(f"- {line}" for line in machines(paper.results)),
    ]
    return "\n\n".join(parts) + "\n"


def machines(results: Sequence[FleetResult]) -> list[str]:
    """Return one line per machine: fleets, hardware, versions, revisions and dates."""
    lines = []
    for (place, data), group in _alike(results).items():
        dates = sorted(net.finished[:10] for result in group for net in result.nets.values() if net.finished)
        days = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        fleets = ", ".join(dict.fromkeys(f"{result.fleet} ({_cores(result)})" for result in group))
        revisions = ", ".join(dict.fromkeys(result.ground.revision or "unknown" for result in group))
        lines.append(f"{fleets}, emulated on {place}; {data}; convoy at {revisions}; {days}.")
    return lines


def _alike(results: Sequence[FleetResult]) -> dict[tuple[str, str], list[FleetResult]]:
    found: dict[tuple[str, str], list[FleetResult]] = {}
    for result in results:
        if result.measured_rows():
            g = result.ground
            place = f"{g.cores} cores of {g.processor}, {g.kernel}, Python {g.python}, torch {g.torch}"
            found.setdefault((place, result.data), []).append(result)
    return found


def _cores(result: FleetResult) -> str:
    return "/".join("all" if cores is None else f"{cores:g}" for _, cores in result.devices) + " core"


def quietness(results: Sequence[FleetResult]) -> str:
    """Say how much of the machine other programs used."""
    nets = [net for result in results for net in result.nets.values() if net.finished]
    shares = [net.others for net in nets if net.others is not None]
    if not shares:
        return "The processor time that other programs used during the runs is not known."
    return (
        f"Other programs, and the kernel's network code, used {max(shares):.1%} of the machine's processor time at most, "
        f"{percentile(shares, 0.5):.1%} in the median net."
    )


def how_timed() -> str:
    """Explain how a step is measured."""
    return (
        "The time of a step is that from a common start to the end of the slowest device's last step, divided by the number of "
        "steps. It includes loading the batch, the loss and the optimizer."
    )


def _verdicts(rows: Sequence[Row]) -> list[str]:
    lines = []
    calm = [row for row in rows if steady(row)]
    for name, some, target in (
        ("of all rows", rows, MEAN_TARGET),
        ("of the filter-split rows", [r for r in rows if splits_filters(r)], FILTER_TARGET),
        ("of the steady rows", calm, MEAN_TARGET),
        ("of the steady filter-split rows", [r for r in calm if splits_filters(r)], FILTER_TARGET),
    ):
        found = summarise(some)
        if found is None:
            lines.append(f"Mean absolute error {name}: no rows.")
            continue
        verdict = "met" if found.mean <= target else "missed"
        lines.append(
            f"Mean absolute error {name} ({found.count}): {found.mean:.1%} (median {found.median:.1%}, worst "
            f"{found.worst:.1%}, signed mean {found.mean_signed:+.1%}); the target of {target:.0%} is {verdict}."
        )
    return lines


def _intervals(rows: Sequence[Row]) -> list[str]:
    """Return a sentence: how many measured steps are within the predicted interval."""
    factor = SIMULATION["measured"].step
    found = [Residual(row.plan, row.net, row.predicted_s, row.median_s) for row in rows if row.predicted_s is not None]
    if not found:
        return []
    nets = by(found, lambda each: each.group)
    short = [
        f"{net} {inside(some, factor):.0%}" for net, some in nets.items() if inside(some, factor) < INTERVAL_TARGET
    ]
    verdict = "met" if inside(found, factor) >= INTERVAL_TARGET else "missed"
    others = f"; factors from all other nets contain {held(found):.0%} of a net's rows" if len(nets) > 1 else ""
    return [
        f"The interval, predicted / {factor} to predicted * {factor}, contains {inside(found, factor):.0%} of {len(found)} "
        f"rows; the target of {INTERVAL_TARGET:.0%} is {verdict}. Its factor was calculated from these rows{others}. Nets "
        f"below the target: {', '.join(short) or 'none'}."
    ]


def _choice_verdicts(found: Sequence[Choice]) -> list[str]:
    if not found:
        return ["The choice of `auto` cannot be judged: no other plan was measured."]
    near = sum(each.near for each in found) / len(found)
    allowed = sum(each.near_within_noise for each in found) / len(found)
    verdict = "met" if near >= CHOICE_TARGET else "missed"
    with_noise = "met" if allowed >= CHOICE_TARGET else "missed"
    return [
        f"The measured step of `auto` was within 3 % of the best plan's in {near:.0%} of {len(found)} cases; the "
        f"target of {CHOICE_TARGET:.0%} is {verdict}. If twice the noise of the two medians is allowed: {allowed:.0%}, "
        f"{with_noise}."
    ]


def _losses(rows: Sequence[Row]) -> list[str]:
    known = [row for row in rows if row.loss is not None]
    groups = [some for some in by(known, lambda r: f"{r.fleet} {r.net} {r.batch}").values() if len(some) > 1]
    if not groups:
        return []
    apart = max(relative_range([row.loss for row in some if row.loss is not None]) for some in groups)
    return [f"For one net, batch and fleet, the first losses of all plans differ by {apart:.1e} at most."]


def _noise(rows: Sequence[Row]) -> list[str]:
    spreads = [full_spread(row.rounds_s) for row in rows]
    repeated = [row for row in rows if len(row.rounds_s) > 1]
    line = (
        f"Noise when the same run is repeated: spread of the rounds {percentile(spreads, 0.5):.1%} (median), "
        f"{percentile(spreads, 0.9):.1%} (90th percentile)"
    )
    if repeated:
        errors = [standard_error(row.rounds_s) for row in repeated]
        line += (
            f"; standard error of a row's median {percentile(errors, 0.5):.1%} (median), "
            f"{percentile(errors, 0.9):.1%} (90th percentile)"
        )
    fewest = min(len(row.rounds_s) for row in rows)
    return [f"{line}. {sum(map(steady, rows))} of {len(rows)} rows are steady. Each has at least {fewest} rounds."]


def _drifted(rows: Sequence[Row]) -> list[str]:
    """Return the error table corrected by the measured drift of the machine's speed, if known."""
    drifts = [drift for row in rows for drift in row.drifts]
    if not drifts:
        return []
    return [
        "## Errors corrected for the machine's speed",
        "The speed of this machine's processor changes with time. The same small convolution was timed on all devices at once, "
        f"with the layers and again before every run. Before the runs it took {min(drifts):.2f} to {max(drifts):.2f} times as "
        f"long, {percentile(drifts, 0.5):.2f} times in the median. Here each round is divided by this factor. The table shows "
        "the errors that remain if the machine's speed is known.",
        _error_table(rows, error_at_measured_speed),
    ]


def _error_table(rows: Sequence[Row], of: Callable[[Row], float]) -> str:
    kinds: list[tuple[str, list[Row]]] = [(f"`{plan}`", [r for r in rows if r.plan == plan]) for plan in PLAN_NAMES]
    kinds += [("filter-split", [r for r in rows if splits_filters(r)]), ("all", list(rows))]
    kinds += [("steady", [r for r in rows if steady(r)])]
    kinds += [(f"fleet {fleet}", some) for fleet, some in by(rows, lambda r: r.fleet).items()]
    kinds += [(f"net {net}", some) for net, some in by(rows, lambda r: r.net).items()]
    body = []
    for name, some in kinds:
        if (found := summarise(some, of)) is not None:
            body.append(
                [name, str(found.count), f"{found.mean:.1%}", f"{found.median:.1%}", f"{found.worst:.1%}",
                 f"{found.mean_signed:+.1%}"]
            )  # fmt: skip
    return table(["rows", "number", "mean absolute", "median absolute", "worst", "signed mean"], body)


def _choice_table(found: Iterable[Choice]) -> str:
    body = [
        [each.fleet, each.net, str(each.batch), f"`{each.best}`", f"{each.behind:.1%}", f"{each.noise:.1%}",
         "yes" if each.near else "within the noise" if each.near_within_noise else "no"]
        for each in found
    ]  # fmt: skip
    return table(["fleet", "net", "batch", "best measured", "behind", "noise", "within 3 %"], body)


def _full_table(rows: Sequence[Row]) -> str:
    body = [
        [row.fleet, row.net, str(row.batch), f"`{row.plan}`", seconds(row.predicted_s), seconds(row.median_s),
         "" if row.predicted_s is None else f"{error(row):+.1%}", f"{full_spread(row.rounds_s):.1%}",
         f"{middle_spread(row.rounds_s):.1%}", f"{len(row.rounds_s)} x {row.steps}"]
        for row in rows
    ]  # fmt: skip
    head = ["fleet", "net", "batch", "plan", "predicted", "measured", "error", "spread", "middle", "rounds x steps"]
    return table(head, body)


def seconds(value: float | None) -> str:
    """Format seconds with three significant digits."""
    if value is None:
        return ""
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
