"""Detects other programs on a machine while it is measured, and CPU quotas.

Processor time of the whole machine minus that of the job's own processes is what other programs used. It slows the job only if
both together want more cores than the machine has.
"""

import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from convoy.comm.control_messages import gather
from convoy.comm.group import Group
from convoy.machine.accelerator import OWN, ROOT, control_groups

NOTICED = 1.1
"""A slowdown above this factor is reported; the kernel's own work stays below it."""

LEAST_FRACTION = 0.05
"""On a machine that others fill, a program gets at least this fraction of what it wants."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Wall-clock seconds, busy seconds of all processors, and processor seconds of this process, each since some start."""

    wall_s: float
    busy_s: float
    own_s: float


def read_usage() -> Reading:
    """Read the three clocks."""
    times = psutil.cpu_times()
    idle_s = sum(getattr(times, name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))
    return Reading(time.perf_counter(), sum(times) - idle_s, time.process_time())


Usage = tuple[str, float, float, float, float]
"""What a device saw: the name of its machine, that machine's cores, the cores that it wants, busy cores, cores that it used."""


def slowed_by_others(group: Group, topic: str, begin: Reading) -> tuple[float, ...]:
    """Return for each device the factor by which other programs slowed it since `begin`. All devices call it."""
    now = read_usage()
    wall_s = max(1e-9, now.wall_s - begin.wall_s)
    busy, own = (now.busy_s - begin.busy_s) / wall_s, (now.own_s - begin.own_s) / wall_s
    threads = float(torch.get_num_threads() if group.torch_device.type == "cpu" else 1)
    usage: Usage = machine_name(), float(os.cpu_count() or 1), min(threads, quota_cores() or threads), busy, own
    return slowdowns(gather(group, topic, usage))


def slowdowns(usages: Sequence[Usage]) -> tuple[float, ...]:
    """Return the slowdown of each device: the job's devices on a machine lose the cores that no longer fit next to others."""
    result = []
    for machine, cores, *_ in usages:
        _, _, wanted, busy, own = zip(*(each for each in usages if each[0] == machine), strict=True)
        others, needed = max(0.0, max(busy) - sum(own)), min(cores, sum(wanted))
        lost = min(others, max(0.0, needed + others - cores))
        result.append(needed / max(needed - lost, LEAST_FRACTION * needed))
    return tuple(result)


def machine_name() -> str:
    """Return what identifies this machine: the boot id on Linux, else its network name."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()


def quota_cores(root: Path = ROOT, own: Path = OWN) -> float | None:
    """Return the CPU quota of this process in cores: the tightest of its control groups. None: no quota.

    An emulated host does not see the control groups of the machine, so `convoy emulate` sets CONVOY_CPU_QUOTA.
    """
    if cores := os.environ.get("CONVOY_CPU_QUOTA"):
        return float(cores)
    found = []
    with suppress(OSError):
        for folder, version in control_groups("cpu", root, own):
            # ValueError: "max", no limit. OSError: a folder of the host that a container does not see.
            with suppress(OSError, ValueError):
                if version == 2:
                    quota, period = (folder / "cpu.max").read_text().split()
                else:
                    quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                if int(quota) > 0:  # -1: no limit
                    found.append(int(quota) / int(period))
    return min(found, default=None)
