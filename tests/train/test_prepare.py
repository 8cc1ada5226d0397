"""`prepare`: a script with an existing optimizer and DataLoader trains the same on several devices."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    default_collate,
)

import convoy
from convoy.comm.group import Group
from convoy.errors import InputError, MismatchError
from convoy.train.adopt import AdoptedLoader
from tests.support.small_script import ALONE, SPEEDS, images, net, seeded, shuffled
from tests.support.threads import run_on_threads


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return Adam with two groups, as for no weight decay on biases, one not in the model's order."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": others, "weight_decay": 0.0}, {"params": weights, "lr": 0.02}], lr=0.01, eps=1e-3
    )


def trained(
    make: Callable[[], DataLoader[Any]], group: Group | None, plan: str = "master", epochs: int = 3, before: int = 0
) -> tuple[list[float], dict[str, Tensor]]:
    """Return a script's losses and weights; with a group, after the `prepare` line.

    Args:
        before: steps of one device before that line: the optimizer remembers something then.
    """
    model = net()
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for k in range(before):
        x, y = images()[5 * k : 5 * k + 5]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    loader: Any = make()
    if group is not None:
        model, optimizer, loader = convoy.prepare(model, optimizer, loader, plan=plan, speeds=SPEEDS, group=group)
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        schedule.step()
    state: Any = model.full_state_dict() if group is not None else model.state_dict()  # type: ignore[operator]
    return losses, state


def assert_as_alone(make: Callable[[], DataLoader[Any]], **options: Any) -> None:
    losses, weights = trained(make, None, before=options.get("before", 0))
    for found, state in run_on_threads(3, lambda group: trained(make, group, **options)):
        assert found == pytest.approx(losses, abs=1e-10)
        assert state.keys() == weights.keys()
        assert all(torch.allclose(state[key], weights[key], rtol=0, atol=1e-10) for key in weights)


# ------------------------------------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("plan", ["data-by-speed", "master", "hybrid"])
def test_existing_optimizer_and_loader_train_as_on_one_device(plan: str) -> None:
    assert_as_alone(shuffled, plan=plan)


class Flipped(Dataset[Any]):
    """A data set with labels only in its items."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x, y = images()[index]
        return x.flip(-1), int(y)


def joined(rows: list[Any]) -> tuple[Tensor, Tensor]:
    """Mix every image with the previous one of the batch, so that samples depend on each other."""
    x, y = default_collate(rows)
    return 0.7 * x + 0.3 * x.roll(1, 0), y


class Odd(BatchSampler):
    """A sampler with batches of one class each, of unequal sizes."""

    batch_size = 9

    def __init__(self) -> None:
        self.rows = [[i for i in range(23) if int(images()[i][1]) == label] for label in range(3)]

    def __iter__(self) -> Any:
        yield from self.rows

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: shuffled(drop_last=True),
        lambda: shuffled(collate_fn=joined),
        lambda: DataLoader(images(), batch_sampler=Odd()),
        lambda: DataLoader(
            images(), 4, sampler=WeightedRandomSampler([1.0] * 23, 17, generator=seeded()), generator=seeded(3)
        ),
    ],
    ids=["drop_last", "collate_fn", "batch_sampler", "weighted"],
)
def test_dataloader_options_are_kept(make: Callable[[], DataLoader[Any]]) -> None:
    assert_as_alone(make)


def test_devices_load_only_their_local_batch() -> None:
    class Counted(Flipped):
        met = 0

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            self.met += 1
            return super().__getitem__(index)

    def work(group: Group) -> tuple[int, list[int]]:
        model, dataset = net(), Counted()
        part, _, loader = convoy.prepare(
            model, adam(model), DataLoader(dataset, 10), plan="data-by-speed", speeds=SPEEDS, group=group,
            outputs="where-computed",
        )  # fmt: skip
        dataset.met, seen = 0, []
        for x, y in convoy.loader(dataset, 10, part):
            assert len(part(2 * x).own) == len(y) == len(x)
            seen.append(len(x))
        assert [len(part(x).rows_of(y)) for x, y in loader] == seen  # global batches again
        return dataset.met - len(dataset), seen

    # A device without samples loads one of each batch, which shows the type of labels. Eight are compared.
    assert run_on_threads(3, work) == [(14 + 8, [6, 6, 2]), (3 + 8, [0, 0, 0]), (9 + 8, [4, 4, 1])]


class Superclasses(Dataset[Any]):
    """A relabelled data set whose `targets` still has the old labels, as with torchvision subclasses."""

    def __init__(self) -> None:
        self.targets = [int(y) for _, y in images()]

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        return images()[index][0], F.one_hot(torch.tensor(self.targets[index] // 2), 3).double()


def test_prepared_labels_come_from_items_not_attributes() -> None:
    assert_as_alone(lambda: shuffled(Superclasses()), plan="master")


def test_a_loader_with_other_samples_on_each_device_is_refused() -> None:
    def work(group: Group) -> None:
        model = net()
        part, *_ = convoy.prepare(model, adam(model), shuffled(), plan="data", speeds=SPEEDS, group=group)
        own = DataLoader(images(), 5, sampler=DistributedSampler(images(), 3, group.device, shuffle=False))
        part(next(iter(own))[0])

    with pytest.raises(MismatchError, match="another global batch than device 0"):
        run_on_threads(3, work)


def test_optimizer_can_be_created_after_prepare() -> None:
    def work(group: Group) -> list[float]:
        part, none, loader = convoy.prepare(net(), None, shuffled(), plan="master", speeds=SPEEDS, group=group)
        assert none is None
        optimizer = adam(part)
        losses = []
        for x, y in loader:
            loss = F.cross_entropy(part(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model = net()
    optimizer, expected = adam(model), []
    for x, y in shuffled():
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert run_on_threads(3, work) == [pytest.approx(expected, abs=1e-10)] * 3


class Turning(RandomSampler):
    """A user-defined sampler with set_epoch, as in torchvision's references for repeated augmentation."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        yield from ((i + 3 * self.epoch) % 23 for i in range(23))


# ------------------------------------------------------------------------------------------------------- refusals


class Backwards(RandomSampler):
    """A sampler whose order depends on its earlier draws."""

    drawn = 0

    def __iter__(self) -> Any:
        self.drawn += 1
        yield from range(23)[:: -1 if self.drawn % 2 else 1]


def test_stateful_sampler_cannot_join_a_running_job() -> None:
    loader = AdoptedLoader(DataLoader(images(), 5, sampler=Backwards(images())), None)
    with pytest.raises(InputError, match=r"Backwards is not torch's.*set_epoch"):
        loader.begin(joined=True)
    AdoptedLoader(shuffled(), None).begin(joined=True)
    AdoptedLoader(DataLoader(images(), 5, sampler=Turning(images())), None).begin(joined=True)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from images()


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        (lambda: DataLoader(Endless(), 5), "Endless is iterable-style.*map-style"),
        (lambda: DataLoader(images(), None), "batch_size=None.*give it a batch_size"),
        (
            lambda: DataLoader(images(), 5, sampler=DistributedSampler(images(), 2, 0)),
            "DistributedSampler.*leave it out",
        ),
        (lambda: images(), "a data set and no batch_size: give one"),
        (
            lambda: DataLoader(["one", "two"], 2),
            r"batches are lists with 0 tensors: say how .*call=lambda model, batch",
        ),
    ],
)
def test_a_loader_that_cannot_be_split_is_refused(loader: Callable[[], Any], told: str) -> None:
    model = net()
    with pytest.raises(InputError, match=told):
        convoy.prepare(model, adam(model), loader(), plan="data", group=ALONE)


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"works on none of the 8 parameters of the model: make it from model.parameters\(\)"
    ):
        convoy.prepare(net(), adam(net()), shuffled(), plan="data", speeds=(1.0,), group=ALONE)


def test_differing_settings_are_refused() -> None:
    def work(group: Group) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + group.device))
        convoy.prepare(model, optimizer, shuffled(), plan="data", speeds=(1.0, 1.0), group=group)

    with pytest.raises(MismatchError, match="device 1 started with another optimizer"):
        run_on_threads(2, work)
