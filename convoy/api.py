"""One line, `prepare`, or four: `join`, `make_plan`, `distribute`, `loader`. And help for scripts."""

import builtins
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader, Dataset

from convoy.comm.control_messages import agree_on
from convoy.comm.environment import read_process_env
from convoy.comm.group import Group, group_of_process
from convoy.elastic.entrance import join
from convoy.machine.accelerator import pick_device
from convoy.measure.planning import Plans, PlansOptions, make_plans
from convoy.model.nested import Example
from convoy.model.tracing import unwrapped
from convoy.plan.placing import placements
from convoy.plan.plan import Plan
from convoy.plan.presets import AUTO
from convoy.planner.request import PlanOptions
from convoy.runtime.module import Distributed
from convoy.runtime.precision import compute_in, dtype_named
from convoy.train import adopt
from convoy.train.loader import Loader

__all__ = ["Plans", "distribute", "is_first", "loader", "make_plan", "make_plans", "prepare", "print"]

loader = Loader

_group: Group | None = None


def prepare(
    model: nn.Module,
    optimizer: Optimizer | None,
    loader: DataLoader[Any] | Dataset[Any],
    *more: DataLoader[Any],
    plan: str | Plan = AUTO,
    batch_size: int | None = None,
    call: Callable[[Any, Any], object] | None = None,
    group: Group | None = None,
    cuda_graphs: bool = False,
    **options: Unpack[PlanOptions],
) -> tuple[Any, ...]:
    """Return a model, its optimizer and its loader for training on all devices of the job. Every device calls it.

    The training loop stays as it is. Without a job, the script trains on one device, with the same numbers.

    Args:
        model: an ordinary module; device 0's weights count. It is taken over, as by DistributedDataParallel: its modules stay
            the same objects. So do its parameters if the plan copies them to every device; if the plan splits them, old
            references to parameters raise when they are used.
        optimizer: made from `model.parameters()`. It stays the same object, with its groups, settings and state, and works on
            this device's shards; schedules that hold it continue. None: make it later.
        loader: an ordinary DataLoader of global batches; or a data set, with `batch_size`. Batches may be tensors, tuples,
            lists, dicts, dataclasses and named tuples, also nested. Every device loads the global batch as a plain DataLoader
            does: same order, same random numbers. If loading is slow, use `convoy.loader(dataset, batch_size, model)` instead.
            If items have images from `convoy.data.open_image`, each device reads its part only, ordered as by `convoy.loader`.
        more: DataLoaders for tests; they are prepared alike.
        call: how the loop calls the model, e.g. `lambda model, batch: model(batch["image"], mask=batch["mask"])`. None: with
            the first tensors of a batch, as many as forward requires; or with the entries of a dict that have their names.
        plan: a name, a plan as from a file, or "auto": the devices are measured, and the planner chooses.
        group: the devices, from `convoy.join`; None: joined here, once per process, and left at its end.
        cuda_graphs, options: see `distribute`, and `PlanOptions`: speeds, fleet, budget_s, precision, slowdown, outputs, ...
    """
    dtype_named(options.get("precision", "float32"))
    if os.environ.get("CONVOY_CHECK"):  # convoy run --check
        adopt.list_refusals(model, optimizer, (loader, *more), batch_size, call)
        return (model, optimizer, loader, *more)
    adopt.check_prepared(model, optimizer, loader, more)
    source = adopt.in_batches(loader, batch_size)
    group = shared_group() if group is None else group
    batch = adopt.first_batch(source)
    example, boxed = adopt.example_of(batch, unwrapped(model), call), adopt.read_by_box(batch)
    adopted = [] if optimizer is None else [optimizer]
    part = take_over(model, example, adopt.batch_size_of(source), group, plan, adopted, cuda_graphs, **options)
    return (part, optimizer, *(adopt.loader_of(each, part, boxed=boxed) for each in (source, *more)))


def take_over(
    model: nn.Module, example: Example, batch: int, group: Group, plan: str | Plan, optimizers: Sequence[Optimizer],
    cuda_graphs: bool = False, **options: Unpack[PlansOptions],
) -> Distributed:  # fmt: skip
    """Plan and distribute a model in place, and let its optimizers work on the shards; see `prepare`."""
    options["optimizer"] = "adam"
    if all(isinstance(each, torch.optim.SGD) for each in optimizers):
        momentum = not optimizers or any(each.defaults["momentum"] for each in optimizers)
        options["optimizer"] = "sgd-momentum" if momentum else "sgd"
    made = make_plans(model, example, batch, group, plan, **options)[0]
    names: dict[Tensor, str] = {parameter: name for name, parameter in unwrapped(model).named_parameters()}
    before = [adopt.state_rows(each, names) for each in optimizers]
    how: dict[str, Any] = {key: value for key, value in options.items() if key in ("slowdown", "precision")}
    part = distribute(model, made, group, example, cuda_graphs=cuda_graphs, takes_over=True, **how)
    for optimizer, rows in zip(optimizers, before, strict=True):
        adopt.rebind(optimizer, names, rows, part)
    return part


def shared_group() -> Group:
    """Return the group of this process's models. The first call joins the job."""
    global _group
    if _group is None or _group.failure is not None:
        _group = join()
    return _group


def is_first() -> bool:
    """Return whether this process is the first device of its job, or alone: the one that prints and saves."""
    place = group_of_process() or read_process_env(os.environ)
    return place is None or place.device == 0


def own_device() -> torch.device:
    """Return the torch device of this process (`convoy.device`), for tensors that a script makes itself."""
    if (group := group_of_process()) is not None:
        return group.torch_device
    env = read_process_env(os.environ)
    return pick_device(None, env.local if env else 0)


def wait_for_everyone() -> None:
    """Wait until every device of the job has called this. Only needed for what Convoy does not do, such as shared files."""
    if (group := group_of_process()) is not None:
        agree_on(group, "wait_for_everyone", "", "waited elsewhere")


def print(*values: object, **options: Any) -> None:
    """Python's print, on the first device only."""
    if is_first():
        builtins.print(*values, **options)


def make_plan(
    name: str, model: nn.Module, example: Example, batch: int, group: Group, **options: Unpack[PlanOptions]
) -> Plan:
    """Return a plan by name for this model on these devices. Every device must call it.

    Args:
        name: "data", "data-by-speed", "sharded", "master", "model", "hybrid"; or "auto": the planner chooses per layer.
        example: a batch; or a tuple or dict of forward's arguments, also nested. Of tensors, only shape and dtype matter.
        batch: samples in the global batch.
        options: see `PlanOptions`: speeds, reduce, wire, outputs, fleet, budget_s, precision, slowdown, ...
    """
    return make_plans(model, example, batch, group, name, **options)[0]


def distribute(
    model: nn.Module,
    plan: Plan,
    group: Group,
    example: Example,
    *,
    slowdown: float = 1.0,
    precision: str = "float32",
    cuda_graphs: bool = False,
    takes_over: bool = False,
) -> Distributed:
    """Return this device's part of a model; see `Distributed`. Every device must call it.

    Args:
        precision: in which its layers compute: "float32" (the type that the model has), "bf16" or "fp16"; see `compute_in`.
            Weights and messages keep their type. With fp16, use `convoy.GradScaler` for the loss.
        cuda_graphs: on NVIDIA GPUs, launch runs of layers as CUDA graphs; it keeps activations' memory between steps.
        takes_over: change the model in place, and take global batches, as `prepare` does; False: copy it.
    """
    part = Distributed(model, plan, group, example, slowdown=slowdown, cuda_graphs=cuda_graphs, takes_over=takes_over)
    compute_in(part, precision)
    graph, note = part.traced[True].graph, part.traced[True].note
    rows = filter(None, (note, graph.unsplit({name: p.gives for name, p in placements(part.plan, graph).items()})))
    if group.devices > 1 and group.device == 0 and (text := "\n".join(rows)):
        builtins.print(text, file=sys.stderr, flush=True)
    return part
