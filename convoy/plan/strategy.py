"""Define the strategies of layers, and the cuts that each kind of layer allows.

A strategy and a layer determine a *placement*: the layouts of inputs, output and parameters. Layers without their own strategy
follow the layout of their first input if their cuts allow it. A *cut* is an axis along which a layer can be split.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from convoy.errors import PlanError
from convoy.layout import shares as share_rules
from convoy.layout.layout import (
    Box,
    Boxes,
    Layout,
    OnOne,
    Partial,
    Replicated,
    Shape,
    Split,
    Tiles,
    Windows,
    covers,
    everywhere,
    holders,
    is_tiling,
    whole,
)
from convoy.layout.shares import Shares
from convoy.model.graph import Cut, Graph, Layer
from convoy.model.windows import Window


@dataclass(frozen=True, slots=True)
class Batch:
    """A split by samples. Weights are replicated, and their gradients are summed."""

    shares: Shares
    name: ClassVar[str] = "batch"


@dataclass(frozen=True, slots=True)
class Filter:
    """A split by output filters (or features). Each device computes its filters for all samples, from a copy of the input."""

    shares: Shares
    name: ClassVar[str] = "filter"


@dataclass(frozen=True, slots=True)
class Channel:
    """A split by input channels (or features). Each device computes a partial sum of every output."""

    shares: Shares
    name: ClassVar[str] = "channel"


@dataclass(frozen=True, slots=True)
class One:
    """The whole layer on one device."""

    device: int
    name: ClassVar[str] = "one"


@dataclass(frozen=True, slots=True)
class Spatial:
    """A split of images into tiles. Devices read what their kernels need from the tiles of others.

    Attributes:
        shares: one proportion per device.
        axes: the axes that are split: 2 for rows of images or slices of volumes, 3 and 4 for the next ones, 0 for the batch.
        grid: number of parts along each of the axes; default: all devices along the only axis. The devices are in the order
            of the grid, the last axis first. The shares of the devices in a part determine the part's share.
    """

    shares: Shares
    axes: tuple[int, ...] = (2,)
    grid: tuple[int, ...] = ()
    name: ClassVar[str] = "spatial"

    def tiles(self, shape: Shape) -> Tiles:
        """Return the tiles of a tensor of this shape."""
        boxes: list[Box | None] = [whole(shape)]
        parts = len(self.shares)
        for axis, count in zip(self.axes, self.grid or (parts,), strict=True):
            parts //= count
            cut: list[Box | None] = []
            for number, before in enumerate(boxes):
                first = number * count * parts
                sums = tuple(sum(self.shares[first + i * parts : first + (i + 1) * parts]) for i in range(count))
                spans = share_rules.ranges(share_rules.rescale(sums, shape[axis])) if any(sums) else ((0, 0),) * count
                for span in spans:
                    holds_any = before is not None and span[0] < span[1]
                    cut.append((*before[:axis], span, *before[axis + 1 :]) if before and holds_any else None)
            boxes = cut
        return Tiles(tuple(boxes))


Strategy = Batch | Filter | Channel | One | Spatial
STRATEGIES: tuple[str, ...] = ("batch", "filter", "channel", "one", "spatial")

Form = Literal["keep", "free"]


@dataclass(frozen=True, slots=True)
class Sharding:
    """Parameters and optimizer state in unequal shards, gathered for the devices that compute with them.

    Attributes:
        shares: one proportion per device. Each parameter is cut along its first axis in these proportions. A device that does
            not compute the layer may hold a shard too.
        form: "keep": whole parameters stay in memory until they are gathered again in the next micro-batch; "free": they
            are gathered and freed in forward, and again in backward.
    """

    shares: Shares
    form: Form = "keep"


@dataclass(frozen=True, slots=True)
class Placement:
    """The layouts of a layer's inputs, output and parameters.

    Attributes:
        parameters: layouts by key within the layer.
        note: a remark for the user, for example why the layer could not keep a split.
    """

    takes: tuple[Layout, ...]
    gives: Layout
    parameters: Mapping[str, Layout] = field(default_factory=dict)
    note: str = ""


def check(layer: Layer, strategy: Strategy, batch: int, devices: int) -> None:
    """Raise PlanError if a strategy does not fit a layer: wrong shares, no such device, or no such split."""
    what = f"layer {layer.name!r}, strategy {strategy.name!r}"
    if layer.shared and isinstance(strategy, Filter | Channel):
        raise PlanError(
            f"{what}: its parameters belong to another layer too, or have hooks, so they cannot be split: use batch or one"
        )
    match strategy:
        case One(device):
            if not 0 <= device < devices:
                raise PlanError(f"{what}: there is no device {device}: name one of 0 to {devices - 1}")
        case Batch(shares):
            share_rules.check(shares, batch, devices, what)
            if not layer.per_sample:
                raise PlanError(f"{what}: {layer.reason}: give it the strategy 'one'")
        case Channel(shares):
            if not layer.sums_channels:
                raise PlanError(
                    f"{what}: only Linear and convolutions of one group sum over channels: use batch, filter or one"
                )
            share_rules.check(shares, layer.channels_in, devices, what)
        case Spatial(shares, axes, grid):
            share_rules.check(shares, sum(shares), devices, what)
            if not any(shares):
                raise PlanError(f"{what}: shares {shares} are all zero: give at least one device a share above 0")
            if math.prod(grid or (devices,)) != devices or len(grid or (devices,)) != len(axes):
                raise PlanError(
                    f"{what}: a grid {grid} along the axes {axes}: give one number per axis, for {devices} devices"
                )
            if not set(axes) <= {0, *range(2, len(layer.shape) + 1)} or len(set(axes)) < len(axes):
                raise PlanError(
                    f"{what}: axes {axes}: choose from 0 (the batch) and 2 to {len(layer.shape)}, each once"
                )
            if not layer.windows or not layer.per_sample:
                raise PlanError(f"{what}: only convolutions, pooling and resizing are split along their images")
        case Filter(shares) if layer.weighted:
            share_rules.check(shares, layer.channels_out, devices, what)
            per_group = layer.channels_out // layer.groups
            if layer.groups > 1 and any(share % per_group for share in shares):
                raise PlanError(f"{what}: shares {shares} cut a group: each must be a multiple of {per_group} filters")
        case Filter(shares):
            if layer.kind not in _CUT_KINDS or len(shares) != devices:
                raise PlanError(f"{what}: a {layer.kind} layer cannot keep a split of its channels: use batch or one")


def check_sharding(layer: Layer, strategy: Strategy | None, shares: Shares, devices: int) -> None:
    """Raise PlanError if a layer's parameters cannot be sharded in this way, or if that would change nothing.

    Args:
        strategy: the layer's own strategy, if any.
    """
    what = f"layer {layer.name!r}, in shares"
    share_rules.check(shares, sum(shares), devices, what)
    if not any(shares):
        raise PlanError(f"{what}: shares {shares} are all zero: give at least one device a share above 0")
    if isinstance(strategy, Filter | Channel | One):
        raise PlanError(
            f"{what}: its strategy is {strategy.name!r}, so no device uses a copy: give it the strategy 'batch', or remove it"
        )
    if reason := _why_whole(layer):
        raise PlanError(f"{what}: {reason}, so every device keeps copies: remove it from in_shares")


def can_shard(layer: Layer) -> bool:
    """Return whether replicated parameters of a layer may be sharded."""
    return not _why_whole(layer)


def _why_whole(layer: Layer) -> str:
    if not any(p.trainable and p.shape for p in layer.parameters.values()):
        return "it has no parameter that is trained and has an axis"
    if layer.shared:
        return "its parameters belong to another layer too, or have hooks"
    if layer.kind == "opaque" or not layer.batched:
        return f"it is {layer.kind} (its Python code may use its parameters or not, or change them)"
    return ""


def place(graph: Graph, layer: Layer, strategy: Strategy, batch: int, devices: int) -> Placement:
    """Place a layer with its own strategy, for a global batch of `batch` samples.

    Raises:
        PlanError: the layer cannot keep this split (for example, a concatenation along the split axis).
    """
    match strategy:
        case Batch(shares):
            return _uniform(graph, layer, Split(0, share_rules.rescale(shares, batch)), devices)
        case One(device):
            return _uniform(graph, layer, OnOne(device), devices)
        case Channel(shares):
            active = share_rules.holders(shares)
            axis = 0 if layer.kind == "conv_transpose" else 1
            parameters: dict[str, Layout] = {"weight": Split(axis, shares), "bias": OnOne(active[0])}
            parameters = {key: parameters[key] for key in layer.parameters}
            return Placement((Split(layer.feature_axis, shares),), Partial(active), parameters)
        case Spatial():
            placed = in_tiles(graph, layer, strategy.tiles(layer.batch_shape(batch)))
            assert placed is not None, "checked by `check`"
            return placed
        case Filter(shares):
            # A flatten layer is split by the channels of its input.
            counted = graph[layer.inputs[0]] if layer.kind == "flatten" else layer
            extent = layer.channels_out if layer.weighted else (*counted.shape, 0)[0]
            share_rules.check(shares, extent, devices, f"layer {layer.name!r}, strategy 'filter'")
            cut = next((cut for cut in cuts(graph, layer) if cut.axis == layer.feature_axis), None)
            placed = None if cut is None else _along(graph, layer, cut, shares)
            if placed is None:
                raise PlanError(f"layer {layer.name!r} cannot keep a split of its channels: use batch or one")
            return placed


def follow(graph: Graph, layer: Layer, leading: Layout, devices: int) -> Placement | None:
    """Place a layer whose first batched input has layout `leading`; None if that input must be moved first."""
    if layer.weighted and layer.groups == 1 and not (layer.kind == "linear" and isinstance(leading, Tiles)):
        return None
    match leading:
        case Partial() | Windows():
            return None
        case Tiles(boxes):
            free = tile_cuts(graph, layer)
            if layer.windows and layer.windows[0].kind == "adaptive":
                return _averaged(layer, leading)
            if layer.shared or not layer.per_sample or layer.several or not free:
                return None
            first = next(i for i, name in enumerate(layer.inputs) if graph[name].batched)
            before = graph[layer.inputs[first]].batch_shape(_batch_of(leading))
            after = layer.batch_shape(before[0])
            tiles = Tiles(tuple(_rescaled(b, before, after, free, first) for b in boxes))
            return in_tiles(graph, layer, tiles) if covers([b for b in tiles.boxes if b], whole(after)) else None
        case Split(axis, shares) if axis > 0:
            if layer.shared:
                return None
            first = next(i for i, name in enumerate(layer.inputs) if graph[name].batched)
            along = (_along(graph, layer, c, shares) for c in cuts(graph, layer) if c.inputs[first] == axis)
            return next((placed for placed in along if placed is not None), None)
        case Split() if not layer.per_sample or (layer.kind == "cat" and layer.axis == 0):
            return None
        case Replicated() if layer.random:
            return None
    return _uniform(graph, layer, leading, devices)


def _along(graph: Graph, layer: Layer, cut: Cut, shares: Shares) -> Placement | None:
    """Place a layer that is split along a cut; None if the shares would divide one of the cut's parts."""
    entries = sum(shares) // cut.parts if cut.parts else 0
    if not entries or any(share % entries for share in shares):
        return None
    units = tuple(share // entries for share in shares)
    holding, everyone = Replicated(share_rules.holders(units)), everywhere(len(units))

    def split(axis: int, shape: Shape) -> Split:
        return Split(axis, tuple(count * (shape[axis] // cut.parts) for count in units))

    takes: list[Layout] = []
    for name, axis in zip(layer.inputs, cut.inputs, strict=True):
        source = graph[name]
        whole = holding if source.batched else everyone
        takes.append(whole if axis is None else split(axis, source.batch_shape(1)))
    parameters = {
        key: split(cut.parameters[key], p.shape) if key in cut.parameters else holding
        for key, p in layer.parameters.items()
    }
    return Placement(tuple(takes), split(cut.axis, layer.batch_shape(1)), parameters)


def _batch_of(tiles: Boxes) -> int:
    return max(b[0][1] for b in tiles.boxes if b is not None)


def _rescaled(tile: Box | None, before: Shape, after: Shape, free: Sequence[Cut], number: int) -> Box | None:
    """Return a tile of a layer's output that corresponds to one of input `number`; None if it is empty.

    Args:
        before, after: shapes of the input and of the output.
        free: the output's axes that may be split; along the others, its tiles are whole.
    """
    if tile is None:
        return None
    scaled = [tile[0], *whole(after)[1:]]
    for cut in free:
        if (axis := cut.inputs[number]) is not None:
            old, new, entries = before[axis], cut.parts, after[cut.axis] // cut.parts
            start, stop = ((2 * edge * new + old) // (2 * old) * entries for edge in tile[axis])
            scaled[cut.axis] = start, stop
    return tuple(scaled) if all(start < stop for start, stop in scaled) else None


def in_tiles(graph: Graph, layer: Layer, tiles: Boxes) -> Placement | None:
    """Place a layer whose output is computed in boxes; None if it needs more than boxes of its inputs."""
    batch, free = _batch_of(tiles), tile_cuts(graph, layer)
    takes: list[Layout] = []
    for number, name in enumerate(layer.inputs):
        boxes = tuple(tile and _read(layer, tile, free, number, graph[name], batch) for tile in tiles.boxes)
        if any(b is None and tile is not None for b, tile in zip(boxes, tiles.boxes, strict=True)):
            return None
        takes.append(Tiles(boxes) if is_tiling(boxes, graph[name].batch_shape(batch)) else Windows(boxes))
    holding = Replicated(parameter_holders(layer, tiles, len(tiles.boxes)))
    return Placement(tuple(takes), tiles, dict.fromkeys(layer.parameters, holding))


def _averaged(layer: Layer, tiles: Tiles) -> Placement:
    """Place an adaptive average: each device averages its tile's entries, and averages of several tiles are added."""
    boxes = tuple(
        tile and (*tile[:2], *map(Window.touched, layer.windows, tile[2:]))[: len(layer.shape) + 1]
        for tile in tiles.boxes
    )
    apart = is_tiling(boxes, layer.batch_shape(_batch_of(tiles)))
    return Placement((tiles,), Tiles(boxes) if apart else Windows(boxes, sums=True))


def _read(layer: Layer, tile: Box, free: Sequence[Cut], number: int, source: Layer, batch: int) -> Box | None:
    """Return the box of input `number` that a tile of the output needs; None if it needs more than a box."""
    shape, output = source.batch_shape(batch), layer.batch_shape(batch)
    split = {axis for axis, span in enumerate(tile) if span != (0, output[axis])}
    if not split <= {cut.axis for cut in free} | (set() if layer.normalised else {0}):
        return None
    found = [tile[0], *whole(shape)[1:]] if source.batched else [*whole(shape)]
    for cut in free:
        if not cut.parts:  # images without any entries
            continue
        span, entries = tile[cut.axis], output[cut.axis] // cut.parts
        if any(edge % entries for edge in span):
            return None
        if (axis := cut.inputs[number]) is not None:
            start, stop = (edge // entries * (shape[axis] // cut.parts) for edge in span)
            found[axis] = layer.windows[axis - 2].held(span) if layer.windows else (start, stop)
    return tuple(found)


def tile_cuts(graph: Graph, layer: Layer) -> tuple[Cut, ...]:
    """Return the cuts along which tiles of a layer's output may lie, except along the batch axis."""
    each = tuple(Cut(axis, extent, (axis,) * len(layer.inputs)) for axis, extent in enumerate(layer.shape, 1))
    if layer.windows or layer.normalised or (layer.kind == "batch_norm" and layer.axis != 2):
        return each[1:]
    match layer.kind:
        case "linear":
            return each[:-1]
        case "elementwise" | "join" | "cat" | "parts" if layer.kind != "cat" or layer.axis:
            return tuple(cut for cut in cuts(graph, layer) if not cut.parameters)
    return ()


def parameter_holders(layer: Layer, gives: Layout, devices: int) -> tuple[int, ...]:
    """Return the devices that hold the parameters of a layer whose output is split by samples (`gives`)."""
    return tuple(range(devices)) if layer.shared or layer.kind == "parameter" else holders(gives)


def _uniform(graph: Graph, layer: Layer, layout: Layout, devices: int) -> Placement:
    """Place a layer whose inputs and output have the same layout of whole samples: batch split, one device, or copies."""
    everyone = everywhere(devices)
    if not layer.batched:
        return Placement((everyone,) * len(layer.inputs), everyone, dict.fromkeys(layer.parameters, everyone))
    # A call may change parameters or buffers, such as the running statistics of a batch norm.
    changes = layer.statistics and any(p.buffer for p in layer.parameters.values())
    changes = changes or (layer.kind == "opaque" and not layer.per_sample)
    note = ""
    if layer.called_everywhere and len(holders(layout)) < devices:
        layout, note = everyone, "a call changes its state, so every device computes it"
    elif layer.shared and changes and not isinstance(layout, Split):
        layout, note = everyone, "it changes what other layers or hooks use, so every device computes it"
        if layer.random:
            raise PlanError(f"layer {layer.name!r}: {note}, and draws random numbers: train this model on one device")
    takes = tuple(layout if graph[name].batched else everyone for name in layer.inputs)
    owners = parameter_holders(layer, layout, devices)
    kept: Layout = OnOne(owners[0]) if isinstance(layout, OnOne) and not layer.shared else Replicated(owners)
    return Placement(takes, layout, dict.fromkeys(layer.parameters, kept), note)


_CUT_KINDS = (
    "elementwise", "pool", "flatten", "batch_norm", "conv", "conv_transpose", "linear", "join", "cat", "parts", "filters"
)  # fmt: skip
"""Kinds of layers that can be split along other axes than the batch."""


def cuts(graph: Graph, layer: Layer) -> tuple[Cut, ...]:
    """Return the cuts of a layer, except along the batch axis. An input that is split along the same cut needs no move."""
    axes = range(1, len(layer.shape) + 1)
    if not layer.inputs:
        return ()
    match layer.kind:
        case "elementwise":
            return tuple(Cut(axis, extent, (axis,)) for axis, extent in enumerate(layer.shape, 1))
        case "pool":
            return (Cut(1, layer.shape[0], (1,)),) if layer.shape else ()
        case "flatten":
            return (Cut(1, graph[layer.inputs[0]].shape[0], (1,)),)
        case "batch_norm" if not layer.axis:
            # num_batches_tracked has no channels: every device with channels counts separately.
            return (Cut(1, layer.shape[0], (1,), {key: 0 for key, p in layer.parameters.items() if p.shape}),)
        case "conv" | "conv_transpose" | "linear":
            # Several groups can be split between groups (depthwise: always); one group reads all channels.
            transposed = layer.kind == "conv_transpose" and layer.groups == 1
            parameters = {"weight": 1 if transposed else 0, "bias": 0}
            parts, reads = (layer.groups, 1) if layer.groups > 1 else (layer.channels_out, None)
            return (Cut(layer.feature_axis, parts, (reads,), {key: parameters[key] for key in layer.parameters}),)
        case "join":
            return tuple(_join_cut(graph, layer, axis) for axis in axes)
        case "cat":
            rest = (axis for axis in axes if axis != layer.axis)
            return tuple(Cut(axis, layer.shape[axis - 1], (axis,) * len(layer.inputs)) for axis in rest)
        case "parts" | "filters":
            return layer.cuts
    return ()


def _join_cut(graph: Graph, layer: Layer, axis: int) -> Cut:
    """Return the cut of a broadcasting operation along an output axis. Inputs that are broadcast along it are read whole."""
    extent, read = layer.shape[axis - 1], list[int | None]()
    for name in layer.inputs:
        shape = graph[name].batch_shape(1)
        own = axis - (len(layer.shape) + 1 - len(shape))  # axes are aligned from the right
        read.append(own if own >= 0 and shape[own] == extent else None)
    return Cut(axis, extent, tuple(read))
