"""Turns an nn.Module into a TracedModel: layer by layer if torch.fx can follow it, else the submodules that it can (`live.py`).

`tracer.py` gets the calls from torch.fx; `node_values.py` evaluates them for two batch sizes; `layer_builder.py` makes the
layers, with their kinds (`supported_layers.py`). `python_state.py` finds values other than tensors that code reads;
`trials.py` runs a call of torch that no rule splits, to find out whether its samples are independent.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from convoy.errors import InputError
from convoy.model.graph import Graph
from convoy.model.nested import CallForm, Example
from convoy.model.operation import TracedModel, disable_in_place
from convoy.model.split_rules import register_layer
from convoy.model.tracing.copies import (
    ON_PARAMETERS,
    copied,
    hooked,
    meta_copy,
    on_weights,
    release,
    shared_parameters,
)
from convoy.model.tracing.layer_builder import LayerBuilder
from convoy.model.tracing.live import LiveModel, RecordedForward, SubmoduleCall, is_inside, live_model, samples_in
from convoy.model.tracing.node_values import Spec, Untraceable
from convoy.model.tracing.python_state import State, StateWatch, changed, modes_of
from convoy.model.tracing.tracer import TRACE_LOCK, nodes_of
from convoy.model.tracing.trials import first_line

__all__ = [
    "Example",
    "StateWatch",
    "TracedModel",
    "copied",
    "disable_in_place",
    "register_layer",
    "samples_in",
    "trace",
    "unwrapped",
]


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
    state, copy, overwrites = State(dict(inner.named_modules())), partial(without_hooks, inner, training), False
    with TRACE_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model's own warnings appear again in training
        before, call = state.forms(), None
        try:
            if like is not None and like.path:
                form, tensors = CallForm.of(inner.get_submodule(like.path), example)
                calls = [SubmoduleCall(like.path, form, tensors)]
                return (_split(inner, copy, calls, like).live or ())[0]
            call, examples = _one_batch(inner, example)
            if like is not None and like.live is not None:
                raise Untraceable("its forward runs on every device in training")
            capture = _Capture(copy(), call, examples, like)
            traced = replace(_with_hooks(capture.run(), inner), call=call, modes=modes_of(capture.model))
            overwrites = capture.overwrites
        except Untraceable as reason:
            if _is_on_meta(inner):
                raise _needs_weights(inner, str(reason)) from None
            if like is not None and like.path:
                raise InputError(f"{like.path!r} cannot be traced: {reason}") from None
            recorded = RecordedForward(copy(), example)
            if training is None and like is not None and like.live is None:
                raise InputError(f"{type(inner).__name__} cannot be traced as it is now, because {reason}") from None
            traced = _live(inner, recorded, copy, like, reason.where)
            note = recorded.note(traced, str(reason))
            traced = replace(traced, call=call, modes=modes_of(recorded.model), note=note, example=example)
        names = changed(before, state.forms())
    if names:
        raise InputError(
            f"a forward of {type(inner).__name__} changes {names[0]!r} outside of its module, as did tracing: keep it in an "
            "attribute of the module"
        )
    if overwrites and training:
        warnings.warn(
            f"{type(inner).__name__} overwrites its input in forward; the distributed model does not change its input. Begin "
            "forward with x = x.clone(), for the same behaviour on one device",
            stacklevel=2,
        )
    if training and any(layer.recomputed for layer in traced.graph.layers.values()):
        note = "checkpoints activations. The distributed model computes the same numbers, but keeps them in memory"
        traced = replace(traced, note=f"{type(inner).__name__} {note}")
    return traced


def _one_batch(model: nn.Module, example: Example) -> tuple[CallForm, Sequence[Tensor]]:
    """Return the form of a call, and its tensors. Untraceable: they are not one batch."""
    try:
        call, tensors = CallForm.of(model, example)
    except InputError as error:
        raise Untraceable(str(error)) from None
    lengths = {t.shape[:1] for t in tensors}
    if len(lengths) != 1 or torch.Size() in lengths:
        shapes = [f"{name} of {tuple(t.shape)}" for name, t in zip(call.names, tensors, strict=True)]
        shown = ", ".join(shapes if len(shapes) < 4 else [*shapes[:3], "..."]) or "none"
        raise Untraceable(f"its arguments are not tensors whose first axis is the batch ({shown})")
    return call, tensors


def _live(
    model: nn.Module,
    recorded: RecordedForward,
    copy: Callable[[], nn.Module],
    like: TracedModel | None,
    where: Sequence[str],
) -> TracedModel:
    """Return the trace of the largest submodules that can be traced, for a model whose own forward runs in every step.

    Args:
        where: paths of modules that cannot be traced.
    """
    among = None if like is None else [part.path for part in like.live or ()]
    without = set(where)
    while calls := recorded.largest(without, among):
        with suppress(Untraceable):
            return _split(model, copy, calls, like)
        failed = {
            path for call in calls for path in _untraceable(partial(_split, model, copy, [call], like), call.path)
        }
        without |= failed or {calls[-1].path}
    return TracedModel(Graph(type(model).__name__, {}, ()), {}, (), live=())


def _untraceable(split: Callable[[], object], path: str) -> set[str]:
    """Return the paths of the modules because of which a submodule cannot be traced."""
    try:
        split()
    except Untraceable as reason:
        return {each for each in reason.where if is_inside(each, [path])} or {path}
    return set()


def _split(
    model: nn.Module, copy: Callable[[], nn.Module], calls: Sequence[SubmoduleCall], like: TracedModel | None
) -> TracedModel:
    """Return the trace of these submodules. Untraceable: some of them cannot be traced."""
    examples = [t for call in calls for t in call.tensors]
    made = LiveModel(copy(), calls)
    form, _ = CallForm.of(made, examples)
    traced = _with_hooks(_Capture(made, form, examples, like).run(), model)
    # A submodule's layers run inside its forward. So it is no layer, except of the kinds that run without their module.
    rows = traced.operations.items()
    layers = {path for name, operation in rows if not traced.graph[name].multiplies for path in operation.modules}
    if found := [path for path in made.paths if path in layers]:
        raise Untraceable("it is one layer", *found)
    return live_model(traced, calls, type(model).__name__)


def without_hooks(model: nn.Module, training: bool | None) -> nn.Module:
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


def _with_hooks(traced: TracedModel, original: nn.Module) -> TracedModel:
    """Mark layers whose parameters have hooks as never split."""
    keys = {key for key, p in original.named_parameters() if any(getattr(p, kind, None) for kind in ON_PARAMETERS)}
    layers = dict(traced.graph.layers)
    for name, layer in layers.items():
        if any(p.key in keys for p in layer.parameters.values()):
            layers[name] = replace(layer, shared=True)
    return replace(traced, graph=Graph(traced.graph.model, layers, traced.graph.outputs))


class _Capture:
    """The tracing of one model in one mode.

    Args:
        model: a copy, which is used up: tracing may change its Python state.
        like: see `trace`.

    Attributes:
        overwrites: whether the model overwrites its inputs.
    """

    def __init__(self, model: nn.Module, call: CallForm, examples: Sequence[Tensor], like: TracedModel | None) -> None:
        self.model, self.call, self.meta = model, call, meta_copy(model)
        self.specs: list[Spec] = [(tuple(e.shape[1:]), e.dtype) for e in examples]
        self.overwrites = False
        self.together: list[set[str]] = []
        if like is not None:
            regions = [n for n, operation in like.operations.items() if operation.call == "region"]
            self.together = [{p.key for p in like.graph[n].parameters.values()} for n in regions]

    def run(self) -> TracedModel:
        """Return the trace. Untraceable: modules that cannot be traced."""
        try:
            nodes = nodes_of(self.model, self.meta, self.call, self.specs)
            builder = LayerBuilder(self.model, self.meta, nodes, self.specs, self.together)
            traced = builder.run()
        finally:
            release(self.model)
        self.overwrites = builder.values.overwrites
        return traced


def _needs_weights(model: nn.Module, part: str) -> InputError:
    return InputError(
        f"{type(model).__name__} has parameters on the meta device, and a part of it must be run to know how it treats samples "
        f"({part}): give a model with weights"
    )
