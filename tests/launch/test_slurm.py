"""The example for Slurm under a real slurmctld: two nodes (namespaces) with unequal numbers of devices and CPUs."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from convoy.emulate import namespaces
from convoy.emulate.machine import RunName
from tests.support import engine_script
from tests.support.processes import PLACE, ROOT
from tests.support.programs import needs

pytestmark = [
    pytest.mark.slow,  # twenty seconds
    pytest.mark.root,
    needs("ip", "munged", "slurmctld", "slurmd", "sbatch", root=True),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="the example asks for two CPUs of a node"),
]

LIMIT_S = 90.0
NODES = ("attic", "cellar")

CONF = """
ClusterName=convoy
SlurmctldHost=attic
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SchedulerParameters=bf_interval=1
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
GresTypes=gpu
PartitionName=all Nodes=ALL Default=YES MaxTime=5 State=UP
"""


class Cluster:
    """A running Slurm. Every daemon stays in the foreground; leaving the context ends them in reverse order."""

    def __init__(self, folder: Path, wiring: namespaces.Wiring) -> None:
        self.folder, self.wiring = folder, wiring
        (folder / "munge.key").write_bytes(os.urandom(64))
        (folder / "munge.key").chmod(0o400)
        (folder / "hosts").write_text("".join(f"{port.address} {port.host}\n" for port in wiring.ports))
        nodes = [f"NodeName={port.host} NodeAddr={port.address} CPUs=2 Gres=gpu:2\n" for port in wiring.ports]
        (folder / "slurm.conf").write_text("".join([CONF.format(folder=folder), *nodes]))
        # Slurm counts these devices as GPUs, and nothing opens them.
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()

    def on(self, node: str, *command: str) -> list[str]:
        """Return a command on a node: in its network, with its host name, and the names of all nodes."""
        setup = f'hostname {node} && mount --bind {self.folder}/hosts /etc/hosts && exec "$@"'
        network = f"--net=/run/netns/{self.wiring.port(node).namespace}"
        return ["nsenter", network, "unshare", "--uts", "--mount", "sh", "-c", setup, "sh", *command]

    def environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if name not in (*PLACE, "OMP_NUM_THREADS")}
        path = f"{self.folder}:{os.environ['PATH']}"
        return own | {"PYTHONPATH": str(ROOT), "PATH": path, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def daemons(self) -> list[list[str]]:
        munge = [f"--{what}-file={self.folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
        return [
            ["munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *munge],
            self.on(NODES[0], "slurmctld", "-D", "-i"),
            *(self.on(node, "slurmd", "-D", "-N", node) for node in NODES),
        ]

    def sbatch(self, *words: str) -> str:
        """Run a job to its end and return its output."""
        command = self.on(NODES[0], "sbatch", "--wait", f"--output={self.folder}/job.out", *words)
        done = subprocess.run(command, cwd=self.folder, env=self.environment(), timeout=LIMIT_S, check=False)
        text = (self.folder / "job.out").read_text() if (self.folder / "job.out").exists() else ""
        assert done.returncode == 0, text + (self.folder / "daemons.log").read_text()[-3000:]
        return text


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    wiring = namespaces.wire(RunName.mine(), NODES)
    (tmp_path / "convoy").write_text(f'#!/bin/sh\nexec {sys.executable} -m convoy "$@"\n')
    (tmp_path / "convoy").chmod(0o755)
    with namespaces.network(wiring):
        made = Cluster(tmp_path, wiring)
        with ExitStack() as stack:
            log = stack.enter_context((tmp_path / "daemons.log").open("w"))
            for command in made.daemons():
                stack.callback(_end, subprocess.Popen(command, env=made.environment(), stdout=log, stderr=log))
                _wait_for(tmp_path / "munge.socket")
            yield made
        left = [subprocess.check_output(["ip", "netns", "pids", port.namespace]) for port in wiring.ports]
        assert not any(left), "processes of the nodes are left"


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    process.wait(20)


def _wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline_s, f"no {path}"
        time.sleep(0.05)


def test_heterogeneous_slurm_job_has_the_losses_of_one_device(cluster: Cluster) -> None:
    out = cluster.folder / "losses.json"
    cluster.sbatch(str(ROOT / "examples/engines/slurm/job.sh"), engine_script.__file__, str(out))
    threads, losses = json.loads(out.read_text())
    assert threads == ["2", "1", "1"], "one device with the node's two CPUs, two with one each"
    assert losses == pytest.approx(engine_script.plain_losses(), rel=0, abs=1e-10)
    assert not list(cluster.folder.glob("convoy-*.key")), "the job has removed its key"


@pytest.mark.parametrize("option", ["--gpus-per-task=1", "--gres=gpu:2"])
def test_each_process_takes_another_gpu(cluster: Cluster, option: str) -> None:
    """With the first option a process sees only its own GPU as number 0, with the second it sees both."""
    program = (
        "import os; from convoy.machine.launch_env import as_torchrun as found; rank = found(os.environ)['LOCAL_RANK']"
    )
    program += "; print('uses GPU', os.environ['CUDA_VISIBLE_DEVICES'].split(',')[int(rank)])"
    (cluster.folder / "job.sh").write_text(f'#!/bin/sh\nsrun {option} {sys.executable} -c "{program}"\n')
    printed = cluster.sbatch("--nodes=1", "--ntasks=2", option, "job.sh")
    assert sorted(printed.splitlines()) == ["uses GPU 0", "uses GPU 1"]
