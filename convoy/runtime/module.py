"""Distributed: an nn.Module that holds this device's part of a model and trains it with the others."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.module import _IncompatibleKeys

from convoy._version import __version__
from convoy.comm.agreement import agree_on, gather
from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.model.graph import Parameter
from convoy.model.operation import Ref
from convoy.model.tracing import TracedModel, disable_in_place, trace
from convoy.plan.compile import compile_all
from convoy.plan.evaluation import misplaced, pin
from convoy.plan.lower import lower, parameter_layouts
from convoy.plan.plan import Plan
from convoy.plan.program_check import check_programs
from convoy.plan.steps import StepList
from convoy.runtime.clock import Clock
from convoy.runtime.elementwise import mark_pieces
from convoy.runtime.exchange import run_move
from convoy.runtime.executor import Executor, Expected, Program
from convoy.runtime.gradients import global_norm
from convoy.sharding.layout import Layout, OnOne, Partial, Replicated, Split, box, holders, local_shape
from convoy.sharding.redistribute import schedule

CHECKED_DEVICES = 16
"""Of larger fleets the programs are not checked against each other before the first step: that takes seconds."""


class Distributed(nn.Module):
    """This device's part of a model.

    It is called like the model: with this device's part of a batch, as the loader of `convoy.loader` gives it. It returns
    the outputs of the *whole* batch, on every device, so that the loss, its printing and its backward are those of one
    device. Its parameters, under their ordinary names, are this device's pieces; optimizers work on them as they are.

    Args:
        model: an ordinary module. It is copied; device 0's weights count.
        plan: who computes what.
        group: the devices.
        example: one batch of each input, for the shapes.
        slowdown: makes this device play one that is so many times slower.
        fuse: layers between two exchanges go to autograd as one graph (see `convoy.plan.fusion`); False: each by itself.

    Attributes:
        plan: the present one.
        reshares: how often the shares have changed.
        layouts: of each parameter and buffer, by its key in `state_dict`.
        precision: what layers compute in (see `compute_in`); None: the type that the model has, or the caller's autocast.

    Raises:
        PlanError: the plan is for another model or another number of devices.
        MismatchError: the devices were given different models or plans.
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
    ) -> None:
        super().__init__()
        trained = trace(model, example, training=True)
        traced = {True: trained, False: trace(model, example, training=False, like=trained)}
        _agree(group, traced[True], plan)
        plan.check(traced[True].graph, group.devices)
        self.group, self.traced = group, traced
        self.clock = Clock(group.torch_device, slowdown)
        self._unused = _unused(model, _parameters(traced))
        self.parameters_by_key = _parameters(traced) | self._unused
        self.reshares = -1
        self.follow(plan)
        self.module = disable_in_place(copy.deepcopy(model)).to(group.torch_device)
        self._keep_own_pieces()
        self._executors = {m: Executor(group, self.module, t, self.clock, fuse=fuse) for m, t in traced.items()}
        self.precision: torch.dtype | None = None
        self._autocast_outputs: dict[tuple[bool, torch.dtype], list[torch.dtype]] = {}
        self._announced: int | None = None
        self._mixing_stage = 0
        self._anchor = torch.zeros((), requires_grad=True, device=group.torch_device)
        self.training = model.training
        self.mark_pieces()

    def follow(self, plan: Plan) -> None:
        """From now on, steps and layouts are those of this plan. It moves nothing: see `reshare`, which does."""
        trained, evaluated = self.traced[True].graph, self.traced[False].graph
        self.plan = plan
        self._plans = {True: plan, False: pin(plan, trained, evaluated)}
        self._misplaced = misplaced(self._plans[False], plan, trained, evaluated)
        everyone = Replicated(tuple(range(self.group.devices)))
        self.layouts = _layouts(self._plans, self.traced) | dict.fromkeys(self._unused, everyone)
        self._programs: dict[tuple[bool, int], Program] = {}
        self.reshares += 1

    # --- calling -----------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Tensor, batch: int | None = None) -> Any:
        """Outputs of the whole batch, on every device.

        Args:
            inputs: this device's part of each input, in the layout of `input_layouts`; zero samples where it has none.
            batch: samples in the whole batch; needed only where the loader is not Convoy's.

        Raises:
            InputError: the parts do not fit the plan for this batch.
        """
        size = batch if batch is not None else self._announced
        if size is None:
            raise InputError("the size of the whole batch is not known: use convoy.loader, or call model(x, batch=64)")
        own = self._program(size)
        self._check_inputs(inputs, own.steps)
        executor = self._executors[self.training]
        self._check_frozen(executor)
        kind = self.group.torch_device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        precision = self.precision or autocast
        with torch.autocast(kind, enabled=False):  # the executor applies it, layer by layer, in backward too
            if torch.is_grad_enabled():
                outputs = _Step.apply(self._anchor, self, executor, own, precision, *inputs)  # type: ignore[no-untyped-call]
            else:
                outputs = executor.forward(own, inputs, keep=False, precision=precision)[0]
        if autocast is not None and self.precision is None:
            outputs = [y.to(t) for y, t in zip(outputs, self._as_autocast(own, autocast), strict=True)]
        result = executor.traced.result
        return fx.node.map_aggregate(result, lambda a: outputs[a.index] if isinstance(a, Ref) else a)

    def steps(self, batch: int) -> StepList:
        """The step list that runs for a global batch of this size, in the present mode."""
        return self._program(batch).steps

    def _program(self, batch: int) -> Program:
        mode = self.training
        if not mode and self._misplaced:
            raise InputError(
                f"in evaluation, layer {self._misplaced[0]!r} is built so differently from training that no device has its "
                "parameters: evaluate on one device, with the weights of full_state_dict()"
            )
        if (mode, batch) not in self._programs:
            executor = self._executors[mode]
            steps = lower(self._plans[mode], executor.traced.graph, batch)
            if not self._programs and self.group.devices <= CHECKED_DEVICES:
                check_programs(compile_all(steps, executor.traced.graph))
            self._programs[mode, batch] = executor.program(steps)
        return self._programs[mode, batch]

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
        mark_pieces((parameter, not self.is_copied(key)) for key, parameter in self.named_parameters())

    def announce(self, batch: int) -> None:
        """The loader tells how many samples the batch has whose part it hands out next."""
        self._announced = batch

    def input_layouts(self, batch: int) -> tuple[Layout, ...]:
        """Where the samples of each input lie, for a global batch of this size."""
        return tuple(value.layout for value in self.steps(batch).inputs)

    def _check_inputs(self, inputs: Sequence[Tensor], steps: StepList) -> None:
        if len(inputs) != len(steps.inputs):
            raise InputError(f"the model takes {len(steps.inputs)} inputs, got {len(inputs)}")
        for x, value in zip(inputs, steps.inputs, strict=True):
            expected = local_shape(value.layout, self.group.device, value.shape)
            if tuple(x.shape) != expected:
                raise InputError(
                    f"device {self.group.device} got an input of shape {tuple(x.shape)}; its part of a batch of "
                    f"{steps.batch} is {expected}: use convoy.loader, or give the size of the whole batch: model(x, batch=n)"
                )
            if torch.is_grad_enabled() and x.requires_grad:
                raise InputError(
                    "an input requires a gradient; Convoy computes gradients of parameters only: use x.detach()"
                )

    # --- parameters --------------------------------------------------------------------------------------------------

    def _keep_own_pieces(self) -> None:
        """Shard device 0's weights: every device gets its pieces, and frees the rest."""
        for key, parameter in self.parameters_by_key.items():
            holder, _, name = key.rpartition(".")
            module = self.module.get_submodule(holder)
            old = getattr(module, name)
            layout = self.layouts[key]
            plan = schedule(OnOne(0), layout, parameter.shape)
            source = old.detach() if self.group.device == 0 else old.detach().new_empty(_none(parameter.shape))
            piece = run_move(self.group, plan, source, OnOne(0), layout, parameter.shape).clone()
            if parameter.buffer:
                module._buffers[name] = piece
            else:
                _replace(self.module, old, nn.Parameter(piece, requires_grad=old.requires_grad))

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
        tied, known = _canonical(self.module), self.module.state_dict()
        missing = [key for key in known if key not in state_dict]
        unexpected = [key for key in state_dict if key not in known]
        if strict and (missing or unexpected):
            hint = (
                "use the model's ordinary keys, without 'module.'"
                if all(k.startswith("module.") for k in unexpected) and unexpected
                else "give all of them, or strict=False"
            )
            raise InputError(f"load_state_dict: keys {missing} are missing, {unexpected} are not known: {hint}")
        for key in known:
            if key in state_dict and tied.get(key, key) in self.parameters_by_key:
                self._load(key, tied.get(key, key), state_dict[key])
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

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """This device's pieces of the buffers under the names they have in the model."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model under its ordinary keys, on every device. Every device must call it.

        With `inexact-butterfly-mixing` every device has weights of its own; these are their averages.
        """
        tied = _canonical(self.module)
        whole = {key: self.gather(key, self._held(key)) for key in self.parameters_by_key}
        own = self.module.state_dict()
        return {key: whole.get(tied.get(key, key), own[key]) for key in own}

    def gather(self, key: str, piece: Tensor) -> Tensor:
        """The whole of a tensor that lies like parameter `key` (its gradient, its momentum), on every device.

        Where the plan mixes inexactly the copies differ from device to device: this is their average.
        """
        layout, shape = self.layouts[key], self.parameters_by_key[key].shape
        everyone = Replicated(tuple(range(self.group.devices)))
        held = piece if box(layout, self.group.device, shape) is not None else piece.new_empty(_none(shape))
        if self.plan.mixes and isinstance(layout, Replicated) and held.is_floating_point():
            held, layout = held / len(layout.devices), Partial(layout.devices)
        return run_move(self.group, schedule(layout, everyone, shape), held, layout, everyone, shape).clone()

    def _held(self, key: str) -> Tensor:
        holder, _, name = key.rpartition(".")
        tensor = getattr(self.module.get_submodule(holder), name)
        assert isinstance(tensor, Tensor)
        return tensor.detach()

    def _check_frozen(self, executor: Executor) -> None:
        """What has a gradient, and whether a batch norm uses the batch or its running statistics: the steps depend on it."""
        for key, parameter in self.module.named_parameters():
            if parameter.requires_grad != self.parameters_by_key[key].trainable:
                raise InputError(
                    f"parameter {key!r} was {'thawed' if parameter.requires_grad else 'frozen'} after distribute(): set "
                    "requires_grad on the model before, and distribute it again"
                )
        for name, norm in executor.norms.items():
            if executor.traced.graph[name].statistics != (norm.module.training or norm.module.running_mean is None):
                raise InputError(
                    f"batch norm {name!r} was frozen or thawed after distribute(): set module.eval() or train() before, "
                    "and freeze it again after model.train(), as the original was"
                )


class _Step(torch.autograd.Function):
    """One training step as one node of the caller's autograd graph: backward runs the backward operations of the program."""

    @staticmethod
    def forward(
        ctx: Any,
        _anchor: Tensor,
        owner: Distributed,
        executor: Executor,
        program: Program,
        precision: torch.dtype | None,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        outputs, ctx.tape = executor.forward(program, inputs, keep=True, precision=precision)
        ctx.owner, ctx.executor, ctx.inputs, ctx.reshares = owner, executor, len(inputs), owner.reshares
        ctx.set_materialize_grads(False)
        # A view of an input or a tensor used twice must not leave a Function as it is.
        return tuple(y.view_as(y) for y in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        tape, owner = ctx.tape, ctx.owner
        if tape is None:
            raise InputError("backward ran twice through one step: call the model again, or add the losses first")
        ctx.tape = None
        if ctx.reshares != owner.reshares:
            raise InputError(
                "the shares changed between a forward pass and its backward: call reshare() after backward()"
            )
        with torch.autocast(owner.group.torch_device.type, enabled=False):
            ctx.executor.backward(tape, gradients, owner._mixing_stage)
        owner._mixing_stage += 1
        return tuple(None for _ in range(5 + ctx.inputs))


def _agree(group: Group, traced: TracedModel, plan: Plan) -> None:
    """Every device must have been given the same model and the same plan."""
    for what, text in (
        ("model", traced.graph.fingerprint),
        ("plan", plan.to_json()),
        ("version of Convoy", __version__),
    ):
        agree_on(group, f"distribute:{what}", text, f"started with another {what}")


def _layouts(plans: Mapping[bool, Plan], traced: Mapping[bool, TracedModel]) -> dict[str, Layout]:
    """Layout of every parameter; layers that exist only in evaluation add theirs."""
    evaluation = parameter_layouts(plans[False], traced[False].graph)
    return evaluation | parameter_layouts(plans[True], traced[True].graph)


def _parameters(traced: Mapping[bool, TracedModel]) -> dict[str, Parameter]:
    rows = [*traced[True].graph.layers.values(), *traced[False].graph.layers.values()]
    return {p.key: p for layer in rows for p in layer.parameters.values()}


def _unused(model: nn.Module, known: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Parameters that no layer reads: they have no gradient, but they belong to the model."""
    tied = _canonical(model)
    rows = [(k, p, False) for k, p in model.named_parameters()] + [(k, b, True) for k, b in model.named_buffers()]
    missing = [(k, t, b) for k, t, b in rows if tied[k] == k and k not in known]
    return {k: Parameter(k, tuple(t.shape), t.requires_grad and not b, b) for k, t, b in missing}


def _none(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *shape[1:])


def _replace(root: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put `new` wherever `old` stands: tied weights stay tied."""
    for module in root.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is old:
                module._parameters[name] = new


def _canonical(root: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    rows = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
    return {key: first.setdefault(id(tensor), key) for key, tensor in rows}
