"""Prints the result of `convoy plan`: a row per plan; the chosen plan by device, by part of a step and by layer."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rich.console import Console

from convoy.plan.explain import layer_rows, work_shares
from convoy.plan.lower import lower
from convoy.planner.prediction import PlanPrediction
from convoy.planner.request import PlanRequest
from convoy.planner.snapshot_cost import spare_price
from convoy.report.measured import remarks
from convoy.report.numbers import in_bytes, percent, plain, seconds
from convoy.report.screen import Screen, new_table
from convoy.report.timeline import kind_of
from convoy.simulate.events import Timeline
from convoy.simulate.interval import Basis, Within
from convoy.simulate.memory import micro_batch_words
from convoy.simulate.network import Network
from convoy.simulate.simulator import LOSS, layers_s

BASIS: Mapping[Basis | None, str] = {
    None: "given costs",
    "measured": "times of this net measured on this fleet",
    "rates": "rates of these devices with another net; links and overheads as measured",
    "described": "a roofline: the devices' peaks and the part of them that nets reach; nothing was measured here "
    "(convoy measure)",
}


def show_all(
    console: Console,
    rows: Sequence[PlanPrediction],
    request: PlanRequest,
    counts: Sequence[tuple[int, float]] = (),
) -> None:
    """Print all predicted plans, and the last one, which is chosen, in detail.

    Args:
        counts: throughput by number of devices, the fastest first.
    """

    def show(line: str) -> None:
        console.print(line, soft_wrap=True)

    row, names = rows[-1], request.names
    _show_predictions(console, rows, request)
    if request.micro_batches > 1:
        show(
            f"A step of {request.batch * request.micro_batches} samples is "
            f"{micro_batch_words(request.graph, request.micro_batches)}. The tables are per micro-batch of "
            f"{request.batch} samples, on average; a step of plan {row.plan.name} takes "
            f"{seconds(request.micro_batches * row.step_s)}."
        )
    basis = BASIS[request.costs.errors.basis]
    show(f"Plan {row.plan.name}: nine of ten steps take {between(row.within)}. Based on {basis}.")
    measured = request.fleet.measured
    for remark in [] if measured is None else remarks(measured):
        show(remark)
    speeds = request.speeds.devices
    order = sorted(range(len(speeds)), key=lambda d: (-speeds[d], d))
    for (fewer, before), (more, after) in itertools.pairwise(counts):
        added, alone = " and ".join(names[d] for d in order[fewer:more]), speeds[order[0]]
        show(
            f"Adding {added}: from {before / alone:.2f}x to {after / alone:.2f}x the throughput of {names[order[0]]} alone."
        )
    _show_devices(console, row, request)
    show_step_parts(console, row, request)
    if len(names) > 1:
        _show_spare(console, row, request)
    _show_plan(console, row, request)


def _show_predictions(console: Console, rows: Sequence[PlanPrediction], request: PlanRequest) -> None:
    """Print a row per plan; the last one is chosen."""
    speeds, names = request.speeds.devices, request.names
    table = new_table(
        f"Predicted; the limit, the sum of solo throughputs, is {plain(sum(speeds))} samples/s", ("plan",),
        ("step", "nine of ten", "samples/s", "of the limit", "traffic", "memory", "J/image", "devices")
    )  # fmt: skip
    table.add_column("limited by")
    for row in rows:
        memory = in_bytes(max(m.total_bytes for m in row.memory))
        table.add_row(
            row.plan.name, seconds(row.step_s), between(row.within), plain(row.samples_per_s),
            percent(row.efficiency), in_bytes(row.traffic_bytes), memory + " !" * bool(row.overfull),
            "-" if row.energy is None else plain(row.energy.image_j), str(row.workers), row.bound
        )  # fmt: skip
    console.print(table)
    for row in rows:
        if row.overfull:
            console.print(f"! {row.plan.name} does not fit: {'; '.join(row.overfull)}", soft_wrap=True)
    best, fastest = rows[-1], max(range(len(speeds)), key=lambda d: speeds[d])
    alone = f"{best.samples_per_s / speeds[fastest]:.2f}x the throughput of {names[fastest]} alone"
    used = "one device" if best.workers == 1 else f"{best.workers} devices"
    console.print(f"auto uses {used}: {alone} ({plain(speeds[fastest])} samples/s).", soft_wrap=True)


def between(within: Within) -> str:
    return f"{seconds(within.low)} - {seconds(within.high)}"


def _show_devices(console: Console, row: PlanPrediction, request: PlanRequest) -> None:
    """Print each device's work, traffic, memory and energy in a step. Messages and the loss keep devices without work busy."""
    columns = ("work", "busy", "sends", "receives", "memory", "of", "idle - busy", "joules")
    table = new_table(f"Plan {row.plan.name}, per device and step", ("device",), columns)
    work = work_shares(lower(row.plan, request.graph), request.graph)
    for device, name in enumerate(request.names):
        limit, own = request.limits.limits_bytes[device], request.limits.own_bytes(device)
        power = None if request.power is None else request.power[device]
        table.add_row(
            name, percent(work[device]) if work[device] else "none", percent(row.timeline.compute_s[device] / row.step_s),
            in_bytes(row.sent_bytes[device]), in_bytes(row.received_bytes[device]),
            in_bytes(row.memory[device].total_bytes + own), "-" if limit is None else in_bytes(limit),
            "-" if power is None else f"{power.idle_w:g} - {power.busy_w:g} W",
            "-" if row.energy is None else plain(row.energy.devices_j[device])
        )  # fmt: skip
    console.print(table)


def _show_spare(console: Console, row: PlanPrediction, request: PlanRequest) -> None:
    """Print the cost of the recovery snapshots of `convoy train`."""
    chosen, each = spare_price(row, request), spare_price(row, request, 1)
    often = "each step" if chosen.every == 1 else f"every {chosen.every} steps"
    sent = f"{in_bytes(chosen.sent_bytes)} sent per step" if chosen.sent_bytes else "nothing sent"
    otherwise = f"; after each step (--spare every-step) {each.part:.1%}" if chosen.every > 1 else ""
    console.print(
        f"Snapshots for recovery from a lost device (--spare auto): after {often}, {chosen.part:.1%} of a step's time, "
        f"{sent}, at most {in_bytes(max(chosen.memory_bytes))} of memory per device{otherwise}.", soft_wrap=True
    )  # fmt: skip
    if chosen.overfull:
        console.print(f"! The snapshots do not fit: {'; '.join(chosen.overfull)}. Give --spare none.", soft_wrap=True)


def _show_plan(console: Console, row: PlanPrediction, request: PlanRequest) -> None:
    """Print the plan layer by layer, with the cost of layers that are not split."""
    graph, rows = request.graph, []
    steps = lower(row.plan, graph)
    costs = layers_s(steps, graph, request.costs)
    for layer in layer_rows(row.plan, graph):
        if graph[layer.layer].kind == "opaque" and layer.layer in costs:
            layer_s, device = costs[layer.layer]
            cost = f"{seconds(layer_s)} of a step's {seconds(row.step_s)} on {request.names[device]}"
            layer = replace(layer, note="; ".join(filter(None, (layer.note, cost))))
        rows.append(layer)
    Screen(visible=True, console=console).plan(row.plan, rows, work_shares(steps, graph))


# --- the parts of a step --------------------------------------------------------------------------------------------------

Span = tuple[float, float]


def step_parts(timeline: Timeline, network: Network) -> tuple[int, dict[str, float]]:
    """Divide the step of the device that finishes last, or on a tie computes longest, into parts.

    Returns:
        the device, and the seconds of each part. A second counts once, for the first part that applies: layers, optimizer,
        loss, handling (of messages and batches); idle while a message is on the wire, while one has left but not begun to
        arrive (latency), or otherwise (others).
    """
    ends_s = [0.0] * len(timeline.compute_s)
    for event in timeline.events:
        ends_s[event.device] = max(ends_s[event.device], event.end_s)
    last = max(range(len(ends_s)), key=lambda d: (ends_s[d], timeline.compute_s[d]))
    spans: dict[str, list[Span]] = {}
    names = {"forward": "layers", "backward": "layers", "send": "wire", "receive": "wire"}
    for event in timeline.events:
        if event.device != last:
            continue
        if event.activity != "wait":
            kind = "loss" if event.label == LOSS else kind_of(event.activity, event.label)
            spans.setdefault(names.get(kind, kind), []).append((event.start_s, event.end_s))
        if event.peer >= 0:
            source, target = (last, event.peer) if event.activity == "send" else (event.peer, last)
            left_s = max(0.0, event.start_s - network.latency_s[source][target])
            spans.setdefault("latency", []).append((left_s, event.start_s))
    found, covered, before_s = {}, list[Span](), 0.0
    for kind in ("layers", "optimizer", "loss", "handling", "wire", "latency"):
        covered = _merged([*covered, *spans.get(kind, ())])
        total_s = sum(end - start for start, end in covered)
        found[kind], before_s = total_s - before_s, total_s
    return last, found | {"others": max(0.0, timeline.step_s - before_s)}


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Merge overlapping spans, and sort them."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def show_step_parts(console: Console, row: PlanPrediction, request: PlanRequest) -> None:
    """Print a row for each part of the step."""
    device, parts = step_parts(row.timeline, request.costs.network)
    step = "Step" if request.micro_batches == 1 else "Last micro-batch of a step"
    title = f"{step} of plan {row.plan.name} on {request.names[device]}, which finishes last"
    table = new_table(title, ("part",), ("predicted", "of the step"))
    rows = {
        "layers": parts["layers"],
        "optimizer": parts["optimizer"],
        "loss function": parts["loss"],
        "copies, calls, loading data": parts["handling"],
        "waiting for messages on the wire": parts["wire"],
        "waiting for their latency": parts["latency"],
        "waiting for other devices": parts["others"],
        "all": sum(parts.values()),
    }
    for name, part_s in rows.items():
        table.add_row(name, seconds(part_s), percent(part_s / rows["all"]))
    console.print(table)
