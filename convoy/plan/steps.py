"""Define the step list: all computations and exchanges of one training step, in the same order on every device.

A computation occupies its device until it is done. An exchange starts at its position in the list. The first step that names
it in `after` waits for it; if there is none, the end of the phase does. So the list alone determines which steps overlap.

A *value* is a layer's output in one layout, with its own key. Backward steps refer to values and handle their gradients: a
backward move reads the gradient of its target value.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from convoy.layout import collectives
from convoy.layout.collectives import Reduce, Schedule
from convoy.layout.comm_dtype import CommDtype, sent_itemsize
from convoy.layout.layout import Layout, OnOne, Replicated, Shape, Split, Tiles, dual
from convoy.layout.shares import Shares, holders

Phase = Literal["forward", "backward"]

InputGradient = Literal["none", "part", "whole"]
"""Gradient of an input that backward returns: none; each device its local shard's; every device that of the global batch."""

MicroBatch = Literal["only", "first", "middle", "last"]
"""Position of a micro-batch in a training step. Gradients of replicated parameters stay local until the last micro-batch sums
them."""

SEGMENT_ENTRIES = 1 << 19
"""Sums with larger messages (in entries) are split in two: 2 MiB of float32 take much longer than a message's latency."""

Part = Literal["all", "input", "weight"]
"""The gradients that a backward step computes: all, those of the layer's inputs, or those of its parameters."""


def micro_batches(count: int) -> dict[MicroBatch, int]:
    """Return the number of micro-batches of each kind, in order, for a step of `count` micro-batches."""
    kinds: dict[MicroBatch, int] = {"only": 1} if count == 1 else {"first": 1, "middle": count - 2, "last": 1}
    return {kind: number for kind, number in kinds.items() if number}


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of a step.

    Attributes:
        shape: shape of the whole (global) tensor.
        layer: the layer that computes it; default: `key`.
    """

    key: str
    shape: Shape
    layout: Layout
    layer: str = ""

    def __post_init__(self) -> None:
        if not self.layer:
            object.__setattr__(self, "layer", self.key)


@dataclass(frozen=True, slots=True)
class ComputeStep:
    """The computation of a layer, on each device's shard.

    Attributes:
        id: position in the list.
        reads, writes: values of the forward pass. Backward turns the gradient of `writes` into gradients of the `reads`
            marked in `wants`, and of the layer's parameters.
        parameters: layout of each parameter of the layer.
        after: ids of the steps that must finish first.
        part: gradients to compute. A layer may have two backward steps, to send the first gradient during the second step.
        last: whether it is the last step of the layer's backward.
        chunks: number of chunks of the input's rows; in forward, each is computed while later ones arrive.
        frees: keys of gathered parameters to free after it.
    """

    id: int
    phase: Phase
    layer: str
    reads: tuple[Value, ...]
    writes: Value
    wants: tuple[bool, ...]
    parameters: Mapping[str, Layout] = field(default_factory=dict)
    note: str = ""
    after: tuple[int, ...] = ()
    part: Part = "all"
    last: bool = True
    chunks: int = 1
    frees: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """Redistribution of a value to another layout. In backward, the gradient of `reads` becomes that of `writes`.

    Attributes:
        chunks: the number of chunks of the batch, sent one after the other.
    """

    id: int
    phase: Phase
    reads: Value
    writes: Value
    reduce: Reduce
    after: tuple[int, ...] = ()
    chunks: int = 1
    wire: CommDtype = "exact"

    @property
    def schedule(self) -> Schedule:
        if self.phase == "forward":
            whole = collectives.schedule(self.reads.layout, self.writes.layout, self.reads.shape, self.reduce)
            return whole if self.chunks == 1 else collectives.in_chunks(whole, self.chunks)
        return collectives.schedule(dual(self.reads.layout), dual(self.writes.layout), self.reads.shape, self.reduce)


@dataclass(frozen=True, slots=True)
class ReturnGradient:
    """The start of backward with an output's gradient, which the caller gives.

    Every device computes the loss from a copy of the output. So it has the whole gradient and takes its shard; nothing is
    sent. (A move back from copies would sum the copies of the gradient.) If the output stays sharded, each device has the
    gradient of its shard, and `reads` and `writes` are the same.
    """

    wire: ClassVar[CommDtype] = "exact"
    id: int
    output: int
    reads: Value
    writes: Value
    after: tuple[int, ...] = ()
    phase: Phase = "backward"

    @property
    def schedule(self) -> Schedule:
        return collectives.schedule(self.reads.layout, dual(self.writes.layout), self.reads.shape)


@dataclass(frozen=True, slots=True)
class GatherStatistics:
    """All-gather of batch norm sums: means and squared deviations in forward, two sums for the gradient in backward.

    These numbers are few, and small differences matter, so they are never rounded.

    Attributes:
        layers: norms that exchange together: each device sends one row with the sums of all norms.
        reads: input of each norm.
        sizes: number of entries of each norm.
    """

    wire: ClassVar[CommDtype] = "exact"
    id: int
    phase: Phase
    layers: tuple[str, ...]
    reads: tuple[Value, ...]
    sizes: tuple[int, ...]
    members: tuple[int, ...]
    after: tuple[int, ...] = ()

    @property
    def entries(self) -> int:
        return sum(self.sizes)

    @property
    def shape(self) -> Shape:
        return (len(self.members), self.entries)

    @property
    def layout(self) -> Split:
        """One row from each member."""
        return Split(0, tuple(int(d in self.members) for d in range(max(self.members) + 1)))

    @property
    def schedule(self) -> Schedule:
        return collectives.schedule(self.layout, Replicated(self.members), self.shape)


@dataclass(frozen=True, slots=True)
class SumGradients:
    """All-reduce of the gradients of replicated parameters, or reduce-scatter of sharded ones, as one flat tensor.

    Attributes:
        keys, sizes: keys of the parameters, and number of entries of each.
        flags: number of entries at the end that mark used parameters (for opaque layers).
        devices: the devices that compute with the parameters.
        alone: there is one gradient, which is summed in its own memory.
        into: for each sharded parameter, the entries of every device. Each device gets only the sum of its shard.
    """

    id: int
    keys: tuple[str, ...]
    sizes: tuple[int, ...]
    flags: int
    devices: tuple[int, ...]
    reduce: Reduce
    after: tuple[int, ...] = ()
    phase: Phase = "backward"
    wire: CommDtype = "exact"
    alone: bool = False
    into: tuple[Shares, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        """The devices that have gradients or get a shard of the sum."""
        return tuple(sorted({*self.devices, *holders(joined(self.into))}))

    @property
    def shape(self) -> Shape:
        return (sum(self.sizes) + self.flags,)

    @property
    def schedule(self) -> Schedule:
        if self.into:
            return collectives.sum_into_shares(self.devices, joined(self.into))
        (n,) = self.shape
        segments = 2 if n // len(self.devices) >= SEGMENT_ENTRIES else 1
        return collectives.sum_in_segments(self.devices, n, self.reduce, segments)


@dataclass(frozen=True, slots=True)
class GatherWeights:
    """All-gather of sharded parameters, to the devices that compute with them.

    The parameters are one flat tensor: all shards of device 0, then all of device 1, and so on.

    Attributes:
        keys, shares: keys of the parameters, and for each the entries of every device.
        devices: the devices that compute with the parameters.
    """

    wire: ClassVar[CommDtype] = "exact"
    id: int
    phase: Phase
    keys: tuple[str, ...]
    shares: tuple[Shares, ...]
    devices: tuple[int, ...]
    after: tuple[int, ...] = ()

    @property
    def alone(self) -> bool:
        return len(self.keys) == 1

    @property
    def members(self) -> tuple[int, ...]:
        """The devices that compute with the parameters or keep a shard."""
        return tuple(sorted({*self.devices, *holders(joined(self.shares))}))

    @property
    def shape(self) -> Shape:
        return (sum(joined(self.shares)),)

    @property
    def schedule(self) -> Schedule:
        return collectives.gather_shares(joined(self.shares), self.devices)


def joined(shares: Sequence[Shares]) -> Shares:
    """Sum the entries of each device over several parameters."""
    return tuple(map(sum, zip(*shares, strict=True)))


def by_samples(layout: Layout) -> bool:
    """Return whether each sample is on exactly one device, as a whole."""
    return isinstance(layout, OnOne) or (isinstance(layout, Split) and layout.axis == 0)


Exchange = Move | ReturnGradient | GatherStatistics | SumGradients | GatherWeights
Step = ComputeStep | Exchange


def traffic(step: Exchange, itemsize: int) -> Counter[tuple[int, int]]:
    """Return the bytes sent in one exchange by (sender, receiver), for numbers of `itemsize` bytes."""
    return collectives.traffic(step.schedule, sent_itemsize(step.wire, itemsize))


@dataclass(frozen=True, slots=True)
class StepList:
    """One micro-batch of a training step, for one batch size.

    Attributes:
        batch: samples of the micro-batch on all devices together.
        inputs: the values that the loader provides.
        outputs: the values that the model returns: copies on every device, or sharded by samples.
        input_gradients: for each input, the value whose gradient the caller gets, or None. Empty: no gradients.
        later: gradient sums that are left to the last micro-batch.
    """

    batch: int
    devices: int
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    steps: tuple[Step, ...]
    input_gradients: tuple[Value | None, ...] = ()
    micro_batch: MicroBatch = "only"
    later: tuple["SumGradients", ...] = ()

    @property
    def sums(self) -> bool:
        """Whether this micro-batch sums gradients of replicated parameters over the devices."""
        return self.micro_batch in ("only", "last")

    @property
    def adds(self) -> bool:
        """Whether this micro-batch adds its gradients to those of earlier ones."""
        return self.micro_batch in ("middle", "last")

    @property
    def joins_losses(self) -> bool:
        """Whether each device computes the loss of its samples, so that losses are summed before backward."""
        stays = any(by_samples(value.layout) or isinstance(value.layout, Tiles) for value in self.outputs)
        return stays and self.devices > 1 and bool(self.phase("backward"))

    def phase(self, phase: Phase) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.phase == phase)

    def traffic(self, itemsize: int = 4) -> Counter[tuple[int, int]]:
        """Return the bytes sent in the whole list, by (sender, receiver)."""
        exchanges = (step for step in self.steps if not isinstance(step, ComputeStep))
        return sum((traffic(step, itemsize) for step in exchanges), Counter())
