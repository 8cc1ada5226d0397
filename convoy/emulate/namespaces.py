"""Emulates hosts as network namespaces with rate-limited NICs, connected by a bridge in a separate namespace.

::

    <run>-<host>          eth0 10.77.0.1/24 ──┐ veth
    <run>-<other host>    eth0 10.77.0.2/24 ──┤
    <run>-_switch                             port1, port2, ... on bridge br0

A network segment has its own bridge in the switch's namespace, br1, br2 and so on, with a veth pair to br0.

The machine's own namespace gets no NIC, no address and no route, so parallel runs may use the same addresses.
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

# The burst of a token bucket, in seconds at the link's rate. A shorter burst loses throughput to timer jitter; a longer one
# lets small messages pass without a limit.
_BURST_S = 6e-4
_FRAME_BYTES = 1514
_LARGEST_PACKET_BYTES = 65_536
_QUEUE_S = 0.05  # packets that would wait longer are dropped, as in a switch
_CONGESTION_CONTROL = "cubic"
"""Linux's default for TCP. With both directions of a NIC busy, BBR reaches only four fifths of the rate: it mistakes
acknowledgements that wait behind data for a slower link (docs/decisions)."""
_FASTEST_BYTES_PER_S = 5e9  # more than a veth pair carries, so that a bucket would only use processor time


@dataclass(frozen=True)
class Port:
    """The connection of one host to the switch.

    Attributes:
        host: the host's name in the fleet.
        namespace: the host's network namespace, which contains its NIC.
        address: the host's IPv4 address.
        plug: the switch's end of the veth pair.
        bridge: the bridge to which the plug belongs.
    """

    host: str
    namespace: str
    address: str
    plug: str
    bridge: str = _BRIDGE


@dataclass(frozen=True)
class Uplink:
    """The veth pair between a segment's bridge and the main bridge. `inner` sends leaving packets, `outer` entering ones."""

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
        """Return the port of a host."""
        return next(port for port in self.ports if port.host == host)


def wire(run: RunName, hosts: Sequence[str], segments: Sequence[NetworkSegment] = ()) -> Wiring:
    """Assign namespaces and addresses.

    Raises:
        InputError: more hosts than a /24 has addresses.
    """
    if len(hosts) > _MOST_HOSTS:
        raise InputError(
            f"{len(hosts)} hosts: an emulated fleet has addresses for {_MOST_HOSTS}; emulate a smaller fleet"
        )
    uplinks = tuple(Uplink(each, f"br{n}", f"in{n}", f"out{n}") for n, each in enumerate(segments, start=1))
    bridges = {host: uplink.bridge for uplink in uplinks for host in uplink.segment.hosts}
    ports = (
        Port(host, run.of(host), f"{_NETWORK}.{n}", f"port{n}", bridges.get(host, _BRIDGE))
        for n, host in enumerate(hosts, start=1)
    )
    return Wiring(run.of("_switch"), tuple(ports), uplinks)  # no host's name starts with an underscore


@contextmanager
def network(wiring: Wiring) -> Iterator[None]:
    """Make the namespaces, bridges and veth pairs, and remove them on exit."""
    switch = wiring.switch
    with ExitStack() as stack:
        for namespace in (switch, *(port.namespace for port in wiring.ports)):
            call("ip", "netns", "add", namespace)
            stack.callback(delete, namespace)
            file = "/proc/sys/net/ipv4/tcp_congestion_control"
            # Every kernel has reno.
            choice = f"echo {_CONGESTION_CONTROL} > {file} || echo reno > {file}"
            call("ip", "netns", "exec", namespace, "sh", "-c", choice)
        for bridge in (_BRIDGE, *(uplink.bridge for uplink in wiring.uplinks)):
            _in(switch, "link", "add", bridge, "type", "bridge")
            _up(switch, bridge)
        for uplink in wiring.uplinks:
            _in(switch, "link", "add", uplink.inner, "type", "veth", "peer", "name", uplink.outer)
            for end, bridge in ((uplink.inner, uplink.bridge), (uplink.outer, _BRIDGE)):
                _in(switch, "link", "set", end, "master", bridge)
                _up(switch, end)
        for port in wiring.ports:
            _in(switch, "link", "add", port.plug, "type", "veth", "peer", "name", NIC, "netns", port.namespace)
            _in(switch, "link", "set", port.plug, "master", port.bridge)
            _in(port.namespace, "address", "add", f"{port.address}/24", "dev", NIC)
            _in(port.namespace, "link", "set", "lo", "up")
            _up(port.namespace, NIC)
            _up(switch, port.plug)
        yield


def namespaces() -> list[str]:
    """Return the names of all named network namespaces."""
    listed = call("ip", "-json", "netns", "list")
    return [entry["name"] for entry in json.loads(listed)] if listed.strip() else []


def delete(namespace: str) -> None:
    """Remove a namespace with its NICs and veth pairs, if it exists."""
    try:
        call("ip", "netns", "delete", namespace)
    except InputError:
        if namespace in namespaces():
            raise


def _up(namespace: str, nic: str) -> None:
    # No IPv6 link-local address, so that libraries that list a NIC's addresses find only the IPv4 address.
    _in(namespace, "link", "set", nic, "addrgenmode", "none")
    _in(namespace, "link", "set", nic, "up")


def _in(namespace: str, *arguments: str) -> None:
    call("ip", "-netns", namespace, *arguments)


# --- rates ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenBucket:
    """A rate limit in the form that the kernel expects.

    Attributes:
        rate_bit_per_s: bits per second including headers; TCP payload reaches 0.95 of it.
        burst_bytes: bytes that may pass at once after a pause.
        packet_bytes: the largest packet that the sending host may pass to the NIC.
    """

    rate_bit_per_s: int
    burst_bytes: int
    packet_bytes: int


def bucket(bytes_per_s: float) -> TokenBucket | None:
    """Return the bucket for a rate; None for a rate that needs no limit.

    TCP passes packets of up to 64 KiB. If a packet is larger than the bucket, the processor must cut it into frames: four
    hosts at 1 Gbit/s then reached 0.52 of the rate in a ring instead of 0.95. So the bucket holds a whole packet. On slow
    links the packets are smaller, to keep the bucket small.
    """
    if bytes_per_s > _FASTEST_BYTES_PER_S:
        return None
    burst_bytes = bytes_per_s * _BURST_S
    packet_bytes = min(_LARGEST_PACKET_BYTES, max(2 * _FRAME_BYTES, round(burst_bytes)))
    # Each frame of a packet is counted with its own headers, about a twentieth of it.
    whole_bytes = packet_bytes + packet_bytes // 16 + _FRAME_BYTES
    return TokenBucket(max(8, round(bytes_per_s * 8)), max(whole_bytes, round(burst_bytes)), packet_bytes)


def shape(wiring: Wiring, nic_of: Callable[[str], Nic]) -> None:
    """Limit the rates of all veth pairs, by a token bucket at each end. `nic_of` returns the NIC of a host.

    Raises:
        InputError: the kernel refuses.
    """
    # Packets of all hosts must fit into the uplinks' buckets.
    rates = (rate for each in wiring.uplinks for rate in _rates(each.segment.uplink))
    packet_bytes = min((limit.packet_bytes for rate in rates if (limit := bucket(rate))), default=_LARGEST_PACKET_BYTES)
    for port in wiring.ports:
        # A bucket limits sending only. The host's end limits what the host sends, the switch's end what the host receives.
        send, receive = _rates(nic_of(port.host))
        sending = bucket(send)
        own_bytes = min(packet_bytes, sending.packet_bytes if sending else _LARGEST_PACKET_BYTES)
        if own_bytes < _LARGEST_PACKET_BYTES or sending:
            _in(port.namespace, "link", "set", NIC, "gso_max_size", str(own_bytes))
        _limit(port.namespace, NIC, send)
        _limit(wiring.switch, port.plug, receive)
    for uplink in wiring.uplinks:
        leaving, entering = _rates(uplink.segment.uplink)
        _limit(wiring.switch, uplink.inner, leaving)
        _limit(wiring.switch, uplink.outer, entering)


def _rates(nic: Nic) -> tuple[float, float]:
    return nic.send_bytes_per_s, nic.receive_bytes_per_s


def _limit(namespace: str, device: str, bytes_per_s: float) -> None:
    if limit := bucket(bytes_per_s):
        rate = [
            "rate",
            f"{limit.rate_bit_per_s}bit",
            "burst",
            f"{limit.burst_bytes}b",
            "latency",
            f"{_QUEUE_S * 1e3:g}ms",
        ]
        call("tc", "-netns", namespace, "qdisc", "add", "dev", device, "root", "tbf", *rate)
