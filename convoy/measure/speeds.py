"""How fast each device is at the layers of a model, for plans that split by speed."""

import math
from collections.abc import Sequence

from torch import nn

from convoy.comm.collectives import agree_on, gather
from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.measure.layers import Bench
from convoy.measure.progress import Progress
from convoy.measure.timing import plain_torch
from convoy.model.graph import Graph
from convoy.model.tracing import TracedModel
from convoy.plan.device_program import whole_size
from convoy.plan.presets import Speeds
from convoy.runtime.clock import Clock
from convoy.runtime.precision import agree_on_precision

STRETCH_S = 0.01
"""Seconds of repeated calls forward, and as many backward: together twice the period of a CPU quota."""

ROUNDS, SIZES = 3, 3
LONG_S = 1.0
"""A layer that takes longer is not timed at larger sizes."""

Rows = dict[str, list[tuple[int, float]]]
"""Of one device: for each layer the numbers of samples that were timed, and the seconds of forward and backward."""


def timing_s(graph: Graph) -> float:
    """Return about how long `measure_speeds` takes at least."""
    return len(_timed(graph)) * SIZES * (ROUNDS + 1) * 2 * STRETCH_S


def _timed(graph: Graph) -> list[str]:
    return [layer.name for layer in graph.layers.values() if layer.batched and layer.kind not in ("input", "pick")]


@plain_torch()
def measure_speeds(
    group: Group,
    traced: TracedModel,
    model: nn.Module,
    batch: int,
    clock: Clock,
    precision: str = "float32",
    progress: Progress = lambda *_: None,
) -> Speeds:
    """Time the model's layers on every device, all at the same time as in training. All devices get all speeds.

    Raises:
        MismatchError: the devices have different models.
        DeviceLostError: a device did not answer.
    """
    agree_on(group, "model to measure", traced.graph.fingerprint, "started with another model")
    agree_on_precision(group, traced.graph, precision)
    bench = Bench(
        traced, model, batch, clock, group.torch_device, stretch_s=STRETCH_S, rounds=ROUNDS, precision=precision
    )
    rows = measure_rows(bench, progress)
    clock.reset()
    return speeds_of(gather(group, "measured speeds", rows), traced.graph)


def measure_rows(bench: Bench, progress: Progress = lambda *_: None) -> Rows:
    """Time each layer that has a batch at an eighth, a quarter and a half of it, on this device."""
    graph, first, rows = bench.traced.graph, bench.alike(), Rows()
    names = _timed(graph)
    for index, name in enumerate(names):
        progress(f"layer {name}", index, len(names))
        if first[name] in rows:
            rows[name] = rows[first[name]]
            continue
        rows[name] = []
        for samples in sorted({max(2, bench.batch // part) for part in (8, 4, 2)}):
            seconds = bench.time(name, whole_size(graph[name], samples)).times.both_s
            rows[name].append((samples, seconds))
            if seconds > LONG_S:
                break
    return rows


def speeds_of(devices: Sequence[Rows], graph: Graph) -> Speeds:
    """Return samples/s on each layer and on the whole model, by the largest size that all devices timed."""
    layers: dict[str, tuple[float, ...]] = {}
    total_s = [0.0] * len(devices)
    for name in devices[0]:
        common = min(len(rows[name]) for rows in devices) - 1
        per_sample_s = [seconds / samples for samples, seconds in (rows[name][common] for rows in devices)]
        total_s = [a + b for a, b in zip(total_s, per_sample_s, strict=True)]
        if graph[name].weighted:
            layers[name] = tuple(1.0 / s for s in per_sample_s)
    return Speeds(tuple(1.0 / s for s in total_s), layers)


def given_speeds(numbers: Sequence[float], devices: int) -> Speeds:
    """Return the speeds that a person gives in place of measured ones.

    Raises:
        InputError: not one positive number per device.
    """
    if len(numbers) != devices or any(not 0 < n < math.inf for n in numbers):
        raise InputError(
            f"speeds {','.join(f'{n:g}' for n in numbers)}: give one positive number for each of the {devices} devices, "
            "e.g. --speeds 4,2,1,1"
        )
    return Speeds(tuple(float(n) for n in numbers), measured=False)
