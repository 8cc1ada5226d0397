"""A fleet as a JobSet for Kubernetes: unequal hosts, each with its own devices, as one job. Pure."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from convoy.comm.job_key import KEY_FILE
from convoy.errors import InputError
from convoy.launch.host_job import HostJob, line_to_paste

NAME = "convoy"


SECRET = "convoy-job-key"
"""A secret of the cluster with one file, job.key: `kubectl create secret generic convoy-job-key --from-file=job.key`."""

_FOLDER = "/etc/convoy"


def jobset(
    jobs: Sequence[HostJob],
    argv: Sequence[str],
    *,
    image: str,
    port: int,
    further: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """A manifest that runs `python -m convoy argv` on every device of a fleet, as JSON, which kubectl reads like YAML.

    One replicated job for each host, since hosts may have unlike devices; Kubeflow's PyTorchJob has one kind of worker, and its
    Trainer makes a JobSet, too (https://jobset.sigs.k8s.io). A pod starts the devices of its host; all meet at the pod of
    device 0 by its name. A job that fails is not started again: the devices end together.

    Args:
        jobs: of all hosts, that of device 0 first. Their names are those of the cluster's nodes.
        argv: what follows `python -m convoy`.
        image: of the containers: it has Convoy, and what `argv` names.
        port: where the devices meet.
        further: variables of all devices. A key's file is that of the secret `SECRET`.

    Raises:
        InputError: a host's name that cannot be part of a DNS name.
    """
    for job in jobs:
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?", job.host.name):
            raise InputError(
                f"host {job.host.name!r}: a job in Kubernetes is named after it, in at most 32 small letters, digits and "
                "dashes; rename the host in the fleet file, as the node is named"
            )
    total = sum(len(job.ranks) for job in jobs)
    address = f"{NAME}-{jobs[0].host.name}-0-0.{NAME}"
    further = {name: f"{_FOLDER}/job.key" if name == KEY_FILE else value for name, value in further.items()}
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": NAME, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [_replicated(job, argv, image, total, address, port, further) for job in jobs],
    }
    manifest = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": NAME}, "spec": spec}
    return json.dumps(manifest, indent=2) + "\n"


def _replicated(
    job: HostJob, argv: Sequence[str], image: str, total: int, address: str, port: int, further: Mapping[str, str]
) -> dict[str, Any]:
    line = line_to_paste(
        job, argv, total=total, address=address, port=port, python="python", folder=".", further=further
    )
    container = {
        "name": "devices",
        "image": image,
        "command": ["sh", "-c", line],
        "ports": [{"containerPort": port}] if 0 in job.ranks else [],
        "resources": _resources(job),
    }
    volume = {"name": "key", "secret": {"secretName": SECRET, "defaultMode": 0o400}}
    if KEY_FILE in further:
        container["volumeMounts"] = [{"name": "key", "mountPath": _FOLDER, "readOnly": True}]
    pod = {
        **({"volumes": [volume]} if KEY_FILE in further else {}),
        "restartPolicy": "Never",
        "nodeSelector": {"kubernetes.io/hostname": job.host.name},
        "containers": [container],
    }
    one = {"parallelism": 1, "completions": 1, "backoffLimit": 0, "template": {"spec": pod}}
    return {"name": job.host.name, "replicas": 1, "template": {"spec": one}}


def _resources(job: HostJob) -> dict[str, dict[str, str]]:
    """What a pod asks for: its GPUs, and the cores of its CPU devices where the file names them."""
    gpus = sum(name.startswith("cuda") for name in job.names)
    cores = sum(int(own.get("OMP_NUM_THREADS", 0)) for own in job.own)
    result: dict[str, dict[str, str]] = {}
    if cores:
        result["requests"] = {"cpu": str(math.ceil(cores))}
    if gpus:
        result["limits"] = {"nvidia.com/gpu": str(gpus)}
    return result
