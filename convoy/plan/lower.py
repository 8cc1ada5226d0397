"""lower(plan): from strategies per layer to one list of steps for one batch size."""

import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from convoy.layout import redistribute
from convoy.layout.comm_dtype import comm_dtype_of
from convoy.layout.layout import Layout, OnOne, Partial, Replicated, Split, everywhere, held_entries, holders
from convoy.layout.shares import Shares, rescale
from convoy.model.graph import Graph, Layer, Parameter
from convoy.plan.placing import is_gathered, kept_layouts, placements, used_layouts
from convoy.plan.plan import Plan
from convoy.plan.steps import (
    ComputeStep,
    GatherStatistics,
    GatherWeights,
    InputGradient,
    MicroBatch,
    Move,
    Part,
    Phase,
    ReturnGradient,
    Step,
    StepList,
    SumGradients,
    Value,
)
from convoy.plan.strategy import Batch, One, Placement, parameter_holders

BUCKET_ENTRIES = 500_000
"""Entries that start a gradient sum: large enough for full bandwidth, small enough to overlap."""

BESIDE_ENTRIES = 125_000
"""A bucket with this many entries is summed with a full one: later it would be alone on the wire."""


def lower(
    plan: Plan,
    graph: Graph,
    batch: int | None = None,
    input_gradients: Sequence[InputGradient] = (),
    kept: Mapping[str, Layout] | None = None,
    micro_batch: MicroBatch = "only",
) -> StepList:
    """Return the steps of one micro-batch of `plan`, for a global batch of `batch` samples (default: the plan's).

    Args:
        input_gradients: for each input of the graph, where its gradient is brought; empty: none has one.
        kept: layouts of parameters, by key, that differ from this plan's: all devices with copies get their gradients.
        micro_batch: which micro-batch of a training step it is; by default the only one.

    Raises:
        PlanError: the plan does not fit the graph.
    """
    plan.check(graph)
    return _Lowering(
        plan, graph, plan.batch if batch is None else batch, input_gradients, kept or {}, micro_batch
    ).run()


@dataclass(frozen=True)
class Bucket:
    """Parameters that are gathered together.

    Attributes:
        devices: that compute with them.
        freed: their whole copies are freed after use.
        layers: that compute with them.
    """

    parameters: tuple[Parameter, ...]
    devices: tuple[int, ...]
    freed: bool
    layers: frozenset[str]


@dataclass(frozen=True, slots=True)
class Turn:
    """Around one layer: the buckets to start before it, and the parameters to free after it, by key."""

    begins: list[Bucket] = field(default_factory=list)
    frees: list[str] = field(default_factory=list)


def buckets_of(graph: Graph, used: Mapping[str, Layout], freed: Collection[str], bucket_entries: int) -> list[Bucket]:
    """Return the parameters that are gathered, in buckets, in the order in which they are used.

    Args:
        used: those that are gathered, by key, with the layout in which layers compute with them.
        freed: keys of those that are freed after use.
        bucket_entries: of a full bucket; a larger parameter has its own.
    """
    found: list[Bucket] = []
    filled: dict[tuple[tuple[int, ...], bool], list[tuple[Parameter, str]]] = {}
    sent = 0
    rows = {p.key: (p, layer.name) for layer in graph.layers.values() for p in layer.parameters.values()}
    for key, row in rows.items():
        if key not in used:
            continue
        kind = (holders(used[key]), key in freed)
        if row[0].entries >= bucket_entries:
            found.append(_bucket([row], *kind))
            sent += row[0].entries
            continue
        filled.setdefault(kind, []).append(row)
        size = sum(p.entries for p, _ in filled[kind])
        # The first layers wait for their weights, so the first buckets are small.
        if size >= min(bucket_entries, max(bucket_entries // 16, sent)):
            found.append(_bucket(filled.pop(kind), *kind))
            sent += size
    return found + [_bucket(rest, *kind) for kind, rest in filled.items()]


def _bucket(rows: Sequence[tuple[Parameter, str]], devices: tuple[int, ...], freed: bool) -> Bucket:
    return Bucket(tuple(p for p, _ in rows), devices, freed, frozenset(layer for _, layer in rows))


def turns(buckets: Sequence[Bucket], order: Sequence[str]) -> dict[str, Turn]:
    """Return by layer which freed buckets start and end there. Each starts when the one before it is first used.

    Args:
        order: the layers, in the order in which they are computed.
    """
    places = {name: place for place, name in enumerate(order)}
    spans = []
    for bucket in buckets:
        used_at = [places[name] for name in bucket.layers if name in places]
        if used_at:
            spans.append((min(used_at), max(used_at), bucket))
    spans.sort(key=lambda span: span[:2])
    found: dict[str, Turn] = {}
    for number, (first, last, bucket) in enumerate(spans):
        begins = spans[number - 1][0] if number else first
        found.setdefault(order[begins], Turn()).begins.append(bucket)
        found.setdefault(order[last], Turn()).frees.extend(p.key for p in bucket.parameters)
    return found


class _Lowering:
    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        batch: int,
        input_gradients: Sequence[InputGradient],
        kept: Mapping[str, Layout],
        micro_batch: MicroBatch,
    ) -> None:
        self.plan, self.graph, self.batch, self.micro_batch = plan, graph, batch, micro_batch
        names = [layer.name for layer in graph.inputs]
        self.wanted = {name: how for name, how in zip(names, input_gradients, strict=False) if how != "none"}
        self.placed = placements(plan, graph, batch)
        self.nominal = self.placed if batch == plan.batch else placements(plan, graph)
        used = used_layouts(graph, self.nominal)
        self.kept = {**kept_layouts(plan, graph, used), **kept}
        self.gathered = {key: used[key] for key in used if is_gathered(self.kept[key], used[key])}
        self.gathered_by: dict[str, int] = {}  # key -> the step that gathers it in this phase
        freed = {p.key for n, how in plan.sharded.items() if how.form == "free" for p in graph[n].trainable}
        self.buckets = buckets_of(graph, self.gathered, freed, BUCKET_ENTRIES)
        self.steps: list[Step] = []
        self.later: list[SumGradients] = []
        self.values: dict[str, Value] = {}
        self.versions: dict[tuple[str, Layout], Value] = {}
        self.made_by: dict[str, int] = {}
        self.moved_for: dict[str, list[Move]] = {}  # layer -> the moves that were made for it
        self.trains = trains(graph, self.wanted)
        self.statistics = {name: how for name in graph.layers if (how := self._statistics(graph[name]))}
        self.rows = rows_of(graph, {n: (members, graph[n].dtype) for n, (_, members) in self.statistics.items()})
        self.row_of = {name: row for row in self.rows for name in row}
        self.told_back: dict[str, int] = {}  # norm -> its exchange in backward

    def run(self) -> StepList:
        for bucket in self.buckets:
            if not bucket.freed:
                self._gather(bucket, "forward")
        self.turns = turns([b for b in self.buckets if b.freed], list(self.row_of))
        for row in self.rows:
            self._forward([self.graph[name] for name in row])
        stay = self._output_layout()
        outputs = tuple(self._version(name, stay[name]) for name in self.graph.outputs)
        forward = list(self.steps)
        ready: dict[str, list[int]] = {}  # value key -> steps that contributed to its gradient
        for i, (name, value) in enumerate(zip(self.graph.outputs, outputs, strict=True)):
            if name in self.trains:
                after = self._after([value])
                # Of a sharded output a device has its shard of the gradient, and moves go back as usual.
                returned = value if isinstance(value.layout, Split | OnOne) else self.values[name]
                step = ReturnGradient(self._id, i, value, returned, after)
                ready.setdefault(returned.key, []).append(self._add(step))
        gradients = self._backward(forward, ready)
        inputs = tuple(self.values[layer.name] for layer in self.graph.inputs)
        return StepList(
            self.batch,
            self.plan.devices,
            inputs,
            outputs,
            tuple(self.steps),
            gradients,
            self.micro_batch,
            tuple(self.later),
        )

    def _output_layout(self) -> dict[str, Layout]:
        """Return each output's layout for the caller: copies everywhere, or all split by samples alike."""
        everyone = everywhere(self.plan.devices)
        own = {name: self.values[name].layout for name in self.graph.outputs if self.graph[name].batched}
        if self.plan.outputs == "everywhere" or not own:
            return dict.fromkeys(self.graph.outputs, everyone)
        otherwise = self.plan.otherwise
        stay = next(filter(by_samples, own.values()), None)
        if stay is None:
            stay = (
                OnOne(otherwise.device)
                if isinstance(otherwise, One)
                else Split(0, rescale(otherwise.shares, self.batch))
            )
        return {name: stay if name in own else everyone for name in self.graph.outputs}

    @property
    def _id(self) -> int:
        return len(self.steps)

    def _add(self, step: Step) -> int:
        self.steps.append(step)
        return step.id

    def _after(self, values: Iterable[Value]) -> tuple[int, ...]:
        return tuple(sorted({self.made_by[v.key] for v in values if v.key in self.made_by}))

    def _gather(self, bucket: Bucket, phase: Phase) -> None:
        """Gather sharded parameters where they are used; later micro-batches may still have them."""
        keys, shares = tuple(p.key for p in bucket.parameters), tuple(map(self._entries_of_shares, bucket.parameters))
        held = not bucket.freed and self.micro_batch in ("middle", "last")
        step = self._add(GatherWeights(self._id, phase, keys, shares, bucket.devices, held=held))
        if not held:
            self.gathered_by.update(dict.fromkeys(keys, step))

    def _waits_for_weights(self, layer: Layer) -> set[int]:
        """Return the steps that gather this layer's parameters in this phase."""
        return {self.gathered_by[p.key] for p in layer.parameters.values() if p.key in self.gathered_by}

    def _entries_of_shares(self, parameter: Parameter) -> Shares:
        layout = self.kept[parameter.key]
        return tuple(held_entries(layout, d, parameter.shape) for d in range(self.plan.devices))

    def _forward(self, row: Sequence[Layer]) -> None:
        """Lower a layer, or batch norms that exchange their sums together."""
        computes = [step for layer in row if (step := self._reading(layer)) is not None]
        if row[0].name in self.statistics:
            after = tuple(sorted({before for step in computes for before in step.after}))
            told = self._share("forward", [(step.layer, step.reads[0]) for step in computes], after)
            computes = [
                replace(s, after=(told, *sorted(self._waits_for_weights(self.graph[s.layer])))) for s in computes
            ]
        for step in computes:
            self.made_by[step.writes.key] = self._add(step if step.id == self._id else replace(step, id=self._id))

    def _reading(self, layer: Layer) -> ComputeStep | None:
        """Move a layer's inputs to it, and return its computation."""
        placed = self.placed[layer.name]
        shape = layer.batch_shape(self.batch)
        value = Value(layer.name, shape, placed.gives)
        self.values[layer.name] = value
        self.versions[layer.name, placed.gives] = value
        if layer.kind == "input":
            return None
        turn = self.turns.get(layer.name, Turn())
        for bucket in turn.begins:
            self._gather(bucket, "forward")
        before = self._id
        pieces = self._pieces(layer, placed)
        reads = tuple(
            self._version(name, layout, pieces) for name, layout in zip(layer.inputs, placed.takes, strict=True)
        )
        self.moved_for[layer.name] = [step for step in self.steps[before:] if isinstance(step, Move)]
        after = tuple(sorted({*self._after(reads), *self._waits_for_weights(layer)}))
        wants = tuple(p and name in self.trains for name, p in zip(layer.inputs, layer.traced_back, strict=True))
        return ComputeStep(
            self._id, "forward", layer.name, reads, value, wants, self._parameters(layer), placed.note, after,
            chunks=pieces, frees=tuple(turn.frees),
        )  # fmt: skip

    def _share(self, phase: Phase, rows: Sequence[tuple[str, Value]], after: tuple[int, ...]) -> int:
        """Add the exchange of some norms' sums; `rows` has each norm's name and input."""
        names, reads = zip(*rows, strict=True)
        sizes, members = tuple(self.statistics[name][0] for name in names), self.statistics[names[0]][1]
        return self._add(GatherStatistics(self._id, phase, names, reads, sizes, members, after))

    def _pieces(self, layer: Layer, placed: Placement) -> int:
        """Return the number of chunks in which a layer's input is moved."""
        if self.plan.chunks == 1 or layer.kind != "conv" or (layer.inputs[0], placed.takes[0]) in self.versions:
            return 1
        source = self.values[layer.inputs[0]]
        schedule = redistribute.schedule(source.layout, placed.takes[0], source.shape, self.plan.collective)
        spans = all(t.box[0] == (0, self.batch) for transfers in schedule.rounds for t in transfers)
        return min(self.plan.chunks, self.batch) if spans and not schedule.in_place else 1

    def _parameters(self, layer: Layer) -> dict[str, Layout]:
        return {key: self.kept[p.key] for key, p in layer.parameters.items()}

    def _statistics(self, layer: Layer) -> tuple[int, tuple[int, ...]] | None:
        """Return (entries per device, members) of a batch norm over several devices, else None."""
        placed = self.placed[layer.name]
        if not layer.statistics or not isinstance(placed.gives, Split) or placed.gives.axis != 0:
            return None
        # By the nominal batch: a device without a sample of this (small) batch keeps its running statistics up to date.
        members = parameter_holders(layer, self.nominal[layer.name].gives, self.plan.devices)
        return (2 * layer.shape[0], members) if len(members) > 1 else None

    def _version(self, name: str, layout: Layout, pieces: int = 1) -> Value:
        known = self.versions.get((name, layout))
        if known is not None:
            return known
        source = self.values[name]
        value = Value(f"{name}@{layout}", source.shape, layout, name)
        layer = self.graph[name]
        # Without a batch axis it is a parameter or a buffer, or made of those, and they are never rounded.
        wire = comm_dtype_of(layer.dtype, self.plan.wire) if layer.batched else "exact"
        step = Move(self._id, "forward", source, value, self.plan.collective, self._after([source]), pieces, wire)
        self.made_by[value.key] = self._add(step)
        self.versions[name, layout] = value
        return value

    def _backward(self, forward: list[Step], ready: dict[str, list[int]]) -> tuple[Value | None, ...]:
        """Lower backward. Return for each input the value with its gradient; None where it has none."""
        sums = _Buckets(self)
        with_gradient = reached(self.graph, self.trains)
        order = [name for name in reversed(self.row_of) if name in with_gradient]
        self.turns, self.gathered_by = turns([b for b in self.buckets if b.freed], order), {}
        for step in reversed(forward):
            if isinstance(step, Move):
                self._return(step, ready)
            elif isinstance(step, ComputeStep) and step.writes.key in ready:
                self._backward_compute(step, ready, sums)
        gradients = tuple(self._input_gradient(layer, ready) for layer in self.graph.inputs) if self.wanted else ()
        self._sum(sums, everything=True)
        return gradients

    def _sum(self, sums: "_Buckets", *, everything: bool) -> None:
        """Add the sums that are due; all but the last micro-batch leave them to it."""
        for step in sums.take(self._id, everything=everything):
            # Sums into shards do not wait: each device would have to keep a whole gradient.
            waits = self.micro_batch in ("first", "middle") and not step.into
            (self.later if waits else self.steps).append(replace(step, id=self._id))

    def _input_gradient(self, layer: Layer, ready: dict[str, list[int]]) -> Value | None:
        """Return the value whose gradient the caller gets: the input, or a value that its gradient is moved to."""
        after, value = ready.get(layer.name), self.values[layer.name]
        if after is None or layer.name not in self.wanted:
            return None
        everyone = tuple(range(self.plan.devices))
        devices = everyone if self.wanted[layer.name] == "whole" else holders(value.layout)
        # The gradient of a pending sum is known whole to each of its devices.
        if self.wanted[layer.name] == "part" and not isinstance(value.layout, Replicated):
            return value
        whole = Value(f"{layer.name} whole", value.shape, Partial(devices), layer.name)
        wire = comm_dtype_of(layer.dtype, self.plan.wire)
        self._add(Move(self._id, "backward", value, whole, self.plan.collective, tuple(after), wire=wire))
        return whole

    def _return(self, step: Move, ready: dict[str, list[int]]) -> None:
        """Move a gradient back, once, when every reader of the moved value has contributed."""
        after = ready.pop(step.writes.key, None)
        if after is not None:
            back = Move(self._id, "backward", step.writes, step.reads, step.reduce, tuple(after), wire=step.wire)
            ready.setdefault(step.reads.key, []).append(self._add(back))

    def _backward_compute(self, step: ComputeStep, ready: dict[str, list[int]], sums: "_Buckets") -> None:
        turn = self.turns.get(step.layer, Turn())
        for bucket in turn.begins:
            self._gather(bucket, "backward")
        after = tuple(ready[step.writes.key])
        if step.layer in self.statistics:
            after = (self._told_back(step, ready),)
        after = (*after, *sorted(self._waits_for_weights(self.graph[step.layer])))
        for part, last in self._parts(step, sums):
            back = ComputeStep(
                self._id, "backward", step.layer, step.reads, step.writes, step.wants, step.parameters, "", after, part, last,
                frees=tuple(turn.frees) if last else (),
            )  # fmt: skip
            self._add(back)
            if part != "weight":
                for value, wanted in zip(step.reads, step.wants, strict=True):
                    if wanted:
                        ready.setdefault(value.key, []).append(back.id)
                for move in reversed(self.moved_for[step.layer]):
                    self._return(move, ready)
            if part != "input":
                sums.add(back)
                self._sum(sums, everything=False)

    def _told_back(self, step: ComputeStep, ready: Mapping[str, list[int]]) -> int:
        """Return the exchange of a norm in backward, with its partners of forward that have a gradient.

        Partners are neighbours in forward, before all their readers: when the last has its gradient, all have.
        """
        if step.layer not in self.told_back:
            names = [name for name in self.row_of[step.layer] if name in ready]
            after = tuple(sorted({before for name in names for before in ready[name]}))
            rows = [(n, self.versions[self.graph[n].inputs[0], self.placed[n].takes[0]]) for n in names]
            self.told_back |= dict.fromkeys(names, self._share("backward", rows, after))
        return self.told_back[step.layer]

    def _parts(self, step: ComputeStep, sums: "_Buckets") -> tuple[tuple[Part, bool], ...]:
        """Split a layer's backward so that the gradient that must be sent travels while the other is computed.

        An input gradient goes first, because the layers below wait for it. Weights go first only if they fill a bucket.
        """
        layer = self.graph[step.layer]
        if not layer.multiplies or not layer.trainable or not any(step.wants):
            return (("all", True),)
        if self.moved_for[step.layer]:
            return (("input", False), ("weight", True))
        leaves = self.micro_batch in ("only", "last") and sums.would_fill(step)
        return (("weight", False), ("input", True)) if leaves else (("all", True),)


def by_samples(layout: Layout) -> bool:
    """Whether every sample of a value is whole, and on one device alone."""
    return isinstance(layout, OnOne) or (isinstance(layout, Split) and layout.axis == 0)


def trains(graph: Graph, inputs: Collection[str] = ()) -> set[str]:
    """Return the layers whose output has a gradient: something before them is trainable, or `inputs` wants one."""
    result = set(inputs)
    for layer in graph.layers.values():
        if layer.trainable or result.intersection(_traced_back(layer)):
            result.add(layer.name)
    return result


def reached(graph: Graph, trains: set[str]) -> set[str]:
    """Return the layers whose backward runs: a gradient reaches them from an output."""
    result = trains.intersection(graph.outputs)
    for layer in reversed(list(graph.layers.values())):
        if layer.name in result:
            result |= trains.intersection(_traced_back(layer))
    return result


def _traced_back(layer: Layer) -> Iterator[str]:
    return itertools.compress(layer.inputs, layer.traced_back)


@dataclass
class _Bucket:
    """Gradients that are summed together."""

    parameters: list[Parameter] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    flagged: int = 0
    after: list[int] = field(default_factory=list)


_Name = tuple[tuple[int, ...], tuple[int, ...], bool, str]
"""A bucket: devices with summands; for mixing, the samples of each; whether it is summed into shards; the key of a gradient
that is alone in it."""


class _Buckets:
    """Buckets of gradients, filled as backward completes them."""

    def __init__(self, lowering: "_Lowering") -> None:
        self.plan, self.graph, self.kept = lowering.plan, lowering.graph, lowering.kept
        self.batch, self.lowering = lowering.batch, lowering
        self.open: dict[_Name, _Bucket] = {}
        with_gradient = reached(self.graph, lowering.trains)
        self.uses = Counter(p.key for name in with_gradient for p in self.graph[name].trainable)
        others = [self.graph[name] for name in with_gradient if not self.graph[name].multiplies]
        self.read_by_others = {p.key for layer in others for p in layer.trainable}

    def add(self, step: ComputeStep) -> None:
        """Add a layer's gradients, which are ready unless an earlier layer shares the parameter."""
        layer = self.graph[step.layer]
        for parameter in layer.trainable:
            self.uses[parameter.key] -= 1
            if self.uses[parameter.key] or not self._is_summed(parameter.key):
                continue
            bucket = self.open.setdefault(self._bucket_of(step, parameter), _Bucket())
            bucket.parameters.append(parameter)
            bucket.sizes.append(parameter.entries)
            # Only a layer with Python of its own may leave a parameter unused on one device and not on another.
            bucket.flagged += layer.kind == "opaque"
            if step.id not in bucket.after[-1:]:
                bucket.after.append(step.id)

    def would_fill(self, step: ComputeStep) -> bool:
        """Whether this layer's weight gradients fill a bucket."""
        new = [p for p in self.graph[step.layer].trainable if self.uses[p.key] == 1 and self._is_summed(p.key)]
        filled: Counter[_Name] = Counter()
        for parameter in new:
            filled[self._bucket_of(step, parameter)] += parameter.entries
        return any(n + sum(self.open.get(name, _Bucket()).sizes) >= BUCKET_ENTRIES for name, n in filled.items())

    def _bucket_of(self, step: ComputeStep, parameter: Parameter) -> "_Name":
        """Return the bucket of a gradient. One that fills a bucket is alone in it, if its memory is its own: no copy."""
        alone = self.graph[step.layer].multiplies and parameter.key not in self.read_by_others and not self.plan.mixes
        name = parameter.key if alone and parameter.entries >= BUCKET_ENTRIES else ""
        # Mixing weighs gradients by samples, so only layers with the same samples share a bucket.
        samples = self._samples(self.graph[step.layer], step.writes.layout) if self.plan.mixes else ()
        used = self.lowering.gathered.get(parameter.key)
        return holders(used or self.kept[parameter.key]), samples, used is not None, name

    def _is_summed(self, key: str) -> bool:
        layout = self.kept[key]
        return key in self.lowering.gathered or (isinstance(layout, Replicated) and len(layout.devices) > 1)

    def take(self, first_id: int, *, everything: bool) -> Iterator[SumGradients]:
        """Yield the sums that are due, numbered from `first_id`."""
        entries = {name: sum(bucket.sizes) for name, bucket in self.open.items()}
        is_full = any(n >= BUCKET_ENTRIES for n in entries.values())
        for name, bucket in list(self.open.items()):
            if everything or entries[name] >= BUCKET_ENTRIES or (is_full and entries[name] >= BESIDE_ENTRIES):
                devices, samples, in_shares, alone = name
                del self.open[name]
                flags = len(bucket.sizes) if bucket.flagged else 0
                keys = tuple(p.key for p in bucket.parameters)
                sizes, after = tuple(bucket.sizes), tuple(bucket.after)
                into = tuple(map(self.lowering._entries_of_shares, bucket.parameters)) if in_shares else ()
                yield SumGradients(
                    first_id, keys, sizes, flags, devices, samples, self.plan.reduce, after,
                    wire=self.plan.wire, alone=bool(alone), into=into,
                )  # fmt: skip
                first_id += 1

    def _samples(self, layer: Layer, layout: Layout) -> tuple[int, ...]:
        """Return each device's samples of a layer; a bare parameter is read by all other layers' samples."""
        if not layer.batched and isinstance(self.plan.otherwise, Batch):
            layout = Split(0, rescale(self.plan.otherwise.shares, self.batch))
        if isinstance(layout, Split) and layout.axis == 0:
            return layout.shares
        return tuple(self.batch if d in holders(layout) else 0 for d in range(self.plan.devices))


Row = tuple[str, ...]
"""A layer; or batch norms that exchange together, in the order of the net."""

Before = tuple[tuple[str, frozenset[str]], ...]
"""See `Graph.before`."""


def rows_of(graph: Graph, exchanged: Mapping[str, Hashable]) -> tuple[Row, ...]:
    """Return the layers in the order in which they are computed, with norms that exchange together as one row.

    A net that branches (Inception, ResNet at its shortcuts) has norms whose inputs are ready at about the same time. One
    message then has the sums of all of them. A norm's level is the number of exchanges on the longest way to it, its own
    included. Norms of one level do not depend on each other; those of one level and kind exchange together.

    Args:
        exchanged: the norms that exchange sums, with the kind of each.
    """
    levels: dict[str, int] = {}
    for name, some in graph.before:
        levels[name] = max([levels[each] for each in some], default=0) + (name in exchanged)
    met: dict[Hashable, list[str]] = {}
    for name, kind in exchanged.items():
        met.setdefault((levels[name], kind), []).append(name)
    return _ordered(graph.before, tuple(tuple(row) for row in met.values() if len(row) > 1))


@lru_cache(maxsize=64)
def _ordered(before: Before, met: tuple[Row, ...]) -> tuple[Row, ...]:
    """Return the graph's order with each row in the place of its last layer and its readers behind it (Kahn's algorithm).

    Cached, because a planner asks for the same order often.
    """
    row_of: dict[str, Row] = {name: (name,) for name, _ in before} | {name: row for row in met for name in row}
    if not met:
        return tuple(row_of.values())
    place = {row_of[name]: at for at, (name, _) in enumerate(before)}  # of its last layer
    needs: dict[Row, set[Row]] = {row: set() for row in place}
    for name, some in before:
        needs[row_of[name]].update(row_of[other] for other in some)
    behind: dict[Row, list[Row]] = {row: [] for row in place}
    for row, others in needs.items():
        for other in others:
            behind[other].append(row)
    missing = Counter({row: len(others) for row, others in needs.items()})
    ready = [(place[row], row) for row, others in needs.items() if not others]
    heapq.heapify(ready)
    found = []
    while ready:
        found.append(heapq.heappop(ready)[1])
        for row in behind[found[-1]]:
            missing[row] -= 1
            if not missing[row]:
                heapq.heappush(ready, (place[row], row))
    return tuple(found)
