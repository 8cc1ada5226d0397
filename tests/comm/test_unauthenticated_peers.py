"""Peers without the job's key: rejected before Convoy reads their bytes, counted, and harmless."""

import os
import resource
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import torch

from convoy.comm import listener as listeners
from convoy.comm.connection import Connection, Credentials, Fields, NotOfThisJob
from convoy.comm.deadlines import LEAST_S
from convoy.comm.environment import listen_at
from convoy.comm.group import Group, Message, present
from convoy.comm.job_key import JobKey, make_key
from convoy.comm.listener import Listener
from convoy.comm.processes import JoinedGroup
from tests.support.networks import ENCRYPTED, ONE_MACHINE
from tests.support.processes import on_processes

Address = tuple[str, int]
LOUD = os.urandom(4096)


@pytest.fixture(scope="module")
def key() -> JobKey:
    return make_key()


@contextmanager
def a_listener(key: JobKey) -> Iterator[tuple[Listener, list[Fields]]]:
    """Return a listener with one handler, and the messages it received."""
    heard: list[Fields] = []

    def answer(words: Fields, _: Connection) -> Fields:
        heard.append(words)
        return {"heard": len(heard)}

    listener = Listener(listen_at("127.0.0.1", 0), Credentials(key))
    listener.handlers["test"] = answer
    try:
        yield listener, heard
    finally:
        listener.close()


def ask(key: JobKey, address: Address, limit_s: float = 10.0) -> Fields:
    channel, answer = Credentials(key).connect(address, {"for": "test"}, time.monotonic() + limit_s)
    channel.close()
    return answer


# -------------------------------------------------------------------------------------------------- kinds of attacks


def scan(address: Address) -> None:
    """Connect and close, like a port scanner."""
    socket.create_connection(address, timeout=5).close()


def babble(address: Address) -> None:
    """Send random bytes instead of a handshake."""
    with socket.create_connection(address, timeout=5) as connection, suppress(OSError):
        connection.sendall(LOUD)
        connection.recv(1)


def babble_afterwards(address: Address) -> None:
    """Complete a handshake without a certificate, which the client believes done, then send random bytes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with suppress(OSError), context.wrap_socket(socket.create_connection(address, timeout=5)) as connection:
        connection.sendall(LOUD)
        connection.recv(1)


def bring_another_key(address: Address) -> None:
    """Connect with another job's key without verifying the peer."""
    context = make_key().contexts()[1]
    context.verify_mode = ssl.CERT_NONE
    with suppress(OSError), context.wrap_socket(socket.create_connection(address, timeout=5)) as connection:
        connection.sendall(LOUD)
        connection.recv(1)


def old_tls(address: Address) -> None:
    """Connect by TLS 1.2 with the right key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with suppress(OSError), context.wrap_socket(socket.create_connection(address, timeout=5)):
        pass


ATTACKS = [scan, babble, babble_afterwards, bring_another_key, old_tls]


@pytest.mark.parametrize("attack", ATTACKS)
def test_unauthenticated_peers_are_rejected_and_counted(key: JobKey, attack: Callable[[Address], None]) -> None:
    with a_listener(key) as (listener, heard):
        for _ in range(3):
            attack(listener.address)
        assert ask(key, listener.address) == {"heard": 1}
        assert heard == [{"for": "test"}]
        until(lambda: sum(listener.rejected.values()) == 3)


def until(true: Callable[[], bool]) -> None:
    """Wait for another thread; the test's time limit is the bound."""
    while not true():
        time.sleep(0.01)


def test_connecting_to_another_key_fails_clearly(key: JobKey) -> None:
    with a_listener(make_key()) as (listener, heard):
        with pytest.raises(NotOfThisJob):
            ask(key, listener.address)
        assert heard == []


def recorded(key: JobKey, address: Address) -> bytes:
    """Return the bytes of a device's conversation with a listener, recorded by a proxy."""
    said = b""
    with socket.create_server(("127.0.0.1", 0)) as between:
        caller = threading.Thread(target=lambda: ask(key, between.getsockname()[:2]))
        caller.start()
        here, there = between.accept()[0], socket.create_connection(address)
        with here, there:

            def back() -> None:
                while piece := there.recv(65536):
                    here.sendall(piece)

            answers = threading.Thread(target=back)
            answers.start()
            while piece := here.recv(65536):
                said += piece
                there.sendall(piece)
            there.shutdown(socket.SHUT_RDWR)
            answers.join()
        caller.join()
    return said


def test_replayed_handshake_is_rejected(key: JobKey) -> None:
    with a_listener(key) as (listener, heard):
        said = recorded(key, listener.address)
        assert len(heard) == 1
        for _ in range(3):
            with socket.create_connection(listener.address, timeout=5) as connection, suppress(ConnectionError):
                connection.sendall(said)
                while connection.recv(65536):
                    pass
        until(lambda: sum(listener.rejected.values()) == 3)
        assert len(heard) == 1


def test_silent_and_slow_peers_are_dropped_in_time(key: JobKey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "HANDSHAKE_S", 0.3)
    with a_listener(key) as (listener, heard):
        hello = recorded(key, listener.address)
        with (
            socket.create_connection(listener.address, timeout=5) as silent,
            socket.create_connection(listener.address) as slow,
        ):
            with suppress(OSError):
                for n in range(200):  # each byte comes long before the limit
                    slow.sendall(hello[n : n + 1])
                    time.sleep(0.01)
            assert n < 199, "it was let go on"
            assert silent.recv(1) == b""
        until(lambda: listener.rejected["no handshake in time"] == 2)
        assert ask(key, listener.address) == {"heard": 2}
        assert len(heard) == 2


def test_members_do_not_queue_behind_half_open_connections(key: JobKey) -> None:
    """Each question has the time after which a device counts as frozen. One that waited its turn took longer."""
    with a_listener(key) as (listener, _), many_files(), ExitStack() as stack:
        over = threading.Event()

        def flood() -> None:
            while not over.is_set():
                with suppress(OSError):  # the kernel's queue is full
                    connections.append(half_open(listener.address))
                if len(connections) > 1500:
                    connections.pop(0).close()
                time.sleep(0.0005)

        connections: list[socket.socket] = []
        flooding = threading.Thread(target=flood)
        flooding.start()
        stack.callback(lambda: [connection.close() for connection in connections])
        stack.callback(flooding.join)
        stack.callback(over.set)
        until(lambda: len(connections) > 1000)
        for number in range(20):
            assert ask(key, listener.address, LEAST_S) == {"heard": number + 1}
        assert listener.rejected["too many at once"] > 500


def test_a_host_with_many_half_open_connections_drops_its_own(key: JobKey) -> None:
    """A slow member's connection is the oldest one, and stays."""
    with a_listener(key) as (listener, heard), many_files(), ExitStack() as stack:
        slow = stack.enter_context(half_open(listener.address, source="127.0.0.2"))
        for _ in range(3 * listeners.MAX_PENDING):
            stack.enter_context(half_open(listener.address))
        until(lambda: listener.rejected["too many at once"] > 2 * listeners.MAX_PENDING)
        channel = Connection(slow, key.contexts()[1], key.certificate, answers=False)
        while not channel.shake_hands():
            pass
        assert channel.ask({"for": "test"}) == {"heard": 1}
        assert len(heard) == 1


def test_members_are_answered_while_failed_handshakes_are_paused(key: JobKey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "MAX_PAUSE_S", 600.0)
    monkeypatch.setattr(listeners, "PAUSE_FACTOR", 1e9)
    with a_listener(key) as (listener, _):
        channel, answer = Credentials(key).connect(listener.address, {"for": "test"}, time.monotonic() + 10)
        with channel.socket:
            assert answer == {"heard": 1}
            babble(listener.address)
            until(lambda: sum(listener.rejected.values()) == 1)
            assert channel.ask({"for": "test"}) == {"heard": 2}


def half_open(address: Address, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(address, timeout=10, source_address=(source, 0))


@contextmanager
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_listener_binds_one_address_only(key: JobKey) -> None:
    with a_listener(key) as (listener, _), pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", listener.address[1]), timeout=1).close()


# -------------------------------------------------------------------------------------------------------- a whole job


def exchange_under_attack(group: Group) -> list[Any]:
    """Both devices exchange and agree for as long as attacks of every kind run at both listeners; what they counted."""
    joined = present(group)
    assert isinstance(joined, JoinedGroup)
    addresses, over = joined._health.addresses, threading.Event()

    def attack() -> None:
        with many_files(), ExitStack() as stack:
            for _ in range(1000):
                with suppress(OSError):
                    stack.enter_context(socket.create_connection(addresses[1], timeout=5))
            for attack in ATTACKS:
                for address in addresses:
                    for _ in range(3):
                        with suppress(OSError):
                            attack(address)
        over.set()

    attacker = threading.Thread(target=attack)
    if group.device == 0:
        attacker.start()
    rounds, peer = 0, 1 - group.device
    while True:
        got = torch.zeros(50_000)
        group.exchange([Message(peer, torch.full((50_000,), rounds + 0.5 * group.device))], [Message(peer, got)])
        assert got.unique().tolist() == [rounds + 0.5 * peer]
        rounds += 1
        if group.agree("is it over?", str(over.is_set()))[0] == "True":
            break
    if group.device == 0:
        attacker.join()
    end_s, expected = time.monotonic() + 20, 3 * len(ATTACKS) + group.device * (1000 - listeners.MAX_PENDING)
    while group.rejected < expected and time.monotonic() < end_s:  # failed handshakes are paused
        time.sleep(0.05)
    group.agree("all are counted", "")
    return [rounds, group.rejected]


@pytest.mark.parametrize("network", [ONE_MACHINE, ENCRYPTED])
def test_job_continues_under_attack(network: dict[str, str]) -> None:
    target = "tests.comm.test_unauthenticated_peers:exchange_under_attack"
    (rounds, few), (_, many) = on_processes(2, target, environment=network)
    assert rounds > 10
    assert few >= 3 * len(ATTACKS)
    assert many >= 1000 - listeners.MAX_PENDING + 3 * len(ATTACKS)
