"""Joins a running job: finds it, sends a join request, waits for the admission, and meets its devices."""

import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

import torch

from convoy._version import __version__
from convoy.comm import processes
from convoy.comm.connection import Connection, Credentials, Fields, NotOfThisJob, credentials_of
from convoy.comm.deadlines import TIMEOUT_S, wait_limit
from convoy.comm.environment import JOIN, ProcessEnv, own_address
from convoy.comm.group import AloneGroup, ChangingGroup, Group
from convoy.comm.job_key import KEY_PIPE, MAX_BYTES, hand_over
from convoy.elastic.admission import POLL_S, SPARE_POLL_S, Address
from convoy.elastic.regroup import Home, Membership
from convoy.errors import DeviceLostError, InputError, MismatchError
from convoy.machine import roster
from convoy.machine.process import watch_parent

HELLO_S = 10.0  # limit for the first reply, long because the job may be starting
REFUSED_S = 3.0  # a refused first request is repeated this long, for the same reason
RETRY_S = 0.2
ROUNDS = 3  # unanswered attempts at every address, then the job counts as ended. (A job that regroups does not answer.)
MOST_ADDRESSES = 64  # a joining device stores at most this number of addresses


def join(device: str | torch.device | None = None, timeout_s: float = TIMEOUT_S, *, key: str | None = None) -> Group:
    """Join this process's job, and return the group of its processes. Without a job, return a group of one.

    torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, ...) describe the job. With `convoy run --join`, the job already runs,
    and admits this device later. The group closes itself at the end of the process, or of a ``with`` block.

    Args:
        device: where to compute, such as "cpu" or "cuda:1". Default: CONVOY_DEVICE, else the accelerator whose number is
            this process's local rank, else the CPU.
        timeout_s: upper bound of this and every later wait. A device that ends, freezes or cannot be reached is found sooner.
        key: the text of a key file, equal on all processes; needed if no launcher passes it (Ray actors).

    Raises:
        InputError: incomplete environment, unknown device or job, taken port, rank or accelerator used twice; or as
            MismatchError: the devices run different versions.
        DeviceLostError: a device did not come in time, or cannot be reached.
    """
    if key is not None:
        os.environ[KEY_PIPE] = str(hand_over(key.encode()[:MAX_BYTES]))
    if not (text := os.environ.pop(JOIN, "")):
        return processes.join(device, timeout_s)
    processes.check_timeout(timeout_s)
    watch_parent()
    torch_device = processes.own_device(device, 0)
    places = [each.rpartition(":") for each in text.split(",")]
    entrance, offer = greet([(host.strip("[]"), int(port)) for host, _, port in places])
    if "script" not in offer:
        raise InputError("the job there is a `convoy train`: join it with `convoy join`, without a script")
    roster.enter(str(offer["job"]), 0, str(torch_device))
    group = ChangingGroup(AloneGroup(torch_device, timeout_s))
    group.entrance = entrance
    group.is_of_this_process()
    return group


def greet(addresses: Sequence[Address]) -> tuple["Entrance", Fields]:
    """Find a running job at these addresses. Return a client for joining it, and the job's description of itself."""
    env = ProcessEnv(0, 2, 0, None, *addresses[0], hosted=False, attempt=0)
    entrance = Entrance(addresses, credentials_of(env))
    offer = entrance.hello(HELLO_S)
    if offer["version"] != __version__:
        raise MismatchError(
            f"the job runs Convoy {offer['version']}, this is {__version__}: install the same version on every machine"
        )
    return entrance, offer


@final
class Entrance:
    """The client of a process that asks a running job to admit it.

    Only the first device admits. All others reply with the addresses of the current generation, the first device's first.
    `addresses` holds these, followed by all earlier ones, because any device may be lost meanwhile.
    """

    def __init__(self, addresses: Sequence[Address], credentials: Credentials) -> None:
        self.credentials, self.mark = credentials, uuid.uuid4().hex
        self.addresses = list(addresses)
        self._unanswered = 0  # consecutive requests without a reply
        self._trips_s = deque([0.6], 32)  # recent requests and replies. Assume a slow link at first
        self._token = ""
        self._open: dict[Address, Connection] = {}  # at most one
        self._offer: Fields = {}

    def hello(self, limit_s: float) -> Fields:
        """Return the job's description of itself. InputError: no answer in time, another job key, or no device is admitted."""
        until_s, other_key = time.monotonic() + limit_s, None
        certain_s = min(until_s, time.monotonic() + REFUSED_S)
        while True:
            for address in self.addresses:
                try:
                    reply = self._request(address, {"do": "hello"})
                except NotOfThisJob as error:
                    other_key = (address, error)
                    continue
                except (OSError, ValueError):
                    continue
                if "refused" in reply and time.monotonic() < certain_s:
                    continue
                if "refused" in reply:
                    self._disconnect()
                    raise InputError(
                        f"the job at {_shown(address)}: {reply['refused']}; start it with --listen to let others join"
                    )
                self._token, self._offer = str(reply["token"]), reply["offer"]
                self._ask_first(_addresses(reply))
                return self._offer
            if time.monotonic() > until_s:
                if other_key is not None:
                    raise InputError(
                        f"the job at {_shown(other_key[0])} has another key ({other_key[1]}): give the job's key file, "
                        "--job-key FILE, or CONVOY_JOB_KEY=FILE"
                    )
                raise InputError(
                    f"no job that can be joined answers at {self._asked()}: give the address that it prints, and check "
                    "that it still trains and that no firewall blocks the connection"
                )
            time.sleep(RETRY_S)

    def enter(self, group: ChangingGroup, facts: Fields, report: Callable[[str], None] = lambda _: None) -> Membership:
        """Wait until the job admits this process, meet its devices, and switch `group` to their group.

        `facts` describe this device; `report` is called with a line of text when it must wait as a spare. InputError: the job
        refuses it. DeviceLostError: the job has ended, or continued without it.
        """
        membership = Membership(group, Home(own_address(*self.addresses[0]), 0, self.credentials, self._token))
        request = {"do": "ask", "mark": self.mark, "address": membership.addresses[0], "facts": facts}
        spare = ""
        try:
            while True:
                try:
                    reply = self._request(self.addresses[0], request)
                except (OSError, NotOfThisJob, ValueError):
                    reply = {"silent": True}
                if "silent" in reply:
                    self._ask_next()
                    if self._unanswered >= ROUNDS * len(self.addresses):
                        raise DeviceLostError(0, f"no device of the job answers at {self._asked()}: has it ended?")
                elif "call" in reply:
                    membership.offer = self._offer  # from here on, this device may get join requests itself
                    membership.meet_as(int(reply["device"]), reply)
                    return membership
                elif "refused" in reply:
                    raise InputError(str(reply["refused"]))
                elif "elsewhere" in reply:
                    self._ask_first(_addresses(reply))
                    continue
                else:
                    # First the address that answered: the one that the device reports may be unreachable from here.
                    self._ask_first([self.addresses[0], *_addresses(reply)])
                    before, spare = spare, str(reply.get("spare", ""))
                    if spare and spare != before:
                        report(f"waits as a spare: {spare}")
                time.sleep(SPARE_POLL_S if spare else POLL_S)
        except BaseException as error:
            membership.depart(error if isinstance(error, DeviceLostError) else DeviceLostError(0, str(error)))
            raise
        finally:
            self._disconnect()

    def _ask_next(self) -> None:
        self.addresses.append(self.addresses.pop(0))
        self._unanswered += 1

    def _ask_first(self, addresses: Sequence[Address]) -> None:
        if not addresses:
            self._ask_next()
            return
        self.addresses, self._unanswered = list(dict.fromkeys([*addresses, *self.addresses]))[:MOST_ADDRESSES], 0

    def _asked(self) -> str:
        return ", ".join(map(_shown, self.addresses[:4])) + (", ..." if len(self.addresses) > 4 else "")

    def _request(self, address: Address, request: Fields) -> Fields:
        begin_s = time.monotonic()
        deadline_s = begin_s + wait_limit(self._trips_s, TIMEOUT_S)
        request = {"for": "join", **request}
        try:
            if address in self._open:
                self._open[address].deadline(deadline_s)
                answer = self._open[address].ask(request)
            else:
                self._disconnect()
                self._open[address], answer = self.credentials.connect(address, request, deadline_s)
        except BaseException:
            self._disconnect()
            raise
        self._trips_s.append(time.monotonic() - begin_s)
        return answer

    def _disconnect(self) -> None:
        while self._open:
            with suppress(OSError):
                self._open.popitem()[1].close()


def _addresses(reply: Fields) -> list[Address]:
    return [(str(host), int(port)) for host, port in reply["addresses"]]


def _shown(address: Address) -> str:
    return f"{address[0]}:{address[1]}"
