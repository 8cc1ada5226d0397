"""Compute a tile of a layer's output from a window of its input: convolutions, pooling and resizing of parts of images.

Only the ends of the whole image are padded. So padding becomes explicit, on the axes along which this device has a part.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.layout.layout import Box
from convoy.model.graph import Layer
from convoy.model.operation import Operation
from convoy.model.windows import Span, Window
from convoy.runtime.kernels import CONVOLUTIONS, Call

_POOLS: Mapping[int, Callable[..., Any]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def windowed_call(model: nn.Module, layer: Layer, operation: Operation, tile: tuple[Box, Box]) -> Call:
    """Return a call that computes a tile of a layer's output. `tile`: its box, and that of the window of the input."""
    spans = list(zip(layer.windows, tile[0][2:], tile[1][2:], strict=True))
    parts = [out != (0, window.outputs) for window, out, _ in spans]
    kind = layer.windows[0].kind
    if kind in ("nearest", "linear"):
        return lambda inputs, _samples: _resized(inputs[0], spans)
    if kind == "max_pool":
        return lambda inputs, _samples: _max_pooled(inputs[0], spans)
    if kind == "avg_pool":
        return lambda inputs, _samples: _averaged(inputs[0], spans)
    module: Any = model.get_submodule(str(operation.target))
    if kind == "conv_transpose":
        return lambda inputs, _samples: _transposed(inputs[0], module, spans, parts)
    # Padding of whole axes by the convolution itself needs no copy.
    padding = [w.before if w.mode == "zeros" and w.before == w.after else 0 for w, _, _ in spans]
    padding = [0 if part else p for part, p in zip(parts, padding, strict=True)]
    groups = layer.groups

    def convolve(inputs: Sequence[Tensor], _samples: int) -> Tensor:
        x = inputs[0]
        for axis, (span, padded) in enumerate(zip(spans, padding, strict=True), 2):
            if not padded:
                x = _padded(x, axis, *span)
        function = CONVOLUTIONS[False, len(spans)]
        return function(x, module.weight, module.bias, module.stride, padding, module.dilation, groups)

    return convolve


def _pad(x: Tensor, axis: int, before: int, after: int, value: float = 0.0) -> Tensor:
    """Pad one axis, or crop it where a number is negative."""
    if not before and not after:
        return x
    return F.pad(x, [0, 0] * (x.dim() - 1 - axis) + [before, after], value=value)


def _padded(x: Tensor, axis: int, window: Window, out: Span, held: Span, value: float = 0.0) -> Tensor:
    """Return the positions of an axis that an output span reads, those in the padding too, from those that are held."""
    first, stop = window.read(out)
    if window.mode == "zeros":
        return _pad(x, axis, held[0] - first, stop - held[1], value)
    last = window.extent - 1
    match window.mode:
        case "reflect":
            positions = [last - abs(last - abs(i)) for i in range(first, stop)]
        case "replicate":
            positions = [min(last, max(0, i)) for i in range(first, stop)]
        case _:
            positions = [i % window.extent for i in range(first, stop)]
    if positions == list(range(held[0], held[1])):
        return x
    return x.index_select(axis, torch.tensor(positions, device=x.device) - held[0])


_Spans = Sequence[tuple[Window, Span, Span]]


def _max_pooled(x: Tensor, spans: _Spans) -> Tensor:
    for axis, span in enumerate(spans, 2):
        x = _padded(x, axis, *span, value=float("-inf"))
    windows = [window for window, _, _ in spans]
    kernel, stride, dilation = ([getattr(w, name) for w in windows] for name in ("kernel", "stride", "dilation"))
    y: Tensor = _POOLS[len(spans)](x, kernel, stride, 0, dilation)
    return y


def _averaged(x: Tensor, spans: _Spans) -> Tensor:
    """Divide sums over kernels by the numbers of positions that torch counts, which differ at the ends of the image."""
    for axis, span in enumerate(spans, 2):
        x = _padded(x, axis, *span)
    for axis, (window, out, _) in enumerate(spans, 2):
        counts = torch.tensor([window.counted(i) for i in range(*out)], dtype=x.dtype, device=x.device)
        x = x.unfold(axis, window.kernel, window.stride).sum(-1) / counts.view(-1, *[1] * (x.dim() - 1 - axis))
    return x


def _transposed(x: Tensor, module: Any, spans: _Spans, parts: Sequence[bool]) -> Tensor:
    """Compute all outputs that the window reaches, without the bias; crop them to the tile, and fill up what none reaches."""
    padding = [0 if part else p for part, p in zip(parts, module.padding, strict=True)]
    extra = [0 if part else p for part, p in zip(parts, module.output_padding, strict=True)]
    function = CONVOLUTIONS[True, len(spans)]
    y = function(x, module.weight, None, module.stride, padding, extra, module.groups, module.dilation)
    for axis, (part, (window, out, held)) in enumerate(zip(parts, spans, strict=True), 2):
        if part:
            start = held[0] * window.stride - window.before
            y = _pad(y, axis, start - out[0], out[1] - start - y.shape[axis])
    return y if module.bias is None else y + module.bias.view(-1, *[1] * len(spans))


def _resized(x: Tensor, spans: _Spans) -> Tensor:
    for axis, (window, out, held) in enumerate(spans, 2):
        if window.kind == "nearest":
            x = x.index_select(axis, torch.tensor(window.sources()[slice(*out)], device=x.device) - held[0])
            continue
        sources = torch.tensor([window.source(i) for i in range(*out)], dtype=torch.float64)
        low = sources.floor().long()
        high, shape = (low + 1).clamp(max=window.extent - 1), (-1, *[1] * (x.dim() - 1 - axis))
        weight = (sources - low).to(x).view(shape)
        low, high = (low - held[0]).to(x.device), (high - held[0]).to(x.device)
        x = x.index_select(axis, low) * (1 - weight) + x.index_select(axis, high) * weight
    return x
