"""Local outputs: no gather in program, traffic, time and memory, and a different plan."""

import math
from dataclasses import replace

import pytest
import torch

from convoy.model.tracing import trace
from convoy.plan.plan import Plan
from convoy.plan.strategy import Batch, Placement, place
from convoy.planner.analytic import CostModel
from convoy.planner.planner import candidates
from convoy.planner.prediction import predict_plan
from convoy.planner.request import PlanRequest
from convoy.simulate.costs import Overheads
from tests.planner.test_micro_batches import fleet, roofline_costs
from tests.support.described_fleets import asked
from tests.support.nets import UNet
from tests.support.torch_seed import torch_seed

with torch_seed(0):
    GRAPH = trace(UNet(), torch.zeros(2, 3, 32, 32)).graph

FLEET = fleet((1e10, None), (5e9, None), (2e9, None))
BATCH = 24


def context(**more: object) -> PlanRequest:
    return asked(GRAPH, BATCH, roofline_costs(FLEET), FLEET, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["data", "data-by-speed", "model"])
def test_prediction_gathers_no_local_outputs(name: str) -> None:
    here = context()
    plan = here.named(name)
    everywhere, stays = (predict_plan(p, here) for p in (plan, replace(plan, outputs="where-computed")))
    assert stays.step_s < everywhere.step_s
    if name == "model":
        assert stays.traffic_bytes < everywhere.traffic_bytes
        return
    (output,) = GRAPH.outputs
    channels, height, width = GRAPH[output].shape
    assert everywhere.traffic_bytes - stays.traffic_bytes == 4 * BATCH * channels * height * width * 2
    assert max(m.exchange_bytes for m in stays.memory) <= max(m.exchange_bytes for m in everywhere.memory)


def test_pixel_loss_time_is_split_with_the_samples() -> None:
    """100 ns per byte: over the global batch for gathered outputs, over local samples for local ones."""
    without = context()
    overheads = tuple(Overheads(loss_s_per_byte=1e-7) for _ in FLEET.devices)
    priced = asked(GRAPH, BATCH, replace(without.costs, overheads=overheads), FLEET)
    plan = without.named("data")
    (output,) = GRAPH.outputs
    whole_s = 1e-7 * 4 * BATCH * math.prod(GRAPH[output].shape)
    for where, part in (("everywhere", 1.0), ("where-computed", 1 / 3)):
        here = replace(plan, outputs=where)
        more_s = predict_plan(here, priced).step_s - predict_plan(here, without).step_s
        assert more_s == pytest.approx(part * whole_s, rel=0.02)
        rows = [
            CostModel(asked(GRAPH, BATCH, each.costs, outputs=where)).compute_s(GRAPH[output], last_of(here))
            for each in (without, priced)
        ]
        assert rows[1] - rows[0] == pytest.approx(whole_s / 3 if where == "where-computed" else 0.0)
    alone_s = [each.alone_s(0) for each in (without, priced)]
    assert alone_s[1] - alone_s[0] == pytest.approx(whole_s)


def last_of(plan: Plan) -> Placement:
    return place(GRAPH, GRAPH[GRAPH.outputs[0]], Batch((BATCH // 3,) * 3), BATCH, plan.devices)


def test_auto_takes_output_placement_into_account() -> None:
    """Gathering logits of images makes a batch split more expensive than keeping them local."""
    everywhere, stays = (candidates(context(outputs=o)) for o in ("everywhere", "where-computed"))
    assert {c.plan.outputs for c in everywhere} == {"everywhere"}
    assert {c.plan.outputs for c in stays} == {"where-computed"}
    assert stays[0].step_s < everywhere[0].step_s
    here = context(outputs="where-computed")
    found = predict_plan(stays[0].plan, here).step_s
    assert found <= 1.001 * min(predict_plan(here.named(n), here).step_s for n in ("data", "data-by-speed"))
