"""Detects other programs on a machine while it is measured, and CPU quotas.

Other programs used the machine's processor time minus that of the job's processes. They slow the job only if both
together need more cores than the machine has.
"""

import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]
import torch

from convoy.comm.control_messages import gather
from convoy.comm.group import Group
from convoy.machine.accelerator import OWN, ROOT, control_groups

NOTICED = 1.1
"""A slowdown above this factor is reported; the kernel's own work stays below it."""

LEAST_FRACTION = 0.05
"""Even on a fully loaded machine, a program gets at least this fraction of the cores it needs."""


class Reading(NamedTuple):
    """Wall-clock seconds, busy seconds of all processors, and processor seconds of this process. Only differences count."""

    wall_s: float
    busy_s: float
    own_s: float


def read_usage() -> Reading:
    times = psutil.cpu_times()
    idle_s = sum(getattr(times, name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))
    return Reading(time.perf_counter(), sum(times) - idle_s, time.process_time())


Usage = tuple[str, float, float, float, float]
"""A device's report: machine name, cores of the machine, cores the device needs, busy cores, cores the device used."""


def slowed_by_others(group: Group, topic: str, begin: Reading) -> tuple[float, ...]:
    """Return each device's slowdown by other programs since `begin`. All devices call it."""
    wall_s, busy_s, own_s = (end - start for end, start in zip(read_usage(), begin, strict=True))
    threads = float(torch.get_num_threads() if group.torch_device.type == "cpu" else 1)
    needed = min(threads, quota_cores() or threads)
    usage: Usage = machine_name(), float(os.cpu_count() or 1), needed, busy_s / wall_s, own_s / wall_s
    return slowdowns(gather(group, topic, usage))


def slowdowns(usages: Sequence[Usage]) -> tuple[float, ...]:
    """Return each device's slowdown. Other programs take cores from a machine's devices, unless cores are idle."""
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
