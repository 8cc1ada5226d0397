"""A plan made better by replay: shares so that no device waits for another, and inputs that come in pieces.

The search balances layers by their times alone. In a step, messages take processor time too, and more of it from one device
than from another; a replay shows who is done early.
"""

import itertools
from collections.abc import Iterator, Mapping
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


NUDGES = 48
"""Small changes of shares that are tried at most: a replay of a deep net takes a tenth of a second."""

UNITS = 64
"""A small change moves one sample, or one of so many parts of an axis."""

GAIN = 1e-3
"""What shortens a step by less is chance."""


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


def nudged(plan: Plan, graph: Graph, costs: Costs) -> Iterator[tuple[float, Plan]]:
    """Variants with a sample or a few filters moved from one device to another, each shorter than the one before.

    Dividing shares by how long devices are busy (`balanced`) overshoots where a sample is a tenth of a device's work, and a
    device with little to do is not rid of what a message costs it. So this tries, from whom waits least to whom waits most
    first, and goes on from what helped.
    """
    timeline = simulate(lower(plan, graph), graph, costs)
    tried = [plan]
    while len(tried) <= NUDGES:
        for other in _neighbours(plan, timeline):
            if other in tried:
                continue
            tried.append(other)
            attempt = simulate(lower(other, graph), graph, costs)
            if attempt.step_s < timeline.step_s * (1 - GAIN):
                plan, timeline = other, attempt
                yield timeline.step_s, plan
                break
            if len(tried) > NUDGES:
                return
        else:
            return


def _neighbours(plan: Plan, timeline: Timeline) -> Iterator[Plan]:
    """With one unit of one kind of shares moved; the shares of layers that are equal stay equal."""
    waits = timeline.exchange_s
    pairs = sorted(itertools.permutations(range(plan.devices), 2), key=lambda pair: waits[pair[0]] - waits[pair[1]])
    every = [
        each.shares for each in (plan.otherwise, *plan.layers.values()) if isinstance(each, Batch | Filter | Channel)
    ]
    kinds = [shares for shares in dict.fromkeys(every) if not any(_is_multiple(shares, base) for base in every)]
    for giver, taker in pairs:
        for shares in kinds:
            unit = min(shares[giver], max(1, sum(shares) // UNITS))
            if unit:
                moved = list(shares)
                moved[giver] -= unit
                moved[taker] += unit
                yield _with_shares(plan, {shares: tuple(moved)})


def balanced(plan: Plan, timeline: Timeline) -> Plan:
    """The same strategies, with less for devices that are busy longer than others in a replay, and more for the rest.

    A device is busy while it does not wait: computing, copying, adding. Every share is divided by that time.
    """
    busy_s = [sum(e.end_s - e.start_s for e in timeline.events if e.device == d and e.activity == "compute")
              for d in range(plan.devices)]  # fmt: skip
    every = [
        each.shares for each in (*plan.layers.values(), plan.otherwise) if isinstance(each, Batch | Filter | Channel)
    ]
    changed = {
        old: apportion(sum(old), [n / busy if busy else 0.0 for n, busy in zip(old, busy_s, strict=True)])
        for old in every
    }
    return _with_shares(plan, changed)


def _with_shares(plan: Plan, changed: Mapping[Shares, Shares]) -> Plan:
    """The plan with some shares put for others. Features behind a flatten, so many for each channel, stay with these."""

    def share(old: Shares) -> Shares:
        source = next((base for base in changed if _is_multiple(old, base)), None)
        if source is not None:
            return tuple(n * (sum(old) // sum(source)) for n in changed[source])
        return changed.get(old, old)

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
