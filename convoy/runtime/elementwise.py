"""Which optimizers are exact on pieces of parameters, and the guard that refuses the others."""

import torch
from torch.optim.optimizer import Optimizer

from convoy.errors import InputError
from convoy.runtime.marks import ORIGINAL, check_summed, is_piece

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

Add your own class where that holds: `convoy.train.ELEMENTWISE.add(Lion)`. LBFGS (products over all parameters), Adafactor (row
and column means) and Muon (whole matrices) are not among them; they are exact where every device has whole copies."""


def elementwise_names() -> str:
    """The names of these optimizers, for messages."""
    return ", ".join(sorted(each.__name__ for each in ELEMENTWISE))


def check_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    """Refuse a step of an optimizer that would train nothing, or would not be exact on this device's pieces.

    Raises:
        InputError: what it is, and what to do instead.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    check_summed(f"{type(optimizer).__name__}.step()", parameters)
    # The original may be trained by itself, too: then it has gradients.
    originals = [p for p in parameters if p.requires_grad and getattr(p, ORIGINAL, False)]
    if originals and all(p.grad is None for p in originals):
        name, some = type(optimizer).__name__, f"{len(originals)} of {len(parameters)} parameters of "
        raise InputError(
            f"{some if len(originals) < len(parameters) else ''}{name} are those that the model had before it was distributed; "
            "they have no gradients, so it would train nothing: make the optimizer from the distributed model's parameters(), "
            "also what add_param_group() is given, or let convoy.prepare(model, optimizer, loader) take it over"
        )
    if type(optimizer) in ELEMENTWISE:
        return
    if any(map(is_piece, parameters)):
        name = type(optimizer).__name__
        raise InputError(
            f"{name} is not known to treat each entry of a parameter by itself, and this plan splits parameters over "
            f"devices: use a plan that copies them ('data', 'data-by-speed'), one of "
            f"{elementwise_names()}, or convoy.train.ELEMENTWISE.add({name}) if it does"
        )
