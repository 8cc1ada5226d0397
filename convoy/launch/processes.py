"""The devices that one machine starts: what each is told, and their processes, ended together."""

import collections
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from convoy.comm.launch_env import PLACE_NAMES
from convoy.errors import InputError
from convoy.launch.exit_status import Ending

CONVOY_COMMAND = (sys.executable, "-m", "convoy")
INTERRUPTED_STATUS = 130
KEPT_LINES = 200
TERMINATE_S = 2.0
"""From the polite signal to the one that nothing survives."""


@dataclass(frozen=True)
class Part:
    """The devices of a job that one machine starts.

    Attributes:
        ranks: the index of each in the job.
        names: what each computes on, such as "cpu" or "cuda:0".
        total: devices of the whole job, on all machines.
        host, port: where all of them meet.
        hosted: the launcher keeps the store there; otherwise device 0 does.
        own: further variables of each.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    total: int
    host: str
    port: int
    hosted: bool = False
    own: tuple[Mapping[str, str], ...] = field(default=())

    def variables(self, base: Mapping[str, str]) -> list[dict[str, str]]:
        """The environment of each device."""
        kept = {name: value for name, value in base.items() if name not in (*PLACE_NAMES, "TORCHELASTIC_RESTART_COUNT")}
        # Torch warns of names and connections that Convoy needs not, or tells of itself.
        kept.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        on_cpu = sum(name.startswith("cpu") for name in self.names)
        if on_cpu:
            # Each would take all cores otherwise, and they would disturb each other.
            kept.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // on_cpu)))
        return [
            {
                **kept,
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(self.total),
                "LOCAL_WORLD_SIZE": str(len(self.ranks)),
                "MASTER_ADDR": self.host,
                "MASTER_PORT": str(self.port),
                "TORCHELASTIC_USE_AGENT_STORE": str(self.hosted),
                "CONVOY_DEVICE": name,
                **(self.own[local] if self.own else {}),
            }
            for local, (rank, name) in enumerate(zip(self.ranks, self.names, strict=True))
        ]


def _cores() -> int:
    """Processor cores that this process may use. Only Linux can be asked for that."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Crew:
    """The devices' processes. A thread waits for the end of each, and another keeps the words of each but device 0.

    Used from one thread, but for `wake`.
    """

    def __init__(self, names: Mapping[int, str], tell: Callable[[Ending], None] = lambda _: None) -> None:
        """Devices by their index in the job, and how endings name them; `tell` is called with every ending."""
        self.names = names
        self.endings: list[Ending] = []
        self._tell = tell
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._readers: dict[int, threading.Thread] = {}
        self._lines: dict[int, collections.deque[str]] = {}
        self._waiters: list[threading.Thread] = []
        self._stopped: set[int] = set()
        self._ended: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def start(
        self,
        device: int,
        command: Sequence[str],
        variables: Mapping[str, str],
        lifeline: int,
        speech: tuple[int, int] | None = None,
    ) -> None:
        """Start a device.

        Args:
            lifeline: the read end of a pipe whose other end only this process has: devices end when it does.
            speech: files for device 0's output and error output; None: it has this process's own.

        Raises:
            InputError: there is no such program.
        """
        quiet = subprocess.DEVNULL if device or speech else None
        output, errors = (subprocess.DEVNULL, subprocess.PIPE) if device else speech or (None, None)
        try:
            process = subprocess.Popen(
                command,
                env={**variables, "CONVOY_PARENT_PIPE": str(lifeline)},
                pass_fds=(lifeline,),
                stdin=quiet,
                stdout=output,
                stderr=errors,
            )
        except OSError as error:
            raise InputError(f"cannot start {command[0]!r}: {error.strerror}; give a program that exists") from None
        self._processes[device] = process
        self._lines[device] = collections.deque(maxlen=KEPT_LINES)
        if process.stderr is not None:
            self._readers[device] = self._run(_keep_lines, process.stderr, self._lines[device])
        self._waiters.append(self._run(self._await, device, process))

    def await_trouble(self) -> None:
        """Return when all have ended, one has ended badly, or `wake` was called."""
        while self._processes:
            device = self._ended.get()
            if device is None or self._note_ending(device).status != 0:
                return

    def wake(self) -> None:
        """Let `await_trouble` return; from any thread."""
        self._ended.put(None)

    def interrupt(self) -> None:
        """Do to all devices what Ctrl-C in their terminal does."""
        for process in self._processes.values():
            process.send_signal(signal.SIGINT)

    def end(self, grace_s: float) -> None:
        """Let the running ones end by themselves; end those that do not."""
        self._drain(grace_s)
        if self._processes:
            self._send(signal.SIGTERM)
            self._drain(TERMINATE_S)

    def kill(self) -> None:
        """End what is still running, at once. Afterwards no process, thread or pipe is left."""
        self._send(signal.SIGKILL)
        self._drain(TERMINATE_S)
        for thread in self._waiters:
            thread.join(TERMINATE_S)

    def _drain(self, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while self._processes:
            try:
                device = self._ended.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                return
            if device is not None:
                self._note_ending(device)

    def _send(self, number: signal.Signals) -> None:
        for device, process in self._processes.items():
            # One that has just ended by itself did not end because of us.
            if process.poll() is None:
                self._stopped.add(device)
                process.send_signal(number)

    def _note_ending(self, device: int) -> Ending:
        status = self._processes.pop(device).wait()
        if device in self._readers:
            self._readers[device].join(TERMINATE_S)
        lines = tuple(self._lines[device])
        ending = Ending(device, self.names[device], status, device in self._stopped, lines)
        self.endings.append(ending)
        self._tell(ending)
        return ending

    def _await(self, device: int, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._ended.put(device)

    @staticmethod
    def _run(work: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, name="convoy-launch", daemon=True)
        thread.start()
        return thread


def _keep_lines(stream: IO[bytes], lines: collections.deque[str]) -> None:
    with stream:
        while line := stream.readline(4096):
            lines.append(line.decode(errors="replace").rstrip("\n"))
