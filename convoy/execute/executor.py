"""The executor: runs a step list on one device, forward and then backward, in the order of the list.

Moves are begun where they stand in the list. What a step needs is awaited just before it, by the ids in its `after`; what
nobody here needs, at the end of the phase.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from convoy.execute.batch_norm import GlobalBatchNorm, Normalisation
from convoy.execute.clock import Clock
from convoy.execute.compute import Arithmetic, arithmetic
from convoy.execute.gradients import Found, Sums
from convoy.execute.group import Group
from convoy.execute.move import Flights, Landing, run_move, start_move
from convoy.graph import Layer
from convoy.layout import Replicated, Split, box, dual, holders, local_shape
from convoy.steps import Compute, Move, ReturnGradient, ShareStatistics, Step, StepList, SumGradients, Value
from convoy.trace import Traced
from convoy.transfer import chunks


@dataclass
class Tape:
    """What backward needs of one forward pass; a layer's part is dropped as soon as it is used.

    Attributes:
        saved: per layer, what its arithmetic kept.
        norms: per batch norm over several devices, the statistics of the whole batch.
        rows: per such batch norm, in backward: the sums of this device, and those of all.
    """

    steps: StepList
    saved: dict[str, Any] = field(default_factory=dict)
    norms: dict[str, Normalisation] = field(default_factory=dict)
    rows: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Executor:
    """Runs step lists on this device's part of a model.

    Args:
        group: the devices.
        model: the module tree that holds this device's pieces of the parameters.
        traced: graph and operations of the whole model, as traced in one mode (training or evaluation).
        clock: adds up computing and exchanging.
    """

    def __init__(self, group: Group, model: nn.Module, traced: Traced, clock: Clock) -> None:
        self.group, self.model, self.traced, self.clock = group, model, traced, clock
        self.arithmetic: dict[str, Arithmetic] = {}
        self.norms: dict[str, GlobalBatchNorm] = {}
        self.landing = Landing()
        for name, layer in traced.graph.layers.items():
            if layer.kind != "input":
                self.arithmetic[name] = arithmetic(model, layer, traced.operations[name])
            if layer.kind == "batch_norm":
                self.norms[name] = GlobalBatchNorm(model.get_submodule(str(traced.operations[name].target)), layer)

    # --- forward -----------------------------------------------------------------------------------------------------

    def forward(self, steps: StepList, inputs: Sequence[Tensor], *, keep: bool) -> tuple[list[Tensor], Tape]:
        """Outputs (the whole batch, on every device), and the tape for backward (empty unless `keep`)."""
        values: dict[str, Any] = {v.key: x for v, x in zip(steps.inputs, inputs, strict=True)}
        tape = Tape(steps)
        unread = _reads(steps)
        flights = Flights(self.clock)
        for step in steps.phase("forward"):
            if self._takes_part(step) and not (isinstance(step, Compute) and step.pieces > 1):
                flights.land(step.after)
            match step:
                case Compute(pieces=pieces) if pieces > 1:
                    values[step.writes.key] = self._compute_in_pieces(step, values, tape, flights, keep=keep)
                case Move():
                    values[step.writes.key] = self._begin(step, values[step.reads.key], flights)
                case ShareStatistics():
                    self._statistics(step, values, tape)
                case Compute():
                    values[step.writes.key] = self._compute(step, values, tape, keep=keep)
            for value in _reads_of(step):
                unread[value.key] -= 1
                if not unread[value.key]:
                    del values[value.key]
        flights.land_all()
        return [values[v.key] for v in steps.outputs], tape

    def _begin(self, step: Move, piece: Tensor, flights: Flights) -> Tensor:
        """The tensor that a move fills; complete once it has landed."""
        src, dst = step.reads.layout, step.writes.layout
        if step.phase == "backward":
            src, dst = dual(src), dual(dst)
        with self.clock.exchange():
            moving = start_move(self.group, step.schedule, piece, src, dst, step.reads.shape, step.wire)
        return flights.add(step.id, moving)

    def _takes_part(self, step: Step) -> bool:
        """Whether this device computes, sends, receives or keeps anything in a step."""
        match step:
            case Compute():
                return self._works(step)
            case Move():
                return any(self.group.device in (t.sender, t.receiver) for r in step.schedule.rounds for t in r)
            case ShareStatistics():
                return self.group.device in step.members
        return False

    def _compute(self, step: Compute, values: Mapping[str, Any], tape: Tape, *, keep: bool) -> Any:
        if not self._works(step):
            return self._nothing(step.writes)
        inputs = [values[v.key] for v in step.reads]
        saved: Any
        with self.clock.compute(step.layer, "forward"):
            if step.layer in tape.norms:
                value, saved = self.norms[step.layer].normalise(inputs[0], tape.norms[step.layer]), inputs[0]
            else:
                run = self.arithmetic[step.layer]
                value, saved = run.forward(inputs, self._samples(step.writes), keep, step.wants)
        if keep:
            tape.saved[step.layer] = saved
        return value

    def _compute_in_pieces(
        self, step: Compute, values: Mapping[str, Any], tape: Tape, flights: Flights, *, keep: bool
    ) -> Tensor:
        """A layer whose input still arrives: each piece is computed as soon as it is there."""
        if not self._works(step):
            return self._nothing(step.writes)
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

    def _works(self, step: Compute) -> bool:
        return self.group.device in holders(step.writes.layout)

    def _samples(self, value: Value) -> int:
        """How many samples of a value with a batch axis lie on this device."""
        here = box(value.layout, self.group.device, value.shape)
        return here[0][1] - here[0][0] if here else 0

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
            for step in tape.steps.phase("backward"):
                if self._takes_part(step):
                    flights.land(step.after)
                self._backward_step(step, output_gradients, gradients, found, tape, flights, sums)
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
        step: Step,
        output_gradients: Sequence[Tensor | None],
        gradients: "_Gradients",
        found: Found,
        tape: Tape,
        flights: Flights,
        sums: Sums,
    ) -> None:
        match step:
            case ReturnGradient():
                g = output_gradients[step.output]
                if g is not None:
                    src, dst = step.reads.layout, dual(step.writes.layout)
                    gradients.add(step.writes.key, run_move(self.group, step.schedule, g, src, dst, step.reads.shape))
            # Where an output is not part of the loss, nothing arrives below; so on every device.
            case Move() if step.reads.key in gradients:
                gradients.add(step.writes.key, self._begin(step, gradients.sum(step.reads.key), flights))
                gradients.drop(step.reads.key)
            case ShareStatistics() if step.layer in gradients and self.group.device in step.members:
                self._backward_statistics(step, gradients.sum(step.layer), tape)
            case Compute() if step.writes.key in gradients:
                self._backward_compute(step, gradients, found, tape)
            case SumGradients():
                sums.begin(step, found)

    def _backward_statistics(self, step: ShareStatistics, g: Tensor, tape: Tape) -> None:
        norm, by = self.norms[step.layer], tape.norms[step.layer]
        with self.clock.compute(step.layer, "backward"):
            row = norm.local_sums(tape.saved.get(step.layer), g, by)
        tape.rows[step.layer] = (row, self._share(step, row))

    def _backward_compute(self, step: Compute, gradients: "_Gradients", found: Found, tape: Tape) -> None:
        layer = self.traced.graph[step.layer]
        own: Mapping[str, Tensor | None] = {}
        inputs: Sequence[Tensor | None]
        if not self._works(step):
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


def _reads_of(step: Step) -> tuple[Value, ...]:
    match step:
        case Compute():
            return step.reads
        case Move():
            return (step.reads,)
    return ()


def _reads(steps: StepList) -> Counter[str]:
    """How often each value is still to be read; the outputs are read once more, by the caller."""
    unread = Counter(v.key for v in steps.outputs)
    for step in steps.phase("forward"):
        unread.update(v.key for v in _reads_of(step))
    return unread


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
