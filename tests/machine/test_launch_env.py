"""Each launcher's rank variables are read as torchrun's: complete, incomplete and wrong."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from convoy.cli.options import in_job
from convoy.comm.environment import read_process_env
from convoy.errors import InputError
from convoy.machine.launch_env import as_torchrun, first_host, is_one_of_job, tasks_on
from tests.support.commands import QUIET, TINY, results
from tests.support.programs import needs

TORCHRUN = {
    "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}  # fmt: skip

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "PMIX_NAMESPACE": "2055798785", "PMIX_RANK": "1",
}  # fmt: skip

MPICH = {"PMI_RANK": "1", "PMI_SIZE": "3", "PMI_FD": "7", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "3"}

# Four hosts with 2, 2, 1 and 3 devices; this is the second one on the last host.
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1,3",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "3",
    "SLURM_JOB_NODELIST": "gpu[01-05]",
    "SLURM_STEP_NODELIST": "gpu[02-05]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9",
}

# What a job's script has, and so has a command in it that srun did not start.
SLURM_SCRIPT = {
    "SLURM_JOB_ID": "4711",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2),1,3",
    "SLURM_JOB_NODELIST": "gpu[01-05]",
}

SLURM_SHELL = SLURM_SCRIPT | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "gpu01"}


def place_of(environment: Mapping[str, str]) -> tuple[int, int, int, int | None, str, int] | None:
    place = read_process_env(environment)
    if place is None:
        return None
    return place.device, place.devices, place.local, place.local_devices, place.host, place.port


SAID: list[tuple[str, dict[str, str], tuple[int, int, int, int | None, str, int] | None]] = [
    ("nothing", {}, None),
    ("torchrun", TORCHRUN, (2, 3, 0, 1, "10.0.0.1", 29500)),
    ("a container with the address only", {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, None),
    ("open mpi, one host", OPEN_MPI, (1, 3, 1, 3, "127.0.0.1", 15_860)),
    (
        "open mpi, two hosts",
        OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
        | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"},
        (2, 3, 0, 1, "10.0.0.1", 4000),
    ),
    ("open mpi, one process", OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, None),
    ("mpich, one host", MPICH, (1, 3, 1, 3, "127.0.0.1", 15_000)),
    ("mpich, two hosts", MPICH | {"MPI_LOCALNRANKS": "2", "MASTER_ADDR": "a"}, (1, 3, 1, 2, "a", 15_000)),
    ("slurm", SLURM, (6, 8, 1, 3, "gpu02", 15_000 + 4711 + 2 * 1009)),
    ("slurm, the next job", SLURM | {"SLURM_JOB_ID": "4712"}, (6, 8, 1, 3, "gpu02", 15_000 + 4712 + 2 * 1009)),
    ("slurm, told where", SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}, (6, 8, 1, 3, "10.0.0.1", 4000)),
    (
        "slurm, one host",
        SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "gpu02"},
        (6, 8, 1, 8, "127.0.0.1", 15_000 + 4711 + 2 * 1009),
    ),
    # Regression: Slurm sets SLURM_GPUS_PER_TASK for a batch script, not for the processes of srun --gpus-per-task.
    ("slurm, a GPU of its own each", SLURM | {"SLURM_STEP_GPUS": "2"}, (6, 8, 0, 3, "gpu02", 21_729)),
    ("slurm, all GPUs for all", SLURM | {"SLURM_STEP_GPUS": "0,1,2"}, (6, 8, 1, 3, "gpu02", 21_729)),
    ("the script of a slurm job", SLURM_SCRIPT, None),
    ("a shell in a slurm job", SLURM_SHELL, None),
    # Slurm's own plugin for MPI, and launchers within a Slurm step.
    ("slurm with --mpi=pmi2", SLURM | {"PMI_RANK": "6", "PMI_SIZE": "8"}, (6, 8, 1, 3, "gpu02", 21_729)),
    ("mpirun in a slurm job", SLURM | OPEN_MPI, (1, 3, 1, 3, "127.0.0.1", 15_860)),
    ("torchrun in a slurm job", SLURM | TORCHRUN, (2, 3, 0, 1, "10.0.0.1", 29500)),
    ("torchrun under mpirun", OPEN_MPI | TORCHRUN, (2, 3, 0, 1, "10.0.0.1", 29500)),
]  # fmt: skip


@pytest.mark.parametrize(("environment", "expected"), [case[1:] for case in SAID], ids=[case[0] for case in SAID])
def test_rank_is_read_from_every_launcher(
    environment: dict[str, str], expected: tuple[int, int, int, int | None, str, int] | None
) -> None:
    before = dict(environment)
    assert place_of(environment) == expected
    assert is_one_of_job(as_torchrun(environment)) is (expected is not None)
    assert environment == before, "asked, not changed"
    # The processes that this one starts are told once, and read the same.
    assert place_of(as_torchrun(environment)) == expected


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


REFUSED: list[tuple[dict[str, str], list[str]]] = [
    (without(TORCHRUN, "WORLD_SIZE"), ["RANK=2", "no WORLD_SIZE", "start it with torchrun, srun, mpirun"]),
    (TORCHRUN | {"RANK": "3"}, ["RANK='3'", "from 0 to 2"]),
    (without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), ["OMPI_COMM_WORLD_RANK=1", "no OMPI_COMM_WORLD_SIZE", "all of"]),
    (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "3"}, ["OMPI_COMM_WORLD_RANK='3'", "from 0 to 2"]),
    (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "many"}, ["OMPI_COMM_WORLD_SIZE='many'", "whole number"]),
    (
        OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        ["started 3 processes, 2 of them on this machine", "set MASTER_ADDR", "mpirun -x MASTER_ADDR="],
    ),
    (MPICH | {"MPI_LOCALNRANKS": "2"}, ["set MASTER_ADDR", "mpirun -genv MASTER_ADDR "]),
    (without(MPICH, "MPI_LOCALRANKID"), ["PMI_RANK=1", "no MPI_LOCALRANKID", "set RANK, WORLD_SIZE, MASTER_ADDR"]),
    (without(SLURM, "SLURM_PROCID"), ["SLURM_LOCALID=1", "no SLURM_PROCID", "srun"]),
    (without(SLURM, "SLURM_STEP_NODELIST"), ["no SLURM_STEP_NODELIST"]),
    (SLURM | {"SLURM_STEP_NODELIST": "gpu[01-"}, ["SLURM_STEP_NODELIST='gpu[01-'", "node[01-03,07]", "set MASTER_ADDR"]),
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2,x"}, ["SLURM_STEP_TASKS_PER_NODE='2,x'", "node 3"]),
    (SLURM | {"SLURM_LOCALID": "3"}, ["SLURM_LOCALID='3'", "from 0 to 2"]),
    (SLURM | {"SLURM_JOB_ID": "x"}, ["SLURM_JOB_ID='x'"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "words"), REFUSED, ids=lambda value: value[0] if isinstance(value, list) else ""
)
def test_incomplete_rank_is_reported(environment: dict[str, str], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        read_process_env(environment)
    for word in words:
        assert word in str(caught.value)


def test_first_host_of_a_slurm_nodelist() -> None:
    assert first_host("node[01-03,07]") == "node01"
    assert first_host("login,node[01-03]") == "login"
    assert first_host("rack[1-2]-node[03-04]") == "rack1-node03"
    for wrong in ("", "node[", "[]", "a b"):
        with pytest.raises(InputError, match="must be a list such as"):
            first_host(wrong)


def test_slurm_tasks_per_node_are_parsed() -> None:
    assert [tasks_on("2(x3),1,10", node) for node in range(5)] == [2, 2, 2, 1, 10]


def test_command_detects_that_it_runs_in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """It then sets torchrun's variables for child processes."""
    for name in (*TORCHRUN, *SLURM, *OPEN_MPI, *MPICH):
        monkeypatch.setenv(name, "to be restored afterwards")
        monkeypatch.delenv(name)
    assert not in_job()
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert in_job()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("6", "8")


@pytest.mark.slow
@needs("mpirun")
def test_command_trains_under_mpirun(tmp_path: Path) -> None:
    def train(*launcher: str) -> str:
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        command = [*launcher, sys.executable, "-m", "convoy", "train", *TINY, "--plan", "data", "--speeds"]
        command.append("1,1" if launcher else "1")
        done = subprocess.run(
            command, cwd=tmp_path, env=QUIET | root, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    together = train("mpirun", "--oversubscribe", "-n", "2")
    assert "Training on 2 devices" in together
    ((loss, right),) = results(together)
    ((loss_alone, right_alone),) = results(train())
    assert right == right_alone
    assert loss == pytest.approx(loss_alone, abs=1.5e-4)
    assert len(re.findall("Training on", together)) == 1, "one job, not two of one device each"
