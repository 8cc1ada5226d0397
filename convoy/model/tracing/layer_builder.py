"""Builds the layers of a traced forward: one for every tensor, or for every region of odd calls (`node_values.py`)."""

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from convoy.errors import InputError
from convoy.model.graph import Graph, Layer, Parameter
from convoy.model.nested import tensors_of
from convoy.model.operation import BatchExtent, Form, Operation, Ref, Region, TracedModel
from convoy.model.split_rules import Call, Known
from convoy.model.tracing.copies import shared_copy
from convoy.model.tracing.effects import IN_PLACE, batch_norm_of, called, draws_random
from convoy.model.tracing.node_values import BATCHES, NodeValues, Spec, Untraceable, is_form, mentions_batch, rows_in
from convoy.model.tracing.python_state import State, changed, subtree
from convoy.model.tracing.supported_layers import is_batch_norm, known
from convoy.model.tracing.tracer import Nodes
from convoy.model.tracing.trials import TrialInputs, check_cuts, has_dropout, is_floating, per_sample


class LayerBuilder:
    """A builder of a model's layers, in one pass over its nodes.

    Args:
        meta: a copy of the model on the meta device.
        together: sets of parameter keys that belong to one layer in the other mode.
    """

    def __init__(
        self,
        model: nn.Module,
        meta: nn.Module,
        traced: Nodes,
        specs: Sequence[Spec],
        together: Sequence[set[str]] = (),
    ) -> None:
        self.model, self.traced, self.together = model, traced, together
        self._norms = {node: path for node in traced.nodes if (path := batch_norm_of(model, node)) is not None}
        self.values = self._values(meta, specs)
        self._names: dict[fx.Node, str] = {}
        self._items: dict[fx.Node, tuple[str, Sequence[int]]] = {}  # node with several tensors -> layer, output indices
        self._shown: dict[str, Any] = {}  # layer -> its value for the smaller batch
        self._layers: dict[str, Layer] = {}
        self._operations: dict[str, Operation] = {}
        self._keys = canonical_keys(model)
        self._uses: dict[str, list[str]] = {}
        self._members: dict[fx.Node, list[fx.Node]] = {}  # node -> its region
        self._waits: dict[fx.Node, list[fx.Node]] = {}  # node -> the nodes whose tensors, or odd numbers, it reads
        self._done: set[fx.Node] = set()
        self._precise = functools.cache(lambda: shared_copy(model).double())

    def run(self) -> TracedModel:
        """Build all layers. Raise Untraceable if a submodule, or the model as a whole, cannot be traced."""
        nodes, values = self.traced.nodes, self.values
        for node in nodes:
            reads = dict.fromkeys(values.reads[node].values())
            if node in self._norms:
                reads = dict.fromkeys(n for n in reads if n.op != "get_attr")
            self._waits[node] = [n for n in reads if n in values.odd or tensors_of(values[n][0])]
        together = [[n for n in nodes if keys & self._keys_of(n)] for keys in self.together]
        for region in _regions(nodes, self._waits, values, [group for group in together if len(group) > 1]):
            self._members |= dict.fromkeys(region, region)
        for node in nodes:
            try:
                self._emit(node, [])
            except Untraceable as reason:
                raise reason if any(reason.where) else Untraceable(str(reason), node.meta["where"]) from None
        names: list[str] = []
        for node in (n for n in nodes if n.op == "output" or is_form(n)):
            if folded := next((n for n in values.reads[node].values() if n in values.folded), None):
                raise Untraceable(f"the first axis of {folded.name} is not the batch")
        (result,), _ = self._arguments(nodes[-1], names, {})
        if not names or mentions_batch(result):
            raise Untraceable("it returns something that is not a tensor")
        shared = {name for users in self._uses.values() if len(set(users)) > 1 for name in users}
        layers = {name: replace(layer, shared=name in shared) for name, layer in self._layers.items()}
        if any(layer.recomputed and layer.called_everywhere for layer in layers.values()):
            raise Untraceable("it is checkpointed, and changes state in both of its forwards")
        graph = Graph(type(self.model).__name__, layers, tuple(names))
        return TracedModel(graph, self._operations, result, self.traced.seen)

    def _values(self, meta: nn.Module, specs: Sequence[Spec], *, folds: bool = False) -> NodeValues:
        values = NodeValues(self.model, meta, specs, self.traced.constants, folds)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            for node in self.traced.nodes:
                values.visit(node, counter)
        read = [n for node in self.traced.nodes if self._is_norm(node) for n in values.reads[node].values()]
        folded = not folds and any(rows_in(values[n]) > 1 for n in read)
        return self._values(meta, specs, folds=True) if folded else values

    def _is_norm(self, node: fx.Node) -> bool:
        of_module = node.op == "call_module" and is_batch_norm(self.model.get_submodule(str(node.target)))
        return (of_module or node in self._norms) and isinstance(next(iter(node.args), None), fx.Node)

    def _keys_of(self, node: fx.Node) -> set[str]:
        module = self._module(node)
        if module is None or node in self._norms:
            return set()  # a bare parameter has no batch axis, so it cannot be an output of a region
        return {self._keys[f"{node.target}.{key}"] for key, _ in module.named_parameters()}

    def _emit(self, node: fx.Node, above: list[list[fx.Node]]) -> None:
        """Build the layer of a node, or of its region, after the layers that it reads."""
        if node in self._done or node.op == "output":
            return
        group = self._members.get(node, [node])
        if group in above:
            raise Untraceable("two odd regions of it wait for each other", node.meta["where"])
        for member in group:
            for read in self._waits[member]:
                if read not in group and read not in self._done:
                    self._emit(read, [*above, group])
        folds = not self._is_norm(node) and any(n in self.values.folded for n in (node, *self._waits[node]))
        if len(group) > 1 or node in self.values.odd or (folds and tensors_of(self.values[node][0])):
            self._add_region(group)
        elif tensors_of(self.values[node][0]) and not is_form(node):
            # A parameter or buffer that only batch norms read, or one region, belongs to their layers.
            regions = [self._members.get(user) for user in node.users]
            of_region = bool(regions) and regions[0] is not None and all(each is regions[0] for each in regions)
            of_norms = bool(regions) and all(user in self._norms for user in node.users)
            if node.op != "get_attr" or not (of_region or of_norms):
                self._add(node)
        self._done.update(group)

    def _add(self, node: fx.Node) -> None:
        source = self.values.reads[node].get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if node.target is operator.getitem and source in self._items:
            (of, items), index = self._items[source], node.args[1]
            parts = (index.start, index.stop, index.step) if isinstance(index, slice) else ()
            if isinstance(index, slice) and not any(isinstance(part, fx.Node) for part in parts):
                self._items[node] = (of, items[index])  # several tensors
            elif isinstance(index, int):
                self._names[node] = self._item(of, items[index])
            else:
                raise Untraceable(f"{node.name} picks by something else than a number", node.meta["where"])
            return
        refs: list[str] = []
        operation = self._operation(node, *self._arguments(node, refs, {}))
        path = str(node.target) if node.op in ("call_module", "get_attr") else self._norms.get(node)
        name = self._unused_name(path or node.name)
        parameters = self._parameters(node, name)
        small, (_, large), folded = self._between(node), self.values[node], node in self.values.folded
        several, first = not isinstance(small, Tensor), tensors_of(small)[0]
        if several:
            fixed = all(isinstance(a, Tensor) and a.shape == b.shape for a, b in zip(small, large, strict=True))
            batched = not fixed or any(self._layers[i].batched for i in refs)
        else:
            batched = rows_in(self.values[node]) > 0
        layer = Layer(
            name, "opaque", tuple(refs), tuple(first.shape[batched:]), parameters, flop=self.values.flop[node],
            dtype=dtype_name(first.dtype), differentiable=self.values.passes_gradient(node), several=several, batched=batched,
            recomputed=node.meta["recomputed"],
        )  # fmt: skip
        found = self._known(node, operation, layer)
        operation = found.operation or operation
        if folded:
            operation = Operation("batch_norm", str(path), operation.args, {"folded": True})
        layer = replace(
            layer, kind=found.kind, groups=found.groups, axis=2 if folded else found.axis, statistics=found.statistics,
            cuts=found.cuts, windows=found.windows, normalised=found.normalised,
        )  # fmt: skip
        layer = self._with_samples(node, operation, layer, found)
        if saved := self.values.saved(node):
            names = [self._names.get(n) for n in saved[0] if n is not None]
            places = [i for i, read in enumerate(refs) if read in names] + ([-1] if None in saved[0] else [])
            layer = replace(layer, saved=tuple(places), saved_bytes=saved[1])
        self._names[node], self._shown[name] = name, small
        self._layers[name], self._operations[name] = layer, operation
        if not found.trusted:
            check_cuts(self.model, layer, operation, self._trial_inputs(layer), found.like)
        if layer.several:
            self._items[node] = (name, range(len(small)))

    def _item(self, name: str, item: int, *, of_batch: bool = False) -> str:
        """Return the layer that picks one tensor of a layer's output. `of_batch`: it is one value for the global batch."""
        picked = f"{name}[{item}]"
        if picked not in self._layers:
            source, small = self._layers[name], self._shown[name][item]
            batched = source.batched and not of_batch
            self._layers[picked] = Layer(
                picked, "pick", (name,), tuple(small.shape[batched:]), dtype=dtype_name(small.dtype), batched=batched,
                differentiable=source.differentiable and is_floating(small),
            )  # fmt: skip
            self._operations[picked] = Operation("function", operator.getitem, (Ref(0), item))
            self._shown[picked] = small
        return picked

    def _add_region(self, group: Sequence[fx.Node]) -> None:
        """Build one layer from the calls of a region. Its outputs are the values that other layers read."""
        values = self.values
        refs, calls, folds = list[str](), list[fx.Node](), list[fx.Node]()
        for node in group:
            for read in self._waits[node]:
                if read.op == "get_attr" and read not in self._names:
                    if read not in calls:
                        calls.append(read)
                elif read not in group:
                    self._lowered(read, functools.partial(_ref, refs))
                    folds += [read] if read in values.folded and read not in folds else []
            calls.append(node)
        at = {node: Ref(len(refs) + i) for i, node in enumerate([*folds, *calls])}
        operations = [Operation("function", torch.flatten, (_ref(refs, self._names[n]), 0, 1)) for n in folds]
        operations += [self._operation(node, *self._arguments(node, refs, at)) for node in calls]
        read_outside = {n for reader, reads in values.reads.items() if reader not in group for n in reads.values()}
        gives = [n for n in group if n in read_outside and (n not in values.odd or n in values.of_batch)]
        gives = [n for n in gives if tensors_of(values[n][0])]
        if not gives:
            return
        several = len(gives) > 1 or gives[0] in values.of_batch
        inner = {at[n]: not n.meta["no_grad"] for n in calls}
        for n in gives:
            if n in values.folded:
                operations.append(Operation("method", "unflatten", (at[n], 0, (BatchExtent(1), values.folded[n]))))
                at[n] = Ref(len(refs) + len(operations) - 1)
        graded = tuple(inner.get(Ref(len(refs) + i), True) for i in range(len(operations)))
        target = Region(tuple(operations), graded, tuple(at[n].index for n in gives), several)
        operation = Operation("region", target, tuple(Ref(i) for i in range(len(refs))))
        odd = [n for n in group if n in values.odd]
        with_keys = [str(n.target) for n in group if n.op == "call_module" and (self._keys_of(n) or len(group) == 1)]
        name = self._unused_name(with_keys[0] if len(with_keys) == 1 else [*odd, group[0]][0].name)
        paths = [str(n.target) for n in calls if n.op == "call_module"] + [
            self._norms[n] for n in calls if n in self._norms
        ]
        parameters = {p.key: p for node in calls for p in self._parameters(node, name).values()}
        small = [self._between(n) for n in gives]
        layer = Layer(
            name, "opaque", tuple(refs), tuple(small[0].shape[1:]), parameters, several=several,
            flop=sum(values.flop[n] for n in calls), dtype=dtype_name(small[0].dtype),
            differentiable=any(map(is_floating, small)) and any(values.passes_gradient(n) for n in group),
            random=any(map(self._draws, calls)),
            recomputed=any(n.meta["recomputed"] for n in calls),
        )  # fmt: skip
        why = "it is one layer in the other mode" if len(group) > 1 else "a sample has several rows of it"
        why = values.odd[odd[0]] if odd else why
        mixes = any(n in values.mixing for n in group)
        known = len(group) == 1 and self._by_row(group[0])
        self._layers[name] = layer if known else self._tried(operation, layer, paths, why, mixes=mixes)
        self._operations[name], self._shown[name] = operation, tuple(small) if several else small[0]
        for i, node in enumerate(gives):
            self._names[node] = self._item(name, i, of_batch=node in values.of_batch) if several else name

    def _between(self, node: fx.Node) -> Any:
        """Return a node's value for the smaller batch as between layers, where rows of a sample have an axis of their own."""
        rows = self.values.folded.get(node)
        return self.values[node][0] if rows is None else self.values[node][0].unflatten(0, (BATCHES[0], rows))

    def _by_row(self, node: fx.Node) -> bool:
        """Return whether a call makes as many rows per sample as it reads, and its kind computes each row separately."""
        refs, rows = list[str](), {self.values.folded.get(n) for n in (node, *self._waits[node]) if n.op != "get_attr"}
        operation = self._operation(node, *self._arguments(node, refs, {}))
        if len(rows) > 1 or None in rows:
            return False
        read = [self._layers[name] for name in refs]
        # The rows of one sample are a batch.
        shapes, batched = tuple(layer.shape for layer in read), tuple(layer.batched for layer in read)
        found = known(Call(operation, self._module(node), shapes, batched, tuple(self._between(node).shape[1:])))
        counts = mentions_batch((operation.args, dict(operation.kwargs)))
        return found is not None and found.trusted and not found.whole_batch and (found.kind == "flatten" or not counts)

    def _arguments(self, node: fx.Node, refs: list[str], at: dict[fx.Node, Ref]) -> tuple[Any, Any]:
        """Return a call's arguments with placeholders. Add the layers that it reads to `refs`; `at`: values in its region."""

        def lower(n: fx.Node) -> Any:
            n = self.values.reads[node][n]
            if n in at and (n in self.values.odd or tensors_of(self.values[n][0])):
                return at[n]
            return self._lowered(n, functools.partial(_ref, refs), at)

        given = (node.args[:1], {}) if node in self._norms else (node.args, node.kwargs)
        return fx.node.map_arg(given, lower)

    def _lowered(self, n: fx.Node, ref: Callable[[str], Ref], at: Mapping[fx.Node, Ref] = MappingProxyType({})) -> Any:
        """Return the placeholder, or the constant, for a node's value from outside the region."""
        if is_form(n):
            assert callable(n.target)

            def part(m: fx.Node) -> Any:
                m = self.values.reads[n][m]
                return at[m] if m in at else self._lowered(m, ref, at)

            args, kwargs = fx.node.map_arg((n.args, n.kwargs), part)
            return Form(n.target, tuple(args), dict(kwargs))
        if n in self._items:
            name, items = self._items[n]
            return tuple(ref(self._item(name, item)) for item in items)
        return ref(self._names[n]) if n in self._names else self.values.constant(n)

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
        if node in self._norms:
            return Operation("batch_norm", self._norms[node], args)
        pure = IN_PLACE.get(called(node))
        if pure is None:
            return Operation("method" if node.op == "call_method" else "function", node.target, args, kwargs)
        home = next(home for home in (operator, torch, nn.functional) if hasattr(home, pure))
        return Operation("function", getattr(home, pure), args, kwargs)

    def _unused_name(self, name: str) -> str:
        if name in self._layers:
            name = f"{name}#{sum(other.partition('#')[0] == name for other in self._layers) + 1}"
        return name

    def _module(self, node: fx.Node) -> nn.Module | None:
        path = str(node.target) if node.op == "call_module" else self._norms.get(node)
        return None if path is None else self.model.get_submodule(path)

    def _known(self, node: fx.Node, operation: Operation, layer: Layer) -> Known:
        """Return the kind of a layer, and its possible cuts."""
        if node.op in ("placeholder", "get_attr"):
            return Known("input" if node.op == "placeholder" else "parameter")
        if node in self._norms:
            norm: Any = self._module(node)
            return Known("batch_norm", statistics=norm.training or norm.running_mean is None)
        if called(node) == "stochastic_depth" and not draws_random(node):
            return Known("elementwise")
        batched = tuple(self._layers[name].batched for name in layer.inputs)
        if not layer.batched or layer.several or not any(batched):
            return Known("opaque")
        inputs = tuple(self._layers[name].batch_shape(BATCHES[0]) for name in layer.inputs)
        call = Call(operation, self._module(node), inputs, batched, layer.batch_shape(BATCHES[0]))
        return known(call) or Known("opaque")

    def _parameters(self, node: fx.Node, name: str) -> dict[str, Parameter]:
        """Return the parameters and buffers of a call, and record that layer `name` uses them."""
        module, path = self._module(node), self._norms.get(node, str(node.target))
        rows: dict[str, Tensor] = {}
        if module is not None:
            inside = node not in self._norms
            rows = dict(module.named_parameters(recurse=inside)) | dict(module.named_buffers(recurse=inside))
        elif node.op == "get_attr" and path in self._keys:
            rows = {"": operator.attrgetter(path)(self.model)}
        result = {}
        for key, tensor in rows.items():
            full = self._keys[f"{path}.{key}".strip(".")]
            is_buffer = not isinstance(tensor, nn.Parameter)
            trainable = tensor.requires_grad and not is_buffer
            result[key] = Parameter(full, tuple(tensor.shape), trainable, is_buffer)
            self._uses.setdefault(full, []).append(name)
        return result

    def _draws(self, node: fx.Node) -> bool:
        """Return whether a call draws random numbers."""
        module = self._module(node)
        return draws_random(node) if module is None else node not in self._norms and has_dropout(module)

    def _with_samples(self, node: fx.Node, operation: Operation, layer: Layer, found: Known) -> Layer:
        """Return the layer, with the information whether it draws random numbers and whether samples are independent."""
        module, layer = self._module(node), replace(layer, random=self._draws(node))
        counts = mentions_batch((operation.args, dict(operation.kwargs)))
        if counts and found.operation is None and layer.kind not in ("opaque", "flatten", "cat"):
            # A number computed from the batch size refers to the global batch, not to this device's samples.
            layer = replace(layer, kind="opaque", cuts=(), groups=1)
        if found.whole_batch:
            return replace(layer, per_sample=False, reason=f"{found.whole_batch}, so it runs whole on one device")
        if layer.kind != "opaque" and found.trusted:
            return layer
        what = type(module).__name__ if module is not None else node.name
        why = f"no rule splits the channels of {what}" if found.trusted else ""
        paths = [str(node.target)] if module is not None else []
        return self._tried(operation, layer, paths, why, registered=not found.trusted)

    def _trial_inputs(self, layer: Layer, *, registered: bool = False) -> TrialInputs:
        like, batched = [self._shown[i] for i in layer.inputs], [self._layers[i].batched for i in layer.inputs]
        return TrialInputs(like, batched, registered)

    def _tried(
        self,
        operation: Operation,
        layer: Layer,
        modules: Sequence[str],
        why: str,
        *,
        mixes: bool = False,
        registered: bool = False,
    ) -> Layer:
        """Run an opaque layer on random numbers, to find out whether it needs the global batch. Return it with the result.

        Args:
            mixes: whether it is known to combine several samples.
            registered: whether it was registered as a layer with independent samples.
        """
        if not layer.batched:
            return replace(layer, reason="it has no batch axis, so every device makes it")
        if any(p.is_meta for p in self.model.parameters()):
            raise Untraceable(layer.name)
        inputs = self._trial_inputs(layer, registered=registered)
        if mixes:
            return replace(layer, per_sample=False, reason=f"{why}; so it runs whole on one device")
        if layer.random and not modules:
            # Random results cannot show whether samples are independent; but these functions draw separately for each entry.
            return replace(layer, reason=why)
        state = State(
            {path: m for each in modules for path, m in subtree(self.model, each).items()} if registered else {}
        )
        hidden, before = state.hidden(), state.forms()
        found = per_sample(self.model, operation, self._precise, inputs, modules)
        kept = hidden or next(map(repr, changed(before, state.forms())), "")
        if found.overwrites:
            raise Untraceable(f"{layer.name} overwrites its input")
        if found.each and layer.random:
            raise Untraceable(f"{layer.name} changes its buffers, and draws random numbers", *modules)
        if registered and (kept or found.dependence):
            raise InputError(
                f"layer {layer.name!r} was registered with register_layer, which is for layers that treat each sample alone, "
                f"but {f'it keeps {kept} in Python from call to call' if kept else found.dependence}: do not register it"
            )
        reason = "; ".join(filter(None, (why, found.dependence)))
        return replace(layer, per_sample=not found.dependence, reason=reason, called_everywhere=found.each)


def _ref(refs: list[str], name: str) -> Ref:
    if name not in refs:
        refs.append(name)
    return Ref(refs.index(name))


def canonical_keys(model: nn.Module) -> dict[str, str]:
    """Map each state_dict key to the first key of the same tensor (tied weights have several keys)."""
    first: dict[int, str] = {}
    rows = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {key: first.setdefault(id(tensor), key) for key, tensor in rows}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _regions(
    nodes: Sequence[fx.Node],
    reads: Mapping[fx.Node, Collection[fx.Node]],
    values: NodeValues,
    together: Sequence[Collection[fx.Node]],
) -> list[list[fx.Node]]:
    """Group nodes into regions. All readers of a value that cannot be passed between layers join its region.

    Args:
        reads: node -> the nodes whose tensors, or odd numbers, it reads.
        together: groups of nodes that must be in one region for another reason.

    Raise Untraceable if an odd value is an input or an output of the model.
    """
    odd = values.odd
    order = {node: place for place, node in enumerate(nodes)}
    users: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    above: dict[fx.Node, int] = {}  # node -> a bit for each node that it depends on, and its own
    for node in nodes:
        above[node] = functools.reduce(operator.or_, map(above.__getitem__, reads[node]), 1 << order[node])
        for read in reads[node]:
            users[read].append(node)
    groups: dict[fx.Node, set[fx.Node]] = {node: {node} for node in nodes}
    for group in together:
        _unite(groups, group)
    for node in odd:
        returned = [n for n in users[node] if node in values.of_batch and (n.op == "output" or is_form(n))]
        _unite(groups, [node, *(n for n in users[node] if n not in returned)])
    before, count = 0, len(nodes) + 1
    while count != before:
        before = count
        found = {id(g): g for g in groups.values() if len(g) > 1 or not odd.keys().isdisjoint(g)}
        for group in found.values():
            for node in group.copy():
                # A region cannot output a value that consists of several tensors.
                small = values[node][0] if node.op != "output" else None
                if isinstance(small, tuple | list) and tensors_of(small):
                    _unite(groups, [node, *users[node]])
            current = groups[next(iter(group))]
            # The nodes on paths between two nodes of the group.
            own = sum(1 << order[node] for node in current)
            ahead = functools.reduce(operator.or_, map(above.__getitem__, current))
            _unite(groups, [*current, *(n for n in nodes if above[n] & own and ahead >> order[n] & 1)])
        count = len({id(group) for group in groups.values()})
    result = [sorted(g, key=order.__getitem__) for g in found.values() if len(g) > 1 or not odd.keys().isdisjoint(g)]
    for region in result:
        for node in region:
            if node.op in ("placeholder", "output"):
                why = next((odd[n] for n in region if n in odd), "")
                raise Untraceable(why, "" if node.op == "output" else node.meta["where"])
    return result


def _unite(groups: dict[fx.Node, set[fx.Node]], nodes: Collection[fx.Node]) -> None:
    union: set[fx.Node] = set().union(*(groups[node] for node in nodes))
    for node in union:
        groups[node] = union
