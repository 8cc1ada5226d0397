"""Plans again when devices leave or join a job.

The devices wait for this plan, so it must be quick: it rescales the running plan and compares it with a few plans of the
quick search. The full search of `planner.py` takes ten times as long and gains only a few per cent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from convoy.plan.coupling import plan_for
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import AUTO, PLANS, Speeds, named_plan
from convoy.planner.analytic import CostModel
from convoy.planner.planner import quick_candidates
from convoy.planner.prediction import predict_plan
from convoy.planner.request import PlanRequest
from convoy.planner.search import model_s
from convoy.simulate.memory import memory_of

SIMULATED_WORK = 1500
"""Plans are compared by simulation up to this product of layers and devices^2, for which it takes half a second."""

TRIED = 2
"""Number of searched plans that are compared with the running one."""

BETTER = 0.97
"""Another plan replaces the running one only if its predicted time is at most this fraction of the running one's."""


@dataclass(frozen=True, slots=True)
class NewPlan:
    """A plan for changed devices.

    Attributes:
        step_s: predicted seconds of a micro-batch, including measured slowdowns; None if a device was not measured.
        overfull: if no compared plan fits, descriptions of the devices whose memory is too small.
    """

    plan: Plan
    step_s: float | None = None
    overfull: tuple[str, ...] = ()


def replanned(request: PlanRequest, plan: Plan, before: Sequence[int], now: Sequence[int]) -> NewPlan:
    """Return the plan for the devices `now`, after the devices `before` ran `plan`.

    A job started with "auto" may get a different plan if all devices are measured. A job started with a named plan, which it
    still runs, gets the plan of that name for the new devices. Otherwise strategies and proportions stay; a new device gets a
    share by its speed, or an average share.

    Args:
        request: the job's original request, with the current knowledge in `fleet`.
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
    # Keep the running plan unless another one is clearly faster, or only the other one fits.
    fitting = [each for each in others if not each.overfull]
    best = min(fitting, key=lambda each: each.step_s or 0.0, default=first)
    limit_s = math.inf if first.overfull else BETTER * (first.step_s or 0.0)
    return best if (best.step_s or 0.0) <= limit_s else first


def with_joining_device(
    request: PlanRequest, plan: Plan, now: Sequence[int], joining: int
) -> tuple[NewPlan, float | None]:
    """Return the plan for the devices `now` (which run `plan`) plus a joining device, and the predicted speedup.

    Without measurements of all devices, the speedup is None.
    """
    without, together = (replanned(request, plan, now, ids) for ids in (now, sorted({*now, joining})))
    gain = None if without.step_s is None or together.step_s is None else without.step_s / together.step_s
    return together, gain


def _predicted(plan: Plan, request: PlanRequest) -> NewPlan:
    graph = request.graph
    if len(graph.layers) * plan.devices**2 <= SIMULATED_WORK:
        found = predict_plan(plan, request)
        return NewPlan(plan, found.step_s, found.overfull)
    memory = memory_of(lower(plan, graph), graph, optimizer=request.optimizer, itemsize=request.costs.itemsize)
    overfull = tuple(request.limits.overfull([each.total_bytes for each in memory]))
    return NewPlan(plan, model_s(CostModel(request), range(plan.devices), plan), overfull)


def _by_name(request: PlanRequest, plan: Plan, before: Sequence[int], speeds: Speeds | None) -> Plan | None:
    """Return the named plan that the job was started with, for the new speeds; None if it runs another plan."""
    had = request.fleet.of(before)
    if request.name not in PLANS or had is None or had.speeds is None or speeds is None:
        return None

    def named(of: Speeds) -> Plan:
        made = named_plan(plan.name, request.graph, plan.batch, of, plan.reduce)
        return replace(made, wire=plan.wire, outputs=plan.outputs, chunks=plan.chunks)

    return named(speeds) if plan.name == request.name and named(had.speeds) == plan else None
