"""Builds one layer and one operation for every tensor of a traced forward pass, or for every region of odd calls."""

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from convoy.errors import InputError
from convoy.model.graph import Graph, Layer, Parameter
from convoy.model.layer_rules import Call, Known
from convoy.model.operation import Form, Operation, Ref, Region, TracedModel
from convoy.model.tracing.effects import IN_PLACE, batch_norm_of, called, draws_random
from convoy.model.tracing.kinds import has_hooks, known, replaced_by_hand
from convoy.model.tracing.node_values import (
    BATCHES,
    NodeValues,
    Spec,
    Untraceable,
    across,
    is_batched,
    is_form,
    mentions_batch,
    without_batch,
)
from convoy.model.tracing.python_state import subtree
from convoy.model.tracing.shared_copy import shared_copy
from convoy.model.tracing.tracer import Nodes
from convoy.model.tracing.trials import (
    Observation,
    TrialInputs,
    check_cuts,
    has_dropout,
    is_floating,
    observe,
    per_sample,
    tensors_of,
)


@dataclass(frozen=True, slots=True)
class _Outputs:
    """The value of a node that gives several tensors: some items of a layer's output."""

    layer: str
    indices: tuple[int, ...]


class LayerBuilder:
    """Goes over the nodes of a model once and builds its layers.

    Args:
        meta: a copy of the model on the meta device.
        together: keys of parameters that belong to one layer in another mode.
        elsewhere: see `noted_by_each`, of the other mode.
        samples: with how many a layer of the user's Python is called once.

    Raises:
        Untraceable: a submodule, or the model as a whole, must stay one layer.
    """

    def __init__(
        self,
        model: nn.Module,
        meta: nn.Module,
        nodes: Nodes,
        specs: Sequence[Spec],
        together: Sequence[set[str]] = (),
        elsewhere: Mapping[str, bool] = MappingProxyType({}),
        samples: int = BATCHES[0],
    ) -> None:
        self.model, self.traced, self.together = model, nodes, together
        self.elsewhere, self.samples = elsewhere, samples
        self.values = NodeValues(model, meta, specs, nodes.constants)
        self.norms = {node: path for node in nodes.nodes if (path := batch_norm_of(model, node)) is not None}
        self.names: dict[fx.Node, str] = {}
        self.outputs: dict[fx.Node, _Outputs] = {}
        self.shown: dict[str, Any] = {}  # by layer, its value for the smaller batch
        self.layers: dict[str, Layer] = {}
        self.operations: dict[str, Operation] = {}
        self.keys = canonical_keys(model)
        self.uses: dict[str, list[str]] = {}
        self.changed: dict[str, str] = {}  # by layer, the Python state that it changes

    def run(self) -> TracedModel:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            for node in self.traced.nodes:
                self.values.visit(node, counter)
        waits = {node: self._waits_for(node) for node in self.traced.nodes}
        several = [n for n in self.traced.nodes if n.op != "output" and self._gives_several(n)]
        values = self.values
        found = regions(self.traced.nodes, waits, values.odd, self._together(), several, values.of_batch)
        members = {node: group for group in found for node in group}
        done: set[fx.Node] = set()
        for node in self.traced.nodes:
            self._emit(node, members, waits, done, [])
        return self._finish(self.traced.nodes[-1])

    def _waits_for(self, node: fx.Node) -> list[fx.Node]:
        """The nodes whose tensors it reads; numbers are in the trace, but odd ones."""
        reads = dict.fromkeys(self.values.reads[node].values())
        if node in self.norms:
            reads = dict.fromkeys(n for n in reads if n.op != "get_attr")
        return [n for n in reads if n in self.values.odd or tensors_of(self.values[n][0])]

    def _gives_several(self, node: fx.Node) -> bool:
        return isinstance(self.values[node][0], tuple | list) and bool(tensors_of(self.values[node][0]))

    def _together(self) -> list[list[fx.Node]]:
        rows = []
        for keys in self.together:
            rows.append([n for n in self.traced.nodes if keys & self._keys_of(n)])
        return [row for row in rows if len(row) > 1]

    def _keys_of(self, node: fx.Node) -> set[str]:
        module = self._module(node)
        if module is None or node in self.norms:
            return {str(node.target)} if node.op == "get_attr" else set()
        return {self.keys[f"{node.target}.{key}"] for key, _ in module.named_parameters()}

    def _emit(
        self,
        node: fx.Node,
        members: dict[fx.Node, list[fx.Node]],
        waits: dict[fx.Node, list[fx.Node]],
        done: set[fx.Node],
        above: list[list[fx.Node]],
    ) -> None:
        """Build the layer of a node, or of its region, after those that it reads."""
        if node in done or node.op == "output":
            return
        group = members.get(node, [node])
        if group in above:
            raise Untraceable("two odd stretches of it wait for each other", node.meta["where"])
        for member in group:
            for read in waits[member]:
                if read not in group and read not in done:
                    self._emit(read, members, waits, done, [*above, group])
        if any(n in self.values.odd for n in group) or len(group) > 1:
            self._add_region(group)
        elif tensors_of(self.values[node][0]) and not is_form(node) and not self._is_inside(node, members):
            self._add(node)
        done.update(group)

    def _is_inside(self, node: fx.Node, members: dict[fx.Node, list[fx.Node]]) -> bool:
        """Whether only batch norms, or one region, read a parameter or buffer: it belongs to their layers then."""
        if node.op != "get_attr" or not node.users:
            return False
        groups = [members.get(user) for user in node.users]
        alone = groups[0] is not None and all(group is groups[0] for group in groups)
        return alone or all(user in self.norms for user in node.users)

    def _add(self, node: fx.Node) -> None:
        source = self.values.reads[node].get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if node.target is operator.getitem and source in self.outputs:
            self._pick(node, self.outputs[source])
            return
        refs: list[str] = []
        args, kwargs = self._arguments(node, refs, {})
        operation = self._operation(node, args, kwargs)
        name = self._name(node)
        layer = Layer(name, "opaque", tuple(refs), (), self._parameters(node, name), flop=self.values.flop[node])
        layer = self._shaped(node, layer)
        found = self._known(node, operation, layer)
        operation = found.operation or operation
        layer = replace(
            layer, kind=found.kind, groups=found.groups, axis=found.axis, statistics=found.statistics, cuts=found.cuts
        )
        layer = self._with_samples(node, operation, layer, found)
        self._keep(node, layer, operation)
        if not found.trusted:
            inputs = TrialInputs([self.shown[i] for i in layer.inputs], [self.layers[i].batched for i in layer.inputs])
            check_cuts(self.model, layer, operation, inputs, found.like)
        if layer.several:
            self.outputs[node] = _Outputs(name, tuple(range(len(self.values[node][0]))))

    def _keep(self, node: fx.Node, layer: Layer, operation: Operation) -> None:
        self.names[node], self.shown[layer.name] = layer.name, self.values[node][0]
        self.layers[layer.name], self.operations[layer.name] = layer, operation

    # --- layers with several outputs ---------------------------------------------------------------------------------

    def _pick(self, node: fx.Node, outputs: _Outputs) -> None:
        """`outputs[i]` is one tensor; `outputs[i:j]` is fewer of them."""
        index = node.args[1]
        if isinstance(index, slice) and not any(isinstance(a, fx.Node) for a in (index.start, index.stop, index.step)):
            self.outputs[node] = _Outputs(outputs.layer, outputs.indices[index])
        elif isinstance(index, int):
            self.names[node] = self._part(outputs.layer, outputs.indices[index])
        else:
            raise Untraceable(f"{node.name} picks by something else than a number", node.meta["where"])

    def _part(self, name: str, item: int, value: tuple[Any, Any] | None = None) -> str:
        """The layer that picks one tensor of those that `name` gives.

        Args:
            value: where that is one of the whole batch, the tensor for each of `BATCHES`.
        """
        picked = f"{name}[{item}]"
        if picked not in self.layers:
            source, small = self.layers[name], self.shown[name][item]
            batched, axes = source.batched and value is None, across(value) if value is not None else ()
            self.layers[picked] = Layer(
                picked, "pick", (name,), tuple(small.shape[1:]) if batched else without_batch(small.shape, axes),
                dtype=dtype_name(small.dtype), batched=batched, across=axes,
                differentiable=source.differentiable and is_floating(small),
            )  # fmt: skip
            self.operations[picked] = Operation("function", operator.getitem, (Ref(0), item))
            self.shown[picked] = small
        return picked

    # --- regions -----------------------------------------------------------------------------------------------------

    def _add_region(self, group: Sequence[fx.Node]) -> None:
        """One layer for the calls of a region, with what leaves it as its outputs."""
        inside, refs, calls = set(group), list[str](), list[fx.Node]()
        for node in group:
            for read in self._waits_for(node):
                if read.op == "get_attr" and read not in self.names:
                    if read not in calls:
                        calls.append(read)
                elif read not in inside:
                    self._lowered(read, functools.partial(_ref, refs))
            calls.append(node)
        at = {node: Ref(len(refs) + i) for i, node in enumerate(calls)}
        operations = [self._operation(node, *self._arguments(node, refs, at)) for node in calls]
        of_batch = self.values.of_batch
        leaving = [n for n in group if n not in self.values.odd or n in of_batch]
        gives = [n for n in leaving if tensors_of(self.values[n][0]) and self._leaves(n, inside)]
        if not gives:
            return  # nobody reads it
        graded = tuple(not node.meta["no_grad"] for node in calls)
        several = len(gives) > 1 or gives[0] in of_batch
        target = Region(tuple(operations), graded, tuple(at[n].index for n in gives), several)
        operation = Operation("region", target, tuple(Ref(i) for i in range(len(refs))))
        name = self._unused_name(self._region_name(group))
        paths = [str(n.target) for n in calls if n.op == "call_module"] + [
            self.norms[n] for n in calls if n in self.norms
        ]
        parameters: dict[str, Parameter] = {}
        for node in calls:
            found = self._parameters(node, name)
            parameters |= {p.key: p for p in found.values()}
        small = [self.values[n][0] for n in gives]
        layer = Layer(
            name, "opaque", tuple(refs), tuple(small[0].shape[1:]), parameters, several=several,
            flop=sum(self.values.flop[n] for n in calls), dtype=dtype_name(small[0].dtype),
            differentiable=any(map(is_floating, small)) and any(self.values.passes_gradient(n) for n in group),
            random=any(draws_random(n) for n in calls),
        )  # fmt: skip
        why = next((self.values.odd[n] for n in group if n in self.values.odd), "it is one layer in the other mode")
        for path in paths:
            if path in self.traced.whole:
                why = f"{type(self.model.get_submodule(path)).__name__} stays whole: {self.traced.whole[path]}"
        mixes = any(n in self.values.mixing for n in group)
        self.layers[name], self.operations[name] = self._judged(operation, layer, paths, why, mixes=mixes), operation
        self.shown[name] = tuple(small) if several else small[0]
        for i, node in enumerate(gives):
            self.names[node] = self._part(name, i, self.values[node] if node in of_batch else None) if several else name

    def _leaves(self, node: fx.Node, inside: Collection[fx.Node]) -> bool:
        """Whether a value of a region is read outside of it."""
        rows = self.values.reads.items()
        return any(reader not in inside and node in reads.values() for reader, reads in rows)

    def _region_name(self, group: Sequence[fx.Node]) -> str:
        odd = [n for n in group if n in self.values.odd] or list(group)
        modules = [n for n in group if n.op == "call_module" and self._keys_of(n)]
        return str(modules[0].target) if len(modules) == 1 else odd[0].name

    # --- what is called ----------------------------------------------------------------------------------------------

    def _arguments(self, node: fx.Node, refs: list[str], at: dict[fx.Node, Ref]) -> tuple[Any, Any]:
        """Arguments with every tensor as a Ref and every size that follows the batch as a BatchExtent.

        Args:
            refs: names of the layers read so far; it grows.
            at: the nodes of the same region.
        """

        ref = functools.partial(_ref, refs)

        def lower(n: fx.Node) -> Any:
            n = self.values.reads[node][n]
            if n in at and (n in self.values.odd or tensors_of(self.values[n][0])):
                return at[n]
            return self._lowered(n, ref, at)

        given = (node.args[:1], {}) if node in self.norms else (node.args, node.kwargs)
        return fx.node.map_arg(given, lower)

    def _lowered(self, n: fx.Node, ref: Callable[[str], Ref], at: dict[fx.Node, Ref] | None = None) -> Any:
        """A value from outside among the arguments of a call."""
        if is_form(n):
            assert callable(n.target)

            def part(m: fx.Node) -> Any:
                m = self.values.reads[n][m]
                return at[m] if at and m in at else self._lowered(m, ref, at)

            args, kwargs = fx.node.map_arg((n.args, n.kwargs), part)
            return Form(n.target, tuple(args), dict(kwargs))
        if n in self.outputs:
            return tuple(ref(self._part(self.outputs[n].layer, item)) for item in self.outputs[n].indices)
        return ref(self.names[n]) if n in self.names else self.values.constant(n)

    def _operation(self, node: fx.Node, args: Any, kwargs: Any) -> Operation:
        kwargs = {k: (False if k == "inplace" else v) for k, v in kwargs.items()}
        match node.op:
            case "placeholder":
                return Operation("input", node.name)
            case "get_attr":
                held = self.traced.constants.get(str(node.target))
                return Operation("attribute", str(node.target)) if held is None else Operation("constant", held)
            case "call_module":
                return Operation("module", str(node.target), args, kwargs)
        if node in self.norms:
            return Operation("batch_norm", self.norms[node], args)
        pure = IN_PLACE.get(called(node))
        if pure is None:
            return Operation("method" if node.op == "call_method" else "function", node.target, args, kwargs)
        home = next(home for home in (operator, torch, nn.functional) if hasattr(home, pure))
        return Operation("function", getattr(home, pure), args, kwargs)

    def _name(self, node: fx.Node) -> str:
        name = str(node.target) if node.op in ("call_module", "get_attr") else self.norms.get(node) or node.name
        return self._unused_name(name)

    def _unused_name(self, name: str) -> str:
        if name in self.layers:
            name = f"{name}#{sum(other.partition('#')[0] == name for other in self.layers) + 1}"
        return name

    def _module(self, node: fx.Node) -> nn.Module | None:
        path = str(node.target) if node.op == "call_module" else self.norms.get(node)
        return None if path is None else self.model.get_submodule(path)

    # --- what a plan must know ---------------------------------------------------------------------------------------

    def _known(self, node: fx.Node, operation: Operation, layer: Layer) -> Known:
        """The kind of a layer, and where it may be cut."""
        if node.op in ("placeholder", "get_attr"):
            return Known("input" if node.op == "placeholder" else "parameter")
        if node in self.norms:
            norm: Any = self._module(node)
            return Known("batch_norm", statistics=norm.training or norm.running_mean is None)
        if called(node) == "stochastic_depth" and not draws_random(node):
            return Known("elementwise")
        batched = tuple(self.layers[name].batched for name in layer.inputs)
        if not layer.batched or layer.several or not any(batched):
            return Known("opaque")
        inputs = tuple(self.layers[name].batch_shape(BATCHES[0]) for name in layer.inputs)
        call = Call(operation, self._module(node), inputs, batched, layer.batch_shape(BATCHES[0]))
        return known(call) or Known("opaque")

    def _parameters(self, node: fx.Node, name: str) -> dict[str, Parameter]:
        module = self._module(node)
        rows: dict[str, tuple[Tensor, bool]] = {}
        if node.op == "get_attr":
            if str(node.target) in self.keys:
                value = operator.attrgetter(str(node.target))(self.model)
                rows = {"": (value, not isinstance(value, nn.Parameter))}
        elif module is not None:
            inside = node not in self.norms
            rows = {key: (p, False) for key, p in module.named_parameters(recurse=inside)}
            rows |= {key: (b, True) for key, b in module.named_buffers(recurse=inside)}
        result = {}
        for key, (tensor, is_buffer) in rows.items():
            path = self.norms.get(node, str(node.target))
            full = self.keys[f"{path}.{key}".lstrip(".") if key else path]
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
            fixed = all(isinstance(a, Tensor) and a.shape == b.shape for a, b in zip(small, large, strict=True))
            if fixed and not any(self.layers[i].batched for i in layer.inputs):
                return replace(layer, several=True, shape=tuple(small[0].shape), batched=False)
            return replace(layer, several=True, shape=tuple(small[0].shape[1:]))
        if is_batched((small, large)):
            return replace(layer, shape=tuple(small.shape[1:]))
        return replace(layer, shape=tuple(small.shape), batched=False)

    def _with_samples(self, node: fx.Node, operation: Operation, layer: Layer, found: Known) -> Layer:
        """Add whether the layer draws random numbers, and whether its samples depend on each other."""
        module = self._module(node)
        if module is not None:
            layer = replace(layer, random=node not in self.norms and has_dropout(module))
        else:
            layer = replace(layer, random=draws_random(node))
        counts = mentions_batch((operation.args, dict(operation.kwargs)))
        if counts and found.operation is None and layer.kind not in ("opaque", "flatten", "cat"):
            # A number taken from the batch size means the whole batch, not this device's samples.
            layer = replace(layer, kind="opaque", cuts=(), groups=1)
        if found.whole_batch:
            return replace(layer, per_sample=False, reason=f"{found.whole_batch}, so it runs whole on one device")
        if layer.kind != "opaque" and found.trusted:
            return layer
        what = type(module).__name__ if module is not None else node.name
        why = self.traced.whole.get(str(node.target)) if node.op == "call_module" else None
        why = f"{what} stays whole: {why}" if why else f"no rule splits the channels of {what}" if found.trusted else ""
        paths = [str(node.target)] if module is not None else []
        return self._judged(operation, layer, paths, why, registered=not found.trusted)

    def _judged(
        self,
        operation: Operation,
        layer: Layer,
        modules: Sequence[str],
        why: str,
        *,
        mixes: bool = False,
        registered: bool = False,
    ) -> Layer:
        """Add how an opaque layer may be computed.

        Args:
            modules: paths of those that it calls.
            why: why it is opaque.
            mixes: it is known to look at several samples.
            registered: somebody has said that it treats samples alike.
        """
        if not layer.batched:
            return replace(layer, reason="it has no batch axis, so every device makes it")
        batched = [self.layers[name].batched for name in layer.inputs]
        inputs = TrialInputs([self.shown[name] for name in layer.inputs], batched, self.samples, registered)

        if is_of_user(operation, self.model):
            inside = {path: m for each in modules for path, m in subtree(self.model, each).items()}
            seen = observe(self.model, operation, inside, inputs)
            if not registered:
                self.changed[layer.name] = seen.changes
                return whole(layer, seen, why, self.elsewhere)
            if keeps := seen.changes or seen.hidden:
                raise _refused(layer, f"it keeps {keeps} in Python from call to call")
        if mixes:
            return replace(layer, per_sample=False, reason=f"{why}; so it runs whole on one device")
        if layer.random and not modules:
            # No two calls agree, so none can show whether samples are independent. These functions draw for each entry.
            return replace(layer, reason=why)
        found = per_sample(self.model, operation, lambda: self._precise, inputs, modules)
        if found.overwrites:
            where = max(modules, key=len).rpartition(".")[0] if modules else ""
            raise Untraceable(f"{layer.name} overwrites its input", where)
        if registered and found.dependence:
            raise _refused(layer, found.dependence)
        reason = "; ".join(filter(None, (why, found.dependence)))
        each = found.each and not layer.random
        return replace(layer, per_sample=not found.dependence, reason=reason, notes=found.each, each=each)

    @functools.cached_property
    def _precise(self) -> nn.Module:
        return shared_copy(self.model).double()

    def _finish(self, output: fx.Node) -> TracedModel:
        names: list[str] = []
        (value,), _ = self._arguments(output, names, {})
        if not names or mentions_batch(value):
            raise Untraceable("it returns something that is not a tensor")
        shared = {name for users in self.uses.values() if len(set(users)) > 1 for name in users}
        layers = {name: replace(layer, shared=name in shared) for name, layer in self.layers.items()}
        graph = Graph(type(self.model).__name__, layers, tuple(names))
        return TracedModel(graph, self.operations, value, self.traced.seen, self.traced.leaves)


def _refused(layer: Layer, why: str) -> InputError:
    return InputError(
        f"layer {layer.name!r} was registered with register_layer, which is for layers that treat each sample by itself, but "
        f"{why}: do not register it"
    )


def is_of_user(operation: Operation, model: nn.Module) -> bool:
    """Whether a call runs Python that is not torch's, which may do something else in a later step."""
    if isinstance(operation.target, Region):
        return any(is_of_user(call, model) for call in operation.target.calls)
    if operation.call == "module":
        return any(map(_is_changed, model.get_submodule(str(operation.target)).modules()))
    return callable(operation.target) and not _is_of_torch(operation.target)


def _is_changed(module: nn.Module) -> bool:
    return not _is_of_torch(type(module)) or has_hooks(module) or bool(replaced_by_hand(module))


def _is_of_torch(thing: Any) -> bool:
    owner = getattr(thing, "__self__", None)
    home = owner if isinstance(owner, type) else thing  # autograd.Function.apply is a method of its class
    return (getattr(home, "__module__", None) or "torch").partition(".")[0] in _LIBRARIES


_LIBRARIES = ("torch", "torchvision", "_operator", "operator", "math", "builtins")


def whole(layer: Layer, seen: Observation, why: str, elsewhere: Mapping[str, bool]) -> Layer:
    """The layer, given the whole batch: its Python is not known.

    Where it changes Python state, every device calls it, so that all have the same state. With random numbers inside, copies
    would differ: then one device calls it, and must not change.

    Args:
        why: why it is opaque.
        elsewhere: see `noted_by_each`, of the other mode.
    """
    random = layer.random or seen.draws or bool(seen.hidden)
    notes = bool(seen.changes or seen.hidden) or layer.name in elsewhere
    each = elsewhere.get(layer.name, notes) and notes and not random
    does = f"it reads {seen.hidden}" if seen.hidden else f"it changes {seen.changes}" if seen.changes else ""
    who = "every device computes it for the whole batch" if each else "one device computes it for the whole batch"
    return replace(
        layer, per_sample=False, random=random, reason="; ".join(filter(None, (why, does, who))), alone=seen.alone,
        notes=notes or seen.writes, blocked=seen.blocked, each=each, everywhere=each,
    )  # fmt: skip


def noted_by_each(graph: Graph) -> dict[str, bool]:
    """Of the layers whose calls change their state, whether every device calls them: so it must be in both modes."""
    return {name: layer.each for name, layer in graph.layers.items() if layer.notes}


def _ref(refs: list[str], name: str) -> Ref:
    if name not in refs:
        refs.append(name)
    return Ref(refs.index(name))


def canonical_keys(model: nn.Module) -> dict[str, str]:
    """state_dict key -> the first key under which the same tensor is known (tied weights share one)."""
    first: dict[int, str] = {}
    rows = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {key: first.setdefault(id(tensor), key) for key, tensor in rows}


def dtype_name(dtype: torch.dtype) -> str:
    """As a `Layer` holds it: "float32"."""
    return str(dtype).removeprefix("torch.")


# --- regions: what passes between the nodes of one is not rows of the batch, so it becomes one layer --------------------

Reads = Mapping[fx.Node, Collection[fx.Node]]
"""Of each node, the nodes that it waits for: whose tensors, or odd numbers, it reads."""


def regions(nodes: Sequence[fx.Node], reads: Reads, odd: Mapping[fx.Node, str], together: Sequence[Collection[fx.Node]],
            rows: Collection[fx.Node], of_batch: Collection[fx.Node] = ()) -> list[list[fx.Node]]:  # fmt: skip
    """The regions, each with its nodes in order.

    Args:
        nodes: all, in order.
        odd: whose value cannot pass from layer to layer, and why: all its readers join its region.
        together: nodes that must be in one region for another reason.
        rows: nodes that give several tensors; no region gives such a value.
        of_batch: odd nodes whose value the model may return.

    Raises:
        Untraceable: an odd value is an input or an output of the model.
    """
    order = {node: place for place, node in enumerate(nodes)}
    users: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    for node in nodes:
        for read in reads[node]:
            users[read].append(node)
    groups = {node: {node} for node in nodes}
    for group in together:
        _unite(groups, group)
    for node in odd:
        returned = [n for n in users[node] if node in of_batch and (n.op == "output" or is_form(n))]
        _unite(groups, [node, *(n for n in users[node] if n not in returned)])
    while True:
        before = len({id(group) for group in groups.values()})
        found = {id(g): g for g in groups.values() if len(g) > 1 or any(n in odd for n in g)}
        for group in found.values():
            for node in [n for n in group if n in rows]:
                _unite(groups, [node, *users[node]])
            _unite(groups, [*groups[next(iter(group))], *_between(group, order, nodes, reads, users)])
        if len({id(group) for group in groups.values()}) == before:
            break
    result = [sorted(g, key=order.__getitem__) for g in found.values() if len(g) > 1 or any(n in odd for n in g)]
    for group in result:
        why = next((odd[n] for n in group if n in odd), "")
        for node in group:
            if node.op in ("placeholder", "output"):
                raise Untraceable(why, "" if node.op == "output" else node.meta["where"])
    return result


def _unite(groups: dict[fx.Node, set[fx.Node]], nodes: Collection[fx.Node]) -> None:
    union: set[fx.Node] = set().union(*(groups[node] for node in nodes))
    for node in union:
        groups[node] = union


def _between(
    group: Collection[fx.Node],
    order: Mapping[fx.Node, int],
    nodes: Sequence[fx.Node],
    reads: Reads,
    users: Mapping[fx.Node, Sequence[fx.Node]],
) -> list[fx.Node]:
    """The nodes on the way from one node of a group to another."""
    places = [order[node] for node in group]
    first, last = min(places), max(places)
    after, before = set(group), set(group)
    for node in nodes[first : last + 1]:
        if any(read in after for read in reads[node]):
            after.add(node)
    for node in reversed(nodes[first : last + 1]):
        if any(user in before for user in users[node]):
            before.add(node)
    return [node for node in after & before if node not in group]
