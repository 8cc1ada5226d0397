"""The convolutional families of torchvision and timm: one small member of each, found in their registries.

A family is a module of the library (`timm.models.resnet`). Its member here is the one with the fewest parameters, as counted
on the meta device; timm's `test_*` nets are left out, as nobody uses them. It is convolutional if that member has at least
four convolutions that see neighbours: kernels larger than their strides, which patch embeddings have not.
"""

import inspect
import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from tests.support.model_zoo import make_importable

LIBRARIES = ("torchvision", "timm")
CONVOLUTIONS = 4
_ROOMS = ("segmentation.", "video.")
"""Of torchvision.models. Others take lists of images with boxes (detection), or hold no floating-point numbers."""


@dataclass(frozen=True)
class Member:
    """The smallest net of a family.

    Attributes:
        family: "timm resnet", "torchvision segmentation.fcn".
        name: as the library's `create_model` or `get_model` takes it.
        parameters: how many.
        convolutions: that see neighbours.
    """

    family: str
    name: str
    parameters: int
    convolutions: int

    @property
    def library(self) -> str:
        return self.family.partition(" ")[0]

    @property
    def convolutional(self) -> bool:
        return self.convolutions >= CONVOLUTIONS


def names_by_family() -> dict[str, list[str]]:
    """Return every family of both libraries with the names of its nets."""
    make_importable()
    import timm
    import torchvision

    result: defaultdict[str, list[str]] = defaultdict(list)
    for name in torchvision.models.list_models():
        _, _, module = torchvision.models.get_model_builder(name).__module__.partition("torchvision.models.")
        if "." not in module or module.startswith(_ROOMS):
            result[f"torchvision {module}"].append(name)
    for module in timm.list_modules():
        names = [name for name in timm.list_models(module=module) if not name.startswith("test_")]
        result[f"timm {module}"] = names
    return {family: names for family, names in result.items() if names}


def build(family: str, name: str, **options: Any) -> nn.Module:
    """Build a net with fresh weights."""
    make_importable()
    import timm
    import torchvision

    if family.startswith("timm"):
        return timm.create_model(name, **options)  # type: ignore[no-any-return]
    if family == "torchvision video.mvit":
        return _small_film(torchvision.models.video.mvit, name)
    builder = torchvision.models.get_model_builder(name)
    more = {k: None for k in ("weights", "weights_backbone") if k in inspect.signature(builder).parameters}
    return builder(**more, **options)  # type: ignore[no-any-return]


def _small_film(mvit: Any, name: str) -> nn.Module:
    """Build MViT for videos of 4x64x64: its builders support 16x224x224 only, but the class takes any size."""

    def make(**options: Any) -> nn.Module:
        return made(**{**options, "spatial_size": (64, 64), "temporal_size": 4})  # type: ignore[no-any-return]

    made = mvit._mvit
    with patch.object(mvit, "_mvit", make):
        return getattr(mvit, name)(weights=None)  # type: ignore[no-any-return]


def narrowed(family: str, model: nn.Module) -> nn.Module:
    """Narrow VGG's classifier to 64 features: with 4,096, three devices in one process fill 19 GB in float64."""
    if family == "torchvision vgg":
        model.classifier[0], model.classifier[3] = nn.Linear(512 * 7 * 7, 64), nn.Linear(64, 4096)  # type: ignore[index, operator]
    if family == "timm vgg":
        model.pre_logits.fc1, model.pre_logits.fc2 = nn.Conv2d(512, 64, 7), nn.Conv2d(64, 4096, 1)  # type: ignore[union-attr]
    return model


def smallest(family: str, names: Iterable[str]) -> Member:
    """Return the net with the fewest parameters and its number of convolutions."""
    found = []
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with torch.device("meta"):
                    model = build(family, name)
            except NotImplementedError:  # its constructor computes widths with tensors
                model = build(family, name)
        found.append(
            Member(
                family, name, sum(p.numel() for p in model.parameters()), sum(map(_sees_neighbours, model.modules()))
            )
        )
    return min(found, key=lambda member: member.parameters)


def _sees_neighbours(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv2d | nn.Conv3d):
        return False
    return any(k > s for k, s in zip(module.kernel_size, module.stride, strict=True))
