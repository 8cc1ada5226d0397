"""Tensors over connections of the job's own: for each pair of devices and each lane one connection each way.

A connection carries messages in one direction, in the order in which they were started. Before each message goes its size:
another one than its receiver expects is an error on the spot. Lanes know nothing of each other.

Who moves a message depends on its size. A small one costs more to hand over to another thread than to move: it is sent at once,
by who starts it, where the connection is free and the kernel takes it without waiting; and it is read by who waits for it. Of a
large one that is not encrypted there leaves at once what the kernel takes. All else is moved by a thread at either end, which
does not hold Python's lock while it encrypts, decrypts or waits: what is large travels while the device computes. So does what
nobody receives yet: it waits in the memory of the sender, or of the kernel. The thread of a connection sends small messages
that are behind each other as one piece, and what has come together is read together.
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

from convoy.comm.backends import PeerFailure, PendingWork, Staging
from convoy.comm.channel import Channel, NotOfThisJob, Words
from convoy.comm.environment import is_loopback
from convoy.comm.group import Message
from convoy.comm.listener import Listener

TEXTS = 2
"""The lane of texts, beside those of tensors."""

SMALL_BYTES = 16_000
"""A message up to this size leaves with its header as one piece, in one TLS record, and needs no thread."""

UNREAD_BYTES, UNREAD = 32_768, 16
"""So much, and so many messages, may be left to who waits for them: any kernel holds as much for a connection."""

AGAIN_S = 0.05
"""Before a door that has dropped a connection is called again."""

_HEADER = struct.Struct("<Q")


class WrongSizeError(RuntimeError):
    """A message has another size than its receiver expects."""


def _fresh(error: RuntimeError) -> RuntimeError:
    """What is kept, to be raised: see `ConvoyError.again`."""
    return type(error)(*error.args)


@final
class Ticket:
    """A message on its way, as the thread that started it sees it."""

    __slots__ = ("_done", "_error")

    def __init__(self) -> None:
        self._done = threading.Lock()
        self._done.acquire()
        self._error: RuntimeError | None = None

    def wait(self, limit: timedelta) -> None:
        """RuntimeError if it cannot arrive any more, or has not after this time."""
        if not self._done.acquire(timeout=limit.total_seconds()):
            raise RuntimeError("timed out waiting for the message")
        self._done.release()
        if self._error is not None:
            raise _fresh(self._error)

    def finish(self, error: RuntimeError | None = None) -> None:
        self._error = error
        self._done.release()


@dataclass(frozen=True, slots=True)
class _Order:
    """A message for the sending thread.

    Attributes:
        begun: its header, and the beginning of it, have left.
        copied: the content is complete behind this event of an accelerator.
    """

    content: memoryview
    ticket: Ticket
    begun: bool = False
    copied: torch.Event | None = None


@final
class Outflow:
    """The messages that go to another device on one lane. Its thread starts with the first that does not leave at once."""

    def __init__(self, channel: Channel, name: str) -> None:
        self._channel, self._name = channel, name
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._left = 0  # orders that the thread has not done
        self._thread: threading.Thread | None = None
        self._error: RuntimeError | None = None
        self._lock = threading.Lock()

    def add(self, content: memoryview, copied: torch.Event | None = None) -> Ticket | None:
        """Queue a message. Return None if it was sent immediately.

        Args:
            copied: the content is complete behind this event of an accelerator.

        Raises:
            RuntimeError: the connection is closed.
        """
        with self._lock:
            if self._error is not None:
                raise _fresh(self._error)
            if copied is not None and copied.query():
                copied = None
            begun = None if self._left or copied is not None else self._begun(content)
            if begun == len(content):
                return None
            ticket = Ticket()
            self._hand_over(_Order(content[begun or 0 :], ticket, begun is not None, copied))
        return ticket

    def _begun(self, content: memoryview) -> int | None:
        """Send what can leave without waiting: how much that is, or None if nothing."""
        header = _HEADER.pack(len(content))
        try:
            if len(content) > SMALL_BYTES:
                return self._channel.send_some(header, content)
            if not self._channel.send_at_once(header + content):
                self._hand_over(_Order(_NOTHING, Ticket(), begun=True))  # the rest, which is a copy
        except OSError as error:
            self._error = _closed(error)
            self._channel.cut()
            raise _fresh(self._error) from None
        return len(content)

    def _hand_over(self, order: _Order) -> None:
        self._left += 1
        self._orders.put(order)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def cut(self) -> None:
        """End the connection; what is under way on it fails. `close` must follow."""
        with self._lock:
            self._error = self._error or RuntimeError("the connection was closed here")
        self._channel.cut()
        self._orders.put(None)

    def close(self, limit_s: float) -> None:
        if self._thread is not None:
            self._thread.join(limit_s)
        self._channel.close()

    def _run(self) -> None:
        while orders := self._next():
            try:
                self._send(orders)
            except (OSError, NotOfThisJob) as error:
                self._fail([order.ticket for order in orders], _closed(error))
                return
            with self._lock:
                self._left -= len(orders)
            tickets = [order.ticket for order in orders]
            del orders  # the tensors are their owner's again
            for ticket in tickets:
                ticket.finish()

    def _next(self) -> list[_Order]:
        """The next message, and small ones behind it; none at the end."""
        if (order := self._orders.get()) is None:
            return []
        orders, size = [order], len(order.content)
        while size <= SMALL_BYTES and not self._orders.empty():
            if (order := self._orders.get()) is None:
                self._orders.put(None)
                break
            orders.append(order)
            size += len(order.content)
        return orders

    def _send(self, orders: Sequence[_Order]) -> None:
        joined = b""
        for order in orders:
            content = order.content
            if order.copied is not None and not order.copied.query():
                if joined:  # what is complete need not wait for what is not
                    self._channel.send(joined)
                    joined = b""
                order.copied.synchronize()  # without Python's lock: the launching thread needs it
            if order.begun:  # it is the first: who sends at once has nothing before it
                self._channel.send(content)
            elif len(content) <= SMALL_BYTES:
                joined += _HEADER.pack(len(content)) + content
            else:
                self._channel.send(joined + _HEADER.pack(len(content)))
                self._channel.send(content)
                joined = b""
        if joined:
            self._channel.send(joined)

    def _fail(self, tickets: Sequence[Ticket], error: RuntimeError) -> None:
        with self._lock:
            self._error = error
        self._channel.cut()  # the other side shall notice as well
        for ticket in tickets:
            ticket.finish(error)
        while not self._orders.empty():
            if (order := self._orders.get()) is not None:
                order.ticket.finish(error)


@final
class Arrival:
    """A message that is to arrive, as the thread that wants it sees it.

    Attributes:
        told: where another thread reads the connection, what that one finishes.
    """

    __slots__ = ("done", "error", "flow", "place", "told")

    def __init__(self, flow: "Inflow", place: memoryview) -> None:
        self.flow, self.place = flow, place
        self.done = False
        self.error: RuntimeError | None = None
        self.told: Ticket | None = None

    def wait(self, limit: timedelta) -> None:
        """As `Ticket.wait`; where no thread reads this connection, it is read here."""
        if not self.done:
            self.flow.wait(self, limit)
        if self.error is not None:
            raise _fresh(self.error)


@final
class Inflow:
    """The messages that come from another device on one lane. Its thread starts with the first that nobody need wait for."""

    def __init__(self, channel: Channel, name: str) -> None:
        self._channel, self._name = channel, name
        self._orders: deque[Arrival] = deque()
        self._unread_bytes = 0
        self._asked = False  # whether somebody waits for the thread
        self._header = bytearray(_HEADER.size)
        self._part, self._in_header = (
            memoryview(self._header),
            True,
        )  # what of the header, or the message, is still to come
        self._reading = threading.Lock()  # of who reads: the thread, or one that waits
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: RuntimeError | None = None
        self._lock = threading.Lock()

    def add(self, place: memoryview) -> Arrival:
        """Another message, behind those that are there.

        Raises:
            RuntimeError: the connection is closed.
        """
        arrival = Arrival(self, place)
        with self._lock:
            if self._error is not None:
                raise _fresh(self._error)
            self._orders.append(arrival)
            self._unread_bytes += len(place)
            self._call_thread()
        return arrival

    def wait(self, arrival: Arrival, limit: timedelta) -> None:
        """Until a message has arrived or failed, or RuntimeError after this time."""
        until_s = time.monotonic() + limit.total_seconds()
        with self._lock:
            if arrival.done:
                return
            if self._error is not None:
                raise _fresh(self._error)
            mine = self._reading.acquire(blocking=False)
            if not mine:
                arrival.told = arrival.told or Ticket()
                self._asked = True
        if not mine:
            assert arrival.told is not None
            arrival.told.wait(limit)
            return
        try:
            while not arrival.done:
                self._read(until_s)
        except TimeoutError:
            raise RuntimeError("timed out waiting for the message") from None
        except (OSError, NotOfThisJob, WrongSizeError) as error:
            self._fail(_closed(error))
        finally:
            with self._lock:
                self._reading.release()
                self._call_thread()

    def _call_thread(self) -> None:
        """Where nobody reads, and more is to come than can be left to who waits for it."""
        due = self._unread_bytes > UNREAD_BYTES or len(self._orders) > UNREAD or self._asked
        if due and self._reading.acquire(blocking=False):
            self._calls.put(True)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while self._calls.get():
            try:
                while self._more():
                    self._read(None)
            except (OSError, NotOfThisJob, WrongSizeError) as error:
                self._fail(_closed(error))
                self._reading.release()
                return

    def _more(self) -> bool:
        """Whether there is more to read; if not, others may."""
        with self._lock:
            if not self._orders:
                self._asked = False
                self._reading.release()
            return bool(self._orders)

    def _read(self, until_s: float | None) -> None:
        """Read the first message to its end."""
        arrival = self._orders[0]
        if self._in_header:
            self._fill(until_s)
            (size,) = _HEADER.unpack(self._header)
            if size != len(arrival.place):
                raise WrongSizeError(f"sent a message of {size} bytes where one of {len(arrival.place)} was expected")
            self._part, self._in_header = arrival.place, False
        self._fill(until_s)
        self._part, self._in_header = memoryview(self._header), True
        with self._lock:
            self._unread_bytes -= len(self._orders.popleft().place)
            _finish(arrival, None)

    def _fill(self, until_s: float | None) -> None:
        while self._part:
            self._part = self._part[self._channel.receive_some(self._part, until_s) :]

    def _fail(self, error: RuntimeError) -> None:
        self._channel.cut()  # the other side shall notice as well
        with self._lock:
            self._error = error
            while self._orders:
                _finish(self._orders.popleft(), error)

    def cut(self) -> None:
        """End the connection; what is under way on it fails. `close` must follow."""
        with self._lock:
            self._error = self._error or RuntimeError("the connection was closed here")
        self._channel.cut()
        self._calls.put(False)

    def close(self, limit_s: float) -> None:
        if self._thread is not None:
            self._thread.join(limit_s)
        if self._reading.acquire(timeout=limit_s):  # who waits has noticed
            self._reading.release()
        self._channel.close()


def _finish(arrival: Arrival, error: RuntimeError | None) -> None:
    arrival.error, arrival.done = error, True
    arrival.place = _NOTHING  # the tensor is its owner's again
    if arrival.told is not None:
        arrival.told.finish(error)


_NOTHING = memoryview(b"")


def _closed(error: Exception) -> RuntimeError:
    return _fresh(error) if isinstance(error, WrongSizeError) else RuntimeError(f"connection closed: {error}")


def _called(door: Listener, address: tuple[str, int], words: Words, deadline_s: float) -> tuple[Channel, Words | None]:
    """A connection to another door, and what it said. One that is slow, or full of strangers, drops who comes: call again."""
    while True:
        channel: Channel | None = None
        try:
            channel = door.credentials.call(address, words, deadline_s)
            return channel, channel.heard()
        except BaseException as error:
            if channel is not None:
                channel.close()
            dropped = isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)
            if not dropped or time.monotonic() + AGAIN_S > deadline_s:
                raise
        time.sleep(AGAIN_S)


@final
class StreamBackend:
    """Tensors over the job's own connections; see the module's text. Those of accelerators are staged."""

    lanes = 2

    def __init__(
        self,
        door: Listener,
        addresses: Sequence[tuple[str, int]],
        device: int,
        name: str,
        limit_s: float,
        staged: bool = False,
    ) -> None:
        """Connect to all others: each calls each, and takes their calls at its door.

        Args:
            addresses: of the doors of all devices.
            name: of this group, the same on all devices, and unlike that of any other group at these doors.

        Raises:
            RuntimeError: somebody could not be reached within ``limit_s``.
        """
        deadline_s = time.monotonic() + max(1.0, limit_s)
        self._staging = Staging(staged)
        self._is_cut = False
        self._out: dict[tuple[int, int], Outflow] = {}
        self._in: dict[tuple[int, int], Inflow] = {}
        ways = [(lane, peer) for peer in range(len(addresses)) if peer != device for lane in range(self.lanes + 1)]
        peer = device
        try:
            for lane, peer in ways:
                words = {"for": "stream", "mark": f"{name}/{lane}/{device}"}
                channel, told = _called(door, addresses[peer], words, deadline_s)
                self._out[lane, peer] = Outflow(channel, f"convoy-to-{peer}.{lane}")
                if told == {"sealed": False} and is_loopback(str(channel.connection.getpeername()[0])):
                    channel.unseal()
                channel.connection.settimeout(None)
            for lane, peer in ways:
                came = door.stream(f"{name}/{lane}/{peer}", max(0.0, deadline_s - time.monotonic()))
                self._in[lane, peer] = Inflow(came, f"convoy-from-{peer}.{lane}")
        except (OSError, NotOfThisJob, ValueError) as error:
            self.cut(broken=True)
            raise RuntimeError(f"device {peer}: {error}") from None

    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int) -> PendingWork:
        """Start messages; on the lane `TEXTS`, too.

        Raises:
            PeerFailure: a connection is closed already.
        """
        work = PendingWork([])
        peer = -1
        try:
            for message in receives:
                peer = message.peer
                place = _bytes_of(self._staging.place_for(message.tensor, work))
                work.works.append(((peer,), self._in[lane, peer].add(place)))
            contents: dict[int, memoryview] = {}  # one tensor often goes to several
            tensors = self._staging.in_host([message.tensor for message in sends], work, lane)
            for message, tensor in zip(sends, tensors, strict=True):
                peer = message.peer
                if id(tensor) not in contents:
                    contents[id(tensor)] = _bytes_of(tensor.detach())
                ticket = self._out[lane, peer].add(contents[id(tensor)], work.copied)
                # A staged tensor is its owner's again behind `copied`: nothing waits until the copy of it has left.
                if ticket is not None and work.copied is None:
                    work.works.append(((peer,), ticket))
        except RuntimeError as error:
            raise PeerFailure((peer,), error) from None
        return work

    def cut(self, broken: bool) -> None:  # noqa: ARG002 - it never waits for messages
        if self._is_cut:
            return
        self._is_cut = True
        flows: list[Outflow | Inflow] = [*self._out.values(), *self._in.values()]
        for flow in flows:
            flow.cut()
        for flow in flows:
            flow.close(1.0)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor that is one block."""
    known = tensor.dtype in _KNOWN_TO_PYTHON
    content: Any = tensor.numpy() if known else tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(content).cast("B")


_KNOWN_TO_PYTHON = frozenset({torch.float32, torch.float64, torch.uint8, torch.int64})
