"""How much of a layer one device computes: the sizes that its time depends on."""

from dataclasses import dataclass, replace

from convoy.model.graph import Layer
from convoy.plan.steps import Compute
from convoy.plan.strategy import feature_axis
from convoy.sharding.layout import Layout, Split, box, holders
from convoy.sharding.redistribute import chunks


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
    if layer.weighted:
        return LocalSize(samples, layer.channels_out, layer.channels_in)
    channels = layer.shape[0] if layer.shape else 1
    return LocalSize(samples, channels, channels)


def local_size(step: Compute, layer: Layer, device: int) -> LocalSize | None:
    """What `device` computes in a step; None where it has no part in it."""
    if device not in holders(step.writes.layout):
        return None
    whole = whole_size(layer, step.writes.shape[0] if layer.batched else 1)
    written = box(step.writes.layout, device, step.writes.shape)
    assert written is not None
    if not layer.batched:
        return whole
    axis = feature_axis(layer)
    samples = written[0][1] - written[0][0]
    outputs = written[axis][1] - written[axis][0] if len(written) > axis else whole.outputs
    inputs = whole.inputs
    if layer.weighted and layer.groups == 1:
        read = box(step.reads[0].layout, device, step.reads[0].shape)
        if read is not None:
            inputs = read[axis][1] - read[axis][0]
    return LocalSize(samples, outputs, inputs, shares_statistics(layer, step.writes.layout))


def shares_statistics(layer: Layer, layout: Layout) -> bool:
    """Whether the batch that a batch norm takes its statistics from lies on several devices."""
    return layer.statistics and isinstance(layout, Split) and layout.axis == 0 and len(holders(layout)) > 1


def flop(layer: Layer, size: LocalSize) -> float:
    """Forward FLOP of a part of a layer."""
    whole = whole_size(layer, 1)
    return layer.flop * size.samples * (size.outputs / whole.outputs) * (size.inputs / whole.inputs)


def sizes_in_chunks(size: LocalSize, pieces: int) -> list[LocalSize]:
    """What a device computes of a layer at a time, where its input comes in so many pieces."""
    if pieces == 1:
        return [size]
    return [replace(size, samples=stop - start) for start, stop in chunks(size.samples, pieces)]
