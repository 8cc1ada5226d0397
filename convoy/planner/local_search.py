"""A plan made better by replay: shares so that no device waits for another, sums in fewer rounds, inputs in pieces.

The search balances layers by their times alone. In a step, messages take processor time too, and more of it from one device
than from another; a replay shows who is done early. Shares change bond by bond (`bonds.py`), so that no change brings a move
that was not there.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from convoy.cost.costs import Costs
from convoy.model.graph import Graph
from convoy.plan.coupling import bonds, reshared
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.strategy import Channel, Filter
from convoy.sharding.redistribute import Reduce
from convoy.sharding.shares import Shares, apportion
from convoy.simulator.simulate import Timeline, simulate

PIECES = (2, 4, 8)
"""In how many pieces moves are tried."""

ROUNDS = 4
"""Times that shares are corrected at most."""

NUDGES = 48
"""Small changes of shares that are tried at most: a replay of a deep net takes a tenth of a second."""

UNITS = 64
"""A small change moves one portion of a bond, or one of so many parts of it."""

GAIN = 1e-3
"""What shortens a step by less is chance."""

Fits = Callable[[Plan], bool]
"""Whether a plan may be run: whether it fits the devices' memory, say."""


def refined(
    plan: Plan, graph: Graph, costs: Costs, fits: Fits, reduces: tuple[Reduce, ...] = ("direct", "ring")
) -> Iterator[tuple[float, Plan]]:
    """Variants of a plan with their replayed seconds, each shorter than the one before; none if nothing helps.

    Args:
        reduces: the ways to sum that are tried.
    """
    timeline = simulate(lower(plan, graph), graph, costs)
    best_s = timeline.step_s
    gathers = any(isinstance(each, Filter | Channel) for each in plan.layers.values())
    changes: list[dict[str, Any]] = [
        *({"reduce": reduce} for reduce in reduces if reduce != plan.reduce),
        *({"pieces": pieces} for pieces in PIECES if gathers),
    ]
    for change in changes:
        other = replace(plan, **change)
        tried = simulate(lower(other, graph), graph, costs)
        if tried.step_s < best_s and fits(other):
            best_s, plan, timeline = tried.step_s, other, tried
            yield best_s, plan
    for _ in range(ROUNDS):
        other = balanced(plan, graph, timeline)
        tried = simulate(lower(other, graph), graph, costs)
        if tried.step_s >= best_s or not fits(other):
            return
        best_s, plan, timeline = tried.step_s, other, tried
        yield best_s, plan


def nudged(plan: Plan, graph: Graph, costs: Costs, fits: Fits) -> Iterator[tuple[float, Plan]]:
    """Variants with a sample or a few filters moved from one device to another, each shorter than the one before.

    Dividing shares by how long devices are busy (`balanced`) overshoots where a sample is a tenth of a device's work, and a
    device with little to do is not rid of what a message costs it. So this tries, from whom waits least to whom waits most
    first, and goes on from what helped.
    """
    timeline = simulate(lower(plan, graph), graph, costs)
    tried = [plan]
    while len(tried) <= NUDGES:
        for other in _neighbours(plan, graph, timeline):
            if other in tried:
                continue
            tried.append(other)
            attempt = simulate(lower(other, graph), graph, costs)
            if attempt.step_s < timeline.step_s * (1 - GAIN) and fits(other):
                plan, timeline = other, attempt
                yield timeline.step_s, plan
                break
            if len(tried) > NUDGES:
                return
        else:
            return


def _neighbours(plan: Plan, graph: Graph, timeline: Timeline) -> Iterator[Plan]:
    """With a little of one bond moved from one device to another."""
    waits = timeline.exchange_s
    pairs = sorted(itertools.permutations(range(plan.devices), 2), key=lambda pair: waits[pair[0]] - waits[pair[1]])
    found = bonds(plan, graph)
    for giver, taker in pairs:
        for bond in found:
            portions = list(bond.portions)
            unit = min(portions[giver], max(1, sum(portions) // UNITS))
            if unit:
                portions[giver] -= unit
                portions[taker] += unit
                yield reshared(plan, bond, tuple(portions))


def balanced(plan: Plan, graph: Graph, timeline: Timeline) -> Plan:
    """The same strategies, with less for devices that are busy longer than others in a replay, and more for the rest.

    A device is busy while it does not wait: computing, copying, adding. Every share is divided by that time.
    """
    busy_s = [sum(e.end_s - e.start_s for e in timeline.events if e.device == d and e.activity == "compute")
              for d in range(plan.devices)]  # fmt: skip

    def divided(portions: Shares) -> Shares:
        weights = [n / busy if busy else 0.0 for n, busy in zip(portions, busy_s, strict=True)]
        return apportion(sum(portions), weights)

    for bond in bonds(plan, graph):
        plan = reshared(plan, bond, divided(bond.portions))
    return plan
