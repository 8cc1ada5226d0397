"""The states of all random generators that a data set or a DataLoader draws from: those of the process and their own."""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convoy.runtime.program import random_states, set_random_states

_KINDS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    torch.Generator: (lambda g: g.get_state(), lambda g, state: g.set_state(torch.tensor(state, dtype=torch.uint8))),
    random.Random: (lambda g: g.getstate(), lambda g, state: g.setstate((state[0], tuple(state[1]), state[2]))),
    np.random.Generator: (lambda g: g.bit_generator.state, lambda g, state: setattr(g.bit_generator, "state", state)),
    np.random.RandomState: (lambda g: g.get_state(legacy=False), lambda g, state: g.set_state(state)),
}
"""How to read and to set the state of a generator."""

_DEPTH, _ITEMS = 6, 64
"""How deep to look for generators, and the largest container to look into: transforms are in short lists."""


def generators_in(*roots: object) -> list[Any]:
    """Return the random generators that objects hold, in attributes, short containers and closures."""
    found: list[Any] = []
    seen = set[int]()
    level = list(roots)
    for _ in range(_DEPTH):
        below: list[Any] = []
        for each in level:
            if id(each) in seen or isinstance(each, Tensor | np.ndarray | str | bytes | type | ModuleType):
                continue
            seen.add(id(each))
            if isinstance(each, tuple(_KINDS)):
                found.append(each)
            elif isinstance(each, dict | list | tuple):
                below += (each.values() if isinstance(each, dict) else each) if len(each) <= _ITEMS else ()
            else:
                below += getattr(each, "__dict__", {}).values()
                below += [cell.cell_contents for cell in getattr(each, "__closure__", None) or ()]
        level = below
    return found


def read_states(generators: list[Any], device: torch.device) -> str:
    """Return the states of the process's generators and of these, as JSON."""
    own = [_KINDS[_kind(each)][0](each) for each in generators]
    return json.dumps([random_states(device), own], default=lambda array: array.tolist())


def set_states(states: str, generators: list[Any], device: torch.device) -> None:
    """Set states from `read_states`. Those of the process stay if they are the same, as other threads may use them."""
    common, own = json.loads(states)
    if common != json.loads(read_states([], device))[0]:
        set_random_states(common, device)
    for generator, state in zip(generators, own, strict=True):
        _KINDS[_kind(generator)][1](generator, state)


def _kind(generator: object) -> type:
    return next(kind for kind in _KINDS if isinstance(generator, kind))


@contextmanager
def restored(*roots: object) -> Iterator[None]:
    """Restore the generators of the process, and those that these objects hold, after the block."""
    generators, cpu = generators_in(*roots), torch.device("cpu")
    states = read_states(generators, cpu)
    try:
        yield
    finally:
        set_states(states, generators, cpu)
