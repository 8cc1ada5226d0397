"""Which line of the user's program a process is at: what to name where devices wait for each other at different ones."""

import gc
import linecache
import os
import sys
import sysconfig
import threading
from contextlib import suppress
from types import FrameType

import torch

MOST_CHARACTERS = 120
"""Of a line that is shown."""

SAME_STEPS = (
    "Every device must run the same steps: move such a line out of `if rank == 0:`, and let device 0 alone only print and save "
    "(`if convoy.is_first():`)"
)
"""What to do where the devices are at different lines."""

_ASKING = threading.Lock()

_OURS = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (os.path.dirname(__file__), torch.__file__))
_LIBRARY = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def own_place() -> str | None:
    """The line of the user's program that the main thread is at, as in "train.py line 57, `model.full_state_dict()`".

    None where it runs none: in the command `convoy train`, or at its end.
    """
    found = _users(_frame_of(threading.main_thread().ident or 0))
    if found is None:
        return None
    path = found.f_code.co_filename
    with suppress(Exception):  # a loader of the user's own may fail
        if text := linecache.getline(path, found.f_lineno, found.f_globals).strip():
            return f"{os.path.basename(path)} line {found.f_lineno}, `{text[:MOST_CHARACTERS]}`"
    return f"{os.path.basename(path)} line {found.f_lineno}"


def _frame_of(thread: int) -> FrameType | None:
    """Where a thread is. Python's garbage collector does not run meanwhile: in Python 3.11 it can let another thread run while
    this one holds a lock of the interpreter, and the whole process stands still (python/cpython#106883)."""
    with _ASKING:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread)
        finally:
            if collects:
                gc.enable()


def _users(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's own files; of a package that is installed, where there are none."""
    second = None
    while frame is not None:
        path = os.path.abspath(frame.f_code.co_filename)
        installed = any(part in path for part in _INSTALLED)
        if not path.startswith(_OURS) and not frame.f_code.co_filename.startswith("<frozen"):
            if installed:
                second = second or frame
            elif not path.startswith(_LIBRARY):
                return frame
        frame = frame.f_back
    return second
