"""What `convoy predict` prints: would it pay, by which plan, from where on, what one device more or less brings."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from convoy.cost.interval import Interval
from convoy.fleet import Fleet
from convoy.fleet.catalogue import DeviceClass, device_class
from convoy.plan.explain import layer_rows, work_shares
from convoy.plan.lower import lower
from convoy.planner.forecast import LINKS, Forecast
from convoy.report.numbers import in_bytes, plain, seconds
from convoy.report.plans import MADE_FROM, least_words
from convoy.report.screen import new_table
from convoy.report.step_parts import show_step_parts


def show_forecast(
    console: Console, found: Forecast, fleet: Fleet, net: str, image: tuple[int, int, int], took_s: float
) -> None:
    """The answer first, then what it rests on."""
    context = found.context
    batch = context.batch
    size = "x".join(map(str, image))
    passes = ""
    if found.passes > 1:
        fastest = context.names[found.fastest]
        passes = (
            f" in {found.passes} passes of {batch} (--accumulate {found.passes}), since {fastest} alone has memory for no "
            "more; a step is one pass here, in the mean"
        )
    console.print(f"{net}, images of {size}, batch {batch * found.passes}{passes}. {_answer(found)}", soft_wrap=True)
    _show_devices(console, found, fleet)
    if found.best.workers > 1:
        console.print(f"By plan auto: {_plan(found)}", soft_wrap=True)
    if len(context.names) > 1:
        least = found.context.least()
        console.print(least_words(found.best, least, found.context.names), soft_wrap=True)
        show_step_parts(console, found.best, least, found.context)
    for line in _around(found, fleet):
        console.print(line, soft_wrap=True)
    console.print(_made_from(found, fleet), soft_wrap=True)
    console.print(f"Answered in {took_s:.1f} s.")


def _answer(found: Forecast) -> str:
    best, fastest = found.best, found.context.names[found.fastest]
    if len(found.context.names) == 1:
        return (
            f"One device: {_rate(best.samples_per_s)} images/s, a step of {seconds(best.step_s)} "
            f"({_seconds(best.within)})."
        )
    if found.verdict in ("no", "probably not"):
        alone, within = found.context.speeds.devices[found.fastest], found.alone_within[found.fastest]
        shared = f" Shared out, it is at best {found.gain:.2f} times as fast ({_factor(found.gain_within)})."
        return (
            f"Would it pay? {found.verdict.capitalize()}: {fastest} alone is the fastest, {_rate(alone)} images/s "
            f"(nine of ten: {_rate(within.low)} - {_rate(within.high)}), a step of {seconds(found.context.batch / alone)}."
            + shared
            * (found.shared is not None)
        )
    word = "Yes" if found.verdict == "yes" else "Perhaps"
    return (
        f"Would it pay? {word}: {found.gain:.2f} times as fast as {fastest} alone ({_factor(found.gain_within)}), "
        f"{_rate(best.samples_per_s)} images/s, a step of {seconds(best.step_s)} ({_seconds(best.within)})."
    )


def _show_devices(console: Console, found: Forecast, fleet: Fleet) -> None:
    table = new_table(
        "Each device",
        ("device", "what it is"),
        ("alone, images/s", "nine of ten", "its work here", "memory here", "of"),
    )
    shares = work_shares(lower(found.best.plan, found.context.graph), found.context.graph)
    for index, device in enumerate(fleet.devices):
        about = "" if device.class_name is None else device_class(device.class_name).about
        within = found.alone_within[index]
        memory = found.best.memory[index].total_bytes
        table.add_row(
            device.name, about, _rate(found.context.speeds.devices[index]), f"{_rate(within.low)} - {_rate(within.high)}",
            f"{shares[index]:.0%}" if shares[index] else "none", in_bytes(memory) if shares[index] else "-",
            "-" if device.memory_bytes is None else in_bytes(device.memory_bytes),
        )  # fmt: skip
    console.print(table)


def _plan(found: Forecast) -> str:
    """How the weighted layers are shared out, in few words."""
    rows = layer_rows(found.best.plan, found.context.graph)
    weighted = {layer.name for layer in found.context.graph.weighted}
    kinds = Counter(row.strategy for row in rows if row.layer in weighted)
    strategies = ", ".join(f"{count} convolutions and linear layers by {name}" for name, count in kinds.items())
    traffic = in_bytes(found.best.traffic_bytes)
    return f"{strategies}; {traffic} on the wire in a step; it waits most for {found.best.bound}."


def _around(found: Forecast, fleet: Fleet) -> list[str]:
    if found.basis != "described" or len(found.context.names) == 1:
        return []
    lines = []
    if found.from_batch is None:
        lines.append("Batch: it pays at none for which the fastest device has memory.")
    else:
        lines.append(f"Batch: it pays from {found.from_batch:,} on.")
    if found.asked_links:
        now = "" if fleet.network is None else f" (here {_link(fleet.network.send_bytes_per_s)})"
        if found.from_link is None:
            lines.append(f"Link: it pays at none up to {_link(LINKS[-1])}{now}.")
        else:
            lines.append(f"Link: it pays from {_link(found.from_link)} on{now}.")
    changes = [f"{each.words} {_gain(each.gain)}" for each in found.changes]
    if changes:
        fastest = found.context.names[found.fastest]
        lines.append(f"One device less or more, over {fastest} alone: {', '.join(changes)}.")
    return lines


def _made_from(found: Forecast, fleet: Fleet) -> str:
    if found.basis != "described":
        return f"Made from: {MADE_FROM[found.basis]}."
    of_catalogue = sum(device.class_name is not None for device in fleet.devices)
    whence = (
        "the catalogue" if of_catalogue == len(fleet.devices) else f"the catalogue ({of_catalogue}) and the fleet file"
    )
    return (
        f"Made from: what the devices can do at most ({whence}), the parts of it that convolutions and memory reach on such "
        "devices, and the link's rate. Intervals are of nine in ten measurements; twice as wide, in "
        "logarithms, for generations of devices of which none was measured."
    )


def _gain(value: float | None) -> str:
    return "does not fit" if value is None else f"{value:.2f}x"


def _rate(value: float) -> str:
    return plain(value, 3)


def _seconds(within: Interval) -> str:
    return f"nine of ten: {seconds(within.low)} - {seconds(within.high)}"


def _factor(within: Interval) -> str:
    return f"nine of ten: {within.low:.2f} - {within.high:.2f}"


def _link(bytes_per_s: float) -> str:
    bits = bytes_per_s * 8
    return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"


def show_classes(console: Console, classes: Sequence[DeviceClass]) -> None:
    """The catalogue, a row per class."""
    columns = ("float32", "memory/s", "memory", "watts")
    table = new_table(f"{len(classes)} device classes", ("class", "what it is"), columns)
    for each in classes:
        names = " = ".join((each.name, *each.aliases))
        table.add_row(
            names, each.about, f"{each.peak_flop_per_s.value / 1e12:.3g} TFLOP/s", in_bytes(int(each.memory_bytes_per_s.value)),
            in_bytes(int(each.memory_bytes.value)), f"{each.busy_w.value:g}",
        )  # fmt: skip
    console.print(table)
    console.print("Sources of every figure: convoy/fleet/catalogue.toml.")
