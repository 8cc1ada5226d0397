"""This process: waits that signals can interrupt, and the launcher whose end also ends it."""

import os
import queue
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def within(limit_s: float, work: Callable[[], T]) -> T:
    """Return the result of ``work``, run on a thread so that a signal or the limit can end the wait for it.

    Raises:
        TimeoutError: it took longer. The thread continues, but does not keep the process alive.
    """
    outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=run, name="convoy-join", daemon=True).start()
    try:
        result, error = outcome.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError(f"not done after {limit_s:g} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def watch_parent() -> None:
    """End this process as soon as the launcher that started it has ended, even if it was killed.

    The launcher alone holds the other end of a pipe, whose number is in CONVOY_PARENT_PIPE. Without it, do nothing.
    """
    # Taken out of the environment: in a process started from here the number would mean another file.
    number = os.environ.pop("CONVOY_PARENT_PIPE", "")
    if not number.isdecimal():
        return
    pipe = int(number)
    try:
        if not stat.S_ISFIFO(os.fstat(pipe).st_mode):
            return
    except OSError:
        return
    os.set_inheritable(pipe, False)

    def watch() -> None:
        while os.read(pipe, 1):
            pass
        with suppress(OSError):  # the launcher may have been the reader
            os.write(2, b"error: the launcher of this device is gone, so it ends too\n")
        os._exit(2)

    threading.Thread(target=watch, name="convoy-parent", daemon=True).start()
