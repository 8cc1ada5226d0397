"""`--compile` with lost and joining devices: all compile the new plan's layers at the same step."""

from dataclasses import dataclass, replace

import pytest
from torch import nn

from convoy.api import distribute, make_plan
from convoy.comm.group import Group
from convoy.runtime import compiled
from convoy.runtime.compiled import Compiler
from convoy.runtime.module import Distributed
from lab.chaos import Case
from tests.elastic.test_joins import EXAMPLE, check, join_job, started
from tests.elastic.test_joins_with import PLAIN, Equipped
from tests.elastic.test_losses_with import Extras, compare
from tests.support.compiler import compiler_imported  # noqa: F401 - a fixture

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


@dataclass
class Compiles(Equipped):
    """A job whose layers are compiled."""

    def build(self, group: Group, net: nn.Module) -> Distributed:
        speeds = [1.0 + d for d in range(group.devices)]
        plan = make_plan(self.case.plan, net, EXAMPLE, self.case.batch, group, speeds=speeds)
        return distribute(net, plan, group, EXAMPLE, compile=True)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Compiler]:
    """Record all compilers in order of creation."""
    made: list[Compiler] = []

    def compiler(group: Group) -> Compiler:
        made.append(Compiler(group))
        return made[-1]

    monkeypatch.setattr("tests.elastic.test_joins.TIMEOUT_S", 100.0)  # one device compiles at a time
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    monkeypatch.setattr("convoy.runtime.module.Compiler", compiler)
    return made


@pytest.mark.parametrize(
    ("plan", "strikes"),
    [("data", {1: (3, 4)}), pytest.param("hybrid", {1: (5, 6), 0: (12, 9)}, marks=pytest.mark.slow)],
)
def test_a_loss_changes_no_number_of_compiled_layers(
    plan: str, strikes: dict[int, tuple[int, int]], made: list[Compiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(Extras(compiles=True), plan, strikes, monkeypatch)
    assert len(made) >= 3 + 2 + (len(strikes) > 1)
    assert made[-1].used, "the remaining devices compile again"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "steps"),
    [
        (replace(PLAIN, plan="hybrid"), range(5, 9)),
        (replace(PLAIN, plan="model", rebalance=True, every=3), range(2, 9)),
        (replace(PLAIN, devices=1, plan="data"), range(5, 9)),
    ],
)
def test_a_joining_device_changes_no_number_of_compiled_layers(case: Case, steps: range, made: list[Compiler]) -> None:
    job = Compiles(case, ["first"])
    job.expected = dict.fromkeys(steps, "first")
    with started(job, job.case.devices) as threads:
        join_job(job, "first", threads)
    check(job, [*map(str, range(job.case.devices)), "first"])
    devices = job.case.devices + 1
    assert len(made) >= devices + devices, "each device has one, and another one after the join"
    assert all(compiler.used for compiler in made[-devices:])
