"""Connections of a pair that a door drops at first."""

import threading

import torch

from convoy.comm.channel import Credentials
from convoy.comm.door import Door
from convoy.comm.environment import listen_at
from convoy.comm.group import Message
from convoy.comm.job_key import make_key
from convoy.comm.streams import StreamBackend


def test_a_connection_that_a_door_drops_is_made_again() -> None:
    """On a busy machine a handshake took longer than a door waits: the job failed to start (chaos on threads, seed 20030)."""
    credentials = Credentials(make_key())
    doors = [Door(listen_at("127.0.0.1", 0), credentials) for _ in range(2)]
    take, dropped = doors[0].handlers["stream"], []

    def drops_the_first(words: dict[str, object], channel: object) -> object:
        if not dropped:
            dropped.append(words)
            return None
        return take(words, channel)  # type: ignore[arg-type]

    doors[0].handlers["stream"] = drops_the_first  # type: ignore[assignment]
    addresses, backends = [door.address for door in doors], {}

    def connect(device: int) -> None:
        backends[device] = StreamBackend(doors[device], addresses, device, "pair", 20.0)

    threads = [threading.Thread(target=connect, args=(device,)) for device in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert dropped
        arrived = torch.zeros(3)
        sending = backends[1].start([Message(0, torch.ones(3))], [], 0)
        backends[0].start([], [Message(1, arrived)], 0).wait(20.0, lambda _: None)
        sending.wait(20.0, lambda _: None)
        assert arrived.tolist() == [1.0, 1.0, 1.0]
    finally:
        for backend in backends.values():
            backend.cut(broken=False)
        for door in doors:
            door.close()
