"""Gives memory that a process has freed back to the system."""

import ctypes
import functools
from collections.abc import Callable


def give_back_freed() -> None:
    """Return pages that hold nothing any more. A process that keeps freed memory for its next tensors would otherwise go on
    with the most that it ever took, in whatever holes that lies (see `launch/host_job.py`, `memory_environment`).

    It takes about a millisecond for each hundred megabytes that are free. Nothing is done where the C library has no such call.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # other C libraries; Windows
        return None
