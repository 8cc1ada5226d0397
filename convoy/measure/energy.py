"""Joules by the counters of the machine itself: RAPL's of the processor's packages, NVML's of a GPU. Nothing is estimated.

RAPL counts whole packages, with whatever else runs on them, and Linux shows it under `POWERCAP`. NVML counts a whole GPU; where
it has no counter of energy it tells its power, which is sampled. Elsewhere a meter says why there is none.
"""

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from convoy.machine.accelerator import uuid_of
from convoy.measure.load import machine_name

POWERCAP = Path("/sys/class/powercap")

ABSENT = "not available here"
SAMPLE_S = 0.1
"""Between two readings of a power, at least: NVML's own is a mean over about as long."""

NVML = "pynvml"

T = TypeVar("T")


class _UnavailableError(Exception):
    """Why there is no meter."""


@dataclass(frozen=True, slots=True)
class Counter:
    """Energy used since some moment: `read` gives units of `unit_j` joules, and begins anew after `range_units` (0: never)."""

    read: Callable[[], int]
    unit_j: float
    range_units: int = 0

    def joules(self, before: int, now: int) -> float:
        """Between two readings with less than a whole range between them; a counter without range that fell was reset."""
        if self.range_units:
            return (now - before) % self.range_units * self.unit_j
        return (now - before if now >= before else now) * self.unit_j


class EnergyMeter:
    """What one device has used since the reading before.

    Args:
        source: what measures, in words.
        key: of the counters; devices with the same key share them.
        counters: read and added; or `power_w`: reads watts.
        now: reads seconds.
    """

    def __init__(
        self,
        source: str,
        key: str = "",
        counters: Sequence[Counter] = (),
        power_w: Callable[[], float] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source, self.key = source, key
        self.counters, self.power_w, self.now = counters, power_w, now
        self._before: list[int] = []
        self._last: tuple[float, float] | None = None
        self._sampled_j = 0.0
        self.joules()

    def sample(self) -> None:
        """Call it often: a power is read as often as that makes sense. Counters need no call."""
        if self.power_w is not None and (self._last is None or self.now() - self._last[0] >= SAMPLE_S):
            self._try(self._sample)

    def joules(self) -> float | None:
        """Since the call before, at first since the meter was made; None where nothing measures it."""
        return self._try(self._joules) if self.counters or self.power_w else None

    def _joules(self) -> float:
        if self.power_w is not None:
            self._sample()
            taken, self._sampled_j = self._sampled_j, 0.0
            return taken
        before, self._before = self._before, [each.read() for each in self.counters]
        rows = zip(self.counters, before or self._before, self._before, strict=True)
        return sum(each.joules(old, new) for each, old, new in rows)

    def _sample(self) -> None:
        assert self.power_w is not None
        watts, now_s = self.power_w(), self.now()
        if self._last is not None:
            self._sampled_j += (now_s - self._last[0]) * (watts + self._last[1]) / 2
        self._last = now_s, watts

    def _try(self, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except Exception as error:  # NVML's are of no family, and a meter that fails must not end a training
            self.counters, self.power_w, self.key, self.source = (), None, "", f"{ABSENT}: {_why(error)}"
            return None


def meter_of(device: torch.device, powercap: Path | None = None) -> EnergyMeter:
    """The meter of a device; one that says why there is none where nothing can be read."""
    try:
        return _packages(powercap or POWERCAP) if device.type == "cpu" else _gpu(device)
    except _UnavailableError as why:
        return EnergyMeter(f"{ABSENT}: {why}")


def once_each(
    keys: Sequence[str], sources: Sequence[str], values: Sequence[float | None]
) -> list[tuple[float | None, str]]:
    """What each device used and who says so; counters that several devices share are counted with the first of them."""
    rows = []
    for device, (key, source, value) in enumerate(zip(keys, sources, values, strict=True)):
        first = keys.index(key) if key else device
        rows.append((value, source) if first == device else (None, counted_with(first)))
    return rows


def counted_with(device: int) -> str:
    return f"counted with device {device}"


# --- processors ---------------------------------------------------------------------------------------------------------


def _packages(powercap: Path) -> EnergyMeter:
    """The packages alone: psys counts them again with the rest of the machine, core and dram are of some machines only."""
    counters, names = [], []
    try:
        zones = sorted(powercap.glob("intel-rapl:*"))
        for zone in zones:
            name = (zone / "name").read_text().strip()
            if zone.name.count(":") == 1 and name.startswith("package"):
                names.append(name.removeprefix("package-"))
                counter = Counter(
                    lambda file=zone / "energy_uj": int(file.read_text()),  # type: ignore[misc]
                    1e-6,
                    int((zone / "max_energy_range_uj").read_text()),
                )
                counter.read()
                counters.append(counter)
    except PermissionError as error:
        raise _UnavailableError(f"{_why(error)}; as root: chmod a+r {powercap}/intel-rapl:*/energy_uj") from None
    except (OSError, ValueError) as error:
        raise _UnavailableError(_why(error)) from None
    if not counters:
        raise _UnavailableError(f"no RAPL counters of a processor in {powercap}")
    words = f"processor package{'s' * (len(names) > 1)} {', '.join(names)} (RAPL)"
    return EnergyMeter(words, f"rapl {machine_name()}", counters)


# --- GPUs ---------------------------------------------------------------------------------------------------------------


def _gpu(device: torch.device) -> EnergyMeter:
    uuid = uuid_of(device)
    if uuid is None:
        raise _UnavailableError(f"{device} has no UUID by which NVML would know it")
    try:
        nvml: Any = importlib.import_module(NVML)
    except ImportError:
        raise _UnavailableError('NVML is not installed: pip install "convoy-train[energy]"') from None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        try:
            counter = Counter(lambda: int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)), 1e-3)
            counter.read()
            return EnergyMeter("GPU (NVML, energy)", uuid, [counter])
        except nvml.NVMLError_NotSupported:
            nvml.nvmlDeviceGetPowerUsage(handle)
            power = lambda: float(nvml.nvmlDeviceGetPowerUsage(handle)) * 1e-3  # noqa: E731
            return EnergyMeter("GPU (NVML, sampled power)", uuid, power_w=power)
    except nvml.NVMLError as error:
        raise _UnavailableError(f"NVML: {error}") from None


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename} cannot be read ({error.strerror})"
    return str(error) or type(error).__name__
