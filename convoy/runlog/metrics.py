"""Numbers that follow from a run's log: seconds of a step, samples/s and their limit, smooth curves, utilization."""

import bisect
import statistics
from collections.abc import Sequence

from convoy.profile.energy import ABSENT
from convoy.runlog.reader import Record
from convoy.runlog.schema import EvaluationLine

LEAST_STEPS = 5
"""Steps after a change of shares before their median is reported."""


def measured_step_s(record: Record) -> float | None:
    """Median seconds of a step of a whole batch, with the last shares where enough steps had them."""
    batch = max((row.samples for row in record.steps), default=0)
    since = record.plans[-1].step if record.plans else 0
    timed = [
        (row.step, s)
        for row, s in zip(record.steps, record.seconds, strict=True)
        if s is not None and row.samples == batch
    ]
    late = [s for step, s in timed if step >= since]
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


def measured_joules_per_image(record: Record) -> float | None:
    """Of all devices together, tests included; None where one of them is not measured, or the log does not tell."""
    lines = [line for line in record.system if line.joules_by and line.samples]
    if not lines or any(by.startswith(ABSENT) for line in lines for by in line.joules_by):
        return None
    return sum(j for line in lines for j in line.joules if j is not None) / sum(line.samples for line in lines)


def best_evaluation(record: Record) -> EvaluationLine | None:
    """The first of the tests that found the highest accuracy; None where there was none."""
    known = [row for row in record.evaluations if row.accuracy is not None]
    return max(known, key=lambda row: row.accuracy or 0.0, default=None)


def time_of(record: Record, steps: int) -> float | None:
    """Seconds from the beginning of the run until so many steps were done; None where the log does not tell."""
    place = bisect.bisect_left(record.steps, steps - 1, key=lambda row: row.step)
    return record.times_s[place] if place < len(record.steps) else None


def utilization(record: Record, device: int, epoch: int | None = None) -> tuple[float, float, float] | None:
    """The parts of a device's time that it computed, exchanged and waited, did everything else; None where not known.

    Args:
        epoch: place in `record.utilization`; None: all epochs together.
    """
    rows = record.utilization if epoch is None else record.utilization[epoch : epoch + 1]
    wall_s = sum(row.wall_s[device] for row in rows)
    if wall_s <= 0:
        return None
    computes = min(1.0, sum(row.compute_s[device] for row in rows) / wall_s)
    exchanges = min(1.0 - computes, sum(row.exchange_s[device] for row in rows) / wall_s)
    return computes, exchanges, 1.0 - computes - exchanges


def step_range(record: Record) -> tuple[float, float]:
    """From the first step to the last: the horizontal axis of all curves."""
    return (record.steps[0].step, record.steps[-1].step + 1) if record.steps else (0, 1)


def smoothing_width(count: int) -> int:
    """Over how many steps a curve of so many is smoothed."""
    return max(1, min(201, count // 20 | 1))


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """The mean of each value and its neighbours, so many in all; fewer at the ends."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    result = []
    for place in range(len(values)):
        start, stop = max(0, place - width // 2), min(len(values), place + width // 2 + 1)
        result.append((sums[stop] - sums[start]) / (stop - start))
    return result


def rates(record: Record) -> list[tuple[float, float]]:
    """(step, samples/s), over a few neighbouring steps."""
    timed = [(row.step, row.samples, s) for row, s in zip(record.steps, record.seconds, strict=True) if s]
    width = smoothing_width(len(timed))
    samples = smoothed([float(count) for _, count, _ in timed], width)
    seconds = smoothed([s for _, _, s in timed], width)
    return [(step, n / s) for (step, _, _), n, s in zip(timed, samples, seconds, strict=True)]
