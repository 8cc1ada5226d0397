"""A simulated accelerator: torch's PrivateUse1 device "sim", with kernels on the CPU. sim_device.cpp lists its
refusals."""

import fcntl
import hashlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

from tests.support.sim import torch_module

SOURCE = Path(__file__).with_name("sim_device.cpp")
GIB = 1 << 30

COMPILER = shutil.which("g++")
NEEDS = "needs a C++ compiler: apt-get install g++"


def library() -> Path:
    """Return the compiled backend; the first use compiles it in half a minute and caches it by source, torch and
    Python.

    Raises:
        subprocess.CalledProcessError: it does not compile.
    """
    # Where torch lies is not in it: the process that loads it has torch's libraries already.
    mark = hashlib.sha256(
        SOURCE.read_bytes() + f"{torch.__version__} {torch.version.git_version} {sys.version}".encode()
    ).hexdigest()
    path = Path(tempfile.gettempdir()) / f"convoy-sim-{mark[:16]}.so"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two processes at once one compiles, and the other has it then
        _compiled(path)
    return path


def _compiled(path: Path) -> None:
    if not path.exists():
        assert COMPILER is not None, NEEDS
        root = Path(torch.__file__).parent
        fresh = tempfile.NamedTemporaryFile(dir=path.parent, suffix=".so", delete=False)  # noqa: SIM115
        fresh.close()
        subprocess.run(
            [
                COMPILER, "-std=c++20", "-O1", "-fPIC", "-shared", "-w", str(SOURCE), "-o", fresh.name,
                f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}", f"-I{sysconfig.get_path('include')}",
                f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10",
            ],
            check=True,
        )  # fmt: skip
        Path(fresh.name).rename(path)  # whole or not at all


def load(devices: int = 4, memory_bytes: int = GIB) -> None:
    """Register `devices` simulated accelerators with this much memory each in this process."""
    if not hasattr(torch, "sim"):
        torch.utils.rename_privateuse1_backend("sim")
        torch.ops.load_library(library())
        torch.ops.sim.register_hooks()
        torch._register_device_module("sim", torch_module)
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.ops.sim.set_up(devices, memory_bytes)
