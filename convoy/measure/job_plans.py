"""Holds the plans of a job (`Plans`), and plans again when its devices change (`Replanner`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from convoy.comm.control_messages import from_first
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.replan import NewPlan, replanned
from convoy.planner.request import PlanRequest
from convoy.runtime.module import Distributed
from convoy.simulate.interval import Within, around
from convoy.simulate.simulator import seconds_by_phase
from convoy.simulate.table import Measurement
from convoy.train import rebalance
from convoy.train.controller import Rebalancer


@dataclass(frozen=True, slots=True)
class Plans(Sequence[Plan]):
    """The best plan, followed by plans that are predicted to be nearly as fast.

    Attributes:
        request: the planning request behind these plans, with the knowledge about the devices.
        step_s: each plan's predicted seconds per micro-batch; empty if nothing was predicted.
        spread: for each plan, a factor: nine of ten measured times lie between step_s / spread and step_s * spread.
        notes: lines for the user about the measurement.
    """

    plans: tuple[Plan, ...]
    request: PlanRequest = field(compare=False)
    step_s: tuple[float, ...] = ()
    spread: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def speeds(self) -> Speeds:
        """Solo throughput of each device in samples/s, or the speeds that the caller gave."""
        assert self.request.fleet.speeds is not None
        return self.request.fleet.speeds

    def replanner(self, rebalancer: Rebalancer | None = None) -> "Replanner":
        """Return a planner for changing devices: `Members(model, optimizer, replan=plans.replanner())`."""
        return Replanner(self.request, rebalancer)

    def __len__(self) -> int:
        return len(self.plans)

    @overload
    def __getitem__(self, index: int) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Plan, ...]: ...
    def __getitem__(self, index: int | slice) -> Plan | tuple[Plan, ...]:
        return self.plans[index]

    def predicted(self, plan: Plan) -> tuple[float, Within] | None:
        """Return a plan's predicted seconds per micro-batch and their interval; None if it is not one of these plans."""
        rows = zip(self.plans, self.step_s, self.spread, strict=False)
        return next(((step_s, around(step_s, spread)) for each, step_s, spread in rows if each == plan), None)


class Replanner:
    """The planner of a running job. Every device holds one with the same values.

    Args:
        request: the job's original request.
        rebalancer: observes how much slower devices run than measured; the planner corrects its times by that.

    Attributes:
        known: all devices that were ever in the job, and their measurements.
        found: the latest plan, on the device that planned.
        prepared: a plan made in advance, preceded by its conditions: current plan, current devices, next devices, speeds.
    """

    def __init__(self, request: PlanRequest, rebalancer: Rebalancer | None = None) -> None:
        self._request, self.rebalancer = request, rebalancer
        self.known = request.fleet
        self.found: NewPlan | None = None
        self.prepared: tuple[Plan, tuple[int, ...], tuple[int, ...], Speeds, NewPlan] | None = None

    @property
    def request(self) -> PlanRequest:
        """The request with the current knowledge of the fleet."""
        return replace(self._request, fleet=self.known)

    def note(self, model: Distributed, before: Sequence[int]) -> None:
        """Record how much slower than predicted each device ran the current plan. Every device calls it before planning."""
        state = None if self.rebalancer is None else self.rebalancer.state
        graph = model.traced[True].graph
        fleet = replace(self.known, slower={}).of(before)
        if state is not None and state.plan == model.plan and fleet is not None and fleet.measured is not None:
            times = fleet.measured.costs(graph).times
            predicted = seconds_by_phase(lower(model.plan, graph), graph, times)
            found = rebalance.slower(state, predicted)
            self.known = self.known.corrected({before[device]: factor for device, factor in found.items()})

    def __call__(self, model: Distributed, before: Sequence[int], now: Sequence[int]) -> Plan:
        """Return the plan for the devices `now`."""
        ready, self.prepared = self.prepared, None
        if ready is not None and ready[:4] == (model.plan, tuple(before), tuple(now), self.known.speeds):
            self.found = ready[4]  # made during training, so that devices do not wait for a search now
        else:
            self.found = replanned(self.request, model.plan, before, now)
        return self.found.plan

    def message(self) -> str:
        """Return a message about the latest plan once, on the device that made it; otherwise an empty string."""
        found, self.found = self.found, None
        if found is None or found.step_s is None:
            return ""
        text = f"new plan: about {found.step_s * self._request.micro_batches:.3g} s a step"
        return f"{text}; no plan fits the memory of {'; '.join(found.overfull)}" if found.overfull else text

    def to_json(self) -> dict[str, Any]:
        """Return the state that a joining device needs to plan like the others, as JSON for `learn`."""
        names = ("name", "optimizer", "reduce", "micro_batches")
        return {**{name: getattr(self._request, name) for name in names}, "known": self.known.to_json()}

    def learn(self, row: Mapping[str, Any]) -> None:
        """Load another device's state from its `to_json`.

        Raises:
            InputError: its measurement cannot be used.
        """
        self._request = replace(self._request, **{name: value for name, value in row.items() if name != "known"})
        self.known = FleetKnowledge.from_json(row["known"])


def expect_measured(part: Distributed, measured: Measurement | None) -> None:
    """Give every device the expected seconds of its layers, by which it divides a segment's time. All devices call it.

    Args:
        measured: the measured times; None: divide by the layers' FLOP.
    """
    graph, steps = part.traced[True].graph, part.steps(part.plan.batch)

    def tables() -> list[dict[str, float]]:
        return [] if measured is None else seconds_by_phase(steps, graph, measured.costs(graph).times)

    if rows := from_first(part.group, "layer times", tables):
        mine = rows[part.group.device]
        part.expect(lambda layer, phase, _: mine.get(f"{phase} {layer.name}", 0.0))
