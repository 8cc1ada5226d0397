"""Models people use, untouched: planned for unequal devices, explained, and trained as on one device (float64, to 1e-10).

The fleet is described, not measured. One of its devices is so slow that no plan should give it work, so that shares of zero
are part of every test. The largest models are marked slow.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from convoy.fleet import Fleet
from convoy.layout.layout import holders
from convoy.model.graph import Graph
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.steps import ComputeStep
from convoy.plan.text import layer_rows, step_lines
from convoy.planner.planner import candidates
from studies.roofline import roofline_costs
from tests.support import model_zoo
from tests.support.described_fleets import asked
from tests.support.one_device import EXACT
from tests.support.traced_models import last

FLEET = Fleet.from_toml("""
[network]
send_bytes_per_s = 1e10
receive_bytes_per_s = 1e10
latency_s = 1e-6

[[host]]
name = "lab"
[[host]]
name = "office"
[[host]]
name = "shelf"

[[device]]
name = "workstation"
host = "lab"
kind = "cpu"
peak_flop_per_s = 4e9
memory_bytes_per_s = 4e9
[[device]]
name = "desktop"
host = "office"
kind = "cpu"
peak_flop_per_s = 2e9
memory_bytes_per_s = 2e9
[[device]]
name = "laptop"
host = "office"
kind = "cpu"
peak_flop_per_s = 1e9
memory_bytes_per_s = 2e9
[[device]]
name = "board"
host = "shelf"
kind = "cpu"
peak_flop_per_s = 1e5
memory_bytes_per_s = 1e5
""")
"""Slow devices on a fast network: at 32x32 and six samples there is work to share."""

BOARD = 3
FAST = ("unet", "thinking")


def _marked(names: Iterable[str], fast: Collection[str] = FAST) -> list[Any]:
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in names]


def graph_of(name: str) -> Graph:
    return model_zoo.traced(name, model_zoo.build(name)).graph


def _computing(plan: Plan, graph: Graph) -> set[int]:
    """The devices that compute for samples. Bare parameters lie on all, with what is made of them."""
    steps = [step for step in lower(plan, graph).phase("forward") if isinstance(step, ComputeStep)]
    return {device for step in steps if graph[step.layer].batched for device in holders(step.writes.layout)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", _marked(name for name in model_zoo.ZOO if name != "thinking"))
def test_auto_plans_it_explains_it_and_trains_it_as_one_device(name: str) -> None:
    model = model_zoo.build(name)
    graph = model_zoo.traced(name, model).graph
    plans = [each.plan for each in candidates(asked(graph, model_zoo.BATCH, roofline_costs(FLEET)))]
    # ConvNeXt at this size is fastest on one device, and left to it: the best plan of several is trained, too.
    plan = next(each for each in plans if len(_computing(each, graph)) > 1)
    assert plan is plans[0] or "convnext" in name
    assert BOARD not in _computing(plan, graph)

    lines, rows = step_lines(lower(plan, graph)), layer_rows(plan, graph)
    for layer in graph.layers.values():
        assert layer.kind == "input" or any(f" {layer.name}: " in line for line in lines), layer.name
    assert {row.layer for row in rows} == {layer.name for layer in graph.layers.values() if layer.kind != "input"}

    assert max(model_zoo.on_many(name, model, plan)) <= EXACT


@pytest.mark.parametrize("plan", ["data-by-speed", "hybrid", "master", "model"])
@pytest.mark.parametrize("name", _marked(("resnet18", *FAST, "shufflenet_v2_x1_0", "googlenet"), FAST[1:]))
def test_plans_by_name_train_it_as_one_device(name: str, plan: str) -> None:
    model = model_zoo.build(name)
    graph = model_zoo.traced(name, model).graph
    chosen = named_plan(plan, graph, model_zoo.BATCH, Speeds((4.0, 0.0, 2.0, 1.0)))
    assert max(model_zoo.on_many(name, model, chosen)) <= EXACT


def test_a_difference_would_be_seen() -> None:
    model = model_zoo.build("unet")
    given = model_zoo.batches("unet", model)
    expected, found = model_zoo.on_one(model, given), model_zoo.on_one(model, given)
    assert model_zoo.difference(found, expected) == 0.0
    found.weights["up1.bias"][0] += 2e-10
    assert model_zoo.difference(found, expected) > EXACT


NOTHING: set[str] = set()
WHOLE = {"shufflenet_v2_x1_0": {"chunk"}}
"""What no rule splits by filter, in the models that have any."""


@pytest.mark.parametrize("name", _marked(name for name in model_zoo.ZOO if name != "thinking"))
def test_what_no_rule_splits_runs_on_whole_samples(name: str) -> None:
    """No model of the zoo is one block, or has a layer that looks at other samples, batch norm aside."""
    layers = graph_of(name).layers.values()
    opaque = [layer for layer in layers if layer.kind == "opaque" and layer.batched]
    assert len(layers) > 10
    assert all(layer.per_sample for layer in layers)
    assert {layer.reason.rpartition(" of ")[2].rstrip("_0123456789") for layer in opaque} == WHOLE.get(name, NOTHING)


def test_a_model_that_cannot_be_taken_apart_runs_on_every_device_and_says_so() -> None:
    model = model_zoo.build("thinking")
    (x, _), *_ = model_zoo.batches("thinking", model)
    assert len({model.answer(sample)[1] for sample in x.split(1)}) > 1, "samples that are thought about differently"
    traced = model_zoo.traced("thinking", model)
    assert traced.note.startswith("the forward of Thinking runs on every device, because torch.fx cannot trace it")


@pytest.mark.parametrize(
    ("chance", "training", "kind"), [(0.5, True, "opaque"), (0.0, True, "elementwise"), (0.5, False, "elementwise")]
)
def test_stochastic_depth_drops_whole_samples_or_does_nothing(chance: float, training: bool, kind: str) -> None:
    """It was taken for a layer that looks at the other samples, because no two calls of it agree: one device did all of it."""
    model_zoo.make_importable()
    from torchvision.ops import StochasticDepth

    model = nn.Sequential(nn.Conv2d(3, 4, 3), StochasticDepth(chance, "row"), nn.Flatten())
    layer = trace(model, torch.zeros(2, 3, 8, 8), training=training).graph["stochastic_depth"]
    assert (layer.kind, layer.per_sample, layer.random) == (kind, True, kind == "opaque")


def test_noise_is_drawn_for_each_sample_by_itself() -> None:
    """No two draws agree, which looked as if the samples depended on each other: one device had to draw for all."""
    layer = last(lambda _, x: torch.rand_like(x))
    assert (layer.kind, layer.per_sample, layer.random) == ("opaque", True, True)
