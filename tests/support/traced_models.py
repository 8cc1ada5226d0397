"""Small models for the tests of trace (one function of a convolution's output each), and a trace run on one device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from convoy.model.graph import Layer
from convoy.model.operation import TracedModel, call_operation, fill
from convoy.model.tracing import trace


def layers_of(model: nn.Module, shape: tuple[int, ...] = (3, 8, 8), **options: Any) -> dict[str, Layer]:
    return dict(trace(model, torch.zeros(2, *shape), **options).graph.layers)


def split_in(model: nn.Module, shape: tuple[int, ...] = (3, 8, 8)) -> list[str]:
    """The submodules that are split, of a model whose own forward must run on every device."""
    live = trace(model, torch.zeros(2, *shape)).live
    assert live is not None
    return [part.path for part in live]


class Calls(nn.Module):
    """A model that is one function of its input, and of a few parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.conv(x))


def last(function: Callable[..., Any], **options: Any) -> Layer:
    """The layer that a function of a convolution's output becomes."""
    return list(layers_of(Calls(function), **options).values())[-1]


def run_traced(model: nn.Module, traced: TracedModel, inputs: Sequence[Tensor]) -> Any:
    """Run a trace on one device, layer by layer."""
    values: dict[str, Any] = {layer.name: x for layer, x in zip(traced.graph.inputs, inputs, strict=True)}
    for name, layer in traced.graph.layers.items():
        if layer.kind != "input":
            reads = [values[i] for i in layer.inputs]
            with torch.set_grad_enabled(layer.differentiable and torch.is_grad_enabled()):
                values[name] = call_operation(model, traced.operations[name], reads, len(inputs[0]))
    return fill(traced.result, [values[name] for name in traced.graph.outputs])
