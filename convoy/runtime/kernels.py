"""Compute one layer on one device's shard: forward, and backward by explicit formulas or by autograd on that layer.

Legend: N samples, C input channels, K output channels (filters), F features; `g` is the gradient of the output.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from convoy.errors import InputError
from convoy.model.graph import Layer
from convoy.model.operation import Operation, bind_operation
from convoy.model.tracing.supported_layers import symmetric_padding
from convoy.plan.steps import Part

Gradients = tuple[list[Tensor | None], dict[str, Tensor | None]]
"""Gradients of the inputs (None where not wanted), and of the parameters by their key within the layer."""


class Arithmetic(Protocol):
    """The arithmetic of a kind of layer on one device."""

    def forward(self, inputs: Sequence[Tensor], batch: int, keep: bool, wants: Sequence[bool]) -> tuple[Any, Any]:
        """Return the output, and what backward needs (None unless `keep`). `batch` counts the samples on this device."""
        ...

    def backward(self, saved: Any, g: Any, wants: Sequence[bool], part: Part = "all") -> Gradients:
        """Return the gradients of the inputs that `wants` marks and of the parameters, or of one kind alone."""
        ...


_Conv = Callable[..., Tensor]
_CONVOLUTIONS: Mapping[int, _Conv] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: Mapping[int, _Conv] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class Convolution:
    """x_NC.. * w_KC.. for the filters, input channels or groups of this device's weight.

    A transposed convolution has its weight as w_CK.. instead. Padding that is not zero or not symmetric is a separate operation
    before it.
    """

    def __init__(self, module: nn.Module, layer: Layer) -> None:
        assert isinstance(
            module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        )
        self.module = module
        self.transposed = layer.kind == "conv_transpose"
        first_axis = layer.channels_in if self.transposed else layer.channels_out
        self.per_group = first_axis // layer.groups
        self.grouped = layer.groups > 1
        padding = symmetric_padding(module)
        self.pads_before = padding is None or module.padding_mode != "zeros"
        self.padding = padding if padding is not None and not self.pads_before else (0,) * len(module.kernel_size)
        self.output_padding = tuple(module.output_padding) if self.transposed else (0,) * len(self.padding)

    @property
    def groups(self) -> int:
        return self.module.weight.shape[0] // self.per_group if self.grouped else 1

    def forward(self, inputs: Sequence[Tensor], batch: int, keep: bool, wants: Sequence[bool]) -> tuple[Any, Any]:  # noqa: ARG002
        m, (x,) = self.module, inputs
        dimensions, bias = len(m.kernel_size), _present(m.bias)
        if self.transposed:
            y = _TRANSPOSED[dimensions](
                x, m.weight, bias, m.stride, self.padding, self.output_padding, self.groups, m.dilation
            )
        else:
            y = _CONVOLUTIONS[dimensions](
                self._padded(x), m.weight, bias, m.stride, self.padding, m.dilation, self.groups
            )
        return y, x if keep else None

    def _padded(self, x: Tensor) -> Tensor:
        if not self.pads_before:
            return x
        mode = self.module.padding_mode
        return F.pad(x, self.module._reversed_padding_repeated_twice, "constant" if mode == "zeros" else mode)

    def backward(self, saved: Any, g: Any, wants: Sequence[bool], part: Part = "all") -> Gradients:
        m, x = self.module, saved
        bias, weighs = _present(m.bias), part != "input"
        mask = [
            wants[0] and part != "weight",
            weighs and m.weight.requires_grad,
            weighs and bias is not None and bias.requires_grad,
        ]
        with torch.set_grad_enabled(self.pads_before and mask[0]):
            root = x.detach().requires_grad_() if self.pads_before and mask[0] else x
            padded = self._padded(root)
        gx, gw, gb = torch.ops.aten.convolution_backward(
            g, padded.detach(), m.weight, [g.shape[1]], m.stride, self.padding, m.dilation, self.transposed,
            self.output_padding, self.groups, mask,
        )  # fmt: skip
        if self.pads_before and mask[0]:
            (gx,) = torch.autograd.grad(padded, root, gx)
        return [gx if mask[0] else None], named(weight=gw if mask[1] else None, bias=gb if mask[2] else None)


class FullyConnected:
    """x_N..F @ w_KF^T + b_K, for the output or input features of this device's weight."""

    def __init__(self, module: nn.Module, layer: Layer) -> None:  # noqa: ARG002
        assert isinstance(module, nn.Linear)
        self.module = module

    def forward(self, inputs: Sequence[Tensor], batch: int, keep: bool, wants: Sequence[bool]) -> tuple[Any, Any]:  # noqa: ARG002
        (x,) = inputs
        return F.linear(x, self.module.weight, _present(self.module.bias)), x if keep else None

    def backward(self, saved: Any, g: Any, wants: Sequence[bool], part: Part = "all") -> Gradients:
        weight, bias, weighs = self.module.weight, _present(self.module.bias), part != "input"
        g_NK, x_NF = g.reshape(-1, g.shape[-1]), saved.reshape(-1, saved.shape[-1])
        gx = (g_NK @ weight).view(saved.shape) if wants[0] and part != "weight" else None
        gw = g_NK.t() @ x_NF if weighs and weight.requires_grad else None
        gb = g_NK.sum(0) if weighs and bias is not None and bias.requires_grad else None
        return [gx], named(weight=gw, bias=gb)


class ByAutograd:
    """Any other layer, in a separate autograd graph: its inputs are detached."""

    def __init__(self, model: nn.Module, layer: Layer, operation: Operation) -> None:
        self.call = bind_operation(model, operation)
        self._model = model
        self._keys = {key: p.key for key, p in layer.parameters.items() if p.trainable}

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The current parameters: a sharded one is whole only during a step."""
        return {key: self._model.get_parameter(whole_key) for key, whole_key in self._keys.items()}

    def forward(self, inputs: Sequence[Tensor], batch: int, keep: bool, wants: Sequence[bool]) -> tuple[Any, Any]:
        if not keep:
            return self.call(inputs, batch), None
        with torch.enable_grad():
            roots = [enter(x) if wanted else x for x, wanted in zip(inputs, wants, strict=True)]
            y = self.call(roots, batch)
        return detached(y), (Roots(roots, wants), edge_of(y))

    def backward(self, saved: Any, g: Any, wants: Sequence[bool], part: Part = "all") -> Gradients:
        assert part == "all", "autograd computes all gradients of a layer at once"
        (roots, y), parameters = saved, self.parameters
        found = iter(gradients_of([with_gradients(y, g)], [*roots.edges, *parameters.values()]))
        gx = iter(roots.or_zeros(found))
        return [next(gx) if wanted else None for wanted in wants], dict(zip(parameters, found, strict=True))


class OutputPick:
    """One output of a layer with several."""

    def __init__(self, operation: Operation) -> None:
        self.item = operation.args[1]

    def forward(self, inputs: Sequence[Any], batch: int, keep: bool, wants: Sequence[bool]) -> tuple[Any, Any]:  # noqa: ARG002
        return inputs[0][self.item], None

    def backward(self, saved: Any, g: Any, wants: Sequence[bool], part: Part = "all") -> Gradients:  # noqa: ARG002
        return [g if wants[0] else None], {}


def arithmetic(model: nn.Module, layer: Layer, operation: Operation) -> Arithmetic:
    """Return a layer's arithmetic on the parameters of `model`, which are local shards."""
    if layer.multiplies:
        assert isinstance(operation.target, str)
        module = model.get_submodule(operation.target)
        return FullyConnected(module, layer) if layer.kind == "linear" else Convolution(module, layer)
    if layer.kind == "pick":
        return OutputPick(operation)
    return ByAutograd(model, layer, operation)


def named(**gradients: Tensor | None) -> dict[str, Tensor | None]:
    return {key: gradient for key, gradient in gradients.items() if gradient is not None}


def _present(bias: Tensor | None) -> Tensor | None:
    """Return the bias if this device holds it: only one summand of a pending sum has it."""
    return bias if bias is not None and bias.numel() else None


def detached(y: Any) -> Any:
    return tuple(detached(v) for v in y) if isinstance(y, tuple | list) else y.detach()


def widened(y: Any, dtype: torch.dtype | None) -> Any:
    """Return outputs as float32 if they are in `dtype`."""
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
    """The edges at which autograd takes gradients, one for each tensor that needs one.

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


def gradients_of(pairs: Sequence[Pairs], sources: Sequence[Any]) -> Sequence[Tensor | None]:
    """Return the gradient of each source; None if no output depends on it."""
    outputs, gradients = [y for ys, _ in pairs for y in ys], [g for _, gs in pairs for g in gs]
    if not outputs or not sources:
        return [None] * len(sources)
    return torch.autograd.grad(outputs, sources, gradients, allow_unused=True)


def with_gradients(y: Any, g: Any) -> Pairs:
    """Return the outputs with a gradient, and the gradients. `g` of several outputs is a dict: index -> gradient."""
    if not isinstance(y, tuple) or isinstance(y, GradientEdge):
        return ([], []) if y is None else ([y], [g])
    pairs = [(y[i], gradient) for i, gradient in g.items() if y[i] is not None]
    return [a for a, _ in pairs], [b for _, b in pairs]


# --- lower precision -------------------------------------------------------------------------------------------------


def in_precision(run: Arithmetic, dtype: torch.dtype | None, device: str) -> Arithmetic:
    """Return a layer's arithmetic in autocast's precision `dtype`. Outputs and gradients are float32."""
    if dtype is None:
        return run
    if isinstance(run, Convolution | FullyConnected):
        return _Rounded(run, dtype)
    return _Autocast(run, dtype, device)


class _Rounded:
    """A convolution or linear layer in lower precision. It casts itself: autocast does not reach its backward kernels."""

    def __init__(self, run: Convolution | FullyConnected, dtype: torch.dtype) -> None:
        self.run, self.dtype = run, dtype

    def forward(self, inputs: Sequence[Tensor], batch: int, keep: bool, wants: Sequence[bool]) -> tuple[Any, Any]:
        y, saved = self._run().forward([x.to(self.dtype) for x in inputs], batch, keep, wants)
        return y.float(), saved

    def backward(self, saved: Any, g: Any, wants: Sequence[bool], part: Part = "all") -> Gradients:
        inputs, own = self._run().backward(saved.to(self.dtype), g.to(self.dtype), wants, part)
        return [_float(x) for x in inputs], {key: _float(w) for key, w in own.items()}

    def _run(self) -> Arithmetic:
        """Return the layer with weights rounded now, because they change in every step."""
        run, module = copy.copy(self.run), copy.copy(self.run.module)
        module._parameters = {
            name: None if p is None else nn.Parameter(p.detach().to(self.dtype), p.requires_grad)
            for name, p in module._parameters.items()
        }
        run.module = module
        return run


class _Autocast:
    """Any other layer in lower precision. Autocast chooses the operations that are safe."""

    def __init__(self, run: Arithmetic, dtype: torch.dtype, device: str) -> None:
        self.run, self.dtype, self.device = run, dtype, device

    def forward(self, inputs: Sequence[Any], batch: int, keep: bool, wants: Sequence[bool]) -> tuple[Any, Any]:
        with torch.autocast(self.device, self.dtype):
            y, saved = self.run.forward(inputs, batch, keep, wants)
        return widened(y, self.dtype), saved

    def backward(self, saved: Any, g: Any, wants: Sequence[bool], part: Part = "all") -> Gradients:
        return self.run.backward(saved, g, wants, part)


def _float(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.float()
