"""Batch norm by the statistics of a batch that lies on several devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from convoy.errors import InputError
from convoy.model.graph import Layer
from convoy.runtime.kernels import Gradients, named


class GlobalBatchNorm:
    """Batch norm whose batch lies on several devices; the numbers are those of the whole batch.

    Each device's mean and variance over its own entries are combined by their counts (Chan, Golub, LeVeque 1979), so
    devices with few samples or none weigh accordingly. torch's SyncBatchNorm refuses CPU tensors.
    """

    def __init__(self, module: nn.Module, layer: Layer) -> None:
        self.module: Any = module
        self.channels = layer.shape[0]
        self.dtype: torch.dtype = getattr(torch, layer.dtype)

    def local_statistics(self, x: Tensor) -> Tensor:
        """One row: mean_C and squared deviation from it, summed, _C, of the entries here."""
        if x.shape[0] == 0:
            return x.new_zeros(1, 2 * self.channels)
        # torch's own kernel for the statistics of a batch; var_mean takes three to eight times as long on a CPU. What it would
        # note in running statistics goes nowhere, with momentum 0.
        nowhere = x.new_zeros(2, self.channels)
        mean, variance = torch.ops.aten.batch_norm_update_stats(x.contiguous(), nowhere[0], nowhere[1], 0.0)
        return torch.cat([mean, variance.mul_(x.numel() // self.channels)])[None]

    def combine(self, rows: Tensor, samples: Sequence[int], per_sample: int) -> "Normalisation":
        """rows_M(2C) of the M devices that take part, with the samples of each."""
        total = sum(samples) * per_sample
        if total < 2:
            raise InputError(
                "batch norm met a global batch with one value per channel: its variance is undefined; "
                "use a larger batch or drop the last one (drop_last)"
            )
        parts = torch.tensor(samples, dtype=rows.dtype, device=rows.device).div_(sum(samples))
        means, squares = rows[:, : self.channels], rows[:, self.channels :]
        mean = parts @ means
        squared = (parts @ (means - mean).square_()).mul_(total).add_(squares.sum(0))
        self._remember(mean, squared, total)
        return Normalisation(mean, (squared / total).add_(self.module.eps).rsqrt_(), total)

    def _remember(self, mean: Tensor, squared: Tensor, total: int) -> None:
        m = self.module
        if not m.training or m.running_mean is None:
            return
        m.num_batches_tracked.add_(1)
        momentum = m.momentum if m.momentum is not None else 1.0 / float(m.num_batches_tracked)
        # `.data`, because autograd must not notice, as with torch's own kernel: another call of this module may have kept
        # the running statistics for its backward, which does not use them.
        m.running_mean.data.mul_(1 - momentum).add_(mean, alpha=momentum)
        m.running_var.data.mul_(1 - momentum).add_(squared, alpha=momentum / (total - 1))

    def normalise(self, x: Tensor, by: "Normalisation") -> Tensor:
        m = self.module
        scale = by.inverse_deviation if m.weight is None else by.inverse_deviation * m.weight
        return affine(x, by.mean, scale, m.bias)

    def local_sums(self, x: Tensor | None, g: Tensor, by: "Normalisation") -> Tensor:
        """One row: sum of g_C and sum of (g * normalised x)_C over the entries here; x is None without samples."""
        if x is None:
            return g.new_zeros(1, 2 * self.channels)
        # torch's own kernel sums these two for the gradients of weight and bias, whatever mean and deviation it is told.
        _, gw, gb = torch.ops.aten.native_batch_norm_backward(
            g.contiguous(), x.contiguous(), None, None, None, by.mean, by.inverse_deviation, True, self.module.eps,
            [False, True, True],
        )  # fmt: skip
        return torch.cat([gb, gw])[None]

    def backward(self, x: Tensor, g: Tensor, by: "Normalisation", row: Tensor, rows: Tensor, wanted: bool) -> Gradients:
        """`row` holds the sums of this device (gradients of its copy of the parameters), `rows` those of all."""
        c = self.channels
        weight, bias = self.module.weight, self.module.bias
        gw = row[0, c:] if weight is not None and weight.requires_grad else None
        gb = row[0, :c] if bias is not None and bias.requires_grad else None
        gx = None
        if wanted:
            # (g - mean g - x' mean(g x')) * scale with x' = (x - mean) / deviation: a multiple of g, and x on a line.
            scale = by.inverse_deviation if weight is None else by.inverse_deviation * weight
            means = (rows.sum(0) / -by.count).view(2, c).mul_(scale)
            line = affine(x, by.mean, means[1] * by.inverse_deviation, means[0])
            gx = line.addcmul_(g, _along(scale, x))
        return [gx], named(weight=gw, bias=gb)


def affine(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    """(x - mean) * scale + shift, per channel, in one pass over x.

    torch's kernel of batch norm in evaluation does it, told a variance of 1 and the deviation in the weight.
    """
    ones = torch.ones_like(mean)
    return torch.batch_norm(x, scale, shift, mean, ones, False, 0.0, 0.0, torch.backends.cudnn.enabled)


@dataclass(frozen=True, slots=True)
class Normalisation:
    """mean_C, 1/deviation_C and the count of entries per channel, of the global batch."""

    mean: Tensor
    inverse_deviation: Tensor
    count: int


def _along(v_C: Tensor, x: Tensor) -> Tensor:
    return v_C.view(1, -1, *[1] * (x.dim() - 2))
