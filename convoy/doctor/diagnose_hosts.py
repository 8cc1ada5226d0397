"""Findings about each machine, and each device on it, by itself."""

from collections.abc import Iterator

from convoy.comm.environment import is_loopback
from convoy.doctor.facts import Checkup, Examination, Finding, Interface
from convoy.doctor.names import ABOUT, Names, listed

GB = 1e9
LEAST_FREE = 0.1
"""Of a host's memory; of a GPU's, half: there what is taken is another program's."""

LEAST_SHARED_BYTES = 256 << 20
"""Docker gives containers 64 MiB."""

LEAST_OPEN_FILES, OPEN_FILES_PER_DEVICE = 256, 16
BUSY = 0.25
"""Of a machine's cores: more is felt in every step, since all wait for the slowest."""

FASTER = 2.0
"""An interface that much faster than the one in use is worth a word."""


def host_findings(examination: Examination, names: Names) -> Iterator[Finding]:
    """What each machine, and each device on it, shows by itself."""
    for checkup in examination.checkups:
        name = names.device(checkup.device) if examination.devices > 1 else names.host[checkup.device]
        if checkup.on_problem:
            yield Finding("error", f"{name}: {checkup.on_problem}", "Set CONVOY_DEVICE, or leave it unset", (name,))
        if checkup.address_problem:
            cure = "Until then no other host can reach it"
            yield Finding("error", f"{name} has no address: {checkup.address_problem}", cure, (name,))
        yield from _threads(checkup, name, examination, names)
    by_device = {checkup.device: checkup for checkup in examination.checkups}
    for host, first in names.first.items():
        checkup = by_device[first]
        for story in (_loopback, _own_name, _interfaces, _nccl, _cuda, _memory, _limits):
            yield from story(checkup, host, examination)
        yield from _busy(examination, host, first)


def _loopback(checkup: Checkup, host: str, _: Examination) -> Iterator[Finding]:
    if not checkup.loopback_works:
        what = f"{host} cannot connect to itself at 127.0.0.1"
        cure = "Bring its loopback interface up (ip link set lo up), and let its firewall accept what comes from lo"
        yield Finding("error", what, cure, (host,))


def _own_name(checkup: Checkup, host: str, _: Examination) -> Iterator[Finding]:
    outward = [each for each in checkup.interfaces if each.addresses]
    if outward and checkup.resolves_to and all(map(is_loopback, checkup.resolves_to)):
        what = f"on {ABOUT} the machine's own name leads to itself only ({checkup.resolves_to[0]})"
        cure = (
            "Convoy does not use it, but as MASTER_ADDR it would keep all others waiting: give its address in the network "
            "there (ip -br address shows it), or put that before the name in /etc/hosts"
        )
        yield Finding("warning", what, cure, (host,))


def _interfaces(checkup: Checkup, host: str, _: Examination) -> Iterator[Finding]:
    used = next((each for each in checkup.interfaces if checkup.address in each.addresses), None)
    rest = [each for each in checkup.interfaces if each is not used]
    if used is None:
        return
    faster = [
        each for each in rest if used.bytes_per_s and each.bytes_per_s and each.bytes_per_s > FASTER * used.bytes_per_s
    ]
    if faster:
        best = max(faster, key=lambda each: each.bytes_per_s or 0.0)
        what = (
            f"{host} talks through {used.name} ({_rate(used)}), though {best.name} ({_rate(best)}, "
            f"{best.addresses[0]}) is up"
        )
        cure = (
            f"If all hosts are on that network: GLOO_SOCKET_IFNAME={best.name}, and MASTER_ADDR with an address of it"
        )
        yield Finding("warning", what, cure, (host,))
    elif used.wireless:
        what = f"{host} talks through {used.name}, a radio: slow, and slower at times"
        cure = f"Use a cable{f': GLOO_SOCKET_IFNAME={rest[0].name} where it is plugged in' if rest else ''}"
        yield Finding("warning", what, cure, (host,))
    elif rest:
        others = ", ".join(f"{each.name} ({each.addresses[0]})" for each in rest)
        what = f"{host} talks through {used.name} ({checkup.address}), where its route leads; it also has {others}"
        cure = "If another is the one to use, name it in GLOO_SOCKET_IFNAME on that host"
        yield Finding("note", what, cure, (host,))


def _rate(interface: Interface) -> str:
    return f"{(interface.bytes_per_s or 0.0) * 8 / 1e9:g} Gbit/s"


def _nccl(checkup: Checkup, host: str, _: Examination) -> Iterator[Finding]:
    """NCCL takes a list of prefixes; `=` in front asks for whole names, `^` for all but these."""
    chosen = checkup.environment.get("NCCL_SOCKET_IFNAME", "")
    if chosen and not chosen.startswith("^") and checkup.gpus:
        exact, wanted = chosen.startswith("="), chosen.removeprefix("=").split(",")
        present = [each.name for each in checkup.interfaces]
        if not any(name == want if exact else name.startswith(want) for name in present for want in wanted):
            what = f"NCCL_SOCKET_IFNAME={chosen} on {host}: no interface of that name is up"
            yield Finding("error", what, f"Unset it, or name one of {listed(present) or 'those to come'}", (host,))
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        if checkup.environment.get(name) == "1" and len(checkup.gpus) > 1:
            what = f"{name}=1 on {host}: its {len(checkup.gpus)} GPUs talk the slow way"
            yield Finding("warning", what, f"Unset {name} unless they hang without it", (host,))


def _cuda(checkup: Checkup, host: str, _: Examination) -> Iterator[Finding]:
    if not checkup.nvidia_driver or checkup.gpus:
        return
    if checkup.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        shown = checkup.environment["CUDA_VISIBLE_DEVICES"]
        what = f"on {ABOUT} there is an NVIDIA driver, but CUDA_VISIBLE_DEVICES={shown!r} hides the GPUs"
        yield Finding("note", what, "Unset it to train on them", (host,))
    elif not checkup.cuda:
        what = f"on {ABOUT} there is an NVIDIA driver, but torch {checkup.torch} is a build for processors only"
        yield Finding(
            "warning", what, "Install torch with CUDA there (pytorch.org has the command), on every host", (host,)
        )
    else:
        what = f"on {ABOUT} there is an NVIDIA driver, but torch {checkup.torch} (CUDA {checkup.cuda}) finds no GPU"
        cure = "Look at nvidia-smi: the driver may be too old for this CUDA, or a container started without --gpus all"
        yield Finding("warning", what, cure, (host,))


def _memory(checkup: Checkup, host: str, _: Examination) -> Iterator[Finding]:
    if checkup.free_bytes < LEAST_FREE * checkup.memory_bytes:
        what = f"{host} has {checkup.free_bytes / GB:.1f} GB of {checkup.memory_bytes / GB:.1f} GB memory free"
        yield Finding(
            "warning", what, "End what fills it (look with top, sorted by M), or give it a smaller share", (host,)
        )
    for index, gpu in enumerate(checkup.gpus):
        if gpu.free_bytes < gpu.total_bytes / 2:
            taken = gpu.total_bytes - gpu.free_bytes
            what = f"other programs hold {taken / GB:.1f} GB of the {gpu.total_bytes / GB:.1f} GB of cuda:{index} on {host}"
            yield Finding("warning", what, "nvidia-smi names them; end them, or leave this GPU out", (host,))
    if checkup.shared_bytes is not None and checkup.shared_bytes < LEAST_SHARED_BYTES:
        what = f"/dev/shm on {ABOUT} holds {checkup.shared_bytes / (1 << 20):.0f} MiB, as Docker's default"
        cure = "Workers that read images crash there (bus error): start the container with --ipc=host or --shm-size=2g"
        yield Finding("warning", what, cure, (host,))


def _limits(checkup: Checkup, host: str, examination: Examination) -> Iterator[Finding]:
    least = LEAST_OPEN_FILES + OPEN_FILES_PER_DEVICE * examination.devices
    # RLIM_INFINITY is negative.
    if 0 <= checkup.open_files < least:
        what = f"on {ABOUT} a process may open {checkup.open_files} files, connections included"
        yield Finding("warning", what, f"{least} are wanted: ulimit -n 4096 before the start", (host,))


def _threads(checkup: Checkup, name: str, examination: Examination, names: Names) -> Iterator[Finding]:
    if not checkup.on.startswith("cpu"):
        return
    host = names.host[checkup.device]
    cores, limit = checkup.usable_cores, None if names.fleet is None else names.fleet.devices[checkup.device].cores
    cores = cores if limit is None else min(cores, limit)
    beside = sum(each.on.startswith("cpu") for each in examination.checkups if names.host[each.device] == host)
    # A quota that the fleet file states is the device's own; any other is shared by all on the host.
    share = cores if limit is not None else cores / beside
    advice = f"OMP_NUM_THREADS={max(1, round(share))}"
    if checkup.threads > max(1.0, 1.5 * share):
        what = f"{ABOUT}: {_threads_of(checkup)}, where {share:.3g} cores may be used"
        yield Finding("warning", what, f"They stand in each other's way: set {advice} there", (name,))
    elif checkup.threads * 2 < share:
        set_to = checkup.environment.get("OMP_NUM_THREADS")
        why = f", since OMP_NUM_THREADS={set_to} (torchrun sets 1 by itself)" if set_to else ""
        what = f"{ABOUT}: {_threads_of(checkup)}{why}, though there are {share:.3g} cores"
        yield Finding("warning", what, f"Set {advice} there", (name,))


def _busy(examination: Examination, host: str, first: int) -> Iterator[Finding]:
    pace = examination.paces.get(first)
    checkup = next(each for each in examination.checkups if each.device == first)
    if pace is None or pace.busy_cores <= BUSY * checkup.cores:
        return
    what = f"other programs keep {pace.busy_cores:.1f} of the {checkup.cores} cores of {ABOUT} busy"
    cure = "Look with top and end them, or wait: every step waits for the slowest device"
    yield Finding("warning", what, cure, (host,))


def _threads_of(checkup: Checkup) -> str:
    return f"{checkup.threads} thread{'s' * (checkup.threads > 1)} compute{'s' * (checkup.threads == 1)}"
