"""Compute batch norm with the statistics of a global batch on several devices, and group norm of images in parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from convoy.errors import InputError
from convoy.machine.accelerator import has_sync_batch_norm
from convoy.model.graph import Layer
from convoy.runtime.kernels import Gradients


class GlobalBatchNorm:
    """A batch norm layer with the statistics of the global batch.

    Devices exchange local means and variances, which are combined by sample counts (Chan, Golub, LeVeque 1979). Accelerators
    use torch's SyncBatchNorm kernels, which need fewer launches but refuse CPU tensors. The messages are the same.
    """

    def __init__(self, module: Any, layer: Layer) -> None:
        self.module = module
        self.channels, self._folded = layer.shape[layer.axis // 2], layer.axis == 2
        self.dtype: torch.dtype = getattr(torch, layer.dtype)
        # Cached between steps, because the sample counts rarely change.
        self._samples: Sequence[int] = ()
        self._parts = torch.empty(0)
        self._counts = torch.empty(0)

    def groups(self, shape: Sequence[int]) -> int:  # noqa: ARG002
        """Return how many means and variances there are for a batch of this shape."""
        return self.channels

    def local_statistics(self, x: Tensor) -> Tensor:
        """Return this device's row (mean_C, variance_C of its samples); zeros without samples."""
        if x.numel() == 0:
            return x.new_zeros(1, 2 * self.channels)
        # var_mean is three to eight times slower on a CPU. With momentum 0 this kernel updates no running statistics.
        unused = x.new_zeros(self.channels)
        row = torch.cat(torch.batch_norm_update_stats(self._rows(x).contiguous(), unused, unused, 0.0))[None]
        return row.to(self.dtype)  # for a bf16 model CUDA returns float32 and the CPU bf16: send one dtype

    def _rows(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1) if self._folded else x

    def no_row(self, groups: int, device: torch.device) -> Tensor:
        return torch.zeros(1, 2 * groups, dtype=self.dtype, device=device)

    def combine(self, rows: Tensor, samples: Sequence[int], per_sample: int) -> "Normalisation":
        """Return the statistics of the global batch from rows_M(2C) of M devices, weighted by their sample counts."""
        total = sum(samples) * per_sample
        if total < 2:
            raise InputError(
                "batch norm got a global batch with one value per channel: its variance is undefined; "
                "use a larger batch or drop the last one (drop_last)"
            )
        if self._fused(rows):
            return self._combine_fused(rows, samples, per_sample)
        if self._samples != samples or self._parts.dtype != rows.dtype:
            self._parts = torch.tensor(samples, dtype=rows.dtype, device=rows.device).div_(sum(samples))
            self._samples = samples
        parts = self._parts
        means, variances = rows.view(-1, 2, self.channels).unbind(1)
        mean = parts @ means
        offsets = means - mean
        variance = parts @ torch.addcmul(variances, offsets, offsets)
        self.update_running(mean, variance, total)
        return Normalisation(mean, variance, (variance + self.module.eps).rsqrt_(), total)

    def _fused(self, of: Tensor) -> bool:
        """Return whether SyncBatchNorm's kernels can run: they need parameters in the dtype of the statistics."""
        m = self.module
        same = all(t is None or t.dtype == of.dtype for t in (m.weight, m.bias, m.running_mean))
        whole = of.dtype in (torch.float32, torch.float64)
        return of.device.type != "cpu" and whole and same and has_sync_batch_norm(of.device)

    def _combine_fused(self, rows: Tensor, samples: Sequence[int], per_sample: int) -> "Normalisation":
        m, total = self.module, sum(samples) * per_sample
        if self._samples != samples or self._parts.dtype != rows.dtype:
            counts = [n * per_sample for n in samples]
            self._parts = torch.tensor([n for n in counts if n], dtype=rows.dtype, device=rows.device)
            self._counts = torch.tensor(counts, dtype=torch.int32, device=rows.device)
            self._samples = samples
        if 0 in samples:  # the kernel would divide by zero
            rows = rows[[i for i, n in enumerate(samples) if n]]
        means, variances = rows.view(-1, 2, self.channels).unbind(1)
        tracks = m.training and m.running_mean is not None
        momentum = 0.0
        if tracks:
            batches = m.num_batches_tracked.add_(1)
            momentum = m.momentum if m.momentum is not None else 1.0 / float(batches)
        mean, inverse = torch.batch_norm_gather_stats_with_counts(
            rows, means, (variances + m.eps).rsqrt_(), m.running_mean.data if tracks else None,
            m.running_var.data if tracks else None, momentum, m.eps, self._parts,
        )  # fmt: skip
        return Normalisation(mean, None, inverse, total, self._counts)

    def update_running(self, mean: Tensor, variance: Tensor, total: int) -> None:
        m = self.module
        if not m.training or (running_mean := m.running_mean) is None:
            return
        batches = m.num_batches_tracked.add_(1)
        momentum = m.momentum if m.momentum is not None else 1.0 / float(batches)
        # `.data` hides the update from autograd, as torch's own kernel does: another call of this module may have saved the
        # running statistics for its backward, which does not use them.
        running_mean.data.mul_(1 - momentum).add_(mean, alpha=momentum)
        m.running_var.data.mul_(1 - momentum).add_(variance, alpha=momentum * total / (total - 1))

    def normalise(self, x: Tensor, by: "Normalisation") -> Tensor:
        m, rows = self.module, self._rows(x)
        if by.variance is None:
            y = torch.batch_norm_elemt(rows.contiguous(), m.weight, m.bias, by.mean, by.inverse_deviation, m.eps)
        else:
            y = self._affine(rows, by, m.weight, m.bias)
        return y.view_as(x)

    def local_sums(self, x: Tensor | None, g: Tensor, by: "Normalisation") -> Tensor:
        """Return this device's row: sum(g)_C and sum(g * normalised x)_C. `x` is None without samples."""
        if x is None:
            return g.new_zeros(1, 2 * self.channels)
        # torch's backward kernel computes these two sums as the gradients of weight and bias, with any mean and deviation.
        # Without an input gradient it reads no weight, but on CUDA the results have the dtype and device of this argument.
        _, gw, gb = _BACKWARD(
            self._rows(g).contiguous(), self._rows(x).contiguous(), by.mean, None, None, by.mean, by.inverse_deviation, True,
            self.module.eps, [False, True, True],
        )  # fmt: skip
        return torch.cat([gb, gw])[None]

    def backward(self, x: Tensor, g: Tensor, by: "Normalisation", row: Tensor, rows: Tensor, wanted: bool) -> Gradients:
        """Return the gradients: the parameters' from this device's sums `row`, the input's from all devices' `rows`."""
        weight, bias, shape = self.module.weight, self.module.bias, x.shape
        x, g = self._rows(x), self._rows(g)
        gb, gw = row.view(2, self.channels).unbind(0)
        gx = None
        if wanted and by.counts is not None:
            sum_g, sum_gx = rows.sum(0).view(2, self.channels).unbind(0)
            gx = torch.batch_norm_backward_elemt(
                g.contiguous(), x.contiguous(), by.mean, by.inverse_deviation, weight, sum_g, sum_gx / by.inverse_deviation,
                by.counts,
            )  # fmt: skip
        elif wanted:
            # (g - mean g - x' mean(g x')) * scale with x' = (x - mean) / deviation: linear in g and in x.
            scale = by.inverse_deviation if weight is None else by.inverse_deviation * weight
            shift, slope = (rows.sum(0) / -by.count).view(2, self.channels).mul_(scale).unbind(0)
            gx = self._affine(x, by, slope, shift).addcmul_(g, scale.view(1, -1, *[1] * (x.dim() - 2)))
        own = (("weight", weight, gw), ("bias", bias, gb))
        found: dict[str, Tensor | None] = {n: g for n, each, g in own if each is not None and each.requires_grad}
        return [gx if gx is None else gx.view(shape)], found

    def _affine(self, x: Tensor, by: "Normalisation", slope_C: Tensor | None, shift_C: Tensor | None) -> Tensor:
        """Return (x - mean) / deviation * slope + shift per channel, by torch's evaluation kernel: it reads x once."""
        eps = self.module.eps
        assert by.variance is not None
        return torch.batch_norm(
            x, slope_C, shift_C, by.mean, by.variance, False, 0.0, eps, torch.backends.cudnn.enabled
        )


_BACKWARD = torch.ops.aten.native_batch_norm_backward


@dataclass(frozen=True, slots=True)
class Normalisation:
    """Statistics of the global batch: mean_C, variance_C, 1/deviation_C and the count of entries per channel.

    Attributes:
        variance: None for SyncBatchNorm's kernels, which use 1/deviation.
        counts: entries per device; None unless SyncBatchNorm's kernels need them.
    """

    mean: Tensor
    variance: Tensor | None
    inverse_deviation: Tensor
    count: int
    counts: Tensor | None = None


class GroupNormOfParts:
    """A group or instance norm of images whose parts are on several devices.

    The entries of a group, in one sample, are normalised like a channel of a batch norm without parameters. So `x` is viewed as
    one sample with N * G channels. The parameters are applied per channel C.
    """

    def __init__(self, module: Any, layer: Layer) -> None:
        self.module, self._groups = module, layer.normalised
        self._norm = GlobalBatchNorm(
            SimpleNamespace(weight=None, bias=None, running_mean=None, training=False, eps=module.eps), layer
        )

    def groups(self, shape: Sequence[int]) -> int:
        return shape[0] * self._groups

    def _viewed(self, x: Tensor) -> Tensor:
        self._norm.channels = len(x) * self._groups
        return x.reshape(1, self._norm.channels, -1)

    def _per_channel(self, weight_C: Tensor, x: Tensor) -> Tensor:
        return weight_C.view(1, -1, *[1] * (x.dim() - 2))

    def no_row(self, groups: int, device: torch.device) -> Tensor:
        return self._norm.no_row(groups, device)

    def local_statistics(self, x: Tensor) -> Tensor:
        return self._norm.local_statistics(self._viewed(x))

    def combine(self, rows: Tensor, counts: Sequence[int], unit: int) -> "Normalisation":
        self._norm.channels = rows.shape[1] // 2  # without a part of these images, `_viewed` was not called
        return self._norm.combine(rows, counts, unit)

    def normalise(self, x: Tensor, by: "Normalisation") -> Tensor:
        y = self._norm.normalise(self._viewed(x), by).view_as(x)
        if self.module.weight is not None:
            y = y * self._per_channel(self.module.weight, x)
        return y if self.module.bias is None else y + self._per_channel(self.module.bias, x)

    def _weighted(self, g: Tensor) -> Tensor:
        return self._viewed(g if self.module.weight is None else g * self._per_channel(self.module.weight, g))

    def local_sums(self, x: Tensor | None, g: Tensor, by: "Normalisation") -> Tensor:
        return self._norm.local_sums(None if x is None else self._viewed(x), self._weighted(g), by)

    def backward(self, x: Tensor, g: Tensor, by: "Normalisation", row: Tensor, rows: Tensor, wanted: bool) -> Gradients:
        (gx,), _ = self._norm.backward(self._viewed(x), self._weighted(g), by, row, rows, wanted)
        axes = [axis for axis in range(x.dim()) if axis != 1]
        normalised = self._norm.normalise(self._viewed(x), by).view_as(x)
        own = (("weight", self.module.weight, (g * normalised).sum(axes)), ("bias", self.module.bias, g.sum(axes)))
        found: dict[str, Tensor | None] = {
            name: value for name, each, value in own if each is not None and each.requires_grad
        }
        return [None if gx is None else gx.view_as(x)], found
