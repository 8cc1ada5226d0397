"""Prints the results of `convoy plan` and `convoy predict`."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from rich.console import Console

from convoy.fleet import Fleet
from convoy.fleet.catalogue import DeviceClass, device_class
from convoy.plan.lower import lower
from convoy.plan.text import layer_rows, work_shares
from convoy.planner.payoff import LINKS, Forecast
from convoy.planner.prediction import PlanPrediction, spare_price
from convoy.planner.request import PlanRequest
from convoy.report.measured import remarks
from convoy.report.numbers import in_bits, in_bytes, percent, plain, seconds
from convoy.report.screen import Screen, print_table
from convoy.simulate.interval import Basis, Within
from convoy.simulate.memory import micro_batch_words
from convoy.simulate.simulator import layers_s

BASIS: Mapping[Basis | None, str] = {
    None: "given costs",
    "measured": "times of this net measured on this fleet",
    "described": "a roofline: the devices' peaks and the part of them that nets reach; nothing was measured here "
    "(convoy measure)",
}


def show_all(
    console: Console, rows: Sequence[PlanPrediction], request: PlanRequest, counts: Sequence[tuple[int, float]] = ()
) -> None:
    """Print all predicted plans, then details of the last one, which is the chosen plan.

    `counts` has (number of devices, samples/s) for growing sets of the fastest devices.
    """
    row, names, show = rows[-1], request.names, partial(console.print, soft_wrap=True)
    _show_predictions(console, rows, request)
    if request.micro_batches > 1:
        show(
            f"A step of {request.batch * request.micro_batches} samples is "
            f"{micro_batch_words(request.graph, request.micro_batches)}. The tables are per micro-batch of "
            f"{request.batch} samples, on average; a step of plan {row.plan.name} takes "
            f"{seconds(request.micro_batches * row.step_s)}."
        )
    show(
        f"Plan {row.plan.name}: nine of ten steps take {between(row.within)}. "
        f"Based on {BASIS[request.costs.errors.basis]}."
    )
    for remark in [] if request.fleet.measured is None else remarks(request.fleet.measured):
        show(remark)
    speeds = request.speeds.devices
    order = sorted(range(len(speeds)), key=lambda d: (-speeds[d], d))
    for (fewer, before), (more, after) in itertools.pairwise(counts):
        added, alone = " and ".join(names[d] for d in order[fewer:more]), speeds[order[0]]
        show(
            f"Adding {added}: from {before / alone:.2f}x to {after / alone:.2f}x the throughput of {names[order[0]]} alone."
        )
    _show_devices(console, row, request)
    if len(names) > 1:
        _show_snapshots(show, row, request)
    _show_layers(console, row, request)


def _show_predictions(console: Console, rows: Sequence[PlanPrediction], request: PlanRequest) -> None:
    """Print a row per plan. Compare the chosen one, which is the last, with the fastest device."""
    speeds, names = request.speeds.devices, request.names
    columns = ("step", "nine of ten", "samples/s", "of the sum", "traffic", "memory", "J/image", "devices")
    print_table(
        console, f"Predicted steps; the sum of solo throughputs is {plain(sum(speeds))} samples/s",
        ("plan", *columns, "limited by"),
        [
            (
                row.plan.name, seconds(row.step_s), between(row.within), plain(row.samples_per_s),
                percent(row.efficiency), in_bytes(row.traffic_bytes),
                in_bytes(max(m.total_bytes for m in row.memory)) + " !" * bool(row.overfull),
                "-" if row.image_j is None else plain(row.image_j), str(row.workers), row.bound,
            )
            for row in rows
        ],
        texts=("plan", "limited by"),
    )  # fmt: skip
    for row in rows:
        if row.overfull:
            console.print(f"! {row.plan.name} does not fit: {'; '.join(row.overfull)}", soft_wrap=True)
    best, fastest = rows[-1], max(range(len(speeds)), key=lambda d: speeds[d])
    alone = f"{best.samples_per_s / speeds[fastest]:.2f}x the throughput of {names[fastest]} alone"
    used = "one device" if best.workers == 1 else f"{best.workers} devices"
    console.print(f"Plan {best.plan.name} uses {used}: {alone} ({plain(speeds[fastest])} samples/s).", soft_wrap=True)


def between(within: Within) -> str:
    return f"{seconds(within.low)} - {seconds(within.high)}"


def _show_devices(console: Console, row: PlanPrediction, request: PlanRequest) -> None:
    """Print each device's arithmetic, traffic and memory in a step. Devices without layers still handle messages."""
    work = work_shares(lower(row.plan, request.graph), request.graph)
    limits = request.limits
    limited = [None if limit is None else in_bytes(limit) for limit in limits.limits_bytes]
    print_table(
        console, f"Plan {row.plan.name}, each device in a step",
        ("device", "arithmetic", "busy", "sends", "receives", "memory", "memory limit"),
        [
            (
                name, percent(part) if part else "none", percent(row.timeline.compute_s[device] / row.step_s),
                in_bytes(row.sent_bytes[device]), in_bytes(row.received_bytes[device]),
                in_bytes(row.memory[device].total_bytes + limits.own_bytes(device)),
                limited[device] or "-",
            )
            for device, (name, part) in enumerate(zip(request.names, work, strict=True))
        ],
        texts=("device",),
    )  # fmt: skip


def _show_snapshots(show: Callable[[str], None], row: PlanPrediction, request: PlanRequest) -> None:
    """Print the cost of the recovery snapshots of `convoy train`."""
    chosen, each = spare_price(row, request), spare_price(row, request, 1)
    often = "each step" if chosen.every == 1 else f"every {chosen.every} steps"
    sent = f"{in_bytes(chosen.sent_bytes)} sent per step" if chosen.sent_bytes else "nothing sent"
    otherwise = f" (--spare every-step: {each.part:.1%})" if chosen.every > 1 else ""
    show(
        f"Snapshots for recovery from a lost device (--spare auto), after {often}, add {chosen.part:.1%} to the training "
        f"time{otherwise}; {sent}, at most {in_bytes(max(chosen.memory_bytes))} of memory per device."
    )
    if chosen.overfull:
        show(f"! The snapshots do not fit: {'; '.join(chosen.overfull)}. Give --spare none.")


def _show_layers(console: Console, row: PlanPrediction, request: PlanRequest) -> None:
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


def show_forecast(
    console: Console, found: Forecast, fleet: Fleet, net: str, image: tuple[int, int, int], took_s: float
) -> None:
    """Print whether the fleet pays off, the predictions, and what they are based on."""
    request, show = found.request, partial(console.print, soft_wrap=True)
    batch, size, count, parts = request.batch, "x".join(map(str, image)), request.micro_batches, ""
    if count > 1:
        parts = (
            f" in {count} micro-batches of {batch} (--accumulate {count}), because {request.names[found.fastest]} alone has "
            "no memory for more; all times are of one micro-batch, on average"
        )
    show(f"{net}, images of {size}, batch {batch * count}{parts}.")
    show(_answer(found))
    shares = work_shares(lower(found.best.plan, request.graph), request.graph)
    print_table(
        console, f"Devices, and their use by plan {found.best.plan.name}",
        ("device", "description", "images/s alone", "nine of ten", "arithmetic", "memory", "memory limit"),
        [
            (
                device.name, "" if device.class_name is None else device_class(device.class_name).about,
                _rate(request.speeds.devices[index]), _rates(found.alone_within[index]),
                f"{shares[index]:.0%}" if shares[index] else "none",
                in_bytes(found.best.memory[index].total_bytes) if shares[index] else "-",
                "-" if device.memory_bytes is None else in_bytes(device.memory_bytes),
            )
            for index, device in enumerate(fleet.devices)
        ],
        texts=("device", "description"),
    )  # fmt: skip
    if found.shared is not None:
        weighted = {layer.name for layer in request.graph.weighted}
        kinds = Counter(row.strategy for row in layer_rows(found.shared.plan, request.graph) if row.layer in weighted)
        names = {"one": "on one device", "copies": "copied to every device"}
        layers = ", ".join(f"{count} {names.get(name, f'split by {name}')}" for name, count in kinds.items())
        show(
            f"Best plan with several devices (convolutions and linear layers): {layers}; "
            f"{in_bytes(found.shared.traffic_bytes)} sent per step; limited by {found.shared.bound}."
        )
    if found.basis == "described" and len(request.names) > 1:
        batches = found.from_batch
        smallest = "no size that fits the fastest device" if batches is None else f"{batches:,} samples or more"
        show(f"Batch: it pays with {smallest}.")
        if found.asked_links:
            rate = found.from_link
            slowest = f"no rate up to {in_bits(LINKS[-1])}" if rate is None else f"{in_bits(rate)} or more"
            here = "" if fleet.network is None else f" (here {in_bits(fleet.network.send_bytes_per_s)})"
            show(f"Link: it pays with {slowest}{here}.")
    show(f"Based on {BASIS[found.basis]}. Nine of ten measurements lie in an interval.")
    show(f"Answered in {took_s:.1f} s.")


def _answer(found: Forecast) -> str:
    best, fastest = found.best, found.request.names[found.fastest]
    times = (
        f"{_rate(best.samples_per_s)} images/s, {seconds(best.step_s)} a step (nine of ten: {between(best.within)})."
    )
    if len(found.request.names) == 1:
        return f"One device: {times}"
    gain = f"{found.gain:.2f} times as fast as {fastest} alone"
    within = f"nine of ten: {found.gain_within.low:.2f} - {found.gain_within.high:.2f}"
    answer = f"Would it pay? {found.verdict.capitalize()}:"
    if found.verdict in ("yes", "perhaps"):
        return f"{answer} {gain} ({within}), {times}"
    alone, rates = found.request.speeds.devices[found.fastest], _rates(found.alone_within[found.fastest])
    several = f" The best plan with several devices is {gain} ({within})." if found.shared is not None else ""
    return (
        f"{answer} {fastest} alone is the fastest, {_rate(alone)} images/s (nine of ten: {rates}), "
        f"{seconds(found.request.batch / alone)} a step.{several}"
    )


def _rate(value: float) -> str:
    return plain(value, 3)


def _rates(within: Within) -> str:
    return f"{_rate(within.low)} - {_rate(within.high)}"


def show_classes(classes: Sequence[DeviceClass]) -> None:
    """Print the catalogue, a row per class."""
    console = Screen(visible=True).console
    print_table(
        console, f"{len(classes)} device classes",
        ("class", "description", "float32", "memory/s", "memory", "watts"),
        [
            (
                " = ".join((each.name, *each.aliases)), each.about, f"{each.peak_flop_per_s.value / 1e12:.3g} TFLOP/s",
                in_bytes(int(each.memory_bytes_per_s.value)), in_bytes(int(each.memory_bytes.value)),
                f"{each.busy_w.value:g}",
            )
            for each in classes
        ],
        texts=("class", "description"),
    )  # fmt: skip
    console.print("Sources of every figure: convoy/fleet/catalogue.toml.")
