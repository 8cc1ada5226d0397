"""What a launcher, or the agent of a host, does at SIGTERM: its devices finish the step and leave, or end the training."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress

from convoy.comm import roster
from convoy.comm.signals import END, LEAVE_TOO
from convoy.launch.supervisor import Interrupted, Supervisor

LEAVE_S = 60.0
"""So long devices may take for that before they are killed. What sends SIGTERM mostly allows less, and kills all then."""


def let_leave(devices: Supervisor, own: int, over: Callable[[], bool] = lambda: False) -> None:
    """Let devices that train leave after the step, and the training end then where no others would go on; end the rest at once,
    such as those that do not train yet. After `LEAVE_S` and some seconds at most all have ended.

    Args:
        own: so many devices that train were started together with these; where there are no more, nobody would go on.
        over: whether they are to be ended now, whatever they do.

    Raises:
        Interrupted: this process was asked to end once more. What still runs is left to the context's end.
    """
    devices.kill_suspended()
    running = devices.running
    rows = roster.of_processes([process.popen.pid for process in running])
    members = [() if row is None else row.members for row in rows]
    if any(members):
        for process, those in zip(running, members, strict=True):
            signum = signal.SIGTERM if not those else END if len(those) <= own else LEAVE_TOO
            process.stopped |= not those
            with suppress(ProcessLookupError):
                os.kill(process.popen.pid, signum)
        devices.listen(lambda: not devices.running or over(), LEAVE_S)
    devices.end(0.0)


def ends_in_order(interrupted: Interrupted) -> bool:
    """Whether a signal asks for that. Ctrl-C, and a terminal that closes, end all at once: the devices get them, too."""
    return interrupted.signum is signal.SIGTERM


def ending_text(count: int) -> str:
    """What a person is told who has sent it."""
    return f"SIGTERM: ending {count} device{'s' * (count > 1)}: where they train after the step, at once after a second one"
