"""Adapts any map-style `torch.utils.data.Dataset` whose items are (tensor or PIL image, class number), and seeds its items."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from convoy.data.images import Samples, Splits, fair_order, read_item, when_needed
from convoy.errors import DataError, InputError


def from_datasets(
    train: Any,
    test: Any = None,
    *,
    name: str = "dataset",
    dtype: torch.dtype = torch.float32,
    test_fraction: float | None = None,
) -> Splits:
    """Return training and test images from map-style data sets.

    PIL images and uint8 tensors are normalised by mean and standard deviation of 256 training images, chosen by a hash of their
    index; floating-point tensors are not. Every item is read once to get its label, because attributes such as `targets` may
    differ from the labels of `__getitem__`. Class names are the data set's `classes`, or numbers if it has none.

    Args:
        train: has `__len__` and `__getitem__`; items are (image, class number), the image a PIL image or a tensor `(C, H, W)`.
        test: like `train`; None: hold out a fraction of each class of `train`, chosen by a hash of the index.
        name: of the data set, for messages.
        dtype: of the images, float32 or float64.
        test_fraction: None: 0.2.

    Raises:
        InputError: not map-style, or a fraction is given with test samples.
        DataError: an empty data set; items or labels that cannot be used.
    """
    if test is not None and test_fraction is not None:
        raise InputError(f"a test fraction of {test_fraction:g} with test samples: leave one of them out")
    # Seed the random numbers that items draw here: equal on every device, and without effect on the program's streams.
    with own_random_numbers():
        reseed("looking")
        names = train.classes if isinstance(getattr(train, "classes", None), list | tuple) else ()
        own = _samples(name, train, len(names), dtype)
        tested = None if test is None else _samples(f"{name} for the test", test, own.classes, dtype)
        order = fair_order(list(map(str, own.rows)))
        return when_needed(own, tested, order, list(map(str, names or range(own.classes))), test_fraction)


def _samples(name: str, dataset: Any, classes: int, dtype: torch.dtype) -> Samples:
    """Return a data set with its labels; `classes` 0: as many as the labels have."""
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InputError(
            f"{name} is a {type(dataset).__name__}: give a map-style data set, with __len__ and __getitem__"
        )
    rows = range(len(dataset))
    if not rows:
        raise DataError(f"{name} is empty, its length is 0: give a data set with samples")
    labels = [read_item(dataset, row, name)[1] for row in rows]
    return Samples(dataset, rows, torch.tensor(labels), classes or max(labels) + 1, name, dtype=dtype)


@contextmanager
def own_random_numbers() -> Iterator[None]:
    """Restore the random streams of Python, NumPy and torch after the block."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def reseed(key: str) -> None:
    """Seed the random generators of Python, NumPy and torch from a key, for data sets that use them.

    The loader's key has the seed, the epoch, the position in the epoch and the sample. So the random numbers of a sample do not
    depend on the fleet, and differ if it occurs twice in an epoch.
    """
    number = seed_of(key)
    random.seed(number)
    np.random.seed(number)
    torch.default_generator.manual_seed(number)


def seed_of(key: str) -> int:
    """Return a seed of 32 bits, the most that NumPy accepts."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little")
