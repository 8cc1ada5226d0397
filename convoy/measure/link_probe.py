"""Measures the network of a job: every pair of hosts alone, each NIC with all others, and the processor time of traffic.

All messages go through `convoy.comm.group.Group`, as in training, so its overhead is included. The first device of a host
represents the host, and the host's other devices are measured against it. Clocks of two machines cannot be compared, so
a latency is half of a round trip.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch

from convoy.comm.control_messages import gather
from convoy.comm.group import Group, Message
from convoy.fleet import Fleet, Link, NetworkSegment, Nic
from convoy.measure.timing import plain_torch, spread_of, typical
from convoy.simulate.table import LinkSpread

SIZES = (1 << 10, 16 << 10, 128 << 10, 1 << 20, 4 << 20)
"""Message sizes in bytes. A pair uses the first, and the largest that its time allows."""

ACK_BYTES = 8
PROBE_S = 1.0  # longer messages are not tried
PAUSE_S = 0.1  # longer than the pauses of a quota
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
class NicRates:
    """The rates of one host to and from all other hosts at once."""

    send_bytes_per_s: float
    receive_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """A device's seconds per byte sent, per byte received and per message, at its share of a processor."""

    send_s_per_byte: float
    receive_s_per_byte: float
    message_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WireTimes:
    """The measured network: pairs in both directions, NICs if there are several hosts, and each device's traffic cost."""

    pairs: tuple[PairLink, ...]
    nics: tuple[NicRates, ...]
    traffic: tuple[Traffic, ...]

    def into(self, fleet: Fleet) -> Fleet:
        """Return the fleet with measured NICs, links and uplinks."""
        host = [device.host for device in fleet.devices]
        links = tuple(
            Link(*ends, statistics.median(p.bytes_per_s for p in pairs), statistics.median(p.latency_s for p in pairs))
            for ends, pairs in self._by_hosts(fleet).items()
        )
        segments = tuple(_measured_segment(replace(fleet, links=()), segment, links) for segment in fleet.segments)
        if not self.nics:
            return replace(fleet, links=links, segments=segments)
        hosts = []
        for entry, rates in zip(fleet.hosts, self.nics, strict=True):
            out = [pair for pair in self.pairs if host[pair.source] == entry.name != host[pair.target]]
            into = [pair for pair in self.pairs if host[pair.target] == entry.name != host[pair.source]]
            # A NIC is at least as fast as each of its links.
            nic = Nic(
                send_bytes_per_s=max(rates.send_bytes_per_s, *(pair.bytes_per_s for pair in out)),
                receive_bytes_per_s=max(rates.receive_bytes_per_s, *(pair.bytes_per_s for pair in into)),
                latency_s=statistics.median(pair.latency_s for pair in out),
            )
            hosts.append(replace(entry, card=nic))
        return replace(fleet, hosts=tuple(hosts), network=None, links=links, segments=segments)

    def spreads(self, fleet: Fleet) -> tuple[LinkSpread, ...]:
        """Return the spread of repetitions of each link of `into`."""
        return tuple(
            LinkSpread(*ends, max(p.latency_spread for p in pairs), max(p.bandwidth_spread for p in pairs))
            for ends, pairs in self._by_hosts(fleet).items()
        )

    def _by_hosts(self, fleet: Fleet) -> dict[tuple[str, str], list[PairLink]]:
        """Group the pairs of devices by their hosts; both directions within a host are one link."""
        host = [device.host for device in fleet.devices]
        result: dict[tuple[str, str], list[PairLink]] = {}
        for pair in self.pairs:
            result.setdefault((host[pair.source], host[pair.target]), []).append(pair)
        return result


def _measured_segment(fleet: Fleet, segment: NetworkSegment, links: Sequence[Link]) -> NetworkSegment:
    """Return the segment with an uplink as fast as the fastest link that only the described uplink limits."""

    def fastest(rate: float, *, leaves: bool) -> float:
        found = [rate]
        for link in links:
            inside, outside = (link.source, link.target) if leaves else (link.target, link.source)
            crosses = fleet.segment_of(inside) == segment != fleet.segment_of(outside)
            if crosses and fleet.path(link.source, link.target).bandwidth_bytes_per_s == rate:
                found.append(link.bandwidth_bytes_per_s)
        return max(found[1:], default=rate)

    send = fastest(segment.uplink.send_bytes_per_s, leaves=True)
    receive = fastest(segment.uplink.receive_bytes_per_s, leaves=False)
    return replace(segment, uplink=replace(segment.uplink, send_bytes_per_s=send, receive_bytes_per_s=receive))


# --- timed messages ------------------------------------------------------------------------------------------------------


class Stage(NamedTuple):
    """Messages of one size, timed at one end: seconds of each with its acknowledgement, and processor seconds."""

    size: int
    seconds: list[float]
    processor_s: list[float]


class _Messages:
    """A sender, receiver and timer of this device's messages."""

    def __init__(self, group: Group, now: Callable[[], float], processor: Callable[[], float]) -> None:
        self.group, self.now, self.processor = group, now, processor

    def _messages(self, sizes: Mapping[int, int]) -> list[Message]:
        device = self.group.torch_device
        return [Message(peer, torch.zeros(size, dtype=torch.uint8, device=device)) for peer, size in sizes.items()]

    def fan(self, centre: int, out: Mapping[int, int], into: Mapping[int, int], repeats: int) -> Stage:
        """Send from one device to others at once, then back from all of them, several times.

        Args:
            out, into: bytes to and from each of the others. The same on all of them.

        Returns:
            all repetitions but the first, which finds cold buffers; nothing on a device without messages.
        """
        me, found = self.group.device, Stage(max(out.values()), [], [])
        if me == centre:
            rounds = [(self._messages(out), []), ([], self._messages(into))]
        elif me in out:
            rounds = [([], self._messages({centre: out[me]})), (self._messages({centre: into[me]}), [])]
        else:
            return found
        for number in range(repeats + 1):
            start_s, start_processor_s = self.now(), self.processor()
            for sends, receives in rounds:
                self.group.exchange(sends, receives)
            if number:
                found.seconds.append(self.now() - start_s)
                found.processor_s.append(self.processor() - start_processor_s)
        return found

    def _stage(self, peer: int, size: int, count: int) -> Stage:
        order = torch.tensor([size, count], dtype=torch.int64, device=self.group.torch_device)
        self.group.exchange([Message(peer, order)], [])
        return self.fan(self.group.device, {peer: size}, {peer: ACK_BYTES}, count) if size else Stage(0, [], [])

    def follow(self, peer: int) -> list[Stage]:
        """Answer the messages of the peer's `lead`."""
        stages: list[Stage] = []
        while True:
            order = torch.zeros(2, dtype=torch.int64, device=self.group.torch_device)
            self.group.exchange([], [Message(peer, order)])
            size, count = order.tolist()
            if not size:
                return stages
            me = self.group.device
            stages.append(Stage(size, [], self.fan(peer, {me: size}, {me: ACK_BYTES}, count).processor_s))

    def lead(self, peer: int, allowance_s: float) -> list[Stage]:
        """Time small messages, and messages of the largest size that the time allows. Only this end measures time."""

        def count(each_s: float) -> int:
            return min(REPEATS[1], max(REPEATS[0], round(allowance_s / 4 / max(each_s, 1e-9))))

        # The first messages find cold connections; they only determine how many more fit.
        first_s = statistics.median(self._stage(peer, SIZES[0], REPEATS[0]).seconds)
        small = self._stage(peer, SIZES[0], count(first_s))
        fastest_s, size, longer_s = min(small.seconds), SIZES[0], 0.0
        for larger in SIZES[1:]:
            if longer_s * larger / size > PROBE_S:
                break
            tried_s = self._stage(peer, larger, 1).seconds[0] - fastest_s
            if tried_s > max(allowance_s / 4, PAUSE_S):  # under a small quota any message may contain a pause
                break
            size, longer_s = larger, max(0.0, tried_s)
        large = self._stage(peer, size, count(fastest_s + longer_s))
        self._stage(peer, 0, 0)
        return [small, large]


# --- rates and latencies ---------------------------------------------------------------------------------------------------


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
    now: Callable[[], float] = time.perf_counter,
    processor: Callable[[], float] = time.process_time,
    progress: Callable[[str], object] = lambda _: None,
) -> WireTimes:
    """Measure the network. All devices call it and get the same value.

    Args:
        host: index of each device's host.
        share: this device's share of a processor; see `convoy.measure.overhead_probe`.
        budget_s: approximate seconds, half for pairs and half for NICs.
        now, processor: read seconds of the wall clock and of this process's processor.

    Raises:
        DeviceLostError: a device did not answer within the group's time limit.
    """
    pairs, firsts = pairs_to_measure(host)
    messages = _Messages(group, now, processor)
    allowance_s = min(PAIR_S, budget_s / 2 / max(1, len(pairs)), group.timeout_s / 8)
    links: list[PairLink] = []
    trips: dict[frozenset[int], float] = {}
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
        out_stages, back_stages = ([Stage(*row) for row in rows[device]] for device in (a, b))
        links += _both_directions(a, b, out_stages, back_stages)
        trips[frozenset((a, b))] = min(*out_stages[0].seconds, *back_stages[0].seconds)
    nics = []
    if len(firsts) > 1:
        rate = {
            (link.source, link.target): link.bytes_per_s for link in links if {link.source, link.target} <= set(firsts)
        }
        each_s = min(budget_s / len(firsts), group.timeout_s) / 16 / NIC_REPEATS
        size = min(SIZES[-1], max(SIZES[0], round(each_s * max(rate.values()) / len(firsts))))
        for centre in firsts:
            progress(f"NIC of device {centre}'s host")
            others = [device for device in firsts if device != centre]
            # Bytes in proportion to each peer's link, so that a slow peer does not hide a fast NIC.
            out = _in_proportion({other: rate[centre, other] for other in others}, size)
            into = _in_proportion({other: rate[other, centre] for other in others}, size)
            acks = dict.fromkeys(others, ACK_BYTES)
            timed = [messages.fan(centre, *sizes, NIC_REPEATS).seconds for sizes in ((out, acks), (acks, into))]
            out_s, into_s = gather(group, f"NIC {centre}", timed)[centre]
            trip_s = max(trips[frozenset((centre, other))] for other in others)
            send, receive = (
                sum(sizes.values()) / max(typical(each) - trip_s, 1e-9)
                for sizes, each in ((out, out_s), (into, into_s))
            )
            nics.append(NicRates(send, receive))
    rows = gather(group, "processor time of traffic", asdict(_traffic(sent, received, share)))
    return WireTimes(tuple(links), tuple(nics), tuple(Traffic(**row) for row in rows))


def _both_directions(a: int, b: int, out_stages: Sequence[Stage], back_stages: Sequence[Stage]) -> list[PairLink]:
    """Return both links of a pair. A round trip contains the latencies of the message and of its acknowledgement."""
    out_rate, back_rate = _bandwidth(out_stages), _bandwidth(back_stages)
    trips = [
        statistics.median(stages[0].seconds) - stages[0].size / out - ACK_BYTES / into
        for stages, out, into in ((out_stages, out_rate, back_rate), (back_stages, back_rate, out_rate))
    ]
    latency_s = max(0.0, statistics.fmean(trips) / 2)
    spread = spread_of([*out_stages[0].seconds, *back_stages[0].seconds])
    return [
        PairLink(source, target, rate, latency_s, spread_of(stages[-1].seconds), spread)
        for source, target, rate, stages in ((a, b, out_rate, out_stages), (b, a, back_rate, back_stages))
    ]


def _bandwidth(stages: Sequence[Stage]) -> float:
    """Return bytes/s from the extra time of the largest messages over the fastest small one.

    The slower small messages waited for a busy processor; large messages contain that wait only once.
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
    rows = []
    for stages in (sent, received):
        size = max((stage.size for stage in stages), default=0)
        rows.append([s / size for stage in stages if stage.size == size for s in stage.processor_s])
    out, into = (typical(row) / share if row else 0.0 for row in rows)
    # Each message is answered, so this end handles two.
    small = [s / 2 for stage in (*sent, *received) if stage.size == SIZES[0] for s in stage.processor_s]
    message_s = typical(small) / share if small else 0.0
    return Traffic(out, into, message_s)
