"""Draws a predicted step: a timeline of each device on a page, and a Chrome trace (Perfetto, chrome://tracing)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convoy.files import write_whole
from convoy.report.numbers import in_bytes, seconds
from convoy.runlog.schema import EventRow, PredictionLine
from convoy.simulate.events import Activity, Timeline

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

WIDTH, LANE = 1000.0, 10.0  # of a device's drawing, and height of a lane, in SVG units
JOINED = 1 / 1500  # of a step: short events of one kind with a smaller gap between them are drawn as one


def kind_of(activity: str, label: str) -> str:
    """Return the kind of an event, one of `KINDS`."""
    if activity != "compute":
        return activity
    words = label.split()
    if words[-1:] and words[-1] in ("copies", "joined", "calls", "additions"):  # CPU time of messages
        return "handling"
    return next((phase for phase in ("forward", "backward", "optimizer") if phase in words), "handling")


@dataclass(slots=True)
class DrawnEvent:
    """A box on a timeline: one event, or `count` consecutive events of one kind."""

    kind: str
    start_s: float
    end_s: float
    label: str
    count: int = 1


def drawn_events(events: Sequence[EventRow], device: int, activity: str, step_s: float) -> list[DrawnEvent]:
    """Return the events to draw for a device, ordered by time. Messages may overlap."""
    result: list[DrawnEvent] = []
    near_s = JOINED * step_s
    own = [e for e in events if e[:2] == (device, activity)]
    for _, _, label, start_s, end_s, peer, size in sorted(own, key=lambda e: (e[3], e[4])):
        preposition = "to" if activity == "send" else "from"
        text = label if peer < 0 else f"{label}, {in_bytes(size)} {preposition} device {peer}"
        last, kind = result[-1] if result else None, kind_of(activity, label)
        is_near = last is not None and last.kind == kind and start_s - last.end_s < near_s
        if last is not None and is_near and min(last.end_s - last.start_s, end_s - start_s) < 2 * near_s:
            last.label = f"{last.label.partition(' … ')[0]} … {text}"
            last.end_s, last.count = max(end_s, last.end_s), last.count + 1
        else:
            result.append(DrawnEvent(kind, start_s, end_s, text))
    return result


def step_boxes(prediction: PredictionLine, device: int) -> list[tuple[float, float, float, str, str]]:
    """Return (x, y, width, kind, text) of a device's boxes, in SVG units: `WIDTH` is a step, each activity has a lane."""
    boxes = []
    step_s = prediction.one_pass.s
    for row, lane in enumerate(LANES):
        for each in drawn_events(prediction.events, device, lane, step_s):
            several = f" ({each.count} in a row)" if each.count > 1 else ""
            text = f"{each.label}{several}: {seconds(each.start_s)} to {seconds(each.end_s)}"
            x, width = each.start_s / step_s * WIDTH, (each.end_s - each.start_s) / step_s * WIDTH
            boxes.append((x, row * LANE + 1, max(1.0, width), each.kind, text))
    return boxes


def to_chrome_trace(timeline: Timeline, names: Sequence[str]) -> dict[str, Any]:
    """Return the trace of a step, in microseconds, as JSON in the Trace Event Format.

    Each device has a row for computing, one for sending and one for receiving. Overlapping messages get separate rows
    ("send 2"), because a trace viewer shows only nested events in a row.
    """
    rows: list[dict[str, Any]] = []

    def add(kind: str, device: int, row: int, **args: Any) -> None:
        rows.append({"ph": "M", "name": kind, "pid": device, "tid": row, "args": args})

    for device, name in enumerate(names):
        add("process_name", device, 0, name=name)
        add("process_sort_index", device, 0, sort_index=device)
        first = 0
        for activity in LANES:
            ends_s: list[float] = []  # of the last event in each row
            own = [e for e in timeline.events if (e.device, e.activity) == (device, activity) and e.end_s > e.start_s]
            for event in sorted(own, key=lambda e: (e.start_s, e.end_s, e.peer)):
                lane = next((i for i, end_s in enumerate(ends_s) if end_s <= event.start_s), len(ends_s))
                ends_s[lane : lane + 1] = [event.end_s]
                duration_s = event.end_s - event.start_s
                args: dict[str, Any] = {"step": event.step}
                if event.peer >= 0:
                    rate = event.size_bytes / duration_s
                    args |= {"peer": names[event.peer], "bytes": event.size_bytes, "bytes_per_s": rate}
                rows.append({
                    "ph": "X", "name": event.label, "cat": event.activity, "pid": device, "tid": first + lane,
                    "ts": event.start_s * 1e6, "dur": duration_s * 1e6, "args": args,
                })  # fmt: skip
            for lane in range(max(1, len(ends_s))):
                add("thread_name", device, first + lane, name=f"{activity} {lane + 1}" if lane else activity)
                add("thread_sort_index", device, first + lane, sort_index=first + lane)
            first += max(1, len(ends_s))
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def write_chrome_trace(timeline: Timeline, path: Path, names: Sequence[str]) -> Path:
    """Write the trace as JSON. Raises InputError if the file cannot be written."""
    write_whole(path, json.dumps(to_chrome_trace(timeline, names)))
    return path
