"""The agent: `python -m convoy.launch.agent` runs on each host of a fleet, and is told what to do line by line.

Its devices end when it is told so, when its input ends (ssh was cut off, or who started it is gone), and after a
minute of silence. Both sides speak in lines of JSON, whose key "convoy" says what the message is.
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
from pathlib import Path
from typing import Any

from convoy._version import __version__
from convoy.comm.environment import resolve, route_to
from convoy.comm.job_key import KEY_FILE, TRUST, JobKey
from convoy.errors import ConvoyError, InputError
from convoy.launch.again import Address, Again
from convoy.launch.exit_status import Ending
from convoy.launch.host_job import CONVOY_COMMAND, device_environments, joining_environment, log_of
from convoy.launch.leaving import ends_in_order, let_leave
from convoy.launch.stay import all_train, go_behind, let_go, note_end, note_line, stay
from convoy.launch.stopped import Stopped
from convoy.launch.supervisor import Interrupted, Interrupts, Output, Sink, Supervisor, by_line, decoded, speaker

BEAT_S = 5.0
"""The side that starts a fleet says at least so often that it is there."""

SILENCE_S = 60.0
"""A host that hears nothing for so long ends its devices: the network may be gone without a sign."""

Message = dict[str, Any]


def to_line(what: str, **fields: object) -> bytes:
    """A message as it travels."""
    return json.dumps({"convoy": what, **fields}).encode() + b"\n"


def from_line(line: bytes) -> Message | None:
    """The message in a line; None for anything else, such as what a login shell prints."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "convoy" in found else None


class Agent:
    """Does what is ordered until the devices of this host have ended."""

    def __init__(self, orders: int, answers: int) -> None:
        """Files to read orders from and to write answers to."""
        self._files = orders, answers
        self._orders: deque[Message | None] = deque()  # None: there will be no more
        self._heard_s = time.monotonic()
        self._held: int | None = None  # closed when it lets go of who started it
        self._alone = False  # it has
        self._again = Again({0: ""}, None, note_line)  # of its own devices, once it has

    def serve(self) -> int:
        """Do what is asked; the exit status."""
        with Interrupts() as interrupts, Supervisor(interrupts, self._tell) as devices:
            devices.watch(self._files[0], self._hear())
            try:
                while (order := self._next(devices)) is not None:
                    match order["convoy"]:
                        case "check":
                            self._say("here", **_description(order["files"]))
                        case "meet":
                            address, port = meeting_point(order["peers"], order["address"], order["port"])
                            self._say("met", address=address, port=port)
                        case "start":
                            if order["detach"]:
                                self._held = go_behind()
                            self._start(devices, order)
                            self._say("started")
                            if order["detach"] and self._are_let_go(devices, order):
                                how = {name: order[name] for name in ("goes_on", "grace_s", "silence_s")}
                                stay(devices, self._again, **how)
                                return 0
                            self._see_them_end(
                                devices, order["grace_s"], goes_on=order["goes_on"], silence_s=order["silence_s"]
                            )
                            return 0
                        case "end":
                            return 0
            except ConvoyError as error:
                self._say("refused", text=str(error))
                return 2
            except Interrupted as interrupted:
                if ends_in_order(
                    interrupted
                ):  # this machine is switched off, perhaps, and the connection is gone by now
                    with suppress(Interrupted):
                        let_leave(devices, len(devices.running), lambda: self._is_told_to_end)
                return interrupted.status
        return 0

    def _start(self, devices: Supervisor, order: Message) -> None:
        """Start the devices, or again one that was lost. What device 0 prints goes to files of the terminal, or as it comes to
        who started this."""
        key = None if order["key"] is None else JobKey(order["key"].encode())
        # What this host's own shell says of keys is of no matter here.
        base = {name: value for name, value in os.environ.items() if name not in (KEY_FILE, TRUST)}
        environments = device_environments(
            base if key is not None else base | {TRUST: "1"}, order["ranks"], order["names"], total=order["total"],
            address=order["address"], port=order["port"], own=order["own"],
        )  # fmt: skip
        own = dict(zip(order["ranks"], environments, strict=True))
        titles = dict(zip(order["ranks"], order["titles"], strict=True))

        def start_again(device: int, number: int, doors: Sequence[Address]) -> None:
            devices.forget_ended()
            try:
                self._start_one(devices, order, key, device, number, joining_environment(own[device], doors))
            except ConvoyError as error:
                self._again.lose_host(number, str(error))

        if order["detach"]:
            named = {rank: f"device {rank} ({title})" for rank, title in titles.items()}
            tries = start_again if order["tries_again"] else None
            self._again = Again(named, tries, note_line, devices=order["total"], alone=True)
        if (again := order["again"]) is not None:
            rank = again["device"]
            self._start_one(devices, order, key, rank, again["process"], joining_environment(own[rank], again["doors"]))
            return
        for rank, variables in own.items():
            self._start_one(devices, order, key, rank, rank, variables)

    def _start_one(
        self, devices: Supervisor, order: Message, key: JobKey | None, rank: int, number: int, variables: dict[str, str]
    ) -> None:
        """Start a device as a process with this number: its own, or another one where it is started again."""
        command = [*CONVOY_COMMAND, *order["argv"]]
        logs = None if order["logs"] is None else Path(order["logs"])
        stdout: Output = subprocess.DEVNULL
        stderr: Output = "keep"
        if number == 0 and order["terminal"] is not None:
            stdout, stderr = order["terminal"]
        elif number == 0:
            stdout, stderr = (self._forward(devices, stream, number) for stream in ("stdout", "stderr"))
            variables["PYTHONUNBUFFERED"] = "1"
        elif order["goes_on"]:  # it may have to print instead of device 0
            stdout = self._forward(devices, "stdout", number)
        log, told = log_of(logs, number), self._pass_on(number) if order["tells"] else None
        if order["detach"]:
            variables["PYTHONUNBUFFERED"] = "1"
            log = logs and logs / f"device-{rank}.log"
            told = by_line(lambda line: self._again.hear(number, line)) if order["tries_again"] else None
        try:
            devices.start(
                number, order["titles"][order["ranks"].index(rank)], command, environment=variables, lifeline=True, key=key,
                stdout=stdout, stderr=stderr, log=log, log_goes_on=order["detach"], told=told,
            )  # fmt: skip
        except OSError as error:
            raise InputError(f"cannot start {command[0]!r}: {error.strerror}; correct the host's python") from None

    def _are_let_go(self, devices: Supervisor, order: Message) -> bool:
        """Whether all devices of the job train, and who started them has let them go; no: some have ended, or are to."""

        def over() -> bool:
            return (devices.failed and not order["goes_on"]) or not devices.running

        told = self._next(devices, lambda: over() or all_train(devices))
        if told is None and not over() and all_train(devices):
            self._say("train")
            told = self._next(devices, over)
            if told is not None and told["convoy"] == "detach":
                logs = Path(order["logs"]).absolute()
                self._say("detached", logs=str(logs))
                devices.unwatch(self._files[0])
                assert self._held is not None
                let_go(self._held, logs / f"host-of-{min(order['ranks'])}.log")
                self._alone = True
                return True
        if told is not None:
            self._orders.appendleft(told)
        return False

    def _see_them_end(self, devices: Supervisor, grace_s: float, *, goes_on: bool, silence_s: float) -> None:
        """Wait until all devices have ended; end them once one has failed, unless the others go on without it, or who started
        them says so or is gone."""

        stopped = Stopped(devices, silence_s)

        def over() -> bool:
            if goes_on:
                stopped.tend()
            return (devices.failed and not goes_on) or not devices.running

        order = self._next(devices, over)
        if order is not None and order.get("own"):  # after the step
            let_leave(devices, order["own"], lambda: bool(self._orders))
            return
        if not over() and (order is None or order.get("interrupt")):
            devices.send_signal(signal.SIGINT)
        devices.end(grace_s)

    def _tell(self, ending: Ending) -> None:
        if self._alone:
            note_end(ending, self._again.device_of(ending.device))
        self._again.note(ending)
        self._say(
            "ended", device=ending.device, name=ending.name, status=ending.status, stopped=ending.stopped_by_us,
            lines=ending.lines,
        )  # fmt: skip

    def _next(self, devices: Supervisor, over: Callable[[], bool] = lambda: False) -> Message | None:
        """The next order; None when there will be none, after a long silence, or once it is over."""
        devices.listen(lambda: self._orders or over() or time.monotonic() > self._heard_s + SILENCE_S)
        return self._orders.popleft() if self._orders and self._orders[0] is not None else None

    @property
    def _is_told_to_end(self) -> bool:
        """At once, and not after the step."""
        return any(order is not None and order["convoy"] == "end" and not order["own"] for order in self._orders)

    def _hear(self) -> Sink:
        def take(line: bytes) -> None:
            order = from_line(line)
            if order is not None and order["convoy"] != "beat":
                self._orders.append(order)

        lines = by_line(take)

        def sink(chunk: bytes) -> None:
            self._heard_s = time.monotonic()
            lines(chunk)
            if not chunk:
                self._orders.append(None)

        return sink

    def _pass_on(self, rank: int) -> Sink:
        return by_line(lambda line: self._say("told", device=rank, line=line.decode(errors="replace")))

    def _forward(self, devices: Supervisor, stream: str, rank: int) -> Sink:
        speaks = speaker(devices, rank)
        return decoded(lambda text: self._say("text", stream=stream, text=text, device=rank, speaks=speaks()))

    def _say(self, what: str, **fields: object) -> None:
        """Write a message. Where nobody reads any more, no more orders come either."""
        if self._alone:
            return
        text, answers = to_line(what, **fields), self._files[1]
        with suppress(OSError):  # who read has gone; the end of the orders says so too
            while text:
                if not select.select([], [answers], [], SILENCE_S)[1]:
                    self._orders.append(None)
                    return
                text = text[os.write(answers, text[: select.PIPE_BUF]) :]


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
    sys.exit(Agent(0, 1).serve())
