"""Sorts the modules, functions and methods of torch into the kinds of layers of `graph.py`."""

from typing import Any

import torch
from torch import nn

from convoy.model.graph import Kind
from convoy.model.operation import Operation

# By name: torch offers most of them as a module, a function and a method.
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
_SPELLED = {name.replace("_", ""): name for name in _ELEMENTWISE | _PER_CHANNEL}  # "avgpool2d", as modules are spelled
_JOIN = frozenset(("add", "sub", "mul", "div", "truediv", "maximum", "minimum"))

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
    return _kind_of_name(_SPELLED.get(type(module).__name__.lower(), ""))


def has_hooks(module: nn.Module) -> bool:
    """Whether forward or backward hooks are registered: they may do anything to a local part of a tensor."""
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


# In-place calls and the out-of-place functions that a trace puts in their place.
IN_PLACE: dict[str, str] = {
    "iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "truediv", "add_": "add", "sub_": "sub", "mul_": "mul",
    "div_": "div", "relu_": "relu", "relu6_": "relu6", "sigmoid_": "sigmoid", "tanh_": "tanh", "clamp_": "clamp",
    "leaky_relu_": "leaky_relu", "elu_": "elu", "selu_": "selu", "celu_": "celu", "hardtanh_": "hardtanh",
    "threshold_": "threshold", "dropout_": "dropout",
}  # fmt: skip
