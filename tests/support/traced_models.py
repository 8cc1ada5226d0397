"""Small models for the tests of trace: one function of a convolution's output each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from convoy.model.graph import Layer
from convoy.model.tracing import trace


def layers_of(model: nn.Module, shape: tuple[int, ...] = (3, 8, 8), **options: Any) -> dict[str, Layer]:
    return dict(trace(model, torch.zeros(2, *shape), **options).graph.layers)


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
