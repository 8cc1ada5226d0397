"""Define layouts: the part of a tensor that each device holds.

A *box* is a tuple of half-open ranges, one per axis, in the coordinates of the whole tensor. In every layout each device holds
at most one box. The terms are those of torch's DTensor, but shares may be unequal and the code is independent of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from convoy.layout import shares as share_rules
from convoy.layout.shares import Shares

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Split:
    """Consecutive shards along one axis; `shares[i]` entries on device i, zero allowed."""

    axis: int
    shares: Shares

    def __str__(self) -> str:
        axis = {0: "batch", 1: "channel"}.get(self.axis, f"axis {self.axis}")
        return f"{axis}({','.join(map(str, self.shares))})"


@dataclass(frozen=True, slots=True)
class Replicated:
    """The whole tensor on each of `devices`, nothing on the others."""

    devices: tuple[int, ...]

    def __str__(self) -> str:
        return f"copies({','.join(map(str, self.devices))})"


@dataclass(frozen=True, slots=True)
class OnOne:
    """The whole tensor on one device."""

    device: int

    def __str__(self) -> str:
        return f"on({self.device})"


@dataclass(frozen=True, slots=True)
class Partial:
    """A pending sum: each of `devices` holds a partial sum of the whole shape; the tensor is the sum of these."""

    devices: tuple[int, ...]

    def __str__(self) -> str:
        return f"sum({','.join(map(str, self.devices))})"


@dataclass(frozen=True, slots=True)
class Tiles:
    """Disjoint boxes that cover the tensor, one per device; None: the device holds nothing."""

    boxes: tuple[Box | None, ...]

    @property
    def channels_last(self) -> bool:
        """Whether the second axis is split, so that it has rows of images, not channels."""
        return len({b[1:2] for b in self.boxes if b is not None}) > 1

    def __str__(self) -> str:
        return f"tiles({_text(self.boxes)})"


@dataclass(frozen=True, slots=True)
class Windows:
    """Boxes that may overlap or leave entries out, one per device: what a convolution reads for tiles of its output.

    Attributes:
        sums: an entry is the sum of its values in all boxes that contain it: in gradients, and in averages over tiles.
    """

    boxes: tuple[Box | None, ...]
    sums: bool = False

    def __str__(self) -> str:
        return f"{'sums' if self.sums else 'windows'}({_text(self.boxes)})"


def _text(boxes: Sequence[Box | None]) -> str:
    """Return boxes as text, without the axes that are the same for all of them; the devices if all boxes are the same."""
    held = [b for b in boxes if b is not None]
    axes = [axis for axis, spans in enumerate(zip(*held, strict=True)) if len(set(spans)) > 1]
    if not axes:
        return ",".join(str(device) for device, b in enumerate(boxes) if b is not None)
    return ", ".join("-" if b is None else " ".join(f"{b[a][0]}:{b[a][1]}" for a in axes) for b in boxes)


Boxes = Tiles | Windows
Layout = Split | Replicated | OnOne | Partial | Boxes


def everywhere(devices: int) -> Replicated:
    """Return the layout with the whole tensor on every device."""
    return Replicated(tuple(range(devices)))


def whole(shape: Shape) -> Box:
    """Return the box that covers a tensor of this shape."""
    return tuple((0, extent) for extent in shape)


def box(layout: Layout, device: int, shape: Shape) -> Box | None:
    """Return the box that `device` holds of a tensor of `shape`; None if it holds nothing."""
    match layout:
        case Split(axis, shares):
            if not shares[device]:
                return None
            start, full = sum(shares[:device]), whole(shape)
            return (*full[:axis], (start, start + shares[device]), *full[axis + 1 :])
        case Replicated(devices) | Partial(devices):
            return whole(shape) if device in devices else None
        case OnOne(owner):
            return whole(shape) if device == owner else None
        case Tiles(boxes) | Windows(boxes):
            return boxes[device]


def local_shape(layout: Layout, device: int, shape: Shape) -> Shape:
    """Return the shape of a device's shard. Without one, it has zero entries along the split (or first) axis."""
    here = box(layout, device, shape)
    if here is not None:
        return tuple(stop - start for start, stop in here)
    axis = layout.axis if isinstance(layout, Split) else 0
    return (*shape[:axis], 0, *shape[axis + 1 :])


def holders(layout: Layout) -> tuple[int, ...]:
    """Return the devices that hold any entries."""
    match layout:
        case Split(_, shares):
            return share_rules.holders(shares)
        case Replicated(devices) | Partial(devices):
            return devices
        case OnOne(device):
            return (device,)
        case Tiles(boxes) | Windows(boxes):
            return tuple(device for device, held in enumerate(boxes) if held is not None)


def single(layout: Layout) -> bool:
    """Return whether no two devices hold the same entries."""
    return isinstance(layout, Split | Tiles) or len(holders(layout)) == 1


def holds(layout: Layout, device: int) -> bool:
    """Return whether a device holds any entries."""
    # Planning calls this a million times, and `match` takes twice as long.
    if isinstance(layout, Split):
        return layout.shares[device] > 0
    if isinstance(layout, Tiles | Windows):
        return layout.boxes[device] is not None
    return layout.device == device if isinstance(layout, OnOne) else device in layout.devices


def held_entries(layout: Layout, device: int, shape: Shape) -> int:
    """Return the number of entries of a tensor of `shape` on a device."""
    match layout:
        case Split(axis, shares):
            return math.prod(shape[:axis]) * shares[device] * math.prod(shape[axis + 1 :])
        case Tiles(boxes) | Windows(boxes):
            held = boxes[device]
            return 0 if held is None else entries(held)
        case _:
            return math.prod(shape) if holds(layout, device) else 0


def dual(layout: Layout) -> Layout:
    """Return the layout of the gradient of a tensor in `layout`.

    Each copy of a tensor gets a part of the gradient's sum, so the gradient of copies is a pending sum, and so is that of
    windows where they overlap. All partial sums of a tensor have the same gradient, so it is replicated. The gradient of a
    split tensor, or on one device, has the same layout.
    """
    match layout:
        case Replicated(devices):
            return Partial(devices)
        case Partial(devices):
            return Replicated(devices)
        case Windows(boxes, sums):
            return Windows(boxes, not sums)
        case _:
            return layout


def intersection(a: Box, b: Box) -> Box | None:
    """Return the common part of two boxes; None if they share no entry."""
    common = tuple((max(lo, lo2), min(hi, hi2)) for (lo, hi), (lo2, hi2) in zip(a, b, strict=True))
    return common if all(lo < hi for lo, hi in common) else None


def entries(b: Box) -> int:
    """Return the number of entries of a box."""
    return math.prod(stop - start for start, stop in b)


def covers(boxes: Sequence[Box], wanted: Box) -> bool:
    """Return whether disjoint boxes inside `wanted` cover all of it."""
    return list(boxes) == [wanted] or (len(boxes) > 1 and 0 < entries(wanted) == sum(map(entries, boxes)))


def is_tiling(boxes: Sequence[Box | None], shape: Shape) -> bool:
    """Return whether boxes are disjoint and cover a tensor of this shape."""
    held = [b for b in boxes if b is not None]
    apart = all(intersection(a, b) is None for i, a in enumerate(held) for b in held[:i])
    return apart and sum(map(entries, held)) == math.prod(shape)
