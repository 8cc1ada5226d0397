"""`convoy report`: one HTML page of a run, made from its log. It needs no network and runs no program."""

from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path

from convoy._version import __version__
from convoy.config.files import write_whole
from convoy.report.markup import Markup, joined, tag
from convoy.report.numbers import percent, plain, seconds
from convoy.report.page_curves import curves_section, rate_section
from convoy.report.page_devices import devices_section, shares_section, train_time
from convoy.report.page_parts import details, device_names, section, table
from convoy.report.page_plan import plan_section
from convoy.report.page_step import step_section
from convoy.runlog.metrics import limit_samples_per_s, measured_samples_per_s, measured_step_s
from convoy.runlog.reader import Record, log_of, read_log

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What a browser may do with the page: show it. No program, no network."""


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
    options = record.run.options
    title = f"{options.get('net', 'a net')} on {options.get('data', 'images')}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"{title} – Convoy"),
        tag("style", Markup(files("convoy.report").joinpath("page.css").read_text(encoding="utf-8"))),
    )
    body = tag(
        "body",
        tag("header", tag("h1", title), tag("p", _subtitle(record))),
        tag(
            "main", _numbers(record), curves_section(record), rate_section(record), plan_section(record),
            step_section(record), devices_section(record), shares_section(record), _settings(record), _versions(record),
        ),
        tag("footer", f"Written by Convoy {__version__} from {record.path.name}."),
    )  # fmt: skip
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _subtitle(record: Record) -> Markup:
    options, count = record.run.options, len(device_names(record))
    plan = record.plan.plan.name if record.plan is not None else str(options.get("plan", ""))
    on = f" on {count} device{'s' * (count != 1)}" if count else ""
    return joined(f"Plan {plan}{on}, begun {_moment(record.run.date)}. ", tag("span", _state(record), class_="state"))


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


def _numbers(record: Record) -> Markup:
    """The numbers that people look for first."""
    losses = [epoch.loss for epoch in record.epochs if epoch.loss is not None]
    tests = [row for row in record.evaluations if row.accuracy is not None]
    best = max(tests, key=lambda row: row.accuracy or 0.0, default=None)
    step_s, rate, limit = measured_step_s(record), measured_samples_per_s(record), limit_samples_per_s(record)
    predicted = record.prediction
    cards = [
        ("Test accuracy", percent(tests[-1].accuracy if tests else None),
         f"best {percent(best.accuracy)} after step {best.step:,}" if best else "not tested yet"),
        ("Training loss", plain(losses[-1] if losses else None, 3),
         "mean of the last epoch" if losses else "no whole epoch yet"),
        ("Samples/s", plain(rate), f"{seconds(step_s)} a step, median"),
        ("Predicted samples/s", plain(predicted.samples_per_s if predicted else None),
         f"{seconds(predicted.step_s)} a step{_off(predicted.step_s, step_s)}" if predicted
         else "only --plan auto predicts"),
        ("Limit", plain(limit),
         "samples/s, the devices' own speeds added up" if limit else "the devices' speeds were not measured"),
        ("Of the limit", percent(rate / limit if rate and limit else None), "what the devices reach together"),
        ("Training", train_time(record), f"{len(record.epochs)} epochs, {len(record.steps):,} steps"),
    ]  # fmt: skip
    return section("numbers", "In short", tag("div", *(_card(*row) for row in cards), class_="cards"))


def _off(predicted_s: float, measured_s: float | None) -> str:
    """How far the prediction is from what was measured."""
    return f", {predicted_s / measured_s - 1:+.1%} off" if measured_s else ""


def _card(name: str, value: str, note: str) -> Markup:
    return tag("div", tag("div", name, class_="name"), tag("div", value, class_="value"), tag("div", note, class_="about"),
               class_="card")  # fmt: skip


def _settings(record: Record) -> Markup:
    sources = record.run.sources
    rows = [
        (name.removesuffix("_s").replace("_", "-"), _value(value), sources.get(name, ""))
        for name, value in record.run.options.items()
    ]
    changed = [row for row in rows if row[2] not in ("default", "")]
    lead = "All others have their defaults." if changed else "All settings have their defaults."
    head = ("setting", "value", "from")
    return section(
        "settings", "Settings", table(head, changed, words=3) if changed else None, tag("p", lead),
        details("All settings in force", table(head, rows, words=3)),
    )  # fmt: skip


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


def _versions(record: Record) -> Markup:
    run = record.run
    rows: list[Sequence[str]] = [
        ("convoy", run.convoy), ("torch", run.torch), ("python", run.python), ("system", run.system), ("machine", run.machine),
        *((f"device {device}", name) for device, name in enumerate(device_names(record))),
    ]  # fmt: skip
    return section("versions", "Versions and devices", table(("what", "which"), rows, words=2))
