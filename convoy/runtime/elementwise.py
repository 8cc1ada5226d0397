"""Which optimizers are exact on pieces of parameters, and the guard that refuses the others."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from convoy.errors import InputError

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


def mark_pieces(parameters: Iterable[tuple[nn.Parameter, bool]]) -> None:
    """Mark the parameters of which this device has less than the whole, and guard every optimizer's step from now on."""
    global _guarded
    for parameter, is_piece in parameters:
        parameter._convoy_piece = is_piece  # type: ignore[attr-defined]
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
