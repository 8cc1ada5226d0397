"""Analytic cost model: seconds of a layer's arithmetic, its moves, its gradient sums and its memory, without simulating a step.

Layers that a roofline cannot tell apart are priced once, and so are devices with the same times: a deep net over a thousand
devices has few different questions. What was computed is kept for all searches of one planning.
"""

import copy
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from convoy.layout.comm_dtype import sent_itemsize
from convoy.layout.layout import Layout, Partial, Replicated, Split, holders
from convoy.layout.redistribute import Reduce
from convoy.layout.shares import Shares, rescale
from convoy.model.graph import Graph, Layer
from convoy.plan.device_program import LocalSize, part_of_outputs, shares_statistics, whole_size
from convoy.plan.lower import BUCKET_ENTRIES, lower, trains
from convoy.plan.plan import Plan
from convoy.plan.steps import MicroBatch, StepList
from convoy.plan.strategy import Placement, Sharding, can_shard
from convoy.planner.request import PlanRequest
from convoy.simulate.compute import Roofline
from convoy.simulate.memory import optimizer_named
from convoy.simulate.traffic import Loads, loads, move_s, share_loads, sum_loads

DIRECT_DEVICES = 16
"""Up to so many devices, plans are searched for with direct sums: with more, the messages of a device's own are many."""

Side = Literal["outputs", "inputs"]


@dataclass(frozen=True, slots=True)
class MemoryPenalty:
    """Makes a search save memory.

    Attributes:
        parts: the largest part of any axis that each device may take, 0 to 1.
        s_per_byte: the price on each device of what a layer keeps there beyond that part.
    """

    parts: tuple[float, ...]
    s_per_byte: tuple[float, ...]

    def limits(self, total: int, active: Sequence[int]) -> list[int] | None:
        """Largest shares of an axis; loosened in proportion where they leave a part of the axis to nobody."""
        room = sum(self.parts[d] for d in active)
        if not room or all(self.parts[d] >= 1 for d in active):
            return None
        wider = max(1.0, 1.0 / room)
        limits = [min(total, math.floor(total * self.parts[d] * wider + 1e-9)) for d in active]
        largest = sorted(range(len(active)), key=lambda i: (-self.parts[active[i]], i))
        while (missing := total - sum(limits)) > 0:
            for i in largest[:missing]:
                limits[i] = min(total, limits[i] + 1)
        return limits


def content(plan: Plan) -> tuple[object, ...]:
    """What of a plan its steps depend on, to look it up by."""
    return (
        plan.reduce,
        plan.chunks,
        plan.wire,
        plan.outputs,
        plan.otherwise,
        frozenset(plan.layers.items()),
        frozenset(plan.sharded.items()),
    )


class CostModel:
    """Seconds of the parts of a step for one request.

    Where a step has several micro-batches, seconds are the mean over them: the last one sums and updates for all.

    Args:
        overlap: the part of what may travel while devices compute (gradients on their way back, sums of gradients) that
            counts as free, and so much of all jitter. The truth lies between 0 and 1; only a simulation knows where.
    """

    def __init__(self, request: PlanRequest, overlap: float = 0.0) -> None:
        self.request, self.overlap = request, overlap
        self.graph, self.batch, self.costs = request.graph, request.batch, request.costs
        self.devices = self.costs.network.devices
        self.reduce: Reduce = request.sums or ("direct" if self.devices <= DIRECT_DEVICES else "ring")
        self.trains = trains(self.graph)
        self.losses = frozenset(n for n in self.graph.outputs if self.graph[n].batched and n in self.trains)
        self.alike = tuple(self.costs.times.alike(d) for d in range(self.devices))
        self.firsts = _alike_layers(self.graph, self.trains) if isinstance(self.costs.times, Roofline) else {}
        self.counts = Counter(self.like(layer).name for layer in self.graph.layers.values() if layer.kind != "input")
        self.round_overhead_s = max((o.round_s + 2 * o.message_s for o in self.costs.overheads), default=0.0)
        self.round_s = self.costs.network.largest_latency_s + self.round_overhead_s
        self.arithmetic: dict[tuple[str, int, LocalSize], float] = {}
        self.wholes: dict[tuple[int, int, bool], float] = {}
        self.curves: dict[tuple[str, Side, int], list[float]] = {}
        self.moves: dict[tuple[Layout, Layout, tuple[int, ...], bool], float] = {}
        self.splits: dict[tuple[int, ...], dict[tuple[str, str], Shares]] = {}  # devices -> the shares of layers
        self.lowered: dict[tuple[object, ...], StepList] = {}

    def variant(self, *, reduce: Reduce | None = None, overlap: float | None = None) -> Self:
        """The same with other sums or another overlap; what layers take is computed once for both."""
        reduce, overlap = reduce or self.reduce, self.overlap if overlap is None else overlap
        if (reduce, overlap) == (self.reduce, self.overlap):
            return self
        other = copy.copy(self)
        other.reduce, other.overlap, other.moves = reduce, overlap, {}
        return other

    def steps(self, plan: Plan, micro_batch: MicroBatch = "only") -> StepList:
        """A plan's steps; of the same plan they are made once, for its memory and for its simulation."""
        key = (*content(plan), micro_batch)
        if key not in self.lowered:
            self.lowered[key] = lower(plan, self.graph, micro_batch=micro_batch)
        return self.lowered[key]

    def like(self, layer: Layer) -> Layer:
        """The layer that is priced in its place."""
        return self.firsts.get(layer.name, layer)

    # --- arithmetic --------------------------------------------------------------------------------------------------

    def layer_s(self, layer: Layer, device: int, size: LocalSize) -> float:
        """Forward and backward of a part of a layer, with what the executor takes for it."""
        if size.samples == 0 or size.outputs == 0 or size.inputs == 0:
            return 0.0
        phases = 2 if layer.name in self.trains else 1
        kind = self.alike[device]
        overhead = self.costs.overhead(kind)
        seconds = self._arithmetic_s(layer, kind, size) + phases * overhead.layer_s / 2
        seconds = max(seconds, phases * overhead.queue_s)
        if layer.name in self.losses and self.request.outputs == "where-computed":
            # Elsewhere every device computes the loss of the whole batch, whatever the plan.
            seconds += overhead.loss_s((size.samples * math.prod(layer.shape),), self.costs.itemsize)
        return seconds

    def _arithmetic_s(self, layer: Layer, device: int, size: LocalSize) -> float:
        layer, device = self.like(layer), self.alike[device]
        if layer.statistics and size.samples < self.batch:
            # The rest of the batch lies on other devices.
            size = replace(size, shares_statistics=True)
        key = (layer.name, device, size)
        if key not in self.arithmetic:
            seconds = self.costs.times.seconds(device, layer, "forward", size)
            if layer.name in self.trains:
                seconds += self.costs.times.seconds(device, layer, "backward", size)
            self.arithmetic[key] = seconds
        return self.arithmetic[key]

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

    def curve_s(self, layer: Layer, side: Side, device: int, points: Sequence[int]) -> list[float]:
        """A layer on all samples with each of some numbers of filters (output features) or input channels.

        Args:
            points: always the same ones for a layer and a side.
        """
        key = (self.like(layer).name, side, self.alike[device])
        if key not in self.curves:
            whole = whole_size(layer, self.batch)
            sizes = [replace(whole, outputs=n) if side == "outputs" else replace(whole, inputs=n) for n in points]
            self.curves[key] = [self.layer_s(layer, device, size) for size in sizes]
        return self.curves[key]

    def compute_s(self, layer: Layer, placed: Placement) -> float:
        """The slowest device's part of a layer."""
        return max((self.layer_s(layer, device, size) for device, size in self._sizes(layer, placed)), default=0.0)

    def _sizes(self, layer: Layer, placed: Placement) -> set[tuple[int, LocalSize]]:
        """(kind of device, what it computes), each once."""
        whole = whole_size(layer, self.batch if layer.batched else 1)
        gives, alike = placed.gives, self.alike
        if not layer.batched or not isinstance(gives, Split | Partial):
            return {(alike[d], whole) for d in holders(gives)}
        if isinstance(gives, Partial):
            # A layer may read no tensor: `torch.ones(x.shape[0], 8)` has only the batch's size from its input.
            first = placed.takes[0] if placed.takes else None
            if not isinstance(first, Split):
                return {(alike[d], whole) for d in holders(gives)}
            return {(alike[d], LocalSize(self.batch, whole.outputs, first.shares[d])) for d in holders(gives)}
        shared = shares_statistics(layer, gives)
        if gives.axis == 0:
            return {(alike[d], LocalSize(gives.shares[d], whole.outputs, whole.inputs, shared)) for d in holders(gives)}
        return {
            (alike[d], LocalSize(self.batch, part_of_outputs(layer, gives, d), whole.inputs)) for d in holders(gives)
        }

    # --- exchanges and memory ----------------------------------------------------------------------------------------

    def move_s(self, src: Layout, dst: Layout, source: Layer, *, back: bool) -> float:
        """A tensor's way into another layout, and (`back`) that of its gradient."""
        if source.kind == "input" or not source.batched:
            return 0.0
        shape = source.batch_shape(self.batch)
        key = (src, dst, shape, back)
        if key not in self.moves:
            load = loads(src, dst, shape, self.devices, self.reduce)
            seconds = self._exchange_s(load)
            if back:
                seconds += self._exchange_s(load.reversed) * (1 - self.overlap)
            self.moves[key] = seconds
        return self.moves[key]

    def _exchange_s(self, load: Loads) -> float:
        seconds = move_s(load, self.costs.network, sent_itemsize(self.request.wire, self.costs.itemsize))
        # Who computed comes late to the first round; to the next ones, all come from waiting.
        return seconds + load.rounds * self.round_overhead_s + (self._jitter_s if load.rounds else 0.0)

    @property
    def _jitter_s(self) -> float:
        return max(self.costs.network.jitter_s, default=0.0) * (1 - self.overlap)

    def sums_s(self, layer: Layer, placed: Placement, how: Sharding | None = None) -> float:
        """Gradient sums of copied parameters, and the optimizer's work on what the busiest device keeps, by pass.

        Args:
            how: copies are kept in shares: sums come to the shares in every pass, and whole copies are gathered from them, in
                the first pass or, where they are freed after use, twice in every pass.
        """
        summed, kept = 0, 0.0
        for key, parameter in layer.parameters.items():
            if not parameter.trainable:
                continue
            layout = placed.parameters[key]
            if isinstance(layout, Replicated) and len(layout.devices) > 1:
                summed += parameter.entries
                layout = (
                    layout if how is None or not parameter.shape else Split(0, rescale(how.shares, parameter.shape[0]))
                )
            kept = max(kept, max(n * self.costs.update_s(d) for d, n in _held(layout, parameter.shape)))
        if not summed:
            return kept / self.request.micro_batches
        copies = next(v for v in placed.parameters.values() if isinstance(v, Replicated))
        # Sums share buckets: a small layer pays only its part of a bucket's latency and jitter.
        shared = max(0.0, 1 - summed / BUCKET_ENTRIES)
        if how is not None:
            load = share_loads(copies.devices, how.shares, float(summed), self.devices)
            gathered = 1 / self.request.micro_batches if how.form == "keep" else 2
            seconds = self._exchange_s(load) + gathered * self._exchange_s(load.reversed)
            seconds -= (1 + gathered) * (self.round_s + self._jitter_s) * shared
            return kept / self.request.micro_batches + seconds * (1 - self.overlap)
        load = sum_loads(copies.devices, copies.devices, float(summed), self.devices, self.reduce)
        seconds = self._exchange_s(load) - (load.rounds * self.round_s + self._jitter_s) * shared
        return (kept + seconds * (1 - self.overlap)) / self.request.micro_batches

    def memory_s(self, layer: Layer, placed: Placement, penalty: MemoryPenalty, how: Sharding | None = None) -> float:
        """The price of what a layer keeps beyond each device's part of it: parameters with gradient and state, its output.

        Were the whole priced, whole tensors would only change places; so priced, they are split. Of what is kept in shares and
        freed after use, whole copies and whole gradients are there for a while only.
        """
        numbers = 2 + optimizer_named(self.request.optimizer).state
        rows: list[tuple[Layout, tuple[int, ...], int]] = []
        for key, p in layer.parameters.items():
            layout, times = placed.parameters[key], numbers if p.trainable else 1
            if how is not None and p.trainable and p.shape and isinstance(layout, Replicated):
                rows += [(layout, p.shape, 1)] * (how.form == "keep")
                layout = Split(0, rescale(how.shares, p.shape[0]))
            rows.append((layout, p.shape, times))
        if layer.batched:
            rows.append((placed.gives, layer.batch_shape(self.batch), 1))
        seconds = 0.0
        for layout, shape, times in rows:
            whole = math.prod(shape)
            for device, entries in _held(layout, shape):
                beyond = max(0.0, entries - penalty.parts[device] * whole)
                seconds += beyond * times * penalty.s_per_byte[device]
        return seconds * self.costs.itemsize


def uses_copies(layer: Layer, placed: Placement) -> bool:
    """Whether several devices use the layer's parameters whole, for samples of their own, and may keep shares of them."""
    gives = placed.gives
    if not can_shard(layer) or not isinstance(gives, Split) or gives.axis != 0 or len(holders(gives)) < 2:
        return False
    return any(isinstance(placed.parameters[key], Replicated) for key, p in layer.parameters.items() if p.trainable)


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
        signature = (repr(blank), parameters, inputs, layer.name in trains, layer.name in graph.outputs)
        result[layer.name] = first.setdefault(signature, layer)
    return result
