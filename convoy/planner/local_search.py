"""Local search: makes a plan better while its simulated step gets shorter.

The search adds up layers. A simulation knows who waits for whom, and that messages take processor time, of one device more than
of another. So a few strategies, then sums, chunks and shares are changed in turn. Shares change by coupled axes
(`convoy.plan.coupling`), so that no change brings a move that was not there.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from convoy.layout.layout import holders
from convoy.layout.redistribute import Reduce
from convoy.layout.shares import Shares, apportion
from convoy.model.graph import Graph
from convoy.plan.coupling import coupled_axes, with_units
from convoy.plan.placing import placements
from convoy.plan.plan import Plan
from convoy.plan.presets import SHARE_UNITS
from convoy.plan.steps import ComputeStep, micro_batches
from convoy.plan.strategy import STRATEGIES, Sharding, Strategy
from convoy.planner.analytic import CostModel, content, uses_copies
from convoy.planner.search import Search
from convoy.simulate.compute import RememberedTimes
from convoy.simulate.simulate import Timeline, computing_s, layers_s, simulate

CHUNKS = (2, 4, 8, 16, 32)
"""In how many chunks moves are tried."""

SOME_CHUNKS, NEAR = 8, 1.5
"""Where strategies are changed, a plan is tried in so many chunks, too, if it takes at most so many times as long without."""

ROUNDS = 4
"""Times that shares are corrected at most."""

NEIGHBOURS = 48
"""Small changes of shares that are tried at most: a simulation of a deep net takes a tenth of a second."""

PARTS = 64
"""A small change moves one unit of coupled axes, or one of so many parts of them."""

LARGE = 16
"""A layer with at least this part of all copied weights is kept in shares where others are not."""

DEEP = 100
"""Of nets with more layers a simulation takes long, and fewer ways are tried."""

JOINED = 4
"""Of so many groups of axes a device is given a part by itself."""

GAIN = 1e-3
"""What shortens a step by less is chance."""

Found = Iterator[tuple[float, Plan]]
"""Plans with their simulated seconds, each shorter than the one before; none if nothing helps."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What a simulation says of a plan; of a step of several passes, of a pass in the mean.

    Attributes:
        busy_s: how long each device computes, copies and adds.
        waits_s: how long each device waits.
    """

    step_s: float
    busy_s: tuple[float, ...]
    waits_s: tuple[float, ...]

    @classmethod
    def mean(cls, rows: Sequence[tuple[int, Self]]) -> Self:
        """That of passes of some kinds, each with how many there are."""
        count = sum(n for n, _ in rows)
        busy, waits = (
            tuple(
                sum(n * s for (n, _), s in zip(rows, each, strict=True)) / count for each in zip(*values, strict=True)
            )
            for values in ([r.busy_s for _, r in rows], [r.waits_s for _, r in rows])
        )
        return cls(sum(n * r.step_s for n, r in rows) / count, busy, waits)

    @classmethod
    def of(cls, timeline: Timeline) -> Self:
        """Without what a search does not ask for: every event."""
        busy_s = [0.0] * len(timeline.exchange_s)
        for event in timeline.events:
            if event.activity == "compute":
                busy_s[event.device] += event.end_s - event.start_s
        return cls(timeline.step_s, tuple(busy_s), timeline.exchange_s)


def _otherwise_left_out(plan: Plan, graph: Graph) -> dict[str, Strategy]:
    """A plan's layers without those weighted ones that it names, and that do what they would do unnamed."""
    same = (name for name, how in plan.layers.items() if how == plan.otherwise)
    left_out = {name for name in same if graph[name].weighted and graph[name].groups == 1}
    return {name: how for name, how in plan.layers.items() if name not in left_out}


class LocalSearch:
    """Changes plans of one model on one fleet.

    Args:
        fits: whether a plan may be run: whether it fits the devices' memory, say.
        reduces: the ways to sum that are tried.
    """

    def __init__(
        self,
        model: CostModel,
        fits: Callable[[Plan], bool] = lambda _: True,
        reduces: tuple[Reduce, ...] = ("direct", "ring"),
    ) -> None:
        self.model, self.fits, self.reduces = model, fits, reduces
        self.costs = replace(model.costs, times=RememberedTimes(model.costs.times))
        self.known: dict[tuple[object, ...], Replay] = {}

    def simulated(self, plan: Plan) -> Replay:
        """A replay of a step; of the same plan only one is made."""
        found = self._simulated(plan)
        assert found is not None
        return found

    def _simulated(self, plan: Plan, limit_s: float = math.inf) -> Replay | None:
        """A replay; or None, where devices compute for longer than a limit even without waiting."""
        graph, costs = self.model.graph, self.costs
        key = content(replace(plan, layers=_otherwise_left_out(plan, graph)))
        if key not in self.known:
            steps = self.model.steps(plan)
            if limit_s < math.inf and max(computing_s(steps, graph, costs)) >= limit_s:
                return None
            kinds = micro_batches(self.model.request.micro_batches).items()
            rows = [(n, Replay.of(simulate(self.model.steps(plan, kind), graph, costs))) for kind, n in kinds]
            self.known[key] = Replay.mean(rows) if len(rows) > 1 else rows[0][1]
        return self.known[key]

    def shorter(self, plan: Plan, than_s: float) -> Replay | None:
        """The replay of a plan that may be run, if its step is shorter than that."""
        found = self._simulated(plan, than_s)
        return found if found is not None and found.step_s < than_s and self.fits(plan) else None

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
                        for _, found in Search(self.model, active, attempt).run()[:1]:
                            for other in self._perhaps_in_chunks(found, best[0]):
                                if replay := self.shorter(other, best[0]):
                                    best, kinds, changed = (replay.step_s, other), attempt, True
        return best

    def _perhaps_in_chunks(self, plan: Plan, than_s: float) -> Iterator[Plan]:
        """A plan; and with its moves in chunks, where it has such and is not much longer without."""
        yield plan
        found = self._simulated(plan, than_s * NEAR)
        if found is not None and found.step_s < than_s * NEAR and self._in_chunks(plan, SOME_CHUNKS):
            yield replace(plan, chunks=min(SOME_CHUNKS, plan.batch))

    def _in_chunks(self, plan: Plan, chunks: int) -> bool:
        """Whether chunks would make a difference."""
        steps = self.model.steps(replace(plan, chunks=min(chunks, plan.batch))).steps
        return any(isinstance(step, ComputeStep) and step.chunks > 1 for step in steps)

    def change_exchanges_and_shares(self, plan: Plan) -> Found:
        """Other sums, moves in chunks, and shares divided by how long each device is busy."""
        replay = self.simulated(plan)
        changes: list[dict[str, Any]] = [{"reduce": reduce} for reduce in self.reduces if reduce != plan.reduce]
        pieces = [chunks for chunks in CHUNKS if chunks <= plan.batch]
        if self._in_chunks(plan, CHUNKS[0]):
            changes += [{"chunks": chunks} for chunks in pieces]
        for change in changes:
            other = replace(plan, **change)
            if tried := self.shorter(other, replay.step_s):
                plan, replay = other, tried
                yield replay.step_s, plan
        for _ in range(ROUNDS):
            other = self.balanced(plan, replay.busy_s)
            tried = self.shorter(other, replay.step_s)
            if tried is None:
                return
            plan, replay = other, tried
            yield replay.step_s, plan

    def keep_otherwise(self, plan: Plan, speeds: Sequence[float]) -> Found:
        """Weights that several devices use whole: as copies, or in shares of those that compute, or of all devices.

        Args:
            speeds: of all devices; shares are tried in proportion, and even.
        """
        graph, replay = self.model.graph, self.simulated(plan)
        placed = placements(plan, graph)
        names = [name for name, each in placed.items() if uses_copies(graph[name], each)]
        if not names:
            return
        entries = {name: sum(p.entries for p in graph[name].trainable) for name in names}
        large = [name for name in names if entries[name] * LARGE >= sum(entries.values())]
        working = {d for each in placed.values() for d in holders(each.gives)}
        shares = [[s if d in working else 0.0 for d, s in enumerate(speeds)], list(speeds), [1.0] * len(speeds)]
        units = dict.fromkeys(apportion(SHARE_UNITS, each) for each in shares)
        parts = (names, large) if len(graph.layers) <= DEEP else (names,)
        tried: list[dict[str, Sharding]] = [{}]
        tried += [dict.fromkeys(some, Sharding(each)) for each in units for some in parts]
        for how in tried:
            other = replace(plan, sharded=how)
            if attempt := self.shorter(other, replay.step_s * (1 - GAIN)):
                plan, replay = other, attempt
                yield replay.step_s, plan

    def let_join(self, plan: Plan, speeds: Sequence[float]) -> Found:
        """Devices without a part of some axes get one by their speed, the fastest first: of all such axes, or of one.

        `move_units` would give them a unit at a time, which costs a device's messages and brings a unit's work.
        """
        replay = self.simulated(plan)
        for device in sorted(range(plan.devices), key=lambda d: (-speeds[d], d)):
            without = [axes for axes in coupled_axes(plan, self.model.graph) if not axes.units[device]]
            for some in [without, *([axes] for axes in without[: JOINED if len(without) > 1 else 0])]:
                other = plan
                for axes in some:
                    beside = sum(speeds[d] for d in axes.active)
                    part = max(1.0, sum(axes.units) * speeds[device] / (beside + speeds[device]))
                    weights = [part if d == device else float(n) for d, n in enumerate(axes.units)]
                    other = with_units(other, axes, apportion(sum(axes.units), weights))
                if content(other) != content(plan) and (attempt := self.shorter(other, replay.step_s * (1 - GAIN))):
                    plan, replay = other, attempt
                    yield replay.step_s, plan
                    break

    def move_units(self, plan: Plan) -> Found:
        """Hill climbing: a sample or a few filters go from one device to another.

        Dividing shares by how long devices are busy (`balanced`) overshoots where a sample is a tenth of a device's work, and a
        device with little to do is not rid of what a message costs it. So this tries, from whom waits least to whom waits most
        first, and goes on from what helped.
        """
        replay = self.simulated(plan)
        tried = {content(plan)}
        while len(tried) <= NEIGHBOURS:
            for other in self._neighbours(plan, replay):
                if content(other) in tried:
                    continue
                tried.add(content(other))
                if attempt := self.shorter(other, replay.step_s * (1 - GAIN)):
                    plan, replay = other, attempt
                    yield replay.step_s, plan
                    break
                if len(tried) > NEIGHBOURS:
                    return
            else:
                return

    def _neighbours(self, plan: Plan, replay: Replay) -> Iterator[Plan]:
        """With a little of some coupled axes moved from one device to another; not where that is too little work to count."""
        every = itertools.permutations(range(plan.devices), 2)
        pairs = sorted(every, key=lambda pair: replay.waits_s[pair[0]] - replay.waits_s[pair[1]])
        longest = layers_s(self.model.steps(plan), self.model.graph, self.costs)
        found = [
            (axes, sum(longest.get(name, (0.0, 0))[0] for name in axes.layers))
            for axes in coupled_axes(plan, self.model.graph)
        ]
        for giver, taker in pairs:
            for axes, work_s in found:
                units = list(axes.units)
                moved = min(units[giver], max(1, sum(units) // PARTS))
                both_stay = units[taker] and moved < units[giver]
                if moved and not (both_stay and work_s * moved / units[giver] < GAIN * replay.step_s):
                    units[giver] -= moved
                    units[taker] += moved
                    yield with_units(plan, axes, tuple(units))

    def balanced(self, plan: Plan, busy_s: Sequence[float]) -> Plan:
        """The same strategies, with less for devices that are busy longer than others, and more for the rest: every share is
        divided by that time."""

        def divided(units: Shares) -> Shares:
            weights = [n / busy if busy else 0.0 for n, busy in zip(units, busy_s, strict=True)]
            return apportion(sum(units), weights)

        for axes in coupled_axes(plan, self.model.graph):
            plan = with_units(plan, axes, divided(axes.units))
        return plan
