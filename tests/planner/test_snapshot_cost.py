"""The cost of snapshots for device losses, against hand-calculated cases."""

from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console

from convoy.model.graph import Graph
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.strategy import One
from convoy.planner.prediction import MOST_PART, PlanPrediction, kept_bytes, predict_plan, spare_price
from convoy.planner.request import PlanRequest
from convoy.report.plans import show_all
from convoy.simulate.costs import Overheads
from tests.support.described_fleets import asked, measured_fleet
from tests.support.nets import TwoConv

BATCH = 48


@pytest.fixture(scope="module")
def graph() -> Graph:
    return trace(TwoConv(16, 24), torch.zeros(2, 3, 8, 8)).graph


def entries(graph: Graph) -> int:
    return sum(layer.entries for layer in graph.layers.values())


def case(
    graph: Graph, name: str, copy_s_per_byte: float = 0.0, link: float = 1e12, devices: int = 3, **memory: int
) -> tuple[PlanPrediction, PlanRequest]:
    """Return a step of one second per device in which only the given copies and links cost time."""
    measured = measured_fleet(graph, [1.0] * devices, BATCH, memory_bytes=memory, link_bytes_per_s=link)
    costs = replace(
        measured.costs(graph), overheads=(Overheads(copy_s_per_byte=copy_s_per_byte),) * devices, update_s_per_entry=()
    )
    context = asked(graph, BATCH, costs, measured.fleet)
    row = predict_plan(named_plan(name, graph, BATCH, Speeds((1.0,) * devices)), context)
    return replace(row, step_s=1.0), context


def test_copied_weights_are_not_sent(graph: Graph) -> None:
    steps = lower(named_plan("data", graph, BATCH, Speeds((1.0, 1.0))), graph)
    assert kept_bytes(steps, graph, "sgd-momentum") == [(8 * entries(graph), 0)] * 2
    assert kept_bytes(steps, graph, "adam", itemsize=8) == [(24 * entries(graph), 0)] * 2


def test_split_weights_are_sent_to_the_next_device(graph: Graph) -> None:
    steps = lower(named_plan("model", graph, BATCH, Speeds((1.0, 1.0))), graph)
    assert sum(own for own, _ in kept_bytes(steps, graph, "sgd")) == 4 * entries(graph)
    assert all(own == alone for own, alone in kept_bytes(steps, graph, "sgd"))
    alone = lower(Plan("one", graph.fingerprint, 2, BATCH, {}, One(1)), graph)
    assert kept_bytes(alone, graph, "sgd") == [(0, 0), (4 * entries(graph),) * 2]


def test_copying_sets_the_snapshot_interval(graph: Graph) -> None:
    """A copy takes 0.07 s of a step of 1 s: every fourth step that is 1.75 %."""
    row, context = case(graph, "data", copy_s_per_byte=0.07 / (8 * entries(graph)))
    found = spare_price(row, context)
    assert found.every == 4
    assert found.part == pytest.approx(0.0175, rel=1e-3)
    assert found.sent_bytes == 0
    assert found.memory_bytes == (16 * entries(graph),) * 3
    assert spare_price(row, context, 1).part == pytest.approx(0.07, rel=1e-3)


def test_sending_overlaps_with_steps(graph: Graph) -> None:
    """A third of the state takes 2.5 s to the next device: behind three steps of a second it costs nothing, behind two half a
    second."""
    row, context = case(graph, "model")
    row = replace(row, sent_bytes=(0,) * 3, received_bytes=(0,) * 3)
    alone = max(size for _, size in kept_bytes(lower(row.plan, graph), graph, "sgd-momentum"))
    row, context = replace(row), case(graph, "model", link=alone / 2.5)[1]
    assert spare_price(row, context, 2).part == pytest.approx(0.25, rel=1e-2)
    found = spare_price(row, context)
    assert found.every == 3
    assert found.part < MOST_PART
    assert found.sent_bytes == pytest.approx(8 * entries(graph) / 3, abs=2)


def test_missing_memory_is_reported_and_one_device_needs_no_snapshot(graph: Graph) -> None:
    row, context = case(graph, "data", d1=1000)
    assert [each.partition(" needs")[0] for each in spare_price(row, context).overfull] == ["d1"]
    out = StringIO()
    show_all(Console(file=out, width=200), [row], context)
    assert "snapshots do not fit: d1 needs" in out.getvalue()
    row, context = case(graph, "data", copy_s_per_byte=0.07 / (8 * entries(graph)))
    out = StringIO()
    show_all(Console(file=out, width=200), [row], context)
    told = "(--spare auto), after every 4 steps, add 1.8% to the training time (--spare every-step: 7.0%); nothing sent"
    assert told in out.getvalue()
    row, context = case(graph, "data", devices=1)
    assert spare_price(row, context).memory_bytes == (0,)
