"""A prepared DataLoader gives the batches of a plain one: order, random numbers, any sampler, also after a resume."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    default_collate,
)

import convoy
from convoy.checkpoint import Progress, load_checkpoint, save_checkpoint
from convoy.comm.group import Group
from convoy.errors import InputError, MismatchError
from convoy.train.adopt import AdoptedLoader
from convoy.train.random_states import generators_in
from tests.support.loader_data import Plain
from tests.support.small_script import ALONE, SPEEDS, images, net, seeded
from tests.support.threads import run_on_threads

Make = Callable[[DataLoader[Any]], Any]


class Noisy(Dataset[Any]):
    """A data set that draws from the streams of the process, and from generators of its own if it has a seed."""

    def __init__(self, seed: int | None = None) -> None:
        self.torch = None if seed is None else torch.Generator().manual_seed(seed)
        self.others: Any = [random, np.random] if seed is None else [random.Random(seed), np.random.default_rng(seed)]

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.rand((), generator=self.torch, dtype=torch.float64) + sum(each.random() for each in self.others)
        x, y = images()[index]
        return x + 0.1 * noise, int(y)


class Learning(Sampler[int]):
    """An endless sampler. Each iteration continues after the last sample of the previous one."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.at += 3
            yield self.at % 23


class Sized(BatchSampler):
    """A batch sampler whose entries are pairs, (index, size)."""

    def __iter__(self) -> Iterator[Any]:
        yield from ([(i, 4) for i in batch] for batch in super().__iter__())


class Resized(Noisy):
    def __getitem__(self, index: Any) -> tuple[Tensor, int]:
        at, size = index if isinstance(index, tuple) else (index, 6)
        x, y = super().__getitem__(at)
        return x[..., :size], y


def shuffled(dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, 5, shuffle=True, **options)


def zipped(make: Make) -> Iterator[Any]:
    one, two = make(shuffled(Noisy())), make(shuffled(Noisy(3), num_workers=1))
    for _ in range(2):
        yield from ([*a, *b] for a, b in zip(one, two, strict=True))


def restarted(make: Make) -> Iterator[Any]:
    loader = make(shuffled(Noisy()))
    batches = iter(loader)
    for _ in range(8):
        try:
            yield next(batches)
        except StopIteration:
            batches = iter(loader)
        if torch.rand(()) < 0.3:
            batches = iter(loader)


def twice_at_once(make: Make) -> Iterator[Any]:
    loader = make(shuffled(Noisy()))
    yield from ([*a, *b] for a, b in zip(loader, loader, strict=True))


def persistent(make: Make) -> Iterator[Any]:
    loader = make(shuffled(Noisy(3), num_workers=1, persistent_workers=True))
    for _ in range(2):
        yield from loader


def learning(make: Make) -> Iterator[Any]:
    sampler = Learning()
    for number, batch in enumerate(make(DataLoader(Noisy(), 5, sampler=sampler))):
        yield batch
        sampler.at += number
        if number == 7:
            return


def sized(make: Make) -> Iterator[Any]:
    yield from make(DataLoader(Resized(), batch_sampler=Sized(RandomSampler(Noisy()), 5, drop_last=False)))


class Doubling(DataLoader[Any]):
    def __iter__(self) -> Any:
        yield from ([2 * x, y] for x, y in super().__iter__())


def doubled(make: Make) -> Iterator[Any]:
    yield from make(Doubling(images(), 5, shuffle=True))


class Counting(Noisy):
    """A data set with state: how often it was asked."""

    calls = 0

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.calls += 1
        x, y = super().__getitem__(index)
        return x * self.calls, y


def counted(make: Make) -> Iterator[Any]:
    def collate(rows: list[Any]) -> Any:
        calls.append(len(calls))
        x, y = default_collate(rows)
        return x + len(calls), y

    calls: list[int] = []
    yield from make(shuffled(Counting(3), collate_fn=collate))


@pytest.mark.parametrize("loop", [zipped, restarted, twice_at_once, persistent, learning, sized, doubled, counted])
def test_prepared_loader_gives_the_batches_of_a_plain_one(loop: Callable[[Make], Iterator[Any]]) -> None:
    def seen(make: Make) -> list[Any]:
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        return [[each.tolist() for each in batch] for batch in loop(make)]

    def prepared(loader: DataLoader[Any]) -> Any:
        return convoy.prepare(net(), None, loader, plan="data", speeds=(1.0,), group=ALONE)[-1]

    assert seen(prepared) == seen(lambda loader: loader)


class Slotted:
    __slots__ = ("generator",)
    of_class = np.random.default_rng(1)

    def __init__(self) -> None:
        self.generator = random.Random(2)


def test_generators_are_found_in_slots_classes_and_containers() -> None:
    held, many = Slotted(), [random.Random(i) for i in range(100)]
    found = generators_in(deque([held]), lambda: (many, later))  # `later` is an empty cell
    assert {*map(id, found)} == {id(each) for each in (held.generator, held.of_class, *many)}
    if held is None:
        later = 0


def test_devices_draw_as_device_0() -> None:
    def work(group: Group) -> list[list[float]]:
        source = DataLoader(Noisy(group.device), 5, shuffle=True, generator=seeded(group.device))
        loader = convoy.prepare(net(), None, source, plan="data", speeds=SPEEDS, group=group)[-1]
        return [x.flatten().tolist() for _ in range(2) for x, _ in loader]

    # Threads share the streams of the process, so only generators of their own can differ here.
    for module in (random, np.random):
        module.seed(0)  # type: ignore[attr-defined]
    alone = DataLoader(Noisy(0), 5, shuffle=True, generator=seeded(0))
    expected = [x.flatten().tolist() for _ in range(2) for x, _ in alone]
    assert run_on_threads(3, work) == [expected] * 3


def test_local_batches_of_other_data_are_refused() -> None:
    def work(group: Group) -> None:
        order = torch.randperm(23, generator=seeded(group.device))
        own = TensorDataset(*(each[order] for each in images().tensors))
        model, _, _ = convoy.prepare(net(), None, DataLoader(own, 5), plan="data", speeds=SPEEDS, group=group)
        next(iter(convoy.loader(own, 5, model)))

    with pytest.raises(MismatchError, match="device 1 has other data than device 0: give every device the same files"):
        run_on_threads(3, work)


@pytest.mark.parametrize("workers", [0, 1])
def test_resume_continues_mid_epoch(tmp_path: Path, workers: int) -> None:
    def losses(saves: int | None, resumes: bool) -> list[float]:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        source = shuffled(Noisy(3), num_workers=workers)
        here, optimizer, loader = convoy.prepare(model, optimizer, source, plan="data", speeds=(1.0,), group=ALONE)
        start = Progress()
        if resumes:
            start = load_checkpoint(tmp_path, here, optimizer, loader=loader)
        found, step = [], start.step
        for epoch in range(start.epoch, 3):
            loader.set_epoch(epoch, start.batch if epoch == start.epoch else 0)
            for x, y in loader:
                loss = F.cross_entropy(here(x), y + 0 * (torch.rand(()) > 2))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                found.append(loss.item())
                if step == saves:
                    save_checkpoint(tmp_path, here, optimizer, Progress(step, *divmod(step, 5)), loader=loader)
                    return found
        return found

    for module in (random, np.random):
        module.seed(4)  # type: ignore[attr-defined]
    torch.manual_seed(4)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    expected = losses(None, resumes=False)
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    assert losses(8, resumes=False) == expected[:8]
    assert losses(None, resumes=True) == expected[8:]


def test_a_start_without_a_loaded_state_is_refused() -> None:
    loader = AdoptedLoader(shuffled(images()), None)
    with pytest.raises(InputError, match=r"start 2 in epoch 1: .*load_checkpoint\(\.\.\., loader=loader\)"):
        loader.set_epoch(1, start=2)
    kept = AdoptedLoader(shuffled(images(), num_workers=1, persistent_workers=True), None)
    with pytest.raises(InputError, match="persistent_workers, whose random states cannot be saved"):
        kept.state_dict()


class NoRoom(Plain):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")


def test_small_shared_memory_names_the_remedy() -> None:
    with pytest.raises(InputError, match=r"/dev/shm is too small .*--shm-size"):
        next(iter(convoy.loader(NoRoom(), 5)))
    with pytest.raises(RuntimeError) as error:
        next(iter(AdoptedLoader(DataLoader(NoRoom(), 5), None)))
    assert "--shm-size" in error.value.__notes__[0]


def test_batches_of_an_unfinished_step_come_again() -> None:
    model, _, loader = convoy.prepare(net(), None, DataLoader(images(), 5), plan="data", speeds=(1.0,), group=ALONE)
    model.guard = lambda given: given.begin()  # as of `Members`
    seen = []
    for x, y in loader:
        seen.append((y.tolist(), x.sum().item()))
        x.zero_()
        if len(seen) == 3:  # the second of two micro-batches fails
            model.repeats += 1
        elif len(seen) != 2:
            model.finished_steps += 1
    batches = [(y.tolist(), x.sum().item()) for x, y in DataLoader(images(), 5)]
    assert seen == [*batches[:3], *batches[1:]]
