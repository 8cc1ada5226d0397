"""Traces an nn.Module into torch.fx nodes.

A trace runs each forward once, with proxies instead of tensors. If it cannot represent what a forward does, it raises
`Untraceable`, and every step runs the model's own forward.
"""

import inspect
import operator
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from convoy.model.nested import CallForm
from convoy.model.operation import fill
from convoy.model.split_rules import MODULES, OTHER_FUNCTIONS
from convoy.model.tracing.copies import hooked
from convoy.model.tracing.effects import (
    batch_norm_of,
    called,
    counted_norm,
    has_effect,
    mutates,
    unsupported_in_place,
    written,
)
from convoy.model.tracing.node_values import Sizes, Spec, Untraceable, is_form
from convoy.model.tracing.python_state import State, changed, random_kept, subtree
from convoy.model.tracing.supported_layers import chosen_forward, replaced_by_hand
from convoy.model.tracing.trials import first_line

# torch.fx patches nn.Module while it traces, for every thread of the process.
TRACE_LOCK = threading.RLock()


@dataclass(frozen=True)
class Nodes:
    """The calls of a model's forward.

    Attributes:
        nodes: the calls in order; the last one is the output. Calls whose result is unused are left out.
        seen: paths of the modules that the trace enters, including the model itself ("").
        constants: node name -> the tensor that the forward made there without any input.
    """

    nodes: Sequence[fx.Node]
    seen: tuple[str, ...]
    constants: dict[str, Tensor] = field(default_factory=dict)


def nodes_of(model: nn.Module, meta: nn.Module, call: CallForm, specs: Sequence[Spec]) -> Nodes:
    """Trace a model's forward, which may change its Python state.

    Args:
        model: a copy that has not been traced before.
        meta: a copy on the meta device.
        specs: shape and dtype of each tensor of the call. The trace is valid for these, and for its other arguments.

    Raise Untraceable if torch.fx cannot follow the forward of the model, or of submodules.
    """
    with TRACE_LOCK, torch.enable_grad():
        tracer = _Tracer(model, meta, call)
        tracer.inputs = dict(zip(call.names, specs, strict=True))
        try:
            with random_kept(), tracer.following(model), _ConcreteTensors(model, tracer.sizes):
                tracer.trace(model)
        except Exception as error:
            if not tracer.given_up:
                raise Untraceable(_why(error)) from None
        if tracer.given_up:
            raise Untraceable(next(iter(tracer.given_up.values())), *tracer.given_up)
    graph = tracer.graph
    # The executor counts a batch norm's batches, once per training step. So the forward must count exactly like this.
    counted = Counter(path for node in graph.nodes if (path := counted_norm(model, node)) is not None)
    norms = Counter(path for node in graph.nodes if (path := batch_norm_of(model, node)) is not None)
    for path in counted | norms:
        norm: Any = model.get_submodule(path)
        if counted[path] != norms[path] * (norm.training and norm.num_batches_tracked is not None):
            raise Untraceable("its forward does not count batches as torch's batch norm does", path)
    graph.eliminate_dead_code(is_impure_node=lambda node: has_effect(model, node))
    constants: Any = {name: t for t, name in tracer.tensor_attrs.items() if name.startswith("_tensor_constant")}
    return Nodes(tuple(graph.nodes), ("", *dict.fromkeys(tracer.seen)), constants)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, model: nn.Module, meta: nn.Module, call: CallForm) -> None:
        super().__init__()
        self.root, self.sizes, self.call = model, Sizes(model, meta), call
        self.inputs: dict[str, Spec] = {}
        self.seen: list[str] = []
        self.given_up: dict[str, str] = {}
        self.traced_func_name = chosen_forward(model) or "forward"
        state = State(subtree(model))
        self._before, names = state.forms(), state.names
        self.types_asked = "is_tensor" in names or ("isinstance" in names and "Tensor" in names)
        self._thread = threading.get_ident()
        self._keys = {id(t): key for key, t in (*model.named_parameters(), *model.named_buffers())}
        self._parameters: dict[str, fx.Proxy] = {}
        self._is_leaf = False
        self._autocasts = _autocasts()

    @contextmanager
    def following(self, module: nn.Module, path: str = "") -> Iterator[None]:
        """Refuse a forward that changes Python state, or reads values that cannot be compared. Changes are not undone."""
        if "forward" in vars(module) and not chosen_forward(module):
            raise Untraceable("its forward was replaced by hand")
        own = State({"": module})
        # Code with this name may call a submodule's forward directly, without `call_module`.
        inner = subtree(self.root, path).values() if "forward" in own.names else ()
        asked = next(filter(None, (State({"": each}).asked() for each in inner)), "")
        if reads := own.asked() or own.hidden() or asked:
            raise Untraceable(f"its forward reads {reads}")
        if own.function:
            raise Untraceable(f"its forward calls {own.function}, which has its own backward")
        state = State(subtree(self.root, path))
        before, buffers = state.forms(), [id(b) for m in module.modules() for b in m._buffers.values()]
        with random_kept() as drawn:
            yield
            if drawn():
                raise Untraceable("its forward draws random numbers of its own")
            if [id(b) for m in module.modules() for b in m._buffers.values()] != buffers:
                raise Untraceable("its forward assigns a buffer")
        if names := [repr(name) for name in changed(before, state.forms())]:
            raise Untraceable(f"its forward changes {', '.join(names[:3])}")

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # torch.fx patches nn.Module for all threads: ignore models that other threads run.
        if threading.get_ident() != self._thread or self.sizes.evaluating:
            return forward(*args, **kwargs)
        self._refuse_surroundings(sys._getframe(1))
        path, stack = self.path_of_module(m), self.module_stack.copy()
        # A parametrized weight is computed in separate layers, so the trace enters the module.
        of_torch = not is_parametrized(m) and super().is_leaf_module(m, path) and all(map(_is_of_torch, m.modules()))
        self._is_leaf = type(m) in MODULES or of_torch
        if self._is_leaf and (names := self._changed(path)):
            raise Untraceable(f"its forward changes {names[0]!r}")
        inside = m.modules() if self._is_leaf else [m]
        try:
            if path not in self.given_up:
                if why := next(filter(None, map(_unlike_its_class, inside)), ""):
                    raise Untraceable(why)
                if self._is_leaf:
                    return super().call_module(m, forward, args, kwargs)
                self.seen.append(path)
                with self.following(m, path):
                    return super().call_module(m, forward, args, kwargs)
        except Exception as error:  # a forward may raise anything on a proxy
            self.given_up[path] = _why(error)
        # The rest of this trace only shows which other modules cannot be traced.
        self.module_stack, self._is_leaf = stack, True
        return super().call_module(m, forward, args, kwargs)

    def _changed(self, path: str) -> list[str]:
        """Return the attributes of a module, and of those in it, that the forward has changed so far."""
        return [n for n, form in State(subtree(self.root, path)).forms().items() if form != self._before.get(n)]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        return self._is_leaf  # `call_module` has decided

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:  # noqa: ARG002
        placed = [self.create_proxy("placeholder", name, (), {}) for name in self.inputs]
        for proxy, spec in zip(placed, self.inputs.values(), strict=True):
            self.sizes.place(proxy.node, spec)
        args, kwargs = fill(self.call.arguments, placed)
        return partial(root_fn, **kwargs), [self.root, *args]

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:  # noqa: ARG002
        if not isinstance(attr_val, Tensor) or self.sizes.evaluating or id(attr_val) not in self._keys:
            return attr_val
        key = self._keys[id(attr_val)]
        if key not in self._parameters:
            self._parameters[key] = self.create_proxy("get_attr", key, (), {})
        return self._parameters[key]

    def create_arg(self, a: Any) -> Any:
        return a.node if issubclass(type(a), fx.Proxy) else super().create_arg(a)  # isinstance may say Tensor

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(kind, *args, **kwargs)
        # A trace has no `with` blocks, so record torch.no_grad() here, except for parameters: all their uses share a node.
        node.meta["recomputed"] = _repeats() > 0
        node.meta["no_grad"] = not torch.is_grad_enabled() and kind != "get_attr"
        stack = node.meta.get("nn_module_stack")
        node.meta["where"] = next(reversed(stack.values()))[0] if stack else ""
        self._refuse_surroundings(sys._getframe(1))
        if kind == "call_function" and not (
            _is_of_torch(node.target) or is_form(node) or node.target in OTHER_FUNCTIONS
        ):
            raise Untraceable(f"its forward calls {called(node)}, which torch.fx.wrap hides")
        if mutates(self.root, node) or unsupported_in_place(node):
            held = written(node)
            if held is not None and counted_norm(self.root, node) is None:
                raise Untraceable(f"its forward changes {str(held.target)!r}")
        return node

    def _refuse_surroundings(self, frame: Any) -> None:
        """Refuse contexts that a trace would lose: autocast, saved-tensor hooks, autograd.Function."""
        if _autocasts() > self._autocasts:
            raise Untraceable("its forward switches autocast on or off")
        if _repeats() > 1:
            raise Untraceable("its forward has hooks on what autograd keeps, or a checkpoint within a checkpoint")
        while frame is not None and frame.f_code not in _BOUNDARIES:
            if frame.f_code is _APPLY:
                raise Untraceable("its forward calls an autograd.Function, which has its own backward")
            frame = frame.f_back

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Sized(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        try:
            return bool(self.sizes.number(obj.node))
        except LookupError:
            return super().to_bool(obj)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        length = self.sizes.length(obj.node)
        return super().iter(obj) if length is None else iter([obj[i] for i in range(length)])  # type: ignore[index]


def _is_of_torch(thing: Any) -> bool:
    """Return whether a function, or a module's class, has no Python that may behave differently in a later step."""
    home = getattr(type(thing) if isinstance(thing, nn.Module) else thing, "__module__", None) or "torch"
    return home.partition(".")[0] in ("torch", "torchvision", "_operator", "operator", "math", "builtins")


def _unlike_its_class(module: nn.Module) -> str:
    """Return why a module's call is not what its class computes, or ""."""
    name = replaced_by_hand(module)
    return f"its {name} was replaced by hand" if name else "it has hooks" if hooked(module) else ""


_APPLY = inspect.unwrap(torch.autograd.Function.apply.__func__).__code__  # type: ignore[attr-defined]
_BOUNDARIES = (_Tracer.call_module.__code__, nodes_of.__code__)


def _repeats() -> int:
    """Return how often torch.utils.checkpoint (use_reentrant=False) repeats calls made here in backward. 2: it depends."""
    autograd: Any = torch._C._autograd
    if (hooks := autograd._top_saved_tensors_default_hooks(True)) is None:
        return 0
    autograd._pop_saved_tensors_default_hooks()
    outer = autograd._top_saved_tensors_default_hooks(True)
    autograd._push_saved_tensors_default_hooks(*hooks)
    return 1 if outer is None and getattr(hooks[0], "__module__", "") == checkpoint.__name__ else 2


def _autocasts() -> int:
    """Return the number of active autocast contexts."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


class _ConcreteTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that refuses operations on parameters and random numbers, whose results a trace would freeze."""

    def __init__(self, model: nn.Module, sizes: Sizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes = sizes
        named = (*model.named_parameters(), *model.named_buffers())
        self._held = {t.untyped_storage()._cdata: key for key, t in named}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._sizes.evaluating:
            if torch.Tag.nondeterministic_seeded in func.tags:
                raise Untraceable("its forward draws random numbers of its own")
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and (key := self._held.get(value.untyped_storage()._cdata)) is not None:
                    raise Untraceable(f"its forward computes with {key!r} where torch.fx cannot see it")
        return func(*args, **(kwargs or {}))


def _why(error: Exception) -> str:
    """Return why a forward cannot be traced, with the place in the user's code."""
    if isinstance(error, Untraceable):
        return str(error)
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(inside)]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"torch.fx cannot trace it: {first_line(error)}{where}"


class _Recorded:
    """A base of proxies that refuses actions which torch.fx would silently lose."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node", "root", "attr", "_node"):
            raise TypeError(f"its forward sets {name!r} of a tensor")
        super().__setattr__(name, value)

    def __str__(self) -> str:
        raise TypeError("its forward makes a text of a tensor, or of its size or device")


def _in_place(name: str) -> Callable[[Any, Any], Any]:
    """Return the method for `x += y` if `name` is "add". It overwrites a tensor, which may have other names; not a number."""

    def call(x: Any, y: Any) -> Any:
        pair = x.tracer.sizes.pair(x.node)
        if pair is not None and not isinstance(pair[0], Tensor):
            return NotImplemented
        return x.tracer.create_proxy("call_function", getattr(operator, f"i{name}"), (x, y), {})

    return call


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    setattr(_Recorded, f"__i{_name}__", _in_place(_name))


class _Attribute(_Recorded, fx.proxy.Attribute):
    pass


class _Sized(_Recorded, fx.Proxy):
    """A proxy that knows its size: `.shape`, `.size()`, `.dim()`, `.ndim` and `len` are numbers.

    Lengths that depend on the batch size are proxies. So are all lengths if the size is unknown.
    """

    tracer: _Tracer

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # so that `isinstance(x, Tensor)` answers as for a tensor
        asks = self.tracer.types_asked and not self.tracer.sizes.evaluating
        return Tensor if asks and self._is_tensor() else _Sized

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "ndim"):
            shape = self.tracer.sizes.shape(self.node)
            if shape is not None and name == "ndim":
                return len(shape)
            if shape is not None:
                symbolic: Any = _Attribute(self, "shape") if None in shape else None
                return _Shape(symbolic[i] if n is None else n for i, n in enumerate(shape))
        if not hasattr(Tensor, name) and self._is_tensor():
            if self.node.op == "get_attr":
                raise Untraceable(f"its forward reads {name!r} of {self.node.target!r}")
            raise AttributeError(f"a tensor has no attribute {name!r}")  # as `hasattr` expects
        return _Attribute(self, name)

    def _is_tensor(self) -> bool:
        pair = self.tracer.sizes.pair(self.node)
        return pair is not None and isinstance(pair[0], Tensor)

    def size(self, dim: int | None = None) -> Any:
        if self.tracer.sizes.shape(self.node) is None:
            return _Attribute(self, "size")(*(() if dim is None else (dim,)))
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> Any:
        shape = self.tracer.sizes.shape(self.node)
        return _Attribute(self, "dim")() if shape is None else len(shape)

    def __len__(self) -> int:
        length = self.tracer.sizes.length(self.node)
        return super().__len__() if length is None else length


class _Shape(tuple[Any, ...]):
    """A shape in which the lengths that depend on the batch size are proxies."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return _Shape(found) if isinstance(index, slice) else found

    def numel(self) -> Any:
        result: Any = 1  # not math.prod, which torch.fx records
        for extent in self:
            result = extent * result
        return result
