"""How the training went: loss, accuracy, learning rate, and samples/s beside what was predicted and what is possible."""

from convoy.report.chart import Chart, Curve, Level, draw
from convoy.report.markup import Markup, tag
from convoy.report.numbers import percent, plain, whole_percent
from convoy.report.page_parts import details, missing, section, table
from convoy.runlog.metrics import limit_samples_per_s, rates, smooth_losses, smoothing_width, step_range
from convoy.runlog.reader import Record


def curves_section(record: Record) -> Markup:
    raw = [(row.step, row.loss) for row in record.steps if row.loss is not None]
    lost = len(record.steps) - len(raw)
    width = smoothing_width(len(raw))
    loss = Chart(
        "loss", "Training loss", "step",
        [Curve("each step", raw, "faint"), Curve(f"mean of {width} steps", smooth_losses(record))] if width > 1
        else [Curve("each step", raw, dots=True)], step_range(record),
    )  # fmt: skip
    tests = [(row.step, row.accuracy) for row in record.evaluations if row.accuracy is not None]
    right = Chart(
        "accuracy",
        "Test accuracy",
        "step",
        [Curve("accuracy", tests, dots=True)],
        step_range(record),
        shown=whole_percent,
    )
    told = [(row.step, row.lr) for row in record.steps if row.lr is not None]
    lr = Chart("lr", "Learning rate", "step", [Curve("learning rate", told)], step_range(record), from_zero=True)
    warning = tag("p", f"The loss was no finite number in {lost:,} steps.", class_="warning") if lost else None
    return section(
        "curves", "How the training went", warning, tag("div", *map(draw, (loss, right, lr)), class_="charts"),
        details("Epoch by epoch", _epochs(record)) if record.epochs else None,
    )  # fmt: skip


def rate_section(record: Record) -> Markup:
    """Throughput; a run without a prediction says so."""
    limit, predicted = limit_samples_per_s(record), record.prediction
    levels = []
    if predicted is not None:
        levels.append(Level("predicted", predicted.samples_per_s, "prediction"))
    if limit is not None:
        levels.append(Level("limit", limit, "limit"))
    marks = [line.step + 1 for line in record.reshares]
    chart = Chart(
        "rate",
        "Samples/s",
        "step",
        [Curve("measured", rates(record))],
        step_range(record),
        levels,
        marks,
        from_zero=True,
    )
    changed = " Numbered lines: the shares changed, see the history of shares." if marks else ""
    words = (
        "The limit is the sum of what the devices reach alone, each with the whole batch."
        if limit is not None
        else "The speeds of the devices alone were not measured, so there is no limit to compare with."
    )
    lead = words + changed
    none = None
    if predicted is None:
        plan = f"Plan {record.plan.plan.name} was given" if record.plan is not None else "The log tells no plan"
        none = missing(
            f"{plan}, so nothing was predicted: ", tag("code", "--plan auto"), " measures the devices and predicts."
        )
    elif predicted.bound:
        lead += f" The prediction is bound by {predicted.bound}."
    return section("rate", "How fast it was", tag("p", lead), none, draw(chart))


def _epochs(record: Record) -> Markup:
    head = ("epoch", "loss", "test accuracy", "samples/s", "seconds", "learning rate")
    rows = [
        (
            str(row.epoch + 1), plain(row.loss), percent(row.accuracy), plain(row.samples_per_s), plain(row.train_s, 3),
            plain(row.lr),
        )
        for row in record.epochs
    ]  # fmt: skip
    return table(head, rows)
