"""Improves a plan by local search: applies small changes while the simulated time gets shorter.

The analytic model only adds up layers; a simulation also contains waiting, and each device's processor time for messages. So
this search changes strategies, then sums, chunks and shares. Coupled axes (`convoy.plan.coupling`) change together, so that
no change adds a move.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from convoy.layout.collectives import Reduce
from convoy.layout.layout import Replicated, Split, holders
from convoy.layout.shares import apportion
from convoy.model.graph import Layer
from convoy.plan.coupling import coupled_axes, with_units
from convoy.plan.placing import placements
from convoy.plan.plan import Plan
from convoy.plan.presets import SHARE_UNITS
from convoy.plan.steps import ComputeStep, micro_batches
from convoy.plan.strategy import STRATEGIES, Placement, Sharding, can_shard
from convoy.planner.analytic import CostModel, content
from convoy.planner.search import Candidate, Search
from convoy.simulate.compute import CachedTimes
from convoy.simulate.simulator import computing_s, layers_s, simulate

CHUNKS = (2, 4, 8, 16, 32)
"""Numbers of chunks per move to try."""

SOME_CHUNKS = 8
"""Number of chunks used when trying other strategies."""

ROUNDS = 4
"""The most corrections of shares."""

NEIGHBOURS = 48
"""The most small changes of shares to try: simulating a deep net takes a tenth of a second."""

PARTS = 64
"""A small change moves 1 / PARTS of the units of coupled axes, but at least one unit."""

DEEP = 100
"""In nets with more layers, fewer plans are tried, because simulations take long."""

GAIN = 1e-3
"""Smaller relative gains are noise."""

Better = Iterator[Candidate]
"""Improved candidates with simulated seconds, each faster than the previous one; empty if no change helps."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """The simulation of a plan, as a mean over the micro-batches of a step.

    Attributes:
        busy_s: by device, seconds of computing, copying and adding.
        waits_s: by device, seconds of waiting for messages.
    """

    step_s: float
    busy_s: tuple[float, ...]
    waits_s: tuple[float, ...]


class LocalSearch:
    """A local search over plans of one model on one fleet.

    Args:
        fits: returns whether a plan may be used, for example whether it fits the devices' memory.
        reduces: values of `Plan.reduce` to try.
    """

    def __init__(
        self,
        model: CostModel,
        fits: Callable[[Plan], bool] = lambda _: True,
        reduces: tuple[Reduce, ...] = ("direct", "ring"),
    ) -> None:
        self.model, self.fits, self.reduces = model, fits, reduces
        self.costs = replace(model.costs, times=CachedTimes(model.costs.times))
        self.known: dict[tuple[object, ...], Simulated] = {}

    def simulated(self, plan: Plan) -> Simulated:
        """Simulate a plan; results are cached."""
        key = self._key(plan)
        if key not in self.known:
            count = self.model.request.micro_batches
            step_s, busy_s, waits_s = 0.0, [0.0] * plan.devices, [0.0] * plan.devices
            for kind, times in micro_batches(count).items():
                part = times / count
                timeline = simulate(self.model.steps(plan, kind), self.model.graph, self.costs)
                step_s += part * timeline.step_s
                for event in timeline.events:
                    if event.activity == "compute":
                        busy_s[event.device] += part * (event.end_s - event.start_s)
                waits_s = [a + part * b for a, b in zip(waits_s, timeline.exchange_s, strict=True)]
            self.known[key] = Simulated(step_s, tuple(busy_s), tuple(waits_s))
        return self.known[key]

    def _key(self, plan: Plan) -> tuple[object, ...]:
        graph = self.model.graph
        # Naming a weighted layer's default strategy does not change the plan.
        same = {name for name, how in plan.layers.items() if how == plan.otherwise and graph[name].weighted}
        named = {n: how for n, how in plan.layers.items() if n not in same or graph[n].groups > 1}
        return content(replace(plan, layers=named))

    def shorter(self, plan: Plan, than_s: float) -> Simulated | None:
        """Return the simulation of a plan if its step is shorter than `than_s` and the plan may be used."""
        steps = self.model.steps(plan)
        # Most plans need no simulation, because one device's layers alone take longer.
        if self._key(plan) not in self.known and max(computing_s(steps, self.model.graph, self.costs)) >= than_s:
            return None
        found = self.simulated(plan)
        return found if found.step_s < than_s and self.fits(plan) else None

    def change_strategies(self, start: Candidate, order: Sequence[int]) -> Better:
        """Change the strategies of one or two layers at a time, with and without chunks, until no change helps.

        Args:
            order: all devices, the fastest first.
        """
        plan, active = start.plan, order[: start.devices]
        names = [layer.name for layer in self.model.graph.weighted if layer.groups == 1]
        kinds = {name: plan.layers[name].name for name in names if name in plan.layers}
        least_s, tried, changed = self.simulated(plan).step_s, {tuple(kinds.values())}, True
        while changed:
            changed = False
            pairs = itertools.combinations_with_replacement(kinds, 2)
            for (a, b), (first, second) in itertools.product(pairs, itertools.product(STRATEGIES, repeat=2)):
                attempt = kinds | {a: first, b: second}
                if tuple(attempt.values()) in tried:
                    continue
                tried.add(tuple(attempt.values()))
                wholes = [each.plan for each in Search(self.model, active, attempt).run()[:1]]
                for other in wholes + [replace(each, chunks=min(SOME_CHUNKS, plan.batch)) for each in wholes]:
                    if better := self.shorter(other, least_s):
                        least_s, kinds, changed = better.step_s, attempt, True
                        yield Candidate(other, least_s, start.devices)

    def change_exchanges_and_shares(self, start: Candidate) -> Better:
        """Try other `reduce` values, moves in chunks, and shares divided by each device's busy time."""
        plan, found = start.plan, self.simulated(start.plan)
        changes: list[dict[str, Any]] = [{"reduce": reduce} for reduce in self.reduces if reduce != plan.reduce]
        in_chunks = self.model.steps(replace(plan, chunks=min(CHUNKS[0], plan.batch))).steps
        if any(isinstance(step, ComputeStep) and step.chunks > 1 for step in in_chunks):
            changes += [{"chunks": chunks} for chunks in CHUNKS if chunks <= plan.batch]
        for change in changes:
            other = replace(plan, **change)
            if better := self.shorter(other, found.step_s):
                plan, found = other, better
                yield Candidate(plan, found.step_s, start.devices)
        for _ in range(ROUNDS):
            other = self.balanced(plan, found.busy_s)
            if (better := self.shorter(other, found.step_s)) is None:
                return
            plan, found = other, better
            yield Candidate(plan, found.step_s, start.devices)

    def balanced(self, plan: Plan, busy_s: Sequence[float]) -> Plan:
        """Return the plan with every share divided by its device's busy time, then rescaled."""
        for axes in coupled_axes(plan, self.model.graph):
            weights = [n / busy if busy else 0.0 for n, busy in zip(axes.units, busy_s, strict=True)]
            plan = with_units(plan, axes, apportion(sum(axes.units), weights))
        return plan

    def keep_otherwise(self, start: Candidate, speeds: Sequence[float]) -> Better:
        """Try to store replicated weights as copies, or as shards: by speed or evenly, over some or all devices."""
        graph, placed = self.model.graph, placements(start.plan, self.model.graph)
        names = [name for name, each in placed.items() if _uses_copies(graph[name], each)]
        if not names:
            return
        working = {d for each in placed.values() for d in holders(each.gives)}
        shares = [[s if d in working else 0.0 for d, s in enumerate(speeds)], list(speeds), [1.0] * len(speeds)]
        others: list[dict[str, Sharding]] = [{}]
        largest = max(names, key=lambda name: sum(p.entries for p in graph[name].trainable))
        for units in dict.fromkeys(apportion(SHARE_UNITS, each) for each in shares):
            others += [dict.fromkeys(some, Sharding(units)) for some in (names, [largest])]
        least_s = self.simulated(start.plan).step_s
        for sharded in others:
            other = replace(start.plan, sharded=sharded)
            if better := self.shorter(other, least_s * (1 - GAIN)):
                least_s = better.step_s
                yield Candidate(other, least_s, start.devices)

    def move_units(self, start: Candidate) -> Better:
        """Move a sample or a few filters from one device to another, until no such change helps.

        `balanced` is too coarse if a sample is a tenth of a device's work, and never removes a device with little work. This
        tries all pairs of devices, first from the device that waits least to the one that waits most.
        """
        plan, found = start.plan, self.simulated(start.plan)
        tried = {content(plan)}
        while len(tried) <= NEIGHBOURS:
            for other in self._neighbours(plan, found):
                if content(other) in tried:
                    continue
                tried.add(content(other))
                if better := self.shorter(other, found.step_s * (1 - GAIN)):
                    plan, found = other, better
                    yield Candidate(plan, found.step_s, start.devices)
                    break
                if len(tried) > NEIGHBOURS:
                    return
            else:
                return

    def _neighbours(self, plan: Plan, found: Simulated) -> Iterator[Plan]:
        """Yield plans in which a few units of coupled axes move to another device. Skip changes of negligible work."""
        every = itertools.permutations(range(plan.devices), 2)
        pairs = sorted(every, key=lambda pair: found.waits_s[pair[0]] - found.waits_s[pair[1]])
        longest = layers_s(self.model.steps(plan), self.model.graph, self.costs)
        rows = [
            (axes, sum(longest.get(name, (0.0, 0))[0] for name in axes.layers))
            for axes in coupled_axes(plan, self.model.graph)
        ]
        for giver, taker in pairs:
            for axes, work_s in rows:
                units = list(axes.units)
                moved = min(units[giver], max(1, sum(units) // PARTS))
                both_stay = units[taker] and moved < units[giver]
                if moved and not (both_stay and work_s * moved / units[giver] < GAIN * found.step_s):
                    units[giver] -= moved
                    units[taker] += moved
                    yield with_units(plan, axes, tuple(units))


def _uses_copies(layer: Layer, placed: Placement) -> bool:
    """Return whether a layer's parameters can be sharded: several devices use all of them for their own samples."""
    gives = placed.gives
    if not can_shard(layer) or not isinstance(gives, Split) or gives.axis != 0 or len(holders(gives)) < 2:
        return False
    return any(isinstance(placed.parameters[key], Replicated) for key, p in layer.parameters.items() if p.trainable)
