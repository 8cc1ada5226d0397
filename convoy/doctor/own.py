"""The facts of this process and of the machine under it."""

import os
import platform
import resource
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from convoy._version import __version__
from convoy.comm.environment import Place, is_loopback, own_address, pick_device, resolve, route_to
from convoy.doctor.facts import Checkup, Gpu, Interface, Reach
from convoy.doctor.knock import knock
from convoy.errors import InputError
from convoy.profile.describe import describe

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
PREFIXES = ("NCCL_",)
"""What people set, and forget, that changes how a training runs."""

SOMEWHERE = "192.0.2.1"
"""An address for examples (RFC 5737): the route to it is the one that leads out. Nothing is sent."""

VIRTUAL = ("docker", "br-", "veth", "virbr", "lxc", "cni", "flannel", "dummy", "ifb")
"""Interfaces that lead to containers, not to the network."""

Resolver = Callable[[str], Sequence[str]]
"""The addresses behind a name; none if it is unknown."""


def addresses_of(name: str) -> tuple[str, ...]:
    """The addresses behind a name, as this machine knows it."""
    try:
        found = resolve(name, 0, socket.SOCK_STREAM)
    except InputError:
        return ()
    return tuple(dict.fromkeys(str(target[0]) for _, target in found))


def check_up(
    place: Place | None,
    on: str | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
    resolver: Resolver = addresses_of,
) -> Checkup:
    """Everything that this process can say without asking another machine.

    Args:
        place: its place in the job; None alone.
        on: what it computes on; by default what training would take.
        environment, resolver: where to read variables and names from.
    """
    local = place.local if place else 0
    device, problem = _device(on, local)
    known = describe(device, slowdown=1.0)
    address, address_problem = _address(place, environment)
    memory = psutil.virtual_memory()
    meets_at = ("", "") if place is None else (f"{place.host} port {place.port}", next(iter(resolver(place.host)), ""))
    return Checkup(
        device=place.device if place else 0,
        devices=place.devices if place else 1,
        host=known.name,
        machine=known.machine,
        on=str(device),
        hardware=torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        on_problem=problem,
        meets_at=meets_at,
        address=address,
        address_problem=address_problem,
        interfaces=_interfaces(),
        resolves_to=tuple(resolver(known.name)),
        loopback_works=_loopback_works(),
        python=".".join(platform.python_version_tuple()[:2]),
        torch=str(torch.__version__),
        convoy=__version__,
        cuda=torch.version.cuda or "",
        nvidia_driver=Path("/proc/driver/nvidia/version").exists(),
        gpus=_gpus(),
        cores=len(os.sched_getaffinity(0)),
        quota_cores=quota_cores(),
        threads=torch.get_num_threads(),
        free_bytes=memory.available,
        memory_bytes=memory.total,
        shared_bytes=_shared_bytes(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        environment={
            name: value for name, value in environment.items() if name in VARIABLES or name.startswith(PREFIXES)
        },
    )


def _device(on: str | None, local: int) -> tuple[torch.device, str]:
    try:
        return pick_device(on, local), ""
    except (InputError, AttributeError) as error:  # a torch for processors only lacks some functions for others
        return torch.device("cpu"), f"{on or os.environ.get('CONVOY_DEVICE')} cannot be used: {error}"


def _address(place: Place | None, environment: Mapping[str, str]) -> tuple[str, str]:
    """Where others reach this machine; or nothing, and why."""
    try:
        if place is not None or environment.get("GLOO_SOCKET_IFNAME"):
            return own_address(place.host if place else SOMEWHERE, place.port if place else 9, environment), ""
    except InputError as error:
        return "", str(error)
    # A machine without a network can train alone.
    with suppress(InputError):
        return route_to(SOMEWHERE, 9), ""
    return "127.0.0.1", ""


def _interfaces() -> tuple[Interface, ...]:
    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    found = []
    for name, state in sorted(states.items()):
        own = tuple(
            entry.address.split("%")[0]
            for entry in addresses.get(name, ())
            if entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith("fe80:")
        )
        if not state.isup or not own or name.startswith(VIRTUAL) or all(map(is_loopback, own)):
            continue
        wireless = Path(f"/sys/class/net/{name}/wireless").exists()
        # Mbit/s; 0 or 65535 where the driver does not say.
        speed = state.speed * 125e3 if 0 < state.speed < 65535 else None
        found.append(Interface(name, own, speed, wireless))
    return tuple(found)


def _loopback_works() -> bool:
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            reach, visit = knock("127.0.0.1", listener.getsockname()[1], 1.0)
    except OSError:
        return False
    if visit is not None:
        visit.close()
    return reach is Reach.OPEN


def _gpus() -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        found.append(Gpu(torch.cuda.get_device_name(index), free_bytes, total_bytes))
    return tuple(found)


def _processor() -> str:
    """The processor's name, as the kernel has it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _shared_bytes() -> int | None:
    with suppress(OSError):
        return shutil.disk_usage("/dev/shm").total
    return None


def quota_cores(proc: Path = Path("/proc/self"), mounts: Path = Path("/proc/mounts")) -> float | None:
    """Processor seconds per second that the control groups above this process grant it; None without a limit.

    Reads version 1 (cpu.cfs_quota_us) and version 2 (cpu.max). The tightest group on the way up counts.
    """
    try:
        groups = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
        roots = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return None
    found = []
    for _, controllers, path in groups:
        version_2 = controllers == ""
        if not version_2 and "cpu" not in controllers.split(","):
            continue
        for _, root, kind, options, *_ in roots:
            if kind == "cgroup2" if version_2 else kind == "cgroup" and "cpu" in options.split(","):
                found += _limits(Path(root), path.strip("/"), version_2)
    return min(found, default=None)


def _limits(root: Path, path: str, version_2: bool) -> list[float]:
    """The limits of a group and those above it, in cores."""
    # Inside a container the path is the host's, and the mount shows the own group as its root.
    group = root / path if (root / path).is_dir() else root
    chain = [group, *group.parents]
    found = []
    for folder in chain[: chain.index(root) + 1]:
        with suppress(OSError, ValueError):
            if version_2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:  # "max" is no number, and -1 means none
                found.append(int(quota) / int(period))
    return found
