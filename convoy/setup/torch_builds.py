"""Which build of PyTorch a host's devices need. Pure.

CUDA builds hold code for some generations of GPUs, and want a driver at least as new as they are:
https://github.com/pytorch/pytorch/blob/main/RELEASE.md#pytorch-cuda-support-matrix
"""

from collections.abc import Collection, Sequence

from convoy.errors import InputError
from convoy.setup.state import Found, Gpu

INDEX = "https://download.pytorch.org/whl"
"""PyTorch's own index; each build has a folder there."""

FAMILY = ("torch", "torchvision", "torchaudio")
"""Packages that come in builds, which must be the same."""

OLD_BUILD, OLD_DRIVER, OLD_CAPABILITY = "cu126", 525, (5.0, 9.0)
NEW_BUILD, NEW_DRIVER, NEW_CAPABILITY = "cu130", 580, (7.5, 12.1)
_LAST_WITH_OLD = (2, 14)
"""Releases after this one are not built for CUDA 12 (pytorch#190385), so for nothing older than capability 7.5."""


def build_for(found: Found, kinds: Collection[str], torch: str) -> str | None:
    """The name of the build, such as "cpu" or "cu126"; None: the one that any index has.

    Args:
        kinds: of the host's devices in the fleet file.
        torch: the version, such as "2.13.0".

    Raises:
        InputError: there is none for its GPUs and their driver.
    """
    if "xpu" in kinds:
        return "xpu"
    if "cuda" in kinds:
        return _cuda(found.gpus, torch)
    return "cpu" if found.system == "Linux" else None


def fits(installed: str | None, wanted: str, build: str | None) -> bool:
    """Whether an installed version is the wanted one in a build that will do. Any build computes on a CPU."""
    public, _, label = (installed or "").partition("+")
    return public == wanted and (build in (None, "cpu") or label == build)


def _cuda(gpus: Sequence[Gpu], torch: str) -> str:
    if not gpus:
        raise InputError(
            "the fleet file gives it cuda devices, and nvidia-smi there shows none: install NVIDIA's driver, or take the "
            "devices out; for AMD's GPUs and Jetsons make the environment by hand and name its `python` in the [[host]]"
        )
    oldest, newest = (pick(gpus, key=lambda gpu: gpu.capability) for pick in (min, max))
    driver = min(gpu.driver for gpu in gpus)
    needs_old = oldest.capability < NEW_CAPABILITY[0]
    if needs_old and newest.capability > OLD_CAPABILITY[1]:
        raise InputError(
            f"no build of PyTorch has code for both its {oldest.name} and its {newest.name}: take one of the two out of the "
            "fleet file"
        )
    old_exists = tuple(map(int, torch.split(".")[:2])) <= _LAST_WITH_OLD
    if oldest.capability < OLD_CAPABILITY[0] or (needs_old and not old_exists):
        raise InputError(
            f"torch {torch} is not built for its {oldest.name} (compute capability {oldest.capability:g}): take it out of the "
            "fleet file, or have an older torch here, the same for all hosts"
        )
    old_will_do = newest.capability <= OLD_CAPABILITY[1] and old_exists
    if driver >= NEW_DRIVER and not needs_old:
        return NEW_BUILD
    if driver >= OLD_DRIVER and old_will_do:
        return OLD_BUILD
    least = OLD_DRIVER if old_will_do else NEW_DRIVER
    raise InputError(
        f"the driver {driver} of its {newest.name} is too old for torch {torch}: update it to {least} or newer"
    )
