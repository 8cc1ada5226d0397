"""Carries out what the devices of a job agree on when one of them is lost: they find each other again, and meet anew.

Each device has a health server for this that outlives the groups, and asks the next one's several times in a second whether it
is there. What is decided is in `elastic/agreement.py`.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import final

from convoy.comm.changing import ChangingGroup, present
from convoy.comm.channel import Channel, Credentials, Words
from convoy.comm.door import Door
from convoy.comm.environment import LISTEN, ProcessEnv, is_loopback, listen_at, read_process_env, resolve
from convoy.comm.failure import HealthServer, NoAnswer
from convoy.comm.group import AloneGroup, Group
from convoy.comm.processes import JoinedGroup, meet
from convoy.comm.rendezvous import credentials_of, forget_store, keep_store
from convoy.elastic.admission import Applicant, Applicants
from convoy.elastic.agreement import (
    Ask,
    Asked,
    Called,
    Event,
    Excluded,
    Gather,
    Generation,
    Granted,
    Heard,
    Interrupted,
    Lost,
    Meet,
    Member,
    Met,
    Missed,
    NotReached,
    Pairs,
    Stop,
    answer,
    instruction,
    observe,
)
from convoy.errors import ConvoyError, DeviceLostError, InputError

SILENT_PART, LEAST_SILENCE_S = 1 / 20, 2.0
"""A device that does not answer for this part of the group's time limit counts as lost: 3 s of 60 s. On a busy machine a live
one may take a second."""

FIRST_PART, SECOND_PART = 1 / 2, 1 / 3
"""Of the silence that is allowed, for a question and for the same once more. It is asked every sixth."""

MEETINGS = 5
"""So many time limits long devices try to meet, whatever happens meanwhile."""

POLL_S = 0.02
"""Between two questions to the leader."""

REPORT_S = 0.1
"""How long the report of a device that leaves because of an error may be on its way."""

Address = tuple[str, int]


class UnnamedLossError(DeviceLostError):
    """Another device says that one was lost; which one, shows when all meet."""


@dataclass(frozen=True, slots=True)
class Home:
    """Where a device answers as a member of its job.

    Attributes:
        address, port: where it listens; port 0: a free one.
        credentials: of the job.
        token: of the job's members.
        staged: as for :func:`convoy.comm.processes.join`.
        wish: the port to take where it is free, else any.
    """

    address: str
    port: int
    credentials: Credentials
    token: str
    staged: bool = False
    wish: int = 0

    @classmethod
    def of(cls, group: JoinedGroup, port: int = 0, wish: int = 0, address: str | None = None) -> "Home":
        """That of a device of this group, at the group's address or another one."""
        return cls(address or group.address, port, group.credentials, f"members of {group.token}", group.staged, wish)

    def listener(self) -> socket.socket:
        """InputError: the port is taken, or the address is none of this machine."""
        if self.wish:
            with suppress(InputError):
                return listen_at(self.address, self.wish)
        return listen_at(self.address, self.port)


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


@final
class Membership:
    """This device's part in a job whose devices change. Every device of a group makes one at the same time.

    Args:
        home: of a device that is alone, or comes into a job that trains already; None: that of its group.

    Attributes:
        group: of the present generation.
        silence_s: how long a device may be silent.
        applicants: those that ask this device to be let in.
        offer: what such a one is told of the job; None: nobody is let in.
    """

    def __init__(self, group: ChangingGroup, home: Home | None = None) -> None:
        joined = group.present
        if home is None:
            assert isinstance(joined, JoinedGroup)
            home = Home.of(joined)
        self.group, self.timeout_s, self.staged = group, group.timeout_s, home.staged
        self.silence_s = max(LEAST_SILENCE_S, group.timeout_s * SILENT_PART)
        if isinstance(joined, JoinedGroup):
            joined.report_s = REPORT_S
        self._credentials = home.credentials
        self.applicants = Applicants()
        self.offer: Words | None = None
        # A door of its own, which outlives the groups.
        door = Door(home.listener(), self._credentials, "convoy-members")
        self._server = HealthServer(joined.device, door, home.token)
        self._state = Member(joined.device, Generation(0, tuple(range(joined.devices))))
        self._changed = threading.RLock()
        self._store: Address | None = None  # of the meeting that this generation came from, or that takes place
        self._left: Address | None = None  # that of the one before
        self._closed = threading.Event()
        # Before anybody knows the address: an early question without an answer is one of a dead device.
        self._server.answers = {"beat": self._beaten, "regroup": self._asked, "interrupt": self._interrupted}
        door.handlers["join"] = self._knocked
        rows = group.agree("members", json.dumps(self._server.address))
        self._addresses: dict[int, Address] = {d: (str(h), int(p)) for d, (h, p) in enumerate(map(json.loads, rows))}
        self._awake_s, self._slept = _now_s(), False
        self._beats = threading.Thread(target=self._beat, name="convoy-beats", daemon=True)
        self._beats.start()

    @property
    def me(self) -> int:
        """The id of this device, which stays the same."""
        return self._state.me

    @property
    def generation(self) -> Generation:
        return self._state.generation

    @property
    def doors(self) -> list[Address]:
        """Where the members of the present generation answer, the first one first."""
        return [self._addresses[d] for d in self.generation.members]

    @property
    def parted(self) -> Pairs:
        """Pairs of devices that do not reach each other, of which the second was left out of the present generation."""
        return self._state.parted

    @property
    def is_out(self) -> bool:
        """Whether this device cannot go on."""
        return self._state.phase == "out"

    def close(self) -> None:
        """At the end of all work: be no member any more. Every device calls it; the group is left open."""
        self._closed.set()
        self._beats.join(self.silence_s)
        try:
            if self.group.failure is None:
                self.group.agree("no members any more", "")  # nobody asks this server from here on
        finally:
            self._server.close()
        if self._store is not None:
            forget_store(*self._store)

    def depart(self, error: ConvoyError) -> None:
        """Leave while the others go on: they are not answered any more."""
        self._closed.set()
        self._server.close()
        self.group.close(error)

    # --- what others say, on the threads of the server and of the beats ------------------------------------------------

    def _observe(self, event: Event) -> Member:
        with self._changed:
            self._slept |= _now_s() - self._awake_s > self.silence_s
            if isinstance(event, Lost) and self._slept:
                # Others may have gone on without this device meanwhile, and have come to the end.
                event = replace(event, dead=False)
            if isinstance(event, Met):
                self._slept, self._awake_s = False, _now_s()
            before, self._state = self._state, observe(self._state, event)
            if before.phase == "training" and self._state.phase != "training":
                # From now on others are called: not to where the meeting before this one was.
                self._left, self._store = self._store, None
                self._break_off(event)
            return self._state

    def _break_off(self, event: Event) -> None:
        lost = event.device if isinstance(event, Lost) else None
        cause = {True: "its process has ended", False: f"it did not answer for {self.silence_s:g} s"}
        told = (
            f"device {lost} was lost: {cause[event.dead]}"
            if isinstance(event, Lost)
            else self._state.reason or "another device of the job was lost"
        )
        error = (DeviceLostError if isinstance(event, Lost) else UnnamedLossError)(
            self.me if lost is None else lost, told
        )
        present = self.group.present
        if isinstance(present, JoinedGroup):
            # It may wait, for threads that end and for what the main thread finds out. Who answers others must not.
            threading.Thread(target=present.break_off, args=(error,), name="convoy-break-off", daemon=True).start()

    def _beaten(self, _words: Words) -> Words:
        return {"generation": _row(self.generation)}

    def _asked(self, words: Words) -> Words:
        device = int(words["device"])
        cut_off = tuple(int(d) for d in words.get("unreachable", ()))
        state = self._observe(Asked(device, _generation(words["generation"]), int(words["highest"]), cut_off))
        told = answer(state, device)
        if told is None:
            return {"wait": True}
        if device not in told.members:
            return {"excluded": _row(told), "parted": sorted(state.parted)}
        return self._call(told) if self._store is not None else {"wait": True}

    def _call(self, generation: Generation) -> Words:
        doors = [[d, *address] for d, address in self._addresses.items()]
        return {"call": _row(generation), "store": self._store, "doors": doors, "parted": sorted(self.parted)}

    def _knocked(self, words: Words, _: Channel) -> Words | None:
        """Somebody asks to be let in."""
        with self._changed:
            state = self._state
            if state.phase == "out":
                return None  # others of the job may answer
            if self.offer is None:
                return {"refused": "this training takes nobody in"}
            if words["do"] == "hello":
                return {"token": self._server.token, "offer": self.offer, "doors": self.doors}
            if state.leader != self.me:
                return {"elsewhere": True, "doors": [self._addresses[d] for d in state.candidates]}
            host, port = words["door"]
            told = self.applicants.hear(Applicant(str(words["mark"]), (str(host), int(port)), words["facts"]))
            device = self.applicants.device_of(str(words["mark"]))
            if device is not None and self._store is not None and state.called and device in state.called.members:
                return {**self._call(state.called), "device": device}
            if device in state.generation.members:  # it was called to a meeting that failed
                return {**self._call(state.generation), "store": None, "device": device}
            return {**told, "doors": self.doors}

    def _interrupted(self, words: Words) -> Words:
        if int(words["device"]) not in self.generation.members:
            return {"excluded": _row(self.generation)}
        # Also of one that belongs to an earlier generation: it did not see the meeting succeed.
        self._observe(Interrupted())
        self._observe(Heard(int(words["device"]), _generation(words["generation"])))
        return {}

    def _beat(self) -> None:
        """Ask the next device of the generation whether it is there."""
        while not self._closed.wait(self.silence_s * (1 - FIRST_PART - SECOND_PART)):
            with self._changed:
                self._slept |= _now_s() - self._awake_s > self.silence_s
                self._awake_s = _now_s()
                members, training = self.generation.members, self._state.phase == "training"
            if not training or len(members) < 2:
                continue
            device = members[(members.index(self.me) + 1) % len(members)]
            told = self._ask(device, "beat")
            if isinstance(told, NoAnswer):
                with self._changed:
                    if members == self.generation.members and not self._closed.is_set():
                        self._observe(Lost(device, told is NoAnswer.DEAD))
            else:
                self._observe(Excluded(_generation(told["generation"])))

    def _ask(self, device: int, question: str) -> Words | NoAnswer:
        state, address = self._state, self._addresses[device]
        words = {"device": self.me, "generation": _row(state.generation), "highest": state.highest}
        words["unreachable"] = sorted(state.unreachable)
        told = self._server.ask(address, question, self.silence_s * FIRST_PART, **words)
        if told in (NoAnswer.FROZEN, NoAnswer.UNREACHABLE):  # or this machine stood still while the answer came
            told = self._server.ask(address, question, self.silence_s * SECOND_PART, **words)
        return NoAnswer.DEAD if told == {} and question != "interrupt" else told

    # --- growing, on the main thread -------------------------------------------------------------------------------------

    @property
    def next_device(self) -> int:
        """The id of the next newcomer."""
        return max(self._addresses) + 1

    def number(self, newcomers: Sequence[Applicant]) -> list[list[object]]:
        """As the leader: who comes in as which device, for `grant`."""
        first = self.next_device
        for device, each in enumerate(newcomers, first):
            self.applicants.number(each.mark, device)
        return [[device, *each.door] for device, each in enumerate(newcomers, first)]

    def grant(self, rows: Sequence[Sequence[object]]) -> None:
        """Let these in: every device calls it between two steps, and `regroup` then."""
        with self._changed:
            self._addresses |= {int(str(d)): (str(host), int(str(port))) for d, host, port in rows}
            self._observe(Granted(tuple(int(str(row[0])) for row in rows)))

    def come(self, device: int, told: Words) -> None:
        """This newcomer is called as that device: meet the others.

        Raises:
            DeviceLostError: they went on without it.
        """
        called = _generation(told["call"])
        with self._changed:
            self._addresses = {int(d): (str(host), int(port)) for d, host, port in told["doors"]}
            self._state = Member(device, Generation(-1, (device,)), phase="meeting", called=called)
            if told["store"] is None:
                self._state = observe(self._state, Missed())
            else:
                self._invite(told)
        self.regroup(DeviceLostError(0, "the devices that this one was to join did not meet it"))

    # --- meeting anew, on the main thread --------------------------------------------------------------------------------

    def regroup(self, error: ConvoyError) -> None:
        """After a step failed: meet those that are left. The group is then theirs.

        Raises:
            DeviceLostError: this device cannot go on; or the others neither come nor end.
        """
        present = self.group.present
        if isinstance(present, JoinedGroup):
            present.break_off(error)
        self._observe(Interrupted())
        if self._left is not None:
            forget_store(*self._left)
            self._left = None
        self.group.close(error)
        waits_until_s = time.monotonic() + self.timeout_s
        gives_up_s = waits_until_s + MEETINGS * self.timeout_s
        while True:
            match instruction(self._state):
                case Stop(reason):
                    raise DeviceLostError(self.me, f"device {self.me} cannot go on: {reason}") from error
                case Ask(leader):
                    self._ask_leader(leader)
                case Gather(missing):
                    self._gather(missing)
                    if time.monotonic() > waits_until_s:  # alive, but it does not come
                        for device in missing:
                            self._observe(Lost(device, dead=False))
                case Meet(generation, hosts):
                    if (group := self._meet(generation, hosts)) is not None:
                        self.group.replace(group)
                        self._observe(Met())
                        self.applicants.changed()
                        self._server.keep_calls(self.doors)
                        return
                    self._observe(NotReached(self._not_reached(generation)))
                    waits_until_s = time.monotonic() + self.timeout_s
            if time.monotonic() > min(waits_until_s + self.timeout_s, gives_up_s):
                raise error
            self._closed.wait(POLL_S)

    def _ask_leader(self, leader: int) -> None:
        told = self._ask(leader, "regroup")
        if isinstance(told, NoAnswer):
            self._observe(Lost(leader, told is NoAnswer.DEAD))
        elif "excluded" in told:
            self._observe(Excluded(_generation(told["excluded"]), _pairs(told["parted"])))
        elif "call" in told:
            with self._changed:
                called = Called(leader, _generation(told["call"]), _pairs(told["parted"]))
                if self._observe(called).phase == "meeting":
                    self._invite(told)

    def _invite(self, told: Words) -> None:
        """Note where the meeting is to which this device is called, and whom it may meet there."""
        self._store = (str(told["store"][0]), int(told["store"][1]))
        self._addresses |= {int(d): (str(host), int(port)) for d, host, port in told["doors"]}

    def _gather(self, missing: tuple[int, ...]) -> None:
        with ThreadPoolExecutor(min(8, len(missing))) as threads:
            for device, told in zip(missing, threads.map(lambda d: self._ask(d, "interrupt"), missing), strict=True):
                if isinstance(told, NoAnswer):
                    self._observe(Lost(device, told is NoAnswer.DEAD))
                elif "excluded" in told:
                    self._observe(Excluded(_generation(told["excluded"])))

    def _not_reached(self, generation: Generation) -> frozenset[int]:
        """Members that do not answer this device, after a meeting with them failed."""
        others = [d for d in generation.members if d != self.me]
        with ThreadPoolExecutor(max(1, min(8, len(others)))) as threads:
            answers = list(threads.map(lambda d: self._ask(d, "beat"), others))
        return frozenset(d for d, told in zip(others, answers, strict=True) if isinstance(told, NoAnswer))

    def _meet(self, generation: Generation, hosts: bool) -> Group | None:
        """The group of a generation; None where somebody does not come."""
        index, count = generation.index(self.me), len(generation.members)
        try:
            if count == 1:
                alone = AloneGroup(self.group.torch_device, self.timeout_s)
                alone.ids = generation.members
                group: Group = alone
            else:
                if hosts:
                    host = self._server.address[0]
                    self._store = (host, keep_store(host, self._credentials))
                assert self._store is not None
                env = ProcessEnv(index, count, 0, None, *self._store, hosted=False, attempt=0)
                grows = set(generation.members) - set(self.generation.members)
                # A newcomer that does not come must not hold up the others for long.
                limit_s = self.silence_s if grows else max(5.0, 2 * self.silence_s)
                met = meet(env, self.group.torch_device, limit_s, self.staged, generation.number, self._credentials)
                met.timeout_s, met.report_s, met.ids = self.timeout_s, REPORT_S, generation.members
                group = met
        except ConvoyError:
            if self._store is not None:
                forget_store(*self._store)
            self._store = None
            self._observe(Missed())
            return None
        return group


def _now_s() -> float:
    """Seconds of a clock that goes on while the machine sleeps, where there is one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _row(generation: Generation) -> list[object]:
    return [generation.number, list(generation.members)]


def _generation(row: list[object]) -> Generation:
    number, members = row
    assert isinstance(members, list)
    return Generation(int(str(number)), tuple(int(d) for d in members))


def _pairs(rows: Sequence[Sequence[object]]) -> Pairs:
    return frozenset((int(str(one)), int(str(other))) for one, other in rows)
