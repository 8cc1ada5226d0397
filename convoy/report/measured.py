"""Prints the result of `convoy measure`: tables of layers, devices and links, and remarks."""

from rich.console import Console

from convoy.report.numbers import seconds
from convoy.report.screen import print_table
from convoy.simulate.table import Measurement, layer_times

SHOWN_LAYERS = 12
UNSTEADY = 0.5  # warn if layers whose times vary by more than this fraction take a third of a step


def show(measured: Measurement, console: Console) -> None:
    _show_layers(measured, console)
    fleet = measured.fleet
    if fleet.links:
        spread = {(each.source, each.target): each for each in measured.link}
        rows = []
        for link in fleet.links:
            rate, latency = _rate(link.bandwidth_bytes_per_s), seconds(link.latency_s)
            if noise := spread.get((link.source, link.target)):
                rate, latency = f"{rate} {_about(noise.bandwidth_spread)}", f"{latency} {_about(noise.latency_spread)}"
            rows.append((link.source, link.target, rate, latency))
        print_table(console, "Links, one at a time", ("from", "to", "rate", "latency"), rows, texts=("from", "to"))
    if len(fleet.hosts) > 1:
        nics = {host.name: fleet.nic(host.name) for host in fleet.hosts}
        rates = [(host, _rate(nic.send_bytes_per_s), _rate(nic.receive_bytes_per_s)) for host, nic in nics.items()]
        print_table(console, "NICs, with all other hosts at once", ("host", "send", "receive"), rates, texts=("host",))
    for remark in remarks(measured):
        console.print(remark, markup=False, soft_wrap=True)


def remarks(measured: Measurement) -> list[str]:
    """Return a line for each reason why the measurement is uncertain: other programs ran, or times did not repeat."""
    lines = []
    loaded = [(each.other_load, each.device) for each in measured.device if each.other_load]
    if loaded:
        most, names = max(loaded)[0], ", ".join(device for _, device in loaded)
        lines.append(
            f"Other programs ran during the measurement: the work of {names} took up to {1 + most:.2g} times as long. "
            "Predictions correct for this as far as possible, with wider intervals; measure again when nothing else runs."
        )
    rows = _layer_rows(measured)
    for index, device in enumerate(measured.fleet.devices):
        cells = [cells[index] for cells in rows.values()]
        part = sum(s for s, spread in cells if spread / 2 > UNSTEADY) / max(1e-12, sum(s for s, _ in cells))
        if part > 1 / 3:
            lines.append(
                f"Times of {device.name} did not repeat: layers that take {part:.0%} of its step varied by more than "
                f"±{UNSTEADY:.0%}. This widens the intervals."
            )
    return lines


def _layer_rows(measured: Measurement) -> dict[str, list[tuple[float, float]]]:
    """Return seconds and median spread of every layer on every device, forward + backward of the global batch."""
    outputs: dict[str, int] = {}
    for point in measured.layer:
        outputs[point.layer] = max(outputs.get(point.layer, 0), point.outputs)
    result: dict[str, list[tuple[float, float]]] = {name: [] for name in outputs}
    for device in measured.fleet.devices:
        for name, points in measured.points_of(device.name).items():
            times, once = layer_times(points), max(point.samples for point in points) == 1
            samples = 1 if once else measured.batch
            both_s = times.forward.at(samples, outputs[name]) + times.backward.at(samples, outputs[name])
            result[name].append((both_s, sorted(point.spread for point in points)[len(points) // 2]))
    return result


def _show_layers(measured: Measurement, console: Console) -> None:
    """Print a row for each of the slowest layers, and one row for all others."""
    devices = measured.fleet.devices
    layers = sorted(_layer_rows(measured).items(), key=lambda item: -max(s for s, _ in item[1]))
    rows = [(name, *(f"{seconds(s)} {_about(spread)}" for s, spread in cells)) for name, cells in layers[:SHOWN_LAYERS]]
    totals, others = (
        [sum(cells[place][0] for _, cells in some) for place in range(len(devices))]
        for some in (layers, layers[SHOWN_LAYERS:])
    )
    if len(layers) > SHOWN_LAYERS:
        rows.append((f"{len(layers) - SHOWN_LAYERS} others", *map(seconds, others)))
    rows.append(("samples/s", *(f"{measured.batch / max(total, 1e-12):,.4g}" for total in totals)))
    title, first = f"{measured.net}, batch {measured.batch}", "forward and backward"
    columns = (first, *(device.name for device in devices))
    print_table(console, title, columns, rows, texts=(first,), total=("all layers", *map(seconds, totals)))


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.4g} MB/s"


def _about(spread: float) -> str:
    """Format a spread, (slowest - fastest repetition) / median, as plus-minus percent."""
    return f"±{spread / 2:.0%}"
