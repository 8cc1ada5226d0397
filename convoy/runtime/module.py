"""Distributed: an nn.Module that holds this device's part of a model and trains it with the others."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from convoy._version import __version__
from convoy.comm.agreement import agree_on, agree_on_modes, gather
from convoy.comm.group import Group
from convoy.errors import ConvoyError, InputError
from convoy.model.graph import Graph, Parameter
from convoy.model.operation import fill_result
from convoy.model.tracing import StateWatch, TracedModel, disable_in_place, trace, unwrapped
from convoy.model.tracing.freed_memory import give_back_freed
from convoy.model.tracing.hooks import copied
from convoy.plan.compile import compile_all
from convoy.plan.evaluation import borrowed, pin
from convoy.plan.lower import lower, parameter_layouts
from convoy.plan.plan import Plan
from convoy.plan.program_check import check_programs
from convoy.plan.steps import Compute, InputGradient, Pass, StepList, Value
from convoy.runtime.alike import (
    batch_of,
    check_batches,
    check_copies,
    check_gradients,
    is_due,
    is_whole,
    mark_whole,
)
from convoy.runtime.clock import Clock
from convoy.runtime.compiled import Compiler, check_compiler
from convoy.runtime.exchange import gather_whole, redistribute
from convoy.runtime.executor import Executor, Expected
from convoy.runtime.gradients import global_norm
from convoy.runtime.marks import (
    check_summed,
    has_changed,
    mark_changed,
    mark_originals,
    mark_pieces,
    mark_unsummed,
)
from convoy.runtime.output_part import OutputPart, rows_of
from convoy.runtime.own_state import guard_module, reading_pieces
from convoy.runtime.passes import Passes
from convoy.runtime.program import Program
from convoy.runtime.step_node import StepCall
from convoy.runtime.torch_guards import guard
from convoy.runtime.watch import Watch, carry_over
from convoy.runtime.whole_weights import WholeWeights
from convoy.sharding.layout import Layout, OnOne, Replicated, Split, box, holders, local_shape

CHECKED_DEVICES = 16
"""Of larger fleets the programs are not checked against each other before the first step: that takes seconds."""

_PASSES: Mapping[tuple[bool, bool], Pass] = {
    (True, True): "only",
    (False, True): "first",
    (False, False): "middle",
    (True, False): "last",
}
"""By whether a pass sums gradients, and whether it gathers weights that are kept in shares."""


class StaleBatchError(ConvoyError):
    """A batch is cut for devices that have changed; `convoy.train.Members` has it handed out again."""


class Distributed(nn.Module):
    """This device's part of a model.

    It is called like the model: with this device's part of a batch, as the loader of `convoy.loader` gives it. It returns
    the outputs of the *whole* batch, on every device, so that the loss, its printing and its backward are those of one
    device; by a plan whose `outputs` are "where-computed", parts of them, for `convoy.loss`. Its parameters, under their
    ordinary names, are this device's pieces; optimizers work on them as they are.

    Args:
        model: an ordinary module. It is copied, piece by piece; device 0's weights count. It may be on the meta device: on
            others than device 0, or everywhere, and then `load_state_dict` has to bring the weights before the first step.
        plan: who computes what.
        group: the devices.
        example: one batch of each input, for the shapes.
        slowdown: makes this device play one that is so many times slower.
        fuse: layers between two exchanges go to autograd as one graph (see `convoy.plan.fusion`); False: each by itself.
        compile: rows of such layers go through torch.compile where that is faster (see `convoy.runtime.compiled`): equal up to
            rounding.

    Attributes:
        plan: the present one.
        reshares: how often the shares have changed.
        layouts: of each parameter and buffer, by its key in `state_dict`.
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
    ) -> None:
        super().__init__()
        model = unwrapped(model)
        trained = trace(model, example, training=True)
        traced = {True: trained, False: trace(model, example, training=False, like=trained)}
        _agree(group, traced[True], plan, compile=compile)
        agree_on_modes(group)
        if compile:
            check_compiler(group)
        plan.check(traced[True].graph, group.devices)
        self.group, self.traced = group, traced
        self.clock = Clock(group.torch_device, slowdown)
        self._unused = _unused(model, _parameters(traced))
        self.parameters_by_key = _parameters(traced) | self._unused
        self.reshares = -1
        self._noting: dict[str, set[int]] = {}
        self._executors: dict[bool, Executor] = {}
        self.follow(plan)
        self.module = disable_in_place(copied(model, _placeholders(model, group.torch_device)))
        self._keep_own_pieces(model)
        give_back_freed()  # what tracing took
        guard_module(self.module)
        self._fuse = fuse
        self.compiler = Compiler(group) if compile else None
        self._bind(model)
        self.precision: torch.dtype | None = None
        self._autocast_outputs: dict[tuple[bool, torch.dtype], list[torch.dtype]] = {}
        self._announced: list[int] = []  # shared with deep copies
        self.takes_whole = False
        self.finished_steps, self.repeats = 0, 0
        self.guard: Callable[[Any], Any] | None = None
        self.stale = False
        self._mixing_stage = 0
        self._calls = 0
        self._compared: set[tuple[bool, int, Pass]] = set()  # what must be the same everywhere was so
        self._sums = True
        self.training = model.training
        mark_originals(model.parameters())
        guard(Distributed)

    def _bind(self, original: nn.Module) -> None:
        """Make ready to run on the modules and parameters that there are."""
        self._make_executors()
        self._watch = Watch(self.module, original, self.traced, self.group.devices)
        self._passes = Passes(lambda key: not isinstance(self.layouts[key], Replicated) or self.counts_here(key))
        self._states = {mode: StateWatch(self.module, t.seen, t.modes) for mode, t in self.traced.items()}
        self.mark_pieces()

    def _make_executors(self) -> None:
        whole = WholeWeights(self.module, {key: p.shape for key, p in self.parameters_by_key.items()})
        self._executors = {
            m: Executor(self.group, self.module, t, self.clock, fuse=self._fuse, whole=whole)
            for m, t in self.traced.items()
        }
        for executor in self._executors.values():
            executor.compiler = self.compiler

    def __deepcopy__(self, memo: dict[int, Any]) -> "Distributed":
        """A model of its own, with this one's weights, plan and devices: a teacher, an average. Every device makes it."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        of_torch = vars(nn.Module()).keys()
        vars(made).update({name: copy.copy(v) if name in of_torch else v for name, v in vars(self).items()})
        made._modules = {"module": copied(self.module)}
        made._programs, made._compared, made._autocast_outputs = {}, set(), {}
        made._bind(self.module)
        return made

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Refused: neither pickle nor torch.save can keep the connections to the other devices.

        Raises:
            InputError: always.
        """
        raise InputError(
            "a distributed model cannot be pickled: it is this device's pieces, and connections to the others. Save "
            "full_state_dict(), which every device calls, or use convoy.Checkpointer"
        )

    def follow(self, plan: Plan) -> None:
        """From now on, steps and layouts are those of this plan. It moves nothing: see `reshare`, which does."""
        trained, evaluated = self.traced[True].graph, self.traced[False].graph
        self.plan = plan
        self._plans = {True: plan, False: pin(plan, trained, evaluated)}
        self._borrowed = borrowed(self._plans[False], plan, trained, evaluated)
        everyone = Replicated(tuple(range(self.group.devices)))
        # Layers that exist only in evaluation add theirs.
        self.layouts = parameter_layouts(self._plans[False], evaluated) | parameter_layouts(plan, trained)
        self.layouts |= dict.fromkeys(self._unused, everyone)
        self._half_trained = next((key for key in self._borrowed if self.parameters_by_key[key].trainable), None)
        self._stay_whole = any(how.form == "keep" for how in plan.in_shares.values())
        self._programs: dict[tuple[bool, int, tuple[InputGradient, ...], Pass], Program] = {}
        for executor in self._executors.values():
            executor.whole.clear()
        self.reshares += 1

    def enter(self, plan: Plan) -> None:
        """Go on in another generation of the group, by a plan for its devices. It moves nothing: `StateKeeper.restore` does.

        What a step that broke off has left is forgotten.

        Raises:
            PlanError: the plan is for another model or another number of devices.
        """
        plan.check(self.traced[True].graph, self.group.devices)
        expected = {mode: executor.expected_s for mode, executor in self._executors.items()}
        self._noting, self._executors = {}, {}
        self.follow(plan)
        if self.compiler is not None:
            self.compiler = Compiler(self.group)
        self._make_executors()
        for mode, executor in self._executors.items():
            executor.expected_s = expected[mode]
        self._watch.follow(self.traced, self.group.devices)
        self._passes = Passes(lambda key: not isinstance(self.layouts[key], Replicated) or self.counts_here(key))
        for parameter in self.parameters():
            mark_unsummed(parameter, False)
        self._compared, self._calls, self._mixing_stage, self._sums = set(), 0, 0, True
        self._autocast_outputs = {}

    # --- calling -----------------------------------------------------------------------------------------------------

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
        self._refuse_odd_call(inputs, others)
        self._require_weights()
        wholes = [whole or (self.takes_whole and batch is None) or is_whole(x) for x in inputs]
        pass_ = _PASSES[self._sums, self._gathers()]
        own = self._program(self._size(inputs, wholes, batch), self._wanted(inputs, wholes), pass_)
        parts = self._parts(inputs, wholes, own.steps, handed_out=batch is None and not any(wholes))
        compares = self._compares(inputs, wholes, own.steps)
        executor = self._executors[self.training]
        executor.whole.held = False  # until this pass has come through
        self._watch.check(self.training, self._whole)
        self._states[self.training].check()
        kind = self.group.torch_device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        precision = self.precision or autocast
        # The executor applies autocast, layer by layer, in backward too.
        with torch.autocast(kind, enabled=False), self._borrowing():
            outputs: Sequence[Tensor]
            if torch.is_grad_enabled() and (self._watch.trained or any(x.requires_grad for x in inputs)):
                begin = partial(self._begin_backward, self.reshares, self.training, compares, own.steps.outputs)
                call = StepCall(executor, own, precision, parts, self._watch.trained, self._passes, begin)
                outputs = call.outputs(inputs)
            else:
                given = {x.untyped_storage().data_ptr() for x in inputs}  # the caller's: not to be marked, or changed
                made = executor.forward(own, parts, keep=False, precision=precision)[0]
                outputs = [y.clone() if y.untyped_storage().data_ptr() in given else y for y in made]
        executor.whole.held = self.training and not self._sums
        if autocast is not None and self.precision is None:
            outputs = [y.to(t) for y, t in zip(outputs, self._as_autocast(own, autocast), strict=True)]
        returned: list[Any] = []
        for value, y in zip(own.steps.outputs, outputs, strict=True):
            if not isinstance(value.layout, Replicated):
                returned.append(OutputPart(y, value.layout, value.shape, self.group))
                continue
            if executor.traced.graph[value.layer].batched:
                mark_whole(y)
            returned.append(y)
        return self._watch.returned(fill_result(executor.traced, returned), inputs, self.training)

    def _refuse_odd_call(self, inputs: Sequence[Any], others: Mapping[str, Any]) -> None:
        if others or not all(isinstance(x, Tensor) for x in inputs):
            odd = [*others, *(f"a {type(x).__name__}" for x in inputs if not isinstance(x, Tensor))]
            raise InputError(
                f"the distributed model was called with {', '.join(odd)}: it takes the tensors of the example, by "
                "position. Give other arguments their value in a module around the model, before distribute()"
            )
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is not None and not hooks[0].__qualname__.startswith("save_on_cpu."):
            raise InputError(
                "the distributed model was called under saved_tensors_hooks, which would see a part of what backward needs, or "
                "nothing: use them inside a module of the model, before distribute()"
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
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
        outside, self._sums = self._sums, False
        try:
            yield
        finally:
            self._sums = outside

    def weights_changed(self) -> None:
        """Tell that weights were changed by hand between two passes of a step. Every device calls it.

        Where weights are kept in shares, the passes of a step gather them once, and one whose device finds its share changed is
        refused; after this the next pass gathers them anew. What changes weights by Convoy or an optimizer tells it by itself.
        """
        mark_changed(self.parameters())

    def _gathers(self) -> bool:
        """Whether this pass gathers weights that are kept in shares; else those of the pass before are whole still."""
        if not self._stay_whole or not self.training:
            return True
        whole, parameters = self._executors[True].whole, self._watch.trained.values()
        if whole.held and has_changed(parameters):
            self.group.agree("weights that have changed between two passes", "")
            whole.held = False
        if not whole.held:
            mark_changed(parameters, False)
        return not whole.held

    @contextmanager
    def _borrowing(self) -> Iterator[None]:
        """In evaluation: bring parameters to the layers that could not be brought to them, and give them back at the end."""
        kept: list[tuple[Tensor, Tensor]] = []
        try:
            for key, wanted in self._borrowed.items() if not self.training else ():
                own, layout, shape = self._own(key), self.layouts[key], self.parameters_by_key[key].shape
                kept.append((own, own.data))
                own.data = redistribute(self.group, own.detach(), layout, wanted, shape)
            yield
        finally:
            for own, piece in kept:
                own.data = piece

    def _begin_backward(
        self,
        reshares: int,
        training: bool,
        compares: bool,
        outputs: Sequence[Value],
        output_gradients: Sequence[Tensor | None],
    ) -> int:
        """The stage of inexact mixing for a backward whose forward ran after so many reshares."""
        if reshares != self.reshares:
            raise InputError(
                "the shares changed between a forward pass and its backward: call reshare() after backward()"
            )
        if not training and self._half_trained is not None:
            raise InputError(
                f"backward in evaluation mode: parameter {self._half_trained!r} is used on other devices there than keep it, "
                "and it would not be trained as on one device; call model.train() before forward, with those modules in "
                "evaluation mode that were so before distribute()"
            )
        if compares:
            # Of outputs that are here in part, each device has another gradient: only whether there is one is compared.
            stays = [not isinstance(v.layout, Replicated) for v in outputs]
            alike = [g[:0] if g is not None and part else g for g, part in zip(output_gradients, stays, strict=True)]
            check_gradients(self.group, alike)
        self._mixing_stage += 1
        return self._mixing_stage - 1

    def steps(self, batch: int) -> StepList:
        """The step list that runs for a global batch of this size, in the present mode."""
        return self._program(batch).steps

    def _program(self, batch: int, wanted: tuple[InputGradient, ...] = (), pass_: Pass = "only") -> Program:
        mode, key = self.training, (self.training, batch, wanted, pass_)
        if key not in self._programs:
            executor = self._executors[mode]
            kept = {key: layout for key, layout in self.layouts.items() if key not in self._borrowed}
            steps = lower(self._plans[mode], executor.traced.graph, batch, wanted, kept, pass_)
            self._check_noting(steps, executor.traced.graph)
            if not self._programs and self.group.devices <= CHECKED_DEVICES:
                check_programs(compile_all(steps, executor.traced.graph))
            self._programs[key] = executor.program(steps)
        return self._programs[key]

    def _check_noting(self, steps: StepList, graph: Graph) -> None:
        """A layer that changes its own state must run on the same devices in every step: elsewhere its state lies behind."""
        for step in steps.phase("forward"):
            if not isinstance(step, Compute) or not (graph[step.layer].notes or step.layer in self._noting):
                continue
            here = set(holders(step.writes.layout))
            before = self._noting.setdefault(step.layer, here)
            if here != before if graph[step.layer].notes else not here <= before:
                raise InputError(
                    f"layer {step.layer!r} changes its Python state, buffers or parameters in forward, on the devices "
                    f"{sorted(before)} so far, and would run on {sorted(here)} for a batch of {steps.batch}: their state would "
                    "no longer be the same. Use batches with samples for each of these devices (drop_last=True), or give "
                    "the layer the strategy 'one'"
                )

    def _as_autocast(self, own: Program, autocast: torch.dtype) -> list[torch.dtype]:
        """The types that torch.autocast gives the outputs, as a device tells that computed them; the same on every device."""
        key = (self.training, autocast)
        if key not in self._autocast_outputs:
            natural = [str(own.natural.get(v.layer, "")) for v in own.steps.outputs]
            rows = gather(self.group, "autocast", natural)
            told = [next((row[i] for row in rows if row[i]), "torch.float32") for i in range(len(natural))]
            self._autocast_outputs[key] = [getattr(torch, name.removeprefix("torch.")) for name in told]
        return self._autocast_outputs[key]

    def expect(self, seconds: Expected) -> None:
        """What parts of layers are expected to take here, as measured: the time of a fused stretch is told apart by it."""
        for executor in self._executors.values():
            executor.expected_s = seconds
        for program in self._programs.values():
            program.expected_s.clear()

    def mark_pieces(self) -> None:
        """From now on, an optimizer that is not exact on this device's pieces is refused at its step."""
        held = dict(self.named_parameters())
        layers = [layer for traced in self.traced.values() for layer in traced.graph.layers.values() if layer.alone]
        in_parts = {p.key for layer in layers for p in layer.parameters.values()}
        self._whole = {k: self.is_copied(k) and not self.plan.mixes and k not in in_parts for k in held}
        mark_pieces((parameter, not self.is_copied(key)) for key, parameter in held.items())

    def announce(self, batch: int | None) -> None:
        """The loader tells how many samples the batch has whose part it hands out next; None: it has no more."""
        self._announced[:] = [] if batch is None else [batch]

    def check_copies(self) -> None:
        """Whether parameters that every device has whole are still the same on all of them. Every device must call it.

        Raises:
            MismatchError: they are not.
        """
        if self.group.devices > 1 and not self.plan.mixes:
            check_copies(self.group, {key: p for key, p in self.named_parameters() if self.is_copied(key)})

    def input_layouts(self, batch: int) -> tuple[Layout, ...]:
        """Where the samples of each input lie, for a global batch of this size."""
        return tuple(value.layout for value in self.steps(batch).inputs)

    def output_rows(self, batch: int) -> tuple[int, int]:
        """The samples of a global batch, from and to, whose outputs this device has: all of them, or its part."""
        values = [v for v in self.steps(batch).outputs if not isinstance(v.layout, Replicated)]
        return rows_of(values[0].layout, values[0].shape, self.group.device) if values else (0, batch)

    def _size(self, inputs: Sequence[Tensor], wholes: Sequence[bool], batch: int | None) -> int:
        size = batch if batch is not None else next((len(x) for x, w in zip(inputs, wholes, strict=True) if w), None)
        known = (batch_of(x) for x in inputs)
        size = size if size is not None else next((each for each in known if each is not None), None)
        size = size if size is not None else next(iter(self._announced), None)
        if size is None:
            raise InputError(
                "the size of the whole batch is not known: use convoy.loader, or the loader that convoy.prepare returned, or "
                "call model(x, batch=64); where every device has the whole batch, model(x, whole=True)"
            )
        return size

    def _compares(self, inputs: Sequence[Tensor], wholes: Sequence[bool], steps: StepList) -> bool:
        """Whether this step compares what must be the same everywhere; the inputs that every device has whole, at once."""
        if self.group.devices == 1:
            return False
        self._calls += 1
        if not is_due(self._calls) and (self.training, steps.batch, steps.pass_) in self._compared:
            return False
        self._compared.add((self.training, steps.batch, steps.pass_))
        agree_on(self.group, "no_sync", steps.pass_, "is on another side of no_sync(), or at another pass of the step,")
        everyone = Replicated(tuple(range(self.group.devices)))
        alike = [x for x, v, w in zip(inputs, steps.inputs, wholes, strict=True) if w or v.layout == everyone]
        if alike:
            check_batches(self.group, alike)
        return True

    @staticmethod
    def _wanted(inputs: Sequence[Tensor], wholes: Sequence[bool]) -> tuple[InputGradient, ...]:
        """Where gradients of the inputs have to be brought."""
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in inputs):
            return ()
        return tuple(
            "none" if not x.requires_grad else "whole" if w else "part" for x, w in zip(inputs, wholes, strict=True)
        )

    def _parts(
        self, inputs: Sequence[Tensor], wholes: Sequence[bool], steps: StepList, handed_out: bool
    ) -> list[Tensor]:
        """This device's part of each input.

        Args:
            handed_out: how large the batch is, the loader has said.
        """
        if len(inputs) != len(steps.inputs):
            raise InputError(f"the model takes {len(steps.inputs)} inputs, got {len(inputs)}")
        parts = []
        for x, value, w in zip(inputs, steps.inputs, wholes, strict=True):
            own = local_shape(value.layout, self.group.device, value.shape)
            expected = value.shape if w else own
            if tuple(x.shape) != expected:
                raise self._misshapen(tuple(x.shape), expected, steps.batch, w, handed_out)
            dtype = self.traced[self.training].graph[value.layer].dtype
            casts = x.is_floating_point() and torch.is_autocast_enabled(x.device.type)
            if x.dtype != getattr(torch, dtype) and not casts:
                raise InputError(
                    f"device {self.group.ids[self.group.device]} got an input of {str(x.dtype).removeprefix('torch.')}, and "
                    f"the example that the model was distributed with was {dtype}: give such inputs, or that kind of example"
                )
            here = box(value.layout, self.group.device, value.shape)
            cut = tuple(slice(*span) for span in here) if here is not None else (slice(0, 0),)
            parts.append(x.detach()[cut] if w else x)
        return parts

    def _misshapen(
        self, shape: tuple[int, ...], expected: tuple[int, ...], batch: int, whole: bool, handed_out: bool
    ) -> InputError:
        what = f"device {self.group.ids[self.group.device]} got an input of shape {shape}"
        if shape == expected[1:]:
            return InputError(f"{what}, one sample without the axis of the batch: give x[None]")
        if shape[1:] != expected[1:]:
            return InputError(
                f"{what}, and the samples of the example that the model was distributed with have the shape {expected[1:]}: "
                "give distribute() an example of the shape of the data, such as a batch of the loader"
            )
        if whole:
            return InputError(f"{what}; the whole batch is {expected}: give all inputs as many samples")
        if handed_out:
            return InputError(
                f"{what}; the loader handed out a batch of {batch} last, and this device's part of that is {expected}. If "
                "these samples are of a DataLoader of your own, let convoy.prepare or convoy.loader serve them, too; if every "
                "device has this same whole batch: model(x, whole=True)"
            )
        return InputError(
            f"{what}; its part of a batch of {batch} is {expected}: use convoy.loader, or tell the size of the whole batch: "
            "model(x, batch=n); if every device has all of it: model(x, whole=True)"
        )

    # --- what does not belong on a distributed model -------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "require_backward_grad_sync":
                raise AttributeError(
                    f"{name} is of DistributedDataParallel: make passes whose gradients are summed later inside no_sync()"
                ) from None
            if name.startswith("__") or not hasattr(self.__dict__.get("_modules", {}).get("module"), name):
                raise
        raise AttributeError(
            f"a distributed model has no attribute {name!r}; the model that was given has. model.module.{name} is that of "
            "this device, whose parameters are pieces; whole ones are in full_state_dict(). Only forward runs on all devices"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for tensor in {(t.dtype, t.device): t for t in (*self.parameters(), *self.buffers())}.values():
            made = fn(tensor.detach()[:0] if tensor.dim() else tensor.detach())
            if made.dtype != tensor.dtype or made.device != tensor.device:
                raise InputError(
                    f"the distributed model would change from {tensor.dtype} on {tensor.device} to {made.dtype} on "
                    f"{made.device}: change the model before it is distributed; where a device computes is said by "
                    "convoy.join(device) or CONVOY_DEVICE, in which precision by precision='bf16'"
                )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    # --- parameters --------------------------------------------------------------------------------------------------

    def _keep_own_pieces(self, original: nn.Module) -> None:
        """Shard device 0's weights: every device gets its pieces, parameter by parameter. Hooks stay on their parameters."""
        held = [(key, _tensor(original, key)) for key in self.parameters_by_key]
        empty = set(gather(self.group, "weights to come", [key for key, t in held if t.is_meta])[0])
        self._to_come = empty
        for (key, old), parameter in zip(held, self.parameters_by_key.values(), strict=True):
            placed, here = _tensor(self.module, key), self.group.torch_device
            if old.is_complex() and old.requires_grad and self.is_copied(key) and self.group.devices > 1:
                raise InputError(
                    f"parameter {key!r} is complex: its gradients cannot be summed over devices. Keep it as a real one with a "
                    "last axis of 2, and use torch.view_as_complex in forward"
                )
            if key in empty:
                shape = local_shape(self.layouts[key], self.group.device, parameter.shape)
                piece = torch.empty(shape, dtype=old.dtype, device=here)
            else:
                whole = (
                    old.detach().to(here) if self.group.device == 0 else torch.empty(0, dtype=old.dtype, device=here)
                )
                piece = redistribute(self.group, whole, OnOne(0), self.layouts[key], parameter.shape).clone()
            if not parameter.buffer:
                piece = nn.Parameter(piece, requires_grad=old.requires_grad)
                carry_over(piece, old)
            _replace(self.module, placed, piece)

    def counts_here(self, key: str) -> bool:
        """Whether this device is the one that counts a parameter: owner of a piece, or first holder of copies."""
        layout = self.layouts[key]
        return isinstance(layout, Split) or holders(layout)[0] == self.group.device

    def holds(self, key: str, device: int) -> bool:
        """Whether a device holds a piece or a copy of a parameter."""
        return device in holders(self.layouts[key])

    def is_copied(self, key: str) -> bool:
        """Whether every device holds the whole parameter."""
        layout = self.layouts[key]
        return isinstance(layout, Replicated) and len(layout.devices) == self.group.devices

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm, over all devices, is at most `max_norm`; returns the norm before.

        `torch.nn.utils.clip_grad_norm_` would see only this device's pieces. Call it on every device.
        """
        check_summed("clip_grad_norm_", self.parameters())
        rows = [(key, self.module.get_parameter(key).grad) for key, p in self.parameters_by_key.items() if p.trainable]
        held = [(g, self.counts_here(key)) for key, g in rows if g is not None]
        norm = global_norm(self.group, held, norm_type)
        scale = max_norm / (norm + 1e-6)
        # Written so that a norm that is not a number shows in the gradients, as torch's does.
        if not scale >= 1.0:
            for g, _ in held:
                g.mul_(scale)
        dtypes = [self.module.get_parameter(key).dtype for key, p in self.parameters_by_key.items() if p.trainable]
        return torch.tensor(
            norm, dtype=reduce(torch.promote_types, dtypes or [torch.float32]), device=self.group.torch_device
        )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This device's pieces under the names they have in the model."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def state_dict(self, *_args: Any, **_kwargs: Any) -> Any:
        """Refused, because this device's pieces are not the model: see `full_state_dict`.

        Raises:
            InputError: always.
        """
        raise InputError(
            "state_dict() would hold only this device's pieces: call full_state_dict() on every device, "
            "which gives the whole model under its ordinary keys"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take this device's pieces of the weights of the whole model. Every device must call it, with the same weights.

        Args:
            state_dict: of the model as it was before `distribute`, under its ordinary keys.
            strict: refuse keys that are missing or not known; False: they are returned, as by torch.
            assign: refused.

        Returns:
            the missing and the unexpected keys, as torch gives them.

        Raises:
            InputError: keys that do not fit, or a tensor of another shape than the whole parameter.
        """
        if assign:
            raise InputError("load_state_dict(assign=True): a device holds pieces, which are copied: leave assign out")
        with reading_pieces():
            tied, known = _canonical(self.module), self.module.state_dict()
        missing = [key for key in known if key not in state_dict]
        unexpected = [key for key in state_dict if key not in known]
        nothing = bool(known) and len(missing) == len(known)
        if nothing or (strict and (missing or unexpected)):
            hint = (
                "use the model's ordinary keys, without 'module.'"
                if all(k.startswith("module.") for k in unexpected) and unexpected
                else "give all of them, or strict=False"
            )
            raise InputError(f"load_state_dict: keys {missing} are missing, {unexpected} are not known: {hint}")
        self.weights_changed()
        for key in filter(state_dict.__contains__, known):
            holder, _, name = key.rpartition(".")
            if tied.get(key, key) in self.parameters_by_key:
                self._load(key, tied.get(key, key), state_dict[key])
            elif name == "_extra_state":
                self.module.get_submodule(holder).set_extra_state(state_dict[key])
            else:
                raise InputError(
                    f"load_state_dict: {key!r} is no parameter or buffer, but what a hook on state_dict, or the "
                    "model's own state_dict, makes of them: load the weights before distribute()"
                )
        return _IncompatibleKeys(missing, unexpected)

    def _load(self, key: str, parameter: str, whole: Tensor) -> None:
        shape, layout = self.parameters_by_key[parameter].shape, self.layouts[parameter]
        if tuple(whole.shape) != tuple(shape):
            raise InputError(
                f"load_state_dict: {key!r} has the shape {tuple(whole.shape)}, the whole parameter has {tuple(shape)}: give "
                "the weights of the whole model, as full_state_dict() does"
            )
        here = box(layout, self.group.device, shape)
        if here is not None:
            self._held(parameter).copy_(whole.detach()[tuple(slice(*span) for span in here)])
        self._to_come.discard(parameter)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """This device's pieces of the buffers under the names they have in the model."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model under its ordinary keys, on every device. Every device must call it.

        With `inexact-butterfly-mixing` every device has weights of its own; these are their averages.
        """
        self._require_weights()
        # Who calls it alone may need no message from the others: it is to be named here, not where they meet its messages.
        self.group.agree("full_state_dict", "")
        whole = {key: self.gather(key, self._held(key)) for key in self.parameters_by_key}
        pieces = [(own, own.data) for own in map(self._own, whole)]
        try:
            for (own, _), tensor in zip(pieces, whole.values(), strict=True):
                own.data = tensor
            with (
                reading_pieces()
            ):  # whole ones for now: hooks of the model, and its own state_dict, may do anything with them
                return dict(self.module.state_dict())
        finally:
            for own, piece in pieces:
                own.data = piece

    def _require_weights(self) -> None:
        if self._to_come:
            raise InputError(
                f"the model was built on the meta device, and {len(self._to_come)} of its parameters and buffers "
                f"({min(self._to_come)!r}, say) have no numbers yet: call load_state_dict() with them on every device, such as "
                "load_state_dict(torch.load(file, mmap=True)), of which each device reads its pieces"
            )

    def gather(self, key: str, piece: Tensor) -> Tensor:
        """The whole of a tensor that lies like parameter `key` (its gradient, its momentum), on every device.

        Where the plan mixes inexactly the copies differ from device to device: this is their average.

        Raises:
            InputError: a gradient that has yet to be summed over the devices, after `no_sync`.
        """
        if piece is (owner := self._own(key)).grad and isinstance(owner, nn.Parameter):
            check_summed("gather", [owner])
        layout, shape = self.layouts[key], self.parameters_by_key[key].shape
        everyone = Replicated(tuple(range(self.group.devices)))
        return gather_whole(self.group, piece, layout, everyone, shape, differ=self.plan.mixes).clone()

    def _held(self, key: str) -> Tensor:
        return self._own(key).detach()

    def _own(self, key: str) -> Tensor:
        return _tensor(self.module, key)


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


def _parameters(traced: Mapping[bool, TracedModel]) -> dict[str, Parameter]:
    rows = [*traced[True].graph.layers.values(), *traced[False].graph.layers.values()]
    return {p.key: p for layer in rows for p in layer.parameters.values()}


def _unused(model: nn.Module, known: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Parameters that no layer reads: they have no gradient, but they belong to the model."""
    tied = _canonical(model)
    rows = [(k, p, False) for k, p in model.named_parameters()] + [(k, b, True) for k, b in model.named_buffers()]
    missing = [(k, t, b) for k, t, b in rows if tied[k] == k and k not in known]
    return {k: Parameter(k, tuple(t.shape), t.requires_grad and not b, b) for k, t, b in missing}


def _placeholders(model: nn.Module, device: torch.device) -> dict[int, Any]:
    """Empty tensors for the parameters and buffers of a copy that gets its pieces later."""
    empty = {id(t): torch.empty(0, dtype=t.dtype, device=device) for t in (*model.parameters(), *model.buffers())}
    return empty | {id(p): nn.Parameter(empty[id(p)], p.requires_grad) for p in model.parameters()}


def _tensor(root: nn.Module, key: str) -> Tensor:
    holder, _, name = key.rpartition(".")
    tensor = getattr(root.get_submodule(holder), name)
    assert isinstance(tensor, Tensor)
    return tensor


def _replace(root: nn.Module, old: Tensor, new: Tensor) -> None:
    """Put `new` wherever `old` stands: tied weights stay tied."""
    for module in root.modules():
        for table in (module._parameters, module._buffers):
            for name in [name for name, tensor in table.items() if tensor is old]:
                table[name] = new  # type: ignore[assignment]


def _canonical(root: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    rows = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
    return {key: first.setdefault(id(tensor), key) for key, tensor in rows}
