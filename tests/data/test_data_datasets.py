"""User data sets: tensors and PIL images, labels, held-out samples, seeds, and refusals."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from convoy.data import from_datasets
from convoy.data.datasets import own_random_numbers, reseed
from convoy.errors import DataError, InputError
from tests.support.data_files import plain_image

SHAPE = (3, 2, 4)


class Listed(Dataset[Any]):
    """A data set of given items that counts what is loaded."""

    def __init__(self, items: Sequence[Any], **offered: Any) -> None:
        self.items, self.loaded = items, []
        vars(self).update(offered)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.loaded.append(index)
        return self.items[index]


def pixels(count: int = 40, classes: int = 4) -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randint(0, 256, SHAPE, dtype=torch.uint8, generator=generator), index % classes)
        for index in range(count)
    ]


# --------------------------------------------------------------------------------------------------------- images


def test_pixels_are_normalised_by_training_statistics() -> None:
    both = from_datasets(Listed(pixels(40)), Listed(pixels(8)), dtype=torch.float64)
    x_NCHW = torch.stack([x for x, _ in pixels(40)]).double() / 255
    mean_C11, std_C11 = x_NCHW.mean((0, 2, 3)).reshape(3, 1, 1), x_NCHW.std((0, 2, 3), correction=0).reshape(3, 1, 1)
    assert (len(both.train), len(both.test), both.train.classes, both.train.image_shape) == (40, 8, 4, SHAPE)
    for split, items in ((both.train, pixels(40)), (both.test, pixels(8))):
        for (x, y), (stored, label) in zip(split, items, strict=True):
            torch.testing.assert_close(x, (stored.double() / 255 - mean_C11) / std_C11)
            assert y == label
    assert both.notes[0] == "4 classes; 40 samples to train on, 8 to test on; test samples of their own"


def test_pil_images_are_grey_only_if_all_are() -> None:
    grey: list[Any] = [(plain_image(index), index % 2) for index in range(10)]
    assert from_datasets(Listed(grey)).train.image_shape == (1, 4, 6)
    grey[0] = (plain_image((9, 8, 7)), 0)
    both = from_datasets(Listed(grey), Listed(grey))
    assert both.train.image_shape == (3, 4, 6)
    assert both.train.read(0)[:, 0, 0].tolist() == [9, 8, 7]
    assert both.train.read(5)[:, 0, 0].tolist() == [5, 5, 5]


def test_missing_test_set_holds_out_samples_of_each_class() -> None:
    items = [
        (torch.full((1, 1, 1), index, dtype=torch.uint8), label) for index, label in enumerate([0] * 10 + [1] * 4 + [2])
    ]
    both = from_datasets(Listed(items), test_fraction=0.3)
    assert torch.bincount(both.test.targets, minlength=3).tolist() == [3, 1, 0]  # 3 of 10, 1.2 of 4, none of 1
    values = [[int(split.read(i)) for i in range(len(split))] for split in (both.train, both.test)]
    assert sorted(values[0] + values[1]) == list(range(15)), "each sample once"
    assert values == [sorted(each) for each in values], "in the order of the data set"
    more = from_datasets(Listed(items), test_fraction=0.5)
    assert set(values[1]) < {int(more.test.read(i)) for i in range(len(more.test))}, "more, but the same first"
    assert "50% of each class held out" in more.notes[0]
    assert torch.bincount(from_datasets(Listed(items), test_fraction=0.99).train.targets).tolist() == [1, 1, 1]


# --------------------------------------------------------------------------------------------------------- labels


def test_labels_come_from_items_not_attributes() -> None:
    items = [(torch.zeros(1, 1, 1), index % 2) for index in range(10)]
    both = from_datasets(Listed(items, targets=[0, 1, 2, 3, 4] * 2), Listed(items))
    assert both.train.targets.tolist() == [label for _, label in items]


# ------------------------------------------------------------------------------------------------- random numbers


def numbers() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_seed_key_determines_the_draws() -> None:
    drawn = {}
    with own_random_numbers():
        for key in ("0/0/0/7", "0/0/1/7", "0/1/0/7", "1/0/0/7", "0/0/0/8"):
            reseed(key)
            drawn[key] = numbers()
        reseed("0/0/0/7")
        assert numbers() == drawn["0/0/0/7"]
    assert len({number for three in drawn.values() for number in three}) == 15


# ----------------------------------------------------------------------------------------------------- wrong data


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from pixels()


@pytest.mark.parametrize("dataset", [Stream(), iter(pixels()), 7])
def test_iterable_data_sets_are_refused(dataset: Any) -> None:
    with pytest.raises(
        InputError, match=f"mine is a {type(dataset).__name__}: give a map-style data set, with __len__"
    ):
        from_datasets(dataset, name="mine")


def test_empty_train_or_test_sets_are_refused() -> None:
    with pytest.raises(DataError, match="mine is empty, its length is 0: give a data set with samples"):
        from_datasets(Listed([]), name="mine")
    with pytest.raises(DataError, match="mine for the test is empty"):
        from_datasets(Listed(pixels()), Listed([]), name="mine")
    with pytest.raises(DataError, match=r"mine: 0\.01 of each class leaves none for the test; give a larger"):
        from_datasets(Listed(pixels()), name="mine", test_fraction=0.01)
    with pytest.raises(InputError, match=r"a test fraction of 0\.5 with test samples: leave one of them out"):
        from_datasets(Listed(pixels()), Listed(pixels()), test_fraction=0.5)


BYTES = torch.zeros(SHAPE, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (torch.zeros(SHAPE), r"mine\[5\] is a Tensor: items are pairs, \(tensor or PIL image, class number\)"),
        ((np.zeros(SHAPE), 0), r"mine\[5\] begins with a ndarray: give a PIL image, or uint8 or floating numbers \(C, H, W\)"),
        ((torch.zeros(2, 4), 0), r"mine\[5\] begins with torch.float32 of shape \(2, 4\): give"),
        ((torch.zeros(SHAPE, dtype=torch.int64), 0), r"mine\[5\] begins with torch.int64 of shape \(3, 2, 4\): give"),
        ((BYTES, 0.5), r"mine\[5\] has the label 0.5: labels are class numbers, whole, from 0"),
        ((BYTES, torch.tensor(0.5)), r"mine\[5\] has the label tensor\(0.5"),
        ((BYTES, -1), r"mine\[5\] has the label -1"),
        ((BYTES, "cat"), r"mine\[5\] has the label 'cat'"),
        ((torch.zeros(3, 2, 5, dtype=torch.uint8), 1), r"mine\[5\] is torch.uint8 \(3, 2, 5\) .*, expected is .* \(3, 2, 4\)"),
        ((torch.zeros(SHAPE), 1), r"mine\[5\] is torch.float32 .*, expected is torch.uint8"),
        ((Image.new("I;16", (4, 2)), 1), r"mine\[5\] has more than 8 bits per channel \(mode I;16\): convert it to 8"),
    ],
)  # fmt: skip
def test_unusable_item_is_named(item: Any, says: str) -> None:
    items: list[Any] = pixels(30)
    items[5] = item
    with pytest.raises(DataError, match=says):
        from_datasets(Listed(items), Listed(pixels(4)), name="mine")


def test_a_label_out_of_range_is_named() -> None:
    with pytest.raises(DataError, match="sample 3 has label 3, and 10 of 40 labels are outside 0 to 2: correct"):
        from_datasets(Listed(pixels(), classes=["ant", "bee", "cat"]))
    with pytest.raises(DataError, match="sample 3 has label 3"):
        from_datasets(Listed(pixels(classes=3)), Listed(pixels()))
