"""The dtype in which the tensors of a step travel between devices.

`exact` sends them as they are. `inexact-bf16` sends float32 and float64 as bfloat16: the range of float32 with 8 bits of
precision, a relative error of at most 2^-8. Replicas stay bitwise equal, because a sender keeps the rounded numbers that it
sends as copies. The summands of a sum are rounded to travel and added in their own dtype at the receiver; where that happens in
one round whose result is replicated, a device rounds its own summand too. Weights, buffers, statistics of batch norms and
whatever is not float32 or float64 are sent as they are. Options and plan files call it `wire`.
"""

from typing import Literal, cast, get_args

from convoy.errors import unknown_name
from convoy.layout.layout import Layout, Replicated
from convoy.layout.redistribute import Schedule

CommDtype = Literal["exact", "inexact-bf16"]
COMM_DTYPES: tuple[str, ...] = get_args(CommDtype)

_SHORT = {"bf16": "inexact-bf16"}
_WIDE = ("float32", "float64")

NARROW_DTYPE, NARROW_BYTES = "bfloat16", 2
"""What `narrow` means in device programs: the one format there is that rounds."""


def parse_comm_dtype(name: str) -> CommDtype:
    """A comm dtype as a person writes it: by its name, or "bf16" for short.

    Raises:
        InputError: unknown name; the choices are listed.
    """
    full = _SHORT.get(name, name)
    if full not in COMM_DTYPES:
        raise unknown_name("wire format", name, COMM_DTYPES)
    return cast(CommDtype, full)


def comm_dtype_of(dtype: str, wire: CommDtype) -> CommDtype:
    """How a tensor of a dtype ("float32", as torch names it) travels where `wire` is asked for."""
    return wire if dtype in _WIDE else "exact"


def sent_itemsize(wire: CommDtype, itemsize: int) -> int:
    """Bytes sent for one number that has `itemsize` bytes in memory."""
    return itemsize if wire == "exact" else narrow_itemsize(itemsize)


def narrow_itemsize(itemsize: int) -> int:
    """Bytes of one narrow number that has `itemsize` bytes in memory."""
    return min(itemsize, NARROW_BYTES)


def narrow_dtype(dtype: str) -> str:
    """The dtype of narrow numbers of a dtype, both as torch names them ("float32")."""
    return NARROW_DTYPE if dtype in _WIDE else dtype


def rounds_own_copy(wire: CommDtype, schedule: Schedule, dst: Layout) -> bool:
    """Whether a move also rounds what stays on its device: other replicas arrive rounded, and all must be equal."""
    travels = any(t.sender != t.receiver for transfers in schedule.rounds for t in transfers)
    return wire != "exact" and isinstance(dst, Replicated) and travels
