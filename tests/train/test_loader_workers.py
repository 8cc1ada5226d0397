"""Loader worker processes: they prefetch, they end, and they change no batch."""

import multiprocessing
import time
from collections.abc import Callable

import psutil
import pytest
import torch
from torch import Tensor

import convoy
from convoy.errors import DataError
from convoy.train.loader import Loader
from tests.support.loader_data import Plain, image, images, part_of, plan_of, read

WAIT_S = 20.0


class Counted(Plain):
    """A data set that counts loaded items in every process."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.count = multiprocessing.Value("i", 0)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with self.count.get_lock():
            self.count.value += 1
        return image(index), index


def workers() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def await_that(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline_s, "it did not come true"
        time.sleep(0.01)


@pytest.mark.parametrize("count", [1, 2])
def test_workers_prefetch_a_few_batches(count: int) -> None:
    dataset = Counted(400)
    batches = iter(Loader(dataset, 4, workers=count))
    next(batches)
    ahead = 4 + 2 * count * 4  # the one that was taken, and two for each worker
    await_that(lambda: dataset.count.value == ahead)
    time.sleep(0.2)
    assert dataset.count.value == ahead, "memory holds no more than that"
    next(batches)
    await_that(lambda: dataset.count.value == ahead + 4)
    batches.close()


def test_workers_end_when_the_loop_is_left() -> None:
    before = len(workers())
    for _ in Loader(Plain(), 5, workers=2):
        break
    assert len(workers()) == before


def fail_after_one(loader: Loader) -> None:
    for _ in loader:
        raise ZeroDivisionError


def test_workers_end_when_training_fails() -> None:
    before = len(workers())
    with pytest.raises(ZeroDivisionError) as kept:
        fail_after_one(Loader(Plain(), 5, workers=2))
    assert len(workers()) == before, "also while somebody looks at the error"
    del kept


class Corrupt(Plain):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 12:
            raise DataError("photo.jpg cannot be read")
        return image(index), index


@pytest.mark.parametrize("count", [0, 2])
def test_loading_error_is_raised_and_ends_the_workers(count: int) -> None:
    before = len(workers())
    seen = []
    with pytest.raises(DataError) as kept:
        seen.extend(y.tolist() for _, y in Loader(Corrupt(), 5, shuffle=False, workers=count))
    assert str(kept.value) == "photo.jpg cannot be read", "without a worker's traceback"
    assert seen == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], "the batches before it were whole"
    assert len(workers()) == before


def test_a_device_without_samples_starts_no_workers() -> None:
    before = len(workers())
    for x, _ in convoy.loader(images(), 5, part_of(plan_of("data-by-speed"), 1), workers=2):
        assert len(x) == 0
        assert len(workers()) == before


@pytest.mark.parametrize("count", [1, 2])
def test_workers_change_no_batch(count: int) -> None:
    loader, alone = Loader(Plain(), 5, seed=2, workers=count), Loader(Plain(), 5, seed=2)
    assert [read(loader) for _ in range(2)] == [read(alone) for _ in range(2)]
    loader.set_epoch(1, start=3)
    alone.set_epoch(1, start=3)
    assert read(loader) == read(alone)


@pytest.mark.parametrize("count", [0, 1])
def test_loading_leaves_global_random_state_unchanged(count: int) -> None:
    torch.manual_seed(4)
    expected = torch.rand(3).tolist()
    torch.manual_seed(4)
    read(Loader(Plain(), 5, workers=count))
    assert torch.rand(3).tolist() == expected
