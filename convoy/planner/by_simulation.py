"""The best of the plans that were found, by simulation, and what local search makes of them."""

import math
from collections.abc import Sequence

from convoy.layout.redistribute import Reduce
from convoy.planner.analytic import CostModel, content
from convoy.planner.found import Candidate, Found, in_order
from convoy.planner.local_search import DEEP, LocalSearch
from convoy.planner.memory import fits
from convoy.simulate.memory import Room

SHALLOW = 4
"""In nets with more weighted layers only the best plans of the search are simulated, and no strategies are changed."""

SIMULATED = 12
"""So many of the plans that are best by the analytic model are simulated, and the best of each number of devices."""

SHARED = 4
"""So many of those that keep weights in shares."""

FAR = 3.0
"""Of nets with more than `DEEP` layers, a named plan is replayed if by the analytic model it takes at most so many times as
long as the best: a replay of a plan that sends every tensor takes the longest of all."""

IMPROVED = 3
"""Of so many of the best, exchanges and shares are changed."""


def by_simulation(
    model: CostModel, found: Sequence[Found], order: Sequence[int], room: Room | None, reduces: tuple[Reduce, ...]
) -> list[Candidate]:
    """Candidates, the shortest simulated step first: the best of those that were found, and what was made of them."""
    local = LocalSearch(model, lambda plan: fits(plan, model, room), reduces)
    copies = [each for each in found if not each.plan.in_shares]
    shortlist = in_order(copies) if len(copies) * len(model.graph.layers) <= 600 else _shortlist(copies)
    # The model knows little of small batches, where moves and sums are short: a named plan is not crowded out.
    deep = len(model.graph.layers) > DEEP
    most_s = FAR * min(each.model_s for each in found if not each.overlap) if deep else math.inf
    shortlist += [e for e in copies if e.plan.name != "auto" and e not in shortlist and e.model_s <= most_s]
    # Beside those that a search without shares would look at, so that none of them is crowded out.
    in_shares = [each for each in found if each.plan.in_shares]
    shared = _shortlist(in_shares, SHARED if len(model.graph.layers) <= DEEP else 1)
    rows = [(local.simulated(each.plan).step_s, each.working, each.plan) for each in (*shortlist, *shared)]
    if len(model.graph.weighted) <= SHALLOW and len(order) <= 8:
        best_of = {working: (step_s, plan) for step_s, working, plan in sorted(rows, key=lambda r: r[:2], reverse=True)}
        # With many devices each attempt is dear, and their number is hardly in doubt.
        for working in sorted(best_of, key=lambda w: (best_of[w][0], w))[: 3 if len(order) <= 4 else 1]:
            step_s, plan = local.change_strategies(best_of[working][1], order[:working])
            rows.append((step_s, working, plan))
    different = {
        content(plan): (working, plan) for _, working, plan in sorted(rows, key=lambda row: row[:2], reverse=True)
    }
    for working, plan in list(different.values())[-IMPROVED:][::-1]:
        rows += [(s, working, better) for s, better in local.change_exchanges_and_shares(plan)]
    speeds = model.solo_speeds()
    for change in (lambda p: local.keep_otherwise(p, speeds), lambda p: local.let_join(p, speeds), local.move_units):
        _, working, plan = min(rows, key=lambda row: row[:2])
        rows += [(s, working, better) for s, better in change(plan)]
    return [Candidate(plan, step_s) for step_s, _, plan in sorted(rows, key=lambda row: row[:2])]


def _shortlist(found: Sequence[Found], most: int = SIMULATED) -> list[Found]:
    """The best by the analytic model of each overlap, and the best of each number of devices: it knows least of what many
    devices wait for, and a small net may train fastest on one."""
    rows: list[Found] = []
    overlaps = sorted({each.overlap for each in found})
    for overlap in overlaps:
        best = in_order(each for each in found if each.overlap == overlap)
        few = -(-most // len(overlaps))
        of_each = {each.working: each for each in reversed(best)} if most == SIMULATED else {}
        rows += [*best[:few], *(each for _, each in sorted(of_each.items()) if each not in best[:few])]
    return rows
