"""Graphs of the networks by name, written down instead of traced: no weights are made, so any size costs nothing.

They equal what `trace(build_net(...))` gives, to the fingerprint (a test holds the two together).
"""

import math
from dataclasses import dataclass, field
from typing import Self

from convoy.errors import InputError
from convoy.model.graph import Graph, Kind, Layer, Parameter
from convoy.sharding.layout import Shape

ImageShape = tuple[int, int, int]
"""Channels, height, width."""


@dataclass
class Stack:
    """Layers one after the other, as in nn.Sequential: named by their place."""

    image: ImageShape
    layers: list[Layer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layers.append(Layer("input_1", "input", (), self.image))

    @property
    def shape(self) -> Shape:
        return self.layers[-1].shape

    def _add(self, kind: Kind, shape: Shape, flop: int = 0, **parameters: Shape) -> Self:
        name = str(len(self.layers) - 1)
        owned = {key: Parameter(f"{name}.{key}", size, trainable=True) for key, size in parameters.items()}
        self.layers.append(Layer(name, kind, (self.layers[-1].name,), shape, owned, flop=flop))
        return self

    def conv(self, filters: int, kernel: int) -> Self:
        """An odd square kernel with 'same' padding and a bias, then ReLU."""
        channels, height, width = self.shape
        flop = 2 * filters * channels * kernel * kernel * height * width
        self._add("conv", (filters, height, width), flop, weight=(filters, channels, kernel, kernel), bias=(filters,))
        return self.relu()

    def relu(self) -> Self:
        return self._add("elementwise", self.shape)

    def pool(self) -> Self:
        channels, height, width = self.shape
        return self._add("pool", (channels, height // 2, width // 2))

    def flatten(self) -> Self:
        return self._add("flatten", (math.prod(self.shape),))

    def linear(self, features: int) -> Self:
        (before,) = self.shape
        return self._add("linear", (features,), 2 * before * features, weight=(features, before), bias=(features,))

    def graph(self) -> Graph:
        return Graph("Sequential", {layer.name: layer for layer in self.layers}, (self.layers[-1].name,))


def two_conv_graph(
    first: int, second: int, image: ImageShape = (3, 32, 32), classes: int = 10, kernel: int = 5
) -> Graph:
    """`nets.two_conv`; the size of its kernels is our assumption, so here it can be another odd number."""
    stack = Stack(image).conv(first, kernel).pool().conv(second, kernel).pool()
    return stack.flatten().linear(classes).graph()


def alexnet_graph(features: int, image: ImageShape = (3, 32, 32), classes: int = 10) -> Graph:
    """`nets.alexnet`."""
    stack = Stack(image).conv(64, 5).pool().conv(192, 5).pool().conv(384, 3).conv(256, 3).conv(256, 3).pool().flatten()
    for _ in range(3):
        stack = stack.linear(features).relu()
    return stack.linear(classes).graph()


def graph_of(net: str, image: ImageShape = (3, 32, 32), classes: int = 10) -> Graph:
    """The graph of a network by name, e.g. "alexnet:4096"; two-conv and alexnet are written down, others are traced.

    Raises:
        InputError: unknown name or sizes, as `nets.build_net`.
    """
    name, *sizes = net.split(":")
    if name == "two-conv" and len(sizes) in (0, 2):
        first, second = _whole(net, sizes) or (50, 500)
        return two_conv_graph(first, second, image, classes)
    if name == "alexnet" and len(sizes) in (0, 1):
        (features,) = _whole(net, sizes) or (4096,)
        return alexnet_graph(features, image, classes)
    import torch

    from convoy.model.nets import build_net
    from convoy.model.tracing import trace

    return trace(build_net(net, image, classes), torch.zeros(2, *image)).graph


def _whole(net: str, sizes: list[str]) -> tuple[int, ...]:
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise InputError(f"net {net!r}: its sizes are whole numbers of 1 or more, e.g. two-conv:50:500; correct them")
    return tuple(int(size) for size in sizes)
