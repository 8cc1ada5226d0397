"""Images and label maps on disk, of which a device reads only its box: `.npy`, zarr, TIFF, or any array that gives slices."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from convoy.errors import DataError, InputError
from convoy.layout.layout import Box, whole
from convoy.model.entry_points import import_package

_OPENED = 64  # files that a process keeps open


@dataclass(frozen=True, eq=False)
class BoxedImage:
    """An image `(C, H, W)`, a volume or a label map, of which boxes can be read; `open_image` makes one.

    `crop`, `flip`, `normalise` and `to` return another image and read nothing. A box has the numbers of the whole image there.

    Attributes:
        source: a path, or an array.
        positions: for each axis of the source: those of the image, in its order; or one position, and the image lacks the axis.
        order: the axes of the source that the image has, in its order.
        dtype: of the tensors that are read.
        mean, std: per channel, in units of the source; empty: unchanged.
    """

    source: Any
    positions: tuple[int | range, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(self._range(axis)) for axis in range(len(self.order)))

    def crop(self, start: Sequence[int], size: Sequence[int]) -> Self:
        """Return the part of this size from `start` on, along the last axes. InputError: it reaches beyond the image."""
        found, first = self, len(self.order) - len(size)
        for axis, (begin, length) in enumerate(zip(start, size, strict=True), first):
            if not 0 <= begin <= begin + length <= self.shape[axis]:
                raise InputError(
                    f"a crop of {tuple(size)} from {tuple(start)} of an image of {self.shape}: it must lie in the image; "
                    "choose another start or size"
                )
            found = found._with(axis, found._range(axis)[begin : begin + length])
        return found

    def flip(self, axis: int) -> Self:
        return self._with(axis, self._range(axis)[::-1])

    def normalise(self, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype | None = None) -> Self:
        """Return the image as `(x - mean) / std`, with one mean and deviation per channel, in units of the file.

        Args:
            dtype: None: the image's own if it is floating-point, else float32.
        """
        if not len(mean) == len(std) == self.shape[0]:
            raise InputError(f"{len(mean)} means and {len(std)} deviations for {self.shape[0]} channels: give one each")
        dtype = dtype or (self.dtype if self.dtype.is_floating_point else torch.float32)
        return replace(self, mean=tuple(mean), std=tuple(std), dtype=dtype)

    def to(self, dtype: torch.dtype) -> Self:
        return replace(self, dtype=dtype)

    def read(self, box: Box | None = None) -> Tensor:
        """Return a box, a (first, stop) per axis, or everything. DataError: the source cannot be read there."""
        box = whole(self.shape) if box is None else box
        spans = dict(zip(self.order, box, strict=True))
        index: list[int | slice] = []
        backwards: list[int] = []
        kept = sorted(self.order)
        for axis, held in enumerate(self.positions):
            if isinstance(held, int):
                index.append(held)
                continue
            row = held[slice(*spans[axis])]
            index.append(slice(min(row[0], row[-1]), max(row[0], row[-1]) + 1) if row else slice(0, 0))
            if held.step < 0:
                backwards.append(kept.index(axis))
        try:
            values = np.asarray(_array(self.source)[tuple(index)])
        except DataError:
            raise
        except Exception as error:  # what the libraries raise for damaged files
            raise DataError(f"{_name(self.source)} cannot be read at {box} ({error}): copy the file again") from error
        values = np.flip(values, tuple(backwards)).transpose([kept.index(axis) for axis in self.order])
        x = torch.from_numpy(np.array(values, dtype=values.dtype.newbyteorder("="), order="C")).to(self.dtype)
        if self.mean:
            numbers = (torch.tensor(each[slice(*box[0])], dtype=self.dtype) for each in (self.mean, self.std))
            mean, std = (each.reshape(-1, *(1,) * (x.dim() - 1)) for each in numbers)
            x = x.sub_(mean).div_(std)
        return x

    def _range(self, axis: int) -> range:
        held = self.positions[self.order[axis]]
        assert isinstance(held, range)
        return held

    def _with(self, axis: int, held: range) -> Self:
        at = self.order[axis]
        return replace(self, positions=(*self.positions[:at], held, *self.positions[at + 1 :]))


def open_image(source: Any, index: int | Sequence[int] = (), *, channels_last: bool = False) -> BoxedImage:
    """Return an image that is read box by box.

    Args:
        source: path of a `.npy`, `.zarr`, `.tif` or `.tiff`; or an array with `shape`, `dtype` and slices, such as those of
            NumPy, zarr and h5py. zarr and TIFF need the extra `boxes`.
        index: position along the first axis, or axes, of a source that has several images.
        channels_last: the channels are the source's last axis; images have them first.

    Raises:
        DataError: there is no such file or image, or it is damaged.
        InputError: a file of another kind, or a package is missing.
    """
    source = os.fspath(source) if isinstance(source, str | os.PathLike) else source
    chosen, array = (index,) if isinstance(index, int) else tuple(index), _array(source)
    sizes = array.shape[: len(chosen)]
    if len(chosen) >= len(array.shape) or any(not 0 <= i < n for i, n in zip(chosen, sizes, strict=True)):
        raise DataError(f"{_name(source)} has the shape {array.shape}, and no image {chosen}: choose another index")
    try:
        dtype = torch.from_numpy(np.empty(0, np.dtype(array.dtype).newbyteorder("="))).dtype
    except TypeError as error:
        raise DataError(f"{_name(source)} has {array.dtype}: store numbers") from error
    order = tuple(range(len(chosen), len(array.shape)))
    order = (order[-1], *order[:-1]) if channels_last else order
    return BoxedImage(source, (*chosen, *(range(n) for n in array.shape[len(chosen) :])), order, dtype)


def _array(source: Any) -> Any:
    # By process, because workers must not share the offset of an open file.
    return _opened(source, os.getpid()) if isinstance(source, str) else source


@lru_cache(maxsize=_OPENED)
def _opened(path: str, process: int) -> Any:  # noqa: ARG001
    kind = Path(path).suffix
    purpose = f"to read {kind} files"
    if kind not in (".npy", ".zarr", ".tif", ".tiff"):
        raise InputError(
            f"{path}: images are read by box from .npy, .zarr, .tif or .tiff; convert it, or open it yourself"
        )
    zarr = None if kind == ".npy" else import_package("zarr", "boxes", purpose)
    tifffile = import_package("tifffile", "boxes", purpose) if kind.startswith(".tif") else None
    try:
        if zarr is None:
            return np.load(path, mmap_mode="r")
        opened = zarr.open(path if tifffile is None else tifffile.imread(path, aszarr=True), mode="r")
        return opened["0"] if hasattr(opened, "group_keys") else opened  # the largest image of a pyramid
    except Exception as error:  # what the libraries raise for missing and damaged files
        raise DataError(f"{path} cannot be opened ({error}): check its name, or copy the file again") from error


def _name(source: Any) -> str:
    return source if isinstance(source, str) else f"a {type(source).__name__}"
