"""Refuses what would act on shards as if they were whole, and on what a script keeps of them from before `prepare`."""

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from convoy.errors import InputError
from convoy.runtime.marks import PIECE, is_piece


def check_not_distributed(model: nn.Module) -> None:
    """
    Raises:
        InputError: parameters of this model are those of a distributed one.
    """
    if any(hasattr(parameter, PIECE) for parameter in model.parameters()):
        raise InputError(
            f"this {type(model).__name__} is distributed already, or shares parameters with a model that is: prepare takes "
            "over the model that it is given. Go on with what prepare returned; to begin anew (a cell of a notebook that runs "
            "twice), make model, optimizer and loader anew before"
        )


class CallGuard:
    """A forward-pre hook that refuses calls of a module outside of a step, where this device has only shards of its parameters.

    Attributes:
        working: steps that are being computed now, forward or backward.
    """

    def __init__(self) -> None:
        self.working = 0

    def __call__(self, module: nn.Module, _inputs: object) -> None:
        if not self.working and any(map(is_piece, module._parameters.values())):
            raise InputError(
                f"a {type(module).__name__} of a distributed model was called by itself, and this device has only shards of "
                "its parameters: call the model that prepare or distribute returned, or use a plan that copies parameters, "
                "such as 'data-by-speed'"
            )

    def __deepcopy__(self, _memo: object) -> NoReturn:
        raise InputError(
            "a module of a distributed model was copied, and this device has only shards of its parameters: copy the "
            "distributed model itself, on every device, or load its full_state_dict() into a model made anew"
        )

    def watch(self, model: nn.Module) -> None:
        """Guard the modules of which this device has shards now."""
        for module in model.modules():
            if any(map(is_piece, module._parameters.values())) and self not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(self)


class Retired(Tensor):
    """A tensor that every operation refuses."""

    key: str

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        rows = [*args, *(kwargs or {}).values()]
        held = [t for row in rows for t in (row if isinstance(row, list | tuple) else [row])]
        key = next((vars(t)["key"] for t in held if type(t) is cls), "?")
        raise InputError(
            f"{getattr(func, '__name__', 'an operation')} on {key!r} of the model as it was before prepare: the plan "
            "has split it over devices. Take parameters from the prepared model (model.named_parameters() has this device's "
            "shards, model.full_state_dict() whole ones), give prepare the optimizer that works on them, or a plan that copies "
            "them, such as 'data-by-speed'"
        )


@torch.no_grad()
def retire(tensor: Tensor, key: str) -> None:
    """Free a tensor's memory, and have every later operation on it raise; autograd may still hold it."""
    tensor.grad = None
    if not tensor.is_meta:
        tensor.data = tensor.new_empty(0)
    vars(tensor)["key"] = key
    tensor.__class__ = Retired
