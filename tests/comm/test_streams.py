"""Stream connections of a pair: retries, and the thread that sends each message."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch

from convoy.comm import listener as listener_module
from convoy.comm import streams
from convoy.comm.backends import MessageError, PeerFailure, PendingWork
from convoy.comm.connection import Credentials
from convoy.comm.environment import listen_at
from convoy.comm.group import Message
from convoy.comm.job_key import make_key
from convoy.comm.listener import Listener
from convoy.comm.streams import StreamBackend


def test_dropped_connection_is_retried() -> None:
    """Regression: on a busy machine a handshake exceeded `HANDSHAKE_S`, and the job failed to start."""
    listeners = two_listeners()
    take, dropped = listeners[0].handlers["stream"], []

    def drops_the_first(words: dict[str, object], channel: object) -> object:
        if not dropped:
            dropped.append(words)
            return None
        return take(words, channel)  # type: ignore[arg-type]

    listeners[0].handlers["stream"] = drops_the_first  # type: ignore[assignment]
    with connected(listeners) as backends:
        assert dropped
        arrived = torch.zeros(3)
        sending = backends[1].start([Message(0, torch.ones(3))], [], 0)
        backends[0].start([], [Message(1, arrived)], 0).wait(20.0, lambda _: None)
        sending.wait(20.0, lambda _: None)
        assert arrived.tolist() == [1.0, 1.0, 1.0]


def two_listeners() -> list[Listener]:
    credentials = Credentials(make_key())
    return [Listener(listen_at("127.0.0.1", 0), credentials) for _ in range(2)]


@contextmanager
def connected(listeners: list[Listener]) -> Iterator[list[StreamBackend]]:
    """Return two connected backends."""
    addresses, backends = [listener.address for listener in listeners], dict[int, StreamBackend]()

    def connect(device: int) -> None:
        backends[device] = StreamBackend(listeners[device], addresses, device, "pair", 20.0)

    threads = [threading.Thread(target=connect, args=(device,)) for device in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        yield [backends[0], backends[1]]
    finally:
        for backend in backends.values():
            backend.cut(broken=False)
        for listener in listeners:
            listener.close()


@pytest.fixture(params=["as inside a machine", "encrypted"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StreamBackend]]:
    if request.param == "encrypted":
        for module in (streams, listener_module):
            monkeypatch.setattr(module, "is_loopback", lambda _: False)
    with connected(two_listeners()) as backends:
        yield backends


def begin(backend: StreamBackend, peer: int, sends: list[torch.Tensor], receives: list[torch.Tensor]) -> PendingWork:
    return backend.start([Message(peer, each) for each in sends], [Message(peer, each) for each in receives], 0)


def movers() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith(("convoy-to", "convoy-from"))]


def end(*works: PendingWork) -> None:
    for work in works:
        work.wait(20.0, lambda _: None)


def test_small_messages_need_no_thread(pair: list[StreamBackend]) -> None:
    """Handing a message of a few bytes to a thread took twice as long as sending it."""
    rows = [torch.full((100,), float(d)) for d in range(2)]
    arrived = [torch.zeros(100) for _ in range(2)]
    works = [begin(pair[d], 1 - d, [rows[d]], [arrived[d]]) for d in range(2)]
    end(*works)
    assert [each[0].item() for each in arrived] == [1.0, 0.0]
    assert not movers()


def test_unsent_bytes_wait_and_stay_in_order(pair: list[StreamBackend]) -> None:
    """Send more than the socket buffers hold: the sender continues and may change the sent tensor."""
    count, row = 4000, torch.zeros(1000)
    for number in range(count):
        work = begin(pair[0], 1, [row.fill_(number)], [])
        if work.works:  # handed over: its memory is in use
            row = torch.zeros(1000)
    assert movers()
    arrived = [torch.zeros(1000) for _ in range(count)]
    end(begin(pair[1], 0, [], arrived))
    assert [(each.min().item(), each.max().item()) for each in arrived] == [(float(n), float(n)) for n in range(count)]


def test_small_and_large_messages_keep_their_order(pair: list[StreamBackend]) -> None:
    sizes = [1, 300_000, 2, 3, 4, 5_000, 70_000, 6, 1, 1, 400_000, 2]
    sent = [torch.full((size,), float(number)) for number, size in enumerate(sizes)]
    arrived = [torch.zeros(size) for size in sizes]
    receiving = [begin(pair[1], 0, [], [each]) for each in arrived]
    sending = [begin(pair[0], 1, [each], []) for each in sent]
    end(*receiving[::-1], *sending)
    assert all(torch.equal(a, b) for a, b in zip(sent, arrived, strict=True))


def test_bfloat16_bool_and_scalar_messages_arrive(pair: list[StreamBackend]) -> None:
    sent = [torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16), torch.tensor([True, False]), torch.tensor(7)]
    arrived = [torch.zeros_like(each) for each in sent]
    end(begin(pair[0], 1, sent, []), begin(pair[1], 0, [], arrived))
    assert all(torch.equal(a, b) for a, b in zip(sent, arrived, strict=True))


def test_timed_out_wait_does_not_lose_the_message(pair: list[StreamBackend]) -> None:
    arrived = torch.zeros(3)
    work = begin(pair[1], 0, [], [arrived])
    with pytest.raises(PeerFailure, match="timed out"):
        work.wait(0.02, lambda _: None)
    end(begin(pair[0], 1, [torch.ones(3)], []), work)
    assert arrived.tolist() == [1.0, 1.0, 1.0]


def test_concurrent_waiters_each_get_their_message(pair: list[StreamBackend]) -> None:
    """Regression: the first waiter read up to its own message, and nobody read the second's."""
    arrived = [torch.zeros(3) for _ in range(2)]
    works = [begin(pair[1], 0, [], [each]) for each in arrived]
    threads = [threading.Thread(target=end, args=(work,)) for work in works]
    threads[0].start()
    first = works[0].works[0][1]
    assert isinstance(first, streams.Arrival)
    while not first.flow._reading.locked():
        pass
    threads[1].start()
    second = works[1].works[0][1]
    assert isinstance(second, streams.Arrival)
    while second.ticket is None:
        pass
    end(begin(pair[0], 1, [torch.ones(3), torch.full((3,), 2.0)], []))
    for thread in threads:
        thread.join()
    assert [each.tolist() for each in arrived] == [[1.0] * 3, [2.0] * 3]


@pytest.mark.parametrize("size", [3, 100_000])
def test_wait_ends_when_the_peer_is_lost(size: int, pair: list[StreamBackend]) -> None:
    work = begin(pair[1], 0, [], [torch.zeros(size)])
    pair[0].cut(broken=True)
    with pytest.raises(PeerFailure, match="closed"):
        end(work)

    def send() -> None:
        while True:  # the kernel takes what is sent first
            end(begin(pair[1], 0, [torch.zeros(size)], []))

    with pytest.raises(PeerFailure):
        send()


def test_wait_ends_when_the_local_side_closes(pair: list[StreamBackend]) -> None:
    work = begin(pair[1], 0, [], [torch.zeros(3)])
    first = work.works[0][1]
    assert isinstance(first, streams.Arrival)
    failed: list[MessageError] = []

    def wait() -> None:
        try:
            first.wait(timedelta(seconds=20))
        except MessageError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not first.flow._reading.locked():
        pass
    pair[1].cut(broken=True)
    thread.join()
    assert "closed" in str(failed[0])


@pytest.mark.parametrize("size", [4, 100_000])
def test_unexpected_message_size_is_an_error(size: int, pair: list[StreamBackend]) -> None:
    end(begin(pair[0], 1, [torch.zeros(5)], []))
    with pytest.raises(PeerFailure, match=f"sent a message of 20 bytes where one of {4 * size} was expected"):
        end(begin(pair[1], 0, [], [torch.zeros(size)]))


def test_large_message_fills_the_send_buffer_at_once() -> None:
    """To wake a thread for each made a step of AlexNet, its Linear layers by filters, 9 % longer than over gloo. What is left
    of one goes behind it, and so do the messages after it."""
    with connected(two_listeners()) as pair:
        out = pair[0]._out[0, 1]
        sizes = (1_000_000, 32_000_000, 10, 20_000)
        sent = [torch.arange(size, dtype=torch.int64).to(torch.uint8) for size in sizes]
        first = begin(pair[0], 1, sent[:1], [])
        arrived = [torch.zeros(sizes[0], dtype=torch.uint8)]
        end(begin(pair[1], 0, [], arrived), first)
        assert torch.equal(arrived[0], sent[0])
        rest = begin(pair[0], 1, sent[1:], [])
        assert out._left, "no kernel takes 32 MB"
        arrived = [torch.zeros(size, dtype=torch.uint8) for size in sizes[1:]]
        end(begin(pair[1], 0, [], arrived), rest)
        assert all(map(torch.equal, arrived, sent[1:]))


class Full:
    """A connection whose kernel accepts a limited number of bytes without blocking."""

    def __init__(self, whole: socket.socket, takes: int) -> None:
        self.whole, self.takes = whole, takes

    def sendmsg(self, parts: list[bytes], *_: object) -> int:
        if not self.takes:
            raise BlockingIOError
        content = b"".join(bytes(part) for part in parts)[: self.takes]
        self.whole.sendall(content)
        return len(content)

    def __getattr__(self, name: str) -> object:
        return getattr(self.whole, name)


@pytest.mark.parametrize("takes", [0, 3, 8, 9, 20_000])
def test_partial_writes_deliver_the_whole_message(takes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within the eight bytes of the header."""
    with connected(two_listeners()) as pair:
        channel = pair[0]._out[0, 1].channel
        monkeypatch.setattr(channel, "socket", Full(channel.socket, takes))
        sent, arrived = torch.arange(20_000).to(torch.uint8), torch.zeros(20_000, dtype=torch.uint8)
        small, came = torch.ones(5), torch.zeros(5)
        work = begin(pair[0], 1, [sent, small], [])
        end(begin(pair[1], 0, [], [arrived, came]), work)
        assert torch.equal(arrived, sent)
        assert torch.equal(came, small)
