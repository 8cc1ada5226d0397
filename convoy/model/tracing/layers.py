"""Builds one layer and one operation for every tensor of a traced forward pass."""

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from convoy.errors import InputError
from convoy.model.graph import Graph, Kind, Layer, Parameter
from convoy.model.operation import Operation, Ref, TracedModel, call_operation
from convoy.model.tracing.kinds import IN_PLACE, kind_of_call, kind_of_module
from convoy.model.tracing.nodes import Untraceable, called, draws_random, holds_tensors, nodes_of
from convoy.model.tracing.per_sample import PerSample, check_per_sample, has_dropout, is_floating, tensors_of
from convoy.model.tracing.values import BATCHES, NodeValues, Spec, is_batched, mentions_batch


@dataclass(frozen=True, slots=True)
class _Outputs:
    """The value of a node that gives several tensors: some items of a layer's output."""

    layer: str
    indices: tuple[int, ...]


class LayerBuilder:
    """Goes over the nodes of a model once and builds its layers.

    Args:
        leaves: paths of submodules to keep whole, beside those that must be.

    Raises:
        Untraceable: the model as a whole must stay one layer.
    """

    def __init__(self, model: nn.Module, specs: Sequence[Spec], leaves: Collection[str] = ()) -> None:
        self.model, self.specs, self.leaves = model, specs, leaves
        self.values = NodeValues(model, specs)
        self.names: dict[fx.Node, str] = {}
        self.outputs: dict[fx.Node, _Outputs] = {}
        self.nodes: dict[str, fx.Node] = {}
        self.layers: dict[str, Layer] = {}
        self.operations: dict[str, Operation] = {}
        self.keys = canonical_keys(model)
        self.uses: dict[str, list[str]] = {}

    def run(self) -> TracedModel:
        nodes = nodes_of(self.model, self.leaves)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            for node in nodes:
                if node.op == "output":
                    return self._finish(node)
                before = counter.get_total_flops()
                value, _ = self.values.visit(node)
                if holds_tensors(value) and not _is_form(node):
                    # Both batch sizes were counted.
                    self._add(node, (counter.get_total_flops() - before) // sum(BATCHES))
                    self.values.overwrite(node)
        raise Untraceable("its forward returns nothing")

    def _add(self, node: fx.Node, flop: int) -> None:
        if node.target is operator.getitem and self._latest(node.args[0]) in self.outputs:
            self._pick(node)
            return
        refs: list[str] = []
        args, kwargs = self._arguments(node, refs)
        operation = self._operation(node, args, kwargs)
        name = self._name(node)
        kind = self._kind(node, operation, refs)
        if kind == "flatten" and node.op != "call_module":
            # `x.view(n, 4096)` too: a local part of a split layer has another width than the one in the source.
            operation = Operation("function", torch.flatten, (Ref(0), 1))
        layer = Layer(name, kind, tuple(refs), (), self._parameters(node, name), flop=flop)
        layer = self._detailed(node, operation, self._shaped(node, layer))
        self._keep(node, self._with_samples(node, operation, layer), operation)
        if layer.several:
            self.outputs[node] = _Outputs(name, tuple(range(len(self.values[node][0]))))

    def _keep(self, node: fx.Node, layer: Layer, operation: Operation) -> None:
        self.names[node], self.nodes[layer.name] = layer.name, node
        self.layers[layer.name], self.operations[layer.name] = layer, operation

    def _latest(self, arg: Any) -> Any:
        return self.values.latest(arg) if isinstance(arg, fx.Node) else arg

    # --- layers with several outputs ---------------------------------------------------------------------------------

    def _pick(self, node: fx.Node) -> None:
        """`outputs[i]` is one tensor; `outputs[i:j]` is fewer of them."""
        outputs, index = self.outputs[self._latest(node.args[0])], node.args[1]
        if isinstance(index, slice) and not any(isinstance(a, fx.Node) for a in (index.start, index.stop, index.step)):
            self.outputs[node] = _Outputs(outputs.layer, outputs.indices[index])
        elif isinstance(index, int):
            self.names[node] = self._part(outputs.layer, outputs.indices[index])
        else:
            raise Untraceable(f"{node.name} picks by something else than a number")

    def _part(self, name: str, item: int) -> str:
        """The layer that picks one tensor of those that `name` gives."""
        picked = f"{name}[{item}]"
        if picked not in self.layers:
            source = self.layers[name]
            small = self.values[self.nodes[name]][0][item]
            self.layers[picked] = Layer(
                picked, "pick", (name,), tuple(small.shape[1:]), dtype=dtype_name(small.dtype),
                differentiable=source.differentiable and is_floating(small),
            )  # fmt: skip
            self.operations[picked] = Operation("function", operator.getitem, (Ref(0), item))
        return picked

    # --- what is called ----------------------------------------------------------------------------------------------

    def _arguments(self, node: fx.Node, refs: list[str]) -> tuple[Any, Any]:
        """Arguments with every tensor as a Ref and every size that follows the batch as a BatchExtent."""

        def ref(name: str) -> Ref:
            if name not in refs:
                refs.append(name)
            return Ref(refs.index(name))

        def lower(n: fx.Node) -> Any:
            n = self.values.latest(n)
            if _is_form(n):
                assert callable(n.target)
                return n.target(*self._arguments(n, refs)[0])
            if n in self.outputs:
                return tuple(ref(self._part(self.outputs[n].layer, item)) for item in self.outputs[n].indices)
            return ref(self.names[n]) if n in self.names else self.values.constant(n)

        return fx.node.map_arg((node.args, node.kwargs), lower)

    def _operation(self, node: fx.Node, args: Any, kwargs: Any) -> Operation:
        kwargs = {k: (False if k == "inplace" else v) for k, v in kwargs.items()}
        match node.op:
            case "placeholder":
                return Operation("input", node.name)
            case "get_attr":
                return Operation("attribute", str(node.target))
            case "call_module":
                return Operation("module", str(node.target), args, kwargs)
        pure = IN_PLACE.get(called(node))
        if pure is None:
            return Operation("method" if node.op == "call_method" else "function", node.target, args, kwargs)
        home = next(home for home in (operator, torch, nn.functional) if hasattr(home, pure))
        return Operation("function", getattr(home, pure), args, kwargs)

    def _name(self, node: fx.Node) -> str:
        name = str(node.target) if node.op in ("call_module", "get_attr") else node.name
        if name in self.layers:
            name = f"{name}#{sum(other.partition('#')[0] == name for other in self.layers) + 1}"
        return name

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self.model.get_submodule(str(node.target)) if node.op == "call_module" else None

    # --- what a plan must know ---------------------------------------------------------------------------------------

    def _kind(self, node: fx.Node, operation: Operation, inputs: Sequence[str]) -> Kind:
        if node.op == "placeholder":
            return "input"
        if node.op == "get_attr":
            return "parameter"
        module = self._module(node)
        if module is not None:
            return kind_of_module(module)
        value = self.values[node][0]
        batched = [self.layers[name] for name in inputs if self.layers[name].batched]
        if not batched or not isinstance(value, Tensor):
            return "opaque"
        if called(node) == "stochastic_depth" and not draws_random(node):
            return "elementwise"
        return kind_of_call(operation, len(inputs), batched[0].shape, tuple(value.shape[1:]))

    def _parameters(self, node: fx.Node, name: str) -> dict[str, Parameter]:
        module = self._module(node)
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(self.model)
            if str(node.target) not in self.keys:
                raise Untraceable(f"it uses the tensor {node.target!r}, which is neither a parameter nor a buffer")
            rows = {"": (value, not isinstance(value, nn.Parameter))}
        elif module is not None:
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
        layer = replace(
            layer, dtype=dtype_name(tensors_of(small)[0].dtype), differentiable=self.values.passes_gradient(node)
        )
        if not isinstance(small, Tensor):
            if not all(is_batched(pair) for pair in zip(small, large, strict=True)):
                raise Untraceable(f"{layer.name} gives several tensors that do not all have the batch as first axis")
            return replace(layer, several=True, shape=tuple(small[0].shape[1:]))
        if is_batched((small, large)):
            return replace(layer, shape=tuple(small.shape[1:]))
        if small.shape != large.shape:
            raise Untraceable(f"the first axis of {layer.name} is not the batch")
        if any(self.layers[i].batched for i in layer.inputs):
            raise Untraceable(f"{layer.name} loses the batch axis")
        return replace(layer, shape=tuple(small.shape), batched=False)

    def _detailed(self, node: fx.Node, operation: Operation, layer: Layer) -> Layer:
        module: Any = self._module(node)
        match layer.kind:
            case "conv":
                return replace(layer, groups=module.groups)
            case "batch_norm":
                return replace(layer, statistics=module.training or module.running_mean is None)
            case "cat":
                axis = operation.args[1] if len(operation.args) > 1 else operation.kwargs.get("dim", 0)
                return replace(layer, axis=axis % (len(layer.shape) + 1))
        return layer

    def _with_samples(self, node: fx.Node, operation: Operation, layer: Layer) -> Layer:
        """Add whether the layer draws random numbers, and whether its samples depend on each other."""
        module = self._module(node)
        layer = replace(layer, random=has_dropout(module) if module is not None else draws_random(node))
        counts = mentions_batch((operation.args, dict(operation.kwargs)))
        if counts and not layer.batched:
            raise Untraceable(f"{layer.name} has no batch axis and computes with the size of the batch")
        if counts and layer.kind in ("elementwise", "join"):
            # A number taken from the batch size means the whole batch, not this device's samples.
            layer = replace(layer, kind="opaque")
        if layer.kind != "opaque":
            return layer
        if not layer.batched:
            return replace(layer, reason="it has no batch axis, so every device makes it")
        what = type(module).__name__ if module is not None else node.name
        unsplit = f"no rule splits the channels of {what}"
        if layer.random and module is None:
            # No two calls agree, so none can show whether samples are independent. These functions draw for each entry.
            return replace(layer, reason=unsplit)
        found = self._check_per_sample(operation, layer, module)
        if found.overwrites:
            raise Untraceable(f"{layer.name} overwrites its input")
        reason = "; ".join(filter(None, (unsplit, found.dependence)))
        random = layer.random or found.random
        return replace(layer, per_sample=found.dependence is None, random=random, reason=reason)

    def _check_per_sample(self, operation: Operation, layer: Layer, module: nn.Module | None) -> PerSample:
        like = [self._value_of(name) for name in layer.inputs]
        batched = [self.layers[i].batched for i in layer.inputs]
        return check_per_sample(
            lambda batch, inputs: call_operation(self.model, operation, inputs, batch), like, batched, module
        )

    def _value_of(self, name: str) -> Tensor:
        operation = self.operations[name]
        if self.layers[name].kind == "pick":
            return self.values[self.nodes[self.layers[name].inputs[0]]][0][operation.args[1]]  # type: ignore[no-any-return]
        return self.values[self.nodes[name]][0]  # type: ignore[no-any-return]

    def _finish(self, output: fx.Node) -> TracedModel:
        names: list[str] = []
        if sum(layer.kind == "input" for layer in self.layers.values()) != len(self.specs):
            raise InputError(
                f"the example has {len(self.specs)} inputs, the model takes another number: give each of them"
            )
        (value,), _ = self._arguments(output, names)
        for layer in (self.layers[name] for name in names):
            if not layer.batched:
                raise Untraceable(f"it returns {layer.name}, which has no batch axis")
        if not names or mentions_batch(value):
            raise Untraceable("it returns something that is not a tensor")
        shared = {name for users in self.uses.values() if len(users) > 1 for name in users}
        layers = {name: replace(layer, shared=name in shared) for name, layer in self.layers.items()}
        return TracedModel(Graph(type(self.model).__name__, layers, tuple(names)), self.operations, value)


def canonical_keys(model: nn.Module) -> dict[str, str]:
    """state_dict key -> the first key under which the same tensor is known (tied weights share one)."""
    first: dict[int, str] = {}
    rows = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {key: first.setdefault(id(tensor), key) for key, tensor in rows}


def _is_form(node: fx.Node) -> bool:
    """Whether a node makes a named tuple: that is no layer, but the form of what is returned."""
    return node.op == "call_function" and isinstance(node.target, type) and hasattr(node.target, "_fields")


def dtype_name(dtype: torch.dtype) -> str:
    """As a `Layer` holds it: "float32"."""
    return str(dtype).removeprefix("torch.")
