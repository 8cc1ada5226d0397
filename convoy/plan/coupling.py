"""Coupled axes: which shares of a plan must change together, so that every tensor still lies where its reader takes it.

All layers that split samples alike are coupled. A layer that splits filters is coupled with the layers that follow it, with a
`channel` layer that takes its parts as they lie, and with another filter-split layer that is added to it. What the devices
share are *units*: the smallest parts of the axes that leave all counts whole, and groups uncut.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from convoy.layout.layout import Split
from convoy.layout.shares import Shares, apportion, rescale
from convoy.model.graph import Graph, Layer
from convoy.plan.placing import own_strategy, placements
from convoy.plan.plan import Plan
from convoy.plan.strategy import Batch, Channel, Filter, One, Placement, Sharding, Strategy

PROPORTIONS = 1000
"""Of which shares of weights are told, once they follow speeds: rows are cut by them, to the nearest."""

OTHERS = ""
"""Stands for `Plan.otherwise` among the names of a plan's strategies."""


@dataclass(frozen=True, slots=True)
class CoupledAxes:
    """Shares that change together.

    Attributes:
        layers: the layers whose work these shares decide, in order.
        strategies: the entries of `Plan.layers` that hold these shares; `OTHERS` for `Plan.otherwise`.
        units: of each device; zero for a device without a part.
        counted: what a person counts: samples, filters or channels.
    """

    layers: tuple[str, ...]
    strategies: tuple[str, ...]
    units: Shares
    counted: str

    @property
    def active(self) -> tuple[int, ...]:
        """The devices that have a part."""
        return tuple(device for device, count in enumerate(self.units) if count)

    @property
    def movable(self) -> bool:
        """Whether there are other shares that leave every active device a unit."""
        return 1 < len(self.active) < sum(self.units)

    @property
    def name(self) -> str:
        return "batch" if self.counted == "samples" else " + ".join(self.strategies)


def coupled_axes(plan: Plan, graph: Graph) -> tuple[CoupledAxes, ...]:
    """The shares of a plan that can be chosen, grouped by which change together, in the order of the model.

    Raises:
        PlanError: the plan does not fit the graph.
    """
    plan.check(graph)
    placed = placements(plan, graph)
    decides = _decides(plan, graph, placed)
    coupled = _coupled(graph, placed, decides)
    result = []
    for root in dict.fromkeys(coupled.values()):
        deciders = [decider for decider, other in coupled.items() if other == root]
        layers = [graph[name] for name, decider in decides.items() if decider in deciders]
        result.append(
            _of_samples(plan, layers, root) if isinstance(root, tuple) else _of_channels(plan, placed, layers, deciders)
        )
    return tuple(axes for axes in result if axes.movable)


def with_units(plan: Plan, axes: CoupledAxes, units: Shares) -> Plan:
    """The plan with other units on one group of its axes."""
    changed = {name: _scaled(plan.layers[name], units) for name in axes.strategies if name != OTHERS}
    otherwise = Batch(units) if OTHERS in axes.strategies else plan.otherwise
    kept = {name: replace(how, shares=_following(how.shares, axes.units, units)) for name, how in _kept(plan, axes)}
    return replace(plan, layers={**plan.layers, **changed}, otherwise=otherwise, sharded={**plan.sharded, **kept})


def _kept(plan: Plan, axes: CoupledAxes) -> Iterable[tuple[str, Sharding]]:
    """The layers among these whose samples are shared out, and whose weights are kept in shares."""
    of_samples = axes.layers if axes.counted == "samples" else ()
    return [(name, how) for name, how in plan.sharded.items() if name in of_samples]


def _following(shares: Shares, before: Shares, after: Shares) -> Shares:
    """Shares of weights that follow the devices' speeds, of which their samples tell: a device that takes over half of
    another's samples has the time to update more. One without samples keeps its share beside the others'."""
    common = math.lcm(*filter(None, before))
    rows = zip(shares, before, after, strict=True)
    wanted = tuple(share * (new * (common // old) if old else common) for share, old, new in rows)
    return rescale(wanted, max(PROPORTIONS, sum(shares)))


def shares_of(plan: Plan, axes: CoupledAxes) -> Shares:
    """The shares of coupled axes as their first strategy counts them."""
    name = axes.strategies[0]
    strategy = plan.otherwise if name == OTHERS else plan.layers[name]
    assert not isinstance(strategy, One)
    return strategy.shares


def _scaled(strategy: Strategy, units: Shares) -> Strategy:
    assert not isinstance(strategy, One)
    entries = sum(strategy.shares) // sum(units)
    return replace(strategy, shares=tuple(count * entries for count in units))


_Decider = str | Shares
"""Who decides on shares: a layer with a strategy of its own, by name; or the shares of samples themselves."""


def _decides(plan: Plan, graph: Graph, placed: Mapping[str, Placement]) -> dict[str, _Decider]:
    """For each layer whose work is shared out, who decides how."""
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


def _coupled(
    graph: Graph, placed: Mapping[str, Placement], decides: Mapping[str, _Decider]
) -> dict[_Decider, _Decider]:
    """For each who decides, the first of those that must decide alike: a tensor goes from one to the other as it lies."""
    first: dict[_Decider, _Decider] = {decider: decider for decider in decides.values()}
    for name, decider in decides.items():
        for source, taken in zip(graph[name].inputs, placed[name].takes, strict=True):
            if isinstance(taken, Split) and taken == placed[source].gives and source in decides:
                kept, dropped = first[decides[source]], first[decider]
                first = {d: kept if f == dropped else f for d, f in first.items()}
    return first


def _of_samples(plan: Plan, layers: Iterable[Layer], shares: Shares) -> CoupledAxes:
    """All strategies that share out the samples of a batch in this way."""
    names = [name for name, strategy in plan.layers.items() if strategy == Batch(shares)]
    others = [OTHERS] if plan.otherwise == Batch(shares) else []
    computed = tuple(layer.name for layer in layers if layer.kind != "input")
    return CoupledAxes(computed, (*names, *others), shares, "samples")


def _of_channels(
    plan: Plan, placed: Mapping[str, Placement], layers: Sequence[Layer], deciders: Iterable[_Decider]
) -> CoupledAxes:
    strategies = tuple(decider for decider in deciders if isinstance(decider, str))
    extents = []
    for layer in layers:
        if layer.groups > 1:
            extents.append(layer.groups)
        here = placed[layer.name]
        # Groups and heads stay whole, which the extents alone do not say.
        extents += [cut.parts for cut in layer.cuts if isinstance(here.gives, Split) and cut.axis == here.gives.axis]
        extents += [sum(layout.shares) for layout in (*here.takes, here.gives) if isinstance(layout, Split)]
    leading = plan.layers[strategies[0]]
    assert isinstance(leading, Filter | Channel)
    entries = sum(leading.shares) // math.gcd(*extents)
    units = tuple(share // entries for share in leading.shares)
    counted = "filters" if isinstance(leading, Filter) else "channels"
    return CoupledAxes(tuple(layer.name for layer in layers), strategies, units, counted)


def plan_for(plan: Plan, graph: Graph, devices: Sequence[int | None], speeds: Sequence[float] | None = None) -> Plan:
    """A plan by which other devices go on with what one has begun.

    Args:
        devices: of each new device its index in the old plan; None for one that is new.
        speeds: of the new devices: one that is new gets a share by it. None: it gets a mean share.

    Returns:
        a plan that fits. Where nobody is left who had a part, all get one.
    """
    kept = [i for i, old in enumerate(devices) if old is not None]
    by = (1.0,) * len(devices) if speeds is None else speeds

    def unit(old: Shares) -> float:
        """What those that are left have for each unit of their speed."""
        return sum(old[devices[i] or 0] for i in kept) / sum(by[i] for i in kept) if kept else 1.0

    def shares(old: Shares, quantum: int = 1) -> Shares:
        weights = [unit(old) * by[i] if d is None else float(old[d]) for i, d in enumerate(devices)]
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
            case Channel(old):
                return Channel(shares(old))
            case Batch(old):
                return Batch(shares(old))

    otherwise = of("", plan.otherwise)
    assert isinstance(otherwise, Batch | One)
    made = replace(
        plan, devices=len(devices), otherwise=otherwise, layers={name: of(name, s) for name, s in plan.layers.items()},
        sharded={name: Sharding(shares(each.shares), each.form) for name, each in plan.sharded.items()},
    )  # fmt: skip
    made.check(graph, len(devices))
    return made
