"""The wire: what each message shares with the others, and how fast it goes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from convoy.fleet import WITHIN_HOST, Fleet, Nic
from convoy.simulate.noise import QuotaNoise

SHARE = 0.5
"""Of a processor that computes, messages get half if they need so much: two threads that both could run take turns."""


@dataclass(frozen=True, slots=True)
class Network:
    """Rates and latencies between the devices of a fleet.

    Attributes:
        host: index of each device's host.
        send_bytes_per_s, receive_bytes_per_s: of each host's card, per direction, shared by all its messages.
        within_bytes_per_s: of the memory of each host, for messages between its own devices.
        latency_s: `latency_s[i][j]` from device i to j: from the moment the sender is ready to the first byte.
        pair_bytes_per_s: `pair_bytes_per_s[i][j]`, what one message alone reaches.
        processor_s_per_byte: of each device's processor, for each byte it sends or receives. Zero for devices whose
            traffic costs their computing nothing.
        segment: index of each host's segment of the network; -1 for a host that is in none. Empty where there is none.
        uplink_send_bytes_per_s, uplink_receive_bytes_per_s: of each segment, shared by all messages that leave or enter it.
        jitter_s: by how much each device, when it has been computing, makes an exchange later than its mean speed says;
            none where nothing was measured. See `convoy.measure.sync_probe`.
        noise: the noise model of each device, None for one without a CPU quota. Empty where no device has one.
        largest_latency_s: of all pairs of different devices.
    """

    host: tuple[int, ...]
    send_bytes_per_s: tuple[float, ...]
    receive_bytes_per_s: tuple[float, ...]
    within_bytes_per_s: tuple[float, ...]
    latency_s: tuple[tuple[float, ...], ...]
    pair_bytes_per_s: tuple[tuple[float, ...], ...]
    processor_s_per_byte: tuple[float, ...]
    jitter_s: tuple[float, ...] = ()
    noise: tuple[QuotaNoise | None, ...] = ()
    segment: tuple[int, ...] = ()
    uplink_send_bytes_per_s: tuple[float, ...] = ()
    uplink_receive_bytes_per_s: tuple[float, ...] = ()
    largest_latency_s: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Once, not per question: of a thousand devices there are a million pairs.
        rows = (max((*row[:i], *row[i + 1 :]), default=0.0) for i, row in enumerate(self.latency_s))
        object.__setattr__(self, "largest_latency_s", max(rows, default=0.0))

    @property
    def devices(self) -> int:
        return len(self.host)

    def segments_crossed(self, sender: int, receiver: int) -> tuple[int | None, int | None]:
        """The segment that messages from one host to another leave, and the one they enter."""
        if not self.segment or self.segment[sender] == self.segment[receiver]:
            return None, None
        left, entered = self.segment[sender], self.segment[receiver]
        return (None if left < 0 else left), (None if entered < 0 else entered)


def network_of(
    fleet: Fleet, processor_s_per_byte: Sequence[float] | None = None, jitter_s: Sequence[float] = ()
) -> Network:
    """The network of a fleet file; links between hosts as measured there, else from the cards."""
    names = [host.name for host in fleet.hosts]
    place = {name: index for index, name in enumerate(names)}
    host = tuple(place[device.host] for device in fleet.devices)
    many = len(names) > 1
    cards = [fleet.nic(n) if many else WITHIN_HOST for n in names]
    latency_s, bandwidth = _between_hosts(fleet, place, cards)
    return Network(
        host=host,
        send_bytes_per_s=tuple(card.send_bytes_per_s if many else float("inf") for card in cards),
        receive_bytes_per_s=tuple(card.receive_bytes_per_s if many else float("inf") for card in cards),
        within_bytes_per_s=tuple(bandwidth[i][i] for i in range(len(names))),
        latency_s=tuple(tuple([latency_s[a][b] for b in host]) for a in host),
        pair_bytes_per_s=tuple(tuple([bandwidth[a][b] for b in host]) for a in host),
        processor_s_per_byte=tuple(processor_s_per_byte or (0.0,) * len(host)),
        jitter_s=tuple(jitter_s),
        segment=tuple(_segment_of_hosts(fleet, names)) if fleet.segments else (),
        uplink_send_bytes_per_s=tuple(segment.uplink.send_bytes_per_s for segment in fleet.segments),
        uplink_receive_bytes_per_s=tuple(segment.uplink.receive_bytes_per_s for segment in fleet.segments),
    )


def _segment_of_hosts(fleet: Fleet, names: Sequence[str]) -> Iterator[int]:
    place = {host: index for index, segment in enumerate(fleet.segments) for host in segment.hosts}
    return (place.get(name, -1) for name in names)


def _between_hosts(
    fleet: Fleet, place: Mapping[str, int], cards: Sequence[Nic]
) -> tuple[list[list[float]], list[list[float]]]:
    """Latency and bandwidth from host to host, as `Fleet.path` has them: it looks one pair up, here are all of them."""
    latency_s = [[max(a.latency_s, b.latency_s) for b in cards] for a in cards]
    bandwidth = [[min(a.send_bytes_per_s, b.receive_bytes_per_s) for b in cards] for a in cards]
    for index in range(len(cards)):
        latency_s[index][index] = WITHIN_HOST.latency_s
        bandwidth[index][index] = min(WITHIN_HOST.send_bytes_per_s, WITHIN_HOST.receive_bytes_per_s)
    for segment in fleet.segments:
        inside = {place[name] for name in segment.hosts}
        for a in inside:
            for b in set(range(len(cards))) - inside:
                for source, target, rate in (
                    (a, b, segment.uplink.send_bytes_per_s),
                    (b, a, segment.uplink.receive_bytes_per_s),
                ):
                    latency_s[source][target] += segment.uplink.latency_s
                    bandwidth[source][target] = min(bandwidth[source][target], rate)
    for link in fleet.links:
        source, target = place[link.source], place[link.target]
        latency_s[source][target] = link.latency_s
        bandwidth[source][target] = link.bandwidth_bytes_per_s
    return latency_s, bandwidth


def rates(
    network: Network, flows: Sequence[tuple[int, int]], processor_room: Sequence[float] | None = None
) -> npt.NDArray[np.float64]:
    """Bytes/s of each (sender, receiver) message while all of them are under way: max-min fair.

    All rates grow together; where a card, a memory, a processor or the pair's own limit is full, the messages that use
    it keep the rate they have, and the others grow on (progressive filling).

    Args:
        processor_room: the part of each device's processor that messages may use; None: all of it.
    """
    use, room = _resources(network, flows, processor_room)
    rate = np.zeros(len(flows))
    growing = np.ones(len(flows), dtype=bool)
    while growing.any():
        load = use[:, growing].sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.where(load > 0, room / load, np.inf)
        step = float(steps.min())
        if not np.isfinite(step):
            rate[growing] = np.inf
            break
        rate[growing] += step
        room = room - load * step
        full = (steps <= step * (1 + 1e-12)) & (load > 0)
        growing &= ~(use[full] > 0).any(axis=0)
    return rate


def _resources(
    network: Network, flows: Sequence[tuple[int, int]], processor_room: Sequence[float] | None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """use[resource, flow], and the room of each resource."""
    rows: dict[tuple[str, int], npt.NDArray[np.float64]] = {}
    room: dict[tuple[str, int], float] = {}

    def add(kind: str, index: int, flow: int, capacity: float, weight: float = 1.0) -> None:
        if np.isfinite(capacity) and weight > 0:
            rows.setdefault((kind, index), np.zeros(len(flows)))[flow] += weight
            room[kind, index] = capacity

    for f, (sender, receiver) in enumerate(flows):
        a, b = network.host[sender], network.host[receiver]
        if a == b:
            card = network.within_bytes_per_s[a]
            add("within", a, f, card)
        else:
            card = min(network.send_bytes_per_s[a], network.receive_bytes_per_s[b])
            add("send", a, f, network.send_bytes_per_s[a])
            add("receive", b, f, network.receive_bytes_per_s[b])
            left, entered = network.segments_crossed(a, b)
            if left is not None:
                card = min(card, network.uplink_send_bytes_per_s[left])
                add("leaves", left, f, network.uplink_send_bytes_per_s[left])
            if entered is not None:
                card = min(card, network.uplink_receive_bytes_per_s[entered])
                add("enters", entered, f, network.uplink_receive_bytes_per_s[entered])
        pair = network.pair_bytes_per_s[sender][receiver]
        if pair < card:  # else the card is full first
            add("pair", f, f, pair)
        for device in (sender, receiver):
            free = 1.0 if processor_room is None else processor_room[device]
            add("processor", device, f, free, network.processor_s_per_byte[device])
    keys = list(rows)
    if not keys:
        return np.zeros((1, len(flows))), np.array([np.inf])
    return np.stack([rows[k] for k in keys]), np.array([room[k] for k in keys])
