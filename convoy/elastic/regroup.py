"""Forms the next generation of devices when one is lost or joins.

Each device has a health server that outlives the groups, and sends heartbeat requests to the next device. The state machine in
`elastic/agreement.py` makes the decisions.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, final

from convoy.comm.connection import Connection, Credentials, Fields, credentials_of
from convoy.comm.environment import LISTEN, ProcessEnv, is_loopback, listen_at, resolve
from convoy.comm.failure import HealthServer, NoAnswer
from convoy.comm.group import AloneGroup, ChangingGroup, Group, present
from convoy.comm.listener import Listener
from convoy.comm.processes import JoinedGroup, meet
from convoy.comm.store import close_store, host_store
from convoy.elastic import agreement
from convoy.elastic.admission import Address, Applicant, Applicants
from convoy.elastic.agreement import Event, Generation, Lost, Member, Pairs, observe
from convoy.errors import ConvoyError, DeviceLostError, InputError

# Fractions of the allowed silence: the limits of a request and its repetition. The rest is a pause.
FIRST_PART, SECOND_PART = 1 / 2, 1 / 3
MEETINGS = 5  # an unsuccessful regroup ends after this number of the group's time limits
POLL_S = 0.02  # between two requests to the leader
REPORT_S = 0.1  # to wait for the error report of a device that leaves


class UnnamedLossError(DeviceLostError):
    """The error if another device reports a loss without the lost device, which the regroup then finds."""


@dataclass(frozen=True, slots=True)
class Home:
    """The listening address (port 0: a free one) and credentials with which a device answers as a member of its job.

    `token` identifies members of the same job.
    """

    address: str
    port: int
    credentials: Credentials
    token: str

    @classmethod
    def of(cls, group: JoinedGroup, port: int = 0, address: str | None = None) -> "Home":
        return cls(address or group.address, port, group.credentials, f"members of {group.token}")


def home_here(group: Group) -> Home | None:
    """Return the home of a script's device (see `home_at`); None without `convoy run --listen`."""
    if not os.environ.get(LISTEN):
        return None
    host, _, port = os.environ[LISTEN].rpartition(":")
    return home_at(host.strip("[]"), int(port), group)


def home_at(host: str, port: int, group: Group) -> Home:
    """Return the home of a device in a job with `--listen host:port`. Only the first device uses that port."""
    inside = present(group)
    if isinstance(inside, JoinedGroup):
        is_first = group.device == 0
        return Home.of(inside, port if is_first else 0, member_address(host, inside.address, is_first))
    env = ProcessEnv(0, 1, 0, 1, host, port, hosted=False, attempt=0)
    return Home(host, port, credentials_of(env), f"members of {uuid.uuid4().hex}")


def member_address(listen: str, met: str, first: bool) -> str:
    """Return the address at which a device answers join requests: `met`, its address in the group, or `listen` if that is a
    loopback address. Raise InputError on the first device if `listen` is another address.
    """
    found = [str(target[0]) for _, target in resolve(listen, 0, socket.SOCK_STREAM)]
    if is_loopback(met):
        return found[0]
    if first and met not in found:
        raise InputError(
            f"--listen {listen}: all devices, joining ones too, communicate at {met} on this machine: give --listen {met} "
            f"with the same port, or for each host of the fleet file an address in the network of {listen}"
        )
    return met


@final
class Membership:
    """One device's membership in a job whose devices change. Every device of a group creates one at the same time.

    Args:
        home: the home of a device that is alone or joins a running job; None: derive it from the group.

    Attributes:
        applicants: the join requests at this device.
        offer: the job's description for joining devices; None: admit no device.
    """

    def __init__(self, group: ChangingGroup, home: Home | None = None) -> None:
        joined = group.present
        if home is None:
            assert isinstance(joined, JoinedGroup)
            home = Home.of(joined)
        self.group, self.timeout_s = group, group.timeout_s
        if isinstance(joined, JoinedGroup):
            joined.report_s = REPORT_S
        self._credentials = home.credentials
        self.applicants = Applicants()
        self.offer: Fields | None = None
        # The listener outlives the groups.
        listener = Listener(listen_at(home.address, home.port), self._credentials, "convoy-members")
        self._server = HealthServer(joined.device, listener, home.token, self.timeout_s)
        self._state = Member(joined.device, Generation(0, tuple(range(joined.devices))))
        self._changed = threading.RLock()
        self._store: Address | None = None  # store of the current meeting, or of this generation's
        self._left: Address | None = None  # store of the previous meeting
        self._closed = threading.Event()
        # Set before others know the address: a device that does not answer an early request counts as dead.
        self._server.answers = {
            "beat": lambda _: {"generation": _row(self.generation)},
            "regroup": self._answer_regroup,
            "interrupt": self._answer_interrupt,
        }
        listener.handlers["join"] = self._answer_join
        rows = group.agree("members", json.dumps(self._server.address))
        self._addresses: dict[int, Address] = {d: (str(h), int(p)) for d, (h, p) in enumerate(map(json.loads, rows))}
        self._awake_s, self._slept = _now_s(), False
        self._beats = threading.Thread(target=self._beat, name="convoy-beats", daemon=True)
        self._beats.start()

    @property
    def silence_s(self) -> float:
        """Seconds after which a silent device counts as lost, derived from the recent round trips."""
        return self._server.limit_s

    @property
    def me(self) -> int:
        return self._state.me

    @property
    def generation(self) -> Generation:
        return self._state.generation

    @property
    def addresses(self) -> list[Address]:
        """The addresses of the current generation's members, in order."""
        return [self._addresses[d] for d in self.generation.members]

    @property
    def parted(self) -> Pairs:
        """Pairs of devices that cannot reach each other; the current generation excludes the second."""
        return self._state.parted

    @property
    def is_out(self) -> bool:
        return self._state.phase == "out"

    def close(self) -> None:
        """Leave the membership at the end of all work. Every device calls it; the group stays open."""
        self._closed.set()
        self._beats.join(self.silence_s)
        try:
            if self.group.failure is None:
                self.group.agree("end of the membership", "")  # no device sends this server requests from here on
        finally:
            self._server.close()
        if self._store is not None:
            close_store(*self._store)

    def depart(self, error: ConvoyError) -> None:
        """Leave while the others continue: stop answering."""
        self._closed.set()
        self._server.close()
        self.group.close(error)

    # --- messages of other devices, on the threads of server and heartbeat ---------------------------------------------

    def _observe(self, event: Event) -> Member:
        with self._changed:
            self._slept |= _now_s() - self._awake_s > self.silence_s
            if isinstance(event, Lost) and self._slept:
                # This machine slept: the others may have continued without this device, and ended normally.
                event = replace(event, dead=False)
            if isinstance(event, agreement.Met):
                self._slept, self._awake_s = False, _now_s()
            before, self._state = self._state, observe(self._state, event)
            if before.phase == "training" and self._state.phase != "training":
                # The next meeting uses a new store, not that of the last one.
                self._left, self._store = self._store, None
                self._abort_group(event)
            return self._state

    def _abort_group(self, event: Event) -> None:
        if isinstance(event, Lost):
            cause = "its process has ended" if event.dead else f"it did not answer for {self.silence_s:.3g} s"
            error = DeviceLostError(event.device, f"device {event.device} was lost: {cause}")
        else:
            error = UnnamedLossError(self.me, self._state.reason or "another device of the job was lost")
        present = self.group.present
        if isinstance(present, JoinedGroup):
            # Use a thread: abort may wait for other threads, but this one must answer other devices.
            threading.Thread(target=present.abort, args=(error,), name="convoy-abort", daemon=True).start()

    def _answer_regroup(self, request: Fields) -> Fields:
        device, highest = int(request["device"]), int(request["highest"])
        cut_off = tuple(int(d) for d in request.get("unreachable", ()))
        state = self._observe(agreement.Requested(device, _generation(request["generation"]), highest, cut_off))
        reply = agreement.answer(state, device)
        if reply is None:
            return {"wait": True}
        if device not in reply.members:
            return {"excluded": _row(reply), "parted": sorted(state.parted)}
        return self._call(reply) if self._store is not None else {"wait": True}

    def _call(self, generation: Generation) -> Fields:
        rows = [[d, *address] for d, address in self._addresses.items()]
        return {"call": _row(generation), "store": self._store, "addresses": rows, "parted": sorted(self.parted)}

    def _answer_join(self, request: Fields, connection: Connection) -> Fields | None:
        with self._changed:
            state = self._state
            if state.phase == "out":
                return None  # another device of the job may answer
            if self.offer is None:
                return {"refused": "this training admits no devices"}
            if request["do"] == "hello":
                return {"token": self._server.token, "offer": self.offer, "addresses": self.addresses}
            if state.leader != self.me:
                return {"elsewhere": True, "addresses": [self._addresses[d] for d in state.candidates]}
            host, port = request["address"]
            applicant = Applicant(str(request["mark"]), (str(host), int(port)), request["facts"], connection)
            reply, device = self.applicants.ask(applicant)
            if device is not None and self._store is not None and state.called and device in state.called.members:
                return {**self._call(state.called), "device": device}
            if device in state.generation.members:  # it was called to a meeting that failed
                return {**self._call(state.generation), "store": None, "device": device}
            return {**reply, "addresses": self.addresses}

    def _answer_interrupt(self, request: Fields) -> Fields:
        if int(request["device"]) not in self.generation.members:
            return {"excluded": _row(self.generation)}
        # The other device may be in an earlier generation, because the meeting failed there.
        self._observe(agreement.Interrupted())
        self._observe(agreement.Reached(int(request["device"]), _generation(request["generation"])))
        return {}

    def _beat(self) -> None:
        """Send heartbeat requests to the next device of the generation until the membership ends."""
        while not self._closed.wait(self.silence_s * (1 - FIRST_PART - SECOND_PART)):
            with self._changed:
                self._slept |= _now_s() - self._awake_s > self.silence_s
                self._awake_s = _now_s()
                members, training = self.generation.members, self._state.phase == "training"
            if not training or len(members) < 2:
                continue
            index = (members.index(self.me) + 1) % len(members)
            device, before, waited_s = members[index], self.group.moved_bytes(index), self.silence_s
            reply = self._ask(device, "beat")
            if isinstance(reply, NoAnswer) and reply is not NoAnswer.DEAD and self.group.moved_bytes(index) != before:
                self._server.note_trip(waited_s)  # bytes move, so the link is slow
            elif isinstance(reply, NoAnswer):
                with self._changed:
                    if members == self.generation.members and not self._closed.is_set():
                        self._observe(Lost(device, reply is NoAnswer.DEAD))
            else:
                self._observe(agreement.Excluded(_generation(reply["generation"])))

    def _ask(self, device: int, question: str) -> Fields | NoAnswer:
        state, address = self._state, self._addresses[device]
        request = {"device": self.me, "generation": _row(state.generation), "highest": state.highest}
        request["unreachable"] = sorted(state.unreachable)
        reply = self._server.ask(address, question, self.silence_s * FIRST_PART, **request)
        if reply in (NoAnswer.FROZEN, NoAnswer.UNREACHABLE):  # retry: this machine itself may have been suspended
            reply = self._server.ask(address, question, self.silence_s * SECOND_PART, **request)
        return NoAnswer.DEAD if reply == {} and question != "interrupt" else reply

    # --- growing, on the main thread -------------------------------------------------------------------------------------

    @property
    def next_device(self) -> int:
        return max(self._addresses) + 1

    def number(self, joining: Sequence[Applicant]) -> list[list[object]]:
        """Assign ids to joining devices, on the leader. Return rows for `grant`."""
        first = self.next_device
        for device, each in enumerate(joining, first):
            each.device = device
        return [[device, *each.address] for device, each in enumerate(joining, first)]

    def grant(self, rows: Sequence[Sequence[Any]]) -> None:
        """Admit devices with these rows (id, host, port). Every device calls it between two steps, then `regroup`."""
        with self._changed:
            self._addresses |= {int(d): (str(host), int(port)) for d, host, port in rows}
            self._observe(agreement.Granted(tuple(int(row[0]) for row in rows)))

    def meet_as(self, device: int, reply: Fields) -> None:
        """Meet the job's devices, as the joining device with this id. DeviceLostError: they continued without it."""
        called = _generation(reply["call"])
        with self._changed:
            self._addresses = {int(d): (str(host), int(port)) for d, host, port in reply["addresses"]}
            self._state = Member(device, Generation(-1, (device,)), phase="meeting", called=called)
            if reply["store"] is None:
                self._state = observe(self._state, agreement.Missed())
            else:
                self._invite(reply)
        self.regroup(DeviceLostError(0, "the devices of the job did not come to the meeting with this joining device"))

    # --- regrouping, on the main thread --------------------------------------------------------------------------------

    def regroup(self, error: ConvoyError) -> None:
        """Form a group of the devices that remain or join. DeviceLostError: this device must stop, or no meeting succeeded."""
        present = self.group.present
        if isinstance(present, JoinedGroup):
            present.abort(error)
        self._observe(agreement.Interrupted())
        if self._left is not None:
            close_store(*self._left)
            self._left = None
        self.group.close(error)
        waits_until_s = time.monotonic() + self.timeout_s
        gives_up_s = waits_until_s + MEETINGS * self.timeout_s
        while True:
            match agreement.instruction(self._state):
                case agreement.Stop(reason):
                    raise DeviceLostError(self.me, f"device {self.me} cannot continue: {reason}") from error
                case agreement.Ask(leader):
                    self._ask_leader(leader)
                case agreement.Gather(missing):
                    for device, reply in self._ask_all(missing, "interrupt").items():
                        if isinstance(reply, NoAnswer):
                            self._observe(Lost(device, reply is NoAnswer.DEAD))
                        elif "excluded" in reply:
                            self._observe(agreement.Excluded(_generation(reply["excluded"])))
                    if time.monotonic() > waits_until_s:  # alive, but they do not send requests
                        for device in missing:
                            self._observe(Lost(device, dead=False))
                case agreement.Meet(generation, hosts):
                    if (group := self._meet(generation, hosts)) is not None:
                        self.group.replace(group)
                        self._observe(agreement.Met())
                        self.applicants.after_regroup()
                        self._server.keep_open(self.addresses)
                        return
                    others = [d for d in generation.members if d != self.me]
                    replies = self._ask_all(others, "beat")
                    silent = {d for d, reply in replies.items() if isinstance(reply, NoAnswer)}
                    self._observe(agreement.NotReached(frozenset(silent)))
                    waits_until_s = time.monotonic() + self.timeout_s
            if time.monotonic() > min(waits_until_s + self.timeout_s, gives_up_s):
                raise error
            self._closed.wait(POLL_S)

    def _ask_leader(self, leader: int) -> None:
        reply = self._ask(leader, "regroup")
        if isinstance(reply, NoAnswer):
            self._observe(Lost(leader, reply is NoAnswer.DEAD))
        elif "excluded" in reply:
            self._observe(agreement.Excluded(_generation(reply["excluded"]), _pairs(reply["parted"])))
        elif "call" in reply:
            with self._changed:
                called = agreement.Called(leader, _generation(reply["call"]), _pairs(reply["parted"]))
                if self._observe(called).phase == "meeting":
                    self._invite(reply)

    def _invite(self, reply: Fields) -> None:
        self._store = (str(reply["store"][0]), int(reply["store"][1]))
        self._addresses |= {int(d): (str(host), int(port)) for d, host, port in reply["addresses"]}

    def _ask_all(self, devices: Sequence[int], question: str) -> dict[int, Fields | NoAnswer]:
        with ThreadPoolExecutor(max(1, min(8, len(devices)))) as threads:
            return dict(zip(devices, threads.map(lambda d: self._ask(d, question), devices), strict=True))

    def _meet(self, generation: Generation, hosts: bool) -> Group | None:
        """Return the group of a generation; None if a device does not come to the meeting."""
        index, count = generation.index(self.me), len(generation.members)
        try:
            if count == 1:
                group: Group = AloneGroup(self.group.torch_device, self.timeout_s)
                group.ids = generation.members
            else:
                if hosts:
                    host = self._server.address[0]
                    self._store = (host, host_store(host, self._credentials))
                assert self._store is not None
                env = ProcessEnv(index, count, 0, None, *self._store, hosted=False, attempt=0)
                grows = set(generation.members) - set(self.generation.members)
                # Connecting takes some round trips per device. A joining device that does not come must not delay the
                # others for long, while members may notice a loss later than this one.
                limit_s = self._server.limit_of(2 * count) + (0.0 if grows else self.silence_s)
                met = meet(env, self.group.torch_device, limit_s, generation.number, self._credentials)
                met.timeout_s, met.report_s, met.ids = self.timeout_s, REPORT_S, generation.members
                group = met
        except ConvoyError:
            if self._store is not None:
                close_store(*self._store)
            self._store = None
            self._observe(agreement.Missed())
            return None
        return group


def _now_s() -> float:
    """Return the seconds of a clock that also counts while the machine sleeps, where available."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _row(generation: Generation) -> list[Any]:
    return [generation.number, list(generation.members)]


def _generation(row: list[Any]) -> Generation:
    return Generation(int(row[0]), tuple(int(d) for d in row[1]))


def _pairs(rows: Sequence[Sequence[Any]]) -> Pairs:
    return frozenset((int(one), int(other)) for one, other in rows)
