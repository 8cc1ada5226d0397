"""Evaluates every node for two batch sizes, on the meta device.

Comparing the two shows which extents and numbers follow the batch size.
"""

import copy
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from convoy.errors import InputError
from convoy.model.operation import BatchExtent
from convoy.model.tracing.kinds import has_hooks, kind_of_module
from convoy.model.tracing.nodes import Untraceable, called, first_line, holds_tensors, mutates, unsupported_in_place
from convoy.model.tracing.per_sample import is_floating, run_on_random, tensors_of

Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape per sample and dtype of an input."""

BATCHES = (2, 3)


class NodeValues:
    """The values of the nodes visited so far, as pairs: one for each of `BATCHES`."""

    def __init__(self, model: nn.Module, specs: Sequence[Spec]) -> None:
        self.model, self.specs = model, specs
        self.meta = copy.deepcopy(model).to("meta")
        self._pairs: dict[fx.Node, tuple[Any, Any]] = {}
        self._overwritten: dict[fx.Node, fx.Node] = {}
        self._inputs = 0

    def __getitem__(self, node: fx.Node) -> tuple[Any, Any]:
        return self._pairs[self.latest(node)]

    def latest(self, node: fx.Node) -> fx.Node:
        """The node that holds the current value of `node`: a later in-place call may have overwritten it."""
        while node in self._overwritten:
            node = self._overwritten[node]
        return node

    def visit(self, node: fx.Node) -> tuple[Any, Any]:
        """Evaluate the next node.

        Raises:
            Untraceable: it does not run on the meta device, works in place without an out-of-place form, or computes with the
                size of the batch.
        """
        try:
            pair = (self._evaluate(node, 0), self._evaluate(node, 1))
        except (Untraceable, InputError):
            raise
        except Exception as error:
            raise Untraceable(f"{node.name} does not run on the meta device: {first_line(error)}") from None
        self._pairs[node] = pair
        self._inputs += node.op == "placeholder"
        if holds_tensors(pair[0]):
            if unsupported_in_place(node):
                raise Untraceable(f"{node.name} works in place and has no pure form")
        else:
            self._check_number(node, pair)
        return pair

    def overwrite(self, node: fx.Node) -> None:
        """Record an in-place call: later readers of its first argument get its result."""
        if mutates(self.model, node):
            self._overwritten[self.latest(node.all_input_nodes[0])] = node

    def constant(self, node: fx.Node) -> Any:
        """A number in the trace: constant, or a multiple of the batch size.

        Raises:
            Untraceable: it depends on the batch in another way.
        """
        return _folded(node, *self[node])

    def passes_gradient(self, node: fx.Node) -> bool:
        """Whether gradients flow through a node: not for integers, `x.detach()`, or under torch.no_grad()."""
        if node.meta["no_grad"]:
            return False
        if node.op not in ("call_function", "call_method"):
            return any(is_floating(t) for t in tensors_of(self[node][0]))
        with torch.enable_grad():
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _tracked(self[n][0]))
            return any(t.requires_grad for t in tensors_of(_call(node, args, kwargs)))

    def _evaluate(self, node: fx.Node, which: int) -> Any:
        if node.op == "placeholder":
            return self._input(node, which)
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self.meta)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self[n][which])
        if node.op == "call_module":
            module = self.meta.get_submodule(str(node.target))
            kind = kind_of_module(module)
            if kind == "batch_norm":
                # With momentum=None it reads a number from its buffers, which meta tensors do not have.
                return torch.empty_like(args[0])  # type: ignore[arg-type]
            if kind == "opaque" and (has_hooks(module) or not type(module).__module__.startswith("torch.nn.modules")):
                # Its Python may read numbers, which meta tensors do not have.
                return run_on_random(self.model.get_submodule(str(node.target)), args, kwargs)
            return module(*args, **kwargs)
        return _call(node, args, kwargs)

    def _input(self, node: fx.Node, which: int) -> Tensor:
        if self._inputs >= len(self.specs):
            if node.args:
                raise Untraceable(f"its forward has an optional argument {node.name!r}")
            raise InputError(f"the model takes more inputs than the {len(self.specs)} of the example: give all of them")
        shape, dtype = self.specs[self._inputs]
        return torch.empty((BATCHES[which], *shape), dtype=dtype, device="meta")

    def _check_number(self, node: fx.Node, pair: tuple[Any, Any]) -> None:
        """Refuse numbers that are not linear in the batch size: two sizes prove nothing about `n // 2` or `min(n, 64)`."""
        numbers = [n for n in node.all_input_nodes if not holds_tensors(self[n][0])]
        following = [n for n in numbers if self[n][0] != self[n][1]]
        if not following:
            return
        # getitem and getattr look into a shape, add joins two; one factor of a product may follow the batch, not both.
        linear = called(node) in ("getitem", "getattr", "mul", "numel") and len(following) == 1
        joined = called(node) == "add" and isinstance(pair[0], tuple)
        if not (linear or joined) or (called(node) == "getitem" and following[0] is not node.args[0]):
            raise Untraceable(f"{node.name} computes with the size of the batch")


def _call(node: fx.Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _tracked(value: Any) -> Any:
    """The same tensors with gradients required, so that the result of a call shows whether gradients flow through it."""

    def track(t: Any) -> Any:
        # Cloned: autograd forbids in-place calls on leaves.
        return t.detach().requires_grad_().clone() if isinstance(t, Tensor) and is_floating(t) else t

    return fx.node.map_aggregate(value, track)


def is_batched(pair: tuple[Any, Any]) -> bool:
    """Whether two evaluations differ exactly in their first axis, as the batch sizes do."""
    small, large = pair
    if not (isinstance(small, Tensor) and isinstance(large, Tensor)) or small.dim() == 0 or small.dim() != large.dim():
        return False
    return (small.shape[0], large.shape[0]) == BATCHES and small.shape[1:] == large.shape[1:]


def mentions_batch(arg: Any) -> bool:
    """Whether arguments of a call hold the size of the batch."""
    match arg:
        case tuple() | list():
            return any(mentions_batch(a) for a in arg)
        case dict():
            return any(mentions_batch(a) for a in arg.values())
        case slice():
            return any(mentions_batch(a) for a in (arg.start, arg.stop, arg.step))
    return isinstance(arg, BatchExtent)


def _folded(node: fx.Node, small: Any, large: Any) -> Any:
    if isinstance(small, tuple | list):
        return tuple(_folded(node, a, b) for a, b in zip(small, large, strict=True))
    if type(small) is type(large) and small == large:
        return small
    if isinstance(small, int) and small * BATCHES[1] == large * BATCHES[0] and small % BATCHES[0] == 0:
        return BatchExtent(small // BATCHES[0])
    raise Untraceable(f"{node.name} is a number that depends on the batch")
