"""Define the device program: all operations of one device in one micro-batch.

`compile.py` compiles it from the step list, once for each plan, batch size and mode. The executor runs it, the simulator
simulates it, the models of time and memory use it, and `--explain` prints it. So the predicted bytes are the bytes sent.

Operations work on *buffers*, which are named tensors. A forward value's buffer has the value's key in the step list as its
name; its gradient's buffer has ``d:`` plus the key. `step` is an id in the step list. Sizes are in entries. `narrow` marks
numbers that are sent in fewer bits.

A program has two lanes. The main lane computes, in the order of the step list. Gradient sums run on the second lane, one after
the other: `BeginSum` starts a sum, `TakeSum` waits for that start, `EndSum` marks the result, and `WaitSum` or `FinishSums`
waits for the result.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from convoy.layout.collectives import chunks
from convoy.layout.comm_dtype import narrow_itemsize
from convoy.layout.layout import Box, Boxes, Layout, Shape, Split, Tiles, Windows, entries, holders, holds
from convoy.layout.shares import Shares
from convoy.model.graph import Layer
from convoy.plan.steps import ComputeStep, MicroBatch, Phase

GRADIENT = "d:"
"""Prefix of the name of a gradient's buffer, before the value's key."""


def output_gradient(output: int) -> str:
    """Return the name of the buffer for an output's gradient, which the caller provides."""
    return f"{GRADIENT}output {output}"


# --- how much of a layer one device computes -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalSize:
    """The size of a layer's part on one device, which determines its time.

    Attributes:
        outputs: filters or features to compute; all of them if the layer is not split by filter.
        inputs: input channels or features to sum over; all of them if the layer is not split by channel.
        tile: fraction of each image that is computed, if devices compute tiles of images.
        shares_statistics: the layer is a norm that exchanges its sums with other devices (`runtime/batch_norm.py`).
    """

    samples: int
    outputs: int
    inputs: int
    shares_statistics: bool = False
    tile: float = 1.0

    @property
    def images(self) -> float:
        """The number of whole images with as many pixels."""
        return self.samples * self.tile

    def with_images(self, images: float) -> "LocalSize":
        """Return this size with another number of images, or with a tile of one image."""
        return replace(self, samples=max(1, int(images)), tile=min(1.0, float(images)))


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
    if isinstance(gives, Tiles | Windows):
        return tile_size(layer, step.reads[0].layout, gives, device)
    if layer.sums_channels:
        takes = step.reads[0].layout
        if isinstance(takes, Split) and takes.axis == layer.feature_axis:
            inputs = takes.shares[device] or inputs
    return LocalSize(samples, part_of_outputs(layer, gives, device), inputs, shares_statistics(layer, gives))


def tile_size(layer: Layer, takes: Layout, gives: Boxes, device: int) -> LocalSize:
    """Return the size of a device's tile of a layer's output, or of the input of a sum; all zero if it has none."""
    counted = takes if isinstance(gives, Windows) and gives.sums and isinstance(takes, Tiles) else gives
    tile, (outputs, inputs) = counted.boxes[device], layer.extents
    if tile is None:
        return LocalSize(0, outputs, inputs)
    part = entries(tile[1:]) / max(1, layer.input_entries if counted is takes else math.prod(layer.shape))
    return LocalSize(tile[0][1] - tile[0][0], outputs, inputs, shares_statistics(layer, gives), part)


def part_of_outputs(layer: Layer, layout: Layout, device: int) -> int:
    """Return the number of a layer's outputs that a device computes, along the split axis."""
    outputs = layer.extents[0]
    if not isinstance(layout, Split) or layout.axis == 0:
        return outputs
    return max(1, outputs * layout.shares[device] // max(1, sum(layout.shares)))


def shares_statistics(layer: Layer, layout: Layout) -> bool:
    """Return whether a layer is a norm over entries that several devices hold."""
    return exchanges_statistics(layer, layout) and len(holders(layout)) > 1


def exchanges_statistics(layer: Layer, layout: Layout) -> bool:
    """Return whether a layer is a norm whose entries may be on several devices: samples of a channel, or parts of an image."""
    if isinstance(layout, Tiles):
        return layer.statistics or layer.normalised > 0
    return layer.statistics and isinstance(layout, Split) and layout.axis == 0


def flop(layer: Layer, size: LocalSize) -> float:
    """Return the forward FLOP of a layer's part of this size."""
    if not layer.flop:  # such a layer may have no outputs either
        return 0.0
    outputs, inputs = layer.extents
    return layer.flop * size.samples * size.tile * (size.outputs / outputs) * (size.inputs / inputs)


def sizes_in_chunks(size: LocalSize, count: int) -> list[LocalSize]:
    """Return the size of a layer's part for each of `count` chunks of its input."""
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
    """A computation of a layer on this device.

    Attributes:
        reads: in forward, the layer's inputs; in backward, the gradient of its output.
        writes: in forward, the output; in backward, the gradient of each input, or "" if it needs none.
        wants: for each input of the layer, whether it needs a gradient.
        part: "all"; in backward "input" or "weight" for that gradient alone; "statistics" and "combine" before and after
            the exchange of a batch norm's sums.
        last: in backward, whether the layer's saved tensors can then be freed.
        rows: in forward, the rows of the input that have arrived, if the input arrives in chunks.
        tile: in forward, the tile of the output that this device computes, and the window of the input that it reads.
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
    tile: tuple[Box, Box] | None = None


@dataclass(frozen=True, slots=True)
class Fused:
    """A segment: layers with no exchange between them, which autograd gets as one graph.

    Attributes:
        number: the segment's number, the same in forward and backward.
        reads: in forward, the input values; in backward, the gradient of each value in the forward's `writes`, or "".
        writes: in forward, the values used outside; in backward, the gradient of each value in the forward's `reads`, or "".
        operations: computations; in backward also `Pack` and `BeginSum` of gradient sums that start inside the segment.
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
    """The allocation of a buffer.

    Attributes:
        result: whether it holds a value or a gradient, not an intermediate of an exchange.
        like: name of a buffer with the same dtype; "": use the dtype of the step's layer.
        flat: whether it is the buffer of an in-place sum.
        slot: number of a reused receive buffer. Rounds with different slots may overlap.
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
    """A copy from one part of a buffer to another, with conversion if one of them is narrow."""

    step: int
    source: Part
    target: Part
    size: int


@dataclass(frozen=True, slots=True)
class Add:
    """An addition of `source` to `target`, with conversion if the source is narrow."""

    step: int
    source: Part
    target: Part
    size: int
    narrow: bool = False


@dataclass(frozen=True, slots=True)
class Merge:
    """The sum, in new memory, of the gradients that a value gets from each of its readers."""

    step: int
    buffer: str
    parts: tuple[str, ...]
    size: int


# --- exchanging ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlannedMessage:
    """A message: a part of a buffer that is sent to a peer or received from it."""

    peer: int
    part: Part
    size: int
    narrow: bool = False


@dataclass(frozen=True, slots=True)
class ExchangeRound:
    """The start of this device's messages of one round, in one call.

    Before the round's `WaitRound`, sent parts must not change and received parts must not be used.
    """

    step: int
    number: int
    sends: tuple[PlannedMessage, ...]
    receives: tuple[PlannedMessage, ...]


@dataclass(frozen=True, slots=True)
class WaitRound:
    """A wait, before step `step`, for the messages of round `number` of step `begun`."""

    step: int
    begun: int
    number: int


# --- gradients of parameters -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pack:
    """A copy of gradients into one flat buffer, with zeros for those that this device did not compute.

    Attributes:
        keys, sizes: keys of the parameters, and number of entries of each.
        flags: number of entries at the end that mark the parameters used on this device; 0: none.
        alone: there is one gradient, which is the buffer itself, without a copy.
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
    """Main lane: the start of a sum. The local gradients are complete in `buffer`."""

    step: int
    buffer: str


@dataclass(frozen=True, slots=True)
class TakeSum:
    """Second lane: a wait until the main lane starts the sum of `buffer`. The following operations sum it in place."""

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
        sizes: number of entries of each parameter, or of this device's shard of it.
        copied: each gradient gets separate memory at the end of the step.
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
        own_only: this device does not compute with the parameters, so the buffer has only its shards.
        fresh: the memory of the whole parameters is allocated again, because it was freed after their last use.
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
        """Number of entries in newly allocated memory."""
        return 0 if self.alone else self.size if self.own_only else sum(map(sum, self.shares))


@dataclass(frozen=True, slots=True)
class UnpackWeights:
    """A copy of gathered shards into whole parameters, unless `alone`. Fields as in `PackWeights`."""

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
        output_gradients: indices of the outputs for which the caller gives a gradient; see `output_gradient`.
        input_gradients: for each input, the buffer that backward returns; "" if this device has no gradient of it.
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
    """Return the buffers that an operation creates, fills or changes. A round's buffers are filled only after its wait."""
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
