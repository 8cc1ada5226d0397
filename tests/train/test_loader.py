"""The loader: the same batches on every fleet and plan, and each device's local batch."""

import pytest
import torch
from torch import Tensor, nn

import convoy
from convoy.errors import InputError
from convoy.train.loader import Loader
from tests.support.loader_data import SAMPLES, SHAPE, Plain, part_of, plan_of, read, read_on_devices

# ------------------------------------------------------------------------------------------------------- the order


def test_every_sample_comes_once_per_epoch_in_a_new_order() -> None:
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


def test_drop_last_drops_the_partial_batch() -> None:
    loader = Loader(Plain(7), 3, shuffle=False, drop_last=True)
    assert [y for _, y in read(loader)] == [[0, 1, 2], [3, 4, 5]]
    assert len(loader) == 2
    assert len(Loader(Plain(6), 3, drop_last=True)) == len(Loader(Plain(6), 3)) == 2
    assert read(Loader(Plain(2), 3, drop_last=True)) == []


@pytest.mark.parametrize("name", ["data-by-speed", "master", "hybrid"])
def test_every_plan_loads_the_batches_of_one_device(name: str) -> None:
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


# ------------------------------------------------------------------------------------------------- beginning later


@pytest.mark.parametrize("start", [1, 5])
def test_an_epoch_can_begin_in_the_middle(start: int) -> None:
    whole = Loader(Plain(), 5, seed=3)
    epochs = [read(whole) for _ in range(3)]
    dataset = Plain()
    loader = Loader(dataset, 5, seed=3)
    loader.set_epoch(1, start=start)
    assert read(loader) == epochs[1][start:]
    assert dataset.loaded == [i for _, labels in epochs[1][start:] for i in labels]
    assert read(loader) == epochs[2], "the next epoch is whole"
    assert len(loader) == 5, "an epoch has as many batches as before"


@pytest.mark.parametrize("start", [-1, 6])
def test_a_start_beyond_the_epoch_is_refused(start: int) -> None:
    with pytest.raises(InputError, match=f"start {start} in an epoch of 5 batches: give 0 to 5"):
        Loader(Plain(), 5).set_epoch(0, start=start)


# --------------------------------------------------------------------------------------------------------- wrong use


@pytest.mark.parametrize("batch", [0, -1])
def test_an_empty_batch_is_refused(batch: int) -> None:
    with pytest.raises(InputError, match=f"a batch of {batch}: .*give 1 or more"):
        convoy.loader(Plain(), batch)


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(InputError, match="the data set is empty: give one with samples"):
        convoy.loader(Plain(0), 4)


def test_missing_batch_size_is_requested() -> None:
    with pytest.raises(InputError, match=r"the size of the global batch is not known: use convoy.loader, or"):
        part_of(plan_of("data"), 0)(torch.zeros(2, *SHAPE))


def test_a_model_with_two_inputs_is_refused() -> None:
    class Two(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b

    with convoy.join() as group:
        example = (torch.zeros(1, 3), torch.zeros(1, 3))
        plan = convoy.make_plan("data", Two(), example, 4, group, speeds=[1])
        part = convoy.distribute(Two(), plan, group, example)
        with pytest.raises(InputError, match="the model has 2 inputs; the loader serves one"):
            next(iter(convoy.loader(Plain(), 4, part)))
