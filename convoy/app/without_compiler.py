"""Keeps torch from importing its compiler in the command, which compiles nothing: that takes longer than torch itself.

An optimizer imports it at every step, to say where compiled code has to end; functions that must never be compiled import it
when they are first called. Nothing else of torch asks for it where nobody compiles.
"""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

_COMPILER = "torch._dynamo"
_CHOSEN = "__dynamo_disable"
"""The attribute in which torch keeps what it runs in the place of a function that is not to be compiled."""


def leave_compiler_out() -> None:
    """From now on, whoever only says what not to compile does not get the compiler for it. Whoever wants more, such as a net
    that uses torch.compile, does."""
    if _COMPILER not in sys.modules:
        sys.modules[_COMPILER] = vars(torch)["_dynamo"] = _StandIn(_COMPILER)
        sys.meta_path.insert(0, _Parts())


class _StandIn(ModuleType):
    """Stands in the place of the compiler."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._plain: list[Any] = []

    def disable(self, function: Any, *_: object, **__: object) -> Any:
        self._plain.append(function)
        return function

    def graph_break(self, *_: object, **__: object) -> None:
        """Where nothing is compiled, nothing is to be cut."""

    def leave(self) -> ModuleType:
        """Give the place to the compiler."""
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER], vars(torch)["_dynamo"]
            for function in self._plain:
                vars(function).pop(_CHOSEN, None)
        return importlib.import_module(_COMPILER)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by Python itself, of any module
            raise AttributeError(name)
        return getattr(self.leave(), name)


class _Parts(MetaPathFinder, Loader):
    """Finds the modules inside the compiler: with the compiler itself, which then takes its place."""

    def find_spec(self, fullname: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        stand_in = sys.modules.get(_COMPILER)
        if not fullname.startswith(f"{_COMPILER}.") or not isinstance(stand_in, _StandIn):
            return None
        stand_in.leave()
        return ModuleSpec(fullname, self, loader_state=importlib.import_module(fullname).__spec__)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
