"""What a picture of a step shows: which kind of work an event is, and which events are drawn as one."""

from collections.abc import Iterable
from dataclasses import dataclass

from convoy.report.numbers import in_bytes

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
"""Spans of one kind that are closer than this part of the step are drawn as one, where one of them would hardly be seen."""

_HANDLING = ("copies", "joined", "calls", "additions")
"""How the labels end of the processor's work for messages."""

Row = tuple[int, str, str, float, float, int, int]
"""An event as the log tells it: device, activity, label, start and end in seconds, peer, bytes."""


@dataclass(frozen=True, slots=True)
class Span:
    """What a device did for a while, once or several times in a row."""

    kind: str
    start_s: float
    end_s: float
    label: str
    times: int = 1


def kind_of(activity: str, label: str) -> str:
    """The kind of an event: one of `KINDS`."""
    if activity != "compute":
        return activity
    words = label.split()
    if words[-1:] and words[-1] in _HANDLING:
        return "handling"
    return next((phase for phase in ("forward", "backward", "optimizer") if phase in words), "handling")


def spans(events: Iterable[Row], device: int, activity: str, step_s: float) -> list[Span]:
    """What is drawn of a device, in order of time. Spans of messages may overlap."""
    result: list[Span] = []
    mine = sorted((e for e in events if e[0] == device and e[1] == activity), key=lambda e: (e[3], e[4]))
    for _, _, label, start_s, end_s, peer, size in mine:
        way = "to" if activity == "send" else "from"
        new = Span(
            kind_of(activity, label), start_s, end_s, label if peer < 0 else f"{label}, {in_bytes(size)} {way} device {peer}"
        )  # fmt: skip
        if result and _are_one(result[-1], new, step_s):
            new = _both(result.pop(), new)
        result.append(new)
    return result


def _are_one(last: Span, new: Span, step_s: float) -> bool:
    thinner_s = min(last.end_s - last.start_s, new.end_s - new.start_s)
    return last.kind == new.kind and new.start_s - last.end_s < JOINED * step_s and thinner_s < 2 * JOINED * step_s


def _both(last: Span, new: Span) -> Span:
    first = last.label.partition(" … ")[0]
    return Span(last.kind, last.start_s, max(last.end_s, new.end_s), f"{first} … {new.label}", last.times + 1)
