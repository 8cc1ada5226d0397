"""Find the line of the user's program that this process runs, for messages about devices that run different steps."""

import gc
import linecache
import os
import sys
import sysconfig
import threading
from contextlib import suppress
from types import FrameType

import torch

MAX_CHARACTERS = 120  # characters of a line that a message shows

SAME_STEPS = (
    "Every device must run the same steps: move such a line out of `if rank == 0:`, and let device 0 alone only print and save "
    "(`if convoy.is_first():`)"
)
"""Remedy if devices are at different lines."""

_ASKING = threading.Lock()

_OURS = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (os.path.dirname(__file__), torch.__file__))
_LIBRARY = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def current_line() -> str | None:
    """Return the line of the user's program that the main thread runs: "train.py line 57, `model.full_state_dict()`".

    Return None if it runs no user code, as in `convoy train`.
    """
    with _ASKING:
        collects = gc.isenabled()
        gc.disable()  # a collection here can deadlock Python 3.11 (python/cpython#106883)
        try:
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
        finally:
            if collects:
                gc.enable()
    found = _user_frame(frame)
    if found is None:
        return None
    path, text = found.f_code.co_filename, ""
    with suppress(Exception):  # the user's own import loader may fail
        text = linecache.getline(path, found.f_lineno, found.f_globals).strip()[:MAX_CHARACTERS]
    return f"{os.path.basename(path)} line {found.f_lineno}" + (f", `{text}`" if text else "")


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame in the user's own files, else the innermost one in an installed package."""
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
