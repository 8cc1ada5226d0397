"""Figures of fleets of real device classes: energy, unequal devices, published figures and the model."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from convoy.fleet.catalogue import device_class
from convoy.model.graph import Graph
from studies.catalogue import KINDS, power_of_class
from studies.drawing import PLAN_LOOKS, legend, new_figure, plain, save
from studies.fleets import Replayed
from studies.points import Points
from studies.published import Published
from studies.sweep import sweep

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000")

Row = Mapping[str, str | float]


def energy_rows(
    graph: Graph,
    *,
    batch: int = 256,
    link_bytes_per_s: float = 125e6,
    counts: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    efficiency: float = 0.5,
    classes: Sequence[str] = KINDS,
) -> list[dict[str, str | float]]:
    """Return time and joules per image of fleets of one class each, with the fastest plan at each size.

    Args:
        efficiency: the part of the peak that dense kernels reach, the same for every class: an assumption.
    """
    rows: list[dict[str, str | float]] = []
    for name in classes:
        known = device_class(name)
        points = Points.of(
            devices=np.asarray(counts), batch=batch, flop_per_s=known.peak_flop_per_s.value, efficiency=efficiency,
            memory_bytes_per_s=known.memory_bytes_per_s.value, link_bytes_per_s=link_bytes_per_s,
        )  # fmt: skip
        sweeps = sweep(graph, points)
        best = np.argmin(np.stack([each.times.step_s for each in sweeps]), axis=0)
        for i, count in enumerate(counts):
            each = sweeps[int(best[i])]
            row: dict[str, str | float] = {"class": name, "devices": count, "plan": each.plan if count > 1 else "alone"}
            row |= {"step_s": float(each.times.step_s[i]), "images_per_s": float(each.samples_per_s[i])}
            rows.append(row | {"joules_per_image": float(each.image_j(power_of_class(known))[i])})
    return rows


def energy_figure(rows: Sequence[Row], path: Path, *, title: str = "") -> Path:
    """Draw joules per image against images/s, a line per class, a point per number of devices."""
    figure = new_figure(7.2, 5.0)
    axes = figure.add_subplot()
    for index, name in enumerate(dict.fromkeys(str(row["class"]) for row in rows)):
        own = [row for row in rows if row["class"] == name]
        x, y = ([float(row[key]) for row in own] for key in ("images_per_s", "joules_per_image"))
        axes.plot(x, y, color=_COLOURS[index % len(_COLOURS)], marker="o", markersize=4, label=name)
        for at in (0, len(own) - 1):
            axes.annotate(
                f"{own[at]['devices']:g}", (x[at], y[at]), xytext=(4, 4), textcoords="offset points", fontsize="x-small"
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(plain)
    axes.yaxis.set_major_formatter(plain)
    axes.set_xlabel("images/s (numbers in the figure: devices)")
    axes.set_ylabel("energy of all devices (J/image)")
    axes.grid(alpha=0.3, which="both")
    legend(figure, axes, columns=3)
    axes.set_title(title, fontsize="medium")
    return save(figure, path)


def fleet_figure(replays: Sequence[Replayed], names: Sequence[str], path: Path, *, title: str = "") -> Path:
    """Draw each plan's throughput on one fleet and the sum of solo throughputs."""
    figure = new_figure(6.8, 0.45 * len(replays) + 1.9)
    axes = figure.add_subplot()
    speed = [each.samples_per_s for each in replays]
    colours = [PLAN_LOOKS.get(name, {"color": "grey"})["color"] for name in names]
    bars = axes.barh(list(names), speed, color=colours)
    used = [sum(seconds > 0 for seconds in each.timeline.compute_s) for each in replays]
    texts = [f" {each.efficiency:.0%}, on {count}" for each, count in zip(replays, used, strict=True)]
    axes.bar_label(bars, texts, fontsize="small")
    axes.axvline(replays[0].limit_samples_per_s, color="black", linestyle=":", label="the devices alone, summed")
    axes.set_xlim(0, max(*speed, replays[0].limit_samples_per_s) * 1.15)
    axes.invert_yaxis()
    axes.set_xlabel("images/s (in the figure: part of the sum, devices that compute)")
    legend(figure, axes)
    axes.set_title(title, fontsize="medium")
    return save(figure, path)


def published_figure(tables: Sequence[tuple[Published, Sequence[Row]]], path: Path) -> Path:
    """Draw the model's range over all assumed speeds and links for each published figure, and the report as a line."""
    figure = new_figure(5.2 * len(tables), 4.4)
    panels = figure.subplots(1, len(tables), squeeze=False)[0]
    for axes, (published, rows) in zip(panels, tables, strict=True):
        speeds, links = (sorted({float(r[key]) for r in rows}) for key in ("flop_per_s", "link_bytes_per_s"))
        for index, link in enumerate(links):
            groups = [
                [float(r["predicted"]) for r in rows if (r["flop_per_s"], r["link_bytes_per_s"]) == (s, link)]
                for s in speeds
            ]
            at = np.arange(len(speeds)) + (index - (len(links) - 1) / 2) * 0.25
            drawn = axes.boxplot(
                groups, positions=at, widths=0.2, whis=(0, 100), manage_ticks=False, patch_artist=True,
                medianprops={"color": "black"},
            )  # fmt: skip
            for box in drawn["boxes"]:
                box.set_facecolor(_COLOURS[index])
                box.set_alpha(0.6)
            axes.bar([0], [0], color=_COLOURS[index], alpha=0.6, label=f"{link * 8e-9:g} Gbit/s")
        axes.axhline(published.speedup, color="black", linestyle="--", label=f"reported: {published.speedup:.2f}x")
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set_xticks(range(len(speeds)), [f"{s * 1e-9:,g}" for s in speeds])
        axes.set_xlabel("assumed arithmetic of the fastest device (GFLOP/s)")
        axes.set_ylabel("speedup over one device")
        axes.set_title(f"{published.what}, two-conv 500:1500", fontsize="medium")
        axes.set_ylim(0, None)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, frameon=False)
    figure.suptitle(
        "boxes: convolution part 80-99 %, kernels 3-7, spread and baseline of the devices", fontsize="small"
    )
    return save(figure, path)
