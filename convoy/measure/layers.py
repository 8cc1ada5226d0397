"""The table of one device: seconds of every layer of a model over samples x filters, and samples x input channels.

A piece of a layer (fewer filters, fewer input channels or narrower inputs) runs on random numbers, as the executor runs it.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from convoy.layout.layout import Shape, box, local_shape
from convoy.layout.layout import whole as whole_box
from convoy.machine.accelerator import to_device
from convoy.measure.axes import POINT_LIMIT_S, Axes, Guess, choose_axes, full_axes
from convoy.measure.timing import LAYERS_BYTES, ROUNDS, STRETCH_S, Cold, Now, Piece, Sample, Times, device_now, sampled
from convoy.model.graph import Graph, Layer
from convoy.model.operation import Operation
from convoy.model.tracing import TracedModel, disable_in_place
from convoy.model.tracing.copies import timed_copy
from convoy.plan.device_program import LocalSize, whole_size
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.steps import ComputeStep, Part
from convoy.plan.strategy import Channel, Filter, One, Placement, place
from convoy.runtime.batch_norm import GlobalBatchNorm
from convoy.runtime.clock import Clock
from convoy.runtime.kernels import Gradients, arithmetic, in_precision
from convoy.runtime.precision import dtype_named

DRAWN = 1 << 16
"""Random numbers of an input at most; a larger one repeats them."""


@dataclass(frozen=True, slots=True)
class Point:
    """A size of a layer and its seconds."""

    size: LocalSize
    times: Times


class Bench:
    """Times the layers of one model on one device.

    Args:
        traced: the model in training mode; `model` itself, whole and left as it is.
        batch: the global batch, the largest number of samples that is timed.
        clock: its slow-down counts.
        stretch_s, rounds: see `convoy.measure.timing.sampled`.
        precision: what the layers compute in; see `convoy.runtime.precision`.

    Attributes:
        wall_s, processor_s: seconds on the wall in which layers were timed, and of them this process's processor.
    """

    def __init__(
        self,
        traced: TracedModel,
        model: nn.Module,
        batch: int,
        clock: Clock,
        device: torch.device,
        *,
        stretch_s: float = STRETCH_S,
        rounds: int = ROUNDS,
        precision: str = "float32",
    ) -> None:
        self.traced, self.batch, self.clock, self.stretch_s = traced, batch, clock, stretch_s
        self.model = to_device(disable_in_place(timed_copy(model)), device)
        self.time_by(device_now(device))
        self.precision = precision
        self.wants, self.trained = _wants(traced.graph, batch)
        self.rounds = rounds
        self.samples: dict[tuple[str, LocalSize], Sample] = {}
        self.wall_s = self.processor_s = 0.0
        self.grids: dict[str, list[LocalSize]] = {}

    def time_by(self, now: Now, *, steady: bool = False) -> None:
        """Read seconds from another clock from now on. `steady`: see `convoy.measure.timing.Sample.times`."""
        device = self.clock.device
        self.now, self.steady = now, steady
        # On an accelerator calls are queued one behind the other, and a fill would have to wait for each.
        self.cold = Cold(device, now, LAYERS_BYTES) if device.type == "cpu" else None

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that a step computes, in order."""
        return tuple(self.wants)

    def alike(self) -> dict[str, str]:
        """For each layer the first one that computes the same on tensors of the same shapes: it is timed for both."""
        first: dict[str, str] = {}
        return {name: first.setdefault(self._signature(name), name) for name in self.layers}

    def measure(self, name: str, allowance_s: float, point_limit_s: float = POINT_LIMIT_S) -> list[Point]:
        """Points of one layer, which fill one or two rectangles (see `Axes`).

        Args:
            allowance_s: what the layer may take, roughly; with too little, fewer and smaller sizes are timed.
            point_limit_s: sizes whose single run would take longer are left away.
        """
        layer = self.traced.graph[name]
        whole = whole_size(layer, self.batch)
        full = full_axes(self.traced.graph, layer, self.batch)
        known: dict[LocalSize, Times] = {}
        probe = Axes(full.samples[:1], full.outputs[:1]).sizes(whole)[0]
        known[probe] = self._time(layer, probe)
        guess = Guess(layer, probe, known[probe].both_s)
        samples, outputs = (axis[len(axis) // 2] for axis in (full.samples, full.outputs))
        middle = LocalSize(samples, outputs, whole.inputs)
        if middle != probe and guess.seconds(middle) < min(point_limit_s, allowance_s) / 4:
            known[middle] = self._time(layer, middle)  # a larger one says more about the largest
            guess = Guess(layer, middle, known[middle].both_s)
        axes = choose_axes(full, whole, guess, allowance_s, point_limit_s, self.stretch_s)
        sizes = axes.sizes(whole)
        if layer.statistics and layer.kind == "batch_norm":
            sizes += [replace(whole, samples=samples, shares_statistics=True) for samples in axes.samples]
        for size in sizes:
            if size not in known:
                known[size] = self._time(layer, size)
        self.grids[name] = sizes
        return [Point(size, known[size]) for size in sizes]

    def unknown(self, name: str) -> list[LocalSize]:
        """The sizes of a layer, of those measured here, that further rounds would tell more of."""
        return [size for size in self.grids.get(name, ()) if not self.is_known(name, size)]

    def again(self, name: str, allowance_s: float, wall: Now) -> list[Point]:
        """All points of a layer after one more turn of those that are not known yet, as far as the time goes."""
        end_s = wall() + allowance_s
        for size in self.unknown(name):
            if wall() >= end_s:
                break
            self._time(self.traced.graph[name], size)
        return [Point(size, self.samples[name, size].times(steady=self.steady)) for size in self.grids[name]]

    def is_known(self, name: str, size: LocalSize) -> bool:
        """Whether further rounds would tell little of a size that was timed."""
        return (name, size) not in self.samples or self.samples[name, size].is_known

    def time(self, name: str, size: LocalSize) -> Point:
        """One size of a layer, that lies beside its grid."""
        return Point(size, self._time(self.traced.graph[name], size))

    def _time(self, layer: Layer, size: LocalSize) -> Times:
        # As in training, where autograd is off around the executor and layers that need it turn it on.
        with (
            torch.no_grad(),
            piece(
                self.model, self.traced, layer, size, self.wants[layer.name], backward=layer.name in self.trained,
                precision=self.precision,
            ) as part,
        ):  # fmt: skip
            if size.shares_statistics:
                part = replace(part, run=SharedStatistics(self.model, self.traced, layer))
            before = self.samples.get((layer.name, size))
            wall_s, processor_s = time.perf_counter(), time.process_time()
            sample = sampled(part, self.clock, self.now, self.stretch_s, before, self.rounds, self.cold)
            self.wall_s += time.perf_counter() - wall_s
            self.processor_s += time.process_time() - processor_s
            self.samples[layer.name, size] = sample
            return sample.times(steady=self.steady)

    def _signature(self, name: str) -> str:
        layer, operation = self.traced.graph[name], self.traced.operations[name]
        if layer.kind == "opaque" or layer.several or layer.kind == "pick":
            return name
        inputs = [(self.traced.graph[i].shape, self.traced.graph[i].dtype) for i in layer.inputs]
        parameters = [(key, p.shape, p.trainable) for key, p in layer.parameters.items()]
        row = (layer.kind, layer.shape, layer.groups, layer.axis, layer.batched, layer.statistics, inputs, parameters)
        return repr((row, self.wants[name], name in self.trained, _call(self.model, operation)))


def _call(model: nn.Module, operation: Operation) -> tuple[str, ...]:
    if operation.call == "module":
        return (repr(model.get_submodule(str(operation.target))),)
    # Where a function has a name of its own; a local one would show its address, and be alike to none.
    target = getattr(operation.target, "__qualname__", operation.target)
    return (operation.call, repr(target), repr(operation.args), repr(dict(operation.kwargs)))


def _wants(graph: Graph, batch: int) -> tuple[dict[str, tuple[bool, ...]], frozenset[str]]:
    """Which inputs of each layer need a gradient, and the layers that one comes to: as a step on one device says."""
    steps = lower(Plan("measure", graph.fingerprint, 1, batch, {}, One(0)), graph).steps
    computes = [step for step in steps if isinstance(step, ComputeStep)]
    wants = {step.layer: step.wants for step in computes if step.phase == "forward"}
    return wants, frozenset(step.layer for step in computes if step.phase == "backward")


# --- a piece of a layer ----------------------------------------------------------------------------------------------


class SharedStatistics:
    """A batch norm as it runs where its batch lies on several devices, but for the exchange: the rows are those from here."""

    def __init__(self, model: nn.Module, traced: TracedModel, layer: Layer) -> None:
        self.norm = GlobalBatchNorm(model.get_submodule(str(traced.operations[layer.name].target)), layer)

    def forward(self, inputs: Sequence[Tensor], batch: int, keep: bool, wants: Sequence[bool]) -> tuple[Any, Any]:  # noqa: ARG002
        (x,) = inputs
        row = self.norm.local_statistics(x)
        by = self.norm.combine(row, [batch], math.prod(x.shape[2:]))
        return self.norm.normalise(x, by), (x, by) if keep else None

    def backward(self, saved: Any, g: Any, wants: Sequence[bool], part: Part = "all") -> Gradients:  # noqa: ARG002
        x, by = saved
        row = self.norm.local_sums(x, g, by)
        return self.norm.backward(x, g, by, row, row, wants[0])


@contextmanager
def piece(
    model: nn.Module,
    traced: TracedModel,
    layer: Layer,
    size: LocalSize,
    wants: Sequence[bool],
    *,
    backward: bool,
    precision: str = "float32",
) -> Iterator[Piece]:
    """A piece of a layer, for as long as the context lasts: until then `model` holds only its part of the weights.

    Args:
        model: a copy that nobody else uses; on the device that is timed.
        size: how much of the layer; a multiple of its `granule`.
        wants: which inputs need a gradient.
        backward: whether a gradient comes to this layer.
        precision: what it computes in; see `convoy.runtime.precision`.
    """
    operation = traced.operations[layer.name]
    with _sliced(model, layer, placement_of(traced.graph, layer, size)):
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        run = in_precision(arithmetic(model, layer, operation), dtype_named(precision), device.type)
        inputs = [_input(model, traced, layer, i, size, device) for i in range(len(layer.inputs))]
        y = run.forward(inputs, size.samples, False, wants)[0]
        gradient = _gradient_like(y) if backward else None
        yield Piece(layer.name, run, inputs, size.samples, wants, gradient, _bytes([*inputs, y]))


def placement_of(graph: Graph, layer: Layer, size: LocalSize) -> Placement:
    """The first of two devices has this piece of a layer; the second has the rest."""
    whole = whole_size(layer, 1)
    if size.inputs < whole.inputs:
        return place(graph, layer, Channel((size.inputs, whole.inputs - size.inputs)), size.samples, 2)
    if size.outputs == whole.outputs:
        return place(graph, layer, One(0), size.samples, 2)
    extent = graph[layer.inputs[0]].shape[0] if layer.kind == "flatten" else whole.outputs
    part = size.outputs * extent // whole.outputs
    return place(graph, layer, Filter((part, extent - part)), size.samples, 2)


def input_shape(graph: Graph, layer: Layer, index: int, size: LocalSize) -> Shape:
    """Shape of what a piece of a layer reads as its input number `index`."""
    layout = placement_of(graph, layer, size).takes[index]
    return local_shape(layout, 0, graph[layer.inputs[index]].batch_shape(size.samples))


@contextmanager
def _sliced(model: nn.Module, layer: Layer, placed: Placement) -> Iterator[None]:
    """Leave only the first device's part of the parameters in the layer's module; afterwards all is as it was."""
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


def _input(
    model: nn.Module, traced: TracedModel, layer: Layer, index: int, size: LocalSize, device: torch.device
) -> Any:
    source = traced.graph[layer.inputs[index]]
    if source.several:
        return _several(model, traced, source, size.samples, device)
    return _random(input_shape(traced.graph, layer, index, size), source.dtype, device)


def _several(model: nn.Module, traced: TracedModel, layer: Layer, samples: int, device: torch.device) -> Any:
    """What a layer with several outputs gives: only the layer itself knows their shapes."""
    size = whole_size(layer, samples)
    inputs = [_input(model, traced, layer, i, size, device) for i in range(len(layer.inputs))]
    return arithmetic(model, layer, traced.operations[layer.name]).forward(inputs, samples, False, [])[0]


def _random(shape: Shape, dtype_name: str, device: torch.device) -> Tensor:
    dtype = getattr(torch, dtype_name)
    if dtype.is_floating_point:
        # Drawing a number takes as long as computing with it: few are drawn, and set out again and again.
        count = math.prod(shape)
        drawn = torch.randn(min(count, DRAWN), dtype=dtype, device=device)
        return drawn.repeat(-(-count // max(1, len(drawn))))[:count].reshape(shape)
    return torch.zeros(shape, dtype=dtype, device=device)


def _gradient_like(y: Any) -> Any:
    """Random gradient of a layer's output; for a layer with several, those of its tensors by their index; or None."""
    if isinstance(y, Tensor):
        return torch.randn_like(y) if y.is_floating_point() else None
    tensors = ((i, each) for i, each in enumerate(y) if isinstance(each, Tensor) and each.is_floating_point())
    return {i: torch.randn_like(each) for i, each in tensors} or None


def _bytes(values: Sequence[Any]) -> int:
    flat = [t for v in values for t in (v if isinstance(v, tuple | list) else (v,)) if isinstance(t, Tensor)]
    return sum(math.prod(t.shape) * t.element_size() for t in flat)
