"""The planner: a strategy with shares for every layer, and which devices take part, for the shortest predicted step.

Costs -> analytic model (`analytic.py`) -> dynamic programming (`search.py`) for the fastest device alone, the two fastest, ...
(`counts.py`) -> those that fit the devices' memory (`memory.py`) -> the best, simulated and corrected by local search
(`by_simulation.py`, `local_search.py`) -> plans. Where a simulation takes long, plans are compared by the analytic model alone.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

from convoy.layout.comm_dtype import CommDtype
from convoy.layout.redistribute import Reduce
from convoy.model.graph import Graph
from convoy.plan.plan import OutputPlace, Plan
from convoy.plan.presets import PLANS, Speeds, named_plan
from convoy.planner.analytic import CostModel
from convoy.planner.by_simulation import by_simulation
from convoy.planner.counts import searched
from convoy.planner.found import Candidate, Found, in_order, model_s
from convoy.planner.local_search import LocalSearch
from convoy.planner.memory import fits, freeing_weights, that_fit
from convoy.planner.search import Search
from convoy.simulate.memory import Room, passes_words
from convoy.simulate.simulate import Costs

SIMULATION_WORK = 300_000
"""A simulation takes time with the layers, and with the messages at a time, each of which shares the wire with all others:
where layers times the fourth power of the devices is more than this, plans are compared by the analytic model."""

NAMED_DEVICES = 16
"""For more devices the named plans are not compared: each is priced by a search over all devices."""


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

    Of deep nets, named plans are left out that by the analytic model take several times as long as the best.

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
    found = searched(model, order)
    simulates = simulated and _simulates(model)
    if simulates:
        found += searched(model.variant(overlap=1.0), order)
    if len(order) <= NAMED_DEVICES:
        made = (named_plan(name, graph, batch, Speeds(speeds), reduce) for name in PLANS)
        named = [replace(plan, wire=wire, outputs=model.outputs) for plan in made]
        found += [Found(model_s(model, order, plan), len(order), plan) for plan in named]
    if room is not None and room.limited:

        def in_passes() -> str:
            some = quick_in_passes(model, room, reduce)
            if some is None:
                return ""
            (passes, best), step_s = some, some[1].step_s
            if _simulates(model):
                part = CostModel(
                    graph, best.plan.batch, model.costs, wire=wire, reduce=reduce, passes=passes, outputs=model.outputs
                )
                step_s = LocalSearch(part).simulated(best.plan).step_s
            return passes_words(graph, passes, passes * step_s)

        found = that_fit(model, found, order, room, "ring" if reduce is None else reduce, in_passes)
    if not simulates:
        return [Candidate(each.plan, each.model_s) for each in in_order(found)]
    return by_simulation(model, found, order, room, reduces=("direct", "ring") if reduce is None else ())


def _simulates(model: CostModel) -> bool:
    return len(model.graph.layers) * model.devices**4 <= SIMULATION_WORK


def quick_candidates(
    graph: Graph,
    batch: int,
    costs: Costs,
    room: Room | None = None,
    wire: CommDtype = "exact",
    *,
    enough: int = 1,
    reduce: Reduce | None = None,
    passes: int = 1,
    outputs: OutputPlace = "everywhere",
) -> list[Candidate]:
    """Some plans that fit, by the analytic model, quickly: for questions that are asked many times.

    The two fastest, the four fastest, ... and all devices are searched, and the batch is split by speed over each number of the
    fastest. Only as many plans are looked at for memory as are asked for; only where none fits, weights are freed after use.

    Args:
        enough: so many plans, the shortest predicted step first; fewer where fewer fit, none where none does.
        wire, reduce, passes, outputs: as for `candidates`.
    """
    model = CostModel(graph, batch, costs, wire=wire, reduce=reduce, passes=passes, outputs=outputs)
    speeds = model.solo_speeds()
    order = sorted(range(len(speeds)), key=lambda d: (-speeds[d], d))
    counts = sorted({len(order), *(1 << i for i in range(1, len(order).bit_length()))})
    found = [Found(cost, n, plan) for n in counts for cost, plan in Search(model, order[:n]).run()]
    for count in range(1, len(order) + 1):
        shared = Speeds(tuple(speed if d in order[:count] else 0.0 for d, speed in enumerate(speeds)))
        plan = replace(named_plan("data-by-speed", graph, batch, shared, reduce), wire=wire, outputs=outputs)
        found.append(Found(model_s(model, order, plan), count, plan))
    fitting: list[Candidate] = []
    for each in in_order(found):
        if fits(each.plan, model, room):
            fitting.append(Candidate(each.plan, each.model_s))
        if len(fitting) == enough:
            break
    if not fitting and room is not None:
        freeing = freeing_weights(model, order, room)
        fitting = [Candidate(each.plan, each.model_s) for each, need in freeing if not room.excess(need)]
    return fitting


MORE_PASSES = 3
"""Beside the fewest passes that fit so many numbers of passes in all are compared: in a few more, a faster plan may fit."""


def quick_in_passes(model: CostModel, room: Room | None, reduce: Reduce | None = None) -> tuple[int, Candidate] | None:
    """In how many passes a step is best made where one does not fit, and the best plan of such a pass, by the analytic model.

    Args:
        model: of a step in one pass, or of one of several, which are to become more.
        reduce: as for `candidates`.

    Returns:
        the number of all passes of the step, equal ones; None where not even passes of a sample fit.
    """
    batch = model.batch

    def found(parts: int) -> Candidate | None:
        some = quick_candidates(
            model.graph, batch // parts, model.costs, room, model.wire, reduce=reduce, passes=model.passes * parts,
            outputs=model.outputs,
        )  # fmt: skip
        return some[0] if some else None

    if batch == 1 or (least := found(batch)) is None:
        return None
    counts = (parts for parts in range(2, batch) if batch % parts == 0)
    fitting = ((model.passes * parts, each) for parts in counts if (each := found(parts)) is not None)
    rows = [*islice(fitting, MORE_PASSES), (model.passes * batch, least)]
    return min(rows, key=lambda row: row[0] * row[1].step_s)
