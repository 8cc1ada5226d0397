"""loss: computes the loss of a global batch that is split over the devices, exactly as on one device.

A mean over a batch is a sum over its samples divided by their count. Both are all-reduced: each device computes the sum and the
count of its own samples, or of its tiles of images, and its gradient is divided by the global count. The count depends on the
criterion: elements, samples, labels that are not ignored, or their weights. Dice is a function of other sums.
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

_OF_PIXELS = (*_ALIKE, *_OF_CLASSES, nn.GaussianNLLLoss)
"""Criteria that depend on each pixel by itself."""

_OWN = (
    "a function that returns the loss of each sample, without their mean, and convoy.loss(function, reduction='mean')"
)


class DiceLoss(nn.Module):
    """1 minus the Dice coefficient of each class over all pixels of the batch, averaged over classes.

    Logits are `(N, C, H, W)`, or volumes, and targets class numbers `(N, H, W)`. One channel: targets are 0 or 1, also
    `(N, 1, H, W)`. `convoy.loss` takes any module with such methods: `sums`, which adds up over samples and pixels, and `of`.

    Args:
        smooth: added to numerator and denominator.
        ignore_index: target of pixels that do not count.
    """

    def __init__(self, smooth: float = 1.0, ignore_index: int = -100) -> None:
        super().__init__()
        self.smooth, self.ignore_index = smooth, ignore_index

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.of(self.sums(output, target))

    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the common part of prediction and target, and the sum of their sizes, for each class."""
        classes, axes = output.shape[1], [0, *range(2, output.dim())]
        target = target if target.dim() == output.dim() else target[:, None]
        if target.shape != (len(output), 1, *output.shape[2:]):
            raise InputError(
                f"DiceLoss of logits of {tuple(output.shape)} and targets of {tuple(target.shape)}: give a class number for "
                "each pixel, (N, H, W) or (N, 1, H, W)"
            )
        counts = target != self.ignore_index
        p = output.softmax(1) if classes > 1 else output.sigmoid()
        numbers = torch.arange(classes, device=output.device) + (classes == 1)
        t = (target == numbers.reshape(-1, *(1,) * (output.dim() - 2))).to(p.dtype)
        return torch.stack([(p * t * counts).sum(axes), ((p + t) * counts).sum(axes)])

    def of(self, sums: Tensor) -> Tensor:
        """Return the loss, from the sums over the global batch."""
        common, sizes = sums
        loss: Tensor = 1 - ((2 * common + self.smooth) / (sizes + self.smooth)).mean()
        return loss


class Loss:
    """A criterion over the global batch, for outputs that every device has or that stay where they are computed.

    ::

        criterion = convoy.loss(nn.CrossEntropyLoss(ignore_index=255))
        criterion(model(x), y).backward()

    Every device gets the same value, that of training on one device. Labels and other tensors are those of the global batch, or
    of this device's samples, as the loader returns them.

    Args:
        criterion: one of torch's modules; a `DiceLoss`, or a module with its methods; or, with `reduction`, your own function
            that returns a tensor with the samples as its first axis; each entry must depend only on its own sample. For tiles
            of images the last axes are those of the pixels, and each entry must depend only on its own pixel.
        reduction: "mean" (over all entries that the function returns) or "sum". torch's modules use their own.

    Raises:
        InputError: the criterion cannot be summed over devices; when called: the arguments are invalid.
        MismatchError: when called: the devices have different criteria.
    """

    def __init__(self, criterion: Callable[..., Any], reduction: str | None = None) -> None:
        self.criterion, self._is_of_torch = criterion, type(criterion) in _KNOWN
        self._of: Callable[[Tensor], Tensor] | None = getattr(criterion, "of", None) if _has_sums(criterion) else None
        self.reduction = _reduction(criterion, reduction)
        self._agreed: WeakSet[Group] = WeakSet()

    def __call__(self, *arguments: Any) -> Tensor:
        """Return the loss of the global batch, the same on every device. All devices call it if outputs are split."""
        parts = [a for a in arguments if isinstance(a, OutputPart)]
        if not parts:
            made: Tensor = self.criterion(*arguments)
            return made if self._is_of_torch or self._of else made.mean() if self.reduction == "mean" else made.sum()
        first = parts[0]
        if any((p.rows, p.pixels, p.batch) != (first.rows, first.pixels, first.batch) for p in parts):
            raise InputError(
                f"outputs of different samples or pixels in one loss: {first!r} and {parts[-1]!r}; call it for each of them"
            )
        self._agree(first)
        rows = [self._rows(a, first) for a in arguments]
        start, stop = first.rows
        if self._of is not None:
            total: Tensor = self.criterion.sums(*rows)  # type: ignore[attr-defined]
            own = in_float64(total.detach())
        else:
            if start < stop:
                total, count = self._of_part(rows, first)
            else:  # no samples here, but autograd still has to reach the model
                total = torch.stack([self._rows(p, first).sum() for p in parts]).sum()
                count = torch.zeros_like(total)
            own = torch.stack([in_float64(total.detach()), in_float64(count)])
        # Devices without samples send nothing: a device that has all of them would wait for their zeros.
        table, pending = share_tensor(first.group, own if own.device == total.device else own.to(total), first.owners)
        pending.wait()
        sums = table.sum(0)
        if self._of is not None:
            with torch.enable_grad():
                value = self._of(sums.requires_grad_())
                (scale,) = torch.autograd.grad(value, sums)
        else:
            count = sums[1] if self.reduction == "mean" else torch.ones_like(sums[1])
            value, scale = sums[0] / count, 1.0 / count
        return _Whole.apply(total, value.detach().to(total), scale.to(total))  # type: ignore[no-any-return, no-untyped-call]

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

    def _of_part(self, rows: list[Any], part: OutputPart) -> tuple[Tensor, Tensor]:
        """Return the sum over this device's samples, or its tile of them, and their count."""
        criterion, samples, pixels = self.criterion, part.rows[1] - part.rows[0], [b - a for a, b in part.pixels]
        if pixels and self._is_of_torch and type(criterion) not in _OF_PIXELS:
            raise InputError(
                f"{_name(criterion)} of outputs in tiles needs whole samples: use a plan with outputs 'everywhere'"
            )
        if isinstance(criterion, _OF_CLASSES):
            return _reduced(criterion, "sum")(*rows), _count_of_classes(criterion, rows[0], rows[1])
        if isinstance(criterion, _ALIKE):
            _check_alike(criterion, rows, len(pixels))
        each = _reduced(criterion, "none")(*rows) if self._is_of_torch else criterion(*rows)
        shape = tuple(each.shape) if isinstance(each, Tensor) else ()
        if shape[:1] != (samples,) or [*shape[len(shape) - len(pixels) :]] != pixels:
            found = f"shape {shape}" if isinstance(each, Tensor) else type(each).__name__
            wanted = f"{samples} samples" + (
                f" of {pixels} pixels, and each pixel needs a loss of its own" if pixels else ""
            )
            raise InputError(f"{_name(criterion)} gives {found} for {wanted}: give {_OWN}")
        by_samples = isinstance(criterion, nn.KLDivLoss) and criterion.reduction == "batchmean"
        # float32 does not represent large numbers of pixels.
        return each.sum(), in_float64(torch.ones((), device=each.device)) * (
            part.samples if by_samples else each.numel()
        )


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
    known = type(criterion) in _KNOWN or _has_sums(criterion)
    if not known and wanted is None:
        raise InputError(
            f"convoy.loss does not know how parts of {_name(criterion)} add up: give a module of torch.nn, or {_OWN}"
        )
    if known and wanted is not None:
        raise InputError(
            f"reduction={wanted!r} with {_name(criterion)}, which has its own: leave it out, and set it there"
        )
    own = getattr(criterion, "reduction", "sum")  # a criterion with sums has none
    found = str(own if wanted is None else wanted).replace("batchmean", "mean")
    if found not in ("mean", "sum"):
        raise InputError(
            f"convoy.loss of a criterion with reduction {found!r}: it is one number; choose 'mean' or 'sum'"
        )
    return found


def _has_sums(criterion: object) -> bool:
    return hasattr(criterion, "sums") and hasattr(criterion, "of")


def _reduced(criterion: Any, reduction: str) -> nn.Module:
    made = copy.copy(criterion)
    made.reduction = reduction
    return made  # type: ignore[no-any-return]


def _count_of_classes(criterion: nn.CrossEntropyLoss | nn.NLLLoss, output: Tensor, target: Tensor) -> Tensor:
    """Return the count of labels that are not ignored, weighted by class; for class probabilities the count of positions."""
    if target.is_floating_point():
        return torch.tensor(output.numel() // max(1, output.shape[1]), device=output.device)
    counts = target != criterion.ignore_index
    if criterion.weight is None:
        return counts.sum()
    return (in_float64(criterion.weight)[torch.where(counts, target, 0)] * counts).sum()


def _check_alike(criterion: Callable[..., Any], rows: list[Any], pixel_axes: int) -> None:
    axes = {tuple(a.shape) for a in rows if isinstance(a, Tensor) and a.dim()}
    if len({len(shape) for shape in axes}) > 1:
        raise InputError(
            f"{_name(criterion)} was given tensors of {' and '.join(map(str, sorted(axes)))} for this device's samples, which "
            "torch would pair sample with sample: give them the same number of axes, such as y[:, None]"
        )
    for name in ("weight", "pos_weight"):
        given = getattr(criterion, name, None)
        if given is None:
            continue
        per_pixel = given.shape[max(0, given.dim() - pixel_axes) :]
        if (given.dim() == rows[0].dim() and len(given) != 1) or any(size != 1 for size in per_pixel):
            raise InputError(
                f"{_name(criterion)} has a {name} of shape {tuple(given.shape)}, which differs from sample "
                f"to sample, or from pixel to pixel: give {_OWN}"
            )


def _name(criterion: object) -> str:
    return getattr(criterion, "__name__", type(criterion).__name__)


loss = Loss
