"""Connect two processes of a job: TLS 1.3 if the job has a key, else plain TCP.

Tensors are encrypted from their own memory in chunks of 64 KB. Received bytes are read in chunks of 128 KB and decrypted into
the tensor's memory. One thread at a time may use a connection.
"""

import errno
import json
import os
import select
import socket
import ssl
import struct
import time
from contextlib import suppress
from typing import Any, final

from convoy.comm.environment import ProcessEnv
from convoy.comm.job_key import JobKey, key_of_process

Fields = dict[str, Any]

# Bytes encrypted at once. Larger chunks do not fit the processor's cache, smaller ones need more system calls.
CHUNK_BYTES = 65_536
RECEIVED_BYTES = 131_072  # encrypted bytes read at once. 64 KB takes a quarter more processor time; 256 KB is no faster
FRAME_BYTES = 1 << 20  # longest accepted control message

_LENGTH = struct.Struct(">I")


class NotOfThisJob(Exception):  # noqa: N818 - says what the peer is
    """The error for a peer without this job's key."""


@final
class Credentials:
    """The TLS contexts of a job; without a key, connections are not authenticated."""

    def __init__(self, key: JobKey | None) -> None:
        self.key = key
        contexts: tuple[ssl.SSLContext | None, ssl.SSLContext | None] = (None, None)
        self._server, self._client = contexts if key is None else key.contexts()
        self._certificate = b"" if key is None else key.certificate

    def accept(self, accepted: socket.socket) -> "Connection":
        """Return the connection of an accepted socket."""
        return Connection(accepted, self._server, self._certificate, answers=True)

    def connect(self, address: tuple[str, int], message: Fields, deadline_s: float) -> tuple["Connection", Fields]:
        """Connect, authenticate, and send a first message. Return the connection and the reply.

        Raises:
            NotOfThisJob: the listener has another key or none.
            OSError: the connection failed. TimeoutError after the deadline. ValueError: the reply is not a message.
        """
        connected = socket.create_connection(address, timeout=_left_s(deadline_s))
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(connected, self._client, self._certificate, answers=False)
            connection.deadline(deadline_s)
            while not connection.shake_hands():
                connection.deadline(deadline_s)
            return connection, connection.ask(message)
        except BaseException:
            connected.close()
            raise


def credentials_of(env: ProcessEnv) -> Credentials:
    """Return this process's credentials for its job."""
    return Credentials(key_of_process(env, os.environ))


@final
class Connection:
    """A connection with its TLS state."""

    def __init__(
        self, connected: socket.socket, context: ssl.SSLContext | None, certificate: bytes, *, answers: bool
    ) -> None:
        self.socket = connected
        self._arriving, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = None if context is None else context.wrap_bio(self._arriving, self._leaving, server_side=answers)
        self._certificate = certificate
        self._chunk = memoryview(bytearray(RECEIVED_BYTES))
        self._ahead = memoryview(b"")  # unencrypted bytes, read but not yet returned
        self._behind = b""  # bytes not sent yet
        self._poll: select.poll | None = None
        self._partial = b""

    def stop_encrypting(self) -> None:
        """Stop encrypting. Both sides must call it, after they have read all bytes sent so far.

        Only for connections inside one machine, which the kernel protects from other processes.
        """
        self._tls = None

    def deadline(self, deadline_s: float) -> None:
        """Make all later waits raise TimeoutError at this time (of `time.monotonic`)."""
        self.socket.settimeout(_left_s(deadline_s))

    def shake_hands(self) -> bool:
        """Continue the TLS handshake. Return whether it is complete. NotOfThisJob: the peer has another key or none."""
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
        """Send all bytes directly from their memory."""
        self.flush()
        if self._tls is None:
            self.socket.sendall(content)
            return
        whole = memoryview(content)
        for start in range(0, len(whole), CHUNK_BYTES):
            self._encrypt(whole[start : start + CHUNK_BYTES])
            self.flush()

    def send_at_once(self, content: bytes) -> bool:
        """Send without waiting. Return whether all bytes were sent; `flush` or the next call sends the rest."""
        if self._tls is not None:
            self._encrypt(memoryview(content))
            content = self._leaving.read()
        content = self._behind + content if self._behind else content
        try:
            self._behind = content[self.socket.send(content, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            self._behind = content
        return not self._behind

    def send_some(self, head: bytes, content: memoryview) -> int | None:
        """If the connection is not encrypted, send as much as the kernel accepts without waiting.

        Return the number of content bytes sent, or None if nothing was sent. The next call first sends the rest of the head.
        """
        if self._tls is not None or self._behind:
            return None
        try:
            count = self.socket.sendmsg([head, content], [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        self._behind = head[count:]
        return max(0, count - len(head))

    def flush(self) -> None:
        """Send the rest of earlier messages."""
        if self._behind:
            behind, self._behind = self._behind, b""
            self.socket.sendall(behind)
        if self._leaving.pending:
            self.socket.sendall(self._leaving.read())

    def receive_some(self, place: memoryview, until_s: float | None = None) -> int:
        """Receive at least one byte into the beginning of a buffer, and return the number of bytes.

        Args:
            until_s: deadline, of `time.monotonic`. None: the timeout of the connection applies.

        Raises:
            ConnectionError: the peer has closed the connection.
            NotOfThisJob: the bytes were not sent with the job's key.
            TimeoutError: nothing arrived in time.
        """
        while self._tls is not None:
            try:
                count: Any = self._tls.read(len(place), place)
                if count:
                    return int(count)
                raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
            except ssl.SSLWantReadError:
                self._arriving.write(self._received(until_s))
            except ssl.SSLError as error:
                raise NotOfThisJob((error.reason or "a broken record").lower().replace("_", " ")) from None
        if not self._ahead and len(place) >= CHUNK_BYTES:
            self._wait(until_s)
            if got := self.socket.recv_into(place):
                return got
            raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
        self._ahead = self._ahead or self._received(until_s)
        count = min(len(place), len(self._ahead))
        place[:count] = self._ahead[:count]
        self._ahead = self._ahead[count:]
        return int(count)

    def send_message(self, fields: Fields) -> None:
        """Send a control message: its length, then JSON."""
        text = json.dumps(fields).encode()
        self.send(_LENGTH.pack(len(text)) + text)

    def receive_message(self) -> Fields | None:
        """Return the next control message. None: it is not complete yet, on a non-blocking connection.

        Raises:
            ValueError: not a control message.
            ConnectionError, NotOfThisJob, TimeoutError: as in `receive_some`.
        """
        place = memoryview(bytearray(4096))
        while (missing := self._missing_bytes()) > 0:
            try:
                self._partial += place[: self.receive_some(place[: min(missing, len(place))])]
            except BlockingIOError:
                return None
        fields, self._partial = json.loads(self._partial[_LENGTH.size :]), b""
        if not isinstance(fields, dict):
            raise ValueError("a control message is a JSON object")
        return fields

    def ask(self, fields: Fields) -> Fields:
        """Send a control message and return the reply. Errors as in `receive_message`."""
        self.send_message(fields)
        answer = self.receive_message()
        assert answer is not None  # this connection blocks
        return answer

    def moved_bytes(self) -> int:
        """Return the bytes that the peer's kernel has acknowledged or sent; 0 where the system does not count them."""
        with suppress(OSError, AttributeError, struct.error):  # closed, or not Linux
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
            return sum(struct.unpack_from("QQ", info, 120))
        return 0

    def cut(self) -> None:
        """Shut the connection down, even while another thread uses it. `close` must follow."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()

    def _missing_bytes(self) -> int:
        if len(self._partial) < _LENGTH.size:
            return _LENGTH.size - len(self._partial)
        (length,) = _LENGTH.unpack(self._partial[: _LENGTH.size])
        if length > FRAME_BYTES:
            raise ValueError(f"a control message of {length} bytes")
        return int(_LENGTH.size + length - len(self._partial))

    def _received(self, until_s: float | None = None) -> memoryview:
        self._wait(until_s)
        if count := self.socket.recv_into(self._chunk):
            return self._chunk[:count]
        raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")

    def _wait(self, until_s: float | None) -> None:
        """Wait for bytes to read until a deadline. Without one, the read itself waits."""
        if until_s is None:
            return
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self.socket, select.POLLIN)
        if not self._poll.poll(max(0.0, until_s - time.monotonic()) * 1e3):
            raise TimeoutError(errno.ETIMEDOUT, "nothing arrived in time")

    def _encrypt(self, content: memoryview) -> None:
        assert self._tls is not None
        while content:
            content = content[self._tls.write(content) :]


def _left_s(deadline_s: float) -> float:
    return max(0.001, deadline_s - time.monotonic())
