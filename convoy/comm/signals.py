"""Signals to a device that trains: SIGTERM lets it leave after the step, SIGUSR1 ends the training on all devices."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

LEAVE, END = signal.SIGTERM, signal.SIGUSR1


class Asked(Protocol):
    """What can be asked to leave, and to end."""

    @property
    def generation(self) -> object: ...

    def leave(self) -> None: ...

    def end(self) -> None: ...


@contextmanager
def hearing_signals(members: Asked) -> Iterator[None]:
    """Within it they do that; a second one of a kind ends the process, and so does the first where it does not train yet."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hear(what: Callable[[], None]) -> Callable[[int, FrameType | None], None]:
        def handle(signum: int, _frame: FrameType | None) -> None:
            signal.signal(signum, signal.SIG_DFL)
            if members.generation is None:
                os.kill(os.getpid(), signum)
            else:
                what()

        return handle

    before = {each: signal.signal(each, hear(what)) for each, what in ((LEAVE, members.leave), (END, members.end))}
    try:
        yield
    finally:
        for each, handler in before.items():
            # None stands for a handler that C code installed; Python cannot give it back.
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
