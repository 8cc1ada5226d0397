"""Plans for a job whose devices change: for those that are left, or for more than before.

The devices wait for this plan, so it is found quickly: the running plan is continued in proportion and compared with a few
plans of the quick search. The search of `planner.py` takes ten times as long and gains a few per cent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from convoy.plan.coupling import plan_for
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import AUTO, PLANS, Speeds, named_plan
from convoy.plan.steps import micro_batches
from convoy.planner.analytic import CostModel
from convoy.planner.planner import quick_candidates
from convoy.planner.prediction import predict_plan
from convoy.planner.request import PlanRequest
from convoy.planner.search import model_s
from convoy.simulate.memory import memory_of_steps

SIMULATED_WORK = 1500
"""Layers times devices^2 up to which plans are compared by simulation, which then takes half a second."""

TRIED = 2
"""The number of plans of the search that are compared with the running one."""

BETTER = 0.97
"""Another plan replaces the running one only if its predicted time is at most this fraction."""


@dataclass(frozen=True, slots=True)
class NewPlan:
    """A plan for other devices.

    Attributes:
        step_s: predicted seconds of a micro-batch, with the slowdowns that rebalancing has measured; None if some device was
            not measured.
        overfull: the devices whose memory it overfills, in words: none of the compared plans fits.
    """

    plan: Plan
    step_s: float | None = None
    overfull: tuple[str, ...] = ()


def plan_anew(request: PlanRequest, plan: Plan, before: Sequence[int], now: Sequence[int]) -> NewPlan:
    """Return the plan for the devices `now` after those of `before` ran `plan`.

    If the job was started with "auto" and all devices are measured, another plan may be found. If it was started with a plan
    by name and still runs it, the result is the plan of that name. Otherwise strategies and proportions of shares stay; a
    device that is new gets a share by its speed, or else an average one.

    Args:
        request: as the job was started; `fleet` holds what is known of all devices today.
        before, now: device ids, in the order of the plan's shares.
    """
    devices = [before.index(d) if d in before else None for d in now]
    fleet = request.fleet.of(now)
    speeds = None if fleet is None else fleet.speeds
    same = _by_name(request, plan, before, speeds) or plan_for(
        plan, request.graph, devices, None if speeds is None else speeds.devices
    )
    if fleet is None or fleet.measured is None:
        return NewPlan(same)
    here = replace(request, fleet=fleet, batch=plan.batch, wire=plan.wire, outputs=plan.outputs)
    others = []
    if request.name == AUTO:
        searched = (each.plan.named(plan.name) for each in quick_candidates(here, TRIED))
        others = [_predicted(each, here) for each in searched if each != same]
    first = _predicted(same, here)
    # The running plan stays, unless another one is clearly faster, or fits if the running one does not.
    fitting = [each for each in others if not each.overfull]
    best = min(fitting, key=lambda each: each.step_s or 0.0, default=first)
    limit_s = math.inf if first.overfull else BETTER * (first.step_s or 0.0)
    return best if (best.step_s or 0.0) <= limit_s else first


def with_joining_device(
    request: PlanRequest, plan: Plan, now: Sequence[int], joining: int
) -> tuple[NewPlan, float | None]:
    """Return the plan of the devices `now`, which train by `plan`, with one more device, and the predicted speedup.

    The speedup is None if one of them was not measured.
    """
    without, together = (plan_anew(request, plan, now, ids) for ids in (now, sorted({*now, joining})))
    gain = None if without.step_s is None or together.step_s is None else without.step_s / together.step_s
    return together, gain


def _predicted(plan: Plan, request: PlanRequest) -> NewPlan:
    graph = request.graph
    if len(graph.layers) * plan.devices**2 <= SIMULATED_WORK:
        found = predict_plan(plan, request)
        return NewPlan(plan, found.step_s, found.overfull)
    lists = [lower(plan, graph, micro_batch=kind) for kind in micro_batches(request.micro_batches) if kind != "middle"]
    memory = memory_of_steps(lists, graph, optimizer=request.optimizer, itemsize=request.costs.itemsize)
    overfull = tuple(request.limits.overfull([each.total_bytes for each in memory]))
    return NewPlan(plan, model_s(CostModel(request), range(plan.devices), plan), overfull)


def _by_name(request: PlanRequest, plan: Plan, before: Sequence[int], speeds: Speeds | None) -> Plan | None:
    """Return the plan of the name that the job was started with; None if the running plan is another one."""
    had = request.fleet.of(before)
    if request.name not in PLANS or had is None or had.speeds is None or speeds is None:
        return None

    def named(of: Speeds) -> Plan:
        made = named_plan(plan.name, request.graph, plan.batch, of, plan.reduce)
        return replace(made, wire=plan.wire, outputs=plan.outputs, chunks=plan.chunks)

    return named(speeds) if plan.name == request.name and named(had.speeds) == plan else None
