"""Labelled images, in memory or loaded when needed, and their split into training and test images.

Letters in names: N images, C channels, H height, W width, B byte values.
"""

import hashlib
import json
import math
import operator
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from convoy.errors import ConvoyError, DataError, InputError

Labelled = tuple[Tensor, Tensor]
"""`(x_NCHW, y_N int64)`: images and their labels."""


def normalise(x: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return `((x / 255) - mean) / std`, channel by channel, as a new tensor; without a mean only the dtype changes."""
    if not mean:
        return x.to(dtype, copy=True)
    # Two operations, rounded separately, so that an image's values do not depend on the rest of the batch.
    black_C11 = torch.tensor([255 * each for each in mean], dtype=dtype).reshape(-1, 1, 1)
    scale_C11 = torch.tensor([1 / (255 * each) for each in std], dtype=dtype).reshape(-1, 1, 1)
    return x.to(dtype).sub_(black_C11).mul_(scale_C11)


def byte_counts(x_NCHW: Tensor) -> Tensor:
    """Return the histogram of each channel of uint8 images, int64 of shape `(C, 256)`."""
    return torch.stack([torch.bincount(x_NHW.flatten(), minlength=256) for x_NHW in x_NCHW.unbind(dim=1)])


def statistics(counts_CB: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel, in units of white = 1, from `byte_counts`.

    A constant channel gets the deviation 1, so that it becomes 0 and not NaN.
    """
    means, stds = [], []
    for counts in counts_CB.tolist():
        # In whole numbers, so that every machine gets the same bits whatever its threads.
        total, first, second = (sum(value**power * n for value, n in enumerate(counts)) for power in (0, 1, 2))
        means.append(first / (total * 255))
        stds.append(math.sqrt((total * second - first**2) / total**2) / 255 or 1.0)
    return tuple(means), tuple(stds)


@dataclass(frozen=True, eq=False, repr=False)
class Images(Dataset[tuple[Tensor, int]]):
    """Labelled images in memory, kept as bytes. A sample is `((x / 255) - mean) / std`, channel by channel.

    Attributes:
        x_NCHW, targets: the pixels, uint8; the labels y_N, int64, each in `range(classes)`.
        mean, std: per channel, in units of white = 1.
        dtype: of the normalised images, float32 or float64.
    """

    x_NCHW: Tensor
    targets: Tensor
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        x, y = self.x_NCHW, self.targets
        if x.dtype != torch.uint8 or x.dim() != 4 or y.dtype != torch.int64 or y.shape != x.shape[:1]:
            met = f"images are {x.dtype} {tuple(x.shape)} and labels {y.dtype} {tuple(y.shape)}"
            raise InputError(f"{met}: give uint8 of shape (N, C, H, W) and int64 of shape (N,)")
        if not len(self.mean) == len(self.std) == x.shape[1] or min(self.std) <= 0:
            raise InputError(f"means {self.mean}, deviations {self.std}: give one, above 0, per channel ({x.shape[1]})")
        check_labels(y, self.classes, self.dtype)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        _, channels, height, width = self.x_NCHW.shape
        return channels, height, width

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return `(x_CHW normalised, label)`."""
        return normalise(self.x_NCHW[index], self.mean, self.std, self.dtype), int(self.targets[index])

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        x_NCHW, y_N = self.batch(indices)
        return list(zip(x_NCHW.unbind(), y_N.tolist(), strict=True))

    def batch(self, indices: Sequence[int] | Tensor) -> Labelled:
        """Return a batch, `(x_NCHW normalised, y_N int64)`, bit-identical to the stacked samples."""
        index_N = torch.as_tensor(indices, dtype=torch.int64)
        # Ten times as fast as x_NCHW[index_N], which copies byte by byte.
        x_NCHW = self.x_NCHW.index_select(0, index_N)
        return normalise(x_NCHW, self.mean, self.std, self.dtype), self.targets.index_select(0, index_N)

    def first(self, count: int) -> Self:
        """Return the first `count` images, normalised as before."""
        return replace(self, x_NCHW=self.x_NCHW[:count], targets=self.targets[:count])


@dataclass(frozen=True, eq=False, repr=False)
class Samples(Dataset[tuple[Tensor, int]]):
    """Labelled images that are loaded when needed from any map-style data set.

    Attributes:
        dataset: its items are (PIL image or tensor `(C, H, W)` of bytes or floating numbers, class number).
        rows: the item of each sample.
        targets: the labels y_N, int64, each in `range(classes)`; reading them loads no image.
        image_shape: `(C, H, W)` of every image; if some are RGB, grey ones get three equal channels.
        stored: uint8 for pixels, else the dtype of the data set's tensors.
        mean, std: per channel, in units of white = 1; empty if the data set returns normalised images.
        dtype: of the normalised images, float32 or float64.
    """

    dataset: Any
    rows: Sequence[int]
    targets: Tensor
    classes: int
    name: str
    image_shape: tuple[int, int, int] = (0, 0, 0)
    stored: torch.dtype = torch.uint8
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        check_labels(self.targets, self.classes, self.dtype)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return `(x_CHW normalised, label)`. DataError names an item that cannot be used."""
        return normalise(self.read(index), self.mean, self.std, self.dtype), int(self.targets[index])

    def read(self, index: int) -> Tensor:
        """Return one image as it is stored."""
        x, label = self.item(index)
        if len(x) == 1 and self.image_shape[0] == 3:
            x = x.expand(3, *x.shape[1:])
        if (x.shape, x.dtype) != (self.image_shape, self.stored) or label != self.targets[index]:
            met = f"{self.name}[{self.rows[index]}] is {x.dtype} {tuple(x.shape)} with label {label}"
            expected = f"{self.stored} {self.image_shape} with label {int(self.targets[index])}"
            raise DataError(f"{met}, expected is {expected}: correct __getitem__, or resize a folder by --image-size")
        return x

    def item(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"no image {index}: they run from 0 to {len(self) - 1}")
        return read_item(self.dataset, self.rows[index], self.name)

    def select(self, positions: Sequence[int]) -> Self:
        return replace(self, rows=[self.rows[each] for each in positions], targets=self.targets[list(positions)])

    def first(self, count: int) -> Self:
        """Return the first `count` images, normalised as before."""
        return replace(self, rows=self.rows[:count], targets=self.targets[:count])


def check_labels(y_N: Tensor, classes: int, dtype: torch.dtype) -> None:
    """Raise DataError for a label outside `range(classes)`, and InputError if `dtype` is not float32 or float64."""
    if dtype not in (torch.float32, torch.float64):
        raise InputError(f"images of {dtype}: choose one of torch.float32, torch.float64")
    wrong = ((y_N < 0) | (y_N >= classes)).nonzero().flatten().tolist()
    if wrong:
        met = f"sample {wrong[0]} has label {int(y_N[wrong[0]])}, and {len(wrong)} of {len(y_N)} labels are"
        raise DataError(f"{met} outside 0 to {classes - 1}: correct the labels, or the number of classes")


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Name the sample in errors that the data set's own code raises."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, ConvoyError):
            error.add_note(f"The data set raised this for {what}.")
        raise


def read_item(dataset: Any, row: int, name: str) -> tuple[Tensor, int]:
    """Return an item of a data set as a tensor `(C, H, W)` and a class number. DataError names an invalid item."""
    what = f"{name}[{row}]"
    with naming(what):
        item = dataset[row]
    if not isinstance(item, Sequence) or len(item) != 2:
        raise DataError(f"{what} is a {type(item).__name__}: items are pairs, (tensor or PIL image, class number)")
    x, label = item
    pillow: Any = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(x, pillow.Image):
        x = torch.from_numpy(np.atleast_3d(np.array(grey_or_rgb(x, what)))).permute(2, 0, 1).contiguous()
    if not isinstance(x, Tensor) or x.dim() != 3 or not (x.dtype == torch.uint8 or x.is_floating_point()):
        met = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise DataError(f"{what} begins with {met}: give a PIL image, or uint8 or floating numbers (C, H, W)")
    try:
        number = operator.index(label)
    except TypeError:
        number = -1
    if number < 0:
        raise DataError(f"{what} has the label {label!r}: labels are class numbers, whole, from 0")
    return x, number


def grey_or_rgb(image: Any, what: str) -> Any:
    """Convert a PIL image to mode L if it is grey, else RGB. DataError for more than 8 bits, which Pillow would clip."""
    if image.mode[0] in "IF":
        raise DataError(f"{what} has more than 8 bits per channel (mode {image.mode}): convert it to 8")
    return image.convert("L" if image.mode in ("1", "L", "LA", "La") else "RGB")


@dataclass(frozen=True, eq=False)
class Splits:
    """Training and test images of a data set, both normalised by the training images; class names by label; notes about
    the files that were read, one line each."""

    name: str
    train: Images | Samples
    test: Images | Samples
    class_names: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """JSON text of what all devices must share (counts, shape, classes, labels, mean, standard deviation)."""
        labels = b"".join(images.targets.numpy().tobytes() for images in (self.train, self.test))
        facts = {
            "train": len(self.train), "test": len(self.test), "shape": self.train.image_shape, "classes": self.class_names,
            "labels": hashlib.blake2b(labels, digest_size=8).hexdigest(), "mean": self.train.mean, "std": self.train.std,
        }  # fmt: skip
        return json.dumps(facts)

    def first(self, count: int) -> "Splits":
        """Return the first `count` training images, normalised as before, and all test images."""
        return replace(self, train=self.train.first(count))


def in_memory(name: str, train: Labelled, test: Labelled, dtype: torch.dtype, class_names: Sequence[str]) -> Splits:
    """Return splits of uint8 images in memory, normalised by all training images."""
    mean, std = statistics(byte_counts(train[0]))
    images, test_images = (Images(*each, len(class_names), mean, std, dtype) for each in (train, test))
    return Splits(name, images, test_images, tuple(class_names))


def when_needed(
    train: Samples, test: Samples | None, order: Sequence[int], class_names: Sequence[str], fraction: float | None
) -> Splits:
    """Return splits of samples that are loaded when needed. 256 training samples give channels, mean and standard deviation.

    Args:
        test: None: hold out `fraction` (None: 0.2) of each class of `train`, but keep at least one sample.
        order: positions in `train` in random order. The first of each class are held out.
    """
    rows, how = list(order), "test samples of their own"
    if test is None:
        fraction = 0.2 if fraction is None else fraction
        labels, rows, test_rows = train.targets.tolist(), list[int](), list[int]()
        wanted = {label: min(n - 1, math.floor(fraction * n + 0.5)) for label, n in Counter(labels).items()}
        for position in order:
            (test_rows if wanted[labels[position]] > 0 else rows).append(position)
            wanted[labels[position]] -= 1
        if not test_rows:
            raise DataError(
                f"{train.name}: {fraction:g} of each class leaves none for the test; give a larger fraction"
            )
        test, how = train.select(sorted(test_rows)), f"{fraction:.0%} of each class held out for the test"
    looked_at = rows[:256]
    first, _ = train.item(looked_at[0])
    colours = any(len(train.item(each)[0]) == 3 for each in looked_at)
    known = replace(train, image_shape=(3 if colours else len(first), *first.shape[1:]), stored=first.dtype)
    notes = [f"{len(class_names)} classes; {len(rows)} samples to train on, {len(test)} to test on; {how}"]
    if first.dtype == torch.uint8:
        # One image at a time, because all together may not fit in memory.
        mean, std = statistics(torch.stack([byte_counts(known.read(each)[None]) for each in looked_at]).sum(0))
        known = replace(known, mean=mean, std=std)
        notes.append(f"mean and deviation of {len(looked_at)} training images")
    test = replace(known, dataset=test.dataset, rows=test.rows, targets=test.targets, name=test.name)
    return Splits(train.name, known.select(sorted(rows)), test, tuple(class_names), tuple(notes))


def fair_order(names: Sequence[str]) -> list[int]:
    """Return positions ordered by the hash of each name: a random order that changes little if names are added."""
    hashes = [hashlib.blake2b(os.fsencode(name), digest_size=8).digest() for name in names]
    return sorted(range(len(names)), key=hashes.__getitem__)
