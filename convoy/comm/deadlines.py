"""Derives time limits from measured times, so that a slow link does not look like a lost device."""

from collections.abc import Iterable

TIMEOUT_S = 600.0  # default of the one upper bound, `--timeout`
LEAST_S = 3.0  # on a busy machine a live device may need a second to answer
FACTOR = 8  # times the longest recent one


def wait_limit(recent_s: Iterable[float], most_s: float) -> float:
    """Return how long to wait for something that recently took these times: `FACTOR` times the longest, within bounds."""
    return min(most_s, max(LEAST_S, FACTOR * max(recent_s, default=0.0)))
