"""System programs that some tests need, and their Debian packages."""

import os
import platform
import shutil

import pytest

PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "mpirun": "openmpi-bin",
    "rsync": "rsync",
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
}


def lacking(*programs: str, root: bool = False) -> str:
    """Return why tests that need these programs (and optionally root on Linux) cannot run; empty if they can."""
    if root and (platform.system() != "Linux" or os.geteuid() != 0):
        return "needs Linux and root"
    missing = [program for program in programs if shutil.which(program) is None]
    packages = dict.fromkeys(PACKAGES[program] for program in missing)
    return f"needs {', '.join(missing)}: apt-get install {' '.join(packages)}" if missing else ""


def needs(*programs: str, root: bool = False) -> pytest.MarkDecorator:
    """Return a mark that skips a test that cannot run and names the missing package."""
    reason = lacking(*programs, root=root)
    return pytest.mark.skipif(bool(reason), reason=reason or "can run")
