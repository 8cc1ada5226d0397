"""The noise model of devices under a CPU quota: when there is one, the share of a processor, and what rests and sums cost."""

import itertools
import time
from collections.abc import Iterator

import pytest
import torch

from convoy.comm.group import AloneGroup, Group
from convoy.errors import DeviceLostError
from convoy.measure import load, quota
from convoy.measure.quota import ProcessorClock, QuotaProbe, contention, measure_share, processor_share, rings_s
from convoy.measure.sync_overhead import SyncOverhead
from convoy.measure.timing import device_now
from convoy.simulate.noise import QuotaNoise
from tests.support.threads import run_on_threads

CPU = torch.device("cpu")


class Machine:
    """Two cores. Other programs take some of them, first more and then less."""

    def __init__(self, others: list[float], monkeypatch: pytest.MonkeyPatch, limit: float | None = None) -> None:
        self.others: Iterator[float] = itertools.chain(others, itertools.repeat(others[-1]))
        self.wall_s = self.busy_s = self.own_s = 0.0
        self.shares: list[float] = []
        self.limit = limit
        for module in (load, quota):
            monkeypatch.setattr(module, "read", lambda: load.Reading(self.wall_s, self.busy_s, self.own_s))
            monkeypatch.setattr(module, "quota_cores", lambda: limit)
        monkeypatch.setattr(quota, "processor_share", self.spin)
        monkeypatch.setattr(quota, "wanted_cores", lambda _: limit or 1.0)
        monkeypatch.setattr(load.os, "cpu_count", lambda: 2)

    def spin(self, seconds: float) -> float:
        taken = next(self.others)
        own = min(1.0 if self.limit is None else self.limit, 2.0 - taken)
        self.wall_s += seconds
        self.busy_s += seconds * (own + taken)
        self.own_s += seconds * own
        self.shares.append(own)
        return own


# --- whether there is a noise model ------------------------------------------------------------------------------------


def test_without_a_quota_there_is_no_noise_model(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine([0.0], monkeypatch)
    assert QuotaProbe.of(AloneGroup(CPU), 1.0, None) is None
    assert machine.shares == [], "nothing is measured"


def test_a_quota_gives_a_clock_without_its_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a processor: 3 s of it take 12 s. Several threads and slept slow-downs are timed by the wall clock."""
    Machine([0.0], monkeypatch, limit=0.25)
    monkeypatch.setattr(time, "process_time", lambda: 3.0)
    monkeypatch.setattr(time, "perf_counter", lambda: 7.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    probe = QuotaProbe.of(AloneGroup(CPU), 1.0, None)
    assert probe is not None
    assert probe.clock(1.0)() == 12.0
    assert probe.clock(2.0)() == 7.0
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert probe.clock(1.0)() == 7.0


def test_beside_a_device_with_a_quota_one_without_is_timed_by_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    probe = QuotaProbe(AloneGroup(CPU), (False,), 1.0, (1.0,))
    assert not isinstance(probe.clock(1.0), ProcessorClock)
    assert probe.noise(SyncOverhead((0.0,), (1.0,)), 0.0) == (None,)


# --- the share of a processor ------------------------------------------------------------------------------------------


def test_on_a_quiet_machine_the_share_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine([0.2], monkeypatch, limit=0.3)
    assert measure_share(AloneGroup(CPU), 1.0) == (pytest.approx(0.3), (1.0,))
    assert machine.shares == [0.3], "a quota is no other program"


def test_beside_other_programs_the_quietest_attempt_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, told = Machine([1.6, 0.5], monkeypatch), []
    assert measure_share(AloneGroup(CPU), 1.0, told.append) == (1.0, (1.0,))
    assert machine.shares == pytest.approx([0.4, 1.0])
    assert told == ["the processors again, since other programs use them"]


@pytest.mark.parametrize("taken", [1.2, 1.5, 1.6])
def test_where_other_programs_stay_the_share_is_that_of_a_quiet_machine(
    taken: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fleet that was measured three times beside others was once predicted at 1.60, 1.90 and 0.74 s."""
    machine = Machine([taken], monkeypatch)
    share, times = measure_share(AloneGroup(CPU), 1.0)
    assert share == pytest.approx(1.0)
    assert times == pytest.approx((1 / (2 - taken),))
    assert len(machine.shares) == quota.TRIES


def test_beside_other_programs_a_share_is_at_most_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine([1.9], monkeypatch, limit=0.3)
    share, times = measure_share(AloneGroup(CPU), 1.0)
    assert share == pytest.approx(0.3)
    assert times[0] == pytest.approx(0.3 / 0.1)


@pytest.mark.parametrize(
    ("cores", "share"), [(None, 0.28), (0.3, 0.3), (0.6, 0.28), (0.26, 0.26), (0.25, 0.28), (8.0, 0.28)]
)
def test_a_described_share_replaces_a_measured_one_that_is_near(
    cores: float | None, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a fleet that is measured twice has different seconds of everything."""
    Machine([0.0], monkeypatch, limit=0.3)
    monkeypatch.setattr(quota, "processor_share", lambda _: 0.28)
    assert measure_share(AloneGroup(CPU), 1.0, cores=cores)[0] == pytest.approx(share)


def test_this_process_has_a_share_of_a_processor() -> None:
    assert 0 < processor_share(0.01) <= 1


# --- noise -------------------------------------------------------------------------------------------------------------


def test_a_device_that_gets_less_of_a_processor_while_all_compute_is_slower() -> None:
    """Of four emulated hosts on two cores, the one with 0.8 of a core had 0.75 while all computed."""
    clock = ProcessorClock(0.8)
    assert contention(clock, 10.0, 7.5, 1.0) == pytest.approx(0.8 / 0.75)
    assert contention(clock, 10.0, 9.0, 1.0) == 1.0, "short rounds begin with a whole quota"
    assert contention(clock, 10.0, 4.0, 2.0) == 1.0, "other programs had half of the machine"
    assert contention(clock, 0.0, 0.0, 1.0) == 1.0, "all tables were kept from a run before"
    assert contention(device_now(CPU), 10.0, 4.0, 1.0) == 1.0, "a wall clock has the waiting in it"


def test_noise_is_what_rests_save_and_what_computing_delays() -> None:
    """Pieces take 40 ms, after a rest 32. A round of a sum takes 30 ms during computing, 10 at rest; its price is 13: it is 17
    late. The device that varies most is charged with all of it, the other in proportion; one without a quota has no noise."""
    sync = SyncOverhead((0.0, 0.0), (1.0, 1.0), piece_s=(0.04, 0.04), deviation_s=(0.01, 0.005))

    def work(group: Group) -> tuple[QuotaNoise | None, ...]:
        probe = QuotaProbe(group, (group.devices > 2, True), 0.25, (1.0, 1.0))
        probe.rested_s, probe.ring_s = [0.032] * 5, [0.010] * 5
        probe.overlapped_ring_s = [0.030 if group.device == 0 else 0.028] * 5
        return probe.noise(sync, 0.013)

    first, second = run_on_threads(2, work)
    assert first == second
    assert first[0] is None
    assert first[1] is not None
    assert (first[1].overlap_delay_s, first[1].rested_s) == pytest.approx((0.0085, 0.008))
    assert first[1].burst == 4.0


def test_all_devices_time_rests_and_rings() -> None:
    def work(group: Group) -> QuotaProbe:
        probe = QuotaProbe(group, (True, True), 0.5, (1.0, 1.0))
        probe.time_block(lambda: None, time.perf_counter, 1e-6, 64)
        assert group.sent_bytes[1 - group.device] == 2 * quota.RINGS * 64
        return probe

    for probe in run_on_threads(2, work):
        assert len(probe.rested_s) == len(probe.ring_s) == len(probe.overlapped_ring_s) == 1


def test_a_ring_that_fails_on_its_thread_raises_here() -> None:
    def lost() -> None:
        raise DeviceLostError(1, "device 1 was lost")

    for compute in (None, lambda: None):
        with pytest.raises(DeviceLostError, match="device 1 was lost"):
            rings_s(lost, compute)
