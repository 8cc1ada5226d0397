"""Builds networks by name: Convoy's own (`builtin.py`), those of torchvision and timm, and the user's (`imported.py`).

::

    model = build_net("resnet18:64", image=(3, 32, 32), classes=10, seed=0)
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from torch import nn

from convoy.errors import InputError, unknown_name
from convoy.model.graph import Graph
from convoy.model.nets.builtin import NETS, ImageShape, build_builtin
from convoy.model.nets.imported import find_imported, is_imported, is_packaged
from convoy.model.tracing import trace
from convoy.model.tracing.nodes import TRACE_LOCK

__all__ = ["NETS", "ImageShape", "build_net", "graph_of", "graph_without_weights"]

ELSEWHERE = ("torchvision:NAME", "timm:NAME", "PACKAGE.MODULE:CALLABLE")


def build_net(text: str, image: ImageShape, classes: int, seed: int = 0) -> nn.Module:
    """Build a network by name, with weights from `seed` (torch's generator; what else a callable draws is its own).

    Args:
        text: "two-conv:150:800" and others of `NETS`; "torchvision:resnet18", "timm:convnext_tiny"; or a callable of one's
            own that returns an nn.Module, as "my_package.my_module:build" (`imported.py` says what it is called with).

    Raises:
        InputError: unknown name (the choices are listed), and what `build_builtin` and `find_imported` say.
    """
    builtin = text.partition(":")[0] in NETS
    if not builtin and not is_imported(text):
        raise unknown_name("net", text, [*(row[2].split(",")[0] for row in NETS.values()), *ELSEWHERE])
    with TRACE_LOCK, torch.random.fork_rng(devices=[]):  # a trace in another thread watches the same random states
        make = partial(build_builtin, text, image, classes) if builtin else find_imported(text, image, classes)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the caller's accelerators too
        return make()


def graph_of(text: str, image: ImageShape = (3, 32, 32), classes: int = 10) -> Graph:
    """The graph of a network by name. It is built without weights where that is possible, so any size costs nothing.

    A net with a part that must be run to know how it treats samples is built with weights, and runs; so is one's own, since
    its trace is then compared with what it computes.

    Raises:
        InputError: as `build_net`.
    """
    build = partial(build_net, text, image, classes)
    if text.partition(":")[0] in NETS:
        return graph_without_weights(partial(build_builtin, text, image, classes), image)
    if is_packaged(text):
        with suppress(InputError, RuntimeError, NotImplementedError):
            return graph_without_weights(build, image)
    return trace(build(), torch.zeros(2, *image)).graph


def graph_without_weights(build: Callable[[], nn.Module], image: ImageShape) -> Graph:
    """The graph of the network that `build` makes, with its parameters on the meta device: no memory, no random numbers."""
    with torch.device("meta"):
        model = build()
    return trace(model, torch.zeros(2, *image)).graph
