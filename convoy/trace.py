"""nn.Module -> graph and operations, by torch.fx and the meta device.

What torch.fx cannot trace becomes one opaque layer: a submodule where that is enough, else the whole model. Two checks on
random numbers keep that honest: the trace must compute what the model computes, and an opaque layer that is to be split by
samples must give each sample the same answer alone as in company.
"""

import copy
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from convoy.errors import InputError
from convoy.graph import Graph, Kind, Layer, Parameter
from convoy.operation import IN_PLACE, BatchExtent, Operation, Ref, kind_of_call, kind_of_module

# torch.fx patches nn.Module while it traces, for every thread of the process.
_ONE_AT_A_TIME = threading.RLock()

# Two batch sizes tell extents that follow the batch from extents that do not.
_BATCHES = (2, 3)


@dataclass(frozen=True, slots=True)
class Traced:
    """A model taken apart: the value that plans read, the calls that execution makes.

    Attributes:
        graph: the layers.
        operations: what each layer calls, by layer name.
        result: what the model returns, with `Ref(i)` for the i-th of `graph.outputs`.
    """

    graph: Graph
    operations: Mapping[str, Operation]
    result: Any


class _Opaque(Exception):
    """The model as a whole cannot be taken apart; the text says why."""


def trace(model: nn.Module, example: Tensor | Sequence[Tensor], *, training: bool = True) -> Traced:
    """Take a model apart. The model itself is left as it is.

    Args:
        model: an ordinary module on any device; its inputs are tensors whose first axis is the batch.
        example: one batch of each input; only shape and dtype matter.
        training: trace what the model does in training (dropout, batch statistics, auxiliary outputs) or in evaluation.

    Raises:
        InputError: the model does not run on the example, or returns something else than tensors.
    """
    examples = (example,) if isinstance(example, Tensor) else tuple(example)
    if not examples or any(e.dim() == 0 for e in examples):
        raise InputError("the example must be a batch: tensors whose first axis is the batch; give e.g. x[:2]")
    local = copy.deepcopy(model).cpu()
    if not training:
        local.eval()
    elif not local.training:
        local.train()
    specs = [(tuple(e.shape[1:]), e.dtype) for e in examples]
    with _ONE_AT_A_TIME:
        try:
            traced = _Tracing(local, specs).run()
            _same_answer(local, traced, specs)
            return traced
        except _Opaque as reason:
            return _whole(local, specs, str(reason))


# --- torch.fx, with untraceable submodules as leaves -----------------------------------------------------------------


class _Tracer(fx.Tracer):
    def __init__(self) -> None:
        super().__init__()
        self.traceable: dict[nn.Module, bool] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) or not self._can_trace(m)

    def _can_trace(self, module: nn.Module) -> bool:
        if module not in self.traceable:
            inner = _Tracer()
            inner.traceable = self.traceable
            try:
                inner.trace(module)
                self.traceable[module] = True
            except Exception:  # whatever its forward does with a proxy, the answer is the same: it stays whole
                self.traceable[module] = False
        return self.traceable[module]


def _fx_nodes(model: nn.Module) -> list[fx.Node]:
    tracer = _Tracer()
    try:
        graph = tracer.trace(model)
    except Exception as error:
        raise _Opaque(f"torch.fx cannot trace it: {_first_line(error)}") from None
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output") or _mutates(model, node))
    return list(graph.nodes)


def _mutates(model: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return bool(getattr(model.get_submodule(str(node.target)), "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return bool(node.kwargs.get("inplace")) or name in IN_PLACE


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


# --- from nodes to layers --------------------------------------------------------------------------------------------


class _Tracing:
    """One pass over the nodes: values on the meta device for two batch sizes, a layer for every tensor."""

    def __init__(self, model: nn.Module, specs: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
        self.model = model
        self.specs = specs
        self.meta = copy.deepcopy(model).to("meta")
        self.values: dict[fx.Node, tuple[Any, Any]] = {}
        self.names: dict[fx.Node, str] = {}
        self.layers: dict[str, Layer] = {}
        self.operations: dict[str, Operation] = {}
        self.alias: dict[fx.Node, fx.Node] = {}
        self.keys = _canonical_keys(model)
        self.uses: dict[str, list[str]] = {}

    def run(self) -> Traced:
        nodes = _fx_nodes(self.model)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            for node in nodes:
                if node.op == "output":
                    return self._finish(node)
                self._visit(node, counter)
        raise _Opaque("its forward returns nothing")

    def _visit(self, node: fx.Node, counter: FlopCounterMode) -> None:
        before = counter.get_total_flops()
        try:
            values = tuple(self._evaluate(node, i) for i in range(2))
        except _Opaque:
            raise
        except Exception as error:
            raise _Opaque(f"{node.name} does not run on the meta device: {_first_line(error)}") from None
        self.values[node] = (values[0], values[1])
        # Both batch sizes were counted.
        flop = (counter.get_total_flops() - before) // sum(_BATCHES)
        if _holds_tensors(values[0]):
            self._add_layer(node, flop)
        if _mutates(self.model, node):
            mutated = node.all_input_nodes[0]
            self.alias[self._final(mutated)] = node

    def _final(self, node: fx.Node) -> fx.Node:
        """The node that holds today's value of `node`: a later in-place call may have overwritten it."""
        while node in self.alias:
            node = self.alias[node]
        return node

    def _evaluate(self, node: fx.Node, which: int) -> Any:
        def value(n: fx.Node) -> Any:
            return self.values[self._final(n)][which]

        if node.op == "placeholder":
            index = len(self.names)
            if index >= len(self.specs):
                if node.args:
                    raise _Opaque(f"its forward has an optional argument {node.name!r}")
                raise InputError(
                    f"the model takes more inputs than the {len(self.specs)} of the example: give all of them"
                )
            shape, dtype = self.specs[index]
            return torch.empty((_BATCHES[which], *shape), dtype=dtype, device="meta")
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self.meta)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
        if node.op == "call_module":
            module = self.meta.get_submodule(str(node.target))
            if kind_of_module(module) == "opaque" and not _torch_leaf(module):
                # Its Python may look at numbers, which meta tensors have not: run the real one on random numbers.
                return _to_meta(self.model.get_submodule(str(node.target)), args, kwargs)
            return module(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _add_layer(self, node: fx.Node, flop: int) -> None:
        refs: list[str] = []
        args, kwargs = self._arguments(node, refs)
        operation = self._operation(node, args, kwargs)
        name = self._name(node)
        inputs = tuple(refs)
        kind = self._kind(node, operation, inputs)
        parameters = self._parameters(node, name)
        layer = self._shaped(node, Layer(name, kind, inputs, (), parameters, flop=flop))
        layer = replace(self._detailed(node, operation, layer), random=self._draws(node, operation))
        self.names[node] = name
        self.layers[name], self.operations[name] = layer, operation

    def _arguments(self, node: fx.Node, refs: list[str]) -> tuple[Any, Any]:
        """Arguments with every tensor as a Ref and every size that follows the batch as a BatchExtent."""

        def lower(n: fx.Node) -> Any:
            n = self._final(n)
            if n in self.names:
                if self.names[n] not in refs:
                    refs.append(self.names[n])
                return Ref(refs.index(self.names[n]))
            return _folded(n, *self.values[n])

        return fx.node.map_arg((node.args, node.kwargs), lower)  # type: ignore[no-any-return]

    def _operation(self, node: fx.Node, args: Any, kwargs: Any) -> Operation:
        kwargs = {k: (False if k == "inplace" else v) for k, v in kwargs.items()}
        match node.op:
            case "placeholder":
                return Operation("input", node.name)
            case "get_attr":
                return Operation("attribute", str(node.target))
            case "call_module":
                return Operation("module", str(node.target), args, kwargs)
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        pure = IN_PLACE.get(name)
        if pure is None:
            return Operation("method" if node.op == "call_method" else "function", node.target, args, kwargs)
        for home in (operator, torch, nn.functional):
            if hasattr(home, pure):
                return Operation("function", getattr(home, pure), args, kwargs)
        raise _Opaque(f"{node.name} works in place and has no pure form")

    def _name(self, node: fx.Node) -> str:
        name = str(node.target) if node.op in ("call_module", "get_attr") else node.name
        if name in self.layers:
            name = f"{name}#{sum(other.partition('#')[0] == name for other in self.layers) + 1}"
        return name

    def _kind(self, node: fx.Node, operation: Operation, inputs: tuple[str, ...]) -> Kind:
        if node.op == "placeholder":
            return "input"
        if node.op == "get_attr":
            return "parameter"
        if node.target is operator.getitem and inputs and self.layers[inputs[0]].several:
            return "pick"
        if node.op == "call_module":
            return kind_of_module(self.model.get_submodule(str(node.target)))
        value = self.values[node][0]
        if not inputs or not isinstance(value, Tensor):
            return "opaque"
        first = self.layers[inputs[0]]
        return kind_of_call(operation, len(inputs), first.shape, tuple(value.shape[1:]))

    def _parameters(self, node: fx.Node, name: str) -> dict[str, Parameter]:
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(self.model)
            is_buffer = not isinstance(value, nn.Parameter)
            if str(node.target) not in self.keys:
                raise _Opaque(f"it uses the tensor {node.target!r}, which is neither a parameter nor a buffer")
            rows = {"": (value, is_buffer)}
        elif node.op == "call_module":
            module = self.model.get_submodule(str(node.target))
            rows = {key: (p, False) for key, p in module.named_parameters()}
            rows |= {key: (b, True) for key, b in module.named_buffers()}
        else:
            return {}
        result = {}
        for key, (tensor, is_buffer) in rows.items():
            full = self.keys[f"{node.target}.{key}" if key else str(node.target)]
            trainable = tensor.requires_grad and not is_buffer
            result[key] = Parameter(full, tuple(tensor.shape), trainable, is_buffer)
            self.uses.setdefault(full, []).append(name)
        return result

    def _shaped(self, node: fx.Node, layer: Layer) -> Layer:
        """Add dtype and shape per sample, and whether there is a batch axis at all."""
        small, large = self.values[node]
        layer = replace(layer, dtype=_dtype(small))
        if not isinstance(small, Tensor):
            parts = list(zip(small, large, strict=True))
            if not all(_batched(a, b) for a, b in parts):
                raise _Opaque(f"{layer.name} gives several tensors that do not all have the batch as first axis")
            return replace(layer, several=True, shape=tuple(small[0].shape[1:]))
        if _batched(small, large):
            return replace(layer, shape=tuple(small.shape[1:]))
        if small.shape != large.shape:
            raise _Opaque(f"the first axis of {layer.name} is not the batch")
        if any(self.layers[i].batched for i in layer.inputs):
            raise _Opaque(f"{layer.name} loses the batch axis")
        return replace(layer, shape=tuple(small.shape), batched=False)

    def _detailed(self, node: fx.Node, operation: Operation, layer: Layer) -> Layer:
        if layer.kind == "conv":
            module = self.model.get_submodule(str(node.target))
            return replace(layer, groups=int(module.groups))  # type: ignore[arg-type]
        if layer.kind == "batch_norm":
            norm = self.model.get_submodule(str(node.target))
            return replace(layer, statistics=norm.training or norm.running_mean is None)
        if layer.kind == "cat":
            axis = operation.args[1] if len(operation.args) > 1 else operation.kwargs.get("dim", 0)
            if not layer.batched:
                return replace(layer, kind="opaque")
            return replace(layer, axis=axis % (len(layer.shape) + 1))
        if layer.kind in ("elementwise", "join") and _mentions_batch(operation):
            layer = replace(layer, kind="opaque")
        if layer.kind == "opaque" and layer.batched and layer.inputs:
            return self._opaque(node, operation, layer)
        return layer

    def _draws(self, node: fx.Node, operation: Operation) -> bool:
        if node.op == "call_module":
            return _draws(self.model.get_submodule(str(node.target)))
        name = getattr(operation.target, "__name__", str(operation.target))
        return "dropout" in name or name in ("bernoulli", "rand_like", "randn_like", "rrelu")

    def _opaque(self, node: fx.Node, operation: Operation, layer: Layer) -> Layer:
        what = type(self.model.get_submodule(str(node.target))).__name__ if node.op == "call_module" else node.name
        reason = f"no rule splits the channels of {what}"
        dependent = self._sample_dependence(node, operation, layer)
        return replace(layer, per_sample=dependent is None, reason=f"{reason}; {dependent}" if dependent else reason)

    def _sample_dependence(self, node: fx.Node, operation: Operation, layer: Layer) -> str | None:
        """Why this layer must see the whole batch at once; None where each sample goes its own way."""
        if node.op == "call_module":
            module = self.model.get_submodule(str(node.target))
            if (norm := _batch_norm_inside(module)) is not None:
                return f"its {norm} looks at the whole batch"

        def call(batch: int, inputs: Sequence[Tensor]) -> Any:
            return call_operation(self.model, operation, inputs, batch)

        tensors = []
        for name in layer.inputs:
            source = next(n for n, known in self.names.items() if known == name)
            tensors.append(self.values[source][1])
        return _sample_check(call, tensors, [self.layers[i].batched for i in layer.inputs], self._evaluating(node))

    def _evaluating(self, node: fx.Node) -> nn.Module | None:
        return self.model.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _finish(self, output: fx.Node) -> Traced:
        names: list[str] = []

        def lower(n: fx.Node) -> Any:
            n = self._final(n)
            if n not in self.names:
                raise _Opaque("it returns something that is not a tensor")
            layer = self.layers[self.names[n]]
            if layer.several or not layer.batched:
                raise _Opaque(f"it returns {layer.name}, which is not one tensor with a batch axis")
            if layer.name not in names:
                names.append(layer.name)
            return Ref(names.index(layer.name))

        if len([n for n in self.names if n.op == "placeholder"]) != len(self.specs):
            raise InputError(
                f"the example has {len(self.specs)} inputs, the model takes another number: give each of them"
            )
        result = fx.node.map_arg(output.args[0], lower)
        shared = {name for users in self.uses.values() if len(users) > 1 for name in users}
        layers = {name: replace(layer, shared=name in shared) for name, layer in self.layers.items()}
        graph = Graph(type(self.model).__name__, layers, tuple(names))
        return Traced(graph, self.operations, result)


def call_operation(model: nn.Module, operation: Operation, inputs: Sequence[Tensor], batch: int) -> Any:
    """Call a layer's module or function on tensors that hold `batch` samples."""

    def fill(arg: Any) -> Any:
        match arg:
            case Ref(index):
                return inputs[index]
            case BatchExtent(multiple):
                return multiple * batch
            case tuple() if hasattr(arg, "_fields"):
                return type(arg)(*(fill(a) for a in arg))
            case tuple() | list():
                return type(arg)(fill(a) for a in arg)
            case dict():
                return {k: fill(v) for k, v in arg.items()}
            case slice():
                return slice(fill(arg.start), fill(arg.stop), fill(arg.step))
            case _:
                return arg

    args, kwargs = fill(tuple(operation.args)), fill(dict(operation.kwargs))
    match operation.call:
        case "module":
            assert isinstance(operation.target, str)
            return model.get_submodule(operation.target)(*args, **kwargs)
        case "method":
            assert isinstance(operation.target, str)
            return getattr(args[0], operation.target)(*args[1:], **kwargs)
        case "attribute":
            assert isinstance(operation.target, str)
            return operator.attrgetter(operation.target)(model)
        case _:
            assert callable(operation.target)
            return operation.target(*args, **kwargs)


# --- small questions about values ------------------------------------------------------------------------------------


def _batched(small: Any, large: Any) -> bool:
    """Whether two evaluations differ exactly in their first axis, as the batch sizes do."""
    if not (isinstance(small, Tensor) and isinstance(large, Tensor)) or small.dim() == 0 or small.dim() != large.dim():
        return False
    return (small.shape[0], large.shape[0]) == _BATCHES and small.shape[1:] == large.shape[1:]


def _dtype(value: Any) -> str:
    return str(_tensors_of(value)[0].dtype).removeprefix("torch.")


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return any(_holds_tensors(v) for v in value)
    return isinstance(value, Tensor)


def _folded(node: fx.Node, small: Any, large: Any) -> Any:
    """A number of the trace: the same for every batch, or a multiple of the batch size."""
    if isinstance(small, tuple | list):
        return tuple(_folded(node, a, b) for a, b in zip(small, large, strict=True))
    if type(small) is type(large) and small == large:
        return small
    if isinstance(small, int) and small * _BATCHES[1] == large * _BATCHES[0] and small % _BATCHES[0] == 0:
        return BatchExtent(small // _BATCHES[0])
    raise _Opaque(f"{node.name} is a number that depends on the batch")


def _mentions_batch(operation: Operation) -> bool:
    """A number taken from the batch size in arithmetic means the whole batch, not this device's samples."""
    return any(isinstance(a, BatchExtent) for a in (*operation.args, *operation.kwargs.values()))


def _canonical_keys(model: nn.Module) -> dict[str, str]:
    """state_dict key -> the first key under which the same tensor is known (tied weights share one)."""
    first: dict[int, str] = {}
    rows = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {key: first.setdefault(id(tensor), key) for key, tensor in rows}


def _torch_leaf(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules")


def _batch_norm_inside(module: nn.Module) -> str | None:
    for inner in module.modules():
        if isinstance(inner, _BatchNorm) and (inner.training or inner.running_mean is None):
            return type(inner).__name__
    return None


def _draws(module: nn.Module) -> bool:
    return any("Dropout" in type(m).__name__ and m.training for m in module.modules())


def _random(like: Tensor, batch: int | None) -> Tensor:
    shape = like.shape if batch is None else (batch, *like.shape[1:])
    if like.dtype.is_floating_point or like.dtype.is_complex:
        return torch.randn(shape, dtype=like.dtype)
    return torch.randint(0, 2, shape).to(like.dtype)


def _to_meta(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run a module on random numbers of these shapes; keep only the shapes it gives."""
    was = {m: m.training for m in module.modules()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        module.eval()
        try:
            real = fx.node.map_aggregate((args, kwargs), lambda a: _random(a, None) if isinstance(a, Tensor) else a)
            value = module(*real[0], **real[1])  # type: ignore[index]
        finally:
            for m, flag in was.items():
                m.training = flag
    return fx.node.map_aggregate(value, lambda a: a.to("meta") if isinstance(a, Tensor) else a)


def _sample_check(
    call: Callable[[int, Sequence[Tensor]], Any],
    tensors: Sequence[Tensor],
    batched: Sequence[bool],
    module: nn.Module | None,
) -> str | None:
    """Run three samples together and one by one. None where the answers agree."""
    was = {m: m.training for m in module.modules()} if module is not None else {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        if module is not None:
            module.eval()
        try:
            inputs = [_random(t, 3 if b else None) for t, b in zip(tensors, batched, strict=True)]
            together = _tensors_of(call(3, inputs))
            for i in range(3):
                one = [t[i : i + 1] if b else t for t, b in zip(inputs, batched, strict=True)]
                alone = _tensors_of(call(1, one))
                if not all(_close(a[i : i + 1], b) for a, b in zip(together, alone, strict=True)):
                    return "a sample's answer depends on the others, so it runs whole on one device"
        except Exception as error:
            return f"it cannot take samples one by one ({_first_line(error)}), so it runs whole on one device"
        finally:
            for m, flag in was.items():
                m.training = flag
    return None


def _tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, tuple | list):
        return [t for v in value for t in _tensors_of(v)]
    return [value] if isinstance(value, Tensor) else []


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)


# --- the trace must compute what the model computes ------------------------------------------------------------------


def evaluate(model: nn.Module, traced: Traced, inputs: Sequence[Tensor]) -> Any:
    """Run a trace on one device, layer by layer, as the executor would with a single device."""
    values: dict[str, Any] = {layer.name: x for layer, x in zip(traced.graph.inputs, inputs, strict=True)}
    for name, layer in traced.graph.layers.items():
        if layer.kind != "input":
            reads = [values[i] for i in layer.inputs]
            values[name] = call_operation(model, traced.operations[name], reads, len(inputs[0]))
    outputs = [values[name] for name in traced.graph.outputs]
    return fx.node.map_aggregate(traced.result, lambda a: outputs[a.index] if isinstance(a, Ref) else a)


def _same_answer(model: nn.Module, traced: Traced, specs: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Python that a trace does not see (`x += y` under another name, say) must not change the numbers silently."""
    if any(p.is_meta for p in model.parameters()):
        return
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        inputs = [_random(torch.empty((2, *shape), dtype=dtype, device="meta"), 2) for shape, dtype in specs]
        reference, pure = copy.deepcopy(model), without_in_place(copy.deepcopy(model))
        try:
            torch.manual_seed(1)
            expected = reference(*[x.clone() for x in inputs])
        except Exception as error:
            raise InputError(f"{type(model).__name__} does not run on the example: {_first_line(error)}") from error
        torch.manual_seed(1)
        found = evaluate(pure, traced, inputs)
    pairs = list(zip(_tensors_of(expected), _tensors_of(found), strict=False))
    if len(_tensors_of(expected)) != len(pairs) or not all(_close(a, b) for a, b in pairs):
        raise _Opaque("its trace computes something else (in-place changes seen under two names?)")


def without_in_place(model: nn.Module) -> nn.Module:
    """Turn off `inplace` everywhere: layers keep their inputs for backward, so nothing may overwrite them."""
    for module in model.modules():
        if getattr(module, "inplace", False):
            module.inplace = False  # type: ignore[assignment]
    return model


def _whole(model: nn.Module, specs: list[tuple[tuple[int, ...], torch.dtype]], reason: str) -> Traced:
    """The whole model as one opaque layer."""
    inputs = {f"input{i}" if i else "input": spec for i, spec in enumerate(specs)}
    layers = {
        name: Layer(name, "input", (), shape, dtype=str(dtype).removeprefix("torch."))
        for name, (shape, dtype) in inputs.items()
    }
    operations: dict[str, Operation] = {name: Operation("input", name) for name in inputs}
    keys = _canonical_keys(model)
    rows = [(k, p, False) for k, p in model.named_parameters()] + [(k, b, True) for k, b in model.named_buffers()]
    parameters = {k: Parameter(keys[k], tuple(t.shape), t.requires_grad and not b, b) for k, t, b in rows}
    metas = [torch.empty((3, *shape), dtype=dtype, device="meta") for shape, dtype in specs]
    try:
        value = _to_meta(model, tuple(metas), {})
    except Exception as error:
        raise InputError(f"{type(model).__name__} does not run on the example: {_first_line(error)}") from error
    outputs = _tensors_of(value)
    if not outputs or (not isinstance(value, Tensor) and len(outputs) != len(value)):
        raise InputError(
            f"{type(model).__name__} returns {type(value).__name__}: return a tensor or a flat tuple of tensors"
        )
    operation = Operation("module", "", tuple(Ref(i) for i in range(len(inputs))))
    if any(t.dim() == 0 or t.shape[0] != 3 for t in outputs):
        raise InputError(f"{type(model).__name__} returns a tensor without the batch axis: return one row per sample")
    norm = _batch_norm_inside(model)
    dependent = f"its {norm} looks at the whole batch" if norm else None
    if dependent is None:
        dependent = _sample_check(
            lambda batch, x: call_operation(model, operation, x, batch), metas, [True] * len(metas), model
        )
    several = not isinstance(value, Tensor)
    why = f"{reason}; {dependent}" if dependent else reason
    layers["model"] = Layer(
        "model", "opaque", tuple(inputs), tuple(outputs[0].shape[1:]), parameters,
        per_sample=dependent is None, several=several, reason=why, dtype=_dtype(outputs), random=_draws(model),
    )  # fmt: skip
    operations["model"] = operation
    names: list[str] = ["model"]
    result: Any = Ref(0)
    if several:
        names = [f"output{i}" for i in range(len(outputs))]
        for i, (name, tensor) in enumerate(zip(names, outputs, strict=True)):
            layers[name] = Layer(name, "pick", ("model",), tuple(tensor.shape[1:]), dtype=_dtype(tensor))
            operations[name] = Operation("function", operator.getitem, (Ref(0), i))
        result = tuple(Ref(i) for i in range(len(outputs)))
    return Traced(Graph(type(model).__name__, layers, tuple(names)), operations, result)
