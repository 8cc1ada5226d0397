"""Lower bounds from one device's NIC and from a chain of entries, for every exact plan; a part of `tight_bound.py`.

**The wire of one device.** Take one device that is alone on its host. A step of T seconds is possible only if the others
take over what of its work does not fit into T, and they can take over at most k T, where k is how many times as fast as it
the others are together at what suits them best. Take a path through the net: weighted layers of which each depends on the
one before. Each is either all the device's own, all the others', or shared out by samples, filters or channels, and between
two such layers each pair of these brings bytes over the NIC: see `_TURNS`. Dynamic programming over the path gives the
fewest bytes with which so much work changes hands; other layers may change hands for nothing. The NIC takes (sent +
received) / (its two rates together) at least, and the device's processor its seconds for each byte beside computing. Where
all gradients of a net are few enough to be summed in one go, a device that shares samples sends or receives half of their
gradients, at least, when it has computed everything.

**A chain of entries.** What one device computes while others wait for it cannot be hidden. Take one entry of the output of
each layer of the path, each dependent on the one before, and draw these chains at random, evenly. Where device d has the
share x(d) of a layer, the chain is there with the probability x(d), and goes on when all of that part is done: after r(d)
x(d) seconds at least. Then the same backward. So a step takes, in the mean over all chains, the sum over the layers of sum
over d of r(d) x(d)^2 at least: r(d) where one device has all of a layer, and 1 / (sum of 1 / r(d)) where several share it,
whatever the shares. Of backward, what comes behind the gradient of a layer's input may be hidden: then entries leave the
device. If a part q of them does, in so many bytes that all of them take c seconds, they take q c / 2 in the mean, and the
chain misses the second half w q times: it counts w - max over q of (w q - c q^2 / 2), of w seconds.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from convoy.model.graph import Graph, Layer
from convoy.plan.lower import BUCKET_ENTRIES, reached, trains
from convoy.simulate.costs import Costs
from lab.lower_bound import least_s

Floats = npt.NDArray[np.float64]

MOST, PARTS = 150, 400
"""With more ways than this to share out a net, work is counted in parts of a device's whole, rounded to the side on which the
bound stays right."""

LAYERS = 12
"""Of paths with more weighted layers the wire is not looked at: it takes as long as planning."""


LOSS = "(loss)"
"""The item of `Kinds` that is the loss."""


@dataclass(frozen=True, slots=True)
class Kinds:
    """Groups of identical devices.

    Attributes:
        names: of the items, a layer's arithmetic or its update: the layer's name; or `LOSS`.
        layers: so many of the items are arithmetic, the first ones.
        seconds: `seconds[item, kind]`, the least that all of an item takes there.
        apart_s: of each kind, beside its layers.
        count: how many devices of each kind there are.
        of_device: the kind of each device.
    """

    names: tuple[str, ...]
    layers: int
    seconds: Floats
    apart_s: Floats
    count: Floats
    of_device: tuple[int, ...]

    @classmethod
    def of(cls, graph: Graph, batch: int, costs: Costs, passes: int) -> "Kinds":
        devices = range(costs.network.devices)
        marks = [(costs.times.alike(d), costs.update_s(d), costs.overhead(d)) for d in devices]
        kinds = {mark: place for place, mark in enumerate(dict.fromkeys(marks))}
        first = [marks.index(mark) for mark in kinds]
        back = reached(graph, trains(graph))
        layers = [layer for layer in graph.layers.values() if layer.kind != "input"]
        rows = [[layer_s(costs, d, layer, batch, layer.name in back) for d in first] for layer in layers]
        names = [layer.name for layer in layers]
        if back:  # the loss of an output is computed where the output is, on one device at least
            outputs = sum(batch * math.prod(graph[name].shape) for name in graph.outputs if graph[name].batched)
            rows.append([outputs * costs.itemsize * costs.overhead(d).loss_s_per_byte for d in first])
            names.append(LOSS)
        trained = {p.key: (layer.name, p.entries) for layer in layers for p in layer.trainable if layer.name in back}
        rows += [[entries * costs.update_s(d) / passes for d in first] for _, entries in trained.values()]
        names += [name for name, _ in trained.values()]
        apart_s = np.array([costs.overhead(d).step_s for d in first])
        count = np.bincount([kinds[mark] for mark in marks], minlength=len(kinds)).astype(np.float64)
        return cls(tuple(names), len(layers), np.array(rows), apart_s, count, tuple(kinds[mark] for mark in marks))


def layer_s(costs: Costs, device: int, layer: Layer, batch: int, back: bool) -> float:
    seconds = least_s(costs.times, device, layer, "forward", batch)
    return seconds + least_s(costs.times, device, layer, "backward", batch) if back else seconds


# --- the wire of one device ---

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

Where the net branches, this holds all the same: an entry of a sum is nowhere without those that it is made of, or itself.
Filters need the whole of what they read on both sides: what the one has made goes to the other. Channels make summands on both
sides of every entry, which come together at one side, or, before filters, at both. In every other pair, shares can be so that
as little passes as one likes: nothing is counted. Of the tensors between two such layers the smallest counts, since each of its
entries depends on what the other side has. Weights that both sides use for samples of their own are received and sent once:
gradients are summed, or go to shares s from which weights come back, w - s + s entries.
"""


@dataclass(frozen=True, slots=True)
class _Way:
    """One partial assignment of layers.

    Attributes:
        entries: over the NIC.
        least_s, most_s: of the device's seconds, what changes hands at least and at most.
        chain_s: of the chain of entries.
        last_s: of the device's NIC behind its backward.
    """

    entries: float
    least_s: float
    most_s: float
    chain_s: float = 0.0
    last_s: float = 0.0


def path_of(graph: Graph, batch: int, costs: Costs) -> list[list[Layer]] | None:
    """Weighted layers of which each depends on the one before, each with the layers behind it up to the next: of all ways
    through the net the one that takes the longest. None where layers have rules of their own."""
    longest: dict[str, tuple[float, str]] = {}
    fed: set[str] = set()  # what is made of the inputs without weights: every device may have copies of it
    for layer in graph.layers.values():
        before = max(((longest[i][0], i) for i in layer.inputs if i in longest), default=(0.0, ""))
        if not layer.weighted and not before[1]:
            fed.add(layer.name)
            continue
        longest[layer.name] = (layer_s(costs, 0, layer, batch, back=True) + before[0], before[1])
    ends = [name for name in graph.outputs if name in longest]
    if len(graph.inputs) != 1 or not ends:
        return None
    name, found = max(ends, key=lambda end: longest[end][0]), []
    while name:
        found.append(graph[name])
        name = longest[name][1]
    if any(_has_own_rules(layer) or (not layer.weighted and layer.inputs[0] in fed) for layer in found):
        return None
    groups: list[list[Layer]] = []
    for layer in reversed(found):
        if layer.weighted:
            groups.append([])
        groups[-1].append(layer)
    return groups if len(groups) <= LAYERS else None


def _has_own_rules(layer: Layer) -> bool:
    odd = (
        layer.kind in ("opaque", "pick", "parameter")
        or layer.shared
        or layer.everywhere
        or layer.called_everywhere
        or layer.several
    )
    return odd or not layer.batched or layer.groups > 1 or layer.no_gradient_to != () or not layer.differentiable


def wire_s(
    graph: Graph, batch: int, costs: Costs, path: Sequence[Sequence[Layer]], kinds: Kinds, device: int, itemsize: int,
    passes: int,
) -> float:  # fmt: skip
    """Return a lower bound of the step from one device's NIC and processor."""
    back = reached(graph, trains(graph))
    own = kinds.of_device[device]
    layers = dict(reversed(list(zip(kinds.names, kinds.seconds, strict=True))))  # arithmetic comes before updates
    rows = [layers[group[0].name] for group in path]
    speeds = [max(row[own] / row[kind] if row[kind] else math.inf for row in rows) for kind in range(len(kinds.count))]
    others = float(np.dot(speeds, kinds.count)) - speeds[own]
    best = [max(_over(row[own], row[kind]) for row in kinds.seconds) for kind in range(len(kinds.count))]
    at_all = float(np.dot(best, kinds.count)) - best[own]
    whole_s = float(kinds.seconds[:, own].sum())
    free_s = whole_s - sum(float(row[own]) for row in rows)
    network, host = costs.network, costs.network.host[device]
    rate = max(network.send_bytes_per_s[host], network.receive_bytes_per_s[host])
    chain = _Chain.of(graph, batch, costs, path, kinds, own, itemsize)
    trained = {p.key: p.entries for name in back for p in graph[name].trainable}
    together = sum(trained.values()) < BUCKET_ENTRIES
    ways: dict[Place, list[_Way]] = {}
    for place, group in enumerate(path):
        layer = group[0]
        weights = sum(p.entries for p in layer.trainable) if layer.name in back else 0
        seconds, following = float(rows[place][own]), {}
        for here in PLACES:
            added = _Way(
                2 * weights / passes if here == "samples" else 0.0,
                seconds if here == "others" else 0.0,
                0.0 if here == "own" else seconds,
                chain.seconds[place][0 if here == "own" else 1 if here == "others" else 2],
                weights / 2 * itemsize / rate / passes if here == "samples" and together else 0.0,
            )
            before = _before(ways, here, path, place, batch, back)
            following[here] = _pruned([_joined(way, added, entries) for entries, way in before], whole_s)
        ways = following
    summed = batch * _smallest(path[-1])  # what channels make at the end comes together somewhere
    ways["channels"] = [replace(way, entries=way.entries + summed) for way in ways["channels"]]
    card = itemsize / (network.send_bytes_per_s[host] + network.receive_bytes_per_s[host])
    handled = itemsize * network.processor_s_per_byte[device]
    apart_s = float(kinds.apart_s[own])
    found = []
    for way in (way for some in ways.values() for way in some):
        busy_s = whole_s + apart_s + max(way.entries * handled, way.last_s)
        # Work taken over, in this device's seconds, and in seconds of all others together.
        given_s = busy_s * at_all / (1 + at_all) if at_all < math.inf else busy_s
        given_s = min(max(given_s, way.least_s), way.most_s + free_s)
        shared_s = max(
            given_s / at_all if at_all else 0.0, busy_s - given_s, way.least_s / others if way.least_s else 0.0
        )
        found.append(max(shared_s, way.entries * card, way.chain_s + chain.rest_s + float(kinds.apart_s.min())))
    return min(found)


def _over(own_s: float, other_s: float) -> float:
    """Return how many times as fast as the device another one is."""
    return own_s / other_s if other_s else math.inf if own_s else 1.0


def _smallest(group: Sequence[Layer]) -> int:
    """Return the entries per sample of the smallest tensor before the next weighted layer."""
    return min(math.prod(layer.shape) for layer in group)


def _before(
    ways: Mapping[Place, Sequence[_Way]],
    here: Place,
    path: Sequence[Sequence[Layer]],
    place: int,
    batch: int,
    back: Collection[str],
) -> Iterator[tuple[float, _Way]]:
    """Return the assignments up to the layer before, with the entries their NIC traffic adds."""
    if not place:  # every device loads what it wants of the inputs
        yield 0.0, _Way(0.0, 0.0, 0.0)
        return
    source = path[place - 1]
    travels = batch * _smallest(source) * (2 if source[0].name in back else 1)
    for before, some in ways.items():
        passed = travels * _TURNS.get((before, here), 0)
        for way in some:
            yield passed, way


def _joined(way: _Way, added: _Way, entries: float) -> _Way:
    return _Way(
        way.entries + added.entries + entries,
        way.least_s + added.least_s,
        way.most_s + added.most_s,
        way.chain_s + added.chain_s,
        way.last_s + added.last_s,
    )


def _pruned(ways: Sequence[_Way], whole_s: float) -> list[_Way]:
    """Drop assignments that another one dominates."""
    found = _undominated(ways)
    if len(found) <= MOST or not whole_s:
        return found
    unit = whole_s / PARTS

    def less(seconds: float) -> float:
        return math.floor(seconds / unit) * unit

    rounded = [
        _Way(way.entries, less(way.least_s), math.ceil(way.most_s / unit) * unit, less(way.chain_s), less(way.last_s))
        for way in found
    ]
    return _undominated(rounded)


def _undominated(ways: Sequence[_Way]) -> list[_Way]:
    rows = np.array([(w.entries, w.least_s, -w.most_s, w.chain_s, w.last_s) for w in ways])
    order = np.lexsort(rows.T[::-1])
    kept: list[int] = []
    known = np.empty_like(rows)
    for place in order:
        row = rows[place]
        if not (known[: len(kept)] <= row).all(axis=1).any():
            known[len(kept)] = row
            kept.append(int(place))
    return [ways[place] for place in kept]


class Waits:
    """Who needs what a device makes of a layer waits for so long, where it makes all: of part f, at least f times that."""

    def __init__(self, graph: Graph, batch: int, costs: Costs, itemsize: int) -> None:
        self.graph, self.batch, self.costs, self.itemsize = graph, batch, costs, itemsize
        self.trained = trains(graph)
        self.back = reached(graph, self.trained)
        network = costs.network
        shared = {host for host, count in Counter(network.host).items() if count > 1}
        self.rate = max(
            send + (network.within_bytes_per_s[host] if host in shared else 0.0)
            for host, send in enumerate(network.send_bytes_per_s)
        )

    def seconds(self, device: int, layer: Layer) -> float:
        """Return the seconds of forward and backward, less what of backward may be hidden."""
        source = self.graph[layer.inputs[0]]
        times, batch, trained = self.costs.times, self.batch, source.name in self.trained
        returned_s = batch * math.prod(source.shape) * self.itemsize / self.rate if trained else math.inf
        forward = least_s(times, device, layer, "forward", batch)
        backward = least_s(times, device, layer, "backward", batch) if layer.name in self.back else 0.0
        second = backward / 2 if layer.multiplies and layer.trainable else 0.0
        return forward + backward - second + _not_hidden(second, returned_s)


@dataclass(frozen=True, slots=True)
class _Chain:
    """Seconds of a chain of entries; see the module.

    Attributes:
        seconds: of each weighted layer of a path: where one device has all of it, where all others share it, and where all do.
        rest_s: of the layers between them, shared by all devices.
    """

    seconds: tuple[tuple[float, float, float], ...]
    rest_s: float

    @classmethod
    def of(
        cls,
        graph: Graph,
        batch: int,
        costs: Costs,
        path: Sequence[Sequence[Layer]],
        kinds: Kinds,
        own: int,
        itemsize: int,
    ) -> "_Chain":
        waits = Waits(graph, batch, costs, itemsize)
        first = [kinds.of_device.index(kind) for kind in range(len(kinds.count))]

        def of_layer(layer: Layer) -> list[float]:
            return [waits.seconds(device, layer) for device in first]

        others = kinds.count.copy()
        others[own] -= 1
        rows = [of_layer(group[0]) for group in path]
        seconds = tuple((row[own], evenly(row, others), evenly(row, kinds.count)) for row in rows)
        return cls(seconds, sum(evenly(of_layer(layer), kinds.count) for group in path for layer in group[1:]))


def evenly(seconds: Sequence[float], count: Floats) -> float:
    """Return the least sum of seconds[d] x[d]^2 over all shares x, for the device counts of each kind."""
    return 1 / sum(n / s for n, s in zip(count, seconds, strict=True) if n) if min(seconds) > 0 else 0.0


def _not_hidden(second_s: float, returned_s: float) -> float:
    """Return the unhidden part of the second half of backward if any part may leave in the given seconds."""
    return second_s - second_s**2 / (2 * returned_s) if second_s < returned_s else returned_s / 2
