"""The processes of a rehearsal: started together, listened to together, ended together."""

import codecs
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TextIO

from convoy.emulate import cgroups
from convoy.emulate.programs import find

_CHUNK_BYTES = 65_536
_TAIL_BYTES = 16_384
_LAST_CHUNKS = 16  # more than a pipe holds
_POLL_S = 0.1  # how soon a signal is noticed
_REAP_LIMIT_S = 5.0


@dataclass(frozen=True)
class Launch:
    """How one device's process starts.

    Attributes:
        namespace: the network namespace it runs in.
        group: the control group it joins before anything else.
        command: program and arguments.
        environment: all its variables.
    """

    namespace: str
    group: Path
    command: Sequence[str]
    environment: Mapping[str, str]

    def arguments(self) -> list[str]:
        """The whole command line: join the group, enter the namespace, become the command."""
        join = 'echo $$ > "$0" && exec "$@"'
        enter = [find("ip"), "netns", "exec", self.namespace]
        return [find("sh"), "-c", join, str(cgroups.entrance(self.group)), *enter, *self.command]


class Crew:
    """The running processes, one per launch, in the order of the devices.

    The first device's output goes to `output` as it comes (None: straight to this process's own stdout and stderr);
    of the others the last 16 KiB are kept. Leaving the context kills what still runs.
    """

    def __init__(self, launches: Sequence[Launch], output: TextIO | None) -> None:
        self._launches = launches
        self._output = output
        self._selector = selectors.DefaultSelector()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._tails = [bytearray() for _ in launches]
        self.statuses: dict[int, int] = {}
        """Exit status of each device's process that has ended, in the order of ending; 128 + n after signal n."""

    def __enter__(self) -> "Crew":
        try:
            for index, launch in enumerate(self._launches):
                self._start(index, launch)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for launch in self._launches:
            cgroups.signal_members(launch.group, signal.SIGKILL)
        for process in self._processes:
            # A process that had not joined its group yet is none of its members.
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_REAP_LIMIT_S)
            if process.stdout is not None:
                process.stdout.close()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
        self._selector.close()

    @property
    def running(self) -> list[int]:
        """Devices whose process has not ended, in order."""
        return [index for index in range(len(self._processes)) if index not in self.statuses]

    @property
    def first_failure(self) -> int | None:
        """The device whose process was the first to end with an error."""
        return next((index for index, status in self.statuses.items() if status != 0), None)

    def listen(self, limit_s: float, until: Callable[[], bool]) -> None:
        """Pass on and keep output and note who ends, until `until()`, until all ended, or for `limit_s`."""
        end_s = time.monotonic() + limit_s
        while self.running and not until():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return
            for key, _ in self._selector.select(min(left_s, _POLL_S)):
                key.data()

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal to every process of every device, children included."""
        for launch in self._launches:
            cgroups.signal_members(launch.group, signum)

    def last_lines(self, index: int, lines: int) -> list[str]:
        """The end of what a device printed; nothing for the first device, whose output was passed on."""
        return self._tails[index].decode(errors="replace").splitlines()[-lines:]

    def _start(self, index: int, launch: Launch) -> None:
        straight = index == 0 and self._output is None
        process = subprocess.Popen(
            launch.arguments(),
            env=dict(launch.environment),
            stdin=subprocess.DEVNULL,
            stdout=None if straight else subprocess.PIPE,
            stderr=None if straight else subprocess.STDOUT,
            # Ctrl-C in a terminal reaches the rehearsal alone, which ends the processes in its own order.
            start_new_session=True,
        )
        self._processes.append(process)
        if process.stdout is not None:
            os.set_blocking(process.stdout.fileno(), False)
            self._selector.register(process.stdout, selectors.EVENT_READ, lambda: self._read(index))
        ending = os.pidfd_open(process.pid)
        self._selector.register(ending, selectors.EVENT_READ, lambda: self._ended(index, ending))

    def _read(self, index: int) -> bool:
        """Take what a device has printed. False if there was nothing (more) to take."""
        pipe = self._processes[index].stdout
        if pipe is None or pipe not in self._selector.get_map():
            return False
        try:
            chunk = os.read(pipe.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self._selector.unregister(pipe)
        if index == 0 and self._output is not None:
            self._output.write(self._decoder.decode(chunk, final=not chunk))
            self._output.flush()
        else:
            self._tails[index] += chunk
            del self._tails[index][:-_TAIL_BYTES]
        return bool(chunk)

    def _ended(self, index: int, ending: int) -> None:
        status = self._processes[index].wait(_REAP_LIMIT_S)
        self.statuses[index] = status if status >= 0 else 128 - status
        self._selector.unregister(ending)
        os.close(ending)
        # What it printed last may still be in the pipe; a child it left behind may go on for ever.
        for _ in range(_LAST_CHUNKS):
            if not self._read(index):
                return
