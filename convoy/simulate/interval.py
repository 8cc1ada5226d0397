"""Computes the interval of a prediction, in which nine of ten measurements lie, from the causes of error.

Each cause is a factor that bounds nine of ten cases. The causes count as independent: the squares of their logarithms add.

- the simulation: the error of a step with exact inputs, from the validation set (docs/validation.md);
- each device: the spread of its layers' repetitions and other programs; if it was not measured, the error of devices of its
  kind. Its weight is the fraction of the step that it computes;
- the network: the spread of its messages' repetitions. Its weight is the rest of the step.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Basis = Literal["measured", "rates", "described"]
"""The source of a prediction: times of this net's layers on these devices, the speeds that these devices reached with another
net, or the peaks of such devices."""

OF_REPEATS = 0.35
"""The mean of five repetitions is within this fraction of (slowest - fastest) of the true mean, nine times of ten. The range
of five normal values is 2.33 deviations, the mean without extremes errs by 0.49 of one, nine of ten are within 1.645 times
that."""

OTHER_NET = 1.59
"""The factor of devices that were measured with another net."""


@dataclass(frozen=True, slots=True)
class Within:
    """An interval that contains nine of ten measurements."""

    low: float
    high: float


def around(value: float, spread: float) -> Within:
    """Return the interval from value / spread to value * spread."""
    return Within(value / spread, value * spread)


class SimulationErrors(NamedTuple):
    """Factors of the simulation: for a device alone, for a step, and for the speedup over the fastest device."""

    alone: float = 1.0
    step: float = 1.0
    gain: float = 1.0


SIMULATION: Mapping[Basis | None, SimulationErrors] = {
    None: SimulationErrors(),
    "measured": SimulationErrors(alone=1.26, step=1.2, gain=1.2),
    "rates": SimulationErrors(step=1.17, gain=1.32),
    "described": SimulationErrors(step=1.17, gain=1.32),
}
"""The smallest factors with which nine of ten measurements lie in the interval (`python -m lab.calibrate`). Described devices
alone have none, because their own factor already comes from such trainings."""


@dataclass(frozen=True, slots=True)
class Errors:
    """The factors of one fleet.

    Attributes:
        basis: None: the costs count as exact.
        devices: for each device's seconds.
        wire: for the seconds of messages.
        kinds: devices of one kind have the same error. Empty: all errors are independent.
    """

    basis: Basis | None = None
    devices: tuple[float, ...] = ()
    wire: float = 1.0
    kinds: tuple[str, ...] = ()

    def alone(self, device: int) -> float:
        """Return the factor of a device that trains alone."""
        return together([SIMULATION[self.basis].alone, *self.devices[device : device + 1]])

    def step(self, computes: Sequence[float]) -> float:
        """Return the factor of a step. `computes` are the fractions of it that each device computes."""
        busy = [device for device, part in enumerate(computes) if part > 0]
        if len(busy) == 1:
            return self.alone(busy[0])
        devices = [factor ** min(1.0, part) for factor, part in zip(self.devices, computes, strict=False)]
        return self._together(SIMULATION[self.basis].step, devices, computes)

    def gain(self, computes: Sequence[float], alone: int) -> float:
        """Return the factor of the speedup over the device `alone`.

        For a device of the same kind, errors of computing cancel in the quotient.
        """
        kinds = self.kinds or tuple(map(str, range(len(self.devices))))
        devices = [
            factor ** (1.0 - min(1.0, part) if kind == kinds[alone] else min(1.0, part))
            for factor, part, kind in zip(self.devices, computes, kinds, strict=False)
            if part > 0
        ]
        return self._together(SIMULATION[self.basis].gain, devices, computes)

    def _together(self, simulation: float, devices: Sequence[float], computes: Sequence[float]) -> float:
        waits = 1.0 - min(1.0, max(computes, default=0.0))
        return together([simulation, max(devices, default=1.0), self.wire**waits])


def together(factors: Iterable[float]) -> float:
    """Combine the factors of independent causes."""
    return math.exp(math.sqrt(math.fsum(math.log(factor) ** 2 for factor in factors)))


def of_repeats(rows: Iterable[tuple[float, float]]) -> float:
    """Return the factor of a sum of (seconds, (slowest - fastest) / typical of their repetitions)."""
    pairs = list(rows)
    total_s = math.fsum(s for s, _ in pairs)
    if not total_s:
        return 1.0
    return 1.0 + math.sqrt(math.fsum((s * OF_REPEATS * spread) ** 2 for s, spread in pairs)) / total_s
