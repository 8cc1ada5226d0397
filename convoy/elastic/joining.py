"""How a process comes into a job that trains already: a state machine. Events in, what to do out. Pure.

It asks at one door of the job after another, first whether the job would take it, then, once it is ready, to be let in. Only
the leader lets in, so every other device answers with the doors of the present generation, the leader's first; the leader tells
them while it has somebody wait, so that any of the devices may be lost meanwhile. Then it is called to the meeting of the next
generation. From then on it is a member like the others, and no newcomer any more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from convoy.elastic.agreement import Generation

Address = tuple[str, int]


# ------------------------------------------------------------------------------------------------ what happens


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Nobody of the job answers at the door that was asked."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Who was asked does not let in; these doors may, the first of them the leader's."""

    doors: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class Waits:
    """The leader has heard it; with a reason where it is not to come in for now, and where its job answers now."""

    reason: str = ""
    doors: tuple[Address, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """It can never come in."""

    reason: str


@dataclass(frozen=True, slots=True)
class Invited:
    """It belongs to a generation, as this device of it."""

    device: int
    generation: Generation


Event = Unanswered | Sent | Waits | Refused | Invited

# ------------------------------------------------------------------------------------------------ what is to be done


@dataclass(frozen=True, slots=True)
class AskAt:
    """Ask at this door."""

    door: Address


@dataclass(frozen=True, slots=True)
class Meet:
    """Be this device of a generation, which meets."""

    device: int
    generation: Generation


@dataclass(frozen=True, slots=True)
class Stop:
    """It cannot join."""

    reason: str


Instruction = AskAt | Meet | Stop

ROUNDS = 3
"""So often every known door is tried without an answer: the job may be just changing."""


@dataclass(frozen=True, slots=True)
class Newcomer:
    """Its view.

    Attributes:
        doors: of the job's devices, as far as they are known.
        asked: the index of the door to ask at.
        unanswered: how many doors in sequence did not answer.
        spare: why it waits; empty: it does not, or nobody has said it.
        invited: the meeting to go to.
        stopped: why it cannot join.
    """

    doors: tuple[Address, ...]
    asked: int = 0
    unanswered: int = 0
    spare: str = ""
    invited: Invited | None = None
    stopped: str = ""


def instruction(state: Newcomer) -> Instruction:
    """What is to be done in a state."""
    if state.stopped:
        return Stop(state.stopped)
    if state.invited is not None:
        return Meet(state.invited.device, state.invited.generation)
    return AskAt(state.doors[state.asked])


def observe(state: Newcomer, event: Event) -> Newcomer:
    """The state after an event."""
    match event:
        case Unanswered():
            count = state.unanswered + 1
            if count >= ROUNDS * len(state.doors):
                return replace(state, stopped=f"nobody of the job answers at {_shown(state.doors)}: has it ended?")
            return replace(state, asked=(state.asked + 1) % len(state.doors), unanswered=count)
        case Sent(doors):
            known = _together(doors, state.doors)
            return replace(state, doors=known, asked=0, unanswered=0) if doors else observe(state, Unanswered())
        case Waits(reason, doors):
            # Who answered stays the first: it may be reached by another address than the one that it knows of itself.
            known = _together((state.doors[state.asked],), doors, state.doors)
            return replace(state, doors=known, asked=0, unanswered=0, spare=reason)
        case Refused(reason):
            return replace(state, stopped=reason)
        case Invited():
            return replace(state, invited=event, unanswered=0, spare="")


MOST_DOORS = 64


def _together(*rows: Sequence[Address]) -> tuple[Address, ...]:
    """Each door once. Those known before come last, and stay: all that it was told of may be lost."""
    return tuple(dict.fromkeys(door for doors in rows for door in doors))[:MOST_DOORS]


def _shown(doors: Sequence[Address]) -> str:
    return ", ".join(f"{host}:{port}" for host, port in doors[:4]) + (", ..." if len(doors) > 4 else "")
