"""The `torch.sim` module that torch expects: the Python side of the simulated accelerator."""

from types import SimpleNamespace

import torch
from torch import Tensor

current_device = torch.accelerator.current_device_index
device_count = torch._C._accelerator_hooks_device_count


def is_available() -> bool:
    return device_count() > 0


def get_device_name(device: object = None) -> str:  # noqa: ARG001
    return "simulated accelerator"


def get_device_properties(device: torch.device) -> SimpleNamespace:
    return SimpleNamespace(uuid=f"simulated-{torch.device(device).index or 0}")


def set_per_process_memory_fraction(fraction: float, device: torch.device) -> None:
    """Set the fraction as CUDA does, but for every device alike."""
    global _whole_bytes
    _whole_bytes = _whole_bytes or torch.accelerator.get_memory_info(device)[1]
    torch.ops.sim.set_up(device_count(), int(fraction * _whole_bytes))


_whole_bytes = 0


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def _is_in_bad_fork() -> bool:
    return False


# Random numbers are drawn from the CPU's generator. Seeds and states are recorded, to test who changes them.

seeds: list[int] = []
"""The seeds that `torch.manual_seed` gave to all accelerators, as it does to CUDA's."""

kept: list[str] = []
"""The devices whose random state was read, to be restored later."""


def manual_seed_all(seed: int) -> None:
    seeds.append(seed)


def get_rng_state(device: object = None) -> Tensor:
    index = device if isinstance(device, int) else torch.device(str(device or "sim")).index
    kept.append(f"sim:{index or 0}")
    return torch.get_rng_state()


def set_rng_state(state: Tensor, device: object = None) -> None:  # noqa: ARG001
    torch.set_rng_state(state)
