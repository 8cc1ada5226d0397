"""Queries hosts over ssh for their hardware, and builds a fleet from the answers. Hosts need no installation. Wakes hosts."""

import os
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

import psutil  # type: ignore[import-untyped]

from convoy.errors import InputError, shown
from convoy.fleet import Device, Fleet, Host, Nic
from convoy.fleet.catalogue import DeviceClass, names, plain_name
from convoy.launch.ssh import remedy, ssh_call, ssh_program

ANSWER_S = 30.0  # limit for a host's answer
WAKE_S = 300.0  # limit for a host to start after a Wake-on-LAN packet
ASSUMED_BYTES_PER_S, ASSUMED_LATENCY_S = 125e6, 1e-4  # 1 Gbit/s, for a NIC that does not report its speed
USED = 0.8  # fraction of a host's memory that plans may use

# For any POSIX shell; one fact per line. Systems omit unknown facts.
QUESTIONS = r"""
echo survey 1
echo cores "$(getconf _NPROCESSORS_ONLN 2>/dev/null || sysctl -n hw.ncpu)"
sed -n 's/^MemTotal: *\([0-9]*\) kB/memory_kib \1/p' /proc/meminfo 2>/dev/null
echo memory_bytes "$(sysctl -n hw.memsize 2>/dev/null)"
sed -n 's/^model name[^:]*: /processor /p' /proc/cpuinfo 2>/dev/null | head -n 1
echo processor "$(sysctl -n machdep.cpu.brand_string 2>/dev/null)"
nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | sed 's/^/gpu /'
set -- $SSH_CONNECTION
echo server "$3" "$4"
nic=$(ip -o route get "${1:-192.0.2.1}" 2>/dev/null | sed -n 's/.* dev \([^ ]*\).*/\1/p')
echo mbit_per_s "$(cat "/sys/class/net/$nic/speed" 2>/dev/null)"
"""


@dataclass(frozen=True)
class Answer:
    """The hardware of a host. `server` is the address and port of its ssh server; None for this machine."""

    cores: int
    memory_bytes: int | None
    processor: str
    gpus: tuple[str, ...]
    server: tuple[str, int] | None = None
    bytes_per_s: float | None = None
    latency_s: float | None = None


def read_answer(text: str) -> Answer | None:
    """Read the answers to QUESTIONS, and ignore other output of a login shell; return None without answers."""
    facts: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.strip().partition(" ")
        if value.strip():
            facts.setdefault(key, []).append(value.strip())
    first = {key: values[0] for key, values in facts.items()}
    cores = _number(first.get("cores"))
    if "survey" not in facts or not cores:
        return None
    kib, speed = _number(first.get("memory_kib")), _number(first.get("mbit_per_s"))  # -1 where a virtual NIC has none
    memory = kib * 1024 if kib else _number(first.get("memory_bytes"))
    server = first.get("server", "").split()
    port = _number(server[1]) if len(server) == 2 else None
    return Answer(
        cores, memory or None, first.get("processor", ""), tuple(facts.get("gpu", ())),
        (server[0], port) if port and port < 1 << 16 else None, speed * 125e3 if speed else None,
    )  # fmt: skip


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[0-9]{1,18}", text) else None


def host_of(text: str) -> Host:
    """Parse a host: name, user@name or name:port; `.` is this machine. Raise InputError for other text."""
    found = re.fullmatch(r"(?:(?P<user>[^@\s]+)@)?(?P<address>\[[^\]]+\]|[^@:\s]+)(?::(?P<port>[0-9]{1,5}))?", text)
    if found is None:
        raise InputError(f"host {shown(text)}: write a name or address, user@name or name:port; . is this machine")
    address = found["address"].strip("[]")
    if address == ".":
        return Host(_name(socket.gethostname()), "127.0.0.1")
    port = None if found["port"] is None else int(found["port"])
    return Host(_name(address), address, user=found["user"], ssh_port=port)


def _name(address: str) -> str:
    """Return a host's name for the fleet file: the first part of a host name, or the whole IP address."""
    plain = address if re.fullmatch(r"[\d.:a-fA-F]*[.:][\d.:a-fA-F]*", address) else address.partition(".")[0]
    return re.sub(r"[^A-Za-z0-9-]", "-", plain)


def ask(hosts: Sequence[Host]) -> list[Answer]:
    """Query all hosts at once. Raise InputError with all failed hosts and remedies."""
    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as threads:
        found = list(threads.map(ask_one, hosts))
    rows = zip(hosts, found, strict=True)
    if problems := [f"host {host.name}: {answer}" for host, answer in rows if isinstance(answer, str)]:
        raise InputError("\n".join(problems))
    return [each for each in found if isinstance(each, Answer)]


def ask_one(host: Host) -> Answer | str:
    """Return a host's answer, or the problem and its remedy."""
    here = host.address == "127.0.0.1"
    command = ["sh", "-s"] if here else ssh_call(ssh_program(os.environ), host, "sh -s")
    try:
        done = subprocess.run(
            command, input=QUESTIONS, capture_output=True, encoding="utf-8", errors="replace", timeout=ANSWER_S, check=False,
            start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"did not answer within {ANSWER_S:g} s: {remedy(host, 'timed out', 'python', '.')}"
    except OSError as error:
        return f"cannot start {command[0]!r}: {error.strerror}; install an ssh client, or correct CONVOY_SSH"
    if (answer := read_answer(done.stdout)) is None:
        last = " | ".join(line for line in done.stderr.splitlines()[-3:] if line) or "no output"
        return f"ssh ended with status {done.returncode}: {last}; {remedy(host, done.stderr, 'sh', '.')}"
    return answer if here or answer.server is None else replace(answer, latency_s=latency_to(answer.server))


def wake(hosts: Sequence[Host]) -> None:
    """Send Wake-on-LAN packets to the hosts with a `mac` until ssh reaches them, at most for `WAKE_S`."""
    asleep, until_s = [host for host in hosts if host.mac is not None], time.monotonic() + WAKE_S
    while asleep := [host for host in asleep if time.monotonic() < until_s and isinstance(ask_one(host), str)]:
        print(f"Waking {', '.join(host.name for host in asleep)} ...", flush=True)
        for host in asleep:
            send_magic_packet(str(host.mac))


def send_magic_packet(mac: str) -> None:
    """Send a Wake-on-LAN packet to this hardware address, on all networks of this machine."""
    packet = b"\xff" * 6 + 16 * bytes.fromhex(re.sub("[:-]", "", mac))
    for row in (row for rows in psutil.net_if_addrs().values() for row in rows if row.family == socket.AF_INET):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:  # the interface may be down
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            sender.bind((row.address, 0))  # selects the interface
            sender.sendto(packet, ("255.255.255.255", 9))


def latency_to(server: tuple[str, int]) -> float | None:
    """Return the latency to a server: half of the shortest time to connect; None if no connection succeeds."""
    times = []
    for _ in range(5):
        begin_s = time.perf_counter()
        with suppress(OSError), socket.create_connection(server, timeout=2.0):
            times.append(time.perf_counter() - begin_s)
    return min(times) / 2 if times else None


def fleet_of(hosts: Sequence[Host], answers: Sequence[Answer]) -> tuple[Fleet, list[str]]:
    """Return the fleet of these hosts, and notes on assumed figures. Raise InputError for two hosts of one name.

    Each GPU is a device, and all cores of a host are one device. Known devices get the figures of the catalogue.
    """
    notes: list[str] = []
    devices: list[Device] = []
    named: list[Host] = []
    for host, answer in zip(hosts, answers, strict=True):
        for number, gpu in enumerate(answer.gpus):
            known, name = class_of(gpu), f"{host.name}-gpu{number}"
            if known is None:
                notes.append(f"{name} ({gpu}): the catalogue has no such class; `convoy measure` will find its speed")
            made = Device(name, host.name, "cuda") if known is None else Device.of_class(known, name, host.name)
            devices.append(made)
        known = class_of(answer.processor)
        if known is not None and known.kind == "mps":
            devices.append(Device.of_class(known, f"{host.name}-gpu", host.name))
        device = Device(f"{host.name}-cpu", host.name, "cpu")
        if known is not None and known.kind == "cpu":
            device = Device.of_class(known.with_cores(answer.cores), device.name, host.name)
        memory = device.memory_bytes if answer.memory_bytes is None else int(USED * answer.memory_bytes)
        devices.append(replace(device, cores=float(answer.cores), memory_bytes=memory))
        if answer.bytes_per_s is None and len(hosts) > 1:
            notes.append(f"host {host.name}: its NIC does not report its speed; 1 Gbit/s is assumed")
        rate = answer.bytes_per_s or ASSUMED_BYTES_PER_S
        named.append(replace(host, card=Nic(rate, rate, answer.latency_s or ASSUMED_LATENCY_S)))
    return Fleet(tuple(named), tuple(devices)), notes


_NOISE = re.compile(
    r"\((r|tm|c)\)|@.*|\b(nvidia|geforce|tesla|amd|radeon|intel|graphics|gpu|cpu|processor|generation|\d+-core)\b"
    r"|\b(\d+th gen|hbm\de?|sxm\d?)\b"
)
"""Parts of product names that are not in a class's name."""


def class_of(product: str) -> DeviceClass | None:
    """Return the catalogue's class of a product: `rtx3060` for "NVIDIA GeForce RTX 3060"; None if there is none.

    The whole name must match, so that a 3060 Ti is not a 3060. Only the memory size and the slot may be omitted.
    """
    words = _NOISE.sub(" ", product.lower())
    without_slot = re.sub(r"\bpcie\b", " ", words)
    without_size = re.sub(r"\b\d+ ?gb\b", " ", without_slot)
    found = (names().get(plain_name(each)) for each in (words, without_slot, without_size))
    return next((row[0] for row in found if row is not None), None)
