"""Newcomers of a loop of one's own: where they ask, what is compared, and what they are told beside the model's state."""

import os
import socket
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch

from convoy._version import __version__
from convoy.comm import roster
from convoy.comm.accelerator import modes
from convoy.comm.changing import present
from convoy.comm.channel import Words
from convoy.comm.environment import LISTEN, ProcessEnv, is_loopback, read_process_env, resolve
from convoy.comm.group import Group
from convoy.comm.processes import JoinedGroup
from convoy.comm.rendezvous import credentials_of
from convoy.elastic.newcomers import Verdict
from convoy.elastic.regroup import Home
from convoy.errors import InputError
from convoy.planner.known import Known
from convoy.runtime.module import Distributed


def listens() -> bool:
    return bool(os.environ.get(LISTEN))


def home_here(group: Group) -> Home | None:
    """Where this device of a script answers newcomers; see :func:`home_at`."""
    if not listens():
        return None
    host, _, port = os.environ[LISTEN].rpartition(":")
    return home_at(host.strip("[]"), int(port), group)


def home_at(host: str, port: int, group: Group) -> Home:
    """Where a device answers as a member of a job that listens there. The first device of each other host takes the port of the
    first of all, if it is free there.

    Raises:
        InputError: as `door_address`.
    """
    inside = present(group)
    if isinstance(inside, JoinedGroup):
        place, is_first = read_process_env(os.environ), group.device == 0
        first_there = place is not None and place.local == 0 and place.local_devices is not None
        address = door_address(host, inside.address, is_first)
        wish = port if first_there and not is_first else 0
        return Home.of(inside, port if is_first else 0, wish, address)
    env = ProcessEnv(0, 1, 0, 1, host, port, hosted=False, attempt=0)
    return Home(host, port, credentials_of(env), f"members of {uuid.uuid4().hex}")


def door_address(listen: str, met: str, first: bool) -> str:
    """The address at which a device answers who comes: where it has met the others, or `--listen` where that leads to this
    machine only, where then all of them are.

    Args:
        listen: the address of `--listen`.
        met: at which this device has met the others.
        first: whether it is device 0, at whose machine newcomers ask first.

    Raises:
        InputError: the devices speak at another address than the one that newcomers are to be told.
    """
    found = [str(target[0]) for _, target in resolve(listen, 0, socket.SOCK_STREAM)]
    if is_loopback(met):
        return found[0]
    if first and met not in found:
        raise InputError(
            f"--listen {listen}: the devices have met at {met} on this machine, where they go on to speak, newcomers too: give "
            f"--listen {met} with the same port, or for each host of the fleet file an address in the network of {listen}"
        )
    return met


def offer() -> Words:
    """What a script's devices tell who asks."""
    return {"version": __version__, "script": True, "job": roster.job()}


def facts_of(model: Distributed) -> Words:
    """What a device says of itself that comes into a script's training."""
    return {"same": _same(model), "title": str(model.group.torch_device)}


def _same(model: Distributed) -> dict[str, str]:
    """What must be the same on all devices, by its name in messages."""
    torch_version = ".".join(torch.__version__.split(".")[:2])
    graph = model.traced[True].graph
    return {"convoy": __version__, "torch": torch_version, "model": graph.fingerprint, **modes()}


class Welcome:
    """Admits devices that have the same model.

    Args:
        replan: of the members: what it knows of the devices is told.
        has_epochs: whether the script iterates over `Members.epochs`, where devices join.
    """

    def __init__(self, model: Distributed, replan: Any, has_epochs: Callable[[], bool]) -> None:
        self.model, self.replan, self.has_epochs = model, replan, has_epochs

    def judge(self, facts: Words, members: Sequence[int], device: int) -> Verdict:  # noqa: ARG002
        for what, mine in _same(self.model).items():
            if (theirs := facts["same"].get(what)) != mine and "unknown" not in (theirs, mine):
                return (
                    "refused",
                    f"its {what} is {theirs}, that of the job is {mine}: it must be the same on every machine",
                )
        if not self.has_epochs():
            return "refused", (
                "its script has no `for epoch in members.epochs(n):`, where devices join: write it around the loop over "
                "batches"
            )
        return "wanted", ""

    def came(self, device: int, facts: Words) -> None:
        """It gets a mean share: nothing was measured of it."""

    def told(self) -> Any:
        known = getattr(self.replan, "known", None)
        return None if known is None else known.to_json()

    def hear(self, told: Any) -> None:
        if told is not None and hasattr(self.replan, "known"):
            self.replan.known = Known.from_json(told)
