"""Starts processes, reads what they print, and ends all of them: one thread, every wait bounded.

The devices of this machine, of a host over ssh and of an emulated fleet run under it, and the sessions with the hosts.
"""

import codecs
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, Literal

import psutil  # type: ignore[import-untyped]

from convoy.comm import roster
from convoy.comm.job_key import KEY_PIPE, JobKey, hand_over
from convoy.comm.launcher import LAUNCHER_PIPE
from convoy.errors import DeviceLostError, InputError
from convoy.launch.exit_status import Ending, judge

TERMINATE_S = 2.0
"""Seconds between SIGTERM and SIGKILL."""

KILL_S = 5.0
"""Seconds that the kernel may take to end a killed process."""

POLL_S = 0.1
"""How soon a signal to this process is noticed (and, without pidfd, the end of a process)."""

TAIL_BYTES = 65_536
"""What is kept of the output of a process."""

CHUNK_BYTES = 65_536
LAST_CHUNKS = 16
"""Read of each pipe after its process has ended: more than a pipe holds. A child left behind may write for ever."""

Sink = Callable[[bytes], None]
"""Takes what a process prints, piece by piece; an empty piece says that there will be no more."""

Output = int | Sink | Literal["keep"] | None
"""Where output goes: a file or a constant of `subprocess`, a sink, the process's tail; None: where this process's goes."""


class Interrupted(Exception):  # noqa: N818 - it is a request, not an error
    """This process was asked to end by a signal."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum.name)
        self.signum = signum
        self.status = 128 + signum
        self.is_ctrl_c = signum is signal.SIGINT


class Interrupts:
    """Notes SIGINT, SIGTERM and SIGHUP while the context lasts; `check` raises them where nothing is left half done.

    A signal that this process ignores stays ignored. Outside the main thread Python handles no signals; there the
    context does nothing.
    """

    def __init__(self) -> None:
        self._noted: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            # None stands for a handler that C code installed; Python cannot give it back.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    def check(self) -> None:
        """Raise Interrupted for a signal that has come and was not raised yet, the first one first."""
        if self._noted:
            raise Interrupted(self._noted.pop(0))

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        self._noted.append(signal.Signals(signum))


def conclude(endings: Sequence[Ending], host_lost: DeviceLostError | None = None, *, goes_on: bool = False) -> int:
    """Print the errors with which devices ended, where they have not been told; the exit status of the job.

    Raises:
        DeviceLostError: a device crashed or was killed; else `host_lost`.
    """
    outcome = judge(endings, goes_on)
    # Who was killed comes before what a host's silence may mean, and that before what others say of it.
    if (lost := outcome.lost or (None if goes_on and not outcome.status else host_lost)) is not None:
        raise lost
    for line in outcome.lines:
        print(line, file=sys.stderr)
    return outcome.status


def once_first(processes: "Supervisor", rank: int, show: Sink | None = None) -> Sink:
    """Shows what a device prints from when on no device before it is left, or it speaks for those that train.

    Args:
        show: None: on this process's own standard output.
    """
    speaks = speaker(processes, rank)

    def sink(chunk: bytes) -> None:
        if speaks() or not any(process.device < rank for process in processes.running):
            (show or to_stdout)(chunk)

    return sink


def speaker(processes: "Supervisor", rank: int) -> Callable[[], bool]:
    """Says whether a device speaks for those that train, or has done so: at its end it says so no more."""
    found = False

    def speaks() -> bool:
        nonlocal found
        found = found or any(roster.speaks(each.popen.pid) for each in processes.running if each.device == rank)
        return found

    return speaks


def to_stdout(chunk: bytes) -> None:
    sys.stdout.buffer.write(chunk)
    sys.stdout.flush()


def note(line: str) -> None:
    """Tell a person something beside what devices print."""
    print(line, file=sys.stderr, flush=True)


class Tail:
    """A sink that keeps the last `TAIL_BYTES`."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def __call__(self, chunk: bytes) -> None:
        self._kept += chunk
        del self._kept[:-TAIL_BYTES]

    def lines(self) -> tuple[str, ...]:
        return tuple(self._kept.decode(errors="replace").splitlines())


def decoded(write: Callable[[str], object]) -> Sink:
    """A sink that passes UTF-8 on as text; characters may be cut between pieces."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def sink(chunk: bytes) -> None:
        if text := decoder.decode(chunk, final=not chunk):
            write(text)

    return sink


def by_line(take: Callable[[bytes], None]) -> Sink:
    """A sink that passes on whole lines, without their ends; at the end also a last one that has none."""
    rest = b""

    def sink(chunk: bytes) -> None:
        nonlocal rest
        *whole, rest = (rest + chunk).split(b"\n")
        if not chunk and rest:
            whole.append(rest)
        for line in whole:
            take(line)

    return sink


@dataclass(eq=False)
class Process:
    """A started process.

    Attributes:
        name: as its Ending names it.
        tail: the end of the output that is kept.
        members: ids of further processes, which get the same signals.
        pipes: its output that is read here, and who takes it.
        words: what it tells its launcher.
    """

    device: int
    name: str
    popen: subprocess.Popen[bytes]
    members: Callable[[], Iterable[int]]
    tail: Tail = field(default_factory=Tail)
    pipes: dict[IO[bytes], Sink] = field(default_factory=dict)
    words: IO[bytes] | None = None
    pidfd: int | None = None
    stopped: bool = False
    ended: bool = False


def _opened(path: Path, goes_on: bool) -> Sink:
    """A sink that writes into a file, anew or behind what it has. It is opened for each piece: few come, and none is lost
    whichever way all ends.

    Raises:
        InputError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab" if goes_on else "wb").close()
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; give another folder for the logs, or none") from None

    def write(chunk: bytes) -> None:
        with suppress(OSError), path.open("ab") as file:  # a full disk ends the log, not the job
            file.write(chunk)

    return write


def both(first: Sink, second: Sink) -> Sink:
    def take(chunk: bytes) -> None:
        first(chunk)
        second(chunk)

    return take


class Supervisor:
    """Running processes. Leaving the context kills what still runs; no process, pipe or file of it is left."""

    def __init__(self, interrupts: Interrupts, on_end: Callable[[Ending], None] = lambda _: None) -> None:
        """`on_end` is called with each Ending."""
        self.endings: list[Ending] = []
        """How processes ended, in the order of time."""
        self._interrupts = interrupts
        self._on_end = on_end
        self._processes: list[Process] = []
        self._selector = selectors.DefaultSelector()
        self._lifeline: tuple[int, int] | None = None

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *_: object) -> None:
        self.send_signal(signal.SIGKILL)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.popen.wait(KILL_S)
            _close_pipes(process)
        self._selector.close()
        for file in (*(process.pidfd for process in self.running), *(self._lifeline or ())):
            if file is not None:
                os.close(file)

    @property
    def running(self) -> list[Process]:
        """Processes whose end has not been noted, in the order of their start."""
        return [process for process in self._processes if not process.ended]

    @property
    def failed(self) -> bool:
        """Whether a process has ended with an error."""
        return any(ending.status != 0 for ending in self.endings)

    def ends_job(self, goes_on: bool, *, begun: bool = False) -> bool:
        """Return whether the others cannot go on after a failure: nothing is kept for them before they train.

        Args:
            goes_on: the devices go on without those that are lost.
            begun: they have told that they train; otherwise the roster says so.
        """
        return self.failed and not (goes_on and (begun or roster.have_begun([each.popen.pid for each in self.running])))

    def start(
        self,
        device: int,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
        stdin: int | None = subprocess.DEVNULL,
        stdout: Output = subprocess.DEVNULL,
        stderr: Output = "keep",
        pass_fds: Sequence[int] = (),
        lifeline: bool = False,
        key: JobKey | None = None,
        own_session: bool = False,
        log: Path | None = None,
        log_goes_on: bool = False,
        told: Sink | None = None,
        members: Callable[[], Iterable[int]] = lambda: (),
    ) -> Process:
        """Start a process.

        Args:
            environment: all its variables; None: this process's.
            lifeline: it can notice the end of this process, however that ends, by `convoy.comm.processes.watch_parent`.
            key: of the job, handed over through a pipe: it stands in no argument and no variable.
            own_session: Ctrl-C in the terminal reaches this process alone, which then ends the others in order.
            log: a file that gets all it prints, beside what its output goes to here: the terminal's excepted.
            log_goes_on: behind what the file has already.
            told: takes what it tells its launcher (see `convoy.comm.launcher`), through a pipe of its own.
            members: ids of further processes that get the same signals, such as its children.

        Raises:
            OSError: there is no such program, or folder.
        """
        variables = dict(os.environ if environment is None else environment)
        if lifeline:
            # Only this process holds the write end, so the others see the end of it whichever way this process ends.
            self._lifeline = self._lifeline or os.pipe()
            variables["CONVOY_PARENT_PIPE"] = str(self._lifeline[0])
            pass_fds = (*pass_fds, self._lifeline[0])
        variables.pop(KEY_PIPE, None)
        variables.pop(LAUNCHER_PIPE, None)
        listens, tells = (None, None) if told is None else os.pipe()
        if tells is not None:
            variables[LAUNCHER_PIPE] = str(tells)
            pass_fds = (*pass_fds, tells)
        pipe_of_key = None if key is None else hand_over(key)
        if pipe_of_key is not None:
            variables[KEY_PIPE] = str(pipe_of_key)
            pass_fds = (*pass_fds, pipe_of_key)
        written = None if log is None else _opened(log, log_goes_on)
        if written is not None and stdout == subprocess.DEVNULL:
            stdout = written
        elif written is not None:
            stdout, stderr = (both(out, written) if callable(out) else out for out in (stdout, stderr))
        piped = [subprocess.PIPE if callable(out) or out == "keep" else out for out in (stdout, stderr)]
        try:
            popen = subprocess.Popen(
                command, env=variables, cwd=folder, stdin=stdin, stdout=piped[0], stderr=piped[1], pass_fds=pass_fds,
                start_new_session=own_session,
            )  # fmt: skip
        except BaseException:
            if listens is not None:
                os.close(listens)
            raise
        finally:
            for file in (pipe_of_key, tells):
                if file is not None:
                    os.close(file)
        process = Process(device, name, popen, members)
        process.words = None if listens is None else os.fdopen(listens, "rb", buffering=0)
        self._processes.append(process)
        for pipe, out in ((popen.stdout, stdout), (popen.stderr, stderr), (process.words, told)):
            if pipe is not None:
                process.pipes[pipe] = (
                    out if callable(out) else process.tail if written is None else both(process.tail, written)
                )
                os.set_blocking(pipe.fileno(), False)
                self._selector.register(pipe, selectors.EVENT_READ, lambda pipe=pipe: self._read(process, pipe))
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):  # an older kernel
                process.pidfd = os.pidfd_open(popen.pid)
                self._selector.register(process.pidfd, selectors.EVENT_READ, lambda: None)
        return process

    def watch(self, file: int, sink: Sink) -> None:
        """Read a file of this process's own while listening."""

        def read() -> None:
            try:
                chunk = os.read(file, CHUNK_BYTES)
            except OSError:
                chunk = b""
            if not chunk:
                self._selector.unregister(file)
            sink(chunk)

        self._selector.register(file, selectors.EVENT_READ, read)

    def unwatch(self, file: int) -> None:
        """Read it no more."""
        with suppress(KeyError):
            self._selector.unregister(file)

    def listen(self, until: Callable[[], object], limit_s: float = float("inf")) -> bool:
        """Read output and note who ends, until something is true, for `limit_s` at most; whether it is true.

        Raises:
            Interrupted: this process was asked to end.
        """
        deadline_s = time.monotonic() + limit_s
        while True:
            self._interrupts.check()
            self._note_ends()
            if until():
                return True
            if (left_s := deadline_s - time.monotonic()) <= 0:
                return False
            for key, _ in self._selector.select(min(left_s, POLL_S)):
                key.data()

    def kill(self, device: int) -> None:
        """End one process at once, if it still runs."""
        for process in self.running:
            if process.device == device:
                process.popen.kill()

    def forget_ended(self) -> None:
        """Keep nothing but the endings of processes that have ended: where others follow them, there would be more and more."""
        for process in [each for each in self._processes if each.ended]:
            for pipe in process.pipes:
                self._selector.unregister(pipe)
            _close_pipes(process)
            self._processes.remove(process)

    def send_signal(self, signum: signal.Signals) -> None:
        """Send a signal to all processes that run, and to the members of all."""
        for process in self._processes:
            pids = set(process.members())
            if process.popen.poll() is None:
                process.stopped |= signum is not signal.SIGINT
                pids.add(process.popen.pid)
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)

    def end(self, grace_s: float) -> None:
        """Let what runs end by itself for `grace_s`, then send SIGTERM, and after `TERMINATE_S` SIGKILL.

        Raises:
            Interrupted: this process was asked to end, perhaps once more. What still runs is left to the context's end.
        """
        self.kill_suspended()
        for signum, limit_s in ((None, grace_s), (signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, KILL_S)):
            if signum is not None and self.running:
                self.send_signal(signum)
            if self.listen(lambda: not self.running, limit_s):
                return

    def kill_suspended(self) -> None:
        """A process that is stopped (Ctrl-Z, a debugger) hears of nothing but SIGKILL."""
        for process in self.suspended:
            process.stopped = True
            process.popen.kill()

    @property
    def suspended(self) -> list[Process]:
        """Processes that run, and are stopped."""
        return [process for process in self.running if _is_stopped(process.popen.pid)]

    def _note_ends(self) -> None:
        for process in self.running:
            status = process.popen.poll()
            if status is None:
                continue
            for pipe in list(process.pipes):
                for _ in range(LAST_CHUNKS):
                    if not self._read(process, pipe):
                        break
            process.ended = True
            if process.pidfd is not None:
                self._selector.unregister(process.pidfd)
                os.close(process.pidfd)
            ending = Ending(process.device, process.name, status, process.stopped, process.tail.lines())
            self.endings.append(ending)
            self._on_end(ending)

    def _read(self, process: Process, pipe: IO[bytes]) -> bool:
        """Take what has been printed. False if there was nothing (more) to take."""
        if pipe not in process.pipes:
            return False
        try:
            chunk = os.read(pipe.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return False
        sink = process.pipes[pipe]
        if not chunk:
            del process.pipes[pipe]
            self._selector.unregister(pipe)
        sink(chunk)
        return bool(chunk)


def _is_stopped(pid: int) -> bool:
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def _close_pipes(process: Process) -> None:
    for pipe in (process.popen.stdin, process.popen.stdout, process.popen.stderr, process.words):
        if pipe is not None:
            pipe.close()
