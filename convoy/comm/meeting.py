"""The key-value store where the processes of a job meet. Only processes with the job's key can use it.

Device 0 hosts it in its memory. Each of the others uses one connection.
"""

import socket
import threading
import time
from typing import Any, Protocol, final

from convoy.comm.connection import Connection, Credentials, Fields, NotOfThisJob
from convoy.comm.environment import nobody_listens, resolve
from convoy.comm.listener import Listener
from convoy.errors import InputError

ANSWER_S = 10.0
"""How long an answer may take: the store has a thread of its own."""

RECONNECT_S = 2.0
"""How long to reconnect: the listener of the previous rendezvous may just be closing."""

OTHER_KEY_S = 2.0
"""How long to tolerate a listener with another key: that job may just be ending."""


class Store(Protocol):
    """Texts by key. Methods raise RuntimeError if the store cannot be reached any more."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys are set."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a text if the key has the expected one (unset counts as empty). Return the resulting text."""

    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


@final
class Prefixed:
    """A store whose keys get a prefix."""

    def __init__(self, prefix: str, store: Store) -> None:
        self._prefix, self._store = prefix, store

    def set(self, key: str, value: str) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._key(key))

    def check(self, keys: list[str]) -> bool:
        return self._store.check([self._key(key) for key in keys])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._store.compare_set(self._key(key), expected, desired)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._store.multi_get([self._key(key) for key in keys])

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"


@final
class KeptStore:
    """The store in the memory of the process that hosts it.

    Attributes:
        texts: by key. Stores that this process hosts one after another at an address may share them.
    """

    def __init__(self, listener: socket.socket, credentials: Credentials, texts: dict[str, str]) -> None:
        self.texts = texts
        self._lock = threading.Lock()
        self._listener = Listener(listener, credentials, "convoy-meeting")
        self._listener.handlers["store"] = self._answer
        self.address = self._listener.address

    @property
    def rejected(self) -> int:
        return sum(self._listener.rejected.values())

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self.texts[key] = value

    def get(self, key: str) -> bytes:
        with self._lock:
            return self.texts[key].encode()

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            return all(key in self.texts for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._lock:
            if self.texts.get(key, "") == expected:
                self.texts[key] = desired
            return self.texts.get(key, expected).encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def close(self) -> None:
        self._listener.close()

    def _answer(self, words: Fields, _: Connection) -> Fields:
        key, value = str(words.get("key")), str(words.get("value"))
        match words["do"]:
            case "set":
                self.set(key, value)
                return {}
            case "check":
                return {"found": self.check([str(each) for each in words["keys"]])}
            case "compare":
                return {"text": self.compare_set(key, str(words["expected"]), value).decode()}
            case "get":
                return {"texts": [self.get(str(each)).decode() for each in words["keys"]]}
        return {}


@final
class VisitedStore:
    """A connection to the store of another process."""

    def __init__(self, address: tuple[str, int], credentials: Credentials) -> None:
        """Connect. Raise OSError or NotOfThisJob if that fails."""
        self._address, self._credentials = address, credentials
        self._lock = threading.Lock()
        self._channel: Connection | None = self._connected(time.monotonic() + ANSWER_S)

    def set(self, key: str, value: str) -> None:
        self._ask({"do": "set", "key": key, "value": value})

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask({"do": "check", "keys": keys})["found"])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return str(self._ask({"do": "compare", "key": key, "expected": expected, "value": desired})["text"]).encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [str(text).encode() for text in self._ask({"do": "get", "keys": keys})["texts"]]

    def close(self) -> None:
        with self._lock:
            if self._channel is not None:
                self._channel.close()
            self._channel = None

    def _connected(self, deadline_s: float) -> Connection:
        channel = self._credentials.connect(self._address, {"for": "store", "do": "hello"}, deadline_s)
        try:
            channel.receive_message()
        except BaseException:
            channel.close()
            raise
        return channel

    def _ask(self, words: Fields) -> dict[str, Any]:
        end_s = time.monotonic() + RECONNECT_S
        with self._lock:
            while True:
                try:
                    if self._channel is None:
                        self._channel = self._connected(end_s)
                    self._channel.deadline(time.monotonic() + ANSWER_S)
                    return self._channel.ask({"for": "store", **words})
                except (OSError, NotOfThisJob, ValueError) as error:
                    if self._channel is not None:
                        self._channel.close()
                    self._channel = None
                    if time.monotonic() > end_s:
                        raise RuntimeError(f"the store does not answer ({error})") from None
                    time.sleep(0.05)


def visit(host: str, port: int, credentials: Credentials, deadline_s: float) -> VisitedStore:
    """Connect to the store of another process, which may start to listen within the time.

    Raises:
        InputError: the name is unknown, or the listener has another key.
        DeviceLostError: nobody listened there until ``deadline_s`` (of ``time.monotonic``).
    """
    resolve(host, port, socket.SOCK_STREAM)
    pause_s, tolerated_until_s = 0.01, time.monotonic() + OTHER_KEY_S
    while True:
        try:
            return VisitedStore((host, port), credentials)
        except NotOfThisJob as error:
            if time.monotonic() > min(tolerated_until_s, deadline_s):
                raise InputError(
                    f"the listener at {host} port {port} does not have the key of this job ({error}): give every device the "
                    "same key file (--job-key, CONVOY_JOB_KEY), or another port if that is another job"
                ) from None
        except (OSError, ValueError) as error:
            if time.monotonic() + pause_s > deadline_s:
                reason = getattr(error, "strerror", None) or error
                raise nobody_listens(host, port, str(reason)) from None
        time.sleep(pause_s)
        pause_s = min(0.25, 1.5 * pause_s)
