"""Small nets by name, with weights that depend on a seed alone."""

from collections.abc import Callable

import torch
from torch import nn

from tests.support.odd_nets import (
    Auxiliary,
    Bare,
    Declared,
    DependentSamples,
    Dropouts,
    Frozen,
    HalfBatch,
    Hooked,
    InPlace,
    NoGradient,
    Noting,
    OpaquePerSample,
    OpaqueWhole,
    OwnBackward,
    OwnNorms,
    Sizes,
    Tied,
)
from tests.support.plain_nets import (
    CLASSES,
    Concatenation,
    Convolutions,
    FrozenNorm,
    Lopsided,
    Mobile,
    ResNet,
    Shuffle,
    Signal,
    Tokens,
    TwoConv,
)
from tests.support.torch_seed import torch_seed

__all__ = [
    "CLASSES",
    "NETS",
    "Auxiliary",
    "Bare",
    "Concatenation",
    "Convolutions",
    "DependentSamples",
    "Dropouts",
    "Frozen",
    "FrozenNorm",
    "HalfBatch",
    "Hooked",
    "InPlace",
    "Lopsided",
    "Mobile",
    "NoGradient",
    "Noting",
    "OpaquePerSample",
    "OpaqueWhole",
    "OwnBackward",
    "OwnNorms",
    "ResNet",
    "Shuffle",
    "Signal",
    "Sizes",
    "Tied",
    "Tokens",
    "TwoConv",
    "build",
    "shape_of",
]

NETS: dict[str, Callable[[], nn.Module]] = {
    "two-conv": TwoConv,
    "resnet": ResNet,
    "concatenation": Concatenation,
    "mobile": Mobile,
    "convolutions": Convolutions,
    "lopsided": Lopsided,
    "signal": Signal,
    "frozen-norm": FrozenNorm,
    "frozen": Frozen,
    "auxiliary": Auxiliary,
    "bare": Bare,
    "tied": Tied,
    "in-place": InPlace,
    "opaque-per-sample": lambda: OpaquePerSample(Declared),
    "opaque-whole": OpaqueWhole,
    "dependent-samples": DependentSamples,
    "dependent-in-training": lambda: DependentSamples(only_training=True),
    "noting": Noting,
    "own-norm": OwnNorms,
    "sizes": Sizes,
    "half-batch": HalfBatch,
    "shuffle": Shuffle,
    "no-gradient": NoGradient,
    "own-backward": OwnBackward,
    "hooked": Hooked,
    "tokens": Tokens,
}
"""All but `Dropouts`, whose training is not that of one device."""


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Build a net whose weights depend on the seed only."""
    with torch_seed(seed):
        return NETS[name]().to(dtype)


def shape_of(model: nn.Module) -> tuple[int, ...]:
    """Return the shape of one input of a net."""
    return getattr(model, "shape", (3, 8, 8))
