"""Who has which parts of a model's state after a loss, of which step, and who sends what to whom. Pure.

Each device keeps its state as it was after some steps: its own pieces, and copies of a neighbour's. The layouts may have
changed in between, so all of them are boxes in the coordinates of the whole tensors.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from convoy.layout.layout import Box, entries, intersection

Boxes = Mapping[str, Sequence[Box]]
"""What one device has of each tensor, by key."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A part of a tensor that a device gets from another, or has itself (`sender == receiver`)."""

    key: str
    box: Box
    sender: int
    receiver: int


def without(box: Box, taken: Box) -> list[Box]:
    """What is left of a box, as boxes that do not overlap."""
    common = intersection(box, taken)
    if common is None:
        return [box]
    rest, left = [], list(box)
    for axis, ((start, stop), (lo, hi)) in enumerate(zip(box, common, strict=True)):
        for span in ((start, lo), (hi, stop)):
            if span[0] < span[1]:
                rest.append((*left[:axis], span, *left[axis + 1 :]))
        left[axis] = (lo, hi)
    return rest


def uncovered(wanted: Box, held: Iterable[Box]) -> list[Box]:
    """The parts of a box that none of some boxes has."""
    rest = [wanted]
    for each in held:
        rest = [part for box in rest for part in without(box, each)]
    return rest


def newest_whole(kept: Sequence[Mapping[int, Boxes]], wanted: Mapping[str, Box]) -> int | None:
    """The last step of which the devices together have every tensor whole; None where there is none.

    Args:
        kept: of each device, what it has of the state after each of some steps.
        wanted: the box of each whole tensor.
    """
    for step in sorted({step for rows in kept for step in rows}, reverse=True):
        held = [rows[step] for rows in kept if step in rows]
        if not any(uncovered(box, (b for row in held for b in row.get(key, ()))) for key, box in wanted.items()):
            return step
    return None


def transfers(
    held: Sequence[Boxes], wanted: Sequence[Mapping[str, Box]], bytes_of: Mapping[str, int]
) -> tuple[Transfer, ...]:
    """Who sends what, so that every device has what it is to have. Who has sent least so far sends next.

    Args:
        held: what each device has; together they have all.
        wanted: what each is to have.
        bytes_of: of an entry of each tensor, with all that travels with it.
    """
    found, sent = [], [0] * len(held)
    for receiver, boxes in enumerate(wanted):
        for key, box in boxes.items():
            rest = [box]
            while rest:
                part = rest.pop()
                order = sorted(range(len(held)), key=lambda d: (d != receiver, sent[d], d))
                sender, common = next(
                    (device, common)
                    for device in order
                    for mine in held[device].get(key, ())
                    if (common := intersection(mine, part)) is not None
                )
                found.append(Transfer(key, common, sender, receiver))
                sent[sender] += (sender != receiver) * entries(common) * bytes_of[key]
                rest += without(part, common)
    return tuple(found)
