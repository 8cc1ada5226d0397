"""Measures a job's network: each pair of hosts alone, each NIC with all others at once, and the processor time of messages.

All messages go through `convoy.comm.group.Group`, as in training, so its overhead is included. The first device of a host
represents the host, and the host's other devices are measured against it. Clocks of two machines cannot be compared, so
a latency is half of a round trip.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch

from convoy.comm.control_messages import gather
from convoy.comm.group import Group, Message
from convoy.fleet import Fleet, Link, Nic
from convoy.measure.timing import Now, Progress, plain_torch, spread_of, typical
from convoy.simulate.table import LinkSpread

SIZES = (1 << 10, 16 << 10, 128 << 10, 1 << 20, 4 << 20)
"""Message sizes in bytes. A pair uses the first, and the largest that its time allows."""

ACK_BYTES = 8
PROBE_S = 1.0  # messages that would take longer are not tried
PAUSE_S = 0.1  # longer than a pause of a CPU quota
REPEATS, NIC_REPEATS = (3, 20), 3  # the fewest and the most messages of one size
PAIR_S = 1.0


@dataclass(frozen=True, slots=True)
class PairLink:
    """The link from one device to another, without other traffic. Spreads are (slowest - fastest) / typical."""

    source: int
    target: int
    bytes_per_s: float
    latency_s: float
    bandwidth_spread: float
    latency_spread: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """A device's processor seconds per byte sent, per byte received and per message, divided by its processor share."""

    send_s_per_byte: float
    receive_s_per_byte: float
    message_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WireTimes:
    """The measured network.

    Attributes:
        pairs: links in both directions.
        nics: each host's rates to and from all others at once; empty if there is one host.
        traffic: each device's processor time of messages.
    """

    pairs: tuple[PairLink, ...]
    nics: tuple[Nic, ...]
    traffic: tuple[Traffic, ...]

    def into(self, fleet: Fleet) -> Fleet:
        """Return the fleet with measured NICs and links. Uplinks of segments stay as described."""
        links = tuple(
            Link(*ends, statistics.median(p.bytes_per_s for p in pairs), statistics.median(p.latency_s for p in pairs))
            for ends, pairs in self._by_hosts(fleet).items()
        )
        if not self.nics:
            return replace(fleet, links=links)
        hosts = []
        for host, nic in zip(fleet.hosts, self.nics, strict=True):
            others = [link for link in links if link.source != link.target]
            out = [link for link in others if link.source == host.name]
            into = [link for link in others if link.target == host.name]
            # A NIC is at least as fast as each of its links.
            card = Nic(
                max(nic.send_bytes_per_s, *(link.bandwidth_bytes_per_s for link in out)),
                max(nic.receive_bytes_per_s, *(link.bandwidth_bytes_per_s for link in into)),
                statistics.median(link.latency_s for link in out),
            )
            hosts.append(replace(host, card=card))
        return replace(fleet, hosts=tuple(hosts), network=None, links=links)

    def spreads(self, fleet: Fleet) -> tuple[LinkSpread, ...]:
        """Return how much the repetitions vary, for each link of `into`."""
        return tuple(
            LinkSpread(*ends, max(p.latency_spread for p in pairs), max(p.bandwidth_spread for p in pairs))
            for ends, pairs in self._by_hosts(fleet).items()
        )

    def _by_hosts(self, fleet: Fleet) -> dict[tuple[str, str], list[PairLink]]:
        """Group the pairs of devices by their hosts; both directions within a host are one link."""
        result: dict[tuple[str, str], list[PairLink]] = {}
        for pair in self.pairs:
            ends = fleet.devices[pair.source].host, fleet.devices[pair.target].host
            result.setdefault(ends, []).append(pair)
        return result


class Stage(NamedTuple):
    """The times of messages of one size, at one end: seconds until the acknowledgement, and processor seconds."""

    size: int
    seconds: list[float]
    processor_s: list[float]


class TimedMessages:
    """The sender and receiver of this device's timed messages."""

    def __init__(self, group: Group, now: Now, processor: Now) -> None:
        self.group, self.now, self.processor = group, now, processor

    def fan(self, centre: int, out: Mapping[int, int], into: Mapping[int, int], repeats: int) -> Stage:
        """Send from one device to others at once, then back from all of them, several times.

        Args:
            out, into: bytes to and from each of the others, equal on all devices.

        Returns:
            all repetitions except the first, which finds cold buffers; no repetitions on a device without messages.
        """
        device, me, found = self.group.torch_device, self.group.device, Stage(max(out.values()), [], [])
        if me != centre:
            if me not in out:
                return found
            out, into = {centre: out[me]}, {centre: into[me]}
        forth, back = (
            [Message(peer, torch.zeros(size, dtype=torch.uint8, device=device)) for peer, size in sizes.items()]
            for sizes in (out, into)
        )
        rounds = [(forth, []), ([], back)] if me == centre else [([], forth), (back, [])]
        for number in range(repeats + 1):
            start_s, start_processor_s = self.now(), self.processor()
            for sends, receives in rounds:
                self.group.exchange(sends, receives)
            if number:
                found.seconds.append(self.now() - start_s)
                found.processor_s.append(self.processor() - start_processor_s)
        return found

    def follow(self, peer: int) -> list[Stage]:
        """Answer the messages of the peer's `lead`."""
        stages: list[Stage] = []
        order, me = torch.zeros(2, dtype=torch.int64, device=self.group.torch_device), self.group.device
        while True:
            self.group.exchange([], [Message(peer, order)])
            size, count = order.tolist()
            if not size:
                return stages
            stages.append(Stage(size, [], self.fan(peer, {me: size}, {me: ACK_BYTES}, count).processor_s))

    def lead(self, peer: int, allowance_s: float) -> list[Stage]:
        """Time small messages, and messages of the largest size that the time allows. The peer calls `follow`."""

        def stage(size: int, count: int) -> Stage:
            order = torch.tensor([size, count], dtype=torch.int64, device=self.group.torch_device)
            self.group.exchange([Message(peer, order)], [])
            return self.fan(self.group.device, {peer: size}, {peer: ACK_BYTES}, count) if size else Stage(0, [], [])

        def count(each_s: float) -> int:
            return min(REPEATS[1], max(REPEATS[0], round(allowance_s / 4 / max(each_s, 1e-9))))

        # The first messages find cold connections; they only determine how many more fit.
        small = stage(SIZES[0], count(statistics.median(stage(SIZES[0], REPEATS[0]).seconds)))
        fastest_s, size, longer_s = min(small.seconds), SIZES[0], 0.0
        for larger in SIZES[1:]:
            if longer_s * larger / size > PROBE_S:
                break
            tried_s = stage(larger, 1).seconds[0] - fastest_s
            if tried_s > max(allowance_s / 4, PAUSE_S):  # under a small quota any message may contain a pause
                break
            size, longer_s = larger, max(0.0, tried_s)
        large = stage(size, count(fastest_s + longer_s))
        stage(0, 0)
        return [small, large]


def pairs_to_measure(host: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the pairs of devices in measuring order, and the first device of each host."""
    firsts = [host.index(h) for h in sorted(set(host))]
    pairs = [(a, b) for i, a in enumerate(firsts) for b in firsts[i + 1 :]]
    pairs += [(firsts[h], d) for d, h in enumerate(host) if d not in firsts]
    return pairs, firsts


@plain_torch(torch.float32)
def measure_links(
    group: Group,
    host: Sequence[int],
    share: float,
    *,
    budget_s: float = 20.0,
    now: Now = time.perf_counter,
    processor: Now = time.process_time,
    progress: Progress = lambda _: None,
) -> WireTimes:
    """Measure the network. All devices call it and get the same value.

    Args:
        host: index of each device's host.
        share: this device's share of a processor; see `convoy.measure.overhead_probe`.
        budget_s: approximate seconds, half for pairs and half for NICs.
        now, processor: return the wall-clock seconds and this process's processor seconds.

    Raises:
        DeviceLostError: a device did not answer within the group's time limit.
    """
    pairs, firsts = pairs_to_measure(host)
    messages = TimedMessages(group, now, processor)
    allowance_s = min(PAIR_S, budget_s / 2 / max(1, len(pairs)), group.timeout_s / 8)
    links: list[PairLink] = []
    trips_s: dict[frozenset[int], float] = {}
    sent: list[Stage] = []
    received: list[Stage] = []
    for a, b in pairs:
        progress(f"link between devices {a} and {b}")
        own: list[Stage] = []
        for source, target in ((a, b), (b, a)):
            if group.device == source:
                own = messages.lead(target, allowance_s)
                sent += own
            elif group.device == target:
                received += messages.follow(source)
        rows = gather(group, f"link {a} {b}", own)
        out, back = ([Stage(*row) for row in rows[device]] for device in (a, b))
        links += _both_directions(a, b, out, back)
        trips_s[frozenset((a, b))] = min(*out[0].seconds, *back[0].seconds)
    nics = []
    if len(firsts) > 1:
        rate = {(link.source, link.target): link.bytes_per_s for link in links}
        each_s = min(budget_s / len(firsts), group.timeout_s) / 16 / NIC_REPEATS
        fastest = max(rate[a, b] for a in firsts for b in firsts if a != b)
        size = min(SIZES[-1], max(SIZES[0], round(each_s * fastest / len(firsts))))
        for centre in firsts:
            progress(f"NIC of device {centre}'s host")
            others = [device for device in firsts if device != centre]
            # Bytes in proportion to each peer's link, so that a slow peer does not hide a fast NIC.
            out_bytes = _in_proportion({other: rate[centre, other] for other in others}, size)
            in_bytes = _in_proportion({other: rate[other, centre] for other in others}, size)
            acks = dict.fromkeys(others, ACK_BYTES)
            timed = [messages.fan(centre, *each, NIC_REPEATS).seconds for each in ((out_bytes, acks), (acks, in_bytes))]
            trip_s = max(trips_s[frozenset((centre, other))] for other in others)
            send, receive = (
                sum(sizes.values()) / max(typical(seconds) - trip_s, 1e-9)
                for sizes, seconds in zip(
                    (out_bytes, in_bytes), gather(group, f"NIC {centre}", timed)[centre], strict=True
                )
            )
            nics.append(Nic(send, receive, latency_s=0.0))
    rows = gather(group, "processor time of traffic", asdict(_traffic(sent, received, share)))
    return WireTimes(tuple(links), tuple(nics), tuple(Traffic(**row) for row in rows))


def _both_directions(a: int, b: int, out: Sequence[Stage], back: Sequence[Stage]) -> list[PairLink]:
    """Return both links of a pair. A round trip contains the latencies of the message and of its acknowledgement."""
    out_rate, back_rate = _bandwidth(out), _bandwidth(back)
    trips_s = [
        statistics.median(stages[0].seconds) - stages[0].size / rate - ACK_BYTES / ack_rate
        for stages, rate, ack_rate in ((out, out_rate, back_rate), (back, back_rate, out_rate))
    ]
    latency_s = max(0.0, statistics.fmean(trips_s) / 2)
    spread = spread_of([*out[0].seconds, *back[0].seconds])
    return [
        PairLink(source, target, rate, latency_s, spread_of(stages[-1].seconds), spread)
        for source, target, rate, stages in ((a, b, out_rate, out), (b, a, back_rate, back))
    ]


def _bandwidth(stages: Sequence[Stage]) -> float:
    """Return bytes/s, from the differences in bytes and time between the largest messages and the fastest small one.

    Slower small messages had to wait for a busy processor; a large message contains that wait only once.
    """
    small, large = stages[0], stages[-1]
    large_s = typical(large.seconds)
    longer_s = large_s - min(small.seconds)
    if longer_s <= 0 or large.size == small.size:
        return large.size / max(large_s, 1e-9)
    return (large.size - small.size) / longer_s


def _in_proportion(rates: Mapping[int, float], largest: int) -> dict[int, int]:
    fastest = max(rates.values())
    return {peer: max(ACK_BYTES, round(largest * each / fastest)) for peer, each in rates.items()}


def _traffic(sent: Sequence[Stage], received: Sequence[Stage], share: float) -> Traffic:
    """Return seconds per byte from the largest messages, whose cost per message is negligible."""

    def per_byte(stages: Sequence[Stage]) -> float:
        size = max((stage.size for stage in stages), default=0)
        each_s = [s / size for stage in stages if stage.size == size for s in stage.processor_s]
        return typical(each_s) / share if each_s else 0.0

    # Each message is answered, so this end handles two.
    small_s = [s / 2 for stage in (*sent, *received) if stage.size == SIZES[0] for s in stage.processor_s]
    return Traffic(per_byte(sent), per_byte(received), typical(small_s) / share if small_s else 0.0)
