"""Writes an HTML page of one run or several, from their logs. The page needs only a browser, and no network."""

import base64
import hashlib
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from convoy._version import __version__
from convoy.errors import InputError
from convoy.files import write_whole
from convoy.measure.energy_meter import ABSENT
from convoy.report import timeline
from convoy.report.chart import Chart, Curve, Level, Point
from convoy.report.numbers import in_bytes, percent, plain, seconds
from convoy.runlog.reader import LOG_NAME, InForce, RunRecord, log_of, read_log
from convoy.runlog.schema import LayerEntry, PlanLine, PredictionLine, ReshardLine
from convoy.simulate.interval import around
from convoy.train.record import EpochResult, Observer

MAX_PLANS = 12
"""Maximum number of successive plans to draw."""

MAX_ROWS = 20
"""Maximum rows of a plan; a longer one is drawn as segments of layers with the same shares, and its rows are folded."""

MIN_TEXT_PART = 0.07
"""Narrower boxes have only a tooltip."""

COLOURS = 8
"""Further devices have the same colours, hatched."""

LETTERS = "ABCDEFGH"
"""Names of compared runs, one per colour of the style sheet."""

TIME_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))

RELOAD_S = 5

MAX_WRITING = 0.05
"""Maximum fraction of a training's time for writing its page."""

SYSTEM = {
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
    "copies": "the whole layer on every device",
    "one": "on one device",
}


def write_report(run: Path, output: Path | None = None, *, reload_s: int = 0) -> Path:
    """Write the page of a run and return its path.

    Args:
        run: the folder of a run, or its log.
        output: default: report.html in the folder; for a log, a file of its name that ends in .html.
        reload_s: seconds until a browser loads the page again; 0: never.

    Raises:
        InputError: there is no log, it is not one, or the page cannot be written.
    """
    log = log_of(run)
    target = output or (run / "report.html" if os.path.isdir(run) else log.with_suffix(".html"))
    write_whole(target, page_of(read_log(log), reload_s))
    return target


def write_comparison(runs: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page of several runs, folders or logs; default: comparison.html here. Return its path."""
    target = output or Path("comparison.html")
    write_whole(target, comparison_of([read_log(log_of(run)) for run in runs]))
    return target


class LivePage(Observer):
    """An observer that writes the page of a run after every epoch, so that a browser can follow the run.

    Epochs are skipped while writing would take more than `MAX_WRITING` of the time. A page that cannot be written is
    reported once; training continues.
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
    places = range(len(names))
    ids = [record.id_of(place) for place in places]
    numbered, begun = [f"device {device}" for device in ids], record.run.date.replace("T", " ")
    time_shares = [
        [line.epoch + 1, line.steps, *(percent(s and s[0]) for s in (record.time_shares(d, n) for d in places))]
        for n, line in enumerate(record.utilization)
    ]
    try:
        return render(
            "page.html", reload_s=reload_s, record=record, names=names, title=title_of(record), begun=begun,
            state=state_of(record), cards=_cards(record), curves=_curves(record), rate=_rate(record),
            plans=shown_plans(record), bars=[_bar(record, place) for place in places],
            time_shares=time_shares if any(record.time_shares(place) for place in places) else [],
            ids=ids, numbered=numbered, devices=list(zip(numbered, names, strict=True)), system=system_charts(record),
            shares=_shares(record), settings=settings_of(record)
        )  # fmt: skip
    except (IndexError, OverflowError, ValueError) as error:
        raise InputError(
            f"the lines of {record.path} do not fit together ({error}): give the log as it was written"
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
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cards(record: RunRecord) -> list[tuple[str, str, str]]:
    """Return name, value and note of the most important numbers."""
    losses = [epoch.loss for epoch in record.epochs if epoch.loss is not None]
    best, predicted, limit = record.best_test, record.prediction, record.limit_samples_per_s
    error, train_s = record.prediction_error, sum(line.train_s for line in record.epochs)
    within = around(predicted.step_s, predicted.spread) if predicted and predicted.spread > 1 else None
    interval = "" if within is None else f" (nine of ten: {seconds(within.low)} - {seconds(within.high)})"
    cards = [
        ("Test accuracy", percent(record.tests[-1][1] if best else None),
         f"best {percent(best[1])} after step {best[0]:,}" if best else "not evaluated yet"),
        ("Training loss", plain(losses[-1] if losses else None, 3),
         "mean of the last epoch" if losses else "no complete epoch yet"),
        ("Samples/s", plain(record.samples_per_s), f"{seconds(record.step_s)} a step, median"),
        ("Predicted samples/s", plain(predicted.samples_per_s if predicted else None),
         f"{seconds(predicted.step_s)} a step{interval}" + (f", {error:+.1%} off" if error is not None else "")
         if predicted else "only --plan auto predicts"),
        ("Limit", plain(limit), "samples/s, the sum of solo throughputs" if limit else "solo speeds were not measured"),
        ("Efficiency", percent(record.efficiency), "samples/s divided by the limit"),
        ("Training", seconds(train_s or None), f"{len(record.epochs)} epochs, {len(record.steps):,} steps"),
    ]  # fmt: skip
    sources = {by for line in record.system for by in line.joules_by}
    if sources:
        expected = predicted and predicted.joules_per_image
        compared = f"{plain(expected)} predicted" if expected else "no prediction: the fleet has no watts"
        absent = [by for by in sources if by.startswith(ABSENT)]
        by = absent[0] if absent else "; ".join(sorted(by for by in sources if not by.startswith("counted")))
        cards.append(("Joules/image", plain(record.joules_per_image), f"measured: {by}; {compared}"))
    return cards


def _span(record: RunRecord) -> tuple[float, float]:
    return (record.steps[0].step, record.steps[-1].step + 1) if record.steps else (0, 1)


def _curves(record: RunRecord) -> list[Chart]:
    lr = [(row.step, row.lr) for row in record.steps if row.lr is not None]
    losses = Curve("training loss", record.losses, is_smooth=True)
    tests = Curve("accuracy", record.tests, dots=True)
    return [
        Chart("loss", "Training loss", "step", [losses], _span(record)),
        Chart("accuracy", "Test accuracy", "step", [tests], _span(record), shown="percent"),
        Chart("lr", "Learning rate", "step", [Curve("learning rate", lr)], _span(record), from_zero=True),
    ]


def _rate(record: RunRecord) -> Chart:
    limit, predicted = record.limit_samples_per_s, record.prediction
    levels = [Level("predicted", predicted.samples_per_s, "prediction")] if predicted is not None else []
    levels += [Level("limit", limit, "limit")] if limit is not None else []
    marks = [line.step + 1 for line in record.reshards]
    measured = Curve("measured", record.rates())
    return Chart("rate", "Samples/s", "step", [measured], _span(record), levels, marks, from_zero=True)


def system_charts(record: RunRecord) -> list[Chart]:
    """Return a chart per resource, with a curve per device, including devices that left."""
    lines = [(line.step, line.by_id) for line in record.system]
    ids = [record.id_of(place) for place in range(len(device_names(record)))]
    ids += sorted({device for _, found in lines for values in found.values() for device in values} - set(ids))
    charts = []
    for name, (title, shown) in SYSTEM.items():
        points = {
            device: [(step, found[name][device]) for step, found in lines if device in found.get(name, ())]
            for device in ids
        }
        curves = [Curve(f"device {d}", points[d], colour(place)) for place, d in enumerate(ids) if points[d]]
        if curves:
            charts.append(Chart(name, title, "step", curves, _span(record), shown=shown, from_zero=True))
    return charts


def _shares(record: RunRecord) -> Chart:
    """Return the chart of each device's share of the arithmetic over the steps."""
    points: dict[int, list[tuple[float, float]]] = {}
    end = record.steps_done
    for each, until in _spans(record):
        for device, part in enumerate(each.line.work):
            points.setdefault(device, []).extend([(min(each.step, end), part), (end if until is None else until, part)])
    curves = [Curve(f"device {record.id_of(device)}", found, colour(device)) for device, found in points.items()]
    marks = [line.step + 1 for line in record.reshards]
    title = "Share of the arithmetic"
    return Chart("share", title, "step", curves, _span(record), (), marks, from_zero=True, shown="percent")


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a bar: CSS classes, width (0 to 1), text, tooltip."""

    look: str
    part: float
    text: str
    title: str


def _bar(record: RunRecord, device: int) -> tuple[list[Box], str]:
    """Return the boxes of a device's time by activity, and other facts about it."""
    parts = zip(("computing", "exchange", "rest"), record.time_shares(device) or (0.0, 0.0, 1.0), strict=True)
    boxes = [
        Box(kind, part, f"{part:.0%}" if part >= 0.08 else "", f"device {record.id_of(device)}: {kind} {percent(part)}")
        for kind, part in parts
        if part > 0.0005
    ]
    facts = []
    speed = record.fleet.devices[device].samples_per_s if record.fleet is not None else None
    if speed is not None:
        facts.append(f"{plain(speed)} samples/s solo")
    if record.plans and record.plans[-1].line.work:
        facts.append(f"{percent(record.plans[-1].line.work[device])} of the arithmetic")
    return boxes, ", ".join(facts)


# --- the plan as a picture: rows of layers in data flow order, each with a box per device -------------------------------------


@dataclass(frozen=True, slots=True)
class Band:
    """A row of the picture: a layer, and the following layers that need no communication in between."""

    lead: LayerEntry
    others: tuple[LayerEntry, ...] = ()

    @property
    def sum_bytes(self) -> int:
        return sum(layer.sum_bytes for layer in (self.lead, *self.others))

    @property
    def then(self) -> str:
        """Name the layers after the first."""
        if any(layer.flop for layer in self.others):
            return f"and {len(self.others)} more, up to {self.others[-1].kind} {self.others[-1].layer}"
        return f"then {', '.join(layer.kind for layer in self.others)}" if self.others else ""

    def boxes(self, names: Sequence[str], ids: Sequence[int]) -> list[Box]:
        """Return a box for each device that has a share."""
        lead, result = self.lead, []
        for device, part in enumerate(_parts(lead)):
            count, unit = lead.parts[device], UNITS.get(lead.strategy, lead.strategy)
            amount = unit if count == "all" else f"{count} {unit}, {percent(part)}"
            text = f"all on {ids[device]}" if lead.strategy == "one" else count
            look = colour(device) + " copy" * (lead.strategy == "copies")
            title = f"{lead.layer} on device {ids[device]} ({names[device]}): {amount}"
            result.append(Box(look, part, text if part >= MIN_TEXT_PART else "", title))
        return [box for box in result if box.part]


def bands(layers: Sequence[LayerEntry], *, segments: bool = False) -> list[Band]:
    """Return the rows of the picture.

    Args:
        segments: also join layers with arithmetic or all-reduces, if they have the same shares.
    """
    result: list[Band] = []
    for layer in layers:
        lead = result[-1].lead if result else None
        free = not (layer.moves or layer.note) and (segments or not (layer.flop or layer.sum_bytes))
        if lead is not None and free and (layer.strategy, _parts(layer)) == (lead.strategy, _parts(lead)):
            result[-1] = Band(lead, (*result[-1].others, layer))
        else:
            result.append(Band(layer))
    return result


def _parts(layer: LayerEntry) -> list[float]:
    """Return the widths of the boxes, one per device."""
    counts = [float(part) if part.isdigit() else float(part == "all") for part in layer.parts]
    return [round(count / (sum(counts) or 1.0), 4) for count in counts]


def colour(device: int) -> str:
    """Return the CSS classes of a device's colour."""
    return f"d{device % COLOURS}" + " again" * (device >= COLOURS)


@dataclass(frozen=True, slots=True)
class ShownPlan:
    """A plan to draw: its steps and reason as text, its log line and prediction, the ids of its devices."""

    when: str
    why: str
    line: PlanLine | ReshardLine
    prediction: PredictionLine | None
    ids: Sequence[int]

    @property
    def idle(self) -> list[str]:
        return [str(device) for device, part in zip(self.ids, self.line.work, strict=False) if not part]

    @property
    def work(self) -> list[Box]:
        parts = zip(self.ids, self.line.work, strict=False)
        return [
            Box(colour(place), part, percent(part) if part >= 2 * MIN_TEXT_PART else "",
                f"device {device}: {percent(part)} of the arithmetic")
            for place, (device, part) in enumerate(parts) if part
        ]  # fmt: skip


def shown_plans(record: RunRecord) -> list[ShownPlan]:
    """Return the plans in order; if there are too many, the first and the latest."""
    known = [
        ShownPlan(
            f"from step {each.step:,} on" if until is None else f"steps {each.step:,} to {until - 1:,}",
            each.line.reason if isinstance(each.line, ReshardLine) else "as the run began", each.line, each.prediction,
            [record.id_of(place) for place in range(len(each.line.layers[0].parts))]
        )
        for each, until in _spans(record) if each.line.layers
    ]  # fmt: skip
    return known if len(known) <= MAX_PLANS else [known[0], *known[1 - MAX_PLANS :]]


def _spans(record: RunRecord) -> list[tuple[InForce, int | None]]:
    """Return each plan with the step that replaced it. If two plans begin at one step, the first never ran."""
    stops: list[int | None] = [each.step for each in record.plans]
    pairs = zip(record.plans, [*stops[1:], None], strict=False)
    return [(each, until) for each, until in pairs if until is None or until > each.step]


# --- several runs on one page -------------------------------------------------------------------------------------------------


def comparison_of(records: Sequence[RunRecord]) -> str:
    if len(records) > len(LETTERS):
        raise InputError(f"{len(records)} runs on one page: at most {len(LETTERS)} have colours; leave some out")
    paths = [record.path.absolute() for record in records]
    names = [path.parent.name if path.name == LOG_NAME else path.stem for path in paths]
    return render(
        "compare.html", title=f"{len(records)} runs", letters=list(LETTERS[: len(records)]),
        runs=[(name, title_of(record), state_of(record)) for name, record in zip(names, records, strict=True)],
        measures=_measures(records), curves=list(_curves_of_all(records)), differences=_differences(records),
        plans=[(device_names(record), shown_plans(record)[-1:]) for record in records]
    )  # fmt: skip


def _measures(records: Sequence[RunRecord]) -> list[tuple[str, ...]]:
    """Return a row for each measure, with a column for each run."""
    best = [None if record.best_test is None else record.best_test[1] for record in records]
    reached = [accuracy for accuracy in best if accuracy is not None]
    aim = min(reached) if len(reached) == len(best) else None  # the highest accuracy that all runs reached

    def predicted(record: RunRecord) -> str:
        error = "" if record.prediction_error is None else f" ({record.prediction_error:+.1%})"
        return seconds(record.prediction.step_s if record.prediction else None) + error

    def time_to_aim(record: RunRecord) -> float | None:
        steps = [step for step, accuracy in record.tests if aim is not None and accuracy >= aim]
        return record.time_of(steps[0]) if steps else None

    columns: list[tuple[str, Callable[[RunRecord], str]]] = [
        ("plan", lambda run: "–" if run.plan is None else run.plan.plan.name),
        ("devices", lambda run: str(len(device_names(run)) or "–")),
        ("seconds of a step, median", lambda run: seconds(run.step_s)),
        ("samples/s", lambda run: plain(run.samples_per_s)),
        ("limit: sum of solo throughputs", lambda run: plain(run.limit_samples_per_s)),
        ("efficiency: samples/s divided by the limit", lambda run: percent(run.efficiency)),
        ("predicted seconds of a step", predicted),
        ("training loss, last epoch", lambda run: plain(run.epochs[-1].loss if run.epochs else None, 3)),
        ("best test accuracy", lambda run: percent(run.best_test and run.best_test[1])),
        (f"time to {percent(aim)} test accuracy", lambda run: seconds(time_to_aim(run))),
        ("time so far", lambda run: seconds(run.times_s[-1] if run.times_s else None)),
        ("steps so far", lambda run: f"{run.steps_done:,}"),
        ("changes of shares", lambda run: f"{len(run.reshards):,}"),
    ]
    return [(name, *(shown(record) for record in records)) for name, shown in columns]


def _curves_of_all(records: Sequence[RunRecord]) -> Iterator[Chart]:
    """Yield each kind of curve over steps, and over time."""
    longest_s = max((record.times_s[-1] for record in records if record.times_s), default=0.0)
    unit, unit_s = next((each for each in TIME_UNITS if longest_s >= 2 * each[1]), TIME_UNITS[-1])
    kinds: list[tuple[str, str, str, list[Sequence[tuple[int, float]]]]] = [
        ("loss", "Training loss", "plain", [[(step + 1, loss) for step, loss in run.losses] for run in records]),
        ("accuracy", "Test accuracy", "percent", [run.tests for run in records]),
        ("rate", "Samples/s", "plain", [[(step + 1, rate) for step, rate in run.rates()] for run in records]),
    ]
    for name, title, shown, over_steps in kinds:
        over_time: list[Sequence[Point]] = [
            [(time_s / unit_s, y) for steps, y in points if (time_s := record.time_of(steps)) is not None]
            for record, points in zip(records, over_steps, strict=True)
        ]
        for over, x_label, drawn in (("steps", "step", over_steps), ("time", unit, over_time)):
            curves = [
                Curve(LETTERS[place], points, f"r{place}", dots=name == "accuracy", is_smooth=name != "accuracy")
                for place, points in enumerate(drawn)
                if points
            ]
            xs = [x for curve in curves for x, _ in curve.points] or [0.0]
            yield Chart(
                f"{name}-{over}", f"{title} over {over}", x_label, curves, (min(xs), max(xs)), shown=shown,
                from_zero=name == "rate"
            )  # fmt: skip


def _differences(records: Sequence[RunRecord]) -> list[tuple[str, ...]]:
    """Return the settings, versions and devices that are not the same in all runs."""
    tables = []
    for record in records:
        run = record.run
        about = {"convoy": run.convoy, "torch": run.torch, "python": run.python, "system": run.system}
        devices = {f"device {record.id_of(place)}": name for place, name in enumerate(device_names(record))}
        tables.append({name: value for name, value, _ in settings_of(record)} | devices | about)
    rows = [
        (name, *(table.get(name, "–") for table in tables))
        for name in dict.fromkeys(name for table in tables for name in table)
    ]
    return [row for row in rows if len(set(row[1:])) > 1]


# --- templates ----------------------------------------------------------------------------------------------------------------


def render(template: str, *, reload_s: int = 0, **values: Any) -> str:
    """Render a template. The page's content security policy allows only our script and no requests."""
    loader = PackageLoader("convoy.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    filters = {"plain": plain, "percent": percent, "seconds": seconds, "in_bytes": in_bytes, "colour": colour}
    environment.filters |= filters | {"number": "{:.7g}".format, "place": "{:.2%}".format}
    environment.globals |= {"kinds": timeline.KINDS, "lanes": timeline.LANES, "tracks": timeline.tracks}
    environment.globals |= {"bands": bands, "max_rows": MAX_ROWS, "time_axis": timeline.time_axis}
    script, _, _ = loader.get_source(environment, "page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        version=__version__, digest=digest, script=Markup(script), reload_s=reload_s, **values
    )
