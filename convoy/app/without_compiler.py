"""Keeps torch from importing its compiler, and the algebra of unknown sizes, in the command, which needs neither: the first
takes longer to import than torch itself, the second a third of that.

An optimizer imports the compiler at every step, to say where compiled code has to end; functions that must never be compiled
import it when they are first called. The algebra (sympy) is imported by whatever checks sizes of a tensor without values,
even where they are plain numbers. Nothing else of torch asks for either where nobody compiles.
"""

import importlib
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_CHOSEN = "__dynamo_disable"
"""The attribute in which torch keeps what it runs in the place of a function that is not to be compiled."""


def leave_compiler_out() -> None:
    """From now on, whoever only says what not to compile does not get the compiler for it, and who only checks numbers not
    the algebra. Whoever wants more, such as a net that uses torch.compile, does."""
    for name, stand_in in _STAND_INS.items():
        if name not in sys.modules:
            sys.modules[name] = stand_in(name)
    if not any(isinstance(finder, _Parts) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Parts())


class _StandIn(ModuleType):
    """Stands in the place of a module, until somebody asks for what it has not; then it hands on all that it is asked for."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = find_spec(name)
        if self.__spec__ is not None and self.__spec__.submodule_search_locations is not None:
            self.__path__: list[str] = []
        parent, _, self._own_name = name.rpartition(".")
        self._parent = sys.modules.get(parent)
        if self._parent is not None:
            setattr(self._parent, self._own_name, self)
        self._given: list[str] = []

    def _give(self, name: str, value: object) -> None:
        setattr(self, name, value)
        self._given.append(name)

    def leave(self) -> ModuleType:
        """Give the place to the module, and that of stand-ins around it and inside it."""
        own = self.__name__
        for name in _STAND_INS:
            stand_in = sys.modules.get(name)
            related = f"{name}.".startswith(f"{own}.") or own.startswith(f"{name}.")
            if related and isinstance(stand_in, _StandIn):
                stand_in._withdraw()
        return importlib.import_module(own)

    def _withdraw(self) -> None:
        del sys.modules[self.__name__]
        if self._parent is not None:
            delattr(self._parent, self._own_name)
        for name in self._given:
            delattr(self, name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by Python itself, of any module
            raise AttributeError(name)
        return getattr(self.leave(), name)


class _NoCompiler(_StandIn):
    """`torch._dynamo`, for who says what not to compile."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._plain: list[Any] = []
        self._give("disable", self._disable)
        self._give("graph_break", lambda *_, **__: None)  # where nothing is compiled, nothing is to be cut

    def _disable(self, function: Any, *_: object, **__: object) -> Any:
        self._plain.append(function)
        return function

    def _withdraw(self) -> None:
        super()._withdraw()
        for function in self._plain:
            vars(function).pop(_CHOSEN, None)


class _NoQuestions(_StandIn):
    """`torch._dynamo.utils`, for who imports a question that is never asked: torchvision does."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._give("is_compile_supported", lambda *asked: self.leave().is_compile_supported(*asked))


_CERTAIN = ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true")
"""Questions whether something is true that may not be known: a bool is."""


class _PlainNumbers(_StandIn):
    """`torch.fx.experimental.symbolic_shapes`, for who asks about sizes that are numbers: the answer is known."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        for certain in _CERTAIN:
            self._answer(certain, bool, lambda known: known)
        self._answer("sym_and", bool, lambda *known: all(known))
        self._answer("sym_or", bool, lambda *known: any(known))
        self._give("sym_eq", self._same)
        self._answer("is_nested_int", int, lambda _: False)
        self._answer("has_guarding_hint", int, lambda _: True)
        self._answer("guarding_hint_or_throw", int, lambda known: known)

    def _same(self, a: Any, b: Any) -> Any:
        """Whether two shapes are the same."""
        if isinstance(a, tuple) and isinstance(b, tuple) and all(type(extent) is int for extent in (*a, *b)):
            return tuple(a) == tuple(b)
        return self.leave().sym_eq(a, b)

    def _answer(self, name: str, kind: type, of_known: Callable[..., Any]) -> None:
        """Answer a question where all that is asked about is of a kind; others are the module's to answer."""

        def answer(*asked: Any) -> Any:
            if all(type(each) is kind for each in asked):
                return of_known(*asked)
            return getattr(self.leave(), name)(*asked)

        self._give(name, answer)


class _NoAlgebra(_StandIn):
    """`sympy`, for who asks whether something is one of its expressions: nothing is, while nobody can have made one."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._give("Basic", type("Basic", (), {}))


_STAND_INS: dict[str, type[_StandIn]] = {
    "torch._dynamo": _NoCompiler,
    "torch._dynamo.utils": _NoQuestions,
    "torch.fx.experimental.symbolic_shapes": _PlainNumbers,
    "sympy": _NoAlgebra,
}


class _Parts(MetaPathFinder, Loader):
    """Finds the modules inside one that a stand-in is for: with it, which then takes its place."""

    def find_spec(self, fullname: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        for name in _STAND_INS:
            stand_in = sys.modules.get(name)
            if fullname.startswith(f"{name}.") and isinstance(stand_in, _StandIn):
                stand_in.leave()
                return ModuleSpec(fullname, self, loader_state=importlib.import_module(fullname).__spec__)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
