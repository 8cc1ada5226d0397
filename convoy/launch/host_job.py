"""Computes the devices that each host of a fleet starts, and their environments. Pure."""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.machine.launch_env import RANK_VARIABLES

if TYPE_CHECKING:  # the agent on a host needs no fleet, and should not load the file's reader
    from convoy.fleet import Device, Fleet, Host

CONVOY_COMMAND = (sys.executable, "-m", "convoy")
MALLOC_NAMES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


@dataclass(frozen=True)
class JobOptions:
    """The options of a job's rendezvous and end, on this machine or on a fleet.

    Attributes:
        port: None: a free port on device 0's host.
        logs: a folder on each host for the output of its devices, except device 0.
        goes_on: the devices continue without lost devices. The output of all is shown: scripts use `convoy.print`.
        grace_s: seconds for devices to end by themselves after one has failed, or after Ctrl-C.
    """

    port: int | None = None
    logs: Path | None = None
    goes_on: bool = False
    grace_s: float = 5.0


DEFAULTS = JobOptions()


@dataclass(frozen=True)
class HostJob:
    """One host of a fleet and its devices: indices in the fleet, torch devices, further variables of each."""

    host: "Host"
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    own: tuple[Mapping[str, str], ...]

    def title(self, rank: int) -> str:
        """Name a device in messages, after its index."""
        return f"host {self.host.name}, {self.names[self.ranks.index(rank)]}"


def host_jobs(fleet: "Fleet") -> list[HostJob]:
    """Return the jobs of all hosts, starting with device 0's. Accelerators are numbered in the order of the file."""
    made = []
    for host in fleet.hosts:
        ranks = fleet.devices_on(host.name)
        devices = [fleet.devices[rank] for rank in ranks]
        kinds = [device.kind for device in devices]
        names = tuple(f"{kind}:{kinds[:n].count(kind)}" if kind != "cpu" else kind for n, kind in enumerate(kinds))
        made.append(HostJob(host, ranks, names, tuple(map(_own_variables, devices))))
    return sorted(made, key=lambda job: job.ranks)


def _own_variables(device: "Device") -> dict[str, str]:
    own = {}
    if device.cores is not None:
        own["OMP_NUM_THREADS"] = str(math.ceil(device.cores))
    if device.slowdown != 1:
        own["CONVOY_SLOWDOWN"] = repr(device.slowdown)
    if device.memory_bytes is not None and device.kind != "cpu":  # torch cannot limit the memory of a CPU device
        own["CONVOY_MEMORY"] = str(int(device.memory_bytes))
    return own


def device_environments(
    base: Mapping[str, str], ranks: Sequence[int], names: Sequence[str], *, total: int, address: str, port: int,
    hosted: bool = False, own: Sequence[Mapping[str, str]] = (),
) -> list[dict[str, str]]:  # fmt: skip
    """Return the full environment of each device that one machine starts.

    Args:
        base: variables of the launching process.
        ranks, names: index in the job and torch device of each.
        total: number of devices in the job, on all machines.
        hosted: the launcher hosts the rendezvous store; otherwise device 0 does.
    """
    kept = {name: value for name, value in base.items() if name not in (*RANK_VARIABLES, "TORCHELASTIC_RESTART_COUNT")}
    kept |= memory_environment(base)
    # Torch warns about names and connections that Convoy does not need or reports itself.
    kept.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    accelerators = [name for name in names if not name.startswith(("cpu", "auto"))]
    if len(set(accelerators)) < len(accelerators):  # named twice on purpose
        kept.setdefault("CONVOY_SHARED_ACCELERATOR", "1")
    if on_cpu := sum(name.startswith("cpu") for name in names):
        # By default each process would use all cores. Leave one core per accelerator to the thread that launches its
        # kernels: OpenMP splits loops evenly, so all threads would wait for a thread that shares its core.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        kept.setdefault("OMP_NUM_THREADS", str(max(1, (cores - len(accelerators)) // on_cpu)))
    return [
        kept
        | rank_variables(rank, local, total, len(ranks), address, port)
        | {"TORCHELASTIC_USE_AGENT_STORE": str(hosted)}
        | ({} if name == "auto" else {"CONVOY_DEVICE": name})
        | dict(own[local] if own else {})
        for local, (rank, name) in enumerate(zip(ranks, names, strict=True))
    ]


def rank_variables(rank: int, local: int, total: int, local_total: int, address: str, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": total, "LOCAL_WORLD_SIZE": local_total}
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": address, "MASTER_PORT": str(port)}


def memory_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make a device reuse the memory of freed tensors, unless `base` sets them.

    glibc's malloc returns freed blocks of 32 MB or more to the kernel, which zeroes new pages for the next step. Large
    thresholds keep them. PyTorch requests huge pages (2 MB instead of 4 KB) for large tensors. Both read their variables
    once at startup, so the launcher must set them.
    """
    chosen = any(base.get(name) for name in (*MALLOC_NAMES, "GLIBC_TUNABLES", "LD_PRELOAD"))
    malloc = {} if chosen else dict.fromkeys(MALLOC_NAMES, str(2**31 - 1))  # the largest number
    return {"THP_MEM_ALLOC_ENABLE": base.get("THP_MEM_ALLOC_ENABLE", "1"), **malloc}


def log_of(folder: Path | None, rank: int) -> Path | None:
    return None if folder is None or rank == 0 else folder / f"device-{rank}.log"  # device 0 has the terminal
