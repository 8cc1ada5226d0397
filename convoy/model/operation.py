"""What each layer of a traced model calls, and how the calls are made.

`graph.py` holds what a plan must know of a layer; an `Operation` holds the module or function to call, with its arguments.
"""

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

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
class PartExtent:
    """Stands for a number that goes with the part of an axis that is present: `count` where all of it is.

    Attributes:
        extent: of the whole axis.
        of: the i-th input tensor, or a parameter of the layer's module, by its key.
    """

    count: int
    axis: int
    extent: int
    of: int | str = 0


@dataclass(frozen=True, slots=True)
class Here:
    """Stands for the device that computes: what `x.device` gave in the model's source."""


@dataclass(frozen=True, slots=True)
class Form:
    """Stands for what a class makes of values: a named tuple, a dataclass."""

    make: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a traced model.

    Attributes:
        call: "module" (target: its path), "batch_norm" (target: path of a batch norm whose own forward does more: only its
            normalisation), "function" (target: the callable), "method" (target: the name), "attribute" (target: path of a
            parameter or buffer), "constant" (target: a tensor), "region" (target: a `Region`) or "input".
        args, kwargs: as in the source, with `Ref` for tensors, `BatchExtent` for the batch size and `PartExtent` for the
            size of an axis that may be cut.
        attributes: numbers of the module that go with its part: the groups of a group norm.
    """

    call: Literal["module", "batch_norm", "function", "method", "attribute", "constant", "region", "input"]
    target: "str | Callable[..., Any] | Tensor | Region"
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, PartExtent] = field(default_factory=dict)

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules that it calls."""
        if isinstance(self.target, Region):
            return tuple(path for call in self.target.calls for path in call.modules)
        return (str(self.target),) if self.call == "module" else ()


@dataclass(frozen=True, slots=True)
class Region:
    """Calls that make up one layer, because what passes between them is not rows of the batch.

    Attributes:
        calls: in order; `Ref(i)` among their arguments is the layer's input i, or what call i - (number of inputs) gave.
        graded: of each call, whether gradients pass (not under torch.no_grad()).
        gives: the values that leave, numbered like the refs.
        several: they leave as a tuple.
    """

    calls: tuple[Operation, ...]
    graded: tuple[bool, ...]
    gives: tuple[int, ...]
    several: bool


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A model as a graph of layers, and the operation that computes each of them.

    Attributes:
        graph: the layers.
        operations: what each layer calls, by layer name.
        result: what the model returns, with `Ref(i)` for the i-th of `graph.outputs`.
        seen: paths of the modules that the trace sees through: their Python ran once, when it was made.
        whole: paths of the modules that stay whole, but for torch's own; "" is the model itself.
        modes: of modules that may do something else in training than in evaluation, by path: whether they were in training.
    """

    graph: Graph
    operations: Mapping[str, Operation]
    result: Any
    seen: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    modes: Mapping[str, bool] = field(default_factory=dict)


def call_operation(model: nn.Module, operation: Operation, inputs: Sequence[Any], batch: int) -> Any:
    """Call a layer's module or function on inputs that hold `batch` samples."""
    return _of_one_format(_called(model, operation, inputs, batch))


def _called(model: nn.Module, operation: Operation, inputs: Sequence[Any], batch: int) -> Any:
    if operation.call == "region":
        assert isinstance(operation.target, Region)
        return _run_region(model, operation.target, inputs, batch)
    here = _Surroundings(inputs, batch, model)
    args = filled(tuple(operation.args), here)
    kwargs = filled(dict(operation.kwargs), here)
    match operation.call, operation.target:
        case "module", str(path):
            return _part_of(model.get_submodule(path), operation, inputs)(*args, **kwargs)
        case "batch_norm", str(path):
            return _BatchNorm.forward(model.get_submodule(path), *args)  # type: ignore[arg-type]
        case "method", str(name):
            return getattr(args[0], name)(*args[1:], **kwargs)
        case "attribute", str(path):
            return operator.attrgetter(path)(model)
        case "constant", Tensor() as tensor:
            return tensor.to(here.device)
        case _, function:
            assert callable(function)
            with torch.device(here.device) if function in _FACTORIES else nullcontext():
                return function(*args, **kwargs)


def _of_one_format(y: Any) -> Any:
    """The output of a call, laid out anew where torch would take it for channels-last in one place, and not in another.

    That is a single sample whose axes were permuted. torch 2.13 gives wrong gradients of its batch norm where the input, or the
    gradient of the output, is one: on a device with one sample, and not on one device with all of them.
    """
    if not isinstance(y, Tensor) or y.dim() not in _CHANNELS_LAST or len(y) != 1:
        return y
    y = _laid_out(y)
    if y.grad_fn is not None and "BatchNorm" in y.grad_fn.name():
        y.register_hook(_laid_out)
    return y


def _laid_out(x: Tensor) -> Tensor:
    doubtful = x.is_contiguous(memory_format=_CHANNELS_LAST[x.dim()]) and x.stride(0) != x[0].numel()
    return x.contiguous() if doubtful and not x.is_contiguous() else x


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _run_region(model: nn.Module, region: Region, inputs: Sequence[Any], batch: int) -> Any:
    values = list(inputs)
    for call, graded in zip(region.calls, region.graded, strict=True):
        with torch.set_grad_enabled(graded and torch.is_grad_enabled()):
            values.append(call_operation(model, call, values, batch))
    given = tuple(values[i] for i in region.gives)
    return given if region.several else given[0]


_FACTORIES = frozenset(
    getattr(torch, name)
    for name in ("arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "tensor", "zeros")
)


def bind_operation(model: nn.Module, operation: Operation) -> Callable[[Sequence[Any], int], Any]:
    """A layer's call with its module already looked up: (inputs, samples they hold) -> output."""
    match operation.call, tuple(operation.args):
        case "module", (Ref(0),) if not operation.kwargs and not operation.attributes:
            module = model.get_submodule(str(operation.target))
            return lambda inputs, _batch: _of_one_format(module(inputs[0]))
    return partial(call_operation, model, operation)


def arguments(
    operation: Operation, inputs: Sequence[Any], batch: int, model: nn.Module
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a layer's call is given; `inputs` may stand for tensors, where it asks for none of their sizes."""
    here = _Surroundings(inputs, batch, model)
    return filled(tuple(operation.args), here), filled(dict(operation.kwargs), here)


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """What the placeholders among the arguments of a call stand for."""

    inputs: Sequence[Any]
    batch: int
    model: nn.Module | None = None

    @property
    def device(self) -> torch.device:
        held = itertools.chain(self.inputs, () if self.model is None else self.model.parameters())
        return next((t.device for t in held if isinstance(t, Tensor)), torch.device("cpu"))


def filled(arg: Any, here: _Surroundings) -> Any:
    """An argument with tensors in the place of each `Ref`, and numbers in that of each `BatchExtent`.

    Not a closure of the caller: a recursive closure is a reference cycle, which kept the inputs (activations) alive until
    Python's garbage collector ran, so that every step allocated new memory.
    """

    def fill_each(values: Iterable[Any]) -> Iterator[Any]:
        return (filled(each, here) for each in values)

    match arg:
        case Ref(index):
            return here.inputs[index]
        case BatchExtent(multiple):
            return multiple * here.batch
        case PartExtent(count, axis, extent, int(index)):
            return count * here.inputs[index].shape[axis] // extent
        case Here():
            return here.device
        case Form(make, args, kwargs):
            return make(*fill_each(args), **dict(zip(kwargs, fill_each(kwargs.values()), strict=True)))
        case tuple() if hasattr(arg, "_fields"):
            return type(arg)(*fill_each(arg))
        case tuple():
            return tuple(fill_each(arg))
        case list():
            return list(fill_each(arg))
        case dict():
            return dict(zip(arg, fill_each(arg.values()), strict=True))
        case slice():
            return slice(*fill_each((arg.start, arg.stop, arg.step)))
        case _:
            return arg


def _part_of(module: nn.Module, operation: Operation, inputs: Sequence[Any]) -> nn.Module:
    """The module, or where a part of it is present one with the same parameters and other numbers."""
    numbers = {}
    for name, each in operation.attributes.items():
        present = inputs[each.of] if isinstance(each.of, int) else operator.attrgetter(each.of)(module)
        numbers[name] = each.count * present.shape[each.axis] // each.extent
    if all(getattr(module, name) == number for name, number in numbers.items()):
        return module
    part = object.__new__(type(module))  # not copy.copy, which modules with parametrizations refuse
    part.__dict__ = {**module.__dict__, **numbers}
    return part


def fill_result(traced: TracedModel, outputs: Sequence[Tensor]) -> Any:
    """What the model returns, made of its outputs: in its own types, which the caller may change."""
    return filled(traced.result, _Surroundings(outputs, 0))


def run_traced(model: nn.Module, traced: TracedModel, inputs: Sequence[Tensor]) -> Any:
    """Run a trace on one device, layer by layer, as the executor would with a single device."""
    values: dict[str, Any] = {layer.name: x for layer, x in zip(traced.graph.inputs, inputs, strict=True)}
    for name, layer in traced.graph.layers.items():
        if layer.kind != "input":
            reads = [values[i] for i in layer.inputs]
            with torch.set_grad_enabled(layer.differentiable and torch.is_grad_enabled()):
                values[name] = call_operation(model, traced.operations[name], reads, len(inputs[0]))
    return fill_result(traced, [values[name] for name in traced.graph.outputs])


def disable_in_place(model: nn.Module) -> nn.Module:
    """Turn off `inplace` everywhere: layers keep their inputs for backward, so nothing may overwrite them."""
    for module in model.modules():
        if getattr(module, "inplace", False):
            module.inplace = False  # type: ignore[assignment]
    return model
