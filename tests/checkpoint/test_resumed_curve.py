"""A loop that resumes in mid-epoch, in new processes, continues on the same curve to the last digit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import convoy
from convoy.checkpoint import Progress
from convoy.comm.group import Group
from tests.support.processes import on_processes

SPEEDS = (3.0, 2.0)


class Noisy(Dataset[Any]):
    """28 images with random augmentation."""

    def __len__(self) -> int:
        return 28

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        own = torch.Generator().manual_seed(i)
        return torch.randn(1, 6, 6, generator=own) + 0.3 * torch.randn(1, 6, 6), i % 3


class Average:
    """An object of the script with a state of its own: a running mean of the loss."""

    value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def run(group: Group, folder: str, last: int, workers: int) -> list[float]:
    """Train with dropout, mixup, augmentation, a schedule and a loss scaler up to step `last`, after the saved ones."""
    torch.manual_seed(3)
    body = (nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.4), nn.Flatten(), nn.Linear(96, 3))
    net: Any = nn.Sequential(*body)
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)
    loader: Any = DataLoader(Noisy(), 4, shuffle=True, num_workers=workers)
    net, optimizer, loader = convoy.prepare(net, optimizer, loader, plan="hybrid", speeds=SPEEDS, group=group)
    scaler, average = convoy.GradScaler(net, init_scale=64.0, growth_interval=3), Average()
    more: dict[str, Any] = {"schedule": schedule, "scaler": scaler, "average": average, "loader": loader}
    here = convoy.load_checkpoint(folder, net, optimizer, missing_ok=True, **more)
    found, step = [], here.step
    for epoch in range(here.epoch, 9):
        for x, y in loader:
            order, share = torch.randperm(len(x)), torch.rand(())
            out = net(share * x + (1 - share) * x[order])
            loss = share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            average.value = 0.9 * average.value + 0.1 * loss.item()
            step += 1
            found += [loss.item(), average.value, scaler.get_scale(), schedule.get_last_lr()[0]]
            if step == last:
                convoy.save_checkpoint(folder, net, optimizer, Progress(step, epoch, step - 7 * epoch), **more)
                return found
    raise AssertionError("the loop ended early")


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_loop_continues_the_curve_to_the_last_digit(tmp_path: Path, workers: int) -> None:
    target = "tests.checkpoint.test_resumed_curve:run"
    expected = on_processes(2, target, str(tmp_path / "whole"), 10, workers)
    first = on_processes(2, target, str(tmp_path / "parts"), 5, workers)
    later = on_processes(2, target, str(tmp_path / "parts"), 10, workers)
    assert [a + b for a, b in zip(first, later, strict=True)] == expected
    assert expected[0] == expected[1]  # both devices draw, and compute, the same
