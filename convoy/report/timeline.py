"""A predicted step as a picture: for the page of a run, as a Chrome trace (Perfetto, chrome://tracing), as a figure.

matplotlib is imported only where a figure is drawn.
"""

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

Trace = dict[str, Any]
"""A JSON object in the Trace Event Format."""

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
"""Thin events of one kind that are closer than this part of the step are drawn as one."""


@dataclass(frozen=True, slots=True)
class Interval:
    """One event, or several of a kind in a row."""

    kind: str
    start_s: float
    end_s: float
    label: str
    times: int = 1


@dataclass(frozen=True, slots=True)
class Track:
    """A device in the picture of a step; `boxes` are x, y, width, kind and text of each interval."""

    name: str
    words: str
    boxes: Sequence[tuple[float, float, float, str, str]]


def intervals(events: Iterable[LogEvent], device: int, activity: str, step_s: float) -> list[Interval]:
    """Return what is drawn of a device, ordered by time. Intervals of messages may overlap."""
    result: list[Interval] = []
    own = sorted((e for e in events if e[0] == device and e[1] == activity), key=lambda e: (e[3], e[4]))
    for _, _, label, start_s, end_s, peer, size in own:
        way = "to" if activity == "send" else "from"
        text = label if peer < 0 else f"{label}, {in_bytes(size)} {way} device {peer}"
        new = Interval(kind_of(activity, label), start_s, end_s, text)
        last = result[-1] if result else None
        if last is not None and _are_one(last, new, JOINED * step_s):
            text = f"{last.label.partition(' … ')[0]} … {text}"
            result[-1] = Interval(last.kind, last.start_s, max(last.end_s, end_s), text, last.times + 1)
        else:
            result.append(new)
    return result


def _are_one(last: Interval, new: Interval, near_s: float) -> bool:
    thinner_s = min(last.end_s - last.start_s, new.end_s - new.start_s)
    return last.kind == new.kind and new.start_s - last.end_s < near_s and thinner_s < 2 * near_s


def tracks(prediction: PredictionLine) -> list[Track]:
    """Draw a predicted step device by device."""
    step = prediction.one_pass
    result = []
    for device, name in enumerate(prediction.names):
        boxes = []
        for row, lane in enumerate(LANES):
            for each in intervals(prediction.events, device, lane, step.s):
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


def to_chrome_trace(timeline: Timeline, names: Sequence[str] | None = None) -> Trace:
    """Return the trace of a step, in microseconds.

    Each device has a row for computing, one for sending and one for receiving. Messages that overlap get rows of their
    own ("send 2"), because a trace viewer shows only nested events in a row.

    Args:
        names: of the devices in order; default "device 0", "device 1", ...

    Raises:
        InputError: `names` does not have one name per device.
    """
    titles = _titles(timeline, names)
    events: list[dict[str, Any]] = []

    def add(kind: str, device: int, row: int, **args: Any) -> None:
        events.append({"ph": "M", "name": kind, "pid": device, "tid": row, "args": args})

    for device, title in enumerate(titles):
        add("process_name", device, 0, name=title)
        add("process_sort_index", device, 0, sort_index=device)
        row = 0
        for activity in LANES:
            for number, lane in enumerate(_lanes(_events_of(timeline, device, activity)), start=1):
                add("thread_name", device, row, name=activity if number == 1 else f"{activity} {number}")
                add("thread_sort_index", device, row, sort_index=row)
                events += [_trace_event(event, titles, row) for event in lane]
                row += 1
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(timeline: Timeline, path: Path, names: Sequence[str] | None = None) -> Path:
    """Write the trace as JSON. Raises InputError if the file cannot be written."""
    try:
        path.write_text(json.dumps(to_chrome_trace(timeline, names)), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error}; give a folder that exists and can be written") from None
    return path


def _titles(timeline: Timeline, names: Sequence[str] | None) -> Sequence[str]:
    count = len(timeline.compute_s)
    if names is not None and len(names) != count:
        raise InputError(f"{len(names)} names for a timeline of {count} devices: give one name per device")
    return names if names is not None else [f"device {device}" for device in range(count)]


def _events_of(timeline: Timeline, device: int, activity: Activity) -> list[Event]:
    found = [e for e in timeline.events if e.device == device and e.activity == activity and e.end_s > e.start_s]
    return sorted(found, key=lambda e: (e.start_s, e.end_s, e.peer))


def _lanes(events: Sequence[Event]) -> list[list[Event]]:
    """Put each event into the first row that is free; return one row at least."""
    lanes: list[list[Event]] = [[]]
    for event in events:
        free = next((lane for lane in lanes if not lane or lane[-1].end_s <= event.start_s), None)
        if free is None:
            lanes.append([event])
        else:
            free.append(event)
    return lanes


def _trace_event(event: Event, titles: Sequence[str], row: int) -> dict[str, Any]:
    duration_s = event.end_s - event.start_s
    args: dict[str, Any] = {"step": event.step}
    if event.peer >= 0:
        args |= {"peer": titles[event.peer], "bytes": event.size_bytes, "bytes_per_s": event.size_bytes / duration_s}
    return {
        "ph": "X", "name": event.label, "cat": event.activity, "pid": event.device, "tid": row,
        "ts": event.start_s * 1e6, "dur": duration_s * 1e6, "args": args,
    }  # fmt: skip


# --- figure -----------------------------------------------------------------------------------------------------------------


def draw(timeline: Timeline, path: Path, names: Sequence[str] | None = None, title: str = "") -> Path:
    """Draw the step as a figure: time to the right, three rows per device.

    Raises:
        InputError: matplotlib is missing, or the file cannot be written.
    """
    titles = _titles(timeline, names)
    unit, size = unit_of(timeline.step_s)
    figure = new_figure(9.0, 1.2 + 0.62 * len(titles))
    axes = figure.add_subplot()
    for device in range(len(titles)):
        for place, activity in enumerate(LANES):
            events = _events_of(timeline, device, activity)
            spans = [(event.start_s / size, (event.end_s - event.start_s) / size) for event in events]
            colours = [_COLOURS[kind_of(event.activity, event.label)] for event in events]
            axes.broken_barh(spans, (device + 0.08 + 0.28 * place, 0.26), facecolors=colours, linewidth=0)
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
