"""Probes of this machine: its facts, its speed, and whether it can connect to an address."""

import errno
import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch
from torch.nn.functional import conv2d

from convoy._version import __version__
from convoy.comm.accelerator import finish, hardware_name, local_devices, memory_of, modes, pick_device
from convoy.comm.environment import ProcessEnv, is_loopback, own_address, resolve, route_to
from convoy.doctor.schema import Checkup, Gpu, Interface, Reach
from convoy.errors import InputError
from convoy.profile.describe import describe
from convoy.profile.load import quota_cores

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
PREFIXES = ("NCCL_",)
"""Environment variables that change how a training runs."""

SOMEWHERE = "192.0.2.1"
"""An address for examples (RFC 5737). The route to it is the default route; nothing is sent."""

VIRTUAL = ("docker", "br-", "veth", "virbr", "lxc", "cni", "flannel", "dummy", "ifb")
"""Interfaces that lead to containers, not to the network."""

COMPUTE_S = 0.3
CHANNELS, SIZE = 64, 32
CPU_BATCH, GPU_BATCH = 2, 256
"""Few enough samples for a tenth of a core; enough to fill a GPU."""

_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EINVAL, errno.EACCES, errno.EPERM)
"""Linux gives the last four for routes of the kinds blackhole and prohibit, and for a missing address family."""


def ping(host: str, port: int, limit_s: float) -> tuple[Reach, socket.socket | None]:
    """Open a TCP connection, or say why not. The socket is the caller's to close, and has the limit as its timeout.

    Args:
        host: a name or an address; a name that is unknown counts as no route.
    """
    try:
        connection = socket.create_connection((host, port), timeout=limit_s)
    except TimeoutError:
        return Reach.SILENT, None
    except ConnectionError:
        return Reach.REFUSED, None
    except OSError as error:
        # An unknown name has an errno of another kind (EAI_...), negative on Linux.
        known = error.errno is not None and error.errno > 0
        return (Reach.NO_ROUTE if not known or error.errno in _NO_WAY else Reach.SILENT), None
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Reach.OPEN, connection


def samples_per_s(device: torch.device, seconds: float = COMPUTE_S, slowdown: float = 1.0) -> float:
    """Measure the samples/s of a convolution of 64 to 64 channels, 3x3, on 32x32 (0.23 GFLOP, forward and backward).

    All calls and all seconds count, so that the pauses of a processor quota do.

    Args:
        slowdown: how many times slower the device is emulated to be.
    """
    batch = CPU_BATCH if device.type == "cpu" else GPU_BATCH
    x_NCHW = torch.randn(batch, CHANNELS, SIZE, SIZE, device=device, requires_grad=True)
    w_KCRS = torch.randn(CHANNELS, CHANNELS, 3, 3, device=device, requires_grad=True)

    def once() -> None:
        y_NKHW = conv2d(x_NCHW, w_KCRS, padding=1)
        torch.autograd.grad(y_NKHW, (x_NCHW, w_KCRS), torch.ones_like(y_NKHW))
        finish(device)

    once()  # chooses kernels
    start_s, calls = time.perf_counter(), 0
    while calls < 2 or time.perf_counter() - start_s < seconds:
        once()
        calls += 1
    return batch * calls / (time.perf_counter() - start_s) / slowdown


def busy_cores() -> float:
    """Measure how many cores of this machine other programs keep busy, in the mean, while this process sleeps."""
    return float(psutil.cpu_percent(interval=0.2)) / 100 * (psutil.cpu_count() or 1)


# ------------------------------------------------------------------------------------------------ facts


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
    env: ProcessEnv | None,
    on: str | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
    resolver: Resolver = addresses_of,
) -> Checkup:
    """Collect everything that this process can say without asking another machine.

    Args:
        env: its rank in the job; None alone.
        on: what it computes on; by default what training would take.
        environment, resolver: where to read variables and names from.
    """
    device, on_problem = torch.device("cpu"), ""
    try:
        device = pick_device(on, env.local if env else 0)
    except InputError as error:
        on_problem = f"{on or os.environ.get('CONVOY_DEVICE')} cannot be used: {error}"
    known = describe(device, slowdown=1.0)
    address, address_problem = _address(env, environment)
    memory, gpus = psutil.virtual_memory(), [torch.device(name) for name in local_devices()[:-1]]
    return Checkup(
        device=env.device if env else 0,
        devices=env.devices if env else 1,
        host=known.name,
        machine=known.machine,
        on=str(device),
        hardware=_processor() if device.type == "cpu" else hardware_name(device),
        on_problem=on_problem,
        meets_at=(f"{env.host} port {env.port}", next(iter(resolver(env.host)), "")) if env else ("", ""),
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
        gpus=tuple(Gpu(hardware_name(gpu), *memory_of(gpu)) for gpu in gpus),
        cores=len(os.sched_getaffinity(0)),
        quota_cores=quota_cores(),
        threads=torch.get_num_threads(),
        free_bytes=memory.available,
        memory_bytes=memory.total,
        shared_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        environment={
            name: value for name, value in environment.items() if name in VARIABLES or name.startswith(PREFIXES)
        },
        modes=modes(),
    )


def _address(env: ProcessEnv | None, environment: Mapping[str, str]) -> tuple[str, str]:
    """(where others reach this machine, ""), or ("", why they cannot)."""
    try:
        if env is not None or environment.get("GLOO_SOCKET_IFNAME"):
            return own_address(env.host if env else SOMEWHERE, env.port if env else 9, environment), ""
    except InputError as error:
        return "", str(error)
    # A machine without a network can train alone.
    with suppress(InputError):
        return route_to(SOMEWHERE, 9), ""
    return "127.0.0.1", ""


def _interfaces() -> tuple[Interface, ...]:
    """The network interfaces that are up, have an address and lead out of the machine."""
    addresses, found = psutil.net_if_addrs(), []
    for name, state in sorted(psutil.net_if_stats().items()):
        own = tuple(
            entry.address.split("%")[0]
            for entry in addresses.get(name, ())
            if entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith("fe80:")
        )
        if state.isup and own and not name.startswith(VIRTUAL) and not all(map(is_loopback, own)):
            # Mbit/s; 0 or 65535 where the driver does not say.
            speed = state.speed * 125e3 if 0 < state.speed < 65535 else None
            found.append(Interface(name, own, speed, wireless=Path(f"/sys/class/net/{name}/wireless").exists()))
    return tuple(found)


def _loopback_works() -> bool:
    with suppress(OSError), socket.create_server(("127.0.0.1", 0)) as listener:
        reach, connection = ping("127.0.0.1", listener.getsockname()[1], 1.0)
        if connection is not None:
            connection.close()
        return reach is Reach.OPEN
    return False


def _processor() -> str:
    """The processor's name, as the kernel has it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
