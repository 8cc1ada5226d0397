"""Wait with a time limit, end with the launcher, and handle signals that make a device leave or end.

SIGTERM makes a device leave after the step. SIGUSR1 ends the training on all devices. A machine that shuts down sends SIGTERM
to a device and to its launcher. So the launcher forwards its own as SIGUSR2, which does not count as a second SIGTERM.
"""

import os
import queue
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

LEAVE, END, LEAVE_TOO = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2


def within(limit_s: float, work: Callable[[], T]) -> T:
    """Run ``work`` on a daemon thread and return its result. TimeoutError after ``limit_s``. Signals interrupt the wait."""
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
    """End this process when its launcher ends or is killed.

    Only the launcher holds the write end of a pipe. CONVOY_PARENT_PIPE is the number of the read end; if unset, do nothing.
    """
    # Remove the variable: in a child process the number would mean another file.
    number = os.environ.pop("CONVOY_PARENT_PIPE", "")
    pipe = int(number) if number.isdecimal() else -1
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(pipe).st_mode)
    except OSError:
        is_pipe = False
    if not is_pipe:
        return
    os.set_inheritable(pipe, False)

    def watch() -> None:
        while os.read(pipe, 1):
            pass
        with suppress(OSError):  # the launcher may have been the reader
            os.write(2, b"error: the launcher of this device has ended, so the device ends\n")
        os._exit(2)

    threading.Thread(target=watch, name="convoy-parent", daemon=True).start()


@contextmanager
def handle_signals(members: Any) -> Iterator[None]:
    """Inside the context, forward the signals to `members`, a `convoy.elastic.members.Members`.

    A second SIGTERM or SIGUSR1 ends the process. So does the first one before training, while `members.generation` is None.
    Signals that the process already ignores or handles keep their handlers.
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
