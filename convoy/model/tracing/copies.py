"""Copies of models: with the user's hooks, and with weights that share the original's memory until one of both is written."""

import copy
import functools
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from convoy.errors import InputError
from convoy.model.tracing.hooks import KINDS, on_weights

_LOCK = threading.Lock()
"""torch makes a storage copy-on-write without its own lock."""


def copied(model: nn.Module, tensors: Mapping[int, Any] | None = None) -> nn.Module:
    """Return a deep copy with the user's own hooks: an object that records what its hook sees is not copied.

    Args:
        tensors: id of a parameter or buffer -> the tensor that replaces it in the copy; None: copies.
    """

    def owners(hook: Any) -> Iterator[Any]:
        """Yield the objects behind a hook that a deep copy would copy."""
        if isinstance(hook, functools.partial):
            for each in (hook.func, *hook.args, *hook.keywords.values()):
                yield from owners(each)
        else:
            yield getattr(hook, "__self__", hook)

    inside = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    hooks = [h for m in model.modules() for kind in KINDS for h in getattr(m, kind).values() if not on_weights(h)]
    kept = {id(owner): owner for hook in hooks for owner in owners(hook) if id(owner) not in inside}
    return copy.deepcopy(model, kept | dict(tensors or {}))


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device: no number is copied."""
    memo: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    return copy.deepcopy(model, memo)


def shared_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy whose parameters and buffers take no memory until they, or the original's, are written."""
    return copy.deepcopy(model, shared_tensors(model))


def shared_tensors(model: nn.Module) -> dict[int, Any]:
    """Return id -> tensor for the parameters and buffers of such a copy: a memo for `copy.deepcopy`."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        if type(p) is nn.Parameter:
            memo[id(p)] = nn.Parameter(shared(p), p.requires_grad)
    for b in model.buffers():
        if type(b) is Tensor and b.is_leaf:
            memo[id(b)] = shared(b).requires_grad_(b.requires_grad)
    return memo


def shared(t: Tensor) -> Tensor:
    """Return a tensor of the same numbers that takes no memory until one of both is written.

    Tensors that torch cannot share so are copied at once: on other devices than the CPU, of memory of numpy or of a mapped
    file, or with a torch without such copies, which are not part of its public interface.
    """
    if t.device.type == "cpu" and t.layout is torch.strided and t.numel():
        with _LOCK:
            try:
                return torch._lazy_clone(t.detach())
            except (RuntimeError, AttributeError):
                pass
    return t.detach().clone()


def is_shared(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors share memory that neither has written."""
    if a.shape != b.shape or a.stride() != b.stride() or not (_is_cow(a) and _is_cow(b)):
        return False
    return bool(torch._C._data_address(a) == torch._C._data_address(b))  # type: ignore[attr-defined]


def _is_cow(t: Tensor) -> bool:
    asked = getattr(torch._C, "_is_cow_tensor", None)
    return asked is not None and t.device.type == "cpu" and t.layout is torch.strided and bool(asked(t))


def timed_copy(model: nn.Module) -> nn.Module:
    """Return a shared copy of a model whose layers are to be timed.

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
    """Free the memory of a shared copy without users, which may be in a reference cycle until Python collects it."""
    for t in (*model.parameters(), *model.buffers()):
        if _is_cow(t):
            t.data = t.detach().new_empty(0)
