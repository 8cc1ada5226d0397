"""Chooses strategies, shares and devices for the shortest predicted step.

Dynamic programming (`search.py`) with an analytic cost model finds plans for the fastest device alone, the two fastest, and so
on. Plans that do not fit into memory are dropped. If the fastest plan does not fit, the batch is split by memory, with weights
in copies, in shards, or in shards that are freed after use. The best plans are simulated and improved by local search
(`LocalSearch`). If simulations take too long, only the analytic model compares the plans.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from convoy.errors import PlanError
from convoy.layout.collectives import Reduce
from convoy.layout.layout import Replicated, Split, holders
from convoy.layout.shares import apportion
from convoy.plan.coupling import coupled_axes, with_units
from convoy.plan.placing import placements
from convoy.plan.plan import Plan
from convoy.plan.presets import PLANS, SHARE_UNITS, Speeds, named_plan
from convoy.plan.steps import ComputeStep, micro_batches
from convoy.plan.strategy import STRATEGIES, Batch, Sharding, can_shard
from convoy.planner.analytic import DIRECT_DEVICES, CostModel, content
from convoy.planner.request import PlanRequest
from convoy.planner.search import SPATIAL_SAMPLES, Candidate, Search, batch_shares, in_order, model_s
from convoy.simulate.compute import CachedTimes
from convoy.simulate.memory import fewest_micro_batches, memory_of, micro_batch_words, most_bytes
from convoy.simulate.simulator import layers_s, seconds_by_phase, simulate

SIMULATION_WORK = 300_000
"""Plans are simulated up to this product of layers and devices^4, because the time grows with layers and concurrent
messages."""

NAMED_DEVICES = 16
"""Named plans are compared up to this number of devices, because computing the cost of each takes a search over all devices."""

SEARCHED_WORK = 400
"""Up to this product of devices and layers, the planner searches plans for every number of devices."""

SHALLOW = 4
"""In nets with more weighted layers, local search does not change strategies."""

ALL_WORK = 600
"""Up to this product of plans and layers, all plans of the search are simulated."""

SIMULATED, SIMULATED_SHARDED = 12, 4
"""Numbers of plans to simulate, without and with sharded weights: the best by the analytic model."""

FAR = 3.0
"""In nets with more than `DEEP` layers, a named plan is simulated only if the analytic model predicts at most this multiple
of the best time. (Plans that send every tensor are slow to simulate.)"""

IMPROVED = 6
"""The number of plans whose exchanges and shares local search changes."""

MEMORY_ATTEMPTS = 8
"""The most times that samples are moved away from devices whose memory is too small."""


def candidates(request: PlanRequest, *, simulated: bool = True) -> list[Candidate]:
    """Return plans for several numbers of devices, and the named plans, the shortest predicted step first.

    The order is deterministic. Either all times are simulated, or all are from the analytic model. For deep nets, clearly
    slower named plans are dropped.

    Args:
        simulated: False: use only the analytic model, which is quick but less exact.

    Raises:
        PlanError: no plan fits; the message describes the closest attempt.
    """
    model = CostModel(request)
    order = _fastest_first(request)
    quick = len(order) * len(model.graph.layers) <= SEARCHED_WORK
    counts = range(1, len(order) + 1) if quick else _some_counts(len(order))
    found = [each for n in counts for each in Search(model, order[:n]).run()]
    if len(order) <= NAMED_DEVICES:
        named = [request.named(name) for name in PLANS]
        found += [Candidate(plan, model_s(model, order, plan), len(order)) for plan in named]
    found = in_order(found)
    if request.limits.limited:
        found = _that_fit(model, found, order)
    if simulated and len(model.graph.layers) * model.devices**4 <= SIMULATION_WORK:
        found = _by_simulation(model, found, order)
    return found


def quick_candidates(request: PlanRequest, enough: int = 1) -> list[Candidate]:
    """Return up to `enough` best plans that fit the memory, by the analytic model. For callers that plan often.

    Search plans for the two, four, ... fastest devices, and add plans that split the batch by speed over each number of the
    fastest. If no plan fits, try plans that save memory. If none of these fits either, the list is empty.
    """
    model = CostModel(request)
    order, speeds = _fastest_first(request), request.speeds.devices
    counts = sorted({len(order), *(1 << i for i in range(1, len(order).bit_length()))})
    found = [each for n in counts for each in Search(model, order[:n]).run()]
    for count in range(1, len(order) + 1):
        some = Speeds(tuple(speed if d in order[:count] else 0.0 for d, speed in enumerate(speeds)))
        plan = named_plan("data-by-speed", request.graph, request.batch, some, request.reduce)
        plan = replace(plan, wire=request.wire, outputs=request.outputs)
        found.append(Candidate(plan, model_s(model, order, plan), count))
    fitting = list(itertools.islice((each for each in in_order(found) if _fits(each.plan, model)), enough))
    return fitting or in_order(each for each, needs in _saving_memory(model, order) if not request.limits.excess(needs))


def _fastest_first(request: PlanRequest) -> list[int]:
    speeds = request.speeds.devices
    return sorted(range(len(speeds)), key=lambda d: (-speeds[d], d))


def _some_counts(devices: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 9, 13, ..., `devices`."""
    counts = [1]
    while counts[-1] < devices:
        counts.append(min(devices, max(counts[-1] + 1, counts[-1] * 3 // 2)))
    return counts


# --- memory ---------------------------------------------------------------------------------------------------------------


def _fits(plan: Plan, model: CostModel) -> bool:
    limits = model.request.limits
    return not limits.limited or not limits.excess(_needs(plan, model))


def _needs(plan: Plan, model: CostModel) -> tuple[int, ...]:
    """Return the bytes that a plan needs on each device, or upper limits if these already fit."""
    graph, request, itemsize = model.graph, model.request, model.costs.itemsize
    most = most_bytes(model.steps(plan), graph, optimizer=request.optimizer, itemsize=itemsize)
    if not request.limits.excess(most):
        return most
    memory = memory_of(model.steps(plan), graph, optimizer=request.optimizer, itemsize=itemsize)
    return tuple(row.total_bytes for row in memory)


def _that_fit(model: CostModel, found: Sequence[Candidate], order: Sequence[int]) -> list[Candidate]:
    """Return the plans that fit the memory, fastest first. If the fastest plan does not fit, add plans that save memory.

    Raises:
        PlanError: no plan fits.
    """
    request = model.request
    rows = [(each, _needs(each.plan, model)) for each in found]
    if request.limits.excess(rows[0][1]):
        rows += _saving_memory(model, order)
    fitting = in_order(each for each, needs in rows if not request.limits.excess(needs))
    if not fitting:
        # For the message: the smallest number of micro-batches with which a step fits.
        count = fewest_micro_batches(model.batch, lambda n: bool(quick_candidates(request.split(model.batch // n))))
        remedy = "" if count is None else micro_batch_words(request.graph, request.micro_batches * count)
        attempts = [needs for _, needs in rows]
        raise PlanError(request.limits.refusal(model.graph.model, model.batch, attempts, remedy))
    return fitting


def _saving_memory(model: CostModel, order: Sequence[int]) -> Iterator[tuple[Candidate, tuple[int, ...]]]:
    """Yield plans that need little memory, with their bytes per device.

    First, split the layers with most weights by filters and channels. Then split large images by memory. Then split the batch,
    with weights copied, sharded by memory, or sharded and freed after use, and move samples from devices with too little memory
    to others until it fits.
    """
    graph, limits = model.graph, model.request.limits
    # A ring sum needs smaller receive buffers than a direct sum.
    model = model.with_reduce(model.request.reduce or "ring")
    parts = [min(limits.bytes_of(d), 1e18) if d in order else 0.0 for d in range(model.devices)]
    heavy = sorted((e for e in graph.weighted if e.sums_channels and not e.shared), key=lambda e: -e.entries)
    attempts = itertools.product((1, 2, 3, len(heavy)), (["filter"], ["filter", "channel"], ["channel", "filter"]))
    for (count, kinds), n in itertools.product(attempts, _some_counts(len(order))[1:]):
        split = [layer.name for layer in graph.weighted if layer in heavy[:count]]
        only = dict(zip(split, itertools.cycle(kinds), strict=False))
        for weights in ([], [part if d in order[:n] else 0.0 for d, part in enumerate(parts)]):
            found = Search(model, order[:n], only, weights).run()[0]
            yield found, _needs(found.plan, model)
    tiled = {layer.name: "spatial" for layer in graph.weighted if layer.windows and not layer.shared}
    if tiled and len(order) > 1 and model.batch < SPATIAL_SAMPLES * len(order):
        weights = parts
        for _ in range(MEMORY_ATTEMPTS):
            found = Search(model, order, tiled, weights).run()[0]
            needs = _needs(found.plan, model)
            yield found, needs
            weights = [w * min(limits.bytes_of(d), 1e18) / max(1, needs[d]) for d, w in enumerate(weights)]
    forms: list[dict[str, Sharding]] = [{}]
    if 1 < len(order) <= DIRECT_DEVICES:  # with shards, each device sends to all others
        keep = Sharding(apportion(SHARE_UNITS, parts))
        names = [layer.name for layer in graph.layers.values() if can_shard(layer)]
        forms += [dict.fromkeys(names, how) for how in (keep, replace(keep, form="free")) if names]
    for sharded in forms:
        samples = list(batch_shares(model, order))
        for _ in range(MEMORY_ATTEMPTS):
            plan = Plan(
                "auto", graph.fingerprint, model.devices, model.batch, {}, Batch(tuple(samples)), model.reduce,
                wire=model.request.wire, sharded=sharded, outputs=model.request.outputs,
            )  # fmt: skip
            needs = _needs(plan, model)
            yield Candidate(plan, model_s(model, order, plan), len(order)), needs
            moved = _moved_off(samples, needs, plan, model)
            if moved is None:
                break
            samples = moved


def _moved_off(samples: Sequence[int], needs: Sequence[int], plan: Plan, model: CostModel) -> list[int] | None:
    """Move samples from devices with too little memory to others. Return None if all fit, or if the others have no room."""
    limits, request = model.request.limits, model.request
    excess = limits.excess(needs)
    memory = memory_of(model.steps(plan), model.graph, optimizer=request.optimizer, itemsize=model.costs.itemsize)
    sample_bytes = max(each.activations_bytes / n for each, n in zip(memory, samples, strict=True) if n)
    if not excess or not sample_bytes:
        return None
    room = [(limits.bytes_of(d) - need) / sample_bytes for d, need in enumerate(needs)]
    left = [int(min(model.batch, max(0.0, each))) for each in room]
    given = {d: min(samples[d], math.ceil(over / sample_bytes)) for d, over in excess.items()}
    if sum(left) < sum(given.values()):
        return None
    weights = [n * speed for n, speed in zip(left, request.speeds.devices, strict=True)]
    taken = apportion(sum(given.values()), weights, at_most=left)
    return [n - given.get(d, 0) + taken[d] for d, n in enumerate(samples)]


# --- by simulation --------------------------------------------------------------------------------------------------------


def _by_simulation(model: CostModel, found: Sequence[Candidate], order: Sequence[int]) -> list[Candidate]:
    """Simulate the best plans, and improve them by local search. Return all simulated plans, fastest first."""
    reduces: tuple[Reduce, ...] = ("direct", "ring") if model.request.reduce is None else ()
    local = LocalSearch(model, lambda plan: _fits(plan, model), reduces)
    shortlist = _shortlist(model, found)
    rows = [replace(each, step_s=local.simulated(each.plan).step_s) for each in shortlist]

    def best() -> Candidate:
        return in_order(rows)[0]

    if len(model.graph.weighted) <= SHALLOW and model.devices <= 8:
        rows += local.change_strategies(best(), order)
    different: dict[object, Candidate] = {}
    for each in in_order(rows):
        different.setdefault(content(each.plan), each)
    for each in list(different.values())[:IMPROVED]:
        rows += local.change_exchanges_and_shares(each)
    rows += local.keep_otherwise(best(), model.request.speeds.devices)
    rows += local.move_units(best())
    return in_order(rows)


def _shortlist(model: CostModel, found: Sequence[Candidate]) -> list[Candidate]:
    """Return the plans to simulate."""
    copies = [each for each in found if not each.plan.sharded]
    deep = len(model.graph.layers) > DEEP
    shortlist = copies
    if len(copies) * len(model.graph.layers) > ALL_WORK:
        # The best plans, and the best for each number of devices, because the model errs most for many devices.
        best_of = {each.devices: each for each in reversed(copies)}
        others = [each for _, each in sorted(best_of.items())]
        # The model is inexact for small batches with short moves and sums, so add the named plans.
        most_s = FAR * found[0].step_s if deep else math.inf
        others += [each for each in copies if each.plan.name != "auto" and each.step_s <= most_s]
        shortlist = copies[:SIMULATED] + [each for each in others if each not in copies[:SIMULATED]]
    return shortlist + [each for each in found if each.plan.sharded][: 1 if deep else SIMULATED_SHARDED]


# --- local search -----------------------------------------------------------------------------------------------------

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
        if self._key(plan) not in self.known:
            # Most plans need no simulation, because one device's layers alone take longer.
            rows = seconds_by_phase(self.model.steps(plan), self.model.graph, self.costs.times)
            if max(sum(row.values()) for row in rows) >= than_s:
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
        graph, placed, names = self.model.graph, placements(start.plan, self.model.graph), []
        for name, each in placed.items():
            # Parameters can be sharded if several devices use all of them for their own samples.
            is_split = isinstance(each.gives, Split) and each.gives.axis == 0 and len(holders(each.gives)) > 1
            trained = [each.parameters[key] for key, p in graph[name].parameters.items() if p.trainable]
            if is_split and can_shard(graph[name]) and any(isinstance(how, Replicated) for how in trained):
                names.append(name)
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
