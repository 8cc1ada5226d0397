"""Draw the figures: predicted against measured, and efficiency by plan."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.configurations import PLAN_NAMES
from benchmarks.results import FleetResult, Row
from benchmarks.score import efficiency

MARKS = dict(zip(PLAN_NAMES, "osXD^vhP", strict=True))


def draw(results: Sequence[FleetResult], path: Path) -> bool:
    """Draw every predicted and measured Convoy row; return False without matplotlib."""
    rows = [row for result in results for row in result.measured_rows() if row.plan in MARKS and row.predicted_s]
    return _drawn(path, (6.4, 6.0), lambda axes: _plot(axes, rows)) if rows else False


def draw_efficiency(results: Sequence[FleetResult], path: Path) -> bool:
    """Draw the efficiency of every plan per case; return False without data or matplotlib."""
    rows = [row for result in results for row in result.measured_rows()]
    found = [(row, value) for row in rows if row.device is None and (value := efficiency(row, rows)) is not None]
    names = list(dict.fromkeys(_case(row) for row, _ in found))
    size = (max(6.4, 1.0 + 0.8 * len(names)), 5.0)
    return _drawn(path, size, lambda axes: _plot_efficiency(axes, found, names)) if found else False


def _drawn(path: Path, size: tuple[float, float], plot: Callable[[Any], None]) -> bool:
    """Draw a figure; return False where matplotlib is not installed."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    try:
        plot(axes)
        figure.savefig(path, dpi=120, metadata={"Software": None})
    finally:
        pyplot.close(figure)
    return True


def _case(row: Row) -> str:
    return f"{row.fleet}\n{row.net}\n{row.batch}"


def _plot_efficiency(axes: Any, found: Sequence[tuple[Row, float]], names: Sequence[str]) -> None:
    for plan, mark in (MARKS | {"ddp-even": "x", "ddp-tuned": "*"}).items():
        points = [(names.index(_case(row)), value) for row, value in found if row.plan == plan]
        if points:
            axes.scatter(*zip(*points, strict=True), marker=mark, s=40, alpha=0.8, label=plan)
    axes.axhline(1.0, color="0.3", linewidth=1)
    axes.set_xticks(range(len(names)), names, fontsize=6, rotation=60)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("samples/s over the sum of all devices alone")
    axes.legend(fontsize=8)


def _plot(axes: Any, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter  # only where there is matplotlib

    for plan, mark in MARKS.items():
        points = [(row.median_s, row.predicted_s) for row in rows if row.plan == plan and row.predicted_s]
        if points:
            measured, predicted = zip(*points, strict=True)
            axes.scatter(measured, predicted, marker=mark, s=26, alpha=0.75, label=plan)
    ends = [value for row in rows for value in (row.median_s, row.predicted_s or row.median_s)]
    edges = (min(ends) / 1.2, max(ends) * 1.2)
    axes.plot(edges, edges, color="0.3", linewidth=1, label="equal")
    axes.fill_between(
        edges, [0.95 * e for e in edges], [1.05 * e for e in edges], color="0.85", label="within 5 %", zorder=0
    )
    axes.set(xscale="log", yscale="log", xlim=edges, ylim=edges)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("measured step, median of the rounds (s)")
    axes.set_ylabel("step predicted before the run (s)")
    axes.set_aspect("equal")
    axes.legend(fontsize=8)
