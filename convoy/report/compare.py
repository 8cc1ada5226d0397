"""`convoy report RUN1 RUN2 ...`: several runs on one page."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from convoy.errors import InputError
from convoy.files import write_whole
from convoy.report.chart import Chart, Curve, Point
from convoy.report.numbers import percent, plain, seconds
from convoy.report.page import device_names, render, settings_of, shown_plans, state_of, title_of
from convoy.runlog.reader import LOG_NAME, Record, log_of, read_log

LETTERS = "ABCDEFGH"
"""Names of the runs on the page, one per colour of the style sheet."""

TIME_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def write_comparison(runs: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page of several runs, folders or logs, and return its path.

    Args:
        output: default: comparison.html in the current folder.

    Raises:
        InputError: too many runs, no log, or the page cannot be written.
    """
    target = output or Path("comparison.html")
    write_whole(target, comparison_of([read_log(log_of(run)) for run in runs]))
    return target


def comparison_of(records: Sequence[Record]) -> str:
    if len(records) > len(LETTERS):
        raise InputError(f"{len(records)} runs on one page: at most {len(LETTERS)} can be told apart; leave some out")
    paths = [record.path.absolute() for record in records]
    names = [path.parent.name if path.name == LOG_NAME else path.stem for path in paths]
    return render(
        "compare.html", title=f"{len(records)} runs", letters=list(LETTERS[: len(records)]),
        runs=[(name, title_of(record), state_of(record)) for name, record in zip(names, records, strict=True)],
        measures=_measures(records), curves=list(_curves(records)), differences=_differences(records),
        plans=[(device_names(record), shown_plans(record)[-1:]) for record in records],
    )  # fmt: skip


def _measures(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return a row for each measure, with a column for each run."""
    best = [None if record.best_test is None else record.best_test[1] for record in records]
    reached = [accuracy for accuracy in best if accuracy is not None]
    aim = min(reached) if len(reached) == len(best) else None  # the highest accuracy that all runs reached

    def predicted(record: Record) -> str:
        error = "" if record.prediction_error is None else f" ({record.prediction_error:+.1%})"
        return seconds(record.prediction.step_s if record.prediction else None) + error

    def time_to_aim(record: Record) -> float | None:
        steps = [step for step, accuracy in record.tests if aim is not None and accuracy >= aim]
        return record.time_of(steps[0]) if steps else None

    columns: list[tuple[str, Callable[[Record], str]]] = [
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


def _curves(records: Sequence[Record]) -> Iterator[Chart]:
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
                from_zero=name == "rate",
            )  # fmt: skip


def _differences(records: Sequence[Record]) -> list[tuple[str, ...]]:
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
