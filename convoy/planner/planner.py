"""The planner: a strategy with shares for every layer, and which devices take part, for the shortest predicted step.

Costs -> analytic model (`analytic.py`) -> dynamic programming (`search.py`) for the fastest device alone, the two fastest, ...
-> local search by simulation (`local_search.py`) -> plans. Where a simulation takes long, plans are compared by the analytic
model alone. Plans that do not fit the devices' memory are left out, and where the fastest are among them, the search goes on
with a penalty on memory.
"""

import gc
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from convoy.cost.memory import Room, fewest_passes, memory_of, memory_of_steps, most_bytes
from convoy.errors import PlanError
from convoy.model.graph import Graph
from convoy.plan.lower import lower
from convoy.plan.plan import OutputPlace, Plan
from convoy.plan.presets import PLANS, SHARE_UNITS, Speeds, named_plan
from convoy.plan.size import whole_size
from convoy.plan.steps import Compute
from convoy.plan.strategy import Batch, InShares, One, may_be_in_shares
from convoy.planner.analytic import DIRECT_DEVICES, CostModel, MemoryPenalty
from convoy.planner.load_balance import batch_shares
from convoy.planner.local_search import DEEP, LocalSearch
from convoy.planner.search import Search
from convoy.sharding.comm_dtype import CommDtype
from convoy.sharding.redistribute import Reduce
from convoy.sharding.shares import apportion
from convoy.simulator.simulate import Costs

SHALLOW = 4
"""In nets with more weighted layers only the best plans of the search are simulated, and no strategies are changed."""

SIMULATED = 12
"""So many of the plans that are best by the analytic model are simulated, and the best of each number of devices."""

SHARED = 4
"""So many of those that keep weights in shares."""

IMPROVED = 3
"""Of so many of the best, exchanges and shares are changed."""

SIMULATION_WORK = 300_000
"""A simulation takes time with the layers, and with the messages at a time, each of which shares the wire with all others:
where layers times the fourth power of the devices is more than this, plans are compared by the analytic model."""

NAMED_DEVICES = 16
"""For more devices the named plans are not compared: each is priced by a search over all devices."""

REACH, TRIED, FEWER = 0.25, 3, 0.75
"""Worth autotuning: predicted to take at most so much longer than the best; so many plans, with the best; each with at most
this part of the messages of the one before it."""

FEW = 400
"""For so many devices times layers, every number of devices is searched for."""

MEMORY_ATTEMPTS = 8
"""Attempts to save memory, each at a higher price, for each set of devices."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its predicted step time."""

    plan: Plan
    step_s: float


@dataclass(frozen=True, slots=True)
class _Found:
    """A plan of the search with its seconds by the analytic model, and how many devices take part."""

    model_s: float
    working: int
    plan: Plan


def plan_auto(graph: Graph, batch: int, costs: Costs, room: Room | None = None) -> Plan:
    """The plan with the shortest predicted step; see `candidates`.

    Raises:
        PlanError: no plan fits the devices' memory.
    """
    return candidates(graph, batch, costs, room)[0].plan


def candidates(
    graph: Graph,
    batch: int,
    costs: Costs,
    room: Room | None = None,
    wire: CommDtype = "exact",
    *,
    reduce: Reduce | None = None,
    simulated: bool = True,
    passes: int = 1,
    outputs: OutputPlace = "everywhere",
) -> list[Candidate]:
    """The planner's plans for some numbers of devices, and the named plans; the shortest predicted step first.

    Deterministic: equal times are ordered by fewer devices, then by the order in which they were found. Either all times are
    simulated, or all are of the analytic model.

    Args:
        batch: global batch, in samples.
        costs: measured or modelled times of these layers on these devices, and their network.
        room: memory that plans may fill; None: no limit is known. Plans that overfill a device are left out.
        wire: of all these plans.
        reduce: how all these plans make sums; None: the named ones as they are known for, the others as the planner says.
        simulated: False: all by the analytic model, however few devices and layers there are; quick, and not the best there is.
        passes: so many passes of a batch make a step; the times are those of a pass in the mean.
        outputs: where they are, by all these plans.

    Raises:
        PlanError: no plan fits; the message names the device that lacks least.
    """
    with _uncollected():
        model = CostModel(graph, batch, costs, wire=wire, reduce=reduce, passes=passes, outputs=outputs)
        return _candidates(model, room, reduce, simulated)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's search for cycles, which planning makes none of: it took a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _candidates(model: CostModel, room: Room | None, reduce: Reduce | None, simulated: bool) -> list[Candidate]:
    graph, batch, wire = model.graph, model.batch, model.wire
    speeds = model.solo_speeds()
    order = sorted(range(len(speeds)), key=lambda d: (-speeds[d], d))
    found = _searched(model, order)
    simulates = simulated and len(graph.layers) * len(order) ** 4 <= SIMULATION_WORK
    if simulates:
        found += _searched(model.variant(overlap=1.0), order)
    if len(order) <= NAMED_DEVICES:
        made = (named_plan(name, graph, batch, Speeds(speeds), reduce) for name in PLANS)
        named = [replace(plan, wire=wire, outputs=model.outputs) for plan in made]
        found += [_Found(_model_s(model, order, plan), len(order), plan) for plan in named]
    if room is not None and room.limited:
        found = _fitting(model, found, order, room, lean="ring" if reduce is None else reduce)
    if not simulates:
        return [Candidate(each.plan, each.model_s) for each in _in_order(found)]
    return _simulated(model, found, order, room, reduces=("direct", "ring") if reduce is None else ())


def quick_candidates(
    graph: Graph, batch: int, costs: Costs, room: Room | None = None, *, enough: int = 1, passes: int = 1
) -> list[Candidate]:
    """Some plans that fit, by the analytic model, quickly: for questions that are asked many times.

    The two fastest, the four fastest, ... and all devices are searched, and the batch is split by speed over each number of the
    fastest. Only as many plans are looked at for memory as are asked for; only where none fits, weights are freed after use.

    Args:
        enough: so many plans, the shortest predicted step first; fewer where fewer fit, none where none does.
        passes: as for `candidates`.
    """
    model = CostModel(graph, batch, costs, passes=passes)
    speeds = model.solo_speeds()
    order = sorted(range(len(speeds)), key=lambda d: (-speeds[d], d))
    counts = sorted({len(order), *(1 << i for i in range(1, len(order).bit_length()))})
    found = [_Found(cost, n, plan) for n in counts for cost, plan in Search(model, order[:n]).run()]
    for count in range(1, len(order) + 1):
        shared = Speeds(tuple(speed if d in order[:count] else 0.0 for d, speed in enumerate(speeds)))
        plan = named_plan("data-by-speed", graph, batch, shared)
        found.append(_Found(_model_s(model, order, plan), count, plan))
    fitting: list[Candidate] = []
    for each in _in_order(found):
        if _fits(each.plan, model, room):
            fitting.append(Candidate(each.plan, each.model_s))
        if len(fitting) == enough:
            break
    if not fitting and room is not None:
        freeing = _freeing_weights(model, order, room)
        fitting = [Candidate(each.plan, each.model_s) for each, need in freeing if not room.excess(need)]
    return fitting


def worth_trying(found: Sequence[Candidate], graph: Graph) -> list[Candidate]:
    """The best of some candidates, and those that may turn out better where messages cost more than is predicted.

    That is what predictions err in most: so each of them has clearly fewer messages than those that are predicted to be faster.

    Args:
        found: the shortest predicted step first.
    """
    tried: list[tuple[Candidate, int]] = []
    for each in found:
        if each.step_s > found[0].step_s * (1 + REACH) or len(tried) == TRIED:
            break
        count = _messages(each.plan, graph)
        if not tried or count <= FEWER * tried[-1][1]:
            tried.append((each, count))
    return [each for each, _ in tried]


def _messages(plan: Plan, graph: Graph) -> int:
    """Messages of one step, from all devices."""
    steps = lower(plan, graph).steps
    rounds = [each for step in steps if not isinstance(step, Compute) for each in step.schedule.rounds]
    return sum(transfer.sender != transfer.receiver for each in rounds for transfer in each)


def solo_speeds(graph: Graph, batch: int, costs: Costs, passes: int = 1) -> tuple[float, ...]:
    """Samples/s of each device training alone with the whole batch: their sum is the limit of the fleet."""
    return CostModel(graph, batch, costs, passes=passes).solo_speeds()


def predicted_speeds(graph: Graph, batch: int, costs: Costs) -> Speeds:
    """Samples/s of each device on the whole model and on each weighted layer, as a measurement would give them."""
    layers = {}
    for layer in graph.weighted:
        size = whole_size(layer, batch)
        layers[layer.name] = tuple(
            batch / sum(costs.times.seconds(device, layer, phase, size) for phase in ("forward", "backward"))
            for device in range(costs.network.devices)
        )
    return Speeds(solo_speeds(graph, batch, costs), layers)


def _model_s(model: CostModel, order: Sequence[int], plan: Plan) -> float:
    """Seconds of a plan by the analytic model, with the sums that it has."""
    return Search(model.variant(reduce=plan.collective), order).step_s(plan)


def _in_order(found: Iterable[_Found]) -> list[_Found]:
    return sorted(found, key=lambda each: (each.model_s, each.working))


# --- how many devices ------------------------------------------------------------------------------------------------


def _searched(model: CostModel, order: Sequence[int]) -> list[_Found]:
    """Plans for the fastest device alone, the two fastest, ...: each number where that is quick, else around the best.

    Then the same with weights in shares, where that is cheaper: for each of these numbers, or for the best.
    """
    rows: dict[int, list[_Found]] = {}

    def attempt(count: int) -> float:
        if count not in rows:
            rows[count] = [_Found(cost, count, plan) for cost, plan in Search(model, order[:count]).run()]
        return rows[count][0].model_s

    devices, layers = len(order), len(model.graph.layers)
    _try_counts(devices, layers, attempt)
    counts = sorted(rows) if devices * layers <= FEW else [min(rows, key=lambda n: (attempt(n), n))]
    for count in counts:
        if 1 < count <= DIRECT_DEVICES:  # each sends a share to each
            shared = Search(model, order[:count], keepers=order[:count]).run()
            rows[count] += [_Found(cost, count, plan) for cost, plan in shared if plan.in_shares]
    return [each for count in sorted(rows) for each in rows[count]]


def _try_counts(devices: int, layers: int, attempt: Callable[[int], float]) -> None:
    if devices * layers <= FEW:
        for count in range(1, devices + 1):
            attempt(count)
        return
    tried = sorted({devices, *(1 << i for i in range(devices.bit_length()))})
    best = min(tried, key=lambda count: (attempt(count), count))
    # Between the neighbours of the best there may be a better one: the middle of each gap, while gaps are wide.
    for _ in range(devices.bit_length()):
        place = tried.index(best)
        near = tried[max(0, place - 1) : place + 2]
        between = [(a + b) // 2 for a, b in itertools.pairwise(near) if b - a > max(1, best // 4)]
        if not between:
            return
        tried = sorted({*tried, *between})
        best = min(tried, key=lambda count: (attempt(count), count))


# --- simulation ------------------------------------------------------------------------------------------------------


def _simulated(
    model: CostModel, found: Sequence[_Found], order: Sequence[int], room: Room | None, reduces: tuple[Reduce, ...]
) -> list[Candidate]:
    local = LocalSearch(model, lambda plan: _fits(plan, model, room), reduces)
    copies = [each for each in found if not each.plan.in_shares]
    shortlist = _in_order(copies) if len(copies) * len(model.graph.layers) <= 600 else _shortlist(copies)
    # Beside those that a search without shares would look at, so that none of them is crowded out.
    shared = _in_order(each for each in found if each.plan.in_shares)[
        : SHARED if len(model.graph.layers) <= DEEP else 1
    ]
    rows = [(local.simulated(each.plan).step_s, each.working, each.plan) for each in (*shortlist, *shared)]
    if len(model.graph.weighted) <= SHALLOW and len(order) <= 8:
        best_of = {working: (step_s, plan) for step_s, working, plan in sorted(rows, key=lambda r: r[:2], reverse=True)}
        # With many devices each attempt is dear, and their number is hardly in doubt.
        for working in sorted(best_of, key=lambda w: (best_of[w][0], w))[: 3 if len(order) <= 4 else 1]:
            step_s, plan = local.change_strategies(best_of[working][1], order[:working])
            rows.append((step_s, working, plan))
    for _, working, plan in sorted(rows, key=lambda row: row[:2])[:IMPROVED]:
        rows += [(s, working, better) for s, better in local.change_exchanges_and_shares(plan)]
    speeds = model.solo_speeds()
    for change in (lambda p: local.keep_otherwise(p, speeds), lambda p: local.let_join(p, speeds), local.move_units):
        _, working, plan = min(rows, key=lambda row: row[:2])
        rows += [(s, working, better) for s, better in change(plan)]
    return [Candidate(plan, step_s) for step_s, _, plan in sorted(rows, key=lambda row: row[:2])]


def _shortlist(found: Sequence[_Found]) -> list[_Found]:
    """The best by the analytic model, and the best of each number of devices: the model knows least of what many devices wait
    for, and a small net may train fastest on one."""
    best = _in_order(found)
    of_each = {each.working: each for each in reversed(best)}
    return [*best[:SIMULATED], *(each for _, each in sorted(of_each.items()) if each not in best[:SIMULATED])]


# --- memory ----------------------------------------------------------------------------------------------------------


def _fits(plan: Plan, model: CostModel, room: Room | None) -> bool:
    return room is None or not room.limited or not room.excess(_memory(plan, model, room))


def _memory(plan: Plan, model: CostModel, room: Room) -> tuple[int, ...]:
    """Bytes on each device; where there is plenty of room, more than that."""
    graph, optimizer, itemsize = model.graph, room.optimizer, model.costs.itemsize
    steps = model.steps(plan)
    most = most_bytes(steps, graph, optimizer=optimizer, itemsize=itemsize)
    if not room.excess(most):
        return most
    return tuple(row.total_bytes for row in memory_of_steps(steps, graph, optimizer=optimizer, itemsize=itemsize))


def _fitting(model: CostModel, found: Sequence[_Found], order: Sequence[int], room: Room, lean: Reduce) -> list[_Found]:
    """Of the plans found, those that fit; and where the fastest did not, others that were made to save memory.

    Args:
        lean: how sums are made where memory is short: in a ring less of a tensor arrives at once than directly.
    """
    needs = [(each, _memory(each.plan, model, room)) for each in _in_order(found)]
    for each, need in list(needs):
        if room.excess(need) and each.plan.reduce == "direct" and lean != "direct":
            plan = replace(each.plan, reduce=lean)
            needs.append((_Found(_model_s(model, order, plan), each.working, plan), _memory(plan, model, room)))
    fitting = [each for each, need in needs if not room.excess(need)]
    if not needs or (fitting and fitting[0] is needs[0][0]):
        return fitting
    largest = sorted(order, key=lambda d: (-room.bytes_of(d), order.index(d)))
    tried: list[tuple[int, ...]] = []
    for ranking in (order, largest):
        for count in _few_counts(len(order)):
            # The set decides, and who works alone where one does; who comes second does not.
            active = (ranking[0], *sorted(ranking[1:count]))
            if active not in tried:
                tried.append(active)
                for keepers in ((), tuple(order)):
                    # Of many devices each sends a share to each: only where nothing else fits.
                    if keepers and fitting and len(order) > DIRECT_DEVICES:
                        continue
                    for each, need in _saving_memory(model.variant(reduce=lean), active, room, keepers):
                        needs.append((each, need))
                        if not room.excess(need):
                            fitting.append(each)
    for each, need in _freeing_weights(model, order, room):
        needs.append((each, need))
        if not room.excess(need):
            fitting.append(each)
    if not fitting:

        def fits(batch: int) -> bool:
            return bool(quick_candidates(model.graph, batch, model.costs, room))

        passes = model.passes * (fewest_passes(model.batch, fits) or 0)
        raise PlanError(room.refusal(model.graph.model, model.batch, [need for _, need in needs], passes))
    return fitting


def _freeing_weights(model: CostModel, order: Sequence[int], room: Room) -> list[tuple[_Found, tuple[int, ...]]]:
    """Plans in which all weights are kept in shares and freed after use: what is left on a device is its samples.

    So samples go from the devices that are overfilled to those with room, until it fits or there is none.
    """
    graph, batch = model.graph, model.batch
    parts = [min(room.bytes_of(d), 1e18) if d in order else 0.0 for d in range(model.devices)]
    how = InShares(apportion(SHARE_UNITS, parts), "free")
    kept = {layer.name: how for layer in graph.layers.values() if may_be_in_shares(layer)}
    samples = list(batch_shares(model, order))
    rows: list[tuple[_Found, tuple[int, ...]]] = []
    # Of more devices each would send a share to each.
    for _ in range(MEMORY_ATTEMPTS if kept and 1 < len(order) <= DIRECT_DEVICES else 0):
        plan = Plan(
            "auto", graph.fingerprint, model.devices, batch, {}, Batch(tuple(samples)), model.reduce,
            wire=model.wire, in_shares=kept, outputs=model.outputs,
        )  # fmt: skip
        memory = memory_of_steps(model.steps(plan), graph, optimizer=room.optimizer, itemsize=model.costs.itemsize)
        need = tuple(each.total_bytes for each in memory)
        rows.append((_Found(_model_s(model, order, plan), len(order), plan), need))
        excess = room.excess(need)
        sample_bytes = max(each.activations_bytes / n for each, n in zip(memory, samples, strict=True) if n)
        if not excess or not sample_bytes:
            break
        left = [int(min(batch, max(0.0, (room.bytes_of(d) - need[d]) / sample_bytes))) for d in range(model.devices)]
        given = {d: min(samples[d], math.ceil(over / sample_bytes)) for d, over in excess.items()}
        if sum(left) < sum(given.values()):
            break
        taken = apportion(
            sum(given.values()), [n * s for n, s in zip(left, model.solo_speeds(), strict=True)], at_most=left
        )
        samples = [n - given.get(d, 0) + taken[d] for d, n in enumerate(samples)]
    return rows


def _few_counts(devices: int) -> list[int]:
    """All numbers of devices up to 16; of more, only ever larger steps."""
    counts = list(range(1, min(devices, 16) + 1))
    while counts[-1] < devices:
        counts.append(min(devices, counts[-1] * 3 // 2))
    return counts


def _saving_memory(
    model: CostModel, active: Sequence[int], room: Room, keepers: Sequence[int] = ()
) -> list[tuple[_Found, tuple[int, ...]]]:
    """Plans of these devices that save ever more memory, until one fits.

    Args:
        keepers: devices that may keep shares of weights that others use.
    """
    plain = Search(model, active)
    alone_s = model.samples_s(active[0], model.batch)
    # One device alone keeps everything: shares of an axis are held to what part of that a device has room for.
    alone = Plan("alone", model.graph.fingerprint, model.devices, model.batch, {}, One(active[0]))
    needs = memory_of(alone, model.graph, optimizer=room.optimizer, itemsize=model.costs.itemsize)
    everything = max(each.total_bytes for each in needs)
    budget = [float(room.bytes_of(d)) for d in range(model.devices)]
    price = [0.0] * model.devices
    rows: list[tuple[_Found, tuple[int, ...]]] = []
    for attempt in range(MEMORY_ATTEMPTS):
        parts = tuple(min(1.0, each / everything) for each in budget)
        penalty = MemoryPenalty(parts, tuple(price))
        search = Search(model, active, penalty=penalty, optimizer=room.optimizer, keepers=keepers)
        _, plan = search.run()[0]
        rows.append((_Found(plain.step_s(plan), len(active), plan), _memory(plan, model, room)))
        excess = room.excess(rows[-1][1])
        if not excess or len(active) == 1:  # alone there is nothing to split
            break
        for device, over in excess.items():
            price[device] = max(4 * price[device], alone_s / room.bytes_of(device))
            # A high price turns copies and whole layers into splits; only then do smaller shares of them help.
            if attempt >= MEMORY_ATTEMPTS // 2:
                budget[device] = max(budget[device] - over, budget[device] / 2)
    return rows
