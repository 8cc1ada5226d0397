"""Represent one training step in the caller's autograd graph, and accumulate the gradients of micro-batches.

Two nodes represent a step: one for the layers and, as its input, one for the parameters. Autograd receives the parameters'
gradients summed over the devices, and treats them as usual: it adds them to `.grad`, calls hooks, or returns them from
`torch.autograd.grad`. With `no_sync` each device keeps the gradients of micro-batches until the last one of the step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from convoy.errors import InputError
from convoy.model.tracing.copies import ON_PARAMETERS
from convoy.plan.steps import MicroBatch
from convoy.runtime import shards
from convoy.runtime.executor import Executor, Tape
from convoy.runtime.gradients import Found
from convoy.runtime.program import Program


class Accumulation:
    """The gradient accumulation of the current step. Marks on the parameters show which gradients are unsummed.

    The true gradient of a marked parameter is the sum of all devices' `.grad`.

    Attributes:
        sums: whether the next micro-batch sums gradients over the devices.
    """

    def __init__(self) -> None:
        self.sums = True
        self._backward: tuple[int, bool] = (-1, True)  # the last one, and whether it summed
        self._own = shards.OwnGradients(-1, (), ())

    def kind(self) -> MicroBatch:
        self._own.end()  # an interrupted backward has not done so
        return "only" if self.sums else "first"

    @contextmanager
    def unsummed(self) -> Iterator[None]:
        outside, self.sums = self.sums, False
        try:
            yield
        finally:
            self.sums = outside

    def begin(self, parameters: Mapping[str, nn.Parameter], reached: Iterable[str], *, sums: bool) -> Found:
        """Take the unsummed gradients of earlier micro-batches out of `.grad` and return them.

        Backward adds them to the new gradients. If `sums`, it sums the result over the devices. `reached` are the keys of
        parameters that get a gradient in this backward.
        """
        task = torch._C._current_graph_task_id()
        if self._backward == (task, not sums):
            raise InputError(
                "one loss uses a forward inside no_sync() and one outside: call the model for all terms of a loss inside, or "
                "for all of them outside"
            )
        self._backward = (task, sums)
        for key in () if sums else reached:
            parameter = parameters.get(key)
            if parameter is not None and not shards.is_unsummed(parameter):
                if parameter.grad is not None and parameter.grad.any():
                    raise InputError(
                        "backward in no_sync() after one outside, whose gradients are summed already: run a step's last "
                        "micro-batch outside, and zero_grad() before the next step"
                    )
                setattr(parameter, shards.UNSUMMED, True)
        left: Found = {}
        for key, parameter in parameters.items():
            if shards.is_unsummed(parameter):
                left[key], parameter.grad = parameter.grad, None
                setattr(parameter, shards.UNSUMMED, not sums)
        return left

    def compare(self, gradients: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> None:
        """When this backward ends, raise InputError if autograd has added other gradients to these parameters."""
        task = torch._C._current_graph_task_id()
        if self._own.task == task:
            self._own.several = True
            return
        self._own.end()
        self._own = shards.OwnGradients(task, gradients, parameters)
        at_end(self._own.check)


@dataclass(slots=True)
class StepCall:
    """One call of a model in training, from forward to backward.

    Attributes:
        parts: local batch of each input; cleared after forward.
        gradients: gradients of the parameters, from the backward of `_Step` to that of `_Parameters`.
        left: unsummed gradients of earlier micro-batches.
    """

    executor: Executor
    program: Program
    precision: torch.dtype | None
    parts: Sequence[Tensor]
    parameters: dict[str, nn.Parameter]
    accumulation: Accumulation
    begin_backward: Callable[[Sequence[Tensor | None]], None]
    tape: Tape | None = None
    gradients: tuple[Tensor | None, ...] = ()
    left: Found = field(default_factory=dict)

    def outputs(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        weights = _Parameters.apply(self, *self.parameters.values())  # type: ignore[no-untyped-call]
        return _Step.apply(self, weights, *inputs)  # type: ignore[no-any-return, no-untyped-call]


class _Parameters(torch.autograd.Function):
    """The node of all parameters. Its backward follows the step's, and runs only if a parameter needs a gradient."""

    @staticmethod
    def forward(ctx: Any, call: StepCall, *_parameters: Tensor) -> Tensor:
        ctx.call = call
        return torch.zeros((), device=call.executor.group.torch_device)

    @staticmethod
    def backward(ctx: Any, _g: Tensor) -> tuple[Tensor | None, ...]:
        # Without another reference to these tensors, autograd uses them as .grad without a copy.
        call: StepCall = ctx.call
        gradients, call.gradients = call.gradients, ()
        rows = list(zip(call.parameters.values(), gradients, strict=False))
        sums = call.program.steps.sums
        # Without a gradient, autograd would call hooks with None here; on one device it does not call them.
        # All hooks wait for the micro-batch that sums.
        at_end(partial(_give_back, _take_hooks(p for p, g in rows if g is None or not sums)))
        if any(g is not None for g in call.left.values()):
            # A post-accumulate hook may have used and cleared a gradient.
            given = [p for p, g in rows if g is not None and not p._post_accumulate_grad_hooks]
            at_end(partial(_check_added, given))
        if partial_ones := [p for p, _ in rows if shards.is_shard(p) or shards.is_unsummed(p)]:
            call.accumulation.compare([g for _, g in rows if g is not None], partial_ones)
            at_end(partial(shards.accept_gradients, partial_ones))
            for p in partial_ones:
                setattr(p, shards.SCALED, call.precision is torch.float16)
        call.left = {}
        return None, *gradients


class _Step(torch.autograd.Function):
    """The node of all layers. Its backward runs the program's backward operations."""

    @staticmethod
    def forward(ctx: Any, call: StepCall, _weights: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        program = call.program
        made, call.tape = call.executor.forward(program, call.parts, keep=True, precision=call.precision)
        empty = [None if x.numel() else torch.zeros_like(x) for x in inputs]  # a device without samples
        ctx.call, ctx.empty, call.parts = call, empty, ()
        # The caller may change outputs in place, so they must not share memory that backward reads.
        outputs = tuple(
            y.detach() if owned else y.clone() for y, owned in zip(made, program.owned_outputs, strict=True)
        )
        ctx.set_materialize_grads(False)
        trained = program.program.output_gradients
        ctx.mark_non_differentiable(*(y for i, y in enumerate(outputs) if i not in trained))
        return outputs

    @staticmethod
    def backward(ctx: Any, *output_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: StepCall = ctx.call
        if torch.is_grad_enabled():
            raise InputError(
                "backward with create_graph=True: a distributed model has first derivatives only; leave it out, or, if the "
                "loss needs second derivatives (a gradient penalty), train on one device"
            )
        if (tape := call.tape) is None:
            raise InputError(
                "backward ran twice through one step: give every backward but the last retain_graph=True, or add the losses"
            )
        tape.kept = torch._C._autograd._get_current_graph_task_keep_graph()
        call.tape = tape if tape.kept else None
        call.begin_backward(output_gradients)
        # Gradients inside a step are not summed yet: autograd calls the hooks later, with the sums.
        held = _take_hooks(call.parameters.values())
        try:
            with torch.autocast(call.executor.group.torch_device.type, enabled=False):
                trains = ctx.needs_input_grad[1]
                if trains:
                    shards.check_gradients("backward()", call.parameters.values())
                    sums = call.program.steps.sums
                    call.left = call.accumulation.begin(call.parameters, call.program.reached, sums=sums)
                found, inputs = call.executor.backward(tape, output_gradients, call.left)
        finally:
            _give_back(held)
        if trains:
            call.gradients = tuple(found.pop(key, None) for key in call.parameters)
        weights = torch.zeros((), device=call.executor.group.torch_device)
        return None, weights, *(g if g is not None else e for g, e in zip(inputs or ctx.empty, ctx.empty, strict=True))


at_end: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Run a function when autograd has finished the current backward."""


_Held = Sequence[tuple[nn.Parameter, str, Any]]


def _take_hooks(parameters: Iterable[nn.Parameter]) -> _Held:
    held = [(p, kind, hooks) for p in parameters for kind in ON_PARAMETERS if (hooks := getattr(p, kind))]
    for p, kind, _ in held:
        setattr(p, kind, None if kind == "_backward_hooks" else {})  # None would not remove post-accumulate hooks
    return held


def _give_back(held: _Held) -> None:
    for p, kind, hooks in held:
        setattr(p, kind, hooks)


def _check_added(given: Sequence[nn.Parameter]) -> None:
    """Raise InputError if autograd did not set `.grad` of these parameters: unsummed gradients would be lost."""
    if any(p.grad is None for p in given):
        raise InputError(
            "torch.autograd.grad, or backward(inputs=...), of parameters whose gradients are not yet summed, because "
            "micro-batches ran in no_sync(): leave no_sync() out"
        )
