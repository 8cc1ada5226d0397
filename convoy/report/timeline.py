"""A replayed step to look at: a Chrome trace (for Perfetto or chrome://tracing) and a picture.

Each device has a row for computing, one for sending and one for receiving. Messages of one device that overlap need rows
of their own, because a trace viewer shows only nested events in a row: "send 2", "send 3" and so on.
matplotlib is imported only where a figure is drawn.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convoy.errors import InputError
from convoy.report.intervals import KINDS, kind_of
from convoy.report.numbers import unit_of
from convoy.simulator.events import Activity, Event, Timeline

Trace = dict[str, Any]
"""A JSON object in the Trace Event Format."""

_ROWS: tuple[Activity, ...] = ("compute", "send", "receive")
_COLOURS = {
    "forward": "#0072B2",
    "backward": "#56B4E9",
    "optimizer": "#CC79A7",
    "handling": "#999999",
    "send": "#E69F00",
    "receive": "#009E73",
}
"""Of Okabe and Ito's palette, which readers of all kinds can tell apart."""


def to_chrome_trace(timeline: Timeline, names: Sequence[str] | None = None) -> Trace:
    """The trace of one step; times in microseconds, as the format wants them.

    Args:
        names: of the devices, in order; default "device 0", "device 1", ...

    Raises:
        InputError: another number of names than devices.
    """
    titles = _titles(timeline, names)
    events: list[dict[str, Any]] = []
    for device, title in enumerate(titles):
        events.append(_about("process_name", device, {"name": title}))
        events.append(_about("process_sort_index", device, {"sort_index": device}))
        row = 0
        for activity in _ROWS:
            for number, lane in enumerate(_lanes(_of(timeline, device, activity)), start=1):
                name = activity if number == 1 else f"{activity} {number}"
                events.append(_about("thread_name", device, {"name": name}, row))
                events.append(_about("thread_sort_index", device, {"sort_index": row}, row))
                events += [_complete(event, titles, row) for event in lane]
                row += 1
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(timeline: Timeline, path: Path, names: Sequence[str] | None = None) -> Path:
    """Write the trace as JSON.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(to_chrome_trace(timeline, names)), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error}; give a folder that exists and can be written") from None
    return path


def draw(timeline: Timeline, path: Path, names: Sequence[str] | None = None, title: str = "") -> Path:
    """A picture of the step: time to the right, three rows per device.

    Raises:
        InputError: matplotlib is missing, or the file cannot be written.
    """
    titles = _titles(timeline, names)
    unit, size = unit_of(timeline.step_s)
    figure = new_figure(9.0, 1.2 + 0.62 * len(titles))
    axes = figure.add_subplot()
    for device in range(len(titles)):
        for place, activity in enumerate(_ROWS):
            spans: dict[str, list[tuple[float, float]]] = {}
            for event in _of(timeline, device, activity):
                span = (event.start_s / size, (event.end_s - event.start_s) / size)
                spans.setdefault(kind_of(event.activity, event.label), []).append(span)
            for kind, bars in spans.items():
                bottom = device + 0.08 + 0.28 * place
                axes.broken_barh(bars, (bottom, 0.26), facecolors=_COLOURS[kind], linewidth=0)
    busy = [seconds / timeline.step_s if timeline.step_s else 0.0 for seconds in timeline.compute_s]
    axes.set_yticks([d + 0.5 for d in range(len(titles))])
    axes.set_yticklabels([f"{name}\ncomputes {part:.0%}" for name, part in zip(titles, busy, strict=True)])
    axes.set_ylim(len(titles), 0)
    axes.set_xlim(0, timeline.step_s / size or 1)
    axes.set_xlabel(f"time ({unit})")
    axes.grid(axis="x", alpha=0.3)
    axes.set_title(title or f"one training step: {timeline.step_s / size:.3g} {unit}")
    patches = [axes.barh(0, 0, color=colour, label=KINDS[kind]) for kind, colour in _COLOURS.items()]
    axes.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.5 / (0.6 + 0.62 * len(titles))), ncols=6)
    return save(figure, path)


def _titles(timeline: Timeline, names: Sequence[str] | None) -> Sequence[str]:
    count = len(timeline.compute_s)
    if names is not None and len(names) != count:
        raise InputError(f"{len(names)} names for a timeline of {count} devices: give one name per device")
    return names if names is not None else [f"device {device}" for device in range(count)]


def _of(timeline: Timeline, device: int, activity: Activity) -> list[Event]:
    found = [e for e in timeline.events if e.device == device and e.activity == activity and e.end_s > e.start_s]
    return sorted(found, key=lambda e: (e.start_s, e.end_s, e.peer))


def _lanes(events: Sequence[Event]) -> list[list[Event]]:
    """The events in as few rows as overlap allows, each into the first row that is free; one row at least."""
    lanes: list[list[Event]] = [[]]
    for event in events:
        free = next((lane for lane in lanes if not lane or lane[-1].end_s <= event.start_s), None)
        if free is None:
            lanes.append([event])
        else:
            free.append(event)
    return lanes


def _about(kind: str, device: int, args: dict[str, Any], row: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": device, "tid": row, "args": args}


def _complete(event: Event, titles: Sequence[str], row: int) -> dict[str, Any]:
    args: dict[str, Any] = {"step": event.step}
    if event.peer >= 0:
        seconds = event.end_s - event.start_s
        args |= {"peer": titles[event.peer], "bytes": event.size_bytes, "bytes_per_s": event.size_bytes / seconds}
    return {
        "ph": "X",
        "name": event.label,
        "cat": event.activity,
        "pid": event.device,
        "tid": row,
        "ts": event.start_s * 1e6,
        "dur": (event.end_s - event.start_s) * 1e6,
        "args": args,
    }


def new_figure(width_in: float, height_in: float) -> Any:
    """An empty figure of this size, in inches.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "matplotlib is not installed: figures need it; pip install 'convoy-train[plots]', or leave the figures out"
        ) from None
    return Figure(figsize=(width_in, height_in), layout="constrained")


def save(figure: Any, path: Path) -> Path:
    """Write a figure; the ending says the format (.png, .pdf, .svg).

    Raises:
        InputError: the folder does not exist or the format is unknown.
    """
    try:
        figure.savefig(path, dpi=160)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write {path}: {error}; give a folder that exists and .png, .pdf or .svg") from None
    return path
