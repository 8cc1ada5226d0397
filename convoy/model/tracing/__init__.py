"""Turns an nn.Module into a TracedModel: layer by layer where torch.fx can follow it, else with submodules kept whole.

`tracer.py` gets the calls from torch.fx; `node_values.py` evaluates them for two batch sizes; `layer_builder.py` makes the
layers, with their kinds (`supported_layers.py`). `python_state.py` finds values other than tensors that code reads;
`trials.py` runs a layer that no rule splits, to find out how it must be computed.
"""

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode

from convoy.errors import InputError
from convoy.model.graph import Graph, Layer, Parameter
from convoy.model.nested import CallForm, Example, tensors_of, without_tensors
from convoy.model.operation import Operation, Ref, Region, TracedModel, disable_in_place, fill
from convoy.model.split_rules import register_layer
from convoy.model.tracing.copies import (
    KINDS,
    ON_PARAMETERS,
    copied,
    hooked,
    meta_copy,
    on_weights,
    release,
    shared_parameters,
)
from convoy.model.tracing.layer_builder import LayerBuilder, canonical_keys, dtype_name, whole
from convoy.model.tracing.node_values import BATCHES, Spec, Untraceable, is_batched, meta_inputs
from convoy.model.tracing.python_state import State, StateWatch, changed, modes_of, subtree
from convoy.model.tracing.tracer import TRACE_LOCK, GivenUp, nodes_of
from convoy.model.tracing.trials import TrialInputs, first_line, has_dropout, is_floating, observe, run_on_random

__all__ = ["Example", "StateWatch", "TracedModel", "disable_in_place", "register_layer", "trace", "unwrapped"]

_MOST_SAMPLES = 8
"""The most samples in a trial call of a layer with user code."""


def trace(
    model: nn.Module, example: Example, *, training: bool | None = True, like: TracedModel | None = None
) -> TracedModel:
    """Trace a model into layers and the operations that compute them. The model itself is not changed.

    Args:
        model: an ordinary module on any device (the meta device only if all layers are of known kinds). The first axis of
            all tensors that it is given is the batch.
        example: a batch, or arguments of forward: by position in a tuple, by name in a dict. Of tensors, also in nested tuples,
            lists, dicts and dataclasses, only shape and dtype matter; other values are constants.
        training: trace the model in training (dropout, batch statistics, auxiliary outputs) or in evaluation; None: as it is.
        like: another trace of the same model. Calls that form one layer there also form one here, so that both have the
            parameters in the same layers.

    Raises:
        InputError: the model cannot be copied or traced, does not run on the example, or returns values other than tensors.
    """
    inner = unwrapped(model)
    check_parameters(inner)
    call, examples = CallForm.of(inner, example)
    lengths = {e.shape[:1] for e in examples}
    if len(lengths) != 1 or torch.Size() in lengths:
        shapes = ", ".join(f"{name} of {tuple(e.shape)}" for name, e in zip(call.names, examples, strict=True))
        raise InputError(
            f"the example must be one batch: tensors whose first axis is the batch, not {shapes or 'none'}; give e.g. x[:2], "
            "and keep tensors without that axis in buffers of the model"
        )
    state = State(dict(inner.named_modules()))
    with TRACE_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model's own warnings appear again in training
        before = state.forms()
        capture = _Capture(partial(_copied, inner, training), call, examples, like)
        traced = capture.run()
        traced = replace(_with_hooks(capture.model, traced, inner), modes=modes_of(capture.model), call=call)
        release(capture.model)
        names = changed(before, state.forms())
    if names:
        raise InputError(
            f"a forward of {type(inner).__name__} changes {names[0]!r} outside of its module, as did tracing: keep it in an "
            "attribute of the module"
        )
    if capture.overwrites and training:
        warnings.warn(
            f"{type(inner).__name__} overwrites its input in forward; the distributed model does not change its input. Begin "
            "forward with x = x.clone(), for the same behaviour on one device",
            stacklevel=2,
        )
    if training and any(layer.recomputed for layer in traced.graph.layers.values()):
        note = "checkpoints activations. The distributed model computes the same numbers, but keeps them in memory"
        warnings.warn(f"{type(inner).__name__} {note}", stacklevel=2)
    return traced


def _copied(model: nn.Module, training: bool | None) -> nn.Module:
    """Return a copy on the CPU, in this mode (None: unchanged), without the user's hooks, which must not run in a trace."""
    try:
        local = copied(model, shared_parameters(model))
        local = local if _is_on_meta(local) else local.cpu()
    except Exception as error:  # an attribute may raise anything when it is copied
        raise InputError(
            f"{type(model).__name__} cannot be copied ({first_line(error)}): do not store tensors that are computed from "
            "parameters in a module; use torch.nn.utils.parametrizations, which can be copied. Leave out attributes that "
            "copy.deepcopy refuses"
        ) from error
    for module in local.modules():
        kinds = hooked(module)
        for hooks in (getattr(module, kind) for kind in kinds):
            for number, hook in list(hooks.items()):
                if not on_weights(hook):
                    del hooks[number]
        if kinds:
            module.register_forward_hook(lambda *_: None)
    if training is not None and not (
        training and local.training
    ):  # in a model that is training, submodules in evaluation mode stay so
        local.train(training)
    return local


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile, DataParallel or DistributedDataParallel."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        if isinstance(model, wrappers):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def check_parameters(model: nn.Module) -> None:
    for key, t in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(t):
            raise InputError(
                f"{key!r} of {type(model).__name__} has no shape yet: call the model once on a batch before it is distributed"
            )
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise InputError(
                f"module {path or 'the model itself'!r} was made by torch.jit, which hides its parameters: "
                "distribute the module from which it was made"
            )


def _is_on_meta(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())


def _with_hooks(model: nn.Module, traced: TracedModel, original: nn.Module) -> TracedModel:
    """Mark layers with hooks to be computed for the global batch, and layers whose parameters have hooks as never split."""
    keys = {key for key, p in original.named_parameters() if any(getattr(p, kind, None) for kind in ON_PARAMETERS)}
    layers = dict(traced.graph.layers)
    for name, layer in layers.items():
        if any(p.key in keys for p in layer.parameters.values()):
            layer = replace(layer, shared=True)
        modules = [m for path in traced.operations[name].modules for m in model.get_submodule(path).modules()]
        kinds = [KINDS[kind] for m in modules for kind in hooked(m)] if layer.kind == "opaque" else []
        if kinds:
            # Random numbers would differ between devices, so one device computes such a layer.
            where = "one device computes it" if layer.random else "every device computes it for the global batch"
            reason = f"it has a {kinds[0]}, so {where}"
            layer = replace(layer, per_sample=False, everywhere=not layer.random, reason=reason)
        layers[name] = layer
    return replace(traced, graph=Graph(traced.graph.model, layers, traced.graph.outputs))


class _Capture:
    """The tracing of one model in one mode, repeated until all modules that must stay whole are known.

    Args:
        copy: makes a copy of the model.
        like: see `trace`.

    Attributes:
        model: the current copy. Tracing may change its Python state, so each trace gets a new copy.
        whole: path of a module that stays whole -> the reason.
        overwrites: whether the model overwrites its inputs.
    """

    def __init__(
        self, copy: Callable[[], nn.Module], call: CallForm, examples: Sequence[Tensor], like: TracedModel | None
    ) -> None:
        self.copy, self.model, self.call, self.examples = copy, copy(), call, tuple(examples)
        self.meta = meta_copy(self.model)
        self.specs: list[Spec] = [(tuple(e.shape[1:]), e.dtype) for e in examples]
        self.samples = min(max(len(examples[0]), BATCHES[0]), _MOST_SAMPLES)
        self.overwrites = False
        self.whole = dict.fromkeys(like.whole if like is not None else (), "")
        self.together: list[set[str]] = []
        self.elsewhere: dict[str, bool] = {}
        if like is not None:
            layers = like.graph.layers.items()
            self.elsewhere = {name: layer.called_everywhere for name, layer in layers if layer.changes_state}
            regions = [n for n, operation in like.operations.items() if operation.call == "region"]
            self.together = [{p.key for p in like.graph[n].parameters.values()} for n in regions]

    def run(self) -> TracedModel:
        try:
            while "" not in self.whole:
                try:
                    traced, more = self._traced()
                except GivenUp as found:
                    more = found.args[0]
                except Untraceable as reason:
                    if reason.where in self.whole:
                        raise
                    more = {reason.where: str(reason)}
                if not more:
                    return traced
                self.whole |= more
                release(self.model)
                self.model = self.copy()
            raise Untraceable(self.whole[""] or "it is one layer in the other mode")
        except Untraceable as reason:
            if _is_on_meta(self.model):
                raise self._needs_weights(str(reason)) from None
            release(self.model)
            self.model = self.copy()
            return self._as_one_layer(str(reason))

    def _traced(self) -> tuple[TracedModel, Mapping[str, str]]:
        """Return the trace, and for further modules that must stay whole: path -> reason."""
        nodes = nodes_of(self.model, self.meta, self.call, self.specs, self.whole)
        builder = LayerBuilder(self.model, self.meta, nodes, self.specs, self.together, self.elsewhere, self.samples)
        traced = builder.run()
        self.overwrites = builder.values.overwrites
        # A module must stay whole if its code may read an attribute that another forward changes.
        keys = {changed.strip("'").rpartition(".")[2] for changed in builder.changed.values() if changed}
        named = {path: State({path: self.model.get_submodule(path)}).names & keys for path in nodes.seen if keys}
        reads = "its forward reads {!r}, which another forward changes"
        return traced, {path: reads.format(min(read)) for path, read in named.items() if read}

    def _needs_weights(self, part: str) -> InputError:
        return InputError(
            f"{type(self.model).__name__} has parameters on the meta device, and a part of it must be run to know how it "
            f"treats samples ({part}): give a model with weights"
        )

    def _as_one_layer(self, why: str) -> TracedModel:
        """Return a trace with the model as one layer, and a `pick` layer for each output if there are several."""
        model = self.model
        inputs = {f"input{i}" if i else "input": spec for i, spec in enumerate(self.specs)}
        layers = {n: Layer(n, "input", (), shape, dtype=dtype_name(dtype)) for n, (shape, dtype) in inputs.items()}
        operations: dict[str, Operation] = {name: Operation("input", name) for name in inputs}
        given, values, sizes, flop = self._results()
        outputs, batched = self._read_results(values, sizes)
        several = not isinstance(values[0], Tensor) or not batched[0] or given.own
        operation = Operation("module", "", *self.call.arguments)
        if several:
            form = without_tensors(values[0], [])
            shapes = [t.shape for t in outputs] if given.own else None  # known for this number of samples only
            flat = Operation("function", partial(_flat, type(model).__name__, repr(form), shapes), (Ref(len(inputs)),))
            target = Region((operation, flat), (True, True), (len(inputs) + 1,), several=False)
            operation = Operation("region", target, tuple(map(Ref, range(len(inputs)))))
        keys = canonical_keys(model)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        parameters = {}
        for key, t in tensors.items():
            is_buffer = not isinstance(t, nn.Parameter)
            parameters[key] = Parameter(keys[key], tuple(t.shape), t.requires_grad and not is_buffer, is_buffer)
        layer = Layer(
            "model", "opaque", tuple(inputs), tuple(outputs[0].shape[1:]), parameters, several=several,
            dtype=dtype_name(outputs[0].dtype), random=has_dropout(model),
            differentiable=any(is_floating(t) for t in outputs), flop=flop,
        )  # fmt: skip
        seen = observe(model, operation, subtree(model), given)
        layers["model"], operations["model"] = whole(layer, seen, why, self.elsewhere), operation
        names: tuple[str, ...] = ("model",)
        if several:
            names = tuple(f"model[{i}]" for i in range(len(outputs)))
            for i, (name, t, rows) in enumerate(zip(names, outputs, batched, strict=True)):
                layers[name] = Layer(
                    name, "pick", ("model",), tuple(t.shape[rows:]), dtype=dtype_name(t.dtype),
                    differentiable=is_floating(t), batched=rows,
                )  # fmt: skip
                operations[name] = Operation("function", operator.getitem, (Ref(0), i))
        graph = Graph(type(model).__name__, layers, names)
        return TracedModel(graph, operations, form if several else Ref(0), whole=("",))

    def _results(self) -> tuple[TrialInputs, list[Any], list[int], int]:
        """Call the model. Return inputs for another call, its results, their batch sizes, and FLOP per sample.

        Call it on random batches of two sizes, to see which sizes depend on the batch size. If that fails, call it on the
        example, because some models accept only certain inputs (videos of 8 frames, lengths in descending order).
        """
        own, samples = len(self.examples[0]), self.samples
        tried: list[list[Sequence[Tensor]]] = [
            [meta_inputs(self.specs, samples) for samples in sizes] for sizes in (BATCHES, (own, 2 * own))
        ]
        errors = []
        tried.append([self.examples])
        for batches in tried:
            try:
                with FlopCounterMode(display=False) as counter:
                    values = [run_on_random(self.model, *fill(self.call.arguments, batch)) for batch in batches]
            except Exception as error:
                errors.append(error)
                samples = own
                continue
            given = TrialInputs(batches[0], [True] * len(self.specs), samples, own=len(batches) == 1)
            sizes = [len(batch[0]) for batch in batches]
            return given, values, sizes, counter.get_total_flops() // sum(sizes)
        raise self._does_not_run(errors) from errors[0]

    def _read_results(self, values: Sequence[Any], sizes: list[int]) -> tuple[list[Tensor], list[bool]]:
        """Return the tensors of the first result, and for each whether it has one row per sample."""
        name = type(self.model).__name__
        small, *others = (tensors_of(value) for value in values)
        forms = {repr(without_tensors(value, [])) for value in values}  # as text: NaN does not equal itself
        if not small or len(forms) > 1:
            odd = " with something other than tensors that differs between batches" if small else ""
            raise InputError(
                f"{name} returns {type(values[0]).__name__}{odd}: return a tensor, or a nest of tuples, dicts and dataclasses "
                "of tensors"
            )
        if not others:
            return small, [t.shape[:1] == (sizes[0],) for t in small]
        pairs = list(zip(small, others[0], strict=True))
        batched = [is_batched(pair, tuple(sizes)) for pair in pairs]
        if any(a.shape != b.shape and not rows for (a, b), rows in zip(pairs, batched, strict=True)):
            raise InputError(
                f"{name} returns a tensor whose size depends on the batch size, but not one row per sample (such as values for "
                "all pairs of samples): return rows of samples, or one value for the batch, and compute the rest from these"
            )
        return small, batched

    def _does_not_run(self, errors: Sequence[Exception]) -> InputError:
        name, shapes = type(self.model).__name__, [tuple(e.shape) for e in self.examples]
        norm = next((path for path, module in self.model.named_modules() if isinstance(module, nn.SyncBatchNorm)), None)
        if norm is not None:
            return InputError(
                f"{name} does not run on the example: {norm!r} is a SyncBatchNorm; all batch norms of a distributed model have "
                "the statistics of the global batch: leave convert_sync_batchnorm out"
            )
        samples = " and ".join(str(shape[1:]) for shape in shapes)
        hooks = ", without the hooks of its modules" if any(hooked(m) for m in self.model.modules()) else ""
        return InputError(
            f"{name} does not run on the example. Called with {BATCHES[0]} and {BATCHES[1]} random samples of shape "
            f"{samples}{hooks}: {first_line(errors[0])}. Called with the {shapes[0][0]} samples of the example{hooks}: "
            f"{first_line(errors[-1])}. Give one batch of each of its inputs, as its forward takes them (prepare: by "
            "call=); of one sample, x[None]"
            + ("; forward cannot read what a hook has recorded: return it, or keep it in a variable" if hooks else "")
        )


def _flat(model: str, form: str, shapes: Sequence[torch.Size] | None, value: Any) -> list[Tensor]:
    """Return the tensors in a model's result. Refuse a result of another form than when the model was distributed.

    Args:
        shapes: required shapes of the tensors; None: any.
    """
    found = tensors_of(value)
    if repr(without_tensors(value, [])) != form:
        raise InputError(
            f"{model} returned something other than tensors that it did not return when it was distributed: a number, a text "
            "or another nest. Return tensors, or compute it from what the model returns"
        )
    if shapes is not None and shapes != [t.shape for t in found]:
        raise InputError(
            f"{model} returned tensors of {[*map(tuple, (t.shape for t in found))]}, and of {[*map(tuple, shapes)]} for the "
            "example: it runs with the example's batch size alone, so give every batch that size (drop_last=True)"
        )
    return found
