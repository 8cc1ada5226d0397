"""The state machine of a process that comes into a job: after single events, what it does."""

import pytest

from convoy.elastic.agreement import Generation
from convoy.elastic.joining import (
    MOST_DOORS,
    ROUNDS,
    AskAt,
    Event,
    Invited,
    Meet,
    Newcomer,
    Refused,
    Sent,
    Stop,
    Unanswered,
    Waits,
    instruction,
    observe,
)

A, B, C = ("a", 1), ("b", 2), ("c", 3)
FIVE = Generation(4, (0, 2, 5))


def after(*events: Event) -> Newcomer:
    state = Newcomer((A, B))
    for event in events:
        state = observe(state, event)
    return state


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ((), AskAt(A)),
        ((Unanswered(),), AskAt(B)),
        ((Unanswered(), Unanswered()), AskAt(A)),
        ((Unanswered(), Sent((C, B))), AskAt(C)),
        ((Sent((C,)), Unanswered()), AskAt(A)),  # those that it knew before stay behind them
        ((Sent(()),), AskAt(B)),
        ((Waits(),), AskAt(A)),
        ((Waits("too slow"),), AskAt(A)),
        ((Waits("too slow", (B, C)),), AskAt(A)),  # who answered, though it knows itself by another address
        ((Waits("too slow", (B, C)), Unanswered()), AskAt(B)),
        ((Waits("too slow", (C,)), *(Unanswered() for _ in range(2))), AskAt(B)),
        ((Unanswered(), Waits("", (C,)), Unanswered()), AskAt(C)),
        ((Invited(5, FIVE),), Meet(5, FIVE)),
        ((Refused("another model"), Unanswered()), Stop("another model")),
        (
            tuple(Unanswered() for _ in range(2 * ROUNDS)),
            Stop("nobody of the job answers at a:1, b:2: has it ended?"),
        ),
        ((*(Unanswered() for _ in range(2 * ROUNDS - 1)), Waits(), Unanswered()), AskAt(A)),
    ],
)
def test_what_is_to_be_done_after_events(events: tuple[Event, ...], expected: object) -> None:
    assert instruction(after(*events)) == expected


def test_why_it_waits_is_forgotten_once_it_is_let_in() -> None:
    assert after(Waits("too slow")).spare == "too slow"
    assert after(Waits("too slow"), Waits()).spare == ""
    assert after(Waits("too slow"), Invited(5, FIVE)).spare == ""


def test_it_knows_a_bounded_number_of_doors() -> None:
    doors = tuple(("host", port) for port in range(200))
    assert len(after(Sent(doors)).doors) == MOST_DOORS
    assert len(after(Waits("", doors)).doors) == MOST_DOORS
