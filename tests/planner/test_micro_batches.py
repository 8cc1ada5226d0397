"""Steps of several micro-batches: predictions, plan choice, and proposals when memory is short."""

import re
from dataclasses import replace

import pytest

from convoy.errors import PlanError
from convoy.fleet import Fleet
from convoy.model.graph import Graph
from convoy.plan.lower import lower
from convoy.plan.presets import PLANS
from convoy.plan.steps import ComputeStep, SumGradients, traffic
from convoy.planner.planner import candidates
from convoy.planner.prediction import predict_plan, working
from convoy.planner.request import PlanRequest
from convoy.simulate.costs import Overheads
from convoy.simulate.memory import MemoryLimits, fewest_micro_batches, memory_of, micro_batch_words
from studies.roofline import roofline_costs
from tests.support.described_fleets import asked, fleet
from tests.support.one_device import by_name, graph_of
from tests.support.stacks import Stack

WIDE = Stack((2, 64, 64)).conv(2, 3).pool().flatten().linear(2048).graph()
CONVOLUTIONS = Stack((8, 32, 32)).conv(64, 3).conv(256, 3).conv(256, 3).pool().flatten().linear(10).graph()


def context_of(fleet: Fleet, graph: Graph, batch: int, passes: int) -> PlanRequest:
    return asked(graph, batch, roofline_costs(fleet), fleet, micro_batches=passes)


@pytest.mark.parametrize("name", PLANS)
def test_gradients_of_copied_weights_are_sent_once_a_step(name: str) -> None:
    passes = 5
    context = context_of(fleet((1e11, None), (5e10, None)), CONVOLUTIONS, 8, passes)
    plan = context.named(name)
    steps = [step for step in lower(plan, CONVOLUTIONS).steps if not isinstance(step, ComputeStep)]
    once = [s for s in steps if isinstance(s, SumGradients) and not s.into]
    sums = sum(sum(traffic(step, 4).values()) for step in once)
    rest = sum(sum(traffic(step, 4).values()) for step in steps) - sums
    found = predict_plan(plan, context)
    assert found.traffic_bytes * passes == pytest.approx(sums + passes * rest, abs=passes * plan.devices)
    assert sum(found.received_bytes) == pytest.approx(found.traffic_bytes, abs=plan.devices)


def test_optimizer_and_all_reduce_count_once_per_step() -> None:
    """One device takes 1 s for the optimizer and 1 ns per added byte; nothing else takes time."""
    graph, entries = WIDE, sum(p.entries for layer in WIDE.layers.values() for p in layer.trainable)
    device = fleet((1e20, None))
    costs = replace(
        roofline_costs(device),
        overheads=(Overheads(add_s_per_byte=1e-9),),
        update_s_per_entry=(1.0 / entries,),
    )
    times = []
    for passes in (1, 2, 5):
        context = asked(graph, 1, costs, device, micro_batches=passes)
        found = predict_plan(context.named("data"), context)
        assert found.image_j == pytest.approx(2.0 * found.step_s, rel=1e-3)  # 2 W while it computes
        times.append(found.step_s * passes)
    adds_s = 4e-9 * entries
    assert times == pytest.approx([1.0, 1.0 + adds_s, 1.0 + 4 * adds_s], abs=1e-6)


def test_slow_link_needs_many_micro_batches() -> None:
    """2.6 MB of weights at 10 Mbit/s: an all-reduce takes longer than one micro-batch, but not than sixteen."""
    slow = fleet((1e11, None), (1e11, None), bytes_per_s=1.25e6)
    workers, speeds = [], []
    for passes in (1, 16):
        context = context_of(slow, CONVOLUTIONS, 64, passes)
        best = candidates(context)[0]
        workers.append(len(working(best.plan, CONVOLUTIONS)))
        speeds.append(best.step_s / predict_plan(best.plan, context).step_s)
    assert workers == [1, 2]
    assert speeds == pytest.approx([1.0, 1.0])


def test_the_refusal_names_micro_batches_that_fit() -> None:
    """Activations of 64 samples do not fit, those of a micro-batch do: the message names a number that fits."""
    tight = fleet((1e11, 30_000_000), (1e11, 30_000_000))
    context = context_of(tight, CONVOLUTIONS, 64, 1)
    with pytest.raises(PlanError, match=r"Make a step of \d+ micro-batches \(--accumulate \d+; in Python") as caught:
        candidates(context)
    passes = int(re.findall(r"--accumulate (\d+)", str(caught.value))[0])
    fewer = context_of(tight, CONVOLUTIONS, 64 // passes, passes)
    plan = candidates(fewer)[0].plan
    assert not MemoryLimits.of(tight).excess(
        [each.total_bytes for each in memory_of(lower(plan, CONVOLUTIONS), CONVOLUTIONS)]
    )
    with pytest.raises(PlanError, match=f"--accumulate {passes};"):  # half of them are already made, and do not do
        candidates(context_of(tight, CONVOLUTIONS, 64 // passes * 2, passes // 2))


def test_the_fewest_micro_batches_divide_the_batch() -> None:
    assert fewest_micro_batches(12, lambda samples: samples <= 5) == 3
    assert fewest_micro_batches(7, lambda samples: samples <= 5) == 7
    assert fewest_micro_batches(8, lambda samples: samples < 1) is None
    assert fewest_micro_batches(1, lambda _: True) is None


def test_the_message_says_that_batch_norm_sees_a_micro_batch() -> None:
    norm = graph_of("resnet")
    assert "different numbers" not in micro_batch_words(CONVOLUTIONS, 2)
    need = max(each.total_bytes for each in memory_of(lower(by_name("data", "resnet", batch=64), norm), norm))
    tight = context_of(fleet((1e11, need // 2), (1e11, need // 2)), norm, 64, 1)
    with pytest.raises(PlanError, match=r"with different numbers, since batch norm '\S+' and \d more would see"):
        candidates(tight)
