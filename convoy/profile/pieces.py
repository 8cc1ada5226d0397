"""One device's piece of a layer, made for timing: fewer filters, fewer input channels or narrower inputs."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from convoy.model.graph import Graph, Layer
from convoy.model.tracing import TracedModel
from convoy.plan.size import LocalSize, whole_size
from convoy.plan.steps import Part
from convoy.plan.strategy import feature_axis
from convoy.runtime.batch_norm import GlobalBatchNorm
from convoy.runtime.kernels import Arithmetic, Gradients, arithmetic
from convoy.runtime.precision import lowered
from convoy.sharding.layout import Shape


@dataclass(frozen=True, slots=True)
class Piece:
    """A layer's arithmetic at one size, with random numbers to run it on.

    Attributes:
        gradient: of the output (index -> gradient for a layer with several outputs); None where no backward runs.
        held_bytes: inputs and outputs together, which backward may keep.
    """

    name: str
    run: Arithmetic
    inputs: Sequence[Any]
    samples: int
    wants: Sequence[bool]
    gradient: Any
    held_bytes: int


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


def granule(graph: Graph, layer: Layer) -> int | None:
    """A piece of this layer has a multiple of so many outputs; None: its channels are never split."""
    match layer.kind:
        case "conv" if layer.groups > 1:
            return layer.channels_out // layer.groups
        case "conv" | "linear":
            return 1
        case "elementwise" | "pool" | "batch_norm" | "join":
            return 1 if layer.shape and layer.batched else None
        case "flatten":
            return layer.shape[0] // graph[layer.inputs[0]].shape[0]
        case "cat":
            return 1 if layer.axis != 1 and layer.shape else None
    return None


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
    with _sliced(model, layer, operation.target, size):
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        run = lowered(arithmetic(model, layer, operation), precision, device.type)
        inputs = [_input(model, traced, layer, i, size, device) for i in range(len(layer.inputs))]
        y = run.forward(inputs, size.samples, False, wants)[0]
        gradient = _gradient_like(y) if backward else None
        yield Piece(layer.name, run, inputs, size.samples, wants, gradient, _bytes([*inputs, y]))


def input_shape(graph: Graph, layer: Layer, index: int, size: LocalSize) -> Shape:
    """Shape of what a piece of a layer reads as its input number `index`."""
    source = graph[layer.inputs[index]]
    shape, whole = list(source.batch_shape(size.samples)), whole_size(layer, 1)
    if layer.weighted and layer.groups == 1:
        shape[feature_axis(layer)] = size.inputs
    elif size.outputs < whole.outputs:
        # Of a join axes are aligned from the right, as in broadcasting: an input may have fewer, and 1 where others have more.
        axis = 1 + len(shape) - len(layer.batch_shape(1)) if layer.kind == "join" else 1
        if axis >= 0 and shape[axis] > 1:
            shape[axis] = shape[axis] * size.outputs // whole.outputs
    return tuple(shape)


@contextmanager
def _sliced(model: nn.Module, layer: Layer, target: Any, size: LocalSize) -> Iterator[None]:
    """Leave only the piece's part of the parameters in the layer's module; afterwards all is as it was."""
    whole = whole_size(layer, 1)
    if layer.kind not in ("conv", "linear", "batch_norm") or (size.outputs, size.inputs) == (
        whole.outputs,
        whole.inputs,
    ):
        yield
        return
    module = model.get_submodule(str(target))
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    fewer_inputs = layer.weighted and layer.groups == 1 and size.inputs < whole.inputs
    try:
        for name, old in parameters.items():
            if old is not None:
                new = old.detach()[: size.outputs]
                new = new[:, : size.inputs] if fewer_inputs and name == "weight" else new
                module._parameters[name] = nn.Parameter(new.clone(), requires_grad=old.requires_grad)
        for name, held in buffers.items():
            if held is not None and held.dim():
                module._buffers[name] = held[: size.outputs].clone()
        yield
    finally:
        module._parameters.update(parameters)
        module._buffers.update(buffers)


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
        return torch.randn(shape, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=dtype, device=device)


def _gradient_like(y: Any) -> Any:
    if isinstance(y, Tensor):
        return torch.randn_like(y) if y.is_floating_point() else None
    return {i: torch.randn_like(each) for i, each in enumerate(y) if each.is_floating_point()} or None


def _bytes(values: Sequence[Any]) -> int:
    flat = [t for v in values for t in (v if isinstance(v, tuple | list) else (v,)) if isinstance(t, Tensor)]
    return sum(math.prod(t.shape) * t.element_size() for t in flat)
