"""How fast a device computes: a fixed convolution, forward and backward; and what else runs on its machine."""

import time

import psutil  # type: ignore[import-untyped]
import torch
from torch.nn.functional import conv2d

from convoy.comm.environment import finish

COMPUTE_S = 0.3
CHANNELS, SIZE = 64, 32
CPU_BATCH, GPU_BATCH = 2, 256
"""Few enough samples for a tenth of a core; enough to fill a GPU."""


def samples_per_s(device: torch.device, seconds: float = COMPUTE_S, slowdown: float = 1.0) -> float:
    """Samples/s of a convolution of 64 to 64 channels, 3x3, on 32x32 (0.23 GFLOP a sample, forward and backward).

    All calls and all seconds count, so that the pauses of a processor quota do.

    Args:
        slowdown: how many times slower the device plays than it is.
    """
    batch = CPU_BATCH if device.type == "cpu" else GPU_BATCH
    x_NCHW = torch.randn(batch, CHANNELS, SIZE, SIZE, device=device, requires_grad=True)
    w_KCRS = torch.randn(CHANNELS, CHANNELS, 3, 3, device=device, requires_grad=True)

    def once() -> None:
        y_NKHW = conv2d(x_NCHW, w_KCRS, padding=1)
        torch.autograd.grad(y_NKHW, (x_NCHW, w_KCRS), torch.ones_like(y_NKHW))
        finish(device)

    once()  # chooses kernels
    start_s, calls = time.perf_counter(), 0
    while calls < 2 or time.perf_counter() - start_s < seconds:
        once()
        calls += 1
    return batch * calls / (time.perf_counter() - start_s) / slowdown


def busy_cores(seconds: float = 0.2) -> float:
    """How many cores of this machine other programs kept busy, in the mean, while this one slept some tenths of a second."""
    return float(psutil.cpu_percent(interval=seconds)) / 100 * (psutil.cpu_count() or 1)
