"""Optimizers on pieces: which of them are exact there, and their state as a whole."""

import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from convoy.errors import InputError
from convoy.execute.module import Distributed

ELEMENTWISE: set[type[Optimizer]] = {
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
}
"""Optimizers that treat each entry of a parameter by itself, so that pieces of it train like the whole.

Add your own class where that holds: `convoy.ELEMENTWISE.add(Lion)`. LBFGS (products over all parameters), Adafactor (row
and column means) and Muon (whole matrices) are not among them; they are exact where every device has whole copies."""

_guarded = False


def mark_pieces(model: Distributed) -> None:
    """Mark the parameters of which some device has less than the whole, and guard every optimizer's step from now on."""
    global _guarded
    for key, parameter in model.named_parameters():
        parameter._convoy_piece = not model.is_copied(key)  # type: ignore[attr-defined]
    if not _guarded:
        register_optimizer_step_pre_hook(_refuse_on_pieces)
        _guarded = True


def _refuse_on_pieces(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if type(optimizer) in ELEMENTWISE:
        return
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    if any(getattr(p, "_convoy_piece", False) for p in parameters):
        name = type(optimizer).__name__
        raise InputError(
            f"{name} is not known to treat each entry of a parameter by itself, and this plan splits parameters over "
            f"devices: use a plan that copies them ('data', 'data-by-speed'), one of "
            f"{', '.join(sorted(c.__name__ for c in ELEMENTWISE))}, or convoy.ELEMENTWISE.add({name}) if it does"
        )


def full_optimizer_state(model: Distributed, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state for the whole model, by parameter name, on every device. Every device must call it.

    Returns:
        {"state": {parameter name: {state name: whole tensor or number}}, "param_groups": [options, "params": names]}.
    """
    names: dict[Tensor, str] = {parameter: key for key, parameter in model.named_parameters()}
    own: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        if parameter in names:
            own[names[parameter]] = {name: _described(name, value, parameter) for name, value in state.items()}
    tables = [json.loads(text) for text in model.group.agree("optimizer state", json.dumps(own))]
    result: dict[str, dict[str, Any]] = {}
    for key, parameter in model.named_parameters():
        known = next((table[key] for d, table in enumerate(tables) if key in table and model.holds(key, d)), None)
        if known is None:
            continue
        held = optimizer.state.get(parameter, {})
        result[key] = {
            name: model.gather(key, _piece(held, name, parameter)) if kind == "tensor" else kind
            for name, kind in sorted(known.items())
        }
    groups = [
        {
            **{k: v for k, v in group.items() if k != "params"},
            "params": [names[p] for p in group["params"] if p in names],
        }
        for group in optimizer.param_groups
    ]
    return {"state": result, "param_groups": groups}


def _described(name: str, value: Any, parameter: Tensor) -> Any:
    """ "tensor" for state of the parameter's own shape, else the number itself."""
    if isinstance(value, Tensor) and value.shape == parameter.shape and name != "step":
        return "tensor"
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _piece(held: dict[str, Any], name: str, parameter: nn.Parameter) -> Tensor:
    value = held.get(name)
    return value if isinstance(value, Tensor) else torch.zeros_like(parameter).detach()
