"""Runs a training loop as a script on one device in plain PyTorch, or on several processes after `convoy.prepare`.

A loop is a generator `loop(prepare, optimizer)` that yields one number per step, such as its loss. In plain PyTorch `prepare`
returns its arguments. So the same lines are the script under test and its oracle.
"""

import importlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import convoy
from convoy.comm.group import Group
from convoy.errors import ConvoyError
from tests.support.processes import on_processes

SPEEDS = (3.0, 2.0, 1.0)
STEPS = 10
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    # Rounding divided by an eps of 1e-8 would be compared where a gradient is zero.
    "adamw": partial(torch.optim.AdamW, lr=0.003, eps=1e-3),
}
Prepare = Callable[..., Any]
Make = Callable[[Any], torch.optim.Optimizer]
Loop = Callable[[Prepare, Make], Iterator[Any]]


def plain(*given: Any, **_options: Any) -> tuple[Any, ...]:
    """Return what `convoy.prepare` was given: the script on one device."""
    return given


def numbers(loop: Loop, optimizer: str, prepare: Prepare) -> list[float]:
    """Run the first steps of a loop in float64 with fixed seeds, in a process of its own. Return what it yields."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    return [torch.as_tensor(each).item() for each in itertools.islice(loop(prepare, OPTIMIZERS[optimizer]), STEPS)]


def run(group: Group, module: str, name: str, optimizer: str, plan: str | None) -> list[float] | str:
    """Run a loop in one of several processes; `plan` None: in plain PyTorch. Return its numbers, or why it was refused."""
    loop = getattr(importlib.import_module(module), name)
    if plan is None:
        return numbers(loop, optimizer, plain)
    options: dict[str, Any] = {"budget_s": 0.5} if plan == "auto" else {"speeds": SPEEDS}
    try:
        return numbers(loop, optimizer, partial(convoy.prepare, group=group, plan=plan, **options))
    except ConvoyError as error:
        return str(error)


def both(
    loop: Loop, optimizer: str, plan: str, devices: int = 3, limit_s: float = 90.0
) -> tuple[list[float], list[Any]]:
    """Return the numbers of a loop in plain PyTorch, and those of each device, or the message that refused it."""
    arguments = ("tests.support.loops:run", loop.__module__, loop.__name__, optimizer)
    return on_processes(1, *arguments, None)[0], on_processes(devices, *arguments, plan, limit_s=limit_s)


def batches(
    *shape: int, classes: int = 4, count: int = 60, size: int = 12, labels: tuple[int, ...] = ()
) -> DataLoader[Any]:
    """Return a shuffled DataLoader of random images and labels; `labels`: the shape of one label."""
    own = torch.Generator().manual_seed(1)
    x = torch.randn(count, *shape, generator=own)
    y = torch.randint(0, classes, (count, *labels), generator=own)
    return DataLoader(TensorDataset(x, y), batch_size=size, shuffle=True, generator=torch.Generator().manual_seed(2))


def endless(loader: Any) -> Iterator[Any]:
    """Yield the batches of epoch after epoch."""
    while True:
        yield from loader


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU())


def encoder(outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(conv(3, 6), conv(6, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, outputs))


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    """Run backward and one optimizer step. Return the loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
