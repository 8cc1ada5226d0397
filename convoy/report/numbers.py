"""Formats numbers for readers."""


def plain(value: float | None, digits: int = 4) -> str:
    """Format with significant digits: 11,069; 0.0132; 3.500e-05; a dash for None."""
    if value is None:
        return "–"
    if value and not 1e-4 <= abs(value) < 1e15:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def percent(part: float | None) -> str:
    return "–" if part is None else f"{part:.1%}"


def in_bytes(count: int) -> str:
    """Format as GB, MB, kB or B; a dash for 0."""
    if not count:
        return "-"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def in_bits(bytes_per_s: float) -> str:
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def seconds(value: float | None) -> str:
    """Format as 13.2 ms, 2.04 s, 3 min 5 s or 2 h 4 min; a dash for None."""
    if value is None:
        return "–"
    if value >= 3600:
        return f"{int(value // 3600)} h {int(value % 3600 // 60)} min"
    if value >= 60:
        return f"{int(value // 60)} min {int(value % 60)} s"
    unit, size = unit_of(value)
    return f"{plain(value / size, 3)} {unit}"


def unit_of(value_s: float) -> tuple[str, float]:
    """Return the unit for printing a time (s, ms or µs), and the unit's length in seconds."""
    return next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if value_s >= size), ("µs", 1e-6))
