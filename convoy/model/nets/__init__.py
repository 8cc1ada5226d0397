"""Builds networks by name: built-in (`builtin.py`), from torchvision and timm, and from user functions (`imported.py`)."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from torch import nn

from convoy.errors import InputError, unknown_name
from convoy.model.entry_points import names_callable
from convoy.model.graph import Graph
from convoy.model.nets.builtin import NETS, ImageShape, build_builtin
from convoy.model.nets.imported import find_imported, is_packaged
from convoy.model.tracing import trace

__all__ = ["NETS", "ImageShape", "build_net", "graph_of", "graph_without_weights"]

ELSEWHERE = ("torchvision:NAME", "timm:NAME", "PACKAGE.MODULE:CALLABLE")


def build_net(text: str, image: ImageShape, classes: int, seed: int = 0) -> nn.Module:
    """Build a network by name. `seed` determines its weights, through torch's CPU generator.

    Args:
        text: a net of `NETS` ("two-conv:150:800"), "torchvision:resnet18", "timm:convnext_tiny", or a user function that
            returns an nn.Module, as "my_package.my_module:build" (see `imported.py`).

    Raises:
        InputError: the name is unknown (the message lists the choices); also see `build_builtin` and `find_imported`.
    """
    builtin = text.partition(":")[0] in NETS
    if not builtin and not is_packaged(text) and not names_callable(text):
        raise unknown_name("net", text, [*(row[2].split(",")[0] for row in NETS.values()), *ELSEWHERE])
    with torch.random.fork_rng(devices=[]):
        make = partial(build_builtin, text, image, classes) if builtin else find_imported(text, image, classes)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the caller's accelerators too
        return make()


def graph_of(text: str, image: ImageShape = (3, 32, 32), classes: int = 10) -> Graph:
    """Return the graph of a network by name. If all kinds of layers are known, no weights are allocated."""
    if text.partition(":")[0] in NETS:
        return graph_without_weights(partial(build_builtin, text, image, classes), image)
    if is_packaged(text):
        with suppress(InputError, RuntimeError, NotImplementedError):
            return graph_without_weights(partial(build_net, text, image, classes), image)
    return trace(build_net(text, image, classes), torch.zeros(2, *image)).graph


def graph_without_weights(build: Callable[[], nn.Module], image: ImageShape) -> Graph:
    """Return the graph of the network that `build` returns, built on the meta device: without weights or random numbers."""
    with torch.device("meta"):
        model = build()
    return trace(model, torch.zeros(2, *image)).graph
