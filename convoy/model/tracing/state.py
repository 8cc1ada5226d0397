"""The Python state of modules: attributes that are no parameters, buffers or submodules.

A trace reads it once. So forwards that change it are not traced through, and a change between two steps must be noticed.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from convoy.errors import InputError
from convoy.model.tracing.kinds import replaced_by_hand

_OF_TORCH = frozenset(vars(nn.Module())) | {"training"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)
_DEEPEST = 4


def state_of(model: nn.Module) -> dict[str, Any]:
    """Every attribute of every module under its path, as a value that can be compared with that of a copy."""
    return {f"{path}.{key}".lstrip("."): comparable(value) for path, key, value in _attributes(model)}


def comparable(value: Any, depth: int = 0) -> Any:
    """A value equal to that of another object exactly if both hold the same plain values and tensors."""
    if isinstance(value, _PLAIN):
        return (type(value).__name__, repr(value))
    name = type(value).__qualname__
    if depth >= _DEEPEST or isinstance(value, nn.Module):
        return name
    if isinstance(value, Tensor):
        shown = value.detach()
        return (name, tuple(value.shape), "" if value.is_meta else repr(shown.double().sum().item()))
    if isinstance(value, np.ndarray):
        return (name, value.shape, value.tobytes())
    if isinstance(value, dict | MappingProxyType):
        return (name, tuple((repr(key), comparable(each, depth + 1)) for key, each in value.items()))
    if isinstance(value, set | frozenset):
        return (name, tuple(sorted(map(repr, value))))
    if isinstance(value, tuple | list | deque):
        return (name, tuple(comparable(each, depth + 1) for each in value))
    if callable(value) and hasattr(value, "__code__"):
        held = (value.__defaults__, tuple(cell.cell_contents for cell in value.__closure__ or ()))
        return (name, id(value.__code__), comparable(held, depth + 1))
    if callable(value) or not hasattr(value, "__dict__"):
        return getattr(value, "__qualname__", name)
    return (name, tuple((key, comparable(each, depth + 1)) for key, each in vars(value).items()))


def _attributes(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _OF_TORCH:
                yield path, key, value


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Give all modules their attributes, their modes and the values of their buffers back at the end."""
    kept = [(vars(m), {k: _copied(v) for k, v in vars(m).items()}) for m in model.modules()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        yield
    finally:
        for attributes, before in kept:
            attributes.clear()
            attributes.update(before)
        with torch.no_grad():
            for buffer, value in buffers:
                if not buffer.is_meta and not torch.equal(buffer, value):
                    buffer.data.copy_(value)


def _copied(value: Any) -> Any:
    return type(value)(value) if type(value) in (list, dict, set, deque) else value


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
    """Set the random states of torch, Python and numpy."""
    torch.manual_seed(seed)
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


# --- changes between steps -------------------------------------------------------------------------------------------


def modes_of(model: nn.Module) -> dict[str, bool]:
    """Of the modules that may do something else in training than in evaluation, by path: whether they are in training."""
    return {path: module.training for path, module in model.named_modules() if _minds_its_mode(module)}


def _minds_its_mode(module: nn.Module) -> bool:
    if not type(module).__module__.startswith("torch.nn"):
        return True
    name, held = type(module).__name__, vars(module) | module._buffers
    return "Dropout" in name or name == "RReLU" or held.get("running_mean") is not None or bool(held.get("dropout"))


class StateWatch:
    """Notices changes of what a trace read of modules that it sees through: it would not follow them.

    Args:
        model: this device's copy, as it was traced.
        seen: paths of the modules that the trace sees through.
        modes: see `TracedModel.modes`.
    """

    def __init__(self, model: nn.Module, seen: Sequence[str], modes: Mapping[str, bool]) -> None:
        self._modes = [(path, model.get_submodule(path), training) for path, training in modes.items()]
        self._values: list[tuple[str, dict[str, Any], str, Any]] = []
        self._nested: list[tuple[str, dict[str, Any], str, Any]] = []
        self._sizes: list[tuple[str, dict[str, Any], int]] = []
        self._modules: list[tuple[str, Mapping[str, Any], dict[str, Any]]] = []
        self._methods = [(path, m, len(vars(m)), replaced_by_hand(m)) for path, m in model.named_modules()]
        for path in seen:
            module = model.get_submodule(path)
            attributes = vars(module)
            self._modules.append((path, module._modules, dict(module._modules)))
            self._sizes.append((path, attributes, len(attributes)))
            for key, value in attributes.items():
                if key not in _OF_TORCH and not isinstance(value, Tensor):
                    simple = isinstance(value, _PLAIN) or callable(value)
                    row = (path, attributes, key, value if simple else comparable(value))
                    (self._values if simple else self._nested).append(row)

    def check(self) -> None:
        """Refuse to go on after a change.

        Raises:
            InputError: an attribute, a submodule or a mode is another one than when the model was distributed.
        """
        for path, module, training in self._modes:
            if module.training != training:
                raise InputError(
                    f"module {path or 'the model itself'!r} was {'frozen' if training else 'thawed'} after distribute(): set "
                    "module.eval() or train() before, and freeze it again after model.train(), as the original was"
                )
        for path, module, size, name in self._methods:
            if len(vars(module)) != size and (method := replaced_by_hand(module)) != name:
                raise self._changed(path, method or name)
        for path, attributes, key, value in self._values:
            found = attributes.get(key, self)
            if found is not value and (found != value or type(found) is not type(value)):
                raise self._changed(path, key)
        for path, attributes, key, value in self._nested:
            if comparable(attributes.get(key, self)) != value:
                raise self._changed(path, key)
        for path, attributes, size in self._sizes:
            if len(attributes) != size:
                raise self._changed(path, next(reversed(attributes)))
        for path, found, children in self._modules:
            if found != children:
                raise self._changed(path, "its submodules")

    def _changed(self, path: str, key: str) -> InputError:
        return InputError(
            f"{key!r} of module {path or 'the model itself'!r} changed after distribute(), which has read it: set it before, "
            "or distribute the model again"
        )
