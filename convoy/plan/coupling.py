"""Bonds: which shares of a plan belong together, so that changing them leaves every tensor where its reader takes it.

All layers that share out samples alike are one bond. A layer that splits filters is a bond with the layers that follow it,
with a `channel` layer that takes its pieces as they lie, and with another filter-split layer that is added to it. What
is shared out are *portions*: the smallest parts of the axis that leave all counts of the bond whole, and groups uncut.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from convoy.model.graph import Graph, Layer
from convoy.plan.lower import own_strategy, placements
from convoy.plan.plan import Plan
from convoy.plan.strategy import Batch, Channel, Filter, One, Placement, Strategy
from convoy.sharding.layout import Split
from convoy.sharding.shares import Shares

OTHERS = ""
"""Stands for `Plan.otherwise` among the names of a plan's strategies."""


@dataclass(frozen=True, slots=True)
class Bond:
    """Shares that change together.

    Attributes:
        layers: the layers whose work these shares decide, in order.
        strategies: the entries of `Plan.layers` that hold these shares; `OTHERS` for `Plan.otherwise`.
        portions: of each device; zero for a device without a part.
        unit: what a person counts: samples, filters or channels.
    """

    layers: tuple[str, ...]
    strategies: tuple[str, ...]
    portions: Shares
    unit: str

    @property
    def active(self) -> tuple[int, ...]:
        """The devices that have a part."""
        return tuple(device for device, count in enumerate(self.portions) if count)

    @property
    def movable(self) -> bool:
        """Whether there are other shares that leave every active device a portion."""
        return 1 < len(self.active) < sum(self.portions)

    @property
    def name(self) -> str:
        return "batch" if self.unit == "samples" else " + ".join(self.strategies)


def bonds(plan: Plan, graph: Graph) -> tuple[Bond, ...]:
    """The bonds of a plan that leave something to choose, in the order of the model.

    Raises:
        PlanError: the plan does not fit the graph.
    """
    plan.check(graph)
    placed = placements(plan, graph)
    decides = _decides(plan, graph, placed)
    bonded = _bonded(graph, placed, decides)
    result = []
    for root in dict.fromkeys(bonded.values()):
        units = [unit for unit, other in bonded.items() if other == root]
        layers = [graph[name] for name, unit in decides.items() if unit in units]
        result.append(
            _of_samples(plan, layers, root) if isinstance(root, tuple) else _bond(plan, placed, layers, units)
        )
    return tuple(bond for bond in result if bond.movable)


def reshared(plan: Plan, bond: Bond, portions: Shares) -> Plan:
    """The plan with other portions in one of its bonds."""
    changed = {name: _scaled(plan.layers[name], portions) for name in bond.strategies if name != OTHERS}
    otherwise = Batch(portions) if OTHERS in bond.strategies else plan.otherwise
    return replace(plan, layers={**plan.layers, **changed}, otherwise=otherwise)


def shares_of(plan: Plan, bond: Bond) -> Shares:
    """The shares of a bond as its first strategy counts them."""
    name = bond.strategies[0]
    strategy = plan.otherwise if name == OTHERS else plan.layers[name]
    assert not isinstance(strategy, One)
    return strategy.shares


def _scaled(strategy: Strategy, portions: Shares) -> Strategy:
    assert not isinstance(strategy, One)
    entries = sum(strategy.shares) // sum(portions)
    return replace(strategy, shares=tuple(count * entries for count in portions))


_Unit = str | Shares
"""Who decides on shares: a layer with a strategy of its own, by name; or the shares of samples themselves."""


def _decides(plan: Plan, graph: Graph, placed: Mapping[str, Placement]) -> dict[str, _Unit]:
    """For each layer whose work is shared out, who decides how."""
    result: dict[str, _Unit] = {}
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


def _bonded(graph: Graph, placed: Mapping[str, Placement], decides: Mapping[str, _Unit]) -> dict[_Unit, _Unit]:
    """For each who decides, the first of those that must decide alike: a tensor goes from one to the other as it lies."""
    first: dict[_Unit, _Unit] = {unit: unit for unit in decides.values()}
    for name, unit in decides.items():
        for source, taken in zip(graph[name].inputs, placed[name].takes, strict=True):
            if isinstance(taken, Split) and taken == placed[source].gives and source in decides:
                kept, dropped = first[decides[source]], first[unit]
                first = {u: kept if f == dropped else f for u, f in first.items()}
    return first


def _of_samples(plan: Plan, layers: Iterable[Layer], shares: Shares) -> Bond:
    """All strategies that share out the samples of a batch in this way."""
    names = [name for name, strategy in plan.layers.items() if strategy == Batch(shares)]
    others = [OTHERS] if plan.otherwise == Batch(shares) else []
    computed = tuple(layer.name for layer in layers if layer.kind != "input")
    return Bond(computed, (*names, *others), shares, "samples")


def _bond(plan: Plan, placed: Mapping[str, Placement], layers: Sequence[Layer], units: Iterable[_Unit]) -> Bond:
    strategies = tuple(unit for unit in units if isinstance(unit, str))
    extents = []
    for layer in layers:
        if layer.groups > 1:
            extents.append(layer.groups)
        here = placed[layer.name]
        extents += [sum(layout.shares) for layout in (*here.takes, here.gives) if isinstance(layout, Split)]
    leading = plan.layers[strategies[0]]
    assert isinstance(leading, Filter | Channel)
    entries = sum(leading.shares) // math.gcd(*extents)
    portions = tuple(share // entries for share in leading.shares)
    return Bond(
        tuple(layer.name for layer in layers), strategies, portions,
        "filters" if isinstance(leading, Filter) else "channels",
    )  # fmt: skip
