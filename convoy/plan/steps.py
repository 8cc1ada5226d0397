"""The step list: what one training step does, in order. Executor, cost model, simulator and `explain` read the same list.

Every device walks the list in order. A computation occupies the device until it is done. What travels does not: a move or
a sum is begun where it stands in the list, and awaited by the first step that names it in `after`, or at the end of its
phase. So the list alone says what overlaps.

A *value* is a layer's output in one layout; a move makes the same numbers available in another layout under another key.
Backward steps name the values whose gradients they handle: a backward move reads the gradient of its target value.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from convoy.layout import redistribute
from convoy.layout.comm_dtype import CommDtype, sent_itemsize
from convoy.layout.layout import Layout, OnOne, Replicated, Shape, Split, dual
from convoy.layout.redistribute import Reduce, Schedule, Sum
from convoy.layout.shares import Shares, holders

Phase = Literal["forward", "backward"]

InputGradient = Literal["none", "part", "whole"]
"""Where the gradient of an input comes to: nowhere; to each device that has of its part; whole to every device."""

MicroBatch = Literal["only", "first", "middle", "last"]
"""Which pass of a training step a list is of. In the first and in the middle ones gradients of copied parameters stay where
they are computed; the last one sums what all passes have left there, and the only pass of a step its own. Weights that are kept
in shares, and stay whole between uses, are gathered by the first pass; those behind it use them again."""


def micro_batches(count: int) -> dict[MicroBatch, int]:
    """How many passes there are of each kind in a step of `count` passes, in order."""
    kinds: dict[MicroBatch, int] = {"only": 1} if count == 1 else {"first": 1, "middle": count - 2, "last": 1}
    return {kind: number for kind, number in kinds.items() if number}


SEGMENT_ENTRIES = 1 << 19
"""A sum whose messages would be longer goes in two segments: 2 MiB of float32 travel for many times a message's latency."""

Part = Literal["all", "input", "weight"]
"""Which gradients a backward step computes: both, those of the layer's inputs, or those of its weights."""


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of a step: `key` names it, `shape` is the shape of the whole (global) tensor.

    Attributes:
        layer: that makes it; by default the key is the layer's name.
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
    """A layer's arithmetic on what each device holds.

    Attributes:
        id: position in the list.
        reads, writes: values of the forward pass. Backward turns the gradient of `writes` into gradients of those
            `reads` that `wants` marks, and of the layer's parameters.
        parameters: layout of each parameter of the layer.
        after: ids of the steps that must have finished.
        part: in backward, which gradients: a layer may have two steps, so that what the first gives travels meanwhile.
        last: whether it is the last step of the layer's backward.
        pieces: in forward, it begins with the first rows of its input while the others still arrive (see `Move.pieces`).
        frees: parameters whose whole copies are freed after it; they were gathered from shares.
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
    """A value comes into another layout. In backward `reads` is the later value: its gradient goes back.

    Attributes:
        pieces: more than 1: it goes in so many pieces of the batch, one after the other.
        wire: in which numbers it travels.
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
            whole = redistribute.schedule(self.reads.layout, self.writes.layout, self.reads.shape, self.reduce)
            return whole if self.chunks == 1 else redistribute.in_chunks(whole, self.chunks)
        return redistribute.schedule(dual(self.reads.layout), dual(self.writes.layout), self.reads.shape, self.reduce)


@dataclass(frozen=True, slots=True)
class ReturnGradient:
    """The gradient of an output enters backward.

    The loss is computed on every device from copies of the output, so every device knows the whole gradient and takes
    from it what it needs: nothing travels. (A move back from copies would sum the gradient, once per device too often.)
    Of an output that stays with its samples, each device has the gradient of its own: `reads` and `writes` are the same.
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
        return redistribute.schedule(self.reads.layout, dual(self.writes.layout), self.reads.shape)


@dataclass(frozen=True, slots=True)
class GatherStatistics:
    """Batch norm over a batch split: each of `members` tells the others `entries` numbers: means and squared deviations of
    its samples (forward), or the two sums over its samples that the gradient needs (backward).

    They are few, and small differences of them matter: they never travel rounded.

    Attributes:
        layers: norms whose numbers travel together, one after the other in one row of each device (see `together.py`).
        reads: the input of each; sizes: how many numbers are of each.
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
        return redistribute.schedule(self.layout, Replicated(self.members), self.shape)


@dataclass(frozen=True, slots=True)
class SumGradients:
    """The gradients of copied parameters, as one flat tensor, are summed over the devices that hold copies.

    Attributes:
        keys: `state_dict` keys, in order; sizes: entries of each.
        flags: how many trailing entries say whether a parameter was used at all (layers with Python of their own).
        devices: the holders of the copies.
        samples: samples per device, for mixing only.
        reduce: the collective, or mixing in its place.
        wire: in which numbers summands and sums travel.
        alone: one gradient that its layer makes in memory of its own: it is summed where it lies, not joined to others.
        into: of parameters that are kept in shares, for each the entries of every device: the sum comes to its shares only.
    """

    id: int
    keys: tuple[str, ...]
    sizes: tuple[int, ...]
    flags: int
    devices: tuple[int, ...]
    samples: tuple[int, ...]
    reduce: Sum
    after: tuple[int, ...] = ()
    phase: Phase = "backward"
    wire: CommDtype = "exact"
    alone: bool = False
    into: tuple[Shares, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        """The devices with a summand, and those that keep some of the sum."""
        return tuple(sorted({*self.devices, *holders(joined(self.into))}))

    @property
    def shape(self) -> Shape:
        return (sum(self.sizes) + self.flags,)

    @property
    def schedule(self) -> Schedule:
        if self.reduce == "inexact-butterfly-mixing":
            return self.stage(0)
        if self.into:
            return redistribute.sum_into_shares(self.devices, joined(self.into))
        (n,) = self.shape
        segments = 2 if n // len(self.devices) >= SEGMENT_ENTRIES else 1
        return redistribute.sum_in_segments(self.devices, n, self.reduce, segments)

    def stage(self, stage: int) -> Schedule:
        """Mixing: one stage of the butterfly, for gradients and weights together."""
        return redistribute.mixing(self.devices, 2 * sum(self.sizes) + self.flags, stage)


@dataclass(frozen=True, slots=True)
class GatherWeights:
    """Parameters that are kept in shares come whole to the devices that compute with them.

    In one flat tensor: the shares of device 0 of all of them, then those of device 1, and so on.

    Attributes:
        keys: `state_dict` keys, in order.
        shares: of each, the entries that every device keeps.
        devices: that compute with them.
        alone: one parameter: its shares arrive where it lies.
        held: the first pass of the step has gathered them: nothing travels, and each device looks whether its shares are still
            those that the others were given.
    """

    wire: ClassVar[CommDtype] = "exact"
    id: int
    phase: Phase
    keys: tuple[str, ...]
    shares: tuple[Shares, ...]
    devices: tuple[int, ...]
    after: tuple[int, ...] = ()
    held: bool = False

    @property
    def alone(self) -> bool:
        return len(self.keys) == 1

    @property
    def members(self) -> tuple[int, ...]:
        """The devices that send or receive, or have."""
        return tuple(sorted({*self.devices, *holders(joined(self.shares))}))

    @property
    def shape(self) -> Shape:
        return (sum(joined(self.shares)),)

    @property
    def schedule(self) -> Schedule:
        if self.held:
            return Schedule((), self.shape, in_place=True)
        return redistribute.gather_shares(joined(self.shares), self.devices)


def joined(shares: Sequence[Shares]) -> Shares:
    """The entries of each device, of several parameters together."""
    return tuple(map(sum, zip(*shares, strict=True)))


Exchange = Move | ReturnGradient | GatherStatistics | SumGradients | GatherWeights
Step = ComputeStep | Exchange


def traffic(step: Exchange, itemsize: int) -> Counter[tuple[int, int]]:
    """Bytes that each (sender, receiver) pair puts on the wire in one step of the list.

    Args:
        itemsize: bytes of one number in memory, 4 for float32.
    """
    return redistribute.traffic(step.schedule, sent_itemsize(step.wire, itemsize))


@dataclass(frozen=True, slots=True)
class StepList:
    """One training step of a plan for one batch size, or one of the passes that make a step.

    Attributes:
        batch: global batch of the pass.
        inputs: the values that the loader provides.
        outputs: the values that the model returns: copies on every device, or where their samples are.
        steps: in an order that every device follows.
        input_gradients: for each input, the value whose gradient is that of the input for the caller; None: it has none.
            Empty where no input wants one.
        micro_batch: which of the passes of a step this is.
        later: the gradient sums that this pass leaves to the last one.
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
        """Whether gradients of copied parameters are summed over the devices."""
        return self.micro_batch in ("only", "last")

    @property
    def gathers(self) -> bool:
        """Whether weights that are kept in shares, and stay whole between uses, are gathered."""
        return self.micro_batch in ("only", "first")

    @property
    def adds(self) -> bool:
        """Whether gradients are added to those of passes before."""
        return self.micro_batch in ("middle", "last")

    @property
    def joins_losses(self) -> bool:
        """Whether the devices have the loss of a part each, and add up between forward and backward what it counts."""
        stays = any(
            isinstance(v.layout, OnOne) or (isinstance(v.layout, Split) and v.layout.axis == 0) for v in self.outputs
        )
        return stays and self.devices > 1 and bool(self.phase("backward"))

    def phase(self, phase: Phase) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.phase == phase)

    def first_readers(self) -> dict[str, str]:
        """By its key, the layer that reads a value first."""
        computes = [step for step in self.phase("forward") if isinstance(step, ComputeStep)]
        return {value.key: step.layer for step in reversed(computes) for value in step.reads}

    def traffic(self, itemsize: int = 4) -> Counter[tuple[int, int]]:
        """Bytes that each (sender, receiver) pair of devices puts on the wire in one training step.

        Args:
            itemsize: bytes of one number in memory, 4 for float32.
        """
        total: Counter[tuple[int, int]] = Counter()
        for step in self.steps:
            if not isinstance(step, ComputeStep):
                total += traffic(step, itemsize)
        return total
