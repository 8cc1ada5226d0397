"""What each layer of a traced model calls, and how the calls are made.

`graph.py` holds what a plan must know of a layer; an `Operation` holds the module or function to call, with its arguments.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from convoy.model.graph import Graph


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for the i-th input tensor of a layer among its arguments."""

    index: int


@dataclass(frozen=True, slots=True)
class BatchExtent:
    """Stands for `multiple` times the number of samples present: what `x.size(0)` gave in the model's source."""

    multiple: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a traced model.

    Attributes:
        call: "module" (target: its path), "function" (target: the callable), "method" (target: the name),
            "attribute" (target: path of a parameter or buffer) or "input".
        args, kwargs: as in the source, with `Ref` for tensors and `BatchExtent` for the batch size.
    """

    call: Literal["module", "function", "method", "attribute", "input"]
    target: str | Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A model as a graph of layers, and the operation that computes each of them.

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
    match operation.call, operation.target:
        case "module", str(path):
            return model.get_submodule(path)(*args, **kwargs)
        case "method", str(name):
            return getattr(args[0], name)(*args[1:], **kwargs)
        case "attribute", str(path):
            return operator.attrgetter(path)(model)
        case _, function:
            assert callable(function)
            return function(*args, **kwargs)


def bind_operation(model: nn.Module, operation: Operation) -> Callable[[Sequence[Any], int], Any]:
    """A layer's call with its module already looked up: (inputs, samples they hold) -> output."""
    match operation.call, tuple(operation.args):
        case "module", (Ref(0),) if not operation.kwargs:
            module = model.get_submodule(str(operation.target))
            return lambda inputs, _batch: module(inputs[0])
    return partial(call_operation, model, operation)


def _filled(arg: Any, inputs: Sequence[Any], batch: int) -> Any:
    """An argument with tensors in the place of each `Ref`, and numbers in that of each `BatchExtent`.

    Not a closure of the caller: a recursive closure is a reference cycle, which kept the inputs (activations) alive until
    Python's garbage collector ran, so that every step allocated new memory.
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
