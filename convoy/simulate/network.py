"""Describes a fleet's network, and computes the rates of simultaneous messages that share it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from convoy.fleet import WITHIN_HOST, Fleet, Nic

SHARE = 0.5
"""The most of a processor that messages get while it also computes: two runnable threads take turns."""


@dataclass(frozen=True)  # without slots, because a property is cached
class Network:
    """Rates and latencies between the devices of a fleet.

    Attributes:
        host: index of each device's host.
        send_bytes_per_s, receive_bytes_per_s: rates of each host's NIC, shared by all its messages in that direction.
        within_bytes_per_s: rate of each host's memory, for messages between its own devices.
        latency_s: `latency_s[i][j]` is the time until the first byte from device i reaches device j.
        pair_bytes_per_s: `pair_bytes_per_s[i][j]` is the rate of a message from i to j without other messages.
        processor_s_per_byte: processor seconds of each device per byte sent or received.
        jitter_s: by device, its mean delay at an exchange after computing; empty if not measured. See
            `convoy.measure.overhead_probe`.
        segment: index of each host's network segment, -1 without one; empty if the fleet has no segments.
        uplink_send_bytes_per_s, uplink_receive_bytes_per_s: rates of each segment's uplink, shared by all its messages.
    """

    host: tuple[int, ...]
    send_bytes_per_s: tuple[float, ...]
    receive_bytes_per_s: tuple[float, ...]
    within_bytes_per_s: tuple[float, ...]
    latency_s: tuple[tuple[float, ...], ...]
    pair_bytes_per_s: tuple[tuple[float, ...], ...]
    processor_s_per_byte: tuple[float, ...]
    jitter_s: tuple[float, ...] = ()
    segment: tuple[int, ...] = ()
    uplink_send_bytes_per_s: tuple[float, ...] = ()
    uplink_receive_bytes_per_s: tuple[float, ...] = ()

    @cached_property
    def largest_latency_s(self) -> float:
        """The largest latency between two devices, computed once because a thousand devices have a million pairs."""
        return max((max((*row[:i], *row[i + 1 :]), default=0.0) for i, row in enumerate(self.latency_s)), default=0.0)


def network_of(
    fleet: Fleet, processor_s_per_byte: Sequence[float] | None = None, jitter_s: Sequence[float] = ()
) -> Network:
    """Return the network of a fleet. Use measured links where the fleet has them, else the NICs."""
    names = [host.name for host in fleet.hosts]
    place = {name: index for index, name in enumerate(names)}
    host = tuple(place[device.host] for device in fleet.devices)
    many = len(names) > 1
    nics = [fleet.nic(n) if many else WITHIN_HOST for n in names]
    latency_s, bandwidth = _between_hosts(fleet, place, nics)
    segment = [-1] * len(names) if fleet.segments else []
    for index, each in enumerate(fleet.segments):
        for name in each.hosts:
            segment[place[name]] = index
    return Network(
        host=host,
        send_bytes_per_s=tuple(nic.send_bytes_per_s if many else float("inf") for nic in nics),
        receive_bytes_per_s=tuple(nic.receive_bytes_per_s if many else float("inf") for nic in nics),
        within_bytes_per_s=tuple(bandwidth[i][i] for i in range(len(names))),
        latency_s=tuple(tuple([latency_s[a][b] for b in host]) for a in host),
        pair_bytes_per_s=tuple(tuple([bandwidth[a][b] for b in host]) for a in host),
        processor_s_per_byte=tuple(processor_s_per_byte or (0.0,) * len(host)),
        jitter_s=tuple(jitter_s),
        segment=tuple(segment),
        uplink_send_bytes_per_s=tuple(each.uplink.send_bytes_per_s for each in fleet.segments),
        uplink_receive_bytes_per_s=tuple(each.uplink.receive_bytes_per_s for each in fleet.segments),
    )


def _between_hosts(
    fleet: Fleet, place: Mapping[str, int], nics: Sequence[Nic]
) -> tuple[list[list[float]], list[list[float]]]:
    """Return latency and bandwidth between all pairs of hosts, equal to `Fleet.path` but faster."""
    latency_s = [[max(a.latency_s, b.latency_s) for b in nics] for a in nics]
    bandwidth = [[min(a.send_bytes_per_s, b.receive_bytes_per_s) for b in nics] for a in nics]
    for index in range(len(nics)):
        latency_s[index][index] = WITHIN_HOST.latency_s
        bandwidth[index][index] = min(WITHIN_HOST.send_bytes_per_s, WITHIN_HOST.receive_bytes_per_s)
    for segment in fleet.segments:
        inside = {place[name] for name in segment.hosts}
        for a in inside:
            for b in set(range(len(nics))) - inside:
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
    """Return the max-min fair rates (bytes/s) of simultaneous messages, given as (sender, receiver).

    All rates grow together. When a NIC, a memory, a processor or a pair's limit is full, the messages that use it keep their
    rate, and the others grow further (progressive filling).

    Args:
        processor_room: the fraction of each device's processor that messages may use; None: all of it.
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
    """Return the matrix use[resource, flow], and the capacity of each resource."""
    rows: dict[tuple[str, int], npt.NDArray[np.float64]] = {}
    room: dict[tuple[str, int], float] = {}

    def add(kind: str, index: int, flow: int, capacity: float, weight: float = 1.0) -> None:
        if np.isfinite(capacity) and weight > 0:
            rows.setdefault((kind, index), np.zeros(len(flows)))[flow] += weight
            room[kind, index] = capacity

    for f, (sender, receiver) in enumerate(flows):
        a, b = network.host[sender], network.host[receiver]
        if a == b:
            shared = [("within", a, network.within_bytes_per_s[a])]
        else:
            shared = [("send", a, network.send_bytes_per_s[a]), ("receive", b, network.receive_bytes_per_s[b])]
            if network.segment and network.segment[a] != network.segment[b]:
                left, entered = network.segment[a], network.segment[b]
                shared += [("leaves", left, network.uplink_send_bytes_per_s[left])] if left >= 0 else []
                shared += [("enters", entered, network.uplink_receive_bytes_per_s[entered])] if entered >= 0 else []
        for kind, index, capacity in shared:
            add(kind, index, f, capacity)
        pair = network.pair_bytes_per_s[sender][receiver]
        if pair < min(capacity for _, _, capacity in shared):  # else a shared resource is full first
            add("pair", f, f, pair)
        for device in (sender, receiver):
            free = 1.0 if processor_room is None else processor_room[device]
            add("processor", device, f, free, network.processor_s_per_byte[device])
    if not rows:
        return np.zeros((1, len(flows))), np.array([np.inf])
    return np.stack(list(rows.values())), np.array([room[key] for key in rows])
