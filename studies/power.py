"""Computes the joules of a training step: each device's idle and busy watts, integrated over a simulated timeline.

A device draws busy watts while it computes, else idle watts. Sending, receiving and
waiting count as idle. Only the devices' own watts are counted: no host around a GPU, no switch, no loss of a power supply.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.fleet import Fleet
from convoy.simulate.events import Timeline


@dataclass(frozen=True, slots=True)
class Power:
    """Watts of one device."""

    idle_w: float
    busy_w: float


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules of one step of `batch` samples, by device."""

    devices_j: tuple[float, ...]
    step_s: float
    batch: int

    @property
    def step_j(self) -> float:
        return sum(self.devices_j)

    @property
    def image_j(self) -> float:
        return self.step_j / self.batch


def energy_of(timeline: Timeline, power: Sequence[Power], batch: int) -> Energy:
    """Return the joules of a simulated step; one `Power` per device, in order."""
    joules = tuple(
        watts.idle_w * timeline.step_s + (watts.busy_w - watts.idle_w) * busy_s
        for watts, busy_s in zip(power, timeline.compute_s, strict=True)
    )
    return Energy(joules, timeline.step_s, batch)


def power_of(fleet: Fleet) -> tuple[Power, ...] | None:
    """Return the watts of a fleet's devices; None if a device has none."""
    rows = [(device.idle_w, device.busy_w) for device in fleet.devices]
    known = [Power(idle_w, busy_w) for idle_w, busy_w in rows if idle_w is not None and busy_w is not None]
    return tuple(known) if len(known) == len(rows) else None
