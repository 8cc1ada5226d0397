"""Reads energy in joules from hardware counters: RAPL of processor packages, NVML of GPUs. Nothing is estimated.

RAPL counts whole packages, including other programs; Linux shows it under `POWERCAP`. NVML counts a whole GPU.
A meter without a counter holds the reason as its `source`.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from convoy.machine.accelerator import uuid_of
from convoy.measure.device_info import machine_name

POWERCAP = Path("/sys/class/powercap")
NVML = "pynvml"
ABSENT = "not available here"


@dataclass(frozen=True, slots=True)
class Counter:
    """An energy counter in units of `unit_j` joules that wraps at `range_units` (0: never)."""

    read: Callable[[], int]
    unit_j: float
    range_units: int = 0

    def joules(self, before: int, now: int) -> float:
        """Return the joules between two readings. A lower reading means: the counter wrapped, or without a range was reset."""
        if self.range_units:
            return (now - before) % self.range_units * self.unit_j
        return (now - before if now >= before else now) * self.unit_j


class EnergyMeter:
    """The energy meter of one device, which adds up its counters.

    Args:
        source: name of the counters, for messages; without counters, the reason for that.
        key: identifies the counters; devices with the same key share them.
    """

    def __init__(self, source: str, key: str = "", counters: Sequence[Counter] = ()) -> None:
        self.source, self.key, self.counters = source, key, counters
        self._before: list[int] = []
        self.joules()

    def joules(self) -> float | None:
        """Return the joules since the previous call, or since construction in the first call; None without counters."""
        if not self.counters:
            return None
        try:
            now = [each.read() for each in self.counters]
        except Exception as error:  # NVML errors share no base class, and a failing meter must not stop training
            self.counters, self.key, self.source = (), "", f"{ABSENT}: {_reason(error)}"
            return None
        before, self._before = self._before or now, now
        return sum(each.joules(old, new) for each, old, new in zip(self.counters, before, now, strict=True))


def meter_of(device: torch.device, powercap: Path | None = None) -> EnergyMeter:
    """Return the meter of a device."""
    try:
        return _package_meter(powercap or POWERCAP) if device.type == "cpu" else _gpu_meter(device)
    except Exception as error:  # as above
        remedy = "; as root: chmod a+r {}/intel-rapl:*/energy_uj" if isinstance(error, PermissionError) else ""
        return EnergyMeter(f"{ABSENT}: {_reason(error)}{remedy.format(powercap or POWERCAP)}")


def once_each(
    keys: Sequence[str], sources: Sequence[str], values: Sequence[float | None]
) -> list[tuple[float | None, str]]:
    """Return each device's value and source. If devices share counters, only the first of them has a value."""
    firsts = [keys.index(key) if key else device for device, key in enumerate(keys)]
    return [
        (value, source) if first == device else (None, f"counted with device {first}")
        for device, (first, source, value) in enumerate(zip(firsts, sources, values, strict=True))
    ]


def _package_meter(powercap: Path) -> EnergyMeter:
    """Return the meter of all packages. (psys would count them twice; core and dram are parts of them.)"""
    counters, names = [], []
    for zone in sorted(powercap.glob("intel-rapl:*")):
        name = (zone / "name").read_text().strip()
        if zone.name.count(":") == 1 and name.startswith("package"):
            names.append(name.removeprefix("package-"))
            counters.append(Counter(partial(_number, zone / "energy_uj"), 1e-6, _number(zone / "max_energy_range_uj")))
            counters[-1].read()
    if not counters:
        raise LookupError(f"no RAPL counters of a processor in {powercap}")
    source = f"processor package{'s' * (len(names) > 1)} {', '.join(names)} (RAPL)"
    return EnergyMeter(source, f"rapl {machine_name()}", counters)


def _number(file: Path) -> int:
    return int(file.read_text())


def _gpu_meter(device: torch.device) -> EnergyMeter:
    uuid = uuid_of(device)
    if uuid is None:
        raise LookupError(f"{device} has no UUID, which NVML needs to find it")
    try:
        nvml: Any = importlib.import_module(NVML)
    except ImportError:
        raise LookupError('NVML is not installed: pip install "convoy-train[energy]"') from None
    try:
        nvml.nvmlInit()
        read = partial(nvml.nvmlDeviceGetTotalEnergyConsumption, nvml.nvmlDeviceGetHandleByUUID(uuid))
        read()
    except nvml.NVMLError as error:
        raise LookupError(f"NVML: {error}") from None
    return EnergyMeter("GPU (NVML)", uuid, [Counter(read, 1e-3)])


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename} cannot be read ({error.strerror})"
    return str(error) or type(error).__name__
