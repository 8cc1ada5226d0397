"""Labelled images in memory, as bytes, and normalised floats on demand.

Letters: N images, C channels, H height, W width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from convoy.errors import DataError, InputError

Labelled = tuple[torch.Tensor, torch.Tensor]
"""`(x_NCHW uint8, y_N int64)`: pixels as stored, and their labels."""

_DTYPES = (torch.float32, torch.float64)
_WHITE = 255


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

    def __post_init__(self) -> None:
        _check_tensors(self.x_NCHW, self.targets)
        if self.dtype not in _DTYPES:
            raise InputError(f"images of {self.dtype}: choose one of {', '.join(map(str, _DTYPES))}")
        channels = self.x_NCHW.shape[1]
        if (len(self.mean), len(self.std)) != (channels, channels):
            raise InputError(
                f"{len(self.mean)} means and {len(self.std)} deviations for {channels} channels: give one per channel"
            )
        if not all(std > 0 for std in self.std):
            raise InputError(f"standard deviations {self.std}: each must be above 0; give 1 for a constant channel")
        if len(self.targets) and not 0 <= int(self.targets.min()) <= int(self.targets.max()) < self.classes:
            raise DataError(
                f"labels from {int(self.targets.min())} to {int(self.targets.max())} with {self.classes} classes: "
                "labels run from 0 to classes - 1; are these the labels of this dataset?"
            )

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
        x_CHW = self.x_NCHW[index].to(self.dtype).sub_(self._black_C11).mul_(self._scale_C11)
        return x_CHW, int(self.targets[index])

    def __getitems__(self, indices: Sequence[int] | torch.Tensor) -> Labelled:
        """A batch in one go: `(x_NCHW normalised, y_N int64)`, equal bit for bit to the samples stacked.

        Indices run from 0; none at all gives tensors of shape `(0, C, H, W)` and `(0,)`.

        Raises:
            IndexError: no such image.
        """
        index_N = torch.as_tensor(indices, dtype=torch.int64)
        # index_select copies whole images: here ten times as fast as x_NCHW[index_N], which goes byte by byte.
        stored_NCHW = self.x_NCHW.index_select(0, index_N)
        x_NCHW = stored_NCHW.to(self.dtype).sub_(self._black_C11).mul_(self._scale_C11)
        return x_NCHW, self.targets.index_select(0, index_N)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.image_shape))
        return f"Images({len(self)} of {shape}, {self.classes} classes, {self.dtype})"

    # In units of the stored bytes, so that a batch costs one subtraction and one product.
    @cached_property
    def _black_C11(self) -> torch.Tensor:
        return torch.tensor([_WHITE * mean for mean in self.mean], dtype=self.dtype).reshape(-1, 1, 1)

    @cached_property
    def _scale_C11(self) -> torch.Tensor:
        return torch.tensor([1 / (_WHITE * std) for std in self.std], dtype=self.dtype).reshape(-1, 1, 1)


@dataclass(frozen=True, eq=False)
class Splits:
    """One dataset: what to train on, and what to test on. Both are normalised by the training images.

    Attributes:
        name: as given to `convoy.data.load`.
        train: training images, in the order of the dataset.
        test: test images, in the order of the dataset.
    """

    name: str
    train: Images
    test: Images

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return self.train.classes

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """`(C, H, W)` of one image."""
        return self.train.image_shape

    def first(self, count: int) -> "Splits":
        """Only the first `count` training images, normalised as before; all test images."""
        train = replace(self.train, x_NCHW=self.train.x_NCHW[:count], targets=self.train.targets[:count])
        return replace(self, train=train)


def splits(name: str, train: Labelled, test: Labelled, dtype: torch.dtype) -> Splits:
    """Splits whose classes, mean and standard deviation are those of the training images.

    Raises:
        InputError: a dtype or shape that `Images` does not take, no training images, or test images of another shape.
        DataError: a negative label, or a test label above all training labels.
    """
    (x_NCHW, y_N), (x_test_NCHW, y_test_N) = train, test
    _check_tensors(x_NCHW, y_N)
    _check_tensors(x_test_NCHW, y_test_N)
    if not len(y_N):
        raise InputError(f"{name} has no training images: its mean and deviation need at least one")
    if x_NCHW.shape[1:] != x_test_NCHW.shape[1:]:
        raise InputError(
            f"{name} trains on images of {tuple(x_NCHW.shape[1:])} and tests on {tuple(x_test_NCHW.shape[1:])}: "
            "both must have one shape"
        )
    classes = int(y_N.max()) + 1
    mean, std = channel_statistics(x_NCHW)
    return Splits(
        name=name,
        train=Images(x_NCHW, y_N, classes, mean, std, dtype),
        test=Images(x_test_NCHW, y_test_N, classes, mean, std, dtype),
    )


def channel_statistics(x_NCHW: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 images, in units of white = 1.

    Counted in whole numbers, so that every machine gets the same bits whatever its threads: devices that
    normalised differently would not train the same model. The deviation is that of the population
    (divided by the count). A constant channel gets 1, so that it becomes 0 and not NaN.
    """
    means, stds = [], []
    for x_NHW in x_NCHW.unbind(dim=1):
        counts = torch.bincount(x_NHW.reshape(-1), minlength=_WHITE + 1).tolist()
        total = sum(counts)
        first = sum(value * count for value, count in enumerate(counts))
        second = sum(value * value * count for value, count in enumerate(counts))
        scatter = total * second - first * first
        means.append(first / (total * _WHITE))
        stds.append(math.sqrt(scatter / total**2) / _WHITE if scatter else 1.0)
    return tuple(means), tuple(stds)


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


def _check_tensors(x_NCHW: torch.Tensor, y_N: torch.Tensor) -> None:
    if x_NCHW.dtype != torch.uint8 or x_NCHW.dim() != 4:
        raise InputError(f"images are {x_NCHW.dtype} {tuple(x_NCHW.shape)}: give uint8 of shape (N, C, H, W)")
    if y_N.dtype != torch.int64 or y_N.shape != x_NCHW.shape[:1]:
        raise InputError(
            f"labels are {y_N.dtype} {tuple(y_N.shape)} for {len(x_NCHW)} images: give int64, one for each image"
        )
