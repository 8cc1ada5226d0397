"""Local search by simulation: hand-calculated shares, and a device that is busy with traffic."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from convoy.model.graph import Graph
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.strategy import Batch, Channel, Filter, One, Strategy
from convoy.planner.analytic import CostModel
from convoy.planner.planner import LocalSearch
from convoy.planner.search import Candidate
from convoy.simulate.compute import Rate, Roofline
from convoy.simulate.costs import Costs
from convoy.simulate.network import Network
from convoy.simulate.simulator import simulate
from tests.support.described_fleets import asked


def small_graph() -> Graph:
    layers = [nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 48, 3, padding=1), nn.MaxPool2d(2), nn.Flatten()]
    return trace(nn.Sequential(*layers, nn.Linear(48 * 16, 10)), torch.zeros(2, 3, 8, 8)).graph


def plan_of(layers: dict[str, Strategy], otherwise: Batch | One, devices: int) -> Plan:
    return Plan("hand", small_graph().fingerprint, devices, 8, layers, otherwise)


def search(graph: Graph, costs: Costs) -> LocalSearch:
    return LocalSearch(CostModel(asked(graph, 8, costs)))


def balanced(plan: Plan, graph: Graph, busy_s: tuple[float, ...]) -> Plan:
    """Balance with irrelevant costs."""
    devices = plan.devices
    times = Roofline((Rate(1e9, 1e9),) * devices)
    near, wide = ((0.0,) * devices,) * devices, (1e9,) * devices
    network = Network(tuple(range(devices)), wide, wide, wide, near, (wide,) * devices, (0.0,) * devices)
    return search(graph, Costs(times, network)).balanced(plan, busy_s)


def test_shares_are_divided_by_busy_time() -> None:
    """6 and 2 samples with 1 + 2 s and 1 s: weights 2 and 2. 24 filters as 18 and 6: 12 and 12."""
    plan = plan_of({"0": Filter((18, 6)), "2": Batch((6, 2))}, Batch((6, 2)), 2)
    better = balanced(plan, small_graph(), (3.0, 1.0))
    assert better.layers == {"0": Filter((12, 12)), "2": Batch((4, 4))}
    assert better.otherwise == Batch((4, 4))


def test_features_stay_with_their_channels() -> None:
    """16 features for each of 48 filters: rounding them separately would add a move."""
    plan = plan_of({"2": Filter((30, 18)), "5": Channel((480, 288))}, One(0), 2)
    better = balanced(plan, small_graph(), (3.0, 2.0))
    assert better.layers["2"] == Filter((25, 23))  # 10 : 9 of 48
    assert better.layers["5"] == Channel((25 * 16, 23 * 16))
    assert better.otherwise == One(0)


def test_local_search_keeps_groups_whole() -> None:
    """32 filters in four groups of eight: three groups for the device that needs half the time."""
    net = nn.Sequential(nn.Conv2d(4, 32, 3, padding=1, groups=4), nn.Flatten(), nn.Linear(32 * 64, 4))
    graph = trace(net, torch.zeros(2, 4, 8, 8)).graph
    plan = Plan("hand", graph.fingerprint, 2, 8, {"0": Filter((16, 16))}, One(0))
    assert balanced(plan, graph, (2.0, 1.0)).layers["0"] == Filter((8, 24))


def test_rejected_variants_are_not_extended() -> None:
    """Direct sums are refused: every variant uses the ring, none extends a refused one."""
    graph, costs = small_graph(), slow_receiver()
    even = plan_of({"0": Filter((12, 12)), "2": Filter((24, 24))}, Batch((4, 4)), 2)
    found = list(
        LocalSearch(
            CostModel(asked(graph, 8, costs)), lambda plan: plan.reduce != "direct"
        ).change_exchanges_and_shares(Candidate(even, 0.0, 2))
    )
    assert found
    assert all(each.plan.reduce == "ring" for each in found)


def slow_receiver() -> Costs:
    """Return two equal devices; each byte costs processor time on the second."""
    network = Network(
        (0, 1), (1e8,) * 2, (1e8,) * 2, (1e12,) * 2, ((0.0, 1e-6), (1e-6, 0.0)), ((1e8,) * 2,) * 2, (0.0, 4e-9)
    )  # fmt: skip
    return Costs(Roofline((Rate(1e10, 1e10),) * 2), network)


def test_units_move_from_the_busiest_device() -> None:
    """Devices of 10 and 1 GFLOP/s with half of the work each: one by one, samples and filters leave the slow one, and the
    features behind the flatten go with their channels."""
    graph = small_graph()
    wide = (1e12,) * 2
    network = Network((0, 1), wide, wide, wide, ((0.0, 1e-9), (1e-9, 0.0)), (wide, wide), (0.0, 0.0))
    costs = Costs(Roofline((Rate(1e10, 1e12), Rate(1e9, 1e12))), network)
    even = plan_of({"0": Batch((4, 4)), "2": Filter((24, 24)), "5": Channel((384, 384))}, Batch((4, 4)), 2)
    found = list(search(graph, costs).move_units(Candidate(even, 0.0, 2)))
    times = [simulate(lower(even, graph), graph, costs).step_s, *(each.step_s for each in found)]
    assert all(after < before for before, after in pairwise(times))
    first, last = found[0].plan, found[-1].plan
    assert first.layers["0"] == Batch((5, 3)) or first.layers["2"] == Filter((25, 23))
    filters, features = last.layers["2"], last.layers["5"]
    assert isinstance(filters, Filter)
    assert isinstance(features, Channel)
    assert filters.shares[1] < 10
    assert features.shares == tuple(16 * n for n in filters.shares)
    assert last.otherwise == last.layers["0"]
    last.check(graph, 2)
    assert found[-1].step_s == simulate(lower(last, graph), graph, costs).step_s


def test_slow_messages_favour_all_reduce_with_fewer_rounds() -> None:
    """Four devices, 10 ms a message: a ring waits for six of them, a direct sum for two."""
    graph = small_graph()
    wide, far = (1e9,) * 4, tuple(tuple(0.0 if a == b else 1e-2 for b in range(4)) for a in range(4))
    costs = Costs(
        Roofline((Rate(1e9, 1e9),) * 4), Network((0, 1, 2, 3), wide, wide, wide, far, (wide,) * 4, (0.0,) * 4)
    )
    by_batch = plan_of({}, Batch((2, 2, 2, 2)), 4)
    found = list(search(graph, costs).change_exchanges_and_shares(Candidate(by_batch, 0.0, 4)))
    assert found[0].plan == replace(by_batch, reduce="direct")
    ring_s = simulate(lower(by_batch, graph), graph, costs).step_s
    assert ring_s - found[0].step_s == pytest.approx(4e-2)


def fast_wire(rates: tuple[float, ...], update_s: float = 0.0) -> Costs:
    devices = len(rates)
    near, wide = ((0.0,) * devices,) * devices, (1e12,) * devices
    network = Network(tuple(range(devices)), wide, wide, wide, near, (wide,) * devices, (0.0,) * devices)
    return Costs(Roofline(tuple(Rate(rate, rate) for rate in rates)), network, 4, (update_s,) * devices)


def test_idle_device_can_hold_a_weight_shard() -> None:
    """Copies of both layers are updated for 1 us an entry: shared out over three devices that is a third of the time."""
    plan = plan_of({}, Batch((4, 4, 0)), 3)
    graph, costs = small_graph(), fast_wire((3e9, 3e9, 3e6), update_s=1e-6)
    found = list(search(graph, costs).keep_otherwise(Candidate(plan, 0.0, 3), (1.0, 1.0, 1.0)))
    assert all(how.shares[2] > 0 for how in found[-1].plan.sharded.values())
    assert found[-1].step_s < found[0].step_s < simulate(lower(plan, graph), graph, costs).step_s
