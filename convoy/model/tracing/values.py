"""Evaluates every node for two batch sizes, on the meta device.

Comparing the two shows which extents and numbers follow the batch size, and which values can pass from layer to layer: rows
of the batch, and what does not depend on it. The others are *odd*.
"""

import copy
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from convoy.errors import InputError
from convoy.model.operation import BatchExtent, Here
from convoy.model.tracing.effects import counts_batches, mutates, unsupported_in_place
from convoy.model.tracing.nodes import Untraceable
from convoy.model.tracing.opaque import first_line, is_floating, map_tensors, on_random, run_on_random, tensors_of
from convoy.model.tracing.sizes import BATCHES, Spec, call_node, call_on_meta, called, meta_input


class NodeValues:
    """The values of the nodes visited so far, as pairs: one for each of `BATCHES`.

    Attributes:
        odd: why the value of a node cannot pass from layer to layer, where it cannot.
        of_batch: nodes with one value of the whole batch (a loss); it can leave the model, though it is odd.
        mixing: nodes that certainly look at several samples: what they are part of needs the whole batch.
        overwrites: whether the model overwrites its inputs.
        reads: of each node, the nodes whose values it reads: in-place calls between may have overwritten its arguments.
        flop: of each node, per sample.
    """

    def __init__(
        self, model: nn.Module, meta: nn.Module, specs: Sequence[Spec], constants: Mapping[str, Tensor]
    ) -> None:
        self.model, self.meta, self.specs, self.constants = model, meta, specs, constants
        self.odd: dict[fx.Node, str] = {}
        self.of_batch: set[fx.Node] = set()
        self.mixing: set[fx.Node] = set()
        self.overwrites = False
        self.reads: dict[fx.Node, dict[fx.Node, fx.Node]] = {}
        self.flop: dict[fx.Node, int] = {}
        self._pairs: dict[fx.Node, tuple[Any, Any]] = {}
        self._overwritten: dict[fx.Node, fx.Node] = {}
        self._written: dict[int, int] = {}  # by storage, after how many nodes it was written into
        self._order: dict[fx.Node, int] = {}
        self._of_storage: defaultdict[int, list[fx.Node]] = defaultdict(list)
        self._of_samples: set[fx.Node] = set()
        self._of_data: set[fx.Node] = set()
        self._inputs = 0

    def __getitem__(self, node: fx.Node) -> tuple[Any, Any]:
        return self._pairs[node]

    def visit(self, node: fx.Node, counter: FlopCounterMode) -> None:
        """Evaluate the next node.

        Raises:
            Untraceable: it does not run.
        """
        self.reads[node] = reads = {n: self._latest(n) for n in node.all_input_nodes}
        if node.op == "output":
            return
        self._order[node] = len(self._order)
        self._refuse_stale(node, reads.values())
        before = counter.get_total_flops()
        from_data = False
        try:
            pair = (self._evaluate(node, 0), self._evaluate(node, 1))
        except (Untraceable, InputError):
            raise
        except Exception as error:  # what the meta device cannot tell: numbers, shapes that depend on numbers
            pair, from_data = self._on_numbers(node, error), True
        if from_data or any(n in self._of_data for n in reads.values()):
            self._of_data.add(node)
        self.flop[node] = (counter.get_total_flops() - before) // sum(BATCHES)  # both batch sizes were counted
        self._pairs[node] = pair
        for t in tensors_of(pair[0]):
            self._of_storage[_place(t)].append(node)
        self._inputs += node.op == "placeholder"
        if node.op == "placeholder" or (called(node) not in _SHAPED and any(map(self._follows, reads.values()))):
            self._of_samples.add(node)
        why = self._oddness(node, pair, list(reads.values()))
        if why:
            self.odd[node] = why
        if mutates(self.model, node) and tensors_of(pair[0]):
            self._write(node, next(iter(reads.values())))
            self._overwritten[self._latest(node.all_input_nodes[0])] = node

    # --- tensors that are overwritten --------------------------------------------------------------------------------

    def _write(self, node: fx.Node, target: fx.Node) -> None:
        """Note that a call writes into the tensor that `target` gave.

        Raises:
            Untraceable: it is a parameter or buffer.
        """
        if target in self._of_data:
            raise Untraceable(f"{node.name} overwrites what was made of numbers", node.meta["where"])
        for t in tensors_of(self[target][0]):
            place = _place(t)
            holders = self._of_storage[place]
            held = next((n for n in holders if n.op == "get_attr" and str(n.target) not in self.constants), None)
            if held is not None and not counts_batches(self.model, held):
                raise Untraceable(f"its forward changes {str(held.target)!r}", node.meta["where"])
            self.overwrites = self.overwrites or any(n.op == "placeholder" for n in holders)
            if unsupported_in_place(node) and any(n not in (node, target) and n not in self.odd for n in holders):
                raise Untraceable(f"{node.name} overwrites a tensor that has another name, too", node.meta["where"])
            self._written[place] = self._order[node]

    def _refuse_stale(self, node: fx.Node, reads: Iterable[fx.Node]) -> None:
        """A trace puts new tensors in the place of overwritten ones, so what reads one under an older name would be wrong."""
        for n in reads:
            for t in tensors_of(self[n][0]):
                if self._written.get(_place(t), -1) > self._order[n] and n not in self.odd:
                    raise Untraceable(
                        f"{node.name} reads a tensor that was overwritten under another name", node.meta["where"]
                    )

    def _latest(self, node: fx.Node) -> fx.Node:
        """The node that holds the current value of `node`: a later in-place call may have overwritten it."""
        while node in self._overwritten:
            node = self._overwritten[node]
        return node

    def _follows(self, node: fx.Node) -> bool:
        return node in self._of_samples and (node in self.odd or bool(tensors_of(self[node][0])))

    def constant(self, node: fx.Node) -> Any:
        """A number in the trace: constant, or a multiple of the batch size."""
        if tensors_of(self[node][0]):
            raise Untraceable(f"{node.name} is a tensor of another layer's inside", node.meta["where"])
        return _folded(*self[node])

    def passes_gradient(self, node: fx.Node) -> bool:
        """Whether gradients flow through a node: not for integers, `x.detach()`, or under torch.no_grad()."""
        if node.meta["no_grad"]:
            return False
        floating = any(is_floating(t) for t in tensors_of(self[node][0]))
        if not floating or node.op not in ("call_function", "call_method"):
            return floating
        try:
            with torch.enable_grad():
                args, kwargs = self._arguments(node, lambda n: self._tracked(n))
                return any(t.requires_grad for t in tensors_of(call_node(node, args, kwargs)))
        except Exception:  # as above: it needs numbers
            return True

    def _tracked(self, node: fx.Node) -> Any:
        """The same tensors with gradients required, so that the result of a call shows whether gradients flow through it."""
        value = self[node][0]
        if node.op == "get_attr" and not isinstance(self._attribute(node), nn.Parameter):
            return value
        # Cloned: autograd forbids in-place calls on leaves.
        return map_tensors(value, lambda t: t.detach().requires_grad_().clone() if is_floating(t) else t)

    def _arguments(self, node: fx.Node, value: Any) -> Any:
        reads = self.reads[node]
        return fx.node.map_arg((node.args, node.kwargs), lambda n: value(reads[n]))

    def _attribute(self, node: fx.Node) -> Any:
        target = str(node.target)
        return self.constants[target] if target in self.constants else operator.attrgetter(target)(self.meta)

    def _evaluate(self, node: fx.Node, which: int) -> Any:
        if node.op == "placeholder":
            return meta_input(self.specs[self._inputs], which)
        if node.op == "get_attr":
            value = self._attribute(node)
            return value.to("meta") if isinstance(value, Tensor) else value
        args, kwargs = self._arguments(node, lambda n: self[n][which])
        with torch.device("meta"):
            if node.op == "call_module":
                return call_on_meta(self.meta.get_submodule(str(node.target)), args, kwargs)
            return call_node(node, args, kwargs)

    def _on_numbers(self, node: fx.Node, error: Exception) -> tuple[Any, Any]:
        """The values of a node that needs numbers, on random ones."""

        def random(which: int) -> Any:
            args, kwargs = self._arguments(node, lambda n: self[n][which])
            if node.op == "call_module":
                return run_on_random(self.model.get_submodule(str(node.target)), args, kwargs)
            args, kwargs = on_random(args), on_random(kwargs)
            return map_tensors(call_node(node, args, kwargs), lambda t: t.detach().to("meta"))

        try:
            return random(0), random(1)
        except Exception:
            raise Untraceable(f"{node.name} does not run: {first_line(error)}", node.meta["where"]) from None

    def _oddness(self, node: fx.Node, pair: tuple[Any, Any], reads: Sequence[fx.Node]) -> str:
        """Why a value cannot pass from layer to layer; "" where it can."""
        small, large = pair
        odd = next((self.odd[n] for n in reads if n in self.odd), "")
        tensors = tensors_of(small)
        if tensors and unsupported_in_place(node):
            base = reads[0]
            if base.op == "placeholder":
                raise Untraceable(f"{node.name} overwrites an input of the model", node.meta["where"])
            self.odd.setdefault(base, f"{node.name} works in place and has no pure form")
            self._write(node, base)
            return f"{node.name} works in place and has no pure form"
        if not tensors:
            why = f"{node.name} reads numbers out of tensors" if node in self._of_data else ""
            why = why or self._odd_number(node, pair, reads)
            if why and why != odd:
                self.mixing.add(node)
            return why
        if is_form(node):
            return next((self.odd[n] for n in reads if n in self.odd and n not in self.of_batch), "")
        if isinstance(small, Tensor):
            if is_batched(pair):
                return ""
            if small.shape != large.shape:
                if axes := across(pair):
                    self.of_batch.add(node)
                    if len(axes) > 1:
                        self.mixing.add(node)
                return odd or f"the first axis of {node.name} is not the batch"
            if node in self._of_samples:
                self.of_batch.add(node)
                self.mixing.add(node)
                return odd or f"{node.name} loses the batch axis"
            numbers = [n for n in reads if not tensors_of(self[n][0]) and n not in self.odd]
            counted = any(mentions_batch(_folded(*self[n])) for n in numbers)
            if counted:
                self.mixing.add(node)
            return odd or (f"{node.name} has no batch axis and computes with the size of the batch" if counted else "")
        fixed = [t.shape for t in tensors] == [t.shape for t in tensors_of(large)]
        if (
            not odd
            and fixed
            and node not in self._of_samples
            and isinstance(small, tuple | list)
            and len(tensors) == len(small)
        ):
            return ""  # made of parameters alone
        plain = isinstance(small, tuple | list) and all(isinstance(t, Tensor) for t in small)
        if plain and all(is_batched(each) for each in zip(small, large, strict=True)):
            return ""
        return odd or f"{node.name} gives something else than rows of the batch"

    def _odd_number(self, node: fx.Node, pair: tuple[Any, Any], reads: Sequence[fx.Node]) -> str:
        """Numbers that are not linear in the batch size: two sizes prove nothing about `n // 2` or `min(n, 64)`."""
        try:
            _folded(*pair)
        except ValueError:
            return f"{node.name} is a number that depends on the batch"
        numbers = [n for n in reads if not tensors_of(self[n][0])]
        if any(n in self.odd for n in numbers):
            return next(self.odd[n] for n in numbers if n in self.odd)
        following = [n for n in numbers if mentions_batch(_folded(*self[n]))]
        if not following:
            return ""
        # getitem and getattr look into a shape, add joins two; one factor of a product may follow the batch, not both.
        linear = called(node) in ("getitem", "getattr", "mul", "numel") and len(following) == 1
        joined = called(node) == "add" and isinstance(pair[0], tuple)
        if not (linear or joined) or (called(node) == "getitem" and following[0] is not reads[0]):
            return f"{node.name} computes with the size of the batch"
        return ""


_SHAPED = ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "zeros_like", "ones_like", "full_like")
"""They read a shape, not numbers."""


def _place(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of a model on the meta device: no number is copied."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    return copy.deepcopy(model, memo)


def is_form(node: fx.Node) -> bool:
    """Whether a node makes a named tuple or a dataclass: that is no layer, but the form of what is returned."""
    made = node.target
    return node.op == "call_function" and isinstance(made, type) and (hasattr(made, "_fields") or is_dataclass(made))


def is_batched(pair: tuple[Any, Any]) -> bool:
    """Whether two evaluations differ exactly in their first axis, as the batch sizes do."""
    small, large = pair
    if not (isinstance(small, Tensor) and isinstance(large, Tensor)) or small.dim() == 0 or small.dim() != large.dim():
        return False
    return (small.shape[0], large.shape[0]) == BATCHES and small.shape[1:] == large.shape[1:]


def across(pair: tuple[Any, Any]) -> tuple[int, ...]:
    """The axes along which two evaluations differ, where they do so as the batch sizes do; () where any does otherwise."""
    small, large = pair
    if small.dim() != large.dim():
        return ()
    extents = enumerate(zip(small.shape, large.shape, strict=True))
    differing = [(axis, each) for axis, each in extents if each[0] != each[1]]
    return tuple(axis for axis, _ in differing) if all(each == BATCHES for _, each in differing) else ()


def without_batch(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """The shape of a value of the whole batch as a `Layer` holds it."""
    return tuple(1 if axis in axes else extent for axis, extent in enumerate(shape))


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


def _folded(small: Any, large: Any) -> Any:
    """One value for both batch sizes.

    Raises:
        ValueError: they differ, but not as the batch sizes do.
    """
    if isinstance(small, tuple | list):
        return tuple(_folded(a, b) for a, b in zip(small, large, strict=True))
    if isinstance(small, torch.device):
        return Here()
    if type(small) is type(large) and small == large:
        return small
    if isinstance(small, int) and small * BATCHES[1] == large * BATCHES[0] and small % BATCHES[0] == 0:
        return BatchExtent(small // BATCHES[0])
    raise ValueError(small)
