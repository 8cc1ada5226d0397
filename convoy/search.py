"""Dynamic programming over the layers of a model, for one set of devices.

The state is where the tensors that are still to be read lie; a layer's choices are the strategies it can have; a choice
costs its arithmetic, the moves of its inputs there and of their gradients back, and its gradient sums.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from convoy.balance import balance
from convoy.cost.size import LocalSize, whole_size
from convoy.cost.traffic import loads, move_s
from convoy.graph import Graph, Layer
from convoy.layout import Layout, OnOne, Partial, Replicated, Split, box, holders
from convoy.lower import BUCKET_ENTRIES, trains
from convoy.plan import Plan
from convoy.shares import Shares, apportion
from convoy.simulate import Costs
from convoy.strategy import Batch, Channel, Filter, One, Placement, Strategy, feature_axis, follow, place

BEAM = 48
"""States kept per layer: residual nets need a handful, only dense concatenation has more."""

_Where = tuple[tuple[str, tuple[Layout, ...]], ...]
"""Live tensors with the layouts they are available in; the first is the one they were made in."""


class Prices:
    """Seconds of layers, remembered: devices with the same table are asked once."""

    def __init__(self, graph: Graph, batch: int, costs: Costs) -> None:
        self.graph, self.batch, self.costs = graph, batch, costs
        self.trains = trains(graph)
        self.known: dict[tuple[str, int, LocalSize], float] = {}

    def layer_s(self, layer: Layer, device: int, size: LocalSize) -> float:
        """Forward and backward of a part of a layer."""
        if size.samples == 0 or size.outputs == 0 or size.inputs == 0:
            return 0.0
        key = (layer.name, self.costs.times.alike(device), size)
        if key not in self.known:
            seconds = self.costs.times.seconds(device, layer, "forward", size)
            if layer.name in self.trains:
                seconds += self.costs.times.seconds(device, layer, "backward", size)
            self.known[key] = seconds
        return self.known[key]

    def samples_s(self, device: int, samples: int) -> float:
        """The whole model on some samples."""
        layers = (layer for layer in self.graph.layers.values() if layer.kind != "input")
        return sum(self.layer_s(layer, device, whole_size(layer, samples)) for layer in layers)

    def alone_s(self, device: int) -> float:
        entries = sum(p.entries for layer in self.graph.layers.values() for p in layer.trainable)
        return self.samples_s(device, self.batch) + entries * self.costs.update_s(device)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Strategies chosen so far, newest first."""

    layer: str
    strategy: Strategy
    before: "_Chosen | None"


class Search:
    """Dynamic programming for one set of devices."""

    def __init__(
        self, graph: Graph, batch: int, costs: Costs, active: Sequence[int], only: Mapping[str, str] | None = None
    ) -> None:
        self.graph, self.batch, self.costs, self.active = graph, batch, costs, tuple(active)
        self.only = only or {}
        self.devices = costs.network.devices
        self.price = Prices(graph, batch, costs)
        self.batch_shares = balance(batch, self.devices, active, self.price.samples_s)
        self.by_batch = Batch(self.batch_shares)
        self.speeds = [1 / self.price.samples_s(d, batch) if d in active else 0.0 for d in range(self.devices)]
        # With one split of the batch for all layers, the device that is last over all of them sets the pace.
        self.last = max(active, key=lambda d: self.price.samples_s(d, self.batch_shares[d]))
        self.readers = {name: len(rows) + (name in graph.outputs) for name, rows in graph.readers.items()}
        self.moves: dict[tuple[Layout, Layout, tuple[int, ...]], float] = {}
        self.filters: dict[str, Shares] = {}

    def run(self) -> list[tuple[float, Plan]]:
        """The best plans (a few, that end in different layouts), cheapest first."""
        states: dict[_Where, tuple[float, _Chosen | None]] = {(): (0.0, None)}
        left = dict(self.readers)
        for layer in self.graph.layers.values():
            for name in set(layer.inputs):
                left[name] -= 1
            following: dict[_Where, tuple[float, _Chosen | None]] = {}
            for where, (cost, chosen) in states.items():
                for strategy, placed in self._choices(layer, dict(where)):
                    price, after = self._price(layer, placed, dict(where), left)
                    new = chosen if strategy is None else _Chosen(layer.name, strategy, chosen)
                    if after not in following or cost + price < following[after][0]:
                        following[after] = (cost + price, new)
            states = dict(sorted(following.items(), key=lambda item: item[1][0])[:BEAM])
        rows = [(cost + self._end_s(dict(where)), chosen) for where, (cost, chosen) in states.items()]
        rows.sort(key=lambda row: row[0])
        return [(cost, self._plan(chosen)) for cost, chosen in rows[:3]]

    def _plan(self, chosen: _Chosen | None) -> Plan:
        layers: dict[str, Strategy] = {}
        while chosen is not None:
            layers[chosen.layer] = chosen.strategy
            chosen = chosen.before
        ordered = {name: layers[name] for name in self.graph.layers if name in layers}
        return Plan("auto", self.graph.fingerprint, self.devices, self.batch, ordered, self.by_batch)

    # --- choices -----------------------------------------------------------------------------------------------------

    def _choices(
        self, layer: Layer, where: Mapping[str, tuple[Layout, ...]]
    ) -> Iterator[tuple[Strategy | None, Placement]]:
        """What a layer can do; None: it follows its input, and the plan need not name it."""
        if layer.kind == "input":
            yield None, Placement((), self._place(layer, self.by_batch).gives)
            return
        leading = next((where[i][0] for i in layer.inputs if self.graph[i].batched), None)
        if not layer.batched or leading is None:
            yield None, self._place(layer, self.by_batch)
            return
        if layer.kind == "pick":
            yield None, Placement((leading,), leading)
            return
        if layer.weighted and layer.groups == 1:
            for strategy in self._weighted(layer, where[layer.inputs[0]]):
                if self.only.get(layer.name, strategy.name) == strategy.name:
                    yield strategy, self._place(layer, strategy)
            return
        followed = follow(self.graph, layer, leading, self.devices)
        if followed is not None:
            yield None, followed
            return
        if layer.per_sample:
            yield None, self._place(layer, self.by_batch)
        fastest = One(self.active[0])
        if layer.per_sample or isinstance(leading, OnOne):
            yield fastest, self._place(layer, fastest)
        else:
            slowest_named = One(self.batch_shares.index(max(self.batch_shares)))
            yield slowest_named, self._place(layer, slowest_named)
        if isinstance(leading, Partial) and layer.kind in ("elementwise", "pool", "flatten", "batch_norm"):
            channels = self.graph[layer.inputs[0]].shape[0]
            split = Filter(apportion(channels, self.speeds))
            if not layer.shared and follow(self.graph, layer, Split(1, split.shares), self.devices) is not None:
                yield split, self._place(layer, split)

    def _place(self, layer: Layer, strategy: Strategy) -> Placement:
        return place(self.graph, layer, strategy, self.batch, self.devices)

    def _weighted(self, layer: Layer, available: tuple[Layout, ...]) -> Iterator[Strategy]:
        yield self.by_batch
        yield One(self.active[0])
        if layer.shared or len(self.active) == 1:
            return
        yield Filter(self._filter_shares(layer))
        axis = feature_axis(layer)
        split = next((a for a in available if isinstance(a, Split) and a.axis == axis), None)
        yield Channel(split.shares if split is not None else self._channel_shares(layer))

    def _filter_shares(self, layer: Layer) -> Shares:
        if layer.name not in self.filters:
            self.filters[layer.name] = balance(
                layer.channels_out, self.devices, self.active,
                lambda d, n: self.price.layer_s(layer, d, LocalSize(self.batch, n, layer.channels_in)),
            )  # fmt: skip
        return self.filters[layer.name]

    def _channel_shares(self, layer: Layer) -> Shares:
        key = f"{layer.name}/in"
        if key not in self.filters:
            self.filters[key] = balance(
                layer.channels_in, self.devices, self.active,
                lambda d, n: self.price.layer_s(layer, d, LocalSize(self.batch, layer.channels_out, n)),
            )  # fmt: skip
        return self.filters[key]

    # --- prices ------------------------------------------------------------------------------------------------------

    def _price(
        self, layer: Layer, placed: Placement, where: dict[str, tuple[Layout, ...]], left: Mapping[str, int]
    ) -> tuple[float, _Where]:
        cost = 0.0
        for name, wanted in zip(layer.inputs, placed.takes, strict=True):
            source = self.graph[name]
            if wanted in where[name]:
                continue
            if source.kind != "input" and source.batched:
                cost += self._move_s(where[name][0], wanted, source, back=name in self.price.trains)
            where[name] = (*where[name], wanted)
        if layer.kind != "input":
            cost += self._compute_s(layer, placed) + self._sums_s(layer, placed)
        where[layer.name] = (placed.gives,)
        live = tuple((name, where[name]) for name in sorted(where) if left.get(name, 0) > 0)
        return cost, live

    def _move_s(self, src: Layout, dst: Layout, source: Layer, *, back: bool) -> float:
        shape = source.batch_shape(self.batch)
        key = (src, dst, shape)
        if key not in self.moves:
            load = loads(src, dst, shape, self.devices)
            self.moves[key] = move_s(load, self.costs.network, self.costs.itemsize)
        there = self.moves[key]
        if not back:
            return there
        key = (dst, src, (*shape, -1))  # the gradient's way, between the dual layouts
        if key not in self.moves:
            load = loads(src, dst, shape, self.devices).reversed
            self.moves[key] = move_s(load, self.costs.network, self.costs.itemsize)
        return there + self.moves[key]

    def _compute_s(self, layer: Layer, placed: Placement) -> float:
        if isinstance(placed.gives, Split) and placed.gives.axis == 0 and placed.gives.shares == self.batch_shares:
            return self.price.layer_s(layer, self.last, whole_size(layer, self.batch_shares[self.last]))
        workers = holders(placed.gives)
        return max((self.price.layer_s(layer, d, self._size(layer, placed, d)) for d in workers), default=0.0)

    def _size(self, layer: Layer, placed: Placement, device: int) -> LocalSize:
        whole = whole_size(layer, self.batch if layer.batched else 1)
        if not layer.batched:
            return whole
        shape = layer.batch_shape(self.batch)
        here = box(placed.gives, device, shape)
        assert here is not None
        axis = feature_axis(layer)
        outputs = here[axis][1] - here[axis][0] if len(here) > axis else whole.outputs
        inputs = whole.inputs
        if isinstance(placed.gives, Partial) and isinstance(placed.takes[0], Split):
            inputs = placed.takes[0].shares[device]
        return LocalSize(here[0][1] - here[0][0], outputs, inputs)

    def _sums_s(self, layer: Layer, placed: Placement) -> float:
        """Gradient sums of copied parameters, and the optimizer's work on what the busiest device keeps."""
        summed, kept = 0, 0.0
        for key, parameter in layer.parameters.items():
            if not parameter.trainable:
                continue
            layout = placed.parameters[key]
            if isinstance(layout, Replicated) and len(layout.devices) > 1:
                summed += parameter.entries
            kept = max(kept, max(self._update_s(layout, parameter.shape, d) for d in holders(layout)))
        if not summed:
            return kept
        copies = next(v for v in placed.parameters.values() if isinstance(v, Replicated))
        load = loads(Partial(copies.devices), copies, (summed,), self.devices)
        latency_s = load.rounds * max(max(row) for row in self.costs.network.latency_s)
        seconds = move_s(load, self.costs.network, self.costs.itemsize)
        # Sums share buckets: a small layer pays only its part of a bucket's latency.
        return kept + seconds - latency_s * max(0.0, 1 - summed / BUCKET_ENTRIES)

    def _update_s(self, layout: Layout, shape: tuple[int, ...], device: int) -> float:
        here = box(layout, device, shape)
        entries = math.prod(stop - start for start, stop in here) if here is not None else 0
        return entries * self.costs.update_s(device)

    def _end_s(self, where: Mapping[str, tuple[Layout, ...]]) -> float:
        """The outputs come to every device."""
        everyone = Replicated(tuple(range(self.devices)))
        return sum(
            self._move_s(where[name][0], everyone, self.graph[name], back=False)
            for name in self.graph.outputs
            if everyone not in where[name]
        )
