"""Outputs that stay with their samples: no gather in the program, so none in traffic, seconds and memory; and another plan."""

from dataclasses import replace

import pytest
import torch

from convoy.model.tracing import trace
from convoy.planner.predict import PlanningContext, predict_plan
from tests.planner.test_passes import fleet, roofline_costs
from tests.support.odd_nets import UNet
from tests.support.torch_seed import torch_seed

with torch_seed(0):
    GRAPH = trace(UNet(), torch.zeros(2, 3, 32, 32)).graph

FLEET = fleet((1e10, None), (5e9, None), (2e9, None))
BATCH = 24


def context(**more: object) -> PlanningContext:
    return PlanningContext.of(GRAPH, BATCH, roofline_costs(FLEET), FLEET, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["data", "data-by-speed", "model"])
def test_a_prediction_has_no_gather_of_outputs(name: str) -> None:
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


def test_auto_plans_for_where_outputs_are() -> None:
    """Where an image of logits has to come to all devices, sharing out samples costs more than where it stays."""
    everywhere, stays = (context(outputs=o).candidates() for o in ("everywhere", "where-computed"))
    assert {c.plan.outputs for c in everywhere} == {"everywhere"}
    assert {c.plan.outputs for c in stays} == {"where-computed"}
    assert stays[0].step_s < everywhere[0].step_s
    here = context(outputs="where-computed")
    found = predict_plan(stays[0].plan, here).step_s
    assert found <= 1.001 * min(predict_plan(here.named(n), here).step_s for n in ("data", "data-by-speed"))
