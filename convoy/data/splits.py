"""A data set split into training and test samples, and how samples are held out for the test."""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from convoy.data.images import Images, Labelled, Samples, byte_counts, check_tensors, statistics
from convoy.errors import InputError

TEST_FRACTION = 0.2
"""Of each class, where there are no test images and nothing else is said."""


@dataclass(frozen=True, eq=False)
class Splits:
    """Training and test images of a data set, both normalised by the training images.

    Attributes:
        name: as given to `convoy.data.load`.
        train: training images, in the order of the dataset.
        test: test images, in the order of the dataset.
        class_names: by label.
        notes: what was found and decided while reading, one line each.
    """

    name: str
    train: Images | Samples
    test: Images | Samples
    class_names: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return self.train.classes

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """`(C, H, W)` of one image."""
        return self.train.image_shape

    @property
    def fingerprint(self) -> str:
        """What must be the same on every device, as JSON (counts, shape, classes, labels in order, mean, deviation)."""
        labels = hashlib.blake2b(digest_size=8)
        for images in (self.train, self.test):
            labels.update(images.targets.numpy().tobytes())
        facts = {
            "train": len(self.train), "test": len(self.test), "shape": self.image_shape, "classes": self.class_names,
            "labels": labels.hexdigest(), "mean": self.train.mean, "std": self.train.std,
        }  # fmt: skip
        return json.dumps(facts)

    def first(self, count: int) -> "Splits":
        """Only the first `count` training images, normalised as before; all test images."""
        return replace(self, train=self.train.first(count))


def splits(
    name: str, train: Labelled, test: Labelled, dtype: torch.dtype, class_names: Sequence[str] | None = None
) -> Splits:
    """Splits in memory; mean and standard deviation are those of all training images.

    Args:
        class_names: by label; None: as many classes as the training labels have, named by their numbers.

    Raises:
        InputError: a dtype or shape that `Images` does not take, no training images, or test images of another shape.
        DataError: a negative label, or a test label that is none of the classes.
    """
    (x_NCHW, y_N), (x_test_NCHW, y_test_N) = train, test
    check_tensors(x_NCHW, y_N)
    check_tensors(x_test_NCHW, y_test_N)
    if not len(y_N):
        raise InputError(f"{name} has no training images: its mean and deviation need at least one")
    if x_NCHW.shape[1:] != x_test_NCHW.shape[1:]:
        raise InputError(
            f"{name} trains on images of {tuple(x_NCHW.shape[1:])} and tests on {tuple(x_test_NCHW.shape[1:])}: "
            "both must have one shape"
        )
    names = tuple(class_names) if class_names is not None else numbered(int(y_N.max()) + 1)
    mean, std = statistics(byte_counts(x_NCHW))
    return Splits(
        name=name,
        train=Images(x_NCHW, y_N, len(names), mean, std, dtype),
        test=Images(x_test_NCHW, y_test_N, len(names), mean, std, dtype),
        class_names=names,
    )


def numbered(classes: int) -> tuple[str, ...]:
    """Names of classes that have none: "0", "1", ..."""
    return tuple(map(str, range(classes)))


def fair_order(names: Sequence[str]) -> list[int]:
    """Positions of names, ordered by the hash of each name.

    The first so many of it are a fair sample, and a name more or less leaves the order of the others alone.
    """
    hashes = [hashlib.blake2b(os.fsencode(name), digest_size=8).digest() for name in names]
    return sorted(range(len(names)), key=hashes.__getitem__)


def held_out(order: Sequence[int], labels: Sequence[int], fraction: float) -> tuple[list[int], list[int]]:
    """Positions to train on and to test on, both in the given order: the first so many of each class are the test's.

    A class of n samples gives `fraction * n`, rounded, and keeps one at least.

    Args:
        order: positions.
        labels: by position.
        fraction: above 0, below 1.
    """
    wanted = {label: min(n - 1, math.floor(fraction * n + 0.5)) for label, n in Counter(labels).items()}
    train: list[int] = []
    test: list[int] = []
    for position in order:
        label = labels[position]
        (test if wanted[label] > 0 else train).append(position)
        wanted[label] -= 1
    return train, test
