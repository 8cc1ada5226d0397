"""The planner: strategies, shares and participating devices for the shortest predicted step.

Costs -> analytic model (`analytic.py`) -> dynamic programming (`search.py`) for the fastest device alone, the two fastest, ...
-> plans that fit into memory (`memory.py`) -> the best of them, simulated and improved by local search (`local_search.py`).
Where a simulation takes long, the analytic model alone compares the plans.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from convoy.layout.redistribute import Reduce
from convoy.plan.plan import Plan
from convoy.plan.presets import PLANS, Speeds, named_plan
from convoy.planner.analytic import DIRECT_DEVICES, CostModel, content
from convoy.planner.local_search import DEEP, LocalSearch
from convoy.planner.memory import fits, freeing_weights, that_fit
from convoy.planner.request import PlanRequest
from convoy.planner.search import Found, Search, in_order, model_s
from convoy.simulate.memory import passes_words

SIMULATION_WORK = 300_000
"""Limit on layers times devices^4 for simulation. Its time grows with the layers, and with the messages in flight, each of
which shares the wire with all others."""

NAMED_DEVICES = 16
"""Named plans are compared up to this number of devices: each is priced by a search over all of them."""

SEARCHED_WORK = 400
"""Up to this many devices times layers, every number of devices is searched."""

SHALLOW = 4
"""In nets with more weighted layers only the best plans of the search are simulated, and strategies stay as they are."""

SIMULATED, SIMULATED_SHARDED = 12, 4
"""Simulated: the best plans by the analytic model, and of these with sharded weights."""

FAR = 3.0
"""In nets with more than `DEEP` layers, a named plan is simulated only if the analytic model predicts at most this multiple
of the best time: simulating a plan that sends every tensor takes longest."""

IMPROVED = 3
"""Local search changes exchanges and shares of this many plans."""

MORE_MICRO_BATCHES = 3
"""The smallest numbers of micro-batches that fit are compared: with a few more, a faster plan may fit."""


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

    The order is deterministic: equal times are ordered by fewer devices, then as they were found. Either all times are
    simulated, or all are of the analytic model. Of deep nets, named plans are left out that are clearly slower.

    Args:
        simulated: False: use the analytic model alone, which is quick and less exact.

    Raises:
        PlanError: no plan fits; the message names the device that lacks least.
    """
    model = CostModel(request)
    speeds = request.speeds.devices
    order = _fastest_first(speeds)
    found = _searched(model, order)
    simulates = simulated and _simulates(model)
    if simulates:
        found += _searched(model.variant(overlap=1.0), order)
    if len(order) <= NAMED_DEVICES:
        named = [request.named(name) for name in PLANS]
        found += [Found(model_s(model, order, plan), len(order), plan) for plan in named]
    if request.room.limited:
        found = that_fit(model, found, order, lambda: _remedy(request))
    if not simulates:
        return [Candidate(each.plan, each.model_s) for each in in_order(found)]
    return _by_simulation(model, found, order)


def quick_candidates(request: PlanRequest, enough: int = 1) -> list[Candidate]:
    """Return up to `enough` plans that fit, by the analytic model: for questions that are asked many times.

    If none fits, plans that free weights after use are tried. If none of these fits either, the list is empty.
    """
    model = CostModel(request)
    order = _fastest_first(request.speeds.devices)
    fitting = (Candidate(each.plan, each.model_s) for each in _quick(model, order) if fits(each.plan, model))
    found = list(itertools.islice(fitting, enough))
    if not found:
        freeing = freeing_weights(model, order)
        found = [Candidate(each.plan, each.model_s) for each, need in freeing if not request.room.excess(need)]
    return found


def _fastest_first(speeds: Sequence[float]) -> list[int]:
    return sorted(range(len(speeds)), key=lambda d: (-speeds[d], d))


def _quick(model: CostModel, order: Sequence[int]) -> list[Found]:
    """Search for the two, four, ... fastest devices, and split the batch by speed over each number of the fastest."""
    request, speeds = model.request, model.request.speeds.devices
    counts = sorted({len(order), *(1 << i for i in range(1, len(order).bit_length()))})
    found = [Found(cost, n, plan) for n in counts for cost, plan in Search(model, order[:n]).run()]
    for count in range(1, len(order) + 1):
        shared = Speeds(tuple(speed if d in order[:count] else 0.0 for d, speed in enumerate(speeds)))
        plan = named_plan("data-by-speed", request.graph, request.batch, shared, request.sums)
        plan = replace(plan, wire=request.wire, outputs=request.outputs)
        found.append(Found(model_s(model, order, plan), count, plan))
    return in_order(found)


def _simulates(model: CostModel) -> bool:
    return len(model.graph.layers) * model.devices**4 <= SIMULATION_WORK


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


def memory_slows(request: PlanRequest) -> bool:
    """Return whether the plan that would be fastest does not fit."""
    if not request.room.limited:
        return False
    model = CostModel(request)
    return not fits(_quick(model, _fastest_first(request.speeds.devices))[0].plan, model)


def _remedy(request: PlanRequest) -> str:
    """Say with how many micro-batches a step fits; empty if with none."""
    found = in_micro_batches(request)
    if found is None:
        return ""
    (smaller, best), step_s = found, found[1].step_s
    model = CostModel(smaller)
    if _simulates(model):
        step_s = LocalSearch(model).simulated(best.plan).step_s
    return passes_words(request.graph, smaller.micro_batches, smaller.micro_batches * step_s)


# --- how many devices -----------------------------------------------------------------------------------------------------


def _searched(model: CostModel, order: Sequence[int]) -> list[Found]:
    """Search for plans of the fastest device alone, the two fastest, ...: each number if that is quick, else around the best.

    Then search with sharded weights: for each of these numbers, or for the best.
    """
    rows: dict[int, list[Found]] = {}

    def attempt(count: int) -> float:
        if count not in rows:
            rows[count] = [Found(cost, count, plan, model.overlap) for cost, plan in Search(model, order[:count]).run()]
        return rows[count][0].model_s

    devices, quick = len(order), len(order) * len(model.graph.layers) <= SEARCHED_WORK
    if quick:
        for count in range(1, devices + 1):
            attempt(count)
    else:
        _narrow(devices, attempt)
    counts = sorted(rows) if quick else [min(rows, key=lambda n: (attempt(n), n))]
    for count in counts:
        if 1 < count <= DIRECT_DEVICES:  # each sends a shard to each
            shared = Search(model, order[:count], keepers=order[:count]).run()
            rows[count] += [Found(cost, count, plan, model.overlap) for cost, plan in shared if plan.sharded]
    return [each for count in sorted(rows) for each in rows[count]]


def _narrow(devices: int, attempt: Callable[[int], float]) -> None:
    """Try powers of two, then the middle of each gap beside the best, while gaps are wide."""
    tried = sorted({devices, *(1 << i for i in range(devices.bit_length()))})
    best = min(tried, key=lambda count: (attempt(count), count))
    for _ in range(devices.bit_length()):
        place = tried.index(best)
        near = tried[max(0, place - 1) : place + 2]
        between = [(a + b) // 2 for a, b in itertools.pairwise(near) if b - a > max(1, best // 4)]
        if not between:
            return
        tried = sorted({*tried, *between})
        best = min(tried, key=lambda count: (attempt(count), count))


# --- by simulation --------------------------------------------------------------------------------------------------------


def _by_simulation(model: CostModel, found: Sequence[Found], order: Sequence[int]) -> list[Candidate]:
    """Simulate the best plans found, improve them by local search, and return all of them, the fastest first."""
    reduces: tuple[Reduce, ...] = ("direct", "ring") if model.request.sums is None else ()
    local = LocalSearch(model, lambda plan: fits(plan, model), reduces)
    copies = [each for each in found if not each.plan.sharded]
    shortlist = in_order(copies) if len(copies) * len(model.graph.layers) <= 600 else _shortlist(copies, SIMULATED)
    # The model is inexact for small batches, where moves and sums are short, so named plans must not be crowded out.
    deep = len(model.graph.layers) > DEEP
    most_s = FAR * min(each.model_s for each in found if not each.overlap) if deep else math.inf
    shortlist += [e for e in copies if e.plan.name != "auto" and e not in shortlist and e.model_s <= most_s]
    # Plans with sharded weights come in addition, so that they crowd out none without.
    sharded = _shortlist([each for each in found if each.plan.sharded], 1 if deep else SIMULATED_SHARDED)
    rows = [(local.simulated(each.plan).step_s, each.working, each.plan) for each in (*shortlist, *sharded)]
    if len(model.graph.weighted) <= SHALLOW and len(order) <= 8:
        best_of = {working: (step_s, plan) for step_s, working, plan in sorted(rows, key=lambda r: r[:2], reverse=True)}
        # With many devices each attempt takes long, and their number is hardly in doubt.
        for working in sorted(best_of, key=lambda w: (best_of[w][0], w))[: 3 if len(order) <= 4 else 1]:
            step_s, plan = local.change_strategies(best_of[working][1], order[:working])
            rows.append((step_s, working, plan))
    different = {
        content(plan): (working, plan) for _, working, plan in sorted(rows, key=lambda row: row[:2], reverse=True)
    }
    for working, plan in list(different.values())[-IMPROVED:][::-1]:
        rows += [(s, working, better) for s, better in local.change_exchanges_and_shares(plan)]
    speeds = model.request.speeds.devices
    for change in (lambda p: local.keep_otherwise(p, speeds), lambda p: local.let_join(p, speeds), local.move_units):
        _, working, plan = min(rows, key=lambda row: row[:2])
        rows += [(s, working, better) for s, better in change(plan)]
    return [Candidate(plan, step_s) for step_s, _, plan in sorted(rows, key=lambda row: row[:2])]


def _shortlist(found: Sequence[Found], most: int) -> list[Found]:
    """Return the best of each overlap, and of `SIMULATED` plans the best of each number of devices, too.

    The model is least exact about what many devices wait for, and a small net may train fastest on one.
    """
    rows: list[Found] = []
    overlaps = sorted({each.overlap for each in found})
    for overlap in overlaps:
        best = in_order(each for each in found if each.overlap == overlap)
        few = -(-most // len(overlaps))
        of_each = {each.working: each for each in reversed(best)} if most == SIMULATED else {}
        rows += [*best[:few], *(each for _, each in sorted(of_each.items()) if each not in best[:few])]
    return rows
