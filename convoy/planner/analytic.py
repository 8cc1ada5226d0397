"""Estimates the seconds of layers, moves and gradient sums by formula, without simulating a step.

Equal layers and equal devices are computed once, and results are cached for all searches of one request. A move's traffic is
computed in closed form by `loads`, because listing all transfers (`convoy.layout`) is too slow for thousands of moves over
hundreds of devices. A test compares both.
"""

import copy
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from convoy.layout.collectives import Reduce, is_collective, schedule, traffic
from convoy.layout.comm_dtype import sent_itemsize
from convoy.layout.layout import (
    Layout,
    OnOne,
    Partial,
    Replicated,
    Shape,
    Split,
    Tiles,
    Windows,
    dual,
    held_entries,
    holders,
)
from convoy.layout.shares import Shares, rescale
from convoy.model.graph import Graph, Layer
from convoy.plan.device_program import LocalSize, part_of_outputs, shares_statistics, tile_size, whole_size
from convoy.plan.lower import BUCKET_ENTRIES, lower, trains
from convoy.plan.plan import Plan
from convoy.plan.steps import MicroBatch, Phase, StepList
from convoy.plan.strategy import Placement, Sharding
from convoy.planner.request import PlanRequest
from convoy.simulate.compute import Roofline
from convoy.simulate.network import Network

DIRECT_DEVICES = 16
"""The search uses direct gradient sums up to this number of devices. With more, each device sends too many messages."""

Side = Literal["outputs", "inputs"]
Vector = npt.NDArray[np.float64]


# --- traffic in closed form ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loads:
    """The entries that each device sends and receives in a move, and the move's number of consecutive rounds."""

    sent: Vector
    received: Vector
    rounds: int

    @property
    def reversed(self) -> "Loads":
        """The adjoint move: every message in the other direction."""
        return Loads(self.received, self.sent, self.rounds)


def loads(src: Layout, dst: Layout, shape: Shape, devices: int, reduce: Reduce = "ring") -> Loads:
    """Return the entries that each of `devices` sends and receives for the move `src -> dst` of a tensor of `shape`."""
    total = float(np.prod(shape, dtype=np.float64))
    nothing = Loads(np.zeros(devices), np.zeros(devices), 0)
    if src == dst:
        return nothing
    if isinstance(src, Tiles | Windows) or isinstance(dst, Tiles | Windows):
        sent, received = np.zeros(devices), np.zeros(devices)
        for (sender, receiver), entries in traffic(schedule(src, dst, shape), 1).items():
            sent[sender] += entries
            received[receiver] += entries
        return Loads(sent, received, 1)
    match src, dst:
        case Replicated(holders), Partial(members):
            # One copy becomes one summand; nothing is sent if a device is both.
            apart = not set(holders) & set(members)
            return Loads(
                total * apart * _mask(holders[:1], devices), total * apart * _mask(members[:1], devices), int(apart)
            )
        case _, Partial():
            return _from_copies(dual(dst), dual(src), total, devices).reversed
    match src:
        case Partial(members) if isinstance(dst, Replicated) and is_collective(src, dst, int(total), reduce):
            return sum_loads(members, dst.devices, total, devices, reduce)
        case Partial(members):
            part = _parts(dst, total, devices)
            member = _mask(members, devices)
            sent = member * (part.sum() - part)
            return Loads(sent, part * (len(members) - member), 1)
        case Replicated() | OnOne():
            return _from_copies(src, dst, total, devices)
    part = _parts(src, total, devices)
    match dst:
        case Replicated(readers):
            reader = _mask(readers, devices)
            return Loads(part * (len(readers) - reader), reader * (total - part), 1)
        case OnOne(reader):
            at = _mask((reader,), devices)
            return Loads(part * (1 - at), at * (total - part), 1)
    assert isinstance(dst, Split)
    assert isinstance(src, Split)
    kept = _kept_entries(src, dst, total, devices)
    return Loads(part - kept, _parts(dst, total, devices) - kept, 1)


def _from_copies(src: Layout, dst: Layout, total: float, devices: int) -> Loads:
    """Return the loads of a move in which each reader without a copy receives from one holder, as in the schedule."""
    assert isinstance(src, Replicated | OnOne)
    holders = (src.device,) if isinstance(src, OnOne) else src.devices
    wanted = _parts(dst, total, devices)
    received = wanted * (1 - _mask(holders, devices))
    sent = np.zeros(devices)
    for device in np.flatnonzero(received):
        sent[holders[int(device) % len(holders)]] += received[device]
    return Loads(sent, received, int(received.any()))


def sum_loads(members: tuple[int, ...], readers: tuple[int, ...], total: float, devices: int, reduce: Reduce) -> Loads:
    """Return the loads of an all-reduce of `total` entries over the members, with the result on each reader."""
    p, member = len(members), _mask(members, devices)
    sent, rounds = _collective(members, total, devices, reduce)
    received = sent.copy()  # in these collectives each device receives as much as it sends
    missing = _mask(readers, devices) * (1 - member)
    if missing.any():
        sent = sent + member * total / p * missing.sum()
        received = received + missing * total
        rounds += 1
    return Loads(sent, received, rounds)


def share_loads(users: tuple[int, ...], parts: tuple[int, ...], total: float, devices: int) -> Loads:
    """Return the loads of a reduce-scatter of `total` entries from the users to shards. The all-gather is its reverse."""
    used, kept = _mask(users, devices), _parts(Split(0, parts), total, devices)
    return Loads(used * (total - kept), kept * (len(users) - used), 1)


def _collective(members: tuple[int, ...], total: float, devices: int, reduce: Reduce) -> tuple[Vector, int]:
    p, member = len(members), _mask(members, devices)
    if reduce in ("ring", "direct"):
        return member * 2 * total * (p - 1) / p, 2 * (p - 1) if reduce == "ring" else 2
    if reduce == "star":
        root = _mask((members[0],), devices)
        return member * total + root * total * (p - 2), 2
    core = 1 << (p.bit_length() - 1)  # butterfly: a power of two exchange, the other devices send to one of these
    extra = p - core
    sent = member * 2 * total * (core - 1) / core
    for i in range(extra):
        sent[members[2 * i + 1]] = total
        sent[members[2 * i]] += total
    return sent, 2 * (core.bit_length() - 1) + (2 if extra else 0)


def _mask(members: tuple[int, ...], devices: int) -> Vector:
    mask = np.zeros(devices)
    mask[list(members)] = 1.0
    return mask


def _parts(layout: Layout, total: float, devices: int) -> Vector:
    match layout:
        case Split(_, shares):
            weights: Vector = np.array(shares, dtype=np.float64)
            parts: Vector = total * weights / max(1.0, weights.sum())
            return parts
        case Replicated(members) | Partial(members):
            return total * _mask(members, devices)
        case OnOne(device):
            return total * _mask((device,), devices)
    raise AssertionError(f"{layout} has no closed form")


def _kept_entries(src: Split, dst: Split, total: float, devices: int) -> Vector:
    a, b = np.array(src.shares, dtype=np.float64), np.array(dst.shares, dtype=np.float64)
    if src.axis != dst.axis:
        both: Vector = total * (a / max(1.0, a.sum())) * (b / max(1.0, b.sum()))
        return both
    a_stop, b_stop = np.cumsum(a), np.cumsum(b)
    overlap = np.minimum(a_stop, b_stop) - np.maximum(a_stop - a, b_stop - b)
    assert len(overlap) == devices
    kept: Vector = total * np.maximum(0.0, overlap) / max(1.0, a.sum())
    return kept


def move_s(load: Loads, network: Network, itemsize: int) -> float:
    """Return the seconds of a move: those of the busiest NIC or processor, plus the largest latency for each round.

    With several hosts all traffic counts as leaving its host, because loads do not contain pairs of devices. For uplinks,
    each message is assumed to go to any other host with equal probability.

    Args:
        itemsize: bytes of one number on the wire.
    """
    if not load.rounds:
        return 0.0
    sent, received = load.sent * itemsize, load.received * itemsize
    hosts = np.array(network.host)
    count = len(network.send_bytes_per_s)
    out = np.bincount(hosts, sent, count) / np.array(network.send_bytes_per_s)
    into = np.bincount(hosts, received, count) / np.array(network.receive_bytes_per_s)
    within = np.bincount(hosts, sent, count) / np.array(network.within_bytes_per_s) if count == 1 else np.zeros(1)
    processor = (sent + received) * np.array(network.processor_s_per_byte)
    longest_s, segment = float(max(out.max(), into.max(), processor.max(), within.max())), np.array(network.segment)
    uplinks = zip(network.uplink_send_bytes_per_s, network.uplink_receive_bytes_per_s, strict=True)
    for index, (sends, receives) in enumerate(uplinks):
        inside = segment[hosts] == index
        outside = float((segment != index).sum()) / max(1, len(segment) - 1)
        longest_s = max(longest_s, outside * sent[inside].sum() / sends, outside * received[inside].sum() / receives)
    return longest_s + load.rounds * network.largest_latency_s


# --- the model --------------------------------------------------------------------------------------------------------


def content(plan: Plan) -> tuple[object, ...]:
    """Return the parts of a plan that determine its steps, as a key."""
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
    """The analytic cost model of one request: mean seconds per micro-batch, without overlap of messages and computation."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.graph, self.batch, self.costs = request.graph, request.batch, request.costs
        self.devices = len(self.costs.network.host)
        self.reduce: Reduce = request.reduce or ("direct" if self.devices <= DIRECT_DEVICES else "ring")
        self.trains = trains(self.graph)
        self.losses = frozenset(n for n in self.graph.outputs if self.graph[n].batched and n in self.trains)
        self.alike = tuple(self.costs.times.alike(d) for d in range(self.devices))
        self.firsts = _alike_layers(self.graph, self.trains) if isinstance(self.costs.times, Roofline) else {}
        self.counts = Counter(self.like(layer).name for layer in self.graph.layers.values() if layer.kind != "input")
        self.round_overhead_s = max((o.round_s + 2 * o.message_s for o in self.costs.overheads), default=0.0)
        self.jitter_s = max(self.costs.network.jitter_s, default=0.0)
        self.live_s = self.batch * max((o.live_s_per_sample for o in self.costs.overheads), default=0.0)
        self.round_s = self.costs.network.largest_latency_s + self.round_overhead_s
        self.arithmetic: dict[tuple[str, int, LocalSize], float] = {}
        self.wholes: dict[tuple[int, int, bool], float] = {}
        self.curves: dict[tuple[str, Side, int], list[float]] = {}
        self.moves: dict[tuple[Layout, Layout, tuple[int, ...], bool], float] = {}
        self.splits: dict[tuple[int, ...], dict[tuple[str, str], Shares]] = {}  # devices -> the shares of layers
        self.lowered: dict[tuple[object, ...], StepList] = {}

    def with_reduce(self, reduce: Reduce) -> Self:
        """Return the model with another `reduce`. Both share the cached layer times."""
        if reduce == self.reduce:
            return self
        other = copy.copy(self)
        other.reduce, other.moves = reduce, {}
        return other

    def steps(self, plan: Plan, micro_batch: MicroBatch = "only") -> StepList:
        """Return a plan's steps, cached."""
        key = (*content(plan), micro_batch)
        if key not in self.lowered:
            self.lowered[key] = lower(plan, self.graph, micro_batch=micro_batch)
        return self.lowered[key]

    def like(self, layer: Layer) -> Layer:
        """Return the first layer with the same cost."""
        return self.firsts.get(layer.name, layer)

    # --- arithmetic --------------------------------------------------------------------------------------------------

    def layer_s(self, layer: Layer, device: int, size: LocalSize) -> float:
        """Return forward + backward seconds of a layer at one size, including overheads."""
        if size.samples == 0 or size.outputs == 0 or size.inputs == 0:
            return 0.0
        trained, like, kind = layer.name in self.trains, self.like(layer), self.alike[device]
        if layer.statistics and size.samples < self.batch:
            size = replace(size, shares_statistics=True)  # other devices compute the rest of the batch
        key = (like.name, kind, size)
        if key not in self.arithmetic:
            phases: tuple[Phase, ...] = ("forward", "backward") if trained else ("forward",)
            self.arithmetic[key] = sum(self.costs.times.seconds(kind, like, phase, size) for phase in phases)
        overhead = self.costs.overhead(kind)
        host_s = (1 + trained) * (overhead.queue_s or overhead.layer_s / 2)
        seconds = overhead.joined_s(self.arithmetic[key], host_s)
        if layer.name in self.losses and self.request.outputs == "where-computed":
            # Otherwise every device computes the loss of the global batch in any plan.
            seconds += overhead.loss_s((size.samples * math.prod(layer.shape),), self.costs.itemsize)
        return seconds

    def samples_s(self, device: int, samples: int, shared: bool = False) -> float:
        """Return the seconds of the whole model on some samples. `shared`: other devices compute the rest of the batch."""
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
        """Return the seconds of a layer on all samples, for each number of filters (output features) or input channels.

        Args:
            points: must be the same for each call with this layer and side.
        """
        key = (self.like(layer).name, side, self.alike[device])
        if key not in self.curves:
            whole = whole_size(layer, self.batch)
            sizes = [replace(whole, outputs=n) if side == "outputs" else replace(whole, inputs=n) for n in points]
            self.curves[key] = [self.layer_s(layer, device, size) for size in sizes]
        return self.curves[key]

    def compute_s(self, layer: Layer, placed: Placement) -> float:
        """Return the seconds that the slowest device takes for its part of a layer."""
        return max((self.layer_s(layer, device, size) for device, size in self._sizes(layer, placed)), default=0.0)

    def _sizes(self, layer: Layer, placed: Placement) -> set[tuple[int, LocalSize]]:
        """Return the distinct pairs (kind of device, size of its part of the layer)."""
        whole = whole_size(layer, self.batch if layer.batched else 1)
        gives, alike = placed.gives, self.alike
        if isinstance(gives, Tiles | Windows):
            return {(alike[d], tile_size(layer, placed.takes[0], gives, d)) for d in holders(gives)}
        if not layer.batched or not isinstance(gives, Split | Partial):
            return {(alike[d], whole) for d in holders(gives)}
        if isinstance(gives, Partial):
            # A layer may read no tensor: `torch.ones(x.shape[0], 8)` needs only the batch size.
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

    # --- exchanges ----------------------------------------------------------------------------------------

    def move_s(self, src: Layout, dst: Layout, source: Layer, *, back: bool) -> float:
        """Return the seconds to move a tensor into another layout and, with `back`, its gradient in reverse."""
        if source.kind == "input" or not source.batched:
            return 0.0
        shape = source.batch_shape(self.batch)
        key = (src, dst, shape, back)
        if key not in self.moves:
            load = loads(src, dst, shape, self.devices, self.reduce)
            seconds = self._exchange_s(load)
            if back:
                seconds += self._exchange_s(load.reversed)
            self.moves[key] = seconds
        return self.moves[key]

    def _exchange_s(self, load: Loads) -> float:
        seconds = move_s(load, self.costs.network, sent_itemsize(self.request.wire, self.costs.itemsize))
        # Jitter delays the first round only.
        return seconds + load.rounds * self.round_overhead_s + (self.jitter_s if load.rounds else 0.0)

    def sums_s(self, layer: Layer, placed: Placement, how: Sharding | None = None) -> float:
        """Return the seconds of gradient sums of copied parameters, and of the optimizer on the busiest device.

        Args:
            how: the sharding, if any. Then every micro-batch sums gradients into shards, and gathers weights once, or twice if
                they are freed after use.
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
            kept = max(
                kept, max(held_entries(layout, d, parameter.shape) * self.costs.update_s(d) for d in holders(layout))
            )
        if not summed:
            return kept / self.request.micro_batches
        copies = next(v for v in placed.parameters.values() if isinstance(v, Replicated))
        # Several layers share a bucket, so a small layer is charged only its fraction of latency and jitter.
        shared = max(0.0, 1 - summed / BUCKET_ENTRIES)
        if how is not None:
            load = share_loads(copies.devices, how.shares, float(summed), self.devices)
            gathered = 1 if how.form == "keep" else 2
            seconds = self._exchange_s(load) + gathered * self._exchange_s(load.reversed)
            seconds -= (1 + gathered) * (self.round_s + self.jitter_s) * shared
            return kept / self.request.micro_batches + seconds
        load = sum_loads(copies.devices, copies.devices, float(summed), self.devices, self.reduce)
        seconds = self._exchange_s(load) - (load.rounds * self.round_s + self.jitter_s) * shared
        return (kept + seconds) / self.request.micro_batches


def _alike_layers(graph: Graph, trains: set[str]) -> dict[str, Layer]:
    """For each layer, return the first layer with the same shapes, inputs and parameters."""
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
