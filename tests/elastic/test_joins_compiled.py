"""`--compile` together with devices that come: the rows of the new plan are compiled by all at the same step."""

from dataclasses import dataclass, replace

import pytest
from torch import nn

from convoy.api import distribute, make_plan
from convoy.comm.group import Group
from convoy.runtime import compiled
from convoy.runtime.compiled import Compiler
from convoy.runtime.module import Distributed
from lab.chaos import Case
from tests.elastic.test_joins_with import PLAIN, Equipped
from tests.elastic.test_newcomers import EXAMPLE, alone, check, newcomer, started
from tests.support.compiler import compiler_imported  # noqa: F401 - a fixture

pytestmark = [
    pytest.mark.slow,  # tests/elastic/test_losses_compiled.py has the quick one
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]


@dataclass
class Compiles(Equipped):
    """Whose layers are compiled, of the newcomer as well."""

    def build(self, group: Group, net: nn.Module) -> Distributed:
        speeds = [1.0 + d for d in range(group.devices)]
        plan = make_plan(self.case.plan, net, EXAMPLE, self.case.batch, group, speeds=speeds)
        return distribute(net, plan, group, EXAMPLE, compile=True)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Compiler]:
    """All compilers, in the order in which they were made. What they make is used, however long it takes."""
    made: list[Compiler] = []

    def compiler(group: Group) -> Compiler:
        made.append(Compiler(group))
        return made[-1]

    monkeypatch.setattr("tests.elastic.test_newcomers.TIMEOUT_S", 100.0)  # one device compiles at a time
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    monkeypatch.setattr(compiled, "FASTER", float("inf"))
    monkeypatch.setattr("convoy.runtime.module.Compiler", compiler)
    return made


CASES = [
    (replace(PLAIN, plan="data"), range(2, 7)),
    (replace(PLAIN, plan="hybrid"), range(5, 9)),
    (replace(PLAIN, plan="model", rebalance=True, every=3), range(2, 9)),
    (replace(PLAIN, devices=1, plan="data"), range(5, 9)),
]


@pytest.mark.parametrize(("case", "steps"), CASES, ids=[f"{case.devices} by {case.plan}" for case, _ in CASES])
def test_a_device_that_comes_changes_no_number_of_compiled_layers(
    case: Case, steps: range, made: list[Compiler]
) -> None:
    """Also where the others had compiled theirs before it came: they go by a new plan then, and try anew."""
    job = Compiles(case, ["first"])
    job.expected = dict.fromkeys(steps, "first")
    with started(job, job.case.devices) as threads:
        newcomer(job, "first", threads)
    check(job, [*map(str, range(job.case.devices)), "first"])
    devices = job.case.devices + 1
    assert len(made) >= devices + devices, "each has one, and after the join another one"
    assert all(compiler.used for compiler in made[-devices:]), "all of them compile, the newcomer too"


def test_who_came_goes_on_alone_with_compiled_layers(made: list[Compiler]) -> None:
    job = Compiles(replace(PLAIN, plan="hybrid", epochs=6), ["first"])
    job.expected = dict.fromkeys(range(2, 7), "first")
    for device in ("0", "1"):
        job.strikes[device, 12] = lambda members: members.leave()
    with started(job, 2) as threads:
        newcomer(job, "first", threads)
    job.errors.clear()  # those that have left
    losses, state = alone(job)
    found, held = job.results["first"]
    assert found == pytest.approx(losses[-len(found) :], rel=1e-10)
    assert all(float((held[key] - state[key]).abs().max()) < 1e-10 for key in state)
    assert made[-1].used
