"""How fast each device is at the layers of the model itself."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from convoy.comm.agreement import agree_on, gather
from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.machine.accelerator import to_device
from convoy.measure.layers import piece
from convoy.measure.progress import Progress
from convoy.measure.timing import HELD_BYTES, Now, Piece, device_now, plain_torch, run_round, spread_of
from convoy.model.graph import Graph, Layer
from convoy.model.tracing import TracedModel, disable_in_place
from convoy.model.tracing.shared_copy import timed_copy
from convoy.plan.presets import Speeds
from convoy.plan.size import whole_size
from convoy.runtime.clock import Clock
from convoy.runtime.precision import agree_on_precision

BURST_S = 0.02
"""A run that is shorter is repeated for this long: twice the period of a processor quota."""

REPEATS, SIZES = 3, 3
"""Rounds that count of each layer, and sizes of it."""

LIMIT_S = 2.0
"""No layer is timed for longer, at one size."""


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Median seconds of one whole layer for `samples` samples, forward and backward apart (0 where no gradient passes)."""

    samples: int
    forward_s: float
    backward_s: float
    spread: float
    """(slowest - fastest) / median of the repetitions, forward and backward together."""


DeviceTimes = Mapping[str, tuple[LayerTime, ...]]
"""The times of one device: for each layer, one per number of samples."""


@torch.no_grad()  # as in the executor, which asks autograd only where it must
def measure_layers(
    traced: TracedModel,
    model: nn.Module,
    batch: int,
    clock: Clock,
    device: torch.device,
    *,
    repeats: int = REPEATS,
    precision: str = "float32",
    progress: Progress = lambda *_: None,
) -> dict[str, tuple[LayerTime, ...]]:
    """Time every layer of a model on this device, forward and backward, on random numbers.

    Args:
        traced: the model in training mode; `model` itself, whole and left as it is.
        batch: the global batch; sizes of an eighth, a quarter and a half of it are timed.
        clock: its slow-down counts.
        repeats: the median of so many rounds, after a run that is not counted; fewer where they take long.
        precision: what the layers compute in; see `convoy.runtime.precision`.
    """
    local = to_device(disable_in_place(timed_copy(model)), device)
    sizes = sorted({max(2, batch // 8), max(2, batch // 4), max(2, batch // 2)})
    result = {}
    timed = _timed(traced.graph)
    for index, layer in enumerate(timed):
        progress(f"layer {layer.name}", index, len(timed))
        sources = [traced.graph[name] for name in layer.inputs]
        wants = [each.kind != "input" and getattr(torch, each.dtype).is_floating_point for each in sources]
        times = []
        for samples in sizes:
            size = whole_size(layer, samples)
            with piece(local, traced, layer, size, wants, backward=layer.differentiable, precision=precision) as part:
                times.append(_time_layer(part, clock, device_now(device), repeats))
            if times[-1].forward_s + times[-1].backward_s > 1.0:
                break
        result[layer.name] = tuple(times)
    return result


def _timed(graph: Graph) -> list[Layer]:
    return [layer for layer in graph.layers.values() if layer.kind not in ("input", "pick") and layer.batched]


def timing_s(graph: Graph) -> float:
    """About how long timing takes at least: longer where a round of a layer takes more than `BURST_S`."""
    return len(_timed(graph)) * SIZES * (REPEATS + 1) * BURST_S


def _time_layer(part: Piece, clock: Clock, now: Now, repeats: int) -> LayerTime:
    first = run_round(part, clock, now, 1, 1)
    # A processor under a quota runs in bursts: one short run says nothing, so short ones are repeated and averaged.
    count = max(1, math.ceil(BURST_S / max(sum(first), 1e-6)))
    back = min(count, max(1, HELD_BYTES // max(1, part.held_bytes)))
    rows: list[tuple[float, float]] = []
    while len(rows) < repeats and sum(f + b for f, b in rows) * count < LIMIT_S:
        forward_s, backward_s = run_round(part, clock, now, count, back)
        rows.append((forward_s / count, backward_s / back))
    both = [f + b for f, b in rows]
    forward_s, backward_s = (statistics.median(column) for column in zip(*rows, strict=True))
    return LayerTime(part.samples, forward_s, backward_s, spread_of(both))


def speeds_of(times: Sequence[DeviceTimes], graph: Graph) -> Speeds:
    """Samples/s of each device on each layer and on the whole model, from the largest size that all of them timed."""
    layers: dict[str, tuple[float, ...]] = {}
    total_s = [0.0] * len(times)
    for name in times[0]:
        common = min(len(device[name]) for device in times) - 1
        rows = [device[name][common] for device in times]
        per_sample_s = [(row.forward_s + row.backward_s) / row.samples for row in rows]
        total_s = [a + b for a, b in zip(total_s, per_sample_s, strict=True)]
        if graph[name].weighted:
            layers[name] = tuple(1.0 / s for s in per_sample_s)
    return Speeds(tuple(1.0 / s for s in total_s), layers)


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
    """Every device times the model's layers, all at the same time as in training; all learn all speeds.

    Raises:
        MismatchError: the devices have different models.
        DeviceLostError: a device did not answer.
    """
    agree_on(group, "model to measure", traced.graph.fingerprint, "started with another model")
    agree_on_precision(group, traced.graph, precision)
    own = measure_layers(traced, model, batch, clock, group.torch_device, precision=precision, progress=progress)
    clock.reset()
    rows = {name: [[t.samples, t.forward_s, t.backward_s, t.spread] for t in times] for name, times in own.items()}
    tables = gather(group, "measured speeds", rows)
    times = [{n: tuple(LayerTime(*r) for r in rows) for n, rows in table.items()} for table in tables]
    return speeds_of(times, traced.graph)


def given_speeds(numbers: Sequence[float], devices: int) -> Speeds:
    """Speeds that a person gives in place of measured ones.

    Raises:
        InputError: not one positive number per device.
    """
    if len(numbers) != devices or any(not 0 < n < math.inf for n in numbers):
        raise InputError(
            f"speeds {','.join(f'{n:g}' for n in numbers)}: give one positive number for each of the {devices} devices, "
            "e.g. --speeds 4,2,1,1"
        )
    return Speeds(tuple(float(n) for n in numbers), measured=False)
