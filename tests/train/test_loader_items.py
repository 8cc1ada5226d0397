"""The loader's use of data sets: labels with and without loading, random numbers, wrong shapes."""

import random
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import convoy
from convoy.comm.group import Group
from convoy.errors import DataError
from convoy.plan.plan import Plan
from convoy.train.loader import Loader
from tests.support.data_files import plain_image
from tests.support.loader_data import DATASETS, SHAPE, Plain, image, net, part_of, plan_of, read
from tests.support.threads import run_on_threads

_TURN = threading.Lock()
"""Threads share one stream of random numbers, where processes have their own."""


@pytest.mark.parametrize(("name", "workers"), [*((name, 0) for name in DATASETS), ("plain", 1), ("images", 1)])
def test_every_kind_of_data_set_gives_the_same_batches(name: str, workers: int) -> None:
    indices = Loader(Plain(), 5, seed=1).batches(0)
    part = part_of(plan_of("data-by-speed"), 1 if workers == 0 else 2)
    loader = convoy.loader(DATASETS[name](), 5, part, seed=1, workers=workers)
    shares = [(3, 0, 2)] * 4 + [(2, 0, 1)]
    device = part.group.device
    for (x, y), batch, share in zip(loader, indices, shares, strict=True):
        start = sum(share[:device])
        assert x.shape == (share[device], *SHAPE)
        assert x.dtype == torch.float32
        assert [round(float(v)) for v in x[:, 0, 0, 0]] == batch[start : start + share[device]]
        assert y.dtype == torch.int64
        assert y.tolist() == batch


@pytest.mark.parametrize("name", ["plain", "images"])
def test_labels_belong_to_the_samples_of_local_outputs(name: str) -> None:
    indices = Loader(Plain(), 5, seed=1).batches(0)
    plan = replace(plan_of("data-by-speed"), outputs="where-computed")
    shares = [(3, 0, 2)] * 4 + [(2, 0, 1)]
    for device in range(3):
        part = part_of(plan, device)
        for (x, y), batch, share in zip(convoy.loader(DATASETS[name](), 5, part, seed=1), indices, shares, strict=True):
            start = sum(share[:device])
            assert y.dtype == torch.int64
            assert y.tolist() == batch[start : start + share[device]]
            assert len(x) == len(y)


def test_local_outputs_load_only_local_labels() -> None:
    # Device 1 has no samples: one of each batch shows the type of labels. Five are compared with the other devices.
    for device, expected in ((0, 6 + 5), (1, 2 + 5), (2, 4 + 5)):
        dataset = Plain(10)
        part = part_of(replace(plan_of("data-by-speed"), outputs="where-computed"), device)
        assert len(read(convoy.loader(dataset, 5, part, shuffle=False))) == 2
        assert len(dataset.loaded) == expected


class Augmented(Plain):
    """A data set that draws from all three random sources, as image transforms do."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return image(index) + torch.rand(()) + random.random() + float(np.random.rand()), index


def augmented(plan: Plan) -> list[list[Tensor]]:
    """Return the images of every device in two epochs, after each has drawn different random numbers."""
    model, dataset = net(), Augmented(10)

    def work(group: Group) -> list[Tensor]:
        part = convoy.distribute(model, plan, group, torch.zeros(1, *SHAPE))
        loader = convoy.loader(dataset, 5, part, seed=1, shuffle=False)
        part.group.agree = lambda _, text: (text,) * plan.devices  # type: ignore[method-assign]  # one after the other
        with _TURN:
            torch.rand(group.device)
            random.random()
            return [x[:, 0, 0, 0] for _ in range(2) for x, _ in loader]

    return run_on_threads(plan.devices, work)


def test_random_images_are_the_same_on_every_fleet() -> None:
    alone = Loader(Augmented(10), 5, seed=1, shuffle=False)
    expected = [x[:, 0, 0, 0] for _ in range(2) for x, _ in alone]
    assert not torch.equal(expected[0], expected[2]), "another epoch draws other numbers"
    copies = augmented(plan_of("model"))
    pieces = augmented(plan_of("data-by-speed"))
    for step, whole in enumerate(expected):
        assert all(torch.equal(device[step], whole) for device in copies)
        assert torch.equal(torch.cat([device[step] for device in pieces]), whole)


class Odd(Plain):
    """A data set with one sample of another shape."""

    def __init__(self, odd: Any) -> None:
        super().__init__(10)
        self.odd = odd

    def __getitem__(self, index: int) -> Any:
        return self.odd if index == 7 else (image(index), index)


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (
            (torch.zeros(1, 3, 2), 7),
            r"samples \[5, 6, 7, 8, 9\] do not make a batch .*\[1, 2, 2\] at entry 0 and \[1, 3, 2\] at entry 2.*of one shape",
        ),
        (
            (plain_image(3), 7),
            r"samples \[5, 6, 7, 8, 9\] do not make a batch .*items are pairs .*convoy.data.from_datasets takes PIL",
        ),
        (torch.zeros(SHAPE), r"samples \[5, 6, 7, 8, 9\] do not make a batch"),
        ((torch.zeros(SHAPE), None), r"samples \[5, 6, 7, 8, 9\] do not make a batch"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_unstackable_samples_are_named(odd: Any, says: str, workers: int) -> None:
    loader = Loader(Odd(odd), 5, shuffle=False, workers=workers)
    with pytest.raises(DataError, match=says) as error:
        read(loader)
    assert "Traceback" not in str(error.value)
