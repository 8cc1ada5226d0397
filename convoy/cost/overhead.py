"""What a step costs a device beside the arithmetic of its layers: the executor's Python, copies, additions, the optimizer."""

import math
from dataclasses import dataclass

from convoy.plan.steps import Exchange, Move, ReturnGradient, ShareStatistics, SumGradients
from convoy.sharding.comm_dtype import CommDtype, rounds_own_copy
from convoy.sharding.layout import Box, Layout, Partial, Replicated, box, covers, dual, entries
from convoy.sharding.redistribute import Round, Schedule

FRESH_BYTES = 32 << 20
"""What is larger, glibc's malloc takes from the system each time and gives back at once (its largest mmap threshold)."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """Properties of one device and of Convoy's executor on it; all zero for a device that exists only as a roofline.

    Attributes:
        step_s: of a whole training step: fetching a batch, the loss, clearing gradients, calling the optimizer.
        layer_s: of a layer's forward and backward together: finding its inputs, keeping its outputs.
        round_s: of a round with one message, sent or received, beyond what `Network.latency_s` holds: cutting, buffers,
            bookkeeping, and that a quota stretches the processor's part of the message.
        message_s: of each further message in it.
        copy_s_per_byte: of copying a tensor.
        add_s_per_byte: of adding a tensor to another.
        fresh_s_per_byte: of memory that the system must provide anew, page by page: for tensors larger than `FRESH_BYTES`.
        update_s_per_tensor: of the optimizer for each parameter, beside its entries.
    """

    step_s: float = 0.0
    layer_s: float = 0.0
    round_s: float = 0.0
    message_s: float = 0.0
    copy_s_per_byte: float = 0.0
    add_s_per_byte: float = 0.0
    fresh_s_per_byte: float = 0.0
    update_s_per_tensor: float = 0.0

    def calls_s(self, messages: int) -> float:
        """Seconds of a device's part in a round, by the messages that it sends and receives; without one it has no part."""
        return self.round_s + (messages - 1) * self.message_s if messages else 0.0

    def handling_s(self, handling: "Handling", itemsize: int) -> float:
        """Seconds of copies, additions and new memory."""
        fresh = sum(n for n in handling.made if n * itemsize > FRESH_BYTES)
        return itemsize * (
            handling.copied * self.copy_s_per_byte
            + handling.added * self.add_s_per_byte
            + fresh * self.fresh_s_per_byte
        )


@dataclass(frozen=True, slots=True)
class Handling:
    """Entries that a device copies and adds around the messages of a round, and those of each tensor that it makes."""

    copied: int = 0
    added: int = 0
    made: tuple[int, ...] = ()

    def __add__(self, other: "Handling") -> "Handling":
        return Handling(self.copied + other.copied, self.added + other.added, self.made + other.made)


NOTHING = Handling()


def copy_of(count: int) -> Handling:
    """A copy in memory of its own."""
    return Handling(copied=count, made=(count,))


def handling(step: Exchange, device: int) -> list[tuple[Handling, Handling]]:
    """What a device does before and after the messages of each round of a step, as `convoy.runtime.exchange` does it.

    A cut that is one block of memory is sent, and received into, as it lies; any other is copied into a block or out of
    one. What is added arrives beside the tensor, in memory that a sum uses again for each of its rounds, and a sum of
    gradients in every training step. Gradients that are summed together are joined to one tensor first.

    Narrowing and widening count as copies: they read or write the wide numbers once. A narrow summand is widened first.
    """
    schedule, (src, dst) = step.schedule, _ends(step)
    if not schedule.in_place:
        return _direct(schedule, device, src, dst, step.wire)
    reads = any(device in (t.sender, t.receiver) for transfers in schedule.rounds for t in transfers)
    alone = isinstance(step, SumGradients) and step.alone
    start = copy_of(schedule.shape[0]) if reads and _holds(src, device) and not alone else NOTHING
    rounds = []
    for number, transfers in enumerate(schedule.rounds):
        summands = tuple(entries(t.box) for t in transfers if t.receiver == device and t.adds)
        made = () if isinstance(step, SumGradients) or number >= schedule.window else summands
        before, after = (NOTHING, NOTHING) if step.wire == "exact" else _casts(transfers, device)
        rounds.append((start + before, Handling(added=sum(summands), made=made) + after))
        start = NOTHING
    return rounds


def _casts(transfers: Round, device: int) -> tuple[Handling, Handling]:
    """Narrow numbers in a round of a sum: each span that leaves is cast once, a finished one is also rounded in its place."""
    leaving = {t.box: t.adds for t in transfers if t.sender == device}
    before = sum((copy_of(entries(b)) for b in leaving), NOTHING)
    rounded = sum(entries(b) for b, adds in leaving.items() if not adds)
    arriving = tuple(entries(t.box) for t in transfers if t.receiver == device)
    return before + Handling(copied=rounded), Handling(copied=sum(arriving), made=arriving)


def kept_sums(step: SumGradients, device: int) -> Handling:
    """Gradients that were summed together lie in one tensor; at the end of a step each gets memory of its own."""
    apart = len(step.keys) > 1 and device in step.devices and len(step.devices) > 1
    return sum((copy_of(size) for size in step.sizes), NOTHING) if apart else NOTHING


def messages(schedule: Schedule, device: int) -> list[int]:
    """How many messages a device sends and receives in each round."""
    return [
        sum(device in (t.sender, t.receiver) and t.sender != t.receiver and entries(t.box) > 0 for t in transfers)
        for transfers in schedule.rounds
    ]


def _ends(step: Exchange) -> tuple[Layout, Layout]:
    match step:
        case Move(phase="backward"):
            return dual(step.reads.layout), dual(step.writes.layout)
        case Move():
            return step.reads.layout, step.writes.layout
        case ReturnGradient():
            return step.reads.layout, dual(step.writes.layout)
        case ShareStatistics():
            return step.layout, Replicated(step.members)
        case SumGradients():
            return Partial(step.devices), Replicated(step.devices)


def _holds(layout: Layout, device: int) -> bool:
    return not isinstance(layout, Partial) or device in layout.devices


def _direct(
    schedule: Schedule, device: int, src: Layout, dst: Layout, wire: CommDtype
) -> list[tuple[Handling, Handling]]:
    transfers = [t for transfers in schedule.rounds for t in transfers]
    if not any(device in (t.sender, t.receiver) for t in transfers):
        return [(NOTHING, NOTHING)] * len(schedule.rounds)
    own, wanted = box(src, device, schedule.shape), box(dst, device, schedule.shape)
    kept = [t.box for t in transfers if t.sender == t.receiver == device]
    arrives = any(t.receiver == device != t.sender for t in transfers)
    narrow, whole = wire != "exact", rounds_own_copy(wire, schedule, dst)
    before = made = NOTHING
    # Copies are narrowed as a whole before the first round, whatever else leaves cut by cut.
    if whole and own is not None and any(t.sender == device for t in transfers):
        before += copy_of(entries(own))
    if wanted is not None and not arrives and covers(kept, wanted):
        before += copy_of(entries(wanted)) if whole else NOTHING
        wanted = None
    elif wanted is not None:
        summed = isinstance(dst, Partial) or any(t.adds for t in transfers if t.receiver == device)
        # Where it is summed, zeros are written first. All rounds fill one tensor, which is made with the first.
        made = Handling(copied=entries(wanted) if summed else 0, made=(entries(wanted),))
    rounds = []
    for each in schedule.rounds:
        packed, landed = _packed(each, device, own, narrow and not whole), _landed(each, device, wanted, narrow)
        rounds.append((before + packed, made + landed))
        before = made = NOTHING
    return rounds


def _packed(transfers: Round, device: int, own: Box | None, cast: bool) -> Handling:
    leaving = [t for t in transfers if t.sender == device != t.receiver]
    return sum((copy_of(entries(t.box)) for t in leaving if cast or not is_block(t.box, own)), NOTHING)


def _landed(transfers: Round, device: int, wanted: Box | None, narrow: bool) -> Handling:
    """What arrives and stays goes into a tensor `wanted`; None: nothing does."""
    total = NOTHING
    if wanted is None:
        return total
    for t in transfers:
        count = entries(t.box)
        aside = t.sender != device and (narrow or t.adds or not is_block(t.box, wanted))
        landing = (count,) if aside else ()
        if t.receiver == device and t.adds:
            total += Handling(added=count, made=landing) + (copy_of(count) if narrow and aside else NOTHING)
        elif t.receiver == device and (landing or t.sender == device):
            total += Handling(copied=count, made=landing)
    return total


def is_block(part: Box, of: Box | None) -> bool:
    """Whether a part of a tensor is one block of memory, where the tensor itself is one."""
    if of is None:
        return True
    extents = [(stop - start, end - origin) for (start, stop), (origin, end) in zip(part, of, strict=True)]
    if math.prod(n for n, _ in extents) <= 1:
        return True
    last = max((axis for axis, (n, whole) in enumerate(extents) if n < whole), default=0)
    return all(n == 1 for n, _ in extents[:last])
