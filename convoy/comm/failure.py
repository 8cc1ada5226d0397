"""Find the failed device by following which device waits for which.

A closed or silent connection does not show which device failed: the peer may have left because of another one. So each process
answers health requests on its listener's thread. A device that loses a peer sends it a health request. Either the connection
is refused (the process is dead), or no reply comes (frozen), or the reply names the device for which the peer waits. A process
that leaves because of an error first sends the others a failure report.
"""

import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from convoy.comm.connection import Connection, Fields, NotOfThisJob
from convoy.comm.deadlines import FACTOR, TIMEOUT_S, wait_limit
from convoy.comm.listener import Listener
from convoy.comm.source_line import SAME_STEPS, current_line

RETRY_S = 0.05  # pause between two attempts
TRIPS = 32  # recent round trips that limit the next ones

# For how many time limits (see `HealthServer.limit_s`) a verdict must stay the same before a group acts on it. A device that
# holds Python's lock, or a switch that restarts, does not answer for some seconds. Devices in a circle may be paused.
SILENT, CIRCLE = 3, 20

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
    """A live device's reply: the device it waits for, if any, whether its work is done, its line in the user's program, and
    the bytes that it has exchanged.
    """

    waits_for: int | None = None
    done: bool = False
    line: str | None = None
    moved: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Verdict:
    """The failed device, and the cause: the words that follow its name in a message.

    `holds`: time limits after which a group acts on it. `moved`: bytes that the devices on the way to it have exchanged.
    """

    device: int
    cause: str
    holds: float = 0.0
    moved: int = 0


def find_failed(
    peers: "HealthServer",
    me: int,
    peer: int,
    silent_s: float | None,
    ids: Sequence[int],
    report_s: float = 1.0,
    wrong: str = "",
) -> Verdict:
    """Find the failed device: start at a peer that closed or fell silent, and follow which device each one waits for.

    Args:
        silent_s: how long nothing came; None: the peer's connection closed.
        ids: ids of the devices, for messages.
        report_s: how long to wait for the report of a device that has just left.
        wrong: what is wrong with a message from the peer.
    """

    def shown(lines: Mapping[int, str | None]) -> str:
        known = [f"device {ids[device]} is at {line}" for device, line in sorted(lines.items()) if line is not None]
        remedy = f". {SAME_STEPS}" if len(set(lines.values())) > 1 else ""
        return f". {'; '.join(known)}{remedy}" if known else ""

    chain, lines, moved = [me], {me: current_line()}, 0
    device, closed = peer, silent_s is None
    if wrong:
        theirs = peers.ping(device)
        lines[device] = None if isinstance(theirs, NoAnswer) else theirs.line
        return Verdict(device, f"{wrong}: the devices do not run the same steps{shown(lines)}")
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
            holds = 0.0 if closed or answer is NoAnswer.DEAD else SILENT
            return Verdict(device, _silence_cause(answer, silent_s or 0.0, closed), holds, moved)
        assert answer is not None
        chain.append(device)
        lines[device], moved = answer.line, moved + answer.moved
        if answer.done:
            return Verdict(device, DONE_CAUSE + shown(lines), 1.0, moved)  # its last message may be on the way
        if answer.waits_for is None and closed:
            cause = "closed its connections though it still runs: its program continued after an error"
            return Verdict(device, f"{cause}; see its own output")
        if answer.waits_for is None:
            cause = f"is alive but sent nothing for {silent_s or 0.0:.3g} s: its computation takes longer than the time limit"
            remedy = "Raise the limit (timeout_s), or give it a smaller share"
            return Verdict(device, f"{cause}. {remedy}{shown(lines)}", math.inf, moved)
        if answer.waits_for in chain:
            circle = " -> ".join(str(ids[each]) for each in [*chain, answer.waits_for])
            same = "the devices do not run the same steps; start all with the same program"
            return Verdict(device, f"waits in a circle ({circle}): {same}{shown(lines)}", CIRCLE, moved)
        device, closed = answer.waits_for, False


def left_because(device: int, error: BaseException) -> Verdict:
    """Return the verdict for a device that leaves because of an error in its own program."""
    return Verdict(device, f"left because of its own error: {type(error).__name__}: {error}"[:4000])


def _silence_cause(silence: NoAnswer, silent_s: float, closed: bool) -> str:
    since = "its connection closed" if closed else f"it sent nothing for {silent_s:.3g} s"
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
        moved_bytes: returns the bytes that this device has exchanged with all others.
        answers: handlers, by the name of the question.
        limit_s: time limit of a reply, which the other listener's thread sends; derived from the recent round trips.
    """

    def __init__(self, device: int, listener: Listener, token: str, most_s: float = TIMEOUT_S) -> None:
        self.device = device
        self.token = token
        self.addresses: list[tuple[str, int]] = []
        self.listener = listener
        self.address = listener.address
        self.waits_for: list[int | None] = []
        self.done = False
        self.moved_bytes: Callable[[], int] = lambda: 0
        self._most_s, self._trips_s = most_s, deque[float](maxlen=TRIPS)
        self.limit_s = self.limit_of(1)
        self.answers: dict[str, Callable[[Fields], Fields]] = {
            "health": lambda _: asdict(Health(self._waited_for(), self.done, current_line(), self.moved_bytes())),
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
        return answer if isinstance(answer, NoAnswer) else Health(**answer) if answer else NoAnswer.DEAD

    def limit_of(self, trips: int) -> float:
        """Return the time limit of this number of round trips."""
        return wait_limit([trips * each for each in list(self._trips_s)], self._most_s)

    def note_trip(self, trip_s: float) -> None:
        """Record the time of a round trip."""
        self._trips_s.append(trip_s)
        self.limit_s = self.limit_of(1)

    def ask(
        self, address: tuple[str, int], question: str, limit_s: float | None = None, **fields: Any
    ) -> Fields | NoAnswer:
        """Send a question to another health server and return the reply. Keep the connection open for later questions."""
        message = {"for": "health", "token": self.token, "ask": question, **fields}
        deadline_s = time.monotonic() + (limit_s or self.limit_s)
        while True:
            begin_s = time.monotonic()
            connection = self._open.pop(address, None)
            try:
                if connection is None:
                    connection, answer = self.listener.credentials.connect(address, message, deadline_s)
                else:
                    connection.deadline(deadline_s)
                    answer = connection.ask(message)
            except (OSError, NotOfThisJob, ValueError) as error:
                if connection is not None:
                    connection.close()
                if isinstance(error, TimeoutError):
                    with suppress(OSError):  # the kernel accepts connections even for a frozen process
                        socket.create_connection(address, timeout=self.limit_s / FACTOR).close()
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
            self.note_trip(time.monotonic() - begin_s)
            return answer

    def keep_open(self, addresses: Collection[tuple[str, int]]) -> None:
        """Close the connections to all other addresses."""
        for address in list(self._open):
            if address not in addresses and (connection := self._open.pop(address, None)) is not None:
                connection.close()

    def report_failure(self, report: FailureReport) -> None:
        """Send a report to all other devices, soon even if some do not answer: 1 s in all, and longer on a slow network."""
        end_s = time.monotonic() + self.limit_s / 3
        for device, address in enumerate(self.addresses):
            left_s = end_s - time.monotonic()
            if device != self.device and left_s > 0:
                self.ask(address, "report", min(left_s, self.limit_s / 10), report=asdict(report))

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
