"""Writes the HTML page of a run, from its log. The page needs only a browser, and no network."""

import base64
import hashlib
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from convoy._version import __version__
from convoy.config.train_options import key_of
from convoy.errors import InputError
from convoy.files import write_whole
from convoy.report import timeline
from convoy.report.numbers import in_bytes, percent, plain, seconds, unit_of
from convoy.runlog.reader import RunRecord, log_of, read_log
from convoy.runlog.schema import LayerEntry, PredictionLine
from convoy.simulate.interval import around
from convoy.train.record import EpochResult, Observer

MAX_ROWS = 20  # if a plan has more rows, consecutive layers with the same shares are drawn in one
MIN_TEXT_PART = 0.07  # of its row: the width of the narrowest box with text; narrower ones have only a tooltip
COLOURS = 8  # of devices; further devices reuse them, hatched
WIDTH, HEIGHT = 1000, 400  # of a chart, in SVG units
MAX_POINTS = 600  # of a drawn line
RELOAD_S = 5  # a browser reloads the page of an unfinished run after this time
MAX_WRITING = 0.05  # fraction of a training's time for writing its page

FORMATS: Mapping[str, Callable[[float], str]] = {
    "plain": plain,
    "percent": lambda part: f"{100 * part:.4g}%",
    "bytes": lambda value: in_bytes(round(value)) if round(value) else "0",
}
"""Formats of the vertical axis; page.js has the same functions."""

Point = tuple[float, float]
Tick = tuple[float, str]
"""Relative position on the axis (0 to 1), and text."""

RESOURCES = {
    "cores": ("CPU cores used by each process", "plain"),
    "host_processor": ("CPU load of its host", "percent"),
    "memory_bytes": ("Memory of each process", "bytes"),
    "accelerator_bytes": ("Tensors in the accelerator's memory", "bytes"),
    "sent_bytes_per_s": ("Sent for the training, per second", "bytes"),
    "received_bytes_per_s": ("Received for the training, per second", "bytes"),
    "power_w": ("Measured power, in watts", "plain"),
}
"""Title and format of the charts of a device's resources, by field of the log."""

UNITS = {
    "batch": "samples",
    "filter": "filters",
    "channel": "input channels",
    "spatial": "positions",
    "copies": "the whole layer on every device",
    "one": "on one device",
}


# Line charts: the drawing scales to any width but its text does not, so ticks have relative positions (0 to 1).


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart, with the CSS classes `look`.

    `is_smooth`: draw it twice: the raw values faintly, and a curve that the page's slider smooths.
    """

    label: str
    points: Sequence[Point]
    look: str = "main"
    dots: bool = False
    is_smooth: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart of curves over training steps.

    Attributes:
        name: prefix of HTML element ids, unique on a page.
        span: first and last step of the horizontal axis; points outside widen it.
        shown: format of the vertical axis, one of `FORMATS`.
    """

    name: str
    title: str
    curves: Sequence[Curve]
    span: Point
    from_zero: bool = False
    shown: str = "plain"

    @cached_property
    def edges(self) -> tuple[float, float, float, float]:
        """Values at the left, right, lower and upper edge, with which page.js converts mouse positions to values."""
        xs, ys = ([point[axis] for curve in self.curves for point in curve.points] for axis in (0, 1))
        left, right = min(*self.span, *xs), max(*self.span, *xs)
        low, high = min(0.0, *ys) if self.from_zero else min(ys), max(ys)
        if high - low < 1e-9 * max(abs(high), 1e-9):  # a straight line
            low, high = (0.0, 2 * high) if high > 0 else (low - 1, high + 1)
        margin = 0.06 * (high - low)
        low, high = low if self.from_zero and low == 0 else low - margin, high + margin
        return left, right if right > left else left + 1, low, high

    def x(self, value: float) -> float:
        left, right, _, _ = self.edges
        return (value - left) / (right - left)

    def y(self, value: float) -> float:
        _, _, low, high = self.edges
        return 1 - (value - low) / (high - low)

    @cached_property
    def lines(self) -> list[Curve]:
        """The curves to draw, thinned and in SVG units."""
        lines = []
        for curve in self.curves:
            few = [(WIDTH * self.x(x), HEIGHT * self.y(y)) for x, y in thinned(curve.points)]
            if curve.is_smooth and len(few) >= 3:
                lines += [Curve("", few, f"{curve.look} faint"), Curve(curve.label, few, f"{curve.look} smooth")]
            elif few:
                lines.append(Curve(curve.label, few, curve.look, curve.dots or len(few) == 1))
        return lines

    @property
    def ys(self) -> list[Tick]:
        _, _, low, high = self.edges
        return [(self.y(y), FORMATS[self.shown](y)) for y in ticks(low, high, 5)]

    @property
    def xs(self) -> list[Tick]:
        left, right, _, _ = self.edges
        return [(self.x(x), plain(x)) for x in ticks(left, right, 5) if x == int(x)]

    @property
    def description(self) -> str:
        """A text description for screen readers."""
        shown = FORMATS[self.shown]
        ends = [(curve.label, curve.points[0], curve.points[-1]) for curve in self.curves if curve.points]
        return "; ".join(
            f"{label}: {shown(a)} at {plain(first)}, {shown(b)} at {plain(last)}"
            for label, (first, a), (last, b) in ends
        )


def time_axis(step_s: float) -> tuple[str, list[Tick]]:
    """Return the unit and the ticks of the time axis of a step."""
    unit, size = unit_of(step_s)
    return unit, [(at * size / step_s, plain(at, 3)) for at in ticks(0.0, step_s / size, 4)]


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round numbers from `low` to `high`: 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / count
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if (high - low) / (size * factor) <= count + 1.5)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Return about `MAX_POINTS` points at most: the lowest and the highest of each group of neighbours, so peaks stay."""
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(2 * len(points) / MAX_POINTS)
    near = (points[start : start + size] for start in range(0, len(points), size))
    return [end for some in near for end in sorted({min(some, key=lambda p: p[1]), max(some, key=lambda p: p[1])})]


def write_report(run: Path, output: Path | None = None, *, reload_s: int = 0) -> Path:
    """Write the page of a run, given as its folder or log, and return its path.

    Args:
        output: None: report.html in the folder; for a log, its name with the suffix .html.
        reload_s: seconds until a browser loads the page again; 0: never.
    """
    log = log_of(run)
    target = output or (run / "report.html" if os.path.isdir(run) else log.with_suffix(".html"))
    write_whole(target, page_of(read_log(log), reload_s))
    return target


def write_step(prediction: PredictionLine, output: Path, title: str) -> Path:
    """Write the page of one predicted step. Return its path."""
    write_whole(output, render("step.html", title=title, prediction=prediction, ids=range(len(prediction.names))))
    return output


class LivePage(Observer):
    """An observer that writes the page of a run after every epoch, so that a browser can follow the run.

    Epochs are skipped while writing would take more than `MAX_WRITING` of the time. If the page cannot be written, `tell` is
    called once with a warning, and training continues.
    """

    def __init__(self, run: Path, tell: Callable[[str], None] = warnings.warn) -> None:
        self.run, self.tell = run, tell
        self._next_s = 0.0

    def on_epoch(self, result: EpochResult) -> None:  # noqa: ARG002
        start_s = time.monotonic()
        if start_s < self._next_s:
            return
        try:
            write_report(self.run, reload_s=RELOAD_S)
            end_s = time.monotonic()
            self._next_s = end_s + (end_s - start_s) / MAX_WRITING
        except Exception as error:  # no error of a page may end the training
            self._next_s = float("inf")
            self.tell(f"WARNING: {error}; training continues without the page")


def page_of(record: RunRecord, reload_s: int = 0) -> str:
    names = device_names(record)
    ids = [record.id_of(place) for place in range(len(names))]
    now = record.plans[-1] if record.plans and record.plans[-1].line.layers else None
    try:
        return render(
            "page.html", reload_s=reload_s, record=record, title=title_of(record), state=state_of(record),
            names=names, ids=ids, cards=summary_of(record), curves=loss_charts(record), rate=rate_chart(record),
            now=now, bars=[time_boxes(record, place) for place in range(len(names))], resources=resource_charts(record),
            shares=share_chart(record), settings=settings_of(record),
        )  # fmt: skip
    except (IndexError, OverflowError, ValueError) as error:
        raise InputError(
            f"the lines of {record.path} contradict each other ({error}): give the unchanged log of a run"
        ) from error


def title_of(record: RunRecord) -> str:
    options = record.run.options
    return f"{options.get('net', 'a net')} on {options.get('data', 'images')}"


def device_names(record: RunRecord) -> list[str]:
    """Describe each device: "cpu (1 thread) on lab1, slowed down 2x"; with its id if devices left or joined."""
    if record.fleet is None:
        count = max((len(each.line.work) for each in record.plans), default=0)
        return [f"device {record.id_of(place)}" for place in range(count)]
    return [
        f"{row.name} on {row.host}"
        + (f", slowed down {row.slowdown:g}x" if row.slowdown != 1 else "")
        + (f", device {record.id_of(place)}" if record.ids else "")
        for place, row in enumerate(record.fleet.devices)
    ]


def state_of(record: RunRecord) -> str:
    done = record.steps_done
    epochs, each = record.run.options.get("epochs"), record.run.epoch_steps
    steps = f"{done:,} of {each * epochs:,} steps" if each and isinstance(epochs, int) else f"{done:,} steps"
    if record.end is not None:
        return f"Finished: {steps}."
    return f"Not finished: {steps}; it is running or was stopped." + " Its last line is incomplete." * record.is_cut


def settings_of(record: RunRecord) -> list[tuple[str, str, str]]:
    """Return name, value and source of every setting."""
    sources, options = record.run.sources, record.run.options.items()
    return [(key_of(name), "–" if value is None else str(value), sources.get(name, "")) for name, value in options]


def summary_of(record: RunRecord) -> list[tuple[str, str, str]]:
    """Return the most important numbers: name, value, explanation."""
    losses = [epoch.loss for epoch in record.epochs if epoch.loss is not None]
    predicted, limit = record.prediction, record.limit_samples_per_s
    rate, step_s = record.samples_per_s, record.step_s
    best = max(record.tests, key=lambda test: test[1], default=None)
    forecast = "only --plan auto predicts"
    if predicted is not None:
        within = around(predicted.step_s, predicted.spread)
        interval = f" (nine of ten: {seconds(within.low)} - {seconds(within.high)})" if predicted.spread > 1 else ""
        off = "" if step_s is None else f", {predicted.step_s / step_s - 1:+.1%} off"
        forecast = f"{seconds(predicted.step_s)} a step{interval}{off}"
    cards = [
        ("Best test accuracy", percent(best and best[1]),
         f"after step {best[0]:,}; the last is {percent(record.tests[-1][1])}" if best else "not evaluated yet"),
        ("Training loss", plain(losses[-1] if losses else None, 3),
         "mean of the last epoch" if losses else "no complete epoch yet"),
        ("Samples/s", plain(rate), f"{seconds(step_s)} a step, median"),
        ("Predicted samples/s", plain(predicted.samples_per_s if predicted else None), forecast),
        ("Efficiency", percent(rate / limit if rate and limit else None),
         f"of {plain(limit)} samples/s, the sum of solo throughputs" if limit else "solo speeds were not measured"),
        ("Training time", seconds(sum(line.train_s for line in record.epochs) or None),
         f"{len(record.epochs)} epochs, {len(record.steps):,} steps"),
    ]  # fmt: skip
    if record.joules_per_image is not None:
        sources = {by for line in record.system for by in line.joules_by if not by.startswith("counted")}
        expected = predicted and predicted.joules_per_image
        compared = f"{plain(expected)} predicted" if expected else "no prediction: the fleet has no watts"
        cards.append(("Joules/image", plain(record.joules_per_image), f"by {'; '.join(sorted(sources))}; {compared}"))
    return cards


def loss_charts(record: RunRecord) -> list[Chart]:
    lr = [(row.step, row.lr) for row in record.steps if row.lr is not None]
    losses = Curve("training loss", record.losses, is_smooth=True)
    tests = Curve("accuracy", record.tests, dots=True)
    return [
        Chart("loss", "Training loss", [losses], record.span),
        Chart("accuracy", "Test accuracy", [tests], record.span, shown="percent"),
        Chart("lr", "Learning rate", [Curve("learning rate", lr)], record.span, from_zero=True),
    ]


def rate_chart(record: RunRecord) -> Chart:
    span, curves = record.span, [Curve("measured", record.rates, is_smooth=True)]
    if record.prediction is not None:
        curves.append(Curve("predicted", [(x, record.prediction.samples_per_s) for x in span], "prediction"))
    if record.limit_samples_per_s is not None:
        curves.append(Curve("limit", [(x, record.limit_samples_per_s) for x in span], "limit"))
    return Chart("rate", "Samples/s", curves, span, from_zero=True)


def resource_charts(record: RunRecord) -> list[Chart]:
    """Return a chart per resource, with a curve per device, including devices that left."""
    lines = [(line.step, line.by_id) for line in record.system]
    ids = [record.id_of(place) for place in range(len(device_names(record)))]
    ids += sorted({device for _, found in lines for values in found.values() for device in values} - set(ids))
    charts = []
    for name, (title, shown) in RESOURCES.items():
        curves = []
        for place, device in enumerate(ids):
            points = [(step, found[name][device]) for step, found in lines if device in found.get(name, ())]
            curves += [Curve(f"device {device}", points, colour(place))] if points else []
        if curves:
            charts.append(Chart(name, title, curves, record.span, shown=shown, from_zero=True))
    return charts


def share_chart(record: RunRecord) -> Chart:
    """Return a chart of each device's share of the arithmetic, by step."""
    points: dict[int, list[Point]] = {}
    ends = [each.step for each in record.plans[1:]] + [record.steps_done]
    for each, end in zip(record.plans, ends, strict=False):
        for device, part in enumerate(each.line.work):
            points.setdefault(device, []).extend([(min(each.step, end), part), (end, part)])
    curves = [Curve(f"device {record.id_of(device)}", found, colour(device)) for device, found in points.items()]
    return Chart("share", "Share of the arithmetic", curves, record.span, from_zero=True, shown="percent")


@dataclass(frozen=True, slots=True)
class Box:
    """A box in a bar: CSS classes, width (0 to 1), text, tooltip."""

    look: str
    part: float
    text: str
    title: str


def time_boxes(record: RunRecord, device: int) -> list[Box]:
    """Return the boxes of a device's time by activity; none if it was not measured."""
    return [
        Box(kind, part, f"{part:.0%}" if part >= MIN_TEXT_PART else "",
            f"device {record.id_of(device)}: {kind} {percent(part)}")
        for kind, part in zip(("computing", "exchange", "rest"), record.time_shares(device) or (), strict=False)
        if part > 0.0005
    ]  # fmt: skip


def bands(layers: Sequence[LayerEntry]) -> list[list[LayerEntry]]:
    """Group layers into rows: each row has a layer and the following layers with the same shares.

    Layers with arithmetic, traffic or a note get their own rows, unless that needs more than `MAX_ROWS`.
    """
    for joins_all in (False, True):
        result: list[list[LayerEntry]] = []
        for layer in layers:
            lead = result[-1][0] if result else None
            is_free = joins_all or not (layer.flop or layer.bytes)
            shares = layer.strategy, _fractions(layer)
            if lead is not None and is_free and not layer.note and shares == (lead.strategy, _fractions(lead)):
                result[-1].append(layer)
            else:
                result.append([layer])
        if len(result) <= MAX_ROWS:
            break
    return result


def layer_boxes(layer: LayerEntry, names: Sequence[str], ids: Sequence[int]) -> list[Box]:
    """Return a box for each device that has a share of the layer."""
    result = []
    for device, part in enumerate(_fractions(layer)):
        count, unit = layer.parts[device], UNITS.get(layer.strategy, layer.strategy)
        amount = unit if count == "all" else f"{count} {unit}, {percent(part)}"
        text = f"all on {ids[device]}" if layer.strategy == "one" else count
        look = colour(device) + " copy" * (layer.strategy == "copies")
        title = f"{layer.layer} on device {ids[device]} ({names[device]}): {amount}"
        result.append(Box(look, part, text if part >= MIN_TEXT_PART else "", title))
    return [box for box in result if box.part]


def work_boxes(work: Sequence[float], ids: Sequence[int]) -> list[Box]:
    return [
        Box(colour(place), part, percent(part) if part >= 2 * MIN_TEXT_PART else "",
            f"device {device}: {percent(part)} of the arithmetic")
        for place, (device, part) in enumerate(zip(ids, work, strict=False)) if part
    ]  # fmt: skip


def _fractions(layer: LayerEntry) -> list[float]:
    counts = [float(part) if part.isdigit() else float(part == "all") for part in layer.parts]
    return [round(count / (sum(counts) or 1.0), 4) for count in counts]


def colour(device: int) -> str:
    """Return the CSS classes of a device's colour."""
    return f"d{device % COLOURS}" + " again" * (device >= COLOURS)


def render(template: str, *, reload_s: int = 0, **values: Any) -> str:
    """Render a template. The page's content security policy allows only our script and no requests."""
    loader = PackageLoader("convoy.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    filters = {"plain": plain, "percent": percent, "seconds": seconds, "in_bytes": in_bytes, "colour": colour}
    environment.filters |= filters | {"number": "{:.7g}".format, "place": "{:.2%}".format}
    environment.globals |= {"kinds": timeline.KINDS, "lanes": timeline.LANES, "step_boxes": timeline.step_boxes}
    environment.globals |= {
        "bands": bands,
        "layer_boxes": layer_boxes,
        "work_boxes": work_boxes,
        "time_axis": time_axis,
    }
    script, _, _ = loader.get_source(environment, "page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        version=__version__, digest=digest, script=Markup(script), reload_s=reload_s, **values
    )
