"""Labelled images in memory, as bytes, and normalised floats on demand.

Letters: N images, C channels, H height, W width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from convoy.data.scale import Scale
from convoy.errors import DataError, InputError

Labelled = tuple[torch.Tensor, torch.Tensor]
"""`(x_NCHW uint8, y_N int64)`: pixels as stored, and their labels."""


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
