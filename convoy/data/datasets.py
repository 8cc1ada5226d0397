"""Adapts any map-style `torch.utils.data.Dataset` whose items are (tensor or PIL image, class number).

PIL images and uint8 tensors are normalised like all other images; floating numbers stay as they are. Every item is read once
for its label, because attributes such as `targets` may hold other labels than `__getitem__` returns.
"""

import hashlib
import operator
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from convoy.data.images import LOOKED_AT, Samples, Scale, measured_scale
from convoy.data.picture import is_picture, pixels, survey, traits
from convoy.data.splits import TEST_FRACTION, Splits, fair_order, held_out, numbered
from convoy.errors import ConvoyError, DataError, InputError


@dataclass(frozen=True)
class _Source:
    """A data set and the labels of its items."""

    name: str
    dataset: Any
    labels: Sequence[int]

    def item(self, row: int) -> tuple[Any, int]:
        """A PIL image or a tensor `(C, H, W)` of bytes or floating numbers, and its label.

        Raises:
            DataError: an item that is none.
        """
        what = f"{self.name}[{row}]"
        with naming(what):
            item = self.dataset[row]
        if not isinstance(item, Sequence) or len(item) != 2:
            raise DataError(f"{what} is a {type(item).__name__}: items are pairs, (tensor or PIL image, class number)")
        image, label = item
        if isinstance(image, Tensor):
            if image.dim() != 3 or not (image.dtype == torch.uint8 or image.is_floating_point()):
                raise DataError(
                    f"{what} is {image.dtype} of shape {tuple(image.shape)}: give (C, H, W), uint8 from 0 to 255 or floating"
                )
        elif not is_picture(image):
            raise DataError(f"{what} begins with a {type(image).__name__}: give a tensor (C, H, W) or a PIL image")
        return image, _whole(what, label)


@dataclass(frozen=True)
class Items:
    """Images of a data set, all of one shape.

    Attributes:
        rows: the item of each image.
        image_shape: `(C, H, W)`.
        dtype: uint8 for pixels, else that of the numbers.
    """

    source: _Source
    rows: Sequence[int]
    image_shape: tuple[int, int, int]
    dtype: torch.dtype

    def __call__(self, index: int) -> Tensor:
        """One image.

        Raises:
            DataError: an item that is none, of another shape, or with another label than before; names it.
        """
        row = self.rows[index]
        what = f"{self.source.name}[{row}]"
        image, label = self.source.item(row)
        x = pixels(image, what, self.image_shape[0]) if is_picture(image) else image
        if (x.shape, x.dtype) != (self.image_shape, self.dtype):
            raise DataError(
                f"{what} is {x.dtype} of shape {tuple(x.shape)}, others are {self.dtype} of shape {self.image_shape}: a net "
                "takes images of one shape; resize or crop in __getitem__"
            )
        if label != self.source.labels[row]:
            raise DataError(
                f"{what} has label {label} now and had {self.source.labels[row]} before: a label stays the same; correct "
                "__getitem__"
            )
        return x

    def samples(self, classes: int, scale: Scale) -> Samples:
        """These images with their labels."""
        targets = torch.tensor([self.source.labels[row] for row in self.rows])
        return Samples(self, targets, classes, self.image_shape, scale)


def from_datasets(
    train: Any,
    test: Any = None,
    *,
    name: str = "dataset",
    dtype: torch.dtype = torch.float32,
    test_fraction: float | None = None,
) -> Splits:
    """Training and test images from map-style data sets.

    Mean and deviation are those of `LOOKED_AT` training images, evenly spread by a hash of their index. Images are grey if
    all of these are grey PIL images. Class names are the data set's `classes` where it has them, else numbers.

    Args:
        train: has `__len__` and `__getitem__`; items are (PIL image, uint8 or floating tensor `(C, H, W)`; class number).
        test: another such; None: a fraction of each class of `train` is held out, chosen by a hash of the index.
        name: of the data set, for messages.
        dtype: of the images, float32 or float64.
        test_fraction: None: `TEST_FRACTION`.

    Raises:
        InputError: not map-style, or a fraction is given beside test samples.
        DataError: an empty data set; items or labels that cannot be used.
    """
    # Random numbers that items draw here are the same on every device, and leave the program's streams as they were.
    with own_random_numbers():
        reseed("looking")
        own = _source(name, train)
        class_names = _class_names(own)
        if test is None:
            rows, test_rows, split = _parted(own, TEST_FRACTION if test_fraction is None else test_fraction)
            tested = own
        elif test_fraction is not None:
            raise InputError(f"a test fraction of {test_fraction:g} beside test samples: leave one of them out")
        else:
            tested = _source(f"{name} for the test", test)
            _check_trained(own, tested)
            rows, test_rows, split = range(len(own.labels)), range(len(tested.labels)), "test samples of their own"
        fair = [rows[position] for position in fair_order(numbered(len(rows)))[:LOOKED_AT]]
        shape, kind, remarks = _look(own, fair)
        scale = Scale((), (), dtype)
        if kind == torch.uint8:
            scale = measured_scale(Items(own, fair, shape, kind), len(fair), dtype)
            remarks = (f"mean and deviation of {len(fair)} training images", *remarks)
    classes = len(class_names)
    found = f"{classes} classes; {len(rows)} samples to train on, {len(test_rows)} to test on; {split}"
    return Splits(
        name=name,
        train=Items(own, rows, shape, kind).samples(classes, scale),
        test=Items(tested, test_rows, shape, kind).samples(classes, scale),
        class_names=class_names,
        notes=(found, *remarks),
    )


@contextmanager
def naming(what: str) -> Iterator[None]:
    """An error of somebody else's code says which sample it was about, below its traceback."""
    try:
        yield
    except ConvoyError:
        raise
    except Exception as error:
        error.add_note(f"The data set raised this for {what}.")
        raise


def _source(name: str, dataset: Any) -> _Source:
    """The data set with its labels, checked.

    Raises:
        InputError: not map-style.
        DataError: no samples, or labels that are no class numbers.
    """
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InputError(
            f"{name} is a {type(dataset).__name__}: give a map-style data set, one with __len__ and __getitem__, so that "
            "every device can load its own samples"
        )
    if len(dataset) < 1:
        raise DataError(f"{name} is empty, its length is {len(dataset)}: give a data set with samples")
    unlabelled = _Source(name, dataset, ())
    return _Source(name, dataset, [unlabelled.item(row)[1] for row in range(len(dataset))])


def _whole(what: str, label: Any) -> int:
    """Convert a label, an integer of Python, NumPy or torch, to a class number."""
    try:
        number = operator.index(label)
    except TypeError:
        number = -1
    if number < 0:
        raise DataError(f"{what} has the label {label!r}: labels are class numbers, whole, from 0")
    return number


def _class_names(own: _Source) -> tuple[str, ...]:
    names, classes = getattr(own.dataset, "classes", None), max(own.labels) + 1
    if not isinstance(names, list | tuple):
        return numbered(classes)
    if len(names) < classes:
        row = own.labels.index(classes - 1)
        raise DataError(
            f"{own.name}[{row}] has label {classes - 1}, and {own.name}.classes names {len(names)}: labels run from 0 to "
            f"{len(names) - 1}; correct one of them"
        )
    return tuple(map(str, names))


def _check_trained(own: _Source, tested: _Source) -> None:
    unknown = sorted(set(tested.labels) - set(own.labels))
    if unknown:
        raise DataError(
            f"{tested.name}[{tested.labels.index(unknown[0])}] has label {unknown[0]}, which no sample of {own.name} has: a "
            "class that is tested must be trained; add training samples, or leave it out"
        )


def _parted(own: _Source, fraction: float) -> tuple[Sequence[int], Sequence[int], str]:
    """Items to train on and to test on, in the order of the data set, and a note on how they were chosen."""
    rows, test_rows = held_out(fair_order(numbered(len(own.labels))), own.labels, fraction)
    if not test_rows:
        raise DataError(f"{own.name}: {fraction:g} of each class leaves none for the test; give a larger fraction")
    return sorted(rows), sorted(test_rows), f"{fraction:.0%} of each class held out for the test"


def _look(own: _Source, rows: Sequence[int]) -> tuple[tuple[int, int, int], torch.dtype, tuple[str, ...]]:
    """Shape and dtype of the images, and remarks on unusual ones."""
    met = {}
    for row in rows:
        image, _ = own.item(row)
        if not is_picture(image):
            break
        met[f"{own.name}[{row}]"] = traits(image)
    channels, remarks = survey(met)
    first, _ = own.item(rows[0])
    x = pixels(first, f"{own.name}[{rows[0]}]", channels) if is_picture(first) else first
    channels, height, width = x.shape
    return (channels, height, width), x.dtype, remarks


# ------------------------------------------------------------------------------------------------ random numbers


@contextmanager
def own_random_numbers() -> Iterator[None]:
    """Restore the random streams of Python, NumPy and torch afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def reseed(key: str) -> None:
    """Seed the streams of Python, NumPy and torch from a key, for data sets that draw from those."""
    number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little")
    random.seed(number)
    np.random.seed(number)
    torch.default_generator.manual_seed(number)
