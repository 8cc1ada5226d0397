"""Change the shares of a plan: find shares that must change together, and rescale a plan to other devices.

All layers that split samples alike are coupled. A layer that splits filters is coupled with the layers that follow it, with a
`channel` layer that reads its shards in place, and with another filter-split layer that is added to it. So a change of coupled
shares adds no move. They are counted in *units*: the smallest parts that give each layer whole entries and uncut groups.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from convoy.layout.layout import Split
from convoy.layout.shares import Shares, apportion, rescale
from convoy.model.graph import Graph, Layer
from convoy.plan.placing import own_strategy, placements
from convoy.plan.plan import Plan
from convoy.plan.strategy import Batch, Channel, Filter, One, Placement, Sharding, Spatial, Strategy

PROPORTIONS = 1000
"""Smallest sum of a sharding's proportions after an adjustment to speeds."""

OTHERS = ""
"""Name of `Plan.otherwise` in a list of layer names."""


@dataclass(frozen=True, slots=True)
class CoupledAxes:
    """A group of shares that change together.

    Attributes:
        layers: the layers that these shares split, in order.
        strategies: the keys of `Plan.layers` with these shares; `OTHERS` for `Plan.otherwise`.
        units: number of units of each device.
        counted: the unit's name for users: samples, filters or channels.
    """

    layers: tuple[str, ...]
    strategies: tuple[str, ...]
    units: Shares
    counted: str

    @property
    def active(self) -> tuple[int, ...]:
        """The devices that have units."""
        return tuple(device for device, count in enumerate(self.units) if count)

    @property
    def name(self) -> str:
        return "batch" if self.counted == "samples" else " + ".join(self.strategies)


_Decider = str | Shares
"""Source of a layer's shares: the name of a layer with its own strategy, or the shares of samples."""


def coupled_axes(plan: Plan, graph: Graph) -> tuple[CoupledAxes, ...]:
    """Return the groups of a plan's shares that can change together, in the order of the model.

    Raises:
        PlanError: the plan does not fit the graph.
    """
    plan.check(graph)
    placed = placements(plan, graph)
    decides = _decides(plan, graph, placed)
    first: dict[_Decider, _Decider] = {decider: decider for decider in decides.values()}  # the first of those coupled
    for name, decider in decides.items():
        for source, taken in zip(graph[name].inputs, placed[name].takes, strict=True):
            if isinstance(taken, Split) and taken == placed[source].gives and source in decides:
                kept, dropped = first[decides[source]], first[decider]
                first = {d: kept if f == dropped else f for d, f in first.items()}
    result = []
    for root in dict.fromkeys(first.values()):
        deciders = [decider for decider, other in first.items() if other == root]
        layers = [graph[name] for name, decider in decides.items() if decider in deciders]
        if isinstance(root, tuple):
            names = [name for name, strategy in plan.layers.items() if strategy == Batch(root)]
            names += [OTHERS] if plan.otherwise == Batch(root) else []
            computed = tuple(layer.name for layer in layers if layer.kind != "input")
            axes = CoupledAxes(computed, tuple(names), root, "samples")
        else:
            axes = _of_channels(plan, placed, layers, tuple(each for each in deciders if isinstance(each, str)))
        if 1 < len(axes.active) < sum(axes.units):  # else every active device has exactly one unit, and none can move
            result.append(axes)
    return tuple(result)


def _decides(plan: Plan, graph: Graph, placed: Mapping[str, Placement]) -> dict[str, _Decider]:
    """For each split layer, return the source of its shares."""
    result: dict[str, _Decider] = {}
    for layer in graph.layers.values():
        own, gives = own_strategy(plan, layer), placed[layer.name].gives
        if isinstance(gives, Split) and gives.axis == 0:
            result[layer.name] = gives.shares
        elif isinstance(own, Filter | Channel) and layer.batched:
            result[layer.name] = layer.name
        elif isinstance(gives, Split):
            leader = next(name for name in layer.inputs if graph[name].batched)
            if leader in result:
                result[layer.name] = result[leader]
    return result


def _of_channels(
    plan: Plan, placed: Mapping[str, Placement], layers: Sequence[Layer], strategies: tuple[str, ...]
) -> CoupledAxes:
    extents = []
    for layer in layers:
        if layer.groups > 1:
            extents.append(layer.groups)
        here = placed[layer.name]
        # Groups and heads stay whole; the extents alone do not show them.
        extents += [cut.parts for cut in layer.cuts if isinstance(here.gives, Split) and cut.axis == here.gives.axis]
        extents += [sum(layout.shares) for layout in (*here.takes, here.gives) if isinstance(layout, Split)]
    leading = plan.layers[strategies[0]]
    assert isinstance(leading, Filter | Channel)
    entries = sum(leading.shares) // math.gcd(*extents)
    units = tuple(share // entries for share in leading.shares)
    counted = "filters" if isinstance(leading, Filter) else "channels"
    return CoupledAxes(tuple(layer.name for layer in layers), strategies, units, counted)


def shares_of(plan: Plan, axes: CoupledAxes) -> Shares:
    """Return the shares of coupled axes, as in their first strategy."""
    strategy = plan.otherwise if axes.strategies[0] == OTHERS else plan.layers[axes.strategies[0]]
    assert not isinstance(strategy, One)
    return strategy.shares


def with_units(plan: Plan, axes: CoupledAxes, units: Shares) -> Plan:
    """Return the plan with other units for one group of shares.

    If shares of samples change, those of sharded weights change in proportion, since faster devices can also update more. A
    device without samples keeps its share of the weights.
    """
    layers, sharded = dict(plan.layers), dict(plan.sharded)
    for name in axes.strategies:
        if name != OTHERS:
            strategy = layers[name]
            assert not isinstance(strategy, One)
            entries = sum(strategy.shares) // sum(units)
            layers[name] = replace(strategy, shares=tuple(count * entries for count in units))
    common = math.lcm(*filter(None, axes.units))
    for name, how in plan.sharded.items():
        if axes.counted == "samples" and name in axes.layers:
            rows = zip(how.shares, axes.units, units, strict=True)
            wanted = tuple(share * (new * (common // old) if old else common) for share, old, new in rows)
            sharded[name] = replace(how, shares=rescale(wanted, max(PROPORTIONS, sum(how.shares))))
    otherwise = Batch(units) if OTHERS in axes.strategies else plan.otherwise
    return replace(plan, layers=layers, otherwise=otherwise, sharded=sharded)


def plan_for(plan: Plan, graph: Graph, devices: Sequence[int | None], speeds: Sequence[float] | None = None) -> Plan:
    """Return a plan for other devices with the same strategies and proportions.

    If no remaining device had a share of something, all devices get equal ones.

    Args:
        devices: for each new device, its index in the old plan; None for a joining device.
        speeds: speeds of the new devices, for the shares of joining devices; None: they get a mean share.
    """
    kept = [i for i, old in enumerate(devices) if old is not None]
    by = (1.0,) * len(devices) if speeds is None else speeds

    def shares(old: Shares, quantum: int = 1) -> Shares:
        unit = sum(old[devices[i] or 0] for i in kept) / sum(by[i] for i in kept) if kept else 1.0
        weights = [unit * by[i] if d is None else float(old[d]) for i, d in enumerate(devices)]
        return apportion(sum(old), weights if any(weights) else [1.0] * len(devices), quantum=quantum)

    rates = shares(plan.otherwise.shares) if isinstance(plan.otherwise, Batch) else (1,) * len(devices)

    def of(name: str, strategy: Strategy) -> Strategy:
        match strategy:
            case One(device):
                return One(devices.index(device) if device in devices else rates.index(max(rates)))
            case Filter(old):
                layer = graph[name]
                grouped = layer.weighted and layer.groups > 1
                return Filter(shares(old, layer.channels_out // layer.groups if grouped else 1))
            case Spatial(old, axes):
                return Spatial(shares(old), axes[-1:])
        return replace(strategy, shares=shares(strategy.shares))

    otherwise = of("", plan.otherwise)
    assert isinstance(otherwise, Batch | One)
    made = replace(
        plan, devices=len(devices), otherwise=otherwise, layers={name: of(name, s) for name, s in plan.layers.items()},
        sharded={name: Sharding(shares(each.shares), each.form) for name, each in plan.sharded.items()},
    )  # fmt: skip
    made.check(graph, len(devices))
    return made
