"""A fleet as a file for sbatch: unequal hosts, each with its own devices, as one Slurm job. Pure."""

import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from convoy.errors import InputError
from convoy.launch.host_job import HostJob, memory_environment


def sbatch_file(
    jobs: Sequence[HostJob],
    words: Sequence[str],
    *,
    port: int | None,
    python: str,
    folder: str,
    further: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """A batch file that runs a Python program on every device of a fleet.

    The names of the hosts are those of Slurm's nodes. Hosts may have unlike numbers of devices: `--distribution=arbitrary`
    places each task on the node that its line of SLURM_HOSTFILE names, and a task takes the device of its number
    (https://slurm.schedmd.com/srun.html). Whole nodes are asked for, with all their GPUs.

    Args:
        jobs: of all hosts, that of device 0 first.
        words: what follows `python`.
        port: where the devices meet; None: one that follows from the job's number.
        python, folder: for hosts that name none; all nodes must agree on them.
        further: variables of all devices.

    Raises:
        InputError: hosts that name different Pythons or folders.
    """
    pythons = {job.host.python or python for job in jobs}
    folders = {job.host.folder or folder for job in jobs}
    if len(pythons) > 1 or len(folders) > 1:
        raise InputError(
            f"the hosts name several places ({', '.join(sorted(pythons | folders))}): a Slurm job has one program and one "
            "folder on all nodes; give all hosts the same `python` and `folder`"
        )
    nodes = [job.host.name for job in jobs]
    rows = sorted((rank, job, local) for job in jobs for local, rank in enumerate(job.ranks))
    cases = [f"  {rank}) export {_variables(job, local)} ;;" for rank, job, local in rows]
    memory = " ".join(f"{name}={value}" for name, value in memory_environment({}).items())
    meeting = [f"export MASTER_ADDR={shlex.quote(nodes[0])}", *([] if port is None else [f"export MASTER_PORT={port}"])]
    placed = " ".join(shlex.quote(job.host.name) for _, job, _ in rows)
    task = "\n".join(["case $SLURM_PROCID in", *cases, "esac", f"exec {shlex.join([pythons.pop(), *words])}"])
    return "\n".join(
        [
            "#!/bin/bash",
            "#SBATCH --job-name=convoy",
            f"#SBATCH --nodelist={','.join(nodes)}",
            f"#SBATCH --nodes={len(nodes)}",
            f"#SBATCH --ntasks={len(rows)}",
            "#SBATCH --exclusive",
            f"cd {shlex.quote(folders.pop())} || exit 1",
            f"export {memory} TORCH_CPP_LOG_LEVEL=ERROR",
            *meeting,
            *(f"export {name}={shlex.quote(value)}" for name, value in further.items()),
            "SLURM_HOSTFILE=$(mktemp) && export SLURM_HOSTFILE && trap 'rm -f \"$SLURM_HOSTFILE\"' EXIT",
            f"printf '%s\\n' {placed} > \"$SLURM_HOSTFILE\"  # the node of each task",
            f"srun --distribution=arbitrary --cpu-bind=none --kill-on-bad-exit=1 bash -c {shlex.quote(task)}",
            "",
        ]
    )


def _variables(job: HostJob, local: int) -> str:
    """What the task of a host's device is told, as words for a shell."""
    words = [
        f"{name}={shlex.quote(value)}" for name, value in {"CONVOY_DEVICE": job.names[local], **job.own[local]}.items()
    ]
    on_cpu = job.names.count("cpu")
    if on_cpu > 1 and "OMP_NUM_THREADS" not in job.own[local]:
        words.append(f"OMP_NUM_THREADS=$(( ($(nproc) + {on_cpu - 1}) / {on_cpu} ))")
    return " ".join(words)
