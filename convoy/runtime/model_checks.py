"""Check before each step that the model has not changed in an unsupported way, and that the devices agree.

Three kinds of hooks act as on one device: hooks on the distributed model, whose outputs are those of the global batch;
forward hooks registered on modules before `distribute`, which every device then computes for the global batch; and hooks on
parameters that every device holds whole, because autograd gets their summed gradients. Any other hook would see a shard or
not run.

The devices also compare model, plan, global batches, losses and copies of parameters: a difference would silently change the
results. They compare batches and losses at steps 1, 2, 4, 8, ... and at the first batch of each size, up to rounding.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.modules.module as modules_of_torch
from torch import Tensor, nn

from convoy._version import __version__
from convoy.comm.control_messages import agree_on, agree_on_modes, gather
from convoy.comm.group import Group
from convoy.errors import InputError, MismatchError
from convoy.layout.layout import Replicated, everywhere
from convoy.machine.accelerator import in_float64
from convoy.model.tracing import TracedModel
from convoy.model.tracing.copies import KINDS, ON_PARAMETERS, on_weights
from convoy.model.tracing.live import is_inside
from convoy.plan.plan import Plan
from convoy.plan.steps import MicroBatch, StepList, Value
from convoy.runtime.batches import StepInputs
from convoy.runtime.shards import CallGuard

_GLOBAL = tuple(getattr(modules_of_torch, f"_global{kind}") for kind in KINDS)


class ModelChecks:
    """The checks of one model before every step.

    Attributes:
        trained: parameters that require a gradient, by key, without those `outside` of the plan.
    """

    def __init__(
        self, model: nn.Module, traced: Mapping[bool, TracedModel], devices: int, outside: Container[str] = ()
    ) -> None:
        self._model = model
        held = {key: p for key, p in model.named_parameters() if key not in outside}
        self._dtypes = {key: p.dtype for key, p in held.items()}
        self.trained = {key: p for key, p in held.items() if p.requires_grad}
        self._parameters = [
            (model.get_submodule(key.rpartition(".")[0])._parameters, key.rpartition(".")[2], key, p)
            for key, p in held.items()
        ]
        self.use_devices(traced, devices)

    def use_devices(self, traced: Mapping[bool, TracedModel], devices: int) -> None:
        self._tables = {mode: _hook_tables(self._model, trace, devices) for mode, trace in traced.items()}

    def check(self, training: bool, whole: Mapping[str, bool]) -> None:
        """Raise InputError if hooks or parameters have changed. `whole`: the parameters that every device holds whole."""
        never, of_torch = self._tables[training]
        for hooks in filter(None, never):
            if not all(isinstance(hook, CallGuard) for hook in list(hooks.values())):
                _refuse_on_module(self._model, hooks)
        for hooks in filter(None, of_torch):
            if not all(map(on_weights, list(hooks.values()))):
                _refuse_on_module(self._model, hooks)
        for kind, hooks in zip(KINDS.values(), _GLOBAL, strict=True):
            # torch's own module tracker, which counts FLOP, changes nothing.
            owners = [type(getattr(hook, "__self__", None)) for hook in list(hooks.values())]
            if not all(owner.__module__.startswith("torch.") for owner in owners):
                raise InputError(
                    f"a {kind} was registered for all modules: a distributed model does not call its modules one by one; "
                    "register it on the distributed model, or on single modules before distribute()"
                )
        for holder, name, key, parameter in self._parameters:
            if holder.get(name) is not parameter:
                raise InputError(
                    f"parameter {key!r} was replaced after distribute(): change its values, by load_state_dict() or "
                    "parameter.data, or change the model before and distribute it again"
                )
            if parameter.dtype is not self._dtypes[key]:
                raise InputError(
                    f"parameter {key!r} became {parameter.dtype} after distribute(), and was {self._dtypes[key]}: change the "
                    "model before, or give prepare a precision"
                )
            if parameter.requires_grad != (key in self.trained):
                raise InputError(
                    f"parameter {key!r} was {'thawed' if parameter.requires_grad else 'frozen'} after distribute(): set "
                    "requires_grad on the model before, and distribute it again"
                )
            if (parameter._backward_hooks or parameter._post_accumulate_grad_hooks) and not whole[key]:
                what = next(name for kind, name in ON_PARAMETERS.items() if getattr(parameter, kind))
                raise InputError(
                    f"parameter {key!r} has a {what}, and each device has only a shard of its gradient: "
                    "change .grad between backward() and step() instead (see gradients_changed()), or use a plan that copies "
                    "the parameter to every device"
                )


def carry_over(new: nn.Parameter, old: Tensor) -> None:
    """Give `new` the hooks of `old`. Both share the hook tables, so removing a hook works for both."""
    for kind in ON_PARAMETERS:
        if hooks := getattr(old, kind, None):
            setattr(new, kind, hooks)


_Tables = list[dict[int, Any]]


def _hook_tables(model: nn.Module, traced: TracedModel, devices: int) -> tuple[_Tables, _Tables]:
    """Return the hook tables of modules that must be empty, and those that may contain torch's own hooks on weights.

    Any other hook in them would not run, or would see a shard.
    """
    called = [
        (path, layer.everywhere)
        for name, layer in traced.graph.layers.items()
        if layer.kind == "opaque"
        for path in traced.operations[name].modules
    ]
    never: _Tables = []
    of_torch: _Tables = []
    for path, module in model.named_modules():
        if traced.live is not None and not is_inside(path, [part.path for part in traced.live]):
            continue  # every device calls it with the global batch
        live = [everywhere for whole, everywhere in called if whole in ("", path) or path.startswith(f"{whole}.")]
        for kind in KINDS:
            if live and (devices == 1 or (any(live) and "forward" in kind)):
                continue  # the module is called as the user wrote it, with the global batch
            (of_torch if live else never).append(getattr(module, kind))
    return never, of_torch


def _refuse_on_module(model: nn.Module, hooks: dict[int, Any]) -> NoReturn:
    path, kind = next((p, k) for p, m in model.named_modules() for k in KINDS if getattr(m, k) is hooks)
    what = f"module {path!r} has" if path else "the model that was distributed has"
    if "backward" in kind or not path:
        remedy = "register it on the distributed model itself, or train on one device"
    else:
        remedy = (
            "register it before distribute(): then every device computes that module for the global batch (impossible for a "
            "module with dropout); or register it on the distributed model itself"
        )
    raise InputError(f"{what} a {KINDS[kind]}, which would see a part of the batch, or not run: {remedy}")


# --- comparisons between devices ----------------------------------------------------------------------------------------

TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-2
"""Allowed differences, relative to the sum of absolute values. CPUs and GPUs round differently, also in bfloat16."""

COPY_TOLERANCE = 5e-3  # relative to a parameter's largest entry

COMPARED_ENTRIES = 4  # of each parameter

INTERVAL = 1024  # largest number of steps between two comparisons


def check_same_start(group: Group, traced: TracedModel, plan: Plan) -> None:
    """Raise MismatchError if the devices have different models, plans or versions. Every device must call it."""
    texts = {"model": traced.graph.fingerprint, "plan": plan.to_json(), "version of Convoy": __version__}
    if traced.live is not None:  # unlike devices may round to another decision
        texts["type of device (this model's own forward runs on all)"] = group.torch_device.type
    for what, text in texts.items():
        agree_on(group, f"distribute:{what}", text, f"started with another {what}")
    agree_on_modes(group)


class Comparisons:
    def __init__(self, group: Group) -> None:
        self._group = group
        self.calls = 0
        self.done: set[tuple[bool, int, MicroBatch]] = set()  # (mode, batch size, micro-batch)

    def check_inputs(self, training: bool, steps: StepList, inputs: StepInputs) -> bool:
        """Return whether this step is compared. If so, compare the devices' micro-batches and global batches."""
        group, key = self._group, (training, steps.batch, steps.micro_batch)
        if group.devices == 1:
            return False
        self.calls += 1
        due = self.calls & (self.calls - 1) == 0 or self.calls % INTERVAL == 0
        if not due and key in self.done:
            return False
        self.done.add(key)
        differs = "has another state of no_sync(), or is at another micro-batch of the step,"
        agree_on(group, "call of the model", steps.micro_batch, differs)
        everyone = everywhere(group.devices)
        rows = zip(inputs.tensors, steps.inputs, inputs.wholes, strict=True)
        if replicated := [x for x, value, whole in rows if whole or value.layout == everyone]:
            check_batches(group, replicated)
        return True

    def check_gradients(self, outputs: Sequence[Value], gradients: Sequence[Tensor | None]) -> None:
        """Check that the devices have the same output gradients; for local outputs, only that all have one."""
        local = [not isinstance(value.layout, Replicated) for value in outputs]
        rows = zip(gradients, local, strict=True)
        _check_same(
            self._group, "gradients of the loss", [g[:0] if g is not None and part else g for g, part in rows],
            GRADIENT_TOLERANCE,
            "has another loss than device 0: every device gets the outputs of the global batch, and must compute the same "
            "loss, with the labels of the global batch (those of the loader), the same weights, and random numbers from a "
            "generator with one seed; do not divide by the number of devices",
        )  # fmt: skip


def check_batches(group: Group, batches: Sequence[Tensor]) -> None:
    """Raise MismatchError if the batches differ between devices by more than rounding. Every device must call it."""
    _check_same(
        group, "global batches", batches, TOLERANCE,
        "was given another global batch than device 0: give every device the same global batch; use the loader of "
        "convoy.prepare or convoy.loader, and draw random numbers from a generator with one seed",
    )  # fmt: skip


def check_copies(group: Group, copies: Mapping[str, Tensor]) -> None:
    """Raise MismatchError if replicated parameters differ between devices. Every device must call it."""
    rows = gather(group, "copies of parameters", {key: sample_of(p.detach()) for key, p in copies.items()})
    for device, row in enumerate(rows):
        for key, (size, *entries) in rows[0].items():
            most = COPY_TOLERANCE * max(size, row[key][0])
            if any(abs(a - b) > most for a, b in zip(entries, row[key][1:], strict=True)):
                one, other = group.ids[0], group.ids[device]
                raise MismatchError(
                    f"the copies of {key!r} on device {one} and device {other} are no longer the same: only one of them "
                    "changed its weights (another learning rate? a skipped step? code under `if rank == 0:`?); do the same "
                    "on every device"
                )


def sample_of(p: Tensor) -> list[float]:
    """Return a parameter's largest absolute value and a few of its entries. NaN and infinity count as zero."""
    if not p.numel():
        return [0.0]
    entries = p.reshape(-1)
    count = min(COMPARED_ENTRIES, p.numel())
    # Integer indices: float32 does not represent indices beyond 2^24 exactly.
    places = torch.arange(count, device=p.device) * (p.numel() - 1) // max(1, count - 1)
    extremes = torch.stack(torch.aminmax(entries))
    found = torch.cat([extremes.abs().amax()[None], entries[places]])
    return in_float64(found).nan_to_num(0.0, 0.0, 0.0).tolist()


def _check_same(group: Group, topic: str, tensors: Sequence[Tensor | None], tolerance: float, message: str) -> None:
    """Raise MismatchError with this message for the first device whose tensors differ from device 0's."""
    rows = gather(group, topic, [_weighted_sum(x.detach()) if x is not None else None for x in tensors])
    for device, row in enumerate(rows):
        for first, other in zip(rows[0], row, strict=True):
            none = first is None or other is None
            if not (first is other if none else abs(first[0] - other[0]) <= tolerance * first[1]):
                raise MismatchError(f"device {group.ids[device]} {message}")


def _weighted_sum(x: Tensor) -> tuple[float, float]:
    """Return the sum of all entries, weighted by row and column, and the sum of absolute values, weighted by row."""
    if not x.numel():
        return 0.0, 1.0
    rows_NF = in_float64(x.reshape(x.shape[0] if x.dim() else 1, -1)).nan_to_num(0.0, 0.0, 0.0)
    columns_F = torch.linspace(1, 2, rows_NF.shape[1], dtype=torch.float64, device=rows_NF.device)
    weights_N = torch.arange(1, len(rows_NF) + 1, dtype=torch.float64, device=rows_NF.device)
    return float((rows_NF @ columns_F) @ weights_N), float(rows_NF.abs().sum(1) @ weights_N)
