"""Describes the devices of a job, and builds the job's fleet from them."""

import os
import platform
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from convoy.errors import InputError
from convoy.fleet import Device, Fleet, Host, Nic
from convoy.machine.accelerator import memory_of, process_bytes
from convoy.measure.other_load import machine_name


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device and its process, as the process reports them.

    Attributes:
        name: the host's name.
        machine: identifies the host: the kernel's boot id and the network namespace.
        cores: number of compute threads; None for an accelerator.
        memory_bytes: an accelerator's memory; for a CPU, the host's free memory plus what this process already holds.
        slowdown: the factor by which it computes more slowly than its hardware.
        process_bytes: see `convoy.machine.accelerator.process_bytes`; includes the model.
    """

    name: str
    machine: str
    kind: str
    cores: int | None
    memory_bytes: int
    slowdown: float
    process_bytes: int = 0


def describe_device(device: torch.device, slowdown: float) -> DeviceInfo:
    """Return the description of this process's device."""
    free_bytes, total_bytes = memory_of(device)
    on_cpu, own_bytes = device.type == "cpu", process_bytes(device)
    machine = f"{platform.node()} {machine_name()}"
    with suppress(OSError):  # systems other than Linux have no network namespaces
        machine = f"{machine} {os.stat('/proc/self/ns/net').st_ino}"
    cores = torch.get_num_threads() if on_cpu else None
    memory_bytes = min(total_bytes, free_bytes + own_bytes) if on_cpu else total_bytes
    return DeviceInfo(platform.node(), machine, device.type, cores, memory_bytes, slowdown, own_bytes)


def fleet_of(rows: Sequence[DeviceInfo]) -> Fleet:
    """Return the fleet of a job's devices, with links that are not measured yet."""
    hosts: dict[str, str] = {}  # machine -> name
    for row in rows:
        name = re.sub(r"[^A-Za-z0-9._-]", "-", row.name.split(".")[0]).lstrip("._-")[:40] or "host"
        hosts.setdefault(row.machine, name if name not in hosts.values() else f"{name}-{len(hosts)}")
    devices: list[Device] = []
    for row in rows:
        host, memory_bytes = hosts[row.machine], row.memory_bytes
        if row.kind == "cpu":  # all processes of a host share its free memory
            count = sum(other.machine == row.machine and other.kind == "cpu" for other in rows)
            free_bytes = max(0, memory_bytes - row.process_bytes) // count
            memory_bytes = min(memory_bytes, free_bytes + row.process_bytes)
        number = sum(device.host == host and device.kind == row.kind for device in devices)
        devices.append(
            Device(
                name=f"{host}-{row.kind}{number}", host=host, kind=row.kind, cores=row.cores, slowdown=row.slowdown,
                memory_bytes=memory_bytes,
            )
        )  # fmt: skip
    # A fleet of several hosts needs a NIC. Measured NICs replace this one.
    network = Nic(1.0, 1.0, 0.0) if len(hosts) > 1 else None
    return Fleet(tuple(Host(name) for name in hosts.values()), tuple(devices), network)


def fit(fleet: Fleet, rows: Sequence[DeviceInfo]) -> Fleet:
    """Check that a file's fleet is the fleet of this job; return it with the job's slow-downs.

    Raises:
        InputError: the number of devices, their kinds or their hosts differ.
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
        for other, other_row in zip(fleet.devices[:index], rows[:index], strict=True):
            if (device.host == other.host) != (row.machine == other_row.machine):
                together = "one host" if device.host == other.host else "two hosts"
                raise InputError(
                    f"{other.name} and {device.name} are on {together} in the fleet file, but not in this job: start the "
                    "processes in the order of the file, each on its host"
                )
    devices = [replace(device, slowdown=row.slowdown) for device, row in zip(fleet.devices, rows, strict=True)]
    return replace(fleet, devices=tuple(devices))


def host_indices(fleet: Fleet) -> tuple[int, ...]:
    """Return the index of each device's host."""
    names = [host.name for host in fleet.hosts]
    return tuple(names.index(device.host) for device in fleet.devices)
