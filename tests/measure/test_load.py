"""Load by other programs is noticed, and CPU quotas are found."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from convoy.measure.device_info import Usage, quota_cores, slowdowns


def use(busy: float, own: float, wants: float = 1.0, cores: float = 2.0, machine: str = "m") -> Usage:
    return machine, cores, wants, busy, own


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
def test_load_of_other_programs_is_a_time_factor(uses: list[Usage], expected: list[float]) -> None:
    assert slowdowns(uses) == pytest.approx(expected)


def quota_in(folder: Path, groups: str, files: Mapping[str, str]) -> float | None:
    """Return the quota found in invented control-group files."""
    for name, text in ({"own": groups} | dict(files)).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return quota_cores(folder, folder / "own")


def test_quotas_of_both_versions_are_found(tmp_path: Path) -> None:
    job_group = {"jobs/7/cpu.max": "max 100000\n", "jobs/cpu.max": "150000 100000\n"}
    assert quota_in(tmp_path, "0::/jobs/7\n", job_group) == 1.5, "the tightest on the way up counts"
    assert quota_in(tmp_path, "0::/elsewhere\n", {"cpu.max": "50000 100000\n"}) == 0.5, "in a container"
    files = {"cpu/d/cpu.cfs_quota_us": "2000\n", "cpu/d/cpu.cfs_period_us": "10000\n"}
    assert quota_in(tmp_path, "4:cpuset:/d\n3:cpu,cpuacct:/d\n", files) == 0.2
    assert quota_in(tmp_path, "3:cpu,cpuacct:/d\n", {"cpu/d/cpu.cfs_quota_us": "-1\n"}) is None
    assert quota_cores(tmp_path, tmp_path / "none") is None


def test_an_emulated_host_names_its_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CONVOY_CPU_QUOTA", "0.3")
    assert quota_cores(tmp_path, tmp_path / "none") == 0.3
