"""Bytes to numbers around 0: mean and deviation of each channel, and the scaling by them.

Letters: N images, C channels, H height, W width, B values of a byte.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from convoy.errors import InputError

WHITE = 255
_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Scale:
    """Turns stored pixels into numbers: `((x / 255) - mean) / std`, channel by channel.

    Attributes:
        mean, std: per channel, in units of white = 1; both empty: numbers that are ready, only their dtype is changed.
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
    """How often each channel of uint8 images has each value, int64 of shape `(C, 256)`. Counts of parts add up."""
    rows = [torch.bincount(x_NHW.reshape(-1), minlength=WHITE + 1) for x_NHW in x_NCHW.unbind(dim=1)]
    return torch.stack(rows)


def statistics(counts_CB: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, in units of white = 1, from `byte_counts`.

    Counted in whole numbers, so that every machine gets the same bits whatever its threads: devices that
    normalised differently would not train the same model. The deviation is that of the population
    (divided by the count). A constant channel gets 1, so that it becomes 0 and not NaN.
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
