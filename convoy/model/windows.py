"""Describes which input positions an output position needs, along one axis of images: of convolution, pooling, resizing.

Devices that compute tiles of an output read windows of the input, which overlap where a kernel is larger than its stride.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

Span = tuple[int, int]
"""First position, and the one after the last."""

WindowKind = Literal[
    "conv", "conv_transpose", "max_pool", "avg_pool", "nearest", "linear", "adaptive", "shuffle", "unshuffle"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Window:
    """How the output positions of a layer read its input, along one axis.

    Attributes:
        extent, outputs: lengths of the whole axis of the input and of the output.
        kernel, stride, dilation: as in torch.
        before, after: padding at both ends.
        mode: padding mode of a convolution or padding layer: "zeros", "reflect", "replicate" or "circular".
        counts_padding: whether an average counts the padding.
        scale: output positions per input position of a resize, as given; 0: the ratio of the lengths.
        corners: whether a linear resize aligns the corners.
    """

    kind: WindowKind
    extent: int
    outputs: int
    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0
    mode: str = "zeros"
    counts_padding: bool = True
    scale: float = 0.0
    corners: bool = False

    def read(self, out: Span) -> Span:
        """Return the positions that an output span reads, those in the padding too."""
        first, last, reach = out[0], out[1] - 1, (self.kernel - 1) * self.dilation
        match self.kind:
            case "conv_transpose" | "shuffle":
                return -(-(first + self.before - reach) // self.stride), (last + self.before) // self.stride + 1
            case "nearest":
                return self.sources()[first], self.sources()[last] + 1
            case "linear":
                return math.floor(self.source(first)), math.floor(self.source(last)) + 2
            case "adaptive":
                return first * self.extent // self.outputs, -(-out[1] * self.extent // self.outputs)
        return first * self.stride - self.before, last * self.stride - self.before + reach + 1

    def held(self, out: Span) -> Span:
        """Return the positions of the axis that a device needs for an output span: at least one."""
        first, stop = self.read(out)
        if self.mode == "circular" and (first < 0 or stop > self.extent):
            return 0, self.extent
        if self.mode == "reflect":
            mirrored = 2 * (self.extent - 1) - (stop - 1), 1 - first  # of the last position, and behind the first one
            first, stop = min(first, mirrored[0]) if stop > self.extent else first, max(stop, mirrored[1])
        first, stop = max(0, min(first, self.extent - 1)), max(1, min(stop, self.extent))
        return first, max(stop, first + 1)

    def touched(self, held: Span) -> Span:
        """Return the positions of the output of an adaptive average that read any of these positions."""
        return replace(self, extent=self.outputs, outputs=self.extent).read(held)

    def sources(self) -> tuple[int, ...]:
        """Return the input position of each output position of a nearest resize, as torch computes it."""
        return _nearest(self.extent, self.outputs, self.scale)

    def source(self, out: int) -> float:
        """Return the position at which a linear resize reads the input, between two of its positions."""
        if self.corners:
            return out * (self.extent - 1) / (self.outputs - 1) if self.outputs > 1 else 0.0
        scale = 1 / self.scale if self.scale else self.extent / self.outputs
        return min(self.extent - 1.0, max(0.0, (out + 0.5) * scale - 0.5))

    def counted(self, out: int) -> int:
        """Return how many positions an average at an output position divides by."""
        first, limit = out * self.stride - self.before, self.extent + self.after
        stop = min(first + self.kernel, limit)
        return stop - first if self.counts_padding else min(stop, self.extent) - max(first, 0)


@lru_cache(maxsize=256)
def _nearest(extent: int, outputs: int, scale: float) -> tuple[int, ...]:
    import torch  # only here: the command line shows its help without torch

    positions = torch.arange(extent, dtype=torch.float64)[None, None]
    if scale:  # torch computes the length from the scale as well
        found = torch.nn.functional.interpolate(positions, scale_factor=scale)[0, 0, :outputs]
    else:
        found = torch.nn.functional.interpolate(positions, size=outputs)[0, 0]
    return tuple(int(n) for n in found.tolist())
