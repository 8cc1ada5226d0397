"""Track the machine's current speed by timing the same calculation again and again.

On a shared machine the processor's speed wanders by tens of per cent within minutes. A prediction is made from tables that
were measured some time before; the same small convolution, timed on all devices at once beside the tables and before every
run, shows how much slower or faster the machine has become since.
"""

import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from convoy.comm.group import Group

STRETCH_S = 0.15
"""Several periods of a processor quota."""


class Reference:
    """The speed of all devices of a group relative to a base. Every device creates one and calls it identically."""

    def __init__(
        self, group: Group, now: Callable[[], float] = time.perf_counter, stretch_s: float = STRETCH_S
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn(2, 64, 16, 16, generator=generator)
        self._w = torch.randn(128, 64, 5, 5, generator=generator)
        self._group, self._now, self._stretch_s = group, now, stretch_s
        self._base_s: list[float] = []

    def rebase(self, *samples: list[float]) -> None:
        """Set the base to the mean of some readings."""
        self._base_s = [statistics.fmean(each) for each in zip(*samples, strict=True)]

    def read(self) -> list[float]:
        """Return the seconds of the calculation on every device, run at the same time."""
        self._group.agree("reference begins", "")
        calls, start_s = 0, self._now()
        with torch.no_grad():
            while (passed_s := self._now() - start_s) < self._stretch_s or not calls:
                F.conv2d(self._x, self._w, padding=2)
                calls += 1
        return [float(text) for text in self._group.agree("reference ends", json.dumps(passed_s / calls))]

    def drift(self) -> float:
        """Return how many times slower the devices are than at the base, on average; 1 without a base."""
        if not self._base_s:
            return 1.0
        return statistics.fmean(now / base for now, base in zip(self.read(), self._base_s, strict=True))
