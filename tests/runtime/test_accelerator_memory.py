"""Accelerators with a memory limit, and full ones, on the simulated accelerator."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from convoy.api import distribute, make_plan
from convoy.comm.group import AloneGroup, Group
from convoy.errors import DeviceLostError, InputError, PlanError
from convoy.machine.accelerator import limit_memory, memory_of
from tests.conftest import ROOT
from tests.support import sim
from tests.support.threads import run_on_threads

pytestmark = pytest.mark.skipif(sim.COMPILER is None, reason=sim.NEEDS)

MIB = 1 << 20


def usable(total_bytes: int) -> int:
    """Return a small accelerator's usable memory: without 10 % for its context and 5 % for fragments."""
    return int(0.85 * total_bytes)


@pytest.fixture
def limited() -> Iterator[torch.device]:
    sim.load()
    device = torch.device("sim:0")
    limit_memory(device, 8 * MIB)
    yield device
    limit_memory(device, None)
    assert memory_of(device)[1] == usable(sim.GIB)
    sim.load(devices=0)


def test_memory_limit_replaces_device_memory(limited: torch.device) -> None:
    assert memory_of(limited)[1] == usable(8 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=f"sim:0 has {8 * MIB}"):
        torch.empty(9 * MIB, dtype=torch.uint8, device=limited)
    with pytest.raises(InputError, match=r"a memory of 0 bytes for sim:0: give one above zero, e\.g\. 6 GB"):
        limit_memory(limited, 0)


def test_plans_respect_the_memory_limit(limited: torch.device) -> None:
    """A net that needs more than 8 MiB for a batch of 40,000."""
    net, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 10)), torch.zeros(2, 3, 8, 8)
    with AloneGroup(limited) as group:
        assert make_plan("auto", net, x, 16, group).batch == 16
        with pytest.raises(
            PlanError,
            match=r"fits the devices' memory\. .* of 7\.13 MB, .* too much\. Make a step of \d+ micro-batches",
        ):
            make_plan("auto", net, x, 40000, group)


def test_full_accelerator_is_named_on_all_devices(limited: torch.device) -> None:  # noqa: ARG001
    net, x, reported = (
        nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten(), nn.Linear(2304, 10)),
        torch.zeros(2, 3, 8, 8),
        [],
    )

    def work(group: Group) -> None:
        plan = make_plan("data", net, x, 4096, group, speeds=[1, 1])
        part = distribute(net, plan, group, x)
        try:
            part(torch.zeros(4096, 3, 8, 8, device=group.torch_device), whole=True).sum().backward()
        except DeviceLostError as error:
            reported.append(str(error))
            raise

    with pytest.raises(torch.OutOfMemoryError, match="sim out of memory"):
        run_on_threads(2, work, on=("sim:0", "cpu"))
    assert len(reported) == 1
    assert re.match(r"device 0 .*OutOfMemoryError: sim out of memory", reported[0]), reported


def convoy_on_sims(tmp_path: Path, line: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """The command, where torch loads the simulated accelerator as it loads those of vendors."""
    installed = tmp_path / "convoy_sim-0.dist-info"
    installed.mkdir(exist_ok=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: convoy-sim\nVersion: 0\n")
    (installed / "entry_points.txt").write_text("[torch.backends]\nsim = tests.support.sim:load\n")
    sim.library()
    return subprocess.run(
        [sys.executable, "-m", "convoy", *line.split()],
        cwd=tmp_path, text=True, capture_output=True, timeout=120, check=False,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("spare", "status"), [("auto", 0), ("none", 2)])
def test_command_reports_a_full_accelerator(spare: str, status: int, tmp_path: Path) -> None:
    line = "train --devices sim:0,cpu --data digits --limit 120 --net two-conv:4:6 --speeds 2,1 --plan data --log none"
    done = convoy_on_sims(tmp_path, f"{line} --memory 20kB,1GB --spare {spare}")
    assert done.returncode == status, done.stdout + done.stderr
    assert "error: there is not enough memory (sim out of memory" in done.stderr
    if spare == "auto":
        assert "device 0 (host" in done.stdout, "it is named"
        assert "; 1 continue after step 0" in done.stdout, "the other device continues alone"
