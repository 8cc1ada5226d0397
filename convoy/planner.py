"""The planner: a strategy with shares for every layer, and which devices take part, for the shortest predicted step.

Dynamic programming over the layers in order. The state is where the tensors that are still to be read lie; a layer's choices
are the strategies it can have; a choice costs its arithmetic, the moves of its inputs there and of their gradients back, and
its gradient sums. The fastest device alone, the two fastest, ... are planned in turn; the best few are replayed.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from convoy.cost.size import LocalSize, whole_size
from convoy.cost.traffic import loads, move_s
from convoy.graph import Graph, Layer
from convoy.layout import Layout, OnOne, Partial, Replicated, Split, box, holders
from convoy.lower import BUCKET_ENTRIES, lower
from convoy.named import PLANS, Speeds, named_plan
from convoy.plan import Plan
from convoy.shares import Shares, apportion
from convoy.simulate import Costs, simulate
from convoy.strategy import STRATEGIES, Batch, Channel, Filter, One, Placement, Strategy, feature_axis, follow, place

BEAM = 48
"""States kept per layer: residual nets need a handful, only dense concatenation has more."""

POLISHED_LAYERS = 4
"""Nets with more weighted layers are planned by the formula alone, and only the best are replayed."""

REPLAYED_MESSAGES = 20_000
"""Plans with more messages per step are compared by formula, not by replay."""

_Where = tuple[tuple[str, tuple[Layout, ...]], ...]
"""Live tensors with the layouts they are available in; the first is the one they were made in."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its predicted step time."""

    plan: Plan
    step_s: float


def plan_auto(graph: Graph, batch: int, costs: Costs) -> Plan:
    """The plan with the shortest predicted step.

    Args:
        batch: global batch, in samples.
        costs: measured or modelled times of these layers on these devices, and their network.
    """
    return candidates(graph, batch, costs)[0].plan


def candidates(graph: Graph, batch: int, costs: Costs) -> list[Candidate]:
    """The planner's plans for each number of devices, and the named plans; the shortest predicted step first.

    Deterministic: equal times are ordered by fewer devices, then by the order in which they were found.
    """
    speeds = solo_speeds(graph, batch, costs)
    order = sorted(range(len(speeds)), key=lambda d: (-speeds[d], d))
    found: list[tuple[float, int, Plan]] = []
    for count in _counts(len(order)):
        for formula_s, plan in _Search(graph, batch, costs, order[:count]).run():
            found.append((_predicted(plan, graph, costs, formula_s), count, plan))
    if len(graph.weighted) <= POLISHED_LAYERS and len(order) <= 8:
        best_of = {
            count: (step_s, plan) for step_s, count, plan in sorted(found, key=lambda row: row[:2], reverse=True)
        }
        for count in sorted(best_of, key=lambda c: (best_of[c][0], c))[:3]:
            found.append(_polished(graph, batch, costs, order[:count], best_of[count][1]))
    if len(order) <= 16:
        for name in PLANS:
            plan = named_plan(name, graph, batch, Speeds(speeds))
            found.append((_predicted(plan, graph, costs, math.inf), len(order), plan))
    return [Candidate(plan, step_s) for step_s, _, plan in sorted(found, key=lambda row: row[:2])]


def _polished(graph: Graph, batch: int, costs: Costs, active: Sequence[int], plan: Plan) -> tuple[float, int, Plan]:
    """The formula adds up layers, the replay knows who waits for whom: change a few strategies at a time (all of them where
    there are three) while a replay gets shorter."""
    names = [layer.name for layer in graph.weighted if layer.groups == 1]
    kinds = {name: plan.layers[name].name for name in names if name in plan.layers}
    best = (_predicted(plan, graph, costs, math.inf), plan)
    tried = {tuple(kinds.values())}
    changed = True
    while changed:
        changed = False
        for width in range(1, min(len(kinds), 3 if len(kinds) < 4 else 2) + 1):
            for some in itertools.combinations(kinds, width):
                for others in itertools.product(STRATEGIES, repeat=width):
                    attempt = kinds | dict(zip(some, others, strict=True))
                    if tuple(attempt.values()) in tried:
                        continue
                    tried.add(tuple(attempt.values()))
                    for formula_s, other in _Search(graph, batch, costs, active, attempt).run()[:1]:
                        step_s = _predicted(other, graph, costs, formula_s)
                        if step_s < best[0]:
                            best, kinds, changed = (step_s, other), attempt, True
    return best[0], len(active), best[1]


def solo_speeds(graph: Graph, batch: int, costs: Costs) -> tuple[float, ...]:
    """Samples/s of each device training alone with the whole batch: their sum is the limit of the fleet."""
    devices = costs.network.devices
    price = _Prices(graph, batch, costs)
    return tuple(batch / price.alone_s(device) for device in range(devices))


def _counts(devices: int) -> list[int]:
    """How many of the fastest devices to try: all numbers up to 16, then ever larger steps."""
    counts = list(range(1, min(devices, 16) + 1))
    while counts[-1] < devices:
        counts.append(min(devices, max(counts[-1] + 1, counts[-1] * 5 // 4)))
    return counts


def _predicted(plan: Plan, graph: Graph, costs: Costs, formula_s: float) -> float:
    if math.isfinite(formula_s) and plan.devices > 16:
        return formula_s
    steps = lower(plan, graph)
    messages = sum(len(r) for s in steps.steps if hasattr(s, "schedule") for r in s.schedule.rounds)
    if math.isfinite(formula_s) and messages > REPLAYED_MESSAGES:
        return formula_s
    return simulate(steps, graph, costs).step_s


class _Prices:
    """Seconds of layers, remembered: devices with the same table are asked once."""

    def __init__(self, graph: Graph, batch: int, costs: Costs) -> None:
        self.graph, self.batch, self.costs = graph, batch, costs
        self.trains = _trains(graph)
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


def _trains(graph: Graph) -> set[str]:
    result: set[str] = set()
    for layer in graph.layers.values():
        if layer.trainable or any(name in result for name in layer.inputs):
            result.add(layer.name)
    return result


def balance(
    total: int, devices: int, active: Sequence[int], seconds: Callable[[int, int], float], quantum: int = 1
) -> Shares:
    """Shares of an axis so that the slowest of `active` is done as early as possible.

    `seconds(device, share)` need not be proportional: it is sampled at some shares and taken as a line between them. A
    device that cannot finish one portion in time gets none.
    """
    points = sorted({0, *(max(quantum, total * i // 16) for i in range(1, 17)), total})
    curves = {d: _rising([(n, seconds(d, n) if n else 0.0) for n in points]) for d in active}
    below, above = 0.0, min(curve[-1][1] for curve in curves.values())
    for _ in range(60):
        middle = (below + above) / 2
        if sum(_done(curve, middle) for curve in curves.values()) >= total:
            above = middle
        else:
            below = middle
    parts = [_done(curves[d], above) if d in curves else 0.0 for d in range(devices)]
    return apportion(total, parts if any(parts) else [float(d == active[0]) for d in range(devices)], quantum=quantum)


def _rising(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Measured times may dip; a larger share never counts as faster."""
    highest, result = 0.0, []
    for n, seconds in points:
        highest = max(highest, seconds)
        result.append((n, highest))
    return result


def _done(curve: list[tuple[int, float]], limit_s: float) -> float:
    """The largest share that is done within a time."""
    for (n0, t0), (n1, t1) in zip(reversed(curve[:-1]), reversed(curve[1:]), strict=True):
        if limit_s >= t1:
            return float(n1)
        if limit_s > t0:
            return n0 + (n1 - n0) * (limit_s - t0) / (t1 - t0)
    return 0.0


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Strategies chosen so far, newest first."""

    layer: str
    strategy: Strategy
    before: "_Chosen | None"


class _Search:
    """Dynamic programming for one set of devices."""

    def __init__(
        self, graph: Graph, batch: int, costs: Costs, active: Sequence[int], only: Mapping[str, str] | None = None
    ) -> None:
        self.graph, self.batch, self.costs, self.active = graph, batch, costs, tuple(active)
        self.only = only or {}
        self.devices = costs.network.devices
        self.price = _Prices(graph, batch, costs)
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
