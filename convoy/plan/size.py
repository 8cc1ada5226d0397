"""How much of a layer one device computes: the sizes that its time depends on."""

from dataclasses import dataclass, replace

from convoy.layout.layout import Layout, Split, holders, holds
from convoy.layout.redistribute import chunks
from convoy.model.graph import Layer
from convoy.plan.steps import Compute


@dataclass(frozen=True, slots=True)
class LocalSize:
    """One device's part of a layer.

    Attributes:
        samples: of the batch.
        outputs: filters or features that it computes; all, where the layer is not split by filter.
        inputs: input channels or features that it sums over; all, where the layer is not split by channel.
        shares_statistics: the samples are a part of a batch that is normalised as a whole: a batch norm then runs in steps
            of its own around an exchange (`convoy.runtime.batch_norm`), at another speed.
    """

    samples: int
    outputs: int
    inputs: int
    shares_statistics: bool = False


def whole_size(layer: Layer, samples: int) -> LocalSize:
    """The size of a layer that is not split, for some samples."""
    return LocalSize(samples, *layer.extents)


def local_size(step: Compute, layer: Layer, device: int) -> LocalSize | None:
    """What `device` computes in a step; None where it has no part in it."""
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
    outputs = part_of_outputs(layer, gives, device)
    return LocalSize(samples, outputs, inputs, shares_statistics(layer, gives))


def part_of_outputs(layer: Layer, layout: Layout, device: int) -> int:
    """How many of its outputs a device computes: its part of the axis that is split, whichever that is."""
    outputs = layer.extents[0]
    if not isinstance(layout, Split) or layout.axis == 0:
        return outputs
    return max(1, outputs * layout.shares[device] // max(1, sum(layout.shares)))


def shares_statistics(layer: Layer, layout: Layout) -> bool:
    """Whether the batch that a batch norm takes its statistics from lies on several devices."""
    return layer.statistics and isinstance(layout, Split) and layout.axis == 0 and len(holders(layout)) > 1


def flop(layer: Layer, size: LocalSize) -> float:
    """Forward FLOP of a part of a layer."""
    if not layer.flop:  # it may have no outputs either
        return 0.0
    outputs, inputs = layer.extents
    return layer.flop * size.samples * (size.outputs / outputs) * (size.inputs / inputs)


def sizes_in_chunks(size: LocalSize, pieces: int) -> list[LocalSize]:
    """What a device computes of a layer at a time, where its input comes in so many pieces."""
    if pieces == 1:
        return [size]
    return [replace(size, samples=stop - start) for start, stop in chunks(size.samples, pieces)]
