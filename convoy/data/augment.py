"""Augments training images with torchvision transforms, given as text like "crop:4,flip".

Steps are applied in the written order to normalised images, so erased pixels and those beyond the border are 0, the mean
colour. The random numbers of an image depend only on its index in the data set, the seed and the epoch: not on the fleet, the
plan, the batch or the worker that loads it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from convoy.data.datasets import seed_of
from convoy.errors import InputError, shown, unknown_name
from convoy.model.entry_points import import_package

STEPS = {
    "crop": (int, "1 pixel of border or more, at most the image's side", "4"),
    "flip": (None, "", ""),
    "resized-crop": (float, "the smallest share of the area, above 0 and up to 1", "0.25"),
    "jitter": (float, "a strength above 0 and up to 1", "0.4"),
    "cutout": (int, "a side of 1 pixel or more, below the image's", "16"),
    "erase": (float, "a probability above 0 and up to 1", "0.5"),
}
"""By step: the type of the number after the colon (int for pixels, float for fractions), its rule and an example."""


@dataclass(frozen=True)
class Augment:
    """Steps to apply to images: name and number (None: the default) of each. Only `jitter` needs the mean and deviation by
    which the images were normalised."""

    steps: tuple[tuple[str, float | None], ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.mean and "jitter" in dict(self.steps):
            met = "augmentation jitter must know black and white, and this data set gives normalised numbers"
            raise InputError(f"{met}: return uint8, or change colours in __getitem__")

    def __call__(self, x_NCHW: Tensor, indices: Sequence[int], seed: int, epoch: int) -> Tensor:
        """Return the augmented batch; `indices` are those of the images in their data set.

        InputError for images that are not normalised, or a step that does not fit their size.
        """
        if x_NCHW.dim() != 4 or not x_NCHW.is_floating_point():
            met = f"augmentation takes floating numbers (N, C, H, W), this data set gives {x_NCHW.dtype} {tuple(x_NCHW.shape)}"
            raise InputError(f"{met}: convoy.data.from_datasets makes them of uint8 and PIL images")
        if not len(x_NCHW):
            return x_NCHW
        transform, images = _transform(self, *x_NCHW.shape[1:]), []
        with torch.random.fork_rng(devices=[]):  # the transforms draw from torch's global generator
            for x_CHW, index in zip(x_NCHW, indices, strict=True):
                torch.default_generator.manual_seed(seed_of(f"augment/{seed}/{epoch}/{index}"))
                images.append(transform(x_CHW))
        return torch.stack(images)


@lru_cache(maxsize=16)
def _transform(augment: Augment, channels: int, height: int, width: int) -> Callable[[Tensor], Tensor]:
    """Return the transforms for images of this shape."""
    size, shorter, numbers = (height, width), min(height, width), dict(augment.steps)
    padding, side = int(numbers.get("crop") or max(1, shorter // 8)), int(numbers.get("cutout") or max(1, shorter // 2))
    for name, fits, rule in (
        ("crop", padding <= max(size), f":{padding} moves them out of sight; give {max(size)} or less"),
        ("cutout", side < shorter, f":{side} leaves nothing of them; give less than {shorter}"),
        ("jitter", channels in (1, 3), f" changes grey or red, green, blue, not {channels} channels; leave it out"),
    ):
        if name in numbers and not fits:
            raise InputError(f"images of {height} x {width} pixels: augmentation {name}{rule}")
    v2 = import_package("torchvision.transforms.v2", "images", "--augment")
    square = side**2 / (height * width)
    normalised = v2.Normalize(augment.mean, augment.std)
    in_colours = v2.Normalize(
        [-m / s for m, s in zip(augment.mean, augment.std, strict=True)], [1 / s for s in augment.std]
    )
    make: dict[str, Callable[[Any], Any]] = {
        "crop": lambda _: v2.RandomCrop(size, padding=padding),
        "flip": lambda _: v2.RandomHorizontalFlip(),
        "resized-crop": lambda area: v2.RandomResizedCrop(size, scale=(area or 0.08, 1.0), antialias=True),
        "jitter": lambda strength: v2.Compose([in_colours, v2.ColorJitter(*[strength or 0.4] * 3), normalised]),
        "cutout": lambda _: v2.RandomErasing(p=1.0, scale=(square, square), ratio=(1.0, 1.0)),
        "erase": lambda share: v2.RandomErasing(p=share or 0.5, scale=(0.02, 1 / 3), ratio=(0.3, 3.3)),
    }
    transforms: Callable[[Tensor], Tensor] = v2.Compose([make[name](number) for name, number in augment.steps])
    return transforms


def augment_steps(text: str) -> tuple[tuple[str, float | None], ...]:
    """Parse names and numbers of steps, such as "crop:4,flip". Needs no torchvision.

    InputError for an unknown name, an invalid number, or a duplicate step.
    """
    steps: dict[str, float | None] = {}
    for item in text.split(","):
        name, colon, written = item.strip().partition(":")
        if name not in STEPS:
            raise unknown_name("augmentation", name, STEPS)
        if name in steps:
            raise InputError(f"augmentation {text!r} has {name} twice: name each step once")
        kind, rule, example = STEPS[name]
        if colon and kind is None:
            raise InputError(f"augmentation {name}:{written}: {name} takes no number; write {name}")
        try:
            number = kind(written) if colon and kind is not None else None
        except ValueError:
            number = -1
        if number is not None and not (number >= 1 if kind is int else 0 < number <= 1):
            raise InputError(f"augmentation {shown(f'{name}:{written}')}: give {rule}, e.g. {name}:{example}")
        steps[name] = number
    return tuple(steps.items())
