"""Writes jobs for other launchers: a shell line per host, a file for Slurm, a JobSet for Kubernetes. Pure."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from convoy.comm.job_key import KEY_FILE
from convoy.errors import InputError
from convoy.launch.host_job import HostJob, memory_environment, rank_variables

SECRET, _KEY_FOLDER = "convoy-job-key", "/etc/convoy"
"""The cluster's secret with the file job.key (`kubectl create secret generic convoy-job-key --from-file=job.key`), and its
folder in the pods."""


@dataclass(frozen=True)
class Command:
    """The command of all devices under another launcher.

    Attributes:
        argv: arguments of `python -m convoy`, starting with the verb.
        port: the rendezvous port of device 0.
        python, folder: defaults for hosts without them.
        further: more variables for all devices.
    """

    argv: Sequence[str]
    port: int | None
    python: str = "python"
    folder: str = "."
    further: Mapping[str, str] = field(default_factory=dict)


def line_to_paste(job: HostJob, command: Command, total: int, address: str) -> str:
    """Return a line for a shell on this host (sh, bash, zsh) that starts its devices and waits for them.

    Args:
        total: number of devices in the fleet.
        address: the rendezvous address.
    """
    assert command.port is not None
    shared = rank_variables(0, 0, total, len(job.ranks), address, command.port)
    shared |= {"TORCH_CPP_LOG_LEVEL": "ERROR", **command.further}
    exports = [f"{name}={shlex.quote(value)}" for name, value in shared.items() if name not in ("RANK", "LOCAL_RANK")]
    exports += [f"{name}=${{{name}:-{value}}}" for name, value in memory_environment({}).items()]
    exports += _threads("getconf _NPROCESSORS_ONLN", job.names.count("cpu"))
    call = shlex.join([job.host.python or command.python, "-m", "convoy", *command.argv])
    starts = []
    for local, (rank, name, own) in enumerate(zip(job.ranks, job.names, job.own, strict=True)):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(local), "CONVOY_DEVICE": name, **own}
        starts.append(" ".join([*(f"{key}={value}" for key, value in variables.items()), call]))
    # The first device keeps the terminal; the others run in the background and end with it.
    background = "".join(f"{start} & " for start in starts[1:])
    run = f"{{ {background}{starts[0]}; s=$?; wait; exit $s; }}"
    return f"( cd {shlex.quote(job.host.folder or command.folder)} && export {' '.join(exports)} && {run} )"


def _threads(count: str, on_cpu: int) -> list[str]:
    """Return the variable that divides a machine's cores between its CPU devices. `count` prints the number of cores."""
    return [f"OMP_NUM_THREADS=$(( ($({count}) + {on_cpu - 1}) / {on_cpu} ))"] if on_cpu > 1 else []


# ------------------------------------------------------------------------------------------------------------- Slurm


def sbatch_file(jobs: Sequence[HostJob], command: Command) -> str:
    """Return a batch file that runs a command on every device of a fleet.

    Host names are the names of Slurm's nodes. Hosts may have different numbers of devices: with `--distribution=arbitrary`
    each task runs on the node in its line of SLURM_HOSTFILE, and takes the device with its number
    (https://slurm.schedmd.com/srun.html). The job gets whole nodes. The default port is derived from the job id.

    Raises:
        InputError: the hosts have different Pythons or folders; all nodes must have the same.
    """
    pythons = {job.host.python or command.python for job in jobs}
    folders = {job.host.folder or command.folder for job in jobs}
    if len(pythons) > 1 or len(folders) > 1:
        raise InputError(
            f"the hosts have different programs or folders ({', '.join(sorted(pythons | folders))}): a Slurm job has one "
            "`python` and one folder on all nodes"
        )
    nodes = [job.host.name for job in jobs]
    rows = sorted((rank, job, local) for job in jobs for local, rank in enumerate(job.ranks))
    argv = list(command.argv)
    if len(rows) == 1:  # Convoy does not treat a step of one task as a job, so name its device
        argv[1:1] = ["--devices", jobs[0].names[0]]
    cases = []
    for rank, job, local in rows:
        own = {"CONVOY_DEVICE": job.names[local], **job.own[local]}
        exports = [f"{name}={shlex.quote(value)}" for name, value in own.items()]
        if "OMP_NUM_THREADS" not in own:
            exports += _threads("nproc", job.names.count("cpu"))
        cases.append(f"  {rank}) export {' '.join(exports)} ;;")
    memory = " ".join(f"{name}={value}" for name, value in memory_environment({}).items())
    port = {} if command.port is None else {"MASTER_PORT": str(command.port)}
    shared = {"MASTER_ADDR": nodes[0], **port, **command.further}
    placed = " ".join(shlex.quote(job.host.name) for _, job, _ in rows)
    call = shlex.join([pythons.pop(), "-m", "convoy", *argv])
    task = "\n".join(["case $SLURM_PROCID in", *cases, "esac", f"exec {call}"])
    # One number applies to all nodes. --exclusive adds the other GPUs of a node.
    gpus = min(_gpus(job) for job in jobs)
    options = [f"nodelist={','.join(nodes)}", f"nodes={len(nodes)}", f"ntasks={len(rows)}", "exclusive", "mem=0"]
    options += [f"gres=gpu:{gpus}"] if gpus else []
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{option}" for option in ("job-name=convoy", *options)),
        f"cd {shlex.quote(folders.pop())} || exit 1",
        f"export {memory} TORCH_CPP_LOG_LEVEL=ERROR",
        *(f"export {name}={shlex.quote(value)}" for name, value in shared.items()),
        "SLURM_HOSTFILE=$(mktemp) && export SLURM_HOSTFILE && trap 'rm -f \"$SLURM_HOSTFILE\"' EXIT",
        f"printf '%s\\n' {placed} > \"$SLURM_HOSTFILE\"  # the node of each task",
        f"srun --distribution=arbitrary --cpu-bind=none --kill-on-bad-exit=1 bash -c {shlex.quote(task)}",
    ]
    return "\n".join(lines) + "\n"


def _gpus(job: HostJob) -> int:
    return sum(name.startswith("cuda") for name in job.names)


# -------------------------------------------------------------------------------------------------------- Kubernetes


def jobset(jobs: Sequence[HostJob], command: Command, name: str, image: str) -> str:
    """Return a manifest (JSON, which kubectl reads as well as YAML) that runs a command on every device of a fleet.

    It has one replicated job per host, since hosts may have different devices; Kubeflow's PyTorchJob requires equal workers
    (https://jobset.sigs.k8s.io). Host names are the names of the cluster's nodes. A pod starts the devices of its host. The
    name of device 0's pod is the rendezvous address. A failed job is not restarted: the devices end together.

    Args:
        name: name of the JobSet, at most 20 characters: Kubernetes builds names of up to 63 characters from it.
        image: container image with Convoy and the files of the command.

    Raises:
        InputError: a host name that cannot be part of a DNS name.
    """
    for job in jobs:
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?", job.host.name):
            rule = "in Kubernetes it has at most 32 small letters, digits and dashes"
            raise InputError(f"host {job.host.name!r}: {rule}; rename the host in the fleet file, as the node is named")
    total, address = sum(len(job.ranks) for job in jobs), f"{name}-{jobs[0].host.name}-0-0.{name}"
    # By default /dev/shm has 64 MB: loader workers need more.
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if KEY_FILE in command.further:
        command = replace(command, further={**command.further, KEY_FILE: f"{_KEY_FOLDER}/job.key"})
        volumes.append({"name": "key", "secret": {"secretName": SECRET, "defaultMode": 0o400}})
        mounts.append({"name": "key", "mountPath": _KEY_FOLDER, "readOnly": True})
    replicated = []
    for job in jobs:
        cores = sum(int(own.get("OMP_NUM_THREADS", 1)) for own in job.own)
        resources: dict[str, Any] = {"requests": {"cpu": str(cores)}}
        if job.memory_bytes:
            resources["requests"]["memory"] = str(job.memory_bytes)
        if gpus := _gpus(job):
            resources["limits"] = {"nvidia.com/gpu": str(gpus)}
        container = {
            "name": "devices",
            "image": image,
            "command": ["sh", "-c", line_to_paste(job, command, total, address)],
            "ports": [{"containerPort": command.port}] if 0 in job.ranks else [],
            "resources": resources,
            "volumeMounts": mounts,
        }
        pod = {
            "restartPolicy": "Never",
            "nodeSelector": {"kubernetes.io/hostname": job.host.name},
            "containers": [container],
            "volumes": volumes,
        }
        one = {"parallelism": 1, "completions": 1, "backoffLimit": 0, "template": {"spec": pod}}
        replicated.append({"name": job.host.name, "replicas": 1, "template": {"spec": one}})
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": replicated,
    }
    manifest = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": name}, "spec": spec}
    return json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
