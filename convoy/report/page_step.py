"""The timeline of one step as the simulator predicts it: for each device when it computes, sends and receives."""

from collections.abc import Iterator, Sequence

from convoy.report.intervals import KINDS, spans
from convoy.report.markup import Markup, tag
from convoy.report.numbers import percent, plain, seconds, ticks, unit_of
from convoy.report.page_parts import chip, missing, section
from convoy.runlog.reader import Record
from convoy.runlog.schema import PredictionLine

WIDTH, LANE = 1000.0, 10.0
"""Of a device's drawing, and the height of each of its three rows."""

LANES = ("compute", "send", "receive")


def step_section(record: Record) -> Markup:
    """When each device does what, where a prediction was made; else, how there would be one."""
    prediction = record.in_force or record.prediction
    if prediction is None:
        plan = record.plan.plan.name if record.plan is not None else "of the run"
        return section(
            "step", "One step",
            missing(f"No prediction was made for plan {plan}, so there is no timeline. ", tag("code", "--plan auto"),
                    " measures the devices and predicts every step; ", tag("code", "convoy simulate --fleet"),
                    " replays one step of any plan."),
        )  # fmt: skip
    whole = prediction.one_pass
    passes = round(prediction.step_s / whole.s)
    lead = (
        f"As the simulator predicts it{_of_shares(record)}: one pass of the batch takes {seconds(whole.s)}"
        + (f"; {passes} passes make a step. " if passes > 1 else ". ")
        + f"It is bound by {prediction.bound}."
    )
    tracks = [_track(prediction, device, name) for device, name in enumerate(prediction.names)]
    key = [tag("span", tag("i", class_=f"key {kind}"), words, class_="entry") for kind, words in KINDS.items()]
    return section(
        "step", "One step", tag("p", lead), tag("span", *key, class_="legend"),
        tag("div", *tracks, _axis(whole.s), class_="tracks"),
    )  # fmt: skip


def _of_shares(record: Record) -> str:
    if record.in_force is None:
        return " with the shares of the beginning"
    return " with the shares at the end, from the times measured before the training" * record.in_force.shares_only


def _track(prediction: PredictionLine, device: int, name: str) -> Markup:
    whole = prediction.one_pass
    computes, waits = whole.compute_s[device] / whole.s, whole.exchange_s[device] / whole.s
    words = f"computes {percent(computes)}, waits for messages {percent(waits)}"
    svg = tag(
        "svg", tag("title", f"device {device}, {name}: {words}"),
        *(tag("line", x1=0, x2=WIDTH, y1=row * LANE, y2=row * LANE, class_="grid") for row in range(len(LANES) + 1)),
        *_drawn(prediction, device), viewbox=f"0 0 {WIDTH:g} {len(LANES) * LANE:g}", preserve="none", role="img",
    )  # fmt: skip
    rows = tag("div", *(tag("span", lane) for lane in LANES), class_="lanes", aria_hidden="true")
    return tag(
        "div", tag("div", chip(device), " ", tag("b", name), f" {words}", class_="head"), rows, svg, class_="track"
    )


def _drawn(prediction: PredictionLine, device: int) -> Iterator[Markup]:
    scale = WIDTH / prediction.one_pass.s
    for row, lane in enumerate(LANES):
        for span in spans(prediction.events, device, lane, prediction.one_pass.s):
            several = f" ({span.times} in a row)" if span.times > 1 else ""
            title = tag("title", f"{span.label}{several}: {seconds(span.start_s)} to {seconds(span.end_s)}")
            yield tag(
                "rect", title, x=span.start_s * scale, y=row * LANE + 1, width=max(1.0, (span.end_s - span.start_s) * scale),
                height=LANE - 2, class_=f"span {span.kind}",
            )  # fmt: skip


def _axis(step_s: float) -> Markup:
    unit, size = unit_of(step_s)
    marks: Sequence[float] = ticks(0.0, step_s / size, 4)
    places = [tag("span", plain(at, 3), style=f"left:{at * size / step_s:.2%}") for at in marks]
    return tag("div", tag("div", *places, class_="xs"), tag("div", f"time ({unit})", class_="x-label"), class_="axis")
