"""Seconds of a layer on a device: from measured tables, or by a roofline where nothing was measured.

A convolution's time does not fall in proportion to its filters: predictors that divide by the number of devices miss
filter splits by about 46 % (ParaDL). So time is measured against samples *and* filters, and interpolated in both.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from convoy.errors import InputError
from convoy.model.graph import Layer
from convoy.plan.device_program import LocalSize, flop, whole_size
from convoy.plan.steps import Part, Phase


class ComputeTimes(Protocol):
    """Seconds of one layer's arithmetic on one device."""

    def seconds(self, device: int, layer: Layer, phase: Phase, size: LocalSize, part: Part = "all") -> float:
        """Of forward, of backward, or of a part of backward."""
        ...

    def alike(self, device: int) -> int:
        """The first device with the same times: planners ask once for all of them."""
        ...

    def least_s(self, device: int, layer: Layer, phase: Phase, batch: int, shared: bool = False) -> float:
        """What all of a layer takes at least, in whatever parts: a part of it, samples times filters times channels, takes at
        least so much of this as it is of the layer.

        Args:
            shared: in parts by samples, of a layer that shares its statistics with other devices.
        """
        ...


@dataclass(frozen=True, slots=True)
class Grid:
    """Measured seconds over two sizes.

    Attributes:
        samples, others: the sizes measured, ascending, one or more of each.
        seconds: `seconds[i][j]` at `samples[i]`, `others[j]`.
    """

    samples: tuple[int, ...]
    others: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def at(self, samples: float, other: float) -> float:
        """Bilinear between the points; beyond them the last cell goes on; from a single point, in proportion."""
        i, u = _cell(self.samples, samples)
        j, v = _cell(self.others, other)
        rows = [_line(self.others, row, j, v, other) for row in self.seconds]
        return max(0.0, _line(self.samples, rows, i, u, samples))

    def least(self, samples: float | None = None, other: float | None = None) -> float:
        """Seconds of a sample and one of the other size, where that is least: within the grid nothing is faster.

        Args:
            samples, other: only up to twice and down to half of this size; None: anywhere.
        """
        rows, columns = _near(self.samples, samples), _near(self.others, other)
        return min(self.seconds[i][j] / (self.samples[i] * self.others[j]) for i in rows for j in columns)


def _near(axis: Sequence[int], x: float | None) -> range:
    """Indices of the edges of all cells that hold something between half of x and twice x."""
    if x is None:
        return range(len(axis))
    last = len(axis) - 1
    return range(max(0, min(bisect_right(axis, x / 2) - 1, last - 1)), min(last, max(bisect_left(axis, 2 * x), 1)) + 1)


def _cell(axis: Sequence[int], x: float) -> tuple[int, float]:
    """Index of the cell's lower edge, and the place within it (below 0 or above 1: beyond the axis)."""
    if len(axis) == 1:
        return 0, 0.0
    i = min(max(bisect_right(axis, x) - 1, 0), len(axis) - 2)
    return i, (x - axis[i]) / (axis[i + 1] - axis[i])


def _line(axis: Sequence[int], values: Sequence[float], i: int, u: float, x: float) -> float:
    if len(axis) == 1:
        return values[0] * x / axis[0]
    value = values[i] + u * (values[i + 1] - values[i])
    # Below the first point a line may cross zero, which no time does: from there down to nothing, in proportion.
    return value if u >= 0 or value > values[0] * x / axis[0] else values[0] * x / axis[0]


@dataclass(frozen=True, slots=True)
class Correction:
    """Seconds of a size that was timed beside the grids, because a plan has it.

    Where the grids reach, sizes near it are corrected too, the less the farther they are: at twice or half of it in one
    axis, not at all. Beyond the grids it says more than they do, and all such sizes are weighed by their distance.
    """

    size: LocalSize
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Measured times of one layer on one device.

    Attributes:
        forward, backward: over (samples, outputs), with all inputs.
        forward_inputs, backward_inputs: over (samples, inputs), with all outputs; None for layers that no plan sums
            over channels.
        forward_shared, backward_shared: over (samples, outputs), of a batch norm that shares its statistics with other
            devices; None for every other layer.
        corrections: sizes beside the grids.
    """

    forward: Grid
    backward: Grid
    forward_inputs: Grid | None = None
    backward_inputs: Grid | None = None
    forward_shared: Grid | None = None
    backward_shared: Grid | None = None
    corrections: tuple[Correction, ...] = ()

    def seconds(self, layer: Layer, phase: Phase, size: LocalSize, part: Part = "all") -> float:
        # The two products of backward are of one size, and were timed together.
        share = 1.0 if part == "all" else 0.5
        shared = self.forward_shared if phase == "forward" else self.backward_shared
        if size.shares_statistics and shared is not None:
            return shared.at(size.samples, size.outputs)
        edge, seconds = self._by_grid(layer, phase, size)
        return share * seconds * self._corrected(layer, phase, size, edge)

    def least_shared_s(self, layer: Layer, phase: Phase, batch: int) -> float:
        """What all of a layer takes at least, in parts by samples that share their statistics.

        Where such sizes were timed up to the whole; else what any parts take.
        """
        whole = whole_size(layer, batch)
        grid = self.forward_shared if phase == "forward" else self.backward_shared
        if grid is None or grid.samples[-1] < whole.samples or grid.others[-1] < whole.outputs:
            return self.least_s(layer, phase, batch)
        return grid.least() * whole.samples * whole.outputs

    def least_s(self, layer: Layer, phase: Phase, batch: int) -> float:
        """What all of the layer takes at least, in whatever parts.

        Let no point of a grid take less than q times its samples times its filters. Between points seconds are means of theirs,
        with the weights with which sizes are means of their sizes, so no part takes less than q times its size either. Beyond a
        grid its edge counts, times the least that a roofline says of such sizes. A correction that makes faster counts where it
        reaches, up to twice and half of its size: for the least q of the cells there. Beyond a grid all of them count.
        """
        whole = whole_size(layer, batch if layer.batched else 1)
        forward = phase == "forward"
        rows = []
        for grid, axis in (
            (self.forward if forward else self.backward, "outputs"),
            (self.forward_inputs if forward else self.backward_inputs, "inputs"),
            (self.forward_shared if forward else self.backward_shared, "outputs"),
        ):
            if grid is None:
                continue
            total: int = getattr(whole, axis)
            least = grid.least() * _beyond(grid, layer, whole, axis)
            faster = [(r, each) for each in self.corrections if (r := self._over_grid(layer, phase, each)) < 1]
            if grid.samples[-1] < whole.samples or grid.others[-1] < total:
                least *= min((ratio for ratio, _ in faster), default=1.0)
            else:
                near = [r * grid.least(each.size.samples, getattr(each.size, axis)) for r, each in faster]
                least = min([least, *near])
            rows.append(least * whole.samples * total)
        return min(rows)

    def _by_grid(self, layer: Layer, phase: Phase, size: LocalSize) -> tuple[LocalSize, float]:
        """The nearest size that the grids reach, and the seconds: beyond them in proportion to a roofline.

        A line through the last cell carries the noise of two small sizes far: from 4 samples and 512 features a Linear of
        4,096 features was predicted three times too slow for 64 samples.
        """
        by_inputs = self.forward_inputs if phase == "forward" else self.backward_inputs
        if size.inputs < layer.extents[1] and by_inputs is not None:
            edge = replace(
                size, samples=min(size.samples, by_inputs.samples[-1]), inputs=min(size.inputs, by_inputs.others[-1])
            )
            seconds = by_inputs.at(edge.samples, edge.inputs)
        else:
            grid = self.forward if phase == "forward" else self.backward
            edge = replace(
                size, samples=min(size.samples, grid.samples[-1]), outputs=min(size.outputs, grid.others[-1])
            )
            seconds = grid.at(edge.samples, edge.outputs)
        return edge, seconds if edge == size else seconds * shape_s(layer, size) / shape_s(layer, edge)

    def _corrected(self, layer: Layer, phase: Phase, size: LocalSize, edge: LocalSize) -> float:
        """By how much the grids are too fast there, by what was timed beside them."""
        if not self.corrections:
            return 1.0
        away, nearest = min(((doublings(each.size, edge), each) for each in self.corrections), key=lambda pair: pair[0])
        at_edge = 1.0 if away >= 1 else self._over_grid(layer, phase, nearest) ** (1.0 - away)
        if edge == size:
            return at_edge
        # Shepard's interpolation of the logarithms, weights 1 / distance^2: exact where something was timed.
        known = [(doublings(size, edge), at_edge)]
        for each in self.corrections:
            away = doublings(each.size, size)
            if away == 0:
                return self._over_grid(layer, phase, each)
            known.append((away, self._over_grid(layer, phase, each)))
        weights = [away**-2 for away, _ in known]
        logs = [weight * math.log(ratio) for weight, (_, ratio) in zip(weights, known, strict=True)]
        return math.exp(sum(logs) / sum(weights))

    def _over_grid(self, layer: Layer, phase: Phase, correction: Correction) -> float:
        timed_s = correction.forward_s if phase == "forward" else correction.backward_s
        by_grid_s = self._by_grid(layer, phase, correction.size)[1]
        return timed_s / by_grid_s if timed_s and by_grid_s else 1.0


def _beyond(grid: Grid, layer: Layer, whole: LocalSize, axis: str) -> float:
    """The least that a size beyond a grid takes for each sample and part of the other axis, of what the grid's edge takes.

    By a roofline a sample of a part p of an axis takes max(a p, (m + w / s) p + r), where s samples are computed: `a` is
    arithmetic, `m` and `r` are moved bytes, those that follow the part and those that do not, and `w` is the weights'. More
    samples than S and the edge have one p: the quotient falls with s, and with p until arithmetic takes over. A larger part
    than P and the edge have one s: it is least where w / s is what arithmetic leaves. And both may be beyond.
    """
    samples, part = min(grid.samples[-1], whole.samples), min(1.0, grid.others[-1] / getattr(whole, axis))
    a = flop(layer, replace(whole, samples=1)) / PROCESSOR.flop_per_s
    w, one = 4.0 * layer.entries, replace(whole, samples=1)
    moved = bytes_moved(layer, one, 4) - w
    written = math.prod(layer.shape) * 4.0
    if layer.weighted and layer.groups == 1:
        m = written if axis == "outputs" else moved - written
    else:
        m = moved if axis == "outputs" else 0.0  # channels that are not written are not read
    r = moved - m

    def seconds(p: float, weights: float) -> float:
        return max(a * p, (m + weights) * p + r)

    rows = [1.0]
    if samples < whole.samples:
        left = a - m - w / whole.samples
        p = min(part, r / left) if left > 0 and r > 0 else part
        rows.append(seconds(p, w / whole.samples) / seconds(p, w / samples))
    if part < 1:
        e = min(max(a - m - r, w / samples), w)
        rows.append(part * seconds(1, e) / seconds(part, e))
        rows.append(part * seconds(1, w / whole.samples) / seconds(part, w / samples))
    return min(rows)


def doublings(a: LocalSize, b: LocalSize) -> float:
    """How far apart two sizes are: doublings, over all axes."""
    pairs = ((a.samples, b.samples), (a.outputs, b.outputs), (a.inputs, b.inputs))
    return sum(abs(math.log2(x / y)) for x, y in pairs if x != y)


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Tables of every device: `devices[i][layer name]`."""

    devices: tuple[Mapping[str, LayerTimes], ...]

    def seconds(self, device: int, layer: Layer, phase: Phase, size: LocalSize, part: Part = "all") -> float:
        """Seconds by interpolation.

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

    def least_s(self, device: int, layer: Layer, phase: Phase, batch: int, shared: bool = False) -> float:
        """See `LayerTimes.least_s` and `least_shared_s`."""
        times = self.devices[device].get(layer.name)
        if times is None:
            return 0.0
        return times.least_shared_s(layer, phase, batch) if shared else times.least_s(layer, phase, batch)


@dataclass(frozen=True, slots=True)
class Rate:
    """What a device that is not there can do.

    Attributes:
        flop_per_s: peak arithmetic.
        bytes_per_s: memory bandwidth.
        efficiency: the part of the peak that dense kernels reach; 1 is the roofline itself.
        conv_flop_per_s: peak of convolutions, where it is another one (tensor cores); None: as the rest.
        call_s: of each call of a layer, whatever its size: starting its kernels.
    """

    flop_per_s: float
    bytes_per_s: float
    efficiency: float = 1.0
    conv_flop_per_s: float | None = None
    call_s: float = 0.0

    def arithmetic_s(self, layer: Layer, flop: float) -> float:
        """Of so much arithmetic in a layer."""
        peak = self.flop_per_s if self.conv_flop_per_s is None or layer.kind != "conv" else self.conv_flop_per_s
        return flop / (peak * self.efficiency)


SHARED_PASSES: Mapping[Phase, int] = {"forward": 5, "backward": 18}
"""How often a batch norm with shared statistics reads or writes a tensor of its size, operation by operation: forward one for
mean and variance, two each for scale and shift; backward 1 + 2 + 3 + 1 for the two sums, 2 + 2 + 2 + 2 + 3 for the gradient."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """time = max(FLOP / peak, bytes / memory bandwidth), per layer: the node model of Castello et al. 2021.

    Backward of a weighted layer computes two products of the size of its forward (one for the input's gradient, one for
    the weights'); every other layer moves its tensors once more. Unlike their public code, layers without FLOP
    (activations, pooling, normalisation) cost their memory traffic.
    """

    rates: tuple[Rate, ...]
    itemsize: int = 4

    def seconds(self, device: int, layer: Layer, phase: Phase, size: LocalSize, part: Part = "all") -> float:
        if size.samples == 0:
            return 0.0
        rate = self.rates[device]
        products = 2 if phase == "backward" and part == "all" else 1
        work = flop(layer, size) * products
        moved = bytes_moved(layer, size, self.itemsize) * products
        if size.shares_statistics:
            moved = SHARED_PASSES[phase] * size.samples * math.prod(layer.shape) * self.itemsize
        return max(rate.arithmetic_s(layer, work), moved / rate.bytes_per_s) + rate.call_s

    def alike(self, device: int) -> int:
        return self.rates.index(self.rates[device])

    def least_s(self, device: int, layer: Layer, phase: Phase, batch: int, shared: bool = False) -> float:
        """All of it at once: arithmetic is in proportion, and parts move no less than their part of what the whole moves."""
        whole = whole_size(layer, batch if layer.batched else 1)
        return self.seconds(device, layer, phase, replace(whole, shares_statistics=True) if shared else whole)


class RememberedTimes:
    """The times of one model's layers, each asked for once: the plans that a planner compares have most sizes in common."""

    def __init__(self, times: ComputeTimes) -> None:
        self.times = times
        self.known: dict[tuple[int, str, Phase, LocalSize, Part], float] = {}

    def seconds(self, device: int, layer: Layer, phase: Phase, size: LocalSize, part: Part = "all") -> float:
        key = (device, layer.name, phase, size, part)
        if key not in self.known:
            self.known[key] = self.times.seconds(device, layer, phase, size, part)
        return self.known[key]

    def alike(self, device: int) -> int:
        return self.times.alike(device)

    def least_s(self, device: int, layer: Layer, phase: Phase, batch: int, shared: bool = False) -> float:
        return self.times.least_s(device, layer, phase, batch, shared)


PROCESSOR = Rate(flop_per_s=10.0, bytes_per_s=1.0)
"""Ten FLOP for every byte from memory, as a core of a processor does; only the ratio counts."""


def shape_s(layer: Layer, size: LocalSize) -> float:
    """What a roofline says of a size, in seconds of nobody's device: to be compared with another size's."""
    return Roofline((PROCESSOR,)).seconds(0, layer, "forward", size)


def bytes_moved(layer: Layer, size: LocalSize, itemsize: int) -> float:
    """Memory traffic of one pass, each tensor once: inputs, output, weights."""
    outputs, inputs = layer.extents
    part = size.outputs / outputs
    output = math.prod(layer.shape) * part
    # A weighted layer reads all channels whatever its filters, others only the channels they write.
    read = layer.input_entries * (size.inputs / inputs if layer.weighted and layer.groups == 1 else part)
    weights = layer.entries * part * (size.inputs / inputs)
    return (size.samples * (output + read) + weights) * itemsize
