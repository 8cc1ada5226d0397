"""Parameters that a script keeps from before `prepare`, and that a plan has split since: any use of them raises."""

from typing import Any, NoReturn

import torch
from torch import Tensor

from convoy.errors import InputError


class Retired(Tensor):
    """A tensor that every operation refuses."""

    key: str

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        rows = [*args, *(kwargs or {}).values()]
        held = [t for row in rows for t in (row if isinstance(row, list | tuple) else [row])]
        key = next((vars(t)["key"] for t in held if type(t) is cls), "?")
        raise InputError(
            f"{getattr(func, '__name__', 'an operation')} on parameter {key!r} of the model as it was before prepare: the plan "
            "has split it over devices. Take parameters from the prepared model (model.named_parameters() has this device's "
            "shards, model.full_state_dict() whole ones), or give prepare a plan that copies them, such as 'data-by-speed'"
        )


@torch.no_grad()
def retire(tensor: Tensor, key: str) -> None:
    """Free a tensor's memory, and have every later operation on it raise; autograd may still hold it."""
    tensor.grad = None
    if not tensor.is_meta:
        tensor.data = tensor.new_empty(0)
    vars(tensor)["key"] = key
    tensor.__class__ = Retired
