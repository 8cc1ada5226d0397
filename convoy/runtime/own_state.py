"""A `state_dict` of modules inside a distributed model is refused where it would hold this device's pieces alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from convoy.errors import InputError
from convoy.runtime.marks import is_piece

_reading: ContextVar[bool] = ContextVar("reading", default=False)


@contextmanager
def reading_pieces() -> Iterator[None]:
    """Within it Convoy itself may ask for the `state_dict` of pieces."""
    token = _reading.set(True)
    try:
        yield
    finally:
        _reading.reset(token)


def guard_module(model: nn.Module) -> None:
    """Scripts save `model.module.state_dict()`, as they do with DDP: refused where this device has pieces."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # it takes no hooks, and has no parameters (see `trace`)
        module.register_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]


def _refuse(module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
    if not _reading.get() and any(map(is_piece, module._parameters.values())):
        raise InputError(
            "state_dict() would hold only this device's pieces: call full_state_dict() of the distributed model on every "
            "device, which gives the whole model under its ordinary keys"
        )
