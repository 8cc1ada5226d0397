"""Python state: the values beside tensors that the code of modules reads, and whether they have changed.

torch.fx runs a forward once and keeps the values that Python had then. So a forward that changes such a value, or reads one
whose changes cannot be seen, is not traced through, and what a trace has read is compared again before every step.
"""

import functools
import inspect
import logging
import random
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from convoy.errors import InputError
from convoy.model.tracing.kinds import replaced_by_hand

OF_TORCH = frozenset(vars(nn.Module())) | {"training"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, Enum)
_CONSTANT = (type, ModuleType, re.Pattern, range, slice, logging.Logger, logging.LoggerAdapter, np.dtype, np.generic)
_HIDDEN = (random.Random, torch.Generator, fx.Proxy)
_CONTAINERS = (list, tuple, deque, dict, MappingProxyType, set, frozenset)
_DEEPEST = 12
_MISSING = "<nothing>"
REGISTERED = " (parameters, buffers and submodules)"
"""Ends the name of the value that says which of these a module has."""


# --- one value -------------------------------------------------------------------------------------------------------


class Hidden(Exception):  # noqa: N818 - an answer, not a fault
    """A value whose state cannot be compared: a random generator, an iterator, an object of a C extension."""


def form_of(value: Any, within: tuple[int, ...] = ()) -> Any:
    """Return a value that is equal later exactly if `value`, with all that is in it, is what it was.

    Args:
        within: ids of the values that hold this one.

    Raises:
        Hidden: there is no telling.
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


def _inner(value: Any) -> list[tuple[Any, Any]]:
    """The values inside of one, with their names; none where it never changes.

    Raises:
        Hidden: they cannot be seen.
    """
    name = type(value).__qualname__
    if isinstance(value, _HIDDEN) or hasattr(type(value), "__next__"):
        raise Hidden(f"a {name}")
    if isinstance(value, dict | MappingProxyType):
        return [(repr(key), each) for key, each in value.items()]
    if isinstance(value, set | frozenset):
        return [(each, None) for each in sorted(map(repr, value))]
    if isinstance(value, list | tuple | deque):
        return list(enumerate(value))
    if isinstance(value, FunctionType):
        return [("defaults", value.__defaults__), ("code", value.__code__.co_name), *_cells(value)]
    if isinstance(value, MethodType):
        return [("self", value.__self__), ("function", value.__func__)]
    if isinstance(value, functools.partial):
        return [("function", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, BuiltinFunctionType):
        owner = value.__self__
        return [] if owner is None or isinstance(owner, type | ModuleType) else [("self", owner)]
    if isinstance(value, nn.Module):  # one that is held in a list, say: it is no submodule
        return [(key, each) for key, each in vars(value).items() if key not in OF_TORCH]
    top = type(value).__module__.partition(".")[0]
    if isinstance(value, _CONSTANT) or (top in ("torch", "numpy") and "random" not in type(value).__module__):
        return []
    slots = [s for cls in type(value).__mro__ for s in _as_tuple(vars(cls).get("__slots__", ())) if hasattr(value, s)]
    if not hasattr(value, "__dict__") and not slots and type(value) is not object:
        raise Hidden(f"a {name}")
    held = [(s, getattr(value, s)) for s in slots if s not in ("__dict__", "__weakref__")]
    return [*held, *getattr(value, "__dict__", {}).items()]


def _as_tuple(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _cells(function: FunctionType) -> list[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return [(name, cell.cell_contents) for name, cell in cells if not _is_empty(cell)]


def _is_empty(cell: CellType) -> bool:
    try:
        return cell.cell_contents is cell  # never so; reading an empty cell raises
    except ValueError:
        return True


# --- what code reads -------------------------------------------------------------------------------------------------

_NO_USERS = frozenset(sys.stdlib_module_names) | {"torch", "torchvision", "numpy", "builtins"}
"""Packages whose code is not looked into."""
_CLOCKS = ("time", "datetime", "secrets", "uuid")
_BY_NAME = {"getattr", "vars", "__dict__", "eval", "exec"}
"""Code that has such a name may read any attribute of its module."""
_ASKS = {"is_grad_enabled", "is_inference_mode_enabled", "is_inference"}

CHANCE = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_",
    "multinomial", "normal", "normal_", "uniform", "uniform_", "poisson", "random", "random_", "shuffle", "choice", "sample",
}  # fmt: skip
"""Code that has such a name may draw random numbers in some steps, if not in the first."""


@dataclass(frozen=True)
class _Place:
    """A value outside of modules: a global variable, an attribute of a class, a variable of an enclosing function."""

    name: str
    holder: "dict[str, Any] | type | CellType"
    key: str

    def found(self) -> Any:
        if isinstance(self.holder, CellType):
            return _MISSING if _is_empty(self.holder) else self.holder.cell_contents
        held = vars(self.holder) if isinstance(self.holder, type) else self.holder
        return held.get(self.key, _MISSING)

    def put(self, value: Any) -> None:
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, type):
            setattr(self.holder, self.key, value)
        else:
            self.holder[self.key] = value


@dataclass(frozen=True)
class _Code:
    """What some functions, and those that they call, name.

    Attributes:
        names: of attributes and variables.
        any: it may read attributes of its module by other names, too.
        places: values outside of modules.
        clock: a clock, or a source of chance, that they name; "" where there is none.
    """

    names: frozenset[str] = frozenset()
    any: bool = False
    places: tuple[_Place, ...] = ()
    clock: str = ""


@functools.lru_cache(maxsize=4096)
def _code_of(cls: type) -> _Code:
    """What the forward of a class of modules names. It is found by names, so it may be more than what is read."""
    classes = [c for c in cls.__mro__ if _is_users(c)]
    if not classes:
        return _Code(any=True)
    code = _named_by([f for c in classes if (f := _function(vars(c).get("forward"))) is not None], classes)
    of_torch = [c for c in cls.__mro__ if not _is_users(c) and c not in (nn.Module, object)]
    return replace(code, any=bool(of_torch or code.names & _BY_NAME))


def _with_functions(module: nn.Module) -> _Code:
    """What the forward of a module names, with functions of the user that it keeps in its attributes."""
    code = _code_of(type(module))  # type: ignore[arg-type]
    kept = [v for k, v in vars(module).items() if k not in OF_TORCH and isinstance(v, FunctionType | MethodType)]
    classes = [c for c in type(module).__mro__ if _is_users(c)]
    more = _named_by([f for each in kept if (f := _function(each)) is not None], classes)
    return replace(
        code, names=code.names | more.names, places=(*code.places, *more.places), clock=code.clock or more.clock
    )


def _is_users(thing: Any) -> bool:
    return (getattr(thing, "__module__", None) or "builtins").partition(".")[0] not in _NO_USERS


def _function(value: Any) -> FunctionType | None:
    """The Python function of a function, a method, a property, or what decorators have made of one."""
    value = value.fget if isinstance(value, property) else value
    value = inspect.unwrap(getattr(value, "__func__", value))
    return value if isinstance(value, FunctionType) else None


def _names(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _named_by(functions: Sequence[FunctionType], classes: Sequence[type]) -> _Code:
    names: set[str] = set()
    places: dict[str, _Place] = {}
    clocks: list[str] = []
    waiting, done = list(functions), set[CodeType]()
    while waiting:
        function = waiting.pop()
        if function.__code__ in done or not _is_users(function):
            continue
        done.add(function.__code__)
        own = _names(function.__code__)
        names |= own
        home = function.__module__
        rows: list[_Place] = [
            _Place(f"{c.__module__}.{c.__qualname__}.{n}", c, n) for c in classes for n in own if n in vars(c)
        ]
        rows += [_Place(f"{home}.{n}", function.__globals__, n) for n in own if n in function.__globals__]
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        rows += [_Place(f"{home}.{function.__qualname__}.{n}", cell, n) for n, cell in cells]
        while rows:
            place = rows.pop()
            value = place.found()
            if isinstance(value, ModuleType):
                if value.__name__ in _CLOCKS:
                    clocks.append(value.__name__)
                elif value.__name__.partition(".")[0] not in _NO_USERS:
                    rows += [
                        _Place(f"{value.__name__}.{n}", vars(value), n)
                        for n in own
                        if n in vars(value) and not isinstance(vars(value)[n], ModuleType)
                    ]
            elif (called := _function(value)) is not None:
                waiting.append(called)
            elif isinstance(value, BuiltinFunctionType) and value.__module__ in _CLOCKS:
                clocks.append(value.__name__)
            else:
                waiting += _methods(value, own)
                if not isinstance(value, type) and value is not _MISSING:
                    places[place.name] = place
    return _Code(frozenset(names), False, tuple(places.values()), next(iter(clocks), ""))


def _methods(value: Any, names: set[str]) -> list[FunctionType]:
    """The methods of a class of the user, or of an object of one, that are called by these names."""
    cls = value if isinstance(value, type) else type(value)
    rows = [vars(c).get(name) for c in cls.__mro__ if _is_users(c) for name in (*names, "__call__")]
    return [f for row in rows if row is not None and (f := _function(row)) is not None]


class State:
    """The values that the code of modules reads, beside tensors.

    Args:
        modules: by path, without the ones in them.
        others: modules whose attributes the code of `modules` may read.
    """

    def __init__(self, modules: Mapping[str, nn.Module], others: Mapping[str, nn.Module] | None = None) -> None:
        self._rows = [(path, module, _with_functions(module)) for path, module in modules.items()]
        self.names = frozenset[str]().union(*(code.names for _, _, code in self._rows))
        self.places = {place.name: place for _, _, code in self._rows for place in code.places}
        if others:
            self._rows += [(path, m, _Code(self.names)) for path, m in others.items() if path not in modules]

    def forms(self) -> dict[str, Any]:
        """Return each value by its name, as `form_of` has it."""
        return {name: _form(value) for name, value in self._values()}

    def asked(self) -> str:
        """Return what is asked that torch.fx would answer otherwise than a step, in words; "" where there is nothing."""
        if asked := self.names & _ASKS:
            return f"{min(asked)!r}, which another step may answer otherwise"
        return "the type of a tensor" if {"type", "Tensor"} <= self.names else ""

    def hidden(self) -> str:
        """Return what is read that cannot be compared, in words; "" where there is nothing."""
        for _, _, code in self._rows:
            if code.clock:
                return code.clock
        for name, value in self._values():
            try:
                form_of(value)
            except Hidden as what:
                return f"{name!r}, which is {what}"
        return ""

    def attributes(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield each attribute by its name, with the dictionary that holds it and its key there."""
        for path, module, code in self._rows:
            held = vars(module)
            for key in held:
                if key not in OF_TORCH and _reads(code, key):
                    yield f"{path}.{key}".lstrip("."), held, key

    def _values(self) -> Iterator[tuple[str, Any]]:
        yield from ((name, held[key]) for name, held, key in self.attributes())
        for path, module, _ in self._rows:
            yield f"{path}{REGISTERED}", (*module._parameters, *module._buffers, *module._modules)
        yield from ((name, place.found()) for name, place in self.places.items())

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Give attributes and everything outside of modules their values back at the end."""
        before = [(place, place.found()) for place in self.places.values()]
        contents = _Contents([vars(module) for _, module, _ in self._rows], [value for _, value in before])
        try:
            yield
        finally:
            contents.restore()
            for place, value in before:
                if place.found() is not value:
                    place.put(value)


def _reads(code: _Code, key: str) -> bool:
    return (code.any or key in code.names) and not key.startswith("_tensor_constant")  # those are torch.fx's own


def _form(value: Any) -> Any:
    try:
        return form_of(value)
    except Hidden:
        return ("hidden", id(value))


def subtree(model: nn.Module, path: str = "") -> dict[str, nn.Module]:
    """Return a submodule and all modules in it, by their paths in the model."""
    return dict(model.get_submodule(path).named_modules(prefix=path))


class _Contents:
    """What containers, objects and tensors hold now, to be put back into the same ones."""

    def __init__(self, own: Iterable[Any], values: Iterable[Any]) -> None:
        """Note what is there.

        Args:
            own: attributes of a copy that nobody else uses: the numbers in its tensors do not matter.
            values: what others use, too.
        """
        self._held: dict[int, tuple[Any, Any]] = {}
        for value in values:
            self._hold(value, 0, tensors=True)
        for value in own:
            self._hold(value, 0, tensors=False)

    def _hold(self, value: Any, depth: int, *, tensors: bool) -> None:
        if id(value) in self._held or depth > _DEEPEST:
            return
        if isinstance(value, Tensor):
            if tensors and not value.is_meta and not isinstance(value, nn.Parameter):
                self._held[id(value)] = (value, value.detach().clone())
            return
        if isinstance(value, nn.Module) and not tensors:
            return  # `own` has its attributes
        try:
            inner = _inner(value)
        except Hidden:
            return
        if isinstance(value, list | dict | set | deque):
            self._held[id(value)] = (value, value.copy())
        elif hasattr(value, "__dict__") and not callable(value):
            self._held[id(value)] = (vars(value), dict(vars(value)))
        for _, each in inner:
            if not isinstance(each, _PLAIN):
                self._hold(each, depth + 1, tensors=tensors)

    def restore(self) -> None:
        for holder, before in self._held.values():
            if isinstance(holder, Tensor):
                if not torch.equal(holder, before):
                    holder.data.copy_(before)
            elif isinstance(holder, list | deque):
                if [*map(id, holder)] != [*map(id, before)]:
                    holder.clear()
                    holder.extend(before)
            elif holder != before if isinstance(holder, set) else _differ(holder, before):
                holder.clear()
                holder.update(before)


def _differ(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return list(a) != list(b) or [*map(id, a.values())] != [*map(id, b.values())]


# --- random numbers --------------------------------------------------------------------------------------------------


@contextmanager
def random_kept() -> Iterator[Callable[[], bool]]:
    """Give the user's random states (torch's on the CPU, Python's, numpy's) back; yields whether they were drawn from."""

    def states() -> tuple[Any, ...]:
        arrays: Any = np.random.get_state()
        return random.getstate(), arrays, torch.get_rng_state()

    def apart(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
        arrays = any(not np.array_equal(x, y) for x, y in zip(a[1], b[1], strict=True))
        return a[0] != b[0] or arrays or not torch.equal(a[2], b[2])

    before = states()
    try:
        yield lambda: apart(before, states())
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


# --- while it trains -------------------------------------------------------------------------------------------------


def modes_of(model: nn.Module) -> dict[str, bool]:
    """Return, for the modules that differ in training and evaluation, by path, whether they are in training."""
    return {path: module.training for path, module in model.named_modules() if _minds_its_mode(module)}


def _minds_its_mode(module: nn.Module) -> bool:
    if not type(module).__module__.startswith("torch.nn"):
        return True
    name, held = type(module).__name__, vars(module) | module._buffers
    return "Dropout" in name or name == "RReLU" or held.get("running_mean") is not None or bool(held.get("dropout"))


class StateWatch:
    """Notices changes of what a trace has read of modules: it would not follow them.

    Args:
        model: this device's copy, as it was traced.
        seen: paths of the modules that the trace sees through.
        modes: see `TracedModel.modes`.
    """

    def __init__(self, model: nn.Module, seen: Sequence[str], modes: Mapping[str, bool]) -> None:
        self._modes = [(path, model.get_submodule(path), training) for path, training in modes.items()]
        self._methods = [(path, m, len(vars(m)), replaced_by_hand(m)) for path, m in model.named_modules()]
        through = {path: model.get_submodule(path) for path in seen}
        self._modules = [(path, m._modules, dict(m._modules)) for path, m in through.items()]
        self._sizes = [(path, vars(m), len(vars(m))) for path, m in through.items()]
        state = State(through, dict(model.named_modules()))
        rows = list(state.attributes())
        # Compared by identity, which is quick; the others by their forms.
        self._plain = [(name, held, key, held[key]) for name, held, key in rows if isinstance(held[key], _PLAIN)]
        self._nested = [(n, held, key, _form(held[key])) for n, held, key in rows if not isinstance(held[key], _PLAIN)]
        self._outside = [(name, place, _form(place.found())) for name, place in state.places.items()]
        named = model.named_modules()
        self._without_chance = [
            (path, m) for path, m in named if "Dropout" in type(m).__name__ and vars(m).get("p") == 0
        ]

    def check(self) -> None:
        """Refuse to go on after a change.

        Raises:
            InputError: an attribute, a submodule or a mode is not what it was when the model was distributed.
        """
        for path, module, training in self._modes:
            if module.training != training:
                raise InputError(
                    f"module {path or 'the model itself'!r} was {'frozen' if training else 'thawed'} after distribute(): set "
                    "module.eval() or train() before, and freeze it again after model.train(), as the original was"
                )
        for path, module, size, name in self._methods:
            if len(vars(module)) != size and (method := replaced_by_hand(module)) != name:
                raise _changed(f"{path}.{method or name}")
        for path, found, children in self._modules:
            if found != children:
                raise _changed(f"{path}.(its submodules)")
        for path, module in self._without_chance:
            if vars(module).get("p") != 0:
                raise _changed(f"{path}.p")
        for name, held, key, value in self._plain:
            found = held.get(key, self)
            if found is not value and _form(found) != _form(value):
                raise _changed(name)
        for name, held, key, form in self._nested:
            if _form(held.get(key)) != form:
                raise _changed(name)
        for path, held, size in self._sizes:
            if len(held) != size:
                raise _changed(f"{path}.{next(reversed(held))}")
        for name, place, form in self._outside:
            if _form(place.found()) != form:
                raise _changed(name, outside=True)


def _changed(name: str, *, outside: bool = False) -> InputError:
    path, _, key = name.rpartition(".")
    what = name if outside else f"{key!r} of module {path or 'the model itself'!r}"
    return InputError(
        f"{what} changed after distribute(), which has read it: set it before, or distribute the model again"
    )


def refuse_changes(what: str, modules: Mapping[str, nn.Module], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that refuses to change Python state: of a layer that one device computes for all.

    Args:
        what: the layer, for people.
        modules: those that the call runs, by path, with all in them.
    """
    state = State(modules)

    def checked(*args: Any, **kwargs: Any) -> Any:
        before = state.forms()
        y = call(*args, **kwargs)
        if (after := state.forms()) != before:
            name = next(n for n in (*before, *after) if before.get(n, _MISSING) != after.get(n, _MISSING))
            raise InputError(
                f"the forward of layer {what!r} changed {name!r}, which it did not when the model was distributed: one device "
                "computes this layer, and the others would keep the old value. Change it in every call, or not at all"
            )
        return y

    return checked
