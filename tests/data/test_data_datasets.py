"""Data sets of anybody's: tensors and PIL images, labels with and without loading, and what cannot be used."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from convoy.data import from_datasets
from convoy.errors import DataError, InputError
from tests.support.data_files import assert_says, plain_image

SHAPE = (3, 2, 4)


class Listed(Dataset[Any]):
    """Items as they are given; counts what is loaded."""

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


def test_pixels_are_normalised_by_those_of_the_training_samples() -> None:
    both = from_datasets(Listed(pixels(40)), Listed(pixels(8)), dtype=torch.float64)
    x_NCHW = torch.stack([x for x, _ in pixels(40)]).double() / 255
    np.testing.assert_allclose(both.train.mean, x_NCHW.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(both.train.std, x_NCHW.std((0, 2, 3), correction=0), rtol=1e-12)
    assert (len(both.train), len(both.test), both.classes, both.image_shape) == (40, 8, 4, SHAPE)
    mean_C11, std_C11 = (
        torch.tensor(v, dtype=torch.float64).reshape(3, 1, 1) for v in (both.train.mean, both.train.std)
    )
    for split, items in ((both.train, pixels(40)), (both.test, pixels(8))):
        for (x, y), (stored, label) in zip(split, items, strict=True):
            torch.testing.assert_close(x, (stored.double() / 255 - mean_C11) / std_C11)
            assert y == label
    assert "4 classes; 40 samples to train on, 8 to test on" in both.notes[0]


def test_the_numbers_of_many_samples_are_those_of_a_stated_few() -> None:
    """256 of them, whatever their number: spread over the data set, the same each time."""
    items = [(torch.full((1, 1, 1), index % 200, dtype=torch.uint8), index // 500) for index in range(1000)]
    dataset = Listed(items)
    both = from_datasets(dataset, Listed(items[::500]))
    looked_at = set(dataset.loaded[len(items) :])  # after one reading of all for the labels
    assert len(looked_at) == 256
    assert 100 < sum(index >= 500 for index in looked_at) < 156
    assert both.train.mean[0] == pytest.approx(99.5 / 255, rel=0.1)
    assert from_datasets(Listed(items), Listed(items[::500])).train.mean == both.train.mean


def test_floating_numbers_stay_as_they_are() -> None:
    items = [(torch.full(SHAPE, index - 3.5), index % 2) for index in range(10)]
    both = from_datasets(Listed(items), Listed(items), dtype=torch.float64)
    assert (both.train.mean, both.train.std) == ((), ())
    assert both.train[9][0].equal(torch.full(SHAPE, 5.5, dtype=torch.float64))
    x_CHW, _ = from_datasets(Listed(items), Listed(items)).train[9]
    x_CHW.zero_()
    assert items[9][0].equal(torch.full(SHAPE, 5.5)), "what is done to a sample leaves the data set alone"


def test_pil_images_are_read_as_files_are() -> None:
    colours = [((index, 0, 200), index % 2) for index in range(10)]
    both = from_datasets(Listed([(plain_image(colour), label) for colour, label in colours]), test_fraction=0.2)
    assert both.image_shape == (3, 4, 6)
    assert (len(both.train), len(both.test)) == (8, 2)
    grey = from_datasets(Listed([(plain_image(index), index % 2) for index in range(10)]))
    assert grey.image_shape == (1, 4, 6)
    mixed = [(plain_image(colour if index else 7), label) for index, (colour, label) in enumerate(colours)]
    both = from_datasets(Listed(mixed), Listed(mixed))
    assert both.image_shape == (3, 4, 6)
    assert both.notes[-1] == (
        "1 of 10 training images looked at are grey, first dataset[0]: read as RGB of equal channels"
    )


def test_samples_are_held_out_where_there_are_no_others() -> None:
    dataset = Listed(pixels(40))
    both = from_datasets(dataset, test_fraction=0.25)
    assert torch.bincount(both.test.targets).tolist() == [3] * 4  # 2.5 of 10, rounded up
    seen = [tuple(split.read(i).flatten().tolist()) for split in (both.train, both.test) for i in range(len(split))]
    assert sorted(seen) == sorted(tuple(x.flatten().tolist()) for x, _ in pixels(40)), "each sample once"


# --------------------------------------------------------------------------------------------------------- labels


def test_labels_are_those_of_the_items_not_those_of_an_attribute() -> None:
    items = [(torch.zeros(1, 1, 1), index % 2) for index in range(10)]
    both = from_datasets(Listed(items, targets=[0, 1, 2, 3, 4] * 2), Listed(items))
    assert both.train.targets.tolist() == [label for _, label in items]


@pytest.mark.parametrize("label", [1, np.int64(1), torch.tensor(1), torch.tensor(1, dtype=torch.uint8)])
def test_whole_numbers_of_any_kind_are_labels(label: Any) -> None:
    both = from_datasets(Listed([(torch.zeros(SHAPE), 0), (torch.zeros(SHAPE), label)] * 4))
    assert both.classes == 2
    assert both.train[0][1] in (0, 1)


def test_class_names_are_those_of_the_data_set() -> None:
    named = from_datasets(Listed(pixels(), classes=["ant", "bee", "cat", "dog", "emu"]))
    assert named.class_names == ("ant", "bee", "cat", "dog", "emu")
    assert named.train.classes == 5, "a class may have no samples"
    assert from_datasets(Listed(pixels())).class_names == ("0", "1", "2", "3")


def test_looking_leaves_the_random_numbers_of_the_program_alone_and_always_sees_the_same() -> None:
    class Drawn(Listed):
        def __getitem__(self, index: int) -> Any:
            return (torch.rand(SHAPE) * 255 * random.random()).to(torch.uint8), index % 2

    random.seed(1)
    torch.manual_seed(1)
    expected = torch.rand(2).tolist(), random.random()
    random.seed(1)
    torch.manual_seed(1)
    first = from_datasets(Drawn(pixels(20)))
    assert (torch.rand(2).tolist(), random.random()) == expected
    assert from_datasets(Drawn(pixels(20))).train.mean == first.train.mean


# ----------------------------------------------------------------------------------------------------- wrong data


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from pixels()


@pytest.mark.parametrize("dataset", [Stream(), iter(pixels()), 7])
def test_what_is_not_map_style_is_refused(dataset: Any) -> None:
    with pytest.raises(
        InputError, match=f"mine is a {type(dataset).__name__}: give a map-style data set, one with __len__"
    ):
        from_datasets(dataset, name="mine")


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(DataError, match="mine is empty, its length is 0: give a data set with samples"):
        from_datasets(Listed([]), name="mine")
    with pytest.raises(DataError, match="mine for the test is empty"):
        from_datasets(Listed(pixels()), Listed([]), name="mine")


def test_a_fraction_beside_test_samples_is_refused() -> None:
    with pytest.raises(InputError, match=r"a test fraction of 0\.5 beside test samples: leave one of them out"):
        from_datasets(Listed(pixels()), Listed(pixels()), test_fraction=0.5)


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ((torch.zeros(SHAPE),), "mine[5] is a tuple: items are pairs, (tensor or PIL image, class number)"),
        (torch.zeros(SHAPE), "mine[5] is a Tensor: items are pairs"),
        ((np.zeros(SHAPE), 0), "mine[5] begins with a ndarray: give a tensor (C, H, W) or a PIL image"),
        ((torch.zeros(2, 4), 0), "mine[5] is torch.float32 of shape (2, 4): give (C, H, W), uint8 from 0 to 255 or floating"),
        ((torch.zeros(SHAPE, dtype=torch.int64), 0), "mine[5] is torch.int64 of shape (3, 2, 4): give"),
        ((torch.zeros(SHAPE, dtype=torch.uint8), 0.5), "mine[5] has the label 0.5: labels are class numbers, whole, from 0"),
        ((torch.zeros(SHAPE, dtype=torch.uint8), -1), "mine[5] has the label -1"),
        ((torch.zeros(SHAPE, dtype=torch.uint8), "cat"), "mine[5] has the label 'cat'"),
        ((torch.zeros(3, 2, 5, dtype=torch.uint8), 0), "mine[5] is torch.uint8 of shape (3, 2, 5), others are torch.uint8"),
        ((torch.zeros(SHAPE), 0), "mine[5] is torch.float32 of shape (3, 2, 4), others are torch.uint8"),
    ],
)  # fmt: skip
def test_an_item_that_cannot_be_used_is_named(item: Any, says: str) -> None:
    items: list[Any] = pixels(30)
    items[5] = item
    with pytest.raises(DataError) as error:
        from_datasets(Listed(items), Listed(pixels(4)), name="mine")
    assert_says(error, says)


def test_a_label_out_of_range_is_named() -> None:
    with pytest.raises(DataError) as error:
        from_datasets(Listed(pixels(), classes=["ant", "bee", "cat"]), name="mine")
    assert_says(error, "mine[3] has label 3, and mine.classes names 3: labels run from 0 to 2; correct one of them")


def test_a_class_that_is_only_tested_is_named() -> None:
    with pytest.raises(DataError) as error:
        from_datasets(Listed(pixels(40, classes=3)), Listed(pixels(40)), name="mine")
    assert_says(error, "mine for the test[3] has label 3, which no sample of mine has", "must be trained")


def test_a_label_that_changes_is_told_when_it_is_met() -> None:
    items = pixels(40)
    both = from_datasets(Listed(items), Listed(items), name="mine")
    items[7] = (items[7][0], 0)
    with pytest.raises(DataError, match=r"mine\[7\] has label 0 now and had 3 before: a label stays the same"):
        both.train[7]


def test_a_data_set_of_torchs_will_do() -> None:
    x_NCHW, y_N = torch.stack([x for x, _ in pixels()]), torch.tensor([label for _, label in pixels()])
    both = from_datasets(TensorDataset(x_NCHW, y_N))
    assert (len(both.train), len(both.test)) == (32, 8)
