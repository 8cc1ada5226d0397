"""Autotune: a pure state machine on synthetic seconds, the plans that come to it, and training through it."""

import copy
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch

import convoy
from convoy.comm.group import Group
from convoy.layout.layout import Layout, Replicated, Split
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.steps import ComputeStep
from convoy.plan.strategy import Batch, Channel, Filter, One
from convoy.planner.planner import Candidate, candidates
from convoy.planner.prediction import FEWER, REACH, REACH_ALONE, TRIED, worth_trying
from convoy.train.autotune import FAR_BEHIND, Autotune, observe
from convoy.train.controller import Rebalancer
from convoy.train.loader import Loader
from convoy.train.loop import Training, fit
from convoy.train.rebalance import Keep, Reshard
from convoy.train.record import History
from tests.planner.test_planner import costs_of
from tests.support import nets
from tests.support.one_device import EXACT, graph_of, one_trace
from tests.support.plan_requests import asked
from tests.support.threads import run_on_threads
from tests.train.test_controller import BATCH, Samples

Step = Callable[[int, int], float]
"""(plan, step) -> seconds."""


def some_plans(count: int) -> list[Plan]:
    return [Plan(f"plan {number}", "model", 2, 8, {}, Batch((8 - number, number))) for number in range(1, count + 1)]


def tried(step_s: Step, count: int, most: int = 500) -> tuple[Autotune, list[int], list[Reshard | Keep]]:
    """The state when it is over, which plan made each step, and what was decided."""
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
def test_the_fastest_plan_goes_on(fastest: int) -> None:
    seconds = [1.1, 1.1, 1.1]
    seconds[fastest] = 1.0
    state, ran, _ = tried(lambda plan, _: seconds[plan], 3)
    assert state.running == fastest
    assert state.plan == some_plans(3)[fastest]
    assert rounds_of(ran) == [0, 1, 2, 1, 0], "there and back"


def test_a_single_plan_is_not_autotuned() -> None:
    state = Autotune.start(some_plans(1))
    assert state.is_over
    assert observe(state, 1.0) == (state, Keep("autotuning is over"))


@pytest.mark.parametrize(
    ("seconds", "winner"), [([1.0, 1.01], 1), ([1.0, 1.03], 0), ([1.0, 0.99, 1.02], 1), ([1.0, 1.03, 1.01], 2)]
)
def test_of_plans_that_are_as_fast_the_one_with_the_fewest_messages_goes_on(seconds: list[float], winner: int) -> None:
    state, _, _ = tried(lambda plan, _: seconds[plan], len(seconds))
    assert state.running == winner


def test_a_plan_far_behind_has_one_round_only() -> None:
    state, ran, _ = tried(lambda plan, _: [1.0, 1.0 + 2 * FAR_BEHIND, 0.9][plan], 3)
    assert rounds_of(ran) == [0, 1, 2, 0]
    assert state.running == 2


@pytest.mark.parametrize(("seconds", "winner", "rounds"), [([1.0, 2.0], 0, [0, 1]), ([2.0, 1.0], 1, [0, 1])])
def test_a_winner_without_a_rival_is_not_tried_again(seconds: list[float], winner: int, rounds: list[int]) -> None:
    state, ran, _ = tried(lambda plan, _: seconds[plan], 2)
    assert (state.running, rounds_of(ran)) == (winner, rounds)


def test_a_machine_that_becomes_slower_evenly_is_unfair_to_no_plan() -> None:
    """In one round each, the second plan would look slower by more than it is faster."""
    state, _, _ = tried(lambda plan, step: [1.0, 0.95][plan] * (1 + 0.015 * step), 2)
    assert state.running == 1


def test_the_first_steps_by_a_plan_do_not_count() -> None:
    """They make memory and kernels ready: ten times as long here."""
    seen: list[int] = []

    def step_s(plan: int, step: int) -> float:  # noqa: ARG001
        first = not seen or seen[-1] != plan
        seen.append(plan)
        return (10.0 if first else 1.0) * [1.0, 0.9][plan]

    state, _, _ = tried(step_s, 2)
    assert state.running == 1
    assert max(step_s for entry in state.entries for step_s in entry.seen_s) <= 1.0


def test_short_steps_have_longer_rounds() -> None:
    _, long, _ = tried(lambda *_: 1.0, 2)
    _, short, _ = tried(lambda *_: 0.01, 2)
    assert len(long) < 20
    assert 150 < len(short) < 250, "half a second each round"


def test_by_a_noise_of_a_tenth_the_better_plan_is_missed_seldom_and_a_bad_one_never_chosen() -> None:
    chosen = []
    for seed in range(200):
        rng = random.Random(seed)
        state, _, _ = tried(lambda plan, _, rng=rng: [1.0, 0.9, 1.3][plan] * rng.uniform(0.9, 1.1), 3)
        chosen.append(state.running)
    assert chosen.count(1) > 170
    assert 2 not in chosen


def test_the_words_name_every_plan_and_its_seconds() -> None:
    _, _, decisions = tried(lambda plan, _: [1.0, 0.8][plan], 2)
    assert [d.reason for d in decisions if isinstance(d, Reshard)] == ["autotune: plan 1 1 s a step; now plan 2"]
    assert decisions[-1] == Keep("autotune: plan 1 1 s, plan 2 0.8 s a step; plan 2 goes on")


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


def test_the_fastest_device_alone_is_tried_although_it_is_predicted_to_be_slower() -> None:
    """ResNet-8 on four unequal hosts: three were predicted to take 0.13 s and took 0.18, the fastest alone 0.18 and took 0.13.
    It was out of reach, and `auto` went on with a fleet that was slower than one of its devices."""
    graph = trace(build_net("two-conv:8:16", (3, 32, 32), 10), torch.zeros(2, 3, 32, 32)).graph
    three, data = (named_plan(name, graph, 32, Speeds((2.0, 1.0, 1.0))) for name in ("model", "data"))
    alone = Plan("alone", graph.fingerprint, 3, 32, {}, One(0))
    found = [Candidate(three, 1.0), Candidate(data, 1.1), Candidate(alone, 1.0 + REACH_ALONE - 0.01)]
    assert worth_trying(found, graph) == found
    assert worth_trying([*found[:2], Candidate(alone, 1.0 + REACH_ALONE + 0.01)], graph) == found[:2]
    assert worth_trying([Candidate(alone, 1.0), Candidate(data, 1.1)], graph) == [Candidate(alone, 1.0)]


def test_a_plan_out_of_reach_is_not_tried_however_few_messages_it_has() -> None:
    graph = trace(build_net("two-conv:8:16", (3, 32, 32), 10), torch.zeros(2, 3, 32, 32)).graph
    fast, quiet = (named_plan(name, graph, 32, Speeds((1.0, 1.0))) for name in ("model", "data"))
    near = [Candidate(fast, 1.0), Candidate(quiet, 1.0 + REACH / 2)]
    assert worth_trying(near, graph) == near
    assert worth_trying([near[0], Candidate(quiet, 1.0 + 2 * REACH)], graph) == near[:1]
    assert worth_trying([Candidate(quiet, 1.0), Candidate(fast, 1.1)], graph) == [Candidate(quiet, 1.0)], (
        "more messages"
    )


# ------------------------------------------------------------------------------------------------------ training by it


def plans_to_try() -> list[Plan]:
    model = graph_of("two-conv").fingerprint
    filters = {"conv1": Filter((2, 2, 1)), "conv2": Filter((3, 2, 2)), "fc": Channel((12, 8, 8))}
    return [
        Plan("filters", model, 3, BATCH, filters, One(0)),
        Plan("mixed", model, 3, BATCH, {"fc": Filter((2, 2, 1))}, Batch((9, 7, 4))),
        Plan("samples", model, 3, BATCH, {}, Batch((7, 7, 6))),
    ]


def test_training_while_plans_are_tried_is_that_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and Adam's state go from plan to plan, a smaller last batch lies between; shares are watched afterwards."""
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

        def tell(_: int, decision: Reshard | Keep) -> None:
            told.append(decision.reason)
            followed.append(here.plan)

        rebalancer = Rebalancer(here, optimizer, tell=tell, others=plans[1:])
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
    assert told_of_it[-1].endswith("goes on")
    assert followed[:2] == plans_to_try()[1:]


def test_the_loader_hands_out_the_parts_of_each_plan_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole batches for a layer that is split by filter, shares of it for one that is split by batch."""
    monkeypatch.setattr("convoy.train.autotune.ROUND_S", 0.0)

    model = nets.build("two-conv")

    def work(group: Group) -> list[Layout]:
        plans = plans_to_try()
        here = convoy.distribute(model, plans[0], group, torch.zeros(2, 3, 8, 8, dtype=torch.float64))
        rebalancer, seen = Rebalancer(here, others=plans[1:]), []
        for _ in range(60):
            (layout,) = here.input_layouts(BATCH)
            if not seen or seen[-1] != layout:
                seen.append(layout)
            rebalancer.step(BATCH)
        return seen

    with one_trace("two-conv", torch.float64):
        for seen in run_on_threads(3, work):
            assert seen[:3] == [Replicated((0, 1, 2)), Split(0, (9, 7, 4)), Split(0, (7, 7, 6))]


def test_plans_of_another_model_are_refused_by_name() -> None:
    model = nets.build("two-conv")
    strange = Plan("strange", "another", 3, BATCH, {}, Batch((7, 7, 6)))

    def work(group: Group) -> None:
        here = convoy.distribute(model, plans_to_try()[0], group, torch.zeros(2, 3, 8, 8).double())
        with pytest.raises(convoy.PlanError, match="'strange' was made for another model"):
            Rebalancer(here, others=[strange])

    with one_trace("two-conv", torch.float64):
        run_on_threads(3, work)
