"""Turns an nn.Module into a TracedModel: layer by layer where torch.fx can follow it, else as one opaque layer.

A trace is believed only after it has computed what the model computes, on random numbers (`_check_same_results`).
"""

import copy
import operator
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from convoy.errors import InputError
from convoy.model.graph import Graph, Layer, Parameter
from convoy.model.operation import Operation, Ref, TracedModel, call_operation, disable_in_place, run_traced
from convoy.model.tracing.layers import LayerBuilder, canonical_keys, dtype_name
from convoy.model.tracing.nodes import TRACE_LOCK, Untraceable, first_line
from convoy.model.tracing.per_sample import (
    check_per_sample,
    has_dropout,
    is_close,
    is_floating,
    random_like,
    run_on_random,
    tensors_of,
)
from convoy.model.tracing.values import BATCHES, Spec, is_batched


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
        InputError: the model cannot be copied, does not run on the example, or returns something else than tensors.
    """
    examples = (example,) if isinstance(example, Tensor) else tuple(example)
    if not examples or any(e.dim() == 0 for e in examples):
        raise InputError("the example must be a batch: tensors whose first axis is the batch; give e.g. x[:2]")
    try:
        local = copy.deepcopy(model)
        local = local if _on_meta(local) else local.cpu()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise InputError(
            f"{type(model).__name__} cannot be copied ({first_line(error)}): what is computed from parameters is no state "
            "of a module; torch.nn.utils.parametrizations has forms that can be copied"
        ) from error
    if not training or not local.training:  # frozen parts of a model in training stay as they are
        local.train(training)
    specs = [(tuple(e.shape[1:]), e.dtype) for e in examples]
    with TRACE_LOCK, torch.random.fork_rng(devices=[]):
        try:
            leaves = _opaque_modules(like) if like is not None else ()
            if "" in leaves:
                raise Untraceable("it is one layer in the other mode")
            traced = LayerBuilder(local, specs, leaves).run()
            _check_same_results(local, traced, specs)
            opaque = [name for name, layer in traced.graph.layers.items() if layer.kind == "opaque"]
        except Untraceable as reason:
            if not _on_meta(local):
                return _as_one_layer(local, specs, str(reason))
            opaque = [str(reason)]
    if opaque and _on_meta(local):
        raise InputError(
            f"{type(model).__name__} has parameters on the meta device, and a part of it must be run to know how it treats "
            f"samples ({opaque[0]}): give a model with weights"
        )
    return traced


def _on_meta(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())


def _opaque_modules(traced: TracedModel) -> tuple[str, ...]:
    """Paths of the modules that a trace keeps whole; "" is the model itself."""
    calls = (traced.operations[layer.name] for layer in traced.graph.layers.values() if layer.kind == "opaque")
    return tuple(str(call.target) for call in calls if call.call == "module")


def _meta_inputs(specs: Sequence[Spec], batch: int) -> tuple[Tensor, ...]:
    return tuple(torch.empty((batch, *shape), dtype=dtype, device="meta") for shape, dtype in specs)


def _does_not_run(model: nn.Module, error: Exception) -> InputError:
    return InputError(
        f"{type(model).__name__} does not run on the example ({first_line(error)}): "
        "give one batch of each of its inputs, as its forward takes them"
    )


# --- does the trace compute what the model computes? -----------------------------------------------------------------


def _check_same_results(model: nn.Module, traced: TracedModel, specs: Sequence[Spec]) -> None:
    """Compare outputs, buffers and gradients of model and trace on the same random numbers.

    Python that a trace does not see (`x += y` under another name, say) must not change results silently.

    Raises:
        Untraceable: they differ.
        InputError: the model itself does not run on inputs of these shapes.
    """
    if _on_meta(model):
        return
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        inputs = [random_like(t, None) for t in _meta_inputs(specs, BATCHES[0])]
        reference, pure = copy.deepcopy(model), disable_in_place(copy.deepcopy(model))
        try:
            torch.manual_seed(1)
            expected = tensors_of(reference(*[x.clone() for x in inputs]))
        except Exception as error:
            raise _does_not_run(model, error) from error
        try:
            torch.manual_seed(1)
            found = tensors_of(run_traced(pure, traced, inputs))
        except Exception as error:
            raise Untraceable(f"its trace does not run: {first_line(error)}") from None
        _require_same(expected, found, "outputs")
        _require_same(list(reference.buffers()), list(pure.buffers()), "buffers")
        try:
            gradients = _gradients(reference, expected)
        except RuntimeError:
            return  # it cannot be trained on one device either
        _require_same(gradients, _gradients(pure, found), "gradients")


def _gradients(model: nn.Module, outputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Gradients of all parameters for a loss that weighs every number of the outputs differently."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    reached = [y for y in outputs if y.requires_grad]
    if not trainable or not reached:
        return [None] * len(trainable)
    torch.manual_seed(2)
    return torch.autograd.grad(reached, trainable, [torch.randn_like(y) for y in reached], allow_unused=True)


def _require_same(a: Sequence[Tensor | None], b: Sequence[Tensor | None], what: str) -> None:
    same = all(x is y if x is None or y is None else is_close(x, y) for x, y in zip(a, b, strict=False))
    if not same or len(a) != len(b):
        raise Untraceable(f"its trace gives other {what} (in-place changes seen under two names, say)")


# --- the model as one opaque layer -----------------------------------------------------------------------------------


def _as_one_layer(model: nn.Module, specs: Sequence[Spec], why: str) -> TracedModel:
    """One layer with the reason `why` there is only one, and a `pick` for each output where there are several.

    Raises:
        InputError: the model does not run on inputs of these shapes, or returns something else than tensors with a
            batch axis.
    """
    inputs = {f"input{i}" if i else "input": spec for i, spec in enumerate(specs)}
    layers = {name: Layer(name, "input", (), shape, dtype=dtype_name(dtype)) for name, (shape, dtype) in inputs.items()}
    operations: dict[str, Operation] = {name: Operation("input", name) for name in inputs}
    with FlopCounterMode(display=False) as counter:
        value, outputs = _outputs(model, specs)
    operation = Operation("module", "", tuple(Ref(i) for i in range(len(inputs))))
    found = check_per_sample(
        lambda n, x: call_operation(model, operation, x, n), _meta_inputs(specs, BATCHES[0]), [True] * len(specs), model
    )
    several = not isinstance(value, Tensor)
    layers["model"] = Layer(
        "model", "opaque", tuple(inputs), tuple(outputs[0].shape[1:]), _parameters(model),
        per_sample=found.dependence is None, several=several, dtype=dtype_name(outputs[0].dtype),
        reason="; ".join(filter(None, (why, found.dependence))), random=has_dropout(model) or found.random,
        differentiable=any(is_floating(t) for t in outputs), flop=counter.get_total_flops() // sum(BATCHES),
    )  # fmt: skip
    operations["model"] = operation
    if not several:
        return TracedModel(Graph(type(model).__name__, layers, ("model",)), operations, Ref(0))
    names = tuple(f"model[{i}]" for i in range(len(outputs)))
    for i, (name, t) in enumerate(zip(names, outputs, strict=True)):
        layers[name] = Layer(
            name, "pick", ("model",), tuple(t.shape[1:]), dtype=dtype_name(t.dtype), differentiable=is_floating(t)
        )
        operations[name] = Operation("function", operator.getitem, (Ref(0), i))
    number = count()

    def ref(a: Any) -> Any:
        return Ref(next(number)) if isinstance(a, Tensor) else a

    result = fx.node.map_aggregate(value, ref)
    return TracedModel(Graph(type(model).__name__, layers, names), operations, result)


def _outputs(model: nn.Module, specs: Sequence[Spec]) -> tuple[Any, list[Tensor]]:
    """What the model returns for the smaller of two batches, and the tensors in it."""
    try:
        values = [run_on_random(model, _meta_inputs(specs, batch), {}) for batch in BATCHES]
    except Exception as error:
        raise _does_not_run(model, error) from error
    small, large = (tensors_of(value) for value in values)
    if not small or (not isinstance(values[0], Tensor) and len(small) != len(values[0])):
        raise InputError(
            f"{type(model).__name__} returns {type(values[0]).__name__}: return a tensor or a flat tuple of tensors"
        )
    if len(small) != len(large) or not all(is_batched(pair) for pair in zip(small, large, strict=True)):
        raise InputError(
            f"{type(model).__name__} returns a tensor whose first axis is not the batch: return one row per sample"
        )
    return values[0], small


def _parameters(model: nn.Module) -> dict[str, Parameter]:
    keys = canonical_keys(model)
    rows = [(k, p, False) for k, p in model.named_parameters()] + [(k, b, True) for k, b in model.named_buffers()]
    return {k: Parameter(keys[k], tuple(t.shape), t.requires_grad and not b, b) for k, t, b in rows}
