"""A model as one opaque layer."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from convoy.errors import InputError
from convoy.model.graph import Graph, Layer, Parameter
from convoy.model.operation import Form, Operation, Ref, Region, TracedModel, call_operation
from convoy.model.tracing.check import DoesNotRun
from convoy.model.tracing.layers import Verdicts, canonical_keys, dtype_name, judged
from convoy.model.tracing.nodes import first_line
from convoy.model.tracing.per_sample import (
    PerSample,
    aged,
    check_later,
    check_per_sample,
    has_dropout,
    is_floating,
    run_on_random,
    tensors_of,
)
from convoy.model.tracing.shared_copy import shared_copy
from convoy.model.tracing.sizes import BATCHES, Spec, meta_inputs
from convoy.model.tracing.values import across, is_batched, without_batch


def as_one_layer(
    model: nn.Module, specs: Sequence[Spec], why: str, verdicts: Verdicts, elsewhere: Mapping[str, bool]
) -> TracedModel:
    """One layer with the reason `why` there is only one, and a `pick` for each output where there are several.

    Args:
        verdicts: whether its samples are independent, where that is known; what is found out is added.
        elsewhere: see `noted_by_each`, of the other mode.

    Raises:
        DoesNotRun: on inputs of these shapes.
        InputError: it returns something else than tensors with a batch axis.
    """
    inputs = {f"input{i}" if i else "input": spec for i, spec in enumerate(specs)}
    layers = {name: Layer(name, "input", (), shape, dtype=dtype_name(dtype)) for name, (shape, dtype) in inputs.items()}
    operations: dict[str, Operation] = {name: Operation("input", name) for name in inputs}
    with FlopCounterMode(display=False) as counter:
        value, outputs, batched = _outputs(model, specs)
    several = not isinstance(value, Tensor) or batched[0] is not None
    operation = Operation("module", "", tuple(Ref(i) for i in range(len(inputs))))
    if several:
        flat = Operation("function", tensors_of, (Ref(len(inputs)),))
        target = Region((operation, flat), (True, True), (len(inputs) + 1,), several=False)
        operation = Operation("region", target, operation.args)
    if "model" not in verdicts:
        like = meta_inputs(specs, BATCHES[0])

        def check(holder: nn.Module) -> PerSample:
            return check_per_sample(
                lambda holder, n, x: call_operation(holder, operation, x, n), holder, lambda: shared_copy(holder).double(),
                like, [True] * len(specs), [""],
            )  # fmt: skip

        first = check(model)
        changes = first.notes or "model" in elsewhere
        verdicts["model"] = check_later(first, check, aged(model, like)) if changes else first
    layer = Layer(
        "model", "opaque", tuple(inputs), tuple(outputs[0].shape[1:]), _parameters(model), several=several,
        dtype=dtype_name(outputs[0].dtype), random=has_dropout(model),
        differentiable=any(is_floating(t) for t in outputs), flop=counter.get_total_flops() // sum(BATCHES),
    )  # fmt: skip
    layers["model"] = judged(layer, verdicts["model"], why, elsewhere)
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
    return TracedModel(graph, operations, _form(value, count()), whole=("",))


def _form(value: Any, number: Iterator[int]) -> Any:
    """What the model returns, with `Ref(i)` for its tensor i."""

    def each(values: Any) -> list[Any]:
        return [_form(v, number) for v in values]

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


def _outputs(model: nn.Module, specs: Sequence[Spec]) -> tuple[Any, list[Tensor], list[tuple[int, ...] | None]]:
    """What the model returns for the smaller of two batches, its tensors, and the `Layer.across` of those without rows."""
    try:
        values = [run_on_random(model, meta_inputs(specs, batch), {}) for batch in BATCHES]
    except Exception as error:
        raise DoesNotRun(first_line(error)) from error
    small, large = (tensors_of(value) for value in values)
    forms = [_form(value, count()) for value in values]
    if not small or forms[0] != forms[1]:
        odd = " with something beside tensors that is another one for other batches" if small else ""
        raise InputError(
            f"{type(model).__name__} returns {type(values[0]).__name__}{odd}: return a tensor, or a nest of tuples, dicts and "
            "dataclasses of tensors"
        )
    pairs = list(zip(small, large, strict=True))
    if any(a.shape != b.shape and not across((a, b)) for a, b in pairs):
        raise InputError(
            f"{type(model).__name__} returns a tensor whose size goes with the batch, but is not that of the batch: return one "
            "row per sample, one value for the batch, or a value for each pair of samples"
        )
    return values[0], small, [None if is_batched(pair) else across(pair) for pair in pairs]


def _parameters(model: nn.Module) -> dict[str, Parameter]:
    keys = canonical_keys(model)
    rows = [(k, p, False) for k, p in model.named_parameters()] + [(k, b, True) for k, b in model.named_buffers()]
    return {k: Parameter(keys[k], tuple(t.shape), t.requires_grad and not b, b) for k, t, b in rows}
