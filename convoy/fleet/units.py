"""Parses numbers with units such as `12 GB`, `1 Gbit/s`, `450 ms`, `64 GiB` or `12e9` into SI units."""

import math
import re
import sys
from collections.abc import Mapping
from typing import Literal

from convoy.errors import InputError

Dimension = Literal["bytes", "bytes_per_s", "s", "flop_per_s", "W"]

_LARGE = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}


def _prefixed(units: Mapping[str, float], prefixes: Mapping[str, float]) -> dict[str, float]:
    return {f"{p}{unit}": factor * size for p, factor in prefixes.items() for unit, size in units.items()}


_BYTES = _prefixed({"b": 1.0, "byte": 1.0, "bytes": 1.0}, _LARGE | _BINARY)
_BITS = _prefixed({"bit": 1 / 8, "bits": 1 / 8, "bps": 1 / 8}, _LARGE)

_UNITS: Mapping[Dimension, Mapping[str, float]] = {
    "bytes": _BYTES,
    "bytes_per_s": _BYTES | _BITS,
    "s": {
        "s": 1.0, "sec": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9,
        "min": 60.0, "minute": 60.0, "minutes": 60.0, "h": 3600.0, "hour": 3600.0, "hours": 3600.0,
    },
    "flop_per_s": _prefixed({"flop": 1.0, "flops": 1.0}, _LARGE),
    "W": {"w": 1.0, "watt": 1.0, "watts": 1.0, "mw": 1e-3, "kw": 1e3},
}  # fmt: skip

_RULES: Mapping[Dimension, tuple[str, str]] = {
    "bytes": ("an amount of memory", "12 GB, 64 GiB, 512 MB or 12e9 (bytes)"),
    "bytes_per_s": ("a rate", "1 Gbit/s, 110 MB/s or 125e6 (bytes/s)"),
    "s": ("a time", "450 ms, 50 us, 2 s, 3 min or 0.45 (seconds)"),
    "flop_per_s": ("a rate of arithmetic", "12.7 TFLOP/s, 80 GFLOP/s or 80e9 (FLOP/s)"),
    "W": ("a power", "170 W or 170 (watts)"),
}

_FORM = re.compile(r"\s*(?P<number>[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(?P<unit>[^\d\s].*?)?\s*")


def quantity(value: object, dimension: Dimension) -> float:
    """Convert a number, or a text with a unit, to SI units.

    Case matters only for bits and bytes per second: `Gb/s` are bits, `GB/s` bytes.
    """
    kind, examples = _RULES[dimension]
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value)
    found = _FORM.fullmatch(value) if isinstance(value, str) and len(value) <= 100 else None
    if found is None:
        raise InputError(f"{kind} is a number with or without a unit: write e.g. {examples}")
    unit = found["unit"] or ""
    size = _size(unit, dimension)
    if size is None:
        raise InputError(f"{unit!r} is no unit of {kind}: write e.g. {examples}")
    number = float(found["number"].replace("_", "")) * size
    if not math.isfinite(number):
        raise InputError(f"{kind} is a finite number: write e.g. {examples}")
    return number


def _size(unit: str, dimension: Dimension) -> float | None:
    """Return a unit's factor to SI units; None if it is not a unit of this dimension."""
    if not unit:
        return 1.0
    word = re.sub(r"\s+", "", unit)
    rate = dimension in ("bytes_per_s", "flop_per_s")
    short = re.sub(r"(/s|/sec|/second|ps)$", "", word, flags=re.IGNORECASE) if rate else word
    if dimension == "bytes_per_s" and short[-1:].lower() == "b" and short[:-1].lower() in _LARGE:
        # Only here case matters: b is a bit, B a byte. 1 gb/s is ambiguous.
        factor = _LARGE[short[:-1].lower()]
        return {"b": factor / 8, "B": factor}[short[-1]] if not short[:-1] or short[0] in "kKMGTP" else None
    known = _UNITS[dimension]
    return known.get(word.lower(), known.get(short.lower()))
