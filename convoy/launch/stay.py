"""`--detach`: the agent of a host goes on without whoever started it, until its devices have ended.

It begins as a process behind the one that was started, in a session of its own, so that no end of a connection, a terminal or
a process before it is its own. Once all devices everywhere train, it lets go of what it was started with: then it gets no
more orders, and what it has to say stands in a file. It starts those of its devices again that were lost, where it is to. It
ends with them, and they with it.
"""

import math
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from convoy.comm import roster
from convoy.launch.again import Again
from convoy.launch.exit_status import Ending
from convoy.launch.leaving import let_leave
from convoy.launch.stopped import LOOK_S, Stopped
from convoy.launch.supervisor import Interrupted, Supervisor


def go_behind() -> int:
    """Go on in another process: there it returns a file, to be closed when that lets go of what it was started with. The one
    that was started waits, and ends then."""
    waits, held = os.pipe()
    if os.fork():
        os.close(held)
        os.read(waits, 1)  # nothing is written: it ends when the other side is closed
        os._exit(0)
    os.close(waits)
    os.setsid()
    return held


def let_go(held: int, log: Path) -> None:
    """Be nobody's process any more: input is empty, and output goes to the end of a file."""
    nothing, out = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for file, instead in ((0, nothing), (1, out), (2, out)):
        os.dup2(instead, file)
    for file in (nothing, out, held):
        os.close(file)


def all_train(devices: Supervisor) -> bool:
    """Whether all devices here have begun to train, as they have noted it."""
    rows = roster.of_processes([process.popen.pid for process in devices.running])
    return all(row is not None and row.trains for row in rows)


def stay(devices: Supervisor, again: Again, *, goes_on: bool, grace_s: float, silence_s: float) -> None:
    """Until all devices have ended, and none is to be started again: nobody gives orders any more.

    Args:
        goes_on: they go on when one of them is lost; otherwise all end then.
        silence_s: one that is stopped (a debugger, Ctrl-Z) is killed after so long: for the others it is lost by then.
    """
    stopped = Stopped(devices, silence_s)

    def over() -> bool:
        again.tend()
        return (devices.failed and not goes_on) or not (devices.running or again.next_s < math.inf)

    while not over():
        try:
            devices.listen(over, LOOK_S)
        except Interrupted as interrupted:  # the machine is switched off, perhaps
            again.stop()
            print(f"{interrupted.signum.name}: its devices are to leave", flush=True)
            with suppress(Interrupted):  # a second one: no more waiting
                let_leave(devices, len(devices.running))
            return
        stopped.tend()
    with suppress(Interrupted):
        devices.end(grace_s)


def note_line(line: str) -> None:
    """Say something, in the file."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", flush=True)


def note_end(ending: Ending, device: int | None) -> None:
    """Say how a device ended, in the file."""
    how = f"exit status {ending.status}" if ending.status >= 0 else signal.Signals(-ending.status).name
    note_line(f"device {ending.device if device is None else device} ({ending.name}) ended: {how}")
