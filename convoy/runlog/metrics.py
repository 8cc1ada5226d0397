"""Numbers that follow from a run's log: pace, limit."""

import statistics

from convoy.report.numbers import smoothed
from convoy.runlog.reader import Record

LEAST_STEPS = 5
"""So few steps after a change of shares tell no pace of their own."""


def measured_step_s(record: Record) -> float | None:
    """Median seconds of a step of a whole batch, with the last shares where enough steps had them."""
    batch = max((row.samples for row in record.steps), default=0)
    since = record.reshares[-1].step if record.reshares else -1
    timed = [
        (row.step, s)
        for row, s in zip(record.steps, record.seconds, strict=True)
        if s is not None and row.samples == batch
    ]
    late = [s for step, s in timed if step > since]
    chosen = late if len(late) >= LEAST_STEPS else [s for _, s in timed]
    return statistics.median(chosen) if chosen else None


def measured_samples_per_s(record: Record) -> float | None:
    step_s = measured_step_s(record)
    return max(row.samples for row in record.steps) / step_s if step_s else None


def limit_samples_per_s(record: Record) -> float | None:
    """The sum of the devices' speeds, each alone; None where they were not measured."""
    if record.fleet is None:
        return None
    speeds = [row.samples_per_s for row in record.fleet.devices]
    return sum(speed for speed in speeds if speed is not None) if None not in speeds else None


def span_of(record: Record) -> tuple[float, float]:
    """From the first step to the last: the horizontal axis of all curves."""
    return (record.steps[0].step, record.steps[-1].step + 1) if record.steps else (0, 1)


def width_of(count: int) -> int:
    """Over how many steps a curve of so many is smoothed."""
    return max(1, min(201, count // 20 | 1))


def rates(record: Record) -> list[tuple[float, float]]:
    """(step, samples/s), over a few neighbouring steps."""
    timed = [(row.step, row.samples, s) for row, s in zip(record.steps, record.seconds, strict=True) if s]
    width = width_of(len(timed))
    samples = smoothed([float(count) for _, count, _ in timed], width)
    seconds = smoothed([s for _, _, s in timed], width)
    return [(step, n / s) for (step, _, _), n, s in zip(timed, samples, seconds, strict=True)]


def smooth_losses(record: Record) -> list[tuple[float, float]]:
    """(step, loss), the mean over neighbouring steps."""
    told = [(row.step, row.loss) for row in record.steps if row.loss is not None]
    return list(zip([step for step, _ in told], smoothed([loss for _, loss in told], width_of(len(told))), strict=True))
