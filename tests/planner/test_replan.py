"""Plans for devices other than those a run started with."""

from dataclasses import replace

import pytest
import torch

from convoy.errors import MismatchError
from convoy.model.graph import Graph
from convoy.model.tracing import trace
from convoy.plan.coupling import plan_for
from convoy.plan.device_program import whole_size
from convoy.plan.plan import Plan
from convoy.plan.presets import AUTO, PLANS, Speeds, named_plan
from convoy.plan.strategy import Batch
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.prediction import predict_plan
from convoy.planner.replan import BETTER, replanned, with_joining_device
from convoy.planner.request import PlanRequest
from convoy.simulate.table import Measurement
from tests.support.described_fleets import measured_fleet
from tests.support.nets import TwoConv

BATCH = 48


@pytest.fixture(scope="module")
def graph() -> Graph:
    return trace(TwoConv(16, 24), torch.zeros(2, 3, 8, 8)).graph


def known(graph: Graph, *flop_per_s: float, link: float = 1e9, **memory: int) -> FleetKnowledge:
    measured = measured_fleet(graph, flop_per_s, BATCH, memory_bytes=memory, link_bytes_per_s=link)
    return FleetKnowledge(measured=measured, ids=tuple(range(len(flop_per_s))), speeds=Speeds(flop_per_s))


def by_speeds(*speeds: float) -> FleetKnowledge:
    return FleetKnowledge(ids=tuple(range(len(speeds))), speeds=Speeds(speeds))


def joining(speed: float, measured: Measurement) -> FleetKnowledge:
    return FleetKnowledge(measured=measured, ids=(0,), speeds=Speeds((speed,)))


def request(of: FleetKnowledge, graph: Graph, name: str | None = AUTO) -> PlanRequest:
    return PlanRequest(graph, BATCH, of, name)


def some_of(of: FleetKnowledge, graph: Graph, ids: list[int]) -> PlanRequest:
    fleet = of.of(ids)
    assert fleet is not None
    return request(fleet, graph)


def by_speed(graph: Graph, *speeds: float) -> Plan:
    return named_plan("data-by-speed", graph, BATCH, Speeds(speeds)).named(AUTO)


def predicted_s(of: FleetKnowledge, graph: Graph, plan: Plan, ids: list[int]) -> float:
    return predict_plan(plan, some_of(of, graph, ids)).step_s


def test_losing_the_fastest_device_can_change_the_plan(graph: Graph) -> None:
    """Two slow distant devices helped a fast one; alone, over their slow link, one of them does everything."""
    of = known(graph, 1e9, 1e8, 1e8, link=1e4)
    old = by_speed(graph, 8, 2, 2)
    found = replanned(request(of, graph), old, (0, 1, 2), (1, 2))
    same = plan_for(old, graph, [1, 2])
    assert found.plan.devices == 2
    assert found.step_s is not None
    assert found.step_s <= BETTER * predicted_s(of, graph, same, [1, 2])
    assert found.step_s == predicted_s(of, graph, found.plan, [1, 2])
    assert found.plan.otherwise != same.otherwise


def test_the_running_plan_stays_unless_another_is_clearly_faster(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moving one sample to the other device would save 4 %."""
    of = known(graph, 1e9, 1e9, 1e9)
    runs = replace(by_speed(graph, 1, 1, 1), otherwise=Batch((15, 16, 17)))
    same = plan_for(runs, graph, [0, 2])
    for better, stays in ((0.9, True), (0.98, False)):
        monkeypatch.setattr("convoy.planner.replan.BETTER", better)
        assert (replanned(request(of, graph), runs, (0, 1, 2), (0, 2)).plan == same) == stays


def test_knowledge_sent_to_another_device_gives_the_same_plan(graph: Graph) -> None:
    of = known(graph, 1e9, 3e8, 2e8, 1e8).corrected({2: 1.7})
    other = FleetKnowledge.from_json(of.to_json())
    assert other == of
    old = by_speed(graph, 8, 4, 2, 2)
    assert replanned(request(of, graph), old, range(4), (0, 2, 3)) == replanned(
        request(other, graph), old, range(4), (0, 2, 3)
    )


def test_measured_slowdowns_count(graph: Graph) -> None:
    """Both were measured equal, one turned out four times as slow: it gets a fifth, not a half."""
    of = known(graph, 1e9, 1e9, 1e9).corrected({2: 4.0})
    found = replanned(request(of, graph), by_speed(graph, 1, 1, 1), (0, 1, 2), (1, 2))
    assert isinstance(found.plan.otherwise, Batch)
    assert found.plan.otherwise.shares[1] in range(BATCH // 5 - 2, BATCH // 5 + 3)
    first, second = (
        replanned(request(of, graph), by_speed(graph, 1, 1, 1), (0, 1, 2), ids) for ids in ((0, 1), (1, 2))
    )
    assert first.step_s is not None
    assert second.step_s is not None
    assert second.step_s > 1.3 * first.step_s


@pytest.mark.parametrize("name", PLANS)
def test_named_plan_is_rebuilt_when_devices_change(graph: Graph, name: str) -> None:
    speeds = Speeds((1.0, 4.0, 2.0), {"conv1": (1.0, 3.0, 5.0)})
    of = FleetKnowledge(ids=(0, 1, 2), speeds=speeds)
    old = named_plan(name, graph, BATCH, speeds)
    found = replanned(request(of, graph, name), old, (0, 1, 2), (0, 2))
    assert found.plan == named_plan(name, graph, BATCH, Speeds((1.0, 2.0), {"conv1": (1.0, 5.0)}))
    assert found.step_s is None
    more = of.with_device(3, FleetKnowledge(speeds=Speeds((8.0,), {"conv1": (2.0,)})))
    grown = replanned(request(more, graph, name), found.plan, (0, 2), (0, 2, 3))
    assert grown.plan == named_plan(name, graph, BATCH, Speeds((1.0, 2.0, 8.0), {"conv1": (1.0, 5.0, 2.0)}))


def test_unmeasured_joining_devices_get_an_average_share(graph: Graph) -> None:
    of = by_speeds(1.0, 3.0)
    old = by_speed(graph, 1, 3)
    assert replanned(request(of, graph, None), old, (0, 1), (0, 1, 2)).plan.otherwise == Batch((8, 24, 16))
    more = of.with_device(2, by_speeds(8.0))
    assert replanned(request(more, graph, None), old, (0, 1), (0, 1, 2)).plan.otherwise == Batch((4, 12, 32))
    assert with_joining_device(request(of, graph, None), old, (0, 1), 2)[1] is None


def test_joining_device_gets_work_if_the_fleet_gains(graph: Graph) -> None:
    of = known(graph, 1e8, 1e8)
    came = measured_fleet(graph, [2e8], BATCH, ["d1"])  # a name that is taken
    more = of.with_device(7, joining(2.0, replace(came, fleet=replace(came.fleet, network=None))))
    old = by_speed(graph, 1, 1)
    found = replanned(request(more, graph), old, (0, 1), (0, 1, 7))
    assert isinstance(found.plan.otherwise, Batch)
    assert found.plan.otherwise.shares == (12, 12, 24)
    _, gain = with_joining_device(request(more, graph), old, (0, 1), 7)
    assert gain is not None
    assert 1.5 < gain < 2.1
    back = replanned(request(more, graph), found.plan, (0, 1, 7), (1, 7))
    assert isinstance(back.plan.otherwise, Batch)
    assert back.plan.otherwise.shares == (16, 32)


def test_returning_device_keeps_its_last_measurement(graph: Graph) -> None:
    of = known(graph, 1e9, 1e9).corrected({0: 3.0})
    again = of.with_device(0, joining(5e8, measured_fleet(graph, [5e8], BATCH, ["d0"])))
    assert again.ids == (1, 0)
    assert again.speeds == Speeds((1e9, 5e8))
    assert again.slower == {}
    times, size = some_of(again, graph, [0, 1]).costs.times, whole_size(graph["conv1"], BATCH)
    seconds = [times.seconds(device, graph["conv1"], "forward", size) for device in (0, 1)]
    assert seconds[0] / seconds[1] == pytest.approx(2.0)


def test_another_model_is_refused(graph: Graph) -> None:
    of = known(graph, 1e9, 1e9)
    assert of.measured is not None
    with pytest.raises(MismatchError, match="fingerprint"):
        of.measured.with_device(replace(measured_fleet(graph, [1e9], BATCH, ["x"]), fingerprint="other"))


def test_fitting_plan_replaces_proportional_plan_that_does_not_fit(graph: Graph) -> None:
    """In proportion the small device needs too much memory; with fewer samples it fits."""
    roomy = known(graph, 1e9, 1e9, 1e9)
    old = by_speed(graph, 1, 1, 1)
    need = predict_plan(plan_for(old, graph, [1, 2]), some_of(roomy, graph, [1, 2])).memory[1].total_bytes
    found = replanned(request(known(graph, 1e9, 1e9, 1e9, d2=int(0.8 * need)), graph), old, (0, 1, 2), (1, 2))
    assert not found.overfull
    hopeless = replanned(request(known(graph, 1e9, 1e9, 1e9, d1=100, d2=100), graph), old, (0, 1, 2), (1, 2))
    assert hopeless.plan == plan_for(old, graph, [1, 2])
    assert len(hopeless.overfull) == 2
    assert hopeless.overfull[0].startswith("d1 needs ")
