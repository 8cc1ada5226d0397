"""What the wire between the devices does: latency and bytes/s of every pair of hosts alone, of each card with all others,
and the processor time that traffic costs.

Everything passes through `convoy.comm.group.Group`, as in training, so it includes what the group itself costs. One
device speaks for its host; the other devices of a host are measured against it. Clocks of two machines cannot be compared,
so a latency is half of a round trip: both directions share it.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from convoy.comm.collectives import gather
from convoy.comm.group import Group, Message
from convoy.measure.timing import plain_torch, spread_of, typical

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

PAIR_S = 1.0


@dataclass(frozen=True, slots=True)
class PairLink:
    """The way from one device to another, alone in use; spreads are (slowest - fastest) / typical."""

    source: int
    target: int
    bytes_per_s: float
    latency_s: float
    bandwidth_spread: float
    latency_spread: float


@dataclass(frozen=True, slots=True)
class CardRates:
    """What one host sends to all others at once, receives from all at once, and passes on in a ring of all hosts."""

    host: int
    send_bytes_per_s: float
    receive_bytes_per_s: float
    ring_bytes_per_s: float
    send_spread: float
    receive_spread: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """Seconds of a device's processor, as much as it has of one, per byte; and of each message, however small."""

    send_s_per_byte: float
    receive_s_per_byte: float
    spread: float
    message_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WireTimes:
    """Pairs in both directions, cards where there are several hosts, and the traffic of every device."""

    pairs: tuple[PairLink, ...]
    cards: tuple[CardRates, ...]
    traffic: tuple[Traffic, ...]


# --- messages, timed from either end ---------------------------------------------------------------------------------


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


# --- what follows from them --------------------------------------------------------------------------------------------


def meetings(host: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Pairs of devices in the order in which they meet, and the device that speaks for each host.

    Args:
        host: index of each device's host.
    """
    speakers = [host.index(h) for h in sorted(set(host))]
    pairs = [(a, b) for i, a in enumerate(speakers) for b in speakers[i + 1 :]]
    pairs += [(speakers[h], d) for d, h in enumerate(host) if d not in speakers]
    return pairs, speakers


@plain_torch(torch.float32)
def measure_links(
    group: Group,
    host: Sequence[int],
    share: float,
    *,
    budget_s: float = 20.0,
    now: Callable[[], float] = time.perf_counter,
    processor: Callable[[], float] = time.process_time,
    progress: Callable[[str], None] = lambda _: None,
) -> WireTimes:
    """Measure the wire. Every device calls it; all know the order, and all get the same answer.

    Args:
        host: index of each device's host.
        share: how much of a processor this device has; see `convoy.measure.load`.
        budget_s: about the seconds that it may take, half for pairs and half for cards.
        now, processor: read seconds, of the wall and of this process's processor time.
        progress: is told what is measured next.

    Raises:
        DeviceLostError: a device did not answer within the group's time limit.
    """
    pairs, speakers = meetings(host)
    wire = Wire(group, now, processor)
    allowance_s = min(PAIR_S, budget_s / 2 / max(1, len(pairs)), group.timeout_s / 8)
    links: list[PairLink] = []
    trips: dict[frozenset[int], float] = {}
    own: dict[str, list[Stage]] = {"sent": [], "received": []}
    for a, b in pairs:
        progress(f"link between devices {a} and {b}")
        found = wire.meet(a, b, allowance_s)
        own["sent"] += found["sent"]
        own["received"] += found["received"]
        rows = gather(group, f"link {a} {b}", [asdict(stage) for stage in found["sent"]])
        there, back = (_stages(rows[device]) for device in (a, b))
        links += _both_ways(a, b, there, back)
        trips[frozenset((a, b))] = _shortest([*there[:1], *back[:1]])
    cards = []
    if len(speakers) > 1:
        between = [link for link in links if {link.source, link.target} <= set(speakers)]
        each_s = min(budget_s / len(speakers), group.timeout_s) / 16 / CARD_REPEATS
        size = round(each_s * max(link.bytes_per_s for link in between) / len(speakers))
        size = min(SIZES[-1], max(SIZES[0], size))
        cards = _cards(wire, speakers, size, between, trips, progress)
    rows = gather(group, "processor time of traffic", asdict(_traffic(own["sent"], own["received"], share)))
    return WireTimes(tuple(links), tuple(cards), tuple(Traffic(**row) for row in rows))


def _stages(rows: list[dict[str, Any]]) -> list[Stage]:
    return [Stage(row["size"], tuple(row["seconds"]), tuple(row["processor_s"])) for row in rows]


def _both_ways(a: int, b: int, there: Sequence[Stage], back: Sequence[Stage]) -> list[PairLink]:
    """A round trip takes both latencies, the message one way and the acknowledgement the other."""
    forth, home = _bandwidth(there), _bandwidth(back)
    trips = [
        statistics.median(stages[0].seconds) - stages[0].size / out - ACK_BYTES / home_
        for stages, out, home_ in ((there, forth, home), (back, home, forth))
    ]
    latency_s = max(0.0, statistics.fmean(trips) / 2)
    spread = spread_of([*there[0].seconds, *back[0].seconds])
    return [
        PairLink(source, target, rate, latency_s, spread_of(stages[-1].seconds), spread)
        for source, target, rate, stages in ((a, b, forth, there), (b, a, home, back))
    ]


def _bandwidth(stages: Sequence[Stage]) -> float:
    """Bytes/s by what the largest messages take longer than the smallest.

    Of the small ones the fastest counts: what the others waited for a busy processor, a large one does not wait as well.
    """
    small, large = stages[0], stages[-1]
    large_s = typical(large.seconds)
    longer_s = large_s - _shortest([small])
    if longer_s <= 0 or large.size == small.size:
        return large.size / max(large_s, 1e-9)
    return (large.size - small.size) / longer_s


def _shortest(stages: Sequence[Stage]) -> float:
    return min(s for stage in stages for s in stage.seconds)


def _cards(
    wire: Wire,
    speakers: Sequence[int],
    size: int,
    links: Sequence[PairLink],
    trips: Mapping[frozenset[int], float],
    progress: Callable[[str], None],
) -> list[CardRates]:
    """Rates without the shortest round trip that each exchange waits for.

    To each peer goes as much as its own link carries in the same time, so that a slow peer does not hide a fast card.
    """
    group, cards = wire.group, []
    rate = {(link.source, link.target): link.bytes_per_s for link in links}
    for index, centre in enumerate(speakers):
        progress(f"card of device {centre}'s host")
        others = [device for device in speakers if device != centre]
        out = _in_proportion({other: rate[centre, other] for other in others}, size)
        into = _in_proportion({other: rate[other, centre] for other in others}, size)
        own = [wire.fan_out(centre, out), wire.fan_in(centre, into)]
        sent, received = gather(group, f"card {centre}", own)[centre]
        trip_s = max(trips[frozenset((centre, other))] for other in others)
        send, receive = (
            sum(sizes.values()) / max(typical(each) - trip_s, 1e-9) for sizes, each in ((out, sent), (into, received))
        )
        cards.append(CardRates(index, send, receive, 0.0, spread_of(sent), spread_of(received)))
    progress("all hosts at once, in a ring")
    took_s = gather(group, "ring", wire.ring(speakers, size))
    way_s = max(trips[frozenset((a, b))] for a, b in zip(speakers, [*speakers[1:], speakers[0]], strict=True)) / 2
    rings = [size / max(typical(took_s[device]) - way_s, 1e-9) for device in speakers]
    return [replace(card, ring_bytes_per_s=ring) for card, ring in zip(cards, rings, strict=True)]


def _in_proportion(rates: Mapping[int, float], largest: int) -> dict[int, int]:
    fastest = max(rates.values())
    return {peer: max(ACK_BYTES, round(largest * each / fastest)) for peer, each in rates.items()}


def _traffic(sent: Sequence[Stage], received: Sequence[Stage], share: float) -> Traffic:
    """From the largest messages, where what each message costs by itself hardly counts."""
    rows = [[s / stage.size for stage in _largest(stages) for s in stage.processor_s] for stages in (sent, received)]
    out, into = (typical(row) / share if row else 0.0 for row in rows)
    # Each is answered: two messages pass through this end.
    small = [s / 2 for stage in (*sent, *received) if stage.size == SIZES[0] for s in stage.processor_s]
    message_s = typical(small) / share if small else 0.0
    return Traffic(out, into, max((spread_of(row) for row in rows if row), default=0.0), message_s)


def _largest(stages: Sequence[Stage]) -> list[Stage]:
    size = max((stage.size for stage in stages), default=0)
    return [stage for stage in stages if stage.size == size]
