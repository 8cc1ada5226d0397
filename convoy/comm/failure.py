"""Find the failed device by following which device waits for which.

A closed or silent connection does not show which device failed: the peer may have left because of another one. So each process
answers health requests on its listener's thread. A device that loses a peer sends it a health request. Either the connection
is refused (the process is dead), or no reply comes (frozen), or the reply names the device for which the peer waits. A process
that leaves because of an error first sends the others a failure report.
"""

import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from convoy.comm.connection import Connection, Fields, NotOfThisJob
from convoy.comm.listener import Listener
from convoy.comm.source_line import SAME_STEPS, current_line

PING_S = 2.0
"""Time limit for a live process's reply, which its listener's thread sends."""

REPORT_S = 1.0
"""Time limit for a failure report, and for sending all of them."""

ONE_REPORT_S = 0.3
"""Time limit for sending the report to one device."""

RETRY_S = 0.05
"""Pause between two attempts."""

DONE_CAUSE = "had ended its work while others still waited for it: the devices do not run the same steps"


class NoAnswer(Enum):
    """The reason why a device did not answer."""

    DEAD = "its process has ended"
    FROZEN = "its process exists but does not answer"
    UNREACHABLE = "its machine does not answer"


@dataclass(frozen=True)
class FailureReport:
    """The message of a device that leaves because of an error: the root device and the cause."""

    device: int
    root: int
    cause: str


@dataclass(frozen=True)
class Health:
    """A live device's reply: the device it waits for, if any, whether its work is done, and its line in the user's program."""

    waits_for: int | None = None
    done: bool = False
    line: str | None = None


@dataclass(frozen=True)
class Verdict:
    """The failed device, and the cause: the words that follow its name in a message."""

    device: int
    cause: str


def find_failed(
    peers: "HealthServer",
    me: int,
    peer: int,
    timed_out: bool,
    limit_s: float,
    line: str | None = None,
    report_s: float = REPORT_S,
    ids: Sequence[int] | None = None,
) -> Verdict:
    """Find the failed device: start at a peer that closed or fell silent, and follow which device each one waits for.

    Args:
        timed_out: the peer was silent for ``limit_s``; False: its connection closed.
        line: this device's line in the user's program.
        ids: ids of the devices, for messages. None: their indices.
    """

    def shown(lines: Mapping[int, str | None]) -> str:
        return shown_lines({device if ids is None else ids[device]: line for device, line in lines.items()})

    chain, lines = [me], {me: line}
    device, closed = peer, not timed_out
    while True:
        report = peers.report_from(device, 0.0)
        answer = peers.ping(device) if report is None else None
        if report is None and (answer is NoAnswer.DEAD or (closed and answer == Health(None))):
            # The device has just left, so its report may still arrive.
            report = peers.report_from(device, report_s)
        if report is not None:
            # The report of a device that ended its work does not contain the lines at which others wait.
            where = shown({**lines, device: None}) if report.cause == DONE_CAUSE else ""
            return Verdict(report.root, report.cause + where)
        if isinstance(answer, NoAnswer):
            return Verdict(device, _silence_cause(answer, limit_s, closed))
        assert answer is not None
        chain.append(device)
        lines[device] = answer.line
        if answer.done:
            return Verdict(device, DONE_CAUSE + shown(lines))
        if answer.waits_for is None and closed:
            cause = "closed its connections though it still runs: its program continued after an error"
            return Verdict(device, f"{cause}; see its own output")
        if answer.waits_for is None:
            cause = f"is alive but sent nothing for {limit_s:g} s: its computation takes longer than the time limit"
            remedy = "Raise the limit (timeout_s), or give it a smaller share"
            return Verdict(device, f"{cause}. {remedy}{shown(lines)}")
        if answer.waits_for in chain:
            circle = " -> ".join(str(each if ids is None else ids[each]) for each in [*chain, answer.waits_for])
            same = "the devices do not run the same steps; start all with the same program"
            return Verdict(device, f"waits in a circle ({circle}): {same}{shown(lines)}")
        device, closed = answer.waits_for, False


def left_because(device: int, error: BaseException) -> Verdict:
    """Return the verdict for a device that leaves because of an error in its own program."""
    return Verdict(device, f"left because of its own error: {type(error).__name__}: {error}"[:4000])


def shown_lines(lines: Mapping[int, str | None]) -> str:
    """Return words for a message: the devices' known lines in the user's program."""
    known = [f"device {device} is at {line}" for device, line in sorted(lines.items()) if line is not None]
    remedy = f". {SAME_STEPS}" if len(set(lines.values())) > 1 else ""
    return f". {'; '.join(known)}{remedy}" if known else ""


def _silence_cause(silence: NoAnswer, limit_s: float, closed: bool) -> str:
    since = "its connection closed" if closed else f"it sent nothing for {limit_s:g} s"
    cause, remedy = {
        NoAnswer.DEAD: (
            "its process ended without a report (killed, crashed, or out of memory)",
            "See its own output and the system log; start",
        ),
        NoAnswer.FROZEN: (f"{since}, and {silence.value}: it is stopped or frozen", "End it, then start"),
        NoAnswer.UNREACHABLE: (
            f"{since}, and {silence.value}: it is off, or its cable is out", "Check the network, then start",
        ),
    }[silence]  # fmt: skip
    return f"was lost: {cause}. {remedy} the job again, or without this device"


class HealthServer:
    """A server that answers other devices' health requests on this process's listener, and a client that sends them.

    Attributes:
        token: token of this group. Requests with another token get no reply.
        addresses: addresses of all devices' health servers.
        waits_for: for each lane, the device that it waits for.
        answers: handlers, by the name of the question.
    """

    def __init__(self, device: int, listener: Listener, token: str) -> None:
        self.device = device
        self.token = token
        self.addresses: list[tuple[str, int]] = []
        self.listener = listener
        self.address = listener.address
        self.waits_for: list[int | None] = []
        self.done = False
        self.answers: dict[str, Callable[[Fields], Fields]] = {
            "health": lambda _: asdict(Health(self._waited_for(), self.done, current_line())),
            "report": self._take_report,
        }
        self._reports: dict[int, FailureReport] = {}
        self._reported = threading.Condition()
        self._open: dict[tuple[str, int], Connection] = {}
        self._closed = False
        listener.handlers["health"] = lambda fields, _: (
            self.answers[fields["ask"]](fields) if fields["token"] == self.token else None
        )

    def ping(self, device: int) -> Health | NoAnswer:
        answer = self.ask(self.addresses[device], "health")
        if isinstance(answer, NoAnswer):
            return answer
        return Health(**answer) if answer else NoAnswer.DEAD

    def ask(self, address: tuple[str, int], question: str, limit_s: float = PING_S, **fields: Any) -> Fields | NoAnswer:
        """Send a question to another health server and return the reply. Keep the connection open for later questions."""
        message = {"for": "health", "token": self.token, "ask": question, **fields}
        deadline_s = time.monotonic() + limit_s
        while True:
            connection = self._open.pop(address, None)
            try:
                if connection is None:
                    connection = self.listener.credentials.connect(address, message, deadline_s)
                else:
                    connection.deadline(deadline_s)
                    connection.send_message(message)
                answer = connection.receive_message()
                assert answer is not None  # this connection blocks
            except (OSError, NotOfThisJob, ValueError) as error:
                if connection is not None:
                    connection.close()
                if isinstance(error, TimeoutError):
                    with suppress(OSError):  # the kernel accepts connections even for a frozen process
                        socket.create_connection(address, timeout=0.2).close()
                        return NoAnswer.FROZEN
                    return NoAnswer.UNREACHABLE
                if isinstance(error, ConnectionRefusedError):
                    return NoAnswer.DEAD
                if isinstance(error, OSError) and not isinstance(error, ConnectionError):
                    return NoAnswer.UNREACHABLE
                # The process has just ended, as the next attempt will show, or its listener dropped the connection.
                if time.monotonic() + RETRY_S > deadline_s:
                    return NoAnswer.DEAD
                time.sleep(RETRY_S)
                continue
            if self._closed or self._open.setdefault(address, connection) is not connection:
                connection.close()  # another thread has opened one at the same time
            return answer

    def keep_open(self, addresses: Collection[tuple[str, int]]) -> None:
        """Close the connections to all other addresses."""
        for address in list(self._open):
            if address not in addresses and (connection := self._open.pop(address, None)) is not None:
                connection.close()

    def report_failure(self, report: FailureReport) -> None:
        """Send a report to all other devices, within about `REPORT_S` even if some do not answer."""
        end_s = time.monotonic() + REPORT_S
        for device, address in enumerate(self.addresses):
            left_s = end_s - time.monotonic()
            if device != self.device and left_s > 0:
                self.ask(address, "report", min(left_s, ONE_REPORT_S), report=asdict(report))

    def report_from(self, device: int, timeout_s: float) -> FailureReport | None:
        """Return a device's report; None if it does not come in time."""
        with self._reported:
            self._reported.wait_for(lambda: device in self._reports, timeout_s)
            return self._reports.get(device)

    def close(self) -> None:
        self._closed = True
        self.listener.close()
        self.keep_open(())

    def _waited_for(self) -> int | None:
        return None if self.done else next((each for each in self.waits_for if each is not None), None)

    def _take_report(self, fields: Fields) -> Fields:
        report = FailureReport(**fields["report"])
        with self._reported:
            self._reports[report.device] = report
            self._reported.notify_all()
        return {}
