"""Emulates hosts as network namespaces, joined by a bridge in a namespace of its own, their NICs at their rates.

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

# The burst of a token bucket in seconds of the link. A shorter one costs throughput by the timer's jitter; with a longer one
# small messages are not shaped.
_BURST_S = 6e-4
_FRAME_BYTES = 1514
_LARGEST_PACKET_BYTES = 65_536
_QUEUE_S = 0.05  # what would wait longer is dropped, as by a switch
_CONGESTION_CONTROL = "cubic"
"""Linux's default for TCP. BBR takes acknowledgements that wait behind data of the other direction for a slower link: with both
directions of a NIC busy it reaches four fifths of the rate (docs/decisions)."""
_FASTEST_BYTES_PER_S = 5e9  # more than a veth pair carries: a bucket would only cost processor time


@dataclass(frozen=True)
class Port:
    """The connection of one host to the switch.

    Attributes:
        host: its name in the fleet.
        namespace: its network namespace, which holds the NIC.
        address: its IPv4 address.
        plug: the switch's end of the veth pair.
        bridge: the bridge that the plug belongs to.
    """

    host: str
    namespace: str
    address: str
    plug: str
    bridge: str = _BRIDGE


@dataclass(frozen=True)
class Uplink:
    """The veth pair of a segment's bridge and the common one: `inner` sends what leaves the segment, `outer` what enters."""

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
    """Return the names of all network namespaces that have one."""
    listed = call("ip", "-json", "netns", "list")
    return [entry["name"] for entry in json.loads(listed)] if listed.strip() else []


def delete(namespace: str) -> None:
    """Remove a namespace with its NICs and veth pairs, if it is there."""
    try:
        call("ip", "netns", "delete", namespace)
    except InputError:
        if namespace in namespaces():
            raise


def _up(namespace: str, nic: str) -> None:
    # Without a link-local address: libraries that look at a NIC's addresses find one, and it is IPv4.
    _in(namespace, "link", "set", nic, "addrgenmode", "none")
    _in(namespace, "link", "set", nic, "up")


def _in(namespace: str, *arguments: str) -> None:
    call("ip", "-netns", namespace, *arguments)


# --- rates ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenBucket:
    """A rate as the kernel takes it.

    Attributes:
        rate_bit_per_s: bits per second, headers included: TCP sees 0.95 of it.
        burst_bytes: may pass at once after a pause.
        packet_bytes: the largest packet that the sending host may pass to the NIC.
    """

    rate_bit_per_s: int
    burst_bytes: int
    packet_bytes: int


def bucket(bytes_per_s: float) -> TokenBucket | None:
    """Return the bucket for a rate; None for a rate that needs no shaping.

    TCP passes packets of up to 64 KiB, and the kernel cuts a packet that is larger than the bucket into frames, in the
    processor: four hosts at 1 Gbit/s then reached 0.52 of the rate in a ring instead of 0.95. So the bucket holds a whole
    packet. On slow links the packets are made smaller, instead of the bucket larger.
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
    # What crosses an uplink must fit into its bucket, whoever sends it.
    rates = (rate for each in wiring.uplinks for rate in _rates(each.segment.uplink))
    packet_bytes = min((limit.packet_bytes for rate in rates if (limit := bucket(rate))), default=_LARGEST_PACKET_BYTES)
    for port in wiring.ports:
        # A bucket limits what leaves a device: the host's end sends, the switch's end is what the host receives.
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
