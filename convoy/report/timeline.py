"""Draws a predicted step: on the page of a run, as a Chrome trace (Perfetto, chrome://tracing), as a figure (matplotlib)."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convoy.errors import InputError
from convoy.report.numbers import in_bytes, percent, plain, seconds, ticks, unit_of
from convoy.runlog.schema import Event as LogEvent
from convoy.runlog.schema import PredictionLine
from convoy.simulate.events import Activity, Event, Timeline

KINDS = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "handling": "messages and loss function",
    "send": "send",
    "receive": "receive",
}
"""Kinds of work and their names in a legend."""

LANES: tuple[Activity, ...] = ("compute", "send", "receive")

_COLOURS = dict(zip(KINDS, ("#0072B2", "#56B4E9", "#CC79A7", "#999999", "#E69F00", "#009E73"), strict=True))
"""Okabe and Ito's palette, distinguishable for colour-blind readers."""


def kind_of(activity: str, label: str) -> str:
    """Return the kind of an event, one of `KINDS`."""
    if activity != "compute":
        return activity
    words = label.split()
    if words[-1:] and words[-1] in ("copies", "joined", "calls", "additions"):  # CPU time of messages
        return "handling"
    return next((phase for phase in ("forward", "backward", "optimizer") if phase in words), "handling")


# --- for the page of a run ------------------------------------------------------------------------------------------------

WIDTH, LANE = 1000.0, 10.0
"""Width of a device's drawing, and height of each of its lanes."""

JOINED = 1 / 1500
"""Thin events of one kind, closer than this fraction of the step, are drawn as one."""


@dataclass(frozen=True, slots=True)
class DrawnEvent:
    """One event, or several consecutive ones of one kind."""

    kind: str
    start_s: float
    end_s: float
    label: str
    times: int = 1


@dataclass(frozen=True, slots=True)
class Track:
    """A device in the picture of a step; `boxes` are x, y, width, kind and text of each event."""

    name: str
    summary: str
    boxes: Sequence[tuple[float, float, float, str, str]]


def drawn_events(events: Iterable[LogEvent], device: int, activity: str, step_s: float) -> list[DrawnEvent]:
    """Return the events to draw for a device, ordered by time. Messages may overlap."""
    result: list[DrawnEvent] = []
    near_s = JOINED * step_s
    own = sorted((e for e in events if e[0] == device and e[1] == activity), key=lambda e: (e[3], e[4]))
    for _, _, label, start_s, end_s, peer, size in own:
        preposition = "to" if activity == "send" else "from"
        text = label if peer < 0 else f"{label}, {in_bytes(size)} {preposition} device {peer}"
        kind = kind_of(activity, label)
        last = result[-1] if result else None
        is_near = last is not None and last.kind == kind and start_s - last.end_s < near_s
        if last is not None and is_near and min(last.end_s - last.start_s, end_s - start_s) < 2 * near_s:
            text = f"{last.label.partition(' … ')[0]} … {text}"
            result[-1] = DrawnEvent(kind, last.start_s, max(last.end_s, end_s), text, last.times + 1)
        else:
            result.append(DrawnEvent(kind, start_s, end_s, text))
    return result


def tracks(prediction: PredictionLine) -> list[Track]:
    """Return a track per device of a predicted step."""
    step = prediction.one_pass
    result = []
    for device, name in enumerate(prediction.names):
        boxes = []
        for row, lane in enumerate(LANES):
            for each in drawn_events(prediction.events, device, lane, step.s):
                several = f" ({each.times} in a row)" if each.times > 1 else ""
                text = f"{each.label}{several}: {seconds(each.start_s)} to {seconds(each.end_s)}"
                x, width = each.start_s / step.s * WIDTH, (each.end_s - each.start_s) / step.s * WIDTH
                boxes.append((x, row * LANE + 1, max(1.0, width), each.kind, text))
        computes, waits = step.compute_s[device] / step.s, step.exchange_s[device] / step.s
        result.append(Track(name, f"busy {percent(computes)}, waits for messages {percent(waits)}", boxes))
    return result


def time_axis(step_s: float) -> tuple[str, list[tuple[float, str]]]:
    """Return the unit of the time axis and its ticks: place (0 to 1) and text."""
    unit, size = unit_of(step_s)
    return unit, [(at * size / step_s, plain(at, 3)) for at in ticks(0.0, step_s / size, 4)]


# --- Chrome trace -----------------------------------------------------------------------------------------------------------


def to_chrome_trace(timeline: Timeline, names: Sequence[str]) -> dict[str, Any]:
    """Return the trace of a step, in microseconds, as JSON in the Trace Event Format.

    Each device has a row for computing, one for sending and one for receiving. Overlapping messages get separate rows
    ("send 2"), because a trace viewer shows only nested events in a row.
    """
    events: list[dict[str, Any]] = []

    def add(kind: str, device: int, row: int, **args: Any) -> None:
        events.append({"ph": "M", "name": kind, "pid": device, "tid": row, "args": args})

    for device, name in enumerate(names):
        add("process_name", device, 0, name=name)
        add("process_sort_index", device, 0, sort_index=device)
        first = 0
        for activity in LANES:
            ends_s: list[float] = []  # of the last event in each row
            for event in _events_of(timeline, device, activity):
                lane = next((i for i, end_s in enumerate(ends_s) if end_s <= event.start_s), len(ends_s))
                ends_s[lane : lane + 1] = [event.end_s]
                duration_s = event.end_s - event.start_s
                args: dict[str, Any] = {"step": event.step}
                if event.peer >= 0:
                    rate = event.size_bytes / duration_s
                    args |= {"peer": names[event.peer], "bytes": event.size_bytes, "bytes_per_s": rate}
                events.append({
                    "ph": "X", "name": event.label, "cat": event.activity, "pid": device, "tid": first + lane,
                    "ts": event.start_s * 1e6, "dur": duration_s * 1e6, "args": args,
                })  # fmt: skip
            for lane in range(max(1, len(ends_s))):
                add("thread_name", device, first + lane, name=f"{activity} {lane + 1}" if lane else activity)
                add("thread_sort_index", device, first + lane, sort_index=first + lane)
            first += max(1, len(ends_s))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(timeline: Timeline, path: Path, names: Sequence[str]) -> Path:
    """Write the trace as JSON. Raises InputError if the file cannot be written."""
    try:
        path.write_text(json.dumps(to_chrome_trace(timeline, names)), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error}; give a folder that exists and can be written") from None
    return path


def _events_of(timeline: Timeline, device: int, activity: Activity) -> list[Event]:
    found = [e for e in timeline.events if e.device == device and e.activity == activity and e.end_s > e.start_s]
    return sorted(found, key=lambda e: (e.start_s, e.end_s, e.peer))


# --- figure -----------------------------------------------------------------------------------------------------------------


def draw(timeline: Timeline, path: Path, names: Sequence[str], title: str) -> Path:
    """Draw the step as a figure: time to the right, three rows per device. InputError as `new_figure` and `save`."""
    unit, size = unit_of(timeline.step_s)
    figure = new_figure(9.0, 1.2 + 0.62 * len(names))
    axes = figure.add_subplot()
    for device in range(len(names)):
        for place, activity in enumerate(LANES):
            events = _events_of(timeline, device, activity)
            spans = [(event.start_s / size, (event.end_s - event.start_s) / size) for event in events]
            colours = [_COLOURS[kind_of(event.activity, event.label)] for event in events]
            axes.broken_barh(spans, (device + 0.08 + 0.28 * place, 0.26), facecolors=colours, linewidth=0)
    busy = [seconds / (timeline.step_s or 1.0) for seconds in timeline.compute_s]
    axes.set_yticks([d + 0.5 for d in range(len(names))])
    axes.set_yticklabels([f"{name}\ncomputes {part:.0%}" for name, part in zip(names, busy, strict=True)])
    axes.set_ylim(len(names), 0)
    axes.set_xlim(0, timeline.step_s / size or 1)
    axes.set_xlabel(f"time ({unit})")
    axes.grid(axis="x", alpha=0.3)
    axes.set_title(title)
    patches = [axes.barh(0, 0, color=colour, label=KINDS[kind]) for kind, colour in _COLOURS.items()]
    axes.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.5 / (0.6 + 0.62 * len(names))), ncols=6)
    return save(figure, path)


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
