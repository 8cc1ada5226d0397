"""Provide the key-value store at which the processes of a job meet. Only processes with the job's key can use it.

Device 0 keeps it in memory. Each other device uses one connection.
"""

import json
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, final

from torch import distributed
from torch._C._distributed_c10d import TCPStore

from convoy.comm.connection import Connection, Credentials, Fields, NotOfThisJob
from convoy.comm.environment import ProcessEnv, inherited_listener, is_loopback, listen_at, own_address, resolve
from convoy.comm.listener import Listener
from convoy.errors import DeviceLostError, InputError

T = TypeVar("T")

ANSWER_S = 10.0  # time limit for a reply, which the store's own thread sends
RECONNECT_S = 2.0  # how long to try to reconnect: the listener of the previous rendezvous may be closing
OTHER_KEY_S = 2.0  # how long to tolerate a listener with another key: another job may be about to end there
MAX_PAUSE_S = 0.1  # longest pause between two requests of a process that waits for others


class Store(ABC):
    """A key-value store of texts. Methods raise RuntimeError if it can no longer be reached."""

    def set(self, key: str, text: str) -> None:
        self._request({"do": "set", "keys": [key], "text": text})

    def set_first(self, key: str, text: str) -> str:
        """Set a key's text unless it has one. Return its text."""
        return self._request({"do": "set_first", "keys": [key], "text": text})[key]

    def get(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the texts of the keys that have one."""
        return self._request({"do": "get", "keys": list(keys)})

    @abstractmethod
    def _request(self, fields: Fields) -> dict[str, str]:
        """Run one operation, and return the texts of its keys."""

    @abstractmethod
    def close(self) -> None: ...


@final
class HostedStore(Store):
    """The store itself, in the memory of its process."""

    def __init__(self, listening: socket.socket, credentials: Credentials) -> None:
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()
        self._listener = Listener(listening, credentials, "convoy-store")
        self._listener.handlers["store"] = lambda fields, _: {"texts": self._request(fields)}
        self.address = self._listener.address

    def close(self) -> None:
        self._listener.close()

    def _request(self, fields: Fields) -> dict[str, str]:
        with self._lock:
            for key in fields["keys"]:
                if fields["do"] == "set":
                    self._texts[key] = str(fields["text"])
                elif fields["do"] == "set_first":
                    self._texts.setdefault(key, str(fields["text"]))
            return {key: self._texts[key] for key in fields["keys"] if key in self._texts}


@final
class RemoteStore(Store):
    """A connection to another process's store."""

    def __init__(self, address: tuple[str, int], credentials: Credentials) -> None:
        """Connect. Raise OSError or NotOfThisJob if that fails."""
        self._address, self._credentials = address, credentials
        self._lock = threading.Lock()
        self._connection: Connection | None = self._connect(time.monotonic() + ANSWER_S)

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def _connect(self, deadline_s: float) -> Connection:
        return self._credentials.connect(self._address, {"for": "store", "do": "get", "keys": []}, deadline_s)[0]

    def _request(self, fields: Fields) -> dict[str, str]:
        end_s = time.monotonic() + RECONNECT_S
        while True:
            try:
                with self._lock:
                    self._connection = connection = self._connection or self._connect(end_s)
                    connection.deadline(time.monotonic() + ANSWER_S)
                    texts = connection.ask({"for": "store", **fields})["texts"]
                return {str(key): str(text) for key, text in texts.items()}
            except (OSError, NotOfThisJob, ValueError) as error:
                self.close()
                if time.monotonic() > end_s:
                    raise RuntimeError(f"the store does not answer ({error})") from None
                time.sleep(0.05)


_stores: dict[tuple[str, int], HostedStore | RemoteStore] = {}  # open stores of this process, by address

_announced = Counter[tuple[str, int]]()
"""Number of stores that the job has announced in a torch store, by the latter's address."""


def host_store(address: str, credentials: Credentials) -> int:
    """Host a store for a later rendezvous on a free port of `address`. Return the port."""
    store = HostedStore(listen_at(address, 0), credentials)
    _stores[address, store.address[1]] = store
    return store.address[1]


def close_store(host: str, port: int) -> None:
    """Close this process's connection to a store, or the store itself if this process hosts it."""
    if store := _stores.pop((host, port), None):
        store.close()


def store_at(env: ProcessEnv, deadline_s: float, credentials: Credentials) -> Store:
    """Return the store of this job. Device 0 hosts it.

    If torch already listens at the job's address, device 0 uses another port and announces it in torch's store.

    Raises:
        InputError: device 0 cannot listen at the address, or the listener there has another key.
        DeviceLostError: no process listened at the address before ``deadline_s`` (of ``time.monotonic``).
    """
    key = (env.host, env.port)
    if key not in _stores:
        torch_has_met = distributed.is_initialized() and distributed.get_world_size() == env.devices
        if torch_has_met or env.hosted:
            default = distributed.distributed_c10d._get_default_store() if torch_has_met else None
            torch_store = default or connect_torch_store(env.host, env.port, deadline_s)
            _stores[key] = _announced_store(env, torch_store, credentials, deadline_s)
        elif env.device == 0:
            address = str(resolve(env.host, env.port, socket.SOCK_STREAM)[0][1][0])
            if env.local_devices is not None and env.local_devices < env.devices and is_loopback(address):
                raise InputError(
                    f"MASTER_ADDR={env.host} is {address} on this machine, a loopback address, but only {env.local_devices} "
                    f"of the job's {env.devices} devices are here: give the network address of this machine (Debian maps a "
                    "machine's own name to loopback in /etc/hosts)"
                )
            _stores[key] = HostedStore(inherited_listener() or listen_at(env.host, env.port), credentials)
        else:
            _stores[key] = connect_store(env.host, env.port, credentials, deadline_s)
    return _stores[key]


def _announced_store(
    env: ProcessEnv, torch_store: Any, credentials: Credentials, deadline_s: float
) -> HostedStore | RemoteStore:
    """Return the job's store, whose address is in torch's store. A forged address could only prevent the start."""
    place = (env.host, env.port)
    key = f"convoy-store/{env.attempt}/{_announced[place]}"
    _announced[place] += 1
    if env.device == 0:
        store = HostedStore(listen_at(own_address(env.host, env.port), 0), credentials)
        torch_store.set(key, json.dumps(store.address))
        return store
    pause_s = 0.01
    while not torch_store.check([key]):
        if time.monotonic() + pause_s > deadline_s:
            raise DeviceLostError(0, "device 0 did not join within the time limit: see its own output, and start it")
        time.sleep(pause_s)
        pause_s = min(MAX_PAUSE_S, 1.5 * pause_s)
    host, port = json.loads(torch_store.get(key))
    return connect_store(str(host), int(port), credentials, deadline_s)


def connect_store(host: str, port: int, credentials: Credentials, deadline_s: float) -> RemoteStore:
    """Connect to another process's store. Wait until it listens. Errors as in `store_at`."""
    tolerated_until_s = min(time.monotonic() + OTHER_KEY_S, deadline_s)

    def attempt() -> RemoteStore:
        try:
            return RemoteStore((host, port), credentials)
        except (ValueError, NotOfThisJob) as error:
            if isinstance(error, NotOfThisJob) and time.monotonic() > tolerated_until_s:
                raise InputError(
                    f"the listener at {host} port {port} does not have the key of this job ({error}): give every device the "
                    "same key file (--job-key, CONVOY_JOB_KEY), or another port if that is another job"
                ) from None
            raise ConnectionError(str(error)) from None

    return _until_listening(attempt, host, port, deadline_s)


def connect_torch_store(host: str, port: int, deadline_s: float) -> TCPStore:
    """Connect to another process's TCPStore. Wait until it listens."""

    def attempt() -> str:
        # Try a plain socket first: torch's client prints stack traces and is three times slower.
        with socket.create_connection((host, port), timeout=max(0.1, deadline_s - time.monotonic())) as probe:
            return str(probe.getpeername()[0])

    address = _until_listening(attempt, host, port, deadline_s)
    limit = timedelta(seconds=max(1.0, deadline_s - time.monotonic()))
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)


def host_torch_store(listener: socket.socket) -> TCPStore:
    """Create a TCPStore on an already bound socket. (torch would bind every address.)"""
    with listener:
        address, port = listener.getsockname()[:2]
        # Multi-tenant, so that a script's own init_process_group() uses this store instead of failing on a used port.
        return TCPStore(
            address, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
        )


def _until_listening(attempt: Callable[[], T], host: str, port: int, deadline_s: float) -> T:
    """Repeat an attempt to connect until it succeeds."""
    resolve(host, port, socket.SOCK_STREAM)
    pause_s = 0.01
    while True:
        try:
            return attempt()
        except OSError as error:
            if time.monotonic() + pause_s > deadline_s:
                raise DeviceLostError(
                    0,
                    f"device 0 was not found: nobody listens at {host} port {port} ({error.strerror or error}). Start it; "
                    "MASTER_ADDR and MASTER_PORT must be the same everywhere, with no firewall between the machines",
                ) from None
        time.sleep(pause_s)
        pause_s = min(0.25, 1.5 * pause_s)
