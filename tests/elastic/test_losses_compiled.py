"""`--compile` together with the loss of devices."""

import pytest

from convoy.comm.group import Group
from convoy.runtime import compiled
from convoy.runtime.compiled import Compiler
from tests.elastic.test_losses_with import Extras, compare
from tests.support.compiler import compiler_imported  # noqa: F401 - a fixture

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")

BEFORE, WHILE, BEHIND = {1: (2, 3)}, {1: (3, 4)}, {1: (5, 6), 0: (12, 9)}


@pytest.mark.parametrize(
    ("plan", "strikes"),
    [("data", WHILE), *(pytest.param("hybrid", each, marks=pytest.mark.slow) for each in (BEFORE, BEHIND))],
)
def test_a_loss_changes_no_number_of_compiled_layers(
    plan: str, strikes: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are compiled after a few steps, and once more after a loss; all devices wait for each other meanwhile."""
    made: list[Compiler] = []

    def compiler(group: Group) -> Compiler:
        made.append(Compiler(group))
        return made[-1]

    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    monkeypatch.setattr(compiled, "FASTER", float("inf"))
    monkeypatch.setattr("convoy.runtime.module.Compiler", compiler)
    compare(Extras(compiles=True), plan, strikes, monkeypatch)
    assert len(made) >= 3 + 2 + (len(strikes) > 1)
    assert made[-1].used, "what is left compiles anew"
