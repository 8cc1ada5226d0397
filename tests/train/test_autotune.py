"""Autotuning: a pure state machine on synthetic seconds, its candidate plans, and training with it."""

import copy
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch

import convoy
from convoy.comm.group import Group
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.steps import ComputeStep
from convoy.plan.strategy import Batch, Channel, Filter, One
from convoy.planner.planner import candidates
from convoy.planner.prediction import FEWER, REACH, TRIED, worth_trying
from convoy.train.autotune import FAR_BEHIND, Autotune, observe
from convoy.train.controller import Rebalancer
from convoy.train.loader import Loader
from convoy.train.loop import Training, fit
from convoy.train.rebalance import Keep, Reshard
from convoy.train.record import History
from tests.planner.test_planner import costs_of
from tests.support import nets
from tests.support.described_fleets import asked
from tests.support.one_device import EXACT, graph_of, one_trace
from tests.support.threads import run_on_threads
from tests.train.test_controller import BATCH, Samples

Step = Callable[[int, int], float]
"""(plan, step) -> seconds."""


def some_plans(count: int) -> list[Plan]:
    return [Plan(f"plan {number}", "model", 2, 8, {}, Batch((8 - number, number))) for number in range(1, count + 1)]


def tried(step_s: Step, count: int, most: int = 500) -> tuple[Autotune, list[int], list[Reshard | Keep]]:
    """Return the final state, the plan of each step, and the decisions."""
    state, ran, decisions = Autotune.start(some_plans(count)), [], []
    while not state.is_over:
        ran.append(state.running)
        assert len(ran) < most, "autotuning does not end"
        before = state.plan
        state, decision = observe(state, step_s(state.running, len(ran)))
        decisions.append(decision)
        assert isinstance(decision, Reshard) == (state.plan != before), "it says so whenever the plan changes"
        assert not isinstance(decision, Reshard) or decision.plan == state.plan
    return state, ran, decisions


def rounds_of(ran: Sequence[int]) -> list[int]:
    return [ran[0], *(b for a, b in pairwise(ran) if a != b)]


# ------------------------------------------------------------------------------------------------------------ the state


@pytest.mark.parametrize("fastest", [0, 1, 2])
def test_the_fastest_plan_wins(fastest: int) -> None:
    seconds = [1.1, 1.1, 1.1]
    seconds[fastest] = 1.0
    state, ran, _ = tried(lambda plan, _: seconds[plan], 3)
    assert state.running == fastest
    assert state.plan == some_plans(3)[fastest]
    assert rounds_of(ran) == [0, 1, 2, 1, 0], "there and back"


def test_slow_plan_gets_one_round_only() -> None:
    state, ran, _ = tried(lambda plan, _: [1.0, 1.0 + 2 * FAR_BEHIND, 0.9][plan], 3)
    assert rounds_of(ran) == [0, 1, 2, 0]
    assert state.running == 2


def test_even_slowdown_does_not_change_the_winner() -> None:
    state, _, _ = tried(lambda plan, step: [1.0, 0.95][plan] * (1 + 0.015 * step), 2)
    assert state.running == 1


def test_first_steps_of_a_plan_are_ignored() -> None:
    seen: list[int] = []

    def step_s(plan: int, step: int) -> float:  # noqa: ARG001
        first = not seen or seen[-1] != plan
        seen.append(plan)
        return (10.0 if first else 1.0) * [1.0, 0.9][plan]

    state, _, _ = tried(step_s, 2)
    assert state.running == 1
    assert max(step_s for entry in state.entries for step_s in entry.seen_s) <= 1.0


def test_ten_percent_noise_never_selects_a_bad_plan() -> None:
    chosen = []
    for seed in range(200):
        rng = random.Random(seed)
        state, _, _ = tried(lambda plan, _, rng=rng: [1.0, 0.9, 1.3][plan] * rng.uniform(0.9, 1.1), 3)
        chosen.append(state.running)
    assert chosen.count(1) > 170
    assert 2 not in chosen


# ---------------------------------------------------------------------------------------------------- what comes to it


def test_only_plans_with_fewer_messages_and_nearly_the_same_time_are_tried() -> None:
    graph = trace(build_net("two-conv:8:16", (3, 32, 32), 10), torch.zeros(2, 3, 32, 32)).graph
    found = candidates(asked(graph, 32, costs_of([4e9, 3e9, 2e9], 1e7)))
    rows = worth_trying(found, graph)
    assert rows[0] == found[0]
    assert 1 < len(rows) <= TRIED, "a slow wire and a small net: several plans are near each other"

    def messages(plan: Plan) -> int:
        moves = [step for step in lower(plan, graph).steps if not isinstance(step, ComputeStep)]
        return sum(t.sender != t.receiver for move in moves for each in move.schedule.rounds for t in each)

    counts = [messages(row.plan) for row in rows]
    assert all(after <= FEWER * before for before, after in pairwise(counts)), counts
    assert all(row.step_s <= found[0].step_s * (1 + REACH) for row in rows)


# ------------------------------------------------------------------------------------------------------ training by it


def plans_to_try() -> list[Plan]:
    model = graph_of("two-conv").fingerprint
    filters = {"conv1": Filter((2, 2, 1)), "conv2": Filter((3, 2, 2)), "fc": Channel((12, 8, 8))}
    return [
        Plan("filters", model, 3, BATCH, filters, One(0)),
        Plan("mixed", model, 3, BATCH, {"fc": Filter((2, 2, 1))}, Batch((9, 7, 4))),
        Plan("samples", model, 3, BATCH, {}, Batch((7, 7, 6))),
    ]


def test_training_during_autotuning_matches_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "convoy.train.autotune.ROUND_S", 0.0
    )  # steps take what they take here: which plan wins is chance
    epochs = 14  # three steps of an epoch are looked at; five rounds take 31 where no plan is far behind
    built = nets.build("two-conv")  # once: threads that each drew weights would take numbers from one another

    def train(group: Group | None) -> tuple[History, dict[str, torch.Tensor], list[str], list[Plan]]:
        plans = plans_to_try()
        if group is None:
            model = copy.deepcopy(built)
            alone = torch.optim.Adam(model.parameters(), lr=0.003, eps=1e-3)
            loaders = Loader(Samples(), BATCH), Loader(Samples(), BATCH, shuffle=False)
            return fit(Training(model, alone), *loaders, epochs), dict(model.state_dict()), [], []
        here = convoy.distribute(built, plans[0], group, torch.zeros(2, 3, 8, 8, dtype=torch.float64))
        loader, test = Loader(Samples(), BATCH, here), Loader(Samples(), BATCH, here, shuffle=False)
        optimizer = torch.optim.Adam(here.parameters(), lr=0.003, eps=1e-3)
        told: list[str] = []
        followed: list[Plan] = []

        def note(_: int, decision: Reshard | Keep) -> None:
            told.append(decision.reason)
            followed.append(here.plan)

        rebalancer = Rebalancer(here, optimizer, tell=note, others=plans[1:])
        assert rebalancer.state is None
        history = fit(Training(here, optimizer), loader, test, epochs, rebalancer=rebalancer)
        assert rebalancer.autotune.is_over
        assert rebalancer.state is not None
        assert rebalancer.state.plan == here.plan
        return history, here.full_state_dict(), told, followed

    with one_trace("two-conv", torch.float64):
        found = run_on_threads(3, train, timeout_s=30)
    history, weights, _, _ = train(None)
    for own_history, own_weights, told, followed in found:
        assert (told, followed) == found[0][2:], "every device comes to the same decisions"
        assert own_history.losses == pytest.approx(history.losses, abs=EXACT)
        for key, value in weights.items():
            assert torch.allclose(own_weights[key], value, rtol=0, atol=EXACT), key
    told, followed = found[0][2:]
    told_of_it = [text for text in told if text.startswith("autotune")]
    assert told_of_it[0].endswith("now plan 2")
    assert told_of_it[-1].endswith("continues")
    assert followed[:2] == plans_to_try()[1:]
