"""Lowering: hand-written step lists of the two-conv net for every named plan; channel splits; inputs.

Speeds 7 : 0 : 2 : 1 share a batch of 10 as (7,0,2,1), 5 filters as (4,0,1,0) and 7 as (5,0,1,1).
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from convoy.layout.collectives import traffic
from convoy.layout.layout import Layout, OnOne, Partial, Replicated, Split
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.placing import parameter_layouts, placements
from convoy.plan.steps import ComputeStep, Move, StepList, SumGradients
from convoy.plan.strategy import Batch, Channel, Filter, One, Strategy
from tests.support.one_device import by_name, graph_of
from tests.support.step_text import ALL, TWO_CONV, moves, plan_of, spelled, two_conv

# --- two-conv, plan by plan ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "shares", "holders"),
    [("data", "batch(3,3,2,2)", "0,1,2,3"), ("data-by-speed", "batch(7,0,2,1)", "0,2,3")],
)
def test_data_plans_compute_on_the_samples_device(plan: str, shares: str, holders: str) -> None:
    steps = two_conv(plan)
    assert [str(v.layout) for v in steps.inputs] == [shares]
    assert spelled(steps, "forward") == [
        *(f"{name}: {shares} -> {shares}" for name in TWO_CONV),
        f"move fc: {shares} -> copies(0,1,2,3)",
    ]
    assert spelled(steps, "backward") == [
        "gradient of fc",
        *(f"{name} back" for name in reversed(TWO_CONV)),
        f"sum over {holders}: fc.weight fc.bias conv2.weight conv2.bias conv1.weight conv1.bias",
    ]


def test_master_distributes_convolutions_alone() -> None:
    steps = two_conv("master")
    assert [str(v.layout) for v in steps.inputs] == ["copies(0,2)"]
    assert spelled(steps, "forward") == [
        "conv1: copies(0,2) -> channel(4,0,1,0)",
        "move conv1: channel(4,0,1,0) -> on(0)",
        "relu: on(0) -> on(0)",
        "pool: on(0) -> on(0)",
        "move pool: on(0) -> copies(0,2,3)",
        "conv2: copies(0,2,3) -> channel(5,0,1,1)",
        "move conv2: channel(5,0,1,1) -> on(0)",
        "relu_1: on(0) -> on(0)",
        "pool#2: on(0) -> on(0)",
        "flatten: on(0) -> on(0)",
        "fc: on(0) -> on(0)",
        "move fc: on(0) -> copies(0,1,2,3)",
    ]
    assert spelled(steps, "backward") == [
        "gradient of fc",
        "fc back",
        "flatten back",
        "pool#2 back",
        "relu_1 back",
        "move back to conv2",
        "conv2 back (input)",
        "move back to pool",  # while the weight gradient is computed
        "conv2 back (weight)",
        "pool back",
        "relu back",
        "move back to conv1",
        "conv1 back",  # and no gradient of the images is moved, no gradient is summed
    ]


def test_model_applies_relu_and_pool_before_it_sends() -> None:
    steps = two_conv("model")
    first, second, features = "channel(2,1,1,1)", "channel(2,2,2,1)", "channel(8,8,8,4)"
    assert [str(v.layout) for v in steps.inputs] == ["copies(0,1,2,3)"]
    assert spelled(steps, "forward") == [
        f"conv1: copies(0,1,2,3) -> {first}",
        f"relu: {first} -> {first}",
        f"pool: {first} -> {first}",
        f"move pool: {first} -> copies(0,1,2,3)",
        f"conv2: copies(0,1,2,3) -> {second}",
        f"relu_1: {second} -> {second}",
        f"pool#2: {second} -> {second}",
        f"flatten: {second} -> {features}",
        f"move flatten: {features} -> copies(0,1,2,3)",
        "fc: copies(0,1,2,3) -> channel(2,1,1,1)",
        "move fc: channel(2,1,1,1) -> copies(0,1,2,3)",
    ]
    assert not [step for step in steps.steps if isinstance(step, SumGradients)]
    moved = next(s for s in steps.steps if isinstance(s, Move) and s.reads.key == "pool")
    # Each device sends its pooled 4x4 channels of 10 samples to three others: a quarter of what conv1 gave.
    assert traffic(moved.schedule, 8)[0, 1] == 10 * 2 * 4 * 4 * 8


def test_parameters_are_stored_on_their_layers_devices() -> None:
    graph = graph_of("two-conv")
    master = parameter_layouts(by_name("master", "two-conv"), graph)
    assert master["conv2.weight"] == master["conv2.bias"] == Split(0, (5, 0, 1, 1))
    assert master["fc.weight"] == master["fc.bias"] == OnOne(0)
    hybrid = parameter_layouts(by_name("hybrid", "two-conv"), graph)
    assert hybrid["conv1.weight"] == Replicated((0, 2, 3))
    assert hybrid["fc.weight"] == Split(0, (4, 0, 1, 0))


def test_smaller_batch_keeps_the_proportions() -> None:
    plan, graph = by_name("data-by-speed", "two-conv"), graph_of("two-conv")
    assert lower(plan, graph, 3).inputs[0].layout == Split(0, (2, 0, 1, 0))
    assert lower(plan, graph, 1).inputs[0].layout == Split(0, (1, 0, 0, 0))
    # Who keeps weights, and so who sums gradients, does not depend on the batch at hand.
    sums = [s for s in lower(plan, graph, 1).steps if isinstance(s, SumGradients)]
    assert [s.devices for s in sums] == [(0, 2, 3)]


# --- channel ---------------------------------------------------------------------------------------------------------


def test_filter_then_channel_needs_no_move() -> None:
    """conv1 produces channels, pooled in place; conv2 reads the same channels; only conv2's sum is sent."""
    graph = graph_of("two-conv")
    layers = {"conv1": Filter((3, 0, 1, 1)), "conv2": Channel((3, 0, 1, 1)), "fc": Filter((2, 1, 1, 1))}
    steps = lower(plan_of(graph, layers, One(0)), graph)
    assert moves(steps) == [
        ("conv2", Partial((0, 2, 3)), OnOne(0)),
        ("flatten", OnOne(0), Replicated(ALL)),
        ("fc", Split(1, (2, 1, 1, 1)), Replicated(ALL)),
    ]
    kept = parameter_layouts(plan_of(graph, layers, One(0)), graph)
    assert kept["conv2.weight"] == Split(1, (3, 0, 1, 1))
    assert kept["conv2.bias"] == OnOne(0)


def test_flatten_turns_channels_into_the_features_of_a_linear_by_channel() -> None:
    """Then 5 numbers per sample are sent, not 28."""
    graph = graph_of("two-conv")
    layers = {"conv1": Batch((3, 3, 2, 2)), "conv2": Filter((2, 2, 2, 1)), "fc": Channel((8, 8, 8, 4))}
    steps = lower(plan_of(graph, layers), graph)
    assert moves(steps) == [
        ("pool", Split(0, (3, 3, 2, 2)), Replicated(ALL)),
        ("fc", Partial(ALL), Replicated(ALL)),
    ]
    assert moves(steps, "backward") == [("pool@copies(0,1,2,3)", Replicated(ALL), Split(0, (3, 3, 2, 2)))]


# --- input layouts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "layout"),
    [
        (Batch((1, 2, 3, 4)), Split(0, (1, 2, 3, 4))),
        (Filter((0, 4, 1, 0)), Replicated((1, 2))),
        (One(3), OnOne(3)),
        (Channel((1, 0, 2, 0)), Replicated((0, 2))),
        (None, Split(0, (3, 3, 2, 2))),
    ],
)
def test_images_are_loaded_in_the_first_layers_layout(first: Strategy | None, layout: Layout) -> None:
    graph = graph_of("two-conv")
    steps = lower(plan_of(graph, {"conv1": first} if first else {}), graph)
    assert steps.inputs[0].layout == layout


def test_first_layers_with_different_layouts_get_copies() -> None:
    graph = graph_of("concatenation")
    steps = lower(plan_of(graph, {"narrow": One(1), "wide": Filter((5, 0, 0, 0))}), graph)
    assert steps.inputs[0].layout == Replicated((0, 1))
    assert _is_free(steps, "x")


def test_input_layout_looks_past_layers_without_weights() -> None:
    class Prepared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(torch.relu(self.norm(x * 2)))

    graph = trace(Prepared(), torch.zeros(2, 3, 8, 8)).graph
    placed = placements(plan_of(graph, {"conv": Filter((2, 0, 2, 0))}), graph)
    copies = Replicated((0, 2))
    assert [placed[name].gives for name in ("x", "mul", "norm", "relu")] == [copies] * 4


def _is_free(steps: StepList, key: str) -> bool:
    found = [s for s in steps.steps if isinstance(s, Move) and s.phase == "forward" and s.reads.key == key]
    return not any(traffic(s.schedule, 4) for s in found)


@pytest.mark.parametrize("net", ["two-conv", "resnet", "concatenation", "mobile", "signal", "shuffle", "convolutions"])
@pytest.mark.parametrize("plan", ["data", "data-by-speed", "master", "model", "hybrid"])
def test_no_input_image_is_sent(net: str, plan: str) -> None:
    graph = graph_of(net)
    for batch in (10, 3):
        steps = lower(by_name(plan, net), graph, batch)
        assert all(_is_free(steps, layer.name) for layer in graph.inputs)
        assert not [s for s in steps.steps if isinstance(s, Move) and s.phase == "backward" and s.writes.key == "x"]


# --- chunks ----------------------------------------------------------------------------------------------------------


def test_convolution_starts_with_the_first_gathered_chunk() -> None:
    plan, graph = by_name("model", "two-conv"), graph_of("two-conv")
    steps = lower(replace(plan, chunks=4), graph)
    pieces = {s.layer: s.chunks for s in steps.phase("forward") if isinstance(s, ComputeStep)}
    assert {name for name, count in pieces.items() if count > 1} == {"conv2"}
    moved = {s.reads.key: s.chunks for s in steps.phase("forward") if isinstance(s, Move)}
    # A Linear would read its weights for every chunk; no layer reads the last move.
    assert moved == {"pool": 4, "flatten": 1, "fc": 1}
    (gather,) = [s for s in steps.phase("forward") if isinstance(s, Move) and s.chunks > 1]
    assert [transfers[0].box[0] for transfers in gather.schedule.rounds] == [(0, 2), (2, 5), (5, 7), (7, 10)]
    # Cut up or not, the same bytes go the same ways; and nothing of backward is cut.
    assert steps.traffic() == lower(plan, graph).traffic()
    assert all(getattr(s, "chunks", 1) == 1 for s in steps.phase("backward"))
