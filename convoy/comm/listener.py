"""The listening socket of a process: serves the processes of the job, and drops and counts all other connections.

Convoy reads nothing from an unauthenticated peer: its bytes only go to OpenSSL. One thread serves all connections and waits
for none. It serves authenticated connections first, then handshakes, then accepts, so members of the job never wait for
peers without the key:

- Accepting costs some microseconds and is never delayed, so members do not queue behind half-open connections. At most
  `MAX_PENDING` are open, each for `HANDSHAKE_S`. Those that have sent nothing are dropped first, and of these the oldest
  one of the host that has most.
- After failed handshakes, no handshakes are processed for `PAUSE_FACTOR` times the processor time that these took.
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
ANSWER_S = 0.5
"""How long a peer may take to receive an answer."""

ACCEPTS = MAX_PENDING // 2
"""Connections accepted in a row. Fewer than may be pending, so that each one gets a turn before it is dropped."""

KEPT: Literal["kept"] = "kept"
"""Returned by a handler that keeps the channel of a message."""

Handler = Callable[[Fields, Connection], Fields | Literal["kept"] | None]
"""Returns the answer to a message, KEPT, or None to close the connection."""


@dataclass(slots=True)
class _Pending:
    """A connection whose peer is not authenticated yet. It gets a channel with its first bytes."""

    host: str
    deadline_s: float
    channel: Connection | None = None


@final
class Listener:
    """Listens at one address, and passes messages of the job's processes to handlers, selected by the message's "for".

    Attributes:
        handlers: by purpose. They run on the listener's thread and must not block.
        rejected: how many connections were dropped before they were authenticated, by reason.
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
        # Pending connections have a selector of their own, which is taken out of the main one during a pause.
        self._selector, self._handshakes = selectors.DefaultSelector(), selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, self._stop)
        self._selector.register(listening, selectors.EVENT_READ, self._accept)
        self._selector.register(self._handshakes, selectors.EVENT_READ, self._shake_hands)
        self._paused_until_s: float | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def stream(self, mark: str, limit_s: float) -> Connection:
        """Return the connection that another process opened with this mark. TimeoutError if it does not come."""
        with self._stream_came:
            if not self._stream_came.wait_for(lambda: mark in self._streams, limit_s):
                raise TimeoutError(f"no connection came within {limit_s:g} s")
            return self._streams.pop(mark)

    def close(self) -> None:
        """End the thread, and close all connections that nobody has taken."""
        self._wakeup.close()
        self._thread.join(2.0)

    # --------------------------------------------------------------------------------------------- the thread

    def _serve(self) -> None:
        try:
            while not self._closing:
                ready = {key.fileobj: key.data for key, _ in self._selector.select(self._timeout_s())}
                last = [ready.pop(each, None) for each in (self._handshakes, self._listening)]
                for serve in (*ready.values(), *last):
                    if serve is not None:
                        serve()
                self._end_pause()
                self._drop_late()
        finally:
            for connection in self._pending:
                connection.close()
            for channel in (*self._members, *self._streams.values()):
                channel.close()
            for each in (self._woken, self._listening, self._handshakes, self._selector):
                each.close()

    def _stop(self) -> None:
        self._closing = True

    def _timeout_s(self) -> float | None:
        times_s = [pending.deadline_s for pending in self._pending.values()]
        times_s += [] if self._paused_until_s is None else [self._paused_until_s]
        return max(0.0, min(times_s) - time.monotonic()) if times_s else None

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                connection, address = self._listening.accept()
            except BlockingIOError:
                break
            except OSError:  # no free file descriptor: the kernel keeps the connection
                self.rejected["no free file descriptor"] += 1
                if not self._pending:
                    time.sleep(0.05)
                    break
                self._reject(next(iter(self._pending)), "too many at once")
                continue
            connection.setblocking(False)
            self._pending[connection] = _Pending(str(address[0]), time.monotonic() + HANDSHAKE_S)
            self._handshakes.register(connection, selectors.EVENT_READ)
        while len(self._pending) > MAX_PENDING:
            silent = {each: pending for each, pending in self._pending.items() if pending.channel is None}
            candidates = silent or self._pending
            ((busiest, _),) = Counter(pending.host for pending in candidates.values()).most_common(1)
            self._reject(next(each for each in candidates if candidates[each].host == busiest), "too many at once")

    def _shake_hands(self) -> None:
        """Continue all handshakes whose peers have sent something."""
        start_s, failed = time.thread_time(), self.rejected.total()
        for key, _ in self._handshakes.select(0):
            assert isinstance(key.fileobj, socket.socket)
            self._shake_hand(key.fileobj)
        if self.rejected.total() > failed:
            pause_s = min(MAX_PAUSE_S, PAUSE_FACTOR * (time.thread_time() - start_s))
            self._paused_until_s = time.monotonic() + pause_s
            self._selector.unregister(self._handshakes)

    def _shake_hand(self, connection: socket.socket) -> None:
        pending = self._pending[connection]
        try:
            channel = pending.channel = pending.channel or self.credentials.accept(connection)
            while not channel.shake_hands():
                pass
        except BlockingIOError:
            return
        except NotOfThisJob as error:
            self._reject(connection, str(error))
            return
        except Exception:
            self._reject(connection, "left during the handshake")
            return
        self._handshakes.unregister(connection)
        del self._pending[connection]
        self._members.add(channel)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._receive(channel))
        self._receive(channel)  # its first message may have come with the handshake

    def _end_pause(self) -> None:
        if self._paused_until_s is not None and time.monotonic() >= self._paused_until_s:
            self._paused_until_s = None
            self._selector.register(self._handshakes, selectors.EVENT_READ, self._shake_hands)

    def _drop_late(self) -> None:
        now_s = time.monotonic()
        for connection in [each for each, pending in self._pending.items() if pending.deadline_s <= now_s]:
            self._reject(connection, "no handshake in time")

    def _reject(self, connection: socket.socket, reason: str) -> None:
        del self._pending[connection]
        self._handshakes.unregister(connection)
        connection.close()
        self.rejected[reason] += 1

    # --------------------------------------------------------------------------------------- authenticated connections

    def _receive(self, channel: Connection) -> None:
        """Answer the messages that have arrived on a channel."""
        try:
            while (words := channel.receive_message()) is not None:
                answer = self.handlers[words["for"]](words, channel)
                if answer == KEPT:
                    self._forget(channel)
                    return
                if answer is None:
                    break
                channel.socket.settimeout(ANSWER_S)
                channel.send_message(answer)
                channel.socket.setblocking(False)
            else:
                return
        except BlockingIOError:
            return
        except Exception:  # closed, not a message, another version, or a handler's error: the listener goes on
            pass
        self._forget(channel)
        channel.close()

    def _forget(self, channel: Connection) -> None:
        self._members.discard(channel)
        self._selector.unregister(channel.socket)

    def _take_stream(self, words: Fields, channel: Connection) -> Literal["kept"]:
        inside = all(is_loopback(str(end[0])) for end in (self.address, channel.socket.getpeername()))
        channel.socket.settimeout(ANSWER_S)
        channel.send_message({"sealed": not inside})
        channel.socket.settimeout(None)
        if inside:
            channel.stop_encrypting()
        with self._stream_came:
            self._streams[str(words["mark"])] = channel
            self._stream_came.notify_all()
        return KEPT
