"""What a layer calls: the half of a trace that only execution needs.

`graph.py` says what a plan must know of a layer; an `Operation` says which module or function to call with which
arguments. `kind_of` sorts the calls of the torch vocabulary into the kinds of `graph.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from convoy.model.graph import Kind


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for the i-th input tensor of a layer among its arguments."""

    index: int


@dataclass(frozen=True, slots=True)
class BatchExtent:
    """Stands for `multiple` times the number of samples present: what `x.size(0)` gave in the model's source."""

    multiple: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a traced model.

    Attributes:
        call: "module" (target: its path), "function" (target: the callable), "method" (target: the name),
            "attribute" (target: path of a parameter or buffer) or "input".
        args, kwargs: as in the source, with `Ref` for tensors and `BatchExtent` for the batch size.
    """

    call: Literal["module", "function", "method", "attribute", "input"]
    target: str | Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


# By name, since torch offers most of them three times: as a module, a function and a method.
_ELEMENTWISE = frozenset((
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "sigmoid", "tanh", "hardswish",
    "hardsigmoid", "hardtanh", "softplus", "softsign", "logsigmoid", "tanhshrink", "softshrink", "hardshrink",
    "threshold", "dropout", "alpha_dropout", "identity", "contiguous", "clone", "neg", "exp", "log", "log1p",
    "sqrt", "rsqrt", "abs", "square", "sin", "cos", "clamp", "erf", "float", "double", "half", "bfloat16", "detach",
))  # fmt: skip
_PER_CHANNEL = frozenset((
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
    "adaptive_max_pool3d", "lp_pool1d", "lp_pool2d", "dropout1d", "dropout2d", "dropout3d", "upsample",
    "upsampling_nearest2d", "upsampling_bilinear2d", "zero_pad2d", "reflection_pad2d", "replication_pad2d",
))  # fmt: skip
_JOIN = frozenset(("add", "sub", "mul", "div", "truediv", "maximum", "minimum"))

_MODULE_NAMES = {
    "ReLU": "relu", "ReLU6": "relu6", "LeakyReLU": "leaky_relu", "ELU": "elu", "SELU": "selu", "CELU": "celu",
    "GELU": "gelu", "SiLU": "silu", "Mish": "mish", "Sigmoid": "sigmoid", "Tanh": "tanh", "Hardswish": "hardswish",
    "Softsign": "softsign", "Hardsigmoid": "hardsigmoid", "Hardtanh": "hardtanh", "Softplus": "softplus",
    "LogSigmoid": "logsigmoid", "Tanhshrink": "tanhshrink", "Softshrink": "softshrink", "Hardshrink": "hardshrink",
    "Threshold": "threshold", "Dropout": "dropout", "AlphaDropout": "alpha_dropout", "Identity": "identity",
    "Dropout1d": "dropout1d", "Dropout2d": "dropout2d", "Dropout3d": "dropout3d", "MaxPool1d": "max_pool1d",
    "MaxPool2d": "max_pool2d", "MaxPool3d": "max_pool3d", "AvgPool1d": "avg_pool1d", "AvgPool2d": "avg_pool2d",
    "AvgPool3d": "avg_pool3d", "AdaptiveAvgPool1d": "adaptive_avg_pool1d",
    "AdaptiveAvgPool2d": "adaptive_avg_pool2d", "AdaptiveAvgPool3d": "adaptive_avg_pool3d",
    "AdaptiveMaxPool1d": "adaptive_max_pool1d", "AdaptiveMaxPool2d": "adaptive_max_pool2d",
    "AdaptiveMaxPool3d": "adaptive_max_pool3d", "LPPool1d": "lp_pool1d", "LPPool2d": "lp_pool2d",
    "Upsample": "upsample", "UpsamplingNearest2d": "upsampling_nearest2d",
    "UpsamplingBilinear2d": "upsampling_bilinear2d", "ZeroPad2d": "zero_pad2d",
    "ReflectionPad2d": "reflection_pad2d", "ReplicationPad2d": "replication_pad2d",
}  # fmt: skip


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def kind_of_module(module: nn.Module) -> Kind:
    """The kind of a leaf module; `opaque` where no rule knows it."""
    if has_hooks(module):
        return "opaque"
    # Exact classes only: a subclass may compute something else.
    match module:
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d() if type(module) in _CONVOLUTIONS:
            plain = module.padding_mode == "zeros" and symmetric_padding(module) is not None
            return "conv" if plain else "opaque"
        case nn.Linear() if type(module) is nn.Linear:
            return "linear"
        case nn.BatchNorm1d() | nn.BatchNorm2d() | nn.BatchNorm3d() if type(module) in _BATCH_NORMS:
            return "batch_norm"
        case nn.Flatten() if (module.start_dim, module.end_dim) == (1, -1):
            return "flatten"
    if not type(module).__module__.startswith("torch.nn.modules"):
        return "opaque"
    if getattr(module, "return_indices", False):
        return "opaque"
    return _kind_of_name(_MODULE_NAMES.get(type(module).__name__, ""))


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody else's code runs when the module is called; no rule knows what it does to a piece."""
    m: Any = module
    return bool(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks)


def kind_of_call(operation: Operation, tensors: int, shape_in: tuple[int, ...], shape_out: tuple[int, ...]) -> Kind:
    """The kind of a function or method call. The shapes are per sample, of its first tensor and of its result."""
    name = operation.target if isinstance(operation.target, str) else getattr(operation.target, "__name__", "")
    if name in _JOIN:
        return "join" if tensors > 1 else "elementwise"
    if name in ("flatten", "view", "reshape") and tensors == 1:
        # With the batch as first axis before and after, there is only one way to end with one more axis.
        retyped = any(isinstance(a, torch.dtype) for a in operation.args)
        return "flatten" if len(shape_out) == 1 and len(shape_in) >= 1 and not retyped else "opaque"
    if name in ("cat", "concat", "concatenate"):
        return "cat"
    if name == "mean" and tensors == 1 and _means_behind_channels(operation, len(shape_in) + 1):
        return "pool"
    if tensors != 1 or operation.kwargs.get("return_indices"):
        return "opaque"
    return _kind_of_name(name)


def _kind_of_name(name: str) -> Kind:
    if name in _ELEMENTWISE:
        return "elementwise"
    return "pool" if name in _PER_CHANNEL else "opaque"


def _means_behind_channels(operation: Operation, axes: int) -> bool:
    dims = operation.args[1] if len(operation.args) > 1 else operation.kwargs.get("dim")
    dims = (dims,) if isinstance(dims, int) else dims
    if not isinstance(dims, tuple | list) or not all(isinstance(d, int) for d in dims):
        return False
    return all(d % axes >= 2 for d in dims)


def symmetric_padding(conv: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> tuple[int, ...] | None:
    """Zeros added on either side of each axis; None where 'same' padding needs one more on one side."""
    if conv.padding == "valid":
        return (0,) * len(conv.kernel_size)
    if conv.padding == "same":
        both = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        return None if any(total % 2 for total in both) else tuple(total // 2 for total in both)
    assert not isinstance(conv.padding, str)
    return tuple(conv.padding)


# In-place calls and what they compute; the trace makes them pure.
IN_PLACE: dict[str, str] = {
    "iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "truediv", "add_": "add", "sub_": "sub", "mul_": "mul",
    "div_": "div", "relu_": "relu", "relu6_": "relu6", "sigmoid_": "sigmoid", "tanh_": "tanh", "clamp_": "clamp",
    "leaky_relu_": "leaky_relu", "elu_": "elu", "selu_": "selu", "celu_": "celu", "hardtanh_": "hardtanh",
    "threshold_": "threshold", "dropout_": "dropout",
}  # fmt: skip
