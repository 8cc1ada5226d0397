"""Models the noise of a CPU quota: how a device with a part of a processor deviates from its mean speed.

Emulated hosts (`convoy emulate`) and containers with a CPU limit compute in bursts: the kernel lets them run at full speed,
then pauses them until the next period. A device without a quota has no noise model.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, Strict

from convoy.fleet.file import CLOSED, MOST


@dataclass(frozen=True, slots=True)
class QuotaNoise:
    """The measured noise of one device under a CPU quota.

    Attributes:
        overlap_delay_s: extra seconds of a gradient sum's round while the device computes.
        rested_s: the most seconds that a device gains after a rest, from unused quota.
        burst: its speed meanwhile, as a multiple of its mean speed.
    """

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    overlap_delay_s: Annotated[float, Strict(), Field(ge=0, le=1e9)] = 0.0
    rested_s: Annotated[float, Strict(), Field(ge=0, le=1e9)] = 0.0
    burst: Annotated[float, Strict(), Field(ge=1, le=MOST)] = 1.0


class SavedQuota:
    """The quota that one device saves while it rests, during a simulated step."""

    def __init__(self, noise: QuotaNoise) -> None:
        self._noise, self._saved_s = noise, 0.0
        self._idle_since_s: float | None = 0.0

    def rest(self, now_s: float) -> None:
        self._idle_since_s = now_s

    def wake(self, now_s: float) -> None:
        if self._idle_since_s is not None:
            self._saved_s = min(self._noise.rested_s, self._saved_s + now_s - self._idle_since_s)
            self._idle_since_s = None

    def spend(self, seconds: float) -> float:
        """Return how long a computation of `seconds` at mean speed takes, at burst speed while the saved quota lasts."""
        gained_s = min(self._saved_s, seconds * (1.0 - 1.0 / self._noise.burst))
        self._saved_s -= gained_s
        return seconds - gained_s
