"""The training loops people have, as scripts: each gives the numbers of plain PyTorch on one device, or is refused by name."""

from typing import Any

import pytest

from tests.loops import changing, methods, structure
from tests.support.loops import both

LOOPS = [pytest.param(loop, id=loop.__name__) for loop in (*changing.LOOPS, *methods.LOOPS, *structure.LOOPS)]
slow = pytest.mark.slow
CASES = [
    ("hybrid", "adamw"),
    *(pytest.param(plan, "sgd", marks=slow) for plan in ("hybrid", "data-by-speed", "auto")),
    *(pytest.param(plan, "adamw", marks=slow) for plan in ("data-by-speed", "auto")),
]


@pytest.mark.parametrize(("plan", "optimizer"), CASES)
@pytest.mark.parametrize("loop", LOOPS)
def test_loop_gives_the_numbers_of_one_device(loop: Any, optimizer: str, plan: str) -> None:
    expected, found = both(loop, optimizer, plan)
    for each in found:
        assert each == pytest.approx(expected, rel=1e-9)


def test_a_script_draws_the_same_numbers_on_every_device_of_a_net_with_dropout() -> None:
    _, found = both(structure.mixup_with_dropout, "sgd", "hybrid")
    assert isinstance(found[0], list)
    assert found[0] == found[1] == found[2]


def test_second_derivatives_are_refused_by_name() -> None:
    _, found = both(methods.gradient_penalty, "sgd", "hybrid")
    assert all(
        "backward with create_graph=True: a distributed model has first derivatives only" in each for each in found
    )
