"""Hosts as network namespaces, joined by a bridge that has a namespace of its own, their cards at their rates.

::

    <run>-<host>          eth0 10.77.0.1/24 ──┐ veth
    <run>-<other host>    eth0 10.77.0.2/24 ──┤
    <run>-_switch                             port1, port2, ... on bridge br0

A segment of the fleet has a bridge of its own in the switch's namespace, br1, br2 and so on, and a cable from there to br0.

The machine's own namespace gets no card, no address and no route, so that runs side by side may use the same addresses.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from convoy.emulate.machine import RunName, call
from convoy.errors import InputError
from convoy.fleet import NetworkSegment, Nic

NIC = "eth0"
_BRIDGE = "br0"
_NETWORK = "10.77.0"
_MOST_HOSTS = 254

# What may pass at once, in seconds of the link. Shorter, and the timer's jitter costs throughput; longer, and small
# messages pass unshaped.
_BURST_S = 6e-4
_FRAME_BYTES = 1514
_LARGEST_PACKET_BYTES = 65_536
_QUEUE_S = 0.05  # what would wait longer is dropped, as a switch does
_CONGESTION_CONTROL = "cubic"
"""Of TCP: what Linux chooses where nobody has. BBR takes the acknowledgements that wait behind the data of the other direction
for a slower way: with both directions of a card busy it reaches four fifths (docs/decisions/073)."""
_FASTEST_BYTES_PER_S = 5e9  # more than a veth pair carries: a bucket would only cost processor time


@dataclass(frozen=True)
class Port:
    """One host on the switch.

    Attributes:
        host: its name in the fleet.
        namespace: its network namespace, which holds the card `NIC`.
        address: its IPv4 address.
        plug: the switch's end of the cable, in the switch's namespace.
        bridge: that the plug is on.
    """

    host: str
    namespace: str
    address: str
    plug: str
    bridge: str = _BRIDGE


@dataclass(frozen=True)
class Uplink:
    """The cable from a segment's bridge to the one where all meet; both in the switch's namespace.

    Attributes:
        inner, outer: its ends: what leaves the segment is sent by the inner one, what enters it by the outer one.
    """

    segment: NetworkSegment
    bridge: str
    inner: str
    outer: str


@dataclass(frozen=True)
class Wiring:
    """The switch's namespace, its ports in the order of the hosts, and the segments' uplinks."""

    switch: str
    ports: tuple[Port, ...]
    uplinks: tuple[Uplink, ...] = ()

    def port(self, host: str) -> Port:
        return next(port for port in self.ports if port.host == host)


def wire(run: RunName, hosts: Sequence[str], segments: Sequence[NetworkSegment] = ()) -> Wiring:
    """Who gets which namespace and address. InputError for more hosts than a /24 has addresses."""
    if len(hosts) > _MOST_HOSTS:
        raise InputError(f"{len(hosts)} hosts: a rehearsal has addresses for {_MOST_HOSTS}; rehearse a smaller fleet")
    uplinks = tuple(Uplink(each, f"br{n}", f"in{n}", f"out{n}") for n, each in enumerate(segments, start=1))
    bridges = {host: uplink.bridge for uplink in uplinks for host in uplink.segment.hosts}
    ports = (
        Port(host, run.of(host), f"{_NETWORK}.{n}", f"port{n}", bridges.get(host, _BRIDGE))
        for n, host in enumerate(hosts, start=1)
    )
    return Wiring(run.of("_switch"), tuple(ports), uplinks)  # no host's name starts with an underscore


@contextmanager
def network(wiring: Wiring) -> Iterator[None]:
    """The namespaces, the bridge and the cables, up and running, for as long as the context lasts."""
    with ExitStack() as stack:
        for namespace in (wiring.switch, *(port.namespace for port in wiring.ports)):
            call("ip", "netns", "add", namespace)
            stack.callback(delete, namespace)
            _control_congestion(namespace)
        for bridge in (_BRIDGE, *(uplink.bridge for uplink in wiring.uplinks)):
            _in(wiring.switch, "link", "add", bridge, "type", "bridge")
            _up(wiring.switch, bridge)
        for uplink in wiring.uplinks:
            _in(wiring.switch, "link", "add", uplink.inner, "type", "veth", "peer", "name", uplink.outer)
            for end, bridge in ((uplink.inner, uplink.bridge), (uplink.outer, _BRIDGE)):
                _in(wiring.switch, "link", "set", end, "master", bridge)
                _up(wiring.switch, end)
        for port in wiring.ports:
            _plug_in(wiring.switch, port)
        yield


def namespaces() -> list[str]:
    """The names of all network namespaces that have one."""
    listed = call("ip", "-json", "netns", "list")
    return [entry["name"] for entry in json.loads(listed)] if listed.strip() else []


def delete(namespace: str) -> None:
    """Remove a namespace; its cards and cables go with it. Nothing happens if it is gone already."""
    try:
        call("ip", "netns", "delete", namespace)
    except InputError:
        if namespace in namespaces():
            raise


def _control_congestion(namespace: str) -> None:
    file = "/proc/sys/net/ipv4/tcp_congestion_control"
    # Every kernel has reno.
    call("ip", "netns", "exec", namespace, "sh", "-c", f"echo {_CONGESTION_CONTROL} > {file} || echo reno > {file}")


def _plug_in(switch: str, port: Port) -> None:
    _in(switch, "link", "add", port.plug, "type", "veth", "peer", "name", NIC, "netns", port.namespace)
    _in(switch, "link", "set", port.plug, "master", port.bridge)
    _in(port.namespace, "address", "add", f"{port.address}/24", "dev", NIC)
    _in(port.namespace, "link", "set", "lo", "up")
    _up(port.namespace, NIC)
    _up(switch, port.plug)


def _up(namespace: str, card: str) -> None:
    # Without a link-local address: libraries that look at a card's addresses find one, and it is IPv4.
    _in(namespace, "link", "set", card, "addrgenmode", "none")
    _in(namespace, "link", "set", card, "up")


def _in(namespace: str, *arguments: str) -> None:
    call("ip", "-netns", namespace, *arguments)


# --- rates ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bucket:
    """A rate as the kernel takes it.

    Attributes:
        rate_bit_per_s: bits per second, headers included: TCP sees 0.95 of it.
        burst_bytes: what may pass at once after a pause.
        packet_bytes: the largest packet that the sending host may hand down in one piece.
    """

    rate_bit_per_s: int
    burst_bytes: int
    packet_bytes: int


def bucket(bytes_per_s: float) -> Bucket | None:
    """The bucket for a rate; None for a rate that needs no shaping.

    TCP hands down packets of up to 64 KiB, and a bucket that is smaller than a packet cuts it up frame by frame in the
    processor. Four hosts at 1 Gbit/s then reached 0.52 of the rate in a ring, against 0.95. So the bucket holds a
    whole packet, and on slow links the packets are made smaller instead of the bucket larger.
    """
    if bytes_per_s > _FASTEST_BYTES_PER_S:
        return None
    burst_bytes = bytes_per_s * _BURST_S
    packet_bytes = min(_LARGEST_PACKET_BYTES, max(2 * _FRAME_BYTES, round(burst_bytes)))
    # Each frame of a packet is counted with its own headers, about a twentieth of it.
    whole_bytes = packet_bytes + packet_bytes // 16 + _FRAME_BYTES
    return Bucket(max(8, round(bytes_per_s * 8)), max(whole_bytes, round(burst_bytes)), packet_bytes)


def shape(wiring: Wiring, card_of: Callable[[str], Nic]) -> None:
    """Give all cables their rates, a token bucket at either end. InputError if the kernel refuses.

    Args:
        card_of: the card of a host, by its name.
    """
    rates = [rate for uplink in wiring.uplinks for rate in _rates(uplink.segment.uplink)]
    # What crosses an uplink must fit into its bucket, whoever sends it.
    packet_bytes = min((limit.packet_bytes for rate in rates if (limit := bucket(rate))), default=_LARGEST_PACKET_BYTES)
    for port in wiring.ports:
        # A bucket holds back what leaves a device: the host's end sends, the switch's end is what the host receives.
        sending, receiving = (bucket(rate) for rate in _rates(card_of(port.host)))
        own_bytes = min(packet_bytes, sending.packet_bytes if sending else _LARGEST_PACKET_BYTES)
        if own_bytes < _LARGEST_PACKET_BYTES or sending:
            call("ip", "-netns", port.namespace, "link", "set", NIC, "gso_max_size", str(own_bytes))
        _hold_back(port.namespace, NIC, sending)
        _hold_back(wiring.switch, port.plug, receiving)
    for uplink in wiring.uplinks:
        leaving, entering = (bucket(rate) for rate in _rates(uplink.segment.uplink))
        _hold_back(wiring.switch, uplink.inner, leaving)
        _hold_back(wiring.switch, uplink.outer, entering)


def _rates(card: Nic) -> tuple[float, float]:
    return card.send_bytes_per_s, card.receive_bytes_per_s


def _hold_back(namespace: str, device: str, limit: Bucket | None) -> None:
    if limit is None:
        return
    words = ["rate", f"{limit.rate_bit_per_s}bit", "burst", f"{limit.burst_bytes}b", "latency", f"{_QUEUE_S * 1e3:g}ms"]
    call("tc", "-netns", namespace, "qdisc", "add", "dev", device, "root", "tbf", *words)
