"""Check that all devices have the same model, plan, global batches, loss and copies of parameters.

A difference would silently change the results. So the devices compare batches and losses, up to rounding, at steps 1, 2, 4,
8, ... and at the first batch of each size.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from convoy._version import __version__
from convoy.comm.control_messages import agree_on, agree_on_modes, gather
from convoy.comm.group import Group
from convoy.errors import MismatchError
from convoy.layout.layout import Replicated, everywhere
from convoy.machine.accelerator import in_float64
from convoy.model.tracing import TracedModel
from convoy.plan.plan import Plan
from convoy.plan.steps import MicroBatch, StepList, Value
from convoy.runtime.batches import StepInputs

TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-2
"""Relative to the sum of absolute values. CPUs and GPUs round a loss differently, in bfloat16 too."""

COPY_TOLERANCE = 5e-3  # relative to a parameter's largest entry

COMPARED_ENTRIES = 4  # of each parameter

INTERVAL = 1024  # largest number of steps between two comparisons


def check_same_start(group: Group, traced: TracedModel, plan: Plan, *, compile: bool) -> None:
    """Raise MismatchError if the devices have different models, plans or options. Every device must call it."""
    for what, text in (
        ("model", traced.graph.fingerprint),
        ("plan", plan.to_json()),
        ("version of Convoy", __version__),
        ("value of compile", str(compile)),
    ):
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
        agree_on(
            group,
            "call of the model",
            steps.micro_batch,
            "is on another side of no_sync(), or at another micro-batch of the step,",
        )
        everyone = everywhere(group.devices)
        rows = zip(inputs.tensors, steps.inputs, inputs.wholes, strict=True)
        if replicated := [x for x, value, whole in rows if whole or value.layout == everyone]:
            check_batches(group, replicated)
        return True

    def check_gradients(self, outputs: Sequence[Value], gradients: Sequence[Tensor | None]) -> None:
        """Check that the output gradients are the same on every device; for local outputs, that all devices have one."""
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
                    "changed its weights, by an optimizer with another learning rate, say, a skipped step, or code under "
                    "`if rank == 0:`; do the same on every device"
                )


def sample_of(p: Tensor) -> list[float]:
    """Return a parameter's largest magnitude and a few of its entries. NaN and infinity count as zero."""
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
