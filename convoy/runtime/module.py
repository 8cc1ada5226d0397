"""Distributed: an nn.Module that holds this device's part of a model and trains it with the others.

`Distributed.forward` is a step from its inputs to its outputs, and says which file does what of it.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from convoy._version import __version__
from convoy.comm.collectives import agree_on, agree_on_modes
from convoy.comm.group import Group
from convoy.errors import ConvoyError, InputError
from convoy.layout.layout import Layout, Replicated
from convoy.model.operation import fill_result
from convoy.model.tracing import StateWatch, TracedModel, disable_in_place, trace, unwrapped
from convoy.model.tracing.copies import copied
from convoy.plan.plan import Plan
from convoy.plan.steps import StepList, Value
from convoy.runtime.alike import Comparisons
from convoy.runtime.clock import Clock
from convoy.runtime.compiled import Compiler, check_compiler
from convoy.runtime.executor import Executor, Expected
from convoy.runtime.freed_memory import give_back_freed
from convoy.runtime.inputs import Inputs, parts_of, read_inputs
from convoy.runtime.marks import mark_originals, mark_unsummed
from convoy.runtime.module_of_pieces import ModuleOfPieces
from convoy.runtime.outputs import Outputs, rows_of
from convoy.runtime.passes import Passes
from convoy.runtime.plan_in_use import plan_in_use
from convoy.runtime.program import Program
from convoy.runtime.program_cache import Noting, ProgramCache
from convoy.runtime.shard_guards import CallGuard, check_not_distributed
from convoy.runtime.step_node import StepCall
from convoy.runtime.torch_guards import guard, guard_module
from convoy.runtime.watch import Watch
from convoy.runtime.weights import Weights, parameters_of, placeholders
from convoy.runtime.whole_weights import WholeWeights


class StaleBatchError(ConvoyError):
    """A batch is cut for devices that have changed; `convoy.train.Members` has it handed out again."""


class Distributed(ModuleOfPieces):
    """This device's part of a model, an nn.Module.

    It is called like the model: with this device's part of a batch, as the loader of `convoy.loader` gives it. It returns
    the outputs of the *whole* batch, on every device, so that the loss, its printing and its backward are those of one
    device; by a plan whose `outputs` are "where-computed", parts of them, for `convoy.loss`. Its parameters, under their
    ordinary names, are this device's pieces; optimizers work on them as they are.

    Args:
        model: an ordinary module; device 0's weights count. It may be on the meta device: on others than device 0, or
            everywhere, and then `load_state_dict` has to bring the weights before the first step.
        plan: who computes what.
        group: the devices.
        example: one batch of each input, for the shapes.
        slowdown: makes this device play one that is so many times slower.
        fuse: layers between two exchanges go to autograd as one graph (see `convoy.plan.compile`); False: each by itself.
        compile: rows of such layers go through torch.compile where that is faster (see `convoy.runtime.compiled`): equal up to
            rounding.
        takes_over: use the model's own modules, and its own parameters where every device has them whole. Parameters that
            the plan splits are replaced, and the old ones raise when they are used. False: work on a copy.

    Attributes:
        plan: the present one.
        reshards: how often the shares have changed.
        layouts: of each parameter and buffer, by its key in `state_dict`.
        weights: this device's pieces of them.
        takes_whole: inputs are whole batches, without `whole=True`.
        finished_steps, repeats: counted by `convoy.train.Members`; a loader hands out the batches since the last finished step
            again when `repeats` has changed.
        guard: begins an epoch of a loader, which talks to the other devices; None: the loader does so by itself.
        stale: whether the batch that was handed out last is for devices of before: to compute with it is a StaleBatchError.
        precision: what layers compute in (see `compute_in`); None: the type that the model has, or the caller's autocast.
        compiler: with `compile`, what tells how many rows of layers run compiled on this device.

    Raises:
        PlanError: the plan is for another model or another number of devices.
        MismatchError: the devices were given different models or plans, or torch computes in other modes on one of them.
        InputError: `compile` where a device has no compiler.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        group: Group,
        example: Tensor | Sequence[Tensor],
        *,
        slowdown: float = 1.0,
        fuse: bool = True,
        compile: bool = False,
        takes_over: bool = False,
    ) -> None:
        super().__init__()
        model = unwrapped(model)
        check_not_distributed(model)
        trained = trace(model, example, training=True)
        self.traced = {True: trained, False: trace(model, example, training=False, like=trained)}
        _agree(group, trained, plan, compile=compile)
        agree_on_modes(group)
        if compile:
            check_compiler(group)
        plan.check(trained.graph, group.devices)
        self.group, self.clock = group, Clock(group.torch_device, slowdown)
        self.parameters_by_key = parameters_of(model, self.traced)
        self.reshards = -1
        self._noting: Noting = {}
        self._set_plan(plan)
        own = model if takes_over else copied(model, placeholders(model, group.torch_device))
        self.module = disable_in_place(own)
        self.weights = Weights(group, self.module, self.parameters_by_key, self._in_use)
        self.calls = CallGuard()
        self.weights.cut(model)
        give_back_freed()  # what tracing took
        guard_module(self.module)
        self._fuse = fuse
        self.compiler = Compiler(group) if compile else None
        self._bind(model)
        self.precision: torch.dtype | None = None
        self._announced: list[int] = []  # shared with deep copies
        self.takes_whole = False
        self.finished_steps, self.repeats = 0, 0
        self.guard: Callable[[Any], Any] | None = None
        self.stale = False
        self.training = model.training
        if not takes_over:
            mark_originals(model.parameters())
        guard(Distributed)

    # --- one call: a step --------------------------------------------------------------------------------------------

    def forward(self, *inputs: Tensor, batch: int | None = None, whole: bool = False, **others: Any) -> Any:
        """Outputs of the whole batch, on every device; or an `OutputPart` each, where the plan leaves them with their samples.

        What another distributed model returned is taken as the whole batch that it is: `discriminator(generator(z))`; a model
        that `prepare` made takes every input so. An input that requires a gradient gets that of one device: this device's
        part of it where it was given in part, all of it where it was given whole.

        Args:
            inputs: this device's part of each input, in the layout of `input_layouts`; zero samples where it has none.
            batch: samples in the whole batch; needed only where the loader is not Convoy's.
            whole: every device gives the whole batch, the same as the others; each takes its part.

        Raises:
            InputError: the inputs do not fit the plan for this batch.
            MismatchError: `whole`, but the devices were given different batches.
        """
        if self.stale:
            raise StaleBatchError("the devices have changed since this batch was handed out: it comes again")
        self.weights.check_there()
        given = read_inputs(inputs, others, batch, whole or (self.takes_whole and batch is None), self._announced)
        training, graph = self.training, self.traced[self.training].graph
        program = self._programs.get(training, given.batch, given.wanted, self._passes.kind(gathers=self._gathers()))
        parts = parts_of(given, program.steps, graph, self.group)
        compares = self._comparisons.check_inputs(training, program.steps, given)
        self._whole_weights.held = False  # until this pass has come through
        self._watch.check(training, self._in_use.whole)
        self._states[training].check()
        outputs = self._compute(given, program, parts, compares)
        self._whole_weights.held = training and not self._passes.sums
        returned = self._outputs.returned(outputs, program, graph)
        return self._watch.returned(fill_result(self.traced[training], returned), inputs, training)

    def _gathers(self) -> bool:
        """Whether this pass gathers weights that are kept in shares; else those of the pass before are whole still."""
        stays = self.training and self._in_use.stays_whole
        return not (stays and self._whole_weights.stay(self._watch.trained.values(), self.group))

    def _compute(self, given: Inputs, program: Program, parts: list[Tensor], compares: bool) -> Sequence[Tensor]:
        """The outputs, as a node of the caller's autograd graph where there is one; `backward` ends in `_begin_backward`."""
        executor, kind = self._executors[self.training], self.group.torch_device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        precision = self.precision or autocast
        borrowing: AbstractContextManager[None] = nullcontext() if self.training else self.weights.borrowing()
        # The executor applies autocast, layer by layer, in backward too.
        with torch.autocast(kind, enabled=False), borrowing, program.random.alike(self.group):
            outputs: Sequence[Tensor]
            if torch.is_grad_enabled() and (self._watch.trained or any(x.requires_grad for x in given.tensors)):
                begin = partial(self._begin_backward, self.reshards, self.training, compares, program.steps.outputs)
                call = StepCall(executor, program, precision, parts, self._watch.trained, self._passes, begin)
                outputs = call.outputs(given.tensors)
            else:
                # The caller's memory is not to be marked, or changed.
                callers = {x.untyped_storage().data_ptr() for x in given.tensors}
                made = executor.forward(program, parts, keep=False, precision=precision)[0]
                outputs = [y.clone() if y.untyped_storage().data_ptr() in callers else y for y in made]
        if autocast is not None and self.precision is None:
            return self._outputs.as_autocast(outputs, program, self.training, autocast)
        return outputs

    def _begin_backward(
        self,
        reshards: int,
        training: bool,
        compares: bool,
        outputs: Sequence[Value],
        output_gradients: Sequence[Tensor | None],
    ) -> int:
        """The stage of inexact mixing for a backward whose forward ran after so many reshards."""
        if reshards != self.reshards:
            raise InputError(
                "the shares changed between a forward pass and its backward: call reshard() after backward()"
            )
        if not training and self._in_use.half_trained is not None:
            raise InputError(
                f"backward in evaluation mode: parameter {self._in_use.half_trained!r} is used on other devices there than "
                "keep it, and it would not be trained as on one device; call model.train() before forward, with those modules "
                "in evaluation mode that were so before distribute()"
            )
        if compares:
            self._comparisons.check_gradients(outputs, output_gradients)
        return next(self._passes.stages)

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, passes leave their gradients on each device; the next pass outside sums those of all passes, once.

        As with DistributedDataParallel, forward and backward of a pass are both inside, those of the last pass of a step
        outside; in between `.grad` is what this device has added up. Every device makes the same passes inside. Hooks on
        parameters are called in the last pass alone, with the gradient of all passes.

        ::

            for number, (x, y) in enumerate(parts):
                with model.no_sync() if number < len(parts) - 1 else nullcontext():
                    (criterion(model(x), y) / len(parts)).backward()
            optimizer.step()
        """
        return self._passes.left_unsummed()

    # --- the plan, and what is made for it ---------------------------------------------------------------------------

    def follow(self, plan: Plan) -> None:
        """From now on, steps and layouts are those of this plan. It moves nothing: see `reshard`, which does."""
        self._set_plan(plan)
        self.weights.in_use = self._in_use
        self._whole_weights.clear()
        self._programs = ProgramCache(self._in_use, self._executors, self._noting)

    def enter(self, plan: Plan) -> None:
        """Go on in another generation of the group, by a plan for its devices. It moves nothing: `SnapshotStore.restore` does.

        What a step that broke off has left is forgotten.

        Raises:
            PlanError: the plan is for another model or another number of devices.
        """
        plan.check(self.traced[True].graph, self.group.devices)
        expected = {mode: executor.expected_s for mode, executor in self._executors.items()}
        self._noting = {}
        self._set_plan(plan)
        self.weights.in_use = self._in_use
        if self.compiler is not None:
            self.compiler = Compiler(self.group)
        self._make_ready()
        for mode, executor in self._executors.items():
            executor.expected_s = expected[mode]
        self._watch.follow(self.traced, self.group.devices)
        for parameter in self.parameters():
            mark_unsummed(parameter, False)

    def _set_plan(self, plan: Plan) -> None:
        trained, evaluated = self.traced[True].graph, self.traced[False].graph
        self._in_use = plan_in_use(plan, trained, evaluated, self.parameters_by_key, self.group.devices)
        self.plan, self.layouts = plan, self._in_use.layouts
        self.reshards += 1

    def _bind(self, original: nn.Module) -> None:
        """Make ready to run on the modules and parameters that there are."""
        self._make_ready()
        self._watch = Watch(self.module, original, self.traced, self.group.devices)
        self._states = {mode: StateWatch(self.module, t.seen, t.modes) for mode, t in self.traced.items()}
        self.mark_pieces()

    def use_clock(self, clock: Clock) -> None:
        """Let another clock count what this device computes and exchanges, from the next step on."""
        self.clock = clock
        self._make_ready()

    def _make_ready(self) -> None:
        """Executors without programs, and whatever counts passes and steps, from the beginning."""
        shapes = {key: p.shape for key, p in self.parameters_by_key.items()}
        self._whole_weights = whole = WholeWeights(self.module, shapes, self.calls)
        self._executors = {
            m: Executor(self.group, self.module, t, self.clock, fuse=self._fuse, whole=whole)
            for m, t in self.traced.items()
        }
        for executor in self._executors.values():
            executor.compiler = self.compiler
        self._programs = ProgramCache(self._in_use, self._executors, self._noting)
        self._passes = Passes(lambda key: self._in_use.sums_on(key, self.group.device))
        self._comparisons, self._outputs = Comparisons(self.group), Outputs(self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Distributed":
        """A model of its own, with this one's weights, plan and devices: a teacher, an average. Every device makes it."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        of_torch = vars(nn.Module()).keys()
        vars(made).update({name: copy.copy(v) if name in of_torch else v for name, v in vars(self).items()})
        made._modules = {"module": copied(self.module, {id(self.calls): self.calls})}
        made.weights = Weights(self.group, made.module, self.parameters_by_key, self._in_use)
        made.weights.to_come = set(self.weights.to_come)
        made._bind(self.module)
        return made

    # --- what loaders and controllers ask and tell -------------------------------------------------------------------

    def steps(self, batch: int) -> StepList:
        """The step list that runs for a global batch of this size, in the present mode."""
        return self._programs.get(self.training, batch).steps

    def input_layouts(self, batch: int) -> tuple[Layout, ...]:
        """Where the samples of each input lie, for a global batch of this size."""
        return tuple(value.layout for value in self.steps(batch).inputs)

    def output_rows(self, batch: int) -> tuple[int, int]:
        """The samples of a global batch, from and to, whose outputs this device has: all of them, or its part."""
        values = [v for v in self.steps(batch).outputs if not isinstance(v.layout, Replicated)]
        return rows_of(values[0].layout, values[0].shape, self.group.device) if values else (0, batch)

    def announce(self, batch: int | None) -> None:
        """The loader tells how many samples the batch has whose part it hands out next; None: it has no more."""
        self._announced[:] = [] if batch is None else [batch]

    def expect(self, seconds: Expected) -> None:
        """Set the measured seconds of layers, used to divide a segment's time."""
        self._programs.expect(seconds)


def not_distributed(who: str, model: object) -> InputError:
    """The error for a model that was not distributed, where one that was is needed."""
    return InputError(
        f"{who} was given a {type(model).__name__}, which is not distributed: give the model that convoy.prepare or "
        "convoy.distribute returned"
    )


def _agree(group: Group, traced: TracedModel, plan: Plan, *, compile: bool) -> None:
    """Every device must have been given the same model and the same plan."""
    for what, text in (
        ("model", traced.graph.fingerprint),
        ("plan", plan.to_json()),
        ("version of Convoy", __version__),
        ("value of compile", str(compile)),
    ):
        agree_on(group, f"distribute:{what}", text, f"started with another {what}")
