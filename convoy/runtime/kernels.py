"""Compute one layer on one device's shard: forward, and backward by autograd on that layer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from convoy.errors import InputError
from convoy.model.graph import Layer
from convoy.model.operation import Operation, bind_operation, in_one_format
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
            "backward reached a tensor from inside the distributed model, such as one that a forward hook kept: the layers "
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
