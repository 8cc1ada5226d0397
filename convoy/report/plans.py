"""What `convoy plan` prints: a row per plan, the chosen one layer by layer, what fewer devices would bring."""

import itertools
from collections.abc import Sequence

from rich.console import Console

from convoy.model.graph import Graph
from convoy.planner.predict import PlanningContext, PlanPrediction
from convoy.report.numbers import in_bytes
from convoy.report.screen import Screen, new_table


def show_predictions(console: Console, rows: Sequence[PlanPrediction], context: PlanningContext) -> None:
    """A row per plan."""
    speeds, names = context.speeds.devices, context.names
    limit = sum(speeds)
    table = new_table(
        f"Predicted, before anything runs; the limit is {limit:,.4g} samples/s", ("plan",),
        ("step", "samples/s", "of the limit", "traffic", "memory", "J/image", "devices"),
    )  # fmt: skip
    table.add_column("bound by")
    for row in rows:
        memory = in_bytes(max(m.total_bytes for m in row.memory))
        table.add_row(
            row.plan.name, f"{row.step_s:.4g} s", f"{row.samples_per_s:,.4g}", f"{row.efficiency:.1%}",
            in_bytes(row.traffic_bytes), memory + " !" * bool(row.overfull),
            "-" if row.energy is None else f"{row.energy.image_j:.4g}", str(row.workers), row.bound,
        )  # fmt: skip
    console.print(table)
    for row in rows:
        if row.overfull:
            console.print(f"! {row.plan.name} does not fit: {'; '.join(row.overfull)}", soft_wrap=True)
    best, fastest = rows[-1], max(range(len(speeds)), key=lambda d: speeds[d])
    gain = best.samples_per_s / speeds[fastest]
    if best.workers == 1:
        console.print(
            f"auto leaves the work to one device: {gain:.2f}x the samples/s of {names[fastest]} alone "
            f"({speeds[fastest]:,.4g}).",
            soft_wrap=True,
        )
    else:
        console.print(f"auto is {gain:.2f}x as fast as {names[fastest]} alone.")


def show_counts(console: Console, counts: Sequence[tuple[int, float]], context: PlanningContext) -> None:
    """What one device less or more brings."""
    speeds, names = context.speeds.devices, context.names
    order = sorted(range(len(speeds)), key=lambda d: (-speeds[d], d))
    alone = speeds[order[0]]
    for (fewer, before), (more, after) in itertools.pairwise(counts):
        added = " and ".join(names[d] for d in order[fewer:more])
        console.print(f"without {added}: {before / alone:.2f}x; with {added}: {after / alone:.2f}x")


def show_devices(console: Console, row: PlanPrediction, context: PlanningContext) -> None:
    """A row per device: what it computes, sends, receives, keeps and draws in a step of one plan."""
    columns = ("computes", "sends", "receives", "memory", "of", "idle - busy", "joules")
    table = new_table(f"Plan {row.plan.name}, device by device, per step", ("device",), columns)
    for device, name in enumerate(context.names):
        limit = context.room.limits_bytes[device]
        watts = (
            "-" if context.power is None else f"{context.power[device].idle_w:g} - {context.power[device].busy_w:g} W"
        )
        table.add_row(
            name, f"{row.timeline.compute_s[device] / row.step_s:.1%}", in_bytes(row.sent_bytes[device]),
            in_bytes(row.received_bytes[device]), in_bytes(row.memory[device].total_bytes),
            "-" if limit is None else in_bytes(limit), watts,
            "-" if row.energy is None else f"{row.energy.devices_j[device]:.4g}",
        )  # fmt: skip
    console.print(table)


def show_plan(console: Console, row: PlanPrediction, graph: Graph) -> None:
    """The plan layer by layer."""
    from convoy.plan.explain import layer_rows, work_shares
    from convoy.plan.lower import lower

    shares = work_shares(lower(row.plan, graph), graph)
    Screen(visible=True, console=console).plan(row.plan, layer_rows(row.plan, graph), shares)
