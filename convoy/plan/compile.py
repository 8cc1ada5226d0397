"""compile_device: from the step list to the program of one device.

Every device follows the list in order. A move starts where it stands; the first step that names it in `after` waits for it, or
the end of its phase. Gradients are summed on the second lane.

Layers that a device computes one after another, in forward and backward, with no exchange between them, are a *segment*:
autograd gets it as one graph, as in plain PyTorch. A gradient sum runs beside it and does not end it. Every other exchange of
the device ends it. So does a wait for an exchange that its first layer does not wait for, and a layer whose backward is split
in two so that one gradient travels while the other is computed.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from convoy.layout.layout import Layout, dual, entries, held_entries, holds, local_shape
from convoy.layout.redistribute import chunks
from convoy.model.graph import Graph, Layer
from convoy.plan.device_program import (
    GRADIENT,
    BeginSum,
    Compute,
    Copy,
    DeviceProgram,
    EndSum,
    FinishSums,
    FreeWeights,
    Fused,
    HaveWeights,
    LocalSize,
    Make,
    Merge,
    Operation,
    Pack,
    PackWeights,
    Part,
    TakeSum,
    Unpack,
    UnpackWeights,
    WaitRound,
    WaitSum,
    local_size,
    output_gradient,
)
from convoy.plan.exchange_program import (
    MoveSpec,
    StartedRound,
    finish,
    gather_operations,
    operations_of,
    shared_rows,
    sum_operations,
)
from convoy.plan.steps import (
    ComputeStep,
    GatherStatistics,
    GatherWeights,
    Move,
    Phase,
    ReturnGradient,
    Step,
    StepList,
    SumGradients,
    Value,
    joined,
)

SUMS_AT_ONCE = 1
"""Gradient sums of freed parameters that may be under way when the next layer's backward begins."""

MIXING = "inexact-butterfly-mixing"


def compile_all(steps: StepList, graph: Graph, *, overlap: bool = True) -> list[DeviceProgram]:
    """Return the programs of all devices; see `compile_device`."""
    return [compile_device(steps, graph, d, overlap=overlap) for d in range(steps.devices)]


def compile_device(
    steps: StepList,
    graph: Graph,
    device: int,
    *,
    fuse: bool = True,
    overlap: bool = True,
    stage: int = 0,
    missing: frozenset[int] = frozenset(),
    left: frozenset[str] = frozenset(),
) -> DeviceProgram:
    """Return the program of one device.

    Args:
        fuse: give segments to autograd as one graph; False: every layer by itself.
        overlap: False: wait for everything where it stands in the list, to see what overlap gains.
        stage: of inexact mixing, which counts its stages over training steps.
        missing: outputs that the loss does not depend on, by their place in `steps.outputs`. Backward leaves out the steps
            that no gradient reaches; forward is the same.
        left: parameters with unsummed gradients from earlier micro-batches; they are summed in any case.
    """
    end = len(steps.steps)
    found = segments(steps, graph, device, lambda step: takes_part(step, device)) if fuse else ()
    if missing:
        steps = without_gradients(steps, graph, missing, left)
        alive = {step.id for step in steps.steps}
        found = tuple(replace(each, back=tuple(s for s in each.back if s.id in alive)) for each in found)
    return _Compiler(steps, graph, device, found, overlap, stage, end).program()


def without_gradients(
    steps: StepList, graph: Graph, missing: frozenset[int], left: frozenset[str] = frozenset()
) -> StepList:
    """Return the list without the backward steps that no gradient reaches.

    Args:
        missing: the outputs without a gradient, by their place in `steps.outputs`.
        left: parameters whose gradients are summed in any case, because an earlier micro-batch left some.
    """
    reached: set[str] = set()
    parameters: set[str] = set()
    kept: list[Step] = []
    for step in steps.steps:
        match step:
            case ReturnGradient():
                alive = step.output not in missing
                reached.update([step.writes.key] if alive else [])
            case Move(phase="backward"):
                alive = step.reads.key in reached
                reached.update([step.writes.key] if alive else [])
            case ComputeStep(phase="backward"):
                alive = step.writes.key in reached
                if alive and step.part != "weight":
                    reached.update(v.key for v, wanted in zip(step.reads, step.wants, strict=True) if wanted)
                if alive and step.part != "input":
                    parameters.update(p.key for p in graph[step.layer].trainable)
            case GatherStatistics(phase="backward"):
                told = [row for row in zip(step.layers, step.reads, step.sizes, strict=True) if row[0] in reached]
                alive = bool(told)
                if alive:
                    layers, reads, sizes = zip(*told, strict=True)
                    step = replace(step, layers=layers, reads=reads, sizes=sizes)
            case SumGradients():
                # Gradients of sharded parameters are summed in every micro-batch, so none is left.
                wanted = parameters if step.into else parameters | left
                rows = [(k, n) for k, n in zip(step.keys, step.sizes, strict=True) if k in wanted]
                alive = bool(rows)
                only_left = any(k not in parameters for k, _ in rows)
                if alive and (len(rows) < len(step.keys) or only_left):
                    keys, sizes = (tuple(each) for each in zip(*rows, strict=True))
                    flags = len(keys) if step.flags or only_left else 0
                    into = tuple(s for k, s in zip(step.keys, step.into, strict=False) if k in parameters)
                    alone = step.alone and not flags
                    step = replace(step, keys=keys, sizes=sizes, flags=flags, alone=alone, into=into)
            case _:
                alive = True
        if alive:
            kept.append(step)
    gradients = tuple(v if v is not None and v.key in reached else None for v in steps.input_gradients)
    return replace(steps, steps=tuple(kept), input_gradients=gradients)


def takes_part(step: Step, device: int) -> bool:
    """Whether a device has a part in a step."""
    match step:
        case ComputeStep(phase="forward"):
            return holds(step.writes.layout, device)
        case ComputeStep():
            return any(holds(value.layout, device) for value in (step.writes, *step.reads))
        case Move() | ReturnGradient():
            either = any(holds(value.layout, device) for value in (step.reads, step.writes))
            return either or any(step.schedule.involving(device))
        case GatherStatistics() | SumGradients() | GatherWeights():
            return device in step.members


_BESIDE, _AWAITED = (SumGradients, ReturnGradient), (Move, GatherWeights)

SHORTEST = 2
"""Computations in a segment: one alone gains nothing."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Layers of one device.

    Attributes:
        steps: in forward, in order.
        back: in backward, in order: the steps of those of the layers that have a gradient.
        reads: the values that come from outside, and whether each has a gradient.
        writes: keys of the values that are used outside on this device.
    """

    steps: tuple[ComputeStep, ...]
    back: tuple[ComputeStep, ...]
    reads: Mapping[str, bool]
    writes: tuple[str, ...]


def segments(steps: StepList, graph: Graph, device: int, takes_part: Callable[[Step], bool]) -> tuple[Segment, ...]:
    """Return all segments of a device, in the order of the list.

    Args:
        takes_part: whether the device has anything to do in a step.
    """
    forward = [step for step in steps.phase("forward") if takes_part(step)]
    backward = [step for step in steps.phase("backward") if not isinstance(step, _BESIDE) and takes_part(step)]
    exchanged = {name for step in steps.steps if isinstance(step, GatherStatistics) for name in step.layers}
    exchanged |= {layer.name for layer in graph.layers.values() if layer.alone}
    places = _Backward(backward)
    readers = Counter(value.key for value in steps.outputs)
    for step in forward:
        readers.update({value.key for value in _values_read(step)})
    found = (_segment(row, places, readers) for row in _rows(forward, places, device, exchanged))
    picks = [layer for layer in graph.layers.values() if layer.kind == "pick"]
    return tuple(each for each in found if not _cuts_apart(each, picks))


class _Backward:
    """Where each layer's steps are in a device's backward, and which steps wait for an exchange first."""

    def __init__(self, backward: Sequence[Step]) -> None:
        self.steps = backward
        self.places: dict[str, list[int]] = {}
        self.waits: list[bool] = []
        moves = {step.id for step in backward if isinstance(step, _AWAITED)}
        landed: set[int] = set()
        for place, step in enumerate(backward):
            if isinstance(step, ComputeStep):
                self.places.setdefault(step.layer, []).append(place)
            fresh = moves.intersection(step.after) - landed
            self.waits.append(bool(fresh))
            landed |= fresh


def _rows(
    forward: Sequence[Step], backward: _Backward, device: int, exchanged: set[str]
) -> Iterator[tuple[ComputeStep, ...]]:
    row: list[ComputeStep] = []
    first: int | None = None  # the row's first place in backward
    moves = {step.id for step in forward if isinstance(step, _AWAITED)}
    landed: set[int] = set()
    for step in forward:
        fresh = moves.intersection(step.after) - landed
        landed |= fresh
        fits = (
            isinstance(step, ComputeStep)
            and step.chunks == 1
            and step.layer not in exchanged
            and all(holds(value.layout, device) for value in step.reads)
            # Of a backward in two parts, what the first gives travels during the second.
            and len(backward.places.get(step.layer, [])) <= 1
        )
        places = backward.places.get(step.layer, []) if isinstance(step, ComputeStep) else []
        follows = fits and not fresh and (
            not places or first is None or (places[-1] == first - 1 and not backward.waits[first])
        )  # fmt: skip
        if row and not follows:
            if len(row) >= SHORTEST:
                yield tuple(row)
            row, first = [], None
        if fits and isinstance(step, ComputeStep):
            row.append(step)
            first = places[0] if places else first
    if len(row) >= SHORTEST:
        yield tuple(row)


def _segment(row: tuple[ComputeStep, ...], backward: _Backward, readers: Counter[str]) -> Segment:
    """Return the segment of a row of layers.

    Args:
        readers: how many forward steps read each value; the caller who gets the outputs counts as one.
    """
    made = dict.fromkeys(step.writes.key for step in row)
    reads: dict[str, bool] = {}
    inside: Counter[str] = Counter()
    for step in row:
        inside.update({value.key for value in step.reads})
        for value, wanted in zip(step.reads, step.wants, strict=True):
            if value.key not in made:
                reads[value.key] = reads.get(value.key, False) or wanted
    places = sorted(place for step in row for place in backward.places.get(step.layer, ()))
    back = tuple(each for each in (backward.steps[place] for place in places) if isinstance(each, ComputeStep))
    used = tuple(key for key in made if readers[key] > inside[key])
    return Segment(row, back, reads, used)


def _values_read(step: Step) -> tuple[Value, ...]:
    match step:
        case ComputeStep():
            return step.reads
        case Move():
            return (step.reads,)
        case GatherStatistics():
            return step.reads
    return ()


def _cuts_apart(segment: Segment, picks: Sequence[Layer]) -> bool:
    """Whether a segment has a layer with several outputs but not the layer that picks from it, or the reverse."""
    inside = {step.layer for step in segment.steps} if picks else set()
    return any((pick.name in inside) != (pick.inputs[0] in inside) for pick in picks)


class _Compiler:
    """Compiles the program of one device, step by step."""

    def __init__(
        self,
        steps: StepList,
        graph: Graph,
        device: int,
        found: tuple[Segment, ...],
        overlap: bool,
        stage: int,
        end: int,
    ) -> None:
        self.steps, self.graph, self.device = steps, graph, device
        self.overlap, self.stage = overlap, stage
        self.end = end  # what is awaited at the end of a phase bears this step
        self.main: list[Operation] = []
        self.sums: list[Operation] = []
        self.under_way: dict[int, deque[StartedRound]] = {}
        self.begun: list[SumGradients] = []
        self.last_rounds: list[Operation] = []  # of the sums: what waits for them
        self.of_freed: list[int] = []  # the sums under way whose parameters are freed after use
        self.users = {k: s.devices for s in steps.steps if isinstance(s, GatherWeights) for k in s.keys}
        self.freed = {k for s in steps.steps if isinstance(s, ComputeStep) for k in s.frees}
        self.merged: set[str] = set()
        self.sizes: dict[str, LocalSize] = {}  # layer -> what of it this device computes
        self.shared = {n for step in steps.steps if isinstance(step, GatherStatistics) for n in step.layers}
        self.segments = found
        self.segment_at: dict[int, int] = {}  # first step, in forward or backward -> which segment
        self.given_by: dict[int, int] = {}  # backward step of a segment -> the first of them
        self.made_in: dict[str, int] = {}  # value -> the segment that makes it
        self.segment_of: dict[str, int] = {}  # layer -> its segment
        for number, segment in enumerate(self.segments):
            for row in (segment.steps, segment.back):
                self.segment_at.update({row[0].id: number} if row else {})
            self.given_by.update({step.id: segment.back[0].id for step in segment.back})
            self.made_in.update({step.writes.key: number for step in segment.steps})
            self.segment_of.update({step.layer: number for step in segment.steps})
        self.givers, self.values = self._givers()

    def program(self) -> DeviceProgram:
        forward, backward = self._phase("forward"), self._phase("backward")
        returned = tuple(s.output for s in self.steps.steps if isinstance(s, ReturnGradient))
        inputs, outputs = (tuple(v.key for v in row) for row in (self.steps.inputs, self.steps.outputs))
        lanes = (forward, backward, tuple(self.sums))
        gradients = tuple(
            GRADIENT + v.key if v is not None and v.key in self.givers else "" for v in self.steps.input_gradients
        )
        return DeviceProgram(
            self.device, self.steps.devices, self.steps.batch, inputs, outputs, returned, *lanes, gradients,
            self.steps.micro_batch,
        )  # fmt: skip

    def _phase(self, phase: Phase) -> tuple[Operation, ...]:
        self.main = []
        steps = self.steps.phase(phase)
        places = {step.id: place for place, step in enumerate(steps)}
        place = 0
        while place < len(steps):
            number = self.segment_at.get(steps[place].id)
            if number is None:
                self._step(steps[place])
                place += 1
            else:
                row = self.segments[number].steps if phase == "forward" else self.segments[number].back
                end = 1 + places[row[-1].id]
                self._segment(steps[place:end], number, row)
                place = end
        self._await(list(self.under_way), self.end)
        for value in self.steps.input_gradients if phase == "backward" else ():
            if value is not None:
                self._merge(value.key, self.end)
        self.sums += self.last_rounds
        self.last_rounds = []
        if self.begun:
            self.main.append(FinishSums(self.end, tuple(step.id for step in self.begun)))
            self.main += [_unpack(step, self.device) for step in self.begun]
            self.begun = []
        return tuple(self.main)

    def _step(self, step: Step) -> None:
        match step:
            case ComputeStep(phase="forward"):
                self._forward(step)
                self._free([step])
            case ComputeStep():
                self._limit_sums(step.id)
                self._backward(step)
                self._free([step])
            case Move(phase="forward"):
                self._move(step, step.reads.layout, step.writes.layout, step.reads.key, step.writes.key)
            case Move():
                source, result = GRADIENT + step.reads.key, self._gives(step.writes.key, step.id)
                self._move(step, dual(step.reads.layout), dual(step.writes.layout), source, result)
            case ReturnGradient():
                source, result = output_gradient(step.output), self._gives(step.writes.key, step.id)
                self._move(step, step.reads.layout, dual(step.writes.layout), source, result)
            case GatherStatistics():
                self._statistics(step)
            case SumGradients():
                self._sum(step)
            case GatherWeights():
                self._gather(step)

    # --- computing ---------------------------------------------------------------------------------------------------

    def _holds(self, value: Value) -> bool:
        return holds(value.layout, self.device)

    def _computes(self, step: ComputeStep) -> bool:
        return holds(step.writes.layout, self.device)

    def _forward(self, step: ComputeStep) -> None:
        if not self._computes(step):
            return
        operation = self._computation(step)
        if step.chunks == 1:
            self._await(step.after, step.id)
            self.main.append(operation)
            return
        # The input is still arriving: compute each chunk of rows as soon as it is there.
        shape = local_shape(step.writes.layout, self.device, step.writes.shape)
        parts = []
        for rows in chunks(shape[0], step.chunks):
            for rounds in (self.under_way[s] for s in step.after if self.under_way.get(s)):
                self.main += finish([rounds.popleft()], step.id)
            made = f"{step.writes.key} {rows[0]}:{rows[1]}"
            size = replace(operation.size, samples=rows[1] - rows[0])
            self.main.append(replace(operation, writes=(made,), rows=rows, size=size))
            here = (rows, *((0, n) for n in shape[1:]))
            parts.append(Copy(step.id, Part(made), Part(step.writes.key, here), entries(here)))
        self._await(step.after, step.id)
        self.main += [Make(step.id, step.writes.key, shape, result=True), *parts]

    def _computation(self, step: ComputeStep) -> Compute:
        """Return the operation of a layer in forward or backward."""
        size = self.sizes.get(step.layer)
        if size is None:  # in backward it is what it was in forward
            size = local_size(step, self.graph[step.layer], self.device)
            assert size is not None
            self.sizes[step.layer] = size
        if step.phase == "forward":
            reads = tuple(value.key for value in step.reads)
            reads += (f"{step.layer} norm",) if step.layer in self.shared else ()
            return Compute(step.id, "forward", step.layer, reads, (step.writes.key,), step.wants, size=size)
        reads = (GRADIENT + step.writes.key,)
        if step.layer in self.shared:
            reads += (f"{GRADIENT}{step.layer} row", f"{GRADIENT}{step.layer} rows")
        gives = tuple(
            self._gives(value.key, step.id) if wanted and step.part != "weight" else ""
            for value, wanted in zip(step.reads, step.wants, strict=True)
        )
        return Compute(step.id, "backward", step.layer, reads, gives, step.wants, step.part, step.last, size)

    def _backward(self, step: ComputeStep) -> None:
        if self._computes(step):
            self._await(step.after, step.id)
            self._merge(step.writes.key, step.id)
            self.main.append(self._computation(step))
        elif step.part != "weight":
            for value, wanted in zip(step.reads, step.wants, strict=True):
                if wanted and step.id in self.givers.get(value.key, ()):
                    # It holds the value but computed nothing from it, so its part of the gradient is zero.
                    shape = local_shape(value.layout, self.device, value.shape)
                    self.main.append(Make(step.id, self._gives(value.key, step.id), shape, zeros=True, result=True))

    def _segment(self, steps: Sequence[Step], number: int, computes: Sequence[ComputeStep]) -> None:
        """Compile a segment, with the steps that lie inside it."""
        phase, first, segment = steps[0].phase, steps[0].id, self.segments[number]
        row = {step.id: step for step in computes}
        if phase == "backward":
            self._limit_sums(first)
        self._await(sorted({a for step in row.values() for a in step.after} - set(row)), first)
        operations: list[Compute | Pack | BeginSum] = []
        behind: list[SumGradients] = []
        for step in steps:
            if step.id in row:
                operations.append(self._computation(row[step.id]))
            elif isinstance(step, SumGradients) and self.device in step.members:
                if self.overlap and step.reduce != MIXING:
                    operations += self._begin_sum(step)
                else:
                    behind.append(step)
        if phase == "forward":
            reads, writes = tuple(segment.reads), segment.writes
        else:
            for key in segment.writes:
                self._merge(key, first)
            reads = tuple(GRADIENT + key if self.givers.get(key) else "" for key in segment.writes)
            writes = tuple(
                self._gives(key, first) if first in self.givers.get(key, ()) else "" for key in segment.reads
            )
        self.main.append(Fused(first, phase, number, reads, writes, tuple(operations)))
        self._free([step for step in steps if isinstance(step, ComputeStep)])
        for each in behind:
            self._sum(each)

    def _free(self, steps: Sequence[ComputeStep]) -> None:
        """Free the whole parameters that these steps were the last to use."""
        if keys := tuple(key for step in steps for key in step.frees if self.device in self.users.get(key, ())):
            # A device without samples of this batch computes nothing and has not waited for them yet.
            self._await([after for step in steps if step.frees for after in step.after], steps[-1].id)
            self.main.append(FreeWeights(steps[-1].id, keys))

    def _limit_sums(self, at: int) -> None:
        """Limit the whole gradients that are in memory at once, where parameters are freed to save memory."""
        while len(self.of_freed) > SUMS_AT_ONCE:
            self.main.append(WaitSum(at, self.of_freed.pop(0)))

    # --- gradients of values -----------------------------------------------------------------------------------------

    def _givers(self) -> tuple[dict[str, list[int]], dict[str, Value]]:
        """Return for each value the steps that give a part of its gradient on this device, and the values by key.

        All layers of a segment give one part, named after its first step: autograd adds between them.
        """
        givers: dict[str, list[int]] = {}
        zeros: dict[str, int] = {}
        values: dict[str, Value] = {}
        for step in self.steps.phase("backward"):
            match step:
                case Move() | ReturnGradient():
                    values[step.writes.key] = step.writes
                    if self._holds(step.writes):
                        givers.setdefault(step.writes.key, []).append(step.id)
                case ComputeStep() if step.part != "weight":
                    for value, wanted in zip(step.reads, step.wants, strict=True):
                        values[value.key] = value
                        inside = self.made_in.get(value.key, -1) == self.segment_of.get(step.layer, -2)
                        if not wanted or inside:
                            continue
                        if self._computes(step):
                            row = givers.setdefault(value.key, [])
                            first = self.given_by.get(step.id, step.id)
                            row += [first] if first not in row else []
                        elif self._holds(value):
                            zeros.setdefault(value.key, step.id)
        return {key: [step] for key, step in zeros.items()} | givers, values

    def _gives(self, key: str, step: int) -> str:
        """Return the buffer of one step's part of a value's gradient."""
        several = len(self.givers.get(key, ())) > 1
        return f"{GRADIENT}{key} from {self.given_by.get(step, step)}" if several else GRADIENT + key

    def _merge(self, key: str, step: int) -> None:
        """Add up the parts of a gradient before it is read for the first time."""
        ids = self.givers.get(key, ())
        if len(ids) > 1 and key not in self.merged:
            self.merged.add(key)
            size = held_entries(self.values[key].layout, self.device, self.values[key].shape)
            self.main.append(Merge(step, GRADIENT + key, tuple(self._gives(key, each) for each in ids), size))

    # --- exchanging --------------------------------------------------------------------------------------------------

    def _move(self, step: Move | ReturnGradient, src: Layout, dst: Layout, source: str, result: str) -> None:
        schedule = step.schedule
        if any(schedule.involving(self.device)):
            self._await(step.after, step.id)
        if step.phase == "backward" and isinstance(step, Move):
            self._merge(step.reads.key, step.id)
        found = operations_of(
            MoveSpec(step.id, schedule, self.device, src, dst, step.reads.shape, step.wire, source, result)
        )
        self.main += found.begin
        if found.started:
            self.under_way[step.id] = deque(found.started)
            if not self.overlap or isinstance(step, ReturnGradient):
                self._await([step.id], step.id)

    def _statistics(self, step: GatherStatistics) -> None:
        """Exchange each member's row of sums; in forward, combine the rows to the statistics of the global batch."""
        if self.device not in step.members:
            return
        self._await(step.after, step.id)
        backward = step.phase == "backward"
        of = [GRADIENT + name if backward else name for name in step.layers]
        for name, each, value in zip(step.layers, of, step.reads, strict=True):
            if backward:
                self._merge(name, step.id)
            read = (each if backward else value.key,) if self._holds(value) else ()
            self.main.append(Compute(step.id, step.phase, name, read, (f"{each} row",), part="statistics"))
        self.main += shared_rows(step, self.device, of)
        if not backward:
            self.main += [
                Compute(step.id, "forward", name, (f"{name} rows",), (f"{name} norm",), part="combine")
                for name in step.layers
            ]

    def _await(self, steps: Iterable[int], at: int) -> None:
        """Wait for those of these exchanges that are under way."""
        for step in steps:
            if step in self.under_way:
                self.main += finish(self.under_way.pop(step), at)

    def _gather(self, step: GatherWeights) -> None:
        """Start to gather shards; the step that waits for them finds whole parameters."""
        if self.device not in step.members:
            return
        size, uses = joined(step.shares)[self.device], self.device in step.devices
        if step.held:
            self.main.append(HaveWeights(step.id, step.keys, step.shares, size, own_only=not uses))
            return
        self._await(step.after, step.id)
        flat, alone = f"weights {step.id}", step.alone and uses
        stays = not uses and self.steps.micro_batch == "first" and self.freed.isdisjoint(step.keys)
        fresh = uses and not self.freed.isdisjoint(step.keys)
        self.main.append(
            PackWeights(step.id, flat, step.keys, step.shares, size, alone, own_only=not uses, stays=stays, fresh=fresh)
        )
        found = gather_operations(step.id, step.schedule, self.device, flat, own_only=not uses)
        self.main += found.begin
        self.under_way[step.id] = deque(found.started)
        if uses:
            whole = UnpackWeights(step.id, flat, step.keys, step.shares, alone)
            self.under_way[step.id].append(StartedRound(step.id, None, [whole]))
        if not self.overlap:
            self._await([step.id], step.id)

    def _sum(self, step: SumGradients) -> None:
        if self.device not in step.members:
            return
        if self.overlap and step.reduce != MIXING:
            self.main += self._begin_sum(step)
            return
        if step.reduce != MIXING:
            self.main.append(_pack(step))
            self.main += sum_operations(step.id, step.schedule, self.device, _flat(step), step.wire, lane=0)
            self.main += _own_share(step, self.device)
            self.main.append(_unpack(step, self.device))
            return
        schedule = step.stage(self.stage)
        partner = next((t.receiver for t in schedule.rounds[0] if t.sender == self.device), None)
        both = [self.device] if partner is None else [self.device, partner]
        # The gradient parts are sums over samples, divided by the global batch: scale what two devices saw to a whole batch.
        samples = sum(step.samples[d] for d in both)
        self.main.append(replace(_pack(step), alone=False, mixed_over=len(both)))
        self.main += sum_operations(step.id, schedule, self.device, _flat(step), "exact", lane=0)
        scale = sum(step.samples) / samples if samples else 0.0
        self.main.append(replace(_unpack(step, self.device), mixed_over=len(both), scale=scale))

    def _begin_sum(self, step: SumGradients) -> list[Pack | BeginSum]:
        """Return the main lane's part of a sum; its rounds go to the second lane.

        What arrives in the last rounds lands in its place, so it is waited for behind all sums: the next sum begins meanwhile.
        """
        flat = _flat(step)
        rounds = list(sum_operations(step.id, step.schedule, self.device, flat, step.wire, lane=1))
        behind: list[Operation] = [EndSum(step.id, _share(step) if step.into else flat)]
        while rounds and isinstance(rounds[-1], WaitRound):
            behind.insert(0, rounds.pop())
        self.sums += [TakeSum(step.id, flat), *rounds, *_own_share(step, self.device)]
        (self.sums if step.into else self.last_rounds).extend(behind)
        if self.freed.intersection(step.keys):
            self.of_freed.append(step.id)
        self.begun.append(step)
        return [_pack(step), BeginSum(step.id, flat)]


def _flat(step: SumGradients) -> str:
    return f"sum {step.id}"


def _share(step: SumGradients) -> str:
    return f"share {step.id}"


def _pack(step: SumGradients) -> Pack:
    return Pack(step.id, _flat(step), step.keys, step.sizes, step.flags, step.alone, into=step.into)


def _own_share(step: SumGradients, device: int) -> list[Operation]:
    """Copy what this device keeps of a sum to its own memory, so that the whole gradients can be freed."""
    if not step.into:
        return []
    kept = joined(step.into)
    start, size = sum(kept[:device]), kept[device]
    share, span = _share(step), Part(_flat(step), ((start, start + size),))
    return [Make(step.id, share, (size,), like=_flat(step)), Copy(step.id, span, Part(share), size)]


def _unpack(step: SumGradients, device: int) -> Unpack:
    if step.into:
        own = tuple(shares[device] for shares in step.into)
        return Unpack(step.id, _share(step), step.keys, own, copied=len(own) > 1)
    apart = len(step.keys) > 1 and len(step.devices) > 1
    return Unpack(step.id, _flat(step), step.keys, step.sizes, step.flags, copied=apart)
