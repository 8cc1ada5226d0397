"""Registers rules that return along which axes a layer can be cut, for torch's layers and user layers (`register_layer`).

A rule gets one call of a model and returns its possible cuts. A layer without a rule is split by samples at most.
`convoy.model.tracing.supported_layers` registers torch's layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from convoy.errors import InputError
from convoy.layout.layout import Shape
from convoy.model.graph import Cut, Kind
from convoy.model.operation import Operation, PartExtent, Ref
from convoy.model.windows import Window


@dataclass(frozen=True, slots=True)
class Call:
    """One call in a model, the argument of a rule.

    Attributes:
        operation: the call; its arguments contain `Ref(i)` for `inputs[i]`.
        module: the called module; None for a function or method.
        inputs: shapes of the input tensors, for some number of samples.
        batched: per input, whether its first axis is the batch (not for a parameter).
        output: shape of the output tensor; the first axis is the batch.
    """

    operation: Operation
    module: nn.Module | None
    inputs: tuple[Shape, ...]
    batched: tuple[bool, ...]
    output: Shape

    @property
    def name(self) -> str:
        """Name of the function or method, or of the module's class in lower case."""
        if self.module is not None:
            return type(self.module).__name__.lower()
        target = self.operation.target
        return target if isinstance(target, str) else getattr(target, "__name__", "")

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument of a function or method by position (0 is a method's own tensor) or name."""
        args = self.operation.args
        return args[place] if len(args) > place else self.operation.kwargs.get(name, default)

    def input_at(self, place: int, name: str) -> int | None:
        """Return which of `inputs` an argument is; None if it is no input tensor."""
        value = self.argument(place, name)
        return value.index if isinstance(value, Ref) else None


@dataclass(frozen=True, slots=True)
class Known:
    """The kind of a call, and its possible cuts.

    Attributes:
        kind, groups, axis, statistics, cuts, windows, normalised: as in `convoy.model.graph.Layer`.
        operation: replaces the traced operation by one with numbers that depend on the shard; None: no replacement.
        trusted: if False, tracing compares the results of two shards with those of the whole layer.
        like: the module class given to `register_layer(like=...)`.
        whole_batch: why the samples must stay together; empty if each is computed separately.
    """

    kind: Kind
    cuts: tuple[Cut, ...] = ()
    groups: int = 1
    axis: int = 0
    statistics: bool = False
    operation: Operation | None = None
    trusted: bool = True
    like: type[nn.Module] | None = None
    whole_batch: str = ""
    windows: tuple[Window, ...] = ()
    normalised: int = 0


Rule = Callable[[Call], Known | None]
Splits = Literal["samples", "entries", "channels"]

MODULES: dict[type[nn.Module], Rule] = {}
"""Module class -> rule. A subclass may compute something else, so it needs its own rule."""
FUNCTIONS: dict[str, Rule] = {}
"""Name -> rule, for functions and methods of torch: most exist as both."""
OTHER_FUNCTIONS: dict[Any, Rule] = {}
"""Function -> rule, for functions that are not torch's."""


def register_layer(
    layer: type[nn.Module] | Callable[..., Any],
    splits: Splits | Rule | None = None,
    *,
    like: type[nn.Module] | None = None,
    axis: int = 1,
    groups: str | None = None,
    parameters: Mapping[str, int] | None = None,
    attributes: tuple[str, ...] = (),
) -> None:
    """Declare how a layer can be split, other than by samples. See the page "Teach Convoy your layer".

    Tracing computes two shards of the layer, compares them with the whole layer, and refuses a layer that differs. All
    processes of a job must register the same rules before they make plans or distribute: plans depend on them.

    Args:
        layer: a module class (exactly this class), or a function that torch.fx records as one call (a custom operator).
        splits: "samples": each sample separately; "entries": each number separately; "channels": each channel of the
            input separately, with the same split of the output. Or a function that takes a `Call` and returns `Known` or
            None, for instance for a layer that computes each of its filters separately.
        like: instead of `splits`: a registered class that computes exactly the same.
        axis: the axis of channels in input and output; the batch is axis 0.
        groups: name of the module's attribute with the number of groups: channels of a group stay together, and the
            number is scaled with the shard.
        parameters: key -> axis, for each parameter and buffer that is split alike; the others are copied. None: the
            first axis of each that has one entry per channel there.
        attributes: names of further integer attributes that are scaled with the shard, such as "num_channels".

    Raises:
        InputError: the layer is registered already, or neither or both of `splits` and `like` are given.
    """
    name = getattr(layer, "__name__", str(layer))
    if (splits is None) == (like is None):
        raise InputError(f"register_layer({name}): give either splits or like")
    is_module = isinstance(layer, type) and issubclass(layer, nn.Module)
    table: dict[Any, Rule] = MODULES if is_module else OTHER_FUNCTIONS
    if layer in table:
        raise InputError(f"register_layer({name}): it is registered already; register a subclass, or leave it")
    if like is not None:
        if like not in MODULES or not is_module:
            raise InputError(f"register_layer({name}, like={like.__name__}): like must be a registered module class")
        rule = MODULES[like]
    elif callable(splits):
        rule = splits
    elif splits in ("samples", "entries", "channels"):
        rule = SplitRule(splits, axis, groups, parameters, attributes, name)
    else:
        raise InputError(
            f"register_layer({name}): unknown splits {splits!r}: choose one of samples, entries, channels, or a function"
        )

    def checked(call: Call) -> Known | None:
        known = rule(call)
        return None if known is None else replace(known, trusted=False, like=like)

    table[layer] = checked


def rule_of(module: nn.Module | None, operation: Operation) -> Rule | None:
    """Return the rule for a call."""
    if module is not None:
        return MODULES.get(type(module))
    target = operation.target
    if isinstance(target, str):
        return FUNCTIONS.get(target)
    home = (getattr(target, "__module__", None) or "torch").partition(".")[0]
    of_torch = home in ("torch", "_operator", "operator", "math")
    return OTHER_FUNCTIONS.get(target) or (FUNCTIONS.get(getattr(target, "__name__", "")) if of_torch else None)


def is_alone(call: Call) -> bool:
    """Return whether a call has exactly one input tensor, with a batch axis."""
    return len(call.inputs) == 1 and call.batched[0]


def cut_with_parameters(call: Call, axis: int | None, extent: int) -> tuple[int | None, ...]:
    """Return `Cut.inputs`: `axis` for the first input; axis 0 for parameters with `extent` entries there."""
    others = (
        0 if not batched and shape and shape[0] == extent else None
        for shape, batched in zip(call.inputs[1:], call.batched[1:], strict=True)
    )
    return (axis, *others)


@dataclass(frozen=True, slots=True)
class SplitRule:
    """The rule for one of the three `splits`; `register_layer` documents the fields."""

    splits: Splits
    axis: int = 1
    groups: str | None = None
    parameters: Mapping[str, int] | None = None
    attributes: tuple[str, ...] = ()
    name: str = "torch"

    def __call__(self, call: Call) -> Known | None:
        x, y = call.inputs[0], call.output
        if self.splits == "samples":
            return Known("opaque")
        if self.splits == "entries":
            return Known("elementwise") if len(call.inputs) == 1 and x == y else None
        has_axis = all(-len(shape) <= self.axis < len(shape) and self.axis % len(shape) for shape in (x, y))
        if not has_axis or not call.batched[0] or any(call.batched[1:]):
            return None
        read, written = self.axis % len(x), self.axis % len(y)
        parts = int(getattr(call.module, self.groups)) if self.groups else min(x[read], y[written])
        if not parts or x[read] % parts or y[written] % parts:
            return None
        parameters = self._axes(call, parts, (x[read], y[written]))
        cut = Cut(written, parts, cut_with_parameters(call, read, x[read]), parameters)
        names = (self.groups, *self.attributes) if self.groups else self.attributes
        scaled = {name: PartExtent(int(getattr(call.module, name)), read, x[read]) for name in names}
        return Known("parts", (cut,), operation=replace(call.operation, attributes=scaled) if scaled else None)

    def _axes(self, call: Call, parts: int, extents: tuple[int, ...]) -> dict[str, int]:
        """Return key -> axis, for each parameter and buffer that is cut into `parts` equal parts."""
        m = call.module
        tensors = {} if m is None else {**dict(m.named_parameters()), **dict(m.named_buffers())}
        if self.parameters is None:
            return {
                key: 0 for key, t in tensors.items() if t.dim() and t.shape[0] in extents and t.shape[0] % parts == 0
            }
        found = {}
        for key, axis in self.parameters.items():
            if key not in tensors:  # such as a bias that is switched off
                continue
            shape = tuple(tensors[key].shape)
            if not -len(shape) <= axis < len(shape) or shape[axis] % parts:
                raise InputError(
                    f"register_layer({self.name}): axis {axis} of its {key!r} of shape {shape} is not {parts} equal parts, "
                    "as its channels or groups are: correct parameters"
                )
            if shape[axis] > 1 or parts == 1:
                found[key] = axis % len(shape)
        return found
