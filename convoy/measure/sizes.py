"""Which sizes of which layers the plans of a model would run: those are timed too, beside the grids of all sizes.

A grid has to reach from one sample to the whole batch, and with little time it is coarse. A prediction needs few of its sizes,
and those exactly.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from convoy.errors import PlanError
from convoy.measure.axes import granule
from convoy.model.graph import Graph
from convoy.plan.device_program import LocalSize, local_size, sizes_in_chunks, whole_size
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import PLANS
from convoy.plan.steps import ComputeStep, StepList
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.planner import candidates
from convoy.planner.request import PlanRequest
from convoy.simulate.costs import Costs
from convoy.simulate.table import Measurement

CANDIDATES = 3
"""How many of the planner's best plans are looked at: the times may still change their order."""

LEAST = 0.01
"""A part of a device's computing that is smaller is not worth its time."""


@dataclass(frozen=True, slots=True)
class SizeToProfile:
    """A size of a layer that a device would compute, and about how long that takes, forward and backward."""

    layer: str
    size: LocalSize
    seconds: float


def sizes_to_profile(
    measured: Measurement, graph: Graph, batch: int, alike: Mapping[str, str]
) -> list[list[SizeToProfile]]:
    """For each device the sizes that the named plans and the planner's best would run, the longest first.

    Args:
        measured: by the grids alone.
        alike: for each layer the one that is timed for it.
    """
    costs = measured.costs(graph)
    known = {(p.device, p.layer, p.samples, p.outputs, p.inputs) for p in measured.layer}
    names = [device.name for device in measured.fleet.devices]
    found: list[dict[tuple[str, LocalSize], SizeToProfile]] = [{} for _ in names]
    for plan in _plans(PlanRequest(graph, batch, FleetKnowledge(measured=measured, given=costs))):
        steps = lower(plan, graph)
        for device, name in enumerate(names):
            sizes = _large(_sizes(steps, graph, costs, device, alike))
            for each in sizes:
                size = each.size
                if (name, each.layer, size.samples, size.outputs, size.inputs) not in known:
                    found[device].setdefault((each.layer, size), each)
    return [sorted(each.values(), key=lambda each: -each.seconds) for each in found]


def _plans(request: PlanRequest) -> list[Plan]:
    plans = [request.named(name) for name in PLANS]
    try:
        # By the analytic model: simulations take seconds on eight devices, and what they change moves a share by little.
        best = candidates(request, simulated=False)
    except PlanError:  # nothing fits: whoever plans will say so
        return plans
    return plans + [each.plan for each in best[:CANDIDATES]]


def _sizes(
    steps: StepList, graph: Graph, costs: Costs, device: int, alike: Mapping[str, str]
) -> Iterable[SizeToProfile]:
    for step in steps.phase("forward"):
        if isinstance(step, ComputeStep) and step.layer in alike:
            layer = graph[step.layer]
            whole = local_size(step, layer, device)
            # Statistics that are shared are timed over samples alone, and each of them is on the grid's line.
            if whole is None or not whole.samples or whole.shares_statistics:
                continue
            unit = granule(graph, layer)
            if whole.outputs < whole_size(layer, 1).outputs and (unit is None or whole.outputs % unit):
                continue  # a part of another axis, which follows in proportion
            for size in {whole, *sizes_in_chunks(whole, step.chunks)}:
                forward_s, backward_s = (
                    costs.times.seconds(device, layer, phase, size) for phase in ("forward", "backward")
                )
                yield SizeToProfile(alike[step.layer], size, forward_s + backward_s)


def _large(sizes: Iterable[SizeToProfile]) -> Sequence[SizeToProfile]:
    rows = list(sizes)
    least_s = LEAST * sum(row.seconds for row in rows)
    return [row for row in rows if row.seconds > least_s]
