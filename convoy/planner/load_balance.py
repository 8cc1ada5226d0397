"""Load balance: shares with which the slowest device is done as early as possible, where time is not proportional to the share.

Each device's seconds are asked of the analytic model at some shares and taken as a line between them. A device that cannot
finish one sample or filter in time gets none.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from convoy.layout.shares import Shares, apportion
from convoy.model.graph import Layer
from convoy.planner.analytic import CostModel, MemoryPenalty, Side

MANY_QUESTIONS = 400
"""Layers times devices, each counted once per kind, beyond which curves are sampled at fewer points."""

Seconds = npt.NDArray[np.float64]


def batch_shares(model: CostModel, active: Sequence[int], penalty: MemoryPenalty | None = None) -> Shares:
    """Samples of each device, by the seconds of the whole model."""
    shared = len(active) > 1
    return _shares(
        model, model.batch, active, penalty, lambda device, points: [model.samples_s(device, n, shared) for n in points]
    )


def layer_shares(
    model: CostModel, layer: Layer, side: Side, active: Sequence[int], penalty: MemoryPenalty | None = None
) -> Shares:
    """Filters (output features) or input channels of each device, by the seconds of one layer."""
    total = layer.channels_out if side == "outputs" else layer.channels_in
    return _shares(model, total, active, penalty, lambda device, points: model.curve_s(layer, side, device, points))


def _shares(
    model: CostModel,
    total: int,
    active: Sequence[int],
    penalty: MemoryPenalty | None,
    curve_s: Callable[[int, Sequence[int]], list[float]],
) -> Shares:
    few = len(model.counts) * len(set(model.alike)) <= MANY_QUESTIONS
    points = _sampled(total, None if few else model.devices)
    curves = {kind: curve_s(kind, points) for kind in {model.alike[d] for d in active}}
    seconds = np.array([curves[model.alike[d]] for d in active])
    limits = None if penalty is None else penalty.limits(total, active)
    return balance(total, model.devices, active, points, seconds, limits)


def _sampled(total: int, devices: int | None) -> tuple[int, ...]:
    """The shares at which times are asked for: sixteen steps up to everything; for many devices, which get small shares and
    cost many questions, everything, its half, its quarter, ... to below an even share."""
    if devices is None:
        steps = [total * i // 16 for i in range(1, 17)]
    else:
        steps = [total >> i for i in range(devices.bit_length() + 1)]
    return tuple(sorted({0, total, *(max(1, step) for step in steps)}))


def balance(
    total: int,
    devices: int,
    active: Sequence[int],
    points: Sequence[int],
    seconds: Seconds,
    at_most: Sequence[int] | None = None,
) -> Shares:
    """Shares of an axis so that the slowest of `active` is done as early as possible.

    Args:
        points: ascending shares, from 0 to `total`.
        seconds: `seconds[i, j]` of device `active[i]` at the share `points[j]`.
        at_most: limits the share of each of `active`.

    Raises:
        PlanError: limits that no shares can meet.
    """
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
    for i, share in zip(order, apportion(total, weights, at_most=limits), strict=True):
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
