"""What must be the same on every device: batches that each has whole, gradients of the loss, copies of parameters.

Where it is not, a script treats the devices differently, and training would go on with other numbers than on one device. So
these are compared, up to rounding, at the steps 1, 2, 4, 8, ... and for every size of batch when it first comes.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from convoy.comm.collectives import agree_on, gather
from convoy.comm.group import Group
from convoy.errors import MismatchError
from convoy.layout.layout import Replicated, everywhere
from convoy.machine.accelerator import in_float64
from convoy.plan.steps import MicroBatch, StepList, Value
from convoy.runtime.inputs import Inputs

_TOLERANCE, _TOLERANCE_OF_GRADIENTS = 1e-4, 1e-2
"""Parts of the sum of absolute values. Devices of two kinds compute a loss with roundings of their own, in bfloat16 too."""

_ENTRIES = 4
"""Of each parameter that are compared."""

_TOLERANCE_OF_COPIES = 1e-2
"""Part of a parameter's root mean square."""

_EVERY = 1024
"""Steps between two comparisons, in the end."""


class Comparisons:
    """Says at which steps of a model what must be the same everywhere is compared, and compares it."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.calls = 0
        self.done: set[tuple[bool, int, MicroBatch]] = set()  # by mode, batch and kind of pass

    def check_inputs(self, training: bool, steps: StepList, inputs: Inputs) -> bool:
        """Whether this step compares: every device begins the same pass, and has the inputs that each has whole alike.

        Raises:
            MismatchError: it does not, or has not.
        """
        group, key = self._group, (training, steps.batch, steps.micro_batch)
        if group.devices == 1:
            return False
        self.calls += 1
        if not _is_due(self.calls) and key in self.done:
            return False
        self.done.add(key)
        differs = "is on another side of no_sync(), or at another micro-batch of the step,"
        agree_on(group, "call of the model", steps.micro_batch, differs)
        everyone = everywhere(group.devices)
        rows = zip(inputs.tensors, steps.inputs, inputs.wholes, strict=True)
        if alike := [x for x, value, whole in rows if whole or value.layout == everyone]:
            check_batches(group, alike)
        return True

    def check_gradients(self, outputs: Sequence[Value], gradients: Sequence[Tensor | None]) -> None:
        """Whether the loss has the same gradients by the outputs; of those that are here in part, whether there is one.

        Raises:
            MismatchError: it has not.
        """
        stays = [not isinstance(value.layout, Replicated) for value in outputs]
        rows = zip(gradients, stays, strict=True)
        check_gradients(self._group, [g[:0] if g is not None and part else g for g, part in rows])


def _is_due(count: int) -> bool:
    """Whether to compare at this step, counted from 1."""
    return count & (count - 1) == 0 or count % _EVERY == 0


def check_batches(group: Group, batches: Sequence[Tensor]) -> None:
    """Whether these are the same on every device, up to rounding. Every device must call it.

    Raises:
        MismatchError: they are not; each device has batches of its own.
    """
    _check_same(
        group, "whole batches", batches, _TOLERANCE,
        "was given another whole batch than device 0: a batch that every device gets whole must be the same everywhere; use "
        "the loader of convoy.prepare or convoy.loader, and draw random numbers from a generator with one seed",
    )  # fmt: skip


def check_gradients(group: Group, gradients: Sequence[Tensor | None]) -> None:
    """Whether the loss has the same gradients by the outputs on every device. Every device must call it.

    Raises:
        MismatchError: they are not; each device has a loss of its own.
    """
    _check_same(
        group, "gradients of the loss", gradients, _TOLERANCE_OF_GRADIENTS,
        "has another loss than device 0: every device gets the outputs of the whole batch, and has to compute the same loss of "
        "them, with the labels of the whole batch (those of the loader), the same weights, and random numbers from a generator "
        "with one seed; nothing is divided by the number of devices",
    )  # fmt: skip


def check_copies(group: Group, copies: Mapping[str, Tensor]) -> None:
    """Whether parameters that every device has whole are the same on all of them. Every device must call it.

    Raises:
        MismatchError: they are not; names the first.
    """
    rows = gather(group, "copies of parameters", {key: _some(p.detach()) for key, p in copies.items()})
    for device, row in enumerate(rows):
        for key, (size, *entries) in rows[0].items():
            most = _TOLERANCE_OF_COPIES * max(size, row[key][0])
            if any(abs(a - b) > most for a, b in zip(entries, row[key][1:], strict=True)):
                one, other = group.ids[0], group.ids[device]
                raise MismatchError(
                    f"the copies of {key!r} on device {one} and device {other} are no longer the same: something changes "
                    "weights on one of them only, such as an optimizer with another learning rate, a step that one leaves "
                    "out, or weights that are set under `if rank == 0:`; do the same on every device"
                )


def _check_same(group: Group, topic: str, tensors: Sequence[Tensor | None], tolerance: float, words: str) -> None:
    """Refuse, in these words, the first device that has something else than device 0."""
    rows = gather(group, topic, [_sums(x.detach()) if x is not None else None for x in tensors])
    for device, row in enumerate(rows):
        for first, other in zip(rows[0], row, strict=True):
            none = first is None or other is None
            if not (first is other if none else abs(first[0] - other[0]) <= tolerance * first[1]):
                raise MismatchError(f"device {group.ids[device]} {words}")


def _sums(x: Tensor) -> tuple[float, float]:
    """A sum over all entries in which the rows have different weights, and how large its summands are."""
    if not x.numel():
        return 0.0, 1.0
    rows_NF = in_float64(x.reshape(x.shape[0] if x.dim() else 1, -1)).nan_to_num(0.0, 0.0, 0.0)
    columns_F = torch.linspace(1, 2, rows_NF.shape[1], dtype=torch.float64, device=rows_NF.device)
    weights_N = torch.arange(1, len(rows_NF) + 1, dtype=torch.float64, device=rows_NF.device)
    return float((rows_NF @ columns_F) @ weights_N), float(rows_NF.abs().sum(1) @ weights_N)


def _some(p: Tensor) -> list[float]:
    """The root mean square of a parameter, and a few of its entries."""
    if not p.numel():
        return [0.0]
    entries = p.reshape(-1)
    # In whole numbers: a float32 knows no place beyond 2^24 exactly.
    count = min(_ENTRIES, p.numel())
    places = torch.arange(count, device=p.device) * (p.numel() - 1) // max(1, count - 1)
    return [_root_mean_square(entries), *in_float64(entries[places]).nan_to_num(0.0, 0.0, 0.0).tolist()]


def _root_mean_square(entries: Tensor) -> float:
    """In the numbers of the entries, where they can hold its square: a copy of all weights in float64 takes longer."""
    given = entries if entries.is_floating_point() else in_float64(entries)
    norm = float(torch.linalg.vector_norm(given, dtype=torch.promote_types(given.dtype, torch.float32)))
    if not 1e-15 < norm < 1e15:
        norm = float(torch.linalg.vector_norm(in_float64(entries)))
    return norm / math.sqrt(len(entries)) if math.isfinite(norm) else 0.0
