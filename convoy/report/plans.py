"""What `convoy plan` prints: a row per plan, the chosen one layer by layer, what fewer devices would bring."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.console import Console

from convoy.cost.interval import Basis, Interval
from convoy.cost.memory import passes_words
from convoy.plan.explain import LayerRow, layer_rows, work_shares
from convoy.plan.lower import lower
from convoy.planner.bound import LowerBound
from convoy.planner.in_passes import InPasses
from convoy.planner.predict import PlanningContext, PlanPrediction
from convoy.planner.spare import spare_price
from convoy.report.numbers import in_bytes
from convoy.report.screen import Screen, new_table
from convoy.simulator.price import layers_s


def show_predictions(console: Console, rows: Sequence[PlanPrediction], context: PlanningContext) -> None:
    """A row per plan."""
    speeds, names, least = context.speeds.devices, context.names, context.least()
    limit = sum(speeds)
    table = new_table(
        f"Predicted, before anything runs; the limit is {limit:,.4g} samples/s", ("plan",),
        ("step", "nine of ten", "over least", "samples/s", "of the limit", "traffic", "memory", "J/image", "devices"),
    )  # fmt: skip
    table.add_column("bound by")
    for row in rows:
        memory = in_bytes(max(m.total_bytes for m in row.memory))
        table.add_row(
            row.plan.name, f"{row.step_s:.3g} s", between(row.within), over_least(row, least), f"{row.samples_per_s:,.4g}",
            f"{row.efficiency:.1%}", in_bytes(row.traffic_bytes), memory + " !" * bool(row.overfull),
            "-" if row.energy is None else f"{row.energy.image_j:.4g}", str(row.workers), row.bound,
        )  # fmt: skip
    console.print(table)
    for row in rows:
        if row.overfull:
            console.print(f"! {row.plan.name} does not fit: {'; '.join(row.overfull)}", soft_wrap=True)
    console.print(least_words(rows[-1], least, names), soft_wrap=True)
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


def least_words(row: PlanPrediction, least: LowerBound, names: Sequence[str]) -> str:
    """How near a plan comes to what is possible."""
    whence = (
        "by computing alone"
        if least.device < 0
        else f"by what must pass the card of {names[least.device]} or wait for it"
    )
    floor = f"No exact plan can take less than {least.step_s:.3g} s a step ({whence})"
    return f"{floor}: {row.plan.name} is within {over_least(row, least)} of that."


def over_least(row: PlanPrediction, least: LowerBound) -> str:
    """By what part of the bound a plan's step is longer; the bound says nothing of plans that are not exact."""
    return "-" if row.plan.mixes else f"{row.step_s / least.step_s - 1:.1%}"


MADE_FROM: Mapping[Basis | None, str] = {
    None: "given costs",
    "measured": "times of this net that were measured on this fleet",
    "rates": "what these devices reached at another net, and the links and the rest of a step as measured",
    "described": "a roofline: what the devices can do at most and the part of it that nets reach, since nothing was measured "
    "here (convoy measure)",
}


def between(within: Interval) -> str:
    """An interval of seconds in few words."""
    return f"{within.low:.3g} - {within.high:.3g} s"


def show_basis(console: Console, row: PlanPrediction, context: PlanningContext) -> None:
    """The interval of the chosen plan's step, and what the predictions are made from."""
    within, made_from = row.within, MADE_FROM[context.costs.errors.basis]
    console.print(
        f"A step of {row.plan.name}: nine of ten take {within.low:.3g} to {within.high:.3g} s. Made from {made_from}.",
        soft_wrap=True,
    )


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
        limit, own = context.room.limits_bytes[device], context.room.own_bytes(device)
        watts = (
            "-" if context.power is None else f"{context.power[device].idle_w:g} - {context.power[device].busy_w:g} W"
        )
        table.add_row(
            name, f"{row.timeline.compute_s[device] / row.step_s:.1%}", in_bytes(row.sent_bytes[device]),
            in_bytes(row.received_bytes[device]), in_bytes(row.memory[device].total_bytes + own),
            "-" if limit is None else in_bytes(limit), watts,
            "-" if row.energy is None else f"{row.energy.devices_j[device]:.4g}",
        )  # fmt: skip
    console.print(table)


def show_spare(console: Console, row: PlanPrediction, context: PlanningContext) -> None:
    """What it costs to keep the state for the loss of a device, as `convoy train` does."""
    if len(context.names) == 1:
        return
    chosen, each = spare_price(row, context), spare_price(row, context, 1)
    often = "each step" if chosen.every == 1 else f"every {chosen.every} steps"
    sent = f"{in_bytes(chosen.sent_bytes)} sent a step" if chosen.sent_bytes else "nothing sent"
    words = (
        f"Kept for the loss of a device (--spare auto): the state after {often}, {chosen.part:.1%} of a step's time, {sent}, "
        f"at most {in_bytes(max(chosen.memory_bytes))} of a device's memory"
    )
    if chosen.every > 1:
        words += f"; after each step (--spare every-step) it would be {each.part:.1%}"
    console.print(f"{words}.", soft_wrap=True)
    if chosen.overfull:
        console.print(f"! With that there is no room: {'; '.join(chosen.overfull)}. --spare none", soft_wrap=True)


def show_plan(console: Console, row: PlanPrediction, context: PlanningContext) -> None:
    """The plan layer by layer; of what stays whole, also what it costs."""
    graph = context.graph
    steps = lower(row.plan, graph)
    seconds = layers_s(steps, graph, context.costs)

    def priced(layer: LayerRow) -> LayerRow:
        if graph[layer.layer].kind != "opaque" or layer.layer not in seconds:
            return layer
        s, device = seconds[layer.layer]
        cost = f"{s:.3g} s of a step's {row.step_s:.3g} s on {context.names[device]}"
        return replace(layer, note="; ".join(filter(None, (layer.note, cost))))

    rows = [priced(layer) for layer in layer_rows(row.plan, graph)]
    Screen(visible=True, console=console).plan(row.plan, rows, work_shares(steps, graph))


def show_passes(console: Console, row: PlanPrediction, context: PlanningContext, other: InPasses | None) -> None:
    """Of how many passes a step is, and whether several would be better.

    Args:
        other: a step of several passes that is much shorter, where there is one.
    """
    if context.passes > 1:
        words = f"A step of {context.batch * context.passes} samples is {passes_words(context.graph, context.passes)}; what is"
        console.print(
            f"{words} said here is of one of them, with {context.batch} samples, in the mean. A step by {row.plan.name} takes "
            f"{context.passes * row.step_s:.3g} s.",
            soft_wrap=True,
        )
    if other is not None:
        words = passes_words(context.graph, other.passes, other.step_s)
        console.print(f"Memory makes this slow. A step could be made in {words}.", soft_wrap=True)
