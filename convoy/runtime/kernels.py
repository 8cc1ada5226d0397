"""Compute one layer on one device's shard: forward, and backward by autograd on that layer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from convoy.errors import InputError
from convoy.layout.layout import Box
from convoy.model.graph import Layer
from convoy.model.operation import Operation, TracedModel, bind_operation, in_one_format
from convoy.model.windows import Span, Window
from convoy.plan.steps import Part
from convoy.runtime.gradients import Found, collect

Call = Callable[[Sequence[Any], int], Any]
"""Function of the inputs and the number of samples."""

Gradients = tuple[list[Tensor | None], dict[str, Tensor | None]]
"""Gradients of the inputs (None where not wanted), and of the parameters by their key within the layer."""


def under_autocast(dtype: torch.dtype | None, device: str) -> AbstractContextManager[Any]:
    """Return a context in which layers compute in `dtype`; None: in the model's own."""
    return nullcontext() if dtype is None else torch.autocast(device, dtype)


def in_precision(call: Call, dtype: torch.dtype | None, device: str) -> Call:
    """Return a call that computes in `dtype` and returns float32."""

    def run(inputs: Sequence[Any], samples: int) -> Any:
        with under_autocast(dtype, device):
            return widened(call(inputs, samples), dtype)

    return run


def _call_on_shard(module: Any, layer: Layer) -> Call:
    """Return a call that computes a convolution or linear layer with this device's shard of its weight.

    If devices compute partial sums, only one of them has the bias.
    """

    def bias() -> Tensor | None:
        return module.bias if module.bias is not None and module.bias.numel() else None

    if layer.kind == "linear":
        return lambda inputs, _samples: in_one_format(F.linear(inputs[0], module.weight, bias()))
    transposed = layer.kind == "conv_transpose"
    function: Callable[..., Tensor] = getattr(F, f"{layer.kind}{len(module.kernel_size)}d")
    per_group = (layer.channels_in if transposed else layer.channels_out) // layer.groups
    padding, mode = module.padding, module.padding_mode

    def convolve(inputs: Sequence[Tensor]) -> Tensor:
        (x,), weight = inputs, module.weight
        groups = weight.shape[0] // per_group if layer.groups > 1 else 1
        if transposed:
            return function(x, weight, bias(), module.stride, padding, module.output_padding, groups, module.dilation)
        if mode != "zeros":
            padded = F.pad(x, module._reversed_padding_repeated_twice, mode)
            return function(padded, weight, bias(), module.stride, 0, module.dilation, groups)
        return function(x, weight, bias(), module.stride, padding, module.dilation, groups)

    return lambda inputs, _samples: in_one_format(convolve(inputs))


class Arithmetic:
    """Forward and backward of one layer on one device. Each layer has a separate autograd graph with detached inputs.

    Args:
        call: computes the layer's output from the parameters of `model`, which are local shards.
    """

    def __init__(self, model: nn.Module, layer: Layer, call: Call) -> None:
        self.call = call
        self._model = model
        self._keys = {key: p.key for key, p in layer.parameters.items() if p.trainable}

    def forward(self, inputs: Sequence[Tensor], batch: int, keep: bool, wants: Sequence[bool]) -> tuple[Any, Any]:
        """Return the output, and the state for backward (None unless `keep`). `batch`: samples on this device."""
        if not keep:
            return self.call(inputs, batch), None
        with torch.enable_grad():
            roots = [enter(x) if wanted else x for x, wanted in zip(inputs, wants, strict=True)]
            y = self.call(roots, batch)
        return detached(y), (Roots(roots, wants), edge_of(y))

    def backward(self, saved: Any, g: Any, wants: Sequence[bool], part: Part = "all", last: bool = True) -> Gradients:
        """Return the gradients of the inputs marked in `wants` and of the parameters, or only one kind, as `part` says.

        Args:
            last: no later call needs the graph.
        """
        roots, y = saved
        # Read the parameters only now, because a sharded parameter is whole only during a step.
        keys = {} if part == "input" else self._keys
        edges = [] if part == "weight" else roots.edges
        sources = [*edges, *map(self._model.get_parameter, keys.values())]
        found = iter(gradients_of([with_gradients(y, g)], sources, last=last))
        gx = iter([] if part == "weight" else roots.or_zeros(found))
        inputs = [next(gx) if wanted and part != "weight" else None for wanted in wants]
        return inputs, dict(zip(keys, found, strict=True))


def backward_by_rows(
    run: Arithmetic, saved: Sequence[tuple[int, Any]], g: Tensor, wants: Sequence[bool], part: Part, last: bool
) -> Gradients:
    """Return the gradients of a layer that ran forward in several calls. `saved`: for each, its rows and its state."""
    parts = torch.split(g, [rows for rows, _ in saved])
    found = [run.backward(each, row, wants, part, last) for (_, each), row in zip(saved, parts, strict=True)]
    own: Found = {}
    for _, gradients in found:
        for key, gradient in gradients.items():
            collect(own, key, gradient)
    wanted = wants[0] and part != "weight"
    return [torch.cat([inputs[0] for inputs, _ in found]) if wanted else None], own  # type: ignore[misc]


class OutputPick(Arithmetic):
    def __init__(self, model: nn.Module, layer: Layer, operation: Operation) -> None:
        item = operation.args[1]
        super().__init__(model, layer, lambda inputs, _batch: inputs[0][item])

    def forward(self, inputs: Sequence[Any], batch: int, keep: bool, wants: Sequence[bool]) -> tuple[Any, Any]:  # noqa: ARG002
        return self.call(inputs, batch), None

    def backward(self, saved: Any, g: Any, wants: Sequence[bool], part: Part = "all", last: bool = True) -> Gradients:  # noqa: ARG002
        return [g if wants[0] else None], {}


def arithmetic(model: nn.Module, layer: Layer, operation: Operation) -> Arithmetic:
    if layer.kind == "pick":
        return OutputPick(model, layer, operation)
    if layer.multiplies:
        return Arithmetic(model, layer, _call_on_shard(model.get_submodule(str(operation.target)), layer))
    return Arithmetic(model, layer, bind_operation(model, operation))


def detached(y: Any) -> Any:
    return tuple(detached(v) for v in y) if isinstance(y, tuple | list) else y.detach()


def widened(y: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(y, tuple | list):
        return tuple(widened(each, dtype) for each in y)
    return y.float() if isinstance(y, Tensor) and y.dtype == dtype else y


class _Enter(torch.autograd.Function):
    """The root of an autograd graph. Gradients are taken at its edge, which does not keep the tensor alive."""

    @staticmethod
    def forward(_ctx: Any, _anchor: Tensor, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(_ctx: Any, *_: Tensor) -> NoReturn:
        # A step takes its gradients before this node, so only another backward reaches it.
        raise InputError(
            "backward reached a tensor from inside the distributed model, such as one that a registered layer kept: the layers "
            "before it would lose its gradient. Return it from the model's forward, or detach() it"
        )


_ANCHOR = torch.zeros((), requires_grad=True)


def enter(x: Tensor) -> Tensor:
    """Return a tensor with the same values that is the root of an autograd graph."""
    return _Enter.apply(_ANCHOR, x)  # type: ignore[no-any-return, no-untyped-call]


class Roots:
    """The graph edges at which autograd returns gradients, one for each tensor that needs a gradient.

    It holds no tensor, so a layer that does not need its input in backward does not keep it.
    """

    def __init__(self, tensors: Sequence[Any], wants: Sequence[bool]) -> None:
        wanted = [x for x, wants_it in zip(tensors, wants, strict=True) if wants_it]
        self.edges = [get_gradient_edge(x) for x in wanted]
        self._shapes = [(x.shape, x.dtype, x.device) for x in wanted]

    def or_zeros(self, gradients: Iterator[Tensor | None]) -> list[Tensor]:
        """Return the next gradient for each root; zeros if the output does not depend on it."""
        rows = [(next(gradients), shape) for shape in self._shapes]
        return [torch.zeros(s, dtype=t, device=d) if g is None else g for g, (s, t, d) in rows]


def edge_of(y: Any) -> Any:
    """Return the edge where a tensor's gradient enters its graph; None without a graph. Several outputs: a tuple."""
    if isinstance(y, tuple | list):
        return tuple(edge_of(each) for each in y)
    if not isinstance(y, Tensor) or not y.requires_grad or (y.grad_fn is None and y._is_view()):
        return None  # a view made under no_grad is in no graph although it requires a gradient
    return get_gradient_edge(y)


Pairs = tuple[list[GradientEdge], list[Tensor]]
"""Outputs, and the gradient of each."""


def gradients_of(pairs: Sequence[Pairs], sources: Sequence[Any], *, last: bool = True) -> Sequence[Tensor | None]:
    """Return the gradient of each source; None if no output depends on it. Keep the graph unless this is the `last` call."""
    outputs, gradients = [y for ys, _ in pairs for y in ys], [g for _, gs in pairs for g in gs]
    if not outputs or not sources:
        return [None] * len(sources)
    return torch.autograd.grad(outputs, sources, gradients, retain_graph=not last, allow_unused=True)


def with_gradients(y: Any, g: Any) -> Pairs:
    """Return the outputs with a gradient, and the gradients. `g` of several outputs is a dict: index -> gradient."""
    if not isinstance(y, tuple) or isinstance(y, GradientEdge):
        return ([], []) if y is None else ([y], [g])
    pairs = [(y[i], gradient) for i, gradient in g.items() if y[i] is not None]
    return [a for a, _ in pairs], [b for _, b in pairs]


# --- tiles of images ---------------------------------------------------------------------------------------------------
#
# A device computes a tile of a layer's output from a window of the input. Only the ends of the whole image are padded, so
# padding is explicit on the axes along which the device has a part.


def tile_arithmetic(model: nn.Module, traced: TracedModel, name: str, tile: tuple[Box, Box]) -> Arithmetic:
    """Return the arithmetic of a tile of a layer's output. `tile`: its box, and that of the window of the input."""
    layer = traced.graph[name]
    return Arithmetic(model, layer, _windowed_call(model, layer, traced.operations[name], tile))


def _windowed_call(model: nn.Module, layer: Layer, operation: Operation, tile: tuple[Box, Box]) -> Call:
    outputs = tile[0][2:] or ((0, 1),) * len(layer.windows)  # a mean may drop the axes of images
    spans = list(zip(layer.windows, outputs, tile[1][2:], strict=True))
    parts = [out != (0, window.outputs) for window, out, _ in spans]
    kind = layer.windows[0].kind
    if kind in ("nearest", "linear"):
        return lambda inputs, _samples: _resized(inputs[0], spans)
    if kind == "adaptive":
        return lambda inputs, _samples: _adapted(inputs[0], spans).reshape([stop - start for start, stop in tile[0]])
    if kind in ("shuffle", "unshuffle"):
        return lambda inputs, _samples: _shuffled(inputs[0], spans)
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

    def convolve(inputs: Sequence[Tensor], _samples: int) -> Tensor:
        def whole(x: Tensor) -> Tensor:
            for axis, (span, padded) in enumerate(zip(spans, padding, strict=True), 2):
                if not padded:
                    x = _padded(x, axis, *span)
            return x

        function: Callable[..., Tensor] = getattr(F, f"conv{len(spans)}d")
        with _made_again(whole, inputs[0]) as x:
            return function(x, module.weight, module.bias, module.stride, padding, module.dilation, layer.groups)

    return convolve


@contextmanager
def _made_again(make: Callable[[Tensor], Tensor], x: Tensor) -> Iterator[Tensor]:
    """Yield `make(x)`. What autograd would save of it is made again in backward, since `x` itself is often saved anyway."""
    made, given, version = make(x), x.detach(), x._version
    if made.data_ptr() == x.data_ptr():
        yield made
        return
    place = (made.data_ptr(), made.shape, made.dtype)

    def unpack(saved: Tensor | None) -> Tensor:
        if saved is None and given._version != version:
            raise RuntimeError(
                "a tensor that backward needs was changed in place: change a copy, or leave out inplace=True"
            )
        return make(given) if saved is None else saved

    with saved_tensors_hooks(lambda t: None if (t.data_ptr(), t.shape, t.dtype) == place else t, unpack):
        yield made


def _pad(x: Tensor, axis: int, before: int, after: int, value: float = 0.0) -> Tensor:
    """Pad one axis, or crop it where a number is negative."""
    if not before and not after:
        return x
    if before > 0 or after > 0:  # first, because a crop at one end may reach into the padding of the other
        x = F.pad(x, [0, 0] * (x.dim() - 1 - axis) + [max(0, before), max(0, after)], value=value)
    return x.narrow(axis, max(0, -before), x.shape[axis] + min(0, before) + min(0, after))


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
    pool: Callable[..., Tensor] = getattr(F, f"max_pool{len(spans)}d")
    return pool(x, kernel, stride, 0, dilation)


def _averaged(x: Tensor, spans: _Spans) -> Tensor:
    """Divide sums over kernels by the numbers of positions that torch counts, which differ at the ends of the image."""
    for axis, span in enumerate(spans, 2):
        x = _padded(x, axis, *span)
    for axis, (window, out, _) in enumerate(spans, 2):
        if window.kernel == window.stride == 1:  # nothing but padding
            continue
        counts = torch.tensor([window.counted(i) for i in range(*out)], dtype=x.dtype, device=x.device)
        x = x.unfold(axis, window.kernel, window.stride).sum(-1) / counts.view(-1, *[1] * (x.dim() - 1 - axis))
    return x


def _adapted(x: Tensor, spans: _Spans) -> Tensor:
    """Average the positions that are held, divided by the whole numbers of positions of adaptive pooling."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    with torch.autocast(x.device.type, enabled=False):
        for axis, (window, out, held) in reversed([*enumerate(spans, 2)]):
            weight = torch.zeros(held[1] - held[0], out[1] - out[0], dtype=y.dtype)
            for i in range(*out):
                first, stop = window.read((i, i + 1))
                weight[max(0, first - held[0]) : stop - held[0], i - out[0]] = 1 / (stop - first)
            y = (y.movedim(axis, -1) @ weight.to(x.device)).movedim(-1, axis)
    return y.to(x.dtype)


def _transposed(x: Tensor, module: Any, spans: _Spans, parts: Sequence[bool]) -> Tensor:
    """Compute all outputs that the window reaches, crop them to the tile, and fill up what none reaches, before the bias."""
    padding = [0 if part else p for part, p in zip(parts, module.padding, strict=True)]
    extra = [0 if part else p for part, p in zip(parts, module.output_padding, strict=True)]
    function: Callable[..., Tensor] = getattr(F, f"conv_transpose{len(spans)}d")
    ends = {}
    for axis, (part, (window, out, held)) in enumerate(zip(parts, spans, strict=True), 2):
        if part:
            start = held[0] * window.stride - window.before
            size = (held[1] - held[0] - 1) * window.stride + (window.kernel - 1) * window.dilation + 1
            ends[axis] = start - out[0], out[1] - start - size
    bias = module.bias if all(n <= 0 for each in ends.values() for n in each) else None
    y = function(x, module.weight, bias, module.stride, padding, extra, module.groups, module.dilation)
    for axis, each in ends.items():
        y = _pad(y, axis, *each)
    return y if bias is module.bias else y + module.bias.view(-1, *[1] * len(spans))


def _shuffled(x: Tensor, spans: _Spans) -> Tensor:
    """Shuffle whole pixels, and crop to the tile."""
    if spans[0][0].kind == "unshuffle":
        return F.pixel_unshuffle(x, spans[0][0].stride)
    y = F.pixel_shuffle(x, spans[0][0].stride)
    for axis, (window, out, held) in enumerate(spans, 2):
        y = _pad(y, axis, held[0] * window.stride - out[0], out[1] - held[1] * window.stride)
    return y


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
