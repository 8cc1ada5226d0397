"""Traces an nn.Module into torch.fx nodes, with untraceable submodules as leaves."""

import inspect
import math
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from convoy.errors import InputError
from convoy.model.layer_rules import is_registered
from convoy.model.tracing.effects import counts_batches, has_effect, mutates, unsupported_in_place, written
from convoy.model.tracing.kinds import chosen_forward, computes_its_rows, has_hooks, replaced_by_hand
from convoy.model.tracing.opaque import first_line
from convoy.model.tracing.python_state import State, random_kept, subtree
from convoy.model.tracing.sizes import Pair, Sized, Sizes, Spec, evaluating, items, meta_input

# torch.fx patches nn.Module while it traces, for every thread of the process.
TRACE_LOCK = threading.RLock()


class Untraceable(Exception):  # noqa: N818 - it ends one way of tracing, not the program
    """A module cannot be traced into layers and stays whole; the text says why.

    Attributes:
        where: path of the module; "" is the model itself.
    """

    def __init__(self, why: str, where: str = "") -> None:
        super().__init__(why)
        self.where = where


@dataclass(frozen=True)
class Nodes:
    """The calls of a model's forward.

    Attributes:
        nodes: in order; the last one is its output. Calls that nobody reads are left out.
        seen: paths of the modules that the trace sees through, the model itself ("") among them.
        whole: why a module stays whole, by path, where there is more to say than that it does.
        leaves: paths of the submodules that stay whole, but for torch's own.
        constants: tensors that the forward makes out of nothing, by the name that their nodes have.
    """

    nodes: Sequence[fx.Node]
    seen: tuple[str, ...]
    whole: dict[str, str] = field(default_factory=dict)
    leaves: tuple[str, ...] = ()
    constants: dict[str, Tensor] = field(default_factory=dict)


def nodes_of(
    model: nn.Module,
    meta: nn.Module,
    specs: Sequence[Spec],
    leaves: Collection[str] = (),
    known: "Followed | None" = None,
) -> Nodes:
    """The calls of a model's forward. The model's state is left as it was.

    Args:
        meta: a copy of the model on the meta device.
        specs: of the inputs that it is called with; its other arguments keep their defaults. The calls hold for these sizes.
        leaves: paths of submodules to keep whole, beside those that must be.
        known: which submodules can be followed, found out before; it grows.

    Raises:
        Untraceable: its own forward does what torch.fx cannot follow.
        InputError: it takes more inputs, or fewer.
    """
    with TRACE_LOCK, torch.enable_grad():
        tracer = _Tracer(dict(zip(model.modules(), meta.modules(), strict=True)), leaves, known, specs)
        names = _inputs_of(model, len(specs))
        with _watched(model):
            why = tracer.follow(model, names, {})
        if why is not None:
            raise Untraceable(why)
        graph = tracer.graph
        graph.eliminate_dead_code(is_impure_node=lambda node: has_effect(model, node))
    constants = {
        name: t for t, name in tracer.tensor_attrs.items() if isinstance(t, Tensor) and not _holds(model, name)
    }
    whole = tuple(str(n.target) for n in graph.nodes if n.op == "call_module" and not _is_of_torch(model, n))
    return Nodes(tuple(graph.nodes), ("", *dict.fromkeys(tracer.seen)), tracer.whole, whole, constants)


def _is_of_torch(model: nn.Module, node: fx.Node) -> bool:
    return type(model.get_submodule(str(node.target))).__module__.startswith("torch.nn")


def _holds(model: nn.Module, path: str) -> bool:
    holder, _, name = path.rpartition(".")
    found = model.get_submodule(holder)
    return any(name in held for held in (vars(found), found._parameters, found._buffers))


def _inputs_of(model: nn.Module, inputs: int) -> tuple[str, ...]:
    """A name for each input of the model."""
    try:
        signature = inspect.signature(type(model).forward)
    except (TypeError, ValueError):
        return tuple(f"input_{i}" for i in range(inputs))
    parameters = list(signature.parameters.values())[1:]
    free = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is p.empty for p in positional)
    if inputs < needed:
        raise InputError(f"the model takes more inputs than the {inputs} of the example: give all of them")
    if inputs > len(positional) and not free:
        raise InputError(f"the example has {inputs} inputs, the model takes another number: give each of them")
    if missing := [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]:
        raise InputError(f"the model needs the keyword argument {missing[0]!r}: give it a default in forward()")
    names = [p.name for p in positional[:inputs]]
    return (*names, *(f"input_{i}" for i in range(len(names), inputs)))


# --- the tracer ------------------------------------------------------------------------------------------------------

Followed = dict[Any, dict[str, str | None]]
"""By submodule and arguments, why it cannot be traced, or None: for the sizes that it is given ("" for whatever sizes)."""


class _StaysWhole(Exception):  # noqa: N818 - ends the tracing of one module
    """The forward of a module does what a trace would lose."""


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(
        self,
        twins: Mapping[nn.Module, nn.Module],
        leaves: Collection[str] = (),
        known: "Followed | None" = None,
        specs: Sequence[Spec] = (),
    ) -> None:
        super().__init__()
        self.twins, self.leaves, self.specs = twins, leaves, specs
        self.thread = threading.get_ident()
        self.seen: list[str] = []
        self.whole: dict[str, str] = {}
        self.known: Followed = {} if known is None else known
        self._held: dict[int, str] | None = None
        self._given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def follow(self, module: nn.Module, given: Any, keywords: dict[str, Any]) -> str | None:
        """Trace a module as the root; returns why that is not possible, or None.

        Args:
            given: the names of its inputs, or the arguments of a call of it, with a Proxy for each tensor.
        """
        self._given = (tuple(given), keywords)
        state = State(subtree(module))
        self.sizes = Sizes(module, self.twins, state.names)
        self.traced_func_name = chosen_forward(module) or "forward"
        if "forward" in vars(module) and not chosen_forward(module):
            return "its forward was replaced by hand"
        own = State({"": module})
        if reads := own.asked() or own.hidden():
            return f"its forward reads {reads}"
        before = state.forms()
        _TRACERS.append(self)
        try:
            with state.kept(), random_kept() as drawn:
                self.trace(module)
                if drawn():
                    return "its forward draws random numbers of its own"
                after = state.forms()
        except _StaysWhole as why:
            return str(why)
        except Exception as error:  # whatever its forward does with a proxy
            return _why_failed(error)
        finally:
            _TRACERS.pop()
        changed = [k for k in {**before, **after} if before.get(k) != after.get(k)]
        return f"its forward changes {', '.join(map(repr, changed[:3]))}" if changed else None

    def create_args_for_root(
        self,
        root_fn: Any,
        is_module: bool,  # noqa: ARG002
        concrete_args: Any = None,  # noqa: ARG002
    ) -> tuple[Any, list[Any]]:
        def input_of(name: str, pair: Callable[[], Pair | None]) -> fx.Proxy:
            proxy = self.create_proxy("placeholder", name, (), {})
            self.sizes.give(proxy.node, pair)
            return proxy

        def placed(a: Any) -> Any:
            if isinstance(a, fx.Proxy):
                return input_of(a.node.name, partial(a.tracer.sizes.pair, a.node))  # type: ignore[attr-defined]
            return _mapped(a, placed)

        given, keywords = self._given
        if given and all(isinstance(name, str) for name in given) and not keywords and len(_TRACERS) == 1:
            pairs = (partial(lambda s: (meta_input(s, 0), meta_input(s, 1)), spec) for spec in self.specs)
            return root_fn, [self.root, *map(input_of, given, pairs)]
        filled = {key: placed(value) for key, value in keywords.items()}
        return (lambda root, *args: root_fn(root, *args, **filled)), [self.root, *map(placed, given)]

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:  # noqa: ARG002
        """As torch.fx has it, without a search through all parameters at every access."""
        if not isinstance(attr_val, Tensor) or evaluating():
            return attr_val
        if self._held is None:
            held = [*self.root.named_parameters(), *self.root.named_buffers()]
            self._held = {id(tensor): key for key, tensor in held}
        key = self._held.get(id(attr_val))
        if key is None:
            return attr_val
        if key not in parameter_proxy_cache:
            parameter_proxy_cache[key] = self.create_proxy("get_attr", key, (), {})
        return parameter_proxy_cache[key]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        path = module_qualified_name
        if (name := replaced_by_hand(m)) and path not in self.leaves:
            self.whole[path] = f"its {name} was replaced by hand"
            return True
        if path in self.leaves or is_registered(m):
            return True
        if has_hooks(m):
            self.whole[path] = "it has hooks"
            return True
        # Every device computes the weight from its parameters, in a layer of its own; then the layer is an ordinary one.
        computed = parametrize.is_parametrized(m) and not computes_its_rows(m)
        if is_by_heads(m, *self._call):
            self.seen.append(path)
            return False
        if not computed and super().is_leaf_module(m, path):
            return True
        why = self._why_not(m)
        if why is not None:
            self.whole[path] = why
        else:
            self.seen.append(path)
        return why is not None

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # torch.fx patches nn.Module for all threads: a model that another thread runs is not part of this trace.
        if threading.get_ident() != self.thread or evaluating():
            return forward(*args, **kwargs)
        self._call = (args, kwargs)
        return super().call_module(m, partial(attend, m) if is_by_heads(m, args, kwargs) else forward, args, kwargs)

    def create_arg(self, a: Any) -> Any:
        return a.node if issubclass(type(a), fx.Proxy) else super().create_arg(a)  # it passes for a tensor

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(kind, *args, **kwargs)
        # A trace has no `with` blocks, so torch.no_grad() is recorded here. A parameter has one node, made at its first
        # use, for all its uses.
        node.meta["no_grad"] = not torch.is_grad_enabled() and kind != "get_attr"
        stack = node.meta.get("nn_module_stack")
        node.meta["where"] = next(reversed(stack.values()))[0] if stack else ""
        node.meta["no_autocast"] = tuple(_AUTOCAST_OFF)
        if _AUTOCAST_OFF and (kind == "call_module" or node.target is nn.functional.batch_norm):
            raise _StaysWhole("its forward switches autocast off around a layer")
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise _StaysWhole("its forward switches autocast on")
        if mutates(self.root, node) or unsupported_in_place(node):
            held = written(node)
            if held is not None and not counts_batches(self.root, held):
                raise _StaysWhole(f"its forward changes {str(held.target)!r}")
        return node

    def _why_not(self, module: nn.Module) -> str | None:
        # Python branches on plain arguments: with `pre_logits=False` given, `if pre_logits` can be traced.
        args, kwargs = self._call
        verdicts = self.known.setdefault((module, repr(_mapped((args, kwargs), _without_proxy))), {})
        sizes = self._sizes_given() if verdicts and "" not in verdicts else ""
        if sizes not in verdicts:
            tracer = _Tracer(self.twins, (), self.known)
            why = tracer.follow(module, args, kwargs)
            sizes = self._sizes_given() if tracer.sizes.asked else ""
            verdicts[sizes] = why
        return verdicts[sizes]

    def _sizes_given(self) -> str:
        """The shapes of the tensors that the module is called with, which nobody evaluates unless a forward asks."""
        pairs: list[Pair | None] = []
        _mapped(self._call, lambda a: pairs.append(self.sizes.pair(a.node)) if isinstance(a, fx.Proxy) else None)
        return repr(pairs)

    # --- what a forward asks -----------------------------------------------------------------------------------------

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Sized(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        try:
            return bool(self.sizes.number(obj.node))
        except LookupError:
            return super().to_bool(obj)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        found = items(obj)
        return super().iter(obj) if found is None else found


_TRACERS: list[_Tracer] = []
_AUTOCAST_OFF: list[str] = []
"""The types of devices on which a forward has switched autocast off; "" is the one that computes, whatever it is."""


def _without_proxy(value: Any) -> Any:
    return "tensor" if isinstance(value, fx.Proxy) else value


def _mapped(value: Any, f: Any) -> Any:
    """A tuple, list or dict with `f` applied to each item; another value as it is."""
    match value:
        case tuple() if hasattr(value, "_fields"):
            return type(value)(*(_or_mapped(v, f) for v in value))
        case tuple() | list():
            return type(value)(_or_mapped(v, f) for v in value)
        case dict():
            return {k: _or_mapped(v, f) for k, v in value.items()}
    return value


def _or_mapped(value: Any, f: Any) -> Any:
    return f(value) if not isinstance(value, tuple | list | dict) else _mapped(value, f)


@contextmanager
def _watched(model: nn.Module) -> Iterator[None]:
    """While a model is traced: what torch.fx would lose is noticed."""
    apply, enter = torch.autograd.Function.__dict__["apply"], saved_tensors_hooks.__enter__
    thread = threading.get_ident()

    def noted_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        original = apply.__get__(None, cls)
        if threading.get_ident() != thread or not any(issubclass(type(a), fx.Proxy) for a in (*args, *kwargs.values())):
            return original(*args, **kwargs)
        if cls is checkpoint.CheckpointFunction:
            raise _StaysWhole("its forward is checkpointed")
        # A backward of its own: the call is one layer.
        return _TRACERS[-1].create_proxy("call_function", original, args, kwargs)

    def noted_enter(hooks: Any) -> Any:
        if threading.get_ident() == thread:
            raise _StaysWhole("its forward is checkpointed, or has hooks on what autograd keeps")
        return enter(hooks)

    torch.autograd.Function.apply = classmethod(noted_apply)  # type: ignore[assignment, method-assign]
    saved_tensors_hooks.__enter__ = noted_enter  # type: ignore[method-assign]
    try:
        with _Concrete(model), _autocast_watched(thread):
            yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]


@contextmanager
def _autocast_watched(thread: int) -> Iterator[None]:
    """While a model is traced: notices where its forward switches autocast off."""
    cls = torch.autocast
    init, enter, leave = cls.__init__, cls.__enter__, cls.__exit__

    def noted_init(self: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
        computing = threading.get_ident() == thread and isinstance(device_type, fx.Proxy)  # `x.device.type`
        init(self, "cpu" if computing else device_type, *args, **kwargs)
        self._convoy_noted = "" if computing else device_type

    def noted_enter(self: Any) -> Any:
        if threading.get_ident() == thread and not self._enabled:
            _AUTOCAST_OFF.append(self._convoy_noted)
        return enter(self)  # type: ignore[no-untyped-call]

    def noted_leave(self: Any, *args: Any) -> Any:
        if threading.get_ident() == thread and not self._enabled:
            _AUTOCAST_OFF.pop()
        return leave(self, *args)

    cls.__init__, cls.__enter__, cls.__exit__ = noted_init, noted_enter, noted_leave  # type: ignore[method-assign]
    try:
        yield
    finally:
        cls.__init__, cls.__enter__, cls.__exit__ = init, enter, leave  # type: ignore[method-assign]
        _AUTOCAST_OFF.clear()


class _Concrete(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the tensors that a forward computes while it is traced: a trace would keep what came of them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        held = [*model.named_parameters(), *model.named_buffers()]
        self._held = {t.untyped_storage()._cdata: key for key, t in held}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if evaluating():
            return func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _StaysWhole("its forward draws random numbers of its own")
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and (key := self._held.get(value.untyped_storage()._cdata)) is not None:
                raise _StaysWhole(f"its forward computes with {key!r} where torch.fx cannot see it")
        return func(*args, **(kwargs or {}))


def _why_failed(error: BaseException) -> str:
    """What an error in a forward says, and where in the user's code it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    own = [f for f in frames if not f.filename.startswith(inside)]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    if any(Path(f.filename) == Path(checkpoint.__file__) for f in frames):
        return f"its forward is checkpointed{where}"
    return f"torch.fx cannot trace it: {first_line(error)}{where}"


# --- torch's attention as the calls that it stands for: queries, keys and values by filter, then each head for itself -----


def is_by_heads(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is attention of rows of the batch without masks or dropout, which `attend` computes as torch does."""
    if type(module) is not nn.MultiheadAttention or not module.batch_first or not module._qkv_same_embed_dim:
        return False
    if module.bias_k is not None or module.add_zero_attn or (module.dropout and module.training):
        return False
    if type(module.out_proj) is not NonDynamicallyQuantizableLinear or has_hooks(module.out_proj):
        return False  # torch never calls it, it reads its weight
    given = inspect.signature(nn.MultiheadAttention.forward).bind(module, *args, **kwargs).arguments
    plain = all(given.get(name) is None for name in ("key_padding_mask", "attn_mask")) and not given.get("is_causal")
    inputs = [given[name] for name in ("query", "key", "value")]
    return plain and all(isinstance(x, fx.Proxy) and _axes(x) == 3 for x in inputs)


def _axes(x: fx.Proxy) -> int | None:
    shape = x.tracer.sizes.shape(x.node)  # type: ignore[attr-defined]
    return None if shape is None else len(shape)


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    key_padding_mask: None = None,  # noqa: ARG001
    need_weights: bool = True,
    attn_mask: None = None,  # noqa: ARG001
    average_attn_weights: bool = True,
    is_causal: bool = False,  # noqa: ARG001
) -> tuple[Any, Any]:
    """Output (samples, queries, features), and the weights where they are asked for; nobody computes what nobody reads."""
    heads = []
    for number, x in enumerate((query, key, value)):
        rows = slice(number * module.embed_dim, (number + 1) * module.embed_dim)
        bias = None if module.in_proj_bias is None else module.in_proj_bias[rows]
        projected: Any = nn.functional.linear(x, module.in_proj_weight[rows], bias)
        heads.append(projected.unflatten(-1, (module.num_heads, -1)).transpose(1, 2))
    q, k, v = heads
    y = module.out_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    if not need_weights:
        return y, None
    weights = (q @ k.transpose(-2, -1) / math.sqrt(module.head_dim)).softmax(-1)
    return y, weights.mean(1) if average_attn_weights else weights
