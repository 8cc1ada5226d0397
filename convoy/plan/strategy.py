"""Strategies: what one layer does, and the table of what each kind of layer lets pass.

A strategy and a layer give a *placement*: the layouts the layer takes, the layout it gives, how its parameters lie. Layers
without a strategy of their own follow the layout of their first input where the table allows it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from convoy.errors import PlanError
from convoy.model.graph import Graph, Kind, Layer
from convoy.sharding import shares as share_rules
from convoy.sharding.layout import Layout, OnOne, Partial, Replicated, Split, holders
from convoy.sharding.shares import Shares


@dataclass(frozen=True, slots=True)
class Batch:
    """Each device computes its samples. Weights are copies; their gradients are summed."""

    shares: Shares
    name: ClassVar[str] = "batch"


@dataclass(frozen=True, slots=True)
class Filter:
    """Each device computes its output filters (or features) of every sample, from copies of the input."""

    shares: Shares
    name: ClassVar[str] = "filter"


@dataclass(frozen=True, slots=True)
class Channel:
    """Each device computes the part that its input channels (or features) contribute; the output is a pending sum."""

    shares: Shares
    name: ClassVar[str] = "channel"


@dataclass(frozen=True, slots=True)
class One:
    """One device computes the layer; the others wait or do something else."""

    device: int
    name: ClassVar[str] = "one"


Strategy = Batch | Filter | Channel | One
STRATEGIES: tuple[str, ...] = ("batch", "filter", "channel", "one")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a layer reads, computes and keeps its parameters.

    Attributes:
        takes: layout of each input.
        gives: layout of the output.
        parameters: layout of each parameter, by its key within the layer.
        note: what a person should know, e.g. that the layer could not keep a split.
    """

    takes: tuple[Layout, ...]
    gives: Layout
    parameters: Mapping[str, Layout] = field(default_factory=dict)
    note: str = ""


def check(layer: Layer, strategy: Strategy, batch: int, devices: int) -> None:
    """Refuse a strategy that does not fit a layer.

    Raises:
        PlanError: wrong shares, a device that is not there, or a layer that cannot be split this way.
    """
    what = f"layer {layer.name!r}, strategy {strategy.name!r}"
    match strategy:
        case One(device):
            if not 0 <= device < devices:
                raise PlanError(f"{what}: there is no device {device}: name one of 0 to {devices - 1}")
            return
        case Batch(shares):
            share_rules.check(shares, batch, devices, what)
            if not layer.per_sample:
                raise PlanError(f"{what}: {layer.reason}: give it the strategy 'one'")
            return
    if layer.shared:
        raise PlanError(
            f"{what}: its parameters belong to another layer too, so they cannot be split: use batch or one"
        )
    if isinstance(strategy, Channel):
        if not layer.weighted or layer.groups > 1:
            raise PlanError(
                f"{what}: only Linear and convolutions of one group sum over channels: use batch, filter or one"
            )
        share_rules.check(strategy.shares, layer.channels_in, devices, what)
        return
    _check_filter(layer, strategy.shares, devices, what)


def _check_filter(layer: Layer, shares: Shares, devices: int, what: str) -> None:
    if layer.weighted:
        share_rules.check(shares, layer.channels_out, devices, what)
        per_group = layer.channels_out // layer.groups
        if layer.groups > 1 and any(share % per_group for share in shares):
            raise PlanError(f"{what}: shares {shares} cut a group: each must be a multiple of {per_group} filters")
    elif layer.kind not in _FOLLOWS or len(shares) != devices:
        raise PlanError(f"{what}: a {layer.kind} layer cannot keep a split of its channels: use batch or one")


def feature_axis(layer: Layer) -> int:
    """The axis that `filter` splits, counted with the batch axis: 1 for convolutions, the last one for a Linear."""
    return len(layer.shape) if layer.kind == "linear" else 1


def place(graph: Graph, layer: Layer, strategy: Strategy, batch: int, devices: int) -> Placement:
    """Placement of a layer that has a strategy of its own, for a global batch of `batch` samples.

    Raises:
        PlanError: the layer cannot keep this split (a concatenation along the split axis, say).
    """
    match strategy:
        case Batch(shares):
            return _uniform(graph, layer, Split(0, share_rules.rescale(shares, batch)), devices)
        case One(device):
            return _uniform(graph, layer, OnOne(device), devices)
        case Channel(shares):
            active = share_rules.holders(shares)
            parameters: dict[str, Layout] = {"weight": Split(1, shares), "bias": OnOne(active[0])}
            return Placement((Split(feature_axis(layer), shares),), Partial(active), _only(layer, parameters))
        case Filter(shares) if layer.weighted and layer.groups == 1:
            split = Split(0, shares)
            takes = (Replicated(share_rules.holders(shares)),)
            return Placement(takes, Split(feature_axis(layer), shares), _only(layer, {"weight": split, "bias": split}))
        case Filter(shares):
            leading = shares
            if not layer.weighted:
                axis = graph[layer.inputs[0]] if layer.kind == "flatten" else layer
                what = f"layer {layer.name!r}, strategy 'filter'"
                share_rules.check(shares, (*axis.shape, 0)[0], devices, what)
            else:
                per_group_in, per_group_out = layer.channels_in // layer.groups, layer.channels_out // layer.groups
                leading = tuple(share // per_group_out * per_group_in for share in shares)
            placed = follow(graph, layer, Split(1, leading), devices)
            if placed is None:
                raise PlanError(f"layer {layer.name!r} cannot keep a split of its channels: use batch or one")
            return placed


def follow(graph: Graph, layer: Layer, leading: Layout, devices: int) -> Placement | None:
    """Placement of a layer whose first input lies in `leading`; None where it must be moved first."""
    match leading:
        case Partial():
            return None
        case Split(axis, _) if axis > 0:
            rule = _FOLLOWS.get(layer.kind)
            return rule(graph, layer, leading) if rule is not None and not layer.shared else None
        case Split() if not layer.per_sample or (layer.kind == "cat" and layer.axis == 0):
            return None
        case Replicated() if layer.random:
            return None
    return _uniform(graph, layer, leading, devices)


def parameter_holders(layer: Layer, gives: Layout, devices: int) -> tuple[int, ...]:
    """Who keeps copies of the parameters of a layer whose samples are shared out."""
    return tuple(range(devices)) if layer.shared or layer.kind == "parameter" else holders(gives)


def _uniform(graph: Graph, layer: Layer, layout: Layout, devices: int) -> Placement:
    """Whole samples in, whole samples out: batch split, one device, or copies."""
    everyone = Replicated(tuple(range(devices)))
    if not layer.batched:
        return Placement((everyone,) * len(layer.inputs), everyone, dict.fromkeys(layer.parameters, everyone))
    note = ""
    if layer.shared and _notes_the_batch(layer) and not isinstance(layout, Split):
        layout, note = everyone, "its running statistics serve several calls, so every device computes it"
    takes = tuple(layout if graph[name].batched else everyone for name in layer.inputs)
    owners = parameter_holders(layer, layout, devices)
    kept: Layout = OnOne(owners[0]) if isinstance(layout, OnOne) and not layer.shared else Replicated(owners)
    return Placement(takes, layout, dict.fromkeys(layer.parameters, kept), note)


def _notes_the_batch(layer: Layer) -> bool:
    """Whether a call changes its buffers: the running statistics of a batch norm."""
    return (layer.statistics or not layer.per_sample) and any(p.buffer for p in layer.parameters.values())


def _only(layer: Layer, parameters: Mapping[str, Layout]) -> dict[str, Layout]:
    return {key: parameters[key] for key in layer.parameters}


# --- The table: what a tensor split along channels may pass through without moving -----------------------------------


def _same(_graph: Graph, layer: Layer, leading: Split) -> Placement | None:
    return Placement((leading,), leading) if leading.axis <= len(layer.shape) else None


def _per_channel(_graph: Graph, _layer: Layer, leading: Split) -> Placement | None:
    return Placement((leading,), leading) if leading.axis == 1 else None


def _flatten(graph: Graph, layer: Layer, leading: Split) -> Placement | None:
    if leading.axis != 1:
        return None
    behind = layer.shape[0] // graph[layer.inputs[0]].shape[0]
    return Placement((leading,), Split(1, tuple(share * behind for share in leading.shares)))


def _batch_norm(_graph: Graph, layer: Layer, leading: Split) -> Placement | None:
    if leading.axis != 1:
        return None
    # num_batches_tracked has no channels: every device that holds some counts for itself.
    counts = Replicated(holders(leading))
    parameters = {key: Split(0, leading.shares) if p.shape else counts for key, p in layer.parameters.items()}
    return Placement((leading,), leading, parameters)


def _grouped(_graph: Graph, layer: Layer, leading: Split) -> Placement | None:
    """A convolution of several groups stays split where the split falls between groups (depthwise: always)."""
    per_group_in, per_group_out = layer.channels_in // layer.groups, layer.channels_out // layer.groups
    if layer.groups == 1 or leading.axis != 1 or any(share % per_group_in for share in leading.shares):
        return None
    shares = tuple(share // per_group_in * per_group_out for share in leading.shares)
    split = Split(0, shares)
    return Placement((leading,), Split(1, shares), _only(layer, {"weight": split, "bias": split}))


def _join(graph: Graph, layer: Layer, leading: Split) -> Placement | None:
    takes: list[Layout] = []
    axes, axis = len(layer.shape) + 1, leading.axis
    if axis >= axes:
        return None
    for name in layer.inputs:
        shape = graph[name].batch_shape(1)
        own = axis - (axes - len(shape))  # axes are aligned from the right, as in broadcasting
        if own < 0 or shape[own] == 1:
            takes.append(Replicated(holders(leading)) if graph[name].batched else _everyone(leading))
        elif shape[own] == sum(leading.shares) and layer.batch_shape(1)[axis] == shape[own]:
            takes.append(Split(own, leading.shares))
        else:
            return None
    return Placement(tuple(takes), leading)


def _everyone(leading: Split) -> Replicated:
    return Replicated(tuple(range(len(leading.shares))))


def _cat(_graph: Graph, layer: Layer, leading: Split) -> Placement | None:
    return Placement((leading,) * len(layer.inputs), leading) if leading.axis != layer.axis else None


_FOLLOWS: dict[Kind, Callable[[Graph, Layer, Split], Placement | None]] = {
    "elementwise": _same,
    "pool": _per_channel,
    "flatten": _flatten,
    "batch_norm": _batch_norm,
    "conv": _grouped,
    "join": _join,
    "cat": _cat,
}
