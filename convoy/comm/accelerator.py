"""The processors that compute, through torch's accelerator interface: CUDA, ROCm, XPU, MPS or whatever torch knows.

The rest of Convoy asks here. It tells the CPU from an accelerator, and no accelerator from another.
"""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from torch import nn

from convoy.comm.memory_limit import left_by_groups
from convoy.errors import InputError, shortened, shown


def accelerator() -> str | None:
    """The kind of this machine's accelerators, such as "cuda"; None where it has none that torch can use."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and torch.accelerator.device_count() else None


def local_devices() -> tuple[str, ...]:
    """The names of all devices of this machine: its accelerators, and its CPU, last."""
    kind = accelerator()
    count = torch.accelerator.device_count() if kind else 0
    return (*(f"{kind}:{index}" for index in range(count)), "cpu")


def pick_device(name: str | torch.device | None, local: int) -> torch.device:
    """The device to compute on; process number ``local`` of its machine takes that accelerator unless told otherwise.

    Raises:
        InputError: no such device.
    """
    chosen = name or os.environ.get("CONVOY_DEVICE")
    if chosen is None:
        devices = local_devices()
        chosen = devices[min(local, len(devices) - 1)]
    device = check_device(str(chosen))
    try:
        enter(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, AttributeError) as error:  # the last: a torch for processors only
        raise _no_device(str(chosen), str(error)) from None
    return device


def check_device(name: str) -> torch.device:
    """The device of that name, without touching it: an accelerator costs seconds and memory from its first use on.

    Raises:
        InputError: this machine has no such device, or torch knows none of that name.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise _no_device(name, str(error)) from None
    if device.type == "cpu":
        return device
    if device.type != accelerator():
        raise _no_device(name, f"torch finds no {shortened(device.type)} here")
    if (device.index or 0) >= torch.accelerator.device_count():
        raise _no_device(name, "there is none of that number")
    return torch.device(device.type, device.index or 0)


def _no_device(name: str, reason: str) -> InputError:
    return InputError(
        f"device {shown(name)} cannot be used ({shortened(reason.partition(chr(10))[0])}): this machine has "
        f"{', '.join(local_devices())}; choose one of them"
    )


def enter(device: torch.device) -> None:
    """Make a device the current one of this thread, for calls that name no device. A CPU needs nothing."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)


def to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a module, in place; what was one tensor under several names stays one.

    On accelerators whose tensors cannot take the place of a CPU's, `nn.Module.to` makes a new parameter for each name.
    """
    names: dict[int, list[str]] = {}
    for tensors in (model.named_parameters, model.named_buffers):
        for name, tensor in tensors(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    model.to(device)
    for first, *others in names.values():
        for other in others:
            holder, _, leaf = other.rpartition(".")
            path, _, own = first.rpartition(".")
            setattr(model.get_submodule(holder), leaf, getattr(model.get_submodule(path), own))
    return model


MODES = (
    "get_default_dtype", "get_float32_matmul_precision", "are_deterministic_algorithms_enabled",
    "is_deterministic_algorithms_warn_only_enabled", "backends.fp32_precision", "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.conv.fp32_precision", "backends.cudnn.rnn.fp32_precision", "backends.cudnn.benchmark",
    "backends.cudnn.deterministic", "backends.mkldnn.matmul.fp32_precision", "backends.mkldnn.conv.fp32_precision",
)  # fmt: skip
"""What torch computes by, beside the numbers it is given: attributes of torch, and functions that tell."""


def modes() -> dict[str, str]:
    """How torch computes in this process, by the name of each setting; whatever device it has."""
    found: dict[str, str] = {}
    for name in MODES:
        try:
            value = attrgetter(name)(torch)
            found[f"torch.{name}"] = str(value() if callable(value) else value)
        except (
            AttributeError,
            RuntimeError,
        ):  # not in this torch; or set by old and new names that contradict each other
            found[f"torch.{name}"] = "unknown"
    return found


def set_modes(tf32: bool | None, deterministic: bool) -> None:
    """Choose how torch computes in this process; nothing else changes what it was.

    Args:
        tf32: whether products of matrices and convolutions may round float32 to TF32; None: as it is.
        deterministic: only algorithms that give the same bits every time; torch refuses what has none.
    """
    if tf32 is not None:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        cudnn: Any = torch.backends.cudnn
        for part in (cudnn.conv, cudnn.rnn):
            part.fp32_precision = "tf32" if tf32 else "ieee"
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch asks for on such GPUs
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def finish(device: torch.device) -> None:
    """Wait until a device has done all that it was given: accelerators queue. A CPU's work is done when a call returns."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the random states of the CPU and of this device afterwards."""
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        with torch.random.fork_rng(devices=[device.index or 0], device_type=device.type):
            yield


def hardware_name(device: torch.device) -> str:
    """What the accelerator, or the machine around the CPU, calls itself."""
    with suppress(AttributeError, RuntimeError):  # not every kind tells
        if device.type != "cpu":
            return str(torch.get_device_module(device).get_device_name(device))
    return platform.machine()


def uuid_of(device: torch.device) -> str | None:
    """By which an accelerator's driver knows it, such as "GPU-6c5c...": there it may have another number. None: not told."""
    with suppress(AttributeError, RuntimeError, NotImplementedError):
        found = str(torch.get_device_module(device).get_device_properties(device).uuid)
        return found if found.startswith(("GPU-", "MIG-")) else f"GPU-{found}"
    return None


def memory_of(device: torch.device) -> tuple[int, int]:
    """Free bytes and all bytes of the memory that a device computes in.

    An accelerator that does not tell its own, such as one that shares the host's memory, is told the host's, of which control
    groups may leave less (`memory_limit.py`). A limit (see `limit_memory`) counts as all of it.
    """
    free_bytes, total_bytes = _memory_of(device)
    limit = _limits_bytes.get(str(device), total_bytes)
    return min(free_bytes, limit), min(total_bytes, limit)


def _memory_of(device: torch.device) -> tuple[int, int]:
    if device.type != "cpu":
        with suppress(NotImplementedError, RuntimeError, AttributeError):
            free_bytes, total_bytes = torch.accelerator.get_memory_info(device)
            return int(free_bytes), int(total_bytes)
    memory = psutil.virtual_memory()
    free_bytes, total_bytes = int(memory.available), int(memory.total)
    left = left_by_groups()
    return (free_bytes, total_bytes) if left is None else (min(free_bytes, left[0]), min(total_bytes, left[1]))


def process_bytes(device: torch.device) -> int:
    """Resident memory of this process that no file backs, where its tensors lie on the CPU: what no other process shares.

    0 for an accelerator, whose memory is another one, and where the system does not tell (elsewhere than on Linux).
    """
    if device.type == "cpu":
        with suppress(OSError, ValueError, IndexError):
            rows = Path("/proc/self/status").read_text().splitlines()
            return next((int(row.split()[1]) << 10 for row in rows if row.startswith("RssAnon:")), 0)
    return 0


_limits_bytes: dict[str, int] = {}


def limit_memory(device: torch.device, most_bytes: float | None) -> None:
    """From now on, this process may fill so much of a device's memory; None: all of it.

    `memory_of` tells the limit, so that plans keep to it. Where torch can, as on CUDA, it refuses to allocate more.

    Raises:
        InputError: not above zero.
    """
    if most_bytes is not None and most_bytes < 1:
        raise InputError(f"a memory of {most_bytes:g} bytes for {device}: give one above zero, e.g. 6 GB")
    _limits_bytes.pop(str(device), None)
    if most_bytes is not None:
        _limits_bytes[str(device)] = int(most_bytes)
    limits = getattr(torch.get_device_module(device), "set_per_process_memory_fraction", None)
    if limits is not None:
        total_bytes = _memory_of(device)[1]
        part = 1.0 if most_bytes is None else min(1.0, most_bytes / total_bytes)
        with suppress(RuntimeError, NotImplementedError):
            try:
                limits(part, device)
            except TypeError:  # of the only device of its kind
                limits(part)


def own_mark(device: torch.device) -> str:
    """What tells an accelerator from any other one, whatever number it has here; empty where torch does not say."""
    if device.type != "cpu":
        with suppress(AttributeError, RuntimeError, NotImplementedError):
            return str(torch.get_device_module(device).get_device_properties(device).uuid)
    return ""


def allocated_bytes(device: torch.device) -> int | None:
    """What tensors hold of an accelerator's memory; None on a CPU, and where torch cannot tell."""
    if device.type == "cpu":
        return None
    try:
        return int(torch.accelerator.memory_allocated(device))
    except (NotImplementedError, RuntimeError):
        return None


def in_float64(x: torch.Tensor) -> torch.Tensor:
    """A tensor in float64: where it lies, or on the host where its accelerator has no such numbers, as Apple's."""
    try:
        return x.double()
    except (TypeError, RuntimeError):
        return x.cpu().double()


def in_host_memory(like: torch.Tensor) -> torch.Tensor:
    """An empty tensor of this shape and dtype in host memory, pinned where it is to exchange with an accelerator."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.device.type != "cpu")


def bring(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device. An accelerator gets it from pinned memory, behind what it has to do: nothing waits."""
    if device.type == "cpu" or x.device.type != "cpu":
        return x.to(device)
    return (x if x.is_pinned() else x.pin_memory()).to(device, non_blocking=True)


def has_sync_batch_norm(device: torch.device) -> bool:
    """Return whether torch has its kernels of SyncBatchNorm for this kind of device."""
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::batch_norm_backward_elemt", key)


def queued(device: torch.device, *, timed: bool = False) -> torch.Event:
    """An event behind all that the current stream of an accelerator was given so far."""
    event = torch.Event(device, enable_timing=timed)
    event.record(torch.accelerator.current_stream(device))
    return event
