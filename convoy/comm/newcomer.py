"""The way of a process into a job that trains already: it asks at the doors of the job's devices, waits, and meets them."""

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

from convoy._version import __version__
from convoy.comm.applicants import POLL_S, SPARE_POLL_S
from convoy.comm.changing import ChangingGroup
from convoy.comm.channel import Channel, Credentials, NotOfThisJob, Words
from convoy.comm.environment import ProcessEnv, own_address
from convoy.comm.regroup import Home, Membership
from convoy.comm.rendezvous import credentials_of
from convoy.errors import DeviceLostError, InputError, MismatchError
from convoy.membership import newcomer
from convoy.membership.agreement import Generation
from convoy.membership.newcomer import AskAt, Event, Invited, Meet, Newcomer, Refused, Sent, Stop, Unanswered, Waits

Address = tuple[str, int]

ANSWER_S = 5.0
"""How long an answer may take: the door's thread has nothing else to do."""

RETRY_S = 0.2

REFUSED_S = 3.0
"""Who answers that nobody is taken in may not have got so far: it is asked again for so long."""


HELLO_S = 10.0
"""How long a job may take to answer: it may be just starting."""


def ask_to_join(addresses: Sequence[Address]) -> "tuple[Entrance, Words]":
    """Ask a running job to be let in; return the entrance and what the job offers.

    Raises:
        InputError: there is no such job, or it admits nobody.
        MismatchError: it was started by another version.
    """
    env = ProcessEnv(0, 2, 0, None, *addresses[0], hosted=False, attempt=0)
    entrance = Entrance(addresses, credentials_of(env))
    offer = entrance.hello(HELLO_S)
    if offer["version"] != __version__:
        raise MismatchError(
            f"the job runs Convoy {offer['version']}, this is {__version__}: install the same version on every machine"
        )
    return entrance, offer


class NoJobError(InputError):
    """Nobody of a job answers."""


@final
class Entrance:
    """A process that asks to be let in.

    Args:
        doors: of the job's devices, as far as they are known.
    """

    def __init__(self, doors: Sequence[Address], credentials: Credentials) -> None:
        self.credentials, self.mark = credentials, uuid.uuid4().hex
        self._state = Newcomer(tuple(doors))
        self._token = ""
        self._channel: tuple[Address, Channel] | None = None
        self._told: Words = {}
        self._offer: Words = {}

    def hello(self, limit_s: float) -> Words:
        """What the job says of itself.

        Raises:
            NoJobError: nobody of a job answers at the doors within the time.
            InputError: who does has another key, or takes nobody in.
        """
        until_s, stranger = time.monotonic() + limit_s, None
        certain_s = min(until_s, time.monotonic() + REFUSED_S)
        while True:
            for door in self._state.doors:
                try:
                    told = self._say(door, {"do": "hello"})
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
                self._token = str(told["token"])
                self._state = newcomer.observe(self._state, Sent(_doors(told)))
                self._offer = told["offer"]
                return self._offer
            if time.monotonic() > until_s:
                if stranger is not None:
                    raise InputError(
                        f"the job at {_shown(stranger[0])} has another key ({stranger[1]}): give the file that it was started "
                        "with, --job-key FILE, or CONVOY_JOB_KEY=FILE"
                    )
                shown = ", ".join(map(_shown, self._state.doors))
                raise NoJobError(
                    f"no job that can be joined answers at {shown}: give the address that it prints, see whether it still "
                    "trains, and whether a firewall is between"
                )
            time.sleep(RETRY_S)

    def enter(self, group: ChangingGroup, facts: Words, tell: Callable[[str], None] = lambda _: None) -> Membership:
        """Wait until the job lets this process in, and meet its devices. The group is then theirs.

        Args:
            group: this device alone.
            facts: what it says of itself.
            tell: is called with a line of text when it waits as a spare.

        Raises:
            InputError: the job refuses it.
            DeviceLostError: the job has ended, or went on without it.
        """
        address = own_address(*self._state.doors[0])
        membership = Membership(group, Home(address, 0, self.credentials, self._token))
        words = {"do": "ask", "mark": self.mark, "door": membership.doors[0], "facts": facts}
        spare = ""
        try:
            while True:
                match newcomer.instruction(self._state):
                    case Stop(reason):
                        kind = InputError if self._told.get("refused") else DeviceLostError
                        raise InputError(reason) if kind is InputError else DeviceLostError(0, reason)
                    case AskAt(door):
                        event = self._ask(door, words)
                        self._state = newcomer.observe(self._state, event)
                        if self._state.spare and self._state.spare != spare:
                            tell(f"waits as a spare: {self._state.spare}")
                        spare = self._state.spare
                        if not isinstance(event, Sent | Invited):
                            time.sleep(SPARE_POLL_S if spare else POLL_S)
                    case Meet(device, _):
                        membership.offer = self._offer  # others may ask this device from here on
                        membership.come(device, self._told)
                        return membership
        except BaseException as error:
            membership.depart(error if isinstance(error, DeviceLostError) else DeviceLostError(0, str(error)))
            raise
        finally:
            self._leave()

    def _ask(self, door: Address, words: Words) -> Event:
        try:
            self._told = told = self._say(door, words)
        except (OSError, NotOfThisJob, ValueError):
            return Unanswered()
        if "call" in told:
            number, members = told["call"]
            return Invited(int(told["device"]), Generation(int(number), tuple(int(d) for d in members)))
        if "refused" in told:
            return Refused(str(told["refused"]))
        if "elsewhere" in told:
            return Sent(_doors(told))
        return Waits(str(told.get("spare", "")), _doors(told))

    def _say(self, door: Address, words: Words) -> Words:
        """The answer at a door. OSError or NotOfThisJob where there is none, ValueError where it is no text."""
        deadline_s = time.monotonic() + ANSWER_S
        words = {"for": "join", **words}
        if self._channel is not None and self._channel[0] != door:
            self._leave()
        try:
            if self._channel is None:
                self._channel = door, self.credentials.call(door, words, deadline_s)
            else:
                self._channel[1].deadline(deadline_s)
                self._channel[1].say(words)
            answer = self._channel[1].heard()
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


def _doors(told: Words) -> tuple[Address, ...]:
    return tuple((str(host), int(port)) for host, port in told["doors"])


def _shown(door: Address) -> str:
    return f"{door[0]}:{door[1]}"
