"""Starting all devices of one machine as processes of this one, and ending them together."""

import collections
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO

from convoy.errors import InputError
from convoy.execute.endings import Ending, judge
from convoy.execute.meeting import host_store
from convoy.execute.place import PLACE_NAMES

CONVOY_COMMAND = (sys.executable, "-m", "convoy")
INTERRUPTED_STATUS = 130
KEPT_LINES = 200
TERMINATE_S = 2.0
"""From the polite signal to the one that nothing survives."""


def launch_local(
    argv: Sequence[str],
    devices: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    timeout_s: float = 5.0,
    environment: Mapping[str, str] | None = None,
    command: Sequence[str] = CONVOY_COMMAND,
) -> int:
    """Run ``command argv`` once per device, as one job, and wait for all of them.

    Device 0 has the terminal. The others' error output is kept and shown where it explains a failure; their standard
    output is dropped. Every device finds its place in torchrun's variables and its hardware in CONVOY_DEVICE.

    Args:
        devices: what each device computes on, such as ``("cpu", "cuda:0")``.
        host, port: where the devices meet; None takes a free port.
        timeout_s: once one has failed, or after Ctrl-C, the others get this long to end by themselves.
        environment: further variables for every device.
        command: what to start, in place of this Python's convoy.

    Returns:
        0 if all ended well, 2 if devices ended with an error that has been printed, 130 after Ctrl-C.

    Raises:
        InputError: no devices, or the port is taken.
        DeviceLostError: a device crashed or was killed; the message says which, how, and its last words.
    """
    if not devices:
        raise InputError("there are no devices to start: name at least one, such as cpu")
    store = host_store(host, port or 0)
    variables = _variables({**os.environ, **(environment or {})}, devices, store.host, store.port)
    # Only this process holds the write end, so the devices see the end of it whichever way this process ends.
    lifeline, held = os.pipe()
    crew = _Crew(devices)
    try:
        for device in range(len(devices)):
            crew.start(device, [*command, *argv], variables[device], lifeline)
        crew.await_trouble()
        crew.end(timeout_s)
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):  # a second Ctrl-C: no more waiting
            crew.end(timeout_s)
        return INTERRUPTED_STATUS
    finally:
        crew.kill()
        os.close(held)
        os.close(lifeline)
        del store
    outcome = judge(crew.endings)
    if outcome.lost is not None:
        raise outcome.lost
    for line in outcome.lines:
        print(line, file=sys.stderr)
    return outcome.status


def _variables(base: Mapping[str, str], devices: Sequence[str], host: str, port: int) -> list[dict[str, str]]:
    """The environment of each device."""
    kept = {name: value for name, value in base.items() if name not in (*PLACE_NAMES, "TORCHELASTIC_RESTART_COUNT")}
    # Torch warns of names and connections that Convoy needs not, or tells of itself.
    kept.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    on_cpu = sum(name.startswith("cpu") for name in devices)
    if on_cpu:
        # Each would take all cores otherwise, and they would disturb each other.
        kept.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // on_cpu)))
    return [
        {
            **kept,
            "RANK": str(device),
            "LOCAL_RANK": str(device),
            "WORLD_SIZE": str(len(devices)),
            "LOCAL_WORLD_SIZE": str(len(devices)),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "CONVOY_DEVICE": name,
        }
        for device, name in enumerate(devices)
    ]


class _Crew:
    """The devices' processes. A thread waits for the end of each, and another keeps the words of each but device 0."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.names = tuple(devices)
        self.endings: list[Ending] = []
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._readers: dict[int, threading.Thread] = {}
        self._lines: dict[int, collections.deque[str]] = {}
        self._waiters: list[threading.Thread] = []
        self._stopped: set[int] = set()
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def start(self, device: int, command: Sequence[str], variables: Mapping[str, str], lifeline: int) -> None:
        quiet = subprocess.DEVNULL if device else None
        try:
            process = subprocess.Popen(
                command,
                env={**variables, "CONVOY_PARENT_PIPE": str(lifeline)},
                pass_fds=(lifeline,),
                stdin=quiet,
                stdout=quiet,
                stderr=subprocess.PIPE if device else None,
            )
        except OSError as error:
            raise InputError(f"cannot start {command[0]!r}: {error.strerror}; give a program that exists") from None
        self._processes[device] = process
        self._lines[device] = collections.deque(maxlen=KEPT_LINES)
        if process.stderr is not None:
            self._readers[device] = self._run(_keep_lines, process.stderr, self._lines[device])
        self._waiters.append(self._run(self._await, device, process))

    def await_trouble(self) -> None:
        """Return when all have ended, or one has ended badly."""
        while self._processes:
            if self._note_ending(self._ended.get()).status != 0:
                return

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
                self._note_ending(self._ended.get(timeout=max(0.0, deadline_s - time.monotonic())))
            except queue.Empty:
                return

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
        self.endings.append(Ending(device, self.names[device], status, device in self._stopped, lines))
        return self.endings[-1]

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
