"""The wire format inexact-bf16: rounding, equal copies, bytes, costs and training.

bfloat16 holds 8 bits of precision: whole numbers up to 256, and every number to 2^-8 of itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.layout.comm_dtype import CommDtype, comm_dtype_of, parse_comm_dtype
from convoy.layout.layout import Layout, OnOne, Partial, Replicated, Split
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import PLANS, Speeds, named_plan
from convoy.plan.steps import GatherStatistics, GatherWeights, Move, SumGradients, Value, traffic
from convoy.plan.text import layer_rows, step_lines
from convoy.planner.planner import candidates
from convoy.runtime.exchange import StartedMove
from convoy.runtime.module import Distributed
from convoy.simulate.costs import Handling
from convoy.simulate.simulator import simulate
from tests.planner.test_planner import costs_of
from tests.runtime.test_exchange import LIMIT_S, Case, check_outcomes, every_case, move_all, own_shard
from tests.support import nets
from tests.support.described_fleets import asked
from tests.support.device_programs import handled
from tests.support.local_shards import DEVICES, every_layout
from tests.support.one_device import (
    OPTIMIZERS,
    Labelled,
    Training,
    by_name,
    graph_of,
    loss_of,
    one_trace,
    part,
    traffic_of,
)
from tests.support.threads import run_on_threads

BF16: CommDtype = "inexact-bf16"
ROUNDING = 2.0**-8
SHAPE = (10, 6)


def narrow(plan: Plan) -> Plan:
    return replace(plan, wire=BF16)


# --- names -----------------------------------------------------------------------------------------------------------


def test_wire_format_has_short_names() -> None:
    assert [parse_comm_dtype(name) for name in ("exact", "inexact-bf16", "bf16")] == ["exact", BF16, BF16]


def test_an_unknown_name_lists_the_choices() -> None:
    with pytest.raises(InputError, match=r"^unknown wire format 'fp8': choose one of exact, inexact-bf16$"):
        parse_comm_dtype("fp8")


def test_only_wide_floats_are_rounded() -> None:
    dtypes = ("float64", "float32", "float16", "bfloat16", "int64", "uint8", "bool", "complex64")
    assert [dtype for dtype in dtypes if comm_dtype_of(dtype, BF16) == BF16] == ["float64", "float32"]
    assert {comm_dtype_of(dtype, "exact") for dtype in dtypes} == {"exact"}


# --- moves -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bytes_"), [("float64", 2), ("float32", 2), ("float16", 2), ("int64", 8)])
def test_moves_keep_bf16_values_and_count_their_bytes(dtype: str, bytes_: int) -> None:
    """Small whole numbers and their sums pass every move and collective unchanged."""
    cases = every_case(every_layout(SHAPE), SHAPE)
    outcomes = run_on_threads(DEVICES, lambda group: move_all(group, cases, dtype, wire=BF16), LIMIT_S)
    check_outcomes(cases, outcomes, dtype, bytes_)


@pytest.mark.parametrize("whole", [torch.tensor([2**40 + 1]), torch.tensor([1 + 2**-10], dtype=torch.float16)], ids=str)
def test_other_dtypes_arrive_bit_for_bit(whole: Tensor) -> None:
    """Labels, indices and half precision need more bits than bfloat16 has."""

    def work(group: Group) -> Tensor:
        case = Case(OnOne(0), Replicated((0, 1)), (1,))
        return StartedMove(group, case.schedule, whole[: 1 - group.device], case.src, case.dst, case.shape, BF16).land()

    for found in run_on_threads(2, work, LIMIT_S):
        assert found.dtype == whole.dtype
        assert torch.equal(found, whole)


def moved(cases: Sequence[Case], summands: Any = None) -> list[list[Tensor]]:
    """Random float32 numbers, or this row of summands, through each move with bf16 on the wire; by device."""

    def work(group: Group) -> list[Tensor]:
        results = []
        for case in cases:
            shard = own_shard(group, case.src, drawn(case.shape), np.random.default_rng(1)).float()
            if summands is not None:
                shard = torch.tensor([summands[group.device]], dtype=torch.float32)
            results.append(StartedMove(group, case.schedule, shard, case.src, case.dst, case.shape, BF16).land())
        return results

    return run_on_threads(DEVICES, work, LIMIT_S)


def drawn(shape: tuple[int, ...]) -> Any:
    return np.random.default_rng(0).standard_normal(shape)


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def test_copies_are_bitwise_equal() -> None:
    """Every sender of copies keeps the rounded numbers too: producer, summing device, idle holders."""
    every = every_case(every_layout(SHAPE), SHAPE)
    cases = [case for case in every if isinstance(case.dst, Replicated) and any(case.schedule.rounds)]
    sums = [case for case in cases if isinstance(case.src, Partial) and len(case.src.devices) > 1]
    assert len(sums) > 50
    whole = torch.from_numpy(drawn(SHAPE)).float()
    for case, *results in zip(cases, *moved(cases), strict=True):
        assert isinstance(case.dst, Replicated)
        copies = [results[device] for device in case.dst.devices]
        travels = any(t.sender != t.receiver for transfers in case.schedule.rounds for t in transfers)
        assert all(torch.equal(copy, copies[0]) for copy in copies), str(case)
        if case in sums:
            # Four summands of size 3 or so, rounded on each of at most four ways.
            if case.schedule.in_place:  # in one round the sum is made of what travelled, and travels no more
                assert torch.equal(copies[0], rounded(copies[0])), str(case)
            assert float((copies[0] - whole).abs().max()) < 4 * 4 * 4 * ROUNDING, str(case)
        else:
            assert torch.equal(copies[0], rounded(whole) if travels else whole), str(case)


@pytest.mark.parametrize("readers", [(0, 1, 2, 3), (3, 1)], ids=str)
def test_a_large_direct_sum_is_rounded_once_and_copied(readers: tuple[int, ...]) -> None:
    """20,000 entries take two rounds: the sum is sent, so its owner keeps the rounded numbers."""
    case = Case(Partial((0, 1, 2, 3)), Replicated(readers), (20_000,), "direct")
    (*results,) = (row[0] for row in moved([case]))
    copies = [results[device] for device in readers]
    assert all(torch.equal(copy, copies[0]) for copy in copies)
    assert torch.equal(copies[0], rounded(copies[0]))


def test_unsent_rows_are_not_rounded() -> None:
    """The first four rows stay local; the others arrive rounded. In a sum, the own summand stays wide."""
    shares = (4, 0, 6, 0)
    kept, summed = Case(OnOne(0), Split(0, shares), SHAPE), Case(Partial((0, 2)), Split(0, shares), SHAPE)
    by_device = moved([kept, summed])
    whole = torch.from_numpy(drawn(SHAPE)).float()
    assert torch.equal(by_device[0][0], whole[:4])
    assert torch.equal(by_device[2][0], rounded(whole[4:]))
    rng = np.random.default_rng(1)
    other = torch.from_numpy(rng.standard_normal(SHAPE)).float()
    first = torch.from_numpy(drawn(SHAPE) - other.double().numpy())
    assert torch.allclose(by_device[0][1], first[:4].float() + rounded(other[:4]), rtol=0, atol=1e-6)


def test_summands_are_added_in_full_width() -> None:
    """256 + 1 + 1 + 1: added in bfloat16, where 256 + 1 is 256, it would stay 256, and a mean would be 65 or so.

    On one device the sum is 259. As copies it is rounded once more: 258 and 260 are as near, and 260 has the even last bit.
    """
    everyone = (0, 1, 2, 3)
    cases = [Case(Partial(everyone), OnOne(0), (1,)), Case(Partial(everyone), OnOne(2), (1,))]
    cases.append(Case(Partial(everyone), Replicated(everyone), (1,), "star"))
    by_device = moved(cases, (256.0, 1.0, 1.0, 1.0))
    assert (by_device[0][0].item(), by_device[2][1].item()) == (259.0, 259.0)
    assert [results[2].item() for results in by_device] == [260.0] * 4


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", ["two-conv", "resnet"])
@pytest.mark.parametrize("plan", [*PLANS])
def test_bytes_sent_match_the_cost_model(plan: str, net: str) -> None:
    """Numbers of 8 bytes travel in 2; only the statistics of batch norms, and weights, travel as they are."""
    exact, graph = by_name(plan, net), graph_of(net)
    assert traffic_of(net, narrow(exact), 10) == lower(narrow(exact), graph).traffic(8)
    before, after = lower(exact, graph), lower(narrow(exact), graph)
    as_they_are = [s for s in after.steps if isinstance(s, GatherStatistics | GatherWeights)]
    exactly = sum(sum(traffic(s, 8).values()) for s in as_they_are)
    shares_statistics = net == "resnet" and plan in ("data", "data-by-speed", "hybrid", "spatial")
    assert (exactly > 0) is (plan == "sharded" or shares_statistics)
    assert 4 * (after.traffic(8).total() - exactly) == before.traffic(8).total() - exactly
    assert 2 * (after.traffic(4).total() - exactly // 2) == before.traffic(4).total() - exactly // 2
    assert after.traffic(2) == before.traffic(2)


def test_bare_parameter_is_moved_unrounded() -> None:
    """Layer outputs are rounded when sent; values without a batch axis come from parameters and buffers."""
    graph = graph_of("bare")
    moves = [s for s in lower(narrow(by_name("model", "bare")), graph).steps if isinstance(s, Move)]
    batched = {move: graph[move.reads.layer].batched for move in moves}
    assert set(batched.values()) == {True, False}
    assert all((move.wire == BF16) is batched[move] for move in moves)


# --- prices ----------------------------------------------------------------------------------------------------------

EVERYONE = Replicated((0, 1))
SUM = SumGradients(0, ("a", "b"), (60, 40), 0, (0, 1), "ring", wire=BF16)


def move(src: Layout, dst: Layout, phase: Any = "forward") -> Move:
    """Return a move of 60 numbers: 5 samples, 3 channels, 2x2."""
    shape = (5, 3, 2, 2)
    return Move(0, phase, Value("a", shape, src), Value("b", shape, dst), "ring", wire=BF16)


def test_copies_are_narrowed_once_and_widened_in_place() -> None:
    """Device 0 narrows its 40 numbers, then writes those and the 20 received into the 60 wide ones."""
    step = move(Split(1, (2, 1)), EVERYONE)
    assert handled(step, 0) == [(Handling(copied=40, made=(40,)), Handling(copied=60, made=(60, 20)))]
    step = move(Split(0, (3, 2)), EVERYONE)
    assert handled(step, 1) == [(Handling(copied=24, made=(24,)), Handling(copied=60, made=(60, 36)))]


def test_a_producer_narrows_and_widens_its_own_copy() -> None:
    step = move(OnOne(0), EVERYONE)
    assert handled(step, 0) == [(Handling(copied=120, made=(60, 60)), Handling())]
    assert handled(step, 1) == [(Handling(), Handling(copied=60, made=(60, 60)))]


def test_only_sent_rows_are_narrowed() -> None:
    assert handled(move(OnOne(0), OnOne(1)), 0) == [(Handling(copied=60, made=(60,)), Handling())]
    before, after = handled(move(EVERYONE, Split(1, (2, 1)), "backward"), 0)[0]
    assert before == Handling(copied=20, made=(20,))
    # Zeros, and the summand that arrived, widened.
    assert after == Handling(copied=40 + 40, added=40 + 40, made=(40, 40, 40))


def test_a_ring_of_two_casts_each_half_and_rounds_its_own() -> None:
    """100 numbers are joined; a half leaves, a half is widened and added. Then the own half is rounded, and leaves."""
    assert handled(SUM, 0) == [
        (Handling(copied=100 + 50, made=(100, 50)), Handling(copied=50, added=50, made=(50,))),
        (Handling(copied=50 + 50, made=(50,)), Handling(copied=50)),
    ]


def test_explain_names_the_wire_format() -> None:
    """The byte counts are half those of test_text.py's exact plan."""
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    graph = trace(model, torch.zeros(1, 1, 2, 2)).graph
    plan = narrow(named_plan("master", graph, 4, Speeds((3.0, 1.0))))
    lines = step_lines(lower(plan, graph))
    assert lines[3] == "     1  move     0: channel(3,1) -> on(0)  (32 bytes in 1 round, inexact-bf16)  after 0"
    assert "(nothing is sent)" in lines[9]
    assert sum(row.bytes_ for row in layer_rows(plan, graph)) == lower(plan, graph).traffic().total() == 32 + 32 + 16


def test_planner_uses_the_wire_format() -> None:
    """On a slow network all candidate plans use it, and the predicted step equals its replay."""
    graph = trace(build_net("two-conv:50:100", (3, 32, 32), 10), torch.zeros(2, 3, 32, 32)).graph
    costs = costs_of([88e9, 55e9, 33e9], 12.5e6)
    found, exact = candidates(asked(graph, 64, costs, wire=BF16)), candidates(asked(graph, 64, costs))
    assert {each.plan.wire for each in found} == {BF16}
    assert found[0].step_s == simulate(lower(found[0].plan, graph), graph, costs).step_s
    assert found[0].step_s < exact[0].step_s


# --- training --------------------------------------------------------------------------------------------------------

TOLERANCE = ROUNDING / 2
"""Of the losses of five steps, which are 1.6 or so; measured: 0.0011 at most."""

SIZES = (10, 3, 10, 10, 10)


@dataclass
class Trained:
    """One device's result: losses, its copies of parameters and buffers, the whole model."""

    losses: list[float] = field(default_factory=list)
    copies: dict[str, Tensor] = field(default_factory=dict)
    whole: dict[str, Tensor] = field(default_factory=dict)


def model_and_batches(net: str) -> tuple[nn.Module, list[Labelled]]:
    """Build once for all devices: threads share one random source and would draw different numbers."""
    model = nets.build(net, dtype=torch.float32)
    return model, Training(net, SIZES, dtype=torch.float32).batches(model)


def train(group: Group, plan: Plan, model: nn.Module, batches: Sequence[Labelled]) -> Trained:
    here = Distributed(model, plan, group, batches[0][0][:2])
    optimizer = OPTIMIZERS["sgd"](here.parameters())
    result = Trained()
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_of(here(part(here, x), batch=len(x)), y)
        loss.backward()
        optimizer.step()
        result.losses.append(loss.item())
    held = {**dict(here.named_parameters()), **dict(here.named_buffers())}
    for key, layout in here.layouts.items():
        if isinstance(layout, Replicated) and group.device in layout.devices:
            result.copies[key] = held[key].detach()
    result.whole = here.full_state_dict()
    return result


def on_threads(plan: Plan, net: str) -> list[Trained]:
    model, batches = model_and_batches(net)
    with one_trace(net, torch.float32):
        return run_on_threads(plan.devices, lambda group: train(group, plan, model, batches), LIMIT_S)


def check_close(plan: Plan, net: str) -> None:
    """Check equal losses on all devices, bitwise equal copies, and losses near but not equal to the exact plan's."""
    trained, exact = on_threads(narrow(plan), net), on_threads(plan, net)
    for each in trained:
        assert each.losses == trained[0].losses
        # Not an average of copies: a number is not always the sum of three thirds of it.
        assert all(torch.equal(each.whole[key], copy) for key, copy in each.copies.items())
    for key in {key for each in trained for key in each.copies}:
        first, *others = [each.copies[key] for each in trained if key in each.copies]
        assert all(torch.equal(first, other) for other in others), f"copies of {key} differ"
    apart = [abs(a - b) for a, b in zip(trained[0].losses, exact[0].losses, strict=True)]
    assert 0 < max(apart) < TOLERANCE, apart


@pytest.mark.parametrize(
    ("plan", "net"),
    [
        *((plan, "two-conv") for plan in PLANS),
        ("hybrid", "resnet"),
        *(pytest.param(plan, "resnet", marks=pytest.mark.slow) for plan in PLANS if plan != "hybrid"),
    ],
)
def test_every_plan_trains_close_to_exact(plan: str, net: str) -> None:
    """Ten samples on four devices by speed: 7, 0, 2, 1; even shares are 3, 3, 2, 2."""
    check_close(by_name(plan, net), net)


def test_chunked_inputs_train_close_to_exact() -> None:
    plan = replace(by_name("model", "two-conv"), chunks=3)
    assert any(
        s.chunks == 3 and s.wire == BF16 for s in lower(narrow(plan), graph_of("two-conv")).steps if isinstance(s, Move)
    )
    check_close(plan, "two-conv")
