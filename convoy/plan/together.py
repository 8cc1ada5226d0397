"""Which batch norms tell each other their sums together: those of layers side by side, none of which waits for another.

A net that branches (Inception, ResNet at its shortcuts) has norms whose inputs are there at about the same time. Where their
samples lie on the same devices, one message takes the sums of all of them, and nobody waits for each apart.
"""

import heapq
from collections import Counter
from collections.abc import Hashable, Mapping
from functools import lru_cache

from convoy.model.graph import Graph

Row = tuple[str, ...]
"""A layer; or norms that exchange together, in the order of the net."""

Before = tuple[tuple[str, frozenset[str]], ...]
"""See `Graph.before`."""


def rows_of(graph: Graph, exchanged: Mapping[str, Hashable]) -> tuple[Row, ...]:
    """The layers in the order in which they are computed: that of the graph, less what norms wait for others of their row.

    A norm's level is how many exchanges it is behind, itself among them, on the longest way to it: so many a device makes at
    least, whoever exchanges with whom. Those of one level depend on none of each other. All exchange together that are alike.

    Args:
        exchanged: the norms that exchange sums, each with what those must have in common that do so together.
    """
    levels: dict[str, int] = {}
    for name, some in graph.before:
        levels[name] = max([levels[each] for each in some], default=0) + (name in exchanged)
    met: dict[Hashable, list[str]] = {}
    for name, kind in exchanged.items():
        met.setdefault((levels[name], kind), []).append(name)
    return _ordered(graph.before, tuple(tuple(row) for row in met.values() if len(row) > 1))


@lru_cache(maxsize=64)
def _ordered(before: Before, met: tuple[Row, ...]) -> tuple[Row, ...]:
    """The order of the graph, where each row stands in the place of its last layer, and what depends on it behind it.

    Of those that are ready the first is next (Kahn's algorithm): without rows of several this is the order as it was. A
    planner asks for the same order often.
    """
    row_of: dict[str, Row] = {name: (name,) for name, _ in before} | {name: row for row in met for name in row}
    if not met:
        return tuple(row_of.values())
    place = {row_of[name]: at for at, (name, _) in enumerate(before)}  # of its last layer
    needs: dict[Row, set[Row]] = {row: set() for row in place}
    for name, some in before:
        needs[row_of[name]].update(row_of[other] for other in some)
    behind: dict[Row, list[Row]] = {row: [] for row in place}
    for row, others in needs.items():
        for other in others:
            behind[other].append(row)
    missing = Counter({row: len(others) for row, others in needs.items()})
    ready = [(place[row], row) for row, others in needs.items() if not others]
    heapq.heapify(ready)
    found = []
    while ready:
        found.append(heapq.heappop(ready)[1])
        for row in behind[found[-1]]:
            missing[row] -= 1
            if not missing[row]:
                heapq.heappush(ready, (place[row], row))
    return tuple(found)
