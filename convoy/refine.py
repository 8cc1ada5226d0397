"""A plan made better by replay: shares so that no device waits for another, and inputs that come in pieces.

The search balances layers by their times alone. In a step, messages take processor time too, and more of it from one device
than from another; a replay shows who is done early.
"""

from collections.abc import Iterator
from dataclasses import replace

from convoy.cost.step import Costs
from convoy.graph import Graph
from convoy.lower import lower
from convoy.plan import Plan
from convoy.shares import Shares, apportion
from convoy.simulate import Timeline, simulate
from convoy.strategy import Batch, Channel, Filter, Strategy

PIECES = (2, 4, 8)
"""In how many pieces moves are tried."""

ROUNDS = 4
"""Times that shares are corrected at most."""


def refined(plan: Plan, graph: Graph, costs: Costs) -> Iterator[tuple[float, Plan]]:
    """Variants of a plan with their replayed seconds, each shorter than the one before; none if nothing helps."""
    timeline = simulate(lower(plan, graph), graph, costs)
    best_s = timeline.step_s
    for pieces in PIECES if any(isinstance(each, Filter | Channel) for each in plan.layers.values()) else ():
        other = replace(plan, pieces=pieces)
        tried = simulate(lower(other, graph), graph, costs)
        if tried.step_s < best_s:
            best_s, plan, timeline = tried.step_s, other, tried
            yield best_s, plan
    for _ in range(ROUNDS):
        other = balanced(plan, timeline)
        tried = simulate(lower(other, graph), graph, costs)
        if tried.step_s >= best_s:
            return
        best_s, plan, timeline = tried.step_s, other, tried
        yield best_s, plan


def balanced(plan: Plan, timeline: Timeline) -> Plan:
    """The same strategies, with less for devices that are busy longer than others in a replay, and more for the rest.

    A device is busy while it does not wait: computing, copying, adding. Every share is divided by that time.
    """
    busy_s = [sum(e.end_s - e.start_s for e in timeline.events if e.device == d and e.activity == "compute")
              for d in range(plan.devices)]  # fmt: skip
    changed: dict[Shares, Shares] = {}

    def share(old: Shares) -> Shares:
        if old not in changed:
            # Features behind a flatten: so many for each channel. They stay with their channels.
            source = next((base for base in changed if _is_multiple(old, base)), None)
            if source is not None:
                changed[old] = tuple(n * (sum(old) // sum(source)) for n in changed[source])
            else:
                weights = [n / busy if busy else 0.0 for n, busy in zip(old, busy_s, strict=True)]
                changed[old] = apportion(sum(old), weights)
        return changed[old]

    def strategy(old: Strategy) -> Strategy:
        return replace(old, shares=share(old.shares)) if isinstance(old, Batch | Filter | Channel) else old

    layers = {name: strategy(each) for name, each in plan.layers.items()}
    otherwise = plan.otherwise
    return replace(
        plan, layers=layers, otherwise=Batch(share(otherwise.shares)) if isinstance(otherwise, Batch) else otherwise
    )


def _is_multiple(old: Shares, base: Shares) -> bool:
    times = sum(old) // max(1, sum(base))
    return times > 1 and old == tuple(n * times for n in base)
