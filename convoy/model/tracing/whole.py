"""The whole model as one opaque layer."""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from convoy.errors import InputError
from convoy.model.graph import Graph, Layer, Parameter
from convoy.model.operation import Operation, Ref
from convoy.model.tracing.calls import TracedModel, call_operation
from convoy.model.tracing.layers import canonical_keys
from convoy.model.tracing.nodes import first_line
from convoy.model.tracing.samples import draws, is_floating, judge, on_random_numbers, tensors_of
from convoy.model.tracing.values import BATCHES, Spec, is_batched


def whole(model: nn.Module, specs: Sequence[Spec], why: str) -> TracedModel:
    """One layer, `why` it is only one, and a `pick` for each output where there are several.

    Raises:
        InputError: the model does not run on inputs of these shapes, or returns something else than tensors with a
            batch axis.
    """
    inputs = {f"input{i}" if i else "input": spec for i, spec in enumerate(specs)}
    layers = {name: Layer(name, "input", (), shape, dtype=_text(dtype)) for name, (shape, dtype) in inputs.items()}
    operations: dict[str, Operation] = {name: Operation("input", name) for name in inputs}
    with FlopCounterMode(display=False) as counter:
        value, outputs = _outputs(model, specs)
    operation = Operation("module", "", tuple(Ref(i) for i in range(len(inputs))))
    like = [torch.empty((BATCHES[0], *shape), dtype=dtype, device="meta") for shape, dtype in specs]
    verdict = judge(lambda n, x: call_operation(model, operation, x, n), like, [True] * len(like), model)
    several = not isinstance(value, Tensor)
    layers["model"] = Layer(
        "model", "opaque", tuple(inputs), tuple(outputs[0].shape[1:]), _parameters(model),
        per_sample=verdict.dependence is None, several=several, dtype=_text(outputs[0].dtype),
        reason="; ".join(filter(None, (why, verdict.dependence))), random=draws(model) or verdict.random,
        differentiable=any(is_floating(t) for t in outputs), flop=counter.get_total_flops() // sum(BATCHES),
    )  # fmt: skip
    operations["model"] = operation
    if not several:
        return TracedModel(Graph(type(model).__name__, layers, ("model",)), operations, Ref(0))
    names = tuple(f"model[{i}]" for i in range(len(outputs)))
    for i, (name, t) in enumerate(zip(names, outputs, strict=True)):
        layers[name] = Layer(
            name, "pick", ("model",), tuple(t.shape[1:]), dtype=_text(t.dtype), differentiable=is_floating(t)
        )
        operations[name] = Operation("function", operator.getitem, (Ref(0), i))
    refs = iter(range(len(outputs)))
    result: Any = fx.node.map_aggregate(value, lambda a: _ref(refs) if isinstance(a, Tensor) else a)
    return TracedModel(Graph(type(model).__name__, layers, names), operations, result)


def _outputs(model: nn.Module, specs: Sequence[Spec]) -> tuple[Any, list[Tensor]]:
    """What the model returns for the smaller of two batches, and the tensors in it."""
    values = []
    for batch in BATCHES:
        metas = tuple(torch.empty((batch, *shape), dtype=dtype, device="meta") for shape, dtype in specs)
        try:
            values.append(on_random_numbers(model, metas, {}))
        except Exception as error:
            raise InputError(
                f"{type(model).__name__} does not run on the example ({first_line(error)}): "
                "give one batch of each of its inputs, as its forward takes them"
            ) from error
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


def _ref(numbers: Iterator[int]) -> Any:
    return Ref(next(numbers))


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
