"""Registers the rules of torch's layers: along which axes a module, function or method can be cut.

A rule examines the arguments of a call. `register_layer` adds rules for other layers.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from convoy.layout.layout import Shape
from convoy.model.graph import Cut
from convoy.model.operation import BatchExtent, Operation, PartExtent, Ref
from convoy.model.split_rules import (
    FUNCTIONS,
    MODULES,
    Call,
    Known,
    Rule,
    SplitRule,
    cut_with_parameters,
    is_alone,
    rule_of,
)
from convoy.model.windows import Window, WindowKind

# Functions that compute each entry separately.
_ENTRIES = (
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "sigmoid", "tanh", "hardswish",
    "hardsigmoid", "hardtanh", "softplus", "softsign", "logsigmoid", "tanhshrink", "softshrink", "hardshrink",
    "threshold", "dropout", "alpha_dropout", "identity", "contiguous", "clone", "neg", "exp", "log", "log1p", "sqrt",
    "rsqrt", "abs", "square", "sin", "cos", "clamp", "erf", "float", "double", "half", "bfloat16", "detach", "tan",
    "atan", "sinh", "cosh", "asinh", "expm1", "exp2", "log2", "log10", "erfc", "sign", "floor", "ceil", "round",
    "trunc", "reciprocal", "logit", "clip", "clamp_min", "clamp_max", "positive", "nan_to_num", "isnan", "isfinite",
    "isinf", "logical_not", "bitwise_not", "invert",
)  # fmt: skip
# Functions of each channel, by number of axes after the channels. (With fewer, torch takes the first axis for the channels.)
_POOLS = (
    "max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool", "dropout", "zero_pad",
    "reflection_pad", "replication_pad", "constant_pad", "circular_pad",
)  # fmt: skip
_CHANNELS = {f"{name}{n}d": n for name in _POOLS for n in (1, 2, 3)} | {
    "dropout2d": 0, "upsampling_nearest2d": 2, "upsampling_bilinear2d": 2, "upsample": 1, "interpolate": 1,
}  # fmt: skip
# Functions of several tensors, entry by entry, with broadcasting.
_JOINS = (
    "add", "sub", "mul", "div", "truediv", "maximum", "minimum", "pow", "where", "masked_fill", "lerp", "addcmul",
    "addcdiv", "atan2", "fmod", "remainder", "hypot", "rsub", "floordiv", "true_divide", "multiply", "subtract",
    "divide", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logaddexp", "copysign", "and_", "or_",
)  # fmt: skip


def known(call: Call) -> Known | None:
    """Return the kind and possible cuts of a call; None if only its samples may be split."""
    m = call.module
    if m is not None and (has_hooks(m) or replaced_by_hand(m) or is_parametrized(m)):
        return None
    rule = rule_of(m, call.operation)
    return None if rule is None or not call.inputs else rule(call)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward or backward hooks, which may not work on a local shard."""
    m: Any = module
    return bool(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks)


def replaced_by_hand(module: nn.Module) -> str:
    """Return the name of a method that was replaced on this object (`layer.forward = ...`), or "".

    `self.forward = self.forward_quickly` does not count, because `chosen_forward` handles it.
    """
    cls = type(module)
    rows = ((name, held) for name, held in vars(module).items() if callable(held) and hasattr(cls, name))
    return next((name for name, _ in rows if name != "forward" or not chosen_forward(module)), "")


def chosen_forward(module: nn.Module) -> str:
    """Return the name of the method that a module uses as its forward (`self.forward = self.forward_quickly`), or ""."""
    held = vars(module).get("forward")
    if not isinstance(held, MethodType) or held.__self__ is not module:
        return ""
    name = held.__func__.__name__
    return name if getattr(type(module), name, None) is held.__func__ else ""


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module is computed as a batch norm, whose statistics several devices share."""
    changed = has_hooks(module) or bool(replaced_by_hand(module))
    return isinstance(module, _BatchNorm) and type(module) in MODULES and not changed


def _rule_for(*layers: str | type[nn.Module]) -> Callable[[Rule], Rule]:
    """Register a rule for functions and methods of these names, and for these module classes."""

    def register(rule: Rule) -> Rule:
        FUNCTIONS.update({each: rule for each in layers if isinstance(each, str)})
        MODULES.update({each: rule for each in layers if not isinstance(each, str)})
        return rule

    return register


def _plain(call: Call) -> bool:
    return is_alone(call) and len(call.operation.args) + len(call.operation.kwargs) == 1


@_rule_for(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def _convolution(call: Call) -> Known | None:
    m: Any = call.module
    if not _plain(call) or len(call.inputs[0]) != len(m.kernel_size) + 2:
        return None
    kind: Literal["conv", "conv_transpose"] = "conv_transpose" if m.transposed else "conv"
    ends = m._reversed_padding_repeated_twice  # of the last axis first, before and after it
    numbers = m.kernel_size, m.stride, m.dilation, ends[-2::-2], ends[-1::-2]
    rows = zip(call.inputs[0][2:], call.output[2:], *numbers, strict=True)
    return Known(kind, groups=m.groups, windows=tuple(_window(kind, *row, mode=m.padding_mode) for row in rows))


@_rule_for(nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
def _linear(call: Call) -> Known | None:
    return Known("linear") if _plain(call) else None


@_rule_for(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def _batch_norm(call: Call) -> Known | None:
    m: Any = call.module
    return Known("batch_norm", statistics=m.training or m.running_mean is None) if _plain(call) else None


@_rule_for(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def _instance_norm(call: Call) -> Known | None:
    m: Any = call.module
    if not _plain(call) or len(call.inputs[0]) != int(type(m).__name__[-2]) + 2:
        return None
    found = SplitRule("channels", attributes=("num_features",))(call)
    if found is None or not m.track_running_stats:
        return found and replace(found, normalised=m.num_features)
    if not m.training:
        return found
    return replace(found, whole_batch="its running statistics are of the global batch")


def _of_channels(axes_behind: int) -> Rule:
    def rule(call: Call) -> Known | None:
        exact = axes_behind > 1 or "1d" in call.name
        behind = len(call.inputs[0]) - 2
        indices = getattr(call.module, "return_indices", False) or call.operation.kwargs.get("return_indices")
        if not is_alone(call) or indices or behind < axes_behind or (exact and behind != axes_behind):
            return None
        return Known("pool", windows=_windows(call))

    return rule


def _window(kind: WindowKind, *numbers: int, mode: str = "zeros", counts: bool = True) -> Window:
    extent, outputs, kernel, stride, dilation, before, after = numbers
    return Window(kind, extent, outputs, kernel, stride, dilation, before, after, mode, counts)


def _windows(call: Call) -> tuple[Window, ...]:
    """Return what each axis of pooling, interpolate or mean reads; nothing for other calls."""
    x, y, name, m = call.inputs[0][2:], call.output[2:], call.name.replace("_", ""), call.module

    def given(place: int, key: str, default: Any = None) -> Any:
        return call.argument(place, key, default) if m is None else getattr(m, key, default)

    def each(value: Any) -> tuple[Any, ...]:
        values = value if isinstance(value, tuple | list) else (value,)
        return tuple(values) * (len(y) if len(values) == 1 else 1)

    if name.startswith(("maxpool", "avgpool")):
        kernel = each(given(1, "kernel_size"))
        stride, padding = each(given(2, "stride") or kernel), each(given(3, "padding", 0))
        is_max = name.startswith("max")
        dilation = each(given(4, "dilation", 1)) if is_max else each(1)
        counts = bool(given(5, "count_include_pad", True))
        numbers = (*kernel, *stride, *padding, *dilation)
        if not _whole_numbers(numbers) or (not is_max and given(6, "divisor_override") is not None):
            return ()
        kind: WindowKind = "max_pool" if is_max else "avg_pool"
        rows = zip(x, y, kernel, stride, dilation, padding, padding, strict=True)
        return tuple(_window(kind, *row, counts=counts) for row in rows)
    if name.startswith(("adaptiveavgpool", "mean")):
        return tuple(Window("adaptive", a, b) for a, b in zip(x, y or (1,) * len(x), strict=True))
    if "pad" in name:
        widths: Any = call.argument(1, "pad") if m is None else m.padding
        mode = call.argument(2, "mode", "constant") if m is None else name.partition("pad")[0]
        ends: Any = [*widths, *[0] * (2 * len(x) - len(widths))][: 2 * len(x)]
        if not _whole_numbers(ends) or given(3, "value"):
            return ()
        # An average over single positions.
        rows = zip(x, y, each(1), each(1), each(1), ends[-2::-2], ends[-1::-2], strict=True)
        return tuple(_window("avg_pool", *row, mode=_MODES.get(mode, mode)) for row in rows)
    mode = given(3, "mode", "nearest")
    linear = mode in ("linear", "bilinear", "trilinear")
    if name not in ("interpolate", "upsample") or not (linear or mode == "nearest") or given(6, "antialias", False):
        return ()
    size, factor = given(1, "size"), given(2, "scale_factor")
    exact = factor is not None and size is None and not given(5, "recompute_scale_factor", False)
    if exact and not all(isinstance(f, int | float) for f in each(factor)):
        return ()
    scales = [float(f) for f in each(factor)] if exact else [0.0] * len(y)
    corners = bool(given(4, "align_corners", False))
    rows = zip(x, y, scales, strict=True)
    return tuple(Window("linear" if linear else "nearest", a, b, scale=s, corners=corners) for a, b, s in rows)


_MODES = {"zero": "zeros", "constant": "zeros", "reflection": "reflect", "replication": "replicate"}


@_rule_for("pixel_shuffle", "pixel_unshuffle", nn.PixelShuffle, nn.PixelUnshuffle)
def _shuffle(call: Call) -> Known | None:
    found, x, y = _CHANNELWISE(call), call.inputs[0], call.output
    if found is None or len(x) != 4:
        return found
    kind: WindowKind = "shuffle" if y[2] > x[2] else "unshuffle"
    factor = max(x[2], y[2]) // min(x[2], y[2])
    return replace(found, windows=tuple(_window(kind, x[a], y[a], factor, factor, 1, 0, 0) for a in (2, 3)))


@_rule_for(nn.PReLU)
def _prelu(call: Call) -> Known | None:
    found = _CHANNELWISE(call)
    free = (Cut(axis, extent, (axis,)) for axis, extent in enumerate(call.output[2:], 2))
    return found and replace(found, cuts=(*found.cuts, *free))


@_rule_for("cat", "concat", "concatenate")
def _cat(call: Call) -> Known | None:
    axis = call.argument(1, "dim", call.argument(1, "axis", 0))
    return Known("cat", axis=axis % len(call.output)) if isinstance(axis, int) else None


@_rule_for("stack")
def _stack(call: Call) -> Known | None:
    new = call.argument(1, "dim", 0)
    if not isinstance(new, int) or not all(call.batched) or not (new := new % len(call.output)):
        return None
    x, count = call.inputs[0], len(call.inputs)
    return Known("parts", tuple(Cut(a if a < new else a + 1, x[a], (a,) * count) for a in range(1, len(x))))


def _whole_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(v, int) and not isinstance(v, bool) for v in values)


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _apart(call: Call, along: Iterable[int]) -> Known | None:
    """Cut every axis except the batch and `along`, if input and output have the same shape."""
    x, read = call.inputs[0], {a % len(call.inputs[0]) for a in along}
    if 0 in read or not call.batched[0] or any(call.batched[1:]) or x != call.output:
        return None
    others = (None,) * (len(call.inputs) - 1)
    return Known("parts", tuple(Cut(a, x[a], (a, *others)) for a in range(1, len(x)) if a not in read))


def _along(place: int, name: str, default: int | None = None) -> Rule:
    """Return the rule of softmax(x, dim) and similar functions."""

    def rule(call: Call) -> Known | None:
        value = call.argument(place, name, default) if call.module is None else getattr(call.module, name, default)
        if value is None and name == "dim":
            value = 0 if len(call.output) in (1, 3) else 1  # softmax's default, with a warning
        # x.flip(2, 3) passes its axes as separate arguments.
        axes = call.operation.args[1:] if name == "dims" and place == 1 and isinstance(value, int) else _tuple(value)
        return _apart(call, axes) if _whole_numbers(axes) else None

    return rule


@_rule_for("layer_norm", "rms_norm", nn.LayerNorm, nn.RMSNorm)
def _layer_norm(call: Call) -> Known | None:
    """Cut the axes before the normalised ones, which are also the axes of the parameters."""
    shape: Any = getattr(call.module, "normalized_shape", None) or call.argument(1, "normalized_shape")
    return _apart(call, range(-len(shape), 0)) if isinstance(shape, tuple | list) and shape else None


@_rule_for("sum", "mean", "amax", "amin", "var", "std", "prod", "logsumexp", "any", "all")
def _reduction(call: Call) -> Known | None:
    """Cut the axes that sum(x, dim) keeps."""
    x, y = call.inputs[0], call.output
    along = _tuple(call.argument(1, "dim", call.argument(1, "axis")))
    if not is_alone(call) or not _whole_numbers(along) or 0 in (axes := {a % len(x) for a in along}):
        return None
    if call.name == "mean" and all(a >= 2 for a in axes):
        whole = axes == {*range(2, len(x))} and call.operation.kwargs.keys() <= {"dim", "axis", "keepdim"}
        return Known("pool", windows=_windows(call) if whole else ())
    kept = len(x) == len(y)
    free = [a for a in range(1, len(x)) if a not in axes]
    return Known("parts", tuple(Cut(a if kept else a - sum(r < a for r in axes), x[a], (a,)) for a in free))


@_rule_for("group_norm")
def _group_norm(call: Call) -> Known | None:
    groups, x, operation = call.argument(1, "num_groups"), call.inputs[0], call.operation
    if not isinstance(groups, int) or len(operation.args) < 2:
        return None
    args = (operation.args[0], PartExtent(groups, 1, x[1]), *operation.args[2:])
    changed = replace(operation, args=args)
    return Known("parts", (Cut(1, groups, cut_with_parameters(call, 1, x[1])),), operation=changed)


@_rule_for("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis")
def _permuted(call: Call) -> Known | None:
    """Cut the axes that permute, transpose or movedim move."""
    x, rest, kwargs = call.inputs[0], call.operation.args[1:], call.operation.kwargs
    numbers = rest[0] if len(rest) == 1 and isinstance(rest[0], tuple | list) else rest
    numbers = tuple(numbers or kwargs.get("dims", ()))
    if not is_alone(call) or not _whole_numbers(numbers) or call.module is not None:
        return None
    try:
        # Let torch move axes of lengths 2, 3, ...: the new lengths identify the axes.
        own = torch.empty(tuple(range(2, len(x) + 2)), device="meta")
        moved = getattr(torch, call.name)(own, *([numbers] if call.name == "permute" else rest), **kwargs)
    except (RuntimeError, TypeError, IndexError):
        return None
    order = [n - 2 for n in moved.shape]
    return Known("parts", tuple(Cut(to, x[a], (a,)) for to, a in enumerate(order) if a)) if order[0] == 0 else None


@_rule_for("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", nn.Flatten, nn.Unflatten)
def _reshaped(call: Call) -> Known | None:
    """Cut an axis that becomes several, or the first of several that become one (view, reshape, unflatten)."""
    x, y, args = call.inputs[0], call.output, call.operation.args
    retyped = any(isinstance(a, torch.dtype) for a in (*args, *call.operation.kwargs.values()))
    if not is_alone(call) or retyped or getattr(call.module, "start_dim", 1) < 1:
        return None
    if len(y) == 2 and len(x) >= 2 and call.name not in ("squeeze", "unsqueeze"):
        # The batch stays the first axis, so a single second axis must contain all others. Even `x.view(n, 4096)` becomes a
        # flatten, because a local shard has another width than the number in the source.
        flat = call.operation if call.module is not None else Operation("function", torch.flatten, (Ref(0), 1))
        return Known("flatten", operation=flat)
    found = tuple(_regrouped(x, y)) if all((*x[1:], *y[1:])) else ()
    sizes: list[Any] = [BatchExtent(1), *y[1:]]
    for cut in found:
        (read,) = cut.inputs
        assert read is not None
        sizes[cut.axis] = PartExtent(y[cut.axis], read, x[read])
    return Known("parts", found, operation=Operation("function", torch.reshape, (Ref(0), tuple(sizes))))


def _regrouped(x: Shape, y: Shape) -> Iterable[Cut]:
    """Yield the cuts of a reshape: for each group of axes with the same entries in `x` and `y`, cut its outermost axis."""
    i = j = 1
    while i < len(x) and j < len(y):
        first, second, before, after = i, j, x[i], y[j]
        while before != after:
            if before < after:
                i += 1
                before *= x[i]
            else:
                j += 1
                after *= y[j]
        i, j = i + 1, j + 1
        while first < i - 1 and x[first] == 1:
            first += 1
        while second < j - 1 and y[second] == 1:
            second += 1
        if (parts := math.gcd(x[first], y[second])) > 1:
            yield Cut(second, parts, (first,))


@_rule_for("pad")
def _pad(call: Call) -> Known | None:
    widths, x = call.argument(1, "pad"), call.inputs[0]
    if not isinstance(widths, tuple | list) or not is_alone(call):
        return None
    padded = [len(x) - 1 - i // 2 for i, n in enumerate(widths) if n]
    if call.argument(2, "mode", "constant") != "constant":
        padded = [len(x) - 1 - i for i in range(len(widths) // 2)]
    if 0 in padded:
        return None
    if all(a >= 2 for a in padded):
        return Known("pool", windows=_windows(call)) if len(x) > 2 else None
    return Known("parts", tuple(Cut(a, x[a], (a,)) for a in range(1, len(x)) if a not in padded))


@_rule_for("getitem")
def _item(call: Call) -> Known | None:
    """Cut the axes that an index such as x[:, :, ::2] does not change."""

    def is_plain(i: Any) -> bool:
        if isinstance(i, slice):
            return all(n is None or isinstance(n, int) for n in (i.start, i.stop, i.step))
        return i is None or i is Ellipsis or (isinstance(i, int) and not isinstance(i, bool))

    x, given = call.inputs[0], call.argument(1, "index")
    index = given if isinstance(given, tuple) else (given,)
    if not is_alone(call) or not all(map(is_plain, index)):
        return None
    if Ellipsis in index:
        here = index.index(Ellipsis)
        fill = len(x) - sum(i is not None and i is not Ellipsis for i in index)
        index = (*index[:here], *(slice(None),) * fill, *index[here + 1 :])
    index = (*index, *(slice(None),) * (len(x) - sum(i is not None for i in index)))
    cuts, read, to = [], 0, 0
    for each in index:
        if each == slice(None):
            cuts.append(Cut(to, x[read], (read,)))
        read += each is not None
        to += not isinstance(each, int)
    return Known("parts", tuple(cuts[1:])) if cuts and cuts[0].axis == 0 and cuts[0].inputs == (0,) else None


@_rule_for("matmul", "bmm")
def _matmul(call: Call) -> Known | None:
    if len(call.inputs) != 2 or tuple(call.operation.args[:2]) != (Ref(0), Ref(1)):
        return None
    (x, w), axis = call.inputs, len(call.output) - 1
    if call.batched == (True, False) and len(w) == 2:
        # Like a fully connected layer: the columns are filters.
        return Known("filters", (Cut(axis, call.output[axis], (None, 1)),)) if len(x) > 1 else None
    if call.batched != (True, True) or len(x) != len(w) or len(x) < 3 or x[1:-2] != w[1:-2]:
        return None
    outer = tuple(Cut(a, call.output[a], (a, a)) for a in range(1, axis - 1))
    rows, columns = Cut(axis - 1, call.output[axis - 1], (axis - 1, None)), Cut(axis, call.output[axis], (None, axis))
    return Known("parts", (*outer, rows, columns))


@_rule_for("scaled_dot_product_attention")
def _attention(call: Call) -> Known | None:
    """Cut the heads of scaled_dot_product_attention, whose inputs are (N, heads, positions, entries)."""
    q, y = call.inputs[0], call.output
    order = [call.input_at(place, name) for place, name in enumerate(("query", "key", "value"))]
    grouped = call.argument(8, "enable_gqa", False)
    if grouped or len(q) < 4 or not all(i is not None and call.batched[i] for i in order):
        return None
    cuts = []
    for axis in range(1, len(q) - 2):
        axes = []
        for shape, batched in zip(call.inputs, call.batched, strict=True):
            own = axis - (len(y) - len(shape))
            axes.append(own if own >= int(batched) and shape[own] == y[axis] else None)
        if any(axes[i] is None for i in order if i is not None):
            return None
        cuts.append(Cut(axis, y[axis], tuple(axes)))
    return Known("parts", tuple(cuts))


@_rule_for("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear")
def _with_weight(call: Call) -> Known | None:
    """Cut conv2d(x, w) and linear(x, w) by the filters of w, which is or depends only on parameters."""
    weight, bias = call.input_at(1, "weight"), call.input_at(2, "bias")
    if call.operation.args[:1] != (Ref(0),) or not call.batched[0] or weight is None or any(call.batched[1:]):
        return None
    x, y, linear = call.inputs[0], call.output, call.name == "linear"
    if (linear and len(y) < 2) or (not linear and len(x) != len(call.inputs[weight])):
        return None
    place = 6  # of `groups`, in both kinds of convolution
    groups = 1 if linear else call.argument(place, "groups", 1)
    if not isinstance(groups, int):
        return None
    axis = len(y) - 1 if linear else 1
    axes: list[int | None] = [None] * len(call.inputs)
    axes[weight] = 1 if call.name.startswith("conv_transpose") and groups == 1 else 0
    if bias is not None:
        axes[bias] = 0
    if groups == 1:
        return Known("filters", (Cut(axis, y[axis], tuple(axes)),))
    axes[0] = 1
    args, kwargs = list(call.operation.args), dict(call.operation.kwargs)
    if len(args) > place:
        args[place] = PartExtent(groups, 1, x[1])
    else:
        kwargs["groups"] = PartExtent(groups, 1, x[1])
    changed = replace(call.operation, args=tuple(args), kwargs=kwargs)
    return Known("filters", (Cut(1, groups, tuple(axes)),), groups, operation=changed)


_ALONE = SplitRule("entries")
_CHANNELWISE = SplitRule("channels")
_SOFTMAX = _along(1, "dim")

FUNCTIONS.update(
    {
        **dict.fromkeys(_ENTRIES, _ALONE),
        **{name: _of_channels(n) for name, n in _CHANNELS.items()},
        **dict.fromkeys(_JOINS, lambda call: Known("join") if len(call.inputs) > 1 else _ALONE(call)),
        **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "logcumsumexp"), _SOFTMAX),
        "normalize": _along(2, "dim", 1),
        "flip": _along(1, "dims"),
        "roll": _along(2, "dims"),
        "fold": _CHANNELWISE,
        # The method x.unfold(1, 3, 2) has other axes.
        "unfold": lambda call: _CHANNELWISE(call) if call.operation.call == "function" else None,
    }
)
MODULES.update(dict.fromkeys((nn.Softmax, nn.LogSoftmax, nn.Softmin), _SOFTMAX))
MODULES.update(dict.fromkeys((nn.Unfold, nn.Fold), _CHANNELWISE))


@_rule_for(nn.GroupNorm)
def _group_norm_module(call: Call) -> Known | None:
    found = SplitRule("channels", groups="num_groups", attributes=("num_channels",))(call)
    return found and replace(found, normalised=call.module.num_groups)  # type: ignore[union-attr, arg-type]


# torch's other modules have the names of the functions they call: AvgPool2d calls "avg_pool2d".
_BY_NAME = {name.replace("_", ""): FUNCTIONS[name] for name in (*_ENTRIES, *_CHANNELS)}
for _class in vars(nn).values():
    if isinstance(_class, type) and issubclass(_class, nn.Module) and _class.__name__.lower() in _BY_NAME:
        MODULES.setdefault(_class, _BY_NAME[_class.__name__.lower()])
