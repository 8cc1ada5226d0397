"""The executor: runs a step list on one device, forward and then backward, in the order of the list.

Moves are begun where they stand in the list. What a step needs is awaited just before it, by the ids in its `after`; what
nobody here needs, at the end of the phase.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from convoy.comm.group import Group
from convoy.model.graph import Layer
from convoy.model.tracing import TracedModel, bind_operation
from convoy.plan.fusion import Run
from convoy.plan.steps import Compute, Move, ReturnGradient, ShareStatistics, SumGradients, Value
from convoy.runtime.batch_norm import GlobalBatchNorm, Normalisation
from convoy.runtime.clock import Clock
from convoy.runtime.exchange import Flights, Landing, run_move, start_move
from convoy.runtime.gradients import Found, Sums
from convoy.runtime.kernels import Arithmetic, arithmetic, detached, gradients_of, or_zeros, widened, with_gradients
from convoy.runtime.script import Line, RunLine, Script
from convoy.sharding.layout import Replicated, Split, dual, local_shape
from convoy.sharding.redistribute import chunks


@dataclass
class Tape:
    """What backward needs of one forward pass; a layer's part is dropped as soon as it is used.

    Attributes:
        saved: per layer, what its arithmetic kept.
        norms: per batch norm over several devices, the statistics of the whole batch.
        rows: per such batch norm, in backward: the sums of this device, and those of all.
        runs: per run, by the id of its first step: the values that it read and made, with autograd's graph between them.
    """

    script: Script
    saved: dict[str, Any] = field(default_factory=dict)
    norms: dict[str, Normalisation] = field(default_factory=dict)
    rows: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    runs: dict[int, tuple[dict[str, Tensor], dict[str, Any]]] = field(default_factory=dict)


class Executor:
    """Runs step lists on this device's part of a model.

    Args:
        group: the devices.
        model: the module tree that holds this device's pieces of the parameters.
        traced: graph and operations of the whole model, as traced in one mode (training or evaluation).
        clock: adds up computing and exchanging.

    Attributes:
        lowered_to: what runs are computed in by autocast; None: the type that the model has.
    """

    def __init__(self, group: Group, model: nn.Module, traced: TracedModel, clock: Clock) -> None:
        self.group, self.model, self.traced, self.clock = group, model, traced, clock
        self.lowered_to: torch.dtype | None = None
        self.arithmetic: dict[str, Arithmetic] = {}
        self.calls = {name: bind_operation(model, operation) for name, operation in traced.operations.items()}
        self.norms: dict[str, GlobalBatchNorm] = {}
        self.landing = Landing()
        for name, layer in traced.graph.layers.items():
            if layer.kind != "input":
                self.arithmetic[name] = arithmetic(model, layer, traced.operations[name])
            if layer.kind == "batch_norm":
                self.norms[name] = GlobalBatchNorm(model.get_submodule(str(traced.operations[name].target)), layer)

    # --- forward -----------------------------------------------------------------------------------------------------

    def forward(self, script: Script, inputs: Sequence[Tensor], *, keep: bool) -> tuple[list[Tensor], Tape]:
        """Outputs (the whole batch, on every device), and the tape for backward (empty unless `keep`)."""
        steps = script.steps
        values: dict[str, Any] = {v.key: x for v, x in zip(steps.inputs, inputs, strict=True)}
        tape = Tape(script)
        flights = Flights(self.clock)
        for line in script.forward:
            if isinstance(line, RunLine):
                flights.land(line.after)
                self._run(line, values, tape, keep=keep)
            else:
                self._forward_step(line, values, tape, flights, keep=keep)
            for key in line.forgets:
                del values[key]
        flights.land_all()
        return [values[v.key] for v in steps.outputs], tape

    def _forward_step(self, line: Line, values: dict[str, Any], tape: Tape, flights: Flights, *, keep: bool) -> None:
        step = line.step
        if line.takes_part and not (isinstance(step, Compute) and step.pieces > 1):
            flights.land(step.after)
        match step:
            case Compute() if not line.takes_part:
                values[step.writes.key] = self._nothing(step.writes)
            case Compute(pieces=pieces) if pieces > 1:
                values[step.writes.key] = self._compute_in_pieces(step, values, tape, flights, keep=keep)
            case Compute():
                values[step.writes.key] = self._compute(step, line.samples, values, tape, keep=keep)
            case Move():
                values[step.writes.key] = self._begin(step, values[step.reads.key], flights)
            case ShareStatistics():
                self._statistics(step, values, tape)

    def _begin(self, step: Move, piece: Tensor, flights: Flights) -> Tensor:
        """The tensor that a move fills; complete once it has landed."""
        src, dst = step.reads.layout, step.writes.layout
        if step.phase == "backward":
            src, dst = dual(src), dual(dst)
        with self.clock.exchange():
            moving = start_move(self.group, step.schedule, piece, src, dst, step.reads.shape, step.wire)
        return flights.add(step.id, moving)

    def _run(self, line: RunLine, values: dict[str, Any], tape: Tape, *, keep: bool) -> None:
        """Layers of this device alone, as one graph of autograd."""
        run = line.run
        with self.clock.compute(run.steps[0].layer, "forward"):
            roots = {key: values[key].detach().requires_grad_(keep and wanted) for key, wanted in run.reads.items()}
            own: dict[str, Any] = dict(roots)
            with self._lowered():
                for step, samples, forgets in zip(run.steps, line.samples, run.forgets, strict=True):
                    inputs = [own[value.key] for value in step.reads]
                    with torch.set_grad_enabled(keep and self.traced.graph[step.layer].differentiable):
                        own[step.writes.key] = self.calls[step.layer](inputs, samples)
                    for key in forgets:
                        del own[key]
            with torch.set_grad_enabled(keep):
                made = {key: widened(own[key], self.lowered_to) for key in run.writes}
        values.update((key, detached(y)) for key, y in made.items())
        if keep:
            tape.runs[run.steps[0].id] = (roots, made)

    def _lowered(self) -> AbstractContextManager[Any]:
        """Autocast where a precision was asked for; else whatever the caller computes in."""
        if self.lowered_to is None:
            return nullcontext()
        return torch.autocast(self.group.torch_device.type, self.lowered_to)

    def _compute(self, step: Compute, samples: int, values: Mapping[str, Any], tape: Tape, *, keep: bool) -> Any:
        inputs = [values[v.key] for v in step.reads]
        saved: Any
        with self.clock.compute(step.layer, "forward"):
            if step.layer in tape.norms:
                value, saved = self.norms[step.layer].normalise(inputs[0], tape.norms[step.layer]), inputs[0]
            else:
                value, saved = self.arithmetic[step.layer].forward(inputs, samples, keep, step.wants)
        if keep:
            tape.saved[step.layer] = saved
        return value

    def _compute_in_pieces(
        self, step: Compute, values: Mapping[str, Any], tape: Tape, flights: Flights, *, keep: bool
    ) -> Tensor:
        """A layer whose input still arrives: each piece is computed as soon as it is there."""
        (x,) = (values[v.key] for v in step.reads)
        run = self.arithmetic[step.layer]
        outputs = []
        for start, stop in chunks(x.shape[0], step.pieces):
            flights.land_next(step.after)
            with self.clock.compute(step.layer, "forward"):
                outputs.append(run.forward([x[start:stop]], stop - start, False, step.wants)[0])
        flights.land(step.after)
        if keep:
            tape.saved[step.layer] = x
        with self.clock.compute(step.layer, "forward"):
            return torch.cat(outputs)

    def _nothing(self, value: Value) -> Tensor:
        """This device's piece of a value that it has no part in."""
        layer = self.traced.graph[value.key.partition("@")[0]]
        shape = local_shape(value.layout, self.group.device, value.shape)
        return torch.zeros(shape, dtype=getattr(torch, layer.dtype), device=self.group.torch_device)

    def _statistics(self, step: ShareStatistics, values: Mapping[str, Any], tape: Tape) -> None:
        if self.group.device not in step.members:
            return
        norm = self.norms[step.layer]
        with self.clock.compute(step.layer, "forward"):
            row = norm.local_statistics(values[step.reads.key])
        rows = self._share(step, row)
        assert isinstance(step.reads.layout, Split)
        samples = [step.reads.layout.shares[d] for d in step.members]
        tape.norms[step.layer] = norm.combine(rows, samples, math.prod(step.reads.shape[2:]))

    def _share(self, step: ShareStatistics, row: Tensor) -> Tensor:
        """Every member's row, in the order of the devices."""
        with self.clock.exchange():
            return run_move(self.group, step.schedule, row, step.layout, Replicated(step.members), step.shape)

    # --- backward ----------------------------------------------------------------------------------------------------

    def backward(self, tape: Tape, output_gradients: Sequence[Tensor | None], mixing_stage: int) -> None:
        """Run the backward steps; adds to `.grad` of the parameters held here."""
        gradients = _Gradients()
        found: Found = {}
        flights, sums = Flights(self.clock), Sums(self.group, self.model, mixing_stage, self.landing)
        try:
            for line in tape.script.backward:
                if isinstance(line, RunLine):
                    flights.land(line.after)
                    self._back_through(line.run, gradients, found, tape)
                    continue
                if line.takes_part:
                    flights.land(line.step.after)
                self._backward_step(line, output_gradients, gradients, found, tape, flights, sums)
            flights.land_all()
        except BaseException:
            sums.abandon()
            raise
        with self.clock.exchange():
            sums.finish(found)
        taken = {g.untyped_storage().data_ptr() for g in output_gradients if g is not None}
        for key, gradient in found.items():
            if gradient is not None:
                _deposit(self.model.get_parameter(key), gradient, taken)

    def _backward_step(
        self,
        line: Line,
        output_gradients: Sequence[Tensor | None],
        gradients: "_Gradients",
        found: Found,
        tape: Tape,
        flights: Flights,
        sums: Sums,
    ) -> None:
        match line.step:
            case ReturnGradient() as step:
                g = output_gradients[step.output]
                if g is not None:
                    src, dst = step.reads.layout, dual(step.writes.layout)
                    gradients.add(step.writes.key, run_move(self.group, step.schedule, g, src, dst, step.reads.shape))
            # Where an output is not part of the loss, nothing arrives below; so on every device.
            case Move() as step if step.reads.key in gradients:
                gradients.add(step.writes.key, self._begin(step, gradients.sum(step.reads.key), flights))
                gradients.drop(step.reads.key)
            case ShareStatistics() as step if step.layer in gradients and self.group.device in step.members:
                self._backward_statistics(step, gradients.sum(step.layer), tape)
            case Compute() as step if step.writes.key in gradients:
                self._backward_compute(step, gradients, found, tape, works=line.takes_part)
            case SumGradients() as step:
                sums.begin(step, found)

    def _backward_statistics(self, step: ShareStatistics, g: Tensor, tape: Tape) -> None:
        norm, by = self.norms[step.layer], tape.norms[step.layer]
        with self.clock.compute(step.layer, "backward"):
            row = norm.local_sums(tape.saved.get(step.layer), g, by)
        tape.rows[step.layer] = (row, self._share(step, row))

    def _back_through(self, run: Run, gradients: "_Gradients", found: Found, tape: Tape) -> None:
        """The gradients of a run's inputs and parameters, all at once."""
        roots, made = tape.runs.pop(run.steps[0].id)
        given = {key: gradients.sum(key) for key in run.writes if key in gradients}
        for key in given:
            gradients.drop(key)
        # As layer by layer, a layer to which no gradient comes is passed by; a run without any is, too.
        reached, parameters = set(given), dict[str, nn.Parameter]()
        for step in run.back:
            if step.writes.key in reached:
                reached.update(v.key for v, wanted in zip(step.reads, step.wants, strict=True) if wanted)
                parameters.update(
                    (p.key, self.model.get_parameter(p.key)) for p in self.traced.graph[step.layer].trainable
                )
        wanted = {key: x for key, x in roots.items() if x.requires_grad and key in reached}
        pairs = [with_gradients(made[key], g) for key, g in given.items()]
        with self.clock.compute(run.steps[0].layer, "backward"):
            results = iter(gradients_of(pairs, [*wanted.values(), *parameters.values()]))
            for key, x in wanted.items():
                gradients.add(key, or_zeros(next(results), x))
        for key, gradient in zip(parameters, results, strict=True):
            _collect(found, key, gradient)

    def _backward_compute(
        self, step: Compute, gradients: "_Gradients", found: Found, tape: Tape, *, works: bool
    ) -> None:
        layer = self.traced.graph[step.layer]
        own: Mapping[str, Tensor | None] = {}
        inputs: Sequence[Tensor | None]
        if not works:
            # Of copies that it holds but does not use (a bare parameter, say) the gradient is zero, not empty.
            inputs = [self._nothing(v) if w else None for v, w in zip(step.reads, step.wants, strict=True)]
        else:
            g = gradients.sum(step.writes.key)
            saved = tape.saved.pop(step.layer) if step.last else tape.saved[step.layer]
            with self.clock.compute(step.layer, "backward"):
                if step.layer in tape.rows:
                    by, rows = tape.norms.pop(step.layer), tape.rows.pop(step.layer)
                    inputs, own = self.norms[step.layer].backward(saved, g, by, *rows, step.wants[0])
                else:
                    inputs, own = self.arithmetic[step.layer].backward(saved, g, step.wants, step.part)
        if step.last:
            gradients.drop(step.writes.key)
        if step.part != "weight":
            for value, gradient in zip(step.reads, inputs, strict=True):
                if gradient is not None:
                    self._pass_on(layer, value, gradient, gradients)
        if step.part != "input":
            for key, parameter in layer.parameters.items():
                if parameter.trainable:
                    _collect(found, parameter.key, own.get(key))

    def _pass_on(self, layer: Layer, value: Value, gradient: Tensor, gradients: "_Gradients") -> None:
        if layer.kind == "pick":
            # The gradient of a layer with several outputs: index -> gradient.
            gradients.add_item(value.key, self.traced.operations[layer.name].args[1], gradient)
        else:
            gradients.add(value.key, gradient)


class _Gradients:
    """Gradients of values on their way back. They are added up when they are read: until then some may still travel."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Any]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._parts

    def add(self, key: str, gradient: Tensor) -> None:
        self._parts.setdefault(key, []).append(gradient)

    def add_item(self, key: str, item: Any, gradient: Tensor) -> None:
        """A gradient for one of the outputs of a layer with several."""
        (items,) = self._parts.setdefault(key, [{}])
        items[item] = items[item] + gradient if item in items else gradient

    def sum(self, key: str) -> Any:
        first, *others = self._parts[key]
        for other in others:
            first = first + other
        self._parts[key] = [first]
        return first

    def drop(self, key: str) -> None:
        del self._parts[key]


def _collect(found: Found, key: str, gradient: Tensor | None) -> None:
    before = found.get(key)
    found[key] = gradient if before is None else before if gradient is None else before + gradient


def _deposit(parameter: nn.Parameter, gradient: Tensor, taken: set[int]) -> None:
    """Add to .grad as autograd does.

    Args:
        taken: storages in use. The gradient of `a + b` is one tensor for both, but no two .grad may be the same memory.
    """
    gradient = gradient.view_as(parameter)
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
        return
    storage = gradient.untyped_storage()
    own = storage.data_ptr() not in taken and storage.nbytes() == gradient.numel() * gradient.element_size()
    parameter.grad = gradient if own else gradient.clone()
    taken.add(parameter.grad.untyped_storage().data_ptr())
