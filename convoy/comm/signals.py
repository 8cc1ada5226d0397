"""Signals to a device that trains: SIGTERM lets it leave after the step, SIGUSR1 ends the training on all devices.

A machine that is switched off sends SIGTERM to each of its processes, so to a device and to who started it. What the latter
passes on is therefore another signal, which may come beside it and is no second one: SIGUSR2.
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
    """What can be asked to leave, and to end."""

    @property
    def generation(self) -> object: ...

    def leave(self) -> None: ...

    def end(self) -> None: ...


@contextmanager
def hearing_signals(members: Asked) -> Iterator[None]:
    """Within it they do that; a second SIGTERM or SIGUSR1 ends the process, and so does the first where it does not train yet.

    A signal that the process ignores, or has a use of its own for, stays as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hear(what: Callable[[], None]) -> Callable[[int, FrameType | None], None]:
        def handle(signum: int, _frame: FrameType | None) -> None:
            if signum != LEAVE_TOO or members.generation is None:
                signal.signal(signum, signal.SIG_DFL)
            if members.generation is None:
                os.kill(os.getpid(), signum)
            else:
                what()

        return handle

    wishes = {LEAVE: members.leave, END: members.end, LEAVE_TOO: members.leave}
    heard = [each for each in wishes if signal.getsignal(each) == signal.SIG_DFL]
    for each in heard:
        signal.signal(each, hear(wishes[each]))
    try:
        yield
    finally:
        for each in heard:
            signal.signal(each, signal.SIG_DFL)
