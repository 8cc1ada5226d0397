"""Other programs are noticed, and CPU quotas are found."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from convoy.measure import load
from convoy.measure.load import Use, quota_cores, slowed


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


def test_the_clocks_of_this_machine_can_be_read() -> None:
    begin = load.read()
    now = load.use_since(begin, 1.0)
    assert now.busy >= 0
    assert now.own >= 0
    assert now.machine


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


def test_an_emulated_host_names_its_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a network namespace the mounts of control groups are not seen."""
    monkeypatch.setenv("CONVOY_CPU_QUOTA", "0.3")
    assert quota_cores(tmp_path / "none", tmp_path / "none") == 0.3
