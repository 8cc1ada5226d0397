"""What a training may have beside its steps, together with devices that come: the numbers are those of one device."""

import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from convoy.comm.job_key import write_key_file
from convoy.elastic.members import LeftError
from convoy.elastic.recovery import may_leave
from convoy.emulate import namespaces
from convoy.emulate.machine import RunName
from convoy.fleet import Nic
from convoy.runtime.module import Distributed
from convoy.runtime.precision import GradScaler
from convoy.train.loop import Training
from lab.chaos import TIGHT, Case
from tests.elastic.test_newcomers import Job, alone, check, newcomer, started
from tests.support.poisoned import Poisoned
from tests.support.programs import needs


@dataclass
class Equipped(Job):
    """With loss scaling, of which some steps are skipped."""

    scales: bool = False

    def made(self, model: nn.Module, part: Distributed | None) -> tuple[Training, Any, Any]:
        training, train, test = super().made(model, part)
        if self.scales:
            scaler = GradScaler(model, init_scale=8.0, growth_interval=2)
            training = Poisoned(**{**vars(training), "scaler": scaler})
        return training, train, test


PLAIN = Case(12, 2, "hybrid", "sgd", epochs=3)
CASES: dict[str, Equipped] = {
    "averages and passes in shares": Equipped(replace(PLAIN, plan="sharded", average=True, accumulate=2), ["first"]),
    "scaled losses": Equipped(replace(PLAIN, plan="model"), ["first"], scales=True),
    "averages": Equipped(replace(PLAIN, plan="hybrid", optimizer="adam", average=True), ["first"]),
    "passes, clipped": Equipped(replace(PLAIN, accumulate=3, clip_norm=1.0, schedule="step"), ["first"]),
    "rebalancing": Equipped(replace(PLAIN, plan="data-by-speed", rebalance=True), ["first"]),
    "rebalancing, seldom kept": Equipped(replace(PLAIN, plan="model", rebalance=True, every=3), ["first"]),
    "all of it": Equipped(
        replace(PLAIN, plan="model", average=True, accumulate=2, clip_norm=1.0, rebalance=True, every=3),
        ["first"],
        scales=True,
    ),
    "all of it, of one device": Equipped(
        replace(PLAIN, devices=1, plan="hybrid", average=True, accumulate=2, rebalance=True), ["first"], scales=True
    ),
}
QUICK = 1


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(job, id=name, marks=[pytest.mark.slow] if i >= QUICK else [])
        for i, (name, job) in enumerate(CASES.items())
    ],
)
def test_a_device_that_comes_changes_no_number(job: Equipped) -> None:
    job.expected = dict.fromkeys(range(2, 7), "first")
    with started(job, job.case.devices) as threads:
        newcomer(job, "first", threads)
    check(job, [*map(str, range(job.case.devices)), "first"])
    assert any("joined" in line for line in job.told["0"]), job.told


def test_neighbours_leave_one_after_another() -> None:
    """Two devices of three left after the same step; what only one of them had, the other one had the copy of."""
    assert may_leave([True, True, False]) == [1]
    assert may_leave([True, False, True]) == [0]
    assert may_leave([True, False, True, False]) == [0, 2]
    assert may_leave([False, False]) == []
    assert may_leave([True, True]) == [], "a job that ends: see test_where_all_leave_the_training_ends"


@pytest.mark.slow
@pytest.mark.root
@needs("ip", "tc", root=True)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["all of it", "averages and passes in shares"])
def test_a_device_of_another_host_changes_no_number(name: str, tmp_path: Path) -> None:
    """Three hosts with addresses and cards of their own, over links of 1 Gbit/s."""
    wiring = namespaces.wire(RunName.mine(), ("a", "b", "c"))
    write_key_file(tmp_path / "key")
    place = {
        "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": wiring.ports[0].address, "MASTER_PORT": "29511",
        "CONVOY_JOB_KEY": str(tmp_path / "key"), "CONVOY_DEVICE": "cpu", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(namespaces.network(wiring))
        namespaces.shape(wiring, lambda _: Nic(125e6, 125e6, 5e-5))
        started = []
        for device, port in zip(("0", "1", "first", "alone"), (*wiring.ports, wiring.ports[2]), strict=True):
            variables = os.environ | place | ({"RANK": device} if device in "01" else {})
            command = ["ip", "netns", "exec", port.namespace, sys.executable, "-m", "tests.support.joining_host"]
            started.append(subprocess.Popen([*command, name, device, str(tmp_path)], env=variables))
            stack.callback(started[-1].wait)
            stack.callback(started[-1].kill)
        assert [process.wait(240) for process in started] == [0, 0, 0, 0]
    losses, state = torch.load(tmp_path / "result-alone")
    for device in ("0", "1", "first"):
        found, held, told, _ = torch.load(tmp_path / f"result-{device}")
        assert found == pytest.approx(losses[-len(found) :], rel=TIGHT)
        assert held.keys() == state.keys()
        assert all(float((held[key] - state[key]).abs().max()) < TIGHT for key in state)
        assert any("joined" in line for line in told), told


@pytest.mark.slow
def test_who_came_goes_on_alone_with_all_of_it() -> None:
    case = replace(PLAIN, plan="model", average=True, accumulate=2, rebalance=True, every=2, epochs=6)
    job = Equipped(case, ["first"], scales=True)
    job.expected = dict.fromkeys(range(2, 7), "first")
    for device in ("0", "1"):
        job.strikes[device, 9] = lambda members: members.leave()
    with started(job, 2) as threads:
        newcomer(job, "first", threads)
    assert [type(error) for error in job.errors] == [LeftError, LeftError], job.errors
    job.errors.clear()
    found = job.results["first"]
    losses, state = alone(job)
    assert found[0] == pytest.approx(losses[-len(found[0]) :], rel=1e-10)
    assert all(float((found[1][key] - state[key]).abs().max()) < 1e-10 for key in state)
