"""Compile the step list into the program of one device (`compile_device`).

Every device follows the list in order. An exchange starts at its position in the list. The first step that names it in `after`
waits for it; if there is none, the end of the phase does. Gradients are summed on the second lane.

A *segment* is a run of layers that a device computes in forward and backward without an exchange between them. Autograd gets
it as one graph, as in plain PyTorch. Gradient sums overlap with a segment. It ends at any other exchange of the device, at a
layer that must wait for a further exchange, and at a layer that sends one gradient while it computes the other.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import cast

from convoy.errors import PlanError
from convoy.layout.collectives import chunks
from convoy.layout.layout import Box, Layout, Tiles, Windows, box, dual, entries, held_entries, holds, local_shape
from convoy.model.graph import Graph
from convoy.plan import device_program as ops
from convoy.plan import exchange_program as exchange
from convoy.plan import steps as st
from convoy.plan.device_program import GRADIENT, DeviceProgram, Operation, Part
from convoy.plan.exchange_program import MoveSpec, StartedRound, finish, operations_of
from convoy.plan.steps import ComputeStep, Move, Step, StepList, SumGradients

SUMS_AT_ONCE = 1
"""Largest number of gradient sums of freed parameters that may be unfinished when the next layer's backward begins."""


def compile_all(steps: StepList, graph: Graph, *, overlap: bool = True) -> list[DeviceProgram]:
    """Return the programs of all devices; see `compile_device`."""
    return [compile_device(steps, graph, d, overlap=overlap) for d in range(steps.devices)]


def compile_device(
    steps: StepList,
    graph: Graph,
    device: int,
    *,
    overlap: bool = True,
    missing: frozenset[int] = frozenset(),
    left: frozenset[str] = frozenset(),
) -> DeviceProgram:
    """Return the program of one device.

    Args:
        overlap: start exchanges early; False: wait for each at its position in the list, to measure the gain of overlap.
        missing: indices in `steps.outputs` of outputs that the loss does not depend on. Backward omits the steps without a
            gradient; forward is the same.
        left: parameters with unsummed gradients from earlier micro-batches; they are always summed.
    """
    end = len(steps.steps)
    found = segments(steps, graph, device)
    if missing:
        steps = without_gradients(steps, graph, missing, left)
        alive = {step.id for step in steps.steps}
        found = tuple(replace(each, back=tuple(s for s in each.back if s.id in alive)) for each in found)
    return _Compiler(steps, graph, device, found, overlap, end).program()


def without_gradients(
    steps: StepList, graph: Graph, missing: frozenset[int], left: frozenset[str] = frozenset()
) -> StepList:
    """Return the list without the backward steps that no gradient reaches. Arguments as in `compile_device`."""
    reached: set[str] = set()
    parameters: set[str] = set()
    kept: list[Step] = []
    for step in steps.steps:
        match step:
            case st.ReturnGradient():
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
            case st.GatherStatistics(phase="backward"):
                norms = [row for row in zip(step.layers, step.reads, step.sizes, strict=True) if row[0] in reached]
                alive = bool(norms)
                if alive:
                    layers, reads, sizes = zip(*norms, strict=True)
                    step = replace(step, layers=layers, reads=reads, sizes=sizes)
            case SumGradients():
                # Gradients of sharded parameters are summed in every micro-batch, so none is left unsummed.
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


def _takes_part(step: Step, device: int) -> bool:
    match step:
        case ComputeStep(phase="forward"):
            return holds(step.writes.layout, device)
        case ComputeStep():
            return any(holds(value.layout, device) for value in (step.writes, *step.reads))
        case Move() | st.ReturnGradient():
            either = any(holds(value.layout, device) for value in (step.reads, step.writes))
            return either or any(step.schedule.involving(device))
        case st.GatherStatistics() | SumGradients() | st.GatherWeights():
            return device in step.members


# --- segments --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive layers of one device without an exchange between them.

    Attributes:
        steps: forward steps, in order.
        back: backward steps of the layers with a gradient, in order.
        reads: keys of input values -> whether each needs a gradient.
        writes: keys of the values that this device uses outside the segment.
    """

    steps: tuple[ComputeStep, ...]
    back: tuple[ComputeStep, ...]
    reads: dict[str, bool]
    writes: tuple[str, ...]


def segments(steps: StepList, graph: Graph, device: int) -> tuple[Segment, ...]:
    """Return all segments of a device, in the order of the list. A single layer would gain nothing, so it is no segment."""
    forward = [step for step in steps.phase("forward") if _takes_part(step, device)]
    # Gradient sums run on the second lane, and the gradient of an output needs no exchange.
    ignored = (SumGradients, st.ReturnGradient)
    backward = [s for s in steps.phase("backward") if not isinstance(s, ignored) and _takes_part(s, device)]
    places: dict[str, list[int]] = {}  # layer -> the places of its steps in backward
    for place, step in enumerate(backward):
        if isinstance(step, ComputeStep):
            places.setdefault(step.layer, []).append(place)
    readers = Counter(value.key for value in steps.outputs)
    for each in forward:
        reads = (each.reads,) if isinstance(each, Move) else getattr(each, "reads", ())
        readers.update({value.key for value in reads})
    whole = {name for step in steps.steps if isinstance(step, st.GatherStatistics) for name in step.layers}
    picks = [layer for layer in graph.layers.values() if layer.kind == "pick"]
    found = []
    for row in _rows(forward, backward, places, device, whole):
        names = {step.layer for step in row}
        # A layer with several outputs and the layers that pick from it must be in the same segment, or in none.
        if len(row) > 1 and not any((pick.name in names) != (pick.inputs[0] in names) for pick in picks):
            back = [backward[place] for place in sorted(p for step in row for p in places.get(step.layer, ()))]
            found.append(_segment(row, [step for step in back if isinstance(step, ComputeStep)], readers))
    return tuple(found)


def _rows(
    forward: Sequence[Step], backward: Sequence[Step], places: dict[str, list[int]], device: int, whole: set[str]
) -> Iterator[list[ComputeStep]]:
    """Yield runs of layers that may form one graph. They contain no layers in `whole`."""
    row: list[ComputeStep] = []
    first, waits = None, _first_waits(backward)  # `first`: the row's first place in backward
    for step, waiting in zip(forward, _first_waits(forward), strict=True):
        at = places.get(step.layer, []) if isinstance(step, ComputeStep) else []
        fits = (
            isinstance(step, ComputeStep)
            and step.chunks == 1
            and step.layer not in whole
            and all(holds(value.layout, device) for value in step.reads)
            # With two backward steps, the gradient of the first is sent during the second.
            and len(at) <= 1
        )
        follows = fits and not waiting and (not at or first is None or (at[0] == first - 1 and not waits[first]))
        if row and not follows:
            yield row
            row, first = [], None
        if fits and isinstance(step, ComputeStep):
            row.append(step)
            first = at[0] if at else first
    yield row


def _first_waits(steps: Sequence[Step]) -> list[bool]:
    """For each step, return whether it waits for a move or gather that no earlier step waited for."""
    moves = {step.id for step in steps if isinstance(step, Move | st.GatherWeights)}
    done: set[int] = set()
    found = []
    for step in steps:
        waits = moves.intersection(step.after) - done
        done |= waits
        found.append(bool(waits))
    return found


def _segment(row: Sequence[ComputeStep], back: Sequence[ComputeStep], readers: Counter[str]) -> Segment:
    """Return the segment of a run of layers. `readers`: number of readers of each value (forward steps and the caller)."""
    made = dict.fromkeys(step.writes.key for step in row)
    reads: dict[str, bool] = {}
    inside: Counter[str] = Counter()
    for step in row:
        inside.update({value.key for value in step.reads})
        for value, wanted in zip(step.reads, step.wants, strict=True):
            if value.key not in made:
                reads[value.key] = reads.get(value.key, False) or wanted
    return Segment(tuple(row), tuple(back), reads, tuple(key for key in made if readers[key] > inside[key]))


# --- one device ------------------------------------------------------------------------------------------------------


class _Compiler:
    """A compiler for the program of one device, step by step."""

    def __init__(
        self,
        steps: StepList,
        graph: Graph,
        device: int,
        found: tuple[Segment, ...],
        overlap: bool,
        end: int,
    ) -> None:
        self.steps, self.graph, self.device = steps, graph, device
        self.overlap = overlap
        self.end = end  # the step id of waits at the end of a phase
        self.main: list[Operation] = []
        self.sums: list[Operation] = []
        self.in_flight: dict[int, deque[StartedRound]] = {}
        self.begun: list[SumGradients] = []
        self.last_rounds: list[Operation] = []  # waits for the last rounds of sums
        self.freed_sums: list[int] = []  # unfinished sums of parameters that are freed after use
        self.users = {k: s.devices for s in steps.steps if isinstance(s, st.GatherWeights) for k in s.keys}
        self.freed = {k for s in steps.steps if isinstance(s, ComputeStep) for k in s.frees}
        self.merged: set[str] = set()
        self.sizes: dict[str, ops.LocalSize] = {}  # by layer
        self.norms = {n for step in steps.steps if isinstance(step, st.GatherStatistics) for n in step.layers}
        self.segments = found
        self.segment_at: dict[int, int] = {}  # first step of a segment, in forward or backward -> number of the segment
        self.first_back: dict[int, int] = {}  # backward step of a segment -> the segment's first backward step
        self.made_in: dict[str, int] = {}  # value -> the segment that makes it
        self.segment_of: dict[str, int] = {}  # layer -> its segment
        for number, segment in enumerate(self.segments):
            for row in (segment.steps, segment.back):
                self.segment_at.update({row[0].id: number} if row else {})
            self.first_back.update({step.id: segment.back[0].id for step in segment.back})
            self.made_in.update({step.writes.key: number for step in segment.steps})
            self.segment_of.update({step.layer: number for step in segment.steps})
        self.sources, self.values = self._sources()

    def program(self) -> DeviceProgram:
        forward, backward = self._phase("forward"), self._phase("backward")
        steps = self.steps
        returned = tuple(s.output for s in steps.steps if isinstance(s, st.ReturnGradient))
        inputs, outputs = (tuple(v.key for v in row) for row in (steps.inputs, steps.outputs))
        gradients = (GRADIENT + v.key if v and v.key in self.sources else "" for v in steps.input_gradients)
        return DeviceProgram(
            self.device, steps.devices, steps.batch, inputs, outputs, returned, forward, backward, tuple(self.sums),
            tuple(gradients), steps.micro_batch,
        )  # fmt: skip

    def _phase(self, phase: st.Phase) -> tuple[Operation, ...]:
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
        self._await(list(self.in_flight), self.end)
        for value in self.steps.input_gradients if phase == "backward" else ():
            if value is not None:
                self._merge(value.key, self.end)
        self.sums += self.last_rounds
        self.last_rounds = []
        if self.begun:
            self.main.append(ops.FinishSums(self.end, tuple(step.id for step in self.begun)))
            self.main += [_unpack(step, self.device) for step in self.begun]
            self.begun = []
        return tuple(self.main)

    def _step(self, step: Step) -> None:
        match step:
            case ComputeStep(phase="forward"):
                if holds(step.writes.layout, self.device):
                    self._forward(step)
                self._free([step])
            case ComputeStep():
                self._limit_sums(step.id)
                self._backward(step)
                self._free([step])
            case Move(phase="forward"):
                self._move(step, step.reads.layout, step.writes.layout, step.reads.key, step.writes.key)
            case Move():
                source, result = GRADIENT + step.reads.key, self._gradient(step.writes.key, step.id)
                self._move(step, dual(step.reads.layout), dual(step.writes.layout), source, result)
            case st.ReturnGradient():
                source, result = ops.output_gradient(step.output), self._gradient(step.writes.key, step.id)
                self._move(step, step.reads.layout, dual(step.writes.layout), source, result)
            case SumGradients() if self.device in step.members:
                self._sum(step)
            case st.GatherStatistics() if self.device in step.members:
                self._statistics(step)
            case st.GatherWeights() if self.device in step.members:
                self._gather(step)

    # --- computing ---------------------------------------------------------------------------------------------------

    def _forward(self, step: ComputeStep) -> None:
        operation = self._computation(step)
        if step.chunks == 1:
            self._await(step.after, step.id)
            self.main.append(operation)
            return
        # The input arrives in chunks: compute each chunk of rows as soon as it has arrived.
        shape = local_shape(step.writes.layout, self.device, step.writes.shape)
        parts = []
        for rows in chunks(shape[0], step.chunks):
            for rounds in (self.in_flight[s] for s in step.after if self.in_flight.get(s)):
                self.main += finish([rounds.popleft()], step.id)
            made = f"{step.writes.key} {rows[0]}:{rows[1]}"
            size = replace(operation.size, samples=rows[1] - rows[0])
            self.main.append(replace(operation, writes=(made,), rows=rows, size=size))
            here = (rows, *((0, n) for n in shape[1:]))
            parts.append(ops.Copy(step.id, Part(made), Part(step.writes.key, here), entries(here)))
        self._await(step.after, step.id)
        self.main += [ops.Make(step.id, step.writes.key, shape, result=True), *parts]

    def _computation(self, step: ComputeStep) -> ops.Compute:
        """Return the operation of a layer in forward or backward."""
        size = self.sizes.get(step.layer)
        if size is None:  # backward has the same size as forward
            size = ops.local_size(step, self.graph[step.layer], self.device)
            assert size is not None
            self.sizes[step.layer] = size
        norm = step.layer in self.norms
        if step.phase == "forward":
            reads = (*(value.key for value in step.reads), *([f"{step.layer} norm"] if norm else []))
            tile = None
            if isinstance(step.writes.layout, Tiles | Windows) and self.graph[step.layer].windows:
                boxes = (box(value.layout, self.device, value.shape) for value in (step.writes, step.reads[0]))
                tile = cast(tuple[Box, Box], tuple(boxes))
            return ops.Compute(
                step.id, "forward", step.layer, reads, (step.writes.key,), step.wants, size=size, tile=tile
            )
        sums = [f"{GRADIENT}{step.layer} row", f"{GRADIENT}{step.layer} rows"] if norm else []
        gives = tuple(
            self._gradient(value.key, step.id) if wanted and step.part != "weight" else ""
            for value, wanted in zip(step.reads, step.wants, strict=True)
        )
        reads = (GRADIENT + step.writes.key, *sums)
        return ops.Compute(step.id, "backward", step.layer, reads, gives, step.wants, step.part, step.last, size)

    def _backward(self, step: ComputeStep) -> None:
        if holds(step.writes.layout, self.device):
            self._await(step.after, step.id)
            self._merge(step.writes.key, step.id)
            self.main.append(self._computation(step))
        elif step.part != "weight":
            for value, wanted in zip(step.reads, step.wants, strict=True):
                if wanted and step.id in self.sources.get(value.key, ()):
                    # The device holds the value but computed nothing from it, so its gradient here is zero.
                    shape = local_shape(value.layout, self.device, value.shape)
                    made = self._gradient(value.key, step.id)
                    self.main.append(ops.Make(step.id, made, shape, zeros=True, result=True))

    def _segment(self, steps: Sequence[Step], number: int, computes: Sequence[ComputeStep]) -> None:
        """Compile a segment, including the steps inside it."""
        phase, first, segment = steps[0].phase, steps[0].id, self.segments[number]
        row = {step.id: step for step in computes}
        if phase == "backward":
            self._limit_sums(first)
        self._await(sorted({a for step in row.values() for a in step.after} - set(row)), first)
        operations: list[ops.Compute | ops.Pack | ops.BeginSum] = []
        behind: list[SumGradients] = []
        for step in steps:
            if step.id in row:
                operations.append(self._computation(row[step.id]))
            elif isinstance(step, SumGradients) and self.device in step.members:
                if self.overlap:
                    operations += self._begin_sum(step)
                else:
                    behind.append(step)
        if phase == "forward":
            reads, writes = tuple(segment.reads), segment.writes
        else:
            for key in segment.writes:
                self._merge(key, first)
            reads = tuple(GRADIENT + key if self.sources.get(key) else "" for key in segment.writes)
            given = (key if first in self.sources.get(key, ()) else "" for key in segment.reads)
            writes = tuple(key and self._gradient(key, first) for key in given)
        self.main.append(ops.Fused(first, phase, number, reads, writes, tuple(operations)))
        self._free([step for step in steps if isinstance(step, ComputeStep)])
        for each in behind:
            self._sum(each)

    def _free(self, steps: Sequence[ComputeStep]) -> None:
        """Free the whole parameters whose last users are these steps."""
        if keys := tuple(key for step in steps for key in step.frees if self.device in self.users.get(key, ())):
            # A device without samples in this batch computes nothing and has not waited for the parameters yet.
            self._await([after for step in steps if step.frees for after in step.after], steps[-1].id)
            self.main.append(ops.FreeWeights(steps[-1].id, keys))

    def _limit_sums(self, at: int) -> None:
        """Limit the number of whole gradients in memory, if parameters are freed to save memory."""
        while len(self.freed_sums) > SUMS_AT_ONCE:
            self.main.append(ops.WaitSum(at, self.freed_sums.pop(0)))

    # --- gradients of values -----------------------------------------------------------------------------------------

    def _sources(self) -> tuple[dict[str, list[int]], dict[str, st.Value]]:
        """For each value, return the steps that contribute to its gradient on this device. Also return the values by key.

        A segment contributes once, under its first step's id, because autograd adds the gradients inside it.
        """
        sources: dict[str, list[int]] = {}
        zeros: dict[str, list[int]] = {}
        values: dict[str, st.Value] = {}
        for step in self.steps.phase("backward"):
            match step:
                case Move() | st.ReturnGradient():
                    values[step.writes.key] = step.writes
                    if holds(step.writes.layout, self.device):
                        sources.setdefault(step.writes.key, []).append(step.id)
                case ComputeStep() if step.part != "weight":
                    for value, wanted in zip(step.reads, step.wants, strict=True):
                        values[value.key] = value
                        inside = self.made_in.get(value.key, -1) == self.segment_of.get(step.layer, -2)
                        if not wanted or inside:
                            continue
                        if holds(step.writes.layout, self.device):
                            row = sources.setdefault(value.key, [])
                            first = self.first_back.get(step.id, step.id)
                            row += [first] if first not in row else []
                        elif holds(value.layout, self.device):
                            zeros.setdefault(value.key, [step.id])
        return zeros | sources, values

    def _gradient(self, key: str, step: int) -> str:
        """Return the buffer of one step's contribution to a value's gradient."""
        several = len(self.sources.get(key, ())) > 1
        return f"{GRADIENT}{key} from {self.first_back.get(step, step)}" if several else GRADIENT + key

    def _merge(self, key: str, step: int) -> None:
        """Sum the contributions to a gradient before its first use."""
        ids = self.sources.get(key, ())
        if len(ids) > 1 and key not in self.merged:
            self.merged.add(key)
            size = held_entries(self.values[key].layout, self.device, self.values[key].shape)
            self.main.append(ops.Merge(step, GRADIENT + key, tuple(self._gradient(key, each) for each in ids), size))

    # --- exchanging --------------------------------------------------------------------------------------------------

    def _await(self, steps: Iterable[int], at: int) -> None:
        """Finish these exchanges if they have started."""
        for step in steps:
            self.main += finish(self.in_flight.pop(step, ()), at)

    def _move(self, step: Move | st.ReturnGradient, src: Layout, dst: Layout, source: str, result: str) -> None:
        schedule, shape = step.schedule, step.reads.shape
        if any(schedule.involving(self.device)):
            self._await(step.after, step.id)
        if step.phase == "backward" and isinstance(step, Move):
            self._merge(step.reads.key, step.id)
        in_place = isinstance(src, Windows) and isinstance(dst, Tiles) and self._owns_gradient(step.reads.layer)
        move = MoveSpec(step.id, schedule, self.device, src, dst, shape, step.wire, source, result, in_place)
        found = operations_of(move)
        self.main += found.begin
        if found.started:
            self.in_flight[step.id] = deque(found.started)
            if not self.overlap or isinstance(step, st.ReturnGradient):
                self._await([step.id], step.id)

    def _owns_gradient(self, name: str) -> bool:
        """Return whether a value's gradient shares memory with no other tensor: a convolution or Linear allocates it."""
        readers = [] if name in self.graph.outputs else self.graph.readers[name]
        if [layer.kind for layer in readers] == ["elementwise"]:
            return self._owns_gradient(readers[0].name)
        return bool(readers) and all(layer.multiplies for layer in readers)

    def _statistics(self, step: st.GatherStatistics) -> None:
        """All-gather each member's row of sums. In forward, combine them into the statistics of the global batch."""
        self._await(step.after, step.id)
        backward = step.phase == "backward"
        of = [GRADIENT + name if backward else name for name in step.layers]
        for name, each, value in zip(step.layers, of, step.reads, strict=True):
            if backward:
                self._merge(name, step.id)
            read = (each if backward else value.key,) if holds(value.layout, self.device) else ()
            self.main.append(ops.Compute(step.id, step.phase, name, read, (f"{each} row",), part="statistics"))
        self.main += exchange.shared_rows(step, self.device, of)
        for name in step.layers if not backward else ():
            read, made = (f"{name} rows",), (f"{name} norm",)
            self.main.append(ops.Compute(step.id, "forward", name, read, made, part="combine"))

    def _gather(self, step: st.GatherWeights) -> None:
        """Start to gather shards. After its wait, a step can use the whole parameters."""
        size, uses = st.joined(step.shares)[self.device], self.device in step.devices
        self._await(step.after, step.id)
        flat, alone = f"weights {step.id}", step.alone and uses
        freed = not self.freed.isdisjoint(step.keys)
        pack = (step.id, flat, step.keys, step.shares, size, alone)
        self.main.append(ops.PackWeights(*pack, own_only=not uses, fresh=uses and freed))
        found = exchange.gather_operations(step.id, step.schedule, self.device, flat, own_only=not uses)
        self.main += found.begin
        self.in_flight[step.id] = deque(found.started)
        if uses:
            whole = ops.UnpackWeights(step.id, flat, step.keys, step.shares, alone)
            self.in_flight[step.id].append(StartedRound(step.id, None, [whole]))
        if not self.overlap:
            self._await([step.id], step.id)

    def _sum(self, step: SumGradients) -> None:
        if self.overlap:
            self.main += self._begin_sum(step)
            return
        pack, flat, unpack = _pack(step), _flat(step), _unpack(step, self.device)
        rounds = exchange.sum_operations(step.id, step.schedule, self.device, flat, step.wire, lane=0)
        self.main += [pack, *rounds, *_own_shard(step, self.device), unpack]

    def _begin_sum(self, step: SumGradients) -> list[ops.Pack | ops.BeginSum]:
        """Return the main lane's operations of a sum. Add its rounds to the second lane.

        The last rounds receive in place, so the lane waits for them only after all sums, and the next sum starts earlier.
        """
        flat = _flat(step)
        rounds = list(exchange.sum_operations(step.id, step.schedule, self.device, flat, step.wire, lane=1))
        behind: list[Operation] = [ops.EndSum(step.id, _shard(step) if step.into else flat)]
        while rounds and isinstance(rounds[-1], ops.WaitRound):
            behind.insert(0, rounds.pop())
        self.sums += [ops.TakeSum(step.id, flat), *rounds, *_own_shard(step, self.device)]
        (self.sums if step.into else self.last_rounds).extend(behind)
        if self.freed.intersection(step.keys):
            self.freed_sums.append(step.id)
        self.begun.append(step)
        return [_pack(step), ops.BeginSum(step.id, flat)]


def _flat(step: SumGradients) -> str:
    return f"sum {step.id}"


def _shard(step: SumGradients) -> str:
    return f"share {step.id}"


def _pack(step: SumGradients) -> ops.Pack:
    return ops.Pack(step.id, _flat(step), step.keys, step.sizes, step.flags, step.alone, into=step.into)


def _own_shard(step: SumGradients, device: int) -> list[Operation]:
    """Return the copy of this device's shard of a sum to separate memory, so that the whole gradients can be freed."""
    if not step.into:
        return []
    kept = st.joined(step.into)
    start, size = sum(kept[:device]), kept[device]
    span = Part(_flat(step), ((start, start + size),))
    make = ops.Make(step.id, _shard(step), (size,), like=_flat(step))
    return [make, ops.Copy(step.id, span, Part(_shard(step)), size)]


def _unpack(step: SumGradients, device: int) -> ops.Unpack:
    if step.into:
        own = tuple(shares[device] for shares in step.into)
        return ops.Unpack(step.id, _shard(step), step.keys, own, copied=len(own) > 1)
    apart = len(step.keys) > 1 and len(step.devices) > 1
    return ops.Unpack(step.id, _flat(step), step.keys, step.sizes, step.flags, copied=apart)


# --- checking the programs of all devices together -------------------------------------------------------------------


def check_programs(programs: Sequence[DeviceProgram]) -> None:
    """Raise PlanError unless, on each lane, two devices send and receive the same messages in the same order."""
    sent: dict[tuple[int, int, int], list[tuple[ops.ExchangeRound, ops.PlannedMessage]]] = {}
    received: dict[tuple[int, int, int], list[tuple[ops.ExchangeRound, ops.PlannedMessage]]] = {}
    for program in programs:
        for lane, operations in enumerate([[*program.forward, *program.backward], program.sums]):
            for op in operations:
                if isinstance(op, ops.ExchangeRound):
                    for message in op.sends:
                        sent.setdefault((program.device, message.peer, lane), []).append((op, message))
                    for message in op.receives:
                        received.setdefault((message.peer, program.device, lane), []).append((op, message))
    for pair in sorted({*sent, *received}):
        sender, receiver, lane = pair
        for out, into in zip_longest(sent.get(pair, ()), received.get(pair, ())):
            texts = [
                end and f"{ops.message_text(direction, end[1])} (round {end[0].number} of step {end[0].step})"
                for direction, end in (("to", out), ("from", into))
            ]
            if out is None or into is None:
                at, verb = (receiver, "sends") if out is None else (sender, "receives")
                raise PlanError(
                    f"device program {at}: nobody {verb} the other end of {texts[0] or texts[1]} (devices {sender} to "
                    f"{receiver}, lane {lane})"
                )
            ends = [(op.step, op.number, message.size, message.narrow) for op, message in (out, into)]
            if ends[0] != ends[1]:
                raise PlanError(
                    f"device program {sender}: {texts[0]} meets {texts[1]} of device {receiver}: the two ends of a message "
                    "must be of one round, one size and one width, and come in one order"
                )
