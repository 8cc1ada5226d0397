"""Numbers on the network: in which dtype the tensors of a step travel between devices.

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

CommDtype = Literal["exact", "inexact-bf16"]
COMM_DTYPES: tuple[str, ...] = get_args(CommDtype)

_SHORT = {"bf16": "inexact-bf16"}
_WIDE = ("float32", "float64")
_BF16_BYTES = 2


def parse_comm_dtype(name: str) -> CommDtype:
    """A wire format as a person writes it: by its name, or "bf16" for short.

    Raises:
        InputError: unknown name; the choices are listed.
    """
    full = _SHORT.get(name, name)
    if full not in COMM_DTYPES:
        raise unknown_name("wire format", name, COMM_DTYPES)
    return cast(CommDtype, full)


def comm_dtype_of(dtype: str, wire: CommDtype) -> CommDtype:
    """The format in which numbers of one type travel, where `wire` is asked for; the type as torch names it."""
    return wire if dtype in _WIDE else "exact"


def sent_itemsize(wire: CommDtype, itemsize: int) -> int:
    """Bytes of one number on the wire that has `itemsize` bytes in memory."""
    return itemsize if wire == "exact" else min(itemsize, _BF16_BYTES)


def rounds_own_copy(wire: CommDtype, schedule: Schedule, dst: Layout) -> bool:
    """Whether a move rounds also what stays on its device: copies are one tensor, and some of them arrive rounded."""
    travels = any(t.sender != t.receiver for transfers in schedule.rounds for t in transfers)
    return wire != "exact" and isinstance(dst, Replicated) and travels
