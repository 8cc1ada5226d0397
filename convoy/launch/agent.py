"""The far side of a start: `python -m convoy.launch.agent` runs on each host of a fleet, and is told what to do line by line.

Its devices end when they are told to, when its input ends (ssh was cut off, or who started it is gone), and after a
minute of silence.
"""

import codecs
import hashlib
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from convoy._version import __version__
from convoy.comm.environment import resolve, route_to
from convoy.errors import ConvoyError, InputError
from convoy.launch import protocol
from convoy.launch.exit_status import Ending
from convoy.launch.processes import CONVOY_COMMAND, TERMINATE_S, Crew, Part
from convoy.launch.protocol import Message, line


class Far:
    """The devices of this host, and who has them started."""

    def __init__(self, orders: int, answers: int) -> None:
        """Files to read orders from and to write answers to."""
        self._answers = answers
        self._writing = threading.Lock()
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._pumps: list[threading.Thread] = []
        self._interrupted = False
        self._thread(self._read, orders)

    def serve(self) -> int:
        """Do what is asked until the devices have ended; the exit status."""
        try:
            while (order := self._next()) is not None:
                match order["convoy"]:
                    case "check":
                        self._say("here", **_description(order["files"]))
                    case "meet":
                        address, port = meeting_point(order["peers"], order["address"], order["port"])
                        self._say("met", address=address, port=port)
                    case "start":
                        self._run(order)
                        return 0
        except ConvoyError as error:
            self._say("refused", text=str(error))
            return 2
        return 0

    def _run(self, order: Message) -> None:
        """Start the devices and see them end."""
        part = Part(
            tuple(order["ranks"]), tuple(order["names"]), order["total"], order["address"], order["port"],
            own=tuple(order["own"]),
        )  # fmt: skip
        # Only this process holds the write end, so the devices see the end of it whichever way this process ends.
        lifeline, held = os.pipe()
        crew = Crew(dict(zip(part.ranks, order["titles"], strict=True)), self._tell)
        self._thread(self._watch, crew)
        try:
            for rank, variables in zip(part.ranks, part.variables(os.environ), strict=True):
                command = [*CONVOY_COMMAND, *order["argv"]]
                if rank:
                    crew.start(rank, command, variables, lifeline)
                else:
                    self._start_first(crew, command, variables, lifeline, order["speech"])
            crew.await_trouble()
            if self._interrupted:
                crew.interrupt()
            crew.end(order["grace_s"])
        finally:
            crew.kill()
            os.close(held)
            os.close(lifeline)

    def _start_first(
        self, crew: Crew, command: Sequence[str], variables: dict[str, str], lifeline: int, speech: Sequence[int] | None
    ) -> None:
        """Device 0: what it says goes to `speech`, files of the terminal, or as it comes to who started this."""
        if speech is not None:
            crew.start(0, command, variables, lifeline, (speech[0], speech[1]))
            return
        pipes = {name: os.pipe() for name in ("stdout", "stderr")}
        try:
            speaking = pipes["stdout"][1], pipes["stderr"][1]
            crew.start(0, command, {**variables, "PYTHONUNBUFFERED": "1"}, lifeline, speaking)
        finally:
            for _, write_end in pipes.values():
                os.close(write_end)
            self._pumps = [self._thread(self._pump, read_end, name) for name, (read_end, _) in pipes.items()]

    def _pump(self, file: int, name: str) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        while chunk := os.read(file, 65_536):
            self._say("text", stream=name, text=decoder.decode(chunk))
        os.close(file)

    def _tell(self, ending: Ending) -> None:
        if ending.device == 0:
            for pump in self._pumps:  # what it said comes before its end; a child of its own may hold the pipe
                pump.join(TERMINATE_S)
        self._say(
            "ended", device=ending.device, name=ending.name, status=ending.status, stopped=ending.stopped_by_us,
            lines=ending.lines,
        )  # fmt: skip

    def _watch(self, crew: Crew) -> None:
        """Wait for the order to end, or for the end of orders."""
        while (order := self._next()) is not None:
            if order["convoy"] == "end":
                break
        self._interrupted = order is None or order["interrupt"]
        crew.wake()

    def _next(self) -> Message | None:
        """The next order; None when there will be none."""
        try:
            return self._inbox.get(timeout=protocol.SILENCE_S)
        except queue.Empty:
            return None

    def _read(self, orders: int) -> None:
        for text in protocol.lines(orders):
            if (order := protocol.message(text)) is not None:
                self._inbox.put(order)
        self._inbox.put(None)

    def _say(self, what: str, **fields: object) -> None:
        text = line(what, **fields)
        with self._writing:
            try:
                while text:
                    text = text[os.write(self._answers, text) :]
            except OSError:  # nobody listens any more; the end of the orders says so too
                return

    @staticmethod
    def _thread(work: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, name="convoy-far", daemon=True)
        thread.start()
        return thread


def _description(files: Sequence[str]) -> Message:
    """What the starting side checks: the version, the two addresses of its connection, the digests of files."""
    client, _, server, _ = (os.environ.get("SSH_CONNECTION") or "   ").split(" ")
    digests = {name: digest(Path(name)) for name in files}
    return {"version": __version__, "client": client, "server": server, "folder": os.getcwd(), "digests": digests}


def digest(path: Path) -> str | None:
    """The SHA-256 of a file; None if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def meeting_point(peers: Sequence[str], address: str, port: int | None) -> tuple[str, int]:
    """Where the devices can meet on this machine: the address on its route to the others, and a port that is free now.

    Args:
        peers: addresses of the other hosts.
        address: what to take if there are none.
        port: None: any.

    Raises:
        InputError: no route, or the port is taken.
    """
    host = route_to(peers[0], 9) if peers else address
    family, target = resolve(host, port or 0, socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(target)
        except OSError as error:
            raise InputError(
                f"the devices cannot meet at {host} port {port}: {error.strerror}; give another --port, or none for a free "
                "one"
            ) from None
        return host, int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(Far(0, 1).serve())
