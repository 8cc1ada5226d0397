"""The link scan: whether hosts reach each other, round trips, clocks, and bytes/s of one link after the other.

::

    client                            server
    {"token": ..., "ask": "time"}     ->
                                  <-  {"came_ns": ..., "left_ns": ...}        as often as it likes
    {"token": ..., "ask": "take"}     ->
                                  <-  {"ready": true}
    random bytes                      ->                                      for some tenths of a second
                                  <-  {"bytes": ..., "seconds": ...}          as the server counted them
"""

import json
import os
import socket
import socketserver
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import IO, Any

from pydantic import TypeAdapter

from convoy.comm.environment import reachable_address
from convoy.doctor.exchange import CONNECT_S, Exchange
from convoy.doctor.probes import ping
from convoy.doctor.schema import LINKS, TEXT_BYTES, Checkup, Finding, Link, Reach, from_text, to_text
from convoy.errors import InputError

TALK_S = 2.0
"""How long the other end of an open connection may be silent."""

ROUND_TRIPS = 20
CHUNK_BYTES = 1 << 18
CLIENTS = 32
"""So many other hosts are tried at a time."""

MAX_CONNECTIONS = 256
"""A server accepts no more at a time."""

ADDRESS_LIMIT_S = 5.0
TURN_LIMIT_S = CONNECT_S + 2 * TALK_S
"""Beside the seconds of data: connecting, and a host that falls silent."""

WallClock = Callable[[], int]
"""Nanoseconds since 1970, as this host believes."""

Rates = Mapping[tuple[int, int], float]
"""(source, target) -> bytes/s."""


@dataclass(frozen=True)
class Address:
    """Where the first device of a host listens, or why it does not."""

    device: int
    host: str = ""
    port: int = 0
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.host} port {self.port}"


ADDRESS = TypeAdapter(Address)


def scan_links(
    exchange: Exchange, checkups: Sequence[Checkup], token: str, wall_ns: WallClock
) -> tuple[tuple[Link, ...], tuple[Finding, ...]]:
    """Try all links between the hosts, by the first device of each, and find hosts that cannot listen.

    All devices of the job call it. Only device 0 learns what the links carry.
    """
    firsts = {own.machine: own for own in reversed(checkups)}.values()
    if len(firsts) < 2:
        return (), ()
    with ExitStack() as stack:
        own = next((each for each in firsts if each.device == exchange.device), None)
        mine = "" if own is None else to_text(ADDRESS, _listen(own, checkups, token, wall_ns, stack))
        texts = exchange.gather("address", mine, ADDRESS_LIMIT_S)
        said = [from_text(ADDRESS, text, f"device {device}") for device, text in texts.items() if text]
        servers = [server for server in said if not server.problem]
        # Those that follow come first: else all would begin with the same one.
        others = sorted(
            (each for each in servers if each.device != exchange.device), key=lambda a: a.device < exchange.device
        )
        found = reach_all(exchange.device, others, token, wall_ns=wall_ns) if mine else []
        limit_s = -(-len(servers) // CLIENTS) * CONNECT_S + len(servers) * TALK_S
        gathered = exchange.gather("links", to_text(LINKS, found), limit_s)
        links = [link for device, text in gathered.items() for link in from_text(LINKS, text, f"device {device}")]
        if not mine:
            return (), ()
        rates = _measure_rates(exchange, [each for each in servers if each.device in gathered], links, token)
    cure = "Give it an address in the network of the others; GLOO_SOCKET_IFNAME names the interface"
    deaf = [
        (f"device {each.device} cannot listen for the others: {each.problem}", cure) for each in said if each.problem
    ]
    links = [replace(link, bytes_per_s=rates.get((link.source, link.target))) for link in links]
    return tuple(links), tuple(Finding("error", *texts) for texts in deaf)


def _listen(own: Checkup, checkups: Sequence[Checkup], token: str, wall_ns: WallClock, stack: ExitStack) -> Address:
    """Start this host's server, at the address that a training would choose."""
    if not own.address:
        return Address(own.device, problem=own.address_problem)
    try:
        address = reachable_address(own.address, [checkup.address for checkup in checkups if checkup.address])
        server = stack.enter_context(Server(address, token, wall_ns))
    except (InputError, OSError) as error:
        return Address(own.device, problem=str(error))
    return Address(own.device, server.address, server.port)


def _measure_rates(exchange: Exchange, servers: Sequence[Address], links: Sequence[Link], token: str) -> Rates:
    """Bytes/s of the open links, one after the other, as device 0 calls them. All stay until the last is measured."""
    open_links = {(link.source, link.target) for link in links if link.reach is Reach.OPEN}
    schedule = schedule_for(len(servers))
    pairs = [(servers[source], servers[target]) for source, target in schedule.pairs]
    order = [(source, target) for source, target in pairs if (source.device, target.device) in open_links]
    turn_s = schedule.each_s + TURN_LIMIT_S
    rates: dict[tuple[int, int], float] = {}
    for number, (source, target) in enumerate(order):
        turn, done = f"turn/{number}", f"turn/{number}/done"
        if exchange.device == 0:
            exchange.put(turn, "go")
        if source.device == exchange.device:
            if not exchange.wait([turn], (number + 1) * turn_s):
                break
            exchange.put(done, json.dumps(bytes_per_s(target, token, schedule.each_s)))
        if exchange.device == 0 and (told := exchange.wait([done], turn_s)):
            # A source that falls silent has measured nothing, and holds nobody up.
            rates[source.device, target.device] = float(json.loads(told[done]))
    if exchange.device == 0:
        exchange.put("turns over", "")
    exchange.wait(["turns over"], len(order) * turn_s + TURN_LIMIT_S)
    return rates


# ------------------------------------------------------------------------------------------------ which link when


EACH_S = 0.3
MIN_EACH_S = 0.1
"""Below that, what TCP needs to come up to speed is most of it."""

TOTAL_S = 8.0


@dataclass(frozen=True)
class Schedule:
    """Ordered pairs (source, target) of hosts, measured one after the other for `each_s` seconds."""

    pairs: tuple[tuple[int, int], ...]
    each_s: float


def schedule_for(hosts: int, each_s: float = EACH_S) -> Schedule:
    """All ordered pairs of hosts where there is time for them; else a sample in which all send and receive equally often.

    Pairs come stride by stride: in stride k every host sends to the k-th after it. Turns become shorter before pairs are left
    out, and one stride always remains: more than `TOTAL_S / MIN_EACH_S` hosts take longer than `TOTAL_S`.
    """
    if hosts < 2:
        return Schedule((), each_s)
    count = max(1, min(hosts - 1, int(TOTAL_S / (MIN_EACH_S * hosts) + 1e-9)))
    # Evenly over 1 ... hosts - 1, so that near and far neighbours are tried, which may sit at other switches.
    strides = [1 + index * (hosts - 1) // count for index in range(count)]
    pairs = tuple((host, (host + stride) % hosts) for stride in strides for host in range(hosts))
    return Schedule(pairs, min(each_s, max(MIN_EACH_S, TOTAL_S / len(pairs))))


# ------------------------------------------------------------------------------------------------ the server


class Server(socketserver.ThreadingTCPServer):
    """Answers clients from other hosts, on a port of its own, until the context ends."""

    request_queue_size = 128

    def __init__(self, address: str, token: str, wall_ns: WallClock = time.time_ns) -> None:
        """Listen on a free port of an address.

        Args:
            token: known to the processes of this job only; others get no answer.

        Raises:
            OSError: the address is none of this machine.
        """
        self.token, self.wall_ns = token, wall_ns
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._connections: set[socket.socket] = set()
        super().__init__((address, 0), _Conversation)
        self.address, self.port = str(self.server_address[0]), int(self.server_address[1])
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="convoy-doctor", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up on everybody and end the threads."""
        self.shutdown()
        self._thread.join()
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def verify_request(self, *_: Any) -> bool:
        return len(self._connections) < MAX_CONNECTIONS

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, *_: Any) -> None:
        """A client that hangs up, falls silent or speaks another protocol gets no answer."""


class _Conversation(socketserver.StreamRequestHandler):
    server: Server
    disable_nagle_algorithm = True

    def handle(self) -> None:
        connection: socket.socket = self.request
        connection.settimeout(TALK_S)
        while line := self.rfile.readline(TEXT_BYTES):
            came_ns = self.server.wall_ns()
            words = json.loads(line)
            if words["token"] != self.server.token:
                return
            if words["ask"] == "take":
                _say(connection, {"ready": True})
                _say(connection, _count(connection, min(TALK_S, float(words["seconds"]))))
                # Closing a connection with bytes that nobody read would destroy the answer on its way.
                _count(connection, TALK_S)
                return
            _say(connection, {"came_ns": came_ns, "left_ns": self.server.wall_ns()})


def _count(connection: socket.socket, seconds: float) -> dict[str, float]:
    """Count bytes that come within the time, from the first read on, which starts the clock and does not count."""
    buffer = bytearray(CHUNK_BYTES)
    connection.recv_into(buffer)
    start_s = last_s = time.monotonic()
    taken = 0
    with suppress(TimeoutError):
        while (left_s := start_s + seconds - last_s) > 0:
            connection.settimeout(left_s)
            count = connection.recv_into(buffer)
            if not count:
                break
            taken += count
            last_s = time.monotonic()
    connection.settimeout(TALK_S)
    return {"bytes": taken, "seconds": last_s - start_s}


# ------------------------------------------------------------------------------------------------ the client


def reach_all(
    source: int, others: Sequence[Address], token: str, *, wall_ns: WallClock = time.time_ns, limit_s: float = CONNECT_S
) -> list[Link]:
    """Connect to every other host, and time small messages to those that answer.

    Takes as long as the slowest connection: `limit_s` for every `CLIENTS` hosts behind a firewall that drops packets.
    """

    def attempt(other: Address) -> Reach:
        reach, connection = ping(other.host, other.port, limit_s)
        if connection is not None:
            connection.close()
        return reach

    with ThreadPoolExecutor(CLIENTS, thread_name_prefix="convoy-doctor-ping") as pool:
        reaches = list(pool.map(attempt, others))
    # One after the other: each would lengthen the others' round trips. On new connections: while a firewall was waited for,
    # the first ones were silent for too long.
    return [
        _time_messages(source, other, token, wall_ns, limit_s)
        if reach is Reach.OPEN
        else Link(source, other.device, str(other), reach)
        for other, reach in zip(others, reaches, strict=True)
    ]


def _time_messages(source: int, other: Address, token: str, wall_ns: WallClock, limit_s: float) -> Link:
    reach, connection = ping(other.host, other.port, limit_s)
    link = Link(source, other.device, str(other), reach)
    if connection is None:
        return link
    with connection, connection.makefile("rb") as lines:
        connection.settimeout(TALK_S)
        try:
            rounds = [_round_trip(connection, lines, token, wall_ns) for _ in range(ROUND_TRIPS)]
        except (OSError, ValueError, LookupError, TypeError):
            return replace(link, reach=Reach.STRANGER)
    median_s = statistics.median(seconds for seconds, _ in rounds)
    return replace(link, round_trip_s=median_s, ahead_s=min(rounds)[1])


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


def bytes_per_s(other: Address, token: str, seconds: float) -> float:
    """Send data to a host for some tenths of a second; bytes/s as it counted them, 0 if none came."""
    _, connection = ping(other.host, other.port, CONNECT_S)
    if connection is None:
        return 0.0
    # What is still in the kernel when this ends must not disturb the next turn.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    with connection, connection.makefile("rb") as lines, suppress(OSError, ValueError, LookupError, TypeError):
        connection.settimeout(TALK_S)
        _say(connection, {"token": token, "ask": "take", "seconds": seconds})
        if _hear(lines).get("ready") is True:
            # Random: some tunnels compress.
            chunk, until_s = memoryview(os.urandom(CHUNK_BYTES)), time.monotonic() + seconds
            while (left_s := until_s - time.monotonic()) > 0:
                connection.settimeout(left_s)
                with suppress(TimeoutError):
                    connection.send(chunk)
            connection.settimeout(TALK_S + 1.0)
            answer = _hear(lines)
            taken, took_s = int(answer["bytes"]), float(answer["seconds"])
            return taken / took_s if taken > 0 and took_s > 0 else 0.0
    return 0.0


def _say(connection: socket.socket, words: dict[str, Any]) -> None:
    connection.sendall(json.dumps(words).encode() + b"\n")


def _hear(lines: IO[bytes]) -> dict[str, Any]:
    words = json.loads(lines.readline(TEXT_BYTES))
    if not isinstance(words, dict):
        raise ValueError(f"{words!r}: not an answer")
    return words
