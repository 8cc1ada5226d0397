"""Lower a plan (the strategies of all layers) to a list of steps for one batch size (`lower`)."""

import heapq
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from convoy.layout import collectives
from convoy.layout.comm_dtype import comm_dtype_of
from convoy.layout.layout import Layout, OnOne, Replicated, Split, Tiles, dual, everywhere, held_entries, holders
from convoy.layout.shares import Shares, rescale
from convoy.model.graph import Graph, Layer, Parameter
from convoy.plan import steps as st
from convoy.plan.device_program import exchanges_statistics
from convoy.plan.placing import kept_layouts, placements, used_layouts
from convoy.plan.plan import Plan
from convoy.plan.steps import ComputeStep, InputGradient, MicroBatch, Move, Phase, Step, StepList, SumGradients, Value
from convoy.plan.strategy import One, parameter_holders

BUCKET_ENTRIES = 500_000
"""Entries at which a bucket of gradients is summed: enough for full bandwidth, few enough to overlap with backward."""

COMPANION_ENTRIES = 125_000
"""Entries at which a bucket is summed early, when another bucket is full. Later it would have no traffic to overlap with."""


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
        input_gradients: for each input of the graph, which gradient to return; empty: none.
        kept: by key, layouts of parameters that another plan determined. All devices with copies get gradients.

    Raises:
        PlanError: the plan does not fit the graph.
    """
    plan.check(graph)
    batch = plan.batch if batch is None else batch
    return _Lowering(plan, graph, batch, input_gradients, kept or {}, micro_batch).run()


@dataclass(frozen=True, slots=True)
class GatherBucket:
    """Parameters that are gathered together, and the layers that compute with them.

    Attributes:
        freed: the whole parameters are freed after use.
    """

    parameters: tuple[Parameter, ...]
    layers: frozenset[str]
    devices: tuple[int, ...]
    freed: bool


def _gather_buckets(graph: Graph, used: Mapping[str, Layout], freed: Collection[str]) -> list[GatherBucket]:
    """Return buckets of the gathered parameters, in order of use.

    Args:
        used: by key, the layouts of gathered parameters in computations.
        freed: keys of parameters that are freed after use.
    """
    found: list[GatherBucket] = []
    filled: dict[tuple[tuple[int, ...], bool], list[tuple[Parameter, str]]] = {}
    sent = 0

    def close(rows: Sequence[tuple[Parameter, str]], devices: tuple[int, ...], free: bool) -> int:
        found.append(GatherBucket(tuple(p for p, _ in rows), frozenset(layer for _, layer in rows), devices, free))
        return sum(p.entries for p, _ in rows)

    rows = {p.key: (p, layer.name) for layer in graph.layers.values() for p in layer.parameters.values()}
    for key, row in rows.items():
        if key not in used:
            continue
        kind = (holders(used[key]), key in freed)
        if row[0].entries >= BUCKET_ENTRIES:
            sent += close([row], *kind)
            continue
        filled.setdefault(kind, []).append(row)
        # The first layers wait for their weights, so the first buckets are small.
        if sum(p.entries for p, _ in filled[kind]) >= min(BUCKET_ENTRIES, max(BUCKET_ENTRIES // 16, sent)):
            sent += close(filled.pop(kind), *kind)
    for kind, rest in filled.items():
        close(rest, *kind)
    return found


@dataclass(frozen=True, slots=True)
class Turn:
    """The buckets to gather before a layer, and the keys of parameters to free after it."""

    begins: list[GatherBucket] = field(default_factory=list)
    frees: list[str] = field(default_factory=list)


def _turns(buckets: Sequence[GatherBucket], order: Sequence[str]) -> dict[str, Turn]:
    """For each layer, return the freed buckets to gather before it, and the parameters to free after it.

    The gathering of a bucket starts at the first use of the previous bucket.

    Args:
        order: the layers, in the order of computation.
    """
    places = {name: place for place, name in enumerate(order)}
    spans = []
    for bucket in buckets:
        if used_at := [places[name] for name in bucket.layers if name in places]:
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
        sharded = (key for key in used if isinstance(self.kept[key], Split))
        self.gathered = {key: used[key] for key in sharded if isinstance(used[key], Replicated)}
        self.gathered_by: dict[str, int] = {}  # key -> the step that gathers it in this phase
        freed = {p.key for n, how in plan.sharded.items() if how.form == "free" for p in graph[n].trainable}
        self.buckets = _gather_buckets(graph, self.gathered, freed)
        self.steps: list[Step] = []
        self.later: list[SumGradients] = []
        self.values: dict[str, Value] = {}
        self.versions: dict[tuple[str, Layout], Value] = {}
        self.made_by: dict[str, int] = {}
        self.moved_for: dict[str, list[Move]] = {}  # layer -> the moves of its inputs
        self.ready: dict[str, list[int]] = {}  # value key -> steps that contributed to its gradient
        self.trains = trains(graph, self.wanted)
        self.statistics = {name: how for name in graph.layers if (how := self._statistics(graph[name]))}
        self.rows = rows_of(graph, {n: (members, graph[n].dtype) for n, (_, members) in self.statistics.items()})
        self.row_of = {name: row for row in self.rows for name in row}
        self.returned_by: dict[str, int] = {}  # norm -> its exchange in backward

    def run(self) -> StepList:
        for bucket in self.buckets:
            if not bucket.freed:
                self._gather(bucket, "forward")
        freed = [bucket for bucket in self.buckets if bucket.freed]
        self.turns = _turns(freed, list(self.row_of))
        for row in self.rows:
            self._forward([self.graph[name] for name in row])
        stay = self._output_layout()
        outputs = tuple(self._version(name, stay[name]) for name in self.graph.outputs)
        forward = list(self.steps)
        for i, (name, value) in enumerate(zip(self.graph.outputs, outputs, strict=True)):
            if name in self.trains:
                # For an output that stays, each device has its part of the gradient, and moves go back as usual.
                returned = self.values[name] if isinstance(value.layout, Replicated) else value
                step = st.ReturnGradient(self._id, i, value, returned, self._after([value]))
                self.ready.setdefault(returned.key, []).append(self._add(step))
        gradients = self._backward(forward, freed)
        inputs = tuple(self.values[layer.name] for layer in self.graph.inputs)
        steps, later = tuple(self.steps), tuple(self.later)
        return StepList(self.batch, self.plan.devices, inputs, outputs, steps, gradients, self.micro_batch, later)

    def _output_layout(self) -> dict[str, Layout]:
        """Return each output's layout for the caller: copies on all devices; or its tiles, or one split by samples."""
        everyone = everywhere(self.plan.devices)
        own = {name: self.values[name].layout for name in self.graph.outputs if self.graph[name].batched}
        if self.plan.outputs == "everywhere" or not own:
            return dict.fromkeys(self.graph.outputs, everyone)
        how = self.plan.otherwise
        default = OnOne(how.device) if isinstance(how, One) else Split(0, rescale(how.shares, self.batch))
        stay: Layout = next(filter(st.by_samples, own.values()), default)
        kept = {n: at if isinstance(at, Tiles) and not at.channels_last else stay for n, at in own.items()}
        return {name: kept.get(name, everyone) for name in self.graph.outputs}

    @property
    def _id(self) -> int:
        return len(self.steps)

    def _add(self, step: Step) -> int:
        self.steps.append(step)
        return step.id

    def _after(self, values: Iterable[Value]) -> tuple[int, ...]:
        return tuple(sorted({self.made_by[v.key] for v in values if v.key in self.made_by}))

    def _gather(self, bucket: GatherBucket, phase: Phase) -> None:
        """Gather sharded parameters for their layers."""
        keys, shares = tuple(p.key for p in bucket.parameters), tuple(map(self.entries_of_shards, bucket.parameters))
        self.gathered_by.update(
            dict.fromkeys(keys, self._add(st.GatherWeights(self._id, phase, keys, shares, bucket.devices)))
        )

    def _waits_for_weights(self, layer: Layer) -> set[int]:
        """Return the steps that gather this layer's parameters in this phase."""
        return {self.gathered_by[p.key] for p in layer.parameters.values() if p.key in self.gathered_by}

    def entries_of_shards(self, parameter: Parameter) -> Shares:
        layout = self.kept[parameter.key]
        return tuple(held_entries(layout, d, parameter.shape) for d in range(self.plan.devices))

    def _forward(self, row: Sequence[Layer]) -> None:
        """Lower one layer, or several batch norms that exchange their sums together."""
        computes = [step for layer in row if (step := self._reading(layer)) is not None]
        if row[0].name in self.statistics:
            after = tuple(sorted({before for step in computes for before in step.after}))
            exchange = self._exchange_statistics("forward", [(step.layer, step.reads[0]) for step in computes], after)
            waits = [sorted(self._waits_for_weights(layer)) for layer in row]
            computes = [replace(s, after=(exchange, *w)) for s, w in zip(computes, waits, strict=True)]
        for step in computes:
            self.made_by[step.writes.key] = self._add(step if step.id == self._id else replace(step, id=self._id))

    def _reading(self, layer: Layer) -> ComputeStep | None:
        """Add the moves of a layer's inputs, and return its computation."""
        placed = self.placed[layer.name]
        value = Value(layer.name, layer.batch_shape(self.batch), placed.gives)
        self.values[layer.name] = self.versions[layer.name, placed.gives] = value
        if layer.kind == "input":
            return None
        turn = self.turns.get(layer.name, Turn())
        for bucket in turn.begins:
            self._gather(bucket, "forward")
        before, chunks = self._id, 1
        if self.plan.chunks > 1 and layer.kind == "conv" and (layer.inputs[0], placed.takes[0]) not in self.versions:
            # The input may arrive in chunks of the batch.
            source = self.values[layer.inputs[0]]
            schedule = collectives.schedule(source.layout, placed.takes[0], source.shape, self.plan.reduce)
            spans = all(t.box[0] == (0, self.batch) for transfers in schedule.rounds for t in transfers)
            chunks = min(self.plan.chunks, self.batch) if spans and not schedule.in_place else 1
        pairs = zip(layer.inputs, placed.takes, strict=True)
        reads = tuple(self._version(name, layout, chunks) for name, layout in pairs)
        self.moved_for[layer.name] = [step for step in self.steps[before:] if isinstance(step, Move)]
        after = tuple(sorted({*self._after(reads), *self._waits_for_weights(layer)}))
        wants = tuple(layer.differentiable and name in self.trains for name in layer.inputs)
        parameters = {key: self.kept[p.key] for key, p in layer.parameters.items()}
        return ComputeStep(
            self._id, "forward", layer.name, reads, value, wants, parameters, placed.note, after, chunks=chunks,
            frees=tuple(turn.frees),
        )  # fmt: skip

    def _exchange_statistics(self, phase: Phase, rows: Sequence[tuple[str, Value]], after: tuple[int, ...]) -> int:
        """Add the exchange of several norms' sums. `rows`: name and input of each norm."""
        names, reads = zip(*rows, strict=True)
        sizes, members = tuple(self.statistics[name][0] for name in names), self.statistics[names[0]][1]
        return self._add(st.GatherStatistics(self._id, phase, names, reads, sizes, members, after))

    def _statistics(self, layer: Layer) -> tuple[int, tuple[int, ...]] | None:
        """Return (entries sent per device, members) of a norm over several devices; None for any other layer."""
        gives = self.placed[layer.name].gives
        if not exchanges_statistics(layer, gives):
            return None
        # Use the plan's batch: a device without samples in this (smaller) batch still updates its running statistics.
        members = parameter_holders(layer, self.nominal[layer.name].gives, self.plan.devices)
        groups = layer.normalised * self.batch or layer.shape[layer.axis // 2]
        return (2 * groups, members) if len(members) > 1 else None

    def _version(self, name: str, layout: Layout, chunks: int = 1) -> Value:
        """Return a layer's output in a layout. Add the move when the layout is first used."""
        known = self.versions.get((name, layout))
        if known is not None:
            return known
        source, layer = self.values[name], self.graph[name]
        value = self.versions[name, layout] = Value(f"{name}@{layout}", source.shape, layout, name)
        # Values without a batch axis come from parameters and buffers, which are never rounded.
        wire = comm_dtype_of(layer.dtype, self.plan.wire) if layer.batched else "exact"
        step = Move(self._id, "forward", source, value, self.plan.reduce, self._after([source]), chunks, wire)
        self.made_by[value.key] = self._add(step)
        return value

    # --- backward ----------------------------------------------------------------------------------------------------

    def _backward(self, forward: list[Step], freed: Sequence[GatherBucket]) -> tuple[Value | None, ...]:
        """Lower backward. For each input, return the value with its gradient; None without a gradient."""
        sums = _SumBuckets(self)
        with_gradient = reached(self.graph, self.trains)
        order = [name for name in reversed(self.row_of) if name in with_gradient]
        self.turns, self.gathered_by = _turns(freed, order), {}
        for step in reversed(forward):
            if isinstance(step, Move):
                self._return(step)
            elif isinstance(step, ComputeStep) and step.writes.key in self.ready:
                self._backward_compute(step, sums)
        gradients = tuple(self._input_gradient(layer) for layer in self.graph.inputs) if self.wanted else ()
        self._sum(sums, everything=True)
        return gradients

    def _sum(self, sums: "_SumBuckets", *, everything: bool) -> None:
        """Add the sums that are due, or leave them to the step's last micro-batch."""
        for step in sums.take(everything=everything):
            # Reduce-scatters cannot wait: until then, each device would have to keep the whole gradient.
            waits = self.micro_batch in ("first", "middle") and not step.into
            (self.later if waits else self.steps).append(replace(step, id=self._id))

    def _input_gradient(self, layer: Layer) -> Value | None:
        """Return the value whose gradient the caller gets: the input, or the target of the gradient's move."""
        after, value, how = self.ready.get(layer.name), self.values[layer.name], self.wanted.get(layer.name)
        if after is None or how is None:
            return None
        # If the target is a pending sum, each of its devices has the whole gradient.
        target = dual(value.layout if how == "part" else everywhere(self.plan.devices))
        if target == value.layout:
            return value
        whole = Value(f"{layer.name} whole", value.shape, target, layer.name)
        wire = comm_dtype_of(layer.dtype, self.plan.wire)
        self._add(Move(self._id, "backward", value, whole, self.plan.reduce, tuple(after), wire=wire))
        return whole

    def _return(self, step: Move) -> None:
        """Move a gradient back once all readers of the moved value have contributed."""
        after = self.ready.pop(step.writes.key, None)
        if after is not None:
            back = Move(self._id, "backward", step.writes, step.reads, step.reduce, tuple(after), wire=step.wire)
            self.ready.setdefault(step.reads.key, []).append(self._add(back))

    def _backward_compute(self, step: ComputeStep, sums: "_SumBuckets") -> None:
        turn = self.turns.get(step.layer, Turn())
        for bucket in turn.begins:
            self._gather(bucket, "backward")
        after = tuple(self.ready[step.writes.key])
        if step.layer in self.statistics:
            if step.layer not in self.returned_by:
                # Partners of the forward exchange are adjacent there and before all their readers, so all have gradients now.
                names = [name for name in self.row_of[step.layer] if name in self.ready]
                ready = tuple(sorted({before for name in names for before in self.ready[name]}))
                rows = [(n, self.versions[self.graph[n].inputs[0], self.placed[n].takes[0]]) for n in names]
                self.returned_by |= dict.fromkeys(names, self._exchange_statistics("backward", rows, ready))
            after = (self.returned_by[step.layer],)
        after = (*after, *sorted(self._waits_for_weights(self.graph[step.layer])))
        parts = self._parts(step, sums)
        for part in parts:
            last = part == parts[-1]
            back = ComputeStep(
                self._id, "backward", step.layer, step.reads, step.writes, step.wants, step.parameters, "", after, part, last,
                frees=tuple(turn.frees) if last else (),
            )  # fmt: skip
            self._add(back)
            if part != "weight":
                for value, wanted in zip(step.reads, step.wants, strict=True):
                    if wanted:
                        self.ready.setdefault(value.key, []).append(back.id)
                for move in reversed(self.moved_for[step.layer]):
                    self._return(move)
            if part != "input":
                sums.add(back)
                self._sum(sums, everything=False)

    def _parts(self, step: ComputeStep, sums: "_SumBuckets") -> tuple[st.Part, ...]:
        """Return the parts of a layer's backward, so that one gradient is sent while the other is computed.

        Input gradients are first, because earlier layers wait for them, unless only the weights' gradients start an exchange.
        """
        layer = self.graph[step.layer]
        if not layer.multiplies or not layer.trainable or not any(step.wants):
            return ("all",)
        if self.moved_for[step.layer]:
            return ("input", "weight")
        return ("weight", "input") if self.micro_batch in ("only", "last") and sums.would_fill(step) else ("all",)


def trains(graph: Graph, inputs: Collection[str] = ()) -> set[str]:
    """Return the layers whose output has a gradient: they depend on a trainable layer or on one of `inputs`."""
    result = set(inputs)
    for layer in graph.layers.values():
        if layer.trainable or (layer.differentiable and result.intersection(layer.inputs)):
            result.add(layer.name)
    return result


def reached(graph: Graph, trains: set[str]) -> set[str]:
    """Return the layers whose backward runs, because a gradient from an output reaches them."""
    result = trains.intersection(graph.outputs)
    for layer in reversed(list(graph.layers.values())):
        if layer.name in result and layer.differentiable:
            result |= trains.intersection(layer.inputs)
    return result


# --- sums of gradients -----------------------------------------------------------------------------------------------


@dataclass
class _SumBucket:
    """Gradients that are summed together."""

    parameters: list[Parameter] = field(default_factory=list)
    flagged: bool = False
    after: list[int] = field(default_factory=list)

    @property
    def entries(self) -> int:
        return sum(p.entries for p in self.parameters)


_Name = tuple[tuple[int, ...], bool, str]
"""Key of a bucket: devices with gradients; whether it is reduce-scattered; the parameter's key if it has a bucket alone."""


class _SumBuckets:
    """Buckets of gradients, which fill in the order of backward."""

    def __init__(self, lowering: "_Lowering") -> None:
        self.lowering, self.plan, self.graph = lowering, lowering.plan, lowering.graph
        self.open: dict[_Name, _SumBucket] = {}
        with_gradient = [self.graph[name] for name in reached(self.graph, lowering.trains)]
        self.uses = Counter(p.key for layer in with_gradient for p in layer.trainable)
        self.read_by_others = {p.key for layer in with_gradient if not layer.multiplies for p in layer.trainable}

    def add(self, step: ComputeStep) -> None:
        """Add a layer's gradients, except those of parameters that an earlier layer uses too."""
        layer = self.graph[step.layer]
        for parameter in layer.trainable:
            self.uses[parameter.key] -= 1
            if self.uses[parameter.key] or not self._is_summed(parameter.key):
                continue
            bucket = self.open.setdefault(self._bucket_of(step, parameter), _SumBucket())
            bucket.parameters.append(parameter)
            # Only an opaque layer can use a parameter on one device but not on another.
            bucket.flagged |= layer.kind == "opaque"
            if step.id not in bucket.after[-1:]:
                bucket.after.append(step.id)

    def would_fill(self, step: ComputeStep) -> bool:
        """Return whether this layer's weight gradients fill a bucket."""
        filled: Counter[_Name] = Counter()
        for parameter in self.graph[step.layer].trainable:
            if self.uses[parameter.key] == 1 and self._is_summed(parameter.key):
                filled[self._bucket_of(step, parameter)] += parameter.entries
        return any(n + self.open.get(name, _SumBucket()).entries >= BUCKET_ENTRIES for name, n in filled.items())

    def _bucket_of(self, step: ComputeStep, parameter: Parameter) -> _Name:
        """Return the bucket of a gradient. If possible, a large gradient gets a bucket alone, without a copy."""
        alone = self.graph[step.layer].multiplies and parameter.key not in self.read_by_others
        name = parameter.key if alone and parameter.entries >= BUCKET_ENTRIES else ""
        used = self.lowering.gathered.get(parameter.key)
        return holders(used or self.lowering.kept[parameter.key]), used is not None, name

    def _is_summed(self, key: str) -> bool:
        layout = self.lowering.kept[key]
        return key in self.lowering.gathered or (isinstance(layout, Replicated) and len(layout.devices) > 1)

    def take(self, *, everything: bool) -> Iterator[SumGradients]:
        """Yield the sums of full buckets, or of all buckets. Their ids are set later."""
        entries = {name: bucket.entries for name, bucket in self.open.items()}
        is_full = any(n >= BUCKET_ENTRIES for n in entries.values())
        for name, bucket in list(self.open.items()):
            if everything or entries[name] >= (min(COMPANION_ENTRIES, BUCKET_ENTRIES) if is_full else BUCKET_ENTRIES):
                del self.open[name]
                devices, is_sharded, alone = name
                keys, sizes = (tuple(row) for row in zip(*((p.key, p.entries) for p in bucket.parameters), strict=True))
                into = tuple(map(self.lowering.entries_of_shards, bucket.parameters)) if is_sharded else ()
                yield SumGradients(
                    0, keys, sizes, len(keys) if bucket.flagged else 0, devices, self.plan.reduce,
                    tuple(bucket.after), wire=self.plan.wire, alone=bool(alone), into=into,
                )  # fmt: skip


# --- order -----------------------------------------------------------------------------------------------------------

Row = tuple[str, ...]
"""One layer, or several batch norms that exchange together, in the model's order."""


def rows_of(graph: Graph, exchanged: Mapping[str, Hashable]) -> tuple[Row, ...]:
    """Return the layers in the order of computation. Norms that exchange together form one row.

    In a model with branches (Inception, ResNet shortcuts), the inputs of several norms are ready at about the same time, so
    one message can carry the sums of all of them. A norm's level is the number of exchanges on the longest path up to and
    including it. Norms of one level do not depend on each other. Those of one level and kind exchange together.

    Args:
        exchanged: the norms that exchange sums, and the kind of each.
    """
    levels: dict[str, int] = {}
    for name, some in graph.before:
        levels[name] = max([levels[each] for each in some], default=0) + (name in exchanged)
    met: dict[Hashable, list[str]] = {}
    for name, kind in exchanged.items():
        met.setdefault((levels[name], kind), []).append(name)
    return _ordered(graph.before, tuple(tuple(row) for row in met.values() if len(row) > 1))


@lru_cache(maxsize=64)
def _ordered(before: tuple[tuple[str, frozenset[str]], ...], met: tuple[Row, ...]) -> tuple[Row, ...]:
    """Return the graph's order, with each row at the position of its last layer and before its readers (Kahn's algorithm).

    Cached, because planners often need the same order.
    """
    row_of: dict[str, Row] = {name: (name,) for name, _ in before} | {name: row for row in met for name in row}
    if not met:
        return tuple(row_of.values())
    place = {row_of[name]: at for at, (name, _) in enumerate(before)}  # of its last layer
    needs: dict[Row, set[Row]] = {row: set() for row in place}
    for name, some in before:
        needs[row_of[name]].update(row_of[other] for other in some)
    ready = [(place[row], row) for row, others in needs.items() if not others]
    heapq.heapify(ready)
    found = []
    while ready:
        done = heapq.heappop(ready)[1]
        found.append(done)
        for row, others in needs.items():
            if done in others:
                others.remove(done)
                if not others:
                    heapq.heappush(ready, (place[row], row))
    return tuple(found)
