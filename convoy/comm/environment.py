"""Read this process's rank from the environment, and find network addresses."""

import math
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]

from convoy.errors import InputError, shown
from convoy.machine.launch_env import MAX_PROCESSES, RANK_VARIABLES, as_torchrun, whole


@dataclass(frozen=True)
class ProcessEnv:
    """A process's rank and rendezvous address, from the launcher's environment.

    Attributes:
        device, devices: torchrun's RANK and WORLD_SIZE.
        local, local_devices: LOCAL_RANK and LOCAL_WORLD_SIZE (None: unknown).
        host, port: address of the store.
        hosted: the launcher hosts a torch store there; otherwise device 0 hosts the store.
        attempt: number of times the launcher has restarted the job.
    """

    device: int
    devices: int
    local: int
    local_devices: int | None
    host: str
    port: int
    hosted: bool
    attempt: int


def read_process_env(environment: Mapping[str, str]) -> ProcessEnv | None:
    """Read the variables of torchrun, srun or mpirun. Return None if there are none: the script runs alone."""
    environment = as_torchrun(environment)
    missing = [name for name in RANK_VARIABLES if not environment.get(name)]
    if "RANK" in missing and "WORLD_SIZE" in missing:
        # MASTER_ADDR alone does not mean a job: clusters set it for every container.
        return None
    if missing:
        present = ", ".join(f"{name}={environment[name]}" for name in RANK_VARIABLES if name not in missing)
        raise InputError(
            f"the environment has {present} but no {', '.join(missing)}: a process of a job needs all of "
            f"{', '.join(RANK_VARIABLES)}; start it with torchrun, srun, mpirun or convoy, or unset them to run alone"
        )
    devices = whole(environment, "WORLD_SIZE", 1, MAX_PROCESSES)

    def optional(name: str, least: int, most: int) -> int | None:
        return whole(environment, name, least, most) if environment.get(name) else None

    return ProcessEnv(
        device=whole(environment, "RANK", 0, devices - 1),
        devices=devices,
        local=optional("LOCAL_RANK", 0, MAX_PROCESSES - 1) or 0,
        local_devices=optional("LOCAL_WORLD_SIZE", 1, devices),
        host=environment["MASTER_ADDR"],
        port=whole(environment, "MASTER_PORT", 1, 65535),
        hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=optional("TORCHELASTIC_RESTART_COUNT", 0, 1 << 30) or 0,
    )


def imposed_slowdown() -> float:
    """Return the slowdown factor of an emulated device (`slowdown` in the fleet file)."""
    from convoy.fleet import MAX_SLOWDOWN  # slow to import, and rarely needed

    text = os.environ.get("CONVOY_SLOWDOWN") or "1"
    try:
        slowdown = float(text)
    except ValueError:
        slowdown = math.nan
    if not 1 <= slowdown <= MAX_SLOWDOWN:
        raise InputError(
            f"CONVOY_SLOWDOWN={shown(text)} in the environment: it must be a number from 1 to {MAX_SLOWDOWN:g}; unset it"
        )
    return slowdown


def route_to(host: str, port: int) -> str:
    """Return this machine's source address for packets to ``host``, without sending any. InputError: unknown, or no route."""
    error: OSError | None = None
    for family, target in resolve(host, port, socket.SOCK_DGRAM):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError as failed:
            error = failed
    raise InputError(f"there is no route to {host} ({error}): check the address and the network of this machine")


def own_address(host: str, port: int, environment: Mapping[str, str] = os.environ) -> str:
    """Return the address at which other devices reach this one: GLOO_SOCKET_IFNAME's if set, else that on the route to host.

    The machine's own name would not do: Debian maps it to loopback. InputError: no such interface, or no address or route.
    """
    chosen = environment.get("GLOO_SOCKET_IFNAME")
    if not chosen:
        return route_to(host, port)
    interfaces = psutil.net_if_addrs()
    name = chosen.split(",")[0]
    if name not in interfaces:
        raise InputError(
            f"GLOO_SOCKET_IFNAME={chosen!r}: this machine has no such interface, it has "
            f"{', '.join(sorted(interfaces))}; give one name (NCCL's ^ and prefixes are not supported)"
        )
    # Prefer the address family of the host, because the other devices use it too.
    families = [resolve(host, port, socket.SOCK_DGRAM)[0][0], socket.AF_INET, socket.AF_INET6]
    for family in families:
        for address in interfaces[name]:
            if address.family == family:
                return str(address.address)
    raise InputError(f"GLOO_SOCKET_IFNAME={chosen!r}: this interface has no IP address; give it one or choose another")


LISTENER = "CONVOY_LISTENER"  # file descriptor of the listening socket that device 0 inherits from its launcher
JOIN = "CONVOY_JOIN"  # HOST:PORT,... of the running job that this process joins
LISTEN = (
    "CONVOY_LISTEN"  # HOST:PORT at which the first device of a script answers join requests, from `convoy run --listen`
)


def listen_at(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 means a free one. InputError: port in use, or not an address of this machine."""
    family, target = resolve(host, port, socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(target)
        # bind() alone does not fail: two sockets may share a port until one listens
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise InputError(
            f"cannot listen at {host} port {port}: {os.strerror(error.errno or 0)}. Choose another port (another job may use "
            "this one; port 0 or no port means a free one) and an address of this machine"
        ) from None
    return listener


def inherited_listener() -> socket.socket | None:
    """Return the listening socket that this process inherits from its launcher, if any."""
    # Remove the variable: in a child process the number would mean another file.
    number = os.environ.pop(LISTENER, "")
    try:
        return socket.socket(fileno=int(number)) if number.isdecimal() else None
    except OSError:
        return None


def is_own(host: str) -> bool:
    """Return whether a name or an address is this machine's; False for an unknown name."""
    own = {entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
    with suppress(InputError):
        found = [str(target[0]) for _, target in resolve(host, 0, socket.SOCK_STREAM)]
        return all(address in own or is_loopback(address) for address in found)
    return False


def is_own_machine(env: ProcessEnv) -> bool:
    """Return whether all processes of a job are known to be on this machine, before the rendezvous."""
    with suppress(InputError):
        targets = resolve(env.host, env.port, socket.SOCK_STREAM) if env.local_devices != env.devices else ()
        return all(is_loopback(str(target[0])) for _, target in targets)
    return False


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def reachable_address(own: str, all_addresses: Sequence[str]) -> str:
    """Return ``own`` if the other devices use its kind (loopback, IPv4, IPv6), else the address on the route to them.

    The first non-loopback address decides, so all devices choose the same kind. A machine may map its own name, given as
    MASTER_ADDR, to loopback.
    """
    guide = next((address for address in all_addresses if not is_loopback(address)), all_addresses[0])
    fits = is_loopback(own) == is_loopback(guide) and (":" in own) == (":" in guide)
    return own if fits else route_to(guide, 9)


def resolve(
    host: str, port: int, kind: socket.SocketKind
) -> list[tuple[socket.AddressFamily, tuple[str | int | bytes, ...]]]:
    """Resolve a name or a numeric address to (family, socket address) pairs, at least one. InputError: unknown name."""
    try:
        found = socket.getaddrinfo(host, port, type=kind)
    except OSError as error:
        raise InputError(f"the host name {host!r} cannot be resolved ({error.strerror}): use its IP address") from None
    return [(family, address) for family, _, _, _, address in found]
