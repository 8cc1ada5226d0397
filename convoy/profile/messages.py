"""Messages between the devices of a group, timed from either end."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from convoy.comm.group import Group, Message

SIZES = (1 << 10, 16 << 10, 128 << 10, 1 << 20, 4 << 20)
"""Bytes of the messages of one pair, as long as they take no longer than its time allows."""

ACK_BYTES = 8
PROBE_S = 1.0
"""A message that seems to take longer is not even tried."""

PAUSE_S = 0.1
"""Pauses of a quota are shorter; what takes so much longer than a small message is slow."""

REPEATS = (3, 20)
"""The fewest and the most messages of one size."""

CARD_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Stage:
    """Messages of one size, as one of their ends saw them.

    Attributes:
        seconds: of each message and its acknowledgement; from the sending end.
        processor_s: of this end's processor for each.
    """

    size: int
    seconds: tuple[float, ...]
    processor_s: tuple[float, ...]


class Wire:
    """Messages of this device, timed."""

    def __init__(self, group: Group, now: Callable[[], float], processor: Callable[[], float]) -> None:
        self.group, self.now, self.processor = group, now, processor
        self.store: dict[tuple[str, int], Tensor] = {}

    def _buffer(self, purpose: str, size: int) -> Tensor:
        if (purpose, size) not in self.store:
            self.store[purpose, size] = torch.zeros(size, dtype=torch.uint8, device=self.group.torch_device)
        return self.store[purpose, size]

    def _send(self, sizes: Mapping[int, int]) -> None:
        self.group.exchange([Message(peer, self._buffer("out", size)) for peer, size in sizes.items()], [])

    def _receive(self, sizes: Mapping[int, int]) -> None:
        self.group.exchange([], [Message(peer, self._buffer(f"from {peer}", size)) for peer, size in sizes.items()])

    def meet(self, a: int, b: int, allowance_s: float) -> dict[str, list[Stage]]:
        """Both ways between two devices; nothing on the others."""
        if self.group.device not in (a, b):
            return {"sent": [], "received": []}
        if self.group.device == a:
            sent = list(self._lead(b, allowance_s))
            return {"sent": sent, "received": list(self._follow(b))}
        received = list(self._follow(a))
        return {"sent": list(self._lead(a, allowance_s)), "received": received}

    def _lead(self, peer: int, allowance_s: float) -> Iterator[Stage]:
        """Send messages of growing size. Only this end reads the time, so it alone decides how far to go."""
        # The first ones meet cold buffers and connections; they only tell how many more there is time for.
        first_s = self._stage(peer, SIZES[0], REPEATS[0]).seconds
        last_s, sent = statistics.median(first_s), SIZES[0]
        fastest_s, s_per_byte = min(first_s), last_s / sent
        for size in SIZES:
            # A larger message is judged by what the last one took longer than the one before it. Of the smallest most is
            # latency, or the pause of a quota: in proportion to it everything looks slow, so the second has more time.
            if size > SIZES[0] and s_per_byte * size > (allowance_s if size == SIZES[1] else allowance_s / 4):
                # Under a small quota small messages differ by pauses, which no byte takes: one of this size tells.
                hopeless = size > SIZES[1] and s_per_byte * size > PROBE_S
                if hopeless or self._stage(peer, size, 1).seconds[0] - fastest_s > max(allowance_s / 4, PAUSE_S):
                    break
                s_per_byte = 0.0
            expected_s = last_s + s_per_byte * (size - sent)
            stage = self._stage(
                peer, size, min(REPEATS[1], max(REPEATS[0], round(allowance_s / 4 / max(expected_s, 1e-9))))
            )
            # The fastest of each size: under a small quota the median of a few may hold a pause, which no byte took.
            if size > sent:
                s_per_byte = max(0.0, (min(stage.seconds) - fastest_s) / (size - sent))
            last_s, fastest_s, sent = statistics.median(stage.seconds), min(stage.seconds), size
            yield stage
        self._tell(peer, 0, 0)

    def _stage(self, peer: int, size: int, count: int) -> Stage:
        self._tell(peer, size, count)
        rows = [self._one(lambda: self._ping({peer: size}, {peer: ACK_BYTES})) for _ in range(count + 1)][1:]
        return Stage(size, tuple(s for s, _ in rows), tuple(p for _, p in rows))

    def _follow(self, peer: int) -> Iterator[Stage]:
        size, count = self._hear(peer)
        while size:
            rows = [self._answer(peer, size) for _ in range(count + 1)][1:]
            yield Stage(size, (), tuple(p for _, p in rows))
            size, count = self._hear(peer)

    def _answer(self, peer: int, size: int) -> tuple[float, float]:
        return self._one(lambda: self._pong({peer: size}, {peer: ACK_BYTES}))

    def _ping(self, sizes: Mapping[int, int], answers: Mapping[int, int]) -> None:
        self._send(sizes)
        self._receive(answers)

    def _pong(self, sizes: Mapping[int, int], answers: Mapping[int, int]) -> None:
        self._receive(sizes)
        self._send(answers)

    def _tell(self, peer: int, size: int, count: int) -> None:
        order = torch.tensor([size, count], dtype=torch.int64, device=self.group.torch_device)
        self.group.exchange([Message(peer, order)], [])

    def _hear(self, peer: int) -> tuple[int, int]:
        order = torch.zeros(2, dtype=torch.int64, device=self.group.torch_device)
        self.group.exchange([], [Message(peer, order)])
        size, count = order.tolist()
        return size, count

    def _one(self, work: Callable[[], None]) -> tuple[float, float]:
        start_s, start_processor_s = self.now(), self.processor()
        work()
        return self.now() - start_s, self.processor() - start_processor_s

    def _repeated(self, work: Callable[[], None]) -> list[float]:
        """Seconds of each run but the first."""
        return [self._one(work)[0] for _ in range(CARD_REPEATS + 1)][1:]

    def fan_out(self, centre: int, sizes: Mapping[int, int]) -> list[float]:
        """One sends to others at once, to each so many bytes; each acknowledges."""
        me = self.group.device
        if me == centre:
            return self._repeated(lambda: self._ping(sizes, dict.fromkeys(sizes, ACK_BYTES)))
        return self._repeated(lambda: self._pong({centre: sizes[me]}, {centre: ACK_BYTES})) if me in sizes else []

    def fan_in(self, centre: int, sizes: Mapping[int, int]) -> list[float]:
        """Others send to one at once, each so many bytes, at its word."""
        me = self.group.device
        if me == centre:
            return self._repeated(lambda: self._ping(dict.fromkeys(sizes, ACK_BYTES), sizes))
        return self._repeated(lambda: self._pong({centre: ACK_BYTES}, {centre: sizes[me]})) if me in sizes else []

    def ring(self, members: Sequence[int], size: int) -> list[float]:
        """Every member sends to the next one and receives from the one before."""
        if self.group.device not in members:
            return []
        place = members.index(self.group.device)
        onward = Message(members[(place + 1) % len(members)], self._buffer("out", size))
        arriving = Message(members[place - 1], self._buffer("ring", size))
        return self._repeated(lambda: self.group.exchange([onward], [arriving]))
