"""Start processes, read their output, and end all of them. One thread; every wait is bounded."""

import codecs
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import psutil  # type: ignore[import-untyped]

from convoy.comm.job_key import KEY_PIPE, JobKey, hand_over
from convoy.errors import InputError
from convoy.launch.exit_status import Ending
from convoy.machine import roster
from convoy.machine.process import END, LEAVE_TOO

TERMINATE_S = 2.0  # seconds between SIGTERM and SIGKILL
KILL_S = 5.0  # seconds that the kernel may take to end a killed process
LEAVE_S = 60.0  # seconds that devices have to finish their step after SIGTERM
LOOK_S = 2.0  # seconds between two searches for stopped devices
POLL_S = 0.1  # seconds until the end of a process, or a signal to this one, is noticed

TAIL_BYTES = CHUNK_BYTES = 65_536
LAST_CHUNKS = 16
"""Chunks read from a pipe after its process has ended: more than a pipe holds. A grandchild may write to it for ever."""

Sink = Callable[[bytes], None]
"""Receives output chunk by chunk. An empty chunk is the end."""

Output = int | Sink | Literal["keep"] | None
"""Where output goes: a file or a constant of `subprocess`, a sink, the process's tail; None: where this process's goes."""


class Signalled(Exception):  # noqa: N818 - it is a request, not an error
    """A signal asked this process to end."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum.name)
        self.signum = signum
        self.status = 128 + signum

    @property
    def after_step(self) -> bool:
        """Whether devices finish their step first. Ctrl-C and a closed terminal end all at once: devices get them too."""
        return self.signum is signal.SIGTERM

    def text(self, count: int) -> str:
        """Describe what happens now to `count` devices."""
        how = ": where they train after the step, at once after a second one" if self.after_step else ""
        return f"{self.signum.name}: ending {count} device{'s' * (count != 1)}{how}"


class Interrupts:
    """Records SIGINT, SIGTERM and SIGHUP while the context lasts; `check` raises them where nothing is left half done.

    A signal that this process ignores stays ignored. Python handles signals in the main thread only; in another one the
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
        """Raise Signalled for the first signal that was not raised yet."""
        if self._noted:
            raise Signalled(self._noted.pop(0))


# ------------------------------------------------------------------------------------------------------------- sinks


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
    """Return a sink that passes UTF-8 on as text. A character may be split over two chunks."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def sink(chunk: bytes) -> None:
        if text := decoder.decode(chunk, final=not chunk):
            write(text)

    return sink


def by_line(take: Callable[[bytes], None]) -> Sink:
    """Return a sink that passes whole lines on, without line ends; at the end also an unfinished one."""
    rest = b""

    def sink(chunk: bytes) -> None:
        nonlocal rest
        *whole, rest = (rest + chunk).split(b"\n")
        if not chunk and rest:
            whole.append(rest)
        for line in whole:
            take(line)

    return sink


def to_stdout(chunk: bytes) -> None:
    sys.stdout.buffer.write(chunk)
    sys.stdout.flush()


def _log_sink(path: Path) -> Sink:
    """Return a sink that writes a new file. InputError if that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("wb").close()
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; give another folder for the logs, or none") from None

    def write(chunk: bytes) -> None:
        # Open it for each chunk: nothing is lost however this process ends. A full disk ends the log, not the job.
        with suppress(OSError), path.open("ab") as file:
            file.write(chunk)

    return write


# --------------------------------------------------------------------------------------------------------- processes


@dataclass(frozen=True, kw_only=True)
class Start:
    """How to start a process.

    Attributes:
        environment: all its variables; None: those of this process.
        lifeline: it can notice the end of this process, however that ends, by `convoy.machine.process.watch_parent`.
        key: of the job, handed over through a pipe: no argument or variable holds it.
        own_session: Ctrl-C in the terminal reaches this process alone, which then ends the others in order. Its children
            get the same signals.
        log: a file that gets a copy of its output, unless that goes to the terminal.
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
    """A started process.

    Attributes:
        pipes: its output that is read here, and the sinks.
        stopped: the supervisor ended it.
    """

    start: Start
    popen: subprocess.Popen[bytes]
    tail: Tail = field(default_factory=Tail)
    pipes: dict[IO[bytes], list[Sink]] = field(default_factory=dict)
    stopped: bool = False
    ended: bool = False

    @property
    def device(self) -> int:
        return self.start.device


class Supervisor:
    """Running processes. Leaving the context kills them and closes all pipes and files.

    Methods that wait raise Signalled when this process is asked to end.

    Args:
        on_end: called with each Ending.
    """

    def __init__(self, interrupts: Interrupts, on_end: Callable[[Ending], None] = lambda _: None) -> None:
        self.endings: list[Ending] = []
        self._interrupts = interrupts
        self._on_end = on_end
        self._processes: list[Process] = []
        self._selector = selectors.DefaultSelector()
        self._lifeline: tuple[int, int] | None = None
        self._looked_s = -LOOK_S
        self._stopped_since_s: dict[Process, float] = {}

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
        """Processes whose end was not noticed yet, in the order of their start."""
        return [process for process in self._processes if not process.ended]

    def start(self, start: Start) -> Process:
        """Start a process. OSError: no such program or folder. InputError: the log cannot be written."""
        variables = dict(os.environ if start.environment is None else start.environment)
        variables.pop(KEY_PIPE, None)
        pass_fds = list(start.pass_fds)
        if start.lifeline:
            # Only this process holds the write end: the others read its end however this process ends.
            self._lifeline = self._lifeline or os.pipe()
            variables["CONVOY_PARENT_PIPE"] = str(self._lifeline[0])
            pass_fds.append(self._lifeline[0])
        stdout, stderr = start.stdout, start.stderr
        copy = None if start.log is None else _log_sink(start.log)
        if copy is not None and stdout == subprocess.DEVNULL:
            stdout = copy
        piped = [subprocess.PIPE if callable(out) or out == "keep" else out for out in (stdout, stderr)]
        key_pipe = None if start.key is None else hand_over(start.key.pem)
        if key_pipe is not None:
            variables[KEY_PIPE] = str(key_pipe)
            pass_fds.append(key_pipe)
        try:
            popen = subprocess.Popen(
                start.command, env=variables, cwd=start.folder, stdin=start.stdin, stdout=piped[0], stderr=piped[1],
                pass_fds=pass_fds, start_new_session=start.own_session,
            )  # fmt: skip
        finally:
            if key_pipe is not None:
                os.close(key_pipe)
        process = Process(start, popen)
        self._processes.append(process)
        for pipe, out in ((popen.stdout, stdout), (popen.stderr, stderr)):
            if pipe is not None:
                sink = out if callable(out) else process.tail
                process.pipes[pipe] = [sink] if copy in (None, sink) else [sink, copy]
                os.set_blocking(pipe.fileno(), False)
                self._selector.register(pipe, selectors.EVENT_READ, lambda pipe=pipe: self._read(process, pipe))
        return process

    def watch(self, file: int, sink: Sink, at_end: Callable[[], None]) -> None:
        """Read a file of this process's own while listening."""

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
        """Read output and note ends until `until` is true, for at most `limit_s`. Return whether it is true."""
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
        """Let devices that train finish their step within `LEAVE_S`; end the others at once.

        Where devices that joined later remain, these leave and the job continues. Otherwise the job ends.

        Args:
            started: how many training devices were started together with these.
            over: whether to end all of them now.
        """
        running = self.running
        members = _members(*running)
        if any(members):
            for process, those in zip(running, members, strict=True):
                signum = signal.SIGTERM if not those else END if len(those) <= started else LEAVE_TOO
                process.stopped |= not those
                with suppress(ProcessLookupError):
                    os.kill(process.popen.pid, signum)
            self.listen(lambda: not self.running or over(), LEAVE_S)
        self.end(0.0)

    def over(self, goes_on: bool, silence_s: float) -> bool:
        """Return whether all devices have ended, or must end because one has failed.

        Where the others go on without a lost device, kill those that are stopped (SIGSTOP, a debugger) for `silence_s`.
        """
        now_s, last_s = time.monotonic(), self._looked_s
        if goes_on and now_s - last_s >= LOOK_S:
            # After a longer pause this process was stopped too (Ctrl-Z) and cannot know since when the devices are.
            before = self._stopped_since_s if now_s - last_s < 2 * LOOK_S else {}
            self._looked_s = now_s
            self._stopped_since_s = {each: before.get(each, now_s) for each in self.running if _is_stopped(each)}
            for process, since_s in self._stopped_since_s.items():
                if last_s - since_s >= silence_s - LOOK_S:
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
            killed, lines = status < 0 and not process.stopped, process.tail.lines()
            in_startup = killed and not _members(process)[0]
            ending = Ending(process.device, process.start.name, status, process.stopped, lines, in_startup)
            self.endings.append(ending)
            self._on_end(ending)

    def _read(self, process: Process, pipe: IO[bytes]) -> bool:
        if pipe not in process.pipes:
            return False
        try:
            chunk = os.read(pipe.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return False
        sinks = process.pipes[pipe]
        if not chunk:
            del process.pipes[pipe]
            self._selector.unregister(pipe)
        for sink in sinks:
            sink(chunk)
        return bool(chunk)


def _is_stopped(process: Process) -> bool:
    try:
        return bool(psutil.Process(process.popen.pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _members(*processes: Process) -> list[tuple[int, ...]]:
    """Return, for each process, the devices that train with it; none before it trains."""
    rows = roster.of_processes([process.popen.pid for process in processes])
    return [() if row is None else row.members for row in rows]
