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

    PIL images and uint8 tensors are normalised by mean and deviation of 256 training images, spread evenly by a hash of their
    index; floating numbers stay as they are. Every item is read once for its label, because attributes such as `targets` may
    hold other labels than `__getitem__` returns. Class names are the data set's `classes` where it has them, else numbers.

    Args:
        train: has `__len__` and `__getitem__`; items are (PIL image, uint8 or floating tensor `(C, H, W)`; class number).
        test: another such; None: a fraction of each class of `train` is held out, chosen by a hash of the index.
        name: of the data set, for messages.
        dtype: of the images, float32 or float64.
        test_fraction: None: 0.2.

    Raises:
        InputError: not map-style, or a fraction is given with test samples.
        DataError: an empty data set; items or labels that cannot be used.
    """
    if test is not None and test_fraction is not None:
        raise InputError(f"a test fraction of {test_fraction:g} with test samples: leave one of them out")
    # Random numbers that items draw here are the same on every device, and leave the program's streams as they were.
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
    """Seed the streams of Python, NumPy and torch from a key, for data sets that draw from those.

    The loader's key holds the seed, the epoch, the position in the epoch and the sample: what a sample draws does not
    depend on the fleet, and a sample that comes twice in an epoch draws again.
    """
    number = seed_of(key)
    random.seed(number)
    np.random.seed(number)
    torch.default_generator.manual_seed(number)


def seed_of(key: str) -> int:
    """Return a seed of 32 bits, all that NumPy takes."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little")
