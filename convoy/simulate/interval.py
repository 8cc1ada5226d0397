"""How far a prediction may err: the interval that nine of ten measurements lie in, from its causes.

Each cause is a factor that nine of ten stay within. They are taken to be independent, so their logarithms add up as squares:

- the replay: what a step errs by where the seconds that go into it are right, from the validation set (docs/validation.md);
- each device: how far the repetitions of its layers lay apart, and what other programs took from it meanwhile; where nothing
  was measured, how far devices of its kind were from what they can do at most. It counts by the part of the step that it
  computes;
- the wire: how far the repetitions of its messages lay apart. It counts by what is left of the step.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Basis = Literal["measured", "rates", "described"]
"""What a prediction is made from: times of this net's layers on these devices; what these devices reached at another net; or
what such devices can do at most."""

OF_REPEATS = 0.35
"""The mean of five repetitions lies within so much of (slowest - fastest) of the true one, nine times of ten: the range of five
normal values is 2.33 deviations, their mean without the extremes errs by 0.49 of one, nine of ten are within 1.645 of that."""


@dataclass(frozen=True, slots=True)
class Interval:
    """What nine of ten measurements of a thing lie between."""

    low: float
    high: float


def around(value: float, spread: float) -> Interval:
    """From value / spread to value * spread."""
    return Interval(value / spread, value * spread)


@dataclass(frozen=True, slots=True)
class Replay:
    """What the validation set leaves unexplained, of a device alone, of a step, and of how many times as fast as its fastest
    device a fleet is: the smallest factors with which nine of ten measurements lie in the interval."""

    alone: float
    step: float
    gain: float


REPLAY: Mapping[Basis, Replay] = {
    "measured": Replay(alone=1.26, step=1.2, gain=1.2),
    "rates": Replay(alone=1.0, step=1.17, gain=1.32),
    "described": Replay(alone=1.0, step=1.17, gain=1.32),
}
"""By `python -m lab.calibrate`, a rule for all: no case has a figure of its own. Of described devices alone nothing is
left unexplained, since their own factor is from such trainings; rates are replayed as they are."""


@dataclass(frozen=True, slots=True)
class Errors:
    """The causes, for one fleet.

    Attributes:
        basis: what the costs are made from; None: they are taken to be right.
        devices: the factor of each device's seconds.
        kinds: devices of one kind err alike; none: each by itself.
        wire: the factor of what messages take.
    """

    basis: Basis | None = None
    devices: tuple[float, ...] = ()
    wire: float = 1.0
    kinds: tuple[str, ...] = ()

    @property
    def replay(self) -> Replay:
        return Replay(1.0, 1.0, 1.0) if self.basis is None else REPLAY[self.basis]

    def alone(self, device: int) -> float:
        """Of a device that trains alone."""
        return together([self.replay.alone, *self.devices[device : device + 1]])

    def step(self, computes: Sequence[float]) -> float:
        """Of a step.

        Args:
            computes: the part of the step that each device computes, 0 to 1.
        """
        busy = [device for device, part in enumerate(computes) if part > 0]
        return self.alone(busy[0]) if len(busy) == 1 else together([self.replay.step, self.costs(computes)])

    def gain(self, computes: Sequence[float], alone: int) -> float:
        """Of how many times as fast as one of its devices, alone, a fleet is."""
        return together([self.replay.gain, self.costs(computes, alone)])

    def costs(self, computes: Sequence[float], alone: int | None = None) -> float:
        """The factor of what goes into a step; or into how it compares with a device alone: what its kind errs by is in both,
        as far as the step is computing."""
        parts = [min(1.0, part) for part in computes]
        kinds = self.kinds or tuple(map(str, range(len(self.devices))))
        factors = [
            factor ** (1.0 - part if alone is not None and kind == kinds[alone] else part)
            for factor, part, kind in zip(self.devices, parts, kinds, strict=False)
            if part > 0
        ]
        return together([max(factors, default=1.0), self.wire ** (1.0 - max(parts, default=0.0))])


def together(factors: Iterable[float]) -> float:
    """The factor of several independent causes."""
    return math.exp(math.sqrt(math.fsum(math.log(factor) ** 2 for factor in factors)))


def of_repeats(rows: Iterable[tuple[float, float]]) -> float:
    """The factor of a sum of seconds, each measured by itself.

    Args:
        rows: seconds, and (slowest - fastest) / typical of their repetitions.
    """
    pairs = list(rows)
    total_s = math.fsum(s for s, _ in pairs)
    if not total_s:
        return 1.0
    return 1.0 + math.sqrt(math.fsum((s * OF_REPEATS * spread) ** 2 for s, spread in pairs)) / total_s
