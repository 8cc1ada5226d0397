"""Check that `auto` on equal devices is the envelope of all named plans' curves, by replays at points of the sweeps."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from convoy.fleet import Device, Fleet, Host, Nic
from convoy.model.graph import Graph
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.planner import candidates
from convoy.planner.request import PlanRequest
from convoy.simulate.costs import Costs, Overheads
from convoy.simulate.simulator import simulate
from studies.roofline import roofline_costs
from studies.sweep import AXES, BASE, Sweep, along, sweep

DEVICES = 16
"""Of more devices a step takes long to plan and to replay."""

EVERY = 4
"""A point in so many of an axis: planning takes seconds, where a closed form takes none."""


@dataclass(frozen=True, slots=True)
class Enveloped:
    """The planner's plan at one point of an axis, and the curves there.

    Attributes:
        curves_s: the step of each named plan by its closed form. One device alone is no curve: in a fleet it sends its outputs.
    """

    axis: str
    value: float
    batch: float
    step_s: float
    plan: Plan
    curves_s: Mapping[str, float]

    @property
    def samples_per_s(self) -> float:
        return self.batch / self.step_s

    @property
    def over_best(self) -> float:
        """Return its step time over that of the best curve: at most 1 where it is the envelope."""
        return self.step_s / min(self.curves_s.values())


def costs_at(point: Mapping[str, float]) -> Costs:
    """Return the closed form's assumptions at a point as replay costs: equal devices, one per host."""
    count = int(point["devices"])
    flop_per_s, memory = point["flop_per_s"], point["memory_bytes_per_s"]
    devices = tuple(
        Device(f"d{i}", f"h{i}", "cpu", peak_flop_per_s=flop_per_s, memory_bytes_per_s=memory) for i in range(count)
    )
    link = point["link_bytes_per_s"]
    fleet = Fleet(tuple(Host(f"h{i}") for i in range(count)), devices, Nic(link, link, point["latency_s"]))
    message_s = point["message_s"]
    overheads = (Overheads(round_s=message_s, message_s=message_s),) * count
    return replace(roofline_costs(fleet, efficiency=point["efficiency"]), overheads=overheads)


def enveloped(
    graph: Graph, axis: str, values: Iterable[float] | None = None, base: Mapping[str, float] = BASE
) -> list[Enveloped]:
    """Plan and replay `auto` along one axis, skipping points with more devices than `DEVICES`.

    Args:
        values: None: every so many of the axis, `EVERY`.

    Raises:
        InputError: an axis that is not one of the five.
    """
    chosen = list(AXES.get(axis, ())[:: EVERY if len(AXES.get(axis, ())) > 16 else 2] if values is None else values)
    points = along(axis, np.array(chosen), base=base)
    sweeps: list[Sweep] = sweep(graph, points)
    found = []
    for place, value in enumerate(chosen):
        point = {name: float(column[place]) for name, column in points.columns().items()}
        if point["devices"] > DEVICES:
            continue
        costs = costs_at(point)
        plan = candidates(PlanRequest(graph, int(point["batch"]), FleetKnowledge(given=costs)))[0].plan
        step_s = simulate(lower(plan, graph), graph, costs).step_s
        curves = {each.plan: float(each.times.step_s[place]) for each in sweeps}
        found.append(Enveloped(axis, value, point["batch"], step_s, plan, curves))
    return found


def rows_of(found: Iterable[Enveloped]) -> list[dict[str, str | float]]:
    """Return a row per point, for a CSV file."""
    return [
        {
            "axis": each.axis,
            "value": each.value,
            "step_s": each.step_s,
            "samples_per_s": each.samples_per_s,
            "best_curve": min(each.curves_s, key=lambda name: each.curves_s[name]),
            "over_best_curve": each.over_best,
            "strategies": " ".join(f"{name}:{s.name}" for name, s in each.plan.layers.items()),
        }
        for each in found
    ]
