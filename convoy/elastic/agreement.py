"""How the remaining devices agree who continues: a state machine of each device, from events to instructions.

A *generation* is a number and the devices that train together. When one of them is lost, each survivor asks the lowest device
that it believes alive, the leader. The leader calls a meeting once every device has asked that it does not know to be lost. The
devices at the meeting are the next generation; if one does not come, all ask again. So two leaders do no harm, for a device
goes to one meeting at a time, and a meeting takes place only with all that were called to it.

Two devices that do not reach each other, while others reach both, would make every meeting fail. After two such meetings each
device reports which devices it reached after neither, and the leader leaves the higher device of such a pair out, or the one
that is in several pairs. After one meeting it could be a device that stood still for a moment and asks again by now.

Two parts of a fleet that do not reach each other must not both continue. So a generation needs more than half of the devices of
the one before, or half of them with the lowest. Devices that are known to be dead do not count: an unreachable device may be
alive, a process that its machine reports as ended is not.

A generation grows between two steps: all members learn in the same step that devices are to be admitted, and the leader calls
these to the meeting with *all* members. If a member is lost just then, the joining devices have to ask again: otherwise a
member that was absent would not know with which devices the next generation may have continued. Every called device counts as a
member from then on, also if the meeting fails. There are never more joining devices at once than members, so the members can
continue without them.
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
"""Pairs of devices."""

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lost:
    """Another device is dead, or (not `dead`) silent."""

    device: int
    dead: bool


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A step failed here, or another device reports that one failed there."""


@dataclass(frozen=True, slots=True)
class Granted:
    """All devices have agreed, between two steps, to admit these."""

    joining: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Requested:
    """Another device asks this one, as its leader, for a meeting.

    It belongs to `generation`, knows numbers up to `highest`, and did not reach `unreachable` after two meetings that failed.
    """

    device: int
    generation: Generation
    highest: int
    unreachable: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Reached:
    """A device of this generation has sent this one a message, so it is not silent.

    Without this event, two devices that wait for each other, one of which took the other for lost, would wait for long.
    """

    device: int
    generation: Generation


@dataclass(frozen=True, slots=True)
class Called:
    """The leader calls to a meeting, without the devices that are `parted` (see `Member`)."""

    by: int
    generation: Generation
    parted: Pairs = frozenset()


@dataclass(frozen=True, slots=True)
class Excluded:
    """Another device reports that the job continues without this one, as this generation, without `parted` (see `Member`)."""

    generation: Generation
    parted: Pairs = frozenset()


@dataclass(frozen=True, slots=True)
class Met:
    """All called devices have come to the meeting."""


@dataclass(frozen=True, slots=True)
class Missed:
    """A called device did not come to the meeting."""


@dataclass(frozen=True, slots=True)
class NotReached:
    """These called devices did not answer this one after a meeting that failed."""

    devices: frozenset[int]


Event = Lost | Interrupted | Granted | Requested | Reached | Called | Excluded | Met | Missed | NotReached

# --- instructions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask this device for a meeting until it answers."""

    leader: int


@dataclass(frozen=True, slots=True)
class Gather:
    """Wait for the requests of these; send them that a step failed, and find out whether they are alive."""

    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Meet:
    """Go to the meeting of this generation; `hosts`: this device hosts it."""

    generation: Generation
    hosts: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """This device cannot continue."""

    reason: str


@dataclass(frozen=True, slots=True)
class Train:
    """Continue with the present generation."""


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
        joining: devices to be called to the next meeting together with the members.
        not_reached: devices that did not answer this one after the last meeting that failed.
        unreachable: those that did not answer after the one before either.
        cut: pairs of members of which the first reports that the second is unreachable.
        parted: pairs that do not reach each other; the second is not called to the present or the next generation.
        highest: the largest number of a generation that it knows of.
        called: the generation that is to meet.
        reason: why it is out.
    """

    me: int
    generation: Generation
    phase: Phase = "training"
    silent: frozenset[int] = frozenset()
    dead: frozenset[int] = frozenset()
    present: frozenset[int] = frozenset()
    joining: frozenset[int] = frozenset()
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
        """Members whose requests it waits for as a leader."""
        return tuple(d for d in self.candidates if d != self.me and d not in self.present)


def instruction(state: Member) -> Instruction:
    """Return what to do in a state."""
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
    """Return the reply to a device after its event `Requested`: the generation that it is called to, or that continues without
    it; None: wait."""
    if state.called is not None and device in state.called.members:
        return state.called
    return state.generation if device not in state.generation.members else None


def observe(state: Member, event: Event) -> Member:
    """Return the state after an event."""
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
        case Granted(joining):
            if state.phase != "training":
                return state  # a device was lost meanwhile; they ask again
            rest = sorted(set(joining) - set(state.generation.members))[: len(state.generation.members)]
            return _interrupted(replace(state, joining=frozenset(rest)))
        case Requested():
            return _requested(_reached(state, event.device, event.generation), event)
        case Reached(device, generation):
            return _reached(state, device, generation)
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
            state = replace(state, generation=state.called if grows else state.generation, joining=frozenset())
            state = replace(
                state, phase="gathering", called=None, present=frozenset(), cut=frozenset(), parted=frozenset(),
                highest=highest,
            )  # fmt: skip
            return _call(state)
        case NotReached(devices):
            return replace(state, not_reached=devices, unreachable=state.not_reached & devices)


def _reached(state: Member, device: int, generation: Generation) -> Member:
    if state.phase != "gathering" or state.me not in generation.members:
        return state  # nothing is decided here, or it continued without this device
    return replace(state, silent=state.silent - {device})


def _requested(state: Member, event: Requested) -> Member:
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
    members, parted = _connected(state)
    if not enough(members, state.generation, state.dead):
        left_out = sorted(state.silent | (set(state.candidates) - set(members)))
        names = f"device{'s' * (len(left_out) > 1)} {', '.join(map(str, left_out))}"
        return _out(
            state,
            f"{names} cannot be reached, and may continue without this part of the fleet, "
            "which is not the larger one: two must not; resume from the last checkpoint",
        )
    joining = () if state.silent or state.dead or len(members) < len(state.candidates) else state.joining
    called = Generation(max(state.highest, state.generation.number) + 1, tuple(sorted({*members, *joining})))
    return replace(state, phase="meeting", called=called, parted=parted)


def _connected(state: Member) -> tuple[tuple[int, ...], Pairs]:
    """Return candidates that all reach each other, with the leader among them; and the pairs that do not.

    Leave out the highest of the devices that are in the most pairs, until no pair is left: so one device that no other reaches
    is left out, not all the others.
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
                f"devices {one} and {other} do not reach each other, so the job continued without the second one, this device; "
                "mend the way between them, and start it again"
            )
    return "the job continued without this device, which had been silent; start it again"


def enough(members: tuple[int, ...], before: Generation, dead: frozenset[int]) -> bool:
    """Return whether these may continue as the next generation: no others can at the same time."""
    counted = [d for d in before.members if d not in dead]
    return 2 * len(members) > len(counted) or (2 * len(members) == len(counted) and counted[0] in members)


def _out(state: Member, reason: str) -> Member:
    return replace(state, phase="out", called=None, reason=reason)
