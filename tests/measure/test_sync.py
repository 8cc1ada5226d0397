"""Synchronisation overhead of computing devices, and CPU quotas."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from convoy.comm.group import AloneGroup, Group
from convoy.measure import overhead_probe
from convoy.measure.link_probe import Traffic, WireTimes
from convoy.measure.overhead_probe import Quota, SyncOverhead, find_quota, measure_sync, sync_overhead
from convoy.runtime.clock import Clock
from convoy.simulate.costs import Overheads
from tests.support.threads import run_on_threads

CPU = torch.device("cpu")


def wire_of(devices: int) -> WireTimes:
    """Return a wire without latency whose traffic costs no processor time."""
    return WireTimes((), (), (Traffic(0.0, 0.0),) * devices)


def blocks(alone_s: float, together_s: float, tasks_s: Sequence[float]) -> dict[str, list[float]]:
    return {"alone": [alone_s] * 5, "together": [together_s] * 5, "tasks": list(tasks_s)}


def jitter_of(devices: Sequence[dict[str, list[float]]], exchange_s: float = 0.0) -> tuple[float, ...]:
    # Of two devices each sends and receives one message: a round and another message.
    costs = [Overheads(round_s=exchange_s)] * len(devices)
    return sync_overhead(devices, 0.0, costs).jitter_s


def test_jitter_is_time_beyond_slowest_device_and_exchange() -> None:
    """Tasks of 40 and 42 ms, together 50 ms; an exchange costs 3, so 5 ms are left. The second device varies half as much as
    the first (standard deviations 1 and 2) and is charged with half."""
    first, second = blocks(0.040, 0.050, (0.038, 0.042)), blocks(0.042, 0.049, (0.041, 0.043))
    assert jitter_of([first, second], 0.003) == pytest.approx((0.005, 0.0025))


def test_steady_devices_have_no_jitter() -> None:
    steady = blocks(0.040, 0.043, (0.040, 0.040))
    assert jitter_of([steady, steady], 0.003) == (0.0, 0.0)
    assert jitter_of([blocks(0.040, 0.041, (0.03, 0.05))] * 2, 0.003) == (0.0, 0.0), "below the price it is noise"


def test_single_interrupted_block_is_ignored() -> None:
    """Of six blocks the lowest and the highest do not count: typical values are 40 and 46 ms."""
    found = blocks(0.0, 0.0, (0.039, 0.041)) | {"alone": [0.040] * 5 + [4.0], "together": [9.0] + [0.046] * 5}
    assert jitter_of([found] * 2) == pytest.approx((0.006, 0.006))


def test_single_device_has_no_sync_overhead() -> None:
    cost = Overheads(round_s=0.1)
    found = measure_sync(AloneGroup(CPU), Clock(CPU), wire_of(1), [cost], slice_s=1e-6)
    assert found == SyncOverhead((0.0,), (cost,))


def test_calls_after_computing_cost_more_than_at_rest() -> None:
    """2 ms of processor after computing, 0.5 at rest; a disturbed block does not count."""
    plain = blocks(0.04, 0.05, (0.04,))
    dearer = plain | {"calls": [0.002, 0.002, 9.0], "rest_calls": [0.0005, 0.0005, 0.7]}
    cheaper = plain | {"calls": [0.0001] * 3, "rest_calls": [0.0005] * 3}
    costs = [Overheads(step_s=1.0, round_s=0.01, message_s=0.02)] * 3
    found = sync_overhead([dearer, plain, cheaper], 0.0, costs).overheads
    assert (found[0].step_s, found[0].round_s, found[0].message_s) == pytest.approx((1.0, 0.04, 0.08))
    assert found[1:] == (costs[1], costs[2])


@pytest.mark.parametrize("threads", [1, 2])
def test_all_devices_time_the_same_exchanges(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """After each task and at rest. Idle OpenMP threads use processor time after a task, so with them calls are not compared:
    on 16 cores they seemed to make the calls of a round take 28 ms."""
    monkeypatch.setattr(overhead_probe, "BLOCKS", 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    costs, blocks = [Overheads(round_s=0.1)] * 3, overhead_probe._time_block
    times: list[dict[str, list[float]]] = []

    def noted(group: Group, found: Any, *given: Any) -> None:
        blocks(group, found, *given)
        times.append(found)

    monkeypatch.setattr(overhead_probe, "_time_block", noted)

    def work(group: Group) -> tuple[SyncOverhead, int]:
        return measure_sync(group, Clock(CPU), wire_of(3), costs, 1e-6), sum(group.sent_bytes)

    rows = run_on_threads(3, work, timeout_s=30.0)
    assert [sent for _, sent in rows] == [2 * 2 * 2 * overhead_probe.TASKS * overhead_probe.MESSAGE_BYTES] * 3
    assert all(found == rows[0][0] for found, _ in rows)
    assert all(("calls" in each) == (threads == 1) for each in times)
    assert threads == 1 or list(rows[0][0].overheads) == costs


# --- under a quota -----------------------------------------------------------------------------------------------------


def test_no_quota_means_no_noise_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead_probe, "quota_cores", lambda: None)
    assert find_quota(AloneGroup(CPU)) is None


def test_quota_gives_a_clock_without_its_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a processor: 3 s of it take 12 s. Several threads and slept slow-downs are timed by the wall clock."""
    monkeypatch.setattr(overhead_probe, "quota_cores", lambda: 0.25)
    monkeypatch.setattr(time, "process_time", lambda: 3.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    quota = find_quota(AloneGroup(CPU))
    assert quota is not None
    now = quota.clock(1.0)
    assert now is not None
    assert now() == 12.0
    assert quota.clock(2.0) is None
    assert Quota().clock(1.0) is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert quota.clock(1.0) is None


def test_cpu_contention_slows_a_device() -> None:
    """Of four emulated hosts on two cores, the one with 0.8 of a core had 0.75 while all computed."""
    quota = Quota(0.8, limited=True)
    assert quota.contention(10.0, 7.5, 1.0) == pytest.approx(0.8 / 0.75)
    assert quota.contention(10.0, 9.0, 1.0) == 1.0, "short rounds begin with a whole quota"
    assert quota.contention(10.0, 4.0, 2.0) == 1.0, "other programs had half of the machine"
