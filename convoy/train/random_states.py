"""Reads and sets the states of all random generators that a data set or DataLoader uses: the process's and their own."""

import json
import random
from collections import deque
from collections.abc import Callable
from types import CellType, MemberDescriptorType, ModuleType
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

_DEPTH, _ITEMS = 6, 64  # levels to look into, and items of the largest container: transforms are in short lists


def generators_in(*roots: object) -> list[Any]:
    """Return the random generators in the attributes, classes, containers and closures of these objects."""
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
            elif isinstance(each, dict | list | tuple | set | frozenset | deque):
                items = each.values() if isinstance(each, dict) else each
                if len(items) <= _ITEMS or isinstance(next(iter(items)), tuple(_KINDS)):
                    below += items
            else:
                below += getattr(each, "__dict__", {}).values()
                for cls in type(each).__mro__:
                    kinds = (*_KINDS, MemberDescriptorType) if "__slots__" in vars(cls) else tuple(_KINDS)
                    below += [getattr(each, name, None) for name, v in vars(cls).items() if isinstance(v, kinds)]
                below += [cell.cell_contents for cell in getattr(each, "__closure__", None) or () if cell != CellType()]
        level = below
    return found


def read_states(generators: list[Any], device: torch.device) -> str:
    """Return the states of the process's generators and of these, as JSON."""
    own = [_KINDS[_kind(each)][0](each) for each in generators]
    return json.dumps([random_states(device), own], default=lambda array: array.tolist())


def set_states(states: str, generators: list[Any], device: torch.device) -> None:
    """Set states from `read_states`. Unchanged states of the process are not set, because other threads may use them."""
    common, own = json.loads(states)
    if common != json.loads(read_states([], device))[0]:
        set_random_states(common, device)
    for generator, state in zip(generators, own, strict=True):
        _KINDS[_kind(generator)][1](generator, state)


def _kind(generator: object) -> type:
    return next(kind for kind in _KINDS if isinstance(generator, kind))
