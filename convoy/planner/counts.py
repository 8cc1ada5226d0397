"""How many devices take part: the search for the fastest device alone, the two fastest, and so on."""

import itertools
from collections.abc import Callable, Sequence

from convoy.planner.analytic import DIRECT_DEVICES, CostModel
from convoy.planner.found import Found
from convoy.planner.search import Search

FEW = 400
"""For so many devices times layers, every number of devices is searched for."""


def searched(model: CostModel, order: Sequence[int]) -> list[Found]:
    """Plans for the fastest device alone, the two fastest, ...: each number where that is quick, else around the best.

    Then the same with weights in shares, where that is cheaper: for each of these numbers, or for the best.
    """
    rows: dict[int, list[Found]] = {}

    def attempt(count: int) -> float:
        if count not in rows:
            rows[count] = [Found(cost, count, plan, model.overlap) for cost, plan in Search(model, order[:count]).run()]
        return rows[count][0].model_s

    devices, layers = len(order), len(model.graph.layers)
    _try_counts(devices, layers, attempt)
    counts = sorted(rows) if devices * layers <= FEW else [min(rows, key=lambda n: (attempt(n), n))]
    for count in counts:
        if 1 < count <= DIRECT_DEVICES:  # each sends a share to each
            shared = Search(model, order[:count], keepers=order[:count]).run()
            rows[count] += [Found(cost, count, plan, model.overlap) for cost, plan in shared if plan.in_shares]
    return [each for count in sorted(rows) for each in rows[count]]


def _try_counts(devices: int, layers: int, attempt: Callable[[int], float]) -> None:
    if devices * layers <= FEW:
        for count in range(1, devices + 1):
            attempt(count)
        return
    tried = sorted({devices, *(1 << i for i in range(devices.bit_length()))})
    best = min(tried, key=lambda count: (attempt(count), count))
    # Between the neighbours of the best there may be a better one: the middle of each gap, while gaps are wide.
    for _ in range(devices.bit_length()):
        place = tried.index(best)
        near = tried[max(0, place - 1) : place + 2]
        between = [(a + b) // 2 for a, b in itertools.pairwise(near) if b - a > max(1, best // 4)]
        if not between:
            return
        tried = sorted({*tried, *between})
        best = min(tried, key=lambda count: (attempt(count), count))
