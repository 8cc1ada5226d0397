"""Shares by time: the slowest device is done as early as possible, where time is not proportional to the share."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from convoy.sharding.shares import Shares, apportion

Seconds = npt.NDArray[np.float64]


def balance(
    total: int,
    devices: int,
    active: Sequence[int],
    seconds: Callable[[int, int], float],
    quantum: int = 1,
    at_most: Sequence[int] | None = None,
) -> Shares:
    """Shares of an axis so that the slowest of `active` is done as early as possible.

    `seconds(device, share)` need not be proportional: it is sampled at some shares and taken as a line between them. A
    device that cannot finish one portion in time gets none. `at_most` limits the share of each of `active`.

    Raises:
        PlanError: limits that no shares can meet.
    """
    points = sampled_shares(total, quantum)
    rows = np.array([[seconds(d, n) if n else 0.0 for n in points] for d in active])
    return balance_sampled(total, devices, active, points, rows, quantum, at_most)


def sampled_shares(total: int, quantum: int = 1, devices: int | None = None) -> tuple[int, ...]:
    """The shares at which times are asked for: sixteen steps up to everything; for many devices, which get small shares and
    cost many questions, everything, its half, its quarter, ... to below an even share."""
    if devices is None:
        steps = [total * i // 16 for i in range(1, 17)]
    else:
        steps = [total >> i for i in range(devices.bit_length() + 1)]
    return tuple(sorted({0, total, *(max(quantum, step) for step in steps)}))


def balance_sampled(
    total: int,
    devices: int,
    active: Sequence[int],
    points: Sequence[int],
    seconds: Seconds,
    quantum: int = 1,
    at_most: Sequence[int] | None = None,
) -> Shares:
    """As `balance`, from times already sampled: `seconds[i][j]` of device `active[i]` at the share `points[j]`."""
    # Measured times may dip; a larger share never counts as faster.
    curves = np.maximum.accumulate(seconds, axis=1)
    sizes = np.array(points, dtype=np.float64)
    room = np.full(len(active), np.inf) if at_most is None else np.array(at_most, dtype=np.float64)
    parts = np.minimum(_done(curves, sizes, _earliest_s(total, curves, sizes, room)), room)
    # Only the active ones are asked, in the order of the devices: a few of a thousand take little time.
    order = sorted(range(len(active)), key=lambda i: active[i])
    weights = [float(parts[i]) for i in order]
    if not any(weights):
        weights = [float(i == 0) for i in order]
    limits = None if at_most is None else [at_most[i] for i in order]
    result = [0] * devices
    for i, share in zip(order, apportion(total, weights, quantum=quantum, at_most=limits), strict=True):
        result[active[i]] = share
    return tuple(result)


def _earliest_s(total: int, curves: Seconds, sizes: Seconds, room: Seconds) -> float:
    """The time in which the devices together finish `total`: between corners of the curves it is a straight line."""

    def done(limit_s: float) -> float:
        return float(np.minimum(_done(curves, sizes, limit_s), room).sum())

    corners: list[float] = np.unique(curves).tolist()
    index = bisect_left(corners, float(total), key=done)
    if index == 0 or index == len(corners):
        return corners[min(index, len(corners) - 1)]
    below, above = corners[index - 1], corners[index]
    if np.isinf(room).all():
        middle = (below + above) / 2
        reached, further = done(below), done(middle)
        if further <= reached:
            return above
        return min(above, below + (total - reached) * (middle - below) / (further - reached))
    # A device's room may fill up between two corners, so the line is followed by halving.
    for _ in range(40):
        middle = (below + above) / 2
        if done(middle) >= total:
            above = middle
        else:
            below = middle
    return above


def _done(curves: Seconds, sizes: Seconds, limit_s: float) -> Seconds:
    """The largest share that each device finishes within a time."""
    index = (curves <= limit_s).sum(axis=1) - 1
    after = np.minimum(index + 1, len(sizes) - 1)
    rows = np.arange(len(curves))
    begin, end = curves[rows, index], curves[rows, after]
    with np.errstate(divide="ignore", invalid="ignore"):
        part = np.where(end > begin, (limit_s - begin) / (end - begin), 0.0)
    result: Seconds = sizes[index] + np.clip(part, 0.0, 1.0) * (sizes[after] - sizes[index])
    return result
