"""Access the devices of this machine through torch's accelerator interface: CUDA, ROCm, XPU, MPS or any other kind.

All other code uses this file. It treats the CPU differently from accelerators, but all kinds of accelerators alike.
"""

import ctypes
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

from convoy.errors import InputError, shortened, shown


def accelerator() -> str | None:
    """Return the kind of this machine's accelerators, such as "cuda"; None if torch can use none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and torch.accelerator.device_count() else None


def local_devices() -> tuple[str, ...]:
    """Return the names of all devices of this machine: accelerators first, the CPU last."""
    kind = accelerator()
    count = torch.accelerator.device_count() if kind else 0
    return (*(f"{kind}:{index}" for index in range(count)), "cpu")


def pick_device(name: str | torch.device | None, local: int) -> torch.device:
    """Return the device to compute on. By default, the process with local rank `local` takes the accelerator of that number."""
    chosen = name or os.environ.get("CONVOY_DEVICE")
    if chosen is None:
        devices = local_devices()
        chosen = devices[min(local, len(devices) - 1)]
    device = check_device(str(chosen))
    try:
        enter(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, AttributeError) as error:  # AttributeError: a torch built for CPUs only
        raise _no_device(str(chosen), str(error)) from None
    return device


def check_device(name: str) -> torch.device:
    """Return the device of a name without using it: the first use of an accelerator costs seconds and memory."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise _no_device(name, str(error)) from None
    if device.type == "cpu":
        return device
    if device.type != accelerator():
        raise _no_device(name, f"torch finds no {shortened(device.type)} here")
    if (device.index or 0) >= torch.accelerator.device_count():
        raise _no_device(name, "no device has this number")
    return torch.device(device.type, device.index or 0)


def _no_device(name: str, reason: str) -> InputError:
    return InputError(
        f"device {shown(name)} cannot be used ({shortened(reason.partition(chr(10))[0])}): this machine has "
        f"{', '.join(local_devices())}; choose one of them"
    )


def enter(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)


def to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a module in place. Keep tied tensors tied: on some accelerators `nn.Module.to` creates one for each name."""
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
"""Attributes and functions of torch that return settings which change results."""


def modes() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in MODES:
        try:
            value = attrgetter(name)(torch)
            found[f"torch.{name}"] = str(value() if callable(value) else value)
        # AttributeError: not in this torch. RuntimeError: the old and the new setting contradict each other.
        except (AttributeError, RuntimeError):
            found[f"torch.{name}"] = "unknown"
    return found


def set_modes(tf32: bool | None, deterministic: bool) -> None:
    """Set torch's modes in this process: TF32 on or off (None: unchanged), and only deterministic algorithms."""
    if tf32 is not None:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        cudnn: Any = torch.backends.cudnn
        for part in (cudnn.conv, cudnn.rnn):
            part.fp32_precision = "tf32" if tf32 else "ieee"
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch requires it on CUDA
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the random states of the CPU and of this device on exit."""
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        with torch.random.fork_rng(devices=[device.index or 0], device_type=device.type):
            yield


def hardware_name(device: torch.device) -> str:
    """Return the accelerator's name, or the machine's architecture for a CPU."""
    with suppress(AttributeError, RuntimeError):  # some kinds have no name
        if device.type != "cpu":
            return str(torch.get_device_module(device).get_device_name(device))
    return platform.machine()


def uuid_of(device: torch.device) -> str | None:
    """Return the driver's id of an accelerator, such as "GPU-6c5c..."; None for a CPU or if torch does not know it."""
    if device.type != "cpu":
        with suppress(AttributeError, RuntimeError, NotImplementedError):
            found = str(torch.get_device_module(device).get_device_properties(device).uuid)
            return found if found.startswith(("GPU-", "MIG-")) else f"GPU-{found}"
    return None


def memory_of(device: torch.device) -> tuple[int, int]:
    """Return the free and total bytes that tensors can use, within the limits of `limit_memory` and control groups."""
    free_bytes, total_bytes = _memory_of(device)
    if device.type != "cpu":  # its context and libraries use up to 1 GB, and fragments are lost
        total_bytes = int(0.95 * total_bytes - min(1e9, 0.1 * total_bytes))
    limit = _limits_bytes.get(str(device), total_bytes)
    return min(free_bytes, limit), min(total_bytes, limit)


def _memory_of(device: torch.device) -> tuple[int, int]:
    if device.type != "cpu":
        with suppress(NotImplementedError, RuntimeError, AttributeError):
            return torch.accelerator.get_memory_info(device)
    memory = psutil.virtual_memory()
    left = control_group_memory() or (memory.available, memory.total)
    return min(memory.available, left[0]), min(memory.total, left[1])


def process_bytes(device: torch.device) -> int:
    """Return the bytes of this process's anonymous resident memory; 0 for an accelerator and outside Linux."""
    if device.type == "cpu":
        with suppress(OSError, ValueError, IndexError):
            rows = Path("/proc/self/status").read_text().splitlines()
            return next((int(row.split()[1]) << 10 for row in rows if row.startswith("RssAnon:")), 0)
    return 0


ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def control_group_memory(root: Path = ROOT, own: Path = OWN) -> tuple[int, int] | None:
    """Return free and total memory of this process's tightest control group, in bytes; None if no group has a limit."""
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    rows = []
    with suppress(OSError, ValueError):
        for folder, version in control_groups("memory", root, own):
            limit_name, used_name, files_name = names[version]
            # ValueError: the limit is "max" (none). OSError: the host's folder is invisible in a container.
            with suppress(OSError, ValueError):
                limit, used = (int((folder / name).read_text()) for name in (limit_name, used_name))
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                # inactive file cache counts as free: the kernel reclaims it first
                rows.append((max(0, limit - used + int(stat.get(files_name, 0))), limit))
    return min(rows, default=None)


def control_groups(controller: str, root: Path = ROOT, own: Path = OWN) -> Iterator[tuple[Path, int]]:
    """Yield this process's control groups and their parents, innermost first, with their version (1 or 2)."""
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            top, version = (root / controller, 1) if controllers else (root, 2)
            folder = top / path.lstrip("/")
            yield from ((each, version) for each in (folder, *folder.parents) if each == top or top in each.parents)


_limits_bytes: dict[str, int] = {}


def limit_memory(device: torch.device, most_bytes: float | None) -> None:
    """Limit the memory of a device that plans of this process may use; on CUDA, limit torch too. None: no limit."""
    if most_bytes is not None and most_bytes < 1:
        raise InputError(f"a memory of {most_bytes:g} bytes for {device}: give one above zero, e.g. 6 GB")
    _limits_bytes.pop(str(device), None)
    if most_bytes is not None:
        _limits_bytes[str(device)] = int(most_bytes)
    set_fraction = getattr(torch.get_device_module(device), "set_per_process_memory_fraction", None)
    if set_fraction is not None:
        part = 1.0 if most_bytes is None else min(1.0, most_bytes / _memory_of(device)[1])
        with suppress(RuntimeError, NotImplementedError):
            try:
                set_fraction(part, device)
            except TypeError:  # a kind with one device only
                set_fraction(part)


_MMAP_THRESHOLD, _HEAP_FACTOR = -3, 3


def spare_memory(need_bytes: int, device: torch.device) -> None:
    """Return freed memory to the system at once if this process and its neighbours could run out of CPU memory otherwise.

    glibc keeps freed tensors for the next step, which is up to 10 % faster. But its heap then takes up to three times as much
    memory as the tensors of a step.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if device.type == "cpu" and _HEAP_FACTOR * processes * need_bytes > memory_of(device)[0]:
        with suppress(AttributeError, OSError, TypeError):  # another C library
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)
            ctypes.CDLL(None).malloc_trim(0)


def allocated_bytes(device: torch.device) -> int | None:
    """Return the bytes that tensors use on an accelerator; None for a CPU or if torch does not know."""
    if device.type != "cpu":
        with suppress(NotImplementedError, RuntimeError):
            return int(torch.accelerator.memory_allocated(device))
    return None


def in_float64(x: torch.Tensor) -> torch.Tensor:
    """Convert a tensor to float64: on its device, or on the host if the device has no float64 (MPS)."""
    try:
        return x.double()
    except (TypeError, RuntimeError):
        return x.cpu().double()


def in_host_memory(like: torch.Tensor) -> torch.Tensor:
    """Return an empty host tensor of this shape and dtype, pinned if `like` is on an accelerator."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.device.type != "cpu")


def bring(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to a device. For an accelerator, queue the copy from pinned memory without waiting."""
    if device.type == "cpu" or x.device.type != "cpu":
        return x.to(device)
    return (x if x.is_pinned() else x.pin_memory()).to(device, non_blocking=True)


def has_sync_batch_norm(device: torch.device) -> bool:
    """Return whether torch has SyncBatchNorm kernels for this kind of device."""
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::batch_norm_backward_elemt", key)


def queued(device: torch.device, *, timed: bool = False) -> torch.Event:
    """Record an event on the current stream of an accelerator."""
    event = torch.Event(device, enable_timing=timed)
    event.record(torch.accelerator.current_stream(device))
    return event
