"""How fast each device is at the layers of the model itself."""

import copy
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from convoy.comm.agreement import agree_on, gather
from convoy.comm.environment import finish
from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.model.graph import Graph, Layer
from convoy.model.tracing import TracedModel, disable_in_place
from convoy.plan.presets import Speeds
from convoy.runtime.clock import Clock
from convoy.runtime.kernels import Arithmetic, arithmetic
from convoy.runtime.precision import agree_on_precision, lowered

BURST_S = 0.02
"""A run that is shorter is repeated for this long: twice the period of a processor quota."""

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
    repeats: int = 3,
    precision: str = "float32",
) -> dict[str, tuple[LayerTime, ...]]:
    """Time every layer of a model on this device, forward and backward, on random numbers.

    Args:
        traced: the model in training mode; `model` itself, whole and left as it is.
        batch: the global batch; sizes of an eighth, a quarter and a half of it are timed.
        clock: its slow-down counts.
        repeats: the median of so many rounds, after a run that is not counted; fewer where they take long.
        precision: what the layers compute in; see `convoy.runtime.precision`.
    """
    local = disable_in_place(copy.deepcopy(model)).to(device)
    sizes = sorted({max(2, batch // 8), max(2, batch // 4), max(2, batch // 2)})
    result = {}
    for layer in traced.graph.layers.values():
        if layer.kind not in ("input", "pick") and layer.batched:
            run = lowered(arithmetic(local, layer, traced.operations[layer.name]), precision, device.type)
            times = []
            for samples in sizes:
                times.append(_time_layer(run, layer, traced.graph, samples, clock, device, repeats))
                if times[-1].forward_s + times[-1].backward_s > 1.0:
                    break
            result[layer.name] = tuple(times)
    return result


def _time_layer(
    run: Arithmetic, layer: Layer, graph: Graph, samples: int, clock: Clock, device: torch.device, repeats: int
) -> LayerTime:
    inputs = [_random(graph[name], samples, device) for name in layer.inputs]
    wants = [
        graph[name].kind != "input" and x.is_floating_point() for name, x in zip(layer.inputs, inputs, strict=True)
    ]
    gradient = _gradient_like(run.forward(inputs, samples, False, wants)[0]) if layer.differentiable else None
    first = _once(run, inputs, gradient, samples, wants, clock, layer.name)
    rows: list[tuple[float, float]] = []
    # A processor under a quota runs in bursts: one short run says nothing, so short ones are repeated and averaged.
    count = max(1, math.ceil(BURST_S / max(sum(first), 1e-6)))
    while len(rows) < repeats and sum(f + b for f, b in rows) * count < LIMIT_S:
        runs = [_once(run, inputs, gradient, samples, wants, clock, layer.name) for _ in range(count)]
        rows.append((sum(f for f, _ in runs) / count, sum(b for _, b in runs) / count))
    both = [f + b for f, b in rows]
    spread = (max(both) - min(both)) / statistics.median(both)
    return LayerTime(samples, statistics.median(f for f, _ in rows), statistics.median(b for _, b in rows), spread)


def _once(
    run: Arithmetic,
    inputs: Sequence[Tensor],
    gradient: Any,
    samples: int,
    wants: Sequence[bool],
    clock: Clock,
    name: str,
) -> tuple[float, float]:
    device = inputs[0].device
    marks = [_now(device)]
    with clock.compute(name, "measure"):
        _, saved = run.forward(inputs, samples, gradient is not None, wants)
    marks.append(_now(device))
    if gradient is None:
        return marks[1] - marks[0], 0.0
    with clock.compute(name, "measure"):
        run.backward(saved, gradient, wants)
    marks.append(_now(device))
    return marks[1] - marks[0], marks[2] - marks[1]


def _gradient_like(y: Any) -> Any:
    """Random gradient of a layer's output; for a layer with several, those of its tensors by their index; or None."""
    if isinstance(y, Tensor):
        return torch.randn_like(y) if y.is_floating_point() else None
    rows = {
        i: torch.randn_like(each) for i, each in enumerate(y) if isinstance(each, Tensor) and each.is_floating_point()
    }
    return rows or None


def _now(device: torch.device) -> float:
    finish(device)
    return time.perf_counter()


def _random(layer: Layer, samples: int, device: torch.device) -> Tensor:
    dtype = getattr(torch, layer.dtype)
    shape = layer.batch_shape(samples)
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=dtype, device=device)


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


def measure_speeds(
    group: Group, traced: TracedModel, model: nn.Module, batch: int, clock: Clock, precision: str = "float32"
) -> Speeds:
    """Every device times the model's layers, all at the same time as in training; all learn all speeds.

    Raises:
        MismatchError: the devices have different models.
        DeviceLostError: a device did not answer.
    """
    agree_on(group, "model to measure", traced.graph.fingerprint, "started with another model")
    agree_on_precision(group, traced.graph, precision)
    own = measure_layers(traced, model, batch, clock, group.torch_device, precision=precision)
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
    return Speeds(tuple(float(n) for n in numbers))
