"""Joules by hardware counters, on an invented powercap tree and a fake NVML."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from convoy.comm.group import Group
from convoy.measure import energy_meter
from convoy.measure.energy_meter import Counter, meter_of, once_each
from convoy.runlog.observers import Meters
from convoy.runlog.schema import SystemLine
from tests.support.threads import run_on_threads

CPU, GPU = torch.device("cpu"), torch.device("cuda:1")
RANGE_UJ = 262_143_328_850


def zone(tree: Path, path: str, name: str, energy_uj: int) -> Path:
    folder = tree / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    return folder / "energy_uj"


def test_packages_are_summed_without_double_counting(tmp_path: Path) -> None:
    """core is part of a package, psys the machine with its packages, mmio a second view of package 0."""
    first = zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    second = zone(tmp_path, "intel-rapl:1", "package-1", 7_000_000)
    others = [
        zone(tmp_path, path, name, 0)
        for path, name in (
            ("intel-rapl:0:0", "core"), ("intel-rapl:2", "psys"), ("intel-rapl-mmio:0", "package-0"), ("dtpm", "dtpm"),
        )
    ]  # fmt: skip
    meter = meter_of(CPU, tmp_path)
    assert meter.source == "processor packages 0, 1 (RAPL)"
    first.write_text("8000000")
    second.write_text("7500000")
    for file in others:
        file.write_text("900000000")
    assert meter.joules() == pytest.approx(3.5)
    assert meter.joules() == 0.0


def test_counter_wraparound_is_handled(tmp_path: Path) -> None:
    file = zone(tmp_path, "intel-rapl:0", "package-0", RANGE_UJ - 1_000_000)
    meter = meter_of(CPU, tmp_path)
    file.write_text("2000000")
    assert meter.joules() == pytest.approx(3.0)
    assert Counter(int, 1e-3).joules(900, 1000) == pytest.approx(0.1)
    assert Counter(int, 1e-3).joules(900, 200) == pytest.approx(0.2), "a driver that was loaded again counts from 0"


def test_missing_counter_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tree in (tmp_path / "none", tmp_path):
        meter = meter_of(CPU, tree)
        assert meter.source == f"not available here: no RAPL counters of a processor in {tree}"
        assert (meter.key, meter.joules()) == ("", None)
    zone(tmp_path, "intel-rapl:0", "package-0", 0)
    closed = zone(tmp_path, "intel-rapl:1", "package-1", 0)
    read_text = Path.read_text

    def refusing(path: Path) -> str:
        if path == closed:  # root may read what no one else may
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", refusing)
    meter = meter_of(CPU, tmp_path)
    assert meter.joules() is None, "one package of two would be half a measurement"
    assert meter.source == (
        f"not available here: {closed} cannot be read (Permission denied); as root: chmod a+r {tmp_path}/intel-rapl:*/energy_uj"
    )
    closed.write_text("no number")
    monkeypatch.undo()
    assert meter_of(CPU, tmp_path).source.startswith("not available here: invalid literal for int()")


def test_vanished_counter_ends_measuring_but_not_training(tmp_path: Path) -> None:
    file = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    meter = meter_of(CPU, tmp_path)
    file.unlink()
    assert (meter.joules(), meter.joules()) == (None, None)
    assert meter.source == f"not available here: {file} cannot be read (No such file or directory)"


# --- NVML ---------------------------------------------------------------------------------------------------------------


class NVMLError(Exception):
    pass


class NotSupportedError(NVMLError):
    pass


class Nvml(SimpleNamespace):
    """A GPU with known energy; None: without a counter."""

    NVMLError, NVMLError_NotSupported = NVMLError, NotSupportedError
    energy_mj: int | None = 1_000_000

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        assert handle == "GPU-1"
        if self.energy_mj is None:
            raise NotSupportedError("Not Supported")
        return self.energy_mj


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    found = Nvml()
    monkeypatch.setitem(sys.modules, energy_meter.NVML, found)
    monkeypatch.setattr(energy_meter, "uuid_of", lambda device: f"GPU-{device.index}")
    return found


def test_a_gpu_counts_its_energy(nvml: Nvml) -> None:
    meter = meter_of(GPU)
    assert (meter.source, meter.key) == ("GPU (NVML)", "GPU-1")
    nvml.energy_mj = 1_002_500
    assert meter.joules() == pytest.approx(2.5)


def test_gpus_unknown_to_nvml_have_no_meter(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert meter_of(torch.device("cuda:0")).source == "not available here: NVML: Not Found"
    nvml.energy_mj = None
    assert meter_of(GPU).source == "not available here: NVML: Not Supported"
    monkeypatch.setattr(energy_meter, "NVML", "no_such_module")
    assert meter_of(GPU).source == 'not available here: NVML is not installed: pip install "convoy-train[energy]"'
    monkeypatch.undo()
    assert meter_of(torch.device("meta")).source == "not available here: meta has no UUID, which NVML needs to find it"


# --- of a fleet ---------------------------------------------------------------------------------------------------------


def test_shared_counters_are_counted_once() -> None:
    assert once_each(["a", "", "a", "b"], ["A", "no", "A", "B"], [1.0, None, 1.5, 2.0]) == [
        (1.0, "A"), (None, "no"), (None, "counted with device 0"), (2.0, "B"),
    ]  # fmt: skip


def test_devices_of_one_machine_report_its_energy_once(tmp_path: Path) -> None:
    """Calculated by hand: 6 J in two steps of 8 samples."""
    zone(tmp_path, "intel-rapl:0", "package-0", 0)

    def work(group: Group) -> SystemLine:
        lines: list[SystemLine] = []
        meters = Meters(group, lines.append, energy=meter_of(CPU, tmp_path))
        group.agree("both read", "")
        if group.device == 0:
            (tmp_path / "intel-rapl:0/energy_uj").write_text("6000000")
        group.agree("both wait", "")
        meters.due = 2
        for number in range(2):
            meters.on_step_end(number, 8)
        return lines[0]

    ours, theirs = run_on_threads(2, work)
    assert ours == theirs.model_copy(update={"s": ours.s})
    assert (ours.joules, ours.samples) == ((6.0, None), 16)
    assert ours.joules_by == ("processor package 0 (RAPL)", "counted with device 0")
    assert ours.power_w[0] is not None
    assert ours.power_w[0] > 0
