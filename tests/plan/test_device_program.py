"""Device programs: by hand, printed and read back, their bytes, and broken ones that are refused before anything runs."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import convoy.plan.lower
from convoy.errors import PlanError
from convoy.layout.comm_dtype import CommDtype
from convoy.model.graph import Graph
from convoy.model.tracing import trace
from convoy.plan.compile import compile_all, compile_device
from convoy.plan.device_program import (
    Compute,
    DeviceProgram,
    Fused,
    Make,
    Merge,
    Operation,
    Pack,
    Part,
    Receive,
    Send,
    Signal,
    Wait,
    reads_of,
)
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.program_check import check_programs
from convoy.plan.program_text import operation_line, parse_program, program_lines
from convoy.plan.strategy import Batch, Filter
from convoy.runtime.gradients import SumLane
from tests.support import nets
from tests.support.one_device import by_name, graph_of

PLANS = ("data", "data-by-speed", "master", "model", "hybrid")


def programs(net: str, plan: Plan, **options: bool) -> list[DeviceProgram]:
    graph = graph_of(net)
    return compile_all(lower(plan, graph), graph, **options)


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_a_split_by_samples_by_hand() -> None:
    """Two of three samples here. One convolution; the outputs go to both devices, the gradients are summed in a ring of two.

    Weight and bias: 2*9 + 2 = 20 entries, halves of 10. The loss reads all 3x2x2x2 = 24 outputs; 16 are made here.
    """
    graph = trace(nn.Sequential(nn.Conv2d(1, 2, 3)), torch.zeros(3, 1, 4, 4)).graph
    plan = Plan("hand", graph.fingerprint, 2, 3, {}, Batch((2, 1)))
    found = compile_device(lower(plan, graph), graph, 0)
    assert [operation_line(op) for op in found.forward] == [
        "compute(step=0, phase='forward', layer='0', reads=('input_1',), writes=('0',), wants=(False,), size=(2, 2, 1))",
        "make(step=1, buffer='0@copies(0,1)', shape=(3, 2, 2, 2), result=True)",
        "send(step=1, number=0, peer=1, part='0', size=16)",
        "receive(step=1, number=0, peer=1, part=('0@copies(0,1)', '2:3,0:2,0:2,0:2'), size=8)",
        "copy(step=1, source='0', target=('0@copies(0,1)', '0:2,0:2,0:2,0:2'), size=16)",
        "wait(step=5, events=(('round', 1, 0),))",
    ]
    assert [type(op).__name__ for op in found.backward] == ["View", "Compute", "Pack", "Signal", "Wait", "Unpack"]
    assert [operation_line(op) for op in found.sums] == [
        "wait(step=4, events=(('ready', 4, 0),))",
        "make(step=4, buffer='slot 1.0.0', shape=(10,), reused=True)",
        "send(step=4, number=0, peer=1, part=('sum 4', '0:10'), size=10)",
        "receive(step=4, number=0, peer=1, part='slot 1.0.0', size=10)",
        "wait(step=4, events=(('round', 4, 0),))",
        "add(step=4, source='slot 1.0.0', target=('sum 4', '10:20'), size=10)",
        "send(step=4, number=1, peer=1, part=('sum 4', '10:20'), size=10)",
        "receive(step=4, number=1, peer=1, part=('sum 4', '0:10'), size=10)",
        "wait(step=4, events=(('round', 4, 1),))",
        "signal(step=4, event=('summed', 4, 0))",
    ]


@pytest.mark.parametrize("wire", ["exact", "inexact-bf16"])
def test_the_last_round_of_a_sum_is_awaited_behind_all_sums(monkeypatch: pytest.MonkeyPatch, wire: CommDtype) -> None:
    """Each round beside computing is 10 ms late, and the wire rested meanwhile: 40 of 710 ms of a VGG-11. What is rounded on
    its way is copied when it has arrived, so it is waited for where it was."""
    monkeypatch.setattr(convoy.plan.lower, "BUCKET_ENTRIES", 140)
    graph = graph_of("two-conv")
    found = compile_device(lower(replace(by_name("data", "two-conv"), wire=wire, reduce="direct"), graph), graph, 0)
    waits = [(op.events[0][0], op.step) for op in found.sums if isinstance(op, Wait)]
    *most, last = dict.fromkeys(step for _, step in waits)
    assert len(most) == 3
    apart = [pair for step in (*most, last) for pair in (("ready", step), ("round", step), ("round", step))]
    behind = [pair for step in (*most, last) for pair in (("ready", step), ("round", step))]
    assert waits == (behind + [("round", step) for step in (*most, last)] if wire == "exact" else apart)
    lane = SumLane.of(found.sums)
    assert list(lane.sums) == [*most, last]
    assert [op.step for op in lane.behind if isinstance(op, Wait)] == (most if wire == "exact" else [])


def test_a_value_with_two_readers_is_merged_before_its_gradient_is_read() -> None:
    """Each layer by itself: the gradient of a residual comes from two of them."""
    graph = graph_of("resnet")
    found = compile_device(lower(by_name("data-by-speed", "resnet"), graph), graph, 0, fuse=False)
    merges = {op.buffer: place for place, op in enumerate(found.backward) if isinstance(op, Merge)}
    assert merges
    for buffer, place in merges.items():
        readers = [at for at, op in enumerate(found.backward) if buffer in reads_of(op)]
        assert place < min(readers)


def test_a_loss_of_some_outputs_leaves_out_the_rest_of_backward() -> None:
    graph = graph_of("auxiliary")
    steps = lower(by_name("data", "auxiliary"), graph)
    whole, part = compile_device(steps, graph, 0), compile_device(steps, graph, 0, missing=frozenset([1]))
    assert part.forward == whole.forward
    assert len(list(part.operations())) < len(list(whole.operations()))
    assert set(part.output_gradients) < set(whole.output_gradients)


# --- what holds for all ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", nets.NETS)
def test_programs_can_run_print_and_send_what_the_list_says(net: str) -> None:
    """By every plan by name, exact or narrow, inputs whole or in chunks: another of the four for each net and plan."""
    for number, plan in enumerate(PLANS, start=list(nets.NETS).index(net)):
        check_all(net, plan, [WAYS[number % 4]])


@pytest.mark.slow
@pytest.mark.parametrize("net", nets.NETS)
def test_programs_of_every_way(net: str) -> None:
    for plan in PLANS:
        check_all(net, plan, WAYS)


WAYS: list[tuple[CommDtype, int]] = [("exact", 1), ("exact", 3), ("inexact-bf16", 1), ("inexact-bf16", 3)]
"""How numbers travel, and in how many pieces."""


def check_all(net: str, plan: str, ways: Sequence[tuple[CommDtype, int]]) -> None:
    graph = graph_of(net)
    for wire, pieces in ways:
        steps = lower(replace(by_name(plan, net), wire=wire, pieces=pieces), graph)
        found = compile_all(steps, graph)
        check_programs(found)
        assert [parse_program(program_lines(each)) for each in found] == found, (plan, wire, pieces)
        sent = Counter({(each.device, peer): n for each in found for peer, n in each.sent_bytes(4).items()})
        assert sent == steps.traffic(4), (plan, wire, pieces)


def test_without_overlap_everything_is_awaited_where_it_stands() -> None:
    for each in programs("two-conv", by_name("hybrid", "two-conv"), overlap=False):
        assert not each.sums
        check_programs(programs("two-conv", by_name("hybrid", "two-conv"), overlap=False))


# --- broken by hand --------------------------------------------------------------------------------------------------


def broken(
    change: Callable[[list[Operation]], Sequence[Operation]],
    lane: str = "forward",
    device: int = 0,
    net: str = "two-conv",
) -> list[DeviceProgram]:
    """The programs of filters in unequal shares, one of them changed."""
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


def moved_to_front(kind: type) -> Callable[[list[Operation]], Sequence[Operation]]:
    def change(operations: list[Operation]) -> Sequence[Operation]:
        place = next(place for place, op in enumerate(operations) if isinstance(op, kind))
        return [operations[place], *operations[:place], *operations[place + 1 :]]

    return change


@pytest.mark.parametrize(
    ("change", "lane", "said"),
    [
        (without(Receive, -1), "backward", "device program 1: nobody receives the other end of send"),
        (without(Send, -1), "backward", "device program 1: nobody sends the other end of receive"),
        (without(Send, -1), "sums", "nobody sends"),
        (without(Send), "sums", "meets receive.* come in one order"),
        (changed(Send, size=7), "forward", "one size"),
        (changed(Receive, narrow=True), "forward", "one width"),
        (changed(Send, step=999), "forward", "meets"),
        (without(Make), "forward", "is not there to receive into"),
        (without(Wait), "forward", "travels: wait for it first"),
        (without(Wait, -1), "forward", "(nobody waits for round|travels: wait for it first)"),
        (without(Wait), "sums", "(wait for each other for ever|travels: wait for it first|read before)"),
        (without(Fused), "forward", "is read before it is made"),
        (without(Compute), "forward", "is read before it is made"),
        (without(Pack), "backward", "is read before it is made|is not there"),
        (without(Signal), "sums", "wait for each other for ever: device 0: wait"),
        (moved_to_front(Wait), "forward", "which this device has not begun"),
        (changed(Send, part=Part("nobody made this")), "forward", "read before it is made"),
    ],
)
def test_a_broken_program_is_refused_by_name(
    change: Callable[[list[Operation]], Sequence[Operation]], lane: str, said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        check_programs(broken(change, lane))


def test_a_circle_of_waits_is_refused() -> None:
    """Each device waits for a round that the other begins after a wait of its own."""

    def program(device: int, first: int, second: int) -> DeviceProgram:
        def swap(step: int) -> list[Operation]:
            peer = 1 - device
            return [
                Make(step, f"in {step}", (4,)),
                Send(step, 0, peer, Part("x"), 4),
                Receive(step, 0, peer, Part(f"in {step}"), 4),
                Wait(step, (("round", step, 0),)),
            ]

        sums = [Wait(9, (("ready", 9, 0),)), *swap(second)]
        main = [*swap(first), Signal(9, ("ready", 9, 0))]
        return DeviceProgram(device, 2, 4, ("x",), (), (), tuple(main), (), tuple(sums))

    check_programs([program(0, 1, 2), program(1, 1, 2)])
    # Each begins with what the other begins on its second lane, which waits for the first.
    with pytest.raises(PlanError):
        check_programs([program(0, 1, 2), program(1, 2, 1)])


def test_a_summand_may_not_change_while_it_travels() -> None:
    def early(operations: list[Operation]) -> Sequence[Operation]:
        """The addition of the first round, before it has been waited for."""
        add = next(op for op in operations if type(op).__name__ == "Add")
        place = next(
            place for place, op in enumerate(operations) if isinstance(op, Wait) and op.events[0][0] == "round"
        )
        return [*operations[:place], add, *operations[place:]]

    with pytest.raises(PlanError, match=r"(wait for it first|read before anything is written)"):
        check_programs(broken(early, "sums"))


# --- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "an empty text"),
        ("program(device=0)", "line 1"),
        ("forward:", "line 1 .* cannot be read"),
        ("HEAD\n  send(step=1)", "line 2 .* in no phase"),
        ("HEAD\nforward:\n  leap(step=1)", "line 3 .*'leap' is no operation: use one of add, compute"),
        ("HEAD\nforward:\n  send(step=1)", "line 3 .*missing"),
        ("HEAD\nforward:\n  send(step=__import__('os').getpid())", "line 3 .* cannot be read"),
        ("HEAD\nforward:\n    compute(step=1)", "line 3 .* follows no fused"),
    ],
)
def test_a_text_that_is_no_program_is_refused_by_its_line(text: str, said: str) -> None:
    (head, *_) = program_lines(programs("two-conv", by_name("data", "two-conv"))[0])
    with pytest.raises(PlanError, match=said):
        parse_program(text.replace("HEAD", head))
