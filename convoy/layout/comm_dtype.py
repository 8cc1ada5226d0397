"""Define the dtype of messages. Options and plan files call it `wire`.

`exact` sends tensors unchanged. `inexact-bf16` sends float32 and float64 as bfloat16: the range of float32 with 8 bits of
precision, a relative error of at most 2^-8. Replicas stay bitwise equal, because the sender of a copy also keeps the rounded
numbers. Summands are rounded for sending and added in their own dtype. If every device computes a sum in one round, each also
rounds its own summand. Weights, buffers, batch norm statistics and other dtypes are always sent unchanged.
"""

from typing import Literal, cast, get_args

from convoy.errors import unknown_name
from convoy.layout.collectives import Schedule
from convoy.layout.layout import Layout, Replicated

CommDtype = Literal["exact", "inexact-bf16"]
COMM_DTYPES: tuple[str, ...] = get_args(CommDtype)

_SHORT = {"bf16": "inexact-bf16"}
_WIDE = ("float32", "float64")

NARROW_DTYPE, NARROW_BYTES = "bfloat16", 2
"""Dtype of buffers marked `narrow` in device programs, and its bytes per entry."""


def parse_comm_dtype(name: str) -> CommDtype:
    """Return the comm dtype of this name or short name ("bf16"). InputError: unknown name."""
    full = _SHORT.get(name, name)
    if full not in COMM_DTYPES:
        raise unknown_name("wire format", name, COMM_DTYPES)
    return cast(CommDtype, full)


def comm_dtype_of(dtype: str, wire: CommDtype) -> CommDtype:
    """Return the format of messages for tensors of `dtype` (torch's name, "float32") under option `wire`."""
    return wire if dtype in _WIDE else "exact"


def sent_itemsize(wire: CommDtype, itemsize: int) -> int:
    """Return the bytes sent for one number of `itemsize` bytes."""
    return itemsize if wire == "exact" else narrow_itemsize(itemsize)


def narrow_itemsize(itemsize: int) -> int:
    """Return the bytes of one number of `itemsize` bytes after narrowing."""
    return min(itemsize, NARROW_BYTES)


def narrow_dtype(dtype: str) -> str:
    """Return the dtype after narrowing; both are torch's names ("float32")."""
    return NARROW_DTYPE if dtype in _WIDE else dtype


def rounds_own_copy(wire: CommDtype, schedule: Schedule, dst: Layout) -> bool:
    """Return whether senders of a move also round their own copy, so that all replicas are equal."""
    sends = any(t.sender != t.receiver for transfers in schedule.rounds for t in transfers)
    return wire != "exact" and isinstance(dst, Replicated) and sends
