"""PyTorch's DistributedDataParallel, as an expert writes it for unequal devices.

Every rank takes its share of each global batch. DDP averages gradients over the ranks, so each rank's loss is the *sum* over
its samples times ranks / global batch: the average is then the gradient of the mean over the global batch, exactly. Gradients
live in the buckets, weights are not broadcast (all ranks build the same), and the size of the buckets and the shares are
searched for (`tuning.py`). DDP sends buffers only for nets that have some; batch norm there uses each rank's own statistics,
so such nets are not compared.
"""

import copy
import json
import math
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate, count
from typing import final

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks.results import Row
from benchmarks.rounds import Turn, timed
from benchmarks.runners import LR, MOMENTUM, UNCOUNTED_STEPS, Batches, sgd
from benchmarks.tuning import Setting, Trial, tune, tune_even
from convoy.comm.group import Group
from convoy.data import Images
from convoy.sharding.shares import apportion
from convoy.train.loader import Loader

TRIAL_S = 0.6
"""About the seconds of the steps that are timed in one trial of the search."""


def meet(group: Group) -> None:
    """Make torch's default process group of the same devices, beside Convoy's own, which torch does not see.

    It finds its store by torchrun's environment, like any script.
    """
    if not distributed.is_initialized():
        limit = timedelta(seconds=group.timeout_s)
        distributed.init_process_group("gloo", rank=group.device, world_size=group.devices, timeout=limit)


def leave() -> None:
    """Undo `meet`, where it was called."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def sharing_sgd(model: nn.Module) -> Optimizer:
    """As `sgd`, each rank updating its even part of the parameters, whole ones, and broadcasting them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, while it is imported
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=LR, momentum=MOMENTUM)


@final
class DdpRunner:
    """DistributedDataParallel with one setting. Every device makes one, after `meet`."""

    def __init__(self, model: nn.Module, setting: Setting, rank: int, images: Images) -> None:
        self._first_weights, self._setting, self._images = model, setting, images
        self._ranks, self._batch = len(setting.shares), sum(setting.shares)
        edges = [0, *accumulate(setting.shares)]
        self._own = slice(edges[rank], edges[rank + 1])
        self._batches: Batches = iter(())
        self._model: DistributedDataParallel | None = None
        self._optimizer: Optimizer | None = None

    def wake(self) -> float | None:
        model = copy.deepcopy(self._first_weights)
        self._model = DistributedDataParallel(
            model,
            bucket_cap_mb=self._setting.bucket_mb,
            static_graph=self._setting.static_graph,
            gradient_as_bucket_view=True,
            init_sync=False,
        )
        self._optimizer = sharing_sgd(model) if self._setting.zero else sgd(model)
        self._batches = own_batches(self._images, self._batch, self._own)
        self.train(UNCOUNTED_STEPS)
        return None

    def train(self, steps: int) -> None:
        self._train(steps, update=True)

    def compute(self, steps: int) -> None:
        """Forward and backward without communication, so many times."""
        self._train(steps, update=False)

    def _train(self, steps: int, update: bool) -> None:
        if self._model is None or self._optimizer is None:
            return
        for _ in range(steps):
            x, y = next(self._batches)
            self._optimizer.zero_grad()
            with nullcontext() if update else self._model.no_sync():
                loss = F.cross_entropy(self._model(x), y, reduction="sum") * (self._ranks / self._batch)
                loss.backward()  # type: ignore[no-untyped-call]
            if update:
                self._optimizer.step()
                float(loss.detach())

    def rest(self) -> None:
        self._model = self._optimizer = None
        self._batches = iter(())


@final
class FsdpRunner:
    """FSDP2: weights, gradients and optimizer state in even shards, each weighted layer gathered by itself; the batch by speed.

    It averages gradients over the ranks as DistributedDataParallel does.
    """

    def __init__(self, model: nn.Module, shares: Sequence[int], rank: int, images: Images) -> None:
        self._first_weights, self._shares, self._images = model, tuple(shares), images
        edges = [0, *accumulate(shares)]
        self._own = slice(edges[rank], edges[rank + 1])
        self._batches: Batches = iter(())
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None

    def wake(self) -> float | None:
        model = copy.deepcopy(self._first_weights)
        mesh = init_device_mesh("cpu", (len(self._shares),))
        for layer in [each for each in model.modules() if isinstance(each, nn.Conv2d | nn.Linear)]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self._model, self._optimizer = model, sgd(model)
        self._batches = own_batches(self._images, sum(self._shares), self._own)
        self.train(UNCOUNTED_STEPS)
        return None

    def train(self, steps: int) -> None:
        if self._model is None or self._optimizer is None:
            return
        scale = len(self._shares) / sum(self._shares)
        for _ in range(steps):
            x, y = next(self._batches)
            self._optimizer.zero_grad()
            loss = F.cross_entropy(self._model(x), y, reduction="sum") * scale
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            float(loss.detach())

    def rest(self) -> None:
        self._model = self._optimizer = None
        self._batches = iter(())


def fsdp_turn(group: Group, row: Row, model: nn.Module, images: Images, speeds: Sequence[float]) -> Turn:
    """The turn of `fsdp`. Every device calls it.

    Args:
        speeds: samples/s of each device alone, as measured before.
    """
    meet(group)
    shares = apportion(row.batch, speeds)
    found = {"*": f"batch({','.join(map(str, shares))})", "weights": "even shards"}
    return Turn((replace(row, strategies=found),), FsdpRunner(model, shares, group.device, images))


def own_batches(images: Images, batch: int, own: slice) -> Batches:
    """One rank's samples of the batches that one device would train on."""
    order = Loader(images, batch, drop_last=True)
    for epoch in count():
        for indices in order.batches(epoch):
            yield images.__getitems__(indices[own])


def ddp_turn(
    group: Group,
    row: Row,
    model: nn.Module,
    images: Images,
    speeds: Sequence[float],
    budget_s: float,
    known: Setting | None = None,
) -> tuple[Turn, Setting]:
    """The turn of `ddp-even` or `ddp-tuned`, after its search, and what was found, which its row tells too.

    Every device calls it.

    Args:
        speeds: samples/s of each device alone, as measured before.
        budget_s: about the seconds of the search.
        known: what was found at another batch of the same net.
    """
    meet(group)

    def attempt(setting: Setting) -> Trial:
        return _trial(group, row, DdpRunner(model, setting, group.device, images))

    if row.plan == "ddp-even":
        setting, trial = tune_even(attempt, row.batch, group.devices, budget_s, known)
    else:
        setting, trial = tune(attempt, row.batch, speeds, budget_s, known)
    found = {
        "*": f"batch({','.join(map(str, setting.shares))})",
        "bucket_mb": str(setting.bucket_mb),
        "static_graph": str(setting.static_graph),
        "zero": str(setting.zero),
    }
    steps = max(row.steps, min(100, math.ceil(TRIAL_S / trial.step_s)))
    turn = Turn((replace(row, strategies=found, steps=steps),), DdpRunner(model, setting, group.device, images))
    return turn, setting


def _trial(group: Group, row: Row, runner: DdpRunner) -> Trial:
    """A turn, and then this rank's computing alone, all ranks at the same time."""
    start_s = time.perf_counter()
    (step_s,) = timed(group, Turn((row,), runner), rest=False).rows_s
    steps = max(1, min(20, math.ceil(TRIAL_S / 2 / step_s)))
    own_start_s = time.perf_counter()
    runner.compute(steps)
    own = [(time.perf_counter() - own_start_s) / steps, time.perf_counter() - start_s]
    runner.rest()
    rows = [json.loads(text) for text in group.agree("a trial of DDP", json.dumps(own))]
    return Trial(step_s, tuple(compute_s for compute_s, _ in rows), max(cost_s for _, cost_s in rows))
