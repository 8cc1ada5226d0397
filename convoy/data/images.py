"""Labelled images, in memory or read when they are wanted, and their scaling from bytes to numbers around 0.

Letters: N images, C channels, H height, W width, B values of a byte.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from convoy.errors import DataError, InputError

Labelled = tuple[torch.Tensor, torch.Tensor]
"""`(x_NCHW uint8, y_N int64)`: pixels as stored, and their labels."""

LOOKED_AT = 256
"""Training images that are read to determine channels, mean and deviation of a data set."""

WHITE = 255
_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Scale:
    """Normalises stored pixels: `((x / 255) - mean) / std`, channel by channel.

    Attributes:
        mean, std: per channel, in units of white = 1; both empty: the values are used as they are, in this dtype.
        dtype: of the numbers, float32 or float64.

    Raises:
        InputError: another dtype, a deviation that is not above 0.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise InputError(f"images of {self.dtype}: choose one of {', '.join(map(str, _DTYPES))}")
        if not all(std > 0 for std in self.std):
            raise InputError(f"standard deviations {self.std}: each must be above 0; give 1 for a constant channel")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor of the same shape, `(..., C, H, W)`."""
        if not self.mean:
            return x.to(self.dtype, copy=True)
        return x.to(self.dtype).sub_(self._black_C11).mul_(self._scale_C11)

    # In units of the stored bytes, so that a batch costs one subtraction and one product. Each of the two is rounded by
    # itself: the numbers of an image do not depend on what else is in the batch.
    @cached_property
    def _black_C11(self) -> torch.Tensor:
        return torch.tensor([WHITE * mean for mean in self.mean], dtype=self.dtype).reshape(-1, 1, 1)

    @cached_property
    def _scale_C11(self) -> torch.Tensor:
        return torch.tensor([1 / (WHITE * std) for std in self.std], dtype=self.dtype).reshape(-1, 1, 1)


def byte_counts(x_NCHW: torch.Tensor) -> torch.Tensor:
    """Histogram of each channel of uint8 images, int64 of shape `(C, 256)`. Histograms of parts add up."""
    return torch.stack([torch.bincount(x_NHW.reshape(-1), minlength=WHITE + 1) for x_NHW in x_NCHW.unbind(dim=1)])


def statistics(counts_CB: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, in units of white = 1, from `byte_counts`.

    In integers, so that every machine gets the same bits whatever its threads. The deviation is that of the population
    (divided by the count); a constant channel gets 1, so that it becomes 0 and not NaN.
    """
    means, stds = [], []
    for counts in counts_CB.tolist():
        total = sum(counts)
        first = sum(value * count for value, count in enumerate(counts))
        second = sum(value * value * count for value, count in enumerate(counts))
        scatter = total * second - first * first
        means.append(first / (total * WHITE))
        stds.append(math.sqrt(scatter / total**2) / WHITE if scatter else 1.0)
    return tuple(means), tuple(stds)


def measured_scale(read: Callable[[int], torch.Tensor], count: int, dtype: torch.dtype) -> Scale:
    """Scale by mean and deviation of the first `count` images, exactly; one image is in memory at a time."""
    counts_CB = byte_counts(read(0)[None])
    for index in range(1, count):
        counts_CB += byte_counts(read(index)[None])
    return Scale(*statistics(counts_CB), dtype)


# ------------------------------------------------------------------------------------------------ images


@dataclass(frozen=True, eq=False, repr=False)
class Images(Dataset[tuple[torch.Tensor, int]]):
    """Labelled images, kept as bytes: a quarter of the memory of floats.

    A sample is `((x / 255) - mean) / std`, channel by channel. `__getitems__` gives a whole batch, already
    stacked; a `torch.utils.data.DataLoader` over these images therefore wants `collate_fn=lambda batch: batch`.

    Attributes:
        x_NCHW: the pixels, uint8.
        targets: the labels y_N, int64, each in `range(classes)`; here to be read without loading any image.
        classes: how many classes there are.
        mean: per channel, in units of white = 1.
        std: per channel, in units of white = 1.
        dtype: of the normalised images, float32 or float64.

    Raises:
        InputError: a dtype or shape that is none of the above.
        DataError: a label outside `range(classes)`.
    """

    x_NCHW: torch.Tensor
    targets: torch.Tensor
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    dtype: torch.dtype = torch.float32
    _scale: Scale = field(init=False)

    def __post_init__(self) -> None:
        check_tensors(self.x_NCHW, self.targets)
        channels = self.x_NCHW.shape[1]
        if (len(self.mean), len(self.std)) != (channels, channels):
            raise InputError(
                f"{len(self.mean)} means and {len(self.std)} deviations for {channels} channels: give one per channel"
            )
        check_range(self.targets, self.classes)
        object.__setattr__(self, "_scale", Scale(self.mean, self.std, self.dtype))

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """`(C, H, W)` of one image."""
        _, channels, height, width = self.x_NCHW.shape
        return channels, height, width

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """One sample: `(x_CHW normalised, label)`.

        Raises:
            IndexError: no such image.
        """
        return self._scale(self.x_NCHW[index]), int(self.targets[index])

    def __getitems__(self, indices: Sequence[int] | torch.Tensor) -> Labelled:
        """A batch in one go: `(x_NCHW normalised, y_N int64)`, equal bit for bit to the samples stacked.

        Indices run from 0; none at all gives tensors of shape `(0, C, H, W)` and `(0,)`.

        Raises:
            IndexError: no such image.
        """
        index_N = torch.as_tensor(indices, dtype=torch.int64)
        # index_select copies whole images: here ten times as fast as x_NCHW[index_N], which goes byte by byte.
        return self._scale(self.x_NCHW.index_select(0, index_N)), self.targets.index_select(0, index_N)

    def first(self, count: int) -> "Images":
        """Only the first `count` images, normalised as before."""
        return replace(self, x_NCHW=self.x_NCHW[:count], targets=self.targets[:count])

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.image_shape))
        return f"Images({len(self)} of {shape}, {self.classes} classes, {self.dtype})"


@dataclass(frozen=True, eq=False, repr=False)
class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Labelled images that a function reads one by one, for data too large for memory or made on demand.

    Attributes:
        read: gives image `index`, of `image_shape`: uint8, or normalised already where `scale` has no mean.
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
        """Per channel, in units of white = 1; empty where images come normalised."""
        return self.scale.mean

    @property
    def std(self) -> tuple[float, ...]:
        """Per channel, in units of white = 1; empty where images come normalised."""
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


def check_range(targets: torch.Tensor, classes: int) -> None:
    """Refuse a label outside `range(classes)`.

    Raises:
        DataError: gives the smallest and the largest label.
    """
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < classes:
        raise DataError(
            f"labels from {int(targets.min())} to {int(targets.max())} with {classes} classes: "
            "labels run from 0 to classes - 1; are these the labels of this dataset?"
        )


def check_labels(path: Path, labels_N: npt.NDArray[np.uint8], classes: int) -> None:
    """Refuse a file with a label outside `range(classes)`.

    Raises:
        DataError: names the file and the first such label.
    """
    outside = np.flatnonzero(labels_N >= classes)
    if len(outside):
        raise DataError(
            f"{path}: image {outside[0]} has label {labels_N[outside[0]]}, and {len(outside)} of {len(labels_N)} "
            f"labels are above {classes - 1}: the file is damaged or of another dataset; fetch it again"
        )


def check_tensors(x_NCHW: torch.Tensor, y_N: torch.Tensor) -> None:
    """Refuse what are not uint8 images of shape `(N, C, H, W)` with int64 labels of shape `(N,)`.

    Raises:
        InputError: gives dtype and shape.
    """
    if x_NCHW.dtype != torch.uint8 or x_NCHW.dim() != 4:
        raise InputError(f"images are {x_NCHW.dtype} {tuple(x_NCHW.shape)}: give uint8 of shape (N, C, H, W)")
    if y_N.dtype != torch.int64 or y_N.shape != x_NCHW.shape[:1]:
        raise InputError(
            f"labels are {y_N.dtype} {tuple(y_N.shape)} for {len(x_NCHW)} images: give int64, one for each image"
        )
