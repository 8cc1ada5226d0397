"""Figures of the sweeps over equal devices, for a paper or a talk."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convoy.model.graph import Graph
from studies.collectives import Floats, Numbers
from studies.drawing import PLAN_LOOKS, legend, log2_axis, look, new_figure, plain, save
from studies.envelope import Enveloped
from studies.points import Points
from studies.sweep import AXES, BASE, PLANS, Sweep, along, crossover, five_axes, points_at, sweep

LINKS = (125e6, 1.25e9, 12.5e9)
"""1, 10 and 100 Gbit/s, in bytes/s."""

_AXIS_LABELS: Mapping[str, tuple[str, float]] = {
    "batch": ("global batch (images)", 1.0),
    "flop_per_s": ("arithmetic of a device (TFLOP/s)", 1e-12),
    "memory_bytes_per_s": ("memory bandwidth of a device (GB/s)", 1e-9),
    "link_bytes_per_s": ("link (Gbit/s)", 8e-9),
    "devices": ("devices", 1.0),
}


def devices_figure(
    graph: Graph,
    path: Path,
    *,
    net: str = "",
    links: Sequence[float] = LINKS,
    base: Mapping[str, float] = BASE,
    samples_per_device: int | None = None,
) -> Path:
    """Draw speedup against the number of devices, a panel per link bandwidth.

    Args:
        samples_per_device: the batch grows with the devices (weak scaling); None: it stays (strong scaling).
    """
    figure, panels = _panels(links)
    counts = np.asarray(AXES["devices"])
    batch: Numbers = base["batch"] if samples_per_device is None else samples_per_device * counts
    for axes, link in zip(panels, links, strict=True):
        points = points_at(base, devices=counts, batch=batch, link_bytes_per_s=link)
        for each in sweep(graph, points):
            axes.plot(counts, each.speedup, label=each.plan, **look(each.plan))
        axes.plot(counts, counts, color="grey", linestyle=":", label="as many times as devices")
        log2_axis(axes, counts)
        axes.set_yscale("log", base=2)
        axes.set_ylim(2.0**-6, counts.max())
        axes.yaxis.set_major_formatter(plain)
        axes.set_title(f"{link * 8e-9:g} Gbit/s")
        axes.set_xlabel("devices")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("speedup over one device")
    legend(figure, panels[0])
    size = f"batch {base['batch']:g}" if samples_per_device is None else f"{samples_per_device} images per device"
    _title(figure, net or graph.model, size, base)
    return save(figure, path)


def batch_figure(
    graph: Graph, path: Path, *, net: str = "", links: Sequence[float] = LINKS, base: Mapping[str, float] = BASE
) -> Path:
    """Draw step time against the global batch, a panel per link; mark where data overtakes model and hybrid."""
    figure, panels = _panels(links)
    for axes, link in zip(panels, links, strict=True):
        points = along("batch", base={**base, "link_bytes_per_s": link})
        sweeps = sweep(graph, points)
        for each in sweeps:
            axes.plot(points.batch, each.times.step_s, label=each.plan, **look(each.plan))
        axes.plot(points.batch, sweeps[0].alone_s, color="grey", linestyle=":", label="one device alone")
        for other in ("model", "hybrid"):
            for batch in crossover(graph, points, other, "data", "batch"):
                _mark(axes, float(batch), f"data beats {other} from {batch:,.0f}", PLAN_LOOKS[other]["color"])
        log2_axis(axes, points.batch)
        axes.set_yscale("log")
        axes.set_title(f"{link * 8e-9:g} Gbit/s")
        axes.set_xlabel("global batch (images)")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("step time (s)")
    legend(figure, panels[0])
    _title(figure, net or graph.model, f"{base['devices']:g} devices", base)
    return save(figure, path)


def five_axes_figure(
    graph: Graph,
    path: Path,
    *,
    net: str = "",
    base: Mapping[str, float] = BASE,
    auto: Mapping[str, Sequence[Enveloped]] | None = None,
) -> Path:
    """Draw throughput along each of Castello's five axes, with everything else at the base point.

    Args:
        auto: the planner's plans along each axis, where they are to be drawn too.
    """
    figure = new_figure(10.6, 6.4)
    panels = figure.subplots(2, 3, sharey=True).ravel()
    for axes, (axis, sweeps) in zip(panels, five_axes(graph, base=base).items(), strict=False):
        label, scale = _AXIS_LABELS[axis]
        for each in sweeps:
            values = each.points.columns()[axis] * scale
            every = max(1, len(values) // 8)
            axes.plot(values, each.samples_per_s, label=each.plan, markevery=every, **look(each.plan))
        found = (auto or {}).get(axis, ())
        if found:
            rates = [each.samples_per_s for each in found]
            axes.plot([each.value * scale for each in found], rates, label="auto, replayed", **look("auto"))
        axes.axvline(base[axis] * scale, color="grey", linestyle=":", linewidth=1)
        axes.set_yscale("log")
        if axis in ("batch", "devices"):
            log2_axis(axes, np.asarray(AXES[axis]))
        else:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(plain)
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    for row in (0, 3):
        panels[row].set_ylabel("images/s")
    panels[-1].axis("off")
    handles, labels = panels[0].get_legend_handles_labels()
    panels[-1].legend(handles, labels, loc="upper left", title="plan", frameon=False)
    link = f"{base['link_bytes_per_s'] * 8e-9:g} Gbit/s"
    lines = ["dotted: the base point", f"{base['devices']:g} devices", f"batch {base['batch']:g}", *_node(base), link]
    panels[-1].text(0.05, 0.05, "\n".join(lines), fontsize="small", va="bottom", transform=panels[-1].transAxes)
    figure.suptitle(f"{net or graph.model}: the five axes", fontsize="medium")
    return save(figure, path)


def fastest_figure(
    graph: Graph,
    path: Path,
    *,
    net: str = "",
    devices: Sequence[int] = (4, 16, 64),
    base: Mapping[str, float] = BASE,
) -> Path:
    """Draw the fastest plan over batch and link, a panel per number of devices; grey where one device is fastest."""
    figure, panels = _panels(devices)
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    colours = ["#BBBBBB", *(PLAN_LOOKS[plan]["color"] for plan in PLANS)]
    links = np.geomspace(12.5e6, 12.5e9, 112)
    for axes, count in zip(panels, devices, strict=True):
        batches = np.unique(np.maximum(count, np.round(np.geomspace(8, 16384, 160) / count) * count))
        across, up = np.meshgrid(batches, links)
        points = points_at(base, devices=count, batch=across.ravel(), link_bytes_per_s=up.ravel())
        fastest = _fastest(graph, points).reshape(across.shape)
        axes.pcolormesh(batches, links * 8e-9, fastest, cmap=ListedColormap(colours), vmin=-0.5, vmax=len(PLANS) + 0.5)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(plain)
        axes.yaxis.set_major_formatter(plain)
        axes.set_title(f"{count} devices")
        axes.set_xlabel(f"global batch (images, multiples of {count})")
    panels[0].set_ylabel("link (Gbit/s)")
    names = ["one device alone", *PLANS]
    patches = [Patch(color=colour, label=name) for colour, name in zip(colours, names, strict=True)]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    _title(figure, net or graph.model, "the fastest plan", base)
    return save(figure, path)


def parts_figure(sweeps: Sequence[Sweep], path: Path, *, net: str = "", index: int = 0) -> Path:
    """Draw the seconds of a step by cause, a bar per plan, at one point."""
    figure = new_figure(6.8, 0.5 * len(sweeps) + 1.9)
    axes = figure.add_subplot()
    left = np.zeros(len(sweeps))
    parts = {"computing": ("compute_s", "#0072B2"), "moves of activations": ("moves_s", "#E69F00")}
    parts |= {"sums of gradients": ("sums_s", "#D55E00"), "optimizer": ("update_s", "#CC79A7")}
    for label, (name, colour) in parts.items():
        width = np.array([getattr(each.times, name)[index] for each in sweeps])
        axes.barh([each.plan for each in sweeps], width, left=left, label=label, color=colour)
        left = left + width
    axes.axvline(sweeps[0].alone_s[index], color="black", linestyle=":", label="one device alone")
    axes.invert_yaxis()
    axes.set_xlabel("time of a step (s)")
    legend(figure, axes, columns=3)
    at = sweeps[0].points
    link = f"{at.link_bytes_per_s[index] * 8e-9:g} Gbit/s"
    about = f"{at.devices[index]:g} devices, batch {at.batch[index]:g}, {link}"
    axes.set_title(f"{net}: {about}" if net else about, fontsize="medium")
    return save(figure, path)


def _panels(over: Sequence[float]) -> tuple[Any, Any]:
    figure = new_figure(3.4 * len(over) + 0.6, 4.0)
    return figure, figure.subplots(1, len(over), sharey=True, squeeze=False)[0]


def _fastest(graph: Graph, points: Points) -> Floats:
    """Return the index of the fastest plan + 1, or 0 where one device alone is as fast."""
    sweeps = sweep(graph, points)
    times = np.stack([sweeps[0].alone_s, *(each.times.step_s for each in sweeps)])
    return np.asarray(times.argmin(axis=0), dtype=np.float64)


def _mark(axes: Any, at: float, text: str, colour: str) -> None:
    axes.axvline(at, color=colour, linestyle="--", linewidth=1)
    axes.annotate(
        text, (at, 0.97), xycoords=("data", "axes fraction"), xytext=(-2, 0), textcoords="offset points", rotation=90,
        fontsize="x-small", va="top", ha="right", color=colour,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1},
    )  # fmt: skip


def _node(base: Mapping[str, float]) -> tuple[str, str]:
    return f"{base['flop_per_s'] * 1e-12:g} TFLOP/s", f"{base['memory_bytes_per_s'] * 1e-9:g} GB/s"


def _title(figure: Any, net: str, about: str, base: Mapping[str, float]) -> None:
    figure.suptitle(f"{net}, {about}; {' and '.join(_node(base))} per device", fontsize="medium")
