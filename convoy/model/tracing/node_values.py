"""Evaluates the nodes of a trace for two batch sizes, on the meta device.

Comparing the two shows which lengths and numbers depend on the batch size, and which values can be passed between layers:
tensors with one row per sample, and values that do not depend on the batch. All other values are *odd*.
"""

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from convoy.errors import InputError
from convoy.model.nested import map_tensors, tensors_of
from convoy.model.operation import BatchExtent, Here
from convoy.model.tracing.effects import called, mutates, unsupported_in_place
from convoy.model.tracing.python_state import random_kept
from convoy.model.tracing.supported_layers import is_batch_norm
from convoy.model.tracing.trials import first_line, is_floating, on_random, run_on_random

Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape per sample and dtype of an input."""

BATCHES = (2, 3)

Pair = tuple[Any, Any]
"""A node's two values, one for each batch size in `BATCHES`."""


class Untraceable(Exception):  # noqa: N818 - it ends one attempt to trace, not the program
    """The error if modules cannot be traced into layers. The text gives the reason for the first of them.

    Attributes:
        where: paths of the modules; "" is the model itself.
    """

    def __init__(self, why: str, *where: str) -> None:
        super().__init__(f"of {where[0]!r}: {why}" if where and where[0] else why)
        self.where = where


def meta_inputs(specs: Sequence[Spec], batch: int) -> tuple[Tensor, ...]:
    return tuple(torch.empty((batch, *shape), dtype=dtype, device="meta") for shape, dtype in specs)


def call_node(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Call the function or method of a node."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _evaluate(node: fx.Node, meta: nn.Module, attribute: Callable[[str], Any], value: Callable[[fx.Node], Any]) -> Any:
    """Return the value of a node on the meta device, with `meta` as the model."""
    if node.op == "get_attr":
        held = attribute(str(node.target))
        return held.to("meta") if isinstance(held, Tensor) else held
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    given: Any = args
    with torch.device("meta"):
        if node.op != "call_module":
            return call_node(node, args, kwargs)
        module = meta.get_submodule(str(node.target))
        # With momentum=None a batch norm reads a number from its buffers, which meta tensors do not have.
        if is_batch_norm(module):
            return torch.empty_like(given[0])
        if type(module).__module__.startswith("torch."):
            return module(*args, **kwargs)
        with random_kept():
            return module(*args, **kwargs)


class Sizes:
    """The sizes and numbers that a forward may read while it is traced.

    Nodes are evaluated on demand. A value is known if it is equal for both batch sizes, unless it was computed from the batch
    size (`n // 2` may be equal for both), from numbers in tensors, or from the device.

    Attributes:
        evaluating: whether a node is being evaluated; then calls are not part of the trace.
    """

    def __init__(self, model: nn.Module, meta: nn.Module) -> None:
        self.evaluating = False
        self._attribute, self._meta = (lambda path: operator.attrgetter(path)(model)), meta
        self._pairs: dict[fx.Node, Pair | None] = {}
        self._counted: set[fx.Node] = set()  # equal for both batch sizes, but computed from them

    def place(self, node: fx.Node, spec: Spec) -> None:
        """Set the values of an input."""
        small, large = (meta_inputs([spec], batch)[0] for batch in BATCHES)
        self._pairs[node] = (small, large)

    def pair(self, node: fx.Node) -> Pair | None:
        """Return the values of a node; None if they depend on numbers in tensors."""
        waiting = [node]
        while waiting:
            missing = [n for n in waiting[-1].all_input_nodes if n not in self._pairs]
            if waiting[-1] in self._pairs:
                waiting.pop()
            elif missing:
                waiting += missing
            else:
                top = waiting.pop()
                self._pairs[top] = self._evaluated(top)
        return self._pairs[node]

    def shape(self, node: fx.Node) -> tuple[int | None, ...] | None:
        """Return the shape of a tensor, with None for lengths that depend on the batch size; None if it is unknown."""
        pair = self.pair(node)
        if pair is None or not all(isinstance(t, Tensor) for t in pair) or node in self._counted:
            return None
        small, large = (t.shape for t in pair)
        if len(small) != len(large):
            return None
        return tuple(a if a == b else None for a, b in zip(small, large, strict=True))

    def number(self, node: fx.Node) -> Any:
        """Return a number, string or None that depends only on the model and its inputs' shapes, else raise LookupError."""
        pair = self.pair(node)
        if pair is None or node in self._counted or not isinstance(pair[0], _PLAIN) or pair[0] != pair[1]:
            raise LookupError(node.name)
        return pair[0]

    def length(self, node: fx.Node) -> int | None:
        """Return the number of items of a value; None if it is unknown, or depends on the batch size."""
        pair = self.pair(node)
        if pair is None or node in self._counted or not all(isinstance(v, Tensor | tuple | list) for v in pair):
            return None
        if isinstance(pair[0], Tensor):
            return (self.shape(node) or (None,))[0]
        return len(pair[0]) if len(pair[0]) == len(pair[1]) else None

    def _evaluated(self, node: fx.Node) -> Pair | None:
        name = called(node)
        reads = [self._pairs[n] for n in node.all_input_nodes]
        if any(pair is None for pair in reads) or (name == "getattr" and node.args[1] in _OF_AUTOGRAD):
            return None
        before, self.evaluating = self.evaluating, True
        try:
            with torch.no_grad():
                small, large = (
                    _evaluate(node, self._meta, self._attribute, lambda n, i=i: self._pairs[n][i])  # type: ignore[index, misc]
                    for i in (0, 1)
                )
        except Exception:  # the meta device has no numbers
            return None
        finally:
            self.evaluating = before
        known = [pair for pair in reads if pair is not None]
        if name == "getattr" and isinstance(small, str | bool):
            small, large = _OF_DEVICES.get(str(node.args[1]), (small, large))
        elif not tensors_of(small) and any(isinstance(pair[0], torch.device) for pair in known):
            return None
        numbers = [pair for pair in known if isinstance(pair[0], int | float | tuple)]
        counted = name not in ("getitem", "getattr") and not tensors_of(small) and small == large
        counted = counted and any(a != b for a, b in numbers)
        if counted or any(n in self._counted for n in node.all_input_nodes):
            self._counted.add(node)
        return small, large


_OF_AUTOGRAD = ("requires_grad", "grad_fn", "is_leaf", "grad")
"""Attributes that depend on whether gradients are required, which may differ between calls."""
_OF_DEVICES = {"type": ("cpu", "cuda"), "is_cuda": (False, True), "is_cpu": (True, False), "is_meta": (False, False)}
"""Attributes that depend on the device -> two different values, so that a trace cannot branch on them."""
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)


class NodeValues:
    """The values of the nodes visited so far, as pairs: one for each of `BATCHES`.

    Attributes:
        odd: node -> why its value cannot be passed between layers.
        of_batch: odd nodes with one value for the global batch (a loss), which the model may return.
        mixing: nodes that combine several samples, so that their layer needs the global batch.
        overwrites: whether the model overwrites its inputs.
        folded: node -> the rows per sample of a tensor whose first axis is a multiple of the batch.
        reads: node -> argument -> the node with the argument's current value, after in-place calls.
        flop: node -> FLOP per sample.
    """

    def __init__(
        self, model: nn.Module, meta: nn.Module, specs: Sequence[Spec], constants: Mapping[str, Tensor], folds: bool
    ) -> None:
        self.model, self.meta, self.specs, self.constants = model, meta, list(specs), constants
        self.folds, self.folded = folds, dict[fx.Node, int]()
        self.odd: dict[fx.Node, str] = {}
        self.of_batch: set[fx.Node] = set()
        self.mixing: set[fx.Node] = set()
        self.overwrites = False
        self.reads: dict[fx.Node, dict[fx.Node, fx.Node]] = {}
        self.flop: dict[fx.Node, int] = {}
        self._pairs: dict[fx.Node, Pair] = {}
        self._overwritten: dict[fx.Node, fx.Node] = {}
        self._written: dict[int, int] = {}  # storage -> number of nodes before the last write
        self._order: dict[fx.Node, int] = {}
        self._of_storage: defaultdict[int, list[fx.Node]] = defaultdict(list)
        self._of_samples: set[fx.Node] = set()
        self._of_data: set[fx.Node] = set()

    def __getitem__(self, node: fx.Node) -> Pair:
        return self._pairs[node]

    def visit(self, node: fx.Node, counter: FlopCounterMode) -> None:
        """Evaluate the next node, or raise Untraceable if it does not run."""
        self.reads[node] = {n: self._latest(n) for n in node.all_input_nodes}
        reads = list(self.reads[node].values())
        self._order[node] = len(self._order)
        # A trace replaces overwritten tensors by new ones, so reading them under an older name would be wrong.
        for n in reads:
            for t in tensors_of(self[n][0]):
                if self._written.get(_storage(t), -1) > self._order[n] and n not in self.odd:
                    raise Untraceable(
                        f"{node.name} reads a tensor that was overwritten under another name", node.meta["where"]
                    )
        if node.op == "output":
            return
        before = counter.get_total_flops()
        given = [(t, t._version) for n in reads for value in self[n] for t in tensors_of(value)]
        self._pairs[node] = pair = self._evaluated(node)
        if not mutates(self.model, node) and not unsupported_in_place(node):
            # A registered layer, or a call with out=, may write into its arguments.
            self._written |= {_storage(t): self._order[node] for t, version in given if t._version != version}
        if any(n in self._of_data for n in reads):
            self._of_data.add(node)
        self.flop[node] = (counter.get_total_flops() - before) // sum(BATCHES)  # both batch sizes were counted
        for t in tensors_of(pair[0]):
            self._of_storage[_storage(t)].append(node)
        followed = [n for n in reads if n in self._of_samples and (n in self.odd or tensors_of(self[n][0]))]
        if node.op == "placeholder" or (followed and called(node) not in _SHAPED):
            self._of_samples.add(node)
        if why := self._oddness(node, pair, reads):
            self.odd[node] = why
        if mutates(self.model, node) and tensors_of(pair[0]):
            self._write(node, reads[0])
            dtypes = [t.dtype for n in reads for t in tensors_of(self[n][0])]
            if functools.reduce(torch.promote_types, dtypes) is not dtypes[0]:
                raise Untraceable(f"{node.name} overwrites a tensor with one of a wider dtype", node.meta["where"])
            self._overwritten[self._latest(node.all_input_nodes[0])] = node

    def _evaluated(self, node: fx.Node) -> Pair:
        if node.op == "placeholder":
            spec = self.specs[sum(n.op == "placeholder" for n in self._pairs)]
            return meta_inputs([spec], BATCHES[0])[0], meta_inputs([spec], BATCHES[1])[0]
        reads = self.reads[node]
        try:
            small, large = (
                _evaluate(node, self.meta, self._attribute, lambda n, i=i: self[reads[n]][i])  # type: ignore[misc]
                for i in (0, 1)
            )
            return small, large
        except (Untraceable, InputError):
            raise
        except Exception as error:  # the meta device has no numbers, and no shapes that depend on numbers
            failed = error
        self._of_data.add(node)
        values = []
        try:
            for i in (0, 1):
                args, kwargs = self._arguments(node, lambda n, i=i: self[n][i])
                if node.op == "call_module":
                    value = run_on_random(self.model.get_submodule(str(node.target)), args, kwargs)
                else:
                    value = call_node(node, *on_random((args, kwargs)))
                values.append(map_tensors(value, lambda t: t.detach().to("meta")))
        except Exception:
            raise Untraceable(f"{node.name} does not run: {first_line(failed)}", node.meta["where"]) from None
        return values[0], values[1]

    def _arguments(self, node: fx.Node, value: Any) -> Any:
        reads = self.reads[node]
        return fx.node.map_arg((node.args, node.kwargs), lambda n: value(reads[n]))

    def _attribute(self, path: str) -> Any:
        return self.constants[path] if path in self.constants else operator.attrgetter(path)(self.meta)

    def constant(self, node: fx.Node) -> Any:
        """Return the value of a node without tensors: a constant, or a multiple of the batch size."""
        if tensors_of(self[node][0]):
            raise Untraceable(f"{node.name} is a tensor inside another layer", node.meta["where"])
        return _folded(*self[node])

    def passes_gradient(self, node: fx.Node) -> bool:
        """Return whether gradients flow through a node. They do not for integers, `x.detach()`, or under torch.no_grad()."""
        if node.meta["no_grad"]:
            return False
        floating = any(is_floating(t) for t in tensors_of(self[node][0]))
        if not floating or node.op not in ("call_function", "call_method"):
            return floating

        try:
            with torch.enable_grad():
                return any(t.requires_grad for t in tensors_of(call_node(node, *self._arguments(node, self._tracked))))
        except Exception:  # it needs numbers
            return True

    def _tracked(self, n: fx.Node) -> Any:
        """Return a node's value as autograd sees it."""
        if n.op == "get_attr" and not isinstance(self._attribute(str(n.target)), nn.Parameter):
            return self[n][0]
        # Cloned: autograd forbids in-place calls on leaves.
        return map_tensors(self[n][0], lambda t: t.detach().requires_grad_().clone() if is_floating(t) else t)

    def saved(self, node: fx.Node) -> tuple[set[fx.Node | None], int] | None:
        """Return what autograd saves of a call of torch: inputs, None for the output, and further bytes per sample.

        Return None if it is unknown, because the call needs numbers, or user code.
        """
        if node.op not in ("call_function", "call_method", "call_module") or node.meta["no_grad"]:
            return None
        module = self.meta.get_submodule(str(node.target)) if node.op == "call_module" else nn.Identity()
        if is_batch_norm(module) or not type(module).__module__.startswith("torch."):
            return None
        found: dict[int, Tensor] = {}
        given = {n: self._tracked(n) for n in self.reads[node].values()}

        def pack(t: Tensor) -> Tensor:
            found[_storage(t)] = t
            return t

        try:
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                made = _evaluate(node, self.meta, self._attribute, lambda n: given[self.reads[node][n]])
        except Exception:
            return None
        known: dict[int, fx.Node | None] = {_storage(t): n for n, value in given.items() for t in tensors_of(value)}
        known |= {_storage(t): None for t in tensors_of(made)}
        weights = {_storage(p) for p in module.parameters()}
        others = [t.untyped_storage().nbytes() for key, t in found.items() if key not in known and key not in weights]
        return {known[key] for key in found if key in known}, sum(others) // BATCHES[0]

    def _write(self, node: fx.Node, target: fx.Node) -> None:
        """Record that a call writes into the output of `target`. Refuse tensors that are known under a second name."""
        where = node.meta["where"]
        if target in self._of_data:
            raise Untraceable(f"{node.name} overwrites a tensor that was computed from numbers", where)
        if node.meta["no_grad"] and self.passes_gradient(target):
            raise Untraceable(f"{node.name} overwrites a tensor that has a gradient under torch.no_grad()", where)
        for t in tensors_of(self[target][0]):
            holders = self._of_storage[_storage(t)]
            if held := [str(n.target) for n in holders if n.op == "get_attr" and str(n.target) not in self.constants]:
                raise Untraceable(f"its forward changes {held[0]!r}", where)
            self.overwrites = self.overwrites or any(n.op == "placeholder" for n in holders)
            if unsupported_in_place(node) and any(n not in (node, target) and n not in self.odd for n in holders):
                raise Untraceable(f"{node.name} overwrites a tensor that has a second name", where)
            self._written[_storage(t)] = self._order[node]

    def _latest(self, node: fx.Node) -> fx.Node:
        """Return the node with the current value of `node`, which a later in-place call may have overwritten."""
        while node in self._overwritten:
            node = self._overwritten[node]
        return node

    def _oddness(self, node: fx.Node, pair: Pair, reads: Sequence[fx.Node]) -> str:
        """Return why a value cannot be passed between layers; "" if it can."""
        small, large = pair
        odd = next((self.odd[n] for n in reads if n in self.odd), "")
        tensors = tensors_of(small)
        if not tensors:
            why = f"{node.name} reads numbers out of tensors" if node in self._of_data else ""
            why = why or self._odd_number(node, pair, reads)
            if why and why != odd:
                self.mixing.add(node)
            return why
        if unsupported_in_place(node):
            if reads[0].op == "placeholder":
                raise Untraceable(f"{node.name} overwrites an input of the model", node.meta["where"])
            why = f"{node.name} works in place and has no pure form"
            self.odd.setdefault(reads[0], why)
            self._write(node, reads[0])
            return why
        if is_form(node):
            return next((self.odd[n] for n in reads if n in self.odd and n not in self.of_batch), "")
        if isinstance(small, Tensor):
            return self._odd_tensor(node, pair, reads, odd)
        if isinstance(small, tuple | list):
            if type(small) is not tuple and any(n.target is not operator.getitem for n in node.users):
                return odd or f"{node.name} gives a {type(small).__name__}"
            fixed = [t.shape for t in tensors] == [t.shape for t in tensors_of(large)]
            if not odd and fixed and node not in self._of_samples and len(tensors) == len(small):
                return ""  # computed from parameters only
            if all(map(is_batched, zip(small, large, strict=True))) and self.folded.keys().isdisjoint(reads):
                return ""
        return odd or f"{node.name} gives something else than rows of the batch"

    def _odd_tensor(self, node: fx.Node, pair: Pair, reads: Sequence[fx.Node], odd: str) -> str:
        small, large = pair
        if is_batched(pair):
            return ""
        if self.folds and (rows := rows_in(pair)):
            self.folded[node] = rows
            return ""
        if small.shape != large.shape:
            if sum(a != b for a, b in zip(small.shape, large.shape, strict=False)) > 1:  # values for all pairs
                self.mixing.add(node)
            return odd or f"the first axis of {node.name} is not the batch"
        if node in self._of_samples:
            self.of_batch.add(node)
            self.mixing.add(node)
            return odd or f"{node.name} loses the batch axis"
        numbers = [n for n in reads if not tensors_of(self[n][0]) and n not in self.odd]
        if not any(mentions_batch(_folded(*self[n])) for n in numbers):
            return odd
        self.mixing.add(node)
        return odd or f"{node.name} has no batch axis and computes with the size of the batch"

    def _odd_number(self, node: fx.Node, pair: Pair, reads: Sequence[fx.Node]) -> str:
        """Return why a number is odd: it is not linear in the batch size, like `n // 2` or `min(n, 64)`. Else return ""."""
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
        # getitem and getattr read from a shape, add joins two shapes, and one factor of a product may be the batch size.
        linear = called(node) in ("getitem", "getattr", "mul", "numel") and len(following) == 1
        joined = called(node) == "add" and isinstance(pair[0], tuple)
        if not (linear or joined) or (called(node) == "getitem" and following[0] is not reads[0]):
            return f"{node.name} computes with the size of the batch"
        return ""


_SHAPED = ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "zeros_like", "ones_like", "full_like")
"""Functions that read a shape, not numbers."""


def _storage(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)


def is_form(node: fx.Node) -> bool:
    """Return whether a node makes a named tuple or a dataclass, which is part of a result but no layer."""
    made = node.target
    return node.op == "call_function" and isinstance(made, type) and (hasattr(made, "_fields") or is_dataclass(made))


def is_batched(pair: tuple[Any, Any], sizes: tuple[int, ...] = BATCHES) -> bool:
    """Return whether the first axis is the batch size in both evaluations, and all other axes are equal."""
    return rows_in(pair, sizes) == 1


def rows_in(pair: tuple[Any, Any], sizes: tuple[int, ...] = BATCHES) -> int:
    """Return the length of the first axis as a multiple of the batch size; 0 if it is none, or if another axis varies."""
    small, large = pair
    if not (isinstance(small, Tensor) and isinstance(large, Tensor)) or small.dim() == 0 or small.dim() != large.dim():
        return 0
    rows = small.shape[0] // sizes[0]
    return rows if [(rows * n, *small.shape[1:]) for n in sizes] == [small.shape, large.shape] else 0


def mentions_batch(arg: Any) -> bool:
    """Return whether arguments of a call contain the batch size."""
    match arg:
        case tuple() | list():
            return any(mentions_batch(a) for a in arg)
        case dict():
            return any(mentions_batch(a) for a in arg.values())
        case slice():
            return any(mentions_batch(a) for a in (arg.start, arg.stop, arg.step))
    return isinstance(arg, BatchExtent)


def _folded(small: Any, large: Any) -> Any:
    """Combine the values for both batch sizes: a constant or a multiple of the batch size. Otherwise raise ValueError."""
    if isinstance(small, tuple | list):
        return tuple(_folded(a, b) for a, b in zip(small, large, strict=True))
    if isinstance(small, torch.device):
        return Here()
    if type(small) is type(large) and small == large:
        return small
    if isinstance(small, int) and small * BATCHES[1] == large * BATCHES[0] and small % BATCHES[0] == 0:
        return BatchExtent(small // BATCHES[0])
    raise ValueError(small)
