"""A model taken apart, and how its calls are made."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from convoy.model.graph import Graph
from convoy.model.operation import BatchExtent, Operation, Ref


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A model taken apart: the value that plans read, the calls that execution makes.

    Attributes:
        graph: the layers.
        operations: what each layer calls, by layer name.
        result: what the model returns, with `Ref(i)` for the i-th of `graph.outputs`.
    """

    graph: Graph
    operations: Mapping[str, Operation]
    result: Any


def call_operation(model: nn.Module, operation: Operation, inputs: Sequence[Any], batch: int) -> Any:
    """Call a layer's module or function on inputs that hold `batch` samples."""
    args = _filled(tuple(operation.args), inputs, batch)
    kwargs = _filled(dict(operation.kwargs), inputs, batch)
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


def bind_operation(model: nn.Module, operation: Operation) -> Callable[[Sequence[Any], int], Any]:
    """The call of a layer, with its module looked up: takes inputs that hold so many samples."""
    match operation.call, tuple(operation.args):
        case "module", (Ref(0),) if not operation.kwargs:
            module = model.get_submodule(str(operation.target))
            return lambda inputs, _batch: module(inputs[0])
    return partial(call_operation, model, operation)


def _filled(arg: Any, inputs: Sequence[Any], batch: int) -> Any:
    """An argument with the inputs in their places.

    Not a function inside the caller: one that calls itself is a cycle, which held the inputs, a layer's activations, until
    Python's collector came, and so every step took fresh memory.
    """

    def fill_each(values: Iterable[Any]) -> Iterator[Any]:
        return (_filled(each, inputs, batch) for each in values)

    match arg:
        case Ref(index):
            return inputs[index]
        case BatchExtent(multiple):
            return multiple * batch
        case tuple() if hasattr(arg, "_fields"):
            return type(arg)(*fill_each(arg))
        case tuple() | list():
            return type(arg)(fill_each(arg))
        case dict():
            return dict(zip(arg, fill_each(arg.values()), strict=True))
        case slice():
            return slice(*fill_each((arg.start, arg.stop, arg.step)))
        case _:
            return arg


def run_traced(model: nn.Module, traced: TracedModel, inputs: Sequence[Tensor]) -> Any:
    """Run a trace on one device, layer by layer, as the executor would with a single device."""
    values: dict[str, Any] = {layer.name: x for layer, x in zip(traced.graph.inputs, inputs, strict=True)}
    for name, layer in traced.graph.layers.items():
        if layer.kind != "input":
            reads = [values[i] for i in layer.inputs]
            with torch.set_grad_enabled(layer.differentiable and torch.is_grad_enabled()):
                values[name] = call_operation(model, traced.operations[name], reads, len(inputs[0]))
    outputs = [values[name] for name in traced.graph.outputs]
    return fx.node.map_aggregate(traced.result, lambda a: outputs[a.index] if isinstance(a, Ref) else a)


def disable_in_place(model: nn.Module) -> nn.Module:
    """Turn off `inplace` everywhere: layers keep their inputs for backward, so nothing may overwrite them."""
    for module in model.modules():
        if getattr(module, "inplace", False):
            module.inplace = False  # type: ignore[assignment]
    return model
