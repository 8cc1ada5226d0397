"""How often the state is kept, by what keeping and steps are seen to take: where nothing was measured before."""

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

MOST_PART = 0.02
"""Of the time of a step, keeping may cost so much."""

TIMED = 5
"""So many steps are kept, and their time taken, before it is decided. The first takes longer, since its memory is new."""


class KeepPace:
    """One device's view of how many steps should lie between two states that are kept.

    Attributes:
        wish: that number; None while too little is known.
    """

    def __init__(self) -> None:
        self.wish: int | None = None
        self._kept_s: list[float] = []
        self._steps_s: list[float] = []
        self._since_s: float | None = None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Around what keeping takes on this device, without waiting for others."""
        begin_s = time.perf_counter()
        yield
        self._kept_s.append(time.perf_counter() - begin_s)

    def begins(self) -> None:
        """A step begins."""
        self._since_s = time.perf_counter()

    def ended(self) -> None:
        """A step has ended, before its state is kept."""
        if self._since_s is not None and self.wish is None:
            self._steps_s.append(time.perf_counter() - self._since_s)
            if len(self._steps_s) >= TIMED and len(self._kept_s) >= TIMED:
                self.wish = steps_between(statistics.median(self._kept_s), statistics.median(self._steps_s))


def steps_between(kept_s: float, step_s: float) -> int:
    """So many that keeping costs at most `MOST_PART` of their time."""
    return max(1, math.ceil(kept_s / (MOST_PART * step_s))) if step_s else 1
