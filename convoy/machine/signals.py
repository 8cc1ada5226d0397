"""Signals to a training device: SIGTERM makes it leave after the step, SIGUSR1 ends the training on all devices.

A machine that shuts down sends SIGTERM to every process: to a device and to its launcher. The launcher therefore
forwards its own as SIGUSR2, which a device does not count as a second SIGTERM.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

LEAVE, END, LEAVE_TOO = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2


class Asked(Protocol):
    """A membership that takes requests to leave and to end."""

    @property
    def generation(self) -> object: ...

    def leave(self) -> None: ...

    def end(self) -> None: ...


@contextmanager
def handle_signals(members: Asked) -> Iterator[None]:
    """Within the block, pass the signals on to `members`.

    The second SIGTERM or SIGUSR1 ends the process. So does the first if the device does not train yet. Signals that the
    process ignores or handles itself stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(request: Callable[[], None]) -> Callable[[int, FrameType | None], None]:
        def handle(signum: int, _frame: FrameType | None) -> None:
            if signum != LEAVE_TOO or members.generation is None:
                signal.signal(signum, signal.SIG_DFL)
            if members.generation is None:
                os.kill(os.getpid(), signum)
            else:
                request()

        return handle

    requests = {LEAVE: members.leave, END: members.end, LEAVE_TOO: members.leave}
    handled = [each for each in requests if signal.getsignal(each) == signal.SIG_DFL]
    for each in handled:
        signal.signal(each, handler(requests[each]))
    try:
        yield
    finally:
        for each in handled:
            signal.signal(each, signal.SIG_DFL)
