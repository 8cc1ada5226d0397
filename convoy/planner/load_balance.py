"""Load balance: shares with which the slowest device finishes as early as possible.

The analytic model gives each device's seconds at some shares; between them they are taken as linear. A device that cannot
finish one sample or filter in time gets none.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from convoy.layout.shares import Shares, apportion
from convoy.model.graph import Layer
from convoy.planner.analytic import CostModel, MemoryPenalty, Side

MANY_QUESTIONS = 400
"""Kinds of layers times kinds of devices, beyond which curves are sampled at fewer points."""

HALVINGS = 50
"""Steps of the bisection for the finishing time."""

Seconds = npt.NDArray[np.float64]


def batch_shares(model: CostModel, active: Sequence[int], penalty: MemoryPenalty | None = None) -> Shares:
    """Return the samples of each device, by the seconds of the whole model."""
    shared = len(active) > 1
    return _shares(
        model, model.batch, active, penalty, lambda device, points: [model.samples_s(device, n, shared) for n in points]
    )


def layer_shares(
    model: CostModel, layer: Layer, side: Side, active: Sequence[int], penalty: MemoryPenalty | None = None
) -> Shares:
    """Return the filters (output features) or input channels of each device, by the seconds of one layer."""
    total = layer.channels_out if side == "outputs" else layer.channels_in
    return _shares(model, total, active, penalty, lambda device, points: model.curve_s(layer, side, device, points))


def _shares(
    model: CostModel,
    total: int,
    active: Sequence[int],
    penalty: MemoryPenalty | None,
    curve_s: Callable[[int, Sequence[int]], list[float]],
) -> Shares:
    if len(model.counts) * len(set(model.alike)) <= MANY_QUESTIONS:
        steps = [total * i // 16 for i in range(1, 17)]
    else:  # many devices get small shares: the total, its half, its quarter, ... to below an even share
        steps = [total >> i for i in range(model.devices.bit_length() + 1)]
    points = tuple(sorted({0, total, *(max(1, step) for step in steps)}))
    curves = {kind: curve_s(kind, points) for kind in {model.alike[d] for d in active}}
    seconds = np.array([curves[model.alike[d]] for d in active])
    limits = None if penalty is None else penalty.limits(total, active)
    return balance(total, model.devices, active, points, seconds, limits)


def balance(
    total: int,
    devices: int,
    active: Sequence[int],
    points: Sequence[int],
    seconds: Seconds,
    at_most: Sequence[int] | None = None,
) -> Shares:
    """Return shares of an axis with which the slowest of `active` finishes as early as possible.

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
    low_s, high_s = 0.0, float(curves.max())
    for _ in range(HALVINGS):
        middle_s = (low_s + high_s) / 2
        if np.minimum(_finished(curves, sizes, middle_s), room).sum() >= total:
            high_s = middle_s
        else:
            low_s = middle_s
    parts = np.minimum(_finished(curves, sizes, high_s), room)
    # Only active devices are apportioned, in the order of devices: with a thousand devices this is much faster.
    order = sorted(range(len(active)), key=lambda i: active[i])
    weights = [float(parts[i]) for i in order]
    if not any(weights):
        weights = [float(i == 0) for i in order]
    limits = None if at_most is None else [at_most[i] for i in order]
    result = [0] * devices
    for i, share in zip(order, apportion(total, weights, at_most=limits), strict=True):
        result[active[i]] = share
    return tuple(result)


def _finished(curves: Seconds, sizes: Seconds, limit_s: float) -> Seconds:
    """Return the largest share that each device finishes within a time."""
    index = (curves <= limit_s).sum(axis=1) - 1
    after = np.minimum(index + 1, len(sizes) - 1)
    rows = np.arange(len(curves))
    begin, end = curves[rows, index], curves[rows, after]
    with np.errstate(divide="ignore", invalid="ignore"):
        part = np.where(end > begin, (limit_s - begin) / (end - begin), 0.0)
    result: Seconds = sizes[index] + np.clip(part, 0.0, 1.0) * (sizes[after] - sizes[index])
    return result
