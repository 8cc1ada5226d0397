"""The loader: the same batches on every fleet and under every plan, and this device's part of each."""

import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

import convoy
from convoy.data import Images
from convoy.errors import InputError
from convoy.execute.data import Loader
from convoy.execute.group import Group
from convoy.execute.module import Distributed
from convoy.execute.threads import run_on_threads
from convoy.named import Speeds, named_plan
from convoy.plan import Plan
from convoy.trace import trace

SAMPLES = 23
SHAPE = (1, 2, 2)

_TURN = threading.Lock()

Batches = list[tuple[list[float], list[int]]]
"""Of each batch: which samples this device got (their first entry tells), and the labels of all of it."""


def image(index: int) -> Tensor:
    return torch.full(SHAPE, float(index))


class Plain(Dataset[tuple[Tensor, int]]):
    """Image i holds the number i; its label is i too. Counts what is loaded."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.loaded.append(index)
        return image(index), index


class WithTargets(Plain):
    """As torchvision's: labels can be had without loading."""

    def __init__(self, samples: int = SAMPLES) -> None:
        super().__init__(samples)
        self.targets: Any = list(range(samples))


class WithTensor(WithTargets):
    def __init__(self, samples: int = SAMPLES) -> None:
        super().__init__(samples)
        self.targets = torch.arange(samples)


class WithArray(WithTargets):
    def __init__(self, samples: int = SAMPLES) -> None:
        super().__init__(samples)
        self.targets = np.arange(samples)


class InLists(Plain):
    """torch's protocol: many samples at once, as a list."""

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        return [self[i] for i in indices]


def images() -> Images:
    x = torch.arange(SAMPLES, dtype=torch.uint8)[:, None, None, None].expand(SAMPLES, *SHAPE).contiguous()
    return Images(x, torch.arange(SAMPLES), SAMPLES, (0.0,), (1 / 255,))


DATASETS = {
    "plain": Plain,
    "targets": WithTargets,
    "tensor": WithTensor,
    "array": WithArray,
    "lists": InLists,
    "images": images,
    "subset": lambda: Subset(images(), list(range(SAMPLES))),
}


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def plan_of(name: str, speeds: tuple[float, ...] = (3.0, 0.0, 2.0), batch: int = 5) -> Plan:
    return named_plan(name, trace(net(), torch.zeros(1, *SHAPE)).graph, batch, Speeds(speeds))


def read(loader: Loader) -> Batches:
    return [([round(float(v)) for v in x[:, 0, 0, 0]], y.tolist()) for x, y in loader]


def read_on_devices(plan: Plan, dataset: Any = None, epochs: int = 1, **options: Any) -> list[list[Batches]]:
    """What every device of a plan gets: [device][epoch][batch]."""
    model = net()

    def work(group: Group) -> list[Batches]:
        part = convoy.distribute(model, plan, group, torch.zeros(1, *SHAPE))
        own = dataset if dataset is not None else Plain()
        loader = convoy.loader(own, plan.batch, part, **options)
        return [read(loader) for _ in range(epochs)]

    return run_on_threads(plan.devices, work)


# ------------------------------------------------------------------------------------------------------- the order


def test_every_sample_comes_once_in_an_epoch_in_an_order_of_its_own() -> None:
    loader = Loader(Plain(), 5, seed=3)
    epochs = [[i for _, y in read(loader) for i in y] for _ in range(2)]
    assert all(sorted(epoch) == list(range(SAMPLES)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert epochs[0] != list(range(SAMPLES))
    assert len(loader) == 5
    loader.set_epoch(0)
    assert [i for _, y in read(loader) for i in y] == epochs[0], "the first epoch can be had again"
    assert [i for _, y in read(Loader(Plain(), 7, seed=3)) for i in y] == epochs[0], "in batches of any size"
    assert [i for _, y in read(Loader(Plain(), 5, seed=4)) for i in y] != epochs[0]


def test_the_order_does_not_depend_on_the_state_of_torch() -> None:
    torch.manual_seed(1)
    first = Loader(Plain(), 5).batches(2)
    torch.manual_seed(2)
    assert Loader(Plain(), 5).batches(2) == first


@pytest.mark.parametrize("seed", [-5, 2**40, 2**62])
def test_any_seed_is_good(seed: int) -> None:
    assert sorted(i for b in Loader(Plain(), 5, seed=seed).batches(1) for i in b) == list(range(SAMPLES))


def test_without_shuffling_the_order_is_that_of_the_data_set() -> None:
    assert read(Loader(Plain(7), 3, shuffle=False)) == [
        ([0, 1, 2], [0, 1, 2]),
        ([3, 4, 5], [3, 4, 5]),
        ([6], [6]),
    ]


def test_a_smaller_last_batch_can_be_left_out() -> None:
    loader = Loader(Plain(7), 3, shuffle=False, drop_last=True)
    assert [y for _, y in read(loader)] == [[0, 1, 2], [3, 4, 5]]
    assert len(loader) == 2
    assert len(Loader(Plain(6), 3, drop_last=True)) == len(Loader(Plain(6), 3)) == 2
    assert read(Loader(Plain(2), 3, drop_last=True)) == []


@pytest.mark.parametrize("name", ["data", "data-by-speed", "master", "model", "hybrid"])
def test_the_batches_are_those_of_one_device_under_every_plan(name: str) -> None:
    """For two epochs in a row; the batches of 5, and the last one of 3, fall on three devices, one of them idle."""
    loader = Loader(Plain(), 5, seed=1)
    expected = [read(loader), read(loader)]
    found = read_on_devices(plan_of(name), epochs=2, seed=1)
    for epoch in range(2):
        for step, (samples, labels) in enumerate(expected[epoch]):
            batches = [device[epoch][step] for device in found]
            assert all(y == labels for _, y in batches), "labels of the whole batch, everywhere"
            parts = [x for x, _ in batches]
            if name in ("data", "data-by-speed", "hybrid"):
                assert [i for part in parts for i in part] == samples, "each sample on one device, in order"
            else:  # filters are split, so whoever has some needs all samples
                assert all(part in ([], samples) for part in parts)
                assert samples in parts


def test_the_parts_by_hand() -> None:
    """Speeds 3 : 0 : 2. A batch of 5 falls 3, 0, 2; the rest of 3 falls 1.8, 0, 1.2, so 2, 0, 1."""
    found = read_on_devices(plan_of("data-by-speed"), dataset=Plain(8), shuffle=False)
    assert [device[0] for device in found] == [
        [([0, 1, 2], [0, 1, 2, 3, 4]), ([5, 6], [5, 6, 7])],
        [([], [0, 1, 2, 3, 4]), ([], [5, 6, 7])],
        [([3, 4], [0, 1, 2, 3, 4]), ([7], [5, 6, 7])],
    ]


def test_a_last_batch_smaller_than_the_number_of_devices() -> None:
    found = read_on_devices(plan_of("data", (1.0,) * 4, 4), dataset=Plain(6), shuffle=False, seed=2)
    assert [device[0][1][0] for device in found] == [[4], [5], [], []]


def test_where_the_first_layer_wants_copies_everybody_loads_all() -> None:
    """`model` splits the four filters of the convolution over three devices; `master` by speed, so device 1 has none."""
    everything = [0, 1, 2, 3, 4]
    found = read_on_devices(plan_of("model"), dataset=Plain(5), shuffle=False)
    assert [device[0][0][0] for device in found] == [everything] * 3
    found = read_on_devices(plan_of("master"), dataset=Plain(5), shuffle=False)
    assert [device[0][0][0] for device in found] == [everything, [], everything]


# ---------------------------------------------------------------------------------------------------- the data sets


@pytest.mark.parametrize(("name", "workers"), [*((name, 0) for name in DATASETS), ("plain", 1), ("images", 1)])
def test_every_kind_of_data_set_gives_the_same(name: str, workers: int) -> None:
    """Also with a process that prepares batches ahead. Nothing has any other shape or dtype where there are no samples."""
    indices = Loader(Plain(), 5, seed=1).batches(0)
    part = _part_of(plan_of("data-by-speed"), 1 if workers == 0 else 2)
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


def _part_of(plan: Plan, device: int) -> Distributed:
    """One device's part of the net; nothing but loading is possible with it."""
    return run_on_threads(plan.devices, lambda group: convoy.distribute(net(), plan, group, torch.zeros(1, *SHAPE)))[
        device
    ]


def test_labels_are_read_without_loading_where_that_is_possible() -> None:
    part = _part_of(plan_of("data-by-speed"), 2)
    for dataset, expected in ((WithTargets(10), 4), (Plain(10), 10)):
        read(convoy.loader(dataset, 5, part, shuffle=False))
        assert len(dataset.loaded) == expected


class Relabelled(WithTargets):
    """As torchvision's with a target_transform: the items have labels that `targets` has not."""

    def __init__(self) -> None:
        super().__init__(10)
        self.target_transform = lambda label: 100 + label

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return image(index), self.target_transform(index)


class Together(WithTargets):
    """As torchvision's with a function of image and label together."""

    def __init__(self) -> None:
        super().__init__(10)
        self.transforms = lambda image, label: (image, 100 + label)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transforms(image(index), index)


@pytest.mark.parametrize("make", [Relabelled, Together])
def test_labels_that_are_changed_on_the_way_are_not_taken_from_targets(make: type[WithTargets]) -> None:
    part = _part_of(plan_of("data-by-speed"), 1)
    assert [y for _, y in read(convoy.loader(make(), 5, part, shuffle=False))] == [
        [100, 101, 102, 103, 104],
        [105, 106, 107, 108, 109],
    ]


class Measurements(Dataset[tuple[Tensor, float]]):
    """Numbers in place of classes."""

    targets = (0.25, 0.5, 0.75)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        return image(index), self.targets[index]


def test_targets_need_not_be_whole_numbers() -> None:
    ((_, y),) = Loader(Measurements(), 3, shuffle=False)
    assert y.tolist() == [0.25, 0.5, 0.75]


class Augmented(Plain):
    """Draws from all three sources of random numbers, as image transforms do."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return image(index) + torch.rand(()) + random.random() + float(np.random.rand()), index


class AugmentedInLists(Augmented):
    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        return [self[i] for i in indices]


def augmented(plan: Plan, make: type[Augmented] = Augmented) -> list[list[Tensor]]:
    """The images of every device, in two epochs; every device has drawn other numbers before."""
    model, dataset = net(), make(10)

    def work(group: Group) -> list[Tensor]:
        part = convoy.distribute(model, plan, group, torch.zeros(1, *SHAPE))
        loader = convoy.loader(dataset, 5, part, seed=1, shuffle=False)
        with _TURN:  # threads share one stream, where processes have their own
            torch.rand(group.device)
            random.random()
            return [x[:, 0, 0, 0] for _ in range(2) for x, _ in loader]

    return run_on_threads(plan.devices, work)


def test_random_images_are_the_same_on_every_fleet() -> None:
    """Crops and flips depend on the seed, the epoch and the sample: devices that split filters must see the same image."""
    alone = Loader(Augmented(10), 5, seed=1, shuffle=False)
    expected = [x[:, 0, 0, 0] for _ in range(2) for x, _ in alone]
    assert not torch.equal(expected[0], expected[2]), "another epoch draws other numbers"
    copies = augmented(plan_of("model"))
    pieces = augmented(plan_of("data-by-speed"))
    for step, whole in enumerate(expected):
        assert all(torch.equal(device[step], whole) for device in copies)
        assert torch.equal(torch.cat([device[step] for device in pieces]), whole)


def test_random_images_that_come_many_at_a_time_are_the_same_on_devices_that_split_filters() -> None:
    first, *others = augmented(plan_of("model"), AugmentedInLists)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_loading_leaves_the_random_numbers_of_the_program_alone() -> None:
    def numbers(dataset: Plain) -> list[tuple[float, float, float]]:
        torch.manual_seed(1)
        random.seed(2)
        np.random.seed(3)
        return [(float(torch.rand(())), random.random(), float(np.random.rand())) for _ in Loader(dataset, 5)]

    assert numbers(Augmented(10)) == numbers(Plain(10))


# --------------------------------------------------------------------------------------------------------- wrong use


@pytest.mark.parametrize("batch", [0, -1])
def test_a_batch_holds_one_sample_at_least(batch: int) -> None:
    with pytest.raises(InputError, match=f"a batch of {batch}: .*give 1 or more"):
        convoy.loader(Plain(), batch)


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(InputError, match="the data set is empty: give one with samples"):
        convoy.loader(Plain(0), 4)


def test_a_part_of_another_batch_is_refused() -> None:
    """Batches collected first and used later: the size that was told last is not that of the first batch."""
    model = net()

    def work(group: Group) -> str:
        part = convoy.distribute(model, plan_of("data", (1.0, 1.0), 4), group, torch.zeros(1, *SHAPE))
        collected = list(convoy.loader(Plain(6), 4, part))
        with pytest.raises(InputError) as caught:
            part(collected[0][0])
        assert part(collected[0][0], batch=4).shape == (4, 3), "saying the size helps"
        return str(caught.value)

    for device, message in enumerate(run_on_threads(2, work)):
        assert f"device {device} got an input of shape (2, 1, 2, 2)" in message
        assert "its part of a batch of 2 is (1, 1, 2, 2)" in message
        assert "model(x, batch=n)" in message


def test_a_model_that_was_told_no_size_asks_for_it() -> None:
    with pytest.raises(InputError, match=r"the size of the whole batch is not known: use convoy.loader, or call model"):
        _part_of(plan_of("data"), 0)(torch.zeros(2, *SHAPE))


def test_a_model_with_two_inputs_needs_another_loader() -> None:
    class Two(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b

    with convoy.join() as group:
        example = (torch.zeros(1, 3), torch.zeros(1, 3))
        plan = convoy.make_plan("data", Two(), example, 4, group, speeds=[1])
        part = convoy.distribute(Two(), plan, group, example)
        with pytest.raises(InputError, match="the model has 2 inputs; the loader serves one"):
            next(iter(convoy.loader(Plain(), 4, part)))
