"""register_layer: along which axes a layer may be cut, for torch's own layers and for yours.

A rule looks at one call of a model and says how it may be cut, or nothing: then the layer is split by samples at most.
`convoy.model.tracing.kinds` registers torch's layers in the way that anybody registers theirs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor, nn

from convoy.errors import InputError
from convoy.layout.layout import Shape
from convoy.model.graph import Cut, Kind
from convoy.model.operation import Operation, PartExtent, Ref


@dataclass(frozen=True, slots=True)
class Call:
    """One call in a model, as a rule sees it.

    Attributes:
        operation: what is called; its arguments have `Ref(i)` for `inputs[i]`.
        module: None where it is a function or a method.
        inputs: shapes of its input tensors, for any number of samples.
        batched: whether the first axis of each is the batch; a parameter's is not.
        output: shape of the tensor it gives, whose first axis is the batch.
    """

    operation: Operation
    module: nn.Module | None
    inputs: tuple[Shape, ...]
    batched: tuple[bool, ...]
    output: Shape

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """An argument of a function or method by its place (the tensor it works on is number 0) or its name."""
        args = self.operation.args
        return args[place] if len(args) > place else self.operation.kwargs.get(name, default)

    def input_at(self, place: int, name: str) -> int | None:
        """Which of the inputs an argument is; None where it is none of them."""
        value = self.argument(place, name)
        return value.index if isinstance(value, Ref) else None


@dataclass(frozen=True, slots=True)
class Known:
    """What a rule says of a call.

    Attributes:
        kind, groups, axis, statistics, cuts: as in `convoy.model.graph.Layer`.
        operation: in the place of the traced one, with numbers that go with the part; None: as traced.
        trusted: False: the numbers of two parts are compared with those of the whole when a model is traced.
        like: the module class that computes the same, where a rule was registered so.
        whole_batch: why its samples must stay together; empty where each is computed for itself.
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


Rule = Callable[[Call], Known | None]
Splits = Literal["samples", "entries", "channels", "filters"]

MODULES: dict[type[nn.Module], Rule] = {}
"""By exact class: a subclass may compute something else."""
FUNCTIONS: dict[str, Rule] = {}
"""Functions and methods of torch, by name: most are there as both."""
OWN_FUNCTIONS: dict[Any, Rule] = {}
"""Other people's functions, by themselves."""


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
    """Tell Convoy how a layer may be shared out other than by samples: see the page "Teach Convoy your layer".

    When a model is traced, two parts of the layer are computed and compared with the whole, and what does not agree is refused.
    Every process of a job must register the same, before it makes plans or distributes: plans are for a model with these rules.

    Args:
        layer: a module class (exactly this class), or a function that torch.fx sees as one call (an operator of your own).
        splits: "samples": every sample for itself, and no more is known; "entries": every number for itself; "channels":
            every channel of its input for itself, and the channels of the output follow; "filters": every channel of its
            output for itself, from the whole input. Or a function that takes a `Call` and returns `Known`, or None.
        like: in place of `splits`: this class computes exactly what that registered class computes.
        axis: of input and output, with the batch as axis 0, on which channels or filters lie.
        groups: name of the module's attribute that counts groups: channels of one group stay together, and the number goes with
            the part.
        parameters: of each parameter and buffer that is split alike, the axis; the others are copies. None: the first axis of
            all that have as many entries there as there are channels.
        attributes: names of further whole numbers of the module that go with the part, such as "out_channels".

    Raises:
        InputError: a layer that is registered already, or neither or both of `splits` and `like`.
    """
    what = getattr(layer, "__name__", str(layer))
    if (splits is None) == (like is None):
        raise InputError(f"register_layer({what}): give either splits or like")
    is_module = isinstance(layer, type) and issubclass(layer, nn.Module)
    table: dict[Any, Rule] = MODULES if is_module else OWN_FUNCTIONS
    if layer in table:
        raise InputError(f"register_layer({what}): it is registered already; register a subclass, or leave it")
    if like is not None:
        if like not in MODULES or not is_module:
            raise InputError(f"register_layer({what}, like={like.__name__}): like must be a registered module class")
        table[layer] = _distrusted(MODULES[like], like)
        return
    if callable(splits):
        table[layer] = _distrusted(splits)
        return
    if splits not in _RULES:
        raise InputError(f"register_layer({what}): unknown splits {splits!r}: choose one of {', '.join(_RULES)}")
    table[layer] = _distrusted(_RULES[splits](_Given(what, axis, groups, parameters, attributes)))


def rule_of(module: nn.Module | None, operation: Operation) -> Rule | None:
    """The rule for a call."""
    if module is not None:
        return MODULES.get(type(module))
    target = operation.target
    if isinstance(target, str):
        return FUNCTIONS.get(target)
    home = (getattr(target, "__module__", None) or "torch").partition(".")[0]
    if home in ("torch", "_operator", "operator", "math"):
        return OWN_FUNCTIONS.get(target) or FUNCTIONS.get(getattr(target, "__name__", ""))
    return OWN_FUNCTIONS.get(target)


def is_registered(module: nn.Module) -> bool:
    """Whether a module is one layer because its class was registered."""
    return type(module) in MODULES


def _distrusted(rule: Rule, like: type[nn.Module] | None = None) -> Rule:
    def checked(call: Call) -> Known | None:
        known = rule(call)
        return None if known is None else replace(known, trusted=False, like=like)

    return checked


# --- the three ways, and what each needs -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Given:
    what: str
    axis: int = 1
    groups: str | None = None
    parameters: Mapping[str, int] | None = None
    attributes: tuple[str, ...] = field(default_factory=tuple)

    def axes(self, call: Call, parts: int, extents: tuple[int, ...]) -> dict[str, int]:
        """The axis of each parameter and buffer that is cut into so many parts."""
        tensors = dict(_tensors(call.module))
        if self.parameters is None:
            return {
                key: 0 for key, t in tensors.items() if t.dim() and t.shape[0] in extents and t.shape[0] % parts == 0
            }
        found = {}
        for key, axis in self.parameters.items():
            if key not in tensors:
                continue  # a bias that is switched off
            shape = tuple(tensors[key].shape)
            if not -len(shape) <= axis < len(shape) or shape[axis] % parts:
                raise InputError(
                    f"register_layer({self.what}): axis {axis} of its {key!r} of shape {shape} is not {parts} equal parts, "
                    "as its channels or groups are: correct parameters"
                )
            if shape[axis] > 1 or parts == 1:
                found[key] = axis % len(shape)
        return found

    def following(self, call: Call, names: tuple[str, ...], of: int | str, axis: int, extent: int) -> Operation | None:
        """The operation with those numbers of the module that go with the part."""
        numbers = {name: PartExtent(int(getattr(call.module, name)), axis, extent, of) for name in names}
        operation = call.operation
        return (
            Operation(operation.call, operation.target, operation.args, operation.kwargs, numbers) if numbers else None
        )

    def extent(self, call: Call, name: str | None) -> int | None:
        return None if name is None else int(getattr(call.module, name))


def _tensors(module: nn.Module | None) -> Iterator[tuple[str, Tensor]]:
    if module is not None:
        yield from module.named_parameters()
        yield from module.named_buffers()


def beside(call: Call, axis: int | None, extent: int) -> tuple[int | None, ...]:
    """For each input the axis to cut: of the first `axis`; of parameters given so, the first if it has `extent` entries."""
    others = (
        0 if not batched and shape and shape[0] == extent else None
        for shape, batched in zip(call.inputs[1:], call.batched[1:], strict=True)
    )
    return (axis, *others)


def _samples(_given: _Given) -> Rule:
    return lambda _call: Known("opaque")


def _entries(_given: _Given) -> Rule:
    def rule(call: Call) -> Known | None:
        return Known("elementwise") if len(call.inputs) == 1 and call.inputs[0] == call.output else None

    return rule


def _channels(given: _Given) -> Rule:
    def rule(call: Call) -> Known | None:
        x, y = call.inputs[0], call.output
        if not call.batched[0] or any(call.batched[1:]) or not -min(len(x), len(y)) <= given.axis < min(len(x), len(y)):
            return None
        read, written = given.axis % len(x), given.axis % len(y)
        if not read or not written:
            return None
        parts = given.extent(call, given.groups) or min(x[read], y[written])
        if not parts or x[read] % parts or y[written] % parts:
            return None
        parameters = given.axes(call, parts, (x[read], y[written]))
        names = (*((given.groups,) if given.groups else ()), *given.attributes)
        cut = Cut(written, parts, beside(call, read, x[read]), parameters)
        return Known("parts", (cut,), operation=given.following(call, names, 0, read, x[read]))

    return rule


def _filters(given: _Given) -> Rule:
    def rule(call: Call) -> Known | None:
        x, y = call.inputs[0], call.output
        if (
            call.module is None
            or len(call.inputs) != 1
            or not -len(y) <= given.axis < len(y)
            or not given.axis % len(y)
        ):
            return None
        read, written = given.axis % len(x), given.axis % len(y)
        groups = given.extent(call, given.groups) or 1
        parameters = given.axes(call, groups if groups > 1 else y[written], (y[written],))
        if groups > 1:
            names = (given.groups or "", *given.attributes)
            cut = Cut(written, groups, (read,), parameters)
            following = given.following(call, names, 0, read, x[read])
        else:
            cut = Cut(written, y[written], (None,), parameters)
            if given.attributes and not parameters:
                return None
            key = next(iter(parameters), "")
            whole = dict(_tensors(call.module))[key].shape[parameters[key]] if key else 1
            following = given.following(call, given.attributes, key, parameters.get(key, 0), whole)
        return Known("filters", (cut,), groups, operation=following)

    return rule


_RULES: dict[str, Callable[[_Given], Rule]] = {
    "samples": _samples,
    "entries": _entries,
    "channels": _channels,
    "filters": _filters,
}


def builtin(splits: Splits, **given: Any) -> Rule:
    """One of the three ways as a rule of torch's own layers, which need no check."""
    return _RULES[splits](_Given("torch", **given))
