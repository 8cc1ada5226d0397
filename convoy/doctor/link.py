"""The way between two hosts: round trips, clocks, bytes/s. One host listens, another visits.

::

    visitor                       listener
    {"token": ..., "ask": "time"}     ->
                                  <-  {"came_ns": ..., "left_ns": ...}        as often as it likes
    {"token": ..., "ask": "take"}     ->
                                  <-  {"ready": true}
    random bytes                      ->                                      for some tenths of a second
                                  <-  {"bytes": ..., "seconds": ...}          as the listener counted them
"""

import json
import os
import selectors
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from pydantic import TypeAdapter

from convoy.doctor.facts import TEXT_BYTES, Link, Reach
from convoy.doctor.knock import knock

CONNECT_S = 3.0
"""A machine that is there answers in milliseconds; a firewall that drops packets never does."""

TALK_S = 2.0
"""How long the other end of an open connection may be silent."""

ROUND_TRIPS = 20
CHUNK_BYTES = 1 << 18
VISITORS = 32
"""So many are served, and tried, at a time."""

WallClock = Callable[[], int]
"""Nanoseconds since 1970, as this host believes."""


class Listener:
    """Answers visitors from other hosts, on a port of its own, until it is closed."""

    def __init__(self, address: str, token: str, wall_ns: WallClock = time.time_ns) -> None:
        """Listen on a free port of an address.

        Args:
            token: known to the processes of this job only; others get no answer.

        Raises:
            OSError: the address is none of this machine.
        """
        self.token = token
        self.wall_ns = wall_ns
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=128)
        self.address = str(self._listener.getsockname()[0])
        self.port = int(self._listener.getsockname()[1])
        self._bell, self._bell_push = socket.socketpair()
        self._visitors: set[socket.socket] = set()
        self._pool = ThreadPoolExecutor(VISITORS, thread_name_prefix="convoy-doctor")
        self._thread = threading.Thread(target=self._serve, name="convoy-doctor-listener", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up on everybody and end the threads."""
        self._bell_push.close()
        self._thread.join(TALK_S)
        for visitor in list(self._visitors):
            with suppress(OSError):
                visitor.shutdown(socket.SHUT_RDWR)
        self._pool.shutdown(cancel_futures=True)
        for visitor in list(self._visitors):
            visitor.close()
        self._listener.close()
        self._bell.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._bell, selectors.EVENT_READ)
            while True:
                if any(key.fileobj is self._bell for key, _ in selector.select()):
                    return
                with suppress(OSError):
                    visitor, _ = self._listener.accept()
                    self._visitors.add(visitor)
                    self._pool.submit(self._welcome, visitor)

    def _welcome(self, visitor: socket.socket) -> None:
        # A visitor that hangs up, falls silent or speaks otherwise gets nothing.
        with suppress(OSError, ValueError, LookupError, TypeError), visitor, visitor.makefile("rb") as lines:
            visitor.settimeout(TALK_S)
            visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while line := lines.readline(TEXT_BYTES):
                came_ns = self.wall_ns()
                words = json.loads(line)
                if words["token"] != self.token:
                    return
                if words["ask"] == "take":
                    _say(visitor, {"ready": True})
                    _say(visitor, _count(visitor, min(TALK_S, float(words["seconds"]))))
                    # Hanging up on bytes that nobody took would destroy the answer on its way.
                    _count(visitor, TALK_S)
                    return
                _say(visitor, {"came_ns": came_ns, "left_ns": self.wall_ns()})
        self._visitors.discard(visitor)


@dataclass(frozen=True)
class Address:
    """Where the first process of a host listens; or why it does not.

    Attributes:
        device: its index in the job.
    """

    device: int
    host: str = ""
    port: int = 0
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.host} port {self.port}"


ADDRESS = TypeAdapter(Address)


def reach_all(
    source: int, others: Sequence[Address], token: str, *, wall_ns: WallClock = time.time_ns, limit_s: float = CONNECT_S
) -> list[Link]:
    """Connect to every other host, and time small messages to those that answer.

    Takes as long as the slowest connection: `limit_s` for every `VISITORS` hosts behind a firewall that drops packets.
    """
    if not others:
        return []
    with ThreadPoolExecutor(min(VISITORS, len(others)), thread_name_prefix="convoy-doctor-knock") as pool:
        reaches = list(pool.map(lambda other: _try(other, limit_s), others))
    # One after the other: each would lengthen the others' round trips. On new connections: while a firewall was waited for,
    # the first ones were silent for too long.
    return [
        _greet(source, other, token, wall_ns, limit_s)
        if reach is Reach.OPEN
        else Link(source, other.device, str(other), reach)
        for other, reach in zip(others, reaches, strict=True)
    ]


def _try(other: Address, limit_s: float) -> Reach:
    reach, connection = knock(other.host, other.port, limit_s)
    if connection is not None:
        connection.close()
    return reach


def _greet(source: int, other: Address, token: str, wall_ns: WallClock, limit_s: float) -> Link:
    reach, connection = knock(other.host, other.port, limit_s)
    if connection is None:
        return Link(source, other.device, str(other), reach)
    with connection, connection.makefile("rb") as lines:
        connection.settimeout(TALK_S)
        try:
            rounds = [_round_trip(connection, lines, token, wall_ns) for _ in range(ROUND_TRIPS)]
        except (OSError, ValueError, LookupError, TypeError):
            return Link(source, other.device, str(other), Reach.STRANGER)
    fastest = min(rounds, key=lambda each: each[0])
    median_s = statistics.median(seconds for seconds, _ in rounds)
    return Link(source, other.device, str(other), reach, round_trip_s=median_s, ahead_s=fastest[1])


def _round_trip(connection: socket.socket, lines: IO[bytes], token: str, wall_ns: WallClock) -> tuple[float, float]:
    """Seconds there and back, without those at the other end; and by how much its clock is ahead."""
    start_ns, sent_ns = time.perf_counter_ns(), wall_ns()
    _say(connection, {"token": token, "ask": "time"})
    answer = _hear(lines)
    seconds, back_ns = (time.perf_counter_ns() - start_ns) / 1e9, wall_ns()
    came_ns, left_ns = int(answer["came_ns"]), int(answer["left_ns"])
    return max(0.0, seconds - (left_ns - came_ns) / 1e9), clock_ahead_s(sent_ns, came_ns, left_ns, back_ns)


def clock_ahead_s(sent_ns: int, came_ns: int, left_ns: int, back_ns: int) -> float:
    """By how much the other clock is ahead of ours: ((t1 - t0) + (t2 - t3)) / 2, as in NTP (RFC 5905, section 8).

    Args:
        sent_ns, back_ns: t0 and t3, on our clock.
        came_ns, left_ns: t1 and t2, on theirs. Off by half the difference of the two ways at most.
    """
    return ((came_ns - sent_ns) + (left_ns - back_ns)) / 2e9


def bytes_per_s(other: Address, token: str, seconds: float, limit_s: float = CONNECT_S) -> float:
    """Send data to a host for some tenths of a second; bytes/s as it counted them, 0 if none came."""
    _, connection = knock(other.host, other.port, limit_s)
    if connection is None:
        return 0.0
    # What is still in the kernel when this ends must not disturb the next turn.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    with connection, connection.makefile("rb") as lines, suppress(OSError, ValueError, LookupError, TypeError):
        connection.settimeout(TALK_S)
        _say(connection, {"token": token, "ask": "take", "seconds": seconds})
        if _hear(lines).get("ready") is True:
            _pour(connection, time.monotonic() + seconds)
            answer = _hear(lines)
            taken, took_s = int(answer["bytes"]), float(answer["seconds"])
            return taken / took_s if taken > 0 and took_s > 0 else 0.0
    return 0.0


def _pour(connection: socket.socket, until_s: float) -> None:
    # Random: some tunnels compress.
    chunk = memoryview(os.urandom(CHUNK_BYTES))
    while (left_s := until_s - time.monotonic()) > 0:
        connection.settimeout(left_s)
        with suppress(TimeoutError):
            connection.send(chunk)
    connection.settimeout(TALK_S + 1.0)


def _count(visitor: socket.socket, seconds: float) -> dict[str, float]:
    """Bytes that come within the time, from the first of them on, which started the watch and does not count."""
    buffer = bytearray(CHUNK_BYTES)
    visitor.recv_into(buffer)
    start_s = last_s = time.monotonic()
    taken = 0
    with suppress(TimeoutError):
        while (left_s := start_s + seconds - last_s) > 0:
            visitor.settimeout(left_s)
            count = visitor.recv_into(buffer)
            if not count:
                break
            taken += count
            last_s = time.monotonic()
    visitor.settimeout(TALK_S)
    return {"bytes": taken, "seconds": last_s - start_s}


def _say(connection: socket.socket, words: dict[str, Any]) -> None:
    connection.sendall(json.dumps(words).encode() + b"\n")


def _hear(lines: IO[bytes]) -> dict[str, Any]:
    words = json.loads(lines.readline(TEXT_BYTES))
    if not isinstance(words, dict):
        raise ValueError(f"{words!r}: not an answer")
    return words
