"""A plan made better by replay: shares so that no device waits for another, sums in fewer rounds, inputs in pieces.

The search balances layers by their times alone. In a step, messages take processor time too, and more of it from one device
than from another; a replay shows who is done early.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from convoy.cost.step import Costs
from convoy.graph import Graph
from convoy.lower import lower
from convoy.plan import Plan
from convoy.shares import Shares, apportion
from convoy.simulate import Timeline, simulate
from convoy.strategy import Batch, Channel, Filter, One, Strategy

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
    gathers = any(isinstance(each, Filter | Channel) for each in plan.layers.values())
    changes: list[dict[str, Any]] = [
        *({"reduce": reduce} for reduce in ("direct", "ring") if reduce != plan.reduce),
        *({"pieces": pieces} for pieces in PIECES if gathers),
    ]
    for change in changes:
        other = replace(plan, **change)
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
    sources = list(dict.fromkeys(_sources(plan).values()))
    for giver, taker in pairs:
        for source in sources:
            unit = min(source.shares[giver], max(1, sum(source.shares) // UNITS))
            if unit:
                moved = list(source.shares)
                moved[giver] -= unit
                moved[taker] += unit
                yield _with_shares(plan, {source: tuple(moved)})


def balanced(plan: Plan, timeline: Timeline) -> Plan:
    """The same strategies, with less for devices that are busy longer than others in a replay, and more for the rest.

    A device is busy while it does not wait: computing, copying, adding. Every share is divided by that time.
    """
    busy_s = [sum(e.end_s - e.start_s for e in timeline.events if e.device == d and e.activity == "compute")
              for d in range(plan.devices)]  # fmt: skip

    def divided(shares: Shares) -> Shares:
        return apportion(sum(shares), [n / busy if busy else 0.0 for n, busy in zip(shares, busy_s, strict=True)])

    return _with_shares(plan, {source: divided(source.shares) for source in _sources(plan).values()})


@dataclass(frozen=True, slots=True)
class _Cut:
    """Shares along an axis. As many filters as samples are another cut: one does not follow the other."""

    axis: Literal["samples", "channels"]
    shares: Shares


def _cut(strategy: Strategy) -> _Cut | None:
    match strategy:
        case Batch(shares):
            return _Cut("samples", shares)
        case Filter(shares) | Channel(shares):
            return _Cut("channels", shares)
        case _:
            return None


def _sources(plan: Plan) -> dict[_Cut, _Cut]:
    """Every cut in a plan with the one it follows, itself or another.

    Features behind a flatten, so many for each filter, follow the filters: rounded apart they would bring a move.
    """
    every = [*plan.layers.values(), plan.otherwise]
    cuts = [cut for cut in dict.fromkeys(map(_cut, every)) if cut is not None]
    inputs = {_cut(each) for each in every if isinstance(each, Channel)}
    return {
        cut: min((base for base in cuts if base == cut or (cut in inputs and _is_multiple(cut, base))), key=_extent)
        for cut in cuts
    }


def _with_shares(plan: Plan, changed: Mapping[_Cut, Shares]) -> Plan:
    """The plan with other shares for some of the cuts that others follow."""
    sources = _sources(plan)

    def strategy(old: Strategy) -> Strategy:
        cut = _cut(old)
        if cut is None or isinstance(old, One) or sources[cut] not in changed:
            return old
        times = _extent(cut) // max(1, _extent(sources[cut]))
        return replace(old, shares=tuple(n * times for n in changed[sources[cut]]))

    otherwise = strategy(plan.otherwise)
    assert isinstance(otherwise, Batch | One)
    return replace(plan, layers={name: strategy(each) for name, each in plan.layers.items()}, otherwise=otherwise)


def _extent(cut: _Cut) -> int:
    return sum(cut.shares)


def _is_multiple(cut: _Cut, base: _Cut) -> bool:
    times = _extent(cut) // max(1, _extent(base))
    return cut.axis == base.axis and times > 1 and cut.shares == tuple(n * times for n in base.shares)
