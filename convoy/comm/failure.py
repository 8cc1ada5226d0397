"""Who was lost: every process answers one question, "for whom do you wait?", and the survivors follow the answers.

A closed or silent connection says little: the neighbour may have left because of somebody else. So each process keeps
a small door beside its data connections, served by a thread of its own. A device that loses its peer knocks there:
nobody opens (its process is dead), somebody opens and says nothing (frozen), or it says for whom it waits itself. And a
process that leaves because of an error first leaves a note with the cause at the others' doors.
"""

import json
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Protocol

KNOCK_S = 2.0
"""How long a live process may take to answer. Its door is served by a thread that does nothing else."""

NOTE_S = 1.0
"""How long a note may be on its way, and how long leaving notes may take."""

LINE_BYTES = 65536

DONE_CAUSE = "had ended its work while others still waited for it: the devices do not run the same steps"


class Silence(Enum):
    """Why a device gave no answer."""

    DEAD = "its process has ended"
    FROZEN = "its process exists but does not answer"
    UNREACHABLE = "its machine does not answer"


@dataclass(frozen=True)
class Note:
    """What a device says as it leaves because of an error: which device is the root of it, and why."""

    device: int
    root: int
    cause: str


@dataclass(frozen=True)
class Answer:
    """What a live device says: for whom it waits at the moment, if it does, or that its work is done."""

    waits_for: int | None = None
    done: bool = False


@dataclass(frozen=True)
class Verdict:
    """Which device was lost, and how, in words that follow its name."""

    device: int
    cause: str


class Doors(Protocol):
    """The doors of all devices, as the search for the lost one uses them."""

    def knock(self, device: int) -> Answer | Silence: ...

    def note_from(self, device: int, timeout_s: float) -> Note | None: ...


def find_lost(doors: Doors, me: int, peer: int, timed_out: bool, limit_s: float) -> Verdict:
    """Follow who waits for whom, from the peer that failed to the device that everybody waits for.

    Args:
        timed_out: the peer was silent for ``limit_s``; otherwise its connection closed.
    """
    chain = [me]
    device, closed = peer, not timed_out
    while True:
        note = doors.note_from(device, 0.0)
        answer = doors.knock(device) if note is None else None
        if note is None and (answer is Silence.DEAD or (closed and answer == Answer(None))):
            # It left a moment ago: its note may still be on the way.
            note = doors.note_from(device, NOTE_S)
        if note is not None:
            return Verdict(note.root, note.cause)
        if isinstance(answer, Silence):
            return Verdict(device, _silence_cause(answer, limit_s, closed))
        chain.append(device)
        if answer is not None and answer.done:
            return Verdict(device, DONE_CAUSE)
        if answer is None or answer.waits_for is None:
            return Verdict(device, _busy_cause(limit_s, closed))
        if answer.waits_for in chain:
            circle = " -> ".join(str(each) for each in [*chain, answer.waits_for])
            return Verdict(
                device,
                f"waits in a circle ({circle}): the devices do not run the same steps; start all with the same program",
            )
        device, closed = answer.waits_for, False


def _silence_cause(silence: Silence, limit_s: float, closed: bool) -> str:
    if silence is Silence.DEAD:
        return (
            "was lost: its process ended without a word (killed, crashed, or out of memory). "
            "Its own output or system log says more; start the job again, or without this device"
        )
    since = "its connection closed" if closed else f"it sent nothing for {limit_s:g} s"
    if silence is Silence.FROZEN:
        return (
            f"was lost: {since}, and its process exists but does not answer: it is stopped or frozen. "
            "End it, then start the job again, or without this device"
        )
    return (
        f"was lost: {since}, and its machine does not answer: it is off, or its cable is out. "
        "Check the network, then start the job again, or without this device"
    )


def _busy_cause(limit_s: float, closed: bool) -> str:
    if closed:
        return "closed its connections though it still runs: its program went on after an error; see its own output"
    return (
        f"is alive but sent nothing for {limit_s:g} s: its own work takes longer than the time limit. "
        "Raise the limit (timeout_s), or give it a smaller share"
    )


class Door:
    """This process's door, and the way to the others' doors. Its thread sleeps unless somebody knocks."""

    def __init__(self, device: int, address: str, token: str, status: Callable[[], Answer]) -> None:
        """Listen at ``address`` on a free port.

        Args:
            token: known to the processes of this job only; others get no answer.
            status: what this device says at the moment; called from the door's thread.
        """
        self.device = device
        self.token = token
        self.status = status
        self.addresses: list[tuple[str, int]] = []
        self._notes: dict[int, Note] = {}
        self._noted = threading.Condition()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=64)
        self._bell, self._bell_push = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="convoy-door", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def knock(self, device: int) -> Answer | Silence:
        """Ask a device for whom it waits."""
        host, port = self.addresses[device]
        connected = False
        try:
            with socket.create_connection((host, port), timeout=KNOCK_S) as visit:
                connected = True
                visit.sendall(self._line({"ask": "status"}))
                answer = json.loads(_read_line(visit))
                return Answer(None if answer["waits_for"] is None else int(answer["waits_for"]), bool(answer["done"]))
        except TimeoutError:
            return Silence.FROZEN if connected else Silence.UNREACHABLE
        except (ConnectionError, ValueError, LookupError, TypeError):
            return Silence.DEAD
        except OSError:
            return Silence.UNREACHABLE

    def leave_notes(self, note: Note) -> None:
        """Tell every other device why this one leaves. Dead and unreachable ones cost at most a second together."""
        deadline_s = time.monotonic() + NOTE_S
        for device, (host, port) in enumerate(self.addresses):
            left_s = deadline_s - time.monotonic()
            if device == self.device or left_s <= 0:
                continue
            try:
                with socket.create_connection((host, port), timeout=min(0.3, left_s)) as visit:
                    visit.sendall(self._line({"note": asdict(note)}))
            except OSError:
                continue

    def note_from(self, device: int, timeout_s: float) -> Note | None:
        """The note that a device left here, if it comes within the time."""
        with self._noted:
            self._noted.wait_for(lambda: device in self._notes, timeout_s)
            return self._notes.get(device)

    def close(self) -> None:
        self._bell_push.close()
        self._thread.join(KNOCK_S)
        self._listener.close()
        self._bell.close()

    def _line(self, words: dict[str, object]) -> bytes:
        return json.dumps({"token": self.token, **words}).encode() + b"\n"

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._bell, selectors.EVENT_READ)
            while True:
                if any(key.fileobj is self._bell for key, _ in selector.select()):
                    return
                try:
                    visitor, _ = self._listener.accept()
                    with visitor:
                        visitor.settimeout(NOTE_S / 2)
                        self._answer(visitor)
                except (OSError, ValueError, LookupError, TypeError):
                    # A visitor that hangs up, or speaks otherwise than a Convoy process, gets nothing.
                    continue

    def _answer(self, visitor: socket.socket) -> None:
        words = json.loads(_read_line(visitor))
        if words["token"] != self.token:
            return
        if "note" in words:
            note = words["note"]
            with self._noted:
                device = int(note["device"])
                self._notes[device] = Note(device, int(note["root"]), str(note["cause"]))
                self._noted.notify_all()
        else:
            visitor.sendall(json.dumps(asdict(self.status())).encode() + b"\n")


def _read_line(visit: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < LINE_BYTES:
        piece = visit.recv(4096)
        if not piece:
            break
        line += piece
    return line
