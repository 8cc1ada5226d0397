"""The fleet of a job: as its devices describe themselves, or as a file says; and with its wire as measured."""

import os
import platform
import re
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from convoy.errors import InputError
from convoy.fleet import Device, Fleet, Host, Link, NetworkSegment, Nic
from convoy.machine.accelerator import memory_of, process_bytes
from convoy.measure.links import PairLink, WireTimes
from convoy.simulate.table import HostRates, LinkSpread


@dataclass(frozen=True, slots=True)
class Own:
    """What one process knows of itself.

    Attributes:
        name: of its host.
        machine: tells two hosts of one name apart: the boot of the kernel and the network namespace.
        cores: threads it computes with; None for a GPU.
        memory_bytes: of the GPU; on a CPU free on the host, and what this process has already.
        slowdown: how many times slower it is made to compute.
        process_bytes: see `convoy.machine.accelerator.process_bytes`; the model is among it.
    """

    name: str
    machine: str
    kind: str
    cores: int | None
    memory_bytes: int
    slowdown: float
    process_bytes: int = 0


def describe(torch_device: torch.device, slowdown: float) -> Own:
    """This process and the machine under it."""
    free_bytes, total_bytes = memory_of(torch_device)
    on_cpu = torch_device.type == "cpu"
    own_bytes = process_bytes(torch_device)
    memory_bytes = min(total_bytes, free_bytes + own_bytes) if on_cpu else total_bytes
    cores = torch.get_num_threads() if on_cpu else None
    return Own(platform.node(), _machine(), torch_device.type, cores, memory_bytes, slowdown, own_bytes)


def _machine() -> str:
    marks = [platform.node()]
    with suppress(OSError):  # elsewhere than on Linux the name must do
        marks.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        marks.append(str(os.stat("/proc/self/ns/net").st_ino))
    return " ".join(marks)


def fleet_of(rows: Sequence[Own]) -> Fleet:
    """The fleet that the devices of a job are; the wire between them is still to be measured.

    Raises:
        InputError: a kind of device that fleets do not know.
    """
    hosts: dict[str, str] = {}  # machine -> name
    for row in rows:
        name = _plain(row.name)
        hosts.setdefault(row.machine, name if name not in hosts.values() else f"{name}-{len(hosts)}")
    devices: list[Device] = []
    for row in rows:
        host = hosts[row.machine]
        alike = [other for other in rows if other.machine == row.machine and other.kind == row.kind]
        before = [device for device in devices if device.host == host and device.kind == row.kind]
        devices.append(
            Device(
                name=f"{host}-{row.kind}{len(before)}",
                host=host,
                kind=row.kind,
                cores=row.cores,
                slowdown=row.slowdown,
                # All processes of a host share its memory; each accelerator has its own.
                memory_bytes=row.memory_bytes if row.kind != "cpu" else _part_of(row, len(alike)),
            )
        )
    # Not known yet: fleets of several hosts need a card, and the measured ones take its place.
    network = Nic(1.0, 1.0, 0.0) if len(hosts) > 1 else None
    return Fleet(tuple(Host(name) for name in hosts.values()), tuple(devices), network)


def _part_of(row: Own, devices: int) -> int:
    """Of what is free, and what the process has."""
    return min(row.memory_bytes, max(0, row.memory_bytes - row.process_bytes) // devices + row.process_bytes)


def _plain(name: str) -> str:
    """A host name as a fleet may write it."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name.split(".")[0]).lstrip("._-")[:40] or "host"


def fit(fleet: Fleet, rows: Sequence[Own]) -> Fleet:
    """A fleet as a file says, with the slow-downs that are in force; it must be the fleet of this job.

    Raises:
        InputError: another number of devices, another kind, hosts that are not the machines of the job.
    """
    if len(fleet.devices) != len(rows):
        raise InputError(
            f"the fleet file has {len(fleet.devices)} devices, this job has {len(rows)}: start one process for each, "
            "in the order of the file"
        )
    for index, (device, row) in enumerate(zip(fleet.devices, rows, strict=True)):
        if device.kind != row.kind:
            raise InputError(
                f"device {index} ({device.name}) is {device.kind} in the fleet file, but computes on {row.kind}: start the "
                "processes in the order of the file, each on its device"
            )
        for other, there in zip(fleet.devices[:index], rows[:index], strict=True):
            if (device.host == other.host) != (row.machine == there.machine):
                together = "one host" if device.host == other.host else "two hosts"
                raise InputError(
                    f"{other.name} and {device.name} are on {together} in the fleet file, but not in this job: start the "
                    "processes in the order of the file, each on its host"
                )
    devices = [replace(device, slowdown=row.slowdown) for device, row in zip(fleet.devices, rows, strict=True)]
    return replace(fleet, devices=tuple(devices))


def host_indices(fleet: Fleet) -> tuple[int, ...]:
    """Index of each device's host."""
    names = [host.name for host in fleet.hosts]
    return tuple(names.index(device.host) for device in fleet.devices)


def with_wire(fleet: Fleet, wire: WireTimes) -> Fleet:
    """The fleet with cards and links as measured, in place of what it had."""
    host = [device.host for device in fleet.devices]
    links = []
    for ends, pairs in _by_hosts(fleet, wire).items():
        rate = statistics.median(pair.bytes_per_s for pair in pairs)
        links.append(Link(*ends, rate, statistics.median(pair.latency_s for pair in pairs)))
    if not wire.cards:
        return replace(fleet, links=tuple(links), segments=_segments(fleet, links))
    hosts = []
    for entry, rates in zip(fleet.hosts, wire.cards, strict=True):
        out = [pair for pair in wire.pairs if host[pair.source] == entry.name != host[pair.target]]
        into = [pair for pair in wire.pairs if host[pair.target] == entry.name != host[pair.source]]
        # A card carries at least what one of its links does alone.
        card = Nic(
            send_bytes_per_s=max(rates.send_bytes_per_s, *(pair.bytes_per_s for pair in out)),
            receive_bytes_per_s=max(rates.receive_bytes_per_s, *(pair.bytes_per_s for pair in into)),
            latency_s=statistics.median(pair.latency_s for pair in out),
        )
        hosts.append(replace(entry, card=card))
    return replace(fleet, hosts=tuple(hosts), network=None, links=tuple(links), segments=_segments(fleet, links))


def _segments(fleet: Fleet, measured: Sequence[Link]) -> tuple[NetworkSegment, ...]:
    """The segments with their uplinks as messages found them: as fast as the fastest link that only the uplink holds back."""
    nominal = replace(fleet, links=())

    def found(segment: NetworkSegment, *, leaves: bool) -> float:
        uplink = segment.uplink.send_bytes_per_s if leaves else segment.uplink.receive_bytes_per_s
        rates = [
            link.bandwidth_bytes_per_s
            for link in measured
            if link.source != link.target
            and nominal.segment_of(link.source if leaves else link.target) == segment
            and nominal.segment_of(link.target if leaves else link.source) != segment
            and nominal.path(link.source, link.target).bandwidth_bytes_per_s == uplink
        ]
        return max(rates, default=uplink)

    return tuple(
        replace(
            segment,
            uplink=replace(
                segment.uplink,
                send_bytes_per_s=found(segment, leaves=True),
                receive_bytes_per_s=found(segment, leaves=False),
            ),
        )
        for segment in fleet.segments
    )


def spreads(fleet: Fleet, wire: WireTimes) -> tuple[tuple[LinkSpread, ...], tuple[HostRates, ...]]:
    """What belongs to the links and cards of `with_wire`, beside their values."""
    links = tuple(
        LinkSpread(*ends, max(p.latency_spread for p in pairs), max(p.bandwidth_spread for p in pairs))
        for ends, pairs in _by_hosts(fleet, wire).items()
    )
    cards = tuple(
        HostRates(fleet.hosts[card.host].name, card.ring_bytes_per_s, card.send_spread, card.receive_spread)
        for card in wire.cards
    )
    return links, cards


def _by_hosts(fleet: Fleet, wire: WireTimes) -> dict[tuple[str, str], list[PairLink]]:
    """Pairs of devices by their hosts; both directions within a host are one."""
    host = [device.host for device in fleet.devices]
    result: dict[tuple[str, str], list[PairLink]] = {}
    for pair in wire.pairs:
        result.setdefault((host[pair.source], host[pair.target]), []).append(pair)
    return result
