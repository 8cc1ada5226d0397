"""Hooks that a user hangs on modules: where they are, copies of models that keep them, and layers that they look at."""

import copy
import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from convoy.model.graph import Graph, Layer
from convoy.model.operation import TracedModel

KINDS: Mapping[str, str] = {
    "_forward_pre_hooks": "forward-pre hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "full-backward-pre hook",
    "_backward_hooks": "backward hook",
}
"""The tables of hooks of a module, and what a hook in each is called."""
ON_PARAMETERS: Mapping[str, str] = {
    "_backward_hooks": "hook",
    "_post_accumulate_grad_hooks": "post-accumulate-grad hook",
}
"""The same of a parameter."""


def table(module: nn.Module, kind: str) -> dict[int, Any]:
    """The hooks of one kind; it stays the same object as long as the module lives."""
    return getattr(module, kind)  # type: ignore[no-any-return]


def on_weights(hook: Any) -> bool:
    """Whether a hook is one of torch's own that compute a weight from others, or of Convoy's: they look at no sample."""
    return type(hook).__module__.startswith(("torch.nn.utils", "convoy.runtime"))


def hooked(module: nn.Module) -> list[str]:
    """The kinds of a user's hooks on a module."""
    return [kind for kind in KINDS if not all(map(on_weights, list(table(module, kind).values())))]


def copied(model: nn.Module, tensors: Mapping[int, Any] | None = None) -> nn.Module:
    """A deep copy whose hooks are the user's own: an object that notes what it sees is not copied along, and goes on noting.

    Args:
        tensors: what the copy has in the place of parameters and buffers, by their `id`; None: copies.
    """
    inside = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    hooks = [h for m in model.modules() for kind in KINDS for h in table(m, kind).values() if not on_weights(h)]
    owners = [owner for hook in hooks for owner in _owners(hook)]
    kept = {id(owner): owner for owner in owners if id(owner) not in inside}
    return copy.deepcopy(model, kept | dict(tensors or {}))


def _owners(hook: Any) -> Iterator[Any]:
    """The objects behind a hook that a deep copy would copy."""
    if isinstance(hook, functools.partial):
        for each in (hook.func, *hook.args, *hook.keywords.values()):
            yield from _owners(each)
    elif hasattr(hook, "__self__"):
        yield hook.__self__
    else:
        yield hook


def mute(model: nn.Module) -> nn.Module:
    """Put hooks that do nothing in the place of the user's, which are not meant to see what a trace computes."""
    for module in model.modules():
        kinds = hooked(module)
        for kind in kinds:
            hooks = table(module, kind)
            for number, hook in list(hooks.items()):
                if not on_weights(hook):
                    del hooks[number]
        if kinds:
            module.register_forward_hook(_nothing)
    return model


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def with_hooks(model: nn.Module, traced: TracedModel, original: nn.Module) -> TracedModel:
    """The trace with every layer that hooks look into computed whole on every device, and hooked parameters never split.

    Args:
        model: the model with its hooks, or with those that do nothing in their place.
        original: the model, on whose parameters hooks are.
    """
    hooked = {key for key, p in original.named_parameters() if any(getattr(p, kind, None) for kind in ON_PARAMETERS)}
    layers = {}
    for name, layer in traced.graph.layers.items():
        shared = layer.shared or any(p.key in hooked for p in layer.parameters.values())
        layers[name] = replace(_observed(model, traced, layer), shared=shared)
    if layers == dict(traced.graph.layers):
        return traced
    return replace(traced, graph=Graph(traced.graph.model, layers, traced.graph.outputs))


def _observed(model: nn.Module, traced: TracedModel, layer: Layer) -> Layer:
    call = traced.operations[layer.name]
    if layer.kind != "opaque":
        return layer
    called = [model.get_submodule(path) for path in call.modules]
    kinds = [KINDS[kind] for module in called for m in module.modules() for kind in hooked(m)]
    if not kinds:
        return layer
    # Copies of random numbers would differ: then one device computes it.
    where = "one device computes it" if layer.random else "every device computes it for the whole batch"
    return replace(layer, per_sample=False, everywhere=not layer.random, reason=f"it has a {kinds[0]}, so {where}")
