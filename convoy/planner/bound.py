"""A lower bound on the step: what no exact plan of the vocabulary can take less than, however its shares are chosen.

It is proved for the cost model, not for the machine: of every plan that `lower` takes, the simulated step is at least so long,
by the same costs. Two things that no plan can avoid are added up, apart, and the larger is the bound.

**Computing.** Every entry that a layer makes is computed on one device at least, and every trained entry is updated on one. Let
device d take at least r(l, d) seconds for the whole of item l, and at least f r(l, d) for a part f of it, whatever its shape
(`ComputeTimes.least_s`). Device d has T - o(d) seconds for its parts, where o(d) is what every device takes for a step beside
its layers. So sum over l of f(l, d) r(l, d) <= T - o(d) for each d, and sum over d of f(l, d) >= 1 for each l. Multiply the
first by any weights w(d) >= 0 that sum to 1, and add:

    T >= sum over d of w(d) o(d) + sum over l and d of w(d) f(l, d) r(l, d)
      >= sum over d of w(d) o(d) + sum over l of the least w(d) r(l, d) of all d.

The last line holds for *any* weights, so the search for good ones needs no proof.

**The wire of one device.** Take one device that is alone on its host. By itself it would compute for A seconds. A step of T
seconds is possible only if the others take at least A - T of these, and they can take at most k T, where k is how many times as
fast as it the others are together at what suits them best. Each weighted layer is either all its own, all the others', or
shared out by samples, filters or channels, and between two such layers each pair of these brings bytes over the card: see
`_TURNS`. Where the net is a chain, dynamic programming over its weighted layers gives the fewest bytes with which so much work
changes hands. The card takes (sent + received) / (its two rates together) at least, and the device's processor its seconds for
each byte beside computing. Where the net is no chain, only computing is counted.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from convoy.cost.costs import Costs
from convoy.model.graph import Graph, Layer
from convoy.plan.lower import reached, trains
from convoy.sharding.comm_dtype import CommDtype, sent_itemsize

Floats = npt.NDArray[np.float64]

ROUNDS = 300
"""Of the search for weights; any weights are right."""

MOST, PARTS = 100, 64
"""With more ways than this to share out a net, work is counted in parts of a device's whole, rounded to the side on which the
bound stays right."""

CARDS = 4
"""Of so many devices the wire is looked at, the fastest."""


@dataclass(frozen=True, slots=True)
class LowerBound:
    """What no exact plan can take less than.

    Attributes:
        compute_s: by computing alone.
        wire_s: by the card of one device; 0: none says more than computing does.
        device: whose card that is.
    """

    compute_s: float
    wire_s: float = 0.0
    device: int = -1

    @property
    def step_s(self) -> float:
        return max(self.compute_s, self.wire_s)


def lower_bound(graph: Graph, batch: int, costs: Costs, wire: CommDtype = "exact", passes: int = 1) -> LowerBound:
    """The bound for a pass of a global batch; where several make a step, of a pass in the mean.

    Args:
        wire: in which numbers tensors travel.
    """
    kinds = _Kinds.of(graph, batch, costs, passes)
    compute_s = _computing_s(kinds.seconds, kinds.apart_s, kinds.count)
    best = LowerBound(compute_s)
    chain = _chain(graph)
    if chain is None or costs.network.devices == 1:
        return best
    alone = kinds.seconds.sum(axis=0)
    hosts = costs.network.host
    single = [d for d in range(len(hosts)) if hosts.count(hosts[d]) == 1] if len(hosts) <= 64 else []
    for device in sorted(single, key=lambda d: (alone[kinds.of_device[d]], d))[:CARDS]:
        wire_s = float(_wire_s(graph, batch, costs, chain, kinds, device, sent_itemsize(wire, costs.itemsize), passes))
        if wire_s > best.step_s:
            best = LowerBound(compute_s, wire_s, device)
    return best


# --- computing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Devices that are alike are one kind.

    Attributes:
        names: of the items, a layer's arithmetic or its update: the layer's name.
        seconds: `seconds[item, kind]`, the least that all of an item takes there.
        apart_s: of each kind, beside its layers.
        count: how many devices of each kind there are.
        of_device: the kind of each device.
    """

    names: tuple[str, ...]
    seconds: Floats
    apart_s: Floats
    count: Floats
    of_device: tuple[int, ...]

    @classmethod
    def of(cls, graph: Graph, batch: int, costs: Costs, passes: int) -> "_Kinds":
        devices = range(costs.network.devices)
        marks = [(costs.times.alike(d), costs.update_s(d), costs.overhead(d)) for d in devices]
        kinds = {mark: place for place, mark in enumerate(dict.fromkeys(marks))}
        first = [marks.index(mark) for mark in kinds]
        back = reached(graph, trains(graph))
        layers = [layer for layer in graph.layers.values() if layer.kind != "input"]
        rows = [[_layer_s(costs, d, layer, batch, layer.name in back) for d in first] for layer in layers]
        names = [layer.name for layer in layers]
        trained = {p.key: (layer.name, p.entries) for layer in layers for p in layer.trainable if layer.name in back}
        rows += [[entries * costs.update_s(d) / passes for d in first] for _, entries in trained.values()]
        names += [name for name, _ in trained.values()]
        apart_s = np.array([costs.overhead(d).step_s for d in first])
        count = np.bincount([kinds[mark] for mark in marks], minlength=len(kinds)).astype(np.float64)
        return cls(tuple(names), np.array(rows), apart_s, count, tuple(kinds[mark] for mark in marks))


def _layer_s(costs: Costs, device: int, layer: Layer, batch: int, back: bool) -> float:
    seconds = costs.times.least_s(device, layer, "forward", batch)
    return seconds + costs.times.least_s(device, layer, "backward", batch) if back else seconds


def _computing_s(seconds: Floats, apart_s: Floats, count: Floats) -> float:
    """The largest bound of the weights that are tried: those that are even in time, then by multiplicative steps."""
    total = np.maximum(seconds.sum(axis=0), 1e-300)
    weights = 1 / total  # a device that takes twice as long for everything has half the price of a second
    best = float(apart_s.max(initial=0.0))  # a device without a part takes that, too
    for step in range(ROUNDS):
        weights = weights / (weights * count).sum()
        priced = weights * seconds
        chosen = priced.argmin(axis=1)
        rows = np.arange(len(seconds))
        best = max(best, float((weights * count * apart_s).sum() + priced[rows, chosen].sum()))
        # The load of each kind where every item goes to whom it is cheapest for: who has more gets dearer.
        load = np.bincount(chosen, seconds[rows, chosen], len(weights)) / count + apart_s
        weights = weights * np.exp((load / max(load.max(), 1e-300) - 0.5) / (2.0 + step))
    return best


# --- the wire of one device ------------------------------------------------------------------------------------------

Place = Literal["own", "others", "samples", "filters", "channels"]
PLACES: tuple[Place, ...] = ("own", "others", "samples", "filters", "channels")

_ALL_NEED, _SUMMED, _BOTH = 1, 1, 2
_TURNS: Mapping[tuple[Place, Place], int] = {
    ("own", "others"): _ALL_NEED,
    ("others", "own"): _ALL_NEED,
    **{(before, "filters"): _ALL_NEED for before in PLACES},
    **{("channels", after): _SUMMED for after in PLACES},
    ("channels", "filters"): _BOTH,
}
"""How often a tensor between two weighted layers passes a device's card, sent and received together; its gradient does again.

Filters need the whole of what they read on both sides: what the one has made goes to the other. Channels make summands on both
sides of every entry, which come together at one side, or, before filters, at both. In every other pair, shares can be so that
as little passes as one likes: nothing is counted. Of the tensors between two such layers the smallest counts, since each of its
entries depends on what the other side has. Weights that both sides use for samples of their own are received and sent once:
gradients are summed, or go to shares s from which weights come back, w - s + s entries.
"""


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to share out the layers so far: entries over the card, and the least and the most of the device's seconds that
    change hands."""

    entries: float
    least_s: float
    most_s: float


def _chain(graph: Graph) -> list[tuple[Layer, int]] | None:
    """The weighted layers, each with the entries of a sample in the smallest tensor before the next; None where the net
    branches, or has layers with rules of their own."""
    found: list[tuple[Layer, int]] = []
    if len(graph.inputs) != 1 or len(graph.outputs) != 1:
        return None
    for layer in graph.layers.values():
        last = layer.name == graph.outputs[0]
        if not layer.batched or len(graph.readers[layer.name]) != 1 - last:
            return None
        if layer.kind != "input" and (
            len(layer.inputs) != 1 or layer.shared or layer.kind == "opaque" or layer.groups > 1
        ):
            return None
        entries = math.prod(layer.shape)
        if layer.weighted:
            found.append((layer, entries))
        elif found:
            found[-1] = (found[-1][0], min(found[-1][1], entries))
    return found or None


def _wire_s(
    graph: Graph, batch: int, costs: Costs, chain: Sequence[tuple[Layer, int]], kinds: _Kinds, device: int, itemsize: int,
    passes: int,
) -> float:  # fmt: skip
    """Seconds of a step, by the card and the processor of one device."""
    back = reached(graph, trains(graph))
    own = kinds.of_device[device]
    layers = dict(reversed(list(zip(kinds.names, kinds.seconds, strict=True))))  # arithmetic comes before updates
    rows = [layers[layer.name] for layer, _ in chain]
    speeds = [max(row[own] / row[kind] if row[kind] else math.inf for row in rows) for kind in range(len(kinds.count))]
    others = float(np.dot(speeds, kinds.count)) - speeds[own]
    whole_s = float(kinds.seconds[:, own].sum())
    free_s = whole_s - sum(float(row[own]) for row in rows)
    ways: dict[Place, list[_Way]] = {}
    for place, (layer, _) in enumerate(chain):
        weights = sum(p.entries for p in layer.trainable) if layer.name in back else 0
        seconds, following = float(rows[place][own]), {}
        for here in PLACES:
            added = _Way(
                2 * weights / passes if here == "samples" else 0.0,
                seconds if here == "others" else 0.0,
                0.0 if here == "own" else seconds,
            )
            before = _before(ways, here, chain, place, batch, back)
            following[here] = _pruned([_joined(way, added, entries) for entries, way in before], whole_s)
        ways = following
    summed = batch * chain[-1][1]  # what channels make at the end comes together somewhere
    ways["channels"] = [replace(way, entries=way.entries + summed) for way in ways["channels"]]
    network, host = costs.network, costs.network.host[device]
    card = itemsize / (network.send_bytes_per_s[host] + network.receive_bytes_per_s[host])
    handled = itemsize * network.processor_s_per_byte[device]
    apart_s = float(kinds.apart_s[own])
    return min(
        max(
            0.0,
            way.least_s / others if way.least_s else 0.0,
            whole_s + apart_s + way.entries * handled - way.most_s - free_s,
            way.entries * card,
        )
        for some in ways.values()
        for way in some
    )


def _before(
    ways: Mapping[Place, Sequence[_Way]],
    here: Place,
    chain: Sequence[tuple[Layer, int]],
    place: int,
    batch: int,
    back: Collection[str],
) -> Iterator[tuple[float, _Way]]:
    """The ways that end at the layer before, each with the entries that pass the card on the way here."""
    if not place:  # every device loads what it wants of the inputs
        yield 0.0, _Way(0.0, 0.0, 0.0)
        return
    source, entries = chain[place - 1]
    travels = batch * entries * (2 if source.name in back else 1)
    for before, some in ways.items():
        passed = travels * _TURNS.get((before, here), 0)
        for way in some:
            yield passed, way


def _joined(way: _Way, added: _Way, entries: float) -> _Way:
    return _Way(way.entries + added.entries + entries, way.least_s + added.least_s, way.most_s + added.most_s)


def _pruned(ways: Sequence[_Way], whole_s: float) -> list[_Way]:
    """Without those that another one is as good as in everything."""
    found = _undominated(ways)
    if len(found) <= MOST or not whole_s:
        return found
    unit = whole_s / PARTS
    rounded = [
        _Way(way.entries, math.floor(way.least_s / unit) * unit, math.ceil(way.most_s / unit) * unit) for way in found
    ]
    return _undominated(rounded)


def _undominated(ways: Sequence[_Way]) -> list[_Way]:
    found: list[_Way] = []
    for way in sorted(ways, key=lambda w: (w.entries, w.least_s, -w.most_s)):
        if not any(other.least_s <= way.least_s and other.most_s >= way.most_s for other in found):
            found.append(way)
    return found
