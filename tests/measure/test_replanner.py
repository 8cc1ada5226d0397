"""A job plans again after a loss, with the speeds that rebalancing measured."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from convoy.api import distribute, loader
from convoy.elastic.members import Members
from convoy.measure.job_plans import Replanner
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.presets import AUTO, Speeds, named_plan
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.replan import NewPlan
from convoy.planner.request import PlanRequest
from convoy.simulate.simulator import seconds_by_phase
from convoy.train.controller import Rebalancer
from convoy.train.loop import Training, fit
from convoy.train.rebalance import Balancer, observe, slower
from lab.chaos import TIGHT, Case, make_data, make_net
from tests.support.described_fleets import measured_fleet
from tests.support.losses import Device, with_losses
from tests.support.torch_seed import torch_seed

CASE = Case(seed=4, samples=64)
EXAMPLE = torch.zeros(2, 2, 8, 8, dtype=torch.float64)


def test_a_device_slower_than_measured_is_found() -> None:
    """Device 1 takes three times its measured time in every layer; device 0 is unchanged; device 2 is idle."""
    graph = trace(make_net(), EXAMPLE).graph
    plan = named_plan("data-by-speed", graph, 8, Speeds((1.0, 1.0, 0.0)))
    times = measured_fleet(graph, [1e9, 2e9, 1e9], 8).costs(graph).times
    predicted = seconds_by_phase(lower(plan, graph), graph, times)
    state = Balancer.start(plan, graph)
    assert slower(state, predicted) == {}
    layers = {name: [0.0] * 3 for axes in state.axes for name in axes.layers}
    for device, row in enumerate(predicted):
        for key, seconds in row.items():
            name = key.partition(" ")[2]
            if name in layers:
                layers[name][device] += (1.0, 3.0, 1.0)[device] * seconds
    for _ in range(6):
        state, _ = observe(state, layers)
    assert slower(state, predicted) == pytest.approx({0: 1.0, 1: 3.0})


def test_prepared_plan_is_used_once_for_its_devices_only() -> None:
    graph = trace(make_net(), EXAMPLE).graph
    measured = measured_fleet(graph, [1e9, 2e9, 3e9], CASE.batch)
    speeds = Speeds((1.0, 2.0, 3.0))
    known = FleetKnowledge(measured=measured, ids=(0, 1, 2), speeds=speeds)
    runs = named_plan("data", graph, CASE.batch, Speeds((1.0, 2.0))).named(AUTO)
    model: Any = SimpleNamespace(traced={True: SimpleNamespace(graph=graph)}, plan=runs)
    replan = Replanner(PlanRequest(graph, CASE.batch, known))
    other = NewPlan(named_plan("master", graph, CASE.batch, speeds).named(AUTO), 1.0)
    usual = replan(model, (0, 1), (0, 1, 2))
    assert usual != other.plan
    replan.prepared = runs, (0, 1), (0, 1, 2), speeds, other
    assert replan(model, (0, 1), (0, 1, 2)) == other.plan
    assert replan.message().startswith("new plan: about 1 s")
    assert replan(model, (0, 1), (0, 1, 2)) == usual, "it is taken once"
    for prepared in (
        (usual, (0, 1), (0, 1, 2), speeds, other),
        (runs, (0, 1), (0, 2), speeds, other),
        (runs, (0, 1), (0, 1, 2), Speeds((1.0, 2.0, 9.0)), other),
    ):
        replan.prepared = prepared
        assert replan(model, (0, 1), (0, 1, 2)) == usual


def test_remaining_devices_agree_on_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    graph = trace(make_net(), EXAMPLE).graph
    speeds, measured = Speeds((1.0, 2.0, 3.0)), measured_fleet(graph, [1e9, 2e9, 3e9], CASE.batch)
    request = PlanRequest(graph, CASE.batch, FleetKnowledge(measured=measured, ids=(0, 1, 2), speeds=speeds))
    begins = named_plan("hybrid", graph, CASE.batch, speeds).named(AUTO)

    def train(here: Device | None) -> tuple[list[float], Replanner | None, object]:
        with torch_seed(0):
            net = make_net()
        model = net if here is None else distribute(net, begins, here.group, EXAMPLE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        training = Training(model, optimizer)
        data, part = make_data(CASE), None if here is None else model
        loaders = [loader(data, CASE.batch, part, seed=1), loader(data, 8, part, shuffle=False)]  # type: ignore[arg-type]
        if here is None:
            return fit(training, *loaders, 3).losses, None, None
        rebalancer = Rebalancer(model, optimizer, every=1)  # type: ignore[arg-type]
        replan = Replanner(request, rebalancer)
        here.members = members = Members(model, optimizer, replan=replan)  # type: ignore[arg-type]
        history = fit(training, *loaders, 3, rebalancer=rebalancer, members=members)
        members.close()
        return history.losses, replan, members.generation

    try:
        losses, _, _ = train(None)
        # By then shares have been watched for four steps; from the fifth on they may change, and are watched afresh.
        found = with_losses(monkeypatch, 3, train, {0: (7, 4)})
    finally:
        torch.set_num_threads(threads)
    assert found.keys() == {1, 2}
    first, second = found[1][1], found[2][1]
    assert first is not None
    assert second is not None
    assert first.known == second.known
    assert set(first.known.slower) == {0, 1, 2}
    assert (first.found is None, second.found is None) == (False, True), "the first of them plans"
    assert first.message().startswith("new plan: about ")
    for row in found.values():
        assert row[0] == pytest.approx(losses, rel=TIGHT)
