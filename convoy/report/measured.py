"""What `convoy measure` prints: a line while it measures, then tables of layers, devices and links."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status
from rich.table import Table

from convoy.cost.table import Measurement, layer_times
from convoy.report.screen import LINE_EVERY_S, new_table

SHOWN_LAYERS = 12


class Watch:
    """Tells what is being measured; it is called with what, how much is done, and how much there is."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.status: Status | None = console.status("measuring") if console.is_terminal else None
        self.shown_s = -LINE_EVERY_S

    def __call__(self, what: str, done: int, total: int) -> None:
        text = f"measuring {what} ({done} of {total} layers are done)"
        if self.status is not None:
            self.status.update(text)
        elif time.monotonic() - self.shown_s >= LINE_EVERY_S:
            self.shown_s = time.monotonic()
            self.console.print(text, markup=False)

    def __enter__(self) -> Self:
        if self.status is not None:
            self.status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.status is not None:
            self.status.stop()


def show(measured: Measurement, console: Console) -> None:
    """Print a measurement: seconds of the layers on each device, then what traffic and the wire take."""
    console.print(_layers(measured))
    console.print(_devices(measured))
    if measured.fleet.links:
        console.print(_links(measured))
    if measured.host:
        console.print(_cards(measured))


def _layers(measured: Measurement) -> Table:
    """Forward and backward of a whole layer for the whole batch, the costliest layers first, and the others together."""
    names = [device.name for device in measured.fleet.devices]
    table = new_table(f"{measured.net}, batch {measured.batch}", ("forward and backward",), names)
    rows = sorted(_layer_rows(measured).items(), key=lambda item: -max(s for s, _ in item[1]))
    for name, cells in rows[:SHOWN_LAYERS]:
        table.add_row(name, *(f"{_seconds(s)} {_about(spread)}" for s, spread in cells))
    others = [cells for _, cells in rows[SHOWN_LAYERS:]]
    if others:
        sums = [sum(cells[device][0] for cells in others) for device in range(len(measured.fleet.devices))]
        table.add_row(f"{len(others)} others", *map(_seconds, sums))
    table.add_section()
    totals = [sum(cells[device][0] for _, cells in rows) for device in range(len(measured.fleet.devices))]
    table.add_row("all", *map(_seconds, totals))
    table.add_row("samples/s", *(f"{measured.batch / max(total, 1e-12):,.4g}" for total in totals))
    return table


def _layer_rows(measured: Measurement) -> dict[str, list[tuple[float, float]]]:
    """(seconds, median spread) of every layer on every device."""
    whole: dict[str, int] = {}
    for point in measured.layer:
        whole[point.layer] = max(whole.get(point.layer, 0), point.outputs)
    result: dict[str, list[tuple[float, float]]] = {name: [] for name in whole}
    for device in measured.fleet.devices:
        for name, points in measured.points_of(device.name).items():
            times, alone = layer_times(points), max(point.samples for point in points) == 1
            samples = 1 if alone else measured.batch
            seconds = times.forward.at(samples, whole[name]) + times.backward.at(samples, whole[name])
            result[name].append((seconds, sorted(point.spread for point in points)[len(points) // 2]))
    return result


def _devices(measured: Measurement) -> Table:
    table = new_table(
        "Traffic in ns/byte of the processor, optimizer in ns/entry, how late to an exchange", ("device", "host"),
        ("cores", "slowed", "send", "receive", "update", "late"),
    )  # fmt: skip
    for device, costs in zip(measured.fleet.devices, measured.device, strict=True):
        table.add_row(
            device.name, device.host, "-" if device.cores is None else f"{device.cores:g}",
            f"{device.slowdown:g}x" if device.slowdown != 1 else "-", f"{costs.send_s_per_byte * 1e9:.3g}",
            f"{costs.receive_s_per_byte * 1e9:.3g} {_about(costs.traffic_spread)}",
            f"{costs.update_s_per_entry * 1e9:.3g} {_about(costs.update_spread)}",
            _seconds(costs.jitter_s) if costs.jitter_s else "-",
        )  # fmt: skip
    return table


def _links(measured: Measurement) -> Table:
    table = new_table("Links, each alone in use", ("from", "to"), ("rate", "latency"))
    spread = {(each.source, each.target): each for each in measured.link}
    for link in measured.fleet.links:
        noise = spread.get((link.source, link.target))
        rate, latency = _rate(link.bandwidth_bytes_per_s), _seconds(link.latency_s)
        if noise is not None:
            rate, latency = f"{rate} {_about(noise.bandwidth_spread)}", f"{latency} {_about(noise.latency_spread)}"
        table.add_row(link.source, link.target, rate, latency)
    return table


def _cards(measured: Measurement) -> Table:
    """A ring much slower than the card says that its two directions, or all hosts, share something."""
    table = new_table("Cards, with all other hosts at once", ("host",), ("send", "receive", "in a ring"))
    for rates in measured.host:
        card = measured.fleet.card(rates.host)
        table.add_row(
            rates.host, f"{_rate(card.send_bytes_per_s)} {_about(rates.send_spread)}",
            f"{_rate(card.receive_bytes_per_s)} {_about(rates.receive_spread)}", _rate(rates.ring_bytes_per_s),
        )  # fmt: skip
    return table


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.4g} MB/s"


def _about(spread: float) -> str:
    """Half of what lies between the fastest and the slowest repetition."""
    return f"±{spread / 2:.0%}"
