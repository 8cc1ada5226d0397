"""Unequal devices: replay each plan's step list on a described fleet, with energy and memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from convoy.errors import unknown_name
from convoy.fleet import Fleet
from convoy.model.graph import Graph
from convoy.plan.device_program import whole_size
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import PLANS, Speeds, named_plan
from convoy.plan.steps import StepList
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.planner import candidates
from convoy.planner.request import PlanRequest
from convoy.simulate.costs import Costs
from convoy.simulate.events import Timeline
from convoy.simulate.memory import DeviceMemory, memory_of
from convoy.simulate.simulator import simulate
from studies.power import Energy, energy_of, power_of
from studies.roofline import roofline_costs


@dataclass(frozen=True, slots=True)
class Replayed:
    """One plan on one fleet.

    Attributes:
        limit_samples_per_s: what the devices train alone with the same global batch, summed: no plan is to be expected to
            do better.
        energy: None where the fleet gives no watts.
        memory: of each device.
    """

    plan: Plan
    steps: StepList
    timeline: Timeline
    limit_samples_per_s: float
    energy: Energy | None
    memory: tuple[DeviceMemory, ...]

    @property
    def samples_per_s(self) -> float:
        return self.steps.batch / self.timeline.step_s

    @property
    def efficiency(self) -> float:
        """Return throughput as a fraction of the limit."""
        return self.samples_per_s / self.limit_samples_per_s


def make_plan(name: str, graph: Graph, batch: int, costs: Costs) -> Plan:
    """Return a named plan for a fleet's modelled speeds; "auto" asks the planner.

    Raises:
        InputError: unknown name; the choices are listed.
    """
    if name == "auto":
        return candidates(PlanRequest(graph, batch, FleetKnowledge(given=costs)))[0].plan
    if name not in PLANS:
        raise unknown_name("plan", name, (*PLANS, "auto"))
    return named_plan(name, graph, batch, layer_speeds(PlanRequest(graph, batch, FleetKnowledge(given=costs))))


def layer_speeds(request: PlanRequest) -> Speeds:
    """Return each device's speeds, per weighted layer too, as a measurement would give them."""
    times = request.costs.times
    layers = {}
    for layer in request.graph.weighted:
        size = whole_size(layer, request.batch)
        rows = (
            sum(times.seconds(device, layer, phase, size) for phase in ("forward", "backward"))
            for device in range(len(request.costs.network.host))
        )
        layers[layer.name] = tuple(request.batch / seconds for seconds in rows)
    return replace(request.speeds, layers=layers)


def replay(
    graph: Graph, fleet: Fleet, plan: Plan, costs: Costs | None = None, *, optimizer: str = "sgd-momentum"
) -> Replayed:
    """Replay one step of a plan on a fleet; `costs` default to the fleet's rooflines.

    Raises:
        InputError: see `roofline_costs`.
        PlanError: a plan for another model or number of devices.
    """
    costs = costs or roofline_costs(fleet, optimizer=optimizer)
    plan.check(graph, len(fleet.devices))
    steps = lower(plan, graph)
    timeline = simulate(steps, graph, costs)
    power = power_of(fleet)
    energy = None if power is None else energy_of(timeline, power, plan.batch)
    memory = memory_of(steps, graph, optimizer=optimizer, itemsize=costs.itemsize)
    limit = sum(PlanRequest(graph, plan.batch, FleetKnowledge(given=costs)).speeds.devices)
    return Replayed(plan, steps, timeline, limit, energy, memory)


def compare(
    graph: Graph, fleet: Fleet, batch: int, plans: Sequence[str] = (*PLANS, "auto"), *, efficiency: float = 1.0
) -> list[Replayed]:
    """Replay each named plan on a fleet, in the given order."""
    costs = roofline_costs(fleet, efficiency=efficiency)
    return [replay(graph, fleet, make_plan(name, graph, batch, costs), costs) for name in plans]


def too_large(replayed: Replayed, fleet: Fleet) -> list[str]:
    """Return text naming the devices whose memory a plan exceeds; empty if it fits or memory is unknown."""
    return [
        f"{device.name}: {need.total_bytes / 1e9:.3g} GB of {device.memory_bytes / 1e9:.3g} GB"
        for device, need in zip(fleet.devices, replayed.memory, strict=True)
        if device.memory_bytes is not None and need.total_bytes > device.memory_bytes
    ]


def rows_of(replays: Sequence[Replayed], names: Sequence[str] | None = None) -> list[dict[str, str | float]]:
    """Return a row per plan, for a table or a CSV file."""
    rows = []
    for index, each in enumerate(replays):
        row: dict[str, str | float] = {"plan": names[index] if names else each.plan.name, "batch": each.plan.batch}
        row |= {"devices": each.plan.devices, "step_s": each.timeline.step_s, "samples_per_s": each.samples_per_s}
        row |= {"efficiency": each.efficiency, "compute_max_s": max(each.timeline.compute_s)}
        row["memory_max_bytes"] = max(memory.total_bytes for memory in each.memory)
        row["joules_per_image"] = each.energy.image_j if each.energy else ""
        rows.append(row)
    return rows
