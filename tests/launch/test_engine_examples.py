"""The examples for Kubernetes, Kubeflow Trainer and SkyPilot: valid for the engine, and run here as it runs them.

`test_slurm.py` runs the one for Slurm.
"""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from convoy.comm.job_key import write_key_file
from tests.support import engine_script
from tests.support.json_schema import breaches
from tests.support.processes import PLACE, ROOT, free_port

ENGINES = ROOT / "examples/engines"
SCHEMAS = json.loads(Path(__file__).with_name("crd_schemas.json").read_text())
LABELS = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
JOBSET_NAME = "convoy-x7k2p"
LIMIT_S = 90.0

Variables = dict[str, str]


def example(name: str) -> dict[str, Any]:
    return yaml.safe_load((ENGINES / name).read_text())  # type: ignore[no-any-return]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a home folder with the program, the key and the script."""
    (tmp_path / "convoy").write_text(f'#!/bin/sh\nexec {sys.executable} -m convoy "$@"\n')
    (tmp_path / "convoy").chmod(0o755)
    write_key_file(tmp_path / "job.key")
    (tmp_path / "train.py").write_text(Path(engine_script.__file__).read_text())
    return tmp_path


def losses(folder: Path, *started: tuple[list[str], Mapping[str, str]]) -> list[float]:
    """Run commands with their variables at the same time; return the losses that device 0 wrote."""
    own = {name: value for name, value in os.environ.items() if name not in (*PLACE, "OMP_NUM_THREADS")}
    own |= {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(folder)}
    with ExitStack() as stack:
        running = []
        for command, variables in started:
            process = subprocess.Popen(command, cwd=folder, env=own | variables)
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)
            running.append(process)
        assert [process.wait(LIMIT_S) for process in running] == [0] * len(running)
    _, found = json.loads((folder / "losses.json").read_text())
    return found  # type: ignore[no-any-return]


def assert_those_of_one_device(found: list[float]) -> None:
    assert found == pytest.approx(engine_script.plain_losses(), rel=0, abs=1e-10)


# ------------------------------------------------------------------------------------------------ Kubernetes, Kubeflow


def replicated_jobs(made: Mapping[str, Any]) -> list[dict[str, Any]]:
    return made["spec"]["replicatedJobs"]  # type: ignore[no-any-return]


def container_of(job: Mapping[str, Any]) -> dict[str, Any]:
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return container  # type: ignore[no-any-return]


def test_jobset_is_valid() -> None:
    made = example("kubernetes/jobset.yaml")
    assert not list(breaches(SCHEMAS["JobSet"], made))
    assert (made["apiVersion"], made["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    counts = [int(job["template"]["spec"]["parallelism"]) for job in replicated_jobs(made)]
    assert counts == [job["template"]["spec"]["completions"] for job in replicated_jobs(made)]
    for number, job in enumerate(replicated_jobs(made)):
        told = {row["name"]: row.get("value") for row in container_of(job)["env"]}
        assert (told["WORLD_SIZE"], told["FIRST_RANK"]) == (str(sum(counts)), str(sum(counts[:number])))
        assert told["OMP_NUM_THREADS"] == container_of(job)["resources"]["requests"]["cpu"]


def test_trainjob_with_its_runtime_is_the_jobset() -> None:
    """Kubeflow Trainer writes the TrainJob's image and arguments into the container `node` of every job with the label."""
    runtime, job = example("kubeflow/runtime.yaml"), example("kubeflow/trainjob.yaml")
    schema = copy.deepcopy(SCHEMAS["ClusterTrainingRuntime"])
    schema["properties"]["spec"]["properties"]["template"]["properties"]["spec"] = SCHEMAS["JobSet"]["properties"][
        "spec"
    ]
    assert not list(breaches(schema, runtime))
    assert not list(breaches(SCHEMAS["TrainJob"], job))
    assert {runtime["apiVersion"], job["apiVersion"]} == {"trainer.kubeflow.org/v1alpha1"}
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert "mlPolicy" not in runtime["spec"], "its numNodes would be the number of pods of each kind"
    made = runtime["spec"]["template"]
    for each in replicated_jobs(made):
        assert each["template"].pop("metadata") == {"labels": LABELS}
        assert (each["replicas"], container_of(each)["name"]) == (1, "node")
        container_of(each).update(job["spec"]["trainer"])
    assert made["spec"] == example("kubernetes/jobset.yaml")["spec"]


def variables_of(container: Mapping[str, Any], index: int) -> Variables:
    """Return the variables of a pod, as kubelet makes them."""
    path = "metadata.labels['jobset.sigs.k8s.io/jobset-name']"
    found = {"JOB_COMPLETION_INDEX": str(index)}
    for row in container["env"]:
        assert row.get("valueFrom", {"fieldRef": {"fieldPath": path}}) == {"fieldRef": {"fieldPath": path}}
        value = row.get("value", JOBSET_NAME)
        for name, known in found.items():
            value = value.replace(f"$({name})", known)
        found[row["name"]] = value
    return found


@pytest.mark.slow  # starts three processes
def test_pods_of_the_jobset_have_the_losses_of_one_device(folder: Path) -> None:
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "CONVOY_JOB_KEY": str(folder / "job.key")}
    started = []
    for job in replicated_jobs(example("kubernetes/jobset.yaml")):
        container = container_of(job)
        for index in range(job["template"]["spec"]["completions"]):
            variables = variables_of(container, index)
            assert variables["MASTER_ADDR"] == f"{JOBSET_NAME}-gpu-0-0.{JOBSET_NAME}"
            mounted = [f"{mount['mountPath']}/job.key" for mount in container["volumeMounts"] if mount["name"] == "key"]
            assert [variables["CONVOY_JOB_KEY"]] == mounted
            started.append(([*container["command"], "train.py", "losses.json"], variables | here))
    assert len(started) == 3
    assert_those_of_one_device(losses(folder, *started))


# ---------------------------------------------------------------------------------------------------------- SkyPilot


@pytest.mark.slow  # imports SkyPilot
def test_skypilot_accepts_the_task(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sky = pytest.importorskip("sky", reason="needs skypilot: pip install skypilot")
    monkeypatch.chdir(folder)
    task = sky.Task.from_yaml(str(ENGINES / "skypilot/task.yaml"))
    task.validate()
    assert (task.num_nodes, task.file_mounts) == (2, {"~/job.key": str(folder / "job.key")})


@pytest.mark.slow  # starts two processes
def test_nodes_of_the_skypilot_task_have_the_losses_of_one_device(folder: Path) -> None:
    task = example("skypilot/task.yaml")
    text = task["run"].replace("29500", str(free_port()))
    shared = {"SCRIPT": "train.py losses.json", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_NODES": "2"}
    nodes = [(["bash", "-c", text], shared | {"SKYPILOT_NODE_RANK": str(rank)}) for rank in range(task["num_nodes"])]
    assert_those_of_one_device(losses(folder, *nodes))
