"""Rules for layers whose arguments say which axes they work along: those axes are read whole, any other may be cut."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from convoy.layout.layout import Shape
from convoy.model.graph import Cut
from convoy.model.layer_rules import Call, Known, Rule, beside
from convoy.model.operation import BatchExtent, Operation, PartExtent, Ref


def join(call: Call) -> Known | None:
    """Several tensors entry by entry, as broadcasting has it; with numbers alone, each entry of the one for itself."""
    if len(call.inputs) > 1:
        return Known("join")
    return Known("elementwise") if call.inputs[0] == call.output else None


def _cat(call: Call) -> Known | None:
    axis = call.argument(1, "dim", call.argument(1, "axis", 0))
    return Known("cat", axis=axis % len(call.output)) if isinstance(axis, int) else None


def _stack(call: Call) -> Known | None:
    new = call.argument(1, "dim", 0)
    if not isinstance(new, int) or not all(call.batched) or not (new := new % len(call.output)):
        return None
    count = len(call.inputs)
    axes = range(1, len(call.inputs[0]))
    cuts = (Cut(a if a < new else a + 1, call.inputs[0][a], (a,) * count) for a in axes)
    return Known("parts", tuple(cuts))


# --- along some axes -------------------------------------------------------------------------------------------------


def _apart(call: Call, along: Iterable[int], parameters: Callable[[int], dict[str, int]] | None = None) -> Known | None:
    """Same shape in and out; every axis but those, and the batch, may be cut."""
    x, read = call.inputs[0], {a % len(call.inputs[0]) for a in along}
    if 0 in read or not call.batched[0] or any(call.batched[1:]) or x != call.output:
        return None
    free = (a for a in range(1, len(x)) if a not in read)
    own = parameters or (lambda _axis: {})
    return Known("parts", tuple(Cut(a, x[a], (a, *(None,) * (len(call.inputs) - 1)), own(a)) for a in free))


def _along(place: int, name: str, default: int | None = None) -> Rule:
    """softmax(x, dim) and its like."""

    def rule(call: Call) -> Known | None:
        value = call.argument(place, name, default) if call.module is None else getattr(call.module, name, default)
        if value is None and name == "dim":
            value = 0 if len(call.output) in (1, 3) else 1  # what softmax takes, with a warning
        # x.flip(2, 3) gives them one by one.
        axes = call.operation.args[1:] if name == "dims" and place == 1 and isinstance(value, int) else _tuple(value)
        return _apart(call, axes) if _whole_numbers(axes) else None

    return rule


def _softmax_2d(call: Call) -> Known | None:
    return _apart(call, (-3,)) if len(call.inputs[0]) == 4 else None


def _local_response(call: Call) -> Known | None:
    return _apart(call, (1,))


def _layer_norm(call: Call) -> Known | None:
    """Over the last axes; its parameters lie along those alone."""
    shape = (
        getattr(call.module, "normalized_shape", None)
        if call.module is not None
        else call.argument(1, "normalized_shape")
    )
    return _apart(call, range(-len(shape), 0)) if isinstance(shape, tuple | list) and shape else None


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _whole_numbers(values: tuple[Any, ...]) -> bool:
    return all(isinstance(v, int) and not isinstance(v, bool) for v in values)


def _reduction(call: Call) -> Known | None:
    """sum(x, dim), keepdim or not."""
    x, y = call.inputs[0], call.output
    along = _tuple(call.argument(1, "dim", call.argument(1, "axis")))
    if len(call.inputs) != 1 or not call.batched[0] or not _whole_numbers(along):
        return None
    axes = {a % len(x) for a in along}
    if 0 in axes:
        return None
    if _called(call) == "mean" and all(a >= 2 for a in axes):
        return Known("pool")
    kept = len(x) == len(y)
    free = [a for a in range(1, len(x)) if a not in axes]
    return Known("parts", tuple(Cut(a if kept else a - sum(r < a for r in axes), x[a], (a,)) for a in free))


def _called(call: Call) -> str:
    target = call.operation.target
    return target if isinstance(target, str) else getattr(target, "__name__", "")


# --- norms as functions ----------------------------------------------------------------------------------------------


def _group_norm(call: Call) -> Known | None:
    groups, x, operation = call.argument(1, "num_groups"), call.inputs[0], call.operation
    if not isinstance(groups, int) or len(operation.args) < 2:
        return None
    part = PartExtent(groups, 1, x[1])
    args = (operation.args[0], part, *operation.args[2:])
    changed = Operation(operation.call, operation.target, args, operation.kwargs)
    return Known("parts", (Cut(1, groups, beside(call, 1, x[1])),), operation=changed)


def _per_channel(call: Call) -> Known | None:
    """One function for every channel, with a parameter for each: prelu, instance_norm."""
    x = call.inputs[0]
    if len(x) < 2 or not call.batched[0] or any(call.batched[1:]):
        return None
    if _called(call) == "instance_norm" and call.input_at(1, "running_mean") is not None:
        return None  # it would note in them what the batch was like
    return Known("parts", (Cut(1, x[1], beside(call, 1, x[1])),))


# --- other shapes of the same numbers --------------------------------------------------------------------------------


def _permuted(call: Call) -> Known | None:
    """permute, transpose, movedim: an axis lies elsewhere."""
    x, name, rest = call.inputs[0], _called(call), call.operation.args[1:]
    numbers = rest[0] if len(rest) == 1 and isinstance(rest[0], tuple | list) else rest
    numbers = numbers or call.operation.kwargs.get("dims", ())
    if len(call.inputs) != 1 or not call.batched[0] or not _whole_numbers(tuple(numbers)) or call.module is not None:
        return None
    try:
        # Where each axis goes, as torch itself says; an axis of its own length each, so that none is mistaken.
        own = torch.empty(tuple(range(2, len(x) + 2)), device="meta")
        moved = getattr(torch, name)(own, *([tuple(numbers)] if name == "permute" else rest), **call.operation.kwargs)
    except (RuntimeError, TypeError, IndexError):
        return None
    order = [n - 2 for n in moved.shape]
    return Known("parts", tuple(Cut(to, x[a], (a,)) for to, a in enumerate(order) if a)) if order[0] == 0 else None


def _reshaped(call: Call) -> Known | None:
    """view, reshape, unflatten: an axis that becomes several, or the first of several that become one, may be cut."""
    x, y, args = call.inputs[0], call.output, call.operation.args
    retyped = any(isinstance(a, torch.dtype) for a in (*args, *call.operation.kwargs.values()))
    if len(call.inputs) != 1 or not call.batched[0] or retyped:
        return None
    if len(y) == 2 and len(x) >= 2 and _called(call) not in ("squeeze", "unsqueeze"):
        # With the batch as first axis before and after, there is only one way to end with one more axis. `x.view(n, 4096)`,
        # too: a local part of a split layer has another width than the one in the source.
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
    """The cuts of a reshape: axes of both that cover the same numbers, of which the outermost may be cut."""
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
        parts = math.gcd(x[first], y[second])
        if parts > 1:
            yield Cut(second, parts, (first,))


def _flattened(call: Call) -> Known | None:
    m: Any = call.module
    return _reshaped(call) if m is None or not isinstance(m, nn.Flatten) or m.start_dim > 0 else None


def _blocks(call: Call) -> Known | None:
    """Blocks of channels become blocks of channels, in the same order: pixel shuffle, unfold."""
    x, y = call.inputs[0], call.output
    name = _called(call) if call.module is None else type(call.module).__name__.lower()
    axes = {"unfold": (4, 3), "fold": (3, 4)}.get(name, (4, 4))  # x.unfold(1, 3, 2) is another function
    if len(call.inputs) != 1 or not call.batched[0] or (len(x), len(y)) != axes:
        return None
    parts = min(x[1], y[1])
    return Known("parts", (Cut(1, parts, (1,)),)) if x[1] % parts == 0 and y[1] % parts == 0 else None


def _pad(call: Call) -> Known | None:
    widths, x = call.argument(1, "pad"), call.inputs[0]
    if not isinstance(widths, tuple | list) or len(call.inputs) != 1 or not call.batched[0]:
        return None
    padded = [len(x) - 1 - i // 2 for i, n in enumerate(widths) if n]
    if call.argument(2, "mode", "constant") != "constant":
        padded = [len(x) - 1 - i for i in range(len(widths) // 2)]
    if 0 in padded:
        return None
    if all(a >= 2 for a in padded):
        return Known("pool") if len(x) > 2 else None
    return Known("parts", tuple(Cut(a, x[a], (a,)) for a in range(1, len(x)) if a not in padded))


def _item(call: Call) -> Known | None:
    """x[:, :, ::2]: the axes that are taken whole may be cut."""
    x, given = call.inputs[0], call.argument(1, "index")
    index = given if isinstance(given, tuple) else (given,)
    if len(call.inputs) != 1 or not call.batched[0] or not all(_plain_index(i) for i in index):
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


def _plain_index(i: Any) -> bool:
    if isinstance(i, slice):
        return all(n is None or isinstance(n, int) for n in (i.start, i.stop, i.step))
    return i is None or i is Ellipsis or (isinstance(i, int) and not isinstance(i, bool))


# --- products --------------------------------------------------------------------------------------------------------


def _einsum(call: Call) -> Known | None:
    equation = call.argument(0, "equation")
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    read, _, written = equation.replace(" ", "").partition("->")
    operands: Any = call.operation.args[1:]
    operands = operands[0] if len(operands) == 1 and isinstance(operands[0], tuple | list) else operands
    letters: list[str] = [""] * len(call.inputs)
    for operand, own in zip(operands, read.split(","), strict=True):
        if not isinstance(operand, Ref) or letters[operand.index] not in ("", own) or len(set(own)) < len(own):
            return None
        letters[operand.index] = own
    return _product(call, letters, written)


def _product(call: Call, letters: Sequence[str], written: str) -> Known | None:
    """Products of tensors whose axes have letters, summed over those that are not written."""
    batch = written[0]
    if not all(letters) or any(
        (own[0] == batch) != batched for own, batched in zip(letters, call.batched, strict=True)
    ):
        return None
    if any(batch in own[1:] for own in letters):
        return None
    cuts = []
    for axis, letter in enumerate(written[1:], 1):
        axes = tuple(own.find(letter) if letter in own else None for own in letters)
        cuts.append(Cut(axis, call.output[axis], axes))
    return Known("parts", tuple(cuts))


def _matmul(call: Call) -> Known | None:
    args = call.operation.args
    if len(call.inputs) != 2 or tuple(args[:2]) != (Ref(0), Ref(1)):
        return None
    x, w = call.inputs
    if call.batched == (True, False) and len(w) == 2:
        # As a fully connected layer: the columns are filters.
        axis = len(call.output) - 1
        return Known("filters", (Cut(axis, call.output[axis], (None, 1)),)) if len(x) > 1 else None
    if call.batched != (True, True) or len(x) != len(w) or len(x) < 3 or x[1:-2] != w[1:-2]:
        return None
    outer = "bcdefgh"[: len(x) - 2]
    return _product(call, [f"{outer}ik", f"{outer}kj"], f"{outer}ij")


def _attention(call: Call) -> Known | None:
    """scaled_dot_product_attention of (N, heads, positions, entries): each head for itself."""
    q, y = call.inputs[0], call.output
    grouped = call.argument(8, "enable_gqa", False)
    order = [call.input_at(place, name) for place, name in enumerate(("query", "key", "value"))]
    if grouped or len(q) < 4 or None in order or not all(call.batched[i] for i in order if i is not None):
        return None
    cuts = []
    for axis in range(1, len(q) - 2):
        axes = []
        for shape, batched in zip(call.inputs, call.batched, strict=True):
            own = axis - (len(y) - len(shape))
            axes.append(own if own >= int(batched) and shape[own] == y[axis] else None)
        cuts.append(Cut(axis, y[axis], tuple(axes)))
    own_all = all(cut.inputs[i] is not None for cut in cuts for i in order if i is not None)
    return Known("parts", tuple(cuts)) if own_all else None


def _sampled(call: Call) -> Known | None:
    """grid_sample(x, grid): every channel at the same places."""
    if len(call.inputs) != 2 or call.operation.args[:1] != (Ref(0),):
        return None
    return Known("parts", (Cut(1, call.inputs[0][1], (1, None)),)) if call.batched[0] else None


# --- convolutions of a weight that something computes ----------------------------------------------------------------


def _with_weight(call: Call) -> Known | None:
    """conv2d(x, w) and linear(x, w), with w a parameter or made from parameters: filters are those of w."""
    weight, bias = call.input_at(1, "weight"), call.input_at(2, "bias")
    if call.operation.args[:1] != (Ref(0),) or not call.batched[0] or weight is None or any(call.batched[1:]):
        return None
    name, x, y = _called(call), call.inputs[0], call.output
    linear, transposed = name == "linear", name.startswith("conv_transpose")
    if (linear and len(y) < 2) or (not linear and len(x) != len(call.inputs[weight])):
        return None
    place = 6  # of `groups`, in both kinds of convolution
    groups = 1 if linear else call.argument(place, "groups", 1)
    if not isinstance(groups, int):
        return None
    axis = len(y) - 1 if linear else 1
    axes: list[int | None] = [None] * len(call.inputs)
    axes[weight] = 1 if transposed and groups == 1 else 0
    if bias is not None:
        axes[bias] = 0
    if groups == 1:
        return Known("filters", (Cut(axis, y[axis], tuple(axes)),))
    axes[0] = 1
    args, kwargs = list(call.operation.args), dict(call.operation.kwargs)
    part = PartExtent(groups, 1, x[1])
    if len(args) > place:
        args[place] = part
    else:
        kwargs["groups"] = part
    changed = Operation(call.operation.call, call.operation.target, tuple(args), kwargs)
    return Known("filters", (Cut(1, groups, tuple(axes)),), groups, operation=changed)


_DIMS = ("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "logcumsumexp")
_SUMS = ("sum", "mean", "amax", "amin", "var", "std", "prod", "logsumexp", "any", "all")
_CONVOLVED = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear")

RULES: dict[str, Rule] = {
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    "stack": _stack,
    **dict.fromkeys(_DIMS, _along(1, "dim")),
    "normalize": _along(2, "dim", 1),
    "flip": _along(1, "dims"),
    "roll": _along(2, "dims"),
    **dict.fromkeys(_SUMS, _reduction),
    **dict.fromkeys(("layer_norm", "rms_norm"), _layer_norm),
    "local_response_norm": _local_response,
    "group_norm": _group_norm,
    **dict.fromkeys(("prelu", "instance_norm"), _per_channel),
    **dict.fromkeys(("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis"), _permuted),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"), _reshaped),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle", "unfold", "fold"), _blocks),
    "pad": _pad,
    "getitem": _item,
    "einsum": _einsum,
    **dict.fromkeys(("matmul", "bmm"), _matmul),
    "scaled_dot_product_attention": _attention,
    "grid_sample": _sampled,
    **dict.fromkeys(_CONVOLVED, _with_weight),
}
"""Functions and methods by name."""

MODULE_RULES: dict[type[nn.Module], Rule] = {
    **dict.fromkeys((nn.Softmax, nn.LogSoftmax, nn.Softmin), _along(1, "dim")),
    nn.Softmax2d: _softmax_2d,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _layer_norm,
    nn.LocalResponseNorm: _local_response,
    **dict.fromkeys((nn.Flatten, nn.Unflatten), _flattened),
    **dict.fromkeys((nn.PixelShuffle, nn.PixelUnshuffle, nn.Unfold, nn.Fold), _blocks),
}
