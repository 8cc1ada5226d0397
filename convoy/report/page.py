"""`convoy report`: one HTML page of a run, made from its log. It needs no network and runs no program."""

import itertools
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from convoy._version import __version__
from convoy.config.files import write_whole
from convoy.report import intervals, numbers, plan_picture
from convoy.report.chart import Axes, Chart, Curve, Drawing, Level, draw
from convoy.report.numbers import percent, plain, seconds
from convoy.report.plan_picture import Box, bands
from convoy.runlog.metrics import (
    limit_samples_per_s,
    measured_samples_per_s,
    measured_step_s,
    rates,
    smooth_losses,
    smoothing_width,
    step_range,
    utilization,
)
from convoy.runlog.reader import Record, log_of, read_log

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What a browser may do with the page: show it. No program, no network."""

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
    target = output or (run / "report.html" if run.is_dir() else log.with_suffix(".html"))
    write_whole(target, page_of(read_log(log)))
    return target


def page_of(record: Record) -> str:
    """The whole page as text."""
    names, options = device_names(record), record.run.options
    return _environment().get_template("page.html").render(
        record=record, names=names, version=__version__, policy=POLICY,
        title=f"{options.get('net', 'a net')} on {options.get('data', 'images')}",
        plan_name=record.plan.plan.name if record.plan is not None else "", begun=_moment(record.run.date),
        state=_state(record), cards=_cards(record), limit=limit_samples_per_s(record),
        curves=_curves(record), rate=_rate(record), **_plan(record), **_step(record),
        **_devices(record, names), shares=_shares(record), settings=_settings(record),
    )  # fmt: skip


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("convoy.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    shown = {"plain": plain, "percent": percent, "seconds": seconds, "in_bytes": numbers.in_bytes}
    environment.filters |= shown | {"number": "{:.6g}".format, "place": "{:.2%}".format, "colour": plan_picture.colour}
    environment.globals |= {"kinds": intervals.KINDS, "lanes": intervals.LANES}
    return environment


def device_names(record: Record) -> list[str]:
    """Of each device, what it is and where: "cpu (1 thread) on lab1, slowed down 2x"."""
    if record.fleet is None:
        count = record.plan.plan.devices if record.plan is not None else 0
        return [f"device {device}" for device in range(count)]
    return [
        f"{row.name} on {row.host}" + (f", slowed down {row.slowdown:g}x" if row.slowdown != 1 else "")
        for row in record.fleet.devices
    ]


def _moment(text: str) -> str:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{moment.day} {moment:%B %Y, %H:%M} {moment.tzname() or ''}".strip()


def _state(record: Record) -> str:
    """How far the run is."""
    done = len(record.steps) and record.steps[-1].step + 1
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
    best = max(tests, key=lambda row: row.accuracy or 0.0, default=None)
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
         f"{seconds(predicted.step_s)} a step{off}" if predicted else "only --plan auto predicts"),
        ("Limit", plain(limit),
         "samples/s, the devices' own speeds added up" if limit else "the devices' speeds were not measured"),
        ("Of the limit", percent(rate / limit if rate and limit else None), "what the devices reach together"),
        ("Training", seconds(train_s or None), f"{len(record.epochs)} epochs, {len(record.steps):,} steps"),
    ]  # fmt: skip


def _curves(record: Record) -> list[Drawing]:
    """How the training went: loss, accuracy, learning rate."""
    span = step_range(record)
    raw = [(row.step, row.loss) for row in record.steps if row.loss is not None]
    width = smoothing_width(len(raw))
    smooth = [Curve("each step", raw, "faint"), Curve(f"mean of {width} steps", smooth_losses(record))]
    tests = [(row.step, row.accuracy) for row in record.evaluations if row.accuracy is not None]
    lr = [(row.step, row.lr) for row in record.steps if row.lr is not None]
    charts = [
        Chart("loss", "Training loss", "step", smooth if width > 1 else [Curve("each step", raw, dots=True)], span),
        Chart("accuracy", "Test accuracy", "step", [Curve("accuracy", tests, dots=True)], span, shown=numbers.axis_percent),
        Chart("lr", "Learning rate", "step", [Curve("learning rate", lr)], span, from_zero=True),
    ]  # fmt: skip
    return [draw(chart) for chart in charts]


def _rate(record: Record) -> Drawing:
    """Throughput beside what was predicted and what is possible."""
    limit, predicted = limit_samples_per_s(record), record.prediction
    levels = [Level("predicted", predicted.samples_per_s, "prediction")] if predicted is not None else []
    levels += [Level("limit", limit, "limit")] if limit is not None else []
    marks = [line.step + 1 for line in record.reshares]
    measured = [Curve("measured", rates(record))]
    return draw(Chart("rate", "Samples/s", "step", measured, step_range(record), levels, marks, from_zero=True))


def _plan(record: Record) -> dict[str, Any]:
    """What the last plan of the run has each device do."""
    if record.plan is None:
        return {"now": None}
    last = record.changes[-1][1]
    now = last if last.layers else record.plan
    rows = bands(now.layers)
    return {
        "now": now, "rows": rows, "work": plan_picture.work_boxes(now),
        "stretches": bands(now.layers, stretches=True) if len(rows) > plan_picture.SHOWN_ROWS else None,
        "idle": [str(device) for device, part in enumerate(now.work) if not part],
    }  # fmt: skip


def _step(record: Record) -> dict[str, Any]:
    """When each device does what in one step, with the shares in force where these were predicted."""
    predicted = record.in_force or record.prediction
    if predicted is None:
        return {"predicted": None}
    of_shares = " with the shares of the beginning"
    if record.in_force is not None:
        of_shares = " with the shares at the end, from the times measured before the training" * predicted.shares_only
    unit, marks = intervals.time_axis(predicted.one_pass.s)
    passes = round(predicted.step_s / predicted.one_pass.s)
    return {
        "predicted": predicted, "tracks": intervals.tracks(predicted), "time_unit": unit, "time_ticks": marks,
        "of_shares": of_shares, "passes": passes,
    }  # fmt: skip


def _devices(record: Record, names: Sequence[str]) -> dict[str, Any]:
    """Where the time of the devices went: a bar for each, a table epoch by epoch."""
    numbered = [f"device {device}" for device in range(len(names))]
    rows = []
    for place, line in enumerate(record.utilization):
        parts = [utilization(record, device, place) for device in range(len(names))]
        rows.append([line.epoch + 1, line.steps, *(percent(part and part[0]) for part in parts)])
    known = any(utilization(record, device) for device in range(len(names)))
    return {
        "bars": [_bar(record, device) for device in range(len(names))], "utilized": rows if known else [],
        "numbered": numbered, "devices": list(zip(numbered, names, strict=True)),
        "queued": any(name.startswith("cuda") for name in names) and not record.run.options.get("rebalance"),
    }  # fmt: skip


def _bar(record: Record, device: int) -> tuple[list[Box], str]:
    """Where the time of a device went; what else is known of it, in words."""
    parts = utilization(record, device) or (0.0, 0.0, 1.0)
    boxes = [
        Box(kind, part, f"{part:.0%}" if part >= 0.08 else "", f"device {device}: {kind} {percent(part)}")
        for kind, part in zip(("computing", "exchange", "rest"), parts, strict=True)
        if part > 0.0005
    ]
    facts = []
    speed = record.fleet.devices[device].samples_per_s if record.fleet is not None else None
    if speed is not None:
        facts.append(f"{plain(speed)} samples/s alone")
    if record.changes and record.changes[-1][1].work:
        facts.append(f"{percent(record.changes[-1][1].work[device])} of the arithmetic")
    return boxes, ", ".join(facts)


def _shares(record: Record) -> dict[str, Any] | None:
    """How the arithmetic was shared out, from step to step: areas as x, y, width, height, colour and title."""
    changes = [(step, line.work) for step, line in record.changes if line.work]
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
            title = f"steps {start} to {stop}: device {device} {percent(part)}"
            areas.append((x, below, width, part * AREA_HEIGHT, plan_picture.colour(device), title))
    numbered = [((line.step + 1 - first) * scale, str(n)) for n, line in enumerate(reshares, 1)]
    xs = [((x - first) * scale, plain(x)) for x in (first, (first + end) // 2, end)]
    ys = [(1 - part / 100, f"{part}%") for part in (0, 50, 100)]
    cuts = [place * AREA_WIDTH for place, _ in numbered]
    return {"reshares": reshares, "areas": areas, "cuts": cuts, "axes": Axes(ys, xs, "step", numbered)}


def _settings(record: Record) -> list[tuple[str, str, str]]:
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
