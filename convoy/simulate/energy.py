"""Joules of a training step: idle and busy watts of each device, integrated over a replayed timeline.

A device draws its idle watts through the whole step and its busy watts instead while it computes. Sending, receiving and
waiting count as idle: what a network card draws is not known to us. Only the devices' own watts are counted: no host around
a GPU, no switch, no power supply loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from convoy.errors import InputError, PlanError
from convoy.fleet import Fleet
from convoy.simulate.simulate import Timeline


@dataclass(frozen=True, slots=True)
class Power:
    """Watts of one device.

    Raises:
        InputError: busy below idle, or a negative number.
    """

    idle_w: float
    busy_w: float

    def __post_init__(self) -> None:
        if not 0 <= self.idle_w <= self.busy_w:
            raise InputError(
                f"a device of {self.idle_w} W idle and {self.busy_w} W busy: it draws 0 W or more when idle, and no less "
                "when busy; correct the watts"
            )


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules of one step.

    Attributes:
        devices_j: of each device.
        step_s: how long the step took.
        batch: samples of the step.
    """

    devices_j: tuple[float, ...]
    step_s: float
    batch: int

    @property
    def step_j(self) -> float:
        return sum(self.devices_j)

    @property
    def image_j(self) -> float:
        """Joules per sample."""
        return self.step_j / self.batch


def energy_of(timeline: Timeline, power: Sequence[Power], batch: int) -> Energy:
    """Joules of a replayed step of `batch` samples; one `Power` per device, in order.

    Raises:
        InputError: another number of devices.
    """
    if len(power) != len(timeline.compute_s):
        raise InputError(
            f"watts of {len(power)} devices for a timeline of {len(timeline.compute_s)}: give one pair per device"
        )
    joules = tuple(
        watts.idle_w * timeline.step_s + (watts.busy_w - watts.idle_w) * busy_s
        for watts, busy_s in zip(power, timeline.compute_s, strict=True)
    )
    return Energy(joules, timeline.step_s, batch)


def power_of(fleet: Fleet) -> tuple[Power, ...]:
    """The watts of a fleet's devices.

    Raises:
        InputError: a device without watts.
    """
    result = []
    for device in fleet.devices:
        if device.idle_w is None or device.busy_w is None:
            raise InputError(f"device {device.name!r} has no watts: give idle_w and busy_w in the fleet file")
        result.append(Power(device.idle_w, device.busy_w))
    return tuple(result)


def known_power_of(fleet: Fleet) -> tuple[Power, ...] | None:
    """As `power_of`; None where a device has no watts."""
    known = all(device.idle_w is not None and device.busy_w is not None for device in fleet.devices)
    return power_of(fleet) if known else None


Choice = TypeVar("Choice")


def least_energy(candidates: Sequence[tuple[Choice, Energy]], limit_s: float) -> tuple[Choice, Energy]:
    """The candidate (a plan, say) of least joules per image among those whose step takes at most `limit_s`.

    Candidates may have different batches; equal joules go to the shorter step, then to the first.

    Raises:
        PlanError: none is fast enough; the fastest is named.
    """
    if not candidates:
        raise PlanError("no candidate to choose from: give one plan at least")
    within = [pair for pair in candidates if pair[1].step_s <= limit_s]
    if not within:
        name, fastest = min(candidates, key=lambda pair: pair[1].step_s)
        raise PlanError(
            f"no plan takes at most {limit_s:.4g} s a step: the fastest, {name}, takes {fastest.step_s:.4g} s; "
            "raise the limit or add devices"
        )
    return min(within, key=lambda pair: (pair[1].image_j, pair[1].step_s))
