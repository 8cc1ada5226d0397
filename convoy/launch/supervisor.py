"""Starts processes, reads their output, and ends all of them. Uses one thread; every wait is bounded."""

import codecs
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import psutil  # type: ignore[import-untyped]

from convoy.comm.deadlines import TIMEOUT_S, wait_limit
from convoy.comm.job_key import KEY_PIPE, JobKey, hand_over
from convoy.errors import InputError
from convoy.launch.exit_status import Ending
from convoy.machine import roster
from convoy.machine.process import END, LEAVE_TOO

TERMINATE_S = 2.0  # seconds between SIGTERM and SIGKILL
KILL_S = 5.0  # seconds that the kernel may take to end a killed process
LEAVE_S = 60.0  # seconds for devices to finish their step after SIGTERM, at least
STOPPED_S = 60.0  # a process that is stopped this long is killed, because the others have removed its device
POLL_S = 0.1  # seconds between two checks for ended processes and signals
TAIL_BYTES = CHUNK_BYTES = 65_536
LAST_CHUNKS = 16  # to read after a process has ended: more than a pipe holds. A grandchild could write forever

Sink = Callable[[bytes], None]  # receives output in chunks. An empty chunk marks the end
# Target of output: a file descriptor or `subprocess` constant, a sink, or the process's tail; None: inherited.
Output = int | Sink | Literal["keep"] | None


class Signalled(Exception):  # noqa: N818 - it is a request, not an error
    """A request by signal to end this process."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum.name)
        self.signum = signum
        self.status = 128 + signum
        # Devices finish their step first. Ctrl-C and a closed terminal also reach devices, and end all at once.
        self.after_step = signum is signal.SIGTERM

    def text(self, count: int) -> str:
        """Describe what happens to `count` devices."""
        how = ": training devices end after the step; send a second signal to end now" if self.after_step else ""
        return f"{self.signum.name}: ending {count} device{'s' * (count != 1)}{how}"


class Interrupts:
    """A context that records SIGINT, SIGTERM and SIGHUP; `check` raises them at safe points.

    A signal that this process ignores stays ignored. Python handles signals only in the main thread; in other threads the
    context does nothing.
    """

    def __init__(self) -> None:
        self._noted: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(signum) not in (signal.SIG_IGN, None):  # None: a handler of C code
                    self._before[signum] = signal.signal(
                        signum, lambda signum, _: self._noted.append(signal.Signals(signum))
                    )
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def check(self) -> None:
        """Raise Signalled for the next recorded signal, if any."""
        if self._noted:
            raise Signalled(self._noted.pop(0))


def decoded(write: Callable[[str], object]) -> Sink:
    """Return a sink that decodes UTF-8 for `write`. A character may be split over two chunks."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def sink(chunk: bytes) -> None:
        if text := decoder.decode(chunk, final=not chunk):
            write(text)

    return sink


def by_line(take: Callable[[bytes], None]) -> Sink:
    """Return a sink that gives whole lines to `take`, without line ends, and at the end an unfinished line."""
    rest = b""

    def sink(chunk: bytes) -> None:
        nonlocal rest
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole if chunk or not rest else [*whole, rest]:
            take(line)

    return sink


def to_stdout(chunk: bytes) -> None:
    sys.stdout.buffer.write(chunk)
    sys.stdout.flush()


@dataclass(frozen=True, kw_only=True)
class Start:
    """The settings of a process to start.

    Attributes:
        environment: all its variables; None: those of this process.
        lifeline: it detects the end of this process by `convoy.machine.process.watch_parent`.
        key: the job's key, sent through a pipe, never in an argument or variable.
        own_session: Ctrl-C in the terminal reaches only the launcher. Children of the process get the same signals.
        log: a file for its output, instead of `stdout` and `stderr`.
    """

    device: int
    name: str
    command: Sequence[str]
    environment: Mapping[str, str] | None = None
    folder: str | None = None
    stdin: int | None = subprocess.DEVNULL
    stdout: Output = subprocess.DEVNULL
    stderr: Output = "keep"
    pass_fds: Sequence[int] = ()
    lifeline: bool = False
    key: JobKey | None = None
    own_session: bool = False
    log: Path | None = None


@dataclass(eq=False)
class Process:
    """A started process, and its output pipes, each with its sink.

    Attributes:
        stopped: the supervisor ended it.
        stopped_since_s: when it was first seen stopped (SIGSTOP, a debugger); None: it runs.
    """

    start: Start
    popen: subprocess.Popen[bytes]
    pipes: dict[IO[bytes], Sink] = field(default_factory=dict)
    stopped: bool = False
    ended: bool = False
    stopped_since_s: float | None = None
    _tail: bytearray = field(default_factory=bytearray)

    def keep(self, chunk: bytes) -> None:
        """Keep the last `TAIL_BYTES` of output."""
        self._tail += chunk
        del self._tail[:-TAIL_BYTES]

    def lines(self) -> tuple[str, ...]:
        """Return the last lines of the kept output, or of the log."""
        with suppress(OSError):
            if self.start.log is not None:
                self.keep(self.start.log.read_bytes()[-TAIL_BYTES:])
        return tuple(self._tail.decode(errors="replace").splitlines())


class Supervisor:
    """The processes of a launcher. Leaving the context kills them and closes all pipes and files.

    Methods that wait raise Signalled after a signal to end this process. `on_end` is called with each Ending.
    """

    def __init__(self, interrupts: Interrupts, on_end: Callable[[Ending], None] = lambda _: None) -> None:
        self.endings: list[Ending] = []
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
            for pipe in (process.popen.stdin, process.popen.stdout, process.popen.stderr):
                if pipe is not None:
                    pipe.close()
        self._selector.close()
        for file in self._lifeline or ():
            os.close(file)

    @property
    def running(self) -> list[Process]:
        """Processes whose end was not detected yet, in starting order."""
        return [process for process in self._processes if not process.ended]

    def start(self, start: Start) -> Process:
        """Start a process. Raise OSError without such a program or folder, InputError if the log cannot be written."""
        variables = dict(os.environ if start.environment is None else start.environment)
        variables.pop(KEY_PIPE, None)
        pass_fds = list(start.pass_fds)
        if start.lifeline:
            # Only this process holds the write end, so the pipe closes however this process ends.
            self._lifeline = self._lifeline or os.pipe()
            variables["CONVOY_PARENT_PIPE"] = str(self._lifeline[0])
            pass_fds.append(self._lifeline[0])
        outputs = [start.stdout, start.stderr]
        with ExitStack() as opened:
            if start.log is not None:
                try:
                    start.log.parent.mkdir(parents=True, exist_ok=True)
                    outputs = [opened.enter_context(start.log.open("wb")).fileno()] * 2
                except OSError as error:
                    why = f"cannot write {start.log}: {error.strerror}"
                    raise InputError(f"{why}; give another folder for the logs, or none") from None
            if start.key is not None:
                key_pipe = hand_over(start.key.pem)
                opened.callback(os.close, key_pipe)
                variables[KEY_PIPE] = str(key_pipe)
                pass_fds.append(key_pipe)
            piped = [subprocess.PIPE if callable(out) or out == "keep" else out for out in outputs]
            popen = subprocess.Popen(
                start.command, env=variables, cwd=start.folder, stdin=start.stdin, stdout=piped[0], stderr=piped[1],
                pass_fds=pass_fds, start_new_session=start.own_session,
            )  # fmt: skip
        process = Process(start, popen)
        self._processes.append(process)
        for pipe, out in zip((popen.stdout, popen.stderr), outputs, strict=True):
            if pipe is not None:
                process.pipes[pipe] = out if callable(out) else process.keep
                os.set_blocking(pipe.fileno(), False)
                self._selector.register(pipe, selectors.EVENT_READ, lambda pipe=pipe: self._read(process, pipe))
        return process

    def watch(self, file: int, sink: Sink, at_end: Callable[[], None]) -> None:
        """Also read a file descriptor of this process while listening."""

        def read() -> None:
            try:
                chunk = os.read(file, CHUNK_BYTES)
            except OSError:
                chunk = b""
            sink(chunk)
            if not chunk:
                self._selector.unregister(file)
                at_end()

        self._selector.register(file, selectors.EVENT_READ, read)

    def listen(self, until: Callable[[], object], limit_s: float = float("inf")) -> bool:
        """Read output and detect ended processes until `until` is true, at most `limit_s`. Return whether it is true."""
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

    def send_signal(self, signum: signal.Signals) -> None:
        for process in self._processes:
            if process.popen.poll() is None:
                process.stopped |= signum is not signal.SIGINT
                with suppress(ProcessLookupError):
                    (os.killpg if process.start.own_session else os.kill)(process.popen.pid, signum)

    def end(self, grace_s: float) -> None:
        """Wait `grace_s` for the processes to end, then send SIGTERM, and after `TERMINATE_S` SIGKILL."""
        for signum, limit_s in ((None, grace_s), (signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, KILL_S)):
            if signum is not None and self.running:
                self.send_signal(signum)
            if self.listen(lambda: not self.running, limit_s):
                return

    def end_after_step(self, started: int, over: Callable[[], object] = lambda: False) -> None:
        """Let training devices finish their step within `leave_limit`; end the others at once.

        If devices remain that joined later, these devices leave and the job continues. Otherwise the job ends.

        Args:
            started: number of training devices started together with these.
            over: return whether to end all of them now.
        """
        running = self.running
        rows = roster.of_processes([process.popen.pid for process in running])
        if any(members := [() if row is None else row.members for row in rows]):
            for process, training in zip(running, members, strict=True):
                signum = signal.SIGTERM if not training else END if len(training) <= started else LEAVE_TOO
                process.stopped |= not training
                with suppress(ProcessLookupError):
                    os.kill(process.popen.pid, signum)
            self.listen(lambda: not self.running or over(), leave_limit([row for row in rows if row is not None]))
        self.end(0.0)

    def over(self, goes_on: bool) -> bool:
        """Return whether all devices have ended, or must end because a device failed.

        With `goes_on`, kill devices that are stopped (SIGSTOP, a debugger) for `STOPPED_S`.
        """
        for process in self.running if goes_on else ():
            stopped = False
            with suppress(psutil.Error):
                stopped = psutil.Process(process.popen.pid).status() == psutil.STATUS_STOPPED
            process.stopped_since_s = (process.stopped_since_s or time.monotonic()) if stopped else None
            if process.stopped_since_s is not None and time.monotonic() > process.stopped_since_s + STOPPED_S:
                process.popen.kill()
        failed = any(ending.in_startup or (ending.status != 0 and not goes_on) for ending in self.endings)
        return failed or not self.running

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
            killed = status < 0 and not process.stopped
            row, start = roster.of_processes([process.popen.pid])[0], process.start
            in_startup = killed and (row is None or not row.members)
            ending = Ending(start.device, start.name, status, process.stopped, process.lines(), in_startup)
            self.endings.append(ending)
            self._on_end(ending)

    def _read(self, process: Process, pipe: IO[bytes]) -> bool:
        if pipe not in process.pipes:
            return False
        try:
            chunk = os.read(pipe.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return False
        process.pipes[pipe](chunk)
        if not chunk:
            del process.pipes[pipe]
            self._selector.unregister(pipe)
        return bool(chunk)


def leave_limit(rows: Iterable[roster.JobProcess]) -> float:
    """Return how long these devices may take to finish their step, as their longest steps tell."""
    return max(LEAVE_S, wait_limit([row.step_s for row in rows], TIMEOUT_S))
