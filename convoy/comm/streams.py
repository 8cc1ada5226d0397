"""Tensors over connections of the job's own: for each pair of devices and each lane one connection each way.

A connection carries messages in one direction, in the order in which they were started, and a thread at either end moves them,
which does not hold Python's lock while it encrypts, decrypts or waits. So lanes know nothing of each other, and what
nobody receives yet waits in the sender's memory. Before each message goes its size: another one than its receiver expects
is an error on the spot.
"""

import queue
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, final

import torch

from convoy.comm.backends import PeerFailure, PendingWork, Staging, Tagged
from convoy.comm.channel import Channel, NotOfThisJob, Words
from convoy.comm.door import Door
from convoy.comm.environment import is_loopback
from convoy.comm.group import Message

TEXTS = 2
"""The lane of texts, beside those of tensors."""

TOGETHER_BYTES = 16_000
"""A message up to this size leaves with its header as one piece."""

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


_Order = tuple[memoryview, Ticket]


@final
class Flow:
    """The messages of one direction of a pair, on one lane. Its thread starts with the first."""

    def __init__(self, channel: Channel, move: Callable[[Channel, memoryview], None], name: str) -> None:
        self._channel, self._move, self._name = channel, move, name
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: RuntimeError | None = None
        self._lock = threading.Lock()

    def add(self, content: memoryview) -> Ticket:
        """Another message, behind those that are there."""
        ticket = Ticket()
        with self._lock:
            if self._error is not None:
                raise _fresh(self._error)
            self._orders.put((content, ticket))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        return ticket

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
        while (order := self._orders.get()) is not None:
            content, ticket = order
            try:
                self._move(self._channel, content)
            except WrongSizeError as error:
                self._fail(ticket, _fresh(error))
                return
            except (OSError, NotOfThisJob) as error:
                self._fail(ticket, RuntimeError(f"connection closed: {error}"))
                return
            ticket.finish()
            del order, content  # the tensor is its owner's again

    def _fail(self, ticket: Ticket, error: RuntimeError) -> None:
        with self._lock:
            self._error = error
        self._channel.cut()  # the other side shall notice as well
        ticket.finish(error)
        while not self._orders.empty():
            if (order := self._orders.get()) is not None:
                order[1].finish(error)


def _send(channel: Channel, content: memoryview) -> None:
    header = _HEADER.pack(len(content))
    if len(content) <= TOGETHER_BYTES:
        channel.send(header + content)
    else:
        channel.send(header)
        channel.send(content)


def _receive(channel: Channel, place: memoryview) -> None:
    header = memoryview(bytearray(_HEADER.size))
    channel.receive(header)
    (size,) = _HEADER.unpack(header)
    if size != len(place):
        raise WrongSizeError(f"sent a message of {size} bytes where one of {len(place)} was expected")
    channel.receive(place)


def _called(door: Door, address: tuple[str, int], words: Words, deadline_s: float) -> tuple[Channel, Words | None]:
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
    """Tensors over authenticated, encrypted connections; see the module's text. Those of accelerators are staged."""

    lanes = 2

    def __init__(
        self,
        door: Door,
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
        self._out: dict[tuple[int, int], Flow] = {}
        self._in: dict[tuple[int, int], Flow] = {}
        ways = [(lane, peer) for peer in range(len(addresses)) if peer != device for lane in range(self.lanes + 1)]
        peer = device
        try:
            for lane, peer in ways:
                words = {"for": "stream", "mark": f"{name}/{lane}/{device}"}
                channel, told = _called(door, addresses[peer], words, deadline_s)
                self._out[lane, peer] = Flow(channel, _send, f"convoy-to-{peer}.{lane}")
                if told == {"sealed": False} and is_loopback(str(channel.connection.getpeername()[0])):
                    channel.unseal()
                channel.connection.settimeout(None)
            for lane, peer in ways:
                came = door.stream(f"{name}/{lane}/{peer}", max(0.0, deadline_s - time.monotonic()))
                self._in[lane, peer] = Flow(came, _receive, f"convoy-from-{peer}.{lane}")
        except (OSError, NotOfThisJob, ValueError) as error:
            self.cut(broken=True)
            raise RuntimeError(f"device {peer}: {error}") from None

    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int) -> PendingWork:
        """Start messages.

        Raises:
            PeerFailure: a connection is closed already.
        """
        work = PendingWork([])
        for message in receives:
            tensor = self._staging.place_for(message.tensor, work)
            work.works.append(self._begin(self._in[lane, message.peer], message.peer, tensor))
        tensors = self._staging.in_host([message.tensor.detach() for message in sends])
        for message, tensor in zip(sends, tensors, strict=True):
            work.works.append(self._begin(self._out[lane, message.peer], message.peer, tensor))
        return work

    def start_tagged(self, sends: Sequence[Tagged], receives: Sequence[Tagged]) -> PendingWork:
        """Start texts, on a lane of their own: there they need no tags."""
        return self.start([message for _, message in sends], [message for _, message in receives], TEXTS)

    def cut(self, broken: bool) -> None:  # noqa: ARG002 - it never waits for messages
        if self._is_cut:
            return
        self._is_cut = True
        flows = [*self._out.values(), *self._in.values()]
        for flow in flows:
            flow.cut()
        for flow in flows:
            flow.close(1.0)

    def _begin(self, flow: Flow, peer: int, tensor: torch.Tensor) -> tuple[tuple[int, ...], Ticket]:
        try:
            content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
            return (peer,), flow.add(memoryview(content))
        except RuntimeError as error:
            raise PeerFailure((peer,), error) from None
