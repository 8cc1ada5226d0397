"""`convoy report RUN1 RUN2 ...`: several runs beside each other: curves, what differs, what they reached, their plans."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from convoy.errors import InputError
from convoy.files import write_whole
from convoy.report.chart import Chart, Curve, Drawing, Point, draw
from convoy.report.numbers import percent, plain, seconds
from convoy.report.page import device_names, render, settings_of, shown_plans, state_of, title_of
from convoy.runlog.metrics import (
    best_evaluation,
    limit_samples_per_s,
    measured_samples_per_s,
    measured_step_s,
    rates,
    time_of,
)
from convoy.runlog.reader import LOG_NAME, Record, log_of, read_log

OUTPUT = Path("comparison.html")

LETTERS = "ABCDEFGH"
"""Names of the runs on the page; there are as many colours."""

UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))

Row = tuple[str, ...]


def write_comparison(runs: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page of several runs; where it was written.

    Args:
        runs: folders of runs, or their logs.
        output: default: `OUTPUT`, in the current folder.

    Raises:
        InputError: more runs than colours, no log, or the page cannot be written.
    """
    target = output or OUTPUT
    write_whole(target, comparison_of([read_log(log_of(run)) for run in runs]))
    return target


def comparison_of(records: Sequence[Record], served: str = "") -> str:
    """The whole page as text; `served` as for `render`."""
    if len(records) > len(LETTERS):
        raise InputError(f"{len(records)} runs on one page: at most {len(LETTERS)} can be told apart; leave some out")
    return render(
        "compare.html", served, title=f"{len(records)} runs",
        runs=[(_name(record), title_of(record), state_of(record)) for record in records],
        letters=list(LETTERS[: len(records)]), measures=_measures(records), curves=_curves(records),
        differences=_differences(records),
        plans=[(device_names(record), shown_plans(record)[-1:]) for record in records],
    )  # fmt: skip


def _name(record: Record) -> str:
    path = record.path.absolute()
    return path.parent.name if path.name == LOG_NAME else path.stem


def _measures(records: Sequence[Record]) -> list[Row]:
    """What they reached: a row for each measure, a column for each run."""
    aim = _common_accuracy(records)
    columns: list[tuple[str, Callable[[Record], str]]] = [
        ("plan", lambda record: "–" if record.plan is None else record.plan.plan.name),
        ("devices", lambda record: str(len(device_names(record)) or "–")),
        ("seconds of a step, median", lambda record: seconds(measured_step_s(record))),
        ("samples/s", lambda record: plain(measured_samples_per_s(record))),
        ("limit: the devices' own speeds added up", lambda record: plain(limit_samples_per_s(record))),
        ("efficiency: samples/s of the limit", _efficiency),
        ("predicted seconds of a step", _predicted),
        ("training loss, last epoch", lambda record: plain(record.epochs[-1].loss if record.epochs else None, 3)),
        ("best test accuracy", lambda record: percent(best.accuracy if (best := best_evaluation(record)) else None)),
        (f"time to {percent(aim)} test accuracy", lambda record: seconds(_time_to(record, aim))),
        ("time so far", lambda record: seconds(record.times_s[-1] if record.times_s else None)),
        ("steps so far", lambda record: f"{record.steps_done:,}"),
        ("changes of shares", lambda record: f"{len(record.reshares):,}"),
    ]
    return [(name, *(shown(record) for record in records)) for name, shown in columns]


def _efficiency(record: Record) -> str:
    rate, limit = measured_samples_per_s(record), limit_samples_per_s(record)
    return percent(rate / limit if rate and limit else None)


def _predicted(record: Record) -> str:
    step_s, predicted = measured_step_s(record), record.prediction
    if predicted is None:
        return "–"
    off = f" ({predicted.step_s / step_s - 1:+.1%})" if step_s else ""
    return seconds(predicted.step_s) + off


def _common_accuracy(records: Sequence[Record]) -> float | None:
    """The highest test accuracy that all of them reached; None where one was not tested."""
    best = [found.accuracy if (found := best_evaluation(record)) else None for record in records]
    known = [each for each in best if each is not None]
    return min(known) if len(known) == len(best) else None


def _time_to(record: Record, accuracy: float | None) -> float | None:
    """Seconds until a test first found so much."""
    if accuracy is None:
        return None
    reached = [row for row in record.evaluations if row.accuracy is not None and row.accuracy >= accuracy]
    return time_of(record, reached[0].step) if reached else None


def _curves(records: Sequence[Record]) -> list[Drawing]:
    """Each kind over steps and beside it over time."""
    longest_s = max((record.times_s[-1] for record in records if record.times_s), default=0.0)
    unit, unit_s = next((each for each in UNITS if longest_s >= 2 * each[1]), UNITS[-1])
    drawings = []
    for name, (title, shown, points_of) in KINDS.items():
        tables = [points_of(record) for record in records]
        timed = [
            [(x_s / unit_s, y) for steps, y in points if (x_s := time_of(record, int(steps))) is not None]
            for record, points in zip(records, tables, strict=True)
        ]
        for over, x_label, drawn in (("steps", "step", tables), ("time", unit, timed)):
            curves = [
                Curve(LETTERS[place], points, f"r{place}", dots=name == "accuracy", is_smooth=name != "accuracy")
                for place, points in enumerate(drawn)
                if points
            ]
            xs = [x for curve in curves for x, _ in curve.points] or [0.0]
            drawings.append(
                draw(
                    Chart(
                        f"{name}-{over}", f"{title} over {over}", x_label, curves, (min(xs), max(xs)), shown=shown,
                        from_zero=name == "rate",
                    )
                )
            )  # fmt: skip
    return drawings


KINDS: Mapping[str, tuple[str, str, Callable[[Record], Sequence[Point]]]] = {
    "loss": ("Training loss", "plain", lambda run: [(r.step + 1, r.loss) for r in run.steps if r.loss is not None]),
    "accuracy": (
        "Test accuracy",
        "percent",
        lambda run: [(r.step, r.accuracy) for r in run.evaluations if r.accuracy is not None],
    ),
    "rate": ("Samples/s", "plain", lambda run: [(step + 1, rate) for step, rate in rates(run)]),
}
"""Of the curves: title, how their values are written, and their points: after so many steps, what."""


def _differences(records: Sequence[Record]) -> list[Row]:
    """Settings, versions and devices that are not the same in all runs."""
    tables = []
    for record in records:
        run = record.run
        about = {"convoy": run.convoy, "torch": run.torch, "python": run.python, "system": run.system}
        devices = {f"device {record.id_of(place)}": name for place, name in enumerate(device_names(record))}
        tables.append({name: value for name, value, _ in settings_of(record)} | devices | about)
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [(name, *(table.get(name, "–") for table in tables)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]
