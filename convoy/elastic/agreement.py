"""How the devices that are left agree on who goes on: a state machine, of which each device has one. Events in, what to do out.

A *generation* is a number and the devices that train together. Where one of them is lost, each survivor asks the lowest that it
believes alive, the leader, which calls a meeting once every device has asked that it does not know to be lost. Who comes to the
meeting is the next generation; where somebody does not come, all ask again. So two leaders can do no harm, for a device goes to
one meeting at a time, and a meeting takes place only with all that were called to it.

Two devices that do not reach each other, while others reach both, would make every meeting fail. After two such meetings each
device says whom it reached after neither, and of such a pair the leader leaves the higher out; where one device is in several
pairs, that one. After one meeting it could be a device that stood still for a moment and asks again by now.

Two parts of a fleet that do not reach each other must not both go on. So a generation needs more than half of the devices of
the one before, or half of them, the lowest among those. Devices that are known to be dead do not count: what cannot be reached
may be alive, a process whose machine says that it is gone is not.

A generation grows between two steps: all its members learn in the same step that newcomers are to be let in, and the leader
calls these to the meeting, too, beside *all* members: where one is lost just then, newcomers have to ask again. For else a
member that was not there would not know whom the next generation may have gone on with. Whoever was called counts as a member
from then on, also where the meeting fails. There are never more newcomers at once than members, so that these can go on without
them.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Generation:
    """Devices that train together.

    Attributes:
        number: a later one is larger.
        members: by their ids, which stay the same while others come and go; in rising order.
    """

    number: int
    members: tuple[int, ...]

    def index(self, device: int) -> int:
        """The index in the group of a device's id."""
        return self.members.index(device)


Pairs = frozenset[tuple[int, int]]
"""Of devices."""

# ------------------------------------------------------------------------------------------------ what happens


@dataclass(frozen=True, slots=True)
class Lost:
    """This device has found out that another one is dead, or (not `dead`) that it is silent."""

    device: int
    dead: bool


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A step failed here, or another device says that one failed there."""


@dataclass(frozen=True, slots=True)
class Granted:
    """All devices have agreed, between two steps, to take these newcomers in."""

    newcomers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """Another device asks this one, as its leader, for a meeting. It belongs to `generation`, and knows numbers up to
    `highest`; after two meetings that failed it did not reach `unreachable`."""

    device: int
    generation: Generation
    highest: int
    unreachable: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Heard:
    """A device of this generation speaks to this one: it is not silent. Two devices that each wait for others, of which one has
    taken the other for lost, would wait for long."""

    device: int
    generation: Generation


@dataclass(frozen=True, slots=True)
class Called:
    """The leader calls to a meeting, to which it did not call who is `parted` (see `Member`)."""

    by: int
    generation: Generation
    parted: Pairs = frozenset()


@dataclass(frozen=True, slots=True)
class Excluded:
    """Another device says that the job goes on without this one, as this generation; from it were `parted` (see `Member`)."""

    generation: Generation
    parted: Pairs = frozenset()


@dataclass(frozen=True, slots=True)
class Met:
    """All that were called have come to the meeting."""


@dataclass(frozen=True, slots=True)
class Missed:
    """Somebody did not come to the meeting."""


@dataclass(frozen=True, slots=True)
class NotReached:
    """After a meeting that failed, this device asked all that were called whether they are there; these did not answer."""

    devices: frozenset[int]


Event = Lost | Interrupted | Granted | Asked | Heard | Called | Excluded | Met | Missed | NotReached

# ------------------------------------------------------------------------------------------------ what is to be done


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask this device for a meeting, again and again."""

    leader: int


@dataclass(frozen=True, slots=True)
class Gather:
    """Wait to be asked by these; tell them that a step failed, and find out whether they are alive."""

    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Meet:
    """Go to the meeting of this generation; `hosts`: it takes place here."""

    generation: Generation
    hosts: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """This device cannot go on."""

    reason: str


@dataclass(frozen=True, slots=True)
class Train:
    """Go on with the present generation."""


Instruction = Ask | Gather | Meet | Stop | Train
Phase = Literal["training", "gathering", "meeting", "out"]


@dataclass(frozen=True, slots=True)
class Member:
    """One device's view.

    Attributes:
        me: its id.
        generation: the last that it belonged to.
        silent, dead: members that it has lost.
        present: members that have asked it for a meeting.
        newcomers: who is to be called to the next meeting beside members.
        not_reached: who did not answer this device after the last meeting that failed.
        unreachable: those that did not answer after the one before either.
        cut: pairs of members of which the first says that the second is unreachable.
        parted: pairs that do not reach each other; the second was therefore not called to the present generation, or is not to
            the one that meets.
        highest: the largest number of a generation that it heard of.
        called: the generation that is to meet.
        reason: why it is out.
    """

    me: int
    generation: Generation
    phase: Phase = "training"
    silent: frozenset[int] = frozenset()
    dead: frozenset[int] = frozenset()
    present: frozenset[int] = frozenset()
    newcomers: frozenset[int] = frozenset()
    not_reached: frozenset[int] = frozenset()
    unreachable: frozenset[int] = frozenset()
    cut: Pairs = frozenset()
    parted: Pairs = frozenset()
    highest: int = 0
    called: Generation | None = None
    reason: str = ""

    @property
    def candidates(self) -> tuple[int, ...]:
        """Members that it believes alive."""
        return tuple(d for d in self.generation.members if d not in self.silent and d not in self.dead)

    @property
    def leader(self) -> int:
        return self.candidates[0]

    @property
    def missing(self) -> tuple[int, ...]:
        """Whom it waits for as a leader."""
        return tuple(d for d in self.candidates if d != self.me and d not in self.present)


def instruction(state: Member) -> Instruction:
    """What is to be done in a state."""
    match state.phase:
        case "training":
            return Train()
        case "out":
            return Stop(state.reason)
        case "meeting":
            assert state.called is not None
            return Meet(state.called, hosts=state.called.members[0] == state.me)
        case "gathering":
            return Gather(state.missing) if state.leader == state.me else Ask(state.leader)


def answer(state: Member, device: int) -> Generation | None:
    """What a device is told that asks this one, after the event `Asked`: the generation that it is called to, or that goes on
    without it; None: to wait."""
    if state.called is not None and device in state.called.members:
        return state.called
    return state.generation if device not in state.generation.members else None


def observe(state: Member, event: Event) -> Member:
    """The state after an event."""
    if state.phase == "out":
        return state
    match event:
        case Lost(device, dead):
            if device not in state.candidates or device == state.me:
                return state
            if dead:
                return _interrupted(replace(state, dead=state.dead | {device}))
            return _interrupted(replace(state, silent=state.silent | {device}))
        case Interrupted():
            return _interrupted(state)
        case Granted(newcomers):
            if state.phase != "training":
                return state  # somebody was lost meanwhile; they ask again
            rest = sorted(set(newcomers) - set(state.generation.members))[: len(state.generation.members)]
            return _interrupted(replace(state, newcomers=frozenset(rest)))
        case Asked():
            return _asked(_heard(state, event.device, event.generation), event)
        case Heard(device, generation):
            return _heard(state, device, generation)
        case Called(by, generation, parted):
            wanted = state.phase == "gathering" and by == state.leader and state.me in generation.members
            if not wanted or generation.number <= state.highest:
                return state
            return replace(state, phase="meeting", called=generation, parted=parted)
        case Excluded(generation, parted):
            if generation.number < state.generation.number or state.me in generation.members:
                return state
            return _out(state, _why_excluded(state.me, parted))
        case Met():
            assert state.called is not None
            highest = max(state.highest, state.called.number)
            return Member(state.me, state.called, highest=highest, parted=state.parted)
        case Missed():
            assert state.called is not None
            highest = max(state.highest, state.called.number)
            grows = set(state.called.members) > set(state.generation.members)
            state = replace(state, generation=state.called if grows else state.generation, newcomers=frozenset())
            state = replace(
                state, phase="gathering", called=None, present=frozenset(), cut=frozenset(), parted=frozenset(),
                highest=highest,
            )  # fmt: skip
            return _call(state)
        case NotReached(devices):
            return replace(state, not_reached=devices, unreachable=state.not_reached & devices)


def _heard(state: Member, device: int, generation: Generation) -> Member:
    if state.phase != "gathering" or state.me not in generation.members:
        return state  # nothing is decided here, or it went on without this device
    return replace(state, silent=state.silent - {device})


def _asked(state: Member, event: Asked) -> Member:
    if event.generation.number > state.generation.number and state.me in event.generation.members:
        # It saw a meeting succeed that failed here: all had come to it.
        state = replace(state, generation=event.generation)
    if event.device not in state.candidates:
        return state
    # It reaches this one: it asks.
    cut = state.cut | {(event.device, other) for other in event.unreachable if other != state.me}
    present, highest = state.present | {event.device}, max(state.highest, event.highest)
    return _interrupted(replace(state, highest=highest, present=present, cut=cut))


def _interrupted(state: Member) -> Member:
    if state.phase == "meeting":
        return state  # which cannot succeed without whoever was lost
    return _call(replace(state, phase="gathering"))


def _call(state: Member) -> Member:
    """Call a meeting, as the leader, once all have asked."""
    if state.leader != state.me or state.missing:
        return state
    members, parted = _who_reach_each_other(state)
    if not enough(members, state.generation, state.dead):
        left_out = sorted(state.silent | (set(state.candidates) - set(members)))
        names = f"device{'s' * (len(left_out) > 1)} {', '.join(map(str, left_out))}"
        return _out(
            state,
            f"{names} cannot be reached, and may go on without this part of the fleet, "
            "which is not the larger one: two must not; resume from the last checkpoint",
        )
    newcomers = () if state.silent or state.dead or len(members) < len(state.candidates) else state.newcomers
    called = Generation(max(state.highest, state.generation.number) + 1, tuple(sorted({*members, *newcomers})))
    return replace(state, phase="meeting", called=called, parted=parted)


def _who_reach_each_other(state: Member) -> tuple[tuple[int, ...], Pairs]:
    """The candidates without those that leave no pair that does not, never without the leader, the lowest; and those pairs.

    Of the devices that are in the most pairs the highest is left out, again and again: one that nobody reaches, not all others.
    """
    pairs = {(min(pair), max(pair)) for pair in state.cut if set(pair) <= set(state.candidates)}
    parted: Pairs = frozenset()
    members = set(state.candidates)
    while pairs:
        often = Counter(device for pair in pairs for device in pair if device != state.leader)
        out = max(often, key=lambda device: (often[device], device))
        gone = {pair for pair in pairs if out in pair}
        parted |= {(one if other == out else other, out) for one, other in gone}
        members, pairs = members - {out}, pairs - gone
    return tuple(sorted(members)), parted


def _why_excluded(me: int, parted: Pairs) -> str:
    for one, other in sorted(parted):
        if other == me:
            return (
                f"devices {one} and {other} do not reach each other, so the job went on without the second one, this device; "
                "mend the way between them, and start it again"
            )
    return "the job went on without this device, which had been silent; start it again"


def enough(members: tuple[int, ...], before: Generation, dead: frozenset[int]) -> bool:
    """Whether these may go on as the next generation: no others can at the same time."""
    counted = [d for d in before.members if d not in dead]
    return 2 * len(members) > len(counted) or (2 * len(members) == len(counted) and counted[0] in members)


def _out(state: Member, reason: str) -> Member:
    return replace(state, phase="out", called=None, reason=reason)
