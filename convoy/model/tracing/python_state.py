"""Finds Python state (values other than tensors that modules' code reads), and detects changes of it.

torch.fx runs a forward once, and fixes the values that Python had then. So a forward that changes such a value, or reads one
that cannot be compared, is not traced: it runs in every step. Values read by a trace are compared again before every step.
"""

import functools
import inspect
import logging
import random
import re
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from convoy.errors import InputError
from convoy.model.tracing.supported_layers import replaced_by_hand

REGISTERED = " (parameters, buffers and submodules)"
"""The end of the name under which a module's lists of these are compared."""
_OF_TORCH = frozenset(vars(nn.Module())) | {"training", "_flat_weights", "_flat_weight_refs"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, Enum, CodeType)
_CONSTANT = (type, ModuleType, re.Pattern, range, slice, logging.Logger, logging.LoggerAdapter, np.dtype, np.generic)
_UNREADABLE = (random.Random, torch.Generator, fx.Proxy)
_CONTAINERS = (list, tuple, deque, dict, MappingProxyType, set, frozenset)
_PARTS: Mapping[type, tuple[str, ...]] = {
    FunctionType: ("__code__", "__defaults__", "__closure__"),
    MethodType: ("__self__", "__func__"),
    CellType: ("cell_contents",),
    functools.partial: ("func", "args", "keywords"),
}
_DEEPEST = 12
_MISSING = "<nothing>"


class Hidden(Exception):  # noqa: N818 - an answer, not an error
    """The signal that a value's state cannot be compared: a random generator, an iterator, an object of a C extension."""


def form_of(value: Any, within: tuple[int, ...] = ()) -> Any:
    """Return a form of `value`. Two forms are equal exactly if the value, with all values in it, is unchanged.

    Raise Hidden if it cannot be compared. `within`: ids of the values that contain this one.
    """
    if isinstance(value, _PLAIN):
        return (type(value).__name__, repr(value) if isinstance(value, float | complex) else value)  # NaN equals itself
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return (value.shape, value.dtype.str, value.tobytes())
    if isinstance(value, nn.Parameter) or (isinstance(value, Tensor) and value.is_inference()):
        return id(value)  # optimizers change parameters
    if isinstance(value, Tensor):
        return (id(value), value._version)
    if id(value) in within:
        return "one of those around it"
    if len(within) >= _DEEPEST:
        raise Hidden(f"a nest of more than {_DEEPEST} levels")
    inner = _inner(value)
    if not inner and not isinstance(value, _CONTAINERS):
        return id(value)
    return (type(value).__qualname__, tuple((key, form_of(each, (*within, id(value)))) for key, each in inner))


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(each, _PLAIN) for each in value))


def _form(value: Any) -> Any:
    try:
        return form_of(value)
    except Hidden:
        return ("hidden", id(value))


def _inner(value: Any) -> list[tuple[Any, Any]]:
    """Return the names and values inside a value; none if it cannot change. Raise Hidden if they cannot be read."""
    if isinstance(value, _UNREADABLE) or hasattr(type(value), "__next__"):
        raise Hidden(f"a {type(value).__qualname__}")
    if isinstance(value, dict | MappingProxyType):
        return [(repr(key), each) for key, each in value.items()]
    if isinstance(value, set | frozenset):
        return [(each, None) for each in sorted(map(repr, value))]
    if isinstance(value, list | tuple | deque):
        return list(enumerate(value))
    if isinstance(value, weakref.ref):  # to the weights of an LSTM, for example
        return [("object", value())]
    if names := _PARTS.get(type(value)):
        return [(name, _attribute(value, name)) for name in names]
    if isinstance(value, BuiltinFunctionType):
        owner = value.__self__
        return [] if owner is None or isinstance(owner, type | ModuleType) else [("self", owner)]
    if isinstance(value, nn.Module):  # a module in a plain list, for example, which is no submodule
        return [(key, each) for key, each in vars(value).items() if key not in _OF_TORCH]
    top = type(value).__module__.partition(".")[0]
    if isinstance(value, _CONSTANT) or (top in ("torch", "numpy") and "random" not in type(value).__module__):
        return []
    slots: list[str] = []
    for cls in type(value).__mro__:
        own = vars(cls).get("__slots__", ())
        slots += [s for s in ((own,) if isinstance(own, str) else own) if hasattr(value, s)]
    if not hasattr(value, "__dict__") and not slots and type(value) is not object:
        raise Hidden(f"a {type(value).__qualname__}")
    held = [(s, getattr(value, s)) for s in slots if s not in ("__dict__", "__weakref__")]
    return [*held, *getattr(value, "__dict__", {}).items()]


def _attribute(value: Any, name: str) -> Any:
    try:
        return getattr(value, name)
    except ValueError:  # an empty cell
        return _MISSING


_NO_USERS = frozenset(sys.stdlib_module_names) | {"torch", "torchvision", "numpy", "builtins"}
"""Packages whose code is not examined."""
_CLOCKS = ("time", "datetime", "secrets", "uuid")
_BY_NAME = {"getattr", "vars", "__dict__", "eval", "exec"}
"""Code with such a name may read any attribute of its module."""
_ASKS = {"is_grad_enabled", "is_inference_mode_enabled", "is_inference"}


@dataclass(frozen=True)
class _Code:
    """The names used in some functions, and in the functions that they call.

    Attributes:
        names: names of attributes and variables.
        any: whether the code may read any attribute of its module (for example by getattr).
        outside: name -> getter of a value outside of modules: a global variable, an attribute of a class, a variable of an
            enclosing function.
        clock: the name of a clock, of a random source or of the environment in the code, or "".
        function: the name of an autograd.Function in the code, or "".
    """

    names: frozenset[str] = frozenset()
    any: bool = False
    outside: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    clock: str = ""
    function: str = ""


@functools.lru_cache(maxsize=4096)
def _code_of_class(cls: type) -> _Code:
    """Return the names in the forward of a module class, which may be more than it reads."""
    classes = [c for c in cls.__mro__ if _is_users(c)]
    if not classes:
        return _Code(any=True)
    code = _names_in([f for c in classes if (f := _function(vars(c).get("forward"))) is not None], classes)
    of_torch = [c for c in cls.__mro__ if not _is_users(c) and c not in (nn.Module, object)]
    return replace(code, any=bool(of_torch or code.names & _BY_NAME))


def _code_of(module: nn.Module) -> _Code:
    """Return the names in the forward of a module, and in user functions among its attributes."""
    code = _code_of_class(type(module))  # type: ignore[arg-type]
    kept = [v for k, v in vars(module).items() if k not in _OF_TORCH and isinstance(v, FunctionType | MethodType)]
    if not kept:
        return code
    classes = [c for c in type(module).__mro__ if _is_users(c)]
    more = _names_in([f for each in kept if (f := _function(each)) is not None], classes)
    function = code.function or more.function or next(filter(None, map(_autograd_function, kept)), "")
    return _Code(
        code.names | more.names, code.any, {**code.outside, **more.outside}, code.clock or more.clock, function
    )


def _is_users(thing: Any) -> bool:
    return (getattr(thing, "__module__", None) or "builtins").partition(".")[0] not in _NO_USERS


def _autograd_function(value: Any) -> str:
    """Return the name of the autograd.Function if a value is one, or a method of one; else ""."""
    cls = value.__self__ if isinstance(value, MethodType) else value
    return cls.__name__ if isinstance(cls, type) and issubclass(cls, torch.autograd.Function) else ""


def _function(value: Any) -> FunctionType | None:
    """Return the Python function behind a function, method, property or decorated function."""
    value = value.fget if isinstance(value, property) else value
    value = value.__func__ if isinstance(value, MethodType | classmethod | staticmethod) else value
    value = inspect.unwrap(value) if callable(value) else value
    return value if isinstance(value, FunctionType) else None


def _names(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _outside_of(
    function: FunctionType, names: set[str], classes: Sequence[type]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield names and getters of the values outside of modules that a function uses."""
    holders = [(f"{c.__module__}.{c.__qualname__}", vars(c)) for c in classes]
    holders.append((function.__module__, function.__globals__))  # type: ignore[arg-type]
    for value in [function.__globals__.get(n) for n in names]:
        if isinstance(value, ModuleType) and value.__name__.partition(".")[0] not in _NO_USERS:
            holders.append((value.__name__, vars(value)))  # type: ignore[arg-type]
    for home, held in holders:
        yield from ((f"{home}.{n}", functools.partial(held.get, n, _MISSING)) for n in names if n in held)
    home = f"{function.__module__}.{function.__qualname__}"
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield f"{home}.{name}", functools.partial(_attribute, cell, "cell_contents")
    for name in ("__defaults__", "__kwdefaults__"):
        if not _is_plain(getattr(function, name)):
            yield f"{home}.{name}", functools.partial(getattr, function, name)


def _names_in(functions: Sequence[FunctionType], classes: Sequence[type]) -> _Code:
    names: set[str] = set()
    outside: dict[str, Callable[[], Any]] = {}
    clock = function_of_autograd = ""
    waiting, done = list(functions), set[CodeType]()
    while waiting:
        function = waiting.pop()
        if function.__code__ in done or not _is_users(function):
            continue
        done.add(function.__code__)
        own = _names(function.__code__)
        names |= own
        for name, get in _outside_of(function, own, classes):
            value = get()
            function_of_autograd = function_of_autograd or _autograd_function(value)
            source = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if source in _CLOCKS and isinstance(value, ModuleType | BuiltinFunctionType):
                clock = clock or value.__name__
            elif source == "os" and own & {"environ", "getenv"}:
                clock = clock or "os.environ"
            elif (called := _function(value)) is not None:
                waiting.append(called)
                read = (key for key in vars(called) if key in own)
                outside.update((f"{name}.{key}", functools.partial(vars(called).get, key)) for key in read)
            elif not isinstance(value, ModuleType):
                # Methods of the user's class, or of an object of one, that are called by these names.
                cls = value if isinstance(value, type) else type(value)
                methods = [vars(c).get(n) for c in cls.__mro__ if _is_users(c) for n in (*own, "__call__")]
                waiting += [f for method in methods if (f := _function(method)) is not None]
                if not isinstance(value, type) and value is not _MISSING:
                    outside[name] = get
    return _Code(frozenset(names), False, outside, clock, function_of_autograd)


class State:
    """The values, other than tensors, that the code of modules reads.

    Args:
        modules: path -> module; submodules must be listed separately.
        others: modules whose attributes the code of `modules` may read.

    Attributes:
        names: names of attributes and variables in the code.
        outside: name -> getter of a value outside of modules.
        function: the name of an autograd.Function in the code, or "".
    """

    def __init__(self, modules: Mapping[str, nn.Module], others: Mapping[str, nn.Module] | None = None) -> None:
        self._rows = [(path, module, _code_of(module)) for path, module in modules.items()]
        codes = [code for _, _, code in self._rows]
        self.names = frozenset[str]().union(*(code.names for code in codes))
        self.outside = {name: get for code in codes for name, get in code.outside.items()}
        self.function = next((code.function for code in codes if code.function), "")
        self._clock = next((code.clock for code in codes if code.clock), "")
        if others:
            self._rows += [(path, m, _Code(self.names)) for path, m in others.items() if path not in modules]

    def forms(self) -> dict[str, Any]:
        """Return the `form_of` each value, by name."""
        return {name: _form(value) for name, value in self._values()}

    def asked(self) -> str:
        """Return a description of a value that the code reads and that may differ in another step, or ""."""
        if asked := self.names & _ASKS:
            return f"{min(asked)!r}, which may differ in another step"
        return "the type of a tensor" if {"type", "Tensor"} <= self.names else ""

    def hidden(self) -> str:
        """Return a description of a value that the code reads and that cannot be compared, or ""."""
        for name, value in () if self._clock else self._values():
            try:
                form_of(value)
            except Hidden as what:
                return f"{name!r}, which is {what}"
        return self._clock

    def attributes(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield the name of each attribute, the dictionary that contains it, and its key there."""
        for path, module, code in self._rows:
            held = vars(module)
            for key in held:
                reads = (code.any or key in code.names) and not key.startswith("_tensor_constant")  # torch.fx's own
                if key not in _OF_TORCH and reads:
                    yield f"{path}.{key}".lstrip("."), held, key

    def _values(self) -> Iterator[tuple[str, Any]]:
        yield from ((name, held[key]) for name, held, key in self.attributes())
        for path, module, _ in self._rows:
            yield f"{path}{REGISTERED}", (*module._parameters, *module._buffers, *module._modules)
            trained = [p is not None and p.requires_grad for p in module._parameters.values()]
            yield f"{path}.training".lstrip("."), module.training
            yield f"{path}.requires_grad".lstrip("."), trained
        yield from ((name, get()) for name, get in self.outside.items())


def settings(modules: Mapping[str, nn.Module]) -> list[tuple[str, dict[str, Any], str]]:
    """Return the attributes of torch's own modules, such as strides and groups: name, dictionary and key.

    Numbers (momentum, eps, slopes) may change later, as layers read them in each call; not those of a `Window`.
    """
    return [
        (f"{path}.{key}", vars(module), key)
        for path, module in modules.items()
        if type(module).__module__.startswith("torch.nn")
        for key, value in vars(module).items()
        if key not in _OF_TORCH and key[0] != "_" and key != "inplace"
        if _is_plain(value) and (key in ("scale_factor", "value") or not isinstance(value, float | None))
    ]


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names of values that differ between two results of `State.forms`."""
    return [name for name in {**before, **after} if before.get(name, _MISSING) != after.get(name, _MISSING)]


def subtree(model: nn.Module, path: str = "") -> dict[str, nn.Module]:
    """Return a submodule and all modules in it, by their paths in the model."""
    return dict(model.get_submodule(path).named_modules(prefix=path))


@contextmanager
def random_kept() -> Iterator[Callable[[], bool]]:
    """Restore the random states of torch (CPU), Python and NumPy at the end. Yield a function that returns whether Python's
    or NumPy's was used."""
    own, numpy_own, torch_own = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def used() -> bool:
        return random.getstate() != own or not all(map(np.array_equal, np.random.get_state(), numpy_own))

    try:
        yield used
    finally:
        random.setstate(own)
        np.random.set_state(numpy_own)
        torch.set_rng_state(torch_own)


def modes_of(model: nn.Module) -> dict[str, bool]:
    """Return path -> whether in training mode, for the modules that behave differently in training and evaluation."""

    def has_modes(module: nn.Module) -> bool:
        if not type(module).__module__.startswith("torch.nn"):
            return True
        name, held = type(module).__name__, vars(module) | module._buffers
        return "Dropout" in name or name == "RReLU" or held.get("running_mean") is not None or bool(held.get("dropout"))

    return {path: module.training for path, module in model.named_modules() if has_modes(module)}


class StateWatch:
    """A check that values read by a trace have not changed, because the trace would ignore the change.

    Args:
        model: this device's copy, in the traced state.
        seen: paths of the modules that the trace enters.
        part: path of the module that was traced.
    """

    def __init__(self, model: nn.Module, seen: Sequence[str], part: str) -> None:
        named = dict(model.named_modules())
        through = {path: named[path] for path in seen}
        state = State(through, named)
        self._lengths = [(path, m, len(vars(m)), replaced_by_hand(m), path in through) for path, m in named.items()]
        self._submodules = [(path, m._modules, dict(m._modules)) for path, m in through.items()]
        rows: list[tuple[str, Any, str]] = [*state.attributes(), *settings(subtree(model, part))]
        # Dropout with p = 0 was traced as a layer without random numbers, so watch p.
        dropouts = [(f"{path}.p", vars(m)) for path, m in named.items() if "Dropout" in type(m).__name__]
        rows += [(name, held, "p") for name, held in dropouts if held.get("p") == 0]
        # Compare plain values by identity first, which is quick.
        values = [(*row, row[1][row[2]]) for row in rows]
        self._attributes = [(*row, v if _is_plain(v) else _MISSING, _form(v)) for *row, v in values]
        self._outside = [(name, get, _form(get())) for name, get in state.outside.items()]

    def check(self) -> None:
        """Raise InputError if an attribute or a submodule has changed since the trace."""
        for path, module, length, method, is_seen in self._lengths:
            if len(vars(module)) != length:
                if (found := replaced_by_hand(module)) != method:
                    raise _changed(f"{path}.{found or method}")
                if is_seen:
                    raise _changed(f"{path}.{next(reversed(vars(module)))}")
        for path, children, before in self._submodules:
            if children != before:
                raise _changed(f"{path}.(its submodules)")
        for name, held, key, value, form in self._attributes:
            found = held.get(key, self)
            if found is not value and _form(found) != form:
                raise _changed(name)
        for name, get, form in self._outside:
            if _form(get()) != form:
                raise _changed(name, outside=True)


def _changed(name: str, *, outside: bool = False) -> InputError:
    path, _, key = name.rpartition(".")
    value = name if outside else f"{key!r} of module {path or 'the model itself'!r}"
    return InputError(
        f"{value} changed after distribute(), which read it: set it before, or distribute the model again"
    )
