"""The Python state of modules: attributes that are no parameters, buffers or submodules.

A trace reads it once. So forwards that change it are not traced through, and a change between two steps must be noticed
(`state_watch.py`).
"""

import copy
import functools
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

OF_TORCH = frozenset(vars(nn.Module())) | {"training"}
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)
_DEEPEST, _DEEPEST_OBJECT = 8, 4
"""Levels of containers, and of objects, that are looked into."""
_TABLES = ("_parameters", "_buffers", "_modules")


def state_of(model: nn.Module) -> dict[str, Any]:
    """Every attribute of every module under its path, as a value that can be compared with that of a copy."""
    return {f"{path}.{key}".lstrip("."): comparable(value) for path, key, value in _attributes(model)}


def comparable(value: Any, depth: int = 0, deepest: int = _DEEPEST, within: tuple[int, ...] = ()) -> Any:
    """A value equal to that of another object exactly if both hold the same plain values and tensors.

    Args:
        depth: of this value in a nest; below `deepest` only types are compared.
        within: what this value is in: a module may hold the one that it is in.
    """
    if isinstance(value, PLAIN):
        return (type(value).__name__, repr(value) if isinstance(value, float | complex) else value)  # NaN is itself
    name = type(value).__qualname__
    if isinstance(value, Tensor):
        shown = value.detach()
        return (name, tuple(value.shape), "" if value.is_meta else repr(_sum(shown)))
    if depth >= deepest or id(value) in within:
        return name
    inside = functools.partial(comparable, depth=depth + 1, deepest=deepest, within=(*within, id(value)))
    if isinstance(value, np.ndarray):
        return (name, value.shape, value.tobytes())
    if isinstance(value, dict | MappingProxyType):
        return (name, tuple((repr(key), inside(each)) for key, each in value.items()))
    if isinstance(value, set | frozenset):
        return (name, tuple(sorted(map(repr, value))))
    if isinstance(value, tuple | list | deque):
        return (name, tuple(inside(each) for each in value))
    inside = functools.partial(inside, deepest=min(deepest, _DEEPEST_OBJECT))
    if depth >= _DEEPEST_OBJECT:
        return name
    if isinstance(value, nn.Module):  # one that is held in a list, say: it is no submodule
        return (name, tuple((key, inside(each)) for key, each in vars(value).items() if key not in OF_TORCH))
    if callable(value) and hasattr(value, "__code__"):
        held = (value.__defaults__, tuple(cell.cell_contents for cell in value.__closure__ or ()))
        return (name, id(value.__code__), inside(held))
    if callable(value) or not hasattr(value, "__dict__"):
        return getattr(value, "__qualname__", name)
    return (name, tuple((key, inside(each)) for key, each in vars(value).items()))


def _sum(t: Tensor) -> float | complex:
    """In float64, without a copy of a large tensor in it."""
    wide = torch.complex128 if t.is_complex() else torch.float64
    parts = torch.split(t.reshape(-1), 1 << 20) if t.numel() > 1 << 20 else (t,)
    return sum(part.to(wide).sum().item() for part in parts)


def is_data(value: Any) -> bool:
    """Whether a value is one that a forward may compute with: no function, class, module or logger."""
    if isinstance(value, Tensor):  # which looks callable to Python
        return True
    return not (callable(value) or isinstance(value, ModuleType | logging.Logger | logging.LoggerAdapter))


def _attributes(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in OF_TORCH:
                yield path, key, value


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Give all modules their attributes, their modes and the values of their buffers back at the end."""
    kept = [vars(m) for m in model.modules()]
    of_torch = [table for own in kept for k in _TABLES if type(table := own.get(k)) is dict]
    contents = Contents((*kept, *of_torch), (v for own in kept for k, v in own.items() if k not in OF_TORCH))
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        yield
    finally:
        contents.restore()
        with torch.no_grad():
            for buffer, value in buffers:
                if not buffer.is_meta and not torch.equal(buffer, value):
                    buffer.data.copy_(value)


class Contents:
    """What is in containers, objects and tensors now, to be put back into the same ones.

    Args:
        tables: dictionaries whose values are somebody else's business.
        values: what else there is, with all that is in it.
    """

    def __init__(self, tables: Iterable[dict[str, Any]], values: Iterable[Any] = ()) -> None:
        self._held: dict[int, tuple[Any, Any]] = {id(table): (table, dict(table)) for table in tables}
        for value in values:
            self._hold(value, 0)

    def _hold(self, value: Any, depth: int, deepest: int = _DEEPEST) -> None:
        if isinstance(value, PLAIN) or id(value) in self._held or depth >= deepest:
            return
        if isinstance(value, Tensor):
            if not value.is_meta and not isinstance(value, nn.Parameter):
                self._held[id(value)] = (value, value.detach().clone())
            return
        inside: Iterable[Any]
        if isinstance(value, _CONTAINERS):
            self._held[id(value)] = (value, copy.copy(value))
            inside = value.values() if isinstance(value, dict) else value
        elif (callable(value) and not isinstance(value, nn.Module)) or not hasattr(value, "__dict__"):
            return
        else:
            own, deepest = vars(value), min(deepest, _DEEPEST_OBJECT)
            self._held[id(value)] = (own, dict(own))
            inside = [v for k, v in own.items() if k not in OF_TORCH]
        for each in list(inside):
            self._hold(each, depth + 1, deepest)

    def restore(self) -> None:
        """Put everything back that has changed."""
        for holder, before in self._held.values():
            if isinstance(holder, Tensor):
                if not torch.equal(holder, before):
                    holder.data.copy_(before)
            elif isinstance(holder, list | deque) and not _alike(holder, before):
                holder.clear()
                holder.extend(before)
            elif isinstance(holder, dict | set) and not _alike(holder, before):
                holder.clear()
                holder.update(before)


_CONTAINERS = (list, tuple, dict, set, deque)


def _alike(a: Any, b: Any) -> bool:
    """Whether two containers hold the very same objects, in the same order."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and list(map(id, a.values())) == list(map(id, b.values())) and list(a) == list(b)
    return list(map(id, a)) == list(map(id, b))


@contextmanager
def random_kept(seed: int | None = None) -> Iterator[None]:
    """Give the caller's random states (torch, Python, numpy) back at the end; inside they begin at a seed."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            if seed is not None:
                seed_all(seed)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


def seed_all(seed: int) -> None:
    """Seed torch's CPU generator, Python and NumPy. `torch.manual_seed` would seed the caller's accelerators too."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def drawn() -> Callable[[], bool]:
    """A question: have random numbers of Python or numpy been drawn since? By any thread: they have one state for all."""

    def states() -> Any:
        arrays: Any = np.random.get_state()
        return random.getstate(), arrays[1].tobytes(), arrays[2]

    before = states()

    def asked() -> bool:
        return bool(states() != before)

    return asked
