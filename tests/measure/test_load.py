"""Other programs are noticed. Two-conv 50:500 on one fleet, measured three times beside others, was predicted at 1.60, 1.90 and
0.74 s, because each device took what it had of a processor for what it has of one."""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from convoy.comm.group import AloneGroup
from convoy.measure import load
from convoy.measure.load import Use, measure_share, quota_cores, slowed

CPU = torch.device("cpu")


def use(busy: float, own: float, wants: float = 1.0, cores: float = 2.0, machine: str = "m") -> Use:
    return Use(machine, cores, wants, busy, own)


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        ([use(busy=1.0, own=1.0)], [1.0]),  # nobody else
        ([use(busy=1.9, own=1.0)], [1.0]),  # others have the other core
        ([use(busy=2.0, own=0.4)], [2.5]),  # five programs for two cores
        ([use(busy=2.0, own=1.0, wants=2.0)], [2.0]),  # two threads wait for each other
        ([use(busy=2.0, own=0.5), use(busy=2.0, own=0.5)], [2.0, 2.0]),  # two of ours, and others with one core
        ([use(busy=2.0, own=0.5)] * 4, [1.0] * 4),  # four of ours on two cores: nobody else's fault
        ([use(busy=2.0, own=0.4), use(busy=1.0, own=1.0, machine="n")], [2.5, 1.0]),
        ([use(busy=1.9, own=0.8, wants=0.8), use(busy=1.9, own=1.0, wants=1.0)], [1.0, 1.0]),  # 0.1 for the kernel
    ],
)  # fmt: skip
def test_how_much_longer_others_make_it(uses: list[Use], expected: list[float]) -> None:
    assert slowed(uses) == pytest.approx(expected)


class Machine:
    """Two cores; programs of others take some of them, first more and then less."""

    def __init__(self, others: list[float], monkeypatch: pytest.MonkeyPatch, quota: float | None = None) -> None:
        self.others: Iterator[float] = itertools.chain(others, itertools.repeat(others[-1]))
        self.wall_s = self.busy_s = self.own_s = 0.0
        self.shares: list[float] = []
        self.quota = quota
        monkeypatch.setattr(load, "read", lambda: load.Reading(self.wall_s, self.busy_s, self.own_s))
        monkeypatch.setattr(load, "processor_share", self.spin)
        monkeypatch.setattr(load, "quota_cores", lambda: quota)
        monkeypatch.setattr(load.os, "cpu_count", lambda: 2)

    def spin(self, seconds: float) -> float:
        taken = next(self.others)
        own = min(1.0 if self.quota is None else self.quota, 2.0 - taken)
        self.wall_s += seconds
        self.busy_s += seconds * (own + taken)
        self.own_s += seconds * own
        self.shares.append(own)
        return own


def test_on_a_quiet_machine_the_share_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine([0.0], monkeypatch)
    assert measure_share(AloneGroup(CPU), 1.0, 1.0) == (1.0, (1.0,))
    assert machine.shares == [1.0]


def test_beside_others_it_is_measured_again_and_the_quietest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, told = Machine([1.6, 0.5], monkeypatch), []
    assert measure_share(AloneGroup(CPU), 1.0, 1.0, told.append) == (1.0, (1.0,))
    assert machine.shares == pytest.approx([0.4, 1.0])
    assert told == ["the processors again, since other programs use them"]


def test_where_others_stay_the_share_is_that_of_a_quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they take: predictions repeat."""
    for taken in (1.2, 1.5, 1.6):
        with monkeypatch.context() as patched:
            machine = Machine([taken], patched)
            share, times = measure_share(AloneGroup(CPU), 1.0, 1.0)
            assert share == pytest.approx(1.0)
            assert times == pytest.approx((1 / (2 - taken),))
            assert len(machine.shares) == load.TRIES


def test_a_quota_is_no_other_program(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine([0.2], monkeypatch, quota=0.3)
    assert measure_share(AloneGroup(CPU), 1.0, 0.3) == (pytest.approx(0.3), (1.0,))


def test_beside_others_a_share_is_at_most_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine([1.9], monkeypatch, quota=0.3)
    share, times = measure_share(AloneGroup(CPU), 1.0, 0.3)
    assert share == pytest.approx(0.3)
    assert times[0] == pytest.approx(0.3 / 0.1)


def test_the_clocks_of_this_machine_can_be_read() -> None:
    begin = load.read()
    now = load.use_since(begin, 1.0)
    assert now.busy >= 0
    assert now.own >= 0
    assert now.machine


@pytest.mark.parametrize(
    ("cores", "share"), [(None, 0.28), (0.3, 0.3), (0.6, 0.28), (0.26, 0.26), (0.25, 0.28), (8.0, 0.28)]
)
def test_a_described_share_is_taken_where_the_measured_one_is_near(
    cores: float | None, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each measuring found another share, by a few parts in a hundred, and so other seconds of everything."""
    Machine([0.0], monkeypatch)
    monkeypatch.setattr(load, "processor_share", lambda _: 0.28)
    assert measure_share(AloneGroup(CPU), 1.0, 0.3, cores=cores)[0] == pytest.approx(share)


def control_groups(folder: Path, lines: str, mounts: str, files: Mapping[str, str]) -> float | None:
    for name, text in ({"self/cgroup": lines, "mounts": mounts} | dict(files)).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return quota_cores(folder / "self", folder / "mounts")


def test_quotas_of_both_versions_are_found(tmp_path: Path) -> None:
    v2 = f"cgroup2 {tmp_path}/v2 cgroup2 rw 0 0\n"
    job_group = {"v2/jobs/7/cpu.max": "max 100000\n", "v2/jobs/cpu.max": "150000 100000\n"}
    assert control_groups(tmp_path, "0::/jobs/7\n", v2, job_group) == 1.5, "the tightest on the way up counts"
    in_container = control_groups(tmp_path, "0::/elsewhere\n", v2, {"v2/cpu.max": "50000 100000\n"})
    assert in_container == 0.5
    v1 = f"cgroup {tmp_path}/cpu cgroup rw,cpu,cpuacct 0 0\ncgroup {tmp_path}/set cgroup rw,cpuset 0 0\n"
    files = {"cpu/d/cpu.cfs_quota_us": "2000\n", "cpu/d/cpu.cfs_period_us": "10000\n"}
    assert control_groups(tmp_path, "4:cpuset:/d\n3:cpu,cpuacct:/d\n", v1, files) == 0.2
    assert control_groups(tmp_path, "3:cpu,cpuacct:/d\n", v1, {"cpu/d/cpu.cfs_quota_us": "-1\n"}) is None
    assert quota_cores(tmp_path / "none", tmp_path / "none") is None
