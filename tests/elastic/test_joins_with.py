"""Training features combined with joining devices: the numbers match one device."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from torch import nn

from convoy.elastic.members import LeftError, may_leave
from convoy.runtime.module import Distributed
from convoy.runtime.precision import GradScaler
from convoy.train.loop import Training
from lab.chaos import Case
from tests.elastic.test_joins import Job, alone, check, join_job, started
from tests.support.poisoned import Poisoned


@dataclass
class Equipped(Job):
    """A training with loss scaling that skips some steps."""

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
def test_a_joining_device_changes_no_number(job: Equipped) -> None:
    job.expected = dict.fromkeys(range(2, 7), "first")
    with started(job, job.case.devices) as threads:
        join_job(job, "first", threads)
    check(job, [*map(str, range(job.case.devices)), "first"])
    assert any("joined" in line for line in job.told["0"]), job.told


def test_neighbours_leave_one_after_another() -> None:
    assert may_leave([True, True, False]) == [1]
    assert may_leave([True, False, True]) == [0]
    assert may_leave([True, False, True, False]) == [0, 2]
    assert may_leave([False, False]) == []
    assert may_leave([True, True]) == [], "a job that ends: see test_where_all_leave_the_training_ends"


@pytest.mark.slow
def test_a_joined_device_continues_alone() -> None:
    case = replace(PLAIN, plan="model", average=True, accumulate=2, rebalance=True, every=2, epochs=6)
    job = Equipped(case, ["first"], scales=True)
    job.expected = dict.fromkeys(range(2, 7), "first")
    for device in ("0", "1"):
        job.strikes[device, 9] = lambda members: members.leave()
    with started(job, 2) as threads:
        join_job(job, "first", threads)
    assert [type(error) for error in job.errors] == [LeftError, LeftError], job.errors
    job.errors.clear()
    found = job.results["first"]
    losses, state = alone(job)
    assert found[0] == pytest.approx(losses[-len(found[0]) :], rel=1e-10)
    assert all(float((found[1][key] - state[key]).abs().max()) < 1e-10 for key in state)
