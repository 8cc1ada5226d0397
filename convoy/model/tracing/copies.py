"""Finds the user's hooks on models, and copies models, with or without sharing the parameters' memory."""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from convoy.errors import InputError

KINDS: Mapping[str, str] = {
    "_forward_pre_hooks": "forward-pre hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "full-backward-pre hook",
    "_backward_hooks": "backward hook",
}
"""Attribute of a module that holds hooks -> name of such a hook in messages."""
ON_PARAMETERS: Mapping[str, str] = {
    "_backward_hooks": "hook",
    "_post_accumulate_grad_hooks": "post-accumulate-grad hook",
}


def on_weights(hook: Any) -> bool:
    """Return whether a hook belongs to torch.nn.utils (it computes a weight) or to Convoy; such hooks read no samples."""
    return type(hook).__module__.startswith(("torch.nn.utils", "convoy.runtime"))


def hooked(module: nn.Module) -> list[str]:
    """Return the kinds of a user's hooks on a module."""
    return [kind for kind in KINDS if not all(map(on_weights, list(getattr(module, kind).values())))]


def carry_over(new: nn.Parameter, old: Tensor) -> None:
    """Give `new` the hooks of `old`. Both share the hook tables, so removing a hook works for both."""
    for kind in ON_PARAMETERS:
        if hooks := getattr(old, kind, None):
            setattr(new, kind, hooks)


def copied(model: nn.Module, tensors: Mapping[int, Any] | None = None) -> nn.Module:
    """Return a deep copy with the user's original hook objects, so that an object that records values is not copied.

    Args:
        tensors: id of a parameter or buffer -> the tensor that replaces it in the copy; None: copy all.
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
    """Return a copy of a model on the meta device, without copying numbers."""
    memo: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    return copy.deepcopy(model, memo)


def shared_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy whose parameters share the original's memory. Run it inside `written`."""
    return copy.deepcopy(model, shared_parameters(model))


def shared_parameters(model: nn.Module) -> dict[int, Any]:
    """Return a memo for `copy.deepcopy` (id -> parameter), with which the copy's parameters share memory."""
    plain = (p for p in model.parameters() if type(p) is nn.Parameter)
    return {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in plain}


@contextmanager
def written(tensors: Iterable[Tensor]) -> Iterator[Callable[[], bool]]:
    """Swap in copies of the tensors' memory inside the block. Yield a function that returns whether a copy was written to."""
    held = [(t, t.data) for t in {id(t): t for t in tensors}.values()]
    for t, data in held:
        t.data = data.clone()
    try:
        yield lambda: not all(torch.equal(t.data, data) for t, data in held)
    finally:
        for t, data in held:
            if not t.is_leaf:
                t.detach_()  # a buffer into which a tensor with a gradient was written
            t.data = data


def release(model: nn.Module) -> None:
    """Free the parameters of an unused copy now, because it may be in a reference cycle until Python collects it."""
    for p in model.parameters():
        p.data = p.detach().new_empty(0)


def timed_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model for timing its layers.

    Raises:
        InputError: the model is on the meta device.
    """
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise InputError(
            f"the layers of a {type(model).__name__} on the meta device cannot be timed: give the plan as a file, or speeds "
            "for a plan by name, or for auto the fleet file of `convoy measure`"
        )
    return copy.deepcopy(model)
