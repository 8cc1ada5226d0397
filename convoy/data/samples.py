"""Labelled images that are read when they are wanted: too many for memory, or made by a data set of yours."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.utils.data import Dataset

from convoy.data.images import check_range
from convoy.data.scale import Scale, byte_counts, statistics

LOOKED_AT = 256
"""Training images that are read to find out what a data set is like: its colours, its mean and deviation."""


@dataclass(frozen=True, eq=False, repr=False)
class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Labelled images behind a function that reads one of them.

    Attributes:
        read: gives image `index`, of `image_shape`: uint8, or numbers that are ready where `scale` has no mean.
        targets: the labels y_N, int64, each in `range(classes)`; here to be read without loading any image.
        classes: how many classes there are.
        image_shape: `(C, H, W)` of every image.
        scale: how pixels become numbers.

    Raises:
        DataError: a label outside `range(classes)`; while reading, whatever `read` raises.
    """

    read: Callable[[int], torch.Tensor]
    targets: torch.Tensor
    classes: int
    image_shape: tuple[int, int, int]
    scale: Scale

    def __post_init__(self) -> None:
        check_range(self.targets, self.classes)

    @property
    def mean(self) -> tuple[float, ...]:
        """Per channel, in units of white = 1; empty where the numbers were ready."""
        return self.scale.mean

    @property
    def std(self) -> tuple[float, ...]:
        """Per channel, in units of white = 1; empty where the numbers were ready."""
        return self.scale.std

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """One sample: `(x_CHW normalised, label)`.

        Raises:
            IndexError: no such image.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"no image {index}: they run from 0 to {len(self) - 1}")
        return self.scale(self.read(index)), int(self.targets[index])

    def first(self, count: int) -> "Samples":
        """Only the first `count` images, normalised as before."""
        return replace(self, targets=self.targets[:count])

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.image_shape))
        return f"Samples({len(self)} of {shape}, {self.classes} classes, {self.scale.dtype})"


def measured_scale(read: Callable[[int], torch.Tensor], count: int, dtype: torch.dtype) -> Scale:
    """Scale by mean and deviation of the first `count` images, exactly; one image is in memory at a time."""
    first, *others = range(count)
    counts_CB = byte_counts(read(first)[None])
    for index in others:
        counts_CB += byte_counts(read(index)[None])
    return Scale(*statistics(counts_CB), dtype)
