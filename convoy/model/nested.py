"""Nested values: tuples, lists, mappings and dataclasses that contain tensors, such as batches and arguments of a model."""

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from convoy.errors import InputError, shown
from convoy.model.operation import Form, Ref, fill


class Arguments(NamedTuple):
    """The arguments of a call, by position and by name."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


Example = Tensor | Arguments | Sequence[Any] | Mapping[str, Any]
"""A tensor; or the arguments of a forward: both kinds, by position, or by name."""
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)


def arguments_of(example: Example) -> Arguments:
    if isinstance(example, Arguments):
        return example
    args = () if isinstance(example, Mapping) else (example,) if isinstance(example, Tensor) else tuple(example)
    return Arguments(args, example if isinstance(example, Mapping) else {})


def without_tensors(value: Any, found: list[Tensor], constant: Callable[[Any], Any] = lambda value: value) -> Any:
    """Append the tensors of a nested value to `found`. Return the value with `Ref(i)` in place of `found[i]`, and with
    `constant(v)` in place of a value v that is neither a tensor nor nested."""

    def each(values: Any) -> list[Any]:
        return [without_tensors(v, found, constant) for v in values]

    if isinstance(value, Tensor):
        found.append(value)
        return Ref(len(found) - 1)
    if is_dataclass(value) and not isinstance(value, type):
        keys = [f.name for f in fields(value) if f.init]
        return Form(type(value), (), dict(zip(keys, each(getattr(value, k) for k in keys), strict=True)))
    if isinstance(value, Mapping):
        filled = dict(zip(value, each(value.values()), strict=True))
        return filled if type(value) in (dict, defaultdict) else Form(type(value), (filled,))
    if not isinstance(value, tuple | list) or isinstance(value, torch.Size):
        return constant(value)
    if type(value) in (tuple, list):
        return type(value)(each(value))
    return Form(type(value), tuple(each(value)) if hasattr(value, "_fields") else (each(value),))


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a nested value, in order."""
    found: list[Tensor] = []
    without_tensors(value, found)
    return found


def map_tensors(value: Any, f: Callable[[Tensor], Any]) -> Any:
    """Return the same nested value, with `f` applied to each tensor."""
    found: list[Tensor] = []
    form = without_tensors(value, found)
    return fill(form, [*map(f, found)])


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model is called. Two calls that differ only in their tensors have equal forms.

    Attributes:
        text: the arguments of forward, by position and by name. Those that are no tensors are constants.
        arguments: the same, with `Ref(i)` in place of the i-th tensor.
        names, dtypes: of the tensors: the parameter of forward, with a number if it has several.
    """

    text: str
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = field(compare=False, repr=False)
    names: tuple[str, ...] = field(compare=False, repr=False)
    dtypes: tuple[torch.dtype, ...] = field(compare=False, repr=False)

    @classmethod
    def of(cls, model: nn.Module, example: Example) -> tuple["CallForm", list[Tensor]]:
        """Return the form of a call, and its tensors. InputError: forward takes other arguments, or one is no constant."""
        args, kwargs = arguments_of(example)
        signature, name = inspect.signature(type(model).forward), type(model).__name__
        try:
            bound = signature.bind(model, *args, **kwargs)
        except TypeError as error:
            raise InputError(f"{name} was called with arguments that its forward does not take: {error}") from None
        for parameter in signature.parameters.values():
            if bound.arguments.get(parameter.name, ...) is parameter.default:
                del bound.arguments[parameter.name]
        found: list[Tensor] = []
        arguments = without_tensors((bound.args[1:], bound.kwargs), found, _constant)
        names: list[str] = []
        for key, value in [*bound.arguments.items()][1:]:
            names += [key] if isinstance(value, Tensor) else [f"{key}_{i}" for i in range(len(tensors_of(value)))]
        args, kwargs = arguments
        rows = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
        text = re.sub(r"Ref\(index=\d+\)", "tensor", f"({', '.join(rows)})")
        return cls(text, arguments, tuple(names), tuple(t.dtype for t in found)), found

    def read(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple["CallForm", Sequence[Tensor]]:
        """Return the form of a call, and its tensors. It is this form in most calls, which is known quickly."""
        by_position = not kwargs and self.arguments == (tuple(map(Ref, range(len(args)))), {})
        quick = by_position and all(isinstance(x, Tensor) for x in args)
        return (self, args) if quick else CallForm.of(model, Arguments(args, kwargs))


def _constant(value: Any) -> Any:
    if isinstance(value, _CONSTANTS):
        return value
    raise InputError(
        f"the model was called with {shown(value)}, a {type(value).__name__}: give it tensors, numbers, texts, or tuples, "
        "lists, dicts and dataclasses of them; keep other objects in attributes of the model"
    )
