"""Convert the environment variables of launchers to torchrun's. These functions change no environment.

::

    torchrun, Kubernetes, convoy   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    mpirun (Open MPI)              OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    mpirun (MPICH, Intel MPI)      PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
    srun                           SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE
    convoy run, to a script        CONVOY_RANK, CONVOY_WORLD_SIZE, ...: torchrun's with a prefix (see `hidden`)

An inner launcher takes precedence over an outer one: mpirun over Slurm, torchrun over both. MASTER_ADDR and MASTER_PORT
take precedence over the derived address.
"""

import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from convoy.errors import InputError, shown

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torchrun sets for each process."""

MAX_PROCESSES = 1 << 20

_OWN = "CONVOY_"
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_STORE = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT")
_OF_LAUNCHERS = re.compile(
    rf"{'|'.join(_PLACE)}|TORCHELASTIC_\w+|(GROUP|ROLE)_\w+|(OMPI|PMI|PMIX|MPI)_\w+|SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS|STEP_\w+)"
)

_LOOPBACK = "127.0.0.1"
_FIRST_PORT, _PORTS = 15_000, 15_000
"""Derived ports are below the ephemeral ports of Linux (32768 and up)."""


class _Names(NamedTuple):
    """The variables of one kind of mpirun, and (`passing`) its option that sets a variable."""

    launcher: str
    rank: str
    size: str
    local: str
    neighbours: str
    passing: str


_OPEN_MPI = _Names(
    "mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE", "mpirun -x MASTER_ADDR=192.168.1.20",
)  # fmt: skip
_HYDRA = _Names(
    "mpirun (MPICH)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
    "mpirun -genv MASTER_ADDR 192.168.1.20",
)  # fmt: skip


def is_one_of_job(environment: Mapping[str, str]) -> bool:
    """Return whether this process is one of a job, by torchrun's variables (see `as_torchrun`)."""
    return any(environment.get(name) for name in ("RANK", "WORLD_SIZE", f"{_OWN}RANK"))


def hidden(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a script: launchers' variables get Convoy's prefix, so that the script does not see them.

    A script that finds RANK or SLURM_PROCID may split the samples and wrap the model itself.
    """
    known = as_torchrun(environment)
    kept = {name: value for name, value in environment.items() if not _OF_LAUNCHERS.fullmatch(name)}
    return kept | {f"{_OWN}{name}": known[name] for name in (*_PLACE, *_OF_STORE) if known.get(name)}


def as_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment, with the rank from srun or mpirun added as torchrun's variables.

    Without a launcher, for a job of one process, and outside a Slurm step (batch script, allocation) nothing is added.
    """
    rank: dict[str, str] = {}
    if not (environment.get("RANK") or environment.get("WORLD_SIZE")):
        if environment.get(f"{_OWN}RANK"):
            own = ((name, environment.get(f"{_OWN}{name}")) for name in (*_PLACE, *_OF_STORE))
            rank = {name: value for name, value in own if value}
        elif _is_set(environment, _OPEN_MPI):
            rank = _from_mpi(environment, _OPEN_MPI)
        # Slurm also sets MPICH's variables, except the local rank.
        elif _is_set(environment, _HYDRA) and not (_is_step(environment) and not environment.get(_HYDRA.local)):
            rank = _from_mpi(environment, _HYDRA)
        elif _is_step(environment):
            rank = _from_slurm(environment)
    return {**environment, **rank}


def whole(environment: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = environment[name]
    if not (text.isdecimal() and len(text) <= 20) or not least <= int(text) <= most:
        raise InputError(f"{name}={shown(text)} in the environment: it must be a whole number from {least} to {most}")
    return int(text)


def _is_set(environment: Mapping[str, str], names: _Names) -> bool:
    return bool(environment.get(names.rank) or environment.get(names.size))


def _from_mpi(environment: Mapping[str, str], names: _Names) -> dict[str, str]:
    if environment.get(names.size) == "1":
        return {}
    _need(environment, names.launcher, names.rank, names.size, names.local, names.neighbours)
    size = whole(environment, names.size, 1, MAX_PROCESSES)
    here = whole(environment, names.neighbours, 1, size)
    address = environment.get("MASTER_ADDR") or (_LOOPBACK if here == size else None)
    if address is None:
        raise InputError(
            f"{names.launcher} started {size} processes, {here} of them on this machine, but gave no rendezvous "
            f"address: set MASTER_ADDR to the address of the machine of process 0, e.g. {names.passing}"
        )
    # Only Open MPI names its jobs. With others, two jobs on one machine need different MASTER_PORTs.
    number = zlib.crc32(environment.get("PMIX_NAMESPACE", "").encode())
    return {
        "RANK": str(whole(environment, names.rank, 0, size - 1)),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(whole(environment, names.local, 0, here - 1)),
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": address,
        "MASTER_PORT": environment.get("MASTER_PORT") or _port(number),
    }


def _is_step(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process. (Batch scripts have SLURM_NTASKS as well.)"""
    return bool(environment.get("SLURM_STEP_NUM_TASKS"))


def _from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    if environment["SLURM_STEP_NUM_TASKS"] == "1":
        return {}
    needed = ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE"]
    needed += [] if environment.get("MASTER_ADDR") else ["SLURM_STEP_NODELIST"]
    needed += [] if environment.get("MASTER_PORT") else ["SLURM_JOB_ID", "SLURM_STEP_ID"]
    _need(environment, "srun", *needed)
    size = whole(environment, "SLURM_STEP_NUM_TASKS", 1, MAX_PROCESSES)
    here = tasks_on(environment["SLURM_STEP_TASKS_PER_NODE"], whole(environment, "SLURM_NODEID", 0, MAX_PROCESSES))
    local = whole(environment, "SLURM_LOCALID", 0, here - 1)
    gpus = environment.get("SLURM_STEP_GPUS")  # those that this process sees; with --gpus-per-task only its own
    job = step = 0
    if not environment.get("MASTER_PORT"):  # one port per step and job
        job, step = (whole(environment, name, 0, 1 << 40) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return {
        "RANK": str(whole(environment, "SLURM_PROCID", 0, size - 1)),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local % len(gpus.split(",")) if gpus else local),
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": environment.get("MASTER_ADDR")
        or (_LOOPBACK if here == size else first_host(environment["SLURM_STEP_NODELIST"])),
        "MASTER_PORT": environment.get("MASTER_PORT") or _port(job + 1009 * step),
    }


def first_host(nodelist: str) -> str:
    """Return the first host of Slurm's list: node01 of `node[01-03,07],login`."""
    entry = re.match(r"(?:[^,\[\]\s]|\[[^\[\]]+\])+(?=,|$)", nodelist)
    if entry is None:
        raise InputError(
            f"SLURM_STEP_NODELIST={nodelist!r} in the environment: it must be a list such as node[01-03,07]; "
            "set MASTER_ADDR to the address of the first machine"
        )
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", entry[0])


def tasks_on(text: str, node: int) -> int:
    """Return the number of tasks on a node from Slurm's list: `2(x3),1` means 2, 2, 2 and 1."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,7})(?:\(x(\d{1,7})\))?", part)
        counts += [] if found is None else [int(found[1])] * int(found[2] or 1)
    if node >= len(counts) or not counts[node]:
        raise InputError(
            f"SLURM_STEP_TASKS_PER_NODE={text!r} in the environment: it must have the tasks of node {node} (SLURM_NODEID), "
            "such as 2(x3),1; start the processes with srun"
        )
    return counts[node]


def _port(number: int) -> str:
    return str(_FIRST_PORT + number % _PORTS)


def _need(environment: Mapping[str, str], launcher: str, *names: str) -> None:
    missing = [name for name in names if not environment.get(name)]
    if missing:
        present = ", ".join(f"{name}={environment[name]}" for name in names if name not in missing)
        raise InputError(
            f"the environment has {present or 'some variables'} of {launcher} but no {', '.join(missing)}: a process of a job "
            f"needs all of {', '.join(names)}. Start it with {launcher}, torchrun or convoy, or set {', '.join(RANK_VARIABLES)}"
        )
