"""A script's random numbers match one device, or at least each other, around a model that draws some."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import convoy
from convoy.comm.group import AloneGroup, Group
from tests.support.processes import on_processes


class Noisy(nn.Module):
    """An unsplit module that draws from all three generators and mixes its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        y = y - y.mean(0) + torch.randn(y.shape)
        return y * 2 if random.random() < 0.5 else y * float(np.random.rand())


NETS = {"dropout": lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2)), "whole": Noisy}


def trained(group: Group, net: str) -> list[float]:
    """Return the losses of a few steps with mixed samples, and the next draw of each generator."""
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    model, x = NETS[net](), torch.randn(5, 4)
    plan = convoy.make_plan("data", model, x, 5, group, speeds=(1.0, 3.0)[: group.devices])
    part = convoy.distribute(model, plan, group, x)
    losses = []
    for _ in range(3):
        mix = random.random() * np.random.rand()
        loss = part(mix * x + (1 - mix) * x[torch.randperm(5)], whole=True).square().mean()
        loss.backward()
        losses.append(loss.item())
    return [*losses, random.random(), float(np.random.rand()), float(torch.rand(()))]


def masks(group: Group) -> list[list[float]]:
    model, x = nn.Dropout(), torch.ones(8, 16)
    plan = convoy.make_plan("data", model, x, 8, group, speeds=(1.0, 1.0))
    part = convoy.distribute(model, plan, group, x)
    return [part(x, whole=True).tolist() for _ in range(2)]  # type: ignore[misc]


def test_unequal_dropout_keeps_loop_randomness_equal() -> None:
    rows = on_processes(2, "tests.runtime.test_random_numbers:trained", "dropout")
    assert rows[0] == rows[1]


def test_unsplit_module_keeps_the_loops_randomness() -> None:
    rows: list[Any] = on_processes(2, "tests.runtime.test_random_numbers:trained", "whole")
    alone = trained(AloneGroup(torch.device("cpu")), "whole")
    assert rows == [pytest.approx(alone)] * 2


def test_dropout_masks_differ_by_device_and_step() -> None:
    first, second = on_processes(2, "tests.runtime.test_random_numbers:masks")[0]
    drawn = [first[:4], first[4:], second[:4], second[4:]]
    assert all(a != b for i, a in enumerate(drawn) for b in drawn[:i])
