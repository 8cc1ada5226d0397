"""The four lines: make_plan, distribute, loader (and join, in comm/processes.py)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from convoy.comm.group import Group
from convoy.data.augment import read_augment
from convoy.errors import InputError, PlanError
from convoy.model.tracing import trace
from convoy.plan.plan import Plan
from convoy.plan.presets import AUTO, named_plan
from convoy.profile.auto import BUDGET_S, Plans, plan_together
from convoy.profile.speeds import given_speeds, measure_speeds
from convoy.runtime.clock import Clock
from convoy.runtime.module import Distributed
from convoy.runtime.precision import compute_in
from convoy.sharding.comm_dtype import CommDtype
from convoy.sharding.redistribute import Sum
from convoy.train.loader import Loader


def make_plan(
    name: str,
    model: nn.Module,
    example: Tensor | Sequence[Tensor],
    batch: int,
    group: Group,
    *,
    speeds: Sequence[float] | None = None,
    reduce: Sum | None = None,
    wire: CommDtype | None = None,
    slowdown: float = 1.0,
    budget_s: float = BUDGET_S,
    fleet: Path | None = None,
    precision: str = "float32",
) -> Plan:
    """A plan by name for this model on these devices. Every device must call it.

    Args:
        name: "data", "data-by-speed", "master", "model", "hybrid"; or "auto": the devices are measured, and the planner
            chooses per layer.
        model: an ordinary module.
        example: one batch of each input; only shape and dtype matter.
        batch: global batch, in samples.
        group: the devices.
        speeds: one number per device; None: every device times the model's own layers first, which takes seconds.
        reduce: "ring", "butterfly", "direct", "star", or "inexact-butterfly-mixing"; None: what the plan is known for.
        wire: "exact" (None: the same), or "inexact-bf16": what travels is rounded to bfloat16, in half the bytes.
        slowdown: this device plays one that is so many times slower.
        budget_s: for "auto", about the seconds that measuring may take.
        fleet: for "auto", a file that `convoy measure` wrote for this model: nothing is measured then. Only device 0 reads it.
        precision: what the layers will compute in, as for `distribute`: they are timed so.

    Raises:
        InputError, PlanError: an unknown name (the choices are listed), a batch below 1, speeds that do not fit; no plan
            that fits the devices' memory.
        DeviceLostError: a device did not answer while speeds were shared.
    """
    return make_plans(
        model, example, batch, group, plan=name, speeds=speeds, reduce=reduce, wire=wire, slowdown=slowdown,
        budget_s=budget_s, fleet=fleet, precision=precision,
    )[0]  # fmt: skip


def make_plans(
    model: nn.Module,
    example: Tensor | Sequence[Tensor],
    batch: int,
    group: Group,
    *,
    plan: str | Plan = AUTO,
    speeds: Sequence[float] | None = None,
    reduce: Sum | None = None,
    wire: CommDtype | None = None,
    slowdown: float = 1.0,
    budget_s: float = BUDGET_S,
    fleet: Path | None = None,
    precision: str = "float32",
    optimizer: str = "sgd-momentum",
    net: str | None = None,
) -> Plans:
    """The plan of `make_plan`, and for "auto" those that are predicted to take nearly as long with fewer messages.

    A `Rebalancer` tries them: `Rebalancer(model, optimizer, others=plans[1:])`. The result also holds the devices' speeds, and
    for "auto" the predicted seconds of a step. Arguments and errors that are not here: see `make_plan`.

    Args:
        plan: a name; or a plan, as from a file: then only speeds are measured, and `reduce` and `wire` replace its own.
        optimizer: for "auto", whose state counts as memory: "sgd", "sgd-momentum" or "adam".
        net: for "auto", the model's name in messages and files; None: that of its class.
    """
    if batch < 1:
        raise PlanError(f"a batch of {batch}: a batch holds one sample at least; give 1 or more")
    traced = trace(model, example)
    if plan == AUTO:
        if speeds is not None:
            raise InputError(
                "speeds with the plan auto: it needs the times of every layer; leave speeds out, or name a plan"
            )
        return plan_together(
            group, traced, model, batch, net=type(model).__name__ if net is None else net, fleet=fleet, budget_s=budget_s,
            slowdown=slowdown, optimizer=optimizer, reduce=reduce, wire="exact" if wire is None else wire, precision=precision,
        )  # fmt: skip
    if isinstance(plan, Plan) and plan.batch != batch:
        raise PlanError(f"the plan {plan.name} is for a batch of {plan.batch}, not {batch}: make a new plan")
    measured = given_speeds((1.0,) * group.devices if speeds is None else speeds, group.devices)
    # A plan that does not fit is found before the seconds of measuring.
    if isinstance(plan, Plan):
        plan.check(traced.graph, group.devices)
    else:
        named_plan(plan, traced.graph, batch, measured, reduce)
    if speeds is None:
        measured = measure_speeds(group, traced, model, batch, Clock(group.torch_device, slowdown), precision)
    made = plan if isinstance(plan, Plan) else named_plan(plan, traced.graph, batch, measured, reduce)
    reduce, wire = made.reduce if reduce is None else reduce, made.wire if wire is None else wire
    return Plans((replace(made, reduce=reduce, wire=wire),), measured)


def distribute(
    model: nn.Module,
    plan: Plan,
    group: Group,
    example: Tensor | Sequence[Tensor],
    *,
    slowdown: float = 1.0,
    precision: str = "float32",
) -> Distributed:
    """This device's part of a model; see `Distributed`. Every device must call it.

    Args:
        precision: what its layers compute in: "float32" (the type that the model has), "bf16" or "fp16"; see `compute_in`.
            Weights and what travels keep their type. With fp16, use `convoy.GradScaler` for the loss.

    Raises:
        InputError, PlanError, MismatchError: see `Distributed` and `compute_in`.
    """
    part = Distributed(model, plan, group, example, slowdown=slowdown)
    compute_in(part, precision)
    return part


def loader(
    dataset: Dataset[Any],
    batch_size: int,
    model: Distributed | None = None,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    workers: int = 0,
    augment: str | None = None,
) -> Loader:
    """Batches of a data set, this device's part of each; see `Loader`.

    Args:
        augment: how training images change from epoch to epoch, e.g. "crop,flip"; see `convoy.data.augment`.

    Raises:
        InputError: a batch below 1, an empty data set, an unknown augmentation.
    """
    steps = None
    if augment is not None:
        steps = read_augment(augment, getattr(dataset, "mean", ()), getattr(dataset, "std", ()))
    return Loader(
        dataset, batch_size, model, shuffle=shuffle, seed=seed, drop_last=drop_last, workers=workers, augment=steps
    )
