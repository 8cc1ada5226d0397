"""How the processes of a job find each other: at a store, where each leaves what the others must know of it."""

import json
import os
import platform
import socket
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import TCPStore

from convoy._version import __version__
from convoy.comm.channel import Credentials
from convoy.comm.environment import (
    ProcessEnv,
    inherited_listener,
    is_loopback,
    listen_at,
    nobody_listens,
    own_address,
    resolve,
)
from convoy.comm.job_key import key_of_process
from convoy.comm.meeting import KeptStore, Prefixed, Store, VisitedStore, visit
from convoy.errors import DeviceLostError, InputError, MismatchError
from convoy.machine.accelerator import hardware_name, uuid_of

SHARED = "CONVOY_SHARED_ACCELERATOR"
"""Set to anything, several processes may compute on one accelerator."""


@dataclass(frozen=True)
class ProcessInfo:
    """What a process says about itself when it joins. What an older or newer Convoy leaves out reads as ``"?"``."""

    device: str = "?"  # "cpu", "cuda:0"
    name: str = "?"  # of the hardware
    host: str = "?"
    address: str = "?"
    devices: str = "?"  # how many it believes there are
    convoy: str = "?"
    torch: str = "?"  # major.minor: patch releases work together
    nonce: str = "?"  # tells two processes apart that claim the same env
    accelerator: str = (
        "?"  # the one piece of hardware; empty on a CPU, where torch does not say, and where it may be shared
    )

    @classmethod
    def from_text(cls, text: str) -> "ProcessInfo":
        try:
            known = json.loads(text)
            return cls(**{field.name: str(known[field.name]) for field in fields(cls) if field.name in known})
        except (ValueError, TypeError):
            return cls()


def own_info(torch_device: torch.device, devices: int, address: str) -> ProcessInfo:
    """What this process says about itself."""
    return ProcessInfo(
        str(torch_device), hardware_name(torch_device), platform.node(), address, str(devices), __version__,
        torch=".".join(torch.__version__.split(".")[:2]), nonce=uuid.uuid4().hex,
        accelerator="" if os.environ.get(SHARED) else uuid_of(torch_device) or "",
    )  # fmt: skip


def check_infos(infos: Sequence[ProcessInfo]) -> None:
    """Refuse a job whose processes run different versions, count different numbers of devices, or share an accelerator.

    Raises:
        MismatchError: names the devices in the minority, what they have, and what the others have.
        InputError: names the devices that compute on one accelerator.
    """
    marks = [info.accelerator for info in infos]
    for i, mark in enumerate(marks):
        if mark not in ("", "?") and (first := marks.index(mark)) != i:
            raise InputError(
                f"{title(first, infos[first])} and {title(i, infos[i])} are two processes on one accelerator ({mark}): leave "
                "CONVOY_DEVICE unset, so that each takes the one of its number, start fewer processes, or let them share it "
                f"with {SHARED}=1"
            )
    for field, meaning in (("devices", "number of devices (WORLD_SIZE)"), ("convoy", "convoy"), ("torch", "torch")):
        values = [getattr(info, field) for info in infos]
        usual = Counter(values).most_common(1)[0][0]
        others = [f"{value} on {title(i, infos[i])}" for i, value in enumerate(values) if value != usual]
        if others:
            raise MismatchError(
                f"the devices do not run the same {meaning}: {usual} on most, but {', '.join(others)}. "
                "Use the same environment on every machine"
            )


def title(device: int, info: ProcessInfo | None) -> str:
    """A device as messages name it: its index, and where it is once that is known."""
    return f"device {device}" if info is None else f"device {device} (host {info.host}, {info.device})"


# ------------------------------------------------------------------------------------------------ the store


LONGEST_PAUSE_S = 0.1
"""Between two looks into the store."""

_stores: dict[tuple[str, int], Store] = {}
"""The stores this process goes to. Torch's stay open until it ends, so that a job can meet again at the same port."""

_texts: dict[tuple[str, int], dict[str, str]] = {}
"""What lies in the stores of this process, so that a job can meet again at a store that was closed in between."""

_boards = Counter[tuple[str, int]]()
"""How often this job has met where torch's store is only the place that tells where the job's own is."""


def credentials_of(env: ProcessEnv) -> Credentials:
    """What this process proves itself with to the others of its job. InputError: see :func:`key_of_process`."""
    return Credentials(key_of_process(env, os.environ))


def keep_store(address: str, credentials: Credentials) -> int:
    """Keep a store for a further meeting, on a free port of this machine's address; the port."""
    listener = listen_at(address, 0)
    port = int(listener.getsockname()[1])
    _stores[address, port] = store_on(listener) if credentials.key is None else KeptStore(listener, credentials, {})
    return port


def leave_store(host: str, port: int) -> None:
    """Close this process's way to a store, and the store if it keeps it: where all have met, the port is free again.

    One of torch's that others may still need, at a job's own meeting point, stays.
    """
    store = _stores.get((host, port))
    if isinstance(store, KeptStore | VisitedStore):
        del _stores[host, port]
        store.close()


def forget_store(host: str, port: int) -> None:
    """Close this process's way to a store, of torch's too, where nobody meets any more."""
    leave_store(host, port)
    _stores.pop((host, port), None)


def store_at(env: ProcessEnv, deadline_s: float, credentials: Credentials | None = None) -> Store:
    """The store of this job; this process keeps it if it is device 0 and no launcher does.

    With a key it is the job's own. Where torch's store is at that place already, that one only tells where the job's own is.

    Raises:
        InputError: device 0 cannot listen there; no key, or another one than who listens there.
        DeviceLostError: nobody listened there until ``deadline_s`` (of ``time.monotonic``).
    """
    key, credentials = (env.host, env.port), credentials or credentials_of(env)
    if key in _stores:
        return _stores[key]
    if credentials.key is None:
        _stores[key] = _torch_store(env, deadline_s)
    elif env.hosted or _torch_has_met(env):
        _stores[key] = _told_store(env, _torch_store(env, deadline_s), credentials, deadline_s)
    elif env.device == 0:
        listener = _listener(env)
        _stores[key] = KeptStore(listener, credentials, _texts.setdefault(key, {}))
    else:
        _stores[key] = visit(env.host, env.port, credentials, deadline_s)
    return _stores[key]


def _torch_has_met(env: ProcessEnv) -> bool:
    """Whether the script has called init_process_group(): all have met already, and device 0's port is taken."""
    return distributed.is_initialized() and distributed.get_world_size() == env.devices


def _torch_store(env: ProcessEnv, deadline_s: float) -> Any:
    if _torch_has_met(env):
        return distributed.distributed_c10d._get_default_store()
    if env.device == 0 and not env.hosted:
        return store_on(_listener(env))
    return visit_store(env.host, env.port, deadline_s)


def _told_store(env: ProcessEnv, board: Store, credentials: Credentials, deadline_s: float) -> Store:
    """The job's own store, of which only the address goes over torch's: who changes that finds no way in, and keeps nothing."""
    place = (env.host, env.port)
    key = f"convoy-meeting/{env.attempt}/{_boards[place]}"
    _boards[place] += 1
    if env.device == 0:
        store = KeptStore(listen_at(own_address(env.host, env.port), 0), credentials, {})
        board.set(key, json.dumps(store.address))
        return store
    pause_s = 0.01
    while not board.check([key]):
        if time.monotonic() + pause_s > deadline_s:
            raise DeviceLostError(0, "device 0 did not come within the time limit: see its own output, and start it")
        time.sleep(pause_s)
        pause_s = min(LONGEST_PAUSE_S, 1.5 * pause_s)
    host, port = json.loads(board.get(key))
    return visit(str(host), int(port), credentials, deadline_s)


def _listener(env: ProcessEnv) -> socket.socket:
    _check_open(env)
    return inherited_listener() or listen_at(env.host, env.port)


def _check_open(env: ProcessEnv) -> None:
    """Refuse to wait for other machines at an address that they cannot reach."""
    address = str(resolve(env.host, env.port, socket.SOCK_STREAM)[0][1][0])
    if env.local_devices is not None and env.local_devices < env.devices and is_loopback(address):
        raise InputError(
            f"MASTER_ADDR={env.host} is {address} on this machine, which leads to itself only, but {env.devices} "
            f"devices are to meet there and {env.local_devices} of them are here: give the address of this machine "
            "in the network (Debian maps a machine's own name to loopback in /etc/hosts)"
        )


def store_on(listener: socket.socket) -> TCPStore:
    """A store that listens where a socket listens already, and there only: torch's own choice is every address."""
    with listener:
        address, port = listener.getsockname()[:2]
        # Multi-tenant: a script that also calls init_process_group() then finds this store, not a taken port.
        return TCPStore(
            address, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
        )


def visit_store(host: str, port: int, deadline_s: float) -> TCPStore:
    """A connection to a store that somebody else hosts, or will within the time.

    Raises:
        InputError: the name is unknown.
        DeviceLostError: nobody listened there until ``deadline_s`` (of ``time.monotonic``).
    """
    resolve(host, port, socket.SOCK_STREAM)
    pause_s = 0.01
    while True:
        try:
            # Asking with a plain socket first: torch's client prints stack traces and takes thrice the time.
            with socket.create_connection((host, port), timeout=max(0.1, deadline_s - time.monotonic())) as probe:
                address = str(probe.getpeername()[0])
            break
        except OSError as error:
            if time.monotonic() + pause_s > deadline_s:
                raise nobody_listens(host, port, str(error.strerror or error)) from None
        time.sleep(pause_s)
        pause_s = min(0.25, 1.5 * pause_s)
    limit = timedelta(seconds=max(1.0, deadline_s - time.monotonic()))
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)


class Rendezvous:
    """One rendezvous of all processes at a store: each topic gathers one text from every one of them."""

    def __init__(self, store: Store, env: ProcessEnv, number: int, deadline_s: float) -> None:
        """Rendezvous ``number`` of this process; all processes hold equally many. It ends at ``deadline_s``."""
        # A restarted or second one must not find the infos, or NCCL's addresses, of the one before.
        self.prefix, self.whole = f"convoy/{env.attempt}/{number}", store
        self.store = Prefixed(self.prefix, store)
        self.env = env
        self.deadline_s = deadline_s
        self.infos: list[ProcessInfo] = []

    def exchange_infos(self, info: ProcessInfo) -> list[ProcessInfo]:
        """Everybody's info.

        Raises:
            InputError, DeviceLostError: as in :meth:`gather`.
            MismatchError: as in :func:`check_infos`.
        """
        texts = self.gather("greeting", json.dumps(asdict(info)))  # the key that all versions use
        self.infos = [ProcessInfo.from_text(text) for text in texts]
        try:
            check_infos(self.infos)
        except (InputError, MismatchError):
            self._linger()
            raise
        return self.infos

    def gather(self, topic: str, text: str) -> list[str]:
        """Everybody's text on the topic, in device order.

        Raises:
            InputError: another process has this one's rank.
            DeviceLostError: some device brought nothing until the deadline; all such devices are named.
        """
        keys = [f"{topic}/{device}" for device in range(self.env.devices)]
        kept = self.store.compare_set(keys[self.env.device], "", text).decode()
        if kept != text:
            raise InputError(
                f"two processes claim to be device {self.env.device} (RANK={self.env.device}): this one, and one "
                f"on host {ProcessInfo.from_text(kept).host}; give every process its own RANK"
            )
        pause_s = 0.002
        while not self.store.check(keys):
            if self.store.check(["failed"]):
                device, cause = json.loads(self.store.get("failed"))
                raise DeviceLostError(int(device), str(cause))
            if time.monotonic() + pause_s > self.deadline_s:
                error = self._absence([key for key in keys if self.store.check([key])], keys)
                self.store.set("failed", json.dumps([error.device, str(error)]))
                self._linger()
                raise error
            # The store's own wait prints warnings when its time runs out.
            time.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 1.5 * pause_s)
        return [value.decode() for value in self.store.multi_get(keys)]

    def _linger(self) -> None:
        """Give the others the time to read what went wrong, if the store ends with this process."""
        if self.env.device == 0 and not self.env.hosted:
            time.sleep(3 * LONGEST_PAUSE_S)

    def _absence(self, present: Sequence[str], keys: Sequence[str]) -> DeviceLostError:
        missing = [device for device, key in enumerate(keys) if key not in present]
        if self.infos:
            names = ", ".join(title(device, self.infos[device]) for device in missing)
            return DeviceLostError(
                missing[0], f"{names} came and was lost before the job began: see its own output, and start again"
            )
        hosts = sorted({ProcessInfo.from_text(self.store.get(key).decode()).host for key in present})
        names = ", ".join(str(device) for device in missing)
        return DeviceLostError(
            missing[0],
            f"{'devices' if len(missing) > 1 else 'device'} {names} of {self.env.devices} did not come within the "
            f"time limit; here are {len(present)}, on {', '.join(hosts)}. Start the missing ones with "
            f"MASTER_ADDR={self.env.host} MASTER_PORT={self.env.port}, or a job of fewer devices",
        )
