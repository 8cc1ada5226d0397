"""Runs on each host of a fleet and starts its devices (`python -m convoy.launch.agent`).

The agent ends its devices on an order, when its input closes (ssh or the launcher ended), and after a minute of silence.
Launcher and agent exchange lines of JSON; the key "convoy" holds the type of a message.
"""

import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from convoy._version import __version__
from convoy.comm.environment import resolve, route_to
from convoy.comm.job_key import KEY_FILE, TRUST, JobKey
from convoy.errors import ConvoyError, InputError
from convoy.launch.host_job import CONVOY_COMMAND, device_environments, log_of
from convoy.launch.supervisor import Interrupts, Output, Signalled, Sink, Start, Supervisor, by_line, decoded

BEAT_S = 5.0  # seconds between two heartbeats of the launcher
SILENCE_S = 60.0  # after this silence a host ends its devices: a network failure may close no connection
Message = dict[str, Any]


def to_line(kind: str, **fields: object) -> bytes:
    return json.dumps({"convoy": kind, **fields}).encode() + b"\n"


def from_line(line: bytes) -> Message | None:
    """Return the message in a line; None for other lines, such as the greeting of a login shell."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "convoy" in found else None


class Agent:
    """The process on a host that runs the launcher's orders, until the host's devices have ended."""

    def __init__(self, orders: int, answers: int) -> None:
        self._files = orders, answers
        self._orders: deque[Message | None] = deque()  # None: end of input
        self._received_s = time.monotonic()

    def serve(self) -> int:
        with (
            Interrupts() as interrupts,
            Supervisor(interrupts, lambda ending: self._send("ended", **asdict(ending))) as devices,
        ):
            devices.watch(self._files[0], by_line(self._take_line), lambda: self._orders.append(None))
            try:
                while (order := self._next(devices)) is not None and order["convoy"] != "end":
                    if order["convoy"] == "check":  # version, both addresses of the connection, digests of files
                        client, _, server, _ = (os.environ.get("SSH_CONNECTION") or "   ").split(" ")
                        digests = {name: digest(Path(name)) for name in order["files"]}
                        addresses = {"client": client, "server": server}
                        self._send("here", version=__version__, folder=os.getcwd(), digests=digests, **addresses)
                    elif order["convoy"] == "meet":
                        address, port = meeting_point(order["peers"], order["port"])
                        self._send("met", address=address, port=port)
                    elif order["convoy"] == "start":
                        self._start(devices, order)
                        self._wait(devices, order)
                        break
            except ConvoyError as error:
                self._send("refused", text=str(error))
                return 2
            except Signalled as interrupted:
                if interrupted.after_step:  # the machine may be shutting down, with the connection already closed
                    with suppress(Signalled):
                        devices.end_after_step(
                            len(devices.running),
                            lambda: any(each and not each.get("after_step") for each in self._orders),
                        )
                return interrupted.status
        return 0

    def _start(self, devices: Supervisor, order: Message) -> None:
        key = None if order["key"] is None else JobKey(order["key"].encode())
        # The order contains the job's key; keys in this host's environment are ignored.
        base = {name: value for name, value in os.environ.items() if name not in (KEY_FILE, TRUST)}
        environments = device_environments(
            base if key is not None else base | {TRUST: "1"}, order["ranks"], order["names"], total=order["total"],
            address=order["address"], port=order["port"], own=order["own"],
        )  # fmt: skip
        logs = None if order["logs"] is None else Path(order["logs"])
        command = [*CONVOY_COMMAND, *order["argv"]]
        for rank, title, variables in zip(order["ranks"], order["titles"], environments, strict=True):
            stdout: Output = subprocess.DEVNULL
            stderr: Output = "keep"
            if rank == 0 and order["terminal"] is not None:
                stdout, stderr = order["terminal"]
            elif rank == 0:
                stdout, stderr = self._forward("stdout"), self._forward("stderr")
                variables["PYTHONUNBUFFERED"] = "1"
            elif order["goes_on"]:  # any device may become the first device
                stdout = self._forward("stdout")
            start = Start(
                device=rank, name=title, command=command, environment=variables, lifeline=True, key=key, stdout=stdout,
                stderr=stderr, log=log_of(logs, rank),
            )  # fmt: skip
            try:
                devices.start(start)
            except OSError as error:
                raise InputError(f"cannot start {command[0]!r}: {error.strerror}; correct the host's python") from None

    def _wait(self, devices: Supervisor, order: Message) -> None:
        """Wait until all devices have ended. End them if a device failed, on an order, or if the launcher has ended."""
        over = partial(devices.over, order["goes_on"])
        end = self._next(devices, over)
        if end is not None and end["after_step"]:
            devices.end_after_step(end["started"], lambda: bool(self._orders))
            return
        if not over() and (end is None or end["interrupt"]):
            devices.send_signal(signal.SIGINT)
        devices.end(order["grace_s"])

    def _next(self, devices: Supervisor, over: Callable[[], bool] = lambda: False) -> Message | None:
        """Return the next order; None at the end of input, after a long silence, or when `over` is true."""
        devices.listen(lambda: self._orders or over() or time.monotonic() > self._received_s + SILENCE_S)
        return self._orders.popleft() if self._orders else None

    def _take_line(self, line: bytes) -> None:
        self._received_s = time.monotonic()
        order = from_line(line)
        if order is not None and order["convoy"] != "beat":
            self._orders.append(order)

    def _forward(self, stream: str) -> Sink:
        return decoded(lambda text: self._send("text", stream=stream, text=text))

    def _send(self, kind: str, **fields: object) -> None:
        text, answers = to_line(kind, **fields), self._files[1]
        with suppress(OSError):  # the reader has ended, so the orders end too
            while text:
                if not select.select([], [answers], [], SILENCE_S)[1]:
                    self._orders.append(None)  # the launcher no longer reads, so it sends no orders
                    return
                text = text[os.write(answers, text[: select.PIPE_BUF]) :]


def digest(path: Path) -> str | None:
    """Return the SHA-256 of a file; None if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def meeting_point(peers: Sequence[str], port: int | None) -> tuple[str, int]:
    """Return the rendezvous address on this machine: its address on the route to the other hosts, and a free port."""
    host = route_to(peers[0], 9) if peers else "127.0.0.1"
    family, target = resolve(host, port or 0, socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(target)
        except OSError as error:
            why = f"device 0 cannot listen at {host} port {port}: {error.strerror}"
            raise InputError(f"{why}; give another --port, or none for a free one") from None
        return host, int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(Agent(0, 1).serve())
