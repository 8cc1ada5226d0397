"""Rendezvous of a job's processes: each publishes a description of itself in the job's store, and reads the others'."""

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
from convoy.comm.connection import Credentials
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
"""If set, several processes may compute on one accelerator."""


@dataclass(frozen=True)
class ProcessInfo:
    """A joining process, as the others know it. A field that another version of Convoy does not send is ``"?"``."""

    device: str = "?"  # "cpu", "cuda:0"
    name: str = "?"  # of the hardware
    host: str = "?"
    address: str = "?"
    devices: str = "?"  # its WORLD_SIZE
    convoy: str = "?"
    torch: str = "?"  # major.minor: patch releases work together
    nonce: str = "?"  # distinguishes two processes with the same rank
    accelerator: str = "?"  # the driver's id; empty on a CPU, where torch does not know it, and where it may be shared

    @classmethod
    def from_text(cls, text: str) -> "ProcessInfo":
        try:
            known = json.loads(text)
            return cls(**{field.name: str(known[field.name]) for field in fields(cls) if field.name in known})
        except (ValueError, TypeError):
            return cls()


def own_info(torch_device: torch.device, devices: int, address: str) -> ProcessInfo:
    """Describe this process."""
    return ProcessInfo(
        str(torch_device), hardware_name(torch_device), platform.node(), address, str(devices), __version__,
        torch=".".join(torch.__version__.split(".")[:2]), nonce=uuid.uuid4().hex,
        accelerator="" if os.environ.get(SHARED) else uuid_of(torch_device) or "",
    )  # fmt: skip


def check_infos(infos: Sequence[ProcessInfo]) -> None:
    """Refuse a job whose processes have different versions, expect different numbers of devices, or share an accelerator.

    Raises:
        MismatchError: names the devices in the minority, what they have, and what the others have.
        InputError: names the processes that share an accelerator.
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
    """Name a device for messages: its id, and its host if known."""
    return f"device {device}" if info is None else f"device {device} (host {info.host}, {info.device})"


# ------------------------------------------------------------------------------------------------ the store


MAX_POLL_S = 0.1
"""Longest pause between two reads of the store."""

_stores: dict[tuple[str, int], KeptStore | VisitedStore] = {}
"""Open stores of this process, by address."""

_texts: dict[tuple[str, int], dict[str, str]] = {}
"""Contents of the stores that this process has hosted, so that a job can meet again after a store was closed."""

_announced = Counter[tuple[str, int]]()
"""How many of the job's own stores were announced in torch's store at an address."""


def credentials_of(env: ProcessEnv) -> Credentials:
    """Return this process's credentials for its job. InputError: see :func:`key_of_process`."""
    return Credentials(key_of_process(env, os.environ))


def host_store(address: str, credentials: Credentials) -> int:
    """Host a store for another rendezvous on a free port of `address`. Return the port."""
    listener = listen_at(address, 0)
    port = int(listener.getsockname()[1])
    _stores[address, port] = KeptStore(listener, credentials, {})
    return port


def close_store(host: str, port: int) -> None:
    """Close this process's connection to a store, or the store itself if this process hosts it."""
    if store := _stores.pop((host, port), None):
        store.close()


def store_at(env: ProcessEnv, deadline_s: float, credentials: Credentials | None = None) -> Store:
    """Return the store of this job. Device 0 hosts it.

    Where torch already listens at the job's address, device 0 hosts the store on another port and announces it in torch's.

    Raises:
        InputError: device 0 cannot listen there, or the job has no key, or whoever listens there has another one.
        DeviceLostError: nobody listened there until ``deadline_s`` (of ``time.monotonic``).
    """
    key, credentials = (env.host, env.port), credentials or credentials_of(env)
    if key not in _stores:
        torch_has_met = distributed.is_initialized() and distributed.get_world_size() == env.devices
        if torch_has_met or env.hosted:
            torch_store = (
                distributed.distributed_c10d._get_default_store()
                if torch_has_met
                else visit_torch_store(env.host, env.port, deadline_s)
            )
            _stores[key] = _announced_store(env, torch_store, credentials, deadline_s)
        elif env.device == 0:
            _check_reachable(env)
            listener = inherited_listener() or listen_at(env.host, env.port)
            _stores[key] = KeptStore(listener, credentials, _texts.setdefault(key, {}))
        else:
            _stores[key] = visit(env.host, env.port, credentials, deadline_s)
    return _stores[key]


def _announced_store(
    env: ProcessEnv, torch_store: Any, credentials: Credentials, deadline_s: float
) -> KeptStore | VisitedStore:
    """Return the job's own store. Only its address passes through torch's, so a forged one can only prevent the start."""
    place = (env.host, env.port)
    key = f"convoy-meeting/{env.attempt}/{_announced[place]}"
    _announced[place] += 1
    if env.device == 0:
        store = KeptStore(listen_at(own_address(env.host, env.port), 0), credentials, {})
        torch_store.set(key, json.dumps(store.address))
        return store
    pause_s = 0.01
    while not torch_store.check([key]):
        if time.monotonic() + pause_s > deadline_s:
            raise DeviceLostError(0, "device 0 did not come within the time limit: see its own output, and start it")
        time.sleep(pause_s)
        pause_s = min(MAX_POLL_S, 1.5 * pause_s)
    host, port = json.loads(torch_store.get(key))
    return visit(str(host), int(port), credentials, deadline_s)


def _check_reachable(env: ProcessEnv) -> None:
    """Refuse to wait for other machines at a loopback address."""
    address = str(resolve(env.host, env.port, socket.SOCK_STREAM)[0][1][0])
    if env.local_devices is not None and env.local_devices < env.devices and is_loopback(address):
        raise InputError(
            f"MASTER_ADDR={env.host} is {address} on this machine, which leads to itself only, but {env.devices} "
            f"devices are to meet there and {env.local_devices} of them are here: give the address of this machine "
            "in the network (Debian maps a machine's own name to loopback in /etc/hosts)"
        )


def store_on(listener: socket.socket) -> TCPStore:
    """Create a TCPStore on an already bound socket. (torch would bind every address.)"""
    with listener:
        address, port = listener.getsockname()[:2]
        # Multi-tenant: a script that also calls init_process_group() then finds this store, not a taken port.
        return TCPStore(
            address, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
        )


def visit_torch_store(host: str, port: int, deadline_s: float) -> TCPStore:
    """Connect to a TCPStore that another process hosts, or will host within the time.

    Raises:
        InputError: the name is unknown.
        DeviceLostError: nobody listened there until ``deadline_s`` (of ``time.monotonic``).
    """
    resolve(host, port, socket.SOCK_STREAM)
    pause_s = 0.01
    while True:
        try:
            # Try a plain socket first: torch's client prints stack traces and takes three times as long.
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
    """One rendezvous of all processes at a store. Per topic, it gathers one text of each process."""

    def __init__(self, store: Store, env: ProcessEnv, number: int, deadline_s: float) -> None:
        """Prepare rendezvous ``number`` of this process, the same number on all. It ends at ``deadline_s``."""
        # The prefix keeps apart the texts of a restarted or of an earlier rendezvous.
        self.store = Prefixed(f"convoy/{env.attempt}/{number}", store)
        self.env = env
        self.deadline_s = deadline_s
        self.infos: list[ProcessInfo] = []

    def exchange_infos(self, info: ProcessInfo) -> list[ProcessInfo]:
        """Return the infos of all processes, in device order.

        Raises:
            InputError, DeviceLostError: as in :meth:`gather`.
            MismatchError: as in :func:`check_infos`.
        """
        texts = self.gather("greeting", json.dumps(asdict(info)))  # all versions use this topic
        self.infos = [ProcessInfo.from_text(text) for text in texts]
        try:
            check_infos(self.infos)
        except (InputError, MismatchError):
            self._linger()
            raise
        return self.infos

    def gather(self, topic: str, text: str) -> list[str]:
        """Return the texts of all processes on a topic, in device order.

        Raises:
            InputError: another process has the same rank.
            DeviceLostError: names all devices that sent nothing until the deadline.
        """
        keys = [f"{topic}/{device}" for device in range(self.env.devices)]
        first = self.store.compare_set(keys[self.env.device], "", text).decode()
        if first != text:
            raise InputError(
                f"two processes claim to be device {self.env.device} (RANK={self.env.device}): this one, and one "
                f"on host {ProcessInfo.from_text(first).host}; give every process its own RANK"
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
            time.sleep(pause_s)
            pause_s = min(MAX_POLL_S, 1.5 * pause_s)
        return [value.decode() for value in self.store.multi_get(keys)]

    def _linger(self) -> None:
        """Give the others time to read the failure, if this process hosts the store."""
        if self.env.device == 0 and not self.env.hosted:
            time.sleep(3 * MAX_POLL_S)

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
