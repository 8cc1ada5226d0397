"""Joining a running job: a process finds it, asks to be admitted, waits, and meets its devices."""

import os
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

import torch

from convoy._version import __version__
from convoy.comm import processes
from convoy.comm.connection import Connection, Credentials, Fields, NotOfThisJob
from convoy.comm.environment import JOIN, ProcessEnv, own_address
from convoy.comm.group import AloneGroup, ChangingGroup, Group
from convoy.comm.rendezvous import credentials_of
from convoy.elastic.admission import POLL_S, SPARE_POLL_S
from convoy.elastic.regroup import Home, Membership
from convoy.errors import DeviceLostError, InputError, MismatchError
from convoy.machine import roster
from convoy.machine.process import watch_parent

Address = tuple[str, int]

ANSWER_S = 5.0
"""How long an answer may take: the listener's thread has nothing else to do."""

RETRY_S = 0.2

REFUSED_S = 3.0
"""A device that admits nobody may not have got that far yet: it is asked again for this long."""

HELLO_S = 10.0
"""How long a running job may take to answer a joining device: the job may be just beginning."""

ROUNDS = 3
"""How often every known address is tried without an answer: the job may be regrouping."""

MOST_DOORS = 64
"""Addresses that a joining device remembers."""


def join(device: str | torch.device | None = None, timeout_s: float = 60.0, *, staged: bool = False) -> Group:
    """Join the job that this process belongs to, and meet the others; a group of one where there is no job.

    The job is what torchrun's environment says: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. Under `convoy run
    --join` it is a running one; the group is then this device alone until the job admits it.
    The group closes itself at the end of the process, or of a ``with`` block.

    Args:
        device: where to compute, such as "cpu" or "cuda:1". By default CONVOY_DEVICE, else the accelerator of this
            process's number on its machine, else the CPU.
        timeout_s: how long to wait for the others here, and in every later wait, before they count as lost.
        staged: send tensors through buffers in host memory even where that is not needed.

    Raises:
        InputError: an incomplete environment, no such device, a port that is taken, a rank or an accelerator claimed twice;
            no running job at the address, or one that takes no scripts.
        MismatchError: the devices run different versions.
        DeviceLostError: somebody did not come in time, or cannot be reached.
    """
    text = os.environ.pop(JOIN, "")
    if not text:
        return processes.join(device, timeout_s, staged=staged)
    processes.check_timeout(timeout_s)
    watch_parent()
    torch_device = processes.own_device(device, 0)
    places = [each.rpartition(":") for each in text.split(",")]
    entrance, offer = greet([(host.strip("[]"), int(port)) for host, _, port in places])
    if "script" not in offer:
        raise InputError("the job there is a `convoy train`: `convoy join` comes into it, without a script")
    roster.enter(str(offer["job"]), 0, str(torch_device))
    group = ChangingGroup(AloneGroup(torch_device, timeout_s))
    group.entrance = entrance
    group.is_of_this_process()
    return group


def greet(doors: Sequence[Address]) -> tuple["Entrance", Fields]:
    """Find a running job at these addresses. Return the entrance to it, and how the job describes itself.

    Raises:
        InputError: see :meth:`Entrance.hello`.
        MismatchError: the job runs another version.
    """
    env = ProcessEnv(0, 2, 0, None, *doors[0], hosted=False, attempt=0)
    entrance = Entrance(doors, credentials_of(env))
    offer = entrance.hello(HELLO_S)
    if offer["version"] != __version__:
        raise MismatchError(
            f"the job runs Convoy {offer['version']}, this is {__version__}: install the same version on every machine"
        )
    return entrance, offer


class NoJobError(InputError):
    """No device of a job answers."""


@dataclass(frozen=True, slots=True)
class Doors:
    """The addresses of a job's devices, as a joining device knows them.

    Only the first device admits. Every other one answers with the addresses of the present generation, the first device's
    first. The addresses known before stay behind them, because any device may be lost meanwhile.

    Attributes:
        known: at least one.
        asked: the index of the address to ask next.
        unanswered: how many addresses in sequence did not answer.
    """

    known: tuple[Address, ...]
    asked: int = 0
    unanswered: int = 0

    @property
    def next(self) -> Address:
        return self.known[self.asked]

    @property
    def are_silent(self) -> bool:
        """Whether the job has probably ended."""
        return self.unanswered >= ROUNDS * len(self.known)

    def without_answer(self) -> "Doors":
        return Doors(self.known, (self.asked + 1) % len(self.known), self.unanswered + 1)

    def redirected(self, doors: Sequence[Address]) -> "Doors":
        """Ask at these next."""
        return Doors(_together(doors, self.known)) if doors else self.without_answer()

    def answered(self, doors: Sequence[Address] = ()) -> "Doors":
        """Ask the same device again; its job now has these addresses."""
        # The one that answered stays the first: it may know itself by an address that this device does not reach.
        return Doors(_together((self.next,), doors, self.known))

    def __str__(self) -> str:
        return ", ".join(map(_shown, self.known[:4])) + (", ..." if len(self.known) > 4 else "")


@final
class Entrance:
    """A process that asks a running job to admit it.

    Args:
        doors: addresses of the job's devices, as far as they are known.
    """

    def __init__(self, doors: Sequence[Address], credentials: Credentials) -> None:
        self.credentials, self.mark = credentials, uuid.uuid4().hex
        self.doors = Doors(tuple(doors))
        self._token = ""
        self._channel: tuple[Address, Connection] | None = None
        self._offer: Fields = {}

    def hello(self, limit_s: float) -> Fields:
        """Return how the job describes itself.

        Raises:
            NoJobError: no device of a job answers at the addresses within the time.
            InputError: the job has another key, or admits nobody.
        """
        until_s, stranger = time.monotonic() + limit_s, None
        certain_s = min(until_s, time.monotonic() + REFUSED_S)
        while True:
            for door in self.doors.known:
                try:
                    told = self._request(door, {"do": "hello"})
                except NotOfThisJob as error:
                    stranger = (door, error)
                    continue
                except (OSError, ValueError):
                    continue
                if "refused" in told and time.monotonic() < certain_s:
                    continue
                if "refused" in told:
                    self._leave()
                    raise InputError(
                        f"the job at {_shown(door)}: {told['refused']}; start it with --listen to let others join"
                    )
                self._token, self._offer = str(told["token"]), told["offer"]
                self.doors = self.doors.redirected(_doors(told))
                return self._offer
            if time.monotonic() > until_s:
                if stranger is not None:
                    raise InputError(
                        f"the job at {_shown(stranger[0])} has another key ({stranger[1]}): give the file that it was started "
                        "with, --job-key FILE, or CONVOY_JOB_KEY=FILE"
                    )
                raise NoJobError(
                    f"no job that can be joined answers at {self.doors}: give the address that it prints, see "
                    "whether it still trains, and whether a firewall is between"
                )
            time.sleep(RETRY_S)

    def enter(self, group: ChangingGroup, facts: Fields, tell: Callable[[str], None] = lambda _: None) -> Membership:
        """Wait until the job admits this process, and meet its devices. The group is then theirs.

        Args:
            group: this device alone.
            facts: how it describes itself.
            tell: is called with a line of text when it waits as a spare.

        Raises:
            InputError: the job refuses it.
            DeviceLostError: the job has ended, or continued without it.
        """
        membership = Membership(group, Home(own_address(*self.doors.next), 0, self.credentials, self._token))
        request = {"do": "ask", "mark": self.mark, "door": membership.doors[0], "facts": facts}
        spare = ""
        try:
            while True:
                told: Fields | None
                try:
                    told = self._request(self.doors.next, request)
                except (OSError, NotOfThisJob, ValueError):
                    told = None
                if told is None:
                    self.doors = self.doors.without_answer()
                    if self.doors.are_silent:
                        raise DeviceLostError(0, f"nobody of the job answers at {self.doors}: has it ended?")
                elif "call" in told:
                    membership.offer = self._offer  # others may ask this device from here on
                    membership.come(int(told["device"]), told)
                    return membership
                elif "refused" in told:
                    raise InputError(str(told["refused"]))
                elif "elsewhere" in told:
                    self.doors = self.doors.redirected(_doors(told))
                    continue
                else:
                    self.doors, before, spare = self.doors.answered(_doors(told)), spare, str(told.get("spare", ""))
                    if spare and spare != before:
                        tell(f"waits as a spare: {spare}")
                time.sleep(SPARE_POLL_S if spare else POLL_S)
        except BaseException as error:
            membership.depart(error if isinstance(error, DeviceLostError) else DeviceLostError(0, str(error)))
            raise
        finally:
            self._leave()

    def _request(self, door: Address, words: Fields) -> Fields:
        """Return the answer at an address. OSError or NotOfThisJob if there is none, ValueError if it is no text."""
        deadline_s = time.monotonic() + ANSWER_S
        words = {"for": "join", **words}
        if self._channel is not None and self._channel[0] != door:
            self._leave()
        try:
            if self._channel is None:
                self._channel = door, self.credentials.connect(door, words, deadline_s)
            else:
                self._channel[1].deadline(deadline_s)
                self._channel[1].send_message(words)
            answer = self._channel[1].receive_message()
        except BaseException:
            self._leave()
            raise
        assert answer is not None  # this connection waits
        return answer

    def _leave(self) -> None:
        if self._channel is not None:
            with suppress(OSError):
                self._channel[1].close()
        self._channel = None


def _doors(told: Fields) -> tuple[Address, ...]:
    return tuple((str(host), int(port)) for host, port in told["doors"])


def _shown(door: Address) -> str:
    return f"{door[0]}:{door[1]}"


def _together(*rows: Sequence[Address]) -> tuple[Address, ...]:
    return tuple(dict.fromkeys(door for doors in rows for door in doors))[:MOST_DOORS]
