"""What each host of a fleet has to start, the environment of each device, and the same as a line for a shell. Pure."""

import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from convoy.comm.environment import LISTENER
from convoy.comm.launch_env import RANK_VARIABLES
from convoy.comm.launcher import JOIN, LISTEN

if TYPE_CHECKING:  # the agent on a host knows no fleet, and should not wait for what reads its file
    from convoy.fleet import Device, Fleet, Host

CONVOY_COMMAND = (sys.executable, "-m", "convoy")

MALLOC_NAMES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_CHOSEN = (*MALLOC_NAMES, "GLIBC_TUNABLES", "LD_PRELOAD")
_LARGEST_BYTES = str(2**31 - 1)


def memory_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Variables by which a device uses the memory that its tensors free again; none that `base` has chosen otherwise.

    By itself glibc's malloc gives tensors of 32 MB or more back to the kernel when they are freed, and those of the next
    step take fresh pages, which the kernel fills with zeros first: a tenth of a step of two-conv 150:800 with 52
    samples. With thresholds that large the process holds the most memory that it ever needed. PyTorch asks for huge
    pages (2 MB in place of 4 KB) for large tensors; without, the gradients of a wide Linear alone took a third of a step.
    Both read their variables once, so they are a matter of who starts a process.
    """
    chosen = any(base.get(name) for name in _CHOSEN)
    malloc = {} if chosen else dict.fromkeys(MALLOC_NAMES, _LARGEST_BYTES)
    return {"THP_MEM_ALLOC_ENABLE": base.get("THP_MEM_ALLOC_ENABLE", "1"), **malloc}


def device_environments(
    base: Mapping[str, str],
    ranks: Sequence[int],
    names: Sequence[str],
    *,
    total: int,
    address: str,
    port: int,
    hosted: bool = False,
    own: Sequence[Mapping[str, str]] = (),
) -> list[dict[str, str]]:
    """All variables of each device that one machine starts.

    Args:
        base: variables of the process that starts them.
        ranks: the index of each in the job.
        names: what each computes on, such as "cpu" or "cuda:0".
        total: devices of the whole job, on all machines.
        address, port: where all of them meet.
        hosted: the launcher keeps the store there; otherwise device 0 does.
        own: further variables of each.
    """
    kept = {name: value for name, value in base.items() if name not in (*RANK_VARIABLES, "TORCHELASTIC_RESTART_COUNT")}
    kept |= memory_environment(base)
    # Torch warns of names and connections that Convoy needs not, or tells of itself.
    kept.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    accelerators = [name for name in names if not name.startswith(("cpu", "auto"))]
    if len(set(accelerators)) < len(accelerators):  # whoever names one twice wants it
        kept.setdefault("CONVOY_SHARED_ACCELERATOR", "1")
    on_cpu = sum(name.startswith("cpu") for name in names)
    if on_cpu:
        # Each would take all cores otherwise, and they would disturb each other. A core is left to the thread that launches the
        # kernels of each accelerator: one of many that share out a loop would have to wait for it.
        kept.setdefault("OMP_NUM_THREADS", str(max(1, (_cores() - len(accelerators)) // on_cpu)))
    return [
        kept
        | rank_variables(rank, local, total, len(ranks), address, port)
        | {"TORCHELASTIC_USE_AGENT_STORE": str(hosted)}
        | ({} if name == "auto" else {"CONVOY_DEVICE": name})
        | dict(own[local] if own else {})
        for local, (rank, name) in enumerate(zip(ranks, names, strict=True))
    ]


def joining_environment(variables: Mapping[str, str], doors: Sequence[tuple[str, int]]) -> dict[str, str]:
    """The environment of a device that is started again by the same command: it has no place among those that began, and asks
    at these doors to be let in."""
    place = (*RANK_VARIABLES, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")
    gone = {LISTENER, LISTEN, *place, *(f"CONVOY_{name}" for name in place)}
    kept = {name: value for name, value in variables.items() if name not in gone}
    return kept | {JOIN: ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in doors)}


def rank_variables(rank: int, local: int, total: int, local_total: int, address: str, port: int) -> dict[str, str]:
    """Which process of a job one is, as torchrun says it."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(total),
        "LOCAL_WORLD_SIZE": str(local_total),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def log_of(folder: Path | None, rank: int) -> Path | None:
    """Where a device's output is kept; device 0 has the terminal."""
    return None if folder is None or rank == 0 else folder / f"device-{rank}.log"


def _cores() -> int:
    """Processor cores that this process may use. Only Linux can be asked for that."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class HostJob:
    """One host of a fleet and its devices.

    Attributes:
        ranks: indices of its devices in the fleet.
        names: what each computes on, as PyTorch calls it.
        own: variables of each, beside those of its rank.
    """

    host: "Host"
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    own: tuple[Mapping[str, str], ...]

    def title(self, rank: int) -> str:
        """A device as messages name it, after its index."""
        return f"host {self.host.name}, {self.names[self.ranks.index(rank)]}"


def host_jobs(fleet: "Fleet") -> list[HostJob]:
    """The hosts, that of device 0 first.

    The accelerators of a host are its cuda:0, cuda:1, ... (or as torch calls them) in the order of the file.
    """
    made = []
    for host in fleet.hosts:
        ranks = fleet.devices_on(host.name)
        devices = [fleet.devices[rank] for rank in ranks]
        kinds = [device.kind for device in devices]
        names = tuple(f"{kind}:{kinds[:n].count(kind)}" if kind != "cpu" else kind for n, kind in enumerate(kinds))
        made.append(HostJob(host, ranks, names, tuple(map(_own_variables, devices))))
    return sorted(made, key=lambda job: job.ranks)


def _own_variables(device: "Device") -> dict[str, str]:
    """What the file says of a device, as its process reads it; the same as in a rehearsal."""
    own = {}
    if device.cores is not None:
        own["OMP_NUM_THREADS"] = str(math.ceil(device.cores))
    if device.slowdown != 1:
        own["CONVOY_SLOWDOWN"] = repr(device.slowdown)
    if device.memory_bytes is not None and device.kind != "cpu":  # torch limits none of a CPU's
        own["CONVOY_MEMORY"] = str(int(device.memory_bytes))
    return own


def line_to_paste(
    job: HostJob,
    argv: Sequence[str],
    *,
    total: int,
    address: str,
    port: int,
    python: str,
    folder: str,
    further: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """A line for a shell on this host (sh, bash, zsh) that starts its devices and waits for them.

    Args:
        argv: what follows `python -m convoy`.
        total: devices of the whole fleet.
        address, port: where all meet: device 0 listens there.
        python, folder: for a host that names none.
        further: variables of all devices.
    """
    shared = rank_variables(0, 0, total, len(job.ranks), address, port) | {"TORCH_CPP_LOG_LEVEL": "ERROR", **further}
    words = [f"{name}={shlex.quote(value)}" for name, value in shared.items() if name not in ("RANK", "LOCAL_RANK")]
    words += [f"{name}=${{{name}:-{value}}}" for name, value in memory_environment({}).items()]
    on_cpu = job.names.count("cpu")
    if on_cpu > 1:  # as many threads as this machine has cores, shared out
        words.append(f"OMP_NUM_THREADS=$(( ($(getconf _NPROCESSORS_ONLN) + {on_cpu - 1}) / {on_cpu} ))")
    command = shlex.join([job.host.python or python, "-m", "convoy", *argv])
    starts = []
    for local, (rank, name, own) in enumerate(zip(job.ranks, job.names, job.own, strict=True)):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(local), "CONVOY_DEVICE": name, **own}
        starts.append(" ".join([*(f"{key}={value}" for key, value in variables.items()), command]))
    # Device 0, the first, keeps the terminal: the others run behind it and end with it.
    behind = "".join(f"{start} & " for start in starts[1:])
    run = f"{{ {behind}{starts[0]}; s=$?; wait; exit $s; }}"
    return f"( cd {shlex.quote(job.host.folder or folder)} && export {' '.join(words)} && {run} )"
