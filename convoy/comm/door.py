"""Where a process listens: connections of the job are let in and answered, all others are dropped and counted.

Nothing that a stranger sends is read by Convoy: it goes to OpenSSL, and only who has proved to have the job's key is heard.
One thread does it all, and waits for nobody: a handshake has `HANDSHAKE_S`, at most `MOST_STRANGERS` are under way, and what
failing ones cost is followed by a pause `PATIENCE` times as long: strangers get a small share of a processor at most.
"""

import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, final

from convoy.comm.channel import Channel, Credentials, NotOfThisJob, Words
from convoy.comm.environment import is_loopback

HANDSHAKE_S = 5.0
MOST_STRANGERS = 128
PATIENCE = 50
LONGEST_PAUSE_S = 0.25
ANSWER_S = 0.5
"""How long who asked may take to take the answer."""

BATCH = 32
"""Connections that are let in before those that are there already get a turn."""

KEPT: Literal["kept"] = "kept"
"""Answer of who keeps the channel that a text came on."""

Handler = Callable[[Words, Channel], Words | Literal["kept"] | None]
"""Takes a text; gives the answer, None for none at all (the connection is closed), or KEPT."""


@final
class Door:
    """Listens at one address, and gives what the job's processes say to handlers, by the text's "for".

    Attributes:
        handlers: by what they are for. They run on the door's thread and must not wait.
        strangers: how many connections were dropped, by reason.
    """

    def __init__(self, listener: socket.socket, credentials: Credentials, name: str = "convoy-door") -> None:
        self.credentials = credentials
        self.handlers: dict[str, Handler] = {"stream": self._take_stream}
        self.strangers: Counter[str] = Counter()
        self.address = (str(listener.getsockname()[0]), int(listener.getsockname()[1]))
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._guests: dict[Channel, float] = {}  # until when the handshake may last; infinite once it is done
        self._streams: dict[str, Channel] = {}
        self._came = threading.Condition()
        self._bell, self._button = socket.socketpair()
        self._ending = False
        listener.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ, self._stop)
        self._selector.register(listener, selectors.EVENT_READ, self._let_in)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def stream(self, mark: str, limit_s: float) -> Channel:
        """The connection that another process has opened under this mark. TimeoutError if it does not come."""
        with self._came:
            if not self._came.wait_for(lambda: mark in self._streams, limit_s):
                raise TimeoutError(f"no connection came within {limit_s:g} s")
            return self._streams.pop(mark)

    def close(self) -> None:
        """End the thread, and all connections that nobody has taken."""
        self._button.close()
        self._thread.join(2.0)

    # --------------------------------------------------------------------------------------------- the thread

    def _serve(self) -> None:
        try:
            while not self._ending:
                events = self._selector.select(self._patience_s())
                start_s, failed = time.thread_time(), sum(self.strangers.values())
                for key, _ in events:
                    key.data()
                self._drop_late()
                if sum(self.strangers.values()) > failed:
                    pause_s = min(LONGEST_PAUSE_S, PATIENCE * (time.thread_time() - start_s))
                    self._bell.settimeout(pause_s)
                    with suppress(TimeoutError):
                        self._ending = self._bell.recv(1) == b""
        finally:
            for channel in (*self._guests, *self._streams.values()):
                channel.close()
            self._bell.close()
            self._listener.close()
            self._selector.close()

    def _stop(self) -> None:
        self._ending = True

    def _patience_s(self) -> float | None:
        first_s = min(self._guests.values(), default=float("inf"))
        return None if first_s == float("inf") else max(0.0, first_s - time.monotonic())

    def _let_in(self) -> None:
        for _ in range(BATCH):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:  # nobody more
                break
            except OSError:  # no more files, say; the kernel keeps them waiting
                self.strangers["not let in"] += 1
                break
            channel = self.credentials.answering(connection)
            channel.connection.setblocking(False)
            self._guests[channel] = time.monotonic() + HANDSHAKE_S
            self._selector.register(connection, selectors.EVENT_READ, lambda channel=channel: self._attend(channel))
        unproved = [channel for channel, until_s in self._guests.items() if until_s < float("inf")]
        for channel in unproved[:-MOST_STRANGERS]:  # the oldest: who is of the job takes milliseconds
            self._drop(channel, "too many at once")

    def _drop_late(self) -> None:
        now_s = time.monotonic()
        for channel in [channel for channel, until_s in self._guests.items() if until_s <= now_s]:
            self._drop(channel, "no handshake in time")

    def _drop(self, channel: Channel, reason: str | None) -> None:
        """Close a connection; with a reason it was a stranger's."""
        self._release(channel)
        channel.close()
        if reason is not None:
            self.strangers[reason] += 1

    def _release(self, channel: Channel) -> None:
        self._guests.pop(channel, None)
        self._selector.unregister(channel.connection)

    def _attend(self, channel: Channel) -> None:
        """Go on with one connection as far as it has sent."""
        if channel not in self._guests:
            return
        proved = self._guests[channel] == float("inf")
        try:
            while not proved:
                proved = channel.greet()
            self._guests[channel] = float("inf")
            while (words := channel.heard()) is not None:
                if not self._answer(channel, words):
                    return
        except BlockingIOError:
            return
        except NotOfThisJob as error:
            self._drop(channel, str(error))
        except OSError:
            self._drop(channel, None if proved else "left during the handshake")
        except Exception:  # no text, of another version, for no handler, or a handler's own error: the door stays open
            self._drop(channel, None)

    def _answer(self, channel: Channel, words: Words) -> bool:
        """Give a text to its handler, and the answer back; whether the connection stays here."""
        answer = self.handlers[words["for"]](words, channel)
        if answer == KEPT:
            self._release(channel)
            return False
        if answer is None:
            self._drop(channel, None)
            return False
        channel.connection.settimeout(ANSWER_S)
        channel.say(answer)
        channel.connection.setblocking(False)
        return True

    def _take_stream(self, words: Words, channel: Channel) -> Words | Literal["kept"] | None:
        mark: Any = words["mark"]
        inside = all(is_loopback(str(end[0])) for end in (self.address, channel.connection.getpeername()))
        channel.connection.settimeout(ANSWER_S)
        channel.say({"sealed": not inside})
        channel.connection.settimeout(None)
        if inside:
            channel.unseal()
        with self._came:
            self._streams[str(mark)] = channel
            self._came.notify_all()
        return KEPT
