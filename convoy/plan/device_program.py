"""Defines the device program: all operations of one device in one micro-batch.

`compile.py` compiles it once from the step list, for each plan, batch size and mode. The executor runs it, the simulator plays
it, the cost and memory models price it, and `--explain` prints it. So the predicted bytes are the bytes sent.

Operations work on *buffers*, which are named tensors. The name of a forward value is its key in the step list; ``d:`` plus
the key names its gradient. Names only identify buffers; operations hold all other properties. `step` is the id in the step
list. Sizes are in entries. `narrow` marks numbers that are sent in fewer bits.

A program has two lanes. The main lane computes, in the order of the step list. Gradient sums run on the second lane, one after
the other: `BeginSum` gives it the summands, `TakeSum` waits for them, `EndSum` marks the result, and `WaitSum` or `FinishSums`
waits for the result.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from convoy.layout.collectives import chunks
from convoy.layout.comm_dtype import narrow_itemsize
from convoy.layout.layout import Box, Layout, Shape, Split, holders, holds
from convoy.layout.shares import Shares
from convoy.model.graph import Layer
from convoy.plan.steps import ComputeStep, MicroBatch, Phase

GRADIENT = "d:"
"""Prefix of a gradient's name, followed by the value's key."""


def output_gradient(output: int) -> str:
    """Return the name of the buffer with an output's gradient, which the caller provides."""
    return f"{GRADIENT}output {output}"


# --- how much of a layer one device computes -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalSize:
    """The size of one device's part of a layer, on which its time depends.

    Attributes:
        outputs: computed filters or features; all if the layer is not split by filter.
        inputs: input channels or features to sum over; all if the layer is not split by channel.
        shares_statistics: a batch norm over samples on several devices, which exchanges its sums (`runtime/batch_norm.py`).
    """

    samples: int
    outputs: int
    inputs: int
    shares_statistics: bool = False


def whole_size(layer: Layer, samples: int) -> LocalSize:
    return LocalSize(samples, *layer.extents)


def local_size(step: ComputeStep, layer: Layer, device: int) -> LocalSize | None:
    """Return the size of a device's part of a step; None if it has no part."""
    gives = step.writes.layout
    if not holds(gives, device):
        return None
    if not layer.batched:
        return whole_size(layer, 1)
    samples, inputs = step.writes.shape[0], layer.extents[1]
    if isinstance(gives, Split) and gives.axis == 0:
        samples = gives.shares[device]
    if layer.sums_channels:
        takes = step.reads[0].layout
        if isinstance(takes, Split) and takes.axis == layer.feature_axis:
            inputs = takes.shares[device] or inputs
    return LocalSize(samples, part_of_outputs(layer, gives, device), inputs, shares_statistics(layer, gives))


def part_of_outputs(layer: Layer, layout: Layout, device: int) -> int:
    """Return the number of a layer's outputs that a device computes, along the split axis."""
    outputs = layer.extents[0]
    if not isinstance(layout, Split) or layout.axis == 0:
        return outputs
    return max(1, outputs * layout.shares[device] // max(1, sum(layout.shares)))


def shares_statistics(layer: Layer, layout: Layout) -> bool:
    """Return whether a layer is a batch norm with its batch split over several devices."""
    return layer.statistics and isinstance(layout, Split) and layout.axis == 0 and len(holders(layout)) > 1


def flop(layer: Layer, size: LocalSize) -> float:
    """Return the forward FLOP of a part of a layer."""
    if not layer.flop:  # it may have no outputs either
        return 0.0
    outputs, inputs = layer.extents
    return layer.flop * size.samples * (size.outputs / outputs) * (size.inputs / inputs)


def sizes_in_chunks(size: LocalSize, count: int) -> list[LocalSize]:
    """Return the sizes of a device's computations if its input arrives in chunks."""
    return [replace(size, samples=stop - start) for start, stop in chunks(size.samples, count)] if count > 1 else [size]


# --- computing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a buffer, in the buffer's own coordinates; None: all of it."""

    buffer: str
    box: Box | None = None

    def __str__(self) -> str:
        return self.buffer + ("" if self.box is None else f"[{','.join(f'{a}:{b}' for a, b in self.box)}]")


@dataclass(frozen=True, slots=True)
class Compute:
    """A layer's arithmetic on this device.

    Attributes:
        reads: in forward, the layer's inputs; in backward, the gradient of its output.
        writes: in forward, the output; in backward, the gradient of each input, "" if not wanted.
        wants: which of the layer's inputs have a gradient.
        part: "all"; in backward "input" or "weight" for that gradient alone; "statistics" and "combine" before and after
            the exchange of a batch norm's sums.
        last: in backward, whether the layer's saved tensors can be freed afterwards.
        rows: in forward, the rows of the input that have arrived, if the input arrives in chunks.
    """

    step: int
    phase: Phase
    layer: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    wants: tuple[bool, ...] = ()
    part: str = "all"
    last: bool = True
    size: LocalSize = LocalSize(0, 0, 0)
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Fused:
    """A segment: layers with no exchange between them, given to autograd as one graph.

    Attributes:
        number: the same in forward and backward.
        reads: in forward, values from outside; in backward, the gradient of each of the forward segment's `writes`, ""
            for none.
        writes: in forward, values used outside; in backward, the gradient of each of the forward segment's `reads`, ""
            for none.
        operations: computations; in backward also `Pack` and `BeginSum` of gradient sums that start inside.
    """

    step: int
    phase: Phase
    number: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    operations: tuple["Compute | Pack | BeginSum", ...]


# --- memory, copies, additions ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Make:
    """Memory for a buffer.

    Attributes:
        result: a value or a gradient, not an intermediate of an exchange.
        like: a buffer of the same dtype; "": the dtype of the step's layer.
        flat: the buffer of an in-place sum.
        slot: number of the memory for a round's summands. Rounds with different slots may overlap; every step reuses it.
    """

    step: int
    buffer: str
    shape: Shape
    zeros: bool = False
    narrow: bool = False
    result: bool = False
    like: str = ""
    flat: bool = False
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class View:
    """Another name and shape for a part of a buffer, without a copy."""

    step: int
    buffer: str
    of: Part
    shape: Shape


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy from one part to another, converted if one of them is narrow."""

    step: int
    source: Part
    target: Part
    size: int


@dataclass(frozen=True, slots=True)
class Add:
    """An addition of one part to another, widened first if it is narrow."""

    step: int
    source: Part
    target: Part
    size: int
    narrow: bool = False


@dataclass(frozen=True, slots=True)
class Merge:
    """The sum of a gradient's parts, one from each reader of its value, in new memory."""

    step: int
    buffer: str
    parts: tuple[str, ...]
    size: int


# --- exchanging ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlannedMessage:
    """A part of a buffer that is sent to a peer, or received from it."""

    peer: int
    part: Part
    size: int
    narrow: bool = False


@dataclass(frozen=True, slots=True)
class ExchangeRound:
    """The start of this device's messages of one round, in one call.

    Until the round has been waited for, sent parts must not change and received parts must not be used.
    """

    step: int
    number: int
    sends: tuple[PlannedMessage, ...]
    receives: tuple[PlannedMessage, ...]


@dataclass(frozen=True, slots=True)
class WaitRound:
    """A wait before step `step` for the messages of round `number` of step `begun`."""

    step: int
    begun: int
    number: int


# --- gradients of parameters -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pack:
    """A copy of gradients into one flat buffer, with zeros for those that this device did not compute.

    Attributes:
        keys, sizes: of the parameters, and their entries.
        flags: number of trailing entries that mark the parameters used on this device; 0: none.
        alone: a single gradient itself is the buffer, without a copy.
        into: for each sharded parameter, the entries of every device. The buffer has all shards of device 0,
            then all of device 1, and so on.
    """

    step: int
    buffer: str
    keys: tuple[str, ...]
    sizes: tuple[int, ...]
    flags: int = 0
    alone: bool = False
    into: tuple[Shares, ...] = ()

    @property
    def size(self) -> int:
        return sum(self.sizes) + self.flags


@dataclass(frozen=True, slots=True)
class BeginSum:
    """Main lane: the transfer of the summands in `buffer` to the second lane."""

    step: int
    buffer: str


@dataclass(frozen=True, slots=True)
class TakeSum:
    """Second lane: a wait for the summands in `buffer`. The following operations sum them in place."""

    step: int
    buffer: str


@dataclass(frozen=True, slots=True)
class EndSum:
    """Second lane: a signal that the sum in `result` is complete."""

    step: int
    result: str


@dataclass(frozen=True, slots=True)
class WaitSum:
    """Main lane: a wait for one gradient sum, before step `step`."""

    step: int
    sum: int


@dataclass(frozen=True, slots=True)
class FinishSums:
    """Main lane: a wait for all these gradient sums, at the end of backward."""

    step: int
    sums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unpack:
    """A copy of gradients out of a flat buffer; fields as in `Pack`.

    Attributes:
        sizes: of the parameters, or of this device's shards.
        copied: each gradient gets its own memory at the end of the step.
    """

    step: int
    buffer: str
    keys: tuple[str, ...]
    sizes: tuple[int, ...]
    flags: int = 0
    copied: bool = False


# --- sharded parameters ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PackWeights:
    """A copy of this device's shards into a flat buffer, which also receives the other devices' shards.

    Attributes:
        shares: for each parameter, the entries of every device.
        size: entries of this device's shards.
        alone: there is one parameter, and the buffer is its memory.
        own_only: this device does not compute with them, so the buffer has only its shards.
        fresh: the memory of the whole parameters was freed after their last use, so it is allocated again.
    """

    step: int
    buffer: str
    keys: tuple[str, ...]
    shares: tuple[Shares, ...]
    size: int
    alone: bool = False
    own_only: bool = False
    fresh: bool = False

    @property
    def made(self) -> int:
        """Entries of new memory."""
        return 0 if self.alone else self.size if self.own_only else sum(map(sum, self.shares))


@dataclass(frozen=True, slots=True)
class UnpackWeights:
    """The use of gathered parameters. Each of several gets its own memory. Fields as in `PackWeights`."""

    step: int
    buffer: str
    keys: tuple[str, ...]
    shares: tuple[Shares, ...]
    alone: bool = False

    @property
    def size(self) -> int:
        return sum(map(sum, self.shares))


@dataclass(frozen=True, slots=True)
class FreeWeights:
    """The release of whole parameters that were gathered from shards."""

    step: int
    keys: tuple[str, ...]


Operation = (
    Compute | Fused | Make | View | Copy | Add | Merge | ExchangeRound | WaitRound | Pack | BeginSum | TakeSum | EndSum
    | WaitSum | FinishSums | Unpack | PackWeights | UnpackWeights | FreeWeights
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeviceProgram:
    """The program of one device for one micro-batch.

    Attributes:
        inputs: buffers of the local batch, provided by the loader.
        outputs: buffers returned to the caller.
        output_gradients: indices of the outputs with gradients from the caller, see `output_gradient`.
        input_gradients: for each input, the buffer returned from backward; "" if this device has no part of it.
        forward, backward: the main lane.
        sums: the second lane; empty in the first and middle micro-batches of a step.
    """

    device: int
    devices: int
    batch: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    output_gradients: tuple[int, ...]
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    sums: tuple[Operation, ...]
    input_gradients: tuple[str, ...] = ()
    micro_batch: MicroBatch = "only"

    def operations(self) -> Iterator[Operation]:
        """Yield all operations, also those inside segments."""
        yield from self.main()
        yield from self.sums

    def main(self) -> Iterator[Operation]:
        """Yield the operations of the main lane, also those inside segments."""
        for operation in (*self.forward, *self.backward):
            yield operation
            if isinstance(operation, Fused):
                yield from operation.operations

    def sent_bytes(self, itemsize: int = 4) -> Counter[int]:
        """Return the bytes that this device sends to each peer, for numbers of `itemsize` bytes in memory."""
        total: Counter[int] = Counter()
        for operation in self.operations():
            if isinstance(operation, ExchangeRound):
                for message in operation.sends:
                    total[message.peer] += message.size * (narrow_itemsize(itemsize) if message.narrow else itemsize)
        return total


def reads_of(operation: Operation) -> tuple[str, ...]:
    """Return the buffers that an operation reads."""
    match operation:
        case Compute(reads=reads) | Fused(reads=reads) | Merge(parts=reads):
            return tuple(name for name in reads if name)
        case Copy(source=source):
            return (source.buffer,)
        case Add(source=source, target=target):
            return (source.buffer, target.buffer)
        case View(of=part):
            return (part.buffer,)
        case ExchangeRound(sends=sends):
            return tuple(message.part.buffer for message in sends)
        case BeginSum(buffer=buffer) | Unpack(buffer=buffer) | UnpackWeights(buffer=buffer):
            return (buffer,)
    return ()


def writes_of(operation: Operation) -> tuple[str, ...]:
    """Return the buffers that an operation makes, fills or changes. A round fills its buffers before its wait ends."""
    match operation:
        case Compute(writes=writes) | Fused(writes=writes):
            return tuple(name for name in writes if name)
        case Make(buffer=buffer) | View(buffer=buffer) | Merge(buffer=buffer) | Pack(buffer=buffer):
            return (buffer,)
        case PackWeights(buffer=buffer):
            return (buffer,)
        case Copy(target=target) | Add(target=target):
            return (target.buffer,)
        case ExchangeRound(receives=receives):
            return tuple(message.part.buffer for message in receives)
    return ()


# --- text ------------------------------------------------------------------------------------------------------------


def program_lines(program: DeviceProgram) -> list[str]:
    """Return a program as text, one line for each operation."""
    lines = [
        f"device {program.device} of {program.devices}, a batch of {program.batch}, micro-batch {program.micro_batch!r}"
    ]
    for phase in ("forward", "backward", "sums"):
        lines.append(f"{phase}:")
        for operation in getattr(program, phase):
            lines.append(f"  {operation_line(operation)}")
            if isinstance(operation, Fused):
                lines += [f"    {operation_line(each)}" for each in operation.operations]
    return lines


def operation_line(operation: Operation) -> str:
    """Return an operation as text, without fields that have their default."""
    values = []
    for each in fields(operation):
        value: Any = getattr(operation, each.name)
        if each.name == "operations" or value == each.default:
            continue
        if each.name in ("sends", "receives"):
            text = f"[{', '.join(message_text('to' if each.name == 'sends' else 'from', m) for m in value)}]"
        elif isinstance(value, LocalSize):
            text = repr((value.samples, value.outputs, value.inputs, *((True,) if value.shares_statistics else ())))
        else:
            text = repr(str(value)) if isinstance(value, Part) else repr(value)
        values.append(f"{each.name}={text}")
    return f"{type(operation).__name__}({', '.join(values)})"


def message_text(direction: str, message: PlannedMessage) -> str:
    """Return a message as text; `direction` is "to" or "from" its peer."""
    return f"{message.size}{' narrow' * message.narrow} of {str(message.part)!r} {direction} {message.peer}"
