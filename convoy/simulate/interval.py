"""Computes the interval around a prediction that contains nine of ten measurements.

Each cause of error is a factor that bounds nine of ten cases. For independent causes, the squares of the logarithms add up.

- the simulation: the error of a step with exact inputs, from the validation set (docs/validation.md);
- each device: the spread of its layers' repetitions, and other programs; for an unmeasured device, the error of its kind. The
  weight is the fraction of the step in which the device computes;
- the network: the spread of repeated messages. Its weight is the rest of the step.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Basis = Literal["measured", "described"]
"""The source of a prediction: measured times of the model's layers, or the devices' peak rates."""

OF_REPEATS = 0.35
"""In nine of ten cases, the mean of five repetitions errs by less than this fraction of (slowest - fastest). For normal values
that range is 2.33 standard deviations, the error of the mean without extremes is 0.49, and nine of ten are within 1.645 times
that."""


@dataclass(frozen=True, slots=True)
class Within:
    """An interval that contains nine of ten measurements."""

    low: float
    high: float


def around(value: float, spread: float) -> Within:
    """Return the interval from value / spread to value * spread."""
    return Within(value / spread, value * spread)


class SimulationErrors(NamedTuple):
    """The error factors of the simulation: for a device alone, for a step, and for the speedup over the fastest device."""

    alone: float = 1.0
    step: float = 1.0
    gain: float = 1.0


SIMULATION: Mapping[Basis | None, SimulationErrors] = {
    None: SimulationErrors(),
    "measured": SimulationErrors(alone=1.26, step=1.25, gain=1.2),
    "described": SimulationErrors(step=1.17, gain=1.32),
}
"""The smallest factors for which nine of ten measurements lie in the interval (`python -m lab.calibrate`). `alone` is 1 for
described devices, because their own factor comes from such trainings."""


@dataclass(frozen=True, slots=True)
class Errors:
    """The error factors of one fleet's predictions.

    Attributes:
        basis: the source of the predictions; None: the costs count as exact.
        devices: factor for each device's seconds.
        wire: factor for the seconds of messages.
        kinds: kind of each device; devices of one kind have the same error. Empty: all errors are independent.
    """

    basis: Basis | None = None
    devices: tuple[float, ...] = ()
    wire: float = 1.0
    kinds: tuple[str, ...] = ()

    def alone(self, device: int) -> float:
        """Return the factor of a device that trains alone."""
        return together([SIMULATION[self.basis].alone, *self.devices[device : device + 1]])

    def step(self, computes: Sequence[float]) -> float:
        """Return the factor of a step. `computes`: for each device, the fraction of the step in which it computes."""
        busy = [device for device, part in enumerate(computes) if part > 0]
        if len(busy) == 1:
            return self.alone(busy[0])
        devices = [factor ** min(1.0, part) for factor, part in zip(self.devices, computes, strict=False)]
        return self._together(SIMULATION[self.basis].step, devices, computes)

    def gain(self, computes: Sequence[float], alone: int) -> float:
        """Return the factor of the speedup over the device `alone`.

        For devices of the same kind, errors of computing cancel.
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
    """Return the error factor of a sum of times, given as rows (seconds, spread of the repetitions)."""
    pairs = list(rows)
    total_s = math.fsum(s for s, _ in pairs)
    if not total_s:
        return 1.0
    return 1.0 + math.sqrt(math.fsum((s * OF_REPEATS * spread) ** 2 for s, spread in pairs)) / total_s
