"""Let a machine take part in a training while nobody uses it: `convoy join --when-idle`.

Every `POLL_S` seconds a meter reads how others use the machine: input of logged-in users, processor time of other processes,
other processes on its GPUs. From the readings `use` decides whether the machine is in use.
"""

import math
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from convoy.errors import InputError
from convoy.launch.host_job import CONVOY_COMMAND
from convoy.launch.supervisor import Interrupts, Signalled, Start, Supervisor

POLL_S = 5.0  # seconds between two readings
WINDOW = 12  # readings whose processor time is averaged, so that a short task makes no device leave
QUIET_S = 300.0  # seconds without input before a machine is idle
START_CORES, STAY_CORES = 0.5, 1.0  # most cores that others use: to join, and to stay
ANSWER_S = 5.0  # limit for a program that reports on the machine


@dataclass(frozen=True)
class MachineUse:
    """The use of a machine by others.

    Attributes:
        cores: processor cores that other processes have used since the reading before.
        input_age_s: seconds since the last input of a user; infinite if there was none.
        gpu: another process computes on a GPU.
    """

    cores: float = 0.0
    input_age_s: float = math.inf
    gpu: bool = False


def use(readings: Sequence[MachineUse], takes_part: bool) -> str:
    """Return how others use the machine, from the last `WINDOW` readings; empty if it is idle."""
    last, cores = readings[-1], sum(reading.cores for reading in readings) / len(readings)
    if last.input_age_s < QUIET_S:
        return f"somebody uses it (last input {last.input_age_s:.0f} s ago)"
    if last.gpu:
        return "another process computes on its GPU"
    if cores > (STAY_CORES if takes_part else START_CORES):
        return f"other processes use {cores:.1f} cores"
    return "" if takes_part or len(readings) == WINDOW else "it was not observed for long enough"


class UseMeter:
    """A meter of a machine's use by all processes except this one and its children."""

    def __init__(self) -> None:
        self._read_s, self._used_s, self._own_s = time.monotonic(), _used_s(), 0.0

    def read(self) -> MachineUse:
        """Return the use now. Its processor time counts from the last call."""
        own = [psutil.Process(), *psutil.Process().children(recursive=True)]
        own_s = 0.0
        for process in own:
            with suppress(psutil.Error):  # it has just ended
                own_s += sum(process.cpu_times()[:2])
        now_s, used_s = time.monotonic(), _used_s()
        others_s = used_s - self._used_s - max(0.0, own_s - self._own_s)
        cores = max(0.0, others_s) / max(0.1, now_s - self._read_s)
        self._read_s, self._used_s, self._own_s = now_s, used_s, own_s
        return MachineUse(cores, _input_age_s(), _others_on_gpu([process.pid for process in own]))


def _used_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "nice", 0.0))


def _input_age_s() -> float:
    """Return the seconds since the last input at a terminal, or in a graphical session that its desktop has not called idle."""
    ages_s = [math.inf]
    for terminal in (*Path("/dev/pts").glob("[0-9]*"), *Path("/dev").glob("tty[0-9]*")):
        with suppress(OSError):
            ages_s.append(max(0.0, time.time() - terminal.stat().st_atime))
    sessions = [line.split()[0] for line in _output("loginctl", "list-sessions", "--no-legend").splitlines() if line]
    for session in sessions:
        facts = _output("loginctl", "show-session", session).splitlines()
        if "Class=user" in facts and "IdleHint=no" in facts and {"Type=x11", "Type=wayland"} & {*facts}:
            return 0.0
    return min(ages_s)


def _others_on_gpu(own: Collection[int]) -> bool:
    pids = _output("nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader").split()
    return any(pid.isdecimal() and int(pid) not in own for pid in pids)


def _output(*words: str) -> str:
    """Return what a program prints; empty if it is not installed, fails or takes too long."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_S, check=True).stdout
    return ""


def join_when_idle(argv: Sequence[str]) -> int:
    """Run `convoy join` with these arguments, as `take_part` does."""
    if any(word.startswith("--pair") for word in argv):
        raise InputError(
            "--when-idle joins again and again, but a code is used once: copy the key with convoy fleet key"
        )
    again = [word for word in argv if word != "--when-idle"]
    return take_part([*CONVOY_COMMAND, *again], UseMeter().read)


def take_part(command: Sequence[str], read: Callable[[], MachineUse], poll_s: float = POLL_S) -> int:
    """Run a command that joins a job while the machine is idle. Return its status when it ends by itself.

    When somebody comes back, it leaves after the step. It starts again when the machine is idle again.
    """
    readings = deque[MachineUse](maxlen=WINDOW)
    with Interrupts() as interrupts, Supervisor(interrupts) as processes:
        try:
            while True:
                readings.append(read())
                takes_part, why = bool(processes.running), use(readings, bool(processes.running))
                if takes_part and why:
                    print(f"leaves after the step: {why}", flush=True)
                    processes.end_after_step(1)
                    readings.clear()
                elif takes_part and processes.listen(lambda: not processes.running, poll_s):
                    return processes.endings[-1].exit_status
                elif not takes_part and not why:
                    print("joins, because nobody uses this machine", flush=True)
                    start = Start(device=0, name="join", command=command, lifeline=True, stdout=None, stderr=None)
                    processes.start(start)
                elif not takes_part:
                    processes.listen(lambda: False, poll_s)
        except Signalled as interrupted:
            print(interrupted.text(len(processes.running)), file=sys.stderr, flush=True)
            with suppress(Signalled):  # a second one: no more waiting
                if interrupted.after_step:
                    processes.end_after_step(1)
                processes.end(5.0)
            return interrupted.status
