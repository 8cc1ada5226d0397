"""`convoy report`: one HTML page of a run, made from its log. It needs no network and no program but a browser."""

import base64
import hashlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from convoy._version import __version__
from convoy.cost.interval import around
from convoy.files import write_whole
from convoy.profile.energy import ABSENT
from convoy.report import intervals, numbers, plan_picture
from convoy.report.chart import Axes, Chart, Curve, Drawing, Level, Tick, draw
from convoy.report.numbers import percent, plain, seconds
from convoy.report.plan_picture import Band, Box, bands
from convoy.runlog.metrics import (
    best_evaluation,
    limit_samples_per_s,
    measured_joules_per_image,
    measured_samples_per_s,
    measured_step_s,
    rates,
    step_range,
    utilization,
)
from convoy.runlog.reader import InForce, Record, log_of, read_log
from convoy.runlog.schema import PlanLine, PredictionLine, ReshareLine, SystemLine

MOST_PLANS = 12
"""In force one after the other, that are drawn."""

SYSTEM = {
    "cores": ("Processor of each process, in cores", "plain"),
    "host_processor": ("Processor of its whole host", "percent"),
    "memory_bytes": ("Memory of each process", "bytes"),
    "accelerator_bytes": ("Tensors in the accelerator's memory", "bytes"),
    "sent_bytes_per_s": ("Sent for the training, per second", "bytes"),
    "received_bytes_per_s": ("Received for the training, per second", "bytes"),
    "power_w": ("Measured power, in watts", "plain"),
}
"""Titles of the charts of what devices use, and how their values are written; by the names of the log."""

AREA_WIDTH, AREA_HEIGHT = 1000.0, 300.0
"""Of the drawing of shares."""


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the page of a run; where it was written.

    Args:
        run: the folder of a run, or its log.
        output: default: report.html in the folder; for a log that was given, a file of its name that ends in .html.

    Raises:
        InputError: there is no log, it is not one, or the page cannot be written.
    """
    log = log_of(run)
    target = output or (run / "report.html" if os.path.isdir(run) else log.with_suffix(".html"))
    write_whole(target, page_of(read_log(log)))
    return target


def page_of(record: Record, served: str = "") -> str:
    """The whole page as text; `served` as for `render`."""
    names = device_names(record)
    return render(
        "page.html", served, record=record, names=names, title=title_of(record),
        plan_name=record.plan.plan.name if record.plan is not None else "", begun=_moment(record.run.date),
        state=state_of(record), cards=_cards(record), limit=limit_samples_per_s(record), curves=_curves(record),
        rate=_rate(record), plans=shown_plans(record), **_devices(record, names), system=_system(record),
        shares=_shares(record), settings=settings_of(record),
    )  # fmt: skip


def title_of(record: Record) -> str:
    options = record.run.options
    return f"{options.get('net', 'a net')} on {options.get('data', 'images')}"


def device_names(record: Record) -> list[str]:
    """Of each device, what it is and where: "cpu (1 thread) on lab1, slowed down 2x". Where devices were lost or came, its
    number stands behind that."""
    if record.fleet is None:
        count = max((len(each.line.work) for each in record.plans), default=0)
        return [f"device {record.id_of(place)}" for place in range(count)]
    return [
        f"{row.name} on {row.host}"
        + (f", slowed down {row.slowdown:g}x" if row.slowdown != 1 else "")
        + (f", device {record.id_of(place)}" if record.ids else "")
        for place, row in enumerate(record.fleet.devices)
    ]


def _moment(text: str) -> str:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{moment.day} {moment:%B %Y, %H:%M} {moment.tzname() or ''}".strip()


def state_of(record: Record) -> str:
    """How far the run is."""
    done = record.steps_done
    epochs, each = record.run.options.get("epochs"), record.run.epoch_steps
    steps = f"{done:,} of {each * epochs:,} steps" if each and isinstance(epochs, int) else f"{done:,} steps"
    if record.end is not None:
        return f"Finished: {steps}."
    cut = " Its last line is cut off." if record.is_cut else ""
    return f"Not finished: {steps}; it still goes on, or was ended.{cut}"


def _cards(record: Record) -> list[tuple[str, str, str]]:
    """The numbers that people look for first: name, value, note."""
    losses = [epoch.loss for epoch in record.epochs if epoch.loss is not None]
    tests = [row for row in record.evaluations if row.accuracy is not None]
    best = best_evaluation(record)
    step_s, rate, limit = measured_step_s(record), measured_samples_per_s(record), limit_samples_per_s(record)
    predicted, train_s = record.prediction, sum(line.train_s for line in record.epochs)
    off = f", {predicted.step_s / step_s - 1:+.1%} off" if predicted and step_s else ""
    return [
        ("Test accuracy", percent(tests[-1].accuracy if tests else None),
         f"best {percent(best.accuracy)} after step {best.step:,}" if best else "not tested yet"),
        ("Training loss", plain(losses[-1] if losses else None, 3),
         "mean of the last epoch" if losses else "no whole epoch yet"),
        ("Samples/s", plain(rate), f"{seconds(step_s)} a step, median"),
        ("Predicted samples/s", plain(predicted.samples_per_s if predicted else None),
         f"{seconds(predicted.step_s)} a step{_within(predicted)}{off}" if predicted else "only --plan auto predicts"),
        ("Limit", plain(limit),
         "samples/s, the devices' own speeds added up" if limit else "the devices' speeds were not measured"),
        ("Of the limit", percent(rate / limit if rate and limit else None), "what the devices reach together"),
        ("Training", seconds(train_s or None), f"{len(record.epochs)} epochs, {len(record.steps):,} steps"),
        *_energy(record),
    ]  # fmt: skip


def _energy(record: Record) -> list[tuple[str, str, str]]:
    """Joules per image: measured, and predicted. Logs before there were meters have none."""
    sources = [by for line in record.system for by in line.joules_by]
    if not sources:
        return []
    joules, predicted = measured_joules_per_image(record), record.prediction and record.prediction.joules_per_image
    absent = [by for by in sources if by.startswith(ABSENT)]
    by = absent[0] if absent else "; ".join(sorted({by for by in sources if not by.startswith("counted")}))
    beside = f"{plain(predicted, 4)} predicted" if predicted else "no prediction: the fleet gives no watts"
    return [("Joules/image", plain(joules, 4), f"measured: {by}; {beside}")]


def _within(predicted: PredictionLine) -> str:
    if predicted.spread == 1:
        return ""
    within = around(predicted.step_s, predicted.spread)
    return f" (nine of ten: {seconds(within.low)} - {seconds(within.high)})"


def _curves(record: Record) -> list[Drawing]:
    """How the training went: loss, accuracy, learning rate."""
    span = step_range(record)
    losses = [(row.step, row.loss) for row in record.steps if row.loss is not None]
    tests = [(row.step, row.accuracy) for row in record.evaluations if row.accuracy is not None]
    lr = [(row.step, row.lr) for row in record.steps if row.lr is not None]
    charts = [
        Chart("loss", "Training loss", "step", [Curve("training loss", losses, is_smooth=True)], span),
        Chart("accuracy", "Test accuracy", "step", [Curve("accuracy", tests, dots=True)], span, shown="percent"),
        Chart("lr", "Learning rate", "step", [Curve("learning rate", lr)], span, from_zero=True),
    ]
    return [draw(chart) for chart in charts]


def _rate(record: Record) -> Drawing:
    """Throughput beside what was predicted and what is possible."""
    limit, predicted = limit_samples_per_s(record), record.prediction
    levels = [Level("predicted", predicted.samples_per_s, "prediction")] if predicted is not None else []
    levels += [Level("limit", limit, "limit")] if limit is not None else []
    marks = [line.step + 1 for line in record.reshares]
    measured = [Curve("measured", rates(record))]
    return draw(Chart("rate", "Samples/s", "step", measured, step_range(record), levels, marks, from_zero=True))


@dataclass(frozen=True, slots=True)
class ShownPlan:
    """What the devices did from a change on, as it is drawn.

    Attributes:
        when: its steps, in words.
        stretches: the rows, where they are many, as neighbours with the same shares.
        ids: of the devices; `idle`: of those with nothing to compute.
        tracks: one step as predicted; empty where there is no prediction.
    """

    when: str
    why: str
    line: PlanLine | ReshareLine
    rows: Sequence[Band]
    stretches: Sequence[Band]
    work: Sequence[Box]
    ids: Sequence[int]
    idle: Sequence[str]
    prediction: PredictionLine | None
    tracks: Sequence[intervals.Track]
    time_axis: tuple[str, Sequence[Tick]]


def shown_plans(record: Record) -> list[ShownPlan]:
    """The plans in force, in their order; of very many the first and the last."""
    known = [(each, until) for each, until in _spans(record) if each.line.layers]
    return [
        _shown_plan(record, *each)
        for each in (known if len(known) <= MOST_PLANS else [known[0], *known[1 - MOST_PLANS :]])
    ]


def _spans(record: Record) -> list[tuple[InForce, int | None]]:
    """With the step at which each was replaced; the first of two that begin at one step never ran."""
    stops: list[int | None] = [each.step for each in record.plans]
    pairs = zip(record.plans, [*stops[1:], None], strict=False)
    return [(each, until) for each, until in pairs if until is None or until > each.step]


def _shown_plan(record: Record, each: InForce, until: int | None) -> ShownPlan:
    line, predicted, rows = each.line, each.prediction, bands(each.line.layers)
    ids = [record.id_of(place) for place in range(len(line.layers[0].parts))]
    return ShownPlan(
        f"from step {each.step:,} on" if until is None else f"steps {each.step:,} to {until - 1:,}",
        line.reason if isinstance(line, ReshareLine) else "as the run began",
        line, rows, bands(line.layers, stretches=True) if len(rows) > plan_picture.SHOWN_ROWS else (),
        plan_picture.work_boxes(line, ids), ids,
        [str(device) for device, part in zip(ids, line.work, strict=False) if not part],
        predicted, () if predicted is None else intervals.tracks(predicted),
        ("", ()) if predicted is None else intervals.time_axis(predicted.one_pass.s),
    )  # fmt: skip


def _system(record: Record) -> list[Drawing]:
    """What the devices used: a chart for each kind, a curve for each device, also of those that train no more."""
    table = [(line.step, _by_id(line)) for line in record.system]
    now = [record.id_of(place) for place in range(len(device_names(record)))]
    ids = list(dict.fromkeys([*now, *sorted({d for _, found in table for values in found.values() for d in values})]))
    span = step_range(record)
    drawings = []
    for name, (title, shown) in SYSTEM.items():
        rows = [(step, values[name]) for step, values in table if name in values]
        curves = [
            Curve(
                f"device {device}",
                points,
                plan_picture.colour(place),
            )
            for place, device in enumerate(ids)
            if (points := [(step, value) for step, values in rows if (value := values.get(device)) is not None])
        ]
        if curves:
            drawings.append(draw(Chart(name, title, "step", curves, span, shown=shown, from_zero=True)))
    return drawings


def _by_id(line: SystemLine) -> dict[str, dict[int, float | None]]:
    """The values of a line by their name and the device's id."""
    return {
        name: dict(zip(line.ids or range(len(values)), values, strict=True)) for name, values in line.per_device.items()
    }


def _devices(record: Record, names: Sequence[str]) -> dict[str, Any]:
    """Where the time of the devices went: a bar for each, a table epoch by epoch."""
    numbered = [f"device {record.id_of(place)}" for place in range(len(names))]
    rows = []
    for place, line in enumerate(record.utilization):
        parts = [utilization(record, device, place) for device in range(len(names))]
        rows.append([line.epoch + 1, line.steps, *(percent(part and part[0]) for part in parts)])
    known = any(utilization(record, device) for device in range(len(names)))
    return {
        "bars": [_bar(record, device) for device in range(len(names))], "utilized": rows if known else [],
        "numbered": numbered, "devices": list(zip(numbered, names, strict=True)),
    }  # fmt: skip


def _bar(record: Record, device: int) -> tuple[list[Box], str]:
    """Where the time of a device went; what else is known of it, in words."""
    parts = utilization(record, device) or (0.0, 0.0, 1.0)
    boxes = [
        Box(kind, part, f"{part:.0%}" if part >= 0.08 else "", f"device {record.id_of(device)}: {kind} {percent(part)}")
        for kind, part in zip(("computing", "exchange", "rest"), parts, strict=True)
        if part > 0.0005
    ]
    facts = []
    speed = record.fleet.devices[device].samples_per_s if record.fleet is not None else None
    if speed is not None:
        facts.append(f"{plain(speed)} samples/s alone")
    if record.plans and record.plans[-1].line.work:
        facts.append(f"{percent(record.plans[-1].line.work[device])} of the arithmetic")
    return boxes, ", ".join(facts)


def _shares(record: Record) -> dict[str, Any] | None:
    """How the arithmetic was shared out, from step to step: areas as x, y, width, height, colour and title."""
    changes = [(each.step, each.line.work) for each in record.plans if each.line.work]
    if not changes or not record.steps:
        return None
    end = record.steps[-1].step + 1
    starts = [min(step, end) for step, _ in changes]
    first, reshares = starts[0], [line for line in record.reshares if line.work]
    scale = 1 / max(1, end - first)
    areas = []
    for (start, stop), (_, work) in zip(itertools.pairwise([*starts, end]), changes, strict=True):
        below = AREA_HEIGHT
        for device, part in enumerate(work):
            below -= part * AREA_HEIGHT
            x, width = (start - first) * scale * AREA_WIDTH, (stop - start) * scale * AREA_WIDTH
            title = f"steps {start} to {stop}: device {record.id_of(device)} {percent(part)}"
            areas.append((x, below, width, part * AREA_HEIGHT, plan_picture.colour(device), title))
    numbered = [((line.step + 1 - first) * scale, str(n)) for n, line in enumerate(reshares, 1)]
    xs = [((x - first) * scale, plain(x)) for x in (first, (first + end) // 2, end)]
    ys = [(1 - part / 100, f"{part}%") for part in (0, 50, 100)]
    cuts = [place * AREA_WIDTH for place, _ in numbered]
    return {"reshares": reshares, "areas": areas, "cuts": cuts, "axes": Axes(ys, xs, "step", numbered)}


def settings_of(record: Record) -> list[tuple[str, str, str]]:
    """Name, value and source of every setting."""
    sources = record.run.sources
    return [
        (name.removesuffix("_s").replace("_", "-"), _value(value), sources.get(name, ""))
        for name, value in record.run.options.items()
    ]


def _value(value: object) -> str:
    match value:
        case None:
            return "–"
        case bool():
            return str(value).lower()
        case list():
            return ", ".join(map(_value, value))
        case float():
            return f"{value:g}"
    return str(value)


# --- what all pages have in common: templates, style, the one script, and what a browser lets them do ---------------------

_LOADER = PackageLoader("convoy.report")


def render(template: str, served: str = "", **values: Any) -> str:
    """A page as text.

    Args:
        served: which version of the page this is, where a server will have newer ones; empty: the page is a file.
    """
    environment = _environment()
    source, _, _ = _LOADER.get_source(environment, "page.js")
    return environment.get_template(template).render(
        version=__version__, served=served, policy=_policy(source, served), script=Markup(source), **values
    )  # fmt: skip


def _policy(script: str, served: str) -> str:
    """What a browser may do with the page: show it, and run that script. Where it is served, ask its server."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = ["default-src 'none'", "style-src 'unsafe-inline'", "img-src data:", f"script-src 'sha256-{digest}'"]
    return "; ".join([*rules, "connect-src 'self'"] if served else rules)


def _environment() -> Environment:
    environment = Environment(
        loader=_LOADER, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    shown = {"plain": plain, "percent": percent, "seconds": seconds, "in_bytes": numbers.in_bytes}
    environment.filters |= shown | {"number": "{:.7g}".format, "place": "{:.2%}".format, "colour": plan_picture.colour}
    environment.globals |= {"kinds": intervals.KINDS, "lanes": intervals.LANES}
    return environment
