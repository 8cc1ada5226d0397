"""Signals that ask a rehearsal to end are noted, not obeyed at once: nothing is left half made or half removed."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """While the context lasts, the first of SIGINT, SIGTERM and SIGHUP is kept in `caught`.

    A signal that this process ignores stays ignored. Outside the main thread Python handles no signals; there the
    context does nothing.
    """

    def __init__(self) -> None:
        self.caught: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for signum in _ENDING:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            # None stands for a handler that C code installed; Python cannot give it back.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        self.caught = self.caught or signal.Signals(signum)
