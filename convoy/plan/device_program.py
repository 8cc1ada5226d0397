"""The device program: everything one device does in one training step, as a list of operations.

It is compiled once from the step list (`compile.py`), for each plan, batch and mode. The executor interprets it, the simulator
plays it, the cost and memory models price it, `--explain` prints it and `program_text.py` parses what was printed. So the bytes
that are predicted are the bytes that are sent: they are the same operations.

Operations work on *buffers*, tensors with a name: a value of the forward pass has the key it has in the step list, its
gradient that key behind ``d:``, and what lies ready for a message or arrives in one has a name of its own. Sizes are in
entries; `narrow` marks those that travel in fewer bits (see `layout/comm_dtype.py`).

A program has two lanes. The main lane computes, in the order of the step list. Gradient sums go on the second lane, one after
the other, while the main lane goes on; `Signal` and `Wait` order the two.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from convoy.layout.comm_dtype import narrow_itemsize
from convoy.layout.layout import Box, Shape
from convoy.layout.shares import Shares
from convoy.plan.size import LocalSize
from convoy.plan.steps import Pass, Phase

Event = tuple[str, int, int]
"""What an operation can wait for: ("round", step, number), the messages of a round; ("ready", step, 0) and ("summed", step, 0),
a gradient sum whose summands are there, and one that is done."""

NO_SIZE = LocalSize(0, 0, 0)

GRADIENT = "d:"
"""A value's gradient has this before the value's key."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a buffer, in the coordinates of the buffer itself; without a box, all of it."""

    buffer: str
    box: Box | None = None


@dataclass(frozen=True, slots=True)
class Compute:
    """A layer's arithmetic on this device.

    Attributes:
        step: id in the step list, as of every operation.
        reads: in forward, the values that the layer takes; in backward, the gradient of the value that it made.
        writes: in forward, the value that it makes; in backward, the gradient of each value that it took, "" where none is
            wanted.
        wants: which of the layer's inputs have a gradient.
        part: "all"; in backward "input" or "weight" for the one gradient alone; "statistics" and "combine" before and after
            the devices of a batch norm tell each other their sums.
        last: in backward, whether the layer's saved tensors are needed no more.
        size: how much of the layer; its time depends on it.
        rows: in forward, the rows of the input that have arrived, where it comes in chunks.
    """

    step: int
    phase: Phase
    layer: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    wants: tuple[bool, ...] = ()
    part: str = "all"
    last: bool = True
    size: LocalSize = NO_SIZE
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Make:
    """Memory for a buffer.

    Attributes:
        zeros: filled with zeros.
        result: a value or a gradient, not only a place on the way.
        reused: the same memory in every step: where summands arrive.
    """

    step: int
    buffer: str
    shape: Shape
    zeros: bool = False
    narrow: bool = False
    result: bool = False
    reused: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """Another name for a part of a buffer, in a shape: nothing is copied."""

    step: int
    buffer: str
    of: Part
    shape: Shape


@dataclass(frozen=True, slots=True)
class Copy:
    """One part is copied to another, converted where one of them is narrow."""

    step: int
    source: Part
    target: Part
    size: int


@dataclass(frozen=True, slots=True)
class Add:
    """One part is added to another, widened first where it is narrow."""

    step: int
    source: Part
    target: Part
    size: int
    narrow: bool = False


@dataclass(frozen=True, slots=True)
class Merge:
    """The gradient of a value with several readers: the sum of what each of them gives, in new memory."""

    step: int
    buffer: str
    parts: tuple[str, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Send:
    """A part goes to another device. It must not change until the round has been waited for."""

    step: int
    number: int
    peer: int
    part: Part
    size: int
    narrow: bool = False


@dataclass(frozen=True, slots=True)
class Receive:
    """A part arrives from another device. It may be used when the round has been waited for."""

    step: int
    number: int
    peer: int
    part: Part
    size: int
    narrow: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """The lane goes on when all of these have happened."""

    step: int
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Signal:
    """This has happened."""

    step: int
    event: Event


@dataclass(frozen=True, slots=True)
class Pack:
    """Gradients of parameters are joined to one flat buffer, zeros for those that this device has no part in.

    Attributes:
        keys, sizes: of the parameters, and their entries.
        flags: trailing entries that say which parameters were used on this device at all; 0: none.
        alone: the one gradient itself is the buffer, nothing is copied.
        mixed_over: INEXACT mixing: the weights go with the gradients, divided by so many devices; 0: an exact sum.
        into: of parameters that are kept in shares, for each the entries of every device: the buffer holds those of device 0
            of all of them, then those of device 1, and so on.
    """

    step: int
    buffer: str
    keys: tuple[str, ...]
    sizes: tuple[int, ...]
    flags: int = 0
    alone: bool = False
    mixed_over: int = 0
    into: tuple[Shares, ...] = ()

    @property
    def size(self) -> int:
        return (2 if self.mixed_over else 1) * sum(self.sizes) + self.flags


@dataclass(frozen=True, slots=True)
class Unpack:
    """The gradients of parameters are those of a flat buffer from now on; fields as in `Pack`.

    Attributes:
        sizes: of the parameters, or of this device's shares of them.
        scale: mixing: what the gradients of two devices count in a whole batch.
        copied: each gets memory of its own at the end of the step.
    """

    step: int
    buffer: str
    keys: tuple[str, ...]
    sizes: tuple[int, ...]
    flags: int = 0
    mixed_over: int = 0
    scale: float = 1.0
    copied: bool = False


@dataclass(frozen=True, slots=True)
class PackWeights:
    """This device's shares of parameters are copied to their place in a flat buffer, in which the others' arrive.

    Attributes:
        shares: of each parameter, the entries that every device keeps.
        size: entries of this device's shares.
        alone: of one parameter: the buffer is the whole parameter itself.
        own_only: this device computes nothing with them: the buffer has its shares alone.
        fresh: the memory of the whole parameters was given back after their last use, and is taken from the system anew.
        stays: the buffer stays until the next pass, which has nothing else to see by whether a share has changed.
    """

    step: int
    buffer: str
    keys: tuple[str, ...]
    shares: tuple[Shares, ...]
    size: int
    alone: bool = False
    own_only: bool = False
    stays: bool = False
    fresh: bool = False

    @property
    def made(self) -> int:
        """Entries of new memory."""
        return 0 if self.alone else self.size if self.own_only else sum(map(sum, self.shares))


@dataclass(frozen=True, slots=True)
class UnpackWeights:
    """Whole parameters are there; where several arrived together, each is copied to memory of its own. Fields as in
    `PackWeights`."""

    step: int
    buffer: str
    keys: tuple[str, ...]
    shares: tuple[Shares, ...]
    alone: bool = False

    @property
    def size(self) -> int:
        return sum(map(sum, self.shares))


@dataclass(frozen=True, slots=True)
class HaveWeights:
    """Whole parameters are there since the first pass of the step, if this device's shares of them have not changed since; if
    they have, the step ends with an error. Fields as in `PackWeights`."""

    step: int
    keys: tuple[str, ...]
    shares: tuple[Shares, ...]
    size: int
    own_only: bool = False


@dataclass(frozen=True, slots=True)
class FreeWeights:
    """The memory of whole parameters that were gathered from shares is given back."""

    step: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fused:
    """A stretch of computations without an exchange between them, handed to autograd as one graph.

    Attributes:
        step: of its first operation.
        number: the same in forward and backward.
        reads: in forward, values from outside; in backward, the gradient of each value in the forward stretch's `writes`, ""
            where none arrives.
        writes: in forward, values that are used outside; in backward, the gradient of each value in the forward stretch's
            `reads`, "" where none is wanted.
        operations: computations; in backward also `Pack` and `Signal` of gradient sums that begin meanwhile.
    """

    step: int
    phase: Phase
    number: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    operations: tuple[Compute | Pack | Signal, ...]


Operation = (
    Compute | Fused | Make | View | Copy | Add | Merge | Send | Receive | Wait | Signal | Pack | Unpack | PackWeights
    | UnpackWeights | HaveWeights | FreeWeights
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeviceProgram:
    """What one device does in one training step.

    Attributes:
        inputs: the parts of the batch that the loader provides, as buffers.
        outputs: buffers that the caller gets.
        output_gradients: buffers that the caller gives to backward.
        input_gradients: for each input, the buffer that the caller gets from backward; "" where this device has no part in it.
        forward, backward: the main lane.
        sums: the second lane.
        pass_: which pass of a training step it is; in the first and the middle ones there are no sums.
    """

    device: int
    devices: int
    batch: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    output_gradients: tuple[str, ...]
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    sums: tuple[Operation, ...]
    input_gradients: tuple[str, ...] = ()
    pass_: Pass = "only"

    def operations(self) -> Iterator[Operation]:
        """All of them, those inside fused stretches too."""
        yield from self.main()
        yield from self.sums

    def main(self) -> Iterator[Operation]:
        """Those of the main lane, those inside fused stretches too."""
        for operation in (*self.forward, *self.backward):
            yield operation
            if isinstance(operation, Fused):
                yield from operation.operations

    def sent_bytes(self, itemsize: int = 4) -> Counter[int]:
        """Bytes that this device sends to each other one in a training step.

        Args:
            itemsize: bytes of one number in memory, 4 for float32.
        """
        total: Counter[int] = Counter()
        for operation in self.operations():
            if isinstance(operation, Send):
                size = narrow_itemsize(itemsize) if operation.narrow else itemsize
                total[operation.peer] += operation.size * size
        return total


def reads_of(operation: Operation) -> tuple[str, ...]:
    """The buffers that an operation reads."""
    match operation:
        case Compute(reads=reads) | Fused(reads=reads) | Merge(parts=reads):
            return tuple(name for name in reads if name)
        case Copy(source=source):
            return (source.buffer,)
        case Add(source=source, target=target):
            return (source.buffer, target.buffer)
        case View(of=part) | Send(part=part):
            return (part.buffer,)
        case Unpack(buffer=buffer) | UnpackWeights(buffer=buffer):
            return (buffer,)
    return ()


def writes_of(operation: Operation) -> tuple[str, ...]:
    """The buffers that an operation makes, fills or changes; what arrives is there after the wait for its round."""
    match operation:
        case Compute(writes=writes) | Fused(writes=writes):
            return tuple(name for name in writes if name)
        case Make(buffer=buffer) | View(buffer=buffer) | Merge(buffer=buffer) | Pack(buffer=buffer):
            return (buffer,)
        case PackWeights(buffer=buffer):
            return (buffer,)
        case Copy(target=target) | Add(target=target):
            return (target.buffer,)
        case Receive(part=part):
            return (part.buffer,)
    return ()
