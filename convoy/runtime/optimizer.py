"""Clip gradients by their global norm, gather an optimizer's state, and average weights, for sharded models."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from convoy.comm.control_messages import gather
from convoy.errors import InputError
from convoy.layout.layout import holds
from convoy.runtime.module import Distributed, not_distributed
from convoy.runtime.shards import elementwise_names, works_on


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients of a model so that their global norm is at most `max_norm`. Every device must call it.

    `torch.nn.utils.clip_grad_norm_` would take the norm of the local shards, so each device would scale by another factor.
    This function combines the norms of all shards, counts copies once, and scales by the same factor everywhere.

    Return the norm before clipping. For an ordinary model, call torch's own function.
    """
    if isinstance(model, Distributed):
        return model.clip_grad_norm_(max_norm, norm_type)
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)


def full_optimizer_state(model: Distributed, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state for the whole model, with parameters' names as keys. Every device must call it."""
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
    """Describe one entry of a parameter's optimizer state in JSON: a "tensor" like the parameter, another tensor (a "number",
    "near" if it is on the parameter's device), or a "plain" value. The device must hold a shard of the parameter."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.shape == parameter.shape and name != "step":
            return {"kind": "tensor", "dtype": dtype}
        return {"kind": "number", "value": value.tolist(), "dtype": dtype, "near": value.device == parameter.device}
    if value is None or isinstance(value, bool | int | float | str):
        return {"kind": "plain", "value": value}
    raise InputError(
        f"the optimizer's state has {name!r} as a {type(value).__name__}: only tensors, numbers and strings can be moved or "
        f"saved; use one of {elementwise_names()}"
    )


def number_of(row: Mapping[str, Any], parameter: Tensor) -> Any:
    if row["kind"] == "plain":
        return row["value"]
    # Some optimizers keep their counters on the CPU, whatever device the parameter is on.
    device = parameter.device if row["near"] else torch.device("cpu")
    return torch.tensor(row["value"], dtype=getattr(torch, row["dtype"]), device=device)


class WeightAverage:
    """An exponential moving average of weights: after every step, average = decay * average + (1 - decay) * weight.

    It computes the numbers of torch's `AveragedModel`, but the average is part of the optimizer's state, so it moves with that
    at a reshard and into checkpoints. The average of a parameter starts with its weights after its first step. Buffers are not
    averaged, as by default in torch: for batch norm statistics of the averages, call `torch.optim.swa_utils.update_bn`.

    ::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = convoy.WeightAverage(optimizer, 0.999)  # every optimizer.step() updates it
        ...
        with average.as_weights():
            update_bn(loader, model)
            weights = model.full_state_dict()

    Args:
        optimizer: the weights' optimizer; its class must be in `convoy.train.ELEMENTWISE`.
        decay: decay per step; 0 to 1.
    """

    STATE: ClassVar[str] = "average"  # the key of an average in the optimizer's state of a parameter

    def __init__(self, optimizer: Optimizer, decay: float) -> None:
        if not 0 <= decay <= 1:
            raise InputError(f"an average with a decay of {decay:g}: give a number from 0 to 1, e.g. 0.999")
        self.optimizer = optimizer
        self._update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        optimizer.register_step_post_hook(self._follow)

    @torch.no_grad()
    def _follow(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        parameters = works_on(optimizer)
        known = [p for p in parameters if self.STATE in optimizer.state.get(p, {})]
        if known:
            self._update([optimizer.state[p][self.STATE] for p in known], known, None)
        for parameter in parameters:
            # Wait for the first gradient, because optimizers initialise a parameter's state only if it is empty.
            if parameter.grad is not None and self.STATE not in optimizer.state.get(parameter, {}):
                optimizer.state[parameter][self.STATE] = parameter.detach().clone()

    @contextmanager
    def as_weights(self) -> Iterator[None]:
        """Use the averages as weights inside the block, to test or gather them."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for parameter, state in self.optimizer.state.items():
            if self.STATE in state:
                state[self.STATE], parameter.data = parameter.data, state[self.STATE]
