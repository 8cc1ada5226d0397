"""An ordinary training loop, for the command line; the same loop trains a distributed model and a plain one."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from convoy.errors import unknown_name
from convoy.execute.data import Loader
from convoy.execute.rebalancing import Rebalancer


@dataclass(frozen=True, slots=True)
class EpochResult:
    """One epoch: mean training loss over its samples, accuracy on the test images (0 to 1), seconds of training."""

    loss: float
    accuracy: float
    train_s: float
    samples_per_s: float


@dataclass
class History:
    """What a training run showed.

    Attributes:
        losses: of every step, over the whole batch.
        epochs: one result per epoch.
    """

    losses: list[float] = field(default_factory=list)
    epochs: list[EpochResult] = field(default_factory=list)


class Observer(Protocol):
    """Is told how training goes; for progress bars and logs."""

    def step(self, epoch: int, loss: float, samples: int) -> None: ...

    def epoch(self, epoch: int, result: EpochResult) -> None: ...


_Build = Callable[[list[nn.Parameter], float, float, float], Optimizer]
OPTIMIZERS: Mapping[str, _Build] = {
    "sgd": lambda p, lr, momentum, decay: torch.optim.SGD(p, lr=lr, momentum=momentum, weight_decay=decay),
    "adam": lambda p, lr, _, decay: torch.optim.Adam(p, lr=lr, weight_decay=decay),
    "adamw": lambda p, lr, _, decay: torch.optim.AdamW(p, lr=lr, weight_decay=decay),
}


def build_optimizer(name: str, model: nn.Module, lr: float, momentum: float, weight_decay: float) -> Optimizer:
    """An optimizer by name.

    Raises:
        InputError: unknown name; the choices are listed.
    """
    if name not in OPTIMIZERS:
        raise unknown_name("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name](list(model.parameters()), lr, momentum, weight_decay)


def fit(
    model: nn.Module,
    train: Loader,
    test: Loader,
    optimizer: Optimizer,
    epochs: int,
    observer: Observer | None = None,
    rebalancer: Rebalancer | None = None,
) -> History:
    """Train with cross entropy for some epochs and test after each. On several devices, each calls it."""
    history = History()
    for epoch in range(epochs):
        model.train()
        start, weighted, samples = time.perf_counter(), 0.0, 0
        if rebalancer is not None:
            rebalancer.begin()
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            history.losses.append(float(loss.detach()))
            weighted, samples = weighted + history.losses[-1] * len(y), samples + len(y)
            if observer is not None:
                observer.step(epoch, history.losses[-1], len(y))
            if rebalancer is not None:
                rebalancer.step(len(y))
        train_s = time.perf_counter() - start
        result = EpochResult(weighted / max(1, samples), accuracy(model, test), train_s, samples / train_s)
        history.epochs.append(result)
        if observer is not None:
            observer.epoch(epoch, result)
    return history


@torch.no_grad()
def accuracy(model: nn.Module, loader: Loader) -> float:
    """Fraction of the loader's samples whose largest output is that of their label. Leaves the model in training mode."""
    model.eval()
    right = total = 0
    for x, y in loader:
        right += int((model(x).argmax(1) == y).sum())
        total += len(y)
    model.train()
    return right / total
