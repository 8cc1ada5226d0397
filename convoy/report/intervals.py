"""What a picture of a step shows: which kind of work an event is, and which events are drawn as one interval."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from convoy.report.numbers import in_bytes, percent, plain, seconds, ticks, unit_of
from convoy.runlog.schema import Event, PredictionLine

KINDS = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "handling": "messages and loss",
    "send": "send",
    "receive": "receive",
}
"""What a device may be seen to do, and how a legend calls it."""

JOINED = 1 / 1500
"""Events of one kind that are closer than this part of the step are drawn as one, where one of them would hardly be seen."""

WIDTH, LANE = 1000.0, 10.0
"""Of a device's drawing, and the height of each of its three lanes."""

LANES = ("compute", "send", "receive")

_HANDLING = ("copies", "joined", "calls", "additions")
"""How the labels end of the processor's work for messages."""


@dataclass(frozen=True, slots=True)
class Interval:
    """What a device did for a while, once or several times in a row."""

    kind: str
    start_s: float
    end_s: float
    label: str
    times: int = 1


@dataclass(frozen=True, slots=True)
class Track:
    """A device in the picture of a step.

    Attributes:
        boxes: x, y, width, kind and text of each interval, in units of `WIDTH` and `LANE`.
    """

    name: str
    words: str
    boxes: Sequence[tuple[float, float, float, str, str]]


def kind_of(activity: str, label: str) -> str:
    """The kind of an event: one of `KINDS`."""
    if activity != "compute":
        return activity
    words = label.split()
    if words[-1:] and words[-1] in _HANDLING:
        return "handling"
    return next((phase for phase in ("forward", "backward", "optimizer") if phase in words), "handling")


def intervals(events: Iterable[Event], device: int, activity: str, step_s: float) -> list[Interval]:
    """What is drawn of a device, in order of time. Intervals of messages may overlap."""
    result: list[Interval] = []
    mine = sorted((e for e in events if e[0] == device and e[1] == activity), key=lambda e: (e[3], e[4]))
    for _, _, label, start_s, end_s, peer, size in mine:
        way = "to" if activity == "send" else "from"
        text = label if peer < 0 else f"{label}, {in_bytes(size)} {way} device {peer}"
        new = Interval(kind_of(activity, label), start_s, end_s, text)
        if result and _are_one(result[-1], new, step_s):
            last = result.pop()
            text = f"{last.label.partition(' … ')[0]} … {new.label}"
            new = Interval(last.kind, last.start_s, max(last.end_s, new.end_s), text, last.times + 1)
        result.append(new)
    return result


def _are_one(last: Interval, new: Interval, step_s: float) -> bool:
    thinner_s = min(last.end_s - last.start_s, new.end_s - new.start_s)
    return last.kind == new.kind and new.start_s - last.end_s < JOINED * step_s and thinner_s < 2 * JOINED * step_s


def tracks(prediction: PredictionLine) -> list[Track]:
    """The picture of a predicted step, device by device."""
    whole = prediction.one_pass
    scale = WIDTH / whole.s
    result = []
    for device, name in enumerate(prediction.names):
        boxes = []
        for row, lane in enumerate(LANES):
            for each in intervals(prediction.events, device, lane, whole.s):
                several = f" ({each.times} in a row)" if each.times > 1 else ""
                text = f"{each.label}{several}: {seconds(each.start_s)} to {seconds(each.end_s)}"
                width = max(1.0, (each.end_s - each.start_s) * scale)
                boxes.append((each.start_s * scale, row * LANE + 1, width, each.kind, text))
        computes, waits = whole.compute_s[device] / whole.s, whole.exchange_s[device] / whole.s
        result.append(Track(name, f"computes {percent(computes)}, waits for messages {percent(waits)}", boxes))
    return result


def time_axis(step_s: float) -> tuple[str, list[tuple[float, str]]]:
    """The unit of the axis below the tracks, and its ticks: place (0 to 1) and text."""
    unit, size = unit_of(step_s)
    return unit, [(at * size / step_s, plain(at, 3)) for at in ticks(0.0, step_s / size, 4)]
