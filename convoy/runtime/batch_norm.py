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

    def local_statistics(self, x: Tensor) -> Tensor:
        """One row: mean_C and squared deviation from it, summed, _C, of the entries here."""
        if x.shape[0] == 0:
            return x.new_zeros(1, 2 * self.channels)
        variance, mean = torch.var_mean(x, _but_channel(x), correction=0)
        return torch.cat([mean, variance * (x.numel() // self.channels)])[None]

    def combine(self, rows: Tensor, samples: Sequence[int], per_sample: int) -> "Normalisation":
        """rows_M(2C) of the M devices that take part, with the samples of each."""
        counts = torch.tensor([n * per_sample for n in samples], dtype=rows.dtype, device=rows.device)[:, None]
        total = sum(samples) * per_sample
        if total < 2:
            raise InputError(
                "batch norm met a global batch with one value per channel: its variance is undefined; "
                "use a larger batch or drop the last one (drop_last)"
            )
        means, squares = rows[:, : self.channels], rows[:, self.channels :]
        mean = (means * counts).sum(0) / total
        squared = squares.sum(0) + (counts * (means - mean) ** 2).sum(0)
        variance = squared / total
        self._remember(mean, squared / (total - 1))
        return Normalisation(mean, torch.rsqrt(variance + self.module.eps), total)

    def _remember(self, mean: Tensor, unbiased: Tensor) -> None:
        m = self.module
        if not m.training or m.running_mean is None:
            return
        m.num_batches_tracked.add_(1)
        momentum = m.momentum if m.momentum is not None else 1.0 / float(m.num_batches_tracked)
        # `.data`, because autograd must not notice, as with torch's own kernel: another call of this module may have kept
        # the running statistics for its backward, which does not use them.
        m.running_mean.data.mul_(1 - momentum).add_(mean, alpha=momentum)
        m.running_var.data.mul_(1 - momentum).add_(unbiased, alpha=momentum)

    def normalise(self, x: Tensor, by: "Normalisation") -> Tensor:
        scale = by.inverse_deviation if self.module.weight is None else by.inverse_deviation * self.module.weight
        shift = -by.mean * scale if self.module.bias is None else self.module.bias - by.mean * scale
        return x * _along(scale, x) + _along(shift, x)

    def local_sums(self, x: Tensor | None, g: Tensor, by: "Normalisation") -> Tensor:
        """One row: sum of g_C and sum of (g * normalised x)_C over the entries here; x is None without samples."""
        if x is None:
            return g.new_zeros(1, 2 * self.channels)
        g_sum = g.sum(_but_channel(x))
        gx_sum = (g * (x - _along(by.mean, x))).sum(_but_channel(x))
        return torch.cat([g_sum, gx_sum * by.inverse_deviation])[None]

    def backward(self, x: Tensor, g: Tensor, by: "Normalisation", row: Tensor, rows: Tensor, wanted: bool) -> Gradients:
        """`row` holds the sums of this device (gradients of its copy of the parameters), `rows` those of all."""
        c = self.channels
        m = self.module
        gw = row[0, c:] if m.weight is not None and m.weight.requires_grad else None
        gb = row[0, :c] if m.bias is not None and m.bias.requires_grad else None
        gx = None
        if wanted:
            mean_g, mean_gx = rows[:, :c].sum(0) / by.count, rows[:, c:].sum(0) / by.count
            scale = by.inverse_deviation if m.weight is None else by.inverse_deviation * m.weight
            slope = scale * mean_gx * by.inverse_deviation
            gx = (g - _along(mean_g, x)) * _along(scale, x) - (x - _along(by.mean, x)) * _along(slope, x)
        return [gx], named(weight=gw, bias=gb)


@dataclass(frozen=True, slots=True)
class Normalisation:
    """mean_C, 1/deviation_C and the count of entries per channel, of the global batch."""

    mean: Tensor
    inverse_deviation: Tensor
    count: int


def _but_channel(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def _along(v_C: Tensor, x: Tensor) -> Tensor:
    return v_C.view(1, -1, *[1] * (x.dim() - 2))
