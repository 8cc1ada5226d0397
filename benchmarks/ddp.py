"""PyTorch's DistributedDataParallel, as an expert writes it for unequal devices.

Every rank takes its share of each global batch. DDP averages gradients over the ranks, so each rank's loss is the *sum* over
its samples times ranks / global batch: the average is then the gradient of the mean over the global batch, exactly. Gradients
live in the buckets, weights are not broadcast (all ranks build the same), and the size of the buckets and the shares are
searched for (`tuning.py`). Where each pixel has a label, the loss is divided by all pixels of the global batch. DDP sends
buffers only for nets that have some; batch norm there uses each rank's own statistics, so such nets are not compared.
"""

import copy
import gc
import json
import math
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
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
from benchmarks.rounds import Turn
from benchmarks.runners import LR, MOMENTUM, UNCOUNTED_STEPS, Batches, sgd
from benchmarks.tasks import Data
from benchmarks.tuning import LONG_S, Setting, Trial, tune, tune_even
from benchmarks.wire import Gradients, Wire
from convoy.comm.group import Group
from convoy.layout.shares import apportion
from convoy.train.loader import Loader

TRIAL_S = 0.6
"""About the seconds of the steps that are timed in one trial of the search."""


def meet(group: Group) -> None:
    """Create torch's default process group on Convoy's devices; torch does not see Convoy's own group.

    It finds its store by torchrun's environment, like any script.
    """
    if not distributed.is_initialized():
        limit = timedelta(seconds=group.timeout_s)
        distributed.init_process_group("gloo", rank=group.device, world_size=group.devices, timeout=limit)


def leave() -> None:
    """Destroy torch's process group if `meet` created it; runners must rest first.

    What holds the group last destroys it. A model that does keeps Python's lock while it waits for gloo's threads, which may
    want it (PyTorch issue 56297): one process of two hung.
    """
    gc.collect()
    if distributed.is_initialized():
        distributed.destroy_process_group()


def sharing_sgd(model: nn.Module) -> Optimizer:
    """Return `sgd` with updates distributed over the ranks: each updates whole parameters and broadcasts them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, while it is imported
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=LR, momentum=MOMENTUM)


@final
class DdpRunner:
    """DistributedDataParallel with one setting. Every device creates one after `meet`.

    Attributes:
        stays: whether it keeps its memory between turns: where a step is long, the uncounted ones would take most of the time.
    """

    def __init__(self, model: nn.Module, setting: Setting, rank: int, images: Data) -> None:
        self._first_weights, self._setting, self._images = model, setting, images
        self._batch, self._scale = sum(setting.shares), loss_scale(images, setting.shares)
        self.stays = False
        edges = [0, *accumulate(setting.shares)]
        self._own = slice(edges[rank], edges[rank + 1])
        self._batches: Batches = iter(())
        self._model: DistributedDataParallel | None = None
        self._optimizer: Optimizer | None = None

    def wake(self) -> float | None:
        if self._model is None:
            self.build()
            self.train(UNCOUNTED_STEPS)
        return None

    def build(self) -> None:
        """Allocate memory without training a step."""
        model = copy.deepcopy(self._first_weights)
        self._model = DistributedDataParallel(
            model,
            bucket_cap_mb=self._setting.cap_mb,
            static_graph=self._setting.static_graph,
            gradient_as_bucket_view=True,
            init_sync=False,
        )
        self._optimizer = sharing_sgd(model) if self._setting.zero else sgd(model)
        self._batches = own_batches(self._images, self._batch, self._own)

    def train(self, steps: int) -> None:
        self._train(steps, update=True)

    def compute(self, steps: int) -> Gradients:
        """Run forward and backward without communication `steps` times; return when gradients were ready on average."""
        assert self._model is not None
        parameters = [p for p in self._model.module.parameters() if p.requires_grad]
        ready_s, start_s = [0.0] * len(parameters), 0.0

        def note(index: int) -> None:
            ready_s[index] += (time.perf_counter() - start_s) / steps

        hooks = [
            p.register_post_accumulate_grad_hook(lambda _, index=index: note(index))  # type: ignore[misc]
            for index, p in enumerate(parameters)
        ]
        for _ in range(steps):
            start_s = time.perf_counter()
            self._train(1, update=False)
        for hook in hooks:
            hook.remove()
        return Gradients(tuple(p.numel() * p.element_size() for p in parameters), (tuple(ready_s),))

    def _train(self, steps: int, update: bool) -> None:
        if self._model is None or self._optimizer is None:
            return
        for _ in range(steps):
            x, y = next(self._batches)
            self._optimizer.zero_grad()
            with nullcontext() if update else self._model.no_sync():
                loss = F.cross_entropy(self._model(x), y, reduction="sum") * self._scale
                loss.backward()  # type: ignore[no-untyped-call]
            if update:
                self._optimizer.step()
                float(loss.detach())

    def rest(self) -> None:
        if not self.stays:
            self._model = self._optimizer = None
            self._batches = iter(())


@final
class FsdpRunner:
    """FSDP2: weights, gradients and optimizer state in even shards, each weighted layer gathered by itself; the batch by speed.

    It averages gradients over the ranks as DistributedDataParallel does.

    Attributes:
        stays: as of `DdpRunner`.
    """

    def __init__(self, model: nn.Module, shares: Sequence[int], rank: int, images: Data) -> None:
        self._first_weights, self._shares, self._images = model, tuple(shares), images
        edges = [0, *accumulate(shares)]
        self._own = slice(edges[rank], edges[rank + 1])
        self._batches: Batches = iter(())
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self.stays = False

    def wake(self) -> float | None:
        if self._model is not None:
            return None
        model = copy.deepcopy(self._first_weights)
        mesh = init_device_mesh("cpu", (len(self._shares),))
        weighted = nn.Conv2d | nn.ConvTranspose2d | nn.Linear
        for layer in [each for each in model.modules() if isinstance(each, weighted)]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self._model, self._optimizer = model, sgd(model)
        self._batches = own_batches(self._images, sum(self._shares), self._own)
        self.train(UNCOUNTED_STEPS)
        return None

    def train(self, steps: int) -> None:
        if self._model is None or self._optimizer is None:
            return
        scale = loss_scale(self._images, self._shares)
        for _ in range(steps):
            x, y = next(self._batches)
            self._optimizer.zero_grad()
            loss = F.cross_entropy(self._model(x), y, reduction="sum") * scale
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            float(loss.detach())

    def rest(self) -> None:
        if not self.stays:
            self._model = self._optimizer = None
            self._batches = iter(())


def loss_scale(images: Data, shares: Sequence[int]) -> float:
    """Return the factor for each rank's loss sum. DDP averages gradients over ranks; they must be those of the mean."""
    labels = sum(shares) * images.targets[0].numel()
    return len(shares) / labels


def fsdp_turn(group: Group, row: Row, model: nn.Module, images: Data, speeds: Sequence[float]) -> Turn:
    """Return the turn of `fsdp`. Every device calls it.

    Args:
        speeds: samples/s of each device alone, as measured before.
    """
    meet(group)
    shares = apportion(row.batch, speeds)
    found = {"*": f"batch({','.join(map(str, shares))})", "weights": "even shards"}
    runner = FsdpRunner(model, shares, group.device, images)
    runner.wake()
    step_s = timed_s(group, runner, 1)
    runner.stays = step_s >= LONG_S
    runner.rest()
    steps = 1 if runner.stays else _steps(TRIAL_S, step_s)
    return Turn((replace(row, strategies=found, steps=steps),), runner)


def own_batches(images: Data, batch: int, own: slice) -> Batches:
    """Yield one rank's samples of the batches that one device would train on."""
    order = Loader(images, batch, drop_last=True)
    for epoch in count():
        for indices in order.batches(epoch):
            yield images.batch(indices[own])


def ddp_turn(
    group: Group,
    row: Row,
    model: nn.Module,
    images: Data,
    speeds: Sequence[float],
    budget_s: float,
    known: Setting | None = None,
    wire: Wire | None = None,
) -> tuple[Turn, Setting]:
    """Search, then return the turn of `ddp-even` or `ddp-tuned` and the search result for its row.

    Every device calls it.

    Args:
        speeds: samples/s of each device alone, as measured before.
        budget_s: about the seconds of the search.
        known: what was found at another batch of the same net.
        wire: as measured before; see `tune`.
    """
    meet(group)
    trials = _Trials(group, model, images)
    if row.plan == "ddp-even":
        tuned = tune_even(trials.attempt, row.batch, group.devices, budget_s, known, wire)
    else:
        tuned = tune(trials.attempt, row.batch, speeds, budget_s, known, wire)
    setting, step_s = tuned.setting, tuned.trial.step_s
    found = {
        "*": f"batch({','.join(map(str, setting.shares))})",
        "bucket_mb": str(setting.bucket_mb),
        "static_graph": str(setting.static_graph),
        "zero": str(setting.zero),
    }
    steps = 1 if step_s >= LONG_S else max(row.steps, min(100, math.ceil(TRIAL_S / step_s)))
    row = replace(row, strategies=found, steps=steps, considered=tuned.considered)
    return Turn((row,), trials.runner(setting, stays=step_s >= LONG_S)), setting


class _Trials:
    """The trials of a search. For long steps the best runner stays ready, since another first step is expensive."""

    def __init__(self, group: Group, model: nn.Module, images: Data) -> None:
        self._group, self._model, self._images = group, model, images
        self._ready: tuple[float, Setting, DdpRunner] | None = None

    def runner(self, setting: Setting, *, stays: bool) -> DdpRunner:
        """Return the runner of a setting, reusing the best trial's runner."""
        ready = self._ready
        found = ready[2] if ready is not None and ready[1] == setting else self._made(setting)
        if ready is not None and found is not ready[2]:
            ready[2].rest()
        found.stays = stays
        return found

    def _made(self, setting: Setting) -> DdpRunner:
        return DdpRunner(self._model, setting, self._group.device, self._images)

    def attempt(self, setting: Setting, first_limit_s: float) -> Trial:
        """Run an uncounted first step, then more if it is short enough, then this rank's computation alone."""
        start_s, runner = time.perf_counter(), self._made(setting)
        gc.collect()
        runner.build()
        step_s = first_s = timed_s(self._group, runner, 1)
        is_long, given_up = first_s >= LONG_S, first_s > first_limit_s
        if not given_up:
            if not is_long:
                step_s = timed_s(self._group, runner, UNCOUNTED_STEPS - 1)
            step_s = timed_s(self._group, runner, _steps(TRIAL_S, step_s))
        steps = _steps(TRIAL_S / 2, step_s)
        own = None if given_up else runner.compute(min(20, steps))
        done = [asdict(own) if own else None, time.perf_counter() - start_s]
        rows = [json.loads(text) for text in self._group.agree("a trial of DDP", json.dumps(done))]
        cost_s = max(each_s for _, each_s in rows)
        if own is None:
            runner.rest()
            return Trial(step_s, (), cost_s, first_s, given_up=True)
        self._keep(step_s, setting, runner, is_long=is_long)
        ready_s = tuple(tuple(each["ready_s"][0]) for each, _ in rows)
        return Trial(step_s, tuple(map(max, ready_s)), cost_s, first_s, gradients=Gradients(own.size_bytes, ready_s))

    def _keep(self, step_s: float, setting: Setting, runner: DdpRunner, *, is_long: bool) -> None:
        """Keep this runner ready if it is the best; release the other."""
        before = self._ready
        if is_long and (before is None or step_s < before[0]):
            self._ready = (step_s, setting, runner)
            runner = before[2] if before is not None else runner
        if self._ready is None or runner is not self._ready[2]:
            runner.rest()


def timed_s(group: Group, runner: DdpRunner | FsdpRunner, steps: int) -> float:
    """Return the seconds of a step on the slowest rank."""
    group.agree("steps of a trial begin", "")
    start_s = time.perf_counter()
    runner.train(steps)
    took_s = (time.perf_counter() - start_s) / steps
    return max(map(float, group.agree("steps of a trial end", json.dumps(took_s))))


def _steps(stretch_s: float, step_s: float) -> int:
    return max(1, min(100, math.ceil(stretch_s / step_s)))
