"""What a forward may ask while it is traced: sizes that do not follow the batch are plain numbers, and so are branches on them.

Nodes are evaluated on the meta device when somebody asks, for two batch sizes. What both agree on is told, unless it was
computed from the size of the batch (`n // 2` may be the same for both), from numbers in tensors, or from the device.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from convoy.model.tracing.kinds import is_batch_norm
from convoy.model.tracing.python_state import random_kept

Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape per sample and dtype of an input."""

BATCHES = (2, 3)

Pair = tuple[Any, Any]
"""A value for each of `BATCHES`."""


def called(node: fx.Node) -> str:
    """Name of the function or method of a node."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def meta_input(spec: Spec, which: int) -> Tensor:
    """An input for one of the batch sizes."""
    shape, dtype = spec
    return torch.empty((BATCHES[which], *shape), dtype=dtype, device="meta")


def call_node(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """What a function or method gives."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def call_on_meta(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """What a module on the meta device gives."""
    # With momentum=None a batch norm reads a number from its buffers, which meta tensors do not have.
    if is_batch_norm(module):
        return torch.empty_like(args[0])
    if type(module).__module__.startswith("torch."):
        return module(*args, **kwargs)
    with random_kept():
        return module(*args, **kwargs)


_INSIDE = [False]


def evaluating() -> bool:
    """Whether a node is being evaluated: what is called then is no part of the trace."""
    return _INSIDE[0]


class Sizes:
    """Values of the nodes of one tracer.

    Args:
        root: the module that is traced.
        twins: of each module its copy on the meta device.
        names: what the code that is traced names.

    Attributes:
        types_asked: whether it may ask if a value is a tensor.
        asked: whether an answer depended on what is given to the root.
    """

    def __init__(self, root: nn.Module, twins: Mapping[nn.Module, nn.Module], names: Collection[str]) -> None:
        self.root, self.twins, self.asked = root, twins, False
        self.types_asked = "is_tensor" in names or ("isinstance" in names and "Tensor" in names)
        self._given: dict[fx.Node, Callable[[], Pair | None]] = {}
        self._pairs: dict[fx.Node, Pair | None] = {}
        self._counted: set[fx.Node] = set()  # same for both batch sizes, but computed from them

    def give(self, node: fx.Node, pair: Callable[[], Pair | None]) -> None:
        """How to get the values of a placeholder."""
        self._given[node] = pair

    def pair(self, node: fx.Node) -> Pair | None:
        """The values of a node; None where nobody can tell without numbers."""
        waiting = [node]
        while waiting:
            top = waiting[-1]
            missing = [n for n in top.all_input_nodes if n not in self._pairs] if top not in self._pairs else []
            if not missing:
                waiting.pop()
                if top not in self._pairs:
                    self._pairs[top] = self._evaluated(top)
            waiting += missing
        return self._pairs[node]

    def shape(self, node: fx.Node) -> tuple[int | None, ...] | None:
        """The shape of a tensor with None for what follows the batch; None where it is no tensor, or not known."""
        pair = self.pair(node)
        if pair is None or not all(isinstance(t, Tensor) for t in pair) or node in self._counted:
            return None
        small, large = (t.shape for t in pair)
        if len(small) != len(large):
            return None
        return tuple(a if a == b else None for a, b in zip(small, large, strict=True))

    def number(self, node: fx.Node) -> Any:
        """A number, text or None that depends on nothing but the model and the shape of its inputs.

        Raises:
            LookupError: it is no such value.
        """
        pair = self.pair(node)
        if pair is None or node in self._counted or not isinstance(pair[0], _PLAIN) or pair[0] != pair[1]:
            raise LookupError(node.name)
        return pair[0]

    def length(self, node: fx.Node) -> int | None:
        """How many items a value has; None where it is not known, or follows the batch."""
        pair = self.pair(node)
        if pair is None or node in self._counted or not all(isinstance(v, Tensor | tuple | list) for v in pair):
            return None
        shape = self.shape(node)
        if isinstance(pair[0], Tensor):
            return shape[0] if shape else None
        return len(pair[0]) if len(pair[0]) == len(pair[1]) else None

    def _evaluated(self, node: fx.Node) -> Pair | None:
        if node.op == "placeholder":
            self.asked = True
            return self._given[node]()
        if called(node) == "getattr" and node.args[1] in _OF_AUTOGRAD:
            return None
        reads = [self._pairs[n] for n in node.all_input_nodes]
        if any(pair is None for pair in reads):
            return None
        before, _INSIDE[0] = _INSIDE[0], True
        try:
            with torch.no_grad():
                small, large = (self._value(node, which) for which in (0, 1))
        except Exception:  # whatever the meta device cannot tell
            return None
        finally:
            _INSIDE[0] = before
        devices = any(isinstance(pair[0], torch.device) for pair in reads if pair is not None)
        if called(node) == "getattr" and isinstance(small, str | bool):
            small, large = _of_devices(str(node.args[1]), (small, large))
        elif devices and not _has_tensors(small):
            return None
        if any(n in self._counted for n in node.all_input_nodes):
            self._counted.add(node)
        elif called(node) not in ("getitem", "getattr") and not _has_tensors(small) and small == large:
            numbers = [pair for pair in reads if pair is not None and isinstance(pair[0], _COUNTS)]
            if any(a != b for a, b in numbers):
                self._counted.add(node)
        return small, large

    def _value(self, node: fx.Node, which: int) -> Any:
        def value(n: fx.Node) -> Any:
            pair = self._pairs[n]
            assert pair is not None
            return pair[which]

        if node.op == "get_attr":
            held = operator.attrgetter(str(node.target))(self.root)
            return held.to("meta") if isinstance(held, Tensor) else held
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
        with torch.device("meta"):
            if node.op == "call_module":
                return call_on_meta(self.twins[self.root.get_submodule(str(node.target))], args, kwargs)
            return call_node(node, args, kwargs)


_OF_AUTOGRAD = ("requires_grad", "grad_fn", "is_leaf", "grad")
"""Attributes that tell whether gradients are wanted, which may be another answer at every call."""
_COUNTS = (int, float, tuple)
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)


def _of_devices(name: str, pair: Pair) -> Pair:
    """What an attribute says of a CPU and of a GPU: what differs is not the same for all devices."""
    answers: dict[str, Pair] = {
        "type": ("cpu", "cuda"),
        "is_cuda": (False, True),
        "is_cpu": (True, False),
        "is_meta": (False, False),
    }
    return answers.get(name, pair)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return any(map(_has_tensors, value))
    return isinstance(value, Tensor) or (isinstance(value, dict) and any(map(_has_tensors, value.values())))


class _Recorded:
    """What Python may not do with a value of a trace: torch.fx would go on with something else, without a word."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node", "root", "attr", "_node"):
            raise TypeError(f"its forward sets {name!r} of a tensor")
        super().__setattr__(name, value)

    def __str__(self) -> str:
        raise TypeError("its forward makes a text of a tensor, or of its size or device")

    def __format__(self, _spec: str) -> str:
        return str(self)


class _Attribute(_Recorded, fx.proxy.Attribute):
    pass


class Sized(_Recorded, fx.Proxy):
    """A value of a trace that tells its size: `.shape`, `.size()`, `.dim()`, `.ndim` and `len` are numbers.

    What follows the batch is a value of the trace, as all of it is where the size is not known.
    """

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # so that `isinstance(x, Tensor)` answers what it does of the tensor
        sizes: Sizes = self.tracer.sizes  # type: ignore[attr-defined]
        return Tensor if sizes.types_asked and not evaluating() and self._is_tensor() else Sized

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "ndim"):
            shape = self.tracer.sizes.shape(self.node)  # type: ignore[attr-defined]
            if shape is not None:
                return len(shape) if name == "ndim" else self._extents(shape)
        if not hasattr(Tensor, name) and self._is_tensor():
            raise AttributeError(f"a tensor has no attribute {name!r}")  # `hasattr` asks so
        return _Attribute(self, name)

    def _is_tensor(self) -> bool:
        pair = self.tracer.sizes.pair(self.node)  # type: ignore[attr-defined]
        return pair is not None and isinstance(pair[0], Tensor)

    def _extents(self, shape: Sequence[int | None]) -> "Shape":
        symbolic = _Attribute(self, "shape") if None in shape else None
        return Shape(symbolic[i] if n is None else n for i, n in enumerate(shape))  # type: ignore[index]

    def size(self, dim: int | None = None) -> Any:
        if self.tracer.sizes.shape(self.node) is None:  # type: ignore[attr-defined]
            return _Attribute(self, "size")(*(() if dim is None else (dim,)))
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> Any:
        shape = self.tracer.sizes.shape(self.node)  # type: ignore[attr-defined]
        return _Attribute(self, "dim")() if shape is None else len(shape)

    def __len__(self) -> int:
        length = self.tracer.sizes.length(self.node)  # type: ignore[attr-defined]
        return super().__len__() if length is None else length


class Shape(tuple[Any, ...]):
    """A shape whose entries that follow the batch are values of the trace."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Shape(found) if isinstance(index, slice) else found

    def numel(self) -> Any:
        """Their product."""
        result: Any = 1
        for extent in self:
            result = extent * result
        return result


def items(proxy: fx.Proxy) -> Iterator[fx.Proxy] | None:
    """The items of a value whose number is known."""
    length = proxy.tracer.sizes.length(proxy.node)  # type: ignore[attr-defined]
    return None if length is None else iter([proxy[i] for i in range(length)])  # type: ignore[index]


def meta_inputs(specs: Sequence[Spec], batch: int) -> tuple[Tensor, ...]:
    return tuple(torch.empty((batch, *shape), dtype=dtype, device="meta") for shape, dtype in specs)
