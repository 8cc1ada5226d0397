"""Computes the seconds of a layer on a device: from measured tables, or by a roofline if nothing was measured.

A convolution's time is not proportional to its filters: predictors that divide by the number of devices err by about 46 % for
filter splits (ParaDL). So times are measured at several numbers of samples and filters, and interpolated in both.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from convoy.errors import InputError
from convoy.model.graph import Layer
from convoy.plan.device_program import LocalSize, flop
from convoy.plan.steps import Part, Phase


class ComputeTimes(Protocol):
    """Seconds of one layer's arithmetic on one device."""

    def seconds(self, device: int, layer: Layer, phase: Phase, size: LocalSize, part: Part = "all") -> float:
        """Return the seconds of forward, of backward, or of a part of backward."""
        ...

    def alike(self, device: int) -> int:
        """Return the first device with the same times, so that planners can reuse its results."""
        ...


_Axis = Literal["outputs", "inputs"]


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of measured seconds over samples and one other axis.

    Attributes:
        samples, others: the measured sizes on both axes, ascending. Samples below 1 are tiles of images.
        seconds: `seconds[i][j]` was measured at `samples[i]` and `others[j]`.
        axis: the axis of `others`.
    """

    samples: tuple[float, ...]
    others: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]
    axis: _Axis = "outputs"

    def at(self, samples: float, other: float) -> float:
        """Return the seconds by linear interpolation. Beyond the grid, extend the last cell; scale a single point."""
        rows = [_on_line(self.others, row, other) for row in self.seconds]
        return max(0.0, _on_line(self.samples, rows, samples))

    def edge(self, size: LocalSize) -> LocalSize:
        """Return the nearest size that is not beyond the grid."""
        limited = replace(size, **{self.axis: min(getattr(size, self.axis), self.others[-1])})
        return limited if size.images <= self.samples[-1] else limited.with_images(self.samples[-1])

    def of(self, layer: Layer, size: LocalSize) -> float:
        """Return the seconds of a size. Beyond the grid, scale the seconds at its edge by a roofline.

        Linear extrapolation would amplify the noise of small sizes: measured at 4 samples and 512 features, a Linear was
        predicted three times too slow for 64 samples and 4,096 features.
        """
        edge = self.edge(size)
        seconds = self.at(edge.images, getattr(edge, self.axis))
        return seconds if edge == size else seconds * shape_s(layer, size) / shape_s(layer, edge)


def _on_line(axis: Sequence[float], values: Sequence[float], x: float) -> float:
    in_proportion = values[0] * x / axis[0]
    if len(axis) == 1:
        return in_proportion
    i = min(max(bisect_right(axis, x) - 1, 0), len(axis) - 2)
    value = values[i] + (x - axis[i]) / (axis[i + 1] - axis[i]) * (values[i + 1] - values[i])
    # Below the first point the line may become negative.
    return value if x >= axis[0] else max(value, in_proportion)


@dataclass(frozen=True, slots=True)
class Correction:
    """The measured seconds of a plan's size, outside the grids. They correct the times of sizes within a factor of two."""

    size: LocalSize
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Measured times of one layer on one device.

    Attributes:
        forward, backward: over (samples, outputs), with all inputs.
        forward_inputs, backward_inputs: over (samples, inputs), with all outputs; None for layers that no plan splits by
            input channels.
        forward_shared, backward_shared: over (samples, outputs), for a batch norm that shares its statistics with other
            devices; None for all other layers.
    """

    forward: Grid
    backward: Grid
    forward_inputs: Grid | None = None
    backward_inputs: Grid | None = None
    forward_shared: Grid | None = None
    backward_shared: Grid | None = None
    corrections: tuple[Correction, ...] = ()

    def seconds(self, layer: Layer, phase: Phase, size: LocalSize, part: Part = "all") -> float:
        shared = self.grids(phase)[2]
        if size.shares_statistics and shared is not None:
            return shared.of(layer, size)
        grid = self._grid_of(layer, phase, size)
        seconds = grid.of(layer, size)
        if self.corrections:
            away, nearest = min(((_doublings(e.size, size), e) for e in self.corrections), key=lambda row: row[0])
            beyond = _doublings(size, grid.edge(size))
            # A correction's weight falls to 0 over one doubling. Beyond the grids it depends on the distance to their edge.
            weight = max(1.0 - away, beyond / (beyond + away) if beyond else 0.0)
            seconds *= self.ratio(layer, phase, nearest) ** weight
        # The two products of backward have the same size and were timed together.
        return seconds if part == "all" else seconds / 2

    def grids(self, phase: Phase) -> tuple[Grid, Grid | None, Grid | None]:
        """Return the grids of a phase over outputs, over inputs, and with shared statistics."""
        if phase == "forward":
            return self.forward, self.forward_inputs, self.forward_shared
        return self.backward, self.backward_inputs, self.backward_shared

    def ratio(self, layer: Layer, phase: Phase, correction: Correction) -> float:
        """Return a correction's measured seconds divided by those of the grids."""
        timed_s = correction.forward_s if phase == "forward" else correction.backward_s
        by_grid_s = self._grid_of(layer, phase, correction.size).of(layer, correction.size)
        return timed_s / by_grid_s if timed_s and by_grid_s else 1.0

    def _grid_of(self, layer: Layer, phase: Phase, size: LocalSize) -> Grid:
        by_outputs, by_inputs, _ = self.grids(phase)
        return by_inputs if by_inputs is not None and size.inputs < layer.extents[1] else by_outputs


def _doublings(a: LocalSize, b: LocalSize) -> float:
    """Return the distance between two sizes: the number of doublings, summed over all axes."""
    pairs = ((a.images, b.images), (a.outputs, b.outputs), (a.inputs, b.inputs))
    return sum(abs(math.log2(x / y)) for x, y in pairs if x != y)


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """The measured times of every device: `devices[i][layer name]`."""

    devices: tuple[Mapping[str, LayerTimes], ...]

    def seconds(self, device: int, layer: Layer, phase: Phase, size: LocalSize, part: Part = "all") -> float:
        """Return the interpolated seconds.

        Raises:
            InputError: the layer was not measured on this device.
        """
        if size.samples == 0:
            return 0.0
        try:
            times = self.devices[device][layer.name]
        except (IndexError, KeyError):
            raise InputError(
                f"layer {layer.name!r} was not measured on device {device}: measure this model on this fleet first"
            ) from None
        return times.seconds(layer, phase, size, part)

    def alike(self, device: int) -> int:
        return next(d for d, table in enumerate(self.devices) if table is self.devices[device])


@dataclass(frozen=True, slots=True)
class Rate:
    """The speed of a device that was not measured.

    Attributes:
        flop_per_s: peak FLOP/s.
        bytes_per_s: memory bandwidth.
        conv_flop_per_s: peak FLOP/s of convolutions, if different (tensor cores).
        call_s: seconds of each call of a layer, for launching kernels, whatever its size.
    """

    flop_per_s: float
    bytes_per_s: float
    conv_flop_per_s: float | None = None
    call_s: float = 0.0


SHARED_PASSES: Mapping[Phase, int] = {"forward": 5, "backward": 18}
"""How often a batch norm with shared statistics reads or writes a tensor of its input's size: forward once for mean and
variance, twice each for scale and shift; backward 1 + 2 + 3 + 1 for the two sums, 2 + 2 + 2 + 2 + 3 for the gradient."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """The model time = max(FLOP / peak, bytes / memory bandwidth) per layer, from Castello et al. 2021.

    Backward of a weighted layer computes two products of its forward's size: the gradients of input and weights. Any other
    layer moves its tensors once more. Unlike in their code, layers without FLOP (activations, pooling) cost memory traffic.
    """

    rates: tuple[Rate, ...]
    itemsize: int = 4

    def seconds(self, device: int, layer: Layer, phase: Phase, size: LocalSize, part: Part = "all") -> float:
        if size.samples == 0:
            return 0.0
        if size.tile < 1.0:
            return size.tile * self.seconds(device, layer, phase, replace(size, tile=1.0), part)
        rate, (outputs, inputs) = self.rates[device], layer.extents
        products, written = 2 if phase == "backward" and part == "all" else 1, size.outputs / outputs
        # A weighted layer reads all channels for any number of filters; other layers read only the channels they write.
        read = layer.input_entries * (size.inputs / inputs if layer.weighted and layer.groups == 1 else written)
        weights = layer.entries * written * (size.inputs / inputs)
        moved = (size.samples * (math.prod(layer.shape) * written + read) + weights) * self.itemsize * products
        if size.shares_statistics:
            moved = SHARED_PASSES[phase] * size.samples * math.prod(layer.shape) * self.itemsize
        peak = rate.conv_flop_per_s if layer.kind == "conv" and rate.conv_flop_per_s is not None else rate.flop_per_s
        return max(flop(layer, size) * products / peak, moved / rate.bytes_per_s) + rate.call_s

    def alike(self, device: int) -> int:
        return self.rates.index(self.rates[device])


class CachedTimes:
    """A cache of layer times, because most plans that a planner compares contain the same sizes.

    Args:
        factors: by device, factors for the seconds of `times`; empty: all are 1.
    """

    def __init__(self, times: ComputeTimes, factors: Sequence[float] = ()) -> None:
        self.times, self.factors = times, tuple(factors)
        self.known: dict[tuple[int, str, Phase, LocalSize, Part], float] = {}

    def seconds(self, device: int, layer: Layer, phase: Phase, size: LocalSize, part: Part = "all") -> float:
        key = (device, layer.name, phase, size, part)
        if key not in self.known:
            factor = self.factors[device] if self.factors else 1.0
            self.known[key] = factor * self.times.seconds(device, layer, phase, size, part)
        return self.known[key]

    def alike(self, device: int) -> int:
        if not self.factors:
            return self.times.alike(device)
        kinds = [(self.times.alike(d), factor) for d, factor in enumerate(self.factors)]
        return kinds.index(kinds[device])


_PROCESSOR = Rate(flop_per_s=10.0, bytes_per_s=1.0)
"""Ten FLOP per byte of memory traffic, as on a processor core. Only their ratio matters."""


def shape_s(layer: Layer, size: LocalSize) -> float:
    """Return roofline seconds of a size, to compare with other sizes only."""
    return Roofline((_PROCESSOR,)).seconds(0, layer, "forward", size)
