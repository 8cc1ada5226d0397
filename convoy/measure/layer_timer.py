"""Times the layers of a model on one device, at several numbers of samples, outputs and input channels.

Each layer runs as in the executor, on random inputs.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from convoy.comm.control_messages import agree_on, gather
from convoy.comm.group import Group
from convoy.layout.layout import box, local_shape
from convoy.layout.layout import whole as whole_box
from convoy.machine.accelerator import to_device
from convoy.measure.timed_sizes import ENDS_SLICES, POINT_LIMIT_S, Axes, choose_axes, full_axes, timed_rows, timing_s
from convoy.measure.timing import ROUNDS, Now, Progress, RoundTimer, Times, Timing, Workload, plain_torch
from convoy.model.graph import Graph, Layer
from convoy.model.tracing import TracedModel, disable_in_place
from convoy.model.tracing.copies import timed_copy
from convoy.plan.device_program import LocalSize, whole_size
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds
from convoy.plan.steps import ComputeStep, Part
from convoy.plan.strategy import Channel, Filter, One, Placement, place
from convoy.runtime.batch_norm import GlobalBatchNorm
from convoy.runtime.clock import Clock
from convoy.runtime.kernels import Arithmetic, Gradients, arithmetic, in_precision
from convoy.runtime.precision import agree_on_precision, dtype_named
from convoy.simulate.compute import shape_s

SPEEDS_SLICE_S, SPEEDS_ROUNDS = 0.01, 3

DRAWN = 1 << 16  # the most random numbers drawn for one input; a larger input repeats them


class LayerTimer:
    """The timer of one model's layers on one device.

    Args:
        traced: the traced whole `model`, in training mode; `model` stays unchanged.
        batch: the global batch, the largest number of samples that is timed.
        rounds: rounds per size and turn.
        precision: number format of the layers; see `convoy.runtime.precision`.

    Attributes:
        alike: for each layer of a step, in order, the first layer with equal computation and shapes; only that one is timed.
        timings: the timed rounds by layer and size.
        grids: the sizes of each layer's grid, chosen in its first turn.
        plan_sizes: additional sizes of each layer, which plans use.
        wall_s, processor_s: wall-clock seconds spent timing, and this process's processor seconds in that time.
    """

    def __init__(
        self,
        traced: TracedModel,
        model: nn.Module,
        batch: int,
        timer: RoundTimer,
        rounds: int = ROUNDS,
        precision: str = "float32",
    ) -> None:
        self.traced, self.batch, self.timer, self.rounds, self.precision = traced, batch, timer, rounds, precision
        self.model = to_device(disable_in_place(timed_copy(model)), timer.clock.device)
        plan = Plan("measure", traced.graph.fingerprint, 1, batch, {}, One(0))
        computes = [step for step in lower(plan, traced.graph).steps if isinstance(step, ComputeStep)]
        self.wants = {step.layer: step.wants for step in computes if step.phase == "forward"}
        self.trained = frozenset(step.layer for step in computes if step.phase == "backward")
        first: dict[str, str] = {}
        self.alike = {name: first.setdefault(self._signature(name), name) for name in self.wants}
        self.timings: dict[tuple[str, LocalSize], Timing] = {}
        self.grids: dict[str, list[LocalSize]] = {}
        self.plan_sizes: dict[str, list[LocalSize]] = {}
        self.wall_s = self.processor_s = 0.0

    def _signature(self, name: str) -> str:
        layer, operation = self.traced.graph[name], self.traced.operations[name]
        if layer.kind == "opaque" or layer.several or layer.kind == "pick":
            return name
        if operation.call == "module":
            call = repr(self.model.get_submodule(str(operation.target)))
        else:
            # `repr` includes the address, which distinguishes functions without a name.
            target = getattr(operation.target, "__qualname__", operation.target)
            call = repr((operation.call, target, operation.args, dict(operation.kwargs)))
        inputs = [(self.traced.graph[i].shape, self.traced.graph[i].dtype) for i in layer.inputs]
        parameters = [(key, p.shape, p.trainable) for key, p in layer.parameters.items()]
        row = (layer.kind, layer.shape, layer.groups, layer.axis, layer.batched, layer.statistics, inputs, parameters)
        return repr((row, self.wants[name], name in self.trained, call))

    def turn(self, name: str, allowance_s: float, wall: Now = time.monotonic) -> None:
        """Time the sizes of a layer's grid that need more rounds, within the allowance.

        The first turn chooses the grid, one or two rectangles of sizes (see `Axes`), and times all of it.
        """
        if name not in self.grids:
            self.grids[name] = self._choose_grid(name, allowance_s)
            for size in self.grids[name]:
                if (name, size) not in self.timings:
                    self.time(name, size)
            return
        end_s = wall() + allowance_s
        for size in self.unknown(name):
            if wall() < end_s:
                self.time(name, size)

    def _choose_grid(self, name: str, allowance_s: float) -> list[LocalSize]:
        layer = self.traced.graph[name]
        whole, full = whole_size(layer, self.batch), full_axes(self.traced.graph, layer, self.batch)
        known = Axes(full.samples[:1], full.outputs[:1]).sizes(whole)[0]
        known_s = self.time(name, known)

        def expected_s(size: LocalSize) -> float:
            # By roofline: scaling by entries overestimates a Linear, since small sizes mostly read weights.
            return known_s * shape_s(layer, size) / shape_s(layer, known)

        # A disturbed call of a small size says little about large ones, so approach the largest size step by step.
        limit_s = max(allowance_s, ENDS_SLICES * self.timer.slice_s)
        for step in range(1, max(len(full.samples), len(full.outputs))):
            outputs = full.outputs[min(step, len(full.outputs) - 1)]
            larger = replace(whole, outputs=outputs).with_images(full.samples[min(step, len(full.samples) - 1)])
            if expected_s(larger) > POINT_LIMIT_S or timing_s(expected_s(larger), self.timer.slice_s) > limit_s:
                break
            known, known_s = larger, self.time(name, larger)
        axes = choose_axes(full, whole, expected_s, allowance_s, self.timer.slice_s)
        sizes = axes.sizes(whole)
        if layer.statistics and layer.kind == "batch_norm":
            sizes += [replace(whole, shares_statistics=True).with_images(samples) for samples in axes.samples]
        return sizes

    def unknown(self, name: str) -> list[LocalSize]:
        """Return the sizes of a layer's grid that need more rounds."""
        return [size for size in self.grids[name] if not self.timings[name, size].is_known]

    def time(self, name: str, size: LocalSize) -> float:
        """Time more rounds of a layer at one size; return its forward + backward seconds."""
        layer, backward = self.traced.graph[name], name in self.trained
        # As in training: the executor turns autograd off, and layers that need it turn it on.
        with (
            torch.no_grad(),
            workload(
                self.model, self.traced, layer, size, self.wants[name], backward=backward, precision=self.precision
            ) as work,
        ):
            wall_s, processor_s = time.perf_counter(), time.process_time()
            timing = self.timer.time(work, self.timings.get((name, size)), self.rounds)
            self.wall_s += time.perf_counter() - wall_s
            self.processor_s += time.process_time() - processor_s
        self.timings[name, size] = timing
        return self._times(name, size).both_s

    def _times(self, name: str, size: LocalSize) -> Times:
        """Return the seconds of exactly this size; whole rows were timed."""
        forward_s, backward_s, spread = self.timings[name, size].times(steady=self.timer.steady)
        rows, _, _ = timed_rows(self.traced.graph, self.traced.graph[name])
        factor = size.tile * rows / _whole_rows(size, rows) if size.tile < 1.0 else 1.0
        return Times(factor * forward_s, factor * backward_s, spread)

    def rows(self, factor: float = 1.0) -> dict[str, list[list[Any]]]:
        """Return each layer's points as `LayerPoint` values without device and layer, seconds times `factor`."""
        rows: dict[str, list[list[Any]]] = {name: [] for name in self.grids}
        for sizes, off_grid in ((self.grids, False), (self.plan_sizes, True)):
            for name, each in sizes.items():
                for size in each:
                    times = self._times(name, size)
                    seconds = [factor * times.forward_s, factor * times.backward_s, times.spread]
                    shared = size.shares_statistics
                    tile = size.tile if size.tile < 1.0 else None
                    rows[name].append([size.samples, size.outputs, size.inputs, *seconds, shared, off_grid, tile])
        return rows


@plain_torch()
def measure_speeds(
    group: Group,
    traced: TracedModel,
    model: nn.Module,
    batch: int,
    slowdown: float = 1.0,
    precision: str = "float32",
    progress: Progress = lambda _: None,
) -> Speeds:
    """Time the model's layers on all devices at once, as in training, and return all devices' speeds.

    Raises:
        MismatchError: the devices have different models.
        DeviceLostError: a device did not answer.
    """
    agree_on(group, "model to measure", traced.graph.fingerprint, "started with another model")
    agree_on_precision(group, traced.graph, precision)
    timer = RoundTimer(Clock(group.torch_device, slowdown), slice_s=SPEEDS_SLICE_S, cold=True)
    own = time_layers(LayerTimer(traced, model, batch, timer, SPEEDS_ROUNDS, precision), progress)
    rows = gather(group, "measured speeds", own)
    weighted = [layer.name for layer in traced.graph.weighted if layer.name in own]
    return Speeds(
        tuple(1 / sum(row.values()) for row in rows), {name: tuple(1 / row[name] for row in rows) for name in weighted}
    )


def time_layers(layers: LayerTimer, progress: Progress = lambda _: None) -> dict[str, float]:
    """Return this device's seconds per sample of each batched layer, timed at a quarter of the batch."""
    graph, samples, seconds = layers.traced.graph, max(2, layers.batch // 4), dict[str, float]()
    for name, first in layers.alike.items():
        if graph[name].batched and graph[name].kind != "pick":
            if first not in seconds:
                progress(f"layer {name}")
                _, _, most = timed_rows(graph, graph[first])
                images = min(samples, most)
                seconds[first] = layers.time(first, whole_size(graph[first], 1).with_images(images)) / images
            seconds[name] = seconds[first]
    return seconds


class SharedStatistics(Arithmetic):
    """A batch norm of a split batch, without the exchange of statistics."""

    def __init__(self, model: nn.Module, traced: TracedModel, layer: Layer) -> None:
        self.norm = GlobalBatchNorm(model.get_submodule(str(traced.operations[layer.name].target)), layer)

    def forward(self, inputs: Sequence[Tensor], batch: int, keep: bool, wants: Sequence[bool]) -> tuple[Any, Any]:  # noqa: ARG002
        (x,) = inputs
        by = self.norm.combine(self.norm.local_statistics(x), [batch], x[0].numel() // self.norm.channels)
        return self.norm.normalise(x, by), (x, by) if keep else None

    def backward(self, saved: Any, g: Any, wants: Sequence[bool], part: Part = "all", last: bool = True) -> Gradients:  # noqa: ARG002
        x, by = saved
        row = self.norm.local_sums(x, g, by)
        return self.norm.backward(x, g, by, row, row, wants[0])


def _whole_rows(size: LocalSize, rows: int) -> int:
    return max(1, round(size.tile * rows))


@contextmanager
def workload(
    model: nn.Module,
    traced: TracedModel,
    layer: Layer,
    size: LocalSize,
    wants: Sequence[bool],
    *,
    backward: bool,
    precision: str = "float32",
) -> Iterator[Workload]:
    """Yield a layer's arithmetic at one size. Inside the context, `model` holds only the local shard of its weights.

    Args:
        model: a copy on the timed device.
        size: its outputs are a multiple of the layer's `granule`.
        wants: which inputs need a gradient.
    """
    placed = placement_of(traced.graph, layer, size)
    with _sliced(model, layer, placed):
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        run: Any = SharedStatistics(model, traced, layer) if size.shares_statistics else None
        if run is None:
            run = arithmetic(model, layer, traced.operations[layer.name])
            run.call = in_precision(run.call, dtype_named(precision), device.type)
        inputs = _inputs(model, traced, layer, size, placed, device)
        y = run.forward(inputs, size.samples, False, wants)[0]
        outputs = list(enumerate(y)) if isinstance(y, tuple | list) else [(0, y)]
        values = [*inputs, *(value for _, value in outputs)]
        tensors = [t for v in values for t in (v if isinstance(v, tuple | list) else (v,)) if isinstance(t, Tensor)]
        held_bytes = sum(math.prod(t.shape) * t.element_size() for t in tensors)
        gradient: Any = {
            i: torch.randn_like(t) for i, t in outputs if backward and isinstance(t, Tensor) and t.is_floating_point()
        }
        gradient = gradient.get(0) if isinstance(y, Tensor) else gradient or None
        yield Workload(layer.name, run, inputs, size.samples, wants, gradient, held_bytes)


def placement_of(graph: Graph, layer: Layer, size: LocalSize) -> Placement:
    """Place a layer on two devices so that the first one computes this size."""
    whole = whole_size(layer, 1)
    if size.inputs < whole.inputs:
        return place(graph, layer, Channel((size.inputs, whole.inputs - size.inputs)), size.samples, 2)
    if size.outputs == whole.outputs:
        return place(graph, layer, One(0), size.samples, 2)
    extent = graph[layer.inputs[0]].shape[0] if layer.kind == "flatten" else whole.outputs
    part = size.outputs * extent // whole.outputs
    return place(graph, layer, Filter((part, extent - part)), size.samples, 2)


@contextmanager
def _sliced(model: nn.Module, layer: Layer, placed: Placement) -> Iterator[None]:
    """Replace the parameters of the layer's module by the first device's shards; restore them on exit."""
    found: list[tuple[dict[str, Any], str, Tensor]] = []
    for key, parameter in layer.parameters.items():
        here = box(placed.parameters[key], 0, parameter.shape)
        if here is not None and here != whole_box(parameter.shape):
            holder, _, name = parameter.key.rpartition(".")
            module = model.get_submodule(holder)
            home: dict[str, Any] = module._buffers if parameter.buffer else module._parameters
            found.append((home, name, home[name]))
            new = home[name].detach()[tuple(slice(*span) for span in here)].clone()
            home[name] = new if parameter.buffer else nn.Parameter(new, requires_grad=home[name].requires_grad)
    try:
        yield
    finally:
        for home, name, old in found:
            home[name] = old


def _inputs(
    model: nn.Module, traced: TracedModel, layer: Layer, size: LocalSize, placed: Placement, device: torch.device
) -> list[Any]:
    """Return random inputs. An input layer with several outputs is run, because only running it shows their shapes."""
    graph, inputs = traced.graph, list[Any]()
    rows, _, _ = timed_rows(graph, layer)
    for layout, name in zip(placed.takes, layer.inputs, strict=True):
        source = graph[name]
        if source.several:
            whole = whole_size(source, size.samples)
            given = _inputs(model, traced, source, whole, placement_of(graph, source, whole), device)
            run = arithmetic(model, source, traced.operations[name])
            inputs.append(run.forward(given, size.samples, False, [])[0])
        else:
            shape, dtype = local_shape(layout, 0, source.batch_shape(size.samples)), getattr(torch, source.dtype)
            cut = size.tile < 1.0 and source.batched
            shape = (*shape[:2], _whole_rows(size, rows), *shape[3:]) if cut else shape
            if not dtype.is_floating_point:
                inputs.append(torch.zeros(shape, dtype=dtype, device=device))
                continue
            # Drawing a number takes as long as computing with it, so repeat a few.
            count = math.prod(shape)
            drawn = torch.randn(min(count, DRAWN), dtype=dtype, device=device)
            inputs.append(drawn.repeat(-(-count // max(1, len(drawn))))[:count].reshape(shape))
    return inputs
