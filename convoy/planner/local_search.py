"""Local search: makes a plan better while its simulated step gets shorter.

The search adds up layers. A simulation knows who waits for whom, and that messages take processor time, of one device more than
of another. So a few strategies, then sums, chunks and shares are changed in turn. Shares change by coupled axes
(`convoy.plan.coupling`), so that no change brings a move that was not there.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from convoy.plan.coupling import coupled_axes, reshared
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.strategy import STRATEGIES, Channel, Filter
from convoy.planner.analytic import CostModel
from convoy.planner.search import Search
from convoy.sharding.redistribute import Reduce
from convoy.sharding.shares import Shares, apportion
from convoy.simulator.simulate import Timeline, simulate

CHUNKS = (2, 4, 8)
"""In how many chunks moves are tried."""

ROUNDS = 4
"""Times that shares are corrected at most."""

NEIGHBOURS = 48
"""Small changes of shares that are tried at most: a simulation of a deep net takes a tenth of a second."""

PARTS = 64
"""A small change moves one unit of coupled axes, or one of so many parts of them."""

GAIN = 1e-3
"""What shortens a step by less is chance."""

Found = Iterator[tuple[float, Plan]]
"""Plans with their simulated seconds, each shorter than the one before; none if nothing helps."""


@dataclass(frozen=True, slots=True)
class LocalSearch:
    """Changes plans of one model on one fleet.

    Attributes:
        fits: whether a plan may be run: whether it fits the devices' memory, say.
        reduces: the ways to sum that are tried.
    """

    model: CostModel
    fits: Callable[[Plan], bool] = lambda _: True
    reduces: tuple[Reduce, ...] = ("direct", "ring")

    def simulated(self, plan: Plan) -> Timeline:
        return simulate(lower(plan, self.model.graph), self.model.graph, self.model.costs)

    def change_strategies(self, plan: Plan, active: Sequence[int]) -> tuple[float, Plan]:
        """The best plan found by changing one or two strategies at a time, or all of up to three; `plan` if none helps."""
        names = [layer.name for layer in self.model.graph.weighted if layer.groups == 1]
        kinds = {name: plan.layers[name].name for name in names if name in plan.layers}
        best = (self.simulated(plan).step_s, plan)
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
                        for _, other in Search(self.model, active, attempt).run()[:1]:
                            other_s = self.simulated(other).step_s
                            if other_s < best[0] and self.fits(other):
                                best, kinds, changed = (other_s, other), attempt, True
        return best

    def change_exchanges_and_shares(self, plan: Plan) -> Found:
        """Other sums, moves in chunks, and shares divided by how long each device is busy."""
        timeline = self.simulated(plan)
        gathers = any(isinstance(each, Filter | Channel) for each in plan.layers.values())
        changes: list[dict[str, Any]] = [
            *({"reduce": reduce} for reduce in self.reduces if reduce != plan.reduce),
            *({"pieces": chunks} for chunks in CHUNKS if gathers),
        ]
        for change in changes:
            other = replace(plan, **change)
            tried = self.simulated(other)
            if tried.step_s < timeline.step_s and self.fits(other):
                plan, timeline = other, tried
                yield timeline.step_s, plan
        for _ in range(ROUNDS):
            other = self.balanced(plan, timeline)
            tried = self.simulated(other)
            if tried.step_s >= timeline.step_s or not self.fits(other):
                return
            plan, timeline = other, tried
            yield timeline.step_s, plan

    def move_units(self, plan: Plan) -> Found:
        """Hill climbing: a sample or a few filters go from one device to another.

        Dividing shares by how long devices are busy (`balanced`) overshoots where a sample is a tenth of a device's work, and a
        device with little to do is not rid of what a message costs it. So this tries, from whom waits least to whom waits most
        first, and goes on from what helped.
        """
        timeline = self.simulated(plan)
        tried = [plan]
        while len(tried) <= NEIGHBOURS:
            for other in self._neighbours(plan, timeline):
                if other in tried:
                    continue
                tried.append(other)
                attempt = self.simulated(other)
                if attempt.step_s < timeline.step_s * (1 - GAIN) and self.fits(other):
                    plan, timeline = other, attempt
                    yield timeline.step_s, plan
                    break
                if len(tried) > NEIGHBOURS:
                    return
            else:
                return

    def _neighbours(self, plan: Plan, timeline: Timeline) -> Iterator[Plan]:
        """With a little of some coupled axes moved from one device to another."""
        waits = timeline.exchange_s
        pairs = sorted(itertools.permutations(range(plan.devices), 2), key=lambda pair: waits[pair[0]] - waits[pair[1]])
        found = coupled_axes(plan, self.model.graph)
        for giver, taker in pairs:
            for axes in found:
                units = list(axes.units)
                moved = min(units[giver], max(1, sum(units) // PARTS))
                if moved:
                    units[giver] -= moved
                    units[taker] += moved
                    yield reshared(plan, axes, tuple(units))

    def balanced(self, plan: Plan, timeline: Timeline) -> Plan:
        """The same strategies, with less for devices that are busy longer than others in a simulation, and more for the rest.

        A device is busy while it does not wait: computing, copying, adding. Every share is divided by that time.
        """
        busy_s = [
            sum(e.end_s - e.start_s for e in timeline.events if e.device == d and e.activity == "compute")
            for d in range(plan.devices)
        ]

        def divided(units: Shares) -> Shares:
            weights = [n / busy if busy else 0.0 for n, busy in zip(units, busy_s, strict=True)]
            return apportion(sum(units), weights)

        for axes in coupled_axes(plan, self.model.graph):
            plan = reshared(plan, axes, divided(axes.units))
        return plan
