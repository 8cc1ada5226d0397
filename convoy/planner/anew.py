"""Plans for a run whose devices change: of some that are left, or of more than before.

It must be quick, for the devices wait for it, and deterministic. So what runs is carried on in proportion, and beside it stand
a few plans of the quick search; they are compared by simulation where that is quick, else by the analytic model. The search
of `planner.py` takes ten times as long for a few per cent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from convoy.model.graph import Graph
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import AUTO, PLANS, Speeds, named_plan
from convoy.plan.steps import passes_of
from convoy.plan.survivors import plan_for
from convoy.planner.analytic import CostModel
from convoy.planner.found import model_s
from convoy.planner.known import Known
from convoy.planner.planner import quick_candidates
from convoy.planner.predict import PlanningContext, predict_plan
from convoy.planner.speeds import solo_speeds
from convoy.simulate.memory import memory_of_passes

SIMULATED_WORK = 1500
"""Layers times the square of the devices, up to which plans are compared by simulation: half a second then."""

TRIED = 2
"""So many plans of the search are compared with the one that runs."""

BETTER = 0.97
"""Another plan than the one that runs is predicted to take at most this part of its time: what runs has been tried."""


@dataclass(frozen=True, slots=True)
class Anew:
    """A plan for other devices.

    Attributes:
        step_s: predicted seconds of a step, corrected by what rebalancing has measured; where several passes make a step, of
            a pass in the mean. None where nothing was measured of some device.
        overfull: the devices whose memory it overfills, in words: no plan that was looked at fits.
    """

    plan: Plan
    step_s: float | None = None
    overfull: tuple[str, ...] = ()


def plan_anew(known: Known, graph: Graph, plan: Plan, before: Sequence[int], now: Sequence[int]) -> Anew:
    """The plan by which the devices `now` go on with what those of `before` did by `plan`. It depends on nothing else.

    Where the run was begun with the planner's plan, and all devices are measured, another one may be found for them. Where it
    was begun with a plan by name, and that still stands, it is the one of that name for these devices. Else the strategies
    stay, and shares are in the same proportions; a device that is new gets one by its speed, or else a mean one.

    Args:
        before, now: ids of devices, in the order of the plan's shares.
    """
    devices = [before.index(d) if d in before else None for d in now]
    speeds, known_costs = known.speeds_of(now), known.costs_of(now, graph)
    if known_costs is None:
        return Anew(_by_name(known, graph, plan, before, speeds) or _same(plan, graph, devices, speeds))
    costs, fleet = known_costs
    alone = Speeds(solo_speeds(graph, plan.batch, costs, known.passes))
    same = _same(plan, graph, devices, alone)
    if known.name != AUTO:
        same = _by_name(known, graph, plan, before, speeds) or same
    context = PlanningContext.of(
        graph, plan.batch, costs, fleet, known.optimizer, plan.wire, known.reduce, known.passes, plan.outputs
    )
    searched: list[Plan] = []
    if known.name == AUTO:
        found = quick_candidates(
            graph, plan.batch, costs, context.room, enough=TRIED, passes=known.passes, wire=plan.wire, reduce=known.reduce,
            outputs=plan.outputs,
        )  # fmt: skip
        searched = [each.plan.named(plan.name) for each in found]
    return _best(same, searched, context)


def with_newcomer(
    known: Known, graph: Graph, plan: Plan, now: Sequence[int], newcomer: int
) -> tuple[Anew, float | None]:
    """The plan of the devices `now`, which train by `plan`, with one more; and how many times as fast they are predicted to be
    then: above 1 it pays. None where nothing was measured of one of them."""
    without, beside = (plan_anew(known, graph, plan, now, ids) for ids in (now, sorted({*now, newcomer})))
    gain = None if without.step_s is None or beside.step_s is None else without.step_s / beside.step_s
    return beside, gain


def _best(same: Plan, searched: Sequence[Plan], context: PlanningContext) -> Anew:
    """What runs, unless another one is faster beyond doubt, or fits where that does not."""
    first, *others = (_predicted(plan, context) for plan in (same, *(each for each in searched if each != same)))
    best_s, _, best = min(
        ((each.step_s or 0.0, i, each) for i, each in enumerate(others) if not each.overfull),
        default=(math.inf, 0, first),
    )
    return best if first.overfull or best_s <= BETTER * (first.step_s or 0.0) else first


def _predicted(plan: Plan, context: PlanningContext) -> Anew:
    graph, room = context.graph, context.room
    if len(graph.layers) * len(context.names) ** 2 <= SIMULATED_WORK:
        found = predict_plan(plan, context)
        return Anew(plan, found.step_s, found.overfull)
    lists = [lower(plan, graph, pass_=kind) for kind in passes_of(context.passes) if kind != "middle"]
    needs = memory_of_passes(lists, graph, optimizer=room.optimizer, itemsize=context.costs.itemsize)
    overfull = tuple(room.overfull([each.total_bytes for each in needs]))
    model = CostModel(graph, plan.batch, context.costs, wire=plan.wire, passes=context.passes, outputs=plan.outputs)
    return Anew(plan, model_s(model, range(plan.devices), plan), overfull)


def _same(plan: Plan, graph: Graph, devices: Sequence[int | None], speeds: Speeds | None) -> Plan:
    return plan_for(plan, graph, devices, None if speeds is None else speeds.devices)


def _by_name(known: Known, graph: Graph, plan: Plan, before: Sequence[int], speeds: Speeds | None) -> Plan | None:
    """The plan of the name that the run was begun with, where the one that runs is what that name says."""
    had = known.speeds_of(before)
    if known.name not in PLANS or had is None or speeds is None:
        return None

    def named(of: Speeds) -> Plan:
        made = named_plan(plan.name, graph, plan.batch, of, plan.reduce)
        return replace(made, wire=plan.wire, outputs=plan.outputs, pieces=plan.pieces)

    return named(speeds) if plan.name == known.name and named(had) == plan else None
