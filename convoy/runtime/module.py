"""Define `Distributed`, an nn.Module that holds this device's shards of a model and trains it with the other devices.

`Distributed.forward` is one step from its inputs to its outputs. `docs/step.md` follows it through the files.
"""

import copy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, reduce
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from convoy.comm.control_messages import agree_on
from convoy.comm.group import Group
from convoy.errors import ConvoyError, InputError
from convoy.layout.layout import Layout, Replicated, Shape, everywhere
from convoy.model.nested import Arguments, CallForm, Example, arguments_of
from convoy.model.operation import TracedModel, fill, with_trained
from convoy.model.tracing import StateWatch, copied, samples_in, trace, unwrapped
from convoy.model.tracing.live import is_inside
from convoy.plan.plan import Plan
from convoy.plan.steps import StepList, Value
from convoy.runtime import model_checks, shards
from convoy.runtime.batches import BatchPart, StepInputs, local_inputs, read_inputs, returned_outputs, sample_shapes
from convoy.runtime.clock import Clock
from convoy.runtime.cuda_graphs import CudaGraphs, can_capture
from convoy.runtime.executor import Executor, Expected, Variant, by_arithmetic
from convoy.runtime.gradients import global_norm
from convoy.runtime.outer import OutsideGradients, SplitForward, run_live
from convoy.runtime.program import Program
from convoy.runtime.step_node import Accumulation, StepCall
from convoy.runtime.weights import GatheredParameters, Weights, copied_without_weights, parameters_of, plan_in_use

MOST_VARIANTS = 16  # of one model: each keeps its programs, and its CUDA graphs


class StaleBatchError(ConvoyError):
    """The error for a batch loaded before the devices changed. `convoy.train.Members` loads it again."""


class Distributed(nn.Module):
    """This device's shards of a model, an nn.Module.

    Call it like the model, with the local batch from `convoy.loader`. It returns the outputs of the *global* batch on every
    device, so that loss and backward are those of one device. With a plan whose `outputs` are "where-computed" it returns
    local outputs, for `convoy.loss`. Its parameters, under their ordinary names, are local shards; optimizers work on them.

    Args:
        model: an ordinary module with device 0's weights. On other devices it may be on the meta device. If it is so on
            device 0 too, call `load_state_dict` before the first step.
        example: as for `trace`.
        slowdown: emulate a device that is slower by this factor.
        cuda_graphs: on CUDA devices, replay layers as CUDA graphs (see `convoy.runtime.cuda_graphs`).
        takes_over: use the model's own modules, and its own parameters if every device has them whole. Shards replace the
            other parameters, which then raise on use. False: work on a copy.

    Attributes:
        reshards: number of reshards.
        layouts: layout of each parameter and buffer, by its key in `state_dict`.
        takes_whole: treat inputs as global batches, even without `whole=True`, except while a `convoy.loader` gives batches.
        finished_steps, repeats: counted by `convoy.train.Members`; if `repeats` changes, a loader repeats the batches since
            the last finished step.
        guard: called with a loader to begin its epoch together with the other devices; None: use `loader.begin`.
        stale: the devices have changed since the loader returned its last batch: using it raises StaleBatchError.
        precision: number type of the layers' arithmetic (see `compute_in`); None: the model's own, or the caller's autocast.

    Raises:
        PlanError: the plan is for another model or another number of devices.
        MismatchError: the devices have different models, plans, or torch modes.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        group: Group,
        example: Example,
        *,
        slowdown: float = 1.0,
        cuda_graphs: bool = False,
        takes_over: bool = False,
    ) -> None:
        super().__init__()
        model = unwrapped(model)
        shards.check_not_distributed(model)
        trained = trace(model, example, training=True)
        self.traced = {True: trained, False: trace(model, example, training=False, like=trained)}
        args, kwargs = arguments_of(example)
        self._samples = samples_in((*args, *kwargs.values()))
        model_checks.check_same_start(group, trained, plan)
        plan.check(trained.graph, group.devices)
        self.group, self.clock = group, Clock(group.torch_device, slowdown)
        self.parameters_by_key = parameters_of(model, self.traced)
        self.reshards = -1
        self._expected_s: Expected = by_arithmetic
        self._set_plan(plan)
        self._in_place = [path for path, m in model.named_modules() if getattr(m, "inplace", False)]
        self.module = model if takes_over else copied_without_weights(model, group.torch_device)
        self.weights = Weights(group, self.module, self.parameters_by_key, self._in_use)
        self.calls = shards.CallGuard()
        self.weights.cut(model)
        self.cuda_graphs = CudaGraphs() if cuda_graphs and can_capture(group.torch_device) else None
        self._bind()
        self.precision: torch.dtype | None = None
        self._announced: list[int] = []  # shared with deep copies
        self.finished_steps, self.repeats = 0, 0
        self.guard: Callable[[Any], Any] | None = None
        self.takes_whole, self.stale = takes_over, False
        self.training = model.training
        self._is_made = True
        if not takes_over:
            for parameter in model.parameters():
                setattr(parameter, shards.ORIGINAL, True)
        shards.guard_optimizers()

    # --- one call: a step --------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, batch: int | None = None, whole: bool = False, **others: Any) -> Any:
        """Return the outputs of the global batch, on every device; or an `OutputPart` for each output that stays local.

        The output of another distributed model is a global batch: `discriminator(generator(z))`. An input that requires a
        gradient gets the gradient it has on one device: of the local batch, or of the global batch if that was given.

        Args:
            inputs, others: arguments like those of the example, with tensors of the local batch, in the layouts of
                `input_layouts`; it may have zero samples.
            batch: samples in the global batch; needed only if the loader is not Convoy's.
            whole: every device gives the same global batch; each takes its local batch from it.

        Raises:
            InputError: the inputs do not fit the plan for this batch.
            MismatchError: `whole`, but the devices gave different batches.
        """
        if torch.compiler.is_compiling():
            # torch.compile around the model would trace the communication code line by line, for minutes.
            return torch.compiler.disable(self._step)(inputs, batch, whole, others)  # type: ignore[no-untyped-call]
        return self._step(inputs, batch, whole, others)

    def _step(self, inputs: tuple[Any, ...], batch: Any, whole: bool, others: dict[str, Any]) -> Any:
        if self.stale:
            raise StaleBatchError("the devices have changed since this batch was loaded: the loader returns it again")
        if nn.parallel.DistributedDataParallel._active_ddp_module is not None:
            raise InputError(
                "DistributedDataParallel around a distributed model, which sums gradients itself: remove that wrapper"
            )
        self.weights.check_loaded()
        if not isinstance(batch, int | None):  # the model's own argument of this name
            others, batch = {**others, "batch": batch}, None
        traced = self.traced[self.training]
        if traced.live is not None:
            return run_live(self.module, inputs, others, batch, self._lending(traced))
        call, tensors = self.traced[True].call.read(self.module, inputs, others)
        whole = whole or (self.takes_whole and batch is None and not self._announced)
        return self._run(traced, call, read_inputs(tensors, batch, whole, self._announced))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if "module" in self._modules and hasattr(self.module, name):
                raise AttributeError(
                    f"{error}: use {name!r} of the model that you gave to prepare() or distribute()"
                ) from None
            raise

    @contextmanager
    def _lending(self, traced: TracedModel) -> Iterator[bool]:
        """Bring the sharded parameters that are in no layer of a trace, and return whether there are any."""
        lent, kind = self._in_use.lent_whole(traced.graph), self.group.torch_device.type
        autocast = nullcontext() if self.precision is None else torch.autocast(kind, self.precision)
        self.calls.working += bool(lent)
        try:
            with self.weights.borrowing(lent), autocast:
                yield bool(lent)
        finally:
            self.calls.working -= bool(lent)

    def _run(self, traced: TracedModel, call: CallForm, given: StepInputs) -> Any:
        """Run one step of the model, or of a split submodule. Return the outputs of the global batch."""
        signature = self._checks.signature(call, sample_shapes(given, call, traced, self.group, self._in_use.boxed))
        variant = self._variant(traced.path, signature)
        traced, program = variant.executor.traced, variant.program(given.batch, given.wanted, self._accumulation.kind())
        parts = local_inputs(given, program.steps, traced.graph, self.group)
        compares = self._comparisons.check_inputs(signature, program.steps, given)
        self._checks.check(variant.tables, self._in_use.whole)
        variant.state.check()
        outputs = self._compute(variant, given, program, parts, compares)
        whole = all(given.wholes)
        return fill(traced.result, returned_outputs(outputs, program.steps, traced.graph, self.group, whole=whole))

    def _compute(
        self, variant: Variant, given: StepInputs, program: Program, parts: list[Tensor], compares: bool
    ) -> Sequence[Tensor]:
        executor, kind, trained = variant.executor, self.group.torch_device.type, variant.trained
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        precision = self.precision or autocast
        lent = variant.in_use.borrowed
        borrowing: AbstractContextManager[None] = self.weights.borrowing(lent) if lent else nullcontext()
        # The executor applies autocast, layer by layer, in backward too.
        with torch.autocast(kind, enabled=False), borrowing, program.random.same_after(self.group):
            if torch.is_grad_enabled() and (trained or any(x.requires_grad for x in given.tensors)):
                compared = program.steps.outputs if compares else ()
                begin = partial(self._begin_backward, self.reshards, variant, compared)
                call = StepCall(executor, program, precision, parts, trained, self._accumulation, begin)
                return call.outputs(given.tensors)
            # The caller's tensors must not be marked or changed.
            callers = {x.untyped_storage().data_ptr() for x in given.tensors}
            made = executor.forward(program, parts, keep=False, precision=precision)[0]
            return [y.clone() if y.untyped_storage().data_ptr() in callers else y for y in made]

    def _begin_backward(
        self, reshards: int, variant: Variant, compared: Sequence[Value], gradients: Sequence[Tensor | None]
    ) -> None:
        """Check that backward can run. `reshards`: the value of `self.reshards` in its forward."""
        if reshards != self.reshards:
            raise InputError(
                "the shares changed between a forward pass and its backward: call reshard() after backward()"
            )
        if lent := variant.in_use.borrowed.keys() & variant.trained.keys():
            raise InputError(
                f"backward in evaluation mode: parameter {min(lent)!r} is used there on devices that do not keep it, so it "
                "would not train as on one device: call model.train() before forward"
            )
        if frozen := [key for key, p in variant.trained.items() if not p.requires_grad]:
            raise InputError(
                f"parameter {frozen[0]!r} was frozen between a forward pass and its backward: set requires_grad before forward"
            )
        shards.check_weights(variant.trained.values())  # in backward: an averaged model may change by hand
        if compared:
            self._comparisons.check_gradients(compared, gradients)

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients local inside the block; the next micro-batch outside sums those of all micro-batches.

        As with DistributedDataParallel, run forward and backward of a micro-batch inside, and those of a step's last
        micro-batch outside. Until then `.grad` is the sum of this device's gradients. Hooks on parameters run in the last
        micro-batch only, with the gradient of all.
        """
        return self._accumulation.unsummed()

    # --- plan, programs and executors --------------------------------------------------------------------------------

    def follow(self, plan: Plan) -> None:
        """Use the steps and layouts of this plan. `reshard` moves the shards."""
        self._set_plan(plan)
        self.weights.in_use = self._in_use
        self._gathered.clear()
        self._variants.clear()

    def enter(self, plan: Plan) -> None:
        """Switch to a plan for the devices after a regroup, and discard an interrupted step and its weights."""
        plan.check(self.traced[True].graph, self.group.devices)
        self._set_plan(plan)
        self.weights.in_use = self._in_use
        self._traces.clear()  # a joining device has none
        self._make_ready()
        for parameter in self.parameters():
            setattr(parameter, shards.UNSUMMED, False)

    def _set_plan(self, plan: Plan) -> None:
        trained, evaluated = self.traced[True].graph, self.traced[False].graph
        self._in_use = plan_in_use(plan, trained, evaluated, self.parameters_by_key, self.group.devices)
        self.plan, self.layouts = plan, self._in_use.layouts
        self.reshards += 1

    def _bind(self) -> None:
        self._make_ready()
        parts = [*filter(None, self.traced[True].parts)]
        for path in self._in_place:  # only the model's own forward may use that an input changes
            own = self.traced[True].live is not None and not is_inside(path, parts)
            self.module.get_submodule(path).inplace = own  # type: ignore[assignment]
        for path in parts:
            module: Any = self.module.get_submodule(path)
            module.forward = SplitForward(module, path, self._run, lambda: self.traced[self.training])
        OutsideGradients(self.group, self.module, self.traced, lambda: self._accumulation.sums)
        self._checks = model_checks.ModelChecks(self.module)
        self._first_traces = {
            (part.path, part.call, _shapes(part), tuple(traced.modes.values())): (
                part,
                StateWatch(self.module, part.seen, part.path),
            )
            for traced in (self.traced[False], self.traced[True])  # a model without modes has one trace
            for part in traced.parts.values()
        }
        self._traces: dict[Any, tuple[TracedModel, StateWatch]] = {}  # by path, call, shapes and modes, in order of use
        self.mark_shards()

    def first_variant(self) -> Variant:
        """Return the variant for inputs like the example, with all modules in the current mode."""
        traced = self.traced[self.training]
        return self._variant("", (traced.call, _shapes(traced), tuple(traced.modes.values()), self._checks.trained))

    def _variant(self, path: str, signature: model_checks.Signature) -> Variant:
        """Return the variant of a signature. All devices need the same ones in the same order, so they make it together."""
        variant = self._variants.pop((path, signature), None) or self._made(path, signature)
        self._variants[path, signature] = variant  # in order of use
        if len(self._variants) > MOST_VARIANTS:
            del self._variants[next(iter(self._variants))]
        return variant

    def _made(self, path: str, signature: model_checks.Signature) -> Variant:
        call, shapes, _, required = signature
        key = path, *signature[:3]
        if (found := self._first_traces.get(key) or self._traces.get(key)) is None:
            start_s = time.perf_counter()
            traced = self._traced_like(path, call, shapes)
            agree_on(self.group, "new trace", f"{signature} {traced.graph.fingerprint}", model_checks.DIFFERS)
            found = self._traces[key] = traced, StateWatch(self.module, traced.seen, path)
            if len(self._traces) > MOST_VARIANTS:
                del self._traces[next(iter(self._traces))]
            if self.group.device == 0 and (took_s := time.perf_counter() - start_s) > 1:
                print(f"convoy: traced the model for inputs {shapes} in {took_s:.1f} s", file=sys.stderr, flush=True)
        inside = {p.key for layer in found[0].graph.layers.values() for p in layer.parameters.values()}
        rows = zip(self._checks.held.items(), required, strict=True)
        trained = {name: p for (name, p), needs in rows if needs and (not path or name in inside)}
        traced, state = with_trained(found[0], trained), found[1]
        executor = Executor(self.group, self.module, traced, self.clock, self._gathered)
        executor.expected_s, executor.graphs = self._expected_s, self.cuda_graphs
        in_use = self._in_use.to(traced, self.traced[True].graph)
        tables = model_checks.hook_tables(self.module, traced)
        return Variant(executor, in_use, tables, state, trained)

    def _traced_like(self, path: str, call: CallForm, shapes: tuple[Shape, ...]) -> TracedModel:
        """Trace the model as it is now, for another call, other shapes or modules in other modes. Every device calls it."""
        like, kind = self.traced[self.training].parts[path], self.group.torch_device.type
        tensors = [torch.zeros((self._samples, *s), dtype=t) for s, t in zip(shapes, call.dtypes, strict=True)]
        example = Arguments(*fill(call.arguments, tensors))
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(kind, enabled=False):
            for values in (False, True):  # weights are gathered only for layers that must be tried
                model = self.weights.whole_copy(self.calls, values=values)
                for each in self._in_place:
                    model.get_submodule(each).inplace = True  # type: ignore[assignment]
                for module in model.modules():
                    if isinstance(vars(module).get("forward"), SplitForward):
                        del module.forward
                try:
                    return trace(model, example, training=None, like=like)
                except InputError as error:
                    failed = error
        raise InputError(f"for inputs of {shapes} per sample, unlike those of the example: {failed}")

    def use_clock(self, clock: Clock) -> None:
        self.clock = clock
        self._make_ready()

    def _make_ready(self) -> None:
        """Drop all executors and programs, and reset the counters of micro-batches and steps."""
        shapes = {key: p.shape for key, p in self.parameters_by_key.items()}
        self._gathered = GatheredParameters(self.module, shapes, self.calls)
        if self.cuda_graphs is not None:
            self.cuda_graphs.captured = 0
        self._variants: dict[tuple[str, model_checks.Signature], Variant] = {}
        self._accumulation = Accumulation()
        self._comparisons = model_checks.Comparisons(self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Distributed":
        """Return a model with the same weights, plan and devices, such as a teacher. Every device must call it."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        of_torch = vars(nn.Module()).keys()
        vars(made).update({name: copy.copy(v) if name in of_torch else v for name, v in vars(self).items()})
        made._modules = {"module": copied(self.module, {id(self.calls): self.calls})}
        made.weights = Weights(self.group, made.module, self.parameters_by_key, self._in_use)
        made.weights.to_come = set(self.weights.to_come)
        made.cuda_graphs = copy.copy(self.cuda_graphs)
        made._bind()
        return made

    # --- parameters and buffers: local shards ------------------------------------------------------------------------

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the local shards of parameters under their names in the model."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Return the local shards of buffers under their names in the model."""
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise InputError: local shards are not the model, see `full_state_dict`."""
        raise InputError(
            "state_dict() would hold only local shards: call full_state_dict() on every device, "
            "which returns the whole model under its ordinary keys"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the local shards of whole weights, under their ordinary keys. Every device gives the same weights."""
        if assign:
            raise InputError("load_state_dict(assign=True): shards are copied: leave assign out")
        loaded = self.weights.load(state_dict, strict=strict)
        self.weights_changed()
        return loaded

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole model under its ordinary keys, on every device. Every device must call it."""
        return self.weights.full_state()

    def gather(self, key: str, shard: Tensor) -> Tensor:
        """Gather a tensor that is sharded like parameter `key` (its gradient, its momentum), on every device."""
        return self.weights.gather(key, shard)

    def mark_shards(self) -> None:
        """Mark sharded parameters, so that unsuitable optimizers and calls of their modules are refused."""
        for key, parameter in self.named_parameters():
            setattr(parameter, shards.SHARD, not self._in_use.whole[key])
        shards.accept_weights(self.parameters())
        self.calls.watch(self.module, [part.path for part in self.traced[True].live or ()])

    def check_copies(self) -> None:
        """Raise MismatchError if replicated parameters differ between devices. Every device must call it."""
        if self.group.devices > 1:
            model_checks.check_copies(
                self.group, {key: p for key, p in self.named_parameters() if self._in_use.whole[key]}
            )

    def weights_changed(self) -> None:
        """Accept the script's changes to sharded weights. Every device calls it.

        A change must treat each entry by itself, as `clamp_` does: any other change is wrong on local shards. Without this
        call the next backward raises InputError.
        """
        shards.accept_weights(self.parameters())

    def gradients_changed(self) -> None:
        """Accept the script's changes to `.grad` since backward. Every device calls it.

        A change must treat each entry by itself, as `clip_grad_value_` does: any other change is wrong on local shards.
        Without this call the optimizer's step raises InputError.
        """
        shards.accept_gradients(self.parameters())

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients; see `convoy.train.clip_grad_norm_`."""
        rows = list(self.module.named_parameters())
        parameters = [p for _, p in rows]
        shards.check_summed("clip_grad_norm_", parameters)
        shards.check_gradients("clip_grad_norm_", parameters)
        held = [(p.grad, self._in_use.counts(key, self.group.device)) for key, p in rows if p.grad is not None]
        norm = global_norm(self.group, held, norm_type)
        scale = max_norm / (norm + 1e-6)
        if not scale >= 1.0:  # also for NaN, which then shows in the gradients, as in torch
            for g, _ in held:
                g.mul_(scale)
            shards.accept_gradients(parameters)
        dtypes = [p.dtype for p in parameters] or [torch.float32]
        return torch.tensor(norm, dtype=reduce(torch.promote_types, dtypes), device=self.group.torch_device)

    # --- calls refused on shards -------------------------------------------------------------------------------------

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise InputError(
            "a distributed model cannot be pickled: it has local shards, and connections to other devices. Save "
            "full_state_dict(), which every device calls, or use convoy.Checkpointer"
        )

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise InputError("DataParallel around a distributed model, which uses all devices itself: remove DataParallel")

    def __setattr__(self, name: str, value: Any) -> None:
        # During __init__ a model's attribute may have the name of one of this class.
        if "_is_made" in self.__dict__ and name not in self.__dict__ and not hasattr(type(self), name):
            if hasattr(self.module, name):
                # The model's forward reads the attribute there; if tracing has read it, the next step is refused.
                setattr(self.module, name, value)
                return
            if isinstance(value, nn.Module | nn.Parameter):
                raise InputError(
                    f"{name!r} would be added to a distributed model, whose parameters() would not have it: add it to the "
                    "model before, or keep it outside of the distributed model, with its parameters in the optimizer"
                )
        super().__setattr__(name, value)

    # --- for loaders and controllers ---------------------------------------------------------------------------------

    def steps(self, batch: int) -> StepList:
        """Return the step list for a global batch of this size, in the current mode."""
        return self.first_variant().program(batch).steps

    @property
    def is_live(self) -> bool:
        """Whether the model's own forward runs in every step, with the global batch on every device."""
        return self.traced[self.training].live is not None

    def input_layouts(self, batch: int) -> tuple[Layout, ...]:
        if self.is_live:
            call = self.traced[self.training].call
            return (everywhere(self.group.devices),) * (1 if call is None else len(call.names))
        return tuple(value.layout for value in self.steps(batch).inputs)

    def input_part(self, batch: int) -> BatchPart:
        """Return this device's part of the only input. InputError: the model has several."""
        layouts = self.input_layouts(batch)
        if len(layouts) != 1:
            raise InputError(f"the model has {len(layouts)} inputs; the loader serves one: write a loader of your own")
        if self.is_live:
            return BatchPart(((0, batch),))
        return BatchPart.of(layouts[0], self.steps(batch).inputs[0].shape, self.group.device)

    def output_part(self, batch: int) -> BatchPart:
        """Return the part of the labels that this device needs: all of them, unless outputs stay where they are computed."""
        values = [v for v in self.steps(batch).outputs if not self.is_live and not isinstance(v.layout, Replicated)]
        if not values:
            return BatchPart(((0, batch),))
        return BatchPart.of(values[0].layout, values[0].shape, self.group.device)

    def announce(self, batch: int | None) -> None:
        """Set the size of the next global batch of the loader; None: no more batches."""
        self._announced[:] = [] if batch is None else [batch]

    def expect(self, seconds: Expected) -> None:
        self._expected_s = seconds
        self._variants.clear()


def _shapes(traced: TracedModel) -> tuple[Shape, ...]:
    return tuple(layer.shape for layer in traced.graph.inputs)


def not_distributed(who: str, model: object) -> InputError:
    return InputError(
        f"{who} was given a {type(model).__name__}, which is not distributed: give the model that convoy.prepare or "
        "convoy.distribute returned"
    )
