"""The planner: a strategy with shares for every layer, and which devices take part, for the shortest predicted step.

The fastest device alone, the two fastest, ... are planned in turn by dynamic programming (`search.py`), which adds up the
costs of layers by formula; the best few are replayed (`simulate.py`), and small plans are polished by replay.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from convoy.graph import Graph
from convoy.lower import lower
from convoy.named import PLANS, Speeds, named_plan
from convoy.plan import Plan
from convoy.search import Prices, Search
from convoy.simulate import Costs, simulate
from convoy.strategy import STRATEGIES

POLISHED_LAYERS = 4
"""Nets with more weighted layers are planned by the formula alone, and only the best are replayed."""

REPLAYED_MESSAGES = 20_000
"""Plans with more messages per step are compared by formula, not by replay."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its predicted step time."""

    plan: Plan
    step_s: float


def plan_auto(graph: Graph, batch: int, costs: Costs) -> Plan:
    """The plan with the shortest predicted step.

    Args:
        batch: global batch, in samples.
        costs: measured or modelled times of these layers on these devices, and their network.
    """
    return candidates(graph, batch, costs)[0].plan


def candidates(graph: Graph, batch: int, costs: Costs) -> list[Candidate]:
    """The planner's plans for each number of devices, and the named plans; the shortest predicted step first.

    Deterministic: equal times are ordered by fewer devices, then by the order in which they were found.
    """
    speeds = solo_speeds(graph, batch, costs)
    order = sorted(range(len(speeds)), key=lambda d: (-speeds[d], d))
    found: list[tuple[float, int, Plan]] = []
    for count in _counts(len(order)):
        for formula_s, plan in Search(graph, batch, costs, order[:count]).run():
            found.append((_predicted(plan, graph, costs, formula_s), count, plan))
    if len(graph.weighted) <= POLISHED_LAYERS and len(order) <= 8:
        best_of = {
            count: (step_s, plan) for step_s, count, plan in sorted(found, key=lambda row: row[:2], reverse=True)
        }
        for count in sorted(best_of, key=lambda c: (best_of[c][0], c))[:3]:
            found.append(_polished(graph, batch, costs, order[:count], best_of[count][1]))
    if len(order) <= 16:
        for name in PLANS:
            plan = named_plan(name, graph, batch, Speeds(speeds))
            found.append((_predicted(plan, graph, costs, math.inf), len(order), plan))
    return [Candidate(plan, step_s) for step_s, _, plan in sorted(found, key=lambda row: row[:2])]


def _polished(graph: Graph, batch: int, costs: Costs, active: Sequence[int], plan: Plan) -> tuple[float, int, Plan]:
    """The formula adds up layers, the replay knows who waits for whom: change a few strategies at a time (all of them where
    there are three) while a replay gets shorter."""
    names = [layer.name for layer in graph.weighted if layer.groups == 1]
    kinds = {name: plan.layers[name].name for name in names if name in plan.layers}
    best = (_predicted(plan, graph, costs, math.inf), plan)
    tried = {tuple(kinds.values())}
    changed = True
    while changed:
        changed = False
        for width in range(1, min(len(kinds), 3 if len(kinds) < 4 else 2) + 1):
            for some in itertools.combinations(kinds, width):
                for others in itertools.product(STRATEGIES, repeat=width):
                    attempt = kinds | dict(zip(some, others, strict=True))
                    if tuple(attempt.values()) in tried:
                        continue
                    tried.add(tuple(attempt.values()))
                    for formula_s, other in Search(graph, batch, costs, active, attempt).run()[:1]:
                        step_s = _predicted(other, graph, costs, formula_s)
                        if step_s < best[0]:
                            best, kinds, changed = (step_s, other), attempt, True
    return best[0], len(active), best[1]


def solo_speeds(graph: Graph, batch: int, costs: Costs) -> tuple[float, ...]:
    """Samples/s of each device training alone with the whole batch: their sum is the limit of the fleet."""
    devices = costs.network.devices
    price = Prices(graph, batch, costs)
    return tuple(batch / price.alone_s(device) for device in range(devices))


def _counts(devices: int) -> list[int]:
    """How many of the fastest devices to try: all numbers up to 16, then ever larger steps."""
    counts = list(range(1, min(devices, 16) + 1))
    while counts[-1] < devices:
        counts.append(min(devices, max(counts[-1] + 1, counts[-1] * 5 // 4)))
    return counts


def _predicted(plan: Plan, graph: Graph, costs: Costs, formula_s: float) -> float:
    if math.isfinite(formula_s) and plan.devices > 16:
        return formula_s
    steps = lower(plan, graph)
    messages = sum(len(r) for s in steps.steps if hasattr(s, "schedule") for r in s.schedule.rounds)
    if math.isfinite(formula_s) and messages > REPLAYED_MESSAGES:
        return formula_s
    return simulate(steps, graph, costs).step_s
