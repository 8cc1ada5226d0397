"""Strategies: what one layer does, and the table of what each kind of layer lets pass.

A strategy and a layer give a *placement*: the layouts the layer takes, the layout it gives, how its parameters lie. Layers
without a strategy of their own follow the layout of their first input where the table allows it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from convoy.errors import PlanError
from convoy.layout import shares as share_rules
from convoy.layout.layout import Layout, OnOne, Partial, Replicated, Shape, Split, everywhere, holders
from convoy.layout.shares import Shares
from convoy.model.graph import Cut, Graph, Kind, Layer


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


Form = Literal["keep", "free"]


@dataclass(frozen=True, slots=True)
class Sharding:
    """Parameters that several devices use whole are kept in shares, each with its part of the optimizer's state.

    Attributes:
        shares: proportions, one per device; each parameter is cut along its first axis into whole rows by them. A device that
            computes nothing of the layer may keep a share.
        form: "keep": whole copies stay until they are gathered anew in the next step; "free": they are freed after use, in
            forward and in backward, and gathered in both.
    """

    shares: Shares
    form: Form = "keep"


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
            f"{what}: its parameters belong to another layer too, or have hooks, so they cannot be split: use batch or one"
        )
    if isinstance(strategy, Channel):
        if not layer.sums_channels:
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
    elif layer.kind not in _CUTS or len(shares) != devices:
        raise PlanError(f"{what}: a {layer.kind} layer cannot keep a split of its channels: use batch or one")


def check_sharding(layer: Layer, strategy: Strategy | None, shares: Shares, devices: int) -> None:
    """Refuse to keep the parameters of a layer in shares where that would not be exact, or means nothing.

    Args:
        strategy: the layer's own; None: it has none.

    Raises:
        PlanError: wrong shares, or a layer whose parameters cannot be kept so.
    """
    what = f"layer {layer.name!r}, in shares"
    share_rules.check(shares, sum(shares), devices, what)
    if not any(shares):
        raise PlanError(f"{what}: shares {shares} are all zero: give one device a share at least")
    if isinstance(strategy, Filter | Channel | One):
        raise PlanError(
            f"{what}: its strategy is {strategy.name!r}, so no device uses a copy: give it the strategy 'batch', or take it out"
        )
    reason = _why_whole(layer)
    if reason:
        raise PlanError(f"{what}: {reason}, so every device keeps copies: take it out of in_shares")


def can_shard(layer: Layer) -> bool:
    """Whether the parameters of a layer may be kept in shares where several devices use them whole."""
    return not _why_whole(layer)


def _why_whole(layer: Layer) -> str:
    if not any(p.trainable and p.shape for p in layer.parameters.values()):
        return "it has no parameter that is trained and has an axis"
    if layer.shared:
        return "its parameters belong to another layer too, or have hooks"
    if layer.kind == "opaque" or layer.alone or layer.notes or not layer.batched:
        return f"it is {layer.kind} (Python of its own may use its parameters or not, or change them)"
    return ""


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
            axis = 0 if layer.kind == "conv_transpose" else 1
            parameters: dict[str, Layout] = {"weight": Split(axis, shares), "bias": OnOne(active[0])}
            placed = Placement((Split(layer.feature_axis, shares),), Partial(active))
            return replace(placed, parameters={key: parameters[key] for key in layer.parameters})
        case Filter(shares):
            what = f"layer {layer.name!r}, strategy 'filter'"
            cut = next((cut for cut in cuts(graph, layer) if cut.axis == layer.feature_axis), None)
            # Of what is flattened, the channels before are counted.
            counted = graph[layer.inputs[0]] if layer.kind == "flatten" else layer
            extent = layer.channels_out if layer.weighted else (*counted.shape, 0)[0]
            share_rules.check(shares, extent, devices, what)
            units = _units(shares, extent, cut.parts) if cut is not None else None
            if cut is None or units is None:
                raise PlanError(f"layer {layer.name!r} cannot keep a split of its channels: use batch or one")
            return _along(graph, layer, cut, units)


def follow(graph: Graph, layer: Layer, leading: Layout, devices: int) -> Placement | None:
    """Placement of a layer whose first batched input lies in `leading`; None where that must be moved first."""
    match leading:
        case Partial():
            return None
        case Split(axis, shares) if axis > 0:
            return None if layer.shared else _kept(graph, layer, axis, shares)
        case Split() if not layer.per_sample or (layer.kind == "cat" and layer.axis == 0):
            return None
        case Replicated() if layer.random or (layer.notes and not layer.each):
            return None
    return _uniform(graph, layer, leading, devices)


def _kept(graph: Graph, layer: Layer, axis: int, shares: Shares) -> Placement | None:
    """The layer on the parts of its first batched input that devices have already."""
    first = next(i for i, name in enumerate(layer.inputs) if graph[name].batched)
    extent = sum(shares)
    for cut in cuts(graph, layer):
        if cut.inputs[first] == axis and (units := _units(shares, extent, cut.parts)) is not None:
            return _along(graph, layer, cut, units)
    return None


def _units(shares: Shares, extent: int, parts: int) -> Shares | None:
    """How many whole parts each share is; None where one is cut."""
    entries = extent // parts if parts else 0
    if not entries or any(share % entries for share in shares):
        return None
    return tuple(share // entries for share in shares)


def _along(graph: Graph, layer: Layer, cut: Cut, units: Shares) -> Placement:
    """Each device computes so many of the parts of a cut."""
    holding = Replicated(share_rules.holders(units))
    everyone = everywhere(len(units))

    def split(axis: int, shape: Shape) -> Split:
        return Split(axis, tuple(count * (shape[axis] // cut.parts) for count in units))

    takes: list[Layout] = []
    for name, axis in zip(layer.inputs, cut.inputs, strict=True):
        source = graph[name]
        whole = holding if source.batched else everyone
        takes.append(whole if axis is None else split(axis, source.batch_shape(1)))
    parameters = {
        key: split(cut.parameters[key], p.shape) if key in cut.parameters else holding
        for key, p in layer.parameters.items()
    }
    return Placement(tuple(takes), split(cut.axis, layer.batch_shape(1)), parameters)


def parameter_holders(layer: Layer, gives: Layout, devices: int) -> tuple[int, ...]:
    """Who keeps copies of the parameters of a layer whose samples are shared out."""
    return tuple(range(devices)) if layer.shared or layer.kind == "parameter" else holders(gives)


def _uniform(graph: Graph, layer: Layer, layout: Layout, devices: int) -> Placement:
    """Whole samples in, whole samples out: batch split, one device, or copies."""
    everyone = everywhere(devices)
    if not layer.batched:
        return Placement((everyone,) * len(layer.inputs), everyone, dict.fromkeys(layer.parameters, everyone))
    note = ""
    if layer.everywhere:
        layout, note = everyone, layer.reason
    elif layer.each and len(holders(layout)) < devices:
        layout, note = everyone, "a call changes its state, so every device computes it"
    elif layer.shared and _changes_what_it_shares(layer) and not isinstance(layout, Split):
        layout, note = everyone, "it changes what other layers or hooks use, so every device computes it"
        if layer.random:
            raise PlanError(f"layer {layer.name!r}: {note}, and draws random numbers: train this model on one device")
    takes = tuple(layout if graph[name].batched else everyone for name in layer.inputs)
    owners = parameter_holders(layer, layout, devices)
    kept: Layout = OnOne(owners[0]) if isinstance(layout, OnOne) and not layer.shared else Replicated(owners)
    return Placement(takes, layout, dict.fromkeys(layer.parameters, kept), note)


def _changes_what_it_shares(layer: Layer) -> bool:
    """Whether a call changes its parameters or buffers, or may do so: the running statistics of a batch norm, say."""
    running = layer.statistics and any(p.buffer for p in layer.parameters.values())
    return running or layer.notes or (layer.kind == "opaque" and not layer.per_sample)


# --- The table: where a layer of each kind may be cut, so that what is split may pass without moving ------------------


def cuts(graph: Graph, layer: Layer) -> tuple[Cut, ...]:
    """Where a layer may be cut, batch axis aside."""
    rule = _CUTS.get(layer.kind)
    return rule(graph, layer) if rule is not None and layer.inputs else ()


def _batch_norm(_graph: Graph, layer: Layer) -> tuple[Cut, ...]:
    # num_batches_tracked has no channels: every device that holds some counts for itself.
    return (Cut(1, layer.shape[0], (1,), {key: 0 for key, p in layer.parameters.items() if p.shape}),)


def _filters(_graph: Graph, layer: Layer) -> tuple[Cut, ...]:
    """Several groups stay split where the split falls between groups (depthwise: always); one group reads all channels."""
    transposed = layer.kind == "conv_transpose" and layer.groups == 1
    axes = {"weight": 1 if transposed else 0, "bias": 0}
    parts, reads = (layer.groups, 1) if layer.groups > 1 else (layer.channels_out, None)
    return (Cut(layer.feature_axis, parts, (reads,), {key: axes[key] for key in layer.parameters}),)


def _join(graph: Graph, layer: Layer) -> tuple[Cut, ...]:
    shapes = [graph[name].batch_shape(1) for name in layer.inputs]
    axes = len(layer.shape) + 1
    found = []
    for axis, extent in enumerate(layer.shape, 1):
        own = [axis - (axes - len(shape)) for shape in shapes]  # axes are aligned from the right, as in broadcasting
        read = tuple(a if a >= 0 and shape[a] == extent else None for a, shape in zip(own, shapes, strict=True))
        found.append(Cut(axis, extent, read))
    return tuple(found)


def _cat(_graph: Graph, layer: Layer) -> tuple[Cut, ...]:
    axes = (axis for axis in range(1, len(layer.shape) + 1) if axis != layer.axis)
    return tuple(Cut(axis, layer.shape[axis - 1], (axis,) * len(layer.inputs)) for axis in axes)


_CUTS: dict[Kind, Callable[[Graph, Layer], tuple[Cut, ...]]] = {
    "elementwise": lambda _, layer: tuple(Cut(axis, extent, (axis,)) for axis, extent in enumerate(layer.shape, 1)),
    "pool": lambda _, layer: (Cut(1, layer.shape[0], (1,)),) if layer.shape else (),
    "flatten": lambda graph, layer: (Cut(1, graph[layer.inputs[0]].shape[0], (1,)),),
    "batch_norm": _batch_norm,
    "conv": _filters,
    "conv_transpose": _filters,
    "linear": _filters,
    "join": _join,
    "cat": _cat,
    "parts": lambda _, layer: layer.cuts,
    "filters": lambda _, layer: layer.cuts,
}
"""The others are computed by samples, on one device, or by every device from copies."""
