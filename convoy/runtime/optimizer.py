"""Clip gradients by their global norm, and gather an optimizer's state, for sharded models."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from convoy.comm.control_messages import gather
from convoy.errors import InputError
from convoy.layout.layout import holds
from convoy.runtime.module import Distributed, not_distributed
from convoy.runtime.shards import elementwise_names


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients of a model so that their global norm is at most `max_norm`. Every device must call it.

    `torch.nn.utils.clip_grad_norm_` would take the norm of the local shards, so each device would scale by another factor.
    This function combines the norms of all shards, counts copies once, and scales by the same factor everywhere.

    Return the norm before clipping. An ordinary model is given to torch's own function.
    """
    if isinstance(model, Distributed):
        return model.clip_grad_norm_(max_norm, norm_type)
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)


def full_optimizer_state(model: Distributed, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state for the whole model, by parameter name, on every device. Every device must call it.

    Returns:
        `state`: whole tensors and numbers by parameter and name; `param_groups`: options, `params` as names.
    """
    if not isinstance(model, Distributed):
        raise not_distributed("full_optimizer_state", model)
    names: dict[Tensor, str] = {parameter: key for key, parameter in model.named_parameters()}
    own: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        if parameter in names:
            own[names[parameter]] = {name: described(name, value, parameter) for name, value in state.items()}
    tables = gather(model.group, "optimizer state", own)
    result: dict[str, dict[str, Any]] = {}
    for key, parameter in model.named_parameters():
        known: dict[str, Any] = next(
            (table[key] for d, table in enumerate(tables) if key in table and holds(model.layouts[key], d)), {}
        )
        held = optimizer.state.get(parameter, {})
        for name, row in sorted(known.items()):
            value = row.get("value")
            if row["kind"] == "tensor":
                empty = torch.zeros_like(parameter, dtype=getattr(torch, row["dtype"])).detach()
                value = model.gather(key, held.get(name, empty))
            result.setdefault(key, {})[name] = value
    groups = [group | {"params": [names[p] for p in group["params"] if p in names]} for group in optimizer.param_groups]
    return {"state": result, "param_groups": groups}


def described(name: str, value: Any, parameter: Tensor) -> dict[str, Any]:
    """Describe one entry of a parameter's optimizer state as JSON, on a device that holds a shard of the parameter.

    Returns:
        {"kind": "tensor", "dtype"} for a tensor of the parameter's own shape, with the parameter's layout;
        {"kind": "number", "value", "dtype", "near"} for another tensor; near: it is on the parameter's device;
        {"kind": "plain", "value"} for None and other numbers and strings.
    """
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.shape == parameter.shape and name != "step":
            return {"kind": "tensor", "dtype": dtype}
        return {"kind": "number", "value": value.tolist(), "dtype": dtype, "near": value.device == parameter.device}
    if value is None or isinstance(value, bool | int | float | str):
        return {"kind": "plain", "value": value}
    raise InputError(
        f"the optimizer's state has {name!r} as a {type(value).__name__}: only tensors, numbers and texts can be moved or "
        f"saved; use one of {elementwise_names()}"
    )


def number_of(row: Mapping[str, Any], parameter: Tensor) -> Any:
    """Return the number or plain value that `described` turned into this row."""
    if row["kind"] == "plain":
        return row["value"]
    # Some optimizers keep their counters on the CPU, whatever device the parameter is on.
    device = parameter.device if row["near"] else torch.device("cpu")
    return torch.tensor(row["value"], dtype=getattr(torch, row["dtype"]), device=device)
