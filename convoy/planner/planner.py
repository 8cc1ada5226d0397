"""Chooses strategies, shares and devices for the shortest predicted step.

Dynamic programming (`search.py`) with an analytic cost model finds plans for the fastest device alone, the two fastest, and so
on. Plans that do not fit into memory are dropped. If the fastest plan does not fit, the search is repeated with a price on
memory, and finally with all weights freed after use. The best plans are simulated and improved by local search
(`local_search.py`). If simulations take too long, only the analytic model compares the plans.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from convoy.errors import PlanError
from convoy.layout.collectives import Reduce
from convoy.layout.shares import apportion
from convoy.plan.plan import Plan
from convoy.plan.presets import PLANS, SHARE_UNITS, Speeds, named_plan
from convoy.plan.steps import micro_batches
from convoy.plan.strategy import Batch, One, Sharding, can_shard
from convoy.planner.analytic import DIRECT_DEVICES, CostModel, MemoryPenalty, content
from convoy.planner.local_search import DEEP, LocalSearch
from convoy.planner.request import PlanRequest
from convoy.planner.search import Found, Search, batch_shares, in_order, model_s
from convoy.simulate.memory import memory_of, memory_of_steps, micro_batch_words, most_bytes

SIMULATION_WORK = 300_000
"""Limit on layers times devices^4 for simulation. Its time grows with the layers, and with the concurrent messages that
share the network."""

NAMED_DEVICES = 16
"""Named plans are compared up to this number of devices: each is priced by a search over all devices."""

SEARCHED_WORK = 400
"""Up to this product of devices and layers, every number of devices is searched."""

SHALLOW = 4
"""In nets with more weighted layers, local search does not change strategies."""

ALL_WORK = 600
"""Up to this product of plans and layers, all plans of the search are simulated."""

SIMULATED, SIMULATED_SHARDED = 12, 4
"""Numbers of plans to simulate, without and with sharded weights: the best by the analytic model."""

FAR = 3.0
"""In nets with more than `DEEP` layers, a named plan is simulated only if the analytic model predicts at most this multiple
of the best time: simulating a plan that sends every tensor takes longest."""

IMPROVED = 6
"""The number of plans whose exchanges and shares local search changes."""

MORE_MICRO_BATCHES = 3
"""Number of micro-batch counts to compare, smallest first: with a few more micro-batches, a faster plan may fit."""

MEMORY_ATTEMPTS = 8
"""Attempts per set of devices to save memory, each at a higher price."""

Needs = tuple[int, ...]
"""Bytes by device."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its predicted step time."""

    plan: Plan
    step_s: float


def plan_auto(request: PlanRequest) -> Plan:
    """Return the plan with the shortest predicted step.

    Raises:
        PlanError: no plan fits the devices' memory.
    """
    return candidates(request)[0].plan


def candidates(request: PlanRequest, *, simulated: bool = True) -> list[Candidate]:
    """Return plans for some numbers of devices, and the named plans, the shortest predicted step first.

    The order is deterministic. Either all times are simulated, or all are from the analytic model. For deep nets, clearly
    slower named plans are dropped.

    Args:
        simulated: False: use only the analytic model, which is quick and less exact.

    Raises:
        PlanError: no plan fits; the message describes the closest attempt.
    """
    model = CostModel(request)
    order = _fastest_first(request)
    found = _searched(model, order)
    if len(order) <= NAMED_DEVICES:
        named = [request.named(name) for name in PLANS]
        found += [Found(model_s(model, order, plan), len(order), plan) for plan in named]
    if request.limits.limited:
        found = _that_fit(model, found, order)
    if not simulated or not _simulates(model):
        return [Candidate(each.plan, each.model_s) for each in in_order(found)]
    return _by_simulation(model, found, order)


def quick_candidates(request: PlanRequest, enough: int = 1) -> list[Candidate]:
    """Return up to `enough` plans that fit, by the analytic model: for callers that plan many times.

    If none fits, try plans that free weights after use. If none of these fits either, return an empty list.
    """
    model = CostModel(request)
    order = _fastest_first(request)
    fitting = (Candidate(each.plan, each.model_s) for each in _quick(model, order) if _fits(each.plan, model))
    found = list(itertools.islice(fitting, enough))
    if not found:
        freeing = _freeing_weights(model, order)
        found = [Candidate(each.plan, each.model_s) for each, needs in freeing if not request.limits.excess(needs)]
    return found


def _fastest_first(request: PlanRequest) -> list[int]:
    speeds = request.speeds.devices
    return sorted(range(len(speeds)), key=lambda d: (-speeds[d], d))


def _quick(model: CostModel, order: Sequence[int]) -> list[Found]:
    """Search for the two, four, ... fastest devices, and split the batch by speed over each number of the fastest."""
    request, speeds = model.request, model.request.speeds.devices
    counts = sorted({len(order), *(1 << i for i in range(1, len(order).bit_length()))})
    found = [Found(cost, n, plan) for n in counts for cost, plan in Search(model, order[:n]).run()]
    for count in range(1, len(order) + 1):
        shared = Speeds(tuple(speed if d in order[:count] else 0.0 for d, speed in enumerate(speeds)))
        plan = named_plan("data-by-speed", request.graph, request.batch, shared, request.reduce)
        plan = replace(plan, wire=request.wire, outputs=request.outputs)
        found.append(Found(model_s(model, order, plan), count, plan))
    return in_order(found)


def _simulates(model: CostModel) -> bool:
    return len(model.graph.layers) * model.devices**4 <= SIMULATION_WORK


# --- how many devices -----------------------------------------------------------------------------------------------------


def _searched(model: CostModel, order: Sequence[int]) -> list[Found]:
    """Search plans of the fastest device alone, the two fastest, ...: every number if that is quick, else some.

    Then search with sharded weights for each of these numbers, or only for the best.
    """
    quick = len(order) * len(model.graph.layers) <= SEARCHED_WORK
    counts = list(range(1, len(order) + 1)) if quick else _some_counts(len(order))
    found = [Found(cost, n, plan) for n in counts for cost, plan in Search(model, order[:n]).run()]
    for count in counts if quick else [in_order(found)[0].working]:
        if 1 < count <= DIRECT_DEVICES:  # each sends a shard to each
            shared = Search(model, order[:count], keepers=order[:count]).run()
            found += [Found(cost, count, plan) for cost, plan in shared if plan.sharded]
    return found


def _some_counts(devices: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 9, 13, ... up to a number of devices."""
    counts = [1]
    while counts[-1] < devices:
        counts.append(min(devices, max(counts[-1] + 1, counts[-1] * 3 // 2)))
    return counts


# --- micro-batches --------------------------------------------------------------------------------------------------------


def in_micro_batches(request: PlanRequest) -> tuple[PlanRequest, Candidate] | None:
    """Split a batch that does not fit into micro-batches, by the analytic model.

    Returns:
        the request for one micro-batch with its best plan; None if not even micro-batches of one sample fit.
    """

    def attempt(count: int) -> tuple[PlanRequest, Candidate] | None:
        smaller = request.split(count)
        found = quick_candidates(smaller)
        return (smaller, found[0]) if found else None

    if request.batch == 1 or (least := attempt(request.batch)) is None:
        return None
    counts = (count for count in range(2, request.batch) if request.batch % count == 0)
    fitting = (found for count in counts if (found := attempt(count)) is not None)
    rows = [*itertools.islice(fitting, MORE_MICRO_BATCHES), least]
    return min(rows, key=lambda row: row[0].micro_batches * row[1].step_s)


def _remedy(request: PlanRequest) -> str:
    """Describe the number of micro-batches with which a step fits; empty if there is none."""
    found = in_micro_batches(request)
    if found is None:
        return ""
    (smaller, best), step_s = found, found[1].step_s
    model = CostModel(smaller)
    if _simulates(model):
        step_s = LocalSearch(model).simulated(best.plan).step_s
    return micro_batch_words(request.graph, smaller.micro_batches, smaller.micro_batches * step_s)


# --- memory ---------------------------------------------------------------------------------------------------------------


def _fits(plan: Plan, model: CostModel) -> bool:
    limits = model.request.limits
    return not limits.limited or not limits.excess(_needs(plan, model))


def _needs(plan: Plan, model: CostModel) -> Needs:
    """Return the bytes that a plan needs on each device; an upper limit if that fits."""
    graph, request, itemsize = model.graph, model.request, model.costs.itemsize
    most = most_bytes(model.steps(plan), graph, optimizer=request.optimizer, itemsize=itemsize)
    if not request.limits.excess(most):
        return most
    # The first micro-batch keeps gathered weights. Middle ones never need most.
    kinds = [kind for kind in micro_batches(request.micro_batches if plan.sharded else 1) if kind != "middle"]
    lists = [model.steps(plan, kind) for kind in kinds]
    memory = memory_of_steps(lists, graph, optimizer=request.optimizer, itemsize=itemsize)
    return tuple(row.total_bytes for row in memory)


def _that_fit(model: CostModel, found: Sequence[Found], order: Sequence[int]) -> list[Found]:
    """Return the plans that fit. If the fastest one does not fit, also search plans that save memory.

    Raises:
        PlanError: no plan fits.
    """
    limits = model.request.limits
    lean = model.request.reduce or "ring"  # in a ring, less of a tensor arrives at once than directly
    needs = [(each, _needs(each.plan, model)) for each in in_order(found)]
    for each, need in list(needs):
        if limits.excess(need) and each.plan.reduce == "direct" and lean != "direct":
            plan = replace(each.plan, reduce=lean)
            needs.append((Found(model_s(model, order, plan), each.working, plan), _needs(plan, model)))
    fitting = [each for each, need in needs if not limits.excess(need)]
    if not needs or (fitting and fitting[0] is needs[0][0]):
        return fitting
    largest = sorted(order, key=lambda d: (-limits.bytes_of(d), order.index(d)))
    counts = _some_counts(len(order))
    # Only the set matters, and the first device, which may work alone.
    active = dict.fromkeys((ranking[0], *sorted(ranking[1:n])) for ranking in (order, largest) for n in counts)
    for some in active:
        for keepers in ((), tuple(order)):
            # With many devices, all-to-all shards are a last resort.
            if not (keepers and fitting and len(order) > DIRECT_DEVICES):
                saving = list(_saving_memory(model.with_reduce(lean), some, keepers))
                needs += saving
                fitting += [each for each, need in saving if not limits.excess(need)]
    freeing = _freeing_weights(model, order)
    fitting += [each for each, need in freeing if not limits.excess(need)]
    if not fitting:
        attempts = [need for _, need in [*needs, *freeing]]
        raise PlanError(limits.refusal(model.graph.model, model.batch, attempts, _remedy(model.request)))
    return fitting


def _saving_memory(model: CostModel, active: Sequence[int], keepers: Sequence[int]) -> Iterator[tuple[Found, Needs]]:
    """Yield plans of these devices that save increasing amounts of memory, up to the first that fits.

    Args:
        keepers: devices that may keep shards of weights that others use.
    """
    plain, limits = Search(model, active), model.request.limits
    alone_s = model.samples_s(active[0], model.batch)
    # Shares of an axis are limited to the fraction of one device's total memory that fits on a device.
    alone = Plan("alone", model.graph.fingerprint, model.devices, model.batch, {}, One(active[0]))
    memory = memory_of(alone, model.graph, optimizer=model.request.optimizer, itemsize=model.costs.itemsize)
    everything = max(each.total_bytes for each in memory)
    budget = [limits.bytes_of(d) for d in range(model.devices)]
    price = [0.0] * model.devices
    for attempt in range(MEMORY_ATTEMPTS):
        penalty = MemoryPenalty(tuple(min(1.0, each / everything) for each in budget), tuple(price))
        _, plan = Search(model, active, penalty=penalty, keepers=keepers).run()[0]
        need = _needs(plan, model)
        yield Found(plain.step_s(plan), len(active), plan), need
        excess = limits.excess(need)
        if not excess or len(active) == 1:  # alone there is nothing to split
            return
        for device, over in excess.items():
            price[device] = max(4 * price[device], alone_s / limits.bytes_of(device))
            # First a high price turns copies and whole layers into splits; then smaller shares help.
            if attempt >= MEMORY_ATTEMPTS // 2:
                budget[device] = max(budget[device] - over, budget[device] / 2)


def _freeing_weights(model: CostModel, order: Sequence[int]) -> list[tuple[Found, Needs]]:
    """Return plans that shard all weights and free them after use, with their bytes per device.

    Samples move from overfilled devices to others until the plan fits.
    """
    graph, batch, limits = model.graph, model.batch, model.request.limits
    parts = [min(limits.bytes_of(d), 1e18) if d in order else 0.0 for d in range(model.devices)]
    how = Sharding(apportion(SHARE_UNITS, parts), "free")
    kept = {layer.name: how for layer in graph.layers.values() if can_shard(layer)}
    samples = list(batch_shares(model, order))
    rows: list[tuple[Found, Needs]] = []
    for _ in range(MEMORY_ATTEMPTS if kept and 1 < len(order) <= DIRECT_DEVICES else 0):
        plan = Plan(
            "auto", graph.fingerprint, model.devices, batch, {}, Batch(tuple(samples)), model.reduce,
            wire=model.request.wire, sharded=kept, outputs=model.request.outputs,
        )  # fmt: skip
        steps = [model.steps(plan)]
        memory = memory_of_steps(steps, graph, optimizer=model.request.optimizer, itemsize=model.costs.itemsize)
        need = tuple(each.total_bytes for each in memory)
        rows.append((Found(model_s(model, order, plan), len(order), plan), need))
        excess = limits.excess(need)
        sample_bytes = max(each.activations_bytes / n for each, n in zip(memory, samples, strict=True) if n)
        if not excess or not sample_bytes:
            break
        left = [int(min(batch, max(0.0, (limits.bytes_of(d) - need[d]) / sample_bytes))) for d in range(model.devices)]
        given = {d: min(samples[d], math.ceil(over / sample_bytes)) for d, over in excess.items()}
        if sum(left) < sum(given.values()):
            break
        weights = [n * speed for n, speed in zip(left, model.request.speeds.devices, strict=True)]
        taken = apportion(sum(given.values()), weights, at_most=left)
        samples = [n - given.get(d, 0) + taken[d] for d, n in enumerate(samples)]
    return rows


# --- by simulation --------------------------------------------------------------------------------------------------------


def _by_simulation(model: CostModel, found: Sequence[Found], order: Sequence[int]) -> list[Candidate]:
    """Simulate the best plans, improve them by local search, and return all of them, fastest first."""
    reduces: tuple[Reduce, ...] = ("direct", "ring") if model.request.reduce is None else ()
    local = LocalSearch(model, lambda plan: _fits(plan, model), reduces)
    ordered = in_order(found)
    copies = [each for each in ordered if not each.plan.sharded]
    deep = len(model.graph.layers) > DEEP
    shortlist = copies
    if len(copies) * len(model.graph.layers) > ALL_WORK:
        # The best, and the best of each number of devices: the model is least exact about waiting of many devices.
        best_of = {each.working: each for each in reversed(copies)}
        others = [each for _, each in sorted(best_of.items())]
        # The model is inexact for small batches with short moves and sums, so named plans always take part.
        most_s = FAR * ordered[0].model_s if deep else math.inf
        others += [each for each in copies if each.plan.name != "auto" and each.model_s <= most_s]
        shortlist = copies[:SIMULATED] + [each for each in others if each not in copies[:SIMULATED]]
    # Sharded plans come in addition to the others.
    shortlist += [each for each in ordered if each.plan.sharded][: 1 if deep else SIMULATED_SHARDED]
    rows = [(local.simulated(each.plan).step_s, each.working, each.plan) for each in shortlist]
    if len(model.graph.weighted) <= SHALLOW and model.devices <= 8:
        _, working, plan = min(rows, key=lambda row: row[:2])
        rows += [(s, working, better) for s, better in local.change_strategies(plan, order[:working])]
    different = {
        content(plan): (working, plan) for _, working, plan in sorted(rows, key=lambda row: row[:2], reverse=True)
    }
    for working, plan in list(different.values())[-IMPROVED:][::-1]:
        rows += [(s, working, better) for s, better in local.change_exchanges_and_shares(plan)]
    speeds = model.request.speeds.devices
    for change in (lambda p: local.keep_otherwise(p, speeds), local.move_units):
        _, working, plan = min(rows, key=lambda row: row[:2])
        rows += [(s, working, better) for s, better in change(plan)]
    return [Candidate(plan, step_s) for step_s, _, plan in sorted(rows, key=lambda row: row[:2])]
