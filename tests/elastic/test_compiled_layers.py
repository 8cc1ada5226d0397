"""`--compile` with lost devices: all compile the new plan's layers at the same step."""

import pytest

from convoy.comm.group import Group
from convoy.runtime import compiled
from convoy.runtime.compiled import Compiler
from tests.elastic.test_losses_with import Extras, compare
from tests.support.compiler import compiler_imported  # noqa: F401 - a fixture

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Compiler]:
    """Record all compilers in order of creation."""
    made: list[Compiler] = []

    def compiler(group: Group) -> Compiler:
        made.append(Compiler(group))
        return made[-1]

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
