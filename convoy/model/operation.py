"""Describes and runs the call of each layer of a traced model.

`graph.py` holds a layer's properties for plans; an `Operation` holds the module or function to call, with its arguments.
"""

import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from convoy.model.graph import Graph


@dataclass(frozen=True, slots=True)
class Ref:
    """Placeholder for the i-th input tensor of a layer."""

    index: int


@dataclass(frozen=True, slots=True)
class BatchExtent:
    """Placeholder for `multiple` times the number of local samples: `x.size(0)` in the model's source."""

    multiple: int


@dataclass(frozen=True, slots=True)
class PartExtent:
    """Placeholder for a number that is proportional to the local shard of an axis: `count` for the whole axis.

    Attributes:
        extent: length of the whole axis.
        of: index of an input tensor, or key of a parameter of the layer's module.
    """

    count: int
    axis: int
    extent: int
    of: int | str = 0


@dataclass(frozen=True, slots=True)
class Here:
    """Placeholder for the local torch device: `x.device` in the model's source."""


@dataclass(frozen=True, slots=True)
class Form:
    """Placeholder for an object that contains other values, such as a named tuple or a dataclass."""

    make: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a traced model.

    Attributes:
        call: "module" (target: its path), "batch_norm" (target: path of a batch norm; only its normalisation runs;
            `folded`: on rows with an axis of their own), "function" (target: the callable), "method" (target: its name),
            "attribute" (target: path of a parameter or buffer), "constant" (target: a tensor), "region" or "input".
        args, kwargs: as in the source, with placeholders for tensors and for numbers that differ between devices.
        attributes: attributes of the module that are scaled with its shard, such as a group norm's number of groups.
    """

    call: Literal["module", "batch_norm", "function", "method", "attribute", "constant", "region", "input"]
    target: "str | Callable[..., Any] | Tensor | Region"
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, PartExtent] = field(default_factory=dict)

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the called modules."""
        if isinstance(self.target, Region):
            return tuple(path for call in self.target.calls for path in call.modules)
        return (str(self.target),) if self.call == "module" else ()


@dataclass(frozen=True, slots=True)
class Region:
    """Several calls that form one layer, because the values between them have no batch axis.

    Attributes:
        calls: in order; in their arguments, `Ref(i)` is the layer's input i, or the output of call i - (number of inputs).
        graded: per call, whether gradients flow (not under torch.no_grad()).
        gives: indices of the layer's outputs, numbered like `Ref`.
        several: whether the output is a tuple.
    """

    calls: tuple[Operation, ...]
    graded: tuple[bool, ...]
    gives: tuple[int, ...]
    several: bool


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A model as a graph of layers, with the operation that computes each of them.

    Attributes:
        operations: layer name -> its call.
        result: the model's result, with `Ref(i)` for the i-th of `graph.outputs`.
        seen: paths of the modules that the trace enters. Their Python code runs only once, during tracing.
        modes: path -> whether in training mode, for modules that behave differently in training and evaluation.
        call: the `CallForm` of its arguments.
        live: if the model's own forward runs in every step, the traces of the submodules that it calls and that are split;
            None: all of the model is traced.
        path: path of such a submodule.
        note: what runs on every device, and why; "" for all others.
        example: the example of the trace of a model that runs live.
    """

    graph: Graph
    operations: Mapping[str, Operation]
    result: Any
    seen: tuple[str, ...] = ()
    modes: Mapping[str, bool] = field(default_factory=dict)
    call: Any = None
    live: "tuple[TracedModel, ...] | None" = None
    path: str = ""
    note: str = ""
    example: Any = field(default=None, compare=False, repr=False)

    @property
    def parts(self) -> "dict[str, TracedModel]":
        """This trace, and those in `live`, by path."""
        return {part.path: part for part in (self, *(self.live or ()))}


def call_operation(model: nn.Module, operation: Operation, inputs: Sequence[Any], batch: int) -> Any:
    """Call a layer's module or function on inputs that hold `batch` samples."""
    if isinstance(operation.target, Region):
        region, values = operation.target, list(inputs)
        for call, graded in zip(region.calls, region.graded, strict=True):
            with torch.set_grad_enabled(graded and torch.is_grad_enabled()):
                values.append(call_operation(model, call, values, batch))
        given = tuple(values[i] for i in region.gives)
        return given if region.several else given[0]
    here = _PlaceholderValues(inputs, batch, model)
    args, kwargs = here.fill(tuple(operation.args)), here.fill(dict(operation.kwargs))
    y: Any
    match operation.call, operation.target:
        case "module", str(path):
            y = _shard_of(model.get_submodule(path), operation, inputs)(*args, **kwargs)
        case "batch_norm", str(path):
            x = args[0].flatten(0, 1) if kwargs else args[0]
            y = _BatchNorm.forward(model.get_submodule(path), x).view_as(args[0])  # type: ignore[arg-type]
        case "method", str(name):
            y = getattr(args[0], name)(*args[1:], **kwargs)
        case "attribute", str(path):
            y = operator.attrgetter(path)(model)
        case "constant", Tensor() as tensor:
            y = tensor.to(here.device)
        case _, function:
            assert callable(function)
            with torch.device(here.device) if function in _FACTORIES else nullcontext():
                y = function(*args, **kwargs)
    return in_one_format(y)


def _shard_of(module: nn.Module, operation: Operation, inputs: Sequence[Any]) -> nn.Module:
    """Return the module, or for a shard a copy with the same parameters and scaled attributes."""
    numbers = {}
    for name, each in operation.attributes.items():
        present = inputs[each.of] if isinstance(each.of, int) else operator.attrgetter(each.of)(module)
        numbers[name] = each.count * present.shape[each.axis] // each.extent
    if all(getattr(module, name) == number for name, number in numbers.items()):
        return module
    shard = object.__new__(type(module))  # not copy.copy, which modules with parametrizations refuse
    shard.__dict__ = {**module.__dict__, **numbers}
    return shard


def in_one_format(y: Any) -> Any:
    """Return the output of a call, made contiguous if torch could mistake it for channels-last.

    This happens for a single sample with permuted axes. torch 2.13 then computes wrong gradients of batch norm if the input
    or the output's gradient is such a tensor: on a device with one sample, but not on a device with all samples.
    """
    if not isinstance(y, Tensor) or y.dim() not in _CHANNELS_LAST or y.size(0) != 1:
        return y
    y = _unambiguous(y)
    if y.grad_fn is not None and "BatchNorm" in y.grad_fn.name():
        y.register_hook(_unambiguous)
    return y


def _unambiguous(x: Tensor) -> Tensor:
    doubtful = x.is_contiguous(memory_format=_CHANNELS_LAST[x.dim()]) and x.stride(0) != x[0].numel()
    return x.contiguous() if doubtful and not x.is_contiguous() else x


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_FACTORIES = frozenset(
    getattr(torch, name)
    for name in ("arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "tensor", "zeros")
)


def bind_operation(model: nn.Module, operation: Operation) -> Callable[[Sequence[Any], int], Any]:
    """Look up the module of a layer's call. Return a function (inputs, number of samples) -> output."""
    match operation.call, tuple(operation.args):
        case "module", (Ref(0),) if not operation.kwargs and not operation.attributes:
            module = model.get_submodule(str(operation.target))
            return lambda inputs, _batch: in_one_format(module(inputs[0]))
    return partial(call_operation, model, operation)


@dataclass(frozen=True, slots=True)
class _PlaceholderValues:
    """The values that replace placeholders in one call. `keep_forms`: objects stay placeholders."""

    inputs: Any
    batch: int
    model: nn.Module | None = None
    keep_forms: bool = False

    @property
    def device(self) -> torch.device:
        held = itertools.chain(self.inputs, () if self.model is None else self.model.parameters())
        return next((t.device for t in held if isinstance(t, Tensor)), torch.device("cpu"))

    def fill(self, arg: Any) -> Any:
        """Return an argument with its placeholders replaced by values."""
        # No recursive closure: its reference cycle would keep the inputs (activations) alive until garbage collection.
        match arg:
            case Ref(index):
                return self.inputs[index]
            case BatchExtent(multiple):
                return multiple * self.batch
            case PartExtent(count, axis, extent, int(index)):
                return count * self.inputs[index].shape[axis] // extent
            case Here():
                return self.device
            case Form(make, args, kwargs):
                args, kwargs = self.fill(args), self.fill(dict(kwargs))
                return Form(make, args, kwargs) if self.keep_forms else make(*args, **kwargs)
            case tuple() if hasattr(arg, "_fields"):
                return type(arg)(*map(self.fill, arg))
            case tuple():
                return tuple(map(self.fill, arg))
            case list():
                return [*map(self.fill, arg)]
            case dict():
                return dict(zip(arg, map(self.fill, arg.values()), strict=True))
            case slice():
                return slice(*map(self.fill, (arg.start, arg.stop, arg.step)))
        return arg


def fill(form: Any, tensors: Sequence[Any]) -> Any:
    """Return a nested value with these tensors in place of each `Ref`, in new objects that the caller may change."""
    return _PlaceholderValues(tensors, 0).fill(form)


def renumbered(form: Any, refs: Mapping[int, Ref]) -> Any:
    """Return a nested value with `refs[i]` in place of each `Ref(i)`."""
    return _PlaceholderValues(refs, 0, keep_forms=True).fill(form)


def with_trained(traced: TracedModel, trained: Collection[str]) -> TracedModel:
    """Return the trace in which exactly the parameters with these keys require a gradient."""
    layers = {}
    for name, layer in traced.graph.layers.items():
        own = {key: replace(p, trainable=p.key in trained) for key, p in layer.parameters.items()}
        layers[name] = replace(layer, parameters=own)
    return traced if layers == traced.graph.layers else replace(traced, graph=replace(traced.graph, layers=layers))


def disable_in_place(model: nn.Module) -> nn.Module:
    """Turn off `inplace` in all modules, because it would overwrite inputs that layers save for backward."""
    for module in model.modules():
        if getattr(module, "inplace", False):
            module.inplace = False  # type: ignore[assignment]
    return model
