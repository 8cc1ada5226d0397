"""Run one configuration on one device as a user would, and release its memory between turns.

A resting runner holds next to no memory: dozens of configurations take turns in one process per device. When it wakes, it
has the net's first weights, no momentum, and the first batch next: every turn is the same run, repeated.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.tasks import Data, PixelImages
from convoy.api import distribute
from convoy.comm.group import Group
from convoy.layout.layout import box
from convoy.plan.plan import Plan
from convoy.train.autotune import Autotune
from convoy.train.controller import Rebalancer
from convoy.train.loader import Loader
from convoy.train.loss import loss as loss_of

UNCOUNTED_STEPS = 2
"""Before a turn that all devices take together: after the first, DDP orders its buckets anew, as the gradients came."""

LR = 0.001
"""With ten times as much most units of a wide net are dead after two steps, and pooling zeros takes half of the time."""
MOMENTUM = 0.9

Batches = Iterator[tuple[Tensor, Tensor]]

Spent = tuple[float, float] | None
"""Seconds in which a device computed, and in which its own lane waited for others; None where nobody keeps that clock."""


class Runner(Protocol):
    """One configuration on one device."""

    def wake(self) -> float | None:
        """Allocate memory with the first weights and run uncounted steps, which allocate buffers and choose kernels.

        Returns:
            The loss of the first whole batch, if this device saw one.
        """

    def train(self, steps: int) -> Spent:
        """Run the given number of steps."""

    def rest(self) -> None:
        """Release the memory."""


def sgd(model: nn.Module) -> Optimizer:
    """Return the optimizer of every benchmark, the same for Convoy and its peers."""
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


def endless(loader: Loader) -> Batches:
    """Yield batches from the first of epoch 0 on, epoch after epoch."""
    loader.set_epoch(0)
    while True:
        yield from loader


Criterion = Callable[..., Tensor]


def train_steps(
    model: nn.Module, optimizer: Optimizer, batches: Batches, steps: int, criterion: Criterion = F.cross_entropy
) -> float:
    """Run the steps of `convoy.train.loop.fit` and return the first loss.

    Args:
        criterion: the mean over the batch, and over its pixels where each has a label.
    """
    first = 0.0
    for step in range(steps):
        x, y = next(batches)
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        value = float(loss.detach())
        first = first if step else value
    return first


@final
class ConvoyRunner:
    """A Convoy plan. Every device creates one."""

    def __init__(self, model: nn.Module, plan: Plan, group: Group, images: Data, batch: int) -> None:
        self._weights: Mapping[str, Tensor] = dict(model.named_parameters())
        self._part = distribute(model, plan, group, torch.zeros(1, *images.image_shape))
        read = images.boxed() if isinstance(images, PixelImages) else images
        self._loader = Loader(read, batch, self._part, drop_last=True)
        self._optimizer = sgd(self._part)
        self._criterion = loss_of(nn.CrossEntropyLoss())  # outputs may stay with their samples
        self._batches: Batches = iter(())
        self.rest()

    def settle(self, steps: int, others: Sequence[Plan] = ()) -> tuple[Autotune, Plan]:
        """Train uncounted, as `convoy train --plan auto`, through autotuning and the given number of steps.

        Returns:
            The state of autotuning, and what rebalancing made of the plan that won it, which is gone on with.
        """
        self.wake()
        rebalancer = Rebalancer(self._part, self._optimizer, others=others)
        left = steps
        while left:
            left -= rebalancer.autotune.is_over
            self._steps(1)
            rebalancer.step(self._loader.batch_size)
        self.rest()
        return rebalancer.autotune, self._part.plan

    def wake(self) -> float | None:
        for key, parameter in self._part.named_parameters():
            parameter.data = self._piece(key)
        self._batches = endless(self._loader)
        return self._steps(UNCOUNTED_STEPS)

    def _steps(self, steps: int) -> float:
        return train_steps(self._part, self._optimizer, self._batches, steps, self._criterion)

    def _piece(self, key: str) -> Tensor:
        whole = self._weights[key].detach()
        here = box(self._part.layouts[key], self._part.group.device, tuple(whole.shape))
        if here is None:
            return whole.new_empty((0, *whole.shape[1:]))
        return whole[tuple(slice(*edges) for edges in here)].clone(memory_format=torch.contiguous_format)

    def train(self, steps: int) -> Spent:
        clock = self._part.clock
        clock.reset()
        self._steps(steps)
        return clock.compute_s, clock.exchange_s

    def rest(self) -> None:
        self._batches = iter(())
        self._optimizer.state.clear()
        for parameter in self._part.parameters():
            parameter.grad = None
            parameter.data = parameter.data.new_empty((0, *parameter.shape[1:]))


@final
class AloneRunner:
    """Plain PyTorch on this device alone.

    Args:
        model: with the first weights; None where it is not this device's turn.
        step_s: predicted. Where a step takes long, the uncounted one has only the samples of two seconds.
    """

    def __init__(self, model: nn.Module | None, images: Data, batch: int, step_s: float) -> None:
        self._first_weights = model
        self._loader = Loader(images, batch, drop_last=True)
        self._first_samples = max(1, min(batch, round(batch * 2.0 / step_s)))
        self._batches: Batches = iter(())
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None

    def wake(self) -> float | None:
        if self._first_weights is None:
            return None
        self._model = copy.deepcopy(self._first_weights)
        self._optimizer = sgd(self._model)
        self._batches = endless(self._loader)
        x, y = next(self._batches)
        few = iter([(x[: self._first_samples], y[: self._first_samples])])
        loss = train_steps(self._model, self._optimizer, few, 1)
        return loss if self._first_samples == len(x) else None

    def train(self, steps: int) -> None:
        if self._model is not None and self._optimizer is not None:
            train_steps(self._model, self._optimizer, self._batches, steps)

    def rest(self) -> None:
        self._model = self._optimizer = None
        self._batches = iter(())
