"""Prints the result of `convoy predict`: whether a fleet pays, the best plan, and changes that affect the answer."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from convoy.fleet import Fleet
from convoy.fleet.catalogue import DeviceClass, device_class
from convoy.plan.explain import layer_rows, work_shares
from convoy.plan.lower import lower
from convoy.planner.payoff import LINKS, Forecast
from convoy.planner.prediction import PlanPrediction
from convoy.report.numbers import in_bytes, plain, seconds
from convoy.report.plans import BASIS, between, show_step_parts
from convoy.report.screen import new_table
from convoy.simulate.interval import Within


def show_forecast(
    console: Console, found: Forecast, fleet: Fleet, net: str, image: tuple[int, int, int], took_s: float
) -> None:
    """Print the answer, then its basis."""
    request = found.request
    batch, size = request.batch, "x".join(map(str, image))
    count, parts = request.micro_batches, ""
    if count > 1:
        parts = (
            f" in {count} micro-batches of {batch} (--accumulate {count}): {request.names[found.fastest]} alone "
            "has no memory for more. Times of a step are those of a micro-batch, on average"
        )
    console.print(f"{net}, images of {size}, batch {batch * count}{parts}. {_answer(found)}", soft_wrap=True)
    _show_devices(console, found, fleet)
    if found.shared is not None:
        console.print(_plan(found, found.shared), soft_wrap=True)
        show_step_parts(console, found.shared, request)
    for line in _changes(found, fleet):
        console.print(line, soft_wrap=True)
    console.print(f"Based on {_basis(found, fleet)}.", soft_wrap=True)
    console.print(f"Answered in {took_s:.1f} s.")


def _answer(found: Forecast) -> str:
    best, fastest = found.best, found.request.names[found.fastest]
    if len(found.request.names) == 1:
        within = between(best.within)
        return (
            f"One device: {_rate(best.samples_per_s)} images/s, {seconds(best.step_s)} a step (nine of ten: {within})."
        )
    gain = f"{found.gain:.2f} times as fast"
    gain_within = f"nine of ten: {found.gain_within.low:.2f} - {found.gain_within.high:.2f}"
    if found.verdict in ("no", "probably not"):
        alone, within_rate = found.request.speeds.devices[found.fastest], found.alone_within[found.fastest]
        several = f" The best plan with several devices is {gain} ({gain_within})." if found.shared is not None else ""
        return (
            f"Would it pay? {found.verdict.capitalize()}: {fastest} alone is the fastest, {_rate(alone)} images/s "
            f"(nine of ten: {_rates(within_rate)}), {seconds(found.request.batch / alone)} a step.{several}"
        )
    return (
        f"Would it pay? {found.verdict.capitalize()}: {gain} as {fastest} alone ({gain_within}), {_rate(best.samples_per_s)} "
        f"images/s, {seconds(best.step_s)} a step (nine of ten: {between(best.within)})."
    )


def _show_devices(console: Console, found: Forecast, fleet: Fleet) -> None:
    columns = ("images/s alone", "nine of ten", "share of the work", "memory used", "of")
    table = new_table("Devices", ("device", "description"), columns)
    shares = work_shares(lower(found.best.plan, found.request.graph), found.request.graph)
    for index, device in enumerate(fleet.devices):
        table.add_row(
            device.name, "" if device.class_name is None else device_class(device.class_name).about,
            _rate(found.request.speeds.devices[index]), _rates(found.alone_within[index]),
            f"{shares[index]:.0%}" if shares[index] else "none",
            in_bytes(found.best.memory[index].total_bytes) if shares[index] else "-",
            "-" if device.memory_bytes is None else in_bytes(device.memory_bytes),
        )  # fmt: skip
    console.print(table)


def _plan(found: Forecast, row: PlanPrediction) -> str:
    """Summarize how a plan splits the layers with weights."""
    weighted = {layer.name for layer in found.request.graph.weighted}
    rows = layer_rows(row.plan, found.request.graph)
    kinds = Counter(layer.strategy for layer in rows if layer.layer in weighted)
    names = {"one": "on one device", "copies": "copied to every device"}
    layers = ", ".join(f"{count} {names.get(name, f'split by {name}')}" for name, count in kinds.items())
    title = "Best plan with several devices (convolutions and linear layers)"
    return f"{title}: {layers}; {in_bytes(row.traffic_bytes)} sent per step; limited by {row.bound}."


def _changes(found: Forecast, fleet: Fleet) -> list[str]:
    if found.basis != "described" or len(found.request.names) == 1:
        return []
    batch = (
        "no size that fits the fastest device" if found.from_batch is None else f"{found.from_batch:,} samples or more"
    )
    lines = [f"Batch: it pays with {batch}."]
    if found.asked_links:
        link = f"no rate up to {_link(LINKS[-1])}" if found.from_link is None else f"{_link(found.from_link)} or more"
        here = "" if fleet.network is None else f" (here {_link(fleet.network.send_bytes_per_s)})"
        lines.append(f"Link: it pays with {link}{here}.")
    gains = [(each.words, "does not fit" if each.gain is None else f"{each.gain:.2f}x") for each in found.changes]
    listed = [f"{words} {gain}" for words, gain in gains if gain != "1.00x"]
    if len(listed) < len(gains):
        listed.append(f"any {'other ' * bool(listed)}1.00x")
    if listed:
        fastest = found.request.names[found.fastest]
        lines.append(f"One device less or more, compared with {fastest} alone: {', '.join(listed)}.")
    return lines


def _basis(found: Forecast, fleet: Fleet) -> str:
    if found.basis != "described":
        return BASIS[found.basis]
    of_catalogue = sum(device.class_name is not None for device in fleet.devices)
    source = (
        "the catalogue" if of_catalogue == len(fleet.devices) else f"the catalogue ({of_catalogue}) and the fleet file"
    )
    return (
        f"the devices' peaks ({source}), the part of them that convolutions and memory reach on such devices, and the link's "
        "rate. Nine of ten measurements lie in an interval; intervals are twice as wide, in logarithms, for device "
        "generations without measurements"
    )


def _rate(value: float) -> str:
    return plain(value, 3)


def _rates(within: Within) -> str:
    return f"{_rate(within.low)} - {_rate(within.high)}"


def _link(bytes_per_s: float) -> str:
    bits = bytes_per_s * 8
    return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"


def show_classes(console: Console, classes: Sequence[DeviceClass]) -> None:
    """Print the catalogue, a row per class."""
    columns = ("float32", "memory/s", "memory", "watts")
    table = new_table(f"{len(classes)} device classes", ("class", "description"), columns)
    for each in classes:
        table.add_row(
            " = ".join((each.name, *each.aliases)), each.about, f"{each.peak_flop_per_s.value / 1e12:.3g} TFLOP/s",
            in_bytes(int(each.memory_bytes_per_s.value)), in_bytes(int(each.memory_bytes.value)), f"{each.busy_w.value:g}",
        )  # fmt: skip
    console.print(table)
    console.print("Sources of every figure: convoy/fleet/catalogue.toml.")
