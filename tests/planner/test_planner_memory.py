"""Plans that fit the devices' memory: cases with arithmetic answers."""

from dataclasses import replace

import pytest

from convoy.errors import PlanError
from convoy.fleet import Fleet
from convoy.layout.collectives import SUMS, Reduce
from convoy.layout.comm_dtype import CommDtype
from convoy.model.graph import Graph
from convoy.model.nets import graph_of
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import PLANS, Speeds, named_plan
from convoy.plan.strategy import Channel, Filter
from convoy.planner.analytic import CostModel
from convoy.planner.planner import candidates, quick_candidates
from convoy.planner.prediction import predict_all
from convoy.planner.request import PlanRequest
from convoy.planner.search import Search
from convoy.simulate.costs import Costs
from convoy.simulate.memory import memory_of, most_bytes
from studies.roofline import roofline_costs
from tests.support.described_fleets import asked, fleet
from tests.support.slow import most_slow
from tests.support.stacks import Stack

# A convolution of little memory before a Linear of 2,048 x 2,048 weights: 16.8 MB, three times over for training: 50.3 MB.
WIDE = Stack((2, 64, 64)).conv(2, 3).pool().flatten().linear(2048).graph()
BATCH = 8


def context_of(fleet: Fleet, graph: Graph = WIDE, batch: int = BATCH, optimizer: str = "sgd-momentum") -> PlanRequest:
    return asked(graph, batch, roofline_costs(fleet), fleet, optimizer=optimizer)


def needs(plan: Plan, graph: Graph = WIDE) -> list[int]:
    return [each.total_bytes for each in memory_of(lower(plan, graph), graph)]


@pytest.mark.parametrize(("reduce", "wire"), [*((each, "exact") for each in SUMS), ("ring", "inexact-bf16")])
@pytest.mark.parametrize("name", PLANS)
def test_the_quick_estimate_of_memory_is_never_too_small(name: str, reduce: Reduce, wire: CommDtype) -> None:
    """An estimate that is too small would let the planner choose a plan that does not fit."""
    for graph in (WIDE, graph_of("resnet:8:16")):
        plan = replace(named_plan(name, graph, 9, Speeds((4.0, 2.0, 0.5)), reduce), wire=wire)
        steps = lower(plan, graph)
        least = [each.total_bytes for each in memory_of(lower(plan, graph), graph)]
        assert all(a >= b for a, b in zip(most_bytes(steps, graph), least, strict=True))


def test_only_a_split_of_the_big_layer_fits() -> None:
    """Neither device holds 50 MB; together they hold 60. Plans that copy the Linear or leave it whole are out."""
    tight = context_of(fleet((1e11, 30_000_000), (5e10, 30_000_000)))
    free = candidates(asked(WIDE, BATCH, tight.costs))[0].plan
    assert max(needs(free)) > 30_000_000  # by speed two thirds of the Linear
    plan = candidates(tight)[0].plan
    assert max(needs(plan)) <= 30_000_000
    assert isinstance(plan.layers["4"], Filter | Channel)
    plan.check(WIDE, 2)


# --- weights in shares -----------------------------------------------------------------------------------------------


def heavy() -> Graph:
    """Six convolutions, each with 9.4 MB of weights and as much of what it makes as 33.5 MB: of the weights a device has to
    keep the least by shares, of what is made by samples."""
    stack = Stack((256, 16, 16))
    for _ in range(6):
        stack = stack.conv(512, 3)
    return stack.pool().flatten().linear(4).graph()


@pytest.mark.parametrize("limit_mb", most_slow(1, [220, 160]))
def test_weights_are_freed_after_use_if_nothing_else_fits(limit_mb: int) -> None:
    """160 MB are little more than an even fourth of the samples needs: fast devices give samples away."""
    graph = heavy()
    tight = context_of(fleet(*[(rate, limit_mb * 10**6) for rate in (1e11, 8e10, 6e10, 6e10)]), graph, 64)
    plan = candidates(tight)[0].plan
    assert {how.form for how in plan.sharded.values()} == {"free"}
    assert max(needs(plan, graph)) <= limit_mb * 10**6
    keeping = {name: replace(how, form="keep") for name, how in plan.sharded.items()}
    others = [replace(plan, sharded={}), replace(plan, sharded=keeping)]
    others += [named_plan(name, graph, 64, tight.speeds) for name in PLANS]
    assert all(max(needs(other, graph)) > limit_mb * 10**6 for other in others)


def test_quick_plans_free_weights_if_nothing_else_fits() -> None:
    graph = heavy()
    tight = context_of(fleet(*[(1e11, 200 * 10**6)] * 4), graph, 64)
    (found,) = quick_candidates(tight)
    assert {how.form for how in found.plan.sharded.values()} == {"free"}
    assert max(needs(found.plan, graph)) <= 200 * 10**6


def test_net_that_fits_nowhere_is_refused_with_sizes() -> None:
    small = context_of(fleet((1e11, 10_000_000), (5e10, 12_000_000)))
    with pytest.raises(PlanError) as refused:
        candidates(small)
    text = str(refused.value)
    assert "d0 needs" in text or "d1 needs" in text
    assert "of 10 MB" in text or "of 12 MB" in text
    assert "smaller batch" in text
    assert "memory_bytes" in text


def test_optimizer_state_counts_as_memory() -> None:
    """64 MB are more than three times the weights, for sgd with momentum, and less than four times, for adam."""
    one = fleet((1e11, 58_000_000))
    assert candidates(context_of(one))[0].plan.devices == 1
    adam = context_of(one, optimizer="adam")
    with pytest.raises(PlanError, match="d0 needs"):
        candidates(adam)


def test_named_plans_that_do_not_fit_are_marked() -> None:
    predicted, _ = predict_all(context_of(fleet((1e11, 30_000_000), (5e10, 30_000_000))))
    rows = {row.plan.name: row for row in predicted}
    assert rows["data"].overfull
    assert rows["data"].overfull[0].startswith("d0 needs 59.4 MB of 30 MB")
    assert not rows["model"].overfull
    assert not rows["auto"].overfull


# --- planning by the analytic model ----------------------------------------------------------------------------------


def many(count: int) -> tuple[Graph, Costs]:
    """Return a net and a fleet that the analytic model plans."""
    graph = Stack((3, 16, 16)).conv(32, 3).pool().conv(64, 3).pool().flatten().linear(64).linear(10).graph()
    return graph, roofline_costs(fleet(*((1e10 * (1 + i % 5), None) for i in range(count))))


def test_a_large_fleet_is_planned_by_the_analytic_model_and_the_plan_fits() -> None:
    graph, costs = many(100)
    first, again = candidates(asked(graph, 800, costs)), candidates(asked(graph, 800, costs))
    assert first == again
    assert [each.step_s for each in first] == sorted(each.step_s for each in first)
    for each in first:
        each.plan.check(graph, 100)


def test_the_analytic_model_prices_the_plans_that_it_found() -> None:
    """The search's sum equals the walk over the finished plan."""
    graph, costs = many(6)
    search = Search(CostModel(asked(graph, 48, costs)), (4, 3, 2))
    for each in search.run():
        assert search.step_s(each.plan) == pytest.approx(each.step_s, rel=1e-12)
