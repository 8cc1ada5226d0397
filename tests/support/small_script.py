"""The training of the script tests: a small net on random images, an ordinary DataLoader, devices of unequal speed."""

import copy
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from convoy.comm.group import AloneGroup
from tests.support.torch_seed import torch_seed

ALONE = AloneGroup(torch.device("cpu"))
SPEEDS = (3.0, 0.1, 2.0)  # the second gets no samples of a batch of 5


def _made() -> nn.Module:
    with torch_seed(1):
        layers = (nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 8), nn.ReLU())
        return nn.Sequential(*layers, nn.Linear(8, 3)).double()


_NET = _made()


def net() -> nn.Module:
    """Return a copy: torch's random state belongs to the process, and devices are threads here."""
    return copy.deepcopy(_NET)


def images(count: int = 23) -> TensorDataset:
    generator = seeded(2)
    x = torch.randn(count, 1, 6, 6, dtype=torch.float64, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (count,), generator=generator))


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shuffled(dataset: Dataset[Any] | None = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset or images(), batch_size=5, shuffle=True, generator=seeded(), **options)
