"""Reshard during training: move weights, gradients and optimizer state to the layouts of a new plan."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from convoy.comm.control_messages import agree_on, gather
from convoy.errors import InputError
from convoy.layout.collectives import schedule
from convoy.layout.layout import Layout, holds, local_shape
from convoy.plan.plan import Plan
from convoy.runtime import shards
from convoy.runtime.exchange import StartedMove
from convoy.runtime.module import Distributed, not_distributed
from convoy.runtime.optimizer import described, number_of

Moved = Mapping[str, tuple[Layout, Layout]]
"""Old and new layout of each parameter and buffer whose layout changes."""


def reshard(model: Distributed, plan: Plan, *optimizers: Optimizer) -> None:
    """Switch a model to another plan between two steps. Every device calls it with the same plan.

    Parameters, buffers, gradients and optimizer state move; parameter objects stay the same, so optimizers and schedules
    continue. The model's loader uses the new plan from its next batch on. The trajectory remains that of one device.

    Args:
        optimizers: all optimizers of the model's parameters; the state of any other would not fit the new shards.

    Raises:
        PlanError: the plan is for another model or another number of devices.
        MismatchError: the devices were given different plans.
        InputError: an optimizer of another model, or one not known to be exact on shards; micro-batches in `no_sync` before.
    """
    if not isinstance(model, Distributed):
        raise not_distributed("reshard", model)
    agree_on(model.group, "reshard", plan.to_json(), "was given another plan to continue with")
    plan.check(model.traced[True].graph, model.group.devices)
    shards.check_summed("reshard()", model.parameters())
    shards.check_gradients("reshard()", model.parameters())
    before, old, held = model.layouts, model.plan, dict(model.named_parameters())
    model.follow(plan)
    shapes = {key: tuple(p.shape) for key, p in model.parameters_by_key.items()}
    moved = {key: (before[key], model.layouts[key]) for key in shapes if before[key] != model.layouts[key]}
    try:
        for optimizer in optimizers:
            _check_optimizer(optimizer, held, moved)
    except InputError:
        model.follow(old)
        raise
    with torch.no_grad():
        _move(model, moved, optimizers)
    model.mark_shards()
    shards.accept_gradients(model.parameters())


def _check_optimizer(optimizer: Optimizer, held: Mapping[str, nn.Parameter], moved: Moved) -> None:
    name, keys = type(optimizer).__name__, {parameter: key for key, parameter in held.items()}
    strange = [p for p in shards.works_on(optimizer) if p not in keys]
    if strange:
        raise InputError(
            f"{name} works on {len(strange)} parameters that this model does not have: give reshard() the optimizers of its "
            "parameters()"
        )
    if type(optimizer) not in shards.ELEMENTWISE and any(keys[p] in moved for p in shards.works_on(optimizer)):
        raise InputError(
            f"{name} is not known to treat each entry of a parameter by itself, and this plan moves parameter shards: "
            f"use one of {shards.elementwise_names()}, or convoy.train.ELEMENTWISE.add({name}) if it does"
        )


def _move(model: Distributed, moved: Moved, optimizers: tuple[Optimizer, ...]) -> None:
    """Start all moves, then wait for all, so that small tensors do not wait for each other."""
    device = model.group.device
    parameters = {k: model.module.get_parameter(k) for k in moved if not model.parameters_by_key[k].buffer}
    with_gradient, rows = _gathered_state(model, moved, parameters, optimizers)

    def start(key: str, shard: Tensor | None, dtype: torch.dtype) -> StartedMove:
        src, dst = moved[key]
        shape = model.parameters_by_key[key].shape
        own = local_shape(src, device, shape)
        if shard is None or tuple(shard.shape) != own:
            shard = torch.zeros(own, dtype=dtype, device=model.group.torch_device)
        return StartedMove(model.group, schedule(src, dst, shape), shard, src, dst, shape)

    weights = {key: start(key, tensor := model.weights.own(key).detach(), tensor.dtype) for key in moved}
    gradients = {key: start(key, p.grad, p.dtype) for key, p in parameters.items() if key in with_gradient}
    states: dict[tuple[int, str], dict[str, Any]] = {}
    for i, optimizer in enumerate(optimizers):
        for key, parameter in parameters.items():
            own = optimizer.state.pop(parameter, {})
            for name, row in sorted(rows.get(f"{i}/{key}", {}).items()):
                tensor = row["kind"] == "tensor"
                value = start(key, own.get(name), getattr(torch, row["dtype"])) if tensor else number_of(row, parameter)
                states.setdefault((i, key), {})[name] = value
    for key, weight in weights.items():
        model.weights.put(key, weight.land().clone())
    for key, gradient in gradients.items():
        parameters[key].grad = gradient.land().clone()
    for (i, key), state in states.items():
        optimizers[i].state[parameters[key]] = {
            name: v.land().clone() if isinstance(v, StartedMove) else v for name, v in state.items()
        }


def _gathered_state(
    model: Distributed, moved: Moved, parameters: Mapping[str, nn.Parameter], optimizers: tuple[Optimizer, ...]
) -> tuple[set[str], dict[str, dict[str, Any]]]:
    """Gather, from the devices with a shard, the keys with a gradient and the optimizer state by "0/key"."""
    gradients, rows = [], {}
    for key, parameter in parameters.items():
        if holds(moved[key][0], model.group.device):
            if parameter.grad is not None:
                gradients.append(key)
            for i, optimizer in enumerate(optimizers):
                if parameter in optimizer.state:
                    state = optimizer.state[parameter]
                    rows[f"{i}/{key}"] = {name: described(name, v, parameter) for name, v in state.items()}
    tables = gather(model.group, "reshard: gradients and state", [gradients, rows])
    merged: dict[str, dict[str, Any]] = {}
    for _, others in reversed(tables):
        merged |= others
    return {key for keys, _ in tables for key in keys}, merged
