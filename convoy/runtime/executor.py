"""Run the program of one device, forward and then backward, operation by operation."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from convoy.comm.group import Group, present
from convoy.errors import InputError
from convoy.layout.layout import Tiles, held_entries
from convoy.model.graph import Layer
from convoy.model.operation import TracedModel
from convoy.model.tracing import StateWatch
from convoy.plan import device_program as ops
from convoy.plan.compile import check_programs, compile_all, compile_device, without_gradients
from convoy.plan.lower import lower
from convoy.plan.steps import ComputeStep, InputGradient, MicroBatch, Phase, StepList, Value
from convoy.runtime import kernels
from convoy.runtime.batch_norm import GlobalBatchNorm, GroupNormOfParts, Normalisation
from convoy.runtime.clock import Clock
from convoy.runtime.cuda_graphs import CudaGraphs, Regions, regions_of
from convoy.runtime.exchange import Buffers, Lane
from convoy.runtime.gradients import Found, SegmentSums, Sums, collect, own_memory, packed, unpack
from convoy.runtime.model_checks import HookTables
from convoy.runtime.program import BoundSegment, LayerCall, Program, spare_memory_for
from convoy.runtime.weights import GatheredParameters, PlanInUse


@dataclass
class Tape:
    """The state that one forward pass saves for backward. The last backward drops each layer's state as soon as it is used.

    Attributes:
        saved: per layer, the state that its arithmetic saved.
        norms: per batch norm over several devices, the statistics of the global batch.
        fused: per segment, autograd's graph: its roots and the edge of each output.
        precision: number type of the layers' arithmetic; None: the model's own.
        regions: layers that may run as one CUDA graph.
        kept: whether another backward may follow the current one (`retain_graph=True`).
    """

    program: Program
    precision: torch.dtype | None
    kept: bool = False
    regions: Regions = field(default_factory=dict)
    saved: dict[str, Any] = field(default_factory=dict)
    norms: dict[str, Normalisation] = field(default_factory=dict)
    fused: dict[int, tuple[kernels.Roots, tuple[Any, ...]]] = field(default_factory=dict)


class Executor:
    """An executor of programs on this device's shards of a model.

    Args:
        traced: graph and operations of the whole model, as traced in one mode (training or evaluation).

    Attributes:
        expected_s: expected seconds per layer, used to divide a segment's measured time.
        graphs: captures regions of layers as CUDA graphs; None: every layer is launched.
    """

    def __init__(
        self, group: Group, model: nn.Module, traced: TracedModel, clock: Clock, gathered: GatheredParameters
    ) -> None:
        self.group, self.model, self.traced, self.clock, self.gathered = group, model, traced, clock, gathered
        self.arithmetic: dict[str, kernels.Arithmetic] = {}
        self.norms: dict[str, GlobalBatchNorm | GroupNormOfParts] = {}
        self.expected_s: Expected = by_arithmetic
        self.graphs: CudaGraphs | None = None
        # Cached: `get_parameter` costs the host 2 ms in each step of a ResNet-18.
        self._held = cache(lambda path: model.get_submodule(path)._parameters)
        self._in_tile = cache(partial(kernels.tile_arithmetic, model, traced))
        for name, layer in traced.graph.layers.items():
            if layer.kind == "input":
                continue
            run = self.arithmetic[name] = kernels.arithmetic(model, layer, traced.operations[name])
            if layer.kind == "batch_norm":
                self.norms[name] = GlobalBatchNorm(model.get_submodule(str(traced.operations[name].target)), layer)
                if layer.recomputed and layer.statistics:
                    run.call = partial(_call_twice, run.call)
            if layer.normalised:
                self.norms[name] = GroupNormOfParts(model.get_submodule(str(traced.operations[name].target)), layer)

    def program(
        self, steps: StepList, missing: frozenset[int] = frozenset(), left: frozenset[str] = frozenset()
    ) -> Program:
        """Return this device's program for a step list; `missing` and `left` as in `compile_device`."""
        graph = self.traced.graph
        made = compile_device(steps, graph, self.group.device, missing=missing, left=left)
        with_gradients = without_gradients(steps, graph, missing) if missing else steps
        computed = [s for s in with_gradients.phase("backward") if isinstance(s, ComputeStep) and s.part != "input"]
        returned = {s.layer for s in with_gradients.phase("backward") if isinstance(s, ComputeStep)}
        again = [layer.name for layer in graph.layers.values() if layer.recomputed and layer.statistics]
        if returned and (silent := [name for name in again if name not in returned]):
            raise InputError(
                f"batch norm {silent[0]!r} is in training mode under torch.utils.checkpoint, and no gradient reaches it: "
                "call eval() on it, or leave it out of the checkpoint, which would update its statistics twice"
            )
        reached = tuple(dict.fromkeys(p.key for step in computed for p in graph[step.layer].trainable))
        program = Program(steps, made, graph, reached)
        program.segments.update((op.number, self._segment(op)) for op in made.forward if isinstance(op, ops.Fused))
        return program

    def _segment(self, fused: ops.Fused) -> BoundSegment:
        """Look up everything that forward needs for a segment: in each step it would take the host 10 us per layer."""
        graph, computed = self.traced.graph, [op for op in fused.operations if isinstance(op, ops.Compute)]
        wants = dict.fromkeys(fused.reads, False)
        last: dict[str, int] = {}
        for number, op in enumerate(computed):
            last.update(dict.fromkeys((*op.reads, *op.writes), number))
            for name, wanted in zip(op.reads, op.wants, strict=True):
                if name in wants:
                    wants[name] = wants[name] or wanted
        calls = []
        for number, op in enumerate(computed):
            layer, call = graph[op.layer], self.arithmetic[op.layer].call
            call = call if op.tile is None else self._in_tile(op.layer, op.tile).call
            drops = [name for name, user in last.items() if user == number and name not in fused.writes]
            calls += [LayerCall(op.layer, op.reads, op.writes[0], call, op.size.samples, layer.differentiable, drops)]
        return BoundSegment(tuple(wants.values()), calls)

    # --- forward -----------------------------------------------------------------------------------------------------

    @torch.no_grad()  # layers and segments that autograd runs enable it themselves
    def forward(
        self, program: Program, inputs: Sequence[Tensor], *, keep: bool, precision: torch.dtype | None = None
    ) -> tuple[list[Tensor], Tape]:
        """Return the outputs (global or local batch), and the tape for backward (empty unless `keep`)."""
        buffers: Buffers = dict(zip(program.program.inputs, inputs, strict=True))
        tape = Tape(program, precision)
        with self.gathered.in_place(program.gathered):
            if self.graphs is not None:
                if (precision, keep) not in program.regions:
                    program.regions[precision, keep] = regions_of(self, program, (precision, keep))
                tape.regions = program.regions[precision, keep]
            self._run_forward(program, tape, buffers, keep=keep)
        return [self._output(buffers, value) for value in program.steps.outputs], tape

    def _output(self, buffers: Buffers, value: Value) -> Tensor:
        """Return this device's rows of an output; zero rows if all of them stay on other devices."""
        made: Tensor | None = buffers.get(value.key)
        if made is not None:
            return made
        layer = self.traced.graph[value.layer]
        return torch.empty((0, *layer.shape), dtype=getattr(torch, layer.dtype), device=self.group.torch_device)

    def _run_forward(self, program: Program, tape: Tape, buffers: Buffers, *, keep: bool) -> None:
        lane = Lane(self.group, 0, self.gathered.slots)
        for item in program.forward:
            match item.operations[0]:
                case ops.Fused() as fused:
                    self._fused_forward(fused, buffers, tape, keep=keep)
                case ops.Compute(part="all") as compute:
                    self._forward(compute, buffers, tape, keep=keep)
                case ops.Compute() as compute:
                    self._statistics(compute, buffers, tape)
                case ops.PackWeights() | ops.UnpackWeights() | ops.FreeWeights() as weights:
                    self.gathered.run(weights, buffers, self.group.device)
                case _:
                    with self.clock.exchange():
                        lane.run(item.operations, buffers, item.dtype)
            for name in item.drops:
                buffers.pop(name, None)

    def _fused_forward(self, fused: ops.Fused, buffers: Buffers, tape: Tape, *, keep: bool) -> None:
        segment = tape.program.segments[fused.number]
        wants = [keep and wanted for wanted in segment.wants]
        with self.clock.segment(self._expected_s(fused, tape.program), fused.phase), torch.set_grad_enabled(keep):
            roots = [kernels.enter(buffers[k]) if w else buffers[k] for k, w in zip(fused.reads, wants, strict=True)]
            own: dict[str, Any] = dict(zip(fused.reads, roots, strict=True))
            begin = kernels.Roots(roots, wants)
            del roots
            with kernels.under_autocast(tape.precision, self.group.torch_device.type):
                ready = 0  # a CUDA graph has done the computations before this index
                for number, layer in enumerate(segment.calls):
                    if self.graphs is not None and (region := tape.regions.get((fused.number, number))) is not None:
                        ready = number + region.run(own, self.graphs)
                    if number >= ready:
                        inputs = [own[name] for name in layer.reads]
                        if keep and not layer.differentiable:
                            with torch.no_grad():
                                own[layer.write] = layer.call(inputs, layer.samples)
                        else:
                            own[layer.write] = layer.call(inputs, layer.samples)
                        del inputs
                    for name in layer.drops:
                        own.pop(name, None)  # values inside a CUDA graph are not in the dict
            made = [kernels.widened(own[name], tape.precision) for name in fused.writes]
        buffers.update(zip(fused.writes, map(kernels.detached, made), strict=True))
        if keep:
            tape.fused[fused.number] = (begin, tuple(map(kernels.edge_of, made)))

    def _expected_s(self, fused: ops.Fused, program: Program) -> dict[str, float]:
        key = (fused.number, fused.phase)
        if key not in program.expected_s:
            found = program.expected_s[key] = defaultdict(float)
            for op in fused.operations:
                if isinstance(op, ops.Compute):
                    found[op.layer] += self.expected_s(self.traced.graph[op.layer], fused.phase, op.size)
        return program.expected_s[key]

    def _forward(self, op: ops.Compute, buffers: Buffers, tape: Tape, *, keep: bool) -> None:
        run, saved = self.arithmetic[op.layer] if op.tile is None else self._in_tile(op.layer, op.tile), None
        with (
            self.clock.compute(op.layer, "forward"),
            kernels.under_autocast(tape.precision, self.group.torch_device.type),
        ):
            if op.layer in tape.norms:
                x = buffers[op.reads[0]]
                value, saved = self.norms[op.layer].normalise(x, tape.norms[op.layer]), x
            elif op.rows is not None:
                # `.data`: autograd must not count the arrival of other rows as a change.
                rows = buffers[op.reads[0]].data[slice(*op.rows)]
                value, graph = run.forward([rows], op.size.samples, keep, op.wants)
                saved = [*tape.saved.get(op.layer, ()), (len(rows), graph)]
            else:
                value, saved = run.forward([buffers[name] for name in op.reads], op.size.samples, keep, op.wants)
        buffers[op.writes[0]] = kernels.widened(value, tape.precision)
        if keep:
            tape.saved[op.layer] = saved

    def _statistics(self, op: ops.Compute, buffers: Buffers, tape: Tape) -> None:
        norm, (members, value) = self.norms[op.layer], tape.program.statistics[op.layer]
        groups = norm.groups(value.shape)
        with self.clock.compute(op.layer, "forward"):
            if op.part == "statistics":
                x = buffers[op.reads[0]] if op.reads else None
                here = self.group.torch_device
                buffers[op.writes[0]] = norm.no_row(groups, here) if x is None else norm.local_statistics(x)
                return
            # Entries that are normalised together, in units that all devices have in common: samples, or single entries.
            unit = 1 if isinstance(value.layout, Tiles) else math.prod(value.shape[1:]) // groups
            counts = [held_entries(value.layout, d, value.shape) // (groups * unit) for d in members]
            tape.norms[op.layer] = norm.combine(buffers[op.reads[0]], counts, unit)
            buffers[op.writes[0]] = tape.norms[op.layer].mean

    # --- backward ----------------------------------------------------------------------------------------------------

    def backward(
        self, tape: Tape, output_gradients: Sequence[Tensor | None], left: Found | None = None
    ) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        """Run backward.

        Args:
            left: unsummed gradients of earlier micro-batches, added before the all-reduces.

        Returns:
            the gradients of the local parameters, by key, each in its own memory; and those of the inputs, None where this
            device gets none.
        """
        missing = frozenset(i for i, g in enumerate(output_gradients) if g is None)
        missing &= set(tape.program.program.output_gradients)
        variant = (missing, frozenset(left or ()) if missing else frozenset[str]())
        if variant not in tape.program.variants:
            tape.program.variants[variant] = self.program(tape.program.steps, *variant) if missing else tape.program
        program = tape.program.variants[variant]
        buffers: Buffers = {ops.output_gradient(i): g for i, g in enumerate(output_gradients) if g is not None}
        before = {key: gradient for key, gradient in (left or {}).items() if gradient is not None}
        # For a sharded parameter, earlier micro-batches left a summed shard: add it after the reduce-scatter.
        found: Found = {key: gradient for key, gradient in before.items() if key not in tape.program.into_shares}
        # After a regroup, sums of this backward must not send to the new group.
        sums = Sums(present(self.group), program.sums, self.gathered.slots, self.gathered.worker)
        with self.gathered.in_place(program.gathered):
            self._run_backward(program, tape, buffers, found, sums)
        for key in tape.program.into_shares & before.keys():
            gradient = found.get(key)
            found[key] = before[key] if gradient is None else before[key] + gradient.view_as(before[key])
        taken = {g.untyped_storage().data_ptr() for g in output_gradients if g is not None}
        inputs = [buffers.get(name) for name in program.program.input_gradients]
        inputs = [g if g is None or g.untyped_storage().data_ptr() not in taken else g.clone() for g in inputs]
        taken |= {g.untyped_storage().data_ptr() for g in inputs if g is not None}
        parameters = {key: self._parameter(key) for key in {*program.reached, *found}}
        for key in program.reached:
            # Every device needs a gradient of every reached parameter, so that all optimizers see the same number of them:
            # empty if the parameter is on other devices, zeros if other devices wait for the sum.
            parameter = parameters[key]
            if found.get(key) is None and (key in program.waiting or not parameter.numel()):
                found[key] = torch.zeros_like(parameter)
        return {k: own_memory(parameters[k], g, taken) for k, g in found.items() if g is not None}, inputs

    def _parameter(self, key: str) -> nn.Parameter:
        path, _, name = key.rpartition(".")
        parameter = self._held(path)[name]
        assert parameter is not None
        return parameter

    def _run_backward(self, program: Program, tape: Tape, buffers: Buffers, found: Found, sums: Sums) -> None:
        lane = Lane(self.group, 0, self.gathered.slots)
        for item in program.backward:
            match item.operations[0]:
                case ops.Fused() as fused:
                    self._fused_backward(fused, buffers, found, tape, sums)
                case ops.Compute(part="statistics") as compute:
                    self._backward_statistics(compute, buffers, tape)
                case ops.Compute() as compute:
                    self._backward(compute, buffers, found, tape)
                case ops.Pack() as pack:
                    buffers[pack.buffer] = packed(pack, found, self.model, self.group)
                case ops.BeginSum(step=step, buffer=flat):
                    sums.begin(step, buffers[flat])
                case ops.PackWeights() | ops.UnpackWeights() | ops.FreeWeights() as weights:
                    self.gathered.run(weights, buffers, self.group.device)
                case ops.WaitSum(sum=step):
                    with self.clock.exchange():
                        sums.wait(step)
                case ops.FinishSums():
                    with self.clock.exchange():
                        sums.finish()
                    buffers.update(sums.shares)
                case ops.Unpack() as pack:
                    unpack(pack, buffers[pack.buffer], found)
                case _:
                    with self.clock.exchange():
                        lane.run(item.operations, buffers, item.dtype)
            for name in item.drops:
                buffers.pop(name, None)

    def _backward_statistics(self, op: ops.Compute, buffers: Buffers, tape: Tape) -> None:
        norm, by = self.norms[op.layer], tape.norms[op.layer]
        if self.traced.graph[op.layer].recomputed and isinstance(norm, GlobalBatchNorm):
            norm.update_running(by.mean, by.inverse_deviation**-2 - norm.module.eps, by.count)
        with self.clock.compute(op.layer, "backward"):
            g = buffers[op.reads[0]] if op.reads else None
            if g is None:
                row = norm.no_row(norm.groups(tape.program.statistics[op.layer][1].shape), self.group.torch_device)
            else:
                row = norm.local_sums(tape.saved.get(op.layer), g, by)
        buffers[op.writes[0]] = row

    def _fused_backward(self, fused: ops.Fused, buffers: Buffers, found: Found, tape: Tape, sums: Sums) -> None:
        """Compute the gradients of a segment's inputs and parameters; start the parameters' sums immediately."""
        roots, outputs = tape.fused[fused.number] if tape.kept else tape.fused.pop(fused.number)
        computed = [op for op in fused.operations if isinstance(op, ops.Compute)]
        layers = dict.fromkeys(op.layer for op in computed)
        parameters = {p.key: self._parameter(p.key) for name in layers for p in self.traced.graph[name].trainable}
        pairs = [
            kernels.with_gradients(edge, buffers[name])
            for edge, name in zip(outputs, fused.reads, strict=True)
            if name in buffers
        ]
        for name in fused.reads:
            buffers.pop(name, None)
        with self.clock.segment(self._expected_s(fused, tape.program), fused.phase) as end_lap:
            leaving = SegmentSums(self.model, self.traced.graph, fused, buffers, found, sums, end_lap)
            with leaving.watching(parameters):
                results = iter(kernels.gradients_of(pairs, [*roots.edges, *parameters.values()], last=not tape.kept))
            del pairs
            gradients = roots.or_zeros(results)
        wanted = compress(fused.writes, tape.program.segments[fused.number].wants)
        buffers.update((name, g) for name, g in zip(wanted, gradients, strict=True) if name)
        for key, gradient in zip(parameters, results, strict=True):
            leaving.collect(key, gradient)
        leaving.finish()

    def _backward(self, op: ops.Compute, buffers: Buffers, found: Found, tape: Tape) -> None:
        layer, last = self.traced.graph[op.layer], op.last and not tape.kept
        g = buffers[op.reads[0]]
        saved = tape.saved.pop(op.layer) if last else tape.saved[op.layer]
        with self.clock.compute(op.layer, "backward"):
            if len(op.reads) > 1:
                row, rows = (buffers[name] for name in op.reads[1:])
                by = tape.norms[op.layer]
                inputs, own = self.norms[op.layer].backward(saved, g, by, row, rows, op.wants[0])
            else:
                run = self.arithmetic[op.layer]
                backward = partial(kernels.backward_by_rows, run) if isinstance(saved, list) else run.backward
                inputs, own = backward(saved, g, op.wants, op.part, last)  # type: ignore[arg-type]
        if op.part != "weight":
            for name, gradient in zip(op.writes, inputs, strict=True):
                if name and gradient is not None:
                    pick = layer.kind == "pick"
                    # A layer with several outputs has a dict of gradients: index -> gradient.
                    buffers[name] = {self.traced.operations[layer.name].args[1]: gradient} if pick else gradient
        if op.part != "input":
            for key, parameter in layer.parameters.items():
                if parameter.trainable:
                    collect(found, parameter.key, own.get(key))


def _call_twice(call: Callable[..., Any], inputs: Sequence[Tensor], samples: int) -> Any:
    """Call a batch norm, and again in backward, as `torch.utils.checkpoint` does: it updates the running statistics twice."""
    y, x = call(inputs, samples), inputs[0].detach()

    @torch.no_grad()
    def again(_: Tensor) -> None:
        call([x], samples)

    if y.requires_grad:
        y.register_hook(again)
    return y


Expected = Callable[[Layer, Phase, ops.LocalSize], float]
"""Function that returns the expected seconds of one phase (forward, backward) of a layer on its local shard."""


def by_arithmetic(layer: Layer, _phase: Phase, size: ops.LocalSize) -> float:
    """Estimate seconds without measurements: 100 GFLOP/s, and two memory accesses per output entry at 10 GB/s."""
    outputs = math.prod(layer.shape) * size.samples * size.outputs / max(1, ops.whole_size(layer, 1).outputs)
    return ops.flop(layer, size) / 100e9 + 2 * 4 * outputs / 10e9


# --- programs of a plan -------------------------------------------------------------------------------------------------

CHECKED_DEVICES = 16
"""Largest number of devices whose programs are checked against each other before the first step. More would take seconds."""


@dataclass(frozen=True, slots=True)
class Variant:
    """The executor, programs and checks for one trace of the model under one plan.

    Attributes:
        trained: parameters that require a gradient, by key.
        programs: by batch size, requested input gradients, and kind of micro-batch.
    """

    executor: Executor
    in_use: PlanInUse
    tables: HookTables
    state: StateWatch
    trained: dict[str, nn.Parameter]
    programs: dict[tuple[int, tuple[InputGradient, ...], MicroBatch], Program] = field(default_factory=dict)

    def program(self, batch: int, wanted: tuple[InputGradient, ...] = (), kind: MicroBatch = "only") -> Program:
        """Return the program for a global batch of this size."""
        key = (batch, wanted, kind)
        if key not in self.programs:
            in_use, graph = self.in_use, self.executor.traced.graph
            kept = {name: layout for name, layout in in_use.layouts.items() if name not in in_use.borrowed}
            steps = lower(in_use.plan, graph, batch, wanted, kept, kind)
            if not self.programs and in_use.plan.devices <= CHECKED_DEVICES:
                check_programs(compile_all(steps, graph))
            self.programs[key] = self.executor.program(steps)
            spare_memory_for(self.programs[key], graph, self.executor.group.torch_device)
        return self.programs[key]
