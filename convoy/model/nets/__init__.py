"""Networks by name, for the command line, the benchmarks and the tests of what was published.

::

    model = build_net("resnet18:64", image=(3, 32, 32), classes=10, seed=0)

`builtin.py` has Convoy's own small nets; `imported.py` takes those of torchvision and timm, and one's own, as they are.
"""

from functools import partial

import torch
from torch import nn

from convoy.errors import unknown_name
from convoy.model.nets.builtin import NETS, ImageShape, build_builtin
from convoy.model.nets.imported import find_imported, is_imported

__all__ = ["NETS", "ImageShape", "build_net"]

ELSEWHERE = ("torchvision:NAME", "timm:NAME", "PACKAGE.MODULE:CALLABLE")


def build_net(text: str, image: ImageShape, classes: int, seed: int = 0) -> nn.Module:
    """A network from a text, with weights drawn from `seed` (torch's random numbers; what else a callable draws is its own).

    Args:
        text: "two-conv:150:800" and others of `NETS`; "torchvision:resnet18", "timm:convnext_tiny"; or a callable of one's
            own that returns an nn.Module, as "my_package.my_module:build" (`imported.py` says what it is called with).

    Raises:
        InputError: unknown name (the choices are listed), and what `build_builtin` and `find_imported` say.
    """
    builtin = text.partition(":")[0] in NETS
    if not builtin and not is_imported(text):
        raise unknown_name("net", text, [*(row[2].split(",")[0] for row in NETS.values()), *ELSEWHERE])
    with torch.random.fork_rng(devices=[]):
        make = partial(build_builtin, text, image, classes) if builtin else find_imported(text, image, classes)
        torch.manual_seed(seed)
        return make()
