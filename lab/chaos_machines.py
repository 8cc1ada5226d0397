"""Simulated machines in one process, each with connections, listeners, a thread and a disk; they can be killed or
frozen.

The devices that run on them are the real ones: the same doors, handshakes, connections, agreement. A machine is the credentials
of its device, which open all its connections, so it knows them all. Switched off, all of them end at once, without a word, and
its address refuses. Silent, its threads stop where they would next speak or hear; connections to it stay open.
"""

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from convoy.checkpoint import checkpoint, run_folder
from convoy.comm import processes, store
from convoy.comm.connection import Connection, Credentials, Fields
from convoy.comm.job_key import JobKey
from convoy.comm.listener import Listener
from convoy.comm.streams import StreamBackend
from convoy.elastic import regroup

_own = threading.local()


class SwitchedOff(BaseException):
    """The end of a killed device's thread; nothing in the package catches it."""


class Machine(Credentials):  # type: ignore[misc]
    """One device's machine, owned by the thread that creates it.

    Args:
        strikes: is called whenever the device's own thread is about to speak to another one.

    Attributes:
        wait_s: before each message, while the device is slow.
        room_bytes: that its disk still has; None: enough.
    """

    def __init__(self, key: JobKey, strikes: Callable[[], None]) -> None:
        super().__init__(key)
        self.thread, self.strikes = threading.current_thread(), strikes
        self.awake, self.is_off = threading.Event(), False
        self.awake.set()
        self.wait_s = 0.0
        self.room_bytes: int | None = None
        self._lock = threading.Lock()
        self._channels: list[Connection] = []
        self._parts: list[Listener | StreamBackend] = []
        _own.machine, _own.stores = self, {}

    def speaks(self) -> None:
        """Note that the device is about to send or receive."""
        mine = threading.current_thread() is self.thread
        if mine and not self.is_off:
            self.strikes()
            time.sleep(self.wait_s)
        self.awake.wait()
        if self.is_off:
            raise SwitchedOff if mine else ConnectionResetError("this machine is off")

    def writes(self, count: int) -> None:
        """Note that bytes are about to be written to this machine's disk.

        Raises:
            OSError: it is full.
        """
        if self.room_bytes is not None:
            if count >= self.room_bytes:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.room_bytes -= count

    def switch_off(self) -> None:
        """Kill the machine; any thread may call it."""
        with self._lock:
            self.is_off = True
            doors = [part._listening for part in self._parts if isinstance(part, Listener)]
            for connection in (*doors, *(channel.socket for channel in self._channels)):
                with suppress(OSError):  # shut, not closed: its number must not become another file's yet
                    connection.shutdown(socket.SHUT_RDWR)
        self.awake.set()

    def bury(self) -> None:
        """Release the resources of a killed device; called on its own thread at its end."""
        for part in self._parts:
            part.close() if isinstance(part, Listener) else part.cut(broken=True)
        for own_store in _own.stores.values():
            own_store.close()
        for channel in self._channels:
            channel.close()

    # --- as credentials -----------------------------------------------------------------------------------------------

    def accept(self, connection: socket.socket) -> Connection:
        self.awake.wait()
        return self._watched(super().accept(connection))

    def connect(self, address: tuple[str, int], message: Fields, deadline_s: float) -> tuple[Connection, Fields]:
        self.speaks()
        connection, reply = super().connect(address, message, deadline_s)
        return self._watched(connection), reply

    def _watched(self, channel: Connection) -> Connection:
        send, send_at_once, receive = channel.send, channel.send_at_once, channel.receive_some

        def gated_send(content: memoryview | bytes) -> None:
            self.awake.wait()
            send(content)

        def gated_at_once(content: bytes) -> bool:
            self.awake.wait()
            return send_at_once(content)

        def gated_receive(place: memoryview, until_s: float | None = None) -> int:
            self.awake.wait()
            got = receive(place, until_s)
            self.awake.wait()  # what has come lies in the kernel
            return got

        channel.send, channel.send_at_once, channel.receive_some = gated_send, gated_at_once, gated_receive  # type: ignore[method-assign]
        with self._lock:
            self._channels = [each for each in self._channels if each.socket.fileno() >= 0]
            self._channels.append(channel)
            if self.is_off:
                with suppress(OSError):
                    channel.socket.shutdown(socket.SHUT_RDWR)
        return channel

    def keep(self, part: Any) -> Any:
        with self._lock:
            self._parts.append(part)
        return part


class _OwnStores(MutableMapping[Any, Any]):
    """The stores of each device, which replace the process-wide ones."""

    def __getitem__(self, key: Any) -> Any:
        return _own.stores[key]

    def __setitem__(self, key: Any, store: Any) -> None:
        _own.stores[key] = store

    def __delitem__(self, key: Any) -> None:
        del _own.stores[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(_own.stores)

    def __len__(self) -> int:
        return len(_own.stores)


@contextmanager
def machines() -> Iterator[None]:
    """Give each machine its own process-wide state for the context."""

    def door(listener: socket.socket, credentials: Any, *rest: Any) -> Any:
        made = Listener(listener, credentials, *rest)
        return credentials.keep(made) if isinstance(credentials, Machine) else made

    def own(_: Any) -> Machine:
        return _own.machine  # type: ignore[no-any-return]

    write, hold = checkpoint.write_file, run_folder.hold

    def written(path: Path, chunks: Iterable[bytes | memoryview]) -> Any:
        def counted() -> Iterator[bytes | memoryview]:
            for chunk in chunks:
                _own.machine.writes(len(chunk))
                yield chunk

        return write(path, counted())

    def held(folder: Path) -> bool:
        _own.machine.writes(1)  # the name of a lock
        return hold(folder)

    def streams(door: Listener, *rest: Any) -> Any:
        machine: Any = door.credentials
        return machine.keep(StreamBackend(door, *rest))

    with (
        mock.patch.object(processes, "credentials_of", own),
        mock.patch.object(processes, "StreamBackend", streams),
        mock.patch.object(processes, "Listener", door),
        mock.patch.object(regroup, "Listener", door),
        mock.patch.object(store, "Listener", door),
        mock.patch.object(checkpoint, "write_file", written),
        mock.patch.object(run_folder, "hold", held),
        mock.patch.object(checkpoint, "hold", held),
        mock.patch.object(store, "_stores", _OwnStores()),
    ):
        yield
