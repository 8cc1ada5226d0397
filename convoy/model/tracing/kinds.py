"""The table of torch's layers: which module, function or method may be cut along which axes.

Each is registered as `register_layer` registers other people's; `axis_rules.py` has the rules that look at arguments.
"""

from dataclasses import replace
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm

from convoy.model.graph import Cut
from convoy.model.layer_rules import FUNCTIONS, MODULES, Call, Known, Rule, builtin, rule_of
from convoy.model.tracing import axis_rules as by_axes

# Each entry for itself.
_ENTRIES = (
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "sigmoid", "tanh", "hardswish",
    "hardsigmoid", "hardtanh", "softplus", "softsign", "logsigmoid", "tanhshrink", "softshrink", "hardshrink",
    "threshold", "dropout", "alpha_dropout", "identity", "contiguous", "clone", "neg", "exp", "log", "log1p", "sqrt",
    "rsqrt", "abs", "square", "sin", "cos", "clamp", "erf", "float", "double", "half", "bfloat16", "detach", "tan",
    "atan", "sinh", "cosh", "asinh", "expm1", "exp2", "log2", "log10", "erfc", "sign", "floor", "ceil", "round",
    "trunc", "reciprocal", "logit", "clip", "clamp_min", "clamp_max", "positive", "nan_to_num", "isnan", "isfinite",
    "isinf", "logical_not", "bitwise_not", "invert",
)  # fmt: skip
# Each channel for itself; the number says how many axes there are behind the channels (with fewer, torch takes the first axis
# for the channels).
_POOLS = (
    "max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool", "dropout", "zero_pad",
    "reflection_pad", "replication_pad", "constant_pad", "circular_pad",
)  # fmt: skip
_CHANNELS = {f"{name}{n}d": n for name in _POOLS for n in (1, 2, 3)} | {
    "dropout2d": 0, "upsampling_nearest2d": 2, "upsampling_bilinear2d": 2, "upsample": 1, "interpolate": 1,
}  # fmt: skip
# Entry by entry, with others as broadcasting has it.
_JOINS = (
    "add", "sub", "mul", "div", "truediv", "maximum", "minimum", "pow", "where", "masked_fill", "lerp", "addcmul",
    "addcdiv", "atan2", "fmod", "remainder", "hypot", "rsub", "floordiv", "true_divide", "multiply", "subtract",
    "divide", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logaddexp", "copysign", "and_", "or_",
)  # fmt: skip


def _spelled(name: str) -> str:
    """As modules are spelled: "avg_pool2d" is AvgPool2d."""
    return name.replace("_", "")


def known(call: Call) -> Known | None:
    """What is known of a call; None: only its samples may be shared out."""
    if call.module is not None:
        if has_hooks(call.module) or replaced_by_hand(call.module):
            return None
        if parametrize.is_parametrized(call.module):
            return _weight_norm(call)
    rule = rule_of(call.module, call.operation)
    return None if rule is None or not call.inputs else rule(call)


def has_hooks(module: nn.Module) -> bool:
    """Whether forward or backward hooks are registered: they may do anything to a local part of a tensor."""
    m: Any = module
    return bool(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks)


def replaced_by_hand(module: nn.Module) -> str:
    """Return the method of its class that an object has another function for (`layer.forward = ...`); "" where there is none.

    One of its own methods is none (`self.forward = self.forward_quickly`): `chosen_forward` follows it.
    """
    cls = type(module)
    rows = ((name, held) for name, held in vars(module).items() if callable(held) and hasattr(cls, name))
    return next((name for name, _ in rows if name != "forward" or not chosen_forward(module)), "")


def chosen_forward(module: nn.Module) -> str:
    """Return the name of the method of its own that a module has put in the place of its forward; "" where it has not."""
    held = vars(module).get("forward")
    if not isinstance(held, MethodType) or held.__self__ is not module:
        return ""
    name = held.__func__.__name__
    return name if getattr(type(module), name, None) is held.__func__ else ""


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is computed as a batch norm, whose statistics several devices share."""
    rule = MODULES.get(type(module))
    changed = has_hooks(module) or bool(replaced_by_hand(module))
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and rule is not None and not changed


# --- torch's modules -------------------------------------------------------------------------------------------------


def _plain(call: Call) -> bool:
    return len(call.inputs) == 1 and call.batched[0] and len(call.operation.args) + len(call.operation.kwargs) == 1


def _of_channels(axes_behind: int) -> Rule:
    def rule(call: Call) -> Known | None:
        exact = axes_behind if axes_behind > 1 or "1d" in _name(call) else None
        behind = len(call.inputs[0]) - 2
        indices = getattr(call.module, "return_indices", False) or call.operation.kwargs.get("return_indices")
        if len(call.inputs) != 1 or not call.batched[0] or indices or behind < axes_behind:
            return None
        return Known("pool") if exact is None or behind == exact else None

    return rule


def _name(call: Call) -> str:
    target = call.operation.target
    if call.module is not None:
        return type(call.module).__name__.lower()
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _convolution(call: Call) -> Known | None:
    m: Any = call.module
    return Known("conv", groups=m.groups) if _plain(call) and len(call.inputs[0]) == len(m.kernel_size) + 2 else None


def _conv_transpose(call: Call) -> Known | None:
    m: Any = call.module
    if not _plain(call) or len(call.inputs[0]) != len(m.kernel_size) + 2:
        return None
    return Known("conv_transpose", groups=m.groups)


def _linear(call: Call) -> Known | None:
    return Known("linear") if _plain(call) else None


def _batch_norm(call: Call) -> Known | None:
    m: Any = call.module
    return Known("batch_norm", statistics=m.training or m.running_mean is None) if _plain(call) else None


def _weight_norm(call: Call) -> Known | None:
    """A layer whose weight is computed row by row from parameters: each device computes the rows of its filters."""
    m: Any = call.module
    axes = {"parametrizations.weight.original0": 0, "parametrizations.weight.original1": 0, "bias": 0}
    own = dict(m.named_parameters())
    plain = issubclass(type(m), (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)) and type(m).__bases__[0] in _FILTERED
    if not computes_its_rows(m) or not plain or not _plain(call) or not own.keys() <= axes.keys():
        return None
    rows, groups = len(own["parametrizations.weight.original1"]), getattr(m, "groups", 1)
    axis = len(call.output) - 1 if isinstance(m, nn.Linear) else 1
    given = {"axis": axis, "groups": "groups" if groups > 1 else None, "parameters": axes}
    return builtin("filters", **given)(call) if rows == call.output[axis] else None


_FILTERED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


def computes_its_rows(module: nn.Module) -> bool:
    """Whether a module's only parametrization is weight norm with one length for each filter."""
    found: Any = getattr(module, "parametrizations", {})
    if list(found) != ["weight"] or len(found["weight"]) != 1:
        return False
    (each,) = found["weight"]
    return isinstance(each, _WeightNorm) and each.dim == 0


def _prelu(call: Call) -> Known | None:
    m: Any = call.module
    if not _plain(call) or len(call.inputs[0]) < 2:
        return None
    cut = Cut(1, call.inputs[0][1], (1,), {"weight": 0} if m.num_parameters > 1 else {})
    return Known("parts", (cut,))


def _instance_norm(axes_behind: int) -> Rule:
    def rule(call: Call) -> Known | None:
        x, m = call.inputs[0], call.module
        if not _plain(call) or len(x) != axes_behind + 2:
            return None
        known = builtin("channels", attributes=("num_features",))(call)
        notes = getattr(m, "track_running_stats", False) and getattr(m, "training", False)
        return replace(known, whole_batch="its running statistics are of the whole batch") if known and notes else known

    return rule


def _with_no_check(table: dict[Any, Rule], rules: dict[Any, Rule]) -> None:
    for key, rule in rules.items():
        assert key not in table, key
        table[key] = rule


_entry, _join = builtin("entries"), by_axes.join
_with_no_check(FUNCTIONS, dict.fromkeys(_ENTRIES, _entry))
_with_no_check(FUNCTIONS, {name: _of_channels(n) for name, n in _CHANNELS.items()})
_with_no_check(FUNCTIONS, dict.fromkeys(_JOINS, _join))
_with_no_check(FUNCTIONS, by_axes.RULES)
_with_no_check(
    MODULES,
    {
        **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
        **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _conv_transpose),
        **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm),
        nn.Linear: _linear,
        nn.modules.linear.NonDynamicallyQuantizableLinear: _linear,  # of attention
        nn.GroupNorm: builtin("channels", groups="num_groups", attributes=("num_channels",)),
        nn.InstanceNorm1d: _instance_norm(1),
        nn.InstanceNorm2d: _instance_norm(2),
        nn.InstanceNorm3d: _instance_norm(3),
        nn.PReLU: _prelu,
        **by_axes.MODULE_RULES,
    },
)
# torch's other modules are spelled like the functions they call.
_BY_NAME = {_spelled(name): rule for name, rule in FUNCTIONS.items() if name in _ENTRIES or name in _CHANNELS}
for _class in vars(nn).values():
    if isinstance(_class, type) and issubclass(_class, nn.Module) and _class not in MODULES:
        _rule = _BY_NAME.get(_class.__name__.lower())
        if _rule is not None:
            MODULES[_class] = _rule


def symmetric_padding(conv: Any) -> tuple[int, ...] | None:
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
