"""The output of `--print`, run here by a shell: a command line, a Slurm file, a Kubernetes JobSet."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from convoy.errors import InputError
from convoy.fleet import Device, Fleet, Host, Nic
from convoy.launch.fleet import Command, jobset, line_to_paste, sbatch_file
from convoy.launch.host_job import host_jobs
from tests.support.json_schema import breaches
from tests.support.processes import PLACE, ROOT

FLEET = Fleet(
    (Host("attic", "10.0.0.1"), Host("cellar", "10.0.0.2")),
    (
        Device("a0", "attic", "cuda"), Device("c0", "cellar", "cpu", cores=2.5, slowdown=2.0), Device("a1", "attic", "cpu"),
        Device("a2", "attic", "cpu"),
    ),
    Nic(125e6, 125e6, 1e-4),
)  # fmt: skip

RUN = ["run", "--", "note.py", "it's $HOME"]

NOTE = """
import json, os, sys
from convoy.machine.launch_env import as_torchrun
told = as_torchrun(os.environ)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "CONVOY_DEVICE", "OMP_NUM_THREADS", "CONVOY_SLOWDOWN", "NODE")
seen = sorted(name for name in os.environ if name.startswith(("SLURM_PROC", "SLURM_JOB")) or name == "RANK")
with open("told." + told.get("RANK", "alone"), "w") as file:
    json.dump({"seen": seen, "words": sys.argv[1:]} | {name: told.get(name) for name in names}, file)
"""
"""A script that writes down what it was told."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "note.py").write_text(NOTE)
    for name, text in {"srun": SRUN, "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def shell(command: list[str], folder: Path, cwd: Path | str = "/") -> int:
    kept = {name: value for name, value in os.environ.items() if name not in (*PLACE, "OMP_NUM_THREADS")}
    variables = kept | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=variables, timeout=60, check=False).returncode


def told(folder: Path, who: object, *names: str) -> list[Any]:
    row = json.loads((folder / f"told.{who}").read_text())
    return [row[name] for name in names]


def test_printed_command_starts_the_devices(tmp_path: Path) -> None:
    """Run it in a shell, with a Python that records its arguments."""
    folder, python = tmp_path / "ann's folder", tmp_path / "ann's python"
    folder.mkdir()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CONVOY_DEVICE")
    write = f"""
import json, os, sys
own = [os.environ[name] for name in {(*names, "OMP_NUM_THREADS")!r}] + [os.environ.get("CONVOY_SLOWDOWN")]
with open("told." + os.environ["RANK"], "w") as file:
    json.dump([own, sys.argv[1:]], file)
sys.exit(3 * (os.environ["RANK"] == "0"))
"""
    program = tmp_path / "write.py"
    program.write_text(write)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    python.chmod(0o755)
    words = ["train", "--data", "folder:it's $HOME", "--net", "two-conv:4:6"]
    command = Command(words, 4000, str(python), str(folder))
    line = line_to_paste(host_jobs(FLEET)[0], command, total=4, address="10.0.0.1")
    assert "\n" not in line
    assert subprocess.run(["sh", "-c", line], cwd="/", timeout=60, check=False).returncode == 3, (
        "that of its first device"
    )
    cores = os.cpu_count() or 1
    expected = {
        0: ["0", "4", "0", "3", "10.0.0.1", "4000", "cuda:0", str((cores + 1) // 2), None],
        3: ["3", "4", "2", "3", "10.0.0.1", "4000", "cpu", str((cores + 1) // 2), None],
    }
    for rank, own in expected.items():
        assert json.loads((folder / f"told.{rank}").read_text()) == [own, ["-m", "convoy", *words]]


# ------------------------------------------------------------------------------------------------------- Slurm

SRUN = """#!/usr/bin/env python3
# Does what srun documents for --distribution=arbitrary: task k runs on the node of line k of SLURM_HOSTFILE.
import os, subprocess, sys
options = [word for word in sys.argv[1:] if word.startswith("--")]
assert options == ["--distribution=arbitrary", "--cpu-bind=none", "--kill-on-bad-exit=1"], options
nodes = open(os.environ["SLURM_HOSTFILE"]).read().split()
names = sorted(set(nodes))
per_node = ",".join(str(nodes.count(name)) for name in names)
started = []
for k, node in enumerate(nodes):
    own = dict(SLURM_PROCID=k, SLURM_LOCALID=nodes[:k].count(node), SLURM_NODEID=names.index(node), NODE=node)
    own |= dict(SLURM_STEP_NUM_TASKS=len(nodes), SLURM_STEP_TASKS_PER_NODE=per_node, SLURM_JOB_ID=7, SLURM_STEP_ID=0)
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    started.append(subprocess.Popen(words, env=os.environ | {name: str(value) for name, value in own.items()}))
sys.exit(max(process.wait() for process in started))
"""


def sbatch(fleet: Fleet, folder: Path, **further: str) -> str:
    return sbatch_file(host_jobs(fleet), Command(RUN, None, sys.executable, str(folder), further))


def test_slurm_file_starts_each_device_on_its_node(folder: Path) -> None:
    """Slurm is not to be had here: a shell runs the file, with an srun that does what its manual says. The script sees the
    job, but not its own place in it: scripts that find SLURM_PROCID distribute the work themselves."""
    text = sbatch(FLEET, folder)
    assert re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE) == [
        "--job-name=convoy", "--nodelist=attic,cellar", "--nodes=2", "--ntasks=4", "--exclusive", "--mem=0",
    ]  # fmt: skip
    assert shell(["bash", "-c", text], folder) == 0
    half = str((len(os.sched_getaffinity(0)) + 1) // 2)
    names = ("LOCAL_RANK", "MASTER_ADDR", "NODE", "CONVOY_DEVICE", "OMP_NUM_THREADS", "CONVOY_SLOWDOWN")
    assert [told(folder, rank, *names) for rank in range(4)] == [
        ["0", "attic", "attic", "cuda:0", half, None],
        ["0", "attic", "cellar", "cpu", "3", "2.0"],
        ["1", "attic", "attic", "cpu", half, None],
        ["2", "attic", "attic", "cpu", half, None],
    ]
    assert told(folder, 3, "seen", "words") == [["SLURM_JOB_ID"], ["it's $HOME"]]


def test_slurm_file_requests_the_gpus_of_each_node(folder: Path) -> None:
    devices = tuple(
        Device(f"{host}{n}", host, "cuda") for host, count in (("attic", 3), ("cellar", 2)) for n in range(count)
    )
    assert "\n#SBATCH --gres=gpu:2\n" in sbatch(replace(FLEET, devices=devices), folder)


def test_one_device_under_slurm_is_named(folder: Path) -> None:
    """A job step of one task is no job: `convoy run` would take every GPU of the node."""
    alone = Fleet(FLEET.hosts[:1], (Device("a0", "attic", "cuda"),))
    assert shell(["bash", "-c", sbatch(alone, folder)], folder) == 0
    assert told(folder, "alone", "CONVOY_DEVICE", "words") == ["cuda:0", ["it's $HOME"]]


def test_slurm_nodes_share_one_folder(folder: Path) -> None:
    hosts = (Host("a", "10.0.0.1", folder="x"), Host("b", "10.0.0.2"))
    fleet = Fleet(hosts, (Device("a0", "a", "cpu"), Device("b0", "b", "cpu")), FLEET.network)
    with pytest.raises(InputError, match="one folder on all nodes"):
        sbatch(fleet, folder)


# ------------------------------------------------------------------------------------------------------- Kubernetes

SCHEMA = json.loads(Path(__file__).with_name("jobset_schema.json").read_text())["schema"]
"""Of the JobSets that Kubernetes takes, with the parts that our manifests have."""


def manifest(fleet: Fleet = FLEET, **further: str) -> dict[str, Any]:
    text = jobset(host_jobs(fleet), Command(RUN, 4000, further=further), "convoy-1a2b3c", "lab/convoy:1")
    return yaml.safe_load(text)  # type: ignore[no-any-return]


def pods(made: dict[str, Any]) -> dict[str, Any]:
    return {job["name"]: job["template"]["spec"]["template"]["spec"] for job in made["spec"]["replicatedJobs"]}


def test_a_jobset_has_a_job_for_each_host_and_its_pod_starts_its_devices(folder: Path) -> None:
    """Validate it against the schema and run the pods' commands here."""
    memory = {"c0": 4_000_000_000, "a1": 3_000_000_000}
    made = manifest(replace(FLEET, devices=tuple(replace(d, memory_bytes=memory.get(d.name)) for d in FLEET.devices)))
    assert not list(breaches(SCHEMA, made))
    assert (made["apiVersion"], made["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert made["spec"]["failurePolicy"] == {"maxRestarts": 0}
    assert made["spec"]["network"]["subdomain"] == made["metadata"]["name"] == "convoy-1a2b3c"
    assert [pod["nodeSelector"]["kubernetes.io/hostname"] for pod in pods(made).values()] == ["attic", "cellar"]
    containers = {name: pod["containers"][0] for name, pod in pods(made).items()}
    assert containers["attic"]["resources"] == {
        "requests": {"cpu": "3", "memory": "3000000000"},
        "limits": {"nvidia.com/gpu": "1"},
    }
    assert containers["cellar"]["resources"] == {"requests": {"cpu": "3", "memory": "4000000000"}}
    for pod in pods(made).values():
        assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
        assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert [shell(each["command"], folder, cwd=folder) for each in containers.values()] == [0, 0]
    assert [told(folder, rank, "WORLD_SIZE", "LOCAL_RANK", "CONVOY_DEVICE", "CONVOY_SLOWDOWN") for rank in range(4)] == [
        ["4", "0", "cuda:0", None], ["4", "0", "cpu", "2.0"], ["4", "1", "cpu", None], ["4", "2", "cpu", None],
    ]  # fmt: skip
    assert told(folder, 1, "OMP_NUM_THREADS") == ["3"], "2.5 cores"
    assert told(folder, 3, "seen", "words", "MASTER_ADDR") == [
        [],
        ["it's $HOME"],
        "convoy-1a2b3c-attic-0-0.convoy-1a2b3c",
    ]


def test_printed_jobs_name_the_key_file(folder: Path) -> None:
    """Print the file's name, never its content. In Kubernetes it belongs to a secret that only the pods get."""
    further = {"CONVOY_JOB_KEY": "/home/ann/job.key"}
    assert "\nexport CONVOY_JOB_KEY=/home/ann/job.key\n" in sbatch(FLEET, folder, **further)
    made = manifest(**further)
    assert not list(breaches(SCHEMA, made))
    for pod in pods(made).values():
        (_, volume), (_, mount) = pod["volumes"], pod["containers"][0]["volumeMounts"]
        assert volume == {"name": mount["name"], "secret": {"secretName": "convoy-job-key", "defaultMode": 0o400}}
        assert f"CONVOY_JOB_KEY={mount['mountPath']}/job.key" in pod["containers"][0]["command"][2]


def test_kubernetes_host_names_are_valid() -> None:
    fleet = Fleet((Host("Attic_1", "10.0.0.1"),), (Device("a0", "Attic_1", "cpu"),), FLEET.network)
    with pytest.raises(InputError, match=r"host 'Attic_1'.*small letters, digits and dashes; rename the host"):
        manifest(fleet)
