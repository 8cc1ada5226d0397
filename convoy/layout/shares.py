"""Divide the extent of an axis into integer shares, one per device, in proportion to their speeds.

Shares follow Marques' rule K_i = K * s_i / sum(s), rounded by the largest remainder (Hamilton's method). Each device may have
a minimum and a maximum, and every share is a multiple of a quantum.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction

from convoy.errors import PlanError

Shares = tuple[int, ...]


def apportion(
    total: int,
    weights: Sequence[float],
    *,
    quantum: int = 1,
    at_least: Sequence[int] | None = None,
    at_most: Sequence[int] | None = None,
) -> Shares:
    """Return integer shares of `total` in proportion to `weights`, by largest remainder.

    Args:
        total: extent of the axis.
        weights: one per device, e.g. its speed. Weight zero means no share, unless `at_least` requires one or the other
            devices are at their maximum.
        quantum: every share is a multiple of this, e.g. the filters of one convolution group.
        at_least, at_most: limits per device, in entries of the axis.

    Returns:
        shares in device order that sum to `total`. Of equal remainders, the lower index is rounded up first.

    Raises:
        PlanError: weights are negative, not finite or all zero, or no shares meet the limits.
    """
    count = len(weights)
    if count == 0 or any(not math.isfinite(w) or w < 0 for w in weights) or (total > 0 and not any(weights)):
        raise PlanError(
            f"cannot split {total} by the weights {tuple(weights)}: "
            "weights must be finite, not negative and not all zero; give at least one positive speed"
        )
    if total < 0 or total % quantum:
        raise PlanError(
            f"cannot split {total} into multiples of {quantum}: the extent must be a multiple, not negative; change the layer"
        )
    units = total // quantum
    low = [-(-v // quantum) for v in at_least] if at_least is not None else [0] * count
    high = [v // quantum for v in at_most] if at_most is not None else [units] * count
    if sum(low) > units or sum(high) < units or any(lo > hi for lo, hi in zip(low, high, strict=True)):
        raise PlanError(
            f"no shares of {total} are between at least {tuple(low)} and at most {tuple(high)} times {quantum}: "
            "loosen the limits or add a device"
        )
    whole = _in_proportion(units, weights, low, high)
    if whole is None:
        whole = _largest_remainder(units, _water_fill(units, weights, low, high), high)
    return tuple(share * quantum for share in whole)


def _in_proportion(units: int, weights: Sequence[float], low: Sequence[int], high: Sequence[int]) -> list[int] | None:
    """Return the largest-remainder shares; None if they break a limit.

    All floats are integer multiples of some power of two. So integers are as exact here as fractions, and 100 times faster.
    """
    pairs = [float(w).as_integer_ratio() for w in weights]
    finest = max(denominator for _, denominator in pairs)
    rates = [numerator * (finest // denominator) for numerator, denominator in pairs]
    total = sum(rates)
    if not total:
        return None
    scaled = [units * rate for rate in rates]
    if any(not lo * total <= s <= hi * total for lo, s, hi in zip(low, scaled, high, strict=True)):
        return None
    parts = [divmod(s, total) for s in scaled]
    whole = [quotient for quotient, _ in parts]
    order = sorted(range(len(parts)), key=lambda i: (-parts[i][1], i))
    missing = units - sum(whole)
    if any(whole[i] >= high[i] for i in order[:missing]):
        return None
    for i in order[:missing]:
        whole[i] += 1
    return whole


def _water_fill(units: int, weights: Sequence[float], low: Sequence[int], high: Sequence[int]) -> list[Fraction]:
    """Return shares before rounding: clamp(level * weight, low, high), for the level at which they sum to `units`.

    Fractions are exact for any range of speeds, so every device computes the same shares.
    """
    rates = [Fraction(float(w)) for w in weights]
    total = sum(rates)
    if total:
        exact = [units * rate / total for rate in rates]
        if all(lo <= e <= hi for lo, e, hi in zip(low, exact, high, strict=True)):
            return exact

    def clamped(level: Fraction) -> list[Fraction]:
        limits = zip(rates, low, high, strict=True)
        return [min(max(level * rate, Fraction(lo)), Fraction(hi)) for rate, lo, hi in limits]

    def filled(level: Fraction) -> Fraction:
        return sum(clamped(level), Fraction(0))

    # The sum grows with the level. It is linear between levels at which a device reaches one of its limits.
    meets = (Fraction(limit) / rate for rate, *pair in zip(rates, low, high, strict=True) if rate for limit in pair)
    levels = sorted({Fraction(0), *meets})
    i = bisect_left(levels, Fraction(units), key=filled)
    if i == 0 or i == len(levels):
        # All devices are at their lower limits, or at their upper ones. Then devices of weight zero get the rest.
        return clamped(levels[min(i, len(levels) - 1)])
    below, above = levels[i - 1 : i + 1]
    return clamped(below + (above - below) * (units - filled(below)) / (filled(above) - filled(below)))


def _largest_remainder(units: int, exact: Sequence[Fraction], high: Sequence[int]) -> list[int]:
    whole = [math.floor(e) for e in exact]
    missing = units - sum(whole)
    order = sorted(range(len(exact)), key=lambda i: (whole[i] - exact[i], i))
    # Only if all devices with a weight are at their maximum are several rounds needed, for the other devices.
    while missing > 0:
        for i in order:
            if missing and whole[i] < high[i]:
                whole[i] += 1
                missing -= 1
    return whole


def even(total: int, devices: int, *, quantum: int = 1) -> Shares:
    """Return shares that are as equal as possible, in multiples of `quantum`."""
    return apportion(total, [1.0] * devices, quantum=quantum)


def rescale(shares: Shares, total: int) -> Shares:
    """Return shares in the same proportions for another extent, such as the smaller last batch of an epoch."""
    return shares if sum(shares) == total else apportion(total, shares)


def ranges(shares: Shares) -> tuple[tuple[int, int], ...]:
    """Return the half-open range of each device along the axis: (3, 0, 2) -> ((0, 3), (3, 3), (3, 5))."""
    result, start = [], 0
    for share in shares:
        result.append((start, start + share))
        start += share
    return tuple(result)


def holders(shares: Shares) -> tuple[int, ...]:
    """Return the devices whose share is not zero."""
    return tuple(i for i, share in enumerate(shares) if share)


def check(shares: Shares, total: int, devices: int, what: str) -> None:
    """Raise PlanError if there is not one share per device, a share is negative, or they do not sum to `total`."""
    if len(shares) != devices:
        raise PlanError(
            f"{what}: shares {shares} name {len(shares)} devices, the fleet has {devices}: give one share per device"
        )
    if any(share < 0 for share in shares):
        raise PlanError(f"{what}: shares {shares} include a negative one: a share is zero (idle) or more")
    if sum(shares) != total:
        raise PlanError(f"{what}: shares {shares} sum to {sum(shares)}, the axis has {total}: make them sum to {total}")
