"""Plans anew in a running job: brings together what is known of the devices and what rebalancing has found out since."""

from collections.abc import Sequence
from dataclasses import replace

from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds
from convoy.planner.anew import Anew, plan_anew
from convoy.planner.known import Known
from convoy.runtime.module import Distributed
from convoy.simulate.regrouped import seconds_of_layers
from convoy.train import rebalance
from convoy.train.controller import Rebalancer


class Replanner:
    """Makes the plan for the devices that a run has now, from the same values on each of them.

    Args:
        known: of the devices that the run began with.
        rebalancer: corrects what was measured before.

    Attributes:
        known: with what was found out since, and the devices that came.
        found: the latest, on the device that planned.
        prepared: a plan that was made before the devices change, and for what: the plan and devices before, the devices and
            speeds then.
    """

    def __init__(self, known: Known, rebalancer: Rebalancer | None = None) -> None:
        self.known, self.rebalancer = known, rebalancer
        self.found: Anew | None = None
        self.prepared: tuple[Plan, tuple[int, ...], tuple[int, ...], Speeds, Anew] | None = None

    def note(self, model: Distributed, before: Sequence[int]) -> None:
        """On every device, before planning: what only the plan of these devices has shown."""
        state = None if self.rebalancer is None else self.rebalancer.state
        graph = model.traced[True].graph
        measured = replace(self.known, slower={}).costs_of(before, graph)
        if state is not None and state.plan == model.plan and measured is not None:
            predicted = seconds_of_layers(lower(model.plan, graph), graph, measured[0].times, len(before))
            found = rebalance.slower(state, predicted)
            self.known = self.known.corrected({before[device]: times for device, times in found.items()})

    def __call__(self, model: Distributed, before: Sequence[int], now: Sequence[int]) -> Plan:
        """The plan for the devices `now`."""
        ready, self.prepared = self.prepared, None
        if ready is not None and ready[:4] == (model.plan, tuple(before), tuple(now), self.known.speeds):
            self.found = ready[4]  # while all trained: to search again would hold them up
        else:
            self.found = plan_anew(self.known, model.traced[True].graph, model.plan, before, now)
        return self.found.plan

    def told(self) -> str:
        """What was found, in words; empty where there is nothing to say. Only the device that planned knows."""
        found, self.found = self.found, None
        if found is None or found.step_s is None:
            return ""
        words = f"planned anew: about {found.step_s * self.known.passes:.3g} s a step"
        return f"{words}; no plan fits the memory of {'; '.join(found.overfull)}" if found.overfull else words
