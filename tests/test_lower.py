"""lower: step lists of the two-conv net, written out by hand for every named plan; inputs, buckets, orders.

Speeds 7 : 0 : 2 : 1 share a batch of 10 as (7,0,2,1), 5 filters as (4,0,1,0) and 7 as (5,0,1,1).
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import convoy.lower
from convoy.errors import PlanError
from convoy.graph import Graph
from convoy.layout import Layout, OnOne, Partial, Replicated, Split
from convoy.lower import lower, parameter_layouts, placements
from convoy.pin import misplaced, pin
from convoy.plan import Plan
from convoy.shares import even
from convoy.steps import Compute, Move, ReturnGradient, ShareStatistics, StepList, SumGradients
from convoy.strategy import Batch, Channel, Filter, One, Strategy
from convoy.trace import trace
from convoy.transfer import traffic
from tests import nets
from tests.one_device import by_name, graph_of

ALL = (0, 1, 2, 3)
TWO_CONV = ("conv1", "relu", "pool", "conv2", "relu_1", "pool#2", "flatten", "fc")


def spelled(steps: StepList, phase: str) -> list[str]:
    """One line per step: who computes, what moves, from which layout to which."""
    return [_line(step) for step in steps.steps if step.phase == phase]


def _line(step: object) -> str:
    match step:
        case Compute(layer=layer, phase="forward"):
            return f"{layer}: {' & '.join(str(v.layout) for v in step.reads)} -> {step.writes.layout}"
        case Compute(layer=layer):
            return f"{layer} back"
        case Move(phase="forward"):
            return f"move {step.reads.key}: {step.reads.layout} -> {step.writes.layout}"
        case Move():
            return f"move back to {step.writes.key}"
        case ReturnGradient():
            return f"gradient of {step.writes.key}"
        case ShareStatistics():
            return f"statistics of {step.layer}: {step.entries} from {','.join(map(str, step.members))}"
        case SumGradients():
            return f"sum over {','.join(map(str, step.devices))}: {' '.join(step.keys)}"
    raise AssertionError(step)


def two_conv(plan: str) -> StepList:
    return lower(by_name(plan, "two-conv"), graph_of("two-conv"))


def plan_of(graph: Graph, layers: dict[str, Strategy], otherwise: Batch | One | None = None, batch: int = 10) -> Plan:
    return Plan("mine", graph.fingerprint, 4, batch, layers, otherwise or Batch(even(batch, 4)))


# --- two-conv, plan by plan ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "shares", "holders"),
    [("data", "batch(3,3,2,2)", "0,1,2,3"), ("data-by-speed", "batch(7,0,2,1)", "0,2,3")],
)
def test_data_plans_compute_everything_where_the_samples_are(plan: str, shares: str, holders: str) -> None:
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
        "conv2 back",
        "move back to pool",
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


def test_hybrid_moves_once_between_convolutions_and_linear() -> None:
    steps = two_conv("hybrid")
    batch = "batch(7,0,2,1)"
    assert spelled(steps, "forward") == [
        *(f"{name}: {batch} -> {batch}" for name in TWO_CONV[:-1]),
        f"move flatten: {batch} -> copies(0,2)",
        "fc: copies(0,2) -> channel(4,0,1,0)",
        "move fc: channel(4,0,1,0) -> copies(0,1,2,3)",
    ]
    assert spelled(steps, "backward") == [
        "gradient of fc",
        "fc back",
        "move back to flatten",
        *(f"{name} back" for name in reversed(TWO_CONV[:-1])),
        "sum over 0,2,3: conv2.weight conv2.bias conv1.weight conv1.bias",
    ]


def test_parameters_lie_where_their_layers_compute() -> None:
    graph = graph_of("two-conv")
    master = parameter_layouts(by_name("master", "two-conv"), graph)
    assert master["conv2.weight"] == master["conv2.bias"] == Split(0, (5, 0, 1, 1))
    assert master["fc.weight"] == master["fc.bias"] == OnOne(0)
    hybrid = parameter_layouts(by_name("hybrid", "two-conv"), graph)
    assert hybrid["conv1.weight"] == Replicated((0, 2, 3))
    assert hybrid["fc.weight"] == Split(0, (4, 0, 1, 0))


def test_a_smaller_batch_is_shared_in_the_same_proportions() -> None:
    plan, graph = by_name("data-by-speed", "two-conv"), graph_of("two-conv")
    assert lower(plan, graph, 3).inputs[0].layout == Split(0, (2, 0, 1, 0))
    assert lower(plan, graph, 1).inputs[0].layout == Split(0, (1, 0, 0, 0))
    # Who keeps weights, and so who sums gradients, does not depend on the batch at hand.
    sums = [s for s in lower(plan, graph, 1).steps if isinstance(s, SumGradients)]
    assert [s.devices for s in sums] == [(0, 2, 3)]


# --- channel ---------------------------------------------------------------------------------------------------------


def moves(steps: StepList, phase: str = "forward") -> list[tuple[str, Layout, Layout]]:
    found = [s for s in steps.steps if isinstance(s, Move) and s.phase == phase]
    return [(s.reads.key, s.reads.layout, s.writes.layout) for s in found]


def test_filter_then_channel_needs_no_move_between_them() -> None:
    """conv1 gives channels, pooled in place; conv2 takes the same channels; only conv2's sum travels."""
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


def test_filter_then_channel_with_other_shares_needs_one_move() -> None:
    graph = graph_of("two-conv")
    layers = {"conv1": Filter((3, 0, 1, 1)), "conv2": Channel((0, 2, 2, 1))}
    found = moves(lower(plan_of(graph, layers), graph))
    assert found[0] == ("pool", Split(1, (3, 0, 1, 1)), Split(1, (0, 2, 2, 1)))
    assert [name for name, _, _ in found] == ["pool", "conv2", "fc"]


def test_flatten_turns_channels_into_the_features_of_a_linear_by_channel() -> None:
    """Then 5 numbers a sample travel, not 28."""
    graph = graph_of("two-conv")
    layers = {"conv1": Batch((3, 3, 2, 2)), "conv2": Filter((2, 2, 2, 1)), "fc": Channel((8, 8, 8, 4))}
    steps = lower(plan_of(graph, layers), graph)
    assert moves(steps) == [
        ("pool", Split(0, (3, 3, 2, 2)), Replicated(ALL)),
        ("fc", Partial(ALL), Replicated(ALL)),
    ]
    assert moves(steps, "backward") == [("pool@copies(0,1,2,3)", Replicated(ALL), Split(0, (3, 3, 2, 2)))]


def test_the_sum_of_a_channel_split_is_made_by_the_collective_of_the_plan() -> None:
    graph = graph_of("two-conv")
    layers = {"fc": Channel((7, 7, 7, 7))}
    for reduce in ("ring", "butterfly", "star"):
        plan = replace(plan_of(graph, layers), reduce=reduce)
        (last,) = [s for s in lower(plan, graph).steps if isinstance(s, Move) and s.reads.key == "fc"]
        rounds = {"ring": 6, "butterfly": 4, "star": 2}[reduce]
        assert len(last.schedule.rounds) == rounds


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
def test_images_are_loaded_where_the_first_layer_wants_them(first: Strategy | None, layout: Layout) -> None:
    graph = graph_of("two-conv")
    steps = lower(plan_of(graph, {"conv1": first} if first else {}), graph)
    assert steps.inputs[0].layout == layout


def test_two_first_layers_that_want_different_things_get_copies() -> None:
    graph = graph_of("concatenation")
    steps = lower(plan_of(graph, {"narrow": One(1), "wide": Filter((5, 0, 0, 0))}), graph)
    assert steps.inputs[0].layout == Replicated((0, 1))
    assert _is_free(steps, "x")


def test_the_input_looks_through_layers_that_follow() -> None:
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
def test_no_image_crosses_the_network(net: str, plan: str) -> None:
    graph = graph_of(net)
    for batch in (10, 3):
        steps = lower(by_name(plan, net), graph, batch)
        assert all(_is_free(steps, layer.name) for layer in graph.inputs)
        assert not [s for s in steps.steps if isinstance(s, Move) and s.phase == "backward" and s.writes.key == "x"]


# --- what follows, and what cannot -----------------------------------------------------------------------------------


def test_batch_norm_and_grouped_convolutions_keep_a_channel_split() -> None:
    graph = graph_of("mobile")
    placed = placements(plan_of(graph, {"expand.0": Filter((3, 1, 0, 2)), "project.0": Channel((6, 2, 0, 4))}), graph)
    assert placed["expand.1"].gives == Split(1, (3, 1, 0, 2))
    assert placed["expand.1"].parameters["running_mean"] == Split(0, (3, 1, 0, 2))
    assert placed["expand.1"].parameters["num_batches_tracked"] == Replicated((0, 1, 3))
    assert placed["depthwise.0"].gives == Split(1, (6, 2, 0, 4))
    assert placed["depthwise.0"].parameters["weight"] == Split(0, (6, 2, 0, 4))


def test_a_cut_through_a_group_falls_back_and_says_so() -> None:
    graph = graph_of("convolutions")
    placed = placements(plan_of(graph, {"same": Filter((4, 2, 0, 0))}), graph)
    assert placed["grouped"].gives == Split(0, (3, 3, 2, 2))
    assert placed["grouped"].note == "cannot keep channel(4,2,0,0)"
    whole = placements(plan_of(graph, {"same": Filter((3, 3, 0, 0))}), graph)
    assert whole["grouped"].gives == Split(1, (4, 4, 0, 0))


def test_a_join_takes_its_second_input_in_the_layout_of_the_first() -> None:
    graph = graph_of("mobile")
    layers = {"excite.up": Filter((6, 3, 3, 0)), "stem": One(0), "depthwise.0": Batch((3, 3, 2, 2))}
    placed = placements(plan_of(graph, layers), graph)
    # x * gate: x leads; the gate comes to its samples.
    gate = next(layer for layer in graph.layers.values() if layer.kind == "join" and "depthwise.2" in layer.inputs)
    assert placed[gate.name].takes == (Split(0, (3, 3, 2, 2)), Split(0, (3, 3, 2, 2)))


def test_dropout_never_runs_on_copies() -> None:
    """Each device would draw other numbers, and the copies would no longer be copies."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.drop = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(self.drop(torch.relu(x)))

    x = torch.zeros(2, 3, 8, 8)
    for training in (True, False):
        graph = trace(Branches(), x, training=training).graph
        placed = placements(plan_of(graph, {"a": Filter((2, 0, 2, 0)), "b": Batch((0, 0, 5, 5))}), graph)
        assert isinstance(placed["relu"].gives, Replicated)
        assert isinstance(placed["drop"].gives, Split if training else Replicated)


def test_a_layer_that_sees_the_whole_batch_runs_on_the_device_with_most_samples() -> None:
    graph = graph_of("dependent-samples")
    placed = placements(plan_of(graph, {}, Batch((2, 1, 6, 1))), graph)
    assert placed["centre"].gives == OnOne(2)
    assert "depends on the others" in placed["centre"].note
    assert placed["conv2"].gives == Split(0, (2, 1, 6, 1))


def test_shared_layers_keep_copies_everywhere() -> None:
    graph = graph_of("tied")
    placed = placements(plan_of(graph, {"stem": Filter((2, 2, 0, 0)), "fc1": One(1)}), graph)
    everyone = Replicated(ALL)
    assert placed["again"].parameters["weight"] == everyone
    assert placed["fc1"].parameters["weight"] == placed["fc2"].parameters["weight"] == everyone


def test_running_statistics_of_a_batch_norm_called_twice_are_kept_by_all() -> None:
    """On one device alone, the copies of the others would grow old."""
    graph = graph_of("tied")
    placed = placements(plan_of(graph, {"norm": One(1)}), graph)
    assert placed["norm"].gives == placed["norm#2"].gives == Replicated(ALL)
    assert "every device computes it" in placed["norm"].note


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"conv1": Filter((1, 1, 1, 1))}, "sum to 4, the axis has 5"),
        ({"conv1": Channel((1, 1, 1, 1))}, "sum to 4, the axis has 3"),
        ({"conv1": Batch((10,))}, "name 1 devices, the fleet has 4"),
        ({"fc": One(4)}, "there is no device 4"),
        ({"relu": Channel((2, 1, 1, 1))}, "only Linear and convolutions of one group"),
        ({"relu": Filter((1, 1, 1, 1))}, "sum to 4, the axis has 5"),
        ({"flatten": Filter((7, 7, 7, 7))}, "sum to 28, the axis has 7"),
        ({"pool": Filter((5, -1, 1, 0))}, "negative"),
    ],
)
def test_strategies_that_do_not_fit(layers: dict[str, Strategy], message: str) -> None:
    """Shares of a ReLU were never compared with its channels: those beyond them were lost without a word."""
    graph = graph_of("two-conv")
    with pytest.raises(PlanError, match=message):
        lower(plan_of(graph, layers), graph)


@pytest.mark.parametrize(
    ("net", "layers", "message"),
    [
        ("tied", {"again": Filter((2, 2, 0, 0))}, "belong to another layer too"),
        ("dependent-samples", {"centre": Batch((3, 3, 2, 2))}, "give it the strategy 'one'"),
        ("concatenation", {"cat": Filter((4, 4, 0, 0))}, "cannot keep a split of its channels"),
        ("convolutions", {"grouped": Filter((3, 5, 0, 0))}, "cut a group"),
    ],
)
def test_strategies_that_a_layer_cannot_have(net: str, layers: dict[str, Strategy], message: str) -> None:
    graph = graph_of(net)
    with pytest.raises(PlanError, match=message):
        lower(plan_of(graph, layers), graph)


# --- backward --------------------------------------------------------------------------------------------------------


def test_batch_norm_shares_statistics_both_ways() -> None:
    graph = graph_of("resnet")
    steps = lower(by_name("data-by-speed", "resnet"), graph, 3)
    forward = [line for line in spelled(steps, "forward") if line.startswith("statistics")]
    backward = [line for line in spelled(steps, "backward") if line.startswith("statistics")]
    # Device 3 has none of the 3 samples, but keeps running statistics.
    assert forward[0] == "statistics of bn1: 8 from 0,2,3"
    assert backward[-1] == forward[0]
    assert len(forward) == len(backward) == 6
    assert not [s for s in lower(by_name("model", "resnet"), graph).steps if isinstance(s, ShareStatistics)]


def test_frozen_batch_norm_shares_nothing() -> None:
    graph = graph_of("frozen-norm")
    lines = spelled(lower(by_name("data", "frozen-norm"), graph), "forward")
    assert [line for line in lines if line.startswith("statistics")] == ["statistics of live: 12 from 0,1,2,3"]


def test_nothing_runs_backward_below_the_last_trainable_layer() -> None:
    graph = graph_of("frozen")
    lines = spelled(lower(by_name("data", "frozen"), graph), "backward")
    assert "net.conv2 back" in lines
    assert lines[-2:] == ["net.conv2 back", "sum over 0,1,2,3: net.fc.weight net.conv2.weight net.conv2.bias"]
    conv2 = next(
        s for s in lower(by_name("data", "frozen"), graph).steps if isinstance(s, Compute) and s.layer == "net.conv2"
    )
    assert conv2.wants == (False,)


def test_a_shared_weight_is_summed_once_after_its_first_use() -> None:
    graph = graph_of("tied")
    steps = lower(by_name("data", "tied"), graph)
    keys = [key for s in steps.steps if isinstance(s, SumGradients) for key in s.keys]
    assert keys.count("again.weight") == keys.count("fc1.weight") == keys.count("norm.weight") == 1
    assert "fc2.weight" not in keys
    trainable = {p.key for layer in graph.layers.values() for p in layer.trainable}
    assert set(keys) == trainable
    (total,) = [s for s in steps.steps if isinstance(s, SumGradients)]
    first_use = next(s for s in steps.steps if isinstance(s, Compute) and s.layer == "norm" and s.phase == "backward")
    assert first_use.id in total.after


def test_a_weight_that_is_also_used_without_gradient_is_still_summed() -> None:
    """conv2 is called under no_grad too, fc also where its output is detached: calls without backward. The sum of such a
    weight waited for them, and never came."""
    graph = graph_of("no-gradient")
    steps = lower(by_name("data", "no-gradient"), graph)
    keys = [key for s in steps.steps if isinstance(s, SumGradients) for key in s.keys]
    assert {"conv2.weight", "fc.weight"} <= set(keys)
    assert "watched.weight" not in keys
    assert not [s for s in steps.steps if isinstance(s, Compute) and s.phase == "backward" and s.layer == "conv2"]


def test_gradients_travel_in_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, plan = graph_of("two-conv"), by_name("data", "two-conv")
    whole = [s for s in lower(plan, graph).steps if isinstance(s, SumGradients)]
    assert [s.sizes for s in whole] == [(28 * 5, 5, 7 * 5 * 9, 7, 5 * 3 * 25, 5)]
    monkeypatch.setattr(convoy.lower, "BUCKET_ENTRIES", 140)
    lines = spelled(lower(plan, graph), "backward")
    # Each sum starts as soon as its layer is done; backward goes on behind it.
    assert lines[1:3] == ["fc back", "sum over 0,1,2,3: fc.weight fc.bias"]
    at = lines.index("conv2 back")
    assert lines[at + 1] == "sum over 0,1,2,3: conv2.weight conv2.bias"
    assert lines[-1] == "sum over 0,1,2,3: conv1.weight conv1.bias"
    monkeypatch.setattr(convoy.lower, "BUCKET_ENTRIES", 146)
    sums = [s for s in lower(plan, graph).steps if isinstance(s, SumGradients)]
    assert [s.keys for s in sums] == [
        ("fc.weight", "fc.bias", "conv2.weight", "conv2.bias"),
        ("conv1.weight", "conv1.bias"),
    ]


def test_gradients_of_different_holders_travel_apart() -> None:
    graph = graph_of("two-conv")
    layers = {"conv1": Batch((5, 5, 0, 0)), "conv2": Batch((0, 0, 5, 5))}
    sums = [s for s in lower(plan_of(graph, layers), graph).steps if isinstance(s, SumGradients)]
    assert {(s.devices, s.keys) for s in sums} == {
        (ALL, ("fc.weight", "fc.bias")),
        ((2, 3), ("conv2.weight", "conv2.bias")),
        ((0, 1), ("conv1.weight", "conv1.bias")),
    }


def test_only_python_of_ones_own_needs_flags() -> None:
    graph = graph_of("opaque-per-sample")
    (total,) = [s for s in lower(by_name("data", "opaque-per-sample"), graph).steps if isinstance(s, SumGradients)]
    assert total.flags == len(total.keys)
    graph = graph_of("two-conv")
    (total,) = [s for s in lower(by_name("data", "two-conv"), graph).steps if isinstance(s, SumGradients)]
    assert total.flags == 0


def test_a_parameter_without_axes_can_be_lowered_in_the_inexact_mode_too() -> None:
    """The samples of a bare parameter were read off its first axis: a scalar has none."""
    graph = graph_of("bare")
    for reduce in ("ring", "inexact-butterfly-mixing"):
        plan = by_name("data-by-speed", "bare", reduce)
        sums = [s for s in lower(plan, graph).steps if isinstance(s, SumGradients)]
        keys = [key for s in sums for key in s.keys]
        assert "temperature" in keys
        if reduce != "ring":
            assert {s.samples for s in sums} == {(7, 0, 2, 1)}


def test_every_step_names_earlier_steps_only_and_sits_at_its_number() -> None:
    for net in ("two-conv", "mobile", "shuffle", "tied", "no-gradient"):
        for plan in ("data", "master", "model", "hybrid"):
            steps = lower(by_name(plan, net), graph_of(net)).steps
            assert [s.id for s in steps] == list(range(len(steps)))
            assert all(before < s.id for s in steps for before in s.after)


# --- evaluation ------------------------------------------------------------------------------------------------------


def both_modes(name: str) -> tuple[Graph, Graph]:
    model = nets.build(name)
    x = torch.zeros(2, *nets.shape_of(model), dtype=torch.float64)
    training = trace(model, x)
    return training.graph, trace(model, x, training=False, like=training).graph


@pytest.mark.parametrize("net", nets.NETS)
@pytest.mark.parametrize("name", ["data-by-speed", "master", "model", "hybrid"])
def test_evaluation_computes_where_training_keeps_the_parameters(net: str, name: str) -> None:
    training, evaluation = both_modes(net)
    plan = by_name(name, net)
    pinned = pin(plan, training, evaluation)
    assert not misplaced(pinned, plan, training, evaluation)
    kept = parameter_layouts(plan, training)
    for step in lower(pinned, evaluation).steps:
        if isinstance(step, Compute) and step.phase == "forward":
            for key, wanted in step.parameters.items():
                have = kept[evaluation[step.layer].parameters[key].key]
                copies = isinstance(have, Replicated | OnOne) and isinstance(wanted, Replicated | OnOne)
                assert wanted == have or (copies and set(_devices(wanted)) <= set(_devices(have)))


def _devices(layout: Replicated | OnOne) -> tuple[int, ...]:
    return layout.devices if isinstance(layout, Replicated) else (layout.device,)


def test_a_layer_that_is_whole_in_training_only_stays_with_its_parameters() -> None:
    """In evaluation it ran by samples, on devices that held none of its weights: a crash."""
    training, evaluation = both_modes("dependent-in-training")
    plan = by_name("data-by-speed", "dependent-in-training")
    assert evaluation["centre"].per_sample
    assert pin(plan, training, evaluation).layers == {"centre": One(0)}
    ordinary = both_modes("resnet")
    assert pin(by_name("data", "resnet"), *ordinary).layers == {}


def test_dropout_in_front_moves_training_but_not_evaluation() -> None:
    class Front(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)
            self.norm = nn.BatchNorm2d(3)
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.norm(self.drop(x)))

    x = torch.zeros(2, 3, 8, 8)
    training, evaluation = trace(Front(), x).graph, trace(Front(), x, training=False).graph
    plan = plan_of(training, {"conv": Filter((1, 1, 1, 1))}, Batch((5, 5, 0, 0)))
    assert parameter_layouts(plan, training)["norm.weight"] == Replicated((0, 1))
    pinned = pin(plan, training, evaluation)
    assert pinned.layers["norm"] == Batch((5, 5, 0, 0))
    assert not misplaced(pinned, plan, training, evaluation)


def test_an_evaluation_that_nobody_can_compute_is_reported() -> None:
    """In evaluation the model is one layer; its weights are split."""
    training = graph_of("two-conv")
    whole = trace(nets.HalfBatch(), torch.zeros(2, 3, 8, 8))
    evaluation = trace(
        nets.build("two-conv"), torch.zeros(2, 3, 8, 8, dtype=torch.float64), training=False, like=whole
    ).graph
    plan = by_name("model", "two-conv")
    assert misplaced(pin(plan, training, evaluation), plan, training, evaluation) == ("model",)
