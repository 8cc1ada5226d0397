"""Wire formats: in which numbers the tensors of a step travel between devices.

`exact` sends them as they are. `inexact-bf16` sends float32 and float64 as bfloat16: float32's range with 8 bits of precision,
so a number that travels is off by at most 2^-8 of itself. Copies stay equal to the last bit, because a device keeps the
same rounded numbers that it sends as copies. Summands are rounded to travel, and added in full width where they arrive;
where copies are made of them in one round, a device rounds its own too.
Weights, buffers, statistics of batch norms and whatever is no floating number stay as they are.
"""

from typing import Literal, cast, get_args

from convoy.errors import unknown_name
from convoy.sharding.layout import Layout, Replicated
from convoy.sharding.redistribute import Schedule

Wire = Literal["exact", "inexact-bf16"]
WIRES: tuple[str, ...] = get_args(Wire)

_SHORT = {"bf16": "inexact-bf16"}
_WIDE = ("float32", "float64")
_BF16_BYTES = 2


def wire_named(name: str) -> Wire:
    """A wire format as a person writes it: by its name, or "bf16" for short.

    Raises:
        InputError: unknown name; the choices are listed.
    """
    full = _SHORT.get(name, name)
    if full not in WIRES:
        raise unknown_name("wire format", name, WIRES)
    return cast(Wire, full)


def wire_of(dtype: str, wire: Wire) -> Wire:
    """The format in which numbers of one type travel, where `wire` is asked for; the type as torch names it."""
    return wire if dtype in _WIDE else "exact"


def wire_bytes(wire: Wire, itemsize: int) -> int:
    """Bytes of one number on the wire that has `itemsize` bytes in memory."""
    return itemsize if wire == "exact" else min(itemsize, _BF16_BYTES)


def rounds_copies(wire: Wire, schedule: Schedule, dst: Layout) -> bool:
    """Whether a move rounds also what stays on its device: copies are one tensor, and some of them arrive rounded."""
    travels = any(t.sender != t.receiver for transfers in schedule.rounds for t in transfers)
    return wire != "exact" and isinstance(dst, Replicated) and travels
