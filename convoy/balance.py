"""Shares by time: the slowest device is done as early as possible, where time is not proportional to the share."""

from collections.abc import Callable, Sequence

from convoy.shares import Shares, apportion


def balance(
    total: int, devices: int, active: Sequence[int], seconds: Callable[[int, int], float], quantum: int = 1
) -> Shares:
    """Shares of an axis so that the slowest of `active` is done as early as possible.

    `seconds(device, share)` need not be proportional: it is sampled at some shares and taken as a line between them. A
    device that cannot finish one portion in time gets none.
    """
    points = sorted({0, *(max(quantum, total * i // 16) for i in range(1, 17)), total})
    curves = {d: _rising([(n, seconds(d, n) if n else 0.0) for n in points]) for d in active}
    below, above = 0.0, min(curve[-1][1] for curve in curves.values())
    for _ in range(60):
        middle = (below + above) / 2
        if sum(_done(curve, middle) for curve in curves.values()) >= total:
            above = middle
        else:
            below = middle
    parts = [_done(curves[d], above) if d in curves else 0.0 for d in range(devices)]
    return apportion(total, parts if any(parts) else [float(d == active[0]) for d in range(devices)], quantum=quantum)


def _rising(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Measured times may dip; a larger share never counts as faster."""
    highest, result = 0.0, []
    for n, seconds in points:
        highest = max(highest, seconds)
        result.append((n, highest))
    return result


def _done(curve: list[tuple[int, float]], limit_s: float) -> float:
    """The largest share that is done within a time."""
    for (n0, t0), (n1, t1) in zip(reversed(curve[:-1]), reversed(curve[1:]), strict=True):
        if limit_s >= t1:
            return float(n1)
        if limit_s > t0:
            return n0 + (n1 - n0) * (limit_s - t0) / (t1 - t0)
    return 0.0
