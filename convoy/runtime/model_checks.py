"""Check before each step that the model has not changed in an unsupported way, and that the devices agree.

Three kinds of hooks act as on one device: hooks on the distributed model; hooks registered on submodules before `distribute`,
which every device then calls with the global batch; and hooks on parameters that every device holds whole, because autograd
gets their summed gradients. Any other hook would see a shard or not run.

The devices also compare model, plan, batches, losses and copies of parameters: a difference would change the results.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.modules.module as modules_of_torch
from torch import Tensor, nn

from convoy._version import __version__
from convoy.comm.control_messages import agree_on, agree_on_modes, gather
from convoy.comm.group import Group
from convoy.errors import InputError, MismatchError
from convoy.layout.layout import Replicated, Shape, everywhere
from convoy.machine.accelerator import in_float64
from convoy.model.nested import CallForm
from convoy.model.operation import TracedModel
from convoy.model.tracing.copies import KINDS, ON_PARAMETERS, on_weights
from convoy.model.tracing.live import is_inside
from convoy.model.tracing.python_state import modes_of
from convoy.plan.plan import Plan
from convoy.plan.steps import MicroBatch, StepList, Value
from convoy.runtime.batches import StepInputs

_GLOBAL = tuple(getattr(modules_of_torch, f"_global{kind}") for kind in KINDS)

Signature = tuple[CallForm, tuple[Shape, ...], tuple[bool, ...], tuple[bool, ...]]
"""What a trace and its programs depend on: the form of the call; the shape of each input per sample; whether in training mode,
for each module that has modes; whether it requires a gradient, for each parameter."""

DIFFERS = (
    "has other sizes of inputs, modes of modules (train, eval) or requires_grad, another state of no_sync(), or is at another "
    "micro-batch of the step,"
)

HookTables = list[dict[int, Any]]
"""The hook tables of modules that may contain only torch's hooks on weights, and Convoy's."""


class ModelChecks:
    """The checks of one model before every step.

    Attributes:
        held, trained: the parameters, by key; for each, whether it required a gradient at first.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.held = dict(model.named_parameters())
        self.trained = tuple(p.requires_grad for p in self.held.values())
        self._with_modes = [model.get_submodule(path) for path in modes_of(model)]
        self._parameters = [
            (model.get_submodule(key.rpartition(".")[0])._parameters, key.rpartition(".")[2], key, p, p.dtype, p.device)
            for key, p in self.held.items()
        ]

    def signature(self, call: CallForm, shapes: tuple[Shape, ...]) -> Signature:
        """Return the present signature, for a call with inputs of these shapes per sample."""
        trained = [p.requires_grad for p in self.held.values()] if torch.is_grad_enabled() else self.trained
        return call, shapes, tuple([m.training for m in self._with_modes]), tuple(trained)

    def check(self, tables: HookTables, whole: Mapping[str, bool]) -> None:
        """Raise InputError if hooks or parameters have changed. `whole`: the parameters that every device holds whole."""
        for hooks in filter(None, tables):
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
        for holder, name, key, parameter, dtype, device in self._parameters:
            if holder.get(name) is not parameter or parameter.dtype is not dtype or parameter.device != device:
                raise InputError(
                    f"parameter {key!r} was replaced after distribute(), or is no longer {dtype} on {device}: change the model "
                    "before it is distributed. For other values use load_state_dict() or parameter.data, for another device "
                    "convoy.join(device) or CONVOY_DEVICE, for another dtype precision='bf16'"
                )
            if (parameter._backward_hooks or parameter._post_accumulate_grad_hooks) and not whole[key]:
                what = next(name for kind, name in ON_PARAMETERS.items() if getattr(parameter, kind))
                raise InputError(
                    f"parameter {key!r} has a {what}, and each device has only a shard of its gradient: "
                    "change .grad between backward() and step() instead (see gradients_changed()), or use a plan that copies "
                    "the parameter to every device"
                )


def hook_tables(model: nn.Module, traced: TracedModel) -> HookTables:
    """Return the tables whose hooks would not run, or would see a shard."""
    parts = [part.path for part in (traced.live if traced.live is not None else [traced])]

    def sees_shards(path: str) -> bool:
        """Return whether a module is inside or around a split submodule. All devices call the others."""
        return "" in (path, *parts) or any(is_inside(path, [part]) or is_inside(part, [path]) for part in parts)

    return [getattr(m, kind) for path, m in model.named_modules() if sees_shards(path) for kind in KINDS]


def _refuse_on_module(model: nn.Module, hooks: dict[int, Any]) -> NoReturn:
    path, kind = next((p, k) for p, m in model.named_modules() for k in KINDS if getattr(m, k) is hooks)
    what = f"module {path!r} has" if path else "the model that was distributed has"
    raise InputError(
        f"{what} a {KINDS[kind]}, which would see a part of the batch or not run: register it on the distributed model itself, "
        "or on a submodule before distribute() (then every device runs the model's own forward, with the global batch)"
    )


# --- comparisons between devices ----------------------------------------------------------------------------------------

TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-2
"""Allowed differences, relative to the sum of absolute values. CPUs and GPUs round differently, also in bfloat16."""

COPY_TOLERANCE = 5e-3  # relative to a parameter's largest entry

COMPARED_ENTRIES = 4  # of each parameter

BLOCK_ENTRIES = 1 << 16  # of a global batch, converted to float64 at once

INTERVAL = (
    1024  # largest number of steps between two comparisons, which are at steps 1, 2, 4, 8, ... and new signatures
)


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
        self.done: set[tuple[Signature, int, MicroBatch]] = set()  # (signature, batch size, micro-batch)

    def check_inputs(self, signature: Signature, steps: StepList, inputs: StepInputs) -> bool:
        """Return whether this step is compared. If so, compare the devices' micro-batches and global batches."""
        group, key = self._group, (signature, steps.batch, steps.micro_batch)
        if group.devices == 1:
            return False
        self.calls += 1
        due = self.calls & (self.calls - 1) == 0 or self.calls % INTERVAL == 0
        if not due and key in self.done:
            return False
        self.done.add(key)
        agree_on(group, "call of the model", f"{steps.micro_batch} {signature}", DIFFERS)
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
    rows_NF = x.reshape(x.shape[0] if x.dim() else 1, -1)
    count, columns = rows_NF.shape
    block, total, size = max(1, BLOCK_ENTRIES // count), 0.0, 0.0
    for start in range(0, columns, block):  # float64 copies of whole images would take more memory than the step
        part_NF = in_float64(rows_NF[:, start : start + block]).nan_to_num(0.0, 0.0, 0.0)
        weights_N = torch.arange(1, count + 1, dtype=torch.float64, device=part_NF.device)
        places_F = torch.arange(start, start + part_NF.shape[1], dtype=torch.float64, device=part_NF.device)
        total += float((part_NF @ (1 + places_F / columns)) @ weights_N)
        size += float(part_NF.abs().sum(1) @ weights_N)
    return total, size
