"""Computes a lower bound on the step time of every exact plan with any shares.

The bound holds for the cost model: with the same costs, no simulated plan is shorter. It is the larger of two bounds.

**Computing.** Every entry of a layer is computed on at least one device, every trained entry is updated on one, and every
output's loss is computed on one. Let device d take at least r(l, d) seconds for all of item l, and at least f r(l, d) for a
fraction f of it (`least_s`). In T seconds, device d has T - o(d) for its parts, where o(d) is its overhead of a
step. So sum over l of f(l, d) r(l, d) <= T - o(d) for each d, and sum over d of f(l, d) >= 1 for each l. Multiply the first
by any weights w(d) >= 0 that sum to 1, and add:

    T >= sum over d of w(d) o(d) + sum over l of the minimum over d of w(d) r(l, d)

This holds for *any* weights, so the search for good ones needs no proof.

**One NIC.** Take a device that is alone on its host, and a path of weighted layers, each dependent on the previous one. Each
layer is on this device ("own"), on the others, or split by samples, filters or channels. Between two layers, each pair of
these placements sends entries through the NIC (`_CROSSINGS`); splitting by samples sends the layer's gradients and weights. If
the device gives away g seconds of its work, it computes the rest, and the others together take at least g / k seconds for g.
Here k is their speed relative to the device, at their best item. Dynamic programming over the path finds the
fewest entries for each g, counted in units. A sum of s units is counted as floor(s). Adding r to it moves the count by
floor(r) or ceil(r), so no plan is missed. Other layers may be given away without messages.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from convoy.layout.comm_dtype import sent_itemsize
from convoy.model.graph import Layer
from convoy.plan.device_program import LocalSize, whole_size
from convoy.plan.lower import reached, trains
from convoy.plan.steps import Phase
from convoy.planner.request import PlanRequest
from convoy.simulate.compute import CachedTimes, ComputeTimes, Grid, LayerTimes, MeasuredTimes, Rate, Roofline, shape_s
from convoy.simulate.costs import Costs

ROUNDS = 300  # of the search for weights

MORE = 1e-3
"""The NIC's bound counts if it is larger by this fraction. Both are equal if all work can be distributed."""

NICS = 4
"""Number of fastest devices whose NICs are examined."""

MOST_HOSTS = 64
"""In larger fleets no NIC is examined."""

UNITS = 128
"""Units of work in the dynamic programming."""

Floats = npt.NDArray[np.float64]
_Place = Literal["own", "others", "samples", "filters", "channels"]
_PLACES: tuple[_Place, ...] = ("own", "others", "samples", "filters", "channels")

_CROSSINGS: Mapping[tuple[_Place, _Place], int] = {
    ("own", "others"): 1,
    ("others", "own"): 1,
    **{(before, "filters"): 1 for before in _PLACES},
    **{("channels", after): 1 for after in _PLACES},
    ("channels", "filters"): 2,
}
"""How often a tensor between two weighted layers crosses the NIC, sent or received. Its gradient crosses as often.

With filters, both sides read the whole input, so each side sends its part. With channels, both sides compute summands of
every entry and add them on one side, or before filters on both. For all other pairs, some shares send almost nothing. The
smallest tensor between the two layers counts, since each of its entries depends on the other side. With branches this
still holds: to have an entry of a sum, a device needs the entry or its summands.
"""


@dataclass(frozen=True, slots=True)
class LowerBound:
    """The lower bound of exact plans, in seconds per micro-batch on average.

    Attributes:
        layers_s, updates_s, apart_s, loss_s: parts of the computing bound: layers, optimizer, overheads, loss.
        wire_s: by one NIC; 0 if no NIC needs longer than computing.
        device: of that NIC, or -1.
    """

    layers_s: float
    updates_s: float = 0.0
    apart_s: float = 0.0
    loss_s: float = 0.0
    wire_s: float = 0.0
    device: int = -1

    @property
    def compute_s(self) -> float:
        return self.layers_s + self.updates_s + self.apart_s + self.loss_s

    @property
    def step_s(self) -> float:
        return max(self.compute_s, self.wire_s)


def lower_bound(request: PlanRequest) -> LowerBound:
    """Return the bound per micro-batch, on average over a step."""
    work, network = _work_of(request), request.costs.network
    best = _computing(work)
    path = _path_of(request) if 1 < len(network.send_bytes_per_s) <= MOST_HOSTS else None
    if path is None:
        return best
    single = [d for d, host in enumerate(network.host) if network.host.count(host) == 1]
    alone = work.seconds.sum(axis=0)
    for device in sorted(single, key=lambda d: (alone[work.kinds[d]], d))[:NICS]:
        found_s = _wire_s(request, path, work, device)
        if found_s > best.step_s * (1 + MORE):
            best = replace(best, wire_s=found_s, device=device)
    return best


@dataclass(frozen=True, slots=True)
class _Work:
    """The items of a step and the least seconds of each on every kind of device.

    Attributes:
        names: of the layers, the first items. The loss, if any, and the updates follow.
        losses: 1 if there is a loss.
        seconds: `seconds[item, kind]`.
        apart_s: overhead of a step, by kind.
        count: devices of each kind.
        kinds: the kind of each device.
    """

    names: tuple[str, ...]
    losses: int
    seconds: Floats
    apart_s: Floats
    count: Floats
    kinds: tuple[int, ...]


def _work_of(request: PlanRequest) -> _Work:
    graph, batch, costs = request.graph, request.batch, request.costs
    marks = [(costs.times.alike(d), costs.update_s(d), costs.overhead(d)) for d in range(len(costs.network.host))]
    distinct = list(dict.fromkeys(marks))
    first = [marks.index(mark) for mark in distinct]
    back = reached(graph, trains(graph))
    layers = [layer for layer in graph.layers.values() if layer.kind != "input"]
    rows = [[_layer_s(costs, d, layer, batch, layer.name in back) for d in first] for layer in layers]
    if back:  # an output's loss is computed where the output is, on at least one device
        outputs = sum(batch * math.prod(graph[name].shape) for name in graph.outputs if graph[name].batched)
        rows.append([outputs * costs.itemsize * costs.overhead(d).loss_s_per_byte for d in first])
    trained = {p.key: p.entries for layer in layers for p in layer.trainable if layer.name in back}
    rows += [[entries * costs.update_s(d) / request.micro_batches for d in first] for entries in trained.values()]
    kinds = tuple(distinct.index(mark) for mark in marks)
    apart_s = np.array([costs.overhead(d).step_s for d in first])
    count = np.bincount(kinds, minlength=len(distinct)).astype(np.float64)
    return _Work(tuple(layer.name for layer in layers), int(bool(back)), np.array(rows), apart_s, count, kinds)


def _layer_s(costs: Costs, device: int, layer: Layer, batch: int, back: bool) -> float:
    seconds = least_s(costs.times, device, layer, "forward", batch)
    return seconds + least_s(costs.times, device, layer, "backward", batch) if back else seconds


def _computing(work: _Work) -> LowerBound:
    """Return the largest computing bound over weights: first even in time, then by multiplicative steps."""
    seconds, rows, layers = work.seconds, np.arange(len(work.seconds)), len(work.names)
    weights = 1 / np.maximum(seconds.sum(axis=0), 1e-300)
    best = LowerBound(0.0, apart_s=float(work.apart_s.max(initial=0.0)))  # also for a device without work
    for step in range(ROUNDS):
        weights = weights / (weights * work.count).sum()
        priced = weights * seconds
        chosen = priced.argmin(axis=1)
        items = priced[rows, chosen]
        layers_s, loss_s = float(items[:layers].sum()), float(items[layers : layers + work.losses].sum())
        updates_s = float(items.sum()) - layers_s - loss_s
        apart_s = float((weights * work.count * work.apart_s).sum())
        best = max(best, LowerBound(layers_s, updates_s, apart_s, loss_s), key=lambda each: each.compute_s)
        # If every item goes to the kind that prices it lowest, a kind with more load gets a higher price.
        load = np.bincount(chosen, seconds[rows, chosen], len(weights)) / work.count + work.apart_s
        weights = weights * np.exp((load / max(load.max(), 1e-300) - 0.5) / (2.0 + step))
    return best


def _path_of(request: PlanRequest) -> list[list[Layer]] | None:
    """Return the longest path through the net: weighted layers, each with the layers up to the next one.

    Return None if layers have special rules that `_CROSSINGS` does not cover.
    """
    graph = request.graph
    longest: dict[str, tuple[float, str]] = {}
    fed: set[str] = set()  # computed from the inputs without weights: every device may have a copy
    for layer in graph.layers.values():
        before = max(((longest[i][0], i) for i in layer.inputs if i in longest), default=(0.0, ""))
        if not layer.weighted and not before[1]:
            fed.add(layer.name)
            continue
        layer_s = _layer_s(request.costs, 0, layer, request.batch, back=True)
        longest[layer.name] = (layer_s + before[0], before[1])
    ends = [name for name in graph.outputs if name in longest]
    if len(graph.inputs) != 1 or not ends:
        return None
    name, groups = max(ends, key=lambda end: longest[end][0]), list[list[Layer]]()
    group: list[Layer] = []
    while name:
        layer = graph[name]
        odd = layer.shared or layer.called_everywhere or layer.several
        odd = odd or layer.groups > 1 or not layer.batched or not layer.differentiable
        if odd or layer.kind in ("opaque", "pick", "parameter") or (not layer.weighted and layer.inputs[0] in fed):
            return None
        group.insert(0, layer)
        if layer.weighted:
            groups.insert(0, group)
            group = []
        name = longest[name][1]
    return groups


def _wire_s(request: PlanRequest, path: list[list[Layer]], work: _Work, device: int) -> float:
    """Return the least seconds of a step by one device's NIC and processor."""
    own, network = work.kinds[device], request.costs.network
    itemsize = sent_itemsize(request.wire, request.costs.itemsize)
    whole_s = float(work.seconds[:, own].sum())
    if not whole_s:
        return 0.0
    rows = [float(work.seconds[work.names.index(group[0].name), own]) for group in path]
    fewest = _fewest_entries(request, path, [row * UNITS / whole_s for row in rows])
    reached_units = np.flatnonzero(np.isfinite(fewest))
    entries, least_s = fewest[reached_units], reached_units * whole_s / UNITS
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.nan_to_num(work.seconds[:, own : own + 1] / work.seconds, nan=1.0, posinf=np.inf).max(axis=0)
    others = float(ratios @ work.count - 1)  # its own ratio is 1
    busy_s = whole_s + float(work.apart_s[own]) + entries * itemsize * network.processor_s_per_byte[device]
    ideal_s = busy_s if others == math.inf else busy_s * others / (1 + others)
    given_s = np.clip(ideal_s, least_s, least_s + whole_s / UNITS + whole_s - sum(rows))
    host = network.host[device]
    nic_s = entries * itemsize / (network.send_bytes_per_s[host] + network.receive_bytes_per_s[host])
    return float(np.maximum(np.maximum(busy_s - given_s, given_s / others), nic_s).min())


def _fewest_entries(request: PlanRequest, path: list[list[Layer]], units: list[float]) -> Floats:
    """For each amount of work given away (in units), return the fewest tensor entries through the device's NIC.

    Args:
        units: of each weighted layer of the path.
    """
    back = reached(request.graph, trains(request.graph))
    nothing = np.full(UNITS + 1, np.inf)
    nothing[0] = 0.0
    fewest = dict.fromkeys(_PLACES, nothing)
    smallest = 0  # entries between two layers; every device loads its inputs itself
    for group, amount in zip(path, units, strict=True):
        layer, following = group[0], dict[_Place, Floats]()
        weights = sum(p.entries for p in layer.trainable) if layer.name in back else 0
        for here in _PLACES:
            arrived = np.min([fewest[b] + smallest * _CROSSINGS.get((b, here), 0) for b in _PLACES], axis=0)
            least = 0 if here != "others" else math.floor(amount)
            most = 0 if here == "own" else math.ceil(amount)
            moved = [np.roll(arrived, n) for n in range(least, most + 1)]
            for n, each in zip(range(least, most + 1), moved, strict=True):
                each[:n] = np.inf
            sent = 2 * weights / request.micro_batches if here == "samples" else 0.0
            following[here] = np.min(moved, axis=0) + sent
        fewest = following
        smallest = request.batch * min(math.prod(each.shape) for each in group) * (2 if layer.name in back else 1)
    # Summands of channels at the end must be added on some device.
    fewest["channels"] = fewest["channels"] + request.batch * min(math.prod(each.shape) for each in path[-1])
    return np.asarray(np.min(list(fewest.values()), axis=0))


# --- least times ------------------------------------------------------------------------------------------------------


def least_s(times: ComputeTimes, device: int, layer: Layer, phase: Phase, batch: int) -> float:
    """Return seconds s such that any fraction f of the layer (samples x filters x channels) takes at least f * s."""
    match times:
        case MeasuredTimes():
            known = times.devices[device].get(layer.name)
            return 0.0 if known is None else table_least_s(known, layer, phase, batch)
        case CachedTimes():
            factor = times.factors[device] if times.factors else 1.0
            return factor * least_s(times.times, device, layer, phase, batch)
    # A roofline: arithmetic is in proportion to size, and a fraction of a layer moves at least that fraction of the bytes.
    return times.seconds(device, layer, phase, whole_size(layer, batch if layer.batched else 1))


def table_least_s(times: LayerTimes, layer: Layer, phase: Phase, batch: int) -> float:
    """Return `least_s` of measured tables. Corrections and sizes beyond the grids may lower the grids' least seconds."""
    whole = whole_size(layer, batch if layer.batched else 1)
    faster = min([1.0, *(times.ratio(layer, phase, each) for each in times.corrections)])
    rows = [
        _grid_least_s(grid) * whole.samples * getattr(whole, grid.axis) * _least_beyond(grid, layer, whole)
        for grid in times.grids(phase)
        if grid is not None
    ]
    return float(min(rows)) * faster


def _grid_least_s(grid: Grid) -> float:
    """Return the least seconds per unit of size. Interpolation takes means of points, so no size takes less."""
    return min(
        seconds / (samples * other)
        for samples, row in zip(grid.samples, grid.seconds, strict=True)
        for other, seconds in zip(grid.others, row, strict=True)
    )


def _least_beyond(grid: Grid, layer: Layer, whole: LocalSize) -> float:
    """Return the least seconds per unit of size beyond a grid, as a fraction of those at its edge.

    By a roofline a unit takes max(a, m). Arithmetic a is in proportion to size; the memory traffic m of a unit at the edge
    exceeds that of a unit beyond by at most `more`. So the quotient is at least t / (t + more), for t a unit of the whole.
    """

    def unit(value: float, size: LocalSize) -> float:
        return value / (size.samples * size.outputs * size.inputs)

    edge = grid.edge(whole)
    bytes_s = Roofline((Rate(math.inf, 1.0),)).seconds  # at one byte per second
    edge_bytes, whole_bytes = (bytes_s(0, layer, "forward", each) for each in (edge, whole))
    more = unit(edge_bytes, edge) - unit(whole_bytes, whole)
    whole_s = unit(shape_s(layer, whole), whole)  # `shape_s` counts one second for a byte
    return whole_s / (whole_s + max(0.0, more)) if whole_s else 1.0
