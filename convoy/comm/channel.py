"""One connection between two processes of a job: TLS 1.3 where the job has a key, else plain TCP.

TLS is the standard library's. Tensors go in and out of their own memory: what is sent is encrypted in pieces of 64 KB, what
arrives is read in pieces of 128 KB and decrypted into its place. A channel may be used by one thread at a time.
"""

import json
import select
import socket
import ssl
import struct
import time
from contextlib import suppress
from typing import Any, final

from convoy.comm.job_key import JobKey

Words = dict[str, Any]

CHUNK_BYTES = 65_536
"""Encrypted at once: larger ones leave the processor's cache, smaller ones cost a system call each."""

RECEIVED_BYTES = 131_072
"""Of encrypted bytes, read at once: with 64 KB, receiving took a quarter more processor time; 256 KB gain nothing more."""

FRAME_BYTES = 1 << 20
"""The longest text that is taken."""

_LENGTH = struct.Struct(">I")


class NotOfThisJob(Exception):  # noqa: N818 - a fact about the other side
    """The other side does not have this job's key."""


@final
class Credentials:
    """What a process proves itself with, and asks of the others; without a key nothing is asked."""

    def __init__(self, key: JobKey | None) -> None:
        self.key = key
        self._answering: ssl.SSLContext | None = None
        self._calling: ssl.SSLContext | None = None
        if key is not None:
            self._answering, self._calling = key.contexts()
        self._certificate = b"" if key is None else key.certificate

    def answering(self, connection: socket.socket) -> "Channel":
        """The channel of a connection that came in."""
        return Channel(connection, self._answering, self._certificate, answers=True)

    def call(self, address: tuple[str, int], words: Words, deadline_s: float) -> "Channel":
        """Connect, prove each other, and say what for; the answer is still to be read.

        Raises:
            NotOfThisJob: it listens, and has another key or none.
            OSError: as connections fail; TimeoutError after the deadline.
        """
        channel: Channel | None = None
        connection = socket.create_connection(address, timeout=_left_s(deadline_s))
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = Channel(connection, self._calling, self._certificate, answers=False)
            channel.deadline(deadline_s)
            while not channel.greet():
                channel.deadline(deadline_s)
            channel.say(words)
            return channel
        except BaseException:
            connection.close()
            raise


@final
class Channel:
    """A connection, and the TLS around it.

    Attributes:
        connection: the plain socket. What goes through it is encrypted already, so it can be shut down at any moment.
        waiting: texts that have begun to arrive.
    """

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext | None, certificate: bytes, *, answers: bool
    ) -> None:
        self.connection = connection
        self._arriving, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = None if context is None else context.wrap_bio(self._arriving, self._leaving, server_side=answers)
        self._certificate = certificate
        self._chunk = memoryview(bytearray(RECEIVED_BYTES))
        self._ahead = memoryview(b"")  # has arrived, unencrypted, behind what was asked for
        self._behind = b""  # has not left yet
        self._poll: select.poll | None = None
        self._partial = b""

    def unseal(self) -> None:
        """From now on nothing is encrypted. Both sides call it, when each has read all that the other has said.

        For connections inside one machine: there the kernel keeps others from reading them, and from speaking on them.
        """
        self._tls = None

    def deadline(self, deadline_s: float) -> None:
        """From now on whatever waits here fails with TimeoutError at that time (of `time.monotonic`)."""
        self.connection.settimeout(_left_s(deadline_s))

    def greet(self) -> bool:
        """Go on with the handshake; whether it is done, and the other side has this job's key.

        Raises:
            NotOfThisJob: it has not, or this is no handshake at all.
        """
        if self._tls is None:
            return True
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self.flush()
            self._arriving.write(self._received())
            return False
        except ssl.SSLError as error:
            raise NotOfThisJob((error.reason or "no handshake").lower().replace("_", " ")) from None
        self.flush()
        if self._tls.getpeercert(binary_form=True) != self._certificate:
            raise NotOfThisJob("another certificate")
        return True

    def send(self, content: memoryview | bytes) -> None:
        """Send all of it, straight from its memory."""
        self.flush()
        if self._tls is None:
            self.connection.sendall(content)
            return
        whole = memoryview(content)
        for start in range(0, len(whole), CHUNK_BYTES):
            self._encrypt(whole[start : start + CHUNK_BYTES])
            self.flush()

    def send_at_once(self, content: bytes) -> bool:
        """Send without waiting; whether all of it has left. What has not leaves with `flush`, or before what is sent next."""
        if self._tls is not None:
            self._encrypt(memoryview(content))
            content = self._leaving.read()
        content = self._behind + content if self._behind else content
        try:
            self._behind = content[self.connection.send(content, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            self._behind = content
        return not self._behind

    def send_some(self, head: bytes, content: memoryview) -> int | None:
        """Send as much as the kernel takes without waiting, where nothing is encrypted.

        Returns:
            how many bytes of the content have left; what of the head has not leaves before what is sent next. None: nothing.
        """
        if self._tls is not None or self._behind:
            return None
        try:
            count = self.connection.sendmsg([head, content], [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        self._behind = head[count:]
        return max(0, count - len(head))

    def flush(self) -> None:
        """Send what has not left yet."""
        if self._behind:
            behind, self._behind = self._behind, b""
            self.connection.sendall(behind)
        if self._leaving.pending:
            self.connection.sendall(self._leaving.read())

    def receive_some(self, place: memoryview, until_s: float | None = None) -> int:
        """Fill the beginning of a place with what has come; how much that was.

        What came behind it by the same call to the system is kept, and the next place is filled with it.

        Args:
            until_s: of `time.monotonic`; None: as long as the connection itself waits.

        Raises:
            ConnectionError: the other side has closed.
            NotOfThisJob: what came was not sent by who has the key.
            TimeoutError: nothing came in this time.
        """
        if self._tls is None:
            return self._unsealed(place, until_s)
        while True:
            try:
                count: Any = self._tls.read(len(place), place)
                if count:
                    return int(count)
                raise ConnectionResetError("the connection was closed")
            except ssl.SSLWantReadError:
                self._arriving.write(self._received(until_s))
            except ssl.SSLError as error:
                raise NotOfThisJob((error.reason or "a broken record").lower().replace("_", " ")) from None

    def _unsealed(self, place: memoryview, until_s: float | None) -> int:
        if not self._ahead:
            if len(place) >= CHUNK_BYTES:
                self._wait(until_s)
                if got := self.connection.recv_into(place):
                    return got
                raise ConnectionResetError("the connection was closed")
            self._ahead = self._received(until_s)
        count = min(len(place), len(self._ahead))
        place[:count] = self._ahead[:count]
        self._ahead = self._ahead[count:]
        return count

    def receive(self, place: memoryview) -> None:
        """Fill a place; errors as in `receive_some`."""
        while place:
            place = place[self.receive_some(place) :]

    def say(self, words: Words) -> None:
        """Send a text: JSON behind its length."""
        text = json.dumps(words).encode()
        self.send(_LENGTH.pack(len(text)) + text)

    def heard(self) -> Words | None:
        """The next text; None if only a part of it is there and the connection does not wait.

        Raises:
            ValueError: what came is none.
            ConnectionError, NotOfThisJob, TimeoutError: as in `receive_some`.
        """
        place = memoryview(bytearray(4096))
        while (missing := self._missing()) > 0:
            try:
                self._partial += place[: self.receive_some(place[: min(missing, len(place))])]
            except BlockingIOError:
                return None
        words, self._partial = json.loads(self._partial[_LENGTH.size :]), b""
        if not isinstance(words, dict):
            raise ValueError("a text is an object of JSON")
        return words

    def ask(self, words: Words) -> Words:
        """Say something, and the answer to it. Errors as in `heard`."""
        self.say(words)
        answer = self.heard()
        assert answer is not None  # this connection waits
        return answer

    def cut(self) -> None:
        """End it at once, also under the hands of another thread. The socket itself is closed by `close`."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.connection.close()

    def _missing(self) -> int:
        if len(self._partial) < _LENGTH.size:
            return _LENGTH.size - len(self._partial)
        (length,) = _LENGTH.unpack(self._partial[: _LENGTH.size])
        if length > FRAME_BYTES:
            raise ValueError(f"a text of {length} bytes")
        return int(_LENGTH.size + length - len(self._partial))

    def _received(self, until_s: float | None = None) -> memoryview:
        self._wait(until_s)
        if count := self.connection.recv_into(self._chunk):
            return self._chunk[:count]
        raise ConnectionResetError("the connection was closed")

    def _wait(self, until_s: float | None) -> None:
        """Until something has come; without a time, reading itself waits."""
        if until_s is None:
            return
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self.connection, select.POLLIN)
        if not self._poll.poll(max(0.0, until_s - time.monotonic()) * 1e3):
            raise TimeoutError("nothing came in time")

    def _encrypt(self, content: memoryview) -> None:
        assert self._tls is not None
        while content:
            content = content[self._tls.write(content) :]


def _left_s(deadline_s: float) -> float:
    return max(0.001, deadline_s - time.monotonic())
