"""Device programs: by hand, as text, their bytes, and refusal of invalid ones."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import convoy.plan.lower
from convoy.errors import PlanError
from convoy.layout.collectives import schedule
from convoy.layout.comm_dtype import CommDtype
from convoy.layout.layout import Replicated, Split
from convoy.model.graph import Graph
from convoy.model.tracing import trace
from convoy.plan.compile import compile_all, compile_device
from convoy.plan.device_program import (
    DeviceProgram,
    EndSum,
    ExchangeRound,
    Fused,
    Make,
    Operation,
    Part,
    PlannedMessage,
    TakeSum,
    WaitRound,
    operation_line,
    program_lines,
)
from convoy.plan.exchange_program import MoveSpec, clear_move_cache, operations_of
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.strategy import Batch, Filter
from convoy.runtime.gradients import SumLane
from tests.support import nets
from tests.support.one_device import by_name, graph_of
from tests.support.program_check import check_programs

PLANS = ("data", "data-by-speed", "master", "model", "hybrid")


def programs(net: str, plan: Plan, **options: bool) -> list[DeviceProgram]:
    graph = graph_of(net)
    return compile_all(lower(plan, graph), graph, **options)


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_batch_split_by_hand() -> None:
    """Two of three samples here. One convolution; the outputs go to both devices, the gradients are summed in a ring of two.

    Weight and bias: 2*9 + 2 = 20 entries, halves of 10. The loss reads all 3x2x2x2 = 24 outputs; 16 are made here.
    """
    graph = trace(nn.Sequential(nn.Conv2d(1, 2, 3)), torch.zeros(3, 1, 4, 4)).graph
    plan = Plan("hand", graph.fingerprint, 2, 3, {}, Batch((2, 1)))
    found = compile_device(lower(plan, graph), graph, 0)
    assert [operation_line(op) for op in found.forward] == [
        "Compute(step=0, phase='forward', layer='0', reads=('input_1',), writes=('0',), wants=(False,), size=(2, 2, 1))",
        "Make(step=1, buffer='0@copies(0,1)', shape=(3, 2, 2, 2), result=True)",
        "ExchangeRound(step=1, number=0, sends=[16 of '0' to 1], receives=[8 of '0@copies(0,1)[2:3,0:2,0:2,0:2]' from 1])",
        "Copy(step=1, source='0', target='0@copies(0,1)[0:2,0:2,0:2,0:2]', size=16)",
        "WaitRound(step=5, begun=1, number=0)",
    ]
    assert [operation_line(op) for op in found.backward[-3:]] == [
        "BeginSum(step=4, buffer='sum 4')",
        "FinishSums(step=5, sums=(4,))",
        "Unpack(step=4, buffer='sum 4', keys=('0.weight', '0.bias'), sizes=(18, 2), copied=True)",
    ]
    assert [type(op).__name__ for op in found.backward[:-3]] == ["View", "Compute", "Pack"]
    assert [operation_line(op) for op in found.sums] == [
        "TakeSum(step=4, buffer='sum 4')",
        "Make(step=4, buffer='slot 1.0.0', shape=(10,), like='sum 4', slot=0)",
        "ExchangeRound(step=4, number=0, sends=[10 of 'sum 4[0:10]' to 1], receives=[10 of 'slot 1.0.0' from 1])",
        "WaitRound(step=4, begun=4, number=0)",
        "Add(step=4, source='slot 1.0.0', target='sum 4[10:20]', size=10)",
        "ExchangeRound(step=4, number=1, sends=[10 of 'sum 4[10:20]' to 1], receives=[10 of 'sum 4[0:10]' from 1])",
        "WaitRound(step=4, begun=4, number=1)",
        "EndSum(step=4, result='sum 4')",
    ]


def test_program_text_lists_operations_by_lane() -> None:
    (program, _) = programs("two-conv", replace(by_name("data", "two-conv"), wire="inexact-bf16"))[:2]
    lines = program_lines(program)
    assert lines[0].startswith("device 0 of")
    phases = [lines.index(f"{phase}:") for phase in ("forward", "backward", "sums")]
    assert phases == sorted(phases)
    assert len(lines) - 1 - len(phases) == len(list(program.operations()))
    assert any("narrow of 'message" in line for line in lines[phases[2] :])


@pytest.mark.parametrize("wire", ["exact", "inexact-bf16"])
def test_last_all_reduce_round_is_awaited_after_all_others(monkeypatch: pytest.MonkeyPatch, wire: CommDtype) -> None:
    """Each round beside computing is 10 ms late, and the wire rested meanwhile: 40 of 710 ms of a VGG-11. What is rounded on
    its way is copied when it has arrived, so it is waited for where it was."""
    monkeypatch.setattr(convoy.plan.lower, "BUCKET_ENTRIES", 140)
    graph = graph_of("two-conv")
    found = compile_device(lower(replace(by_name("data", "two-conv"), wire=wire, reduce="direct"), graph), graph, 0)
    waits = [(type(op), op.step) for op in found.sums if isinstance(op, TakeSum | WaitRound)]
    *most, last = dict.fromkeys(step for _, step in waits)
    assert len(most) == 3
    apart = [pair for step in (*most, last) for pair in ((TakeSum, step), (WaitRound, step), (WaitRound, step))]
    behind = [pair for step in (*most, last) for pair in ((TakeSum, step), (WaitRound, step))]
    assert waits == (behind + [(WaitRound, step) for step in (*most, last)] if wire == "exact" else apart)
    lane = SumLane.of(found.sums)
    assert list(lane.sums) == [*most, last]
    assert [op.step for op in lane.behind] == (most if wire == "exact" else [])


def test_partial_loss_skips_unneeded_backward() -> None:
    graph = graph_of("auxiliary")
    steps = lower(by_name("data", "auxiliary"), graph)
    whole, part = compile_device(steps, graph, 0), compile_device(steps, graph, 0, missing=frozenset([1]))
    assert part.forward == whole.forward
    assert len(list(part.operations())) < len(list(whole.operations()))
    assert set(part.output_gradients) < set(whole.output_gradients)
    for plan in ("data", "master", "hybrid"):  # no device waits for a gradient that another one leaves out
        steps = lower(by_name(plan, "auxiliary"), graph)
        check_programs([compile_device(steps, graph, d, missing=frozenset([0])) for d in range(4)])


# --- what holds for all ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", nets.NETS)
def test_programs_are_valid_and_send_the_listed_bytes(net: str) -> None:
    """Cover named plans, exact or narrow, inputs whole or in chunks: one combination per net and plan."""
    for number, plan in enumerate(PLANS, start=list(nets.NETS).index(net)):
        check_all(net, plan, [WAYS[number % 4]])


@pytest.mark.slow
@pytest.mark.parametrize("net", nets.NETS)
def test_programs_of_every_layout(net: str) -> None:
    for plan in PLANS:
        check_all(net, plan, WAYS)


WAYS: list[tuple[CommDtype, int]] = [("exact", 1), ("exact", 3), ("inexact-bf16", 1), ("inexact-bf16", 3)]
"""How numbers travel, and in how many pieces."""


def check_all(net: str, plan: str, ways: Sequence[tuple[CommDtype, int]]) -> None:
    graph = graph_of(net)
    for wire, pieces in ways:
        steps = lower(replace(by_name(plan, net), wire=wire, chunks=pieces), graph)
        found = compile_all(steps, graph)
        check_programs(found)
        sent = Counter({(each.device, peer): n for each in found for peer, n in each.sent_bytes(4).items()})
        assert sent == steps.traffic(4), (plan, wire, pieces)


# --- broken by hand --------------------------------------------------------------------------------------------------


def broken(
    change: Callable[[list[Operation]], Sequence[Operation]],
    lane: str = "forward",
    device: int = 0,
    net: str = "two-conv",
) -> list[DeviceProgram]:
    """Return the programs of an uneven filter split with one of them changed."""
    graph: Graph = graph_of(net)
    plan = Plan("broken", graph.fingerprint, 2, 10, {graph.weighted[1].name: Filter((4, 3))}, Batch((6, 4)))
    found = compile_all(lower(plan, graph), graph)
    check_programs(found)
    changed = tuple(change(list(getattr(found[device], lane))))
    found[device] = replace(found[device], **{lane: changed})
    return found


def without(kind: type, number: int = 0) -> Callable[[list[Operation]], Sequence[Operation]]:
    def change(operations: list[Operation]) -> Sequence[Operation]:
        places = [place for place, op in enumerate(operations) if isinstance(op, kind)]
        del operations[places[number]]
        return operations

    return change


def changed(kind: type, **values: Any) -> Callable[[list[Operation]], Sequence[Operation]]:
    def change(operations: list[Operation]) -> Sequence[Operation]:
        place = next(place for place, op in enumerate(operations) if isinstance(op, kind))
        operations[place] = replace(operations[place], **values)
        return operations

    return change


def with_message(ends: str, number: int, change: Callable[[PlannedMessage], list[PlannedMessage]]) -> Any:
    """Change one message: the first (`number` 0) or last (-1) of the "sends" or "receives" of all rounds."""

    def changed_round(operations: list[Operation]) -> Sequence[Operation]:
        rounds = [p for p, op in enumerate(operations) if isinstance(op, ExchangeRound) and getattr(op, ends)]
        place = rounds[number]
        messages = list(getattr(operations[place], ends))
        messages[number : number + 1 or None] = change(messages[number])
        operations[place] = replace(operations[place], **{ends: tuple(messages)})
        return operations

    return changed_round


def moved_to_front(kind: type) -> Callable[[list[Operation]], Sequence[Operation]]:
    def change(operations: list[Operation]) -> Sequence[Operation]:
        place = next(place for place, op in enumerate(operations) if isinstance(op, kind))
        return [operations[place], *operations[:place], *operations[place + 1 :]]

    return change


@pytest.mark.parametrize(
    ("change", "lane", "said"),
    [
        (with_message("receives", -1, lambda _: []), "backward", "device program 1: nobody receives the other end of"),
        (with_message("sends", -1, lambda _: []), "backward", "device program 1: nobody sends the other end of"),
        (without(ExchangeRound), "sums", "meets .* come in one order"),
        (with_message("sends", 0, lambda m: [replace(m, size=7)]), "forward", "one size"),
        (changed(ExchangeRound, step=999), "forward", "meets"),
        (without(Make), "forward", "is not there to receive into"),
        (without(WaitRound), "forward", "wait for it first"),
        (without(TakeSum), "sums", "(wait for each other for ever|wait for it first|read before)"),
        (without(Fused), "forward", "is read before it is made"),
        (without(EndSum), "sums", "wait for each other for ever: device 0: FinishSums"),
        (moved_to_front(WaitRound), "forward", "which this device has not begun"),
        (
            with_message("sends", 0, lambda m: [replace(m, part=Part("nobody made this"))]),
            "forward",
            "read before it is made",
        ),
    ],
)
def test_a_broken_program_is_refused_by_name(
    change: Callable[[list[Operation]], Sequence[Operation]], lane: str, said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        check_programs(broken(change, lane))


def test_cached_moves_of_old_shares_are_dropped() -> None:
    """Regression: a job whose devices changed 700 times had grown by 60 MB."""
    clear_move_cache()
    for first in range(1, 8):
        src, dst = Split(0, (first, 9 - first)), Replicated((0, 1))
        moved = schedule(src, dst, (9, 2))
        operations_of(MoveSpec(0, moved, 0, src, dst, (9, 2), "float32", "piece", "result"))
    assert schedule.cache_info().currsize == operations_of.cache_info().currsize == 7
    clear_move_cache()
    assert schedule.cache_info().currsize == operations_of.cache_info().currsize == 0
