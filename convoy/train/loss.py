"""loss: computes the loss of a global batch that is split over the devices, exactly as on one device.

A mean over a batch is a sum over its samples divided by their count. Both are all-reduced: each device computes the sum and the
count of its own samples, and its gradient is divided by the global count. The count depends on the criterion: elements,
samples, labels that are not ignored, or their weights.
"""

import copy
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from convoy.comm.control_messages import agree_on, share_tensor
from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.machine.accelerator import in_float64
from convoy.runtime.batches import OutputPart

_ALIKE = (
    nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss,
    nn.SoftMarginLoss, nn.KLDivLoss, nn.HingeEmbeddingLoss, nn.MarginRankingLoss,
)  # fmt: skip
"""Criteria whose mean is over the elements of arguments with equal shapes."""

_OF_SAMPLES = (
    nn.GaussianNLLLoss, nn.MultiMarginLoss, nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss, nn.CosineEmbeddingLoss,
    nn.TripletMarginLoss, nn.TripletMarginWithDistanceLoss,
)  # fmt: skip
"""Criteria whose mean is over the entries of `reduction="none"`, one or more per sample."""

_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)
"""Criteria whose mean is over the labels that are not ignored, weighted by class."""

_KNOWN = (*_ALIKE, *_OF_SAMPLES, *_OF_CLASSES)

_OWN = (
    "a function that returns the loss of each sample, without their mean, and convoy.loss(function, reduction='mean')"
)


class Loss:
    """A criterion over the global batch, for outputs that every device has or that stay where they are computed.

    ::

        criterion = convoy.loss(nn.CrossEntropyLoss(ignore_index=255))
        criterion(model(x), y).backward()

    Every device gets the same value, that of training on one device. Labels and other tensors are those of the global batch, or
    of this device's samples, as the loader returns them.

    Args:
        criterion: one of torch's modules; or, with `reduction`, your own function that returns a tensor with the samples as its
            first axis; each entry must depend only on its own sample.
        reduction: "mean" (over all entries that the function returns) or "sum". torch's modules use their own.

    Raises:
        InputError: the criterion cannot be summed over devices; when called: the arguments are invalid.
        MismatchError: when called: the devices have different criteria.
    """

    def __init__(self, criterion: Callable[..., Any], reduction: str | None = None) -> None:
        self.criterion, self._is_of_torch = criterion, type(criterion) in _KNOWN
        self.reduction = _reduction(criterion, reduction)
        self._agreed: WeakSet[Group] = WeakSet()

    def __call__(self, *arguments: Any) -> Tensor:
        """Return the loss of the global batch, the same on every device. All devices call it if outputs are split."""
        parts = [a for a in arguments if isinstance(a, OutputPart)]
        if not parts:
            made: Tensor = self.criterion(*arguments)
            return made if self._is_of_torch else made.mean() if self.reduction == "mean" else made.sum()
        first = parts[0]
        if any((p.rows, p.batch) != (first.rows, first.batch) for p in parts):
            raise InputError(
                f"outputs of different samples in one loss: {first!r} and {parts[-1]!r}; call it for each of them"
            )
        self._agree(first)
        rows = [self._rows(a, first) for a in arguments]
        start, stop = first.rows
        if start < stop:
            total, count = self._of_part(rows, stop - start)
        else:  # no samples here, but autograd still has to reach the model
            total = torch.stack([self._rows(p, first).sum() for p in parts]).sum()
            count = torch.zeros_like(total)
        own = torch.stack([in_float64(total.detach()), in_float64(count)])
        # Devices without samples send nothing: a device that has all of them would wait for their zeros.
        table, pending = share_tensor(first.group, own if own.device == total.device else own.to(total), first.owners)
        pending.wait()
        sums = table.sum(0)
        count = sums[1] if self.reduction == "mean" else torch.ones_like(sums[1])
        value, scale = sums[0] / count, 1.0 / count
        return _Whole.apply(total, value.to(total), scale.to(total))  # type: ignore[no-any-return, no-untyped-call]

    def _agree(self, part: OutputPart) -> None:
        """Compare the devices' criteria at the first call: different class weights would silently give wrong gradients."""
        if part.group in self._agreed:
            return
        text = f"{_name(self.criterion)} {self.reduction}"
        if isinstance(self.criterion, nn.Module):
            text += str({k: v for k, v in vars(self.criterion).items() if isinstance(v, int | float | str)})
            text += str({key: in_float64(v).sum().item() for key, v in self.criterion.state_dict().items()})
        agree_on(part.group, "loss", text, "has another criterion")
        self._agreed.add(part.group)

    @staticmethod
    def _rows(argument: Any, part: OutputPart) -> Any:
        """Return this device's samples of a tensor argument. Return numbers unchanged."""
        if isinstance(argument, OutputPart):
            rows = argument.attached
        elif isinstance(argument, Tensor) and argument.dim():
            rows = part.rows_of(argument)
        else:
            return argument
        # A sum over many pixels would be too large for half precision.
        return rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows

    def _of_part(self, rows: list[Any], samples: int) -> tuple[Tensor, Tensor]:
        """Return the sum over this device's samples, and their count."""
        criterion = self.criterion
        if isinstance(criterion, _OF_CLASSES):
            return _reduced(criterion, "sum")(*rows), _count_of_classes(criterion, rows[0], rows[1])
        if isinstance(criterion, _ALIKE):
            _check_alike(criterion, rows)
        each = _reduced(criterion, "none")(*rows) if self._is_of_torch else criterion(*rows)
        if not isinstance(each, Tensor) or not each.dim() or len(each) != samples:
            found = f"shape {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
            raise InputError(f"{_name(criterion)} gives {found} for {samples} samples: give {_OWN}")
        by_samples = isinstance(criterion, nn.KLDivLoss) and criterion.reduction == "batchmean"
        return each.sum(), torch.tensor(float(samples if by_samples else each.numel()), device=each.device)


class _Whole(torch.autograd.Function):
    """The loss of the global batch as a function of this device's sum."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, value: Tensor, scale: Tensor) -> Tensor:  # noqa: ARG004
        ctx.scale = scale
        return value.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return g * ctx.scale, None, None


def _reduction(criterion: Callable[..., Any], wanted: str | None) -> str:
    """Return "mean" or "sum". InputError for anything else."""
    known = type(criterion) in _KNOWN
    if not known and wanted is None:
        raise InputError(
            f"convoy.loss does not know how parts of {_name(criterion)} add up: give a module of torch.nn, or {_OWN}"
        )
    if known and wanted is not None:
        raise InputError(
            f"reduction={wanted!r} with {_name(criterion)}, which has its own: leave it out, and set it there"
        )
    found = str(getattr(criterion, "reduction") if wanted is None else wanted).replace("batchmean", "mean")  # noqa: B009
    if found not in ("mean", "sum"):
        raise InputError(
            f"convoy.loss of a criterion with reduction {found!r}: it is one number; choose 'mean' or 'sum'"
        )
    return found


def _reduced(criterion: Any, reduction: str) -> nn.Module:
    made = copy.copy(criterion)
    made.reduction = reduction
    return made  # type: ignore[no-any-return]


def _count_of_classes(criterion: nn.CrossEntropyLoss | nn.NLLLoss, output: Tensor, target: Tensor) -> Tensor:
    """Return the count of labels that are not ignored, weighted by class; for class probabilities the count of positions."""
    if target.is_floating_point():
        return torch.tensor(output.numel() / max(1, output.shape[1]), device=output.device)
    counts = target != criterion.ignore_index
    if criterion.weight is None:
        return counts.sum()
    return (in_float64(criterion.weight)[torch.where(counts, target, 0)] * counts).sum()


def _check_alike(criterion: Callable[..., Any], rows: list[Any]) -> None:
    axes = {tuple(a.shape) for a in rows if isinstance(a, Tensor) and a.dim()}
    if len({len(shape) for shape in axes}) > 1:
        raise InputError(
            f"{_name(criterion)} was given tensors of {' and '.join(map(str, sorted(axes)))} for this device's samples, which "
            "torch would pair sample with sample: give them the same number of axes, such as y[:, None]"
        )
    for name in ("weight", "pos_weight"):
        given = getattr(criterion, name, None)
        if given is not None and given.dim() == rows[0].dim() and len(given) != 1:
            raise InputError(
                f"{_name(criterion)} has a {name} of shape {tuple(given.shape)}, which differs from sample "
                f"to sample: give {_OWN}"
            )


def _name(criterion: object) -> str:
    return getattr(criterion, "__name__", type(criterion).__name__)


loss = Loss
