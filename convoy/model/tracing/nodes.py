"""Traces an nn.Module into torch.fx nodes, with untraceable submodules as leaves."""

import inspect
import threading
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx, nn

from convoy.model.tracing.kinds import IN_PLACE

# torch.fx patches nn.Module while it traces, for every thread of the process.
TRACE_LOCK = threading.RLock()


class Untraceable(Exception):  # noqa: N818 - it ends one way of tracing, not the program
    """The model cannot be traced into layers and runs as one; the text says why."""


class _Tracer(fx.Tracer):
    def __init__(self, leaves: Collection[str] = ()) -> None:
        super().__init__()
        self.leaves = leaves
        self.thread = threading.get_ident()
        self.traceable: dict[tuple[nn.Module, tuple[tuple[str, Any], ...]], bool] = {}
        self.given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = module_qualified_name in self.leaves or super().is_leaf_module(m, module_qualified_name)
        return known or not self._can_trace(m)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # torch.fx patches nn.Module for all threads: a model that another thread runs is not part of this trace.
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        self.given = (args, kwargs)
        return super().call_module(m, forward, args, kwargs)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(kind, *args, **kwargs)
        # A trace has no `with` blocks, so torch.no_grad() is recorded here. A parameter has one node, made at its first
        # use, for all its uses.
        node.meta["no_grad"] = not torch.is_grad_enabled() and kind != "get_attr"
        return node

    def _can_trace(self, module: nn.Module) -> bool:
        # Python branches on them: with `pre_logits=False` given, `if pre_logits` can be traced.
        constants = _constants(module, *self.given)
        key = (module, tuple(constants.items()))
        if key not in self.traceable:
            inner = _Tracer()
            inner.traceable = self.traceable
            try:
                inner.trace(module, constants or None)
                self.traceable[key] = True
            except Exception:  # whatever its forward does with a proxy: it stays one layer
                self.traceable[key] = False
        return self.traceable[key]


def _constants(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, those left to their defaults included, that are plain values."""
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {}
    bound.apply_defaults()
    return {
        name: value for name, value in bound.arguments.items() if isinstance(value, bool | int | float | str | None)
    }


def nodes_of(model: nn.Module, leaves: Collection[str] = ()) -> list[fx.Node]:
    """The calls of a model's forward, in order; the last one is its output. Calls that nobody reads are left out.

    Args:
        leaves: paths of submodules to keep whole, beside those that must be.

    Raises:
        Untraceable: its own forward does what torch.fx cannot follow.
    """
    with TRACE_LOCK, torch.enable_grad():
        try:
            graph = _Tracer(leaves).trace(model)
        except Exception as error:
            raise Untraceable(f"torch.fx cannot trace it: {first_line(error)}") from None
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output") or mutates(model, node))
    return list(graph.nodes)


def called(node: fx.Node) -> str:
    """Name of the function or method of a node."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def mutates(model: nn.Module, node: fx.Node) -> bool:
    """Whether a call overwrites its first argument."""
    if node.op == "call_module":
        return bool(getattr(model.get_submodule(str(node.target)), "inplace", False))
    if node.op not in ("call_function", "call_method"):
        return False
    return bool(node.kwargs.get("inplace")) or called(node) in IN_PLACE


def unsupported_in_place(node: fx.Node) -> bool:
    """Whether a call works in place and has no out-of-place form in `IN_PLACE`: `x.zero_()`, say."""
    name = called(node)
    if node.op not in ("call_function", "call_method") or name in IN_PLACE:
        return False
    return (name.endswith("_") and not name.endswith("__")) or name in _OTHER_IN_PLACE


_OTHER_IN_PLACE = frozenset(
    ("setitem", "ipow", "imod", "imatmul", "ifloordiv", "iand", "ior", "ixor", "ilshift", "irshift", "iconcat")
)


def draws_random(node: fx.Node) -> bool:
    """Whether a function or method draws random numbers: noise, or a dropout that is switched on."""
    name = called(node)
    # dropout(x, p, training) and torchvision's stochastic_depth(x, p, mode, training)
    place = 3 if name == "stochastic_depth" else 2 if "dropout" in name else None
    if place is None:
        return name in ("bernoulli", "rand_like", "randn_like", "rrelu")
    chance = node.kwargs.get("p", node.args[1] if len(node.args) > 1 else None)
    training = node.kwargs.get("training", node.args[place] if len(node.args) > place else True)
    return not (chance == 0 or training is False)


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def holds_tensors(value: Any) -> bool:
    """Whether a call gave a tensor, or several.

    Raises:
        Untraceable: tensors in something else than a tuple or list.
    """
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return any(holds_tensors(v) for v in value)
    if isinstance(value, dict) and any(holds_tensors(v) for v in value.values()):
        raise Untraceable("it hands a dictionary of tensors from layer to layer")
    return isinstance(value, Tensor)
