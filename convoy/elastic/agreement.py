"""Decides which devices continue after a change, with a state machine per device: events in, instructions out.

A *generation* is a numbered set of devices that train together. When a device is lost, each survivor sends a request to the
leader, the lowest device that it believes alive. The leader calls a meeting when it has a request from every device that it
believes alive. The devices at the meeting are the next generation; if one does not come, all send requests again. Two leaders
at once are harmless: a device goes to one meeting at a time, and a meeting succeeds only if all called devices come.

If two devices cannot reach each other but others reach both, every meeting fails. After two failed meetings each device reports
the devices that did not answer it after both. The leader then excludes the higher device of such a pair, or the one in several
pairs. (After a single failed meeting, a device may only have been stopped for a moment.)

Two parts of a fleet that cannot reach each other must not both continue. So a generation needs more than half of the previous
one's devices, or half of them including the lowest. Unreachable devices count, because they may be alive. Dead devices do not
count: their machine has reported the end of the process.

A generation grows between two steps: all members record the admission in the same step, and the leader calls the joining
devices to the meeting with *all* members. If a member is lost meanwhile, the joining devices must ask again: otherwise an
absent member would not know which devices may be in the next generation. Every called device counts as a member from then on,
even if the meeting fails. There are never more joining devices at once than members, so the members can continue without them.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Generation:
    """The devices that train together.

    Attributes:
        number: increases from one generation to the next.
        members: ids of the devices in rising order. A device keeps its id when others join or leave.
    """

    number: int
    members: tuple[int, ...]

    def index(self, device: int) -> int:
        """Return the group index of the device with this id."""
        return self.members.index(device)


Pairs = frozenset[tuple[int, int]]
"""Pairs of devices."""

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lost:
    """The event that another device's process has ended (`dead`), or that the device does not answer."""

    device: int
    dead: bool


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The event that a step failed on this device, or that another device reports a failed step."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The event that all members admit these joining devices, between two steps."""

    joining: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Requested:
    """The event that another device asks this one, as its leader, for a meeting.

    `generation` is its last one, `highest` the largest number it knows. `unreachable` did not answer after two failed meetings.
    """

    device: int
    generation: Generation
    highest: int
    unreachable: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Reached:
    """The event that a device of this generation has sent this one a message, so it is not silent.

    Without this event, two devices would wait long for each other if one counts the other as lost.
    """

    device: int
    generation: Generation


@dataclass(frozen=True, slots=True)
class Called:
    """The event that the leader calls this generation to a meeting. For `parted`, see `Member`."""

    by: int
    generation: Generation
    parted: Pairs = frozenset()


@dataclass(frozen=True, slots=True)
class Excluded:
    """The event that the job continues as this generation, which excludes this device. For `parted`, see `Member`."""

    generation: Generation
    parted: Pairs = frozenset()


@dataclass(frozen=True, slots=True)
class Met:
    """The event that all called devices came to the meeting."""


@dataclass(frozen=True, slots=True)
class Missed:
    """The event that a called device did not come to the meeting."""


@dataclass(frozen=True, slots=True)
class NotReached:
    """The event that these devices did not answer this one after a failed meeting."""

    devices: frozenset[int]


Event = Lost | Interrupted | Granted | Requested | Reached | Called | Excluded | Met | Missed | NotReached

# --- instructions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """The instruction to ask this device for a meeting until it answers."""

    leader: int


@dataclass(frozen=True, slots=True)
class Gather:
    """The instruction to tell these devices that a step failed, check that they are alive, and wait for their requests."""

    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Meet:
    """The instruction to go to the meeting of this generation, and to host its store if `hosts`."""

    generation: Generation
    hosts: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """The instruction to stop, because this device cannot continue."""

    reason: str


@dataclass(frozen=True, slots=True)
class Train:
    """The instruction to continue with the current generation."""


Instruction = Ask | Gather | Meet | Stop | Train
Phase = Literal["training", "gathering", "meeting", "out"]


@dataclass(frozen=True, slots=True)
class Member:
    """One device's state.

    Attributes:
        me: this device's id.
        generation: the last generation to which this device belonged.
        silent, dead: members that do not answer, and members whose process has ended.
        present: members that have asked this device for a meeting.
        joining: devices to call to the next meeting in addition to the members.
        not_reached: devices that did not answer this one after the last failed meeting.
        unreachable: devices that did not answer this one after the last two failed meetings.
        cut: pairs (a, b) of members: a reports that b is unreachable.
        parted: pairs that cannot reach each other; the second is excluded from the current or next generation.
        highest: the largest generation number known here.
        called: the generation that is called to the meeting.
        reason: why this device cannot continue.
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
        """Members that this device believes alive."""
        return tuple(d for d in self.generation.members if d not in self.silent and d not in self.dead)

    @property
    def leader(self) -> int:
        return self.candidates[0]

    @property
    def missing(self) -> tuple[int, ...]:
        """Members whose requests have not arrived at this device, the leader."""
        return tuple(d for d in self.candidates if d != self.me and d not in self.present)


def instruction(state: Member) -> Instruction:
    """Return what the device must do in this state."""
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
    """Return the reply to a device that requested a meeting: the generation that calls or excludes it; None: wait."""
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
                return state  # a device was lost meanwhile; the joining devices ask again
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
        return state  # no regroup is in progress here, or that generation excludes this device
    return replace(state, silent=state.silent - {device})


def _requested(state: Member, event: Requested) -> Member:
    if event.generation.number > state.generation.number and state.me in event.generation.members:
        # The meeting succeeded there, so all devices came, although the same meeting failed here.
        state = replace(state, generation=event.generation)
    if event.device not in state.candidates:
        return state
    # The request shows that the other device reaches this one.
    cut = state.cut | {(event.device, other) for other in event.unreachable if other != state.me}
    present, highest = state.present | {event.device}, max(state.highest, event.highest)
    return _interrupted(replace(state, highest=highest, present=present, cut=cut))


def _interrupted(state: Member) -> Member:
    if state.phase == "meeting":
        return state  # that meeting fails anyway if a called device is lost
    return _call(replace(state, phase="gathering"))


def _call(state: Member) -> Member:
    """Call a meeting if this device is the leader and has all requests."""
    if state.leader != state.me or state.missing:
        return state
    members, parted = _connected(state)
    if not enough(members, state.generation, state.dead):
        left_out = sorted(state.silent | (set(state.candidates) - set(members)))
        names = f"device{'s' * (len(left_out) > 1)} {', '.join(map(str, left_out))}"
        return _out(
            state,
            f"{names} cannot be reached, and may continue as the larger part of the fleet, so this part must stop; resume "
            "from the last checkpoint",
        )
    joining = () if state.silent or state.dead or len(members) < len(state.candidates) else state.joining
    called = Generation(max(state.highest, state.generation.number) + 1, tuple(sorted({*members, *joining})))
    return replace(state, phase="meeting", called=called, parted=parted)


def _connected(state: Member) -> tuple[tuple[int, ...], Pairs]:
    """Return candidates that all reach each other, including the leader, and the pairs that do not.

    Exclude the device in the most pairs (of several, the highest) until no pair is left. So if all others fail to reach one
    device, only that one is excluded.
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
                f"devices {one} and {other} cannot reach each other, so the job continued without the second one, this "
                "device; repair their connection, and start it again"
            )
    return "the job continued without this device, which was silent; start it again"


def enough(members: tuple[int, ...], before: Generation, dead: frozenset[int]) -> bool:
    """Return whether these devices may continue as the next generation; then no other part of the fleet may."""
    counted = [d for d in before.members if d not in dead]
    return 2 * len(members) > len(counted) or (2 * len(members) == len(counted) and counted[0] in members)


def _out(state: Member, reason: str) -> Member:
    return replace(state, phase="out", called=None, reason=reason)
