"""What the code of modules reads and writes outside of them: attributes of their classes, global variables.

A trace reads such a value once. So, as with the Python state of modules, a change must be noticed, and a forward that makes one
is not traced through.
"""

import dis
import functools
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from convoy.model.tracing.state import Contents, comparable, is_data

_NOT_A_USERS = ("torch", "torchvision", "builtins")
_MISSING = "<nothing>"


class Place:
    """One value outside of modules: a global variable, an item or an attribute of it, an attribute of a class.

    Args:
        name: for people.
        holder: the names of a Python module, or a class.
        key: the name in it.
        inner: what the code reads of an object or a dict, where it is not all of it.
    """

    def __init__(self, name: str, holder: dict[str, Any] | type, key: str, inner: "Inner | None" = None) -> None:
        self.name, self.holder, self.key, self.inner = name, holder, key, inner

    def found(self) -> Any:
        """The present value; `_MISSING` where there is none, or it is no data."""
        value = self.whole
        if self.inner is not None and is_data(value):
            kind, name = self.inner
            if kind == "attribute":
                read = getattr(value, name, _MISSING)
                value = value if callable(read) else read
            elif isinstance(value, dict):
                value = value.get(name, _MISSING)
        return value if is_data(value) else _MISSING

    def put(self, value: Any) -> None:
        """Give the name its value back; what is inside of a value is not this class's business."""
        if isinstance(self.holder, type):
            setattr(self.holder, self.key, value)
        else:
            self.holder[self.key] = value

    @property
    def whole(self) -> Any:
        """What the name itself means now."""
        return (vars(self.holder) if isinstance(self.holder, type) else self.holder).get(self.key, _MISSING)


class Outside:
    """The values outside of modules that their code names.

    Args:
        modules: those themselves, without the ones in them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        classes = dict.fromkeys(map(type, modules))
        self.places = {place.name: place for cls in classes for place in places_of(cls)}

    def values(self) -> dict[str, Any]:
        """Each of them, as it can be compared."""
        return {name: comparable(place.found()) for name, place in self.places.items()}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Give them their values back at the end."""
        if not self.places:
            yield
            return
        before = [(place, place.whole) for place in self.places.values()]
        contents = Contents((), (value for _, value in before))
        try:
            yield
        finally:
            contents.restore()
            for place, value in before:
                if place.whole is not value:
                    place.put(value)


Inner = tuple[str, Any]
"""("attribute", its name) or ("item", its key)."""


@functools.lru_cache(maxsize=4096)
def places_of(cls: type) -> tuple[Place, ...]:
    """What the forward of a class reads outside of modules, with what it calls of the class and its Python module."""
    classes = [c for c in cls.__mro__ if c.__module__.partition(".")[0] not in _NOT_A_USERS]
    found: dict[str, Place] = {}
    waiting = [f for c in classes if (f := _function(vars(c).get("forward"))) is not None]
    done: set[CodeType] = set()
    while waiting:
        function = waiting.pop()
        if function.__code__ in done:
            continue
        done.add(function.__code__)
        for code in _codes(function.__code__):
            rows: list[tuple[Any, dict[str, Any] | type, str, Inner | None]] = [
                (function.__globals__.get(name, _MISSING), function.__globals__, name, inner)
                for name, inner in _globals_read(code)
            ]
            rows += [(vars(c)[name], c, name, None) for name in code.co_names for c in classes if name in vars(c)]
            for value, holder, name, inner in rows:
                if (called := _function(value)) is not None:
                    waiting += [called] * (called.__module__ == cls.__module__)
                elif value is not _MISSING and is_data(value):
                    where = (
                        f"{holder.__module__}.{holder.__qualname__}"
                        if isinstance(holder, type)
                        else function.__module__
                    )
                    told = f"{where}.{_told(name, inner)}"
                    found.setdefault(told, Place(told, holder, name, inner))
    return tuple(found.values())


def _told(name: str, inner: Inner | None) -> str:
    if inner is None:
        return name
    return f"{name}.{inner[1]}" if inner[0] == "attribute" else f"{name}[{inner[1]!r}]"


def _function(value: Any) -> FunctionType | None:
    """The Python function of a function, a method, a property, or what decorators have made of one."""
    value = value.fget if isinstance(value, property) else value
    value = inspect.unwrap(getattr(value, "__func__", value))
    return value if isinstance(value, FunctionType) else None


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _globals_read(code: CodeType) -> Iterator[tuple[str, Inner | None]]:
    """The global names of some code, each with the attribute or item that is taken of it at once."""
    rows = list(dis.get_instructions(code))
    for row, first, second in zip(rows, (*rows[1:], None), (*rows[2:], None, None), strict=True):
        if row.opname not in ("LOAD_GLOBAL", "STORE_GLOBAL"):
            continue
        inner: Inner | None = None
        if row.opname == "LOAD_GLOBAL" and first is not None and second is not None:
            if first.opname in ("LOAD_ATTR", "STORE_ATTR", "LOAD_METHOD"):
                inner = ("attribute", first.argval)
            elif first.opname in ("LOAD_CONST", "LOAD_SMALL_INT") and (
                "SUBSCR" in second.opname or second.argrepr == "[]"
            ):
                inner = ("item", first.argval)
        yield str(row.argval), inner
