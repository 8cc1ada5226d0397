"""Numbers as people read them, and marks for axes."""

import math
from collections.abc import Callable, Mapping


def plain(value: float | None, digits: int = 4) -> str:
    """So many significant digits, no exponent where it can be avoided: 11,069; 0.0132; 3.5e-05; a dash for nothing."""
    if value is None:
        return "–"
    if value and not 1e-4 <= abs(value) < 1e15:
        return f"{value:.{digits - 1}e}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def percent(part: float | None) -> str:
    return "–" if part is None else f"{part:.1%}"


def axis_percent(part: float) -> str:
    """For axes: 90%, 61.94%."""
    return f"{100 * part:.4g}%"


def in_bytes(count: int) -> str:
    """With a unit that leaves few digits; a dash for nothing."""
    if not count:
        return "-"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def seconds(value: float | None) -> str:
    """With a unit that leaves few digits: 13.2 ms, 2.04 s, 3 min 5 s, 2 h 4 min."""
    if value is None:
        return "–"
    if value >= 3600:
        return f"{int(value // 3600)} h {int(value % 3600 // 60)} min"
    if value >= 60:
        return f"{int(value // 60)} min {int(value % 60)} s"
    unit, size = unit_of(value)
    return f"{plain(value / size, 3)} {unit}"


SHOWN: Mapping[str, Callable[[float], str]] = {
    "plain": plain,
    "percent": axis_percent,
    "bytes": lambda value: in_bytes(round(value)) if round(value) else "0",
}
"""How the values of a chart are written; the script of the page writes them alike."""


def unit_of(value_s: float) -> tuple[str, float]:
    """The unit of time for a value, and its seconds."""
    return next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if value_s >= size), ("µs", 1e-6))


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers from `low` to `high`, about so many: 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / count
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if (high - low) / (size * factor) <= count + 1.5)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]
