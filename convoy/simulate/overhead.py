"""What a step costs a device beside the arithmetic of its layers: the executor's Python, copies, additions, the optimizer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from convoy.plan.device_program import (
    Add,
    Copy,
    FreeWeights,
    HaveWeights,
    Make,
    Merge,
    Operation,
    Pack,
    PackWeights,
    Unpack,
    UnpackWeights,
    View,
)

FRESH_BYTES = 32 << 20
"""What is larger, glibc's malloc takes from the system each time and gives back at once (its largest mmap threshold)."""

LOSS_TENSORS = 3
"""As large as the outputs, that a cross-entropy makes: logarithms of probabilities, their gradient, that of the outputs."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """Properties of one device and of Convoy's executor on it; all zero for a device that exists only as a roofline.

    Attributes:
        step_s: of a whole training step: fetching a batch, calling the loss, clearing gradients, calling the optimizer.
        layer_s: of a layer's forward and backward together: finding its inputs, keeping its outputs.
        round_s: of a round with one message, sent or received, beyond what `Network.latency_s` holds: cutting, buffers,
            bookkeeping, and that a quota stretches the processor's part of the message.
        message_s: of each further message in it.
        copy_s_per_byte: of copying a tensor.
        add_s_per_byte: of adding a tensor to another.
        fresh_s_per_byte: of memory that the system must provide anew, page by page: for tensors larger than `FRESH_BYTES`.
        update_s_per_tensor: of the optimizer for each parameter, beside its entries.
        loss_s_per_byte: of the loss and its gradient, for each byte of the outputs that it is computed of.
        queue_s: of an accelerator's host to queue one layer's forward or backward. The host runs ahead of the device, so a
            segment takes the device's seconds or the host's, whichever are more. 0 on a CPU.
    """

    step_s: float = 0.0
    layer_s: float = 0.0
    round_s: float = 0.0
    message_s: float = 0.0
    copy_s_per_byte: float = 0.0
    add_s_per_byte: float = 0.0
    fresh_s_per_byte: float = 0.0
    update_s_per_tensor: float = 0.0
    loss_s_per_byte: float = 0.0
    queue_s: float = 0.0

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

    def loss_s(self, outputs: Sequence[int], itemsize: int) -> float:
        """Seconds of the loss, forward and backward, of outputs with so many entries each."""
        if not self.loss_s_per_byte:
            return 0.0
        made = Handling(made=tuple(n for n in outputs for _ in range(LOSS_TENSORS)))
        return sum(outputs) * itemsize * self.loss_s_per_byte + self.handling_s(made, itemsize)


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


def handling_of(operation: Operation) -> Handling | None:
    """What an operation copies, adds and makes; None for one that computes, sends, receives, waits or signals.

    Narrowing and widening count as copies: they read or write the wide numbers once. Where a pending sum begins, zeros are
    written. Memory that every step uses again costs nothing to make.
    """
    match operation:
        case Make(slot=int()) | View() | Unpack() | Pack(alone=True) | FreeWeights():
            return NOTHING
        case Make(shape=shape, zeros=zeros):
            size = math.prod(shape)
            return Handling(copied=size if zeros else 0, made=(size,))
        case Copy(size=size):
            return Handling(copied=size)
        case Add(size=size, narrow=narrow):
            return Handling(copied=size, added=size, made=(size,)) if narrow else Handling(added=size)
        case Merge(parts=parts, size=size):
            return Handling(added=size * (len(parts) - 1), made=(size,) * (len(parts) - 1))
        case Pack(size=size):
            return copy_of(size)
        case PackWeights(size=size, made=made, fresh=fresh, shares=shares):
            return Handling(copied=size, made=(made, *(map(sum, shares) if fresh else ())))
        case HaveWeights(size=size):  # compared: two are read, as a copy reads one and writes one
            return Handling(copied=size)
        case UnpackWeights(size=size, alone=alone):
            return NOTHING if alone else Handling(copied=size)
    return None
