"""Graphs of small plain nets, layer after layer: Stack((3, 16, 16)).conv(32, 3).pool().flatten().linear(10).graph()."""

import math
from typing import Self

from torch import nn

from convoy.layout.layout import Shape
from convoy.model.graph import Graph
from convoy.model.nets import ImageShape, graph_without_weights


class Stack:
    """Consecutive layers, as in nn.Sequential, named by position."""

    def __init__(self, image: ImageShape) -> None:
        self.image, self.shape, self.layers = image, Shape(image), list[nn.Module]()

    def _add(self, shape: Shape, *layers: nn.Module) -> Self:
        self.shape = shape
        self.layers += layers
        return self

    def conv(self, filters: int, kernel: int) -> Self:
        """Add a convolution with an odd square kernel and 'same' padding, then ReLU."""
        convolution = nn.Conv2d(self.shape[0], filters, kernel, padding=kernel // 2, device="meta")
        return self._add((filters, *self.shape[1:]), convolution, nn.ReLU())

    def pool(self) -> Self:
        channels, height, width = self.shape
        return self._add((channels, height // 2, width // 2), nn.MaxPool2d(2))

    def flatten(self) -> Self:
        return self._add((math.prod(self.shape),), nn.Flatten())

    def linear(self, features: int) -> Self:
        return self._add((features,), nn.Linear(self.shape[0], features, device="meta"))

    def graph(self) -> Graph:
        return graph_without_weights(lambda: nn.Sequential(*self.layers), self.image)
