"""The same command under torchrun on two machines (namespaces) with different numbers of devices."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from convoy.comm.job_key import write_key_file
from convoy.emulate import namespaces
from convoy.emulate.machine import RunName
from tests.support.commands import TINY, assert_close, results
from tests.support.processes import PLACE, ROOT
from tests.support.ssh_hosts import needs_ssh

pytestmark = [
    pytest.mark.slow,  # twenty seconds
    pytest.mark.root,
    needs_ssh,
]

LIMIT_S = 100.0


def environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name not in (*PLACE, "CONVOY_DEVICE", "COLUMNS")}
    return own | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CONVOY_DEVICE": "cpu"}


@pytest.fixture
def wiring() -> Iterator[namespaces.Wiring]:
    made = namespaces.wire(RunName.mine(), ("attic", "cellar"))
    with namespaces.network(made):
        yield made


def test_torchrun_on_two_hosts_matches_one_device(wiring: namespaces.Wiring, tmp_path: Path) -> None:
    """Started as torchrun's users start it: one agent on each host. The devices find their addresses by the route to the
    first host, and the numbers are those of one device."""
    train = ["-m", "convoy", "train", *TINY, "--epochs", "2", "--speeds", "1,2,1", "--plan", "hybrid"]
    write_key_file(tmp_path / "job.key")
    train += ["--job-key", str(tmp_path / "job.key")]
    attic, cellar = wiring.ports
    with ExitStack() as stack:
        agents = []
        for rank, (port, devices) in enumerate(((attic, 1), (cellar, 2))):
            words = [
                *("ip", "netns", "exec", port.namespace, sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes", "2", "--nproc-per-node", str(devices), "--node-rank", str(rank)),
                *("--master-addr", attic.address, "--master-port", "29517", *train),
            ]
            agent = subprocess.Popen(
                words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            stack.callback(agent.wait, 20)
            stack.callback(agent.terminate)  # torchrun ends its processes then
            agents.append(agent)
        told = [agent.communicate(timeout=LIMIT_S) for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0], told
    assert "Training on 3 devices, plan hybrid" in told[0][0]
    assert "Training on" not in told[1][0], "one job, told once"
    alone = subprocess.run(
        [sys.executable, "-m", "convoy", "train", *TINY, "--epochs", "2", "--speeds", "1", "--devices", "1"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    assert len(results(alone.stdout)) == 2
    assert_close(results(told[0][0]), results(alone.stdout))
