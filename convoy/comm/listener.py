"""Serve the job's own processes at a listening socket. Drop and count all other connections.

Only OpenSSL reads the bytes of an unauthenticated peer. One thread serves all connections and never blocks. It serves
authenticated connections first, then handshakes, then accepts, so the job's processes never wait for peers without the key:

- Accepting takes some microseconds and is never delayed. At most `MAX_PENDING` unauthenticated connections are open, each for
  `HANDSHAKE_S`. The listener first drops those that have sent nothing, and among them the oldest of the host with the most.
- After failed handshakes, the listener pauses handshakes for `PAUSE_FACTOR` times the processor time that they took.
"""

import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, final

from convoy.comm.connection import Connection, Credentials, Fields, NotOfThisJob
from convoy.comm.environment import is_loopback

HANDSHAKE_S = 5.0
MAX_PENDING = 128
PAUSE_FACTOR = 50
MAX_PAUSE_S = 0.25
ANSWER_S = 0.5  # time limit for a peer to receive a reply
# Most connections accepted in a row. Fewer than `MAX_PENDING`, so that each can start its handshake before it is dropped.
ACCEPTS = MAX_PENDING // 2
KEPT: Literal["kept"] = "kept"  # return value of a handler that takes over the connection

Handler = Callable[[Fields, Connection], Fields | Literal["kept"] | None]
"""Function that returns the reply to a message, KEPT, or None to close the connection."""


@dataclass(slots=True)
class _Pending:
    """A connected but unauthenticated peer. Its first bytes create the `connection`."""

    host: str
    deadline_s: float
    connection: Connection | None = None


@final
class Listener:
    """A listening socket that passes the job's messages to handlers, selected by the message's "for".

    Attributes:
        handlers: handlers by purpose. They run on the listener's thread and must not block.
        rejected: number of unauthenticated connections dropped, by reason.
    """

    def __init__(self, listening: socket.socket, credentials: Credentials, name: str = "convoy-listener") -> None:
        self.credentials = credentials
        self.handlers: dict[str, Handler] = {"stream": self._take_stream}
        self.rejected: Counter[str] = Counter()
        self.address = (str(listening.getsockname()[0]), int(listening.getsockname()[1]))
        self._listening = listening
        self._members: set[Connection] = set()
        self._pending: dict[socket.socket, _Pending] = {}  # oldest first
        self._streams: dict[str, Connection] = {}
        self._stream_came = threading.Condition()
        self._woken, self._wakeup = socket.socketpair()
        self._closing = False
        listening.setblocking(False)
        # Pending connections have a separate selector, which is not in the main one during a pause.
        self._selector, self._handshakes = selectors.DefaultSelector(), selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: setattr(self, "_closing", True))
        self._selector.register(listening, selectors.EVENT_READ, self._accept)
        self._selector.register(self._handshakes, selectors.EVENT_READ, self._shake_hands)
        self._paused_until_s: float | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def stream(self, mark: str, limit_s: float) -> Connection:
        """Wait for a connection that another process opens with this mark, and return it. TimeoutError: none came in time."""
        with self._stream_came:
            if not self._stream_came.wait_for(lambda: mark in self._streams, limit_s):
                raise TimeoutError(f"no connection came within {limit_s:g} s")
            return self._streams.pop(mark)

    def close(self) -> None:
        """Stop the thread, and close all connections except those that `stream` has returned."""
        self._wakeup.close()
        self._thread.join(2.0)

    def _serve(self) -> None:
        try:
            while not self._closing:
                times_s = [pending.deadline_s for pending in self._pending.values()]
                times_s += [] if self._paused_until_s is None else [self._paused_until_s]
                wait_s = max(0.0, min(times_s) - time.monotonic()) if times_s else None
                ready = {key.fileobj: key.data for key, _ in self._selector.select(wait_s)}
                last = [ready.pop(each, None) for each in (self._handshakes, self._listening)]
                for serve in (*ready.values(), *last):
                    if serve is not None:
                        serve()
                now_s = time.monotonic()
                if self._paused_until_s is not None and now_s >= self._paused_until_s:
                    self._paused_until_s = None
                    self._selector.register(self._handshakes, selectors.EVENT_READ, self._shake_hands)
                for late in [each for each, pending in self._pending.items() if pending.deadline_s <= now_s]:
                    self._reject(late, "no handshake in time")
        finally:
            for connected in self._pending:
                connected.close()
            for connection in (*self._members, *self._streams.values()):
                connection.close()
            for each in (self._woken, self._listening, self._handshakes, self._selector):
                each.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                connected, address = self._listening.accept()
            except BlockingIOError:
                break
            except OSError:  # no free file descriptor: the kernel keeps the connection
                self.rejected["no free file descriptor"] += 1
                if not self._pending:
                    time.sleep(0.05)
                    break
                self._reject(next(iter(self._pending)), "too many at once")
                continue
            connected.setblocking(False)
            self._pending[connected] = _Pending(str(address[0]), time.monotonic() + HANDSHAKE_S)
            self._handshakes.register(connected, selectors.EVENT_READ)
        while len(self._pending) > MAX_PENDING:
            silent = {each: pending for each, pending in self._pending.items() if pending.connection is None}
            candidates = silent or self._pending
            ((busiest, _),) = Counter(pending.host for pending in candidates.values()).most_common(1)
            self._reject(next(each for each in candidates if candidates[each].host == busiest), "too many at once")

    def _shake_hands(self) -> None:
        start_s, failed = time.thread_time(), self.rejected.total()
        for key, _ in self._handshakes.select(0):
            assert isinstance(key.fileobj, socket.socket)
            self._shake_hand(key.fileobj)
        if self.rejected.total() > failed:
            pause_s = min(MAX_PAUSE_S, PAUSE_FACTOR * (time.thread_time() - start_s))
            self._paused_until_s = time.monotonic() + pause_s
            self._selector.unregister(self._handshakes)

    def _shake_hand(self, connected: socket.socket) -> None:
        pending = self._pending[connected]
        try:
            connection = pending.connection = pending.connection or self.credentials.accept(connected)
            while not connection.shake_hands():
                pass
        except BlockingIOError:
            return
        except Exception as error:
            self._reject(connected, str(error) if isinstance(error, NotOfThisJob) else "left during the handshake")
            return
        self._handshakes.unregister(connected)
        del self._pending[connected]
        self._members.add(connection)
        self._selector.register(connected, selectors.EVENT_READ, lambda: self._receive(connection))
        self._receive(connection)  # its first message may have come with the handshake

    def _reject(self, connected: socket.socket, reason: str) -> None:
        del self._pending[connected]
        self._handshakes.unregister(connected)
        connected.close()
        self.rejected[reason] += 1

    def _receive(self, connection: Connection) -> None:
        """Answer the messages that have arrived on an authenticated connection."""
        answer: Fields | Literal["kept"] | None = None
        try:
            while (message := connection.receive_message()) is not None:
                answer = self.handlers[message["for"]](message, connection)
                if answer is None or answer == KEPT:
                    break
                connection.socket.settimeout(ANSWER_S)
                connection.send_message(answer)
                connection.socket.setblocking(False)
            else:
                return
        except BlockingIOError:
            return
        except Exception:  # closed, not a message, another version, or a handler's error: the listener continues
            answer = None
        self._members.discard(connection)
        self._selector.unregister(connection.socket)
        if answer != KEPT:
            connection.close()

    def _take_stream(self, message: Fields, connection: Connection) -> Literal["kept"]:
        inside = all(is_loopback(str(end[0])) for end in (self.address, connection.socket.getpeername()))
        connection.socket.settimeout(ANSWER_S)
        connection.send_message({"sealed": not inside})
        connection.socket.settimeout(None)
        if inside:
            connection.stop_encrypting()
        with self._stream_came:
            self._streams[str(message["mark"])] = connection
            self._stream_came.notify_all()
        return KEPT
