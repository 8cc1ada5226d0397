"""Measures how fast each device computes the layers of a model, for plans that split by speed."""

import math
from collections.abc import Sequence

from torch import nn

from convoy.comm.control_messages import agree_on, gather
from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.measure.layer_timer import LayerTimer
from convoy.measure.timing import Progress, RoundTimer, plain_torch
from convoy.model.tracing import TracedModel
from convoy.plan.device_program import whole_size
from convoy.plan.presets import Speeds
from convoy.runtime.clock import Clock
from convoy.runtime.precision import agree_on_precision

SLICE_S, ROUNDS = 0.01, 3


@plain_torch()
def measure_speeds(
    group: Group,
    traced: TracedModel,
    model: nn.Module,
    batch: int,
    clock: Clock,
    precision: str = "float32",
    progress: Progress = lambda _: None,
) -> Speeds:
    """Time the model's layers on all devices at once, as in training. Every device gets all speeds.

    Raises:
        MismatchError: the devices have different models.
        DeviceLostError: a device did not answer.
    """
    agree_on(group, "model to measure", traced.graph.fingerprint, "started with another model")
    agree_on_precision(group, traced.graph, precision)
    layers = LayerTimer(traced, model, batch, RoundTimer(clock, slice_s=SLICE_S, cold=True), ROUNDS, precision)
    own = time_layers(layers, progress)
    clock.reset()
    rows = gather(group, "measured speeds", own)
    weighted = [layer.name for layer in traced.graph.weighted if layer.name in own]
    return Speeds(
        tuple(1 / sum(row.values()) for row in rows), {name: tuple(1 / row[name] for row in rows) for name in weighted}
    )


def time_layers(layers: LayerTimer, progress: Progress = lambda _: None) -> dict[str, float]:
    """Return this device's seconds per sample of each batched layer, timed at a quarter of the batch."""
    graph, samples, seconds = layers.traced.graph, max(2, layers.batch // 4), dict[str, float]()
    for name, first in layers.alike.items():
        if not graph[name].batched or graph[name].kind == "pick":
            continue
        if first not in seconds:
            progress(f"layer {name}")
            seconds[first] = layers.time(first, whole_size(graph[first], samples)) / samples
        seconds[name] = seconds[first]
    return seconds


def given_speeds(numbers: Sequence[float], devices: int) -> Speeds:
    """Return the speeds that a user gives instead of measured ones.

    Raises:
        InputError: not one positive number per device.
    """
    if len(numbers) != devices or any(not 0 < n < math.inf for n in numbers):
        raise InputError(
            f"speeds {','.join(f'{n:g}' for n in numbers)}: give one positive number for each of the {devices} devices, "
            "e.g. --speeds 4,2,1,1"
        )
    return Speeds(tuple(float(n) for n in numbers), measured=False)
