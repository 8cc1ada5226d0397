"""Notices what other programs take of a machine while it is measured.

Processor time of the whole machine, less that of the job's own processes, is what others took. It slows the job where both
together want more cores than there are; on a machine with cores to spare it does not.
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

from convoy.comm.collectives import gather
from convoy.comm.group import Group

NOTICED = 1.1
"""Work that others make so many times longer is told; less are the kernel's own doings."""

LEAST_PART = 0.05
"""Of a machine that others fill, an own program gets so much at least; at most so many times is its work longer."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Seconds, all since some start: of the wall, of all processors of this machine busy, of this process's processor."""

    wall_s: float
    busy_s: float
    own_s: float


def read() -> Reading:
    """The clocks now."""
    times = psutil.cpu_times()
    idle_s = (
        times.idle + getattr(times, "iowait", 0.0) + getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    )
    return Reading(time.perf_counter(), sum(times) - idle_s, time.process_time())


@dataclass(frozen=True, slots=True)
class Use:
    """What one device saw of its machine for a while.

    Attributes:
        machine: the same for all devices of a machine, whatever network they are in.
        cores: of the machine.
        wants: cores that this device would use if it were alone there.
        busy: cores that were busy, whoever used them; `own`: that this process used.
    """

    machine: str
    cores: float
    wants: float
    busy: float
    own: float


def use_since(begin: Reading, wants: float) -> Use:
    """What this process and its machine did since `begin`."""
    now = read()
    wall_s = max(1e-9, now.wall_s - begin.wall_s)
    busy, own = (now.busy_s - begin.busy_s) / wall_s, (now.own_s - begin.own_s) / wall_s
    return Use(machine_name(), float(os.cpu_count() or 1), wants, busy, own)


def slowed_by_others(group: Group, topic: str, use: Use) -> tuple[float, ...]:
    """How many times as long each device's work took because of others, at most. All devices call it; all get the same."""
    row = [use.machine, use.cores, use.wants, use.busy, use.own]
    return slowed([Use(*each) for each in gather(group, topic, row)])


def slowed(uses: Sequence[Use]) -> tuple[float, ...]:
    """As `slowed_by_others`, from what every device saw.

    Of what all devices of a machine want, W cores, others have the part that no longer fits beside them.
    """
    result = []
    for use in uses:
        here = [each for each in uses if each.machine == use.machine]
        others = max(0.0, max(each.busy for each in here) - sum(each.own for each in here))
        wants = min(use.cores, sum(each.wants for each in here))
        taken = min(others, max(0.0, wants + others - use.cores))
        result.append(wants / max(wants - taken, LEAST_PART * wants))
    return tuple(result)


def wanted_cores(device: torch.device) -> float:
    """Cores that this process would use if nobody else were there."""
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    return min(float(threads), quota_cores() or float(threads))


def machine_name() -> str:
    with suppress(OSError):  # elsewhere than on Linux each machine has one network, and the name must do
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()


def quota_cores(proc: Path = Path("/proc/self"), mounts: Path = Path("/proc/mounts")) -> float | None:
    """Return the CPU quota of this process in cores; None without a limit.

    An emulated host names it in CONVOY_CPU_QUOTA: its process does not see where control groups are mounted. Elsewhere
    the tightest control group above the process counts, version 1 (cpu.cfs_quota_us) or 2 (cpu.max).
    """
    if cores := os.environ.get("CONVOY_CPU_QUOTA"):
        return float(cores)
    try:
        groups = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
        roots = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return None
    found = []
    for _, controllers, path in groups:
        wanted = "cgroup2" if not controllers else "cgroup" if "cpu" in controllers.split(",") else None
        for _, mount, kind, options, *_ in roots:
            if kind == wanted and (kind == "cgroup2" or "cpu" in options.split(",")):
                # Inside a container the path is the host's, and the mount shows the own group as its root.
                root, group = Path(mount), Path(mount, path.strip("/"))
                chain = [group, *group.parents] if group.is_dir() else [root]
                found += [_quota(folder, kind) for folder in chain[: chain.index(root) + 1]]
    return min((quota for quota in found if quota is not None), default=None)


def _quota(folder: Path, kind: str) -> float | None:
    with suppress(OSError, ValueError):
        if kind == "cgroup2":
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:  # "max" is no number, and -1 means none
            return int(quota) / int(period)
    return None
