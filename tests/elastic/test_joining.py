"""The addresses at which a joining device asks, after single answers."""

from collections.abc import Callable

import pytest

from convoy.elastic.entrance import MOST_DOORS, ROUNDS, Doors

A, B, C = ("a", 1), ("b", 2), ("c", 3)
Step = Callable[[Doors], Doors]
SILENT: Step = Doors.without_answer
ANSWERED: Step = Doors.answered


def redirected(*doors: tuple[str, int]) -> Step:
    return lambda state: state.redirected(doors)


def answered(*doors: tuple[str, int]) -> Step:
    return lambda state: state.answered(doors)


def after(*steps: Step) -> Doors:
    state = Doors((A, B))
    for step in steps:
        state = step(state)
    return state


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((), A),
        ((SILENT,), B),
        ((SILENT, SILENT), A),
        ((SILENT, redirected(C, B)), C),
        ((redirected(C), SILENT), A),  # those that it knew before stay behind them
        ((redirected(),), B),
        ((ANSWERED,), A),
        ((answered(B, C),), A),  # the one that answered, though it knows itself by another address
        ((answered(B, C), SILENT), B),
        ((answered(C), SILENT, SILENT), B),
        ((SILENT, answered(C), SILENT), C),
    ],
)
def test_the_address_to_ask_next(steps: tuple[Step, ...], expected: tuple[str, int]) -> None:
    assert after(*steps).next == expected


def test_a_job_has_ended_when_no_address_answers_for_some_rounds() -> None:
    assert after(*[SILENT] * (2 * ROUNDS)).are_silent
    assert not after(*[SILENT] * (2 * ROUNDS - 1), ANSWERED, SILENT).are_silent
    assert str(after()) == "a:1, b:2"


def test_a_joining_device_remembers_a_bounded_number_of_addresses() -> None:
    doors = tuple(("host", port) for port in range(200))
    assert len(after(redirected(*doors)).known) == MOST_DOORS
    assert len(after(answered(*doors)).known) == MOST_DOORS
