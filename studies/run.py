"""Run the whole study into a folder: tables as CSV, figures as PNG."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from convoy.errors import InputError
from convoy.fleet import Nic
from convoy.model.graph import Graph
from convoy.model.nets import graph_of
from convoy.plan.presets import PLANS
from studies import figures, figures_fleets, fleets
from studies.catalogue import fleet_of
from studies.envelope import Enveloped, enveloped
from studies.envelope import rows_of as envelope_rows
from studies.published import CPUS, GPUS, summary, table
from studies.sweep import AXES, BASE, five_axes, points_at, rows_of, sweep, write_csv

Say = Callable[[str], object]

MIXED = ("server-cpu", "embedded-gpu", "laptop-cpu", "mobile-gpu")
"""A lab's fleet, by classes of the catalogue."""

_GIGABIT = Nic(send_bytes_per_s=125e6, receive_bytes_per_s=125e6, latency_s=1e-4)


def run_study(
    out: Path,
    net: str = "alexnet:4096",
    *,
    draw: bool = True,
    published: bool = True,
    auto: bool = True,
    say: Say = lambda _: None,
) -> list[Path]:
    """Write every table and figure of the study for one network.

    Args:
        out: a folder; made if it is not there.
        net: a network by name, on 3x32x32 images of 10 classes.
        draw: figures too (needs matplotlib).
        published: also the 1,728 replays behind the check of the published figures, ten seconds or more.
        auto: also the planner's plans along the five axes, a minute or more.
        say: called with a line for each file.

    Returns:
        the files written.

    Raises:
        InputError: unknown network, a folder that cannot be written, matplotlib missing.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {out}: {error}; give one that can be made") from None
    graph = graph_of(net)
    written: list[Path] = []

    def note(*paths: Path) -> None:
        for path in paths:
            written.append(path)
            say(f"wrote {path}")

    found = {axis: enveloped(graph, axis) for axis in AXES} if auto else {}
    if found:
        note(write_csv(out / "axis-auto.csv", [row for each in found.values() for row in envelope_rows(each)]))
    note(*_equal_devices(graph, net, out, draw, found))
    note(*_real_classes(graph, net, out, draw))
    if published:
        tables = [(each, table(each)) for each in (CPUS, GPUS)]
        for each, rows in tables:
            say(summary(each, rows))
            note(write_csv(out / f"published-{each.devices}-devices.csv", rows))
        if draw:
            note(figures_fleets.published_figure(tables, out / "published.png"))
    return written


def _equal_devices(
    graph: Graph, net: str, out: Path, draw: bool, auto: Mapping[str, Sequence[Enveloped]]
) -> list[Path]:
    paths = [write_csv(out / f"axis-{axis}.csv", rows_of(sweeps)) for axis, sweeps in five_axes(graph).items()]
    counts, links = np.meshgrid(AXES["devices"], figures.LINKS)
    points = points_at(BASE, devices=counts.ravel(), link_bytes_per_s=links.ravel())
    sweeps = sweep(graph, points)
    paths.append(write_csv(out / "devices-by-link.csv", rows_of(sweeps)))
    if draw:
        paths += [
            figures.five_axes_figure(graph, out / "five-axes.png", net=net, auto=auto),
            figures.devices_figure(graph, out / "devices-strong.png", net=net),
            figures.devices_figure(graph, out / "devices-weak.png", net=net, samples_per_device=64),
            figures.batch_figure(graph, out / "batch.png", net=net),
            figures.fastest_figure(graph, out / "fastest.png", net=net),
            figures.parts_figure(sweep(graph, points_at(BASE)), out / "parts.png", net=net),
        ]
    return paths


def _real_classes(graph: Graph, net: str, out: Path, draw: bool) -> list[Path]:
    rows = figures_fleets.energy_rows(graph)
    names = (*PLANS, "auto")
    replays = fleets.compare(graph, fleet_of(MIXED, _GIGABIT), 256, names, efficiency=0.5)
    paths = [write_csv(out / "energy.csv", rows), write_csv(out / "mixed-fleet.csv", fleets.rows_of(replays, names))]
    if draw:
        about = f"{net}, batch 256, 1 Gbit/s, kernels at half of the peak"
        paths.append(figures_fleets.energy_figure(rows, out / "energy.png", title=about))
        title = f"{', '.join(MIXED)}\n{about}"
        paths.append(figures_fleets.fleet_figure(replays, names, out / "mixed-fleet.png", title=title))
    return paths
