"""Traffic of a move by formula, compared with the transfers that run."""

import numpy as np
import pytest

from convoy.layout.collectives import Reduce, Schedule, gather_shares, schedule, sum_in_segments, sum_into_shares
from convoy.layout.layout import Layout, Shape, entries
from convoy.planner.analytic import Loads, loads, move_s, share_loads, sum_loads
from convoy.simulate.network import Network
from tests.support.local_shards import DEVICES, every_layout

REDUCES: tuple[Reduce, ...] = ("ring", "butterfly", "direct", "star")


def counted(plan: Schedule) -> Loads:
    """Count the same transfer by transfer."""
    sent, received = np.zeros(DEVICES), np.zeros(DEVICES)
    rounds = 0
    for transfers in plan.rounds:
        travelling = [t for t in transfers if t.sender != t.receiver and entries(t.box)]
        rounds += bool(travelling)
        for t in travelling:
            sent[t.sender] += entries(t.box)
            received[t.receiver] += entries(t.box)
    return Loads(sent, received, rounds)


def assert_same(formula: Loads, plan: Schedule, case: str) -> None:
    found = counted(plan)
    assert formula.sent.tolist() == pytest.approx(found.sent.tolist()), case
    assert formula.received.tolist() == pytest.approx(found.received.tolist()), case
    if found.rounds:
        assert formula.rounds == found.rounds, case


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("shape", [(10, 6), (10, 6, 300)], ids=str)
def test_formula_matches_the_schedules_traffic(shape: Shape, reduce: Reduce) -> None:
    """60 entries, which `direct` sums in one round, and 18,000, for which it takes two; both divide by 2, 3 and 4."""
    every: list[Layout] = every_layout((10, 6))
    for src in every:
        for dst in every:
            case = f"{src} -> {dst} of {shape}, {reduce}"
            assert_same(loads(src, dst, shape, DEVICES, reduce), schedule(src, dst, shape, reduce), case)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("n", [12, 24_000])
def test_formula_matches_gradient_all_reduce_rounds(n: int, reduce: Reduce) -> None:
    for members in [(0, 1, 2, 3), (0, 2, 3), (1, 3)]:
        formula = sum_loads(members, members, float(n), DEVICES, reduce)
        assert_same(formula, sum_in_segments(members, n, reduce, 1), f"{members}, {reduce}")


@pytest.mark.parametrize("users", [(0, 1, 2, 3), (0, 2, 3), (1, 3)])
@pytest.mark.parametrize("shares", [(6, 3, 2, 1), (0, 12, 0, 0), (4, 0, 4, 4)])
def test_formula_matches_reduce_scatter_and_gather(users: tuple[int, ...], shares: tuple[int, ...]) -> None:
    formula = share_loads(users, shares, 12.0, DEVICES)
    assert_same(formula, sum_into_shares(users, shares), f"{users} into {shares}")
    assert_same(formula.reversed, gather_shares(shares, users), f"{users} from {shares}")


@pytest.mark.parametrize("devices", [4, 64, 65, 200])
def test_highest_pair_latency_counts_in_large_fleets(devices: int) -> None:
    """Above 64 devices a round had the latency of the first and the last device: a far one in the middle was not seen, and
    a far last one was charged to fleets whose others are near. Here device 2 is 10 ms from all others, 1 ms apart."""
    far, near = 1e-2, 1e-3
    latency = tuple(tuple(far if 2 in (a, b) else near for b in range(devices)) for a in range(devices))
    fast = (1e30,) * devices
    network = Network(tuple(range(devices)), fast, fast, fast, latency, (fast,) * devices, (0.0,) * devices)
    load = Loads(np.ones(devices), np.ones(devices), rounds=3)
    assert move_s(load, network, 4) == pytest.approx(3 * far)


def test_uplink_carries_traffic_that_leaves_its_segment() -> None:
    """Four hosts, two of them behind an uplink: of what each sends, two of the three others are outside. 300 bytes from either
    of the two make 400 that cross at 40 bytes/s; out of each NIC 300 go at 1000."""
    fast = (1000.0,) * 4
    network = Network(
        (0, 1, 2, 3), fast, fast, fast, ((0.0,) * 4,) * 4, (fast,) * 4, (0.0,) * 4,
        segment=(0, 0, -1, -1), uplink_send_bytes_per_s=(40.0,), uplink_receive_bytes_per_s=(1e6,),
    )  # fmt: skip
    load = Loads(np.array([300.0, 300.0, 0.0, 0.0]), np.array([0.0, 0.0, 300.0, 300.0]), rounds=1)
    assert move_s(load, network, 1) == pytest.approx(10.0)
