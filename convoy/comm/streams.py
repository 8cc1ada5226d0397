"""Send tensors over the job's own connections: for each pair of devices and each lane, one connection per direction.

A connection delivers messages in the order in which they were started. Each message starts with its size; an unexpected size
is an error.

Sending a small message is faster than passing it to another thread. The calling thread sends it immediately if the queue is
empty and the kernel accepts it, and the waiting thread receives it. The calling thread also sends as much of a large
unencrypted message as the kernel accepts. Background threads send and receive everything else. They release the GIL while
they encrypt, decrypt and wait, so large messages are sent while the device computes.

A signal handler may raise an exception during any wait. The system's errors have an errno. An `OSError` without one comes from
a signal handler, such as a script's own `TimeoutError`, and is raised unchanged.
"""

import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import torch

from convoy.comm.backends import MessageError, OverdueError, PeerFailure, PendingWork
from convoy.comm.connection import Connection, Fields, NotOfThisJob
from convoy.comm.environment import is_loopback
from convoy.comm.group import Message
from convoy.comm.listener import Listener
from convoy.machine.accelerator import in_host_memory, queued

TEXTS = 2  # number of the lane for texts; the lanes for tensors are 0 and 1
SMALL_BYTES = 16_000  # largest message that the calling thread sends itself, with its header in one TLS record
# Bytes and messages that may wait in the kernel until a caller reads them. Every kernel buffers this much.
UNREAD_BYTES, UNREAD = 32_768, 16
AGAIN_S = 0.05  # pause before connecting again to a listener that dropped the connection

_HEADER = struct.Struct("<Q")


class WrongSizeError(MessageError):
    """The error for a message of unexpected size."""


@final
class Ticket:
    """A handle with which a thread waits for one message that another thread sends or receives."""

    __slots__ = ("_done", "_error")

    def __init__(self) -> None:
        self._done = threading.Lock()
        self._done.acquire()
        self._error: MessageError | None = None

    def wait(self, limit: timedelta) -> None:
        """Wait for completion. MessageError if it failed or took longer than `limit`."""
        if not self._done.acquire(timeout=limit.total_seconds()):
            raise OverdueError("timed out waiting for the message")
        self._done.release()
        if self._error is not None:
            raise self._error.again()

    def finish(self, error: MessageError | None = None) -> None:
        self._error = error
        self._done.release()


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """A message for the sender thread. `begun`: the header and the first bytes are sent already."""

    content: memoryview
    ticket: Ticket
    begun: bool = False
    copied: torch.Event | None = None


@final
class Outflow:
    """Outgoing message queue of one peer and lane. The sender thread starts when a message cannot be sent immediately."""

    def __init__(self, channel: Connection, name: str) -> None:
        self.channel, self._name = channel, name
        self._queue: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._left = 0  # messages in progress on the thread
        self._thread: threading.Thread | None = None
        self._error: MessageError | None = None
        self._lock = threading.Lock()

    def add(self, content: memoryview, copied: torch.Event | None = None) -> Ticket | None:
        """Queue a message. Return None if it was sent immediately. MessageError: the connection is closed.

        Args:
            copied: accelerator event after which the content is complete.
        """
        with self._lock:
            if self._error is not None:
                raise self._error.again()
            if copied is not None and copied.query():
                copied = None
            sent = None if self._left or copied is not None else self._send_now(content)
            if sent == len(content):
                return None
            ticket = Ticket()
            self._enqueue(_Outgoing(content[sent or 0 :], ticket, sent is not None, copied))
        return ticket

    def _send_now(self, content: memoryview) -> int | None:
        """Send what the kernel accepts without waiting. Return the number of bytes, or None if nothing was sent."""
        header = _HEADER.pack(len(content))
        try:
            if len(content) > SMALL_BYTES:
                return self.channel.send_some(header, content)
            if not self.channel.send_at_once(header + content):
                self._enqueue(_Outgoing(_NOTHING, Ticket(), begun=True))  # flushes the rest, which is a copy
        except OSError as error:
            if error.errno is None:
                raise
            self._error = _closed(error)
            self.channel.cut()
            raise self._error.again() from None
        return len(content)

    def _enqueue(self, message: _Outgoing) -> None:
        self._left += 1
        self._queue.put(message)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def cut(self) -> None:
        """Shut the connection down, so that all its messages fail. `close` must follow."""
        with self._lock:
            self._error = self._error or MessageError("the connection was closed here")
        self.channel.cut()
        self._queue.put(None)

    def close(self, limit_s: float) -> None:
        if self._thread is not None:
            self._thread.join(limit_s)
        self.channel.close()

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            ticket = message.ticket
            try:
                self._send(message)
            except (OSError, NotOfThisJob) as error:
                self._fail(ticket, _closed(error))
                return
            with self._lock:
                self._left -= 1
            del message  # release the tensor
            ticket.finish()

    def _send(self, message: _Outgoing) -> None:
        content = message.content
        if message.copied is not None:
            message.copied.synchronize()  # releases the GIL, which the launching thread needs
        if message.begun:
            self.channel.send(content)
        elif len(content) <= SMALL_BYTES:
            self.channel.send(_HEADER.pack(len(content)) + content)
        else:
            self.channel.send(_HEADER.pack(len(content)))
            self.channel.send(content)

    def _fail(self, ticket: Ticket, error: MessageError) -> None:
        with self._lock:
            self._error = error
        self.channel.cut()  # so that the peer notices as well
        ticket.finish(error)
        while not self._queue.empty():
            if (message := self._queue.get()) is not None:
                message.ticket.finish(error)


@final
class Arrival:
    """One expected message. If another thread reads it, that thread finishes the `ticket`."""

    __slots__ = ("done", "error", "flow", "place", "ticket")

    def __init__(self, flow: "Inflow", place: memoryview) -> None:
        self.flow, self.place = flow, place
        self.done = False
        self.error: MessageError | None = None
        self.ticket: Ticket | None = None

    def wait(self, limit: timedelta) -> None:
        """Wait as `Ticket.wait` does. If no other thread reads this connection, read it in this thread."""
        if not self.done:
            self.flow.wait(self, limit)
        if self.error is not None:
            raise self.error.again()


@final
class Inflow:
    """Incoming message queue of one peer and lane. The receiver thread starts when the kernel cannot buffer all messages."""

    def __init__(self, channel: Connection, name: str) -> None:
        self.channel, self._name = channel, name
        self._queue: deque[Arrival] = deque()
        self._unread_bytes = 0
        self._asked = False  # whether a caller waits for the receiver thread
        self._header = bytearray(_HEADER.size)
        self._part, self._in_header = memoryview(self._header), True  # the bytes to receive next
        self._reading = threading.Lock()  # held by the reader: the thread, or a waiting caller
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: MessageError | None = None
        self._lock = threading.Lock()

    def add(self, place: memoryview) -> Arrival:
        """Queue an expected message. MessageError: the connection is closed."""
        arrival = Arrival(self, place)
        with self._lock:
            if self._error is not None:
                raise self._error.again()
            self._queue.append(arrival)
            self._unread_bytes += len(place)
            self._call_thread()
        return arrival

    def wait(self, arrival: Arrival, limit: timedelta) -> None:
        """Wait until a message has arrived. MessageError if it failed or took longer than `limit`."""
        until_s = time.monotonic() + limit.total_seconds()
        with self._lock:
            if arrival.done:
                return
            if self._error is not None:
                raise self._error.again()
            mine = self._reading.acquire(blocking=False)
            if not mine:
                arrival.ticket = arrival.ticket or Ticket()
                self._asked = True
        if not mine:
            assert arrival.ticket is not None
            arrival.ticket.wait(limit)
            return
        try:
            while not arrival.done:
                self._read(until_s)
        except (OSError, NotOfThisJob, WrongSizeError) as error:
            if isinstance(error, OSError) and error.errno is None:
                raise
            if isinstance(error, TimeoutError):
                raise OverdueError("timed out waiting for the message") from None
            self._fail(_closed(error))
        finally:
            with self._lock:
                self._reading.release()
                self._call_thread()

    def _call_thread(self) -> None:
        """Start the receiver thread if no thread reads and the kernel cannot buffer all messages."""
        due = self._unread_bytes > UNREAD_BYTES or len(self._queue) > UNREAD or self._asked
        if due and self._reading.acquire(blocking=False):
            self._calls.put(True)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while self._calls.get():
            try:
                while True:
                    with self._lock:
                        if not self._queue:  # let another thread read
                            self._asked = False
                            self._reading.release()
                            break
                    self._read(None)
            except (OSError, NotOfThisJob, WrongSizeError) as error:
                self._fail(_closed(error))
                self._reading.release()
                return

    def _read(self, until_s: float | None) -> None:
        """Receive the first message completely."""
        arrival = self._queue[0]
        if self._in_header:
            self._fill(until_s)
            (size,) = _HEADER.unpack(self._header)
            if size != len(arrival.place):
                raise WrongSizeError(f"sent a message of {size} bytes where one of {len(arrival.place)} was expected")
            self._part, self._in_header = arrival.place, False
        self._fill(until_s)
        self._part, self._in_header = memoryview(self._header), True
        with self._lock:
            self._unread_bytes -= len(self._queue.popleft().place)
            _finish(arrival, None)

    def _fill(self, until_s: float | None) -> None:
        while self._part:
            self._part = self._part[self.channel.receive_some(self._part, until_s) :]

    def _fail(self, error: MessageError) -> None:
        self.channel.cut()  # so that the peer notices as well
        with self._lock:
            self._error = error
            while self._queue:
                _finish(self._queue.popleft(), error)

    def cut(self) -> None:
        """Shut the connection down, so that all its messages fail. `close` must follow."""
        with self._lock:
            self._error = self._error or MessageError("the connection was closed here")
        self.channel.cut()
        self._calls.put(False)

    def close(self, limit_s: float) -> None:
        if self._thread is not None:
            self._thread.join(limit_s)
        if self._reading.acquire(timeout=limit_s):  # a waiting reader has returned
            self._reading.release()
        self.channel.close()


def _finish(arrival: Arrival, error: MessageError | None) -> None:
    arrival.error, arrival.done = error, True
    arrival.place = _NOTHING  # release the tensor
    if arrival.ticket is not None:
        arrival.ticket.finish(error)


_NOTHING = memoryview(b"")


def _closed(error: Exception) -> MessageError:
    return error.again() if isinstance(error, WrongSizeError) else MessageError(f"connection closed: {error}")


def _connect(
    listener: Listener, address: tuple[str, int], request: Fields, deadline_s: float
) -> tuple[Connection, Fields]:
    """Connect to another listener and return its reply. Retry if it drops the connection: it may be overloaded."""
    while True:
        try:
            return listener.credentials.connect(address, request, deadline_s)
        except ConnectionError as error:
            if isinstance(error, ConnectionRefusedError) or time.monotonic() + AGAIN_S > deadline_s:
                raise
        time.sleep(AGAIN_S)


@final
class StreamBackend:
    """A backend over the job's own connections. It stages accelerator tensors in pinned host memory.

    On lane 0 it copies to the host on a separate stream, so that copies do not wait for kernels queued after them. Callers on
    other lanes already use a separate stream. The calling thread never waits.
    """

    lanes = 2

    def __init__(
        self, listener: Listener, addresses: Sequence[tuple[str, int]], device: int, name: str, limit_s: float
    ) -> None:
        """Connect to all other devices, and accept their connections. MessageError: that took longer than ``limit_s``.

        Args:
            addresses: addresses of the listeners of all devices.
            name: name of this group, the same on all devices and unique among the groups of these listeners.
        """
        deadline_s = time.monotonic() + max(1.0, limit_s)
        self._stream: torch.Stream | None = None  # for copies to the host
        self._is_cut = False
        self._out: dict[tuple[int, int], Outflow] = {}
        self._in: dict[tuple[int, int], Inflow] = {}
        pairs = [(lane, peer) for peer in range(len(addresses)) if peer != device for lane in range(self.lanes + 1)]
        peer = device
        try:
            for lane, peer in pairs:
                request = {"for": "stream", "mark": f"{name}/{lane}/{device}"}
                channel, reply = _connect(listener, addresses[peer], request, deadline_s)
                self._out[lane, peer] = Outflow(channel, f"convoy-to-{peer}.{lane}")
                if reply == {"sealed": False} and is_loopback(str(channel.socket.getpeername()[0])):
                    channel.stop_encrypting()
                channel.socket.settimeout(None)
            for lane, peer in pairs:
                accepted = listener.stream(f"{name}/{lane}/{peer}", max(0.0, deadline_s - time.monotonic()))
                self._in[lane, peer] = Inflow(accepted, f"convoy-from-{peer}.{lane}")
        except (OSError, NotOfThisJob, ValueError) as error:
            self.cut(broken=True)
            raise MessageError(f"device {peer}: {error}") from None

    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int) -> PendingWork:
        """Start messages on any lane, including `TEXTS`. PeerFailure: a connection is already closed."""
        work = PendingWork([])
        peer = -1
        try:
            for message in receives:
                peer = message.peer
                target = message.tensor
                if target.device.type != "cpu":
                    target = in_host_memory(target)
                    work.staged.append((target, message.tensor))
                work.works.append(((peer,), self._in[lane, peer].add(_bytes_of(target))))
            contents: dict[int, memoryview] = {}  # one tensor is often sent to several peers
            tensors = self._in_host([message.tensor for message in sends], work, lane)
            for message, tensor in zip(sends, tensors, strict=True):
                peer = message.peer
                if id(tensor) not in contents:
                    contents[id(tensor)] = _bytes_of(tensor.detach())
                ticket = self._out[lane, peer].add(contents[id(tensor)], work.copied)
                # A staged tensor may be reused after `copied`, so no caller waits until its copy is sent.
                if ticket is not None and work.copied is None:
                    work.works.append(((peer,), ticket))
        except MessageError as error:
            raise PeerFailure((peer,), error) from None
        return work

    def moved_bytes(self, peer: int | None = None) -> int:
        """Return the bytes that a peer, or all peers, have acknowledged or sent."""
        flows: list[tuple[tuple[int, int], Outflow | Inflow]] = [*self._out.items(), *self._in.items()]
        return sum(flow.channel.moved_bytes() for (_, each), flow in flows if peer in (None, each))

    def _in_host(self, tensors: Sequence[torch.Tensor], work: PendingWork, lane: int) -> list[torch.Tensor]:
        """Copy accelerator tensors to host memory, each one once. The copies are complete after ``work.copied``."""
        if not tensors or tensors[0].device.type == "cpu":
            return list(tensors)
        hosts = {id(tensor): in_host_memory(tensor) for tensor in tensors}
        device = tensors[0].device
        stream = torch.accelerator.current_stream(device)
        if lane == 0:
            stream = self._stream = self._stream or torch.Stream(device)
            queued(device).wait(stream)
        with stream:
            for tensor in {id(tensor): tensor for tensor in tensors}.values():
                hosts[id(tensor)].copy_(tensor, non_blocking=True)
                if lane == 0:
                    tensor.record_stream(stream)  # its owner may free it before it is copied
            work.copied = queued(device)
        return [hosts[id(tensor)] for tensor in tensors]

    def cut(self, broken: bool) -> None:  # noqa: ARG002 - it never waits for messages
        """Close all connections now, so that the peers notice."""
        if self._is_cut:
            return
        self._is_cut = True
        flows: list[Outflow | Inflow] = [*self._out.values(), *self._in.values()]
        for flow in flows:
            flow.cut()
        for flow in flows:
            flow.close(1.0)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    known = tensor.dtype in _NUMPY_DTYPES
    content: Any = tensor.numpy() if known else tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(content).cast("B")


_NUMPY_DTYPES = frozenset({torch.float32, torch.float64, torch.uint8, torch.int64})
