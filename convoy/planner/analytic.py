"""What a layer's choices cost by formula: arithmetic, moves, gradient sums, memory. Remembered for all searches of a planning.

Layers that a roofline cannot tell apart are priced once, and so are devices with the same times: a deep net over a thousand
devices has few different questions.
"""

import copy
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from convoy.cost.compute import Roofline
from convoy.cost.costs import Costs
from convoy.cost.memory import optimizer_named
from convoy.cost.traffic import Loads, loads, move_s, sum_loads
from convoy.model.graph import Graph, Layer
from convoy.plan.lower import BUCKET_ENTRIES
from convoy.plan.size import LocalSize, shares_statistics, whole_size
from convoy.plan.strategy import Placement, feature_axis
from convoy.planner.load_balance import Seconds, balance_sampled, sampled_shares
from convoy.sharding.comm_dtype import CommDtype, sent_itemsize
from convoy.sharding.layout import Layout, Partial, Replicated, Split, holders
from convoy.sharding.redistribute import Reduce
from convoy.sharding.shares import Shares

MANY_QUESTIONS = 400
"""Layers times devices, each counted once per kind, beyond which curves are sampled at fewer points."""

DIRECT_DEVICES = 16
"""Up to so many devices, plans are searched for with direct sums: with more, the messages of a device's own are many."""

Side = Literal["outputs", "inputs"]


class LayerPrices(Protocol):
    """Seconds of forward and backward of a part of a layer."""

    trains: set[str]

    def layer_s(self, layer: Layer, device: int, size: LocalSize) -> float: ...


@dataclass(frozen=True, slots=True)
class Squeeze:
    """What makes a search save memory.

    Attributes:
        parts: the largest part of any axis that each device may take, 0 to 1.
        s_per_byte: the price on each device of what a layer keeps there beyond that part.
    """

    parts: tuple[float, ...]
    s_per_byte: tuple[float, ...]

    def limits(self, total: int, active: Sequence[int], quantum: int) -> list[int] | None:
        """Largest shares of an axis; loosened in proportion where they leave a part of the axis to nobody."""
        portions = total // quantum
        room = sum(self.parts[d] for d in active)
        if not room or all(self.parts[d] >= 1 for d in active):
            return None
        wider = max(1.0, 1.0 / room)
        limits = [min(portions, math.floor(portions * self.parts[d] * wider + 1e-9)) for d in active]
        largest = sorted(range(len(active)), key=lambda i: (-self.parts[active[i]], i))
        while (missing := portions - sum(limits)) > 0:
            for i in largest[:missing]:
                limits[i] = min(portions, limits[i] + 1)
        return [limit * quantum for limit in limits]


class Formula:
    """Seconds by formula for one model, batch and fleet.

    Args:
        hidden: the part of what may travel while devices compute (gradients on their way back, sums of gradients) that
            counts as free, and so much of all jitter. The truth lies between 0 and 1, and only a replay knows where.
        wire: in which numbers tensors travel.
        reduce: how sums are made; None: by `direct` up to `DIRECT_DEVICES`, by `ring` beyond.
    """

    def __init__(
        self,
        graph: Graph,
        batch: int,
        costs: Costs,
        price: LayerPrices,
        hidden: float = 0.0,
        wire: CommDtype = "exact",
        reduce: Reduce | None = None,
    ) -> None:
        self.wire = wire
        self.graph, self.batch, self.costs, self.price, self.hidden = graph, batch, costs, price, hidden
        self.devices = costs.network.devices
        self.reduce: Reduce = reduce or ("direct" if self.devices <= DIRECT_DEVICES else "ring")
        self.alike = tuple(costs.times.alike(d) for d in range(self.devices))
        self.firsts = _alike_layers(graph, price.trains) if isinstance(costs.times, Roofline) else {}
        self.counts = Counter(self.like(layer).name for layer in graph.layers.values() if layer.kind != "input")
        self.points_for = None if len(self.counts) * len(set(self.alike)) <= MANY_QUESTIONS else self.devices
        self.handling_s = max((o.round_s + 2 * o.message_s for o in costs.overheads), default=0.0)
        self.jitter_s = max(costs.network.jitter_s, default=0.0) * (1 - hidden)
        self.round_s = costs.network.largest_latency_s + self.handling_s
        self.known: dict[tuple[str, int, LocalSize], float] = {}
        self.wholes: dict[tuple[int, int, bool], float] = {}
        self.curves: dict[tuple[str, str, int], tuple[tuple[int, ...], dict[int, list[float]]]] = {}
        self.moves: dict[tuple[Layout, Layout, tuple[int, ...], bool], float] = {}

    def summing(self, reduce: Reduce) -> "Formula":
        """The same with sums made in another way."""
        if reduce == self.reduce:
            return self
        other = copy.copy(self)
        other.reduce, other.moves = reduce, {}
        return other

    def like(self, layer: Layer) -> Layer:
        """The layer that is priced in its place."""
        return self.firsts.get(layer.name, layer)

    def layer_s(self, layer: Layer, device: int, size: LocalSize) -> float:
        """Forward and backward of a part of a layer."""
        if size.samples == 0 or size.outputs == 0 or size.inputs == 0:
            return 0.0
        layer = self.like(layer)
        key = (layer.name, self.alike[device], size)
        if key not in self.known:
            self.known[key] = self.price.layer_s(layer, self.alike[device], size)
        return self.known[key]

    def samples_s(self, device: int, samples: int, shared: bool = False) -> float:
        """The whole model on some samples; `shared`: they are a part of a batch on several devices."""
        key = (self.alike[device], samples, shared)
        if key not in self.wholes:
            total = 0.0
            for name, count in self.counts.items():
                layer = self.graph[name]
                size = whole_size(layer, samples)
                if shared and layer.statistics:
                    size = replace(size, shares_statistics=True)
                total += count * self.layer_s(layer, device, size)
            self.wholes[key] = total
        return self.wholes[key]

    # --- shares ------------------------------------------------------------------------------------------------------

    def batch_shares(self, active: Sequence[int], squeeze: Squeeze | None = None) -> Shares:
        """Samples of each device."""
        points = sampled_shares(self.batch, devices=self.points_for)
        shared = len(active) > 1
        rows = {a: [self.samples_s(a, n, shared) for n in points] for a in {self.alike[d] for d in active}}
        return self._balanced(self.batch, active, points, rows, 1, squeeze)

    def shares(self, layer: Layer, side: Side, active: Sequence[int], squeeze: Squeeze | None = None) -> Shares:
        """Filters (output features) or input channels of each device."""
        total = layer.channels_out if side == "outputs" else layer.channels_in
        name = self.like(layer).name
        points = sampled_shares(total, devices=self.points_for)
        rows: dict[int, list[float]] = {}
        for kind in {self.alike[d] for d in active}:
            key = (name, side, kind)
            if key not in self.curves:
                whole = LocalSize(self.batch, layer.channels_out, layer.channels_in)
                sizes = [replace(whole, outputs=n) if side == "outputs" else replace(whole, inputs=n) for n in points]
                self.curves[key] = (points, {kind: [self.layer_s(layer, kind, size) for size in sizes]})
            rows |= self.curves[key][1]
        return self._balanced(total, active, points, rows, 1, squeeze)

    def _balanced(
        self,
        total: int,
        active: Sequence[int],
        points: Sequence[int],
        rows: dict[int, list[float]],
        quantum: int,
        squeeze: Squeeze | None,
    ) -> Shares:
        kinds = list(rows)
        table = np.array([rows[kind] for kind in kinds])
        place = {kind: index for index, kind in enumerate(kinds)}
        seconds: Seconds = table[[place[self.alike[d]] for d in active]]
        limits = squeeze.limits(total, active, quantum) if squeeze is not None else None
        return balance_sampled(total, self.devices, active, points, seconds, quantum, limits)

    # --- prices ------------------------------------------------------------------------------------------------------

    def move_s(self, src: Layout, dst: Layout, source: Layer, *, back: bool) -> float:
        """A tensor's way into another layout, and that of its gradient back."""
        if source.kind == "input" or not source.batched:
            return 0.0
        shape = source.batch_shape(self.batch)
        key = (src, dst, shape, back)
        if key not in self.moves:
            load = loads(src, dst, shape, self.devices, self.reduce)
            seconds = self._wire_s(load)
            if back:
                seconds += self._wire_s(load.reversed) * (1 - self.hidden)
            self.moves[key] = seconds
        return self.moves[key]

    def _wire_s(self, load: Loads) -> float:
        seconds = move_s(load, self.costs.network, sent_itemsize(self.wire, self.costs.itemsize))
        # Who computed comes late to the first round; to the next ones, all come from waiting.
        return seconds + load.rounds * self.handling_s + (self.jitter_s if load.rounds else 0.0)

    def compute_s(self, layer: Layer, placed: Placement) -> float:
        """The slowest device's part of a layer."""
        return max((self.layer_s(layer, device, size) for device, size in self._sizes(layer, placed)), default=0.0)

    def _sizes(self, layer: Layer, placed: Placement) -> set[tuple[int, LocalSize]]:
        """(kind of device, what it computes), each once."""
        whole = whole_size(layer, self.batch if layer.batched else 1)
        gives, alike = placed.gives, self.alike
        if not layer.batched or not isinstance(gives, Split | Partial):
            return {(alike[d], whole) for d in holders(gives)}
        first = placed.takes[0]
        if isinstance(gives, Partial):
            if not isinstance(first, Split):
                return {(alike[d], whole) for d in holders(gives)}
            return {(alike[d], LocalSize(self.batch, whole.outputs, first.shares[d])) for d in holders(gives)}
        shared = shares_statistics(layer, gives)
        parts = {(alike[d], gives.shares[d]) for d in holders(gives)}
        if gives.axis == 0:
            return {(kind, LocalSize(n, whole.outputs, whole.inputs, shared)) for kind, n in parts}
        if gives.axis == feature_axis(layer):
            return {(kind, LocalSize(self.batch, n, whole.inputs)) for kind, n in parts}
        return {(kind, whole) for kind, _ in parts}

    def sums_s(self, layer: Layer, placed: Placement) -> float:
        """Gradient sums of copied parameters, and the optimizer's work on what the busiest device keeps."""
        summed, kept = 0, 0.0
        for key, parameter in layer.parameters.items():
            if not parameter.trainable:
                continue
            layout = placed.parameters[key]
            if isinstance(layout, Replicated) and len(layout.devices) > 1:
                summed += parameter.entries
            kept = max(kept, max(n * self.costs.update_s(d) for d, n in _held(layout, parameter.shape)))
        if not summed:
            return kept
        copies = next(v for v in placed.parameters.values() if isinstance(v, Replicated))
        load = sum_loads(copies.devices, copies.devices, float(summed), self.devices, self.reduce)
        seconds = self._wire_s(load)
        # Sums share buckets: a small layer pays only its part of a bucket's latency and jitter.
        seconds -= (load.rounds * self.round_s + self.jitter_s) * max(0.0, 1 - summed / BUCKET_ENTRIES)
        return kept + seconds * (1 - self.hidden)

    def memory_s(self, layer: Layer, placed: Placement, squeeze: Squeeze, optimizer: str) -> float:
        """The price of what a layer keeps beyond each device's part of it: parameters with gradient and state, its output.

        Were the whole priced, whole tensors would only change places; so priced, they are split.
        """
        numbers = 2 + optimizer_named(optimizer).state
        rows = [(placed.parameters[key], p.shape, numbers if p.trainable else 1) for key, p in layer.parameters.items()]
        if layer.batched:
            rows.append((placed.gives, layer.batch_shape(self.batch), 1))
        seconds = 0.0
        for layout, shape, times in rows:
            whole = math.prod(shape)
            for device, entries in _held(layout, shape):
                beyond = max(0.0, entries - squeeze.parts[device] * whole)
                seconds += beyond * times * squeeze.s_per_byte[device]
        return seconds * self.costs.itemsize


def _held(layout: Layout, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """(device, entries) of each device that holds something."""
    entries = math.prod(shape)
    if isinstance(layout, Split):
        behind = entries // max(1, shape[layout.axis])
        return [(d, n * behind) for d, n in enumerate(layout.shares) if n]
    return [(d, entries) for d in holders(layout)]


def _alike_layers(graph: Graph, trains: set[str]) -> dict[str, Layer]:
    """For each layer the first one that has the same shapes, inputs and parameters."""
    first: dict[object, Layer] = {}
    result = {}
    for layer in graph.layers.values():
        parameters = tuple((key, p.shape, p.trainable, p.buffer) for key, p in layer.parameters.items())
        inputs = tuple(
            (layer.inputs.index(i), graph[i].shape, graph[i].kind == "input", graph[i].batched, i in trains)
            for i in layer.inputs
        )
        blank = replace(layer, name="", inputs=(), parameters={}, reason="")
        signature = (repr(blank), parameters, inputs, layer.name in trains)
        result[layer.name] = first.setdefault(signature, layer)
    return result
