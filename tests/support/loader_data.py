"""Data sets whose images encode their index, and what the devices of a plan load of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

import convoy
from convoy.comm.group import Group
from convoy.data import Images
from convoy.model.tracing import trace
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan
from convoy.runtime.module import Distributed
from convoy.train.loader import Loader
from tests.support.threads import run_on_threads

SAMPLES = 23
SHAPE = (1, 2, 2)


Batches = list[tuple[list[float], list[int]]]
"""Of each batch: which samples this device got (their first entry tells), and the labels of all of it."""


def image(index: int) -> Tensor:
    return torch.full(SHAPE, float(index))


class Plain(Dataset[tuple[Tensor, int]]):
    """A data set whose image i and label i are the number i. It counts what is loaded."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.loaded.append(index)
        return image(index), index


class WithTargets(Plain):
    """A data set whose label attribute differs from the labels it returns, like a relabelling subclass."""

    def __init__(self, samples: int = SAMPLES) -> None:
        super().__init__(samples)
        self.targets: Any = [label + 100 for label in range(samples)]


class InLists(Plain):
    """A data set with torch's batched protocol: it returns a list of samples at once."""

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        return [self[i] for i in indices]


def images() -> Images:
    x = torch.arange(SAMPLES, dtype=torch.uint8)[:, None, None, None].expand(SAMPLES, *SHAPE).contiguous()
    return Images(x, torch.arange(SAMPLES), SAMPLES, (0.0,), (1 / 255,))


DATASETS = {
    "plain": Plain,
    "targets": WithTargets,
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
    """Return the batches of every device: [device][epoch][batch]."""
    model = net()

    def work(group: Group) -> list[Batches]:
        part = convoy.distribute(model, plan, group, torch.zeros(1, *SHAPE))
        own = dataset if dataset is not None else Plain()
        loader = convoy.loader(own, plan.batch, part, **options)
        return [read(loader) for _ in range(epochs)]

    return run_on_threads(plan.devices, work)


def part_of(plan: Plan, device: int) -> Distributed:
    """Return one device's distributed net, usable for loading only."""
    parts = run_on_threads(plan.devices, lambda group: convoy.distribute(net(), plan, group, torch.zeros(1, *SHAPE)))
    parts[device].group.agree = lambda _, text: (text,) * plan.devices  # type: ignore[method-assign]
    return parts[device]
