"""Describes the devices of a job: their fleet, CPU quotas, and how much other programs slow them."""

import os
import platform
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]
import torch

from convoy.comm.control_messages import gather
from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.fleet import Device, Fleet, Host, Nic
from convoy.machine.accelerator import OWN, ROOT, control_groups, memory_of, process_bytes

NOTICED = 1.1  # a slowdown above this factor is reported; the kernel's own work stays below it

LEAST_FRACTION = 0.05  # even on a fully loaded machine, a program gets at least this fraction of the cores it needs


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device and its process, as the process reports them.

    Attributes:
        name: the host's name.
        machine: identifies the host: the kernel's boot id and the network namespace.
        cores: number of compute threads; None for an accelerator.
        memory_bytes: an accelerator's memory; for a CPU, the host's free memory plus what this process already holds.
        slowdown: the factor by which the process slows its computation down, to act like slower hardware.
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
    """Return the fleet of a job's devices, without measured links."""
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
    """Check that a fleet file describes this job's devices. Return its fleet, with this job's slowdowns.

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


class Reading(NamedTuple):
    """Wall-clock seconds, busy seconds of all processors, and this process's processor seconds. Compare two readings."""

    wall_s: float
    busy_s: float
    own_s: float


def read_usage() -> Reading:
    times = psutil.cpu_times()
    idle_s = sum(getattr(times, name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))
    return Reading(time.perf_counter(), sum(times) - idle_s, time.process_time())


Usage = tuple[str, float, float, float, float]
"""A device's report: machine name, the machine's cores, cores the device needs, the machine's busy cores, cores the device
used."""


def slowed_by_others(group: Group, topic: str, begin: Reading) -> tuple[float, ...]:
    """Return the factor by which other programs slowed each device since `begin`. All devices call it."""
    wall_s, busy_s, own_s = (end - start for end, start in zip(read_usage(), begin, strict=True))
    threads = float(torch.get_num_threads() if group.torch_device.type == "cpu" else 1)
    needed = min(threads, quota_cores() or threads)
    usage: Usage = machine_name(), float(os.cpu_count() or 1), needed, busy_s / wall_s, own_s / wall_s
    return slowdowns(gather(group, topic, usage))


def slowdowns(usages: Sequence[Usage]) -> tuple[float, ...]:
    """Return each device's slowdown. Other programs use a machine's idle cores first, then they take cores from devices."""
    result = []
    for machine, cores, *_ in usages:
        _, _, wanted, busy, own = zip(*(each for each in usages if each[0] == machine), strict=True)
        others, needed = max(0.0, max(busy) - sum(own)), min(cores, sum(wanted))
        lost = min(others, max(0.0, needed + others - cores))
        result.append(needed / max(needed - lost, LEAST_FRACTION * needed))
    return tuple(result)


def machine_name() -> str:
    """Return an identifier of this machine: the boot id on Linux, else its network name."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()


def quota_cores(root: Path = ROOT, own: Path = OWN) -> float | None:
    """Return this process's CPU quota in cores, the tightest of its control groups; None without a quota.

    An emulated host does not see the control groups of the machine, so `convoy emulate` sets CONVOY_CPU_QUOTA.
    """
    if cores := os.environ.get("CONVOY_CPU_QUOTA"):
        return float(cores)
    found = []
    with suppress(OSError):
        for folder, version in control_groups("cpu", root, own):
            names = ["cpu.max"] if version == 2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
            # ValueError: "max", no limit. OSError: a folder of the host that a container does not see.
            with suppress(OSError, ValueError):
                quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
                if quota > 0:  # -1: no limit
                    found.append(quota / period)
    return min(found, default=None)
