"""Shared style of the figures: one colour per plan, plain numbers on axes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convoy.errors import InputError

PLAN_LOOKS: Mapping[str, Mapping[str, str]] = {
    "data": {"color": "#0072B2", "marker": "o"},
    "data-by-speed": {"color": "#56B4E9", "marker": "v"},
    "sharded": {"color": "#F0E442", "marker": "X"},
    "model": {"color": "#D55E00", "marker": "s"},
    "hybrid": {"color": "#009E73", "marker": "^"},
    "master": {"color": "#CC79A7", "marker": "D"},
    "auto": {"color": "#000000", "marker": "*"},
}
"""Of Okabe and Ito's palette, which readers of all kinds can tell apart; a marker too, for print in grey."""


def new_figure(width_in: float, height_in: float) -> Any:
    """Return an empty figure. Raises InputError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "matplotlib is not installed: figures need it; pip install 'convoy-train[plots]', or leave the figures out"
        ) from None
    return Figure(figsize=(width_in, height_in), layout="constrained")


def save(figure: Any, path: Path) -> Path:
    """Write a figure; the file name gives the format. Raises InputError if that fails."""
    try:
        figure.savefig(path, dpi=160)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write {path}: {error}; give a folder that exists and .png, .pdf or .svg") from None
    return path


def legend(figure: Any, axes: Any, columns: int = 6) -> None:
    """Put the legend of one panel below all panels."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(labels)), frameon=False)


def look(plan: str) -> dict[str, Any]:
    """Return the line style of a plan."""
    return {**PLAN_LOOKS[plan], "markersize": 4, "linewidth": 1.5}


def plain(value: float, _place: int | None = None) -> str:
    """Format an axis number: 0.1, 64, 16,384; powers of two below one as 1/8."""
    if 0 < value < 1 and (1 / value).is_integer() and int(1 / value).bit_count() == 1:
        return f"1/{int(1 / value)}"
    return f"{value:g}" if value < 1e4 else f"{value:,.0f}"


def log2_axis(axes: Any, values: Any) -> None:
    """Make a horizontal axis of powers of two with about six numbers."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(values)[:: max(1, len(values) // 6)])
    axes.xaxis.set_major_formatter(plain)
