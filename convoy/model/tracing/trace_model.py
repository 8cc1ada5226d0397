"""Turns an nn.Module into a TracedModel: layer by layer where torch.fx can follow it, else with submodules kept whole.

Nothing is tried: a trace is right because what torch.fx would lose is noticed while it traces (`nodes.py`, `values.py`), and
because Python state that it has read may not change (`python_state.py`).
"""

import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode

from convoy.errors import InputError
from convoy.model.graph import Graph, Layer, Parameter
from convoy.model.operation import Form, Operation, Ref, Region, TracedModel
from convoy.model.tracing.hooks import copied, mute, with_hooks
from convoy.model.tracing.layers import LayerBuilder, canonical_keys, dtype_name, noted_by_each, whole
from convoy.model.tracing.node_values import (
    BATCHES,
    Spec,
    Untraceable,
    across,
    is_batched,
    meta_inputs,
    on_meta,
    without_batch,
)
from convoy.model.tracing.python_state import State, modes_of, subtree
from convoy.model.tracing.shared_copy import release, shared_tensors
from convoy.model.tracing.tracer import TRACE_LOCK, Nodes, nodes_of
from convoy.model.tracing.trials import (
    TrialInputs,
    first_line,
    has_dropout,
    is_floating,
    observe,
    run_on_random,
    tensors_of,
)


def trace(
    model: nn.Module, example: Tensor | Sequence[Tensor], *, training: bool = True, like: TracedModel | None = None
) -> TracedModel:
    """Trace a model into layers and the operations that compute them. The model itself is not changed.

    Args:
        model: an ordinary module on any device, the meta device too where all layers are of known kinds; its inputs are
            tensors whose first axis is the batch.
        example: one batch of each input; only shape and dtype matter.
        training: trace what the model does in training (dropout, batch statistics, auxiliary outputs) or in evaluation.
        like: a trace of the same model in the other mode; what is one layer there is one layer here, so that both
            modes keep parameters in the same layers.

    Raises:
        InputError: the model cannot be copied, does not run on the example, returns something else than tensors, or does
            what no trace can repeat.
    """
    if isinstance(example, Mapping):
        raise InputError(
            f"the example is a dict ({', '.join(map(str, example))}): give the inputs as a tuple of tensors, in the order in "
            "which forward takes them"
        )
    examples = (example,) if isinstance(example, Tensor) else tuple(example)
    if not examples or any(not isinstance(e, Tensor) or e.dim() == 0 for e in examples):
        raise InputError("the example must be a batch: tensors whose first axis is the batch; give e.g. x[:2]")
    inner = unwrapped(model)
    lazy = [k for k, t in (*inner.named_parameters(), *inner.named_buffers()) if is_lazy(t)]
    if lazy:
        raise InputError(
            f"{lazy[0]!r} of {type(inner).__name__} has no shape yet: call the model once on a batch before it is distributed"
        )
    for path, module in inner.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise InputError(
                f"module {path or 'the model itself'!r} was made by torch.jit, which keeps its parameters to itself: "
                "distribute the module that it was made of"
            )
    try:
        local = mute(copied(inner, shared_tensors(inner)))
        local = local if _on_meta(local) else local.cpu()
    except Exception as error:  # whatever an attribute of it does when it is copied
        raise InputError(
            f"{type(inner).__name__} cannot be copied ({first_line(error)}): what is computed from parameters is no state "
            "of a module; torch.nn.utils.parametrizations has forms that can be copied. Leave out attributes that "
            "copy.deepcopy refuses"
        ) from error
    if not training or not local.training:  # frozen parts of a model in training stay as they are
        local.train(training)
    specs = [(tuple(e.shape[1:]), e.dtype) for e in examples]
    with TRACE_LOCK, State(dict(local.named_modules())).kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a model warns of, it warns of when it is trained
        capture = _Capture(local, specs, [tuple(e.shape) for e in examples], like)
        traced = with_hooks(local, capture.run(), inner)
    modes = modes_of(local)
    release(local)
    if capture.overwrites and training:
        warnings.warn(
            f"{type(inner).__name__} overwrites its input in forward; distributed, it leaves the tensors that it is given as "
            "they are. Begin forward with x = x.clone(), and one device does so, too",
            stacklevel=2,
        )
    return replace(traced, modes=modes)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside what torch.compile, DataParallel or DistributedDataParallel made of it."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        if isinstance(model, wrappers):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


_OBSERVED = 8
"""Samples, at most, with which a layer of the user's Python is called once."""


class _Capture:
    """One model in one mode on its way to a trace.

    Args:
        model: a copy that nobody else uses.
        specs: of each input, the shape of a sample and the type.
        shapes: of the examples, as they were given.
        like: see `trace`.

    Attributes:
        overwrites: whether the model overwrites its inputs.
    """

    def __init__(
        self, model: nn.Module, specs: Sequence[Spec], shapes: Sequence[tuple[int, ...]], like: TracedModel | None
    ) -> None:
        self.model, self.specs, self.shapes, self.like = model, list(specs), shapes, like
        self.samples = min(max(shapes[0][0], BATCHES[0]), _OBSERVED)
        self.meta = on_meta(model)
        self.why: dict[str, str] = {}
        self.overwrites = False
        self.together: list[set[str]] = []
        self.elsewhere = noted_by_each(like.graph) if like is not None else {}
        if like is not None:
            regions = [n for n, operation in like.operations.items() if operation.call == "region"]
            self.together = [{p.key for p in like.graph[n].parameters.values()} for n in regions]

    def run(self) -> TracedModel:
        leaves = frozenset(self.like.whole) if self.like is not None else frozenset()
        try:
            if "" in leaves:
                raise Untraceable("it is one layer in the other mode")
            while True:
                try:
                    traced, readers = self._traced(leaves)
                except Untraceable as reason:
                    if not reason.where or reason.where in leaves:
                        raise
                    readers = {reason.where: str(reason)}
                if not readers:
                    return traced
                self.why |= readers
                if "" in readers:
                    raise Untraceable(readers[""])
                leaves |= frozenset(readers)
        except Untraceable as reason:
            if _on_meta(self.model):
                raise self._needs_weights(str(reason)) from None
            return self._as_one_layer(str(reason))

    def _traced(self, leaves: frozenset[str]) -> tuple[TracedModel, dict[str, str]]:
        """The trace with these leaves, and which modules must stay whole, too, and why."""
        nodes = nodes_of(self.model, self.meta, self.specs, leaves)
        named = replace(nodes, whole={**nodes.whole, **{path: why for path, why in self.why.items() if why}})
        builder = LayerBuilder(self.model, self.meta, named, self.specs, self.together, self.elsewhere, self.samples)
        traced = builder.run()
        self.overwrites = builder.values.overwrites
        if _on_meta(self.model):
            opaque = [name for name, layer in traced.graph.layers.items() if layer.kind == "opaque"]
            if opaque:
                raise self._needs_weights(opaque[0])
        return traced, self._readers(nodes, builder.changed)

    def _readers(self, nodes: Nodes, changed: Mapping[str, str]) -> dict[str, str]:
        """Modules that a trace sees through whose code names an attribute that another forward changes."""
        keys = {what.strip("'").rpartition(".")[2] for what in changed.values() if what}
        found = {}
        for path in nodes.seen:
            if read := State({path: self.model.get_submodule(path)}).names & keys:
                found[path] = f"its forward reads {min(read)!r}, which another forward changes"
        return found

    # --- the model as one layer --------------------------------------------------------------------------------------

    def _as_one_layer(self, why: str) -> TracedModel:
        """One layer with the reason `why` there is only one, and a `pick` for each output where there are several.

        Raises:
            InputError: it does not run on inputs of these shapes, or returns something else than tensors with a batch axis.
        """
        model = self.model
        inputs = {f"input{i}" if i else "input": spec for i, spec in enumerate(self.specs)}
        layers = {n: Layer(n, "input", (), shape, dtype=dtype_name(dtype)) for n, (shape, dtype) in inputs.items()}
        operations: dict[str, Operation] = {name: Operation("input", name) for name in inputs}
        with FlopCounterMode(display=False) as counter:
            value, outputs, batched = self._outputs()
        several = not isinstance(value, Tensor) or batched[0] is not None
        operation = Operation("module", "", tuple(Ref(i) for i in range(len(inputs))))
        if several:
            form = _result_form(value, count())
            flat = Operation("function", partial(_flat, type(model).__name__, repr(form)), (Ref(len(inputs)),))
            target = Region((operation, flat), (True, True), (len(inputs) + 1,), several=False)
            operation = Operation("region", target, operation.args)
        layer = Layer(
            "model", "opaque", tuple(inputs), tuple(outputs[0].shape[1:]), _parameters(model), several=several,
            dtype=dtype_name(outputs[0].dtype), random=has_dropout(model),
            differentiable=any(is_floating(t) for t in outputs), flop=counter.get_total_flops() // sum(BATCHES),
        )  # fmt: skip
        given = TrialInputs(meta_inputs(self.specs, BATCHES[0]), [True] * len(self.specs), self.samples)
        seen = observe(model, operation, subtree(model), given)
        layers["model"] = whole(layer, seen, why, self.elsewhere)
        operations["model"] = operation
        if not several:
            graph = Graph(type(model).__name__, layers, ("model",))
            return TracedModel(graph, operations, Ref(0), whole=("",))
        names = tuple(f"model[{i}]" for i in range(len(outputs)))
        for i, (name, t, axes) in enumerate(zip(names, outputs, batched, strict=True)):
            rows = axes is None
            layers[name] = Layer(
                name, "pick", ("model",), tuple(t.shape[1:]) if rows else without_batch(t.shape, axes or ()),
                dtype=dtype_name(t.dtype), differentiable=is_floating(t), batched=rows, across=axes or (),
            )  # fmt: skip
            operations[name] = Operation("function", operator.getitem, (Ref(0), i))
        graph = Graph(type(model).__name__, layers, names)
        return TracedModel(graph, operations, form, whole=("",))

    def _outputs(self) -> tuple[Any, list[Tensor], list[tuple[int, ...] | None]]:
        """What the model returns for the smaller of two batches, its tensors, and the `Layer.across` of those without rows."""
        model = self.model
        try:
            values = [run_on_random(model, meta_inputs(self.specs, batch), {}) for batch in BATCHES]
        except Exception as error:
            raise self._does_not_run(error) from error
        small, large = (tensors_of(value) for value in values)
        forms = [_result_form(value, count()) for value in values]
        if not small or repr(forms[0]) != repr(forms[1]):  # of which NaN is equal to itself
            odd = " with something beside tensors that is another one for other batches" if small else ""
            raise InputError(
                f"{type(model).__name__} returns {type(values[0]).__name__}{odd}: return a tensor, or a nest of tuples, dicts "
                "and dataclasses of tensors"
            )
        pairs = list(zip(small, large, strict=True))
        if any(a.shape != b.shape and not across((a, b)) for a, b in pairs):
            raise InputError(
                f"{type(model).__name__} returns a tensor whose size goes with the batch, but is not that of the batch: return "
                "one row per sample, one value for the batch, or a value for each pair of samples"
            )
        return values[0], small, [None if is_batched(pair) else across(pair) for pair in pairs]

    # --- refusals ----------------------------------------------------------------------------------------------------

    def _does_not_run(self, error: Exception) -> InputError:
        told = f"{type(self.model).__name__} does not run on the example ({first_line(error)}): "
        norm = next((path for path, module in self.model.named_modules() if isinstance(module, nn.SyncBatchNorm)), None)
        if norm is not None:
            return InputError(
                f"{told}{norm!r} is a SyncBatchNorm; of a distributed model every batch norm takes the statistics of the whole "
                "batch: leave convert_sync_batchnorm out"
            )
        sample = [(shape, dtype) for shape, (_, dtype) in zip(self.shapes, self.specs, strict=True)]
        if _runs(self.model, sample):
            return InputError(
                f"{told}it is one sample, {' and '.join(map(str, self.shapes))}, without the axis of the batch: give "
                "example[None], or one batch of the loader"
            )
        return InputError(
            f"{told}it was given {BATCHES[0]} and {BATCHES[1]} samples of random numbers with the shapes of the example; give "
            "one batch of each of its inputs, as its forward takes them"
        )

    def _needs_weights(self, part: str) -> InputError:
        return InputError(
            f"{type(self.model).__name__} has parameters on the meta device, and a part of it must be run to know how it "
            f"treats samples ({part}): give a model with weights"
        )


def _flat(model: str, form: str, value: Any) -> list[Tensor]:
    """The tensors that a model returned, where what is beside them is as it was when it was traced."""
    if repr(_result_form(value, count())) != form:  # of which NaN is equal to itself
        raise InputError(
            f"{model} returned something beside its tensors that it did not return when it was distributed: a number, a text "
            "or another nest. Return tensors, or compute it from what the model returns"
        )
    return tensors_of(value)


def _runs(model: nn.Module, specs: Sequence[Spec]) -> bool:
    try:
        run_on_random(model, meta_inputs(specs, 2), {})
    except Exception:
        return False
    return True


def _on_meta(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())


def _result_form(value: Any, number: Iterator[int]) -> Any:
    """What the model returns, with `Ref(i)` for its tensor i."""

    def each(values: Any) -> list[Any]:
        return [_result_form(v, number) for v in values]

    if isinstance(value, Tensor):
        return Ref(next(number))
    if is_dataclass(value) and not isinstance(value, type):
        keys = [f.name for f in fields(value) if f.init]
        return Form(type(value), (), dict(zip(keys, each(getattr(value, k) for k in keys), strict=True)))
    if isinstance(value, dict):
        filled = dict(zip(value, each(value.values()), strict=True))
        return filled if type(value) is dict else Form(type(value), (filled,))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Form(type(value), tuple(each(value)))
    return type(value)(each(value)) if isinstance(value, tuple | list) else value


def _parameters(model: nn.Module) -> dict[str, Parameter]:
    keys = canonical_keys(model)
    rows = [(k, p, False) for k, p in model.named_parameters()] + [(k, b, True) for k, b in model.named_buffers()]
    return {k: Parameter(keys[k], tuple(t.shape), t.requires_grad and not b, b) for k, t, b in rows}
