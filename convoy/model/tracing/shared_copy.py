"""Copies of models that share the memory of the original's weights, until one of both writes into them."""

import copy
import threading
from typing import Any

import torch
from torch import Tensor, nn

from convoy.errors import InputError

_LOCK = threading.Lock()
"""torch makes a storage copy-on-write without a lock of its own."""


def shared_copy(model: nn.Module) -> nn.Module:
    """A deep copy whose parameters and buffers take no memory of their own until they, or the original's, are written."""
    return copy.deepcopy(model, shared_tensors(model))


def shared_tensors(model: nn.Module) -> dict[int, Any]:
    """The parameters and buffers of such a copy, by the `id` of those of the model: a memo for `copy.deepcopy`."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        if type(p) is nn.Parameter:
            memo[id(p)] = nn.Parameter(shared(p), p.requires_grad)
    for b in model.buffers():
        if type(b) is Tensor and b.is_leaf:
            memo[id(b)] = shared(b).requires_grad_(b.requires_grad)
    return memo


def shared(t: Tensor) -> Tensor:
    """A tensor of the same numbers, which takes no memory of its own until one of both is written.

    What torch cannot share so (on other devices than the CPU; memory of numpy, or of a mapped file; a torch that has no such
    copies, which are not part of its public interface) is copied at once.
    """
    if t.device.type == "cpu" and t.layout is torch.strided and t.numel():
        with _LOCK:
            try:
                return torch._lazy_clone(t.detach())
            except (RuntimeError, AttributeError):
                pass
    return t.detach().clone()


def is_shared(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one memory, which neither has written into since it is shared."""
    if a.shape != b.shape or a.stride() != b.stride() or not (_is_cow(a) and _is_cow(b)):
        return False
    return bool(torch._C._data_address(a) == torch._C._data_address(b))  # type: ignore[attr-defined]


def _is_cow(t: Tensor) -> bool:
    asked = getattr(torch._C, "_is_cow_tensor", None)
    return asked is not None and t.device.type == "cpu" and t.layout is torch.strided and bool(asked(t))


def timed_copy(model: nn.Module) -> nn.Module:
    """A shared copy of a model whose layers are to be timed.

    Raises:
        InputError: the model is on the meta device.
    """
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise InputError(
            f"the layers of a {type(model).__name__} on the meta device cannot be timed: give the plan as a file, or speeds "
            "for a plan by name, or for auto the fleet file of `convoy measure`"
        )
    return shared_copy(model)


def release(model: nn.Module) -> None:
    """Take the memory away from a shared copy that is not needed any more, but may lie in a cycle until Python finds that."""
    for t in (*model.parameters(), *model.buffers()):
        if _is_cow(t):
            t.data = t.detach().new_empty(0)
