"""Lowering: the layouts layers keep, strategies they refuse, and the placement of evaluation."""

import functools

import pytest
import torch
from torch import Tensor, nn

from convoy.errors import PlanError
from convoy.layout.layout import OnOne, Replicated, Split
from convoy.model.graph import Graph, Layer
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.placing import borrowed, parameter_layouts, pin, placements
from convoy.plan.steps import ComputeStep
from convoy.plan.strategy import Batch, Channel, Filter, One, Strategy
from tests.support import nets
from tests.support.one_device import by_name, graph_of
from tests.support.step_text import ALL, plan_of
from tests.support.traced_models import Calls

# --- what follows, and what cannot -----------------------------------------------------------------------------------


def test_batch_norm_and_grouped_convolutions_keep_a_channel_split() -> None:
    graph = graph_of("mobile")
    placed = placements(plan_of(graph, {"expand.0": Filter((3, 1, 0, 2)), "project.0": Channel((6, 2, 0, 4))}), graph)
    assert placed["expand.1"].gives == Split(1, (3, 1, 0, 2))
    assert placed["expand.1"].parameters["running_mean"] == Split(0, (3, 1, 0, 2))
    assert placed["expand.1"].parameters["num_batches_tracked"] == Replicated((0, 1, 3))
    assert placed["depthwise.0"].gives == Split(1, (6, 2, 0, 4))
    assert placed["depthwise.0"].parameters["weight"] == Split(0, (6, 2, 0, 4))


def test_split_through_a_group_falls_back_and_says_so() -> None:
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


def test_dropout_never_runs_replicated() -> None:
    """Each device would draw different numbers, so the copies would differ."""

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


def test_global_batch_layer_runs_on_the_device_with_most_samples() -> None:
    graph = trace(Calls(lambda _, x: x - x.mean(0, keepdim=True)), torch.zeros(2, 3, 8, 8)).graph
    placed = placements(plan_of(graph, {}, Batch((2, 1, 6, 1))), graph)
    assert placed[graph.outputs[0]].gives == OnOne(2)
    assert "it runs whole on one device" in placed[graph.outputs[0]].note
    assert placed["conv"].gives == Split(0, (2, 1, 6, 1))


def test_shared_layers_keep_copies_everywhere() -> None:
    graph = graph_of("tied")
    placed = placements(plan_of(graph, {"stem": Filter((2, 2, 0, 0)), "fc1": One(1)}), graph)
    everyone = Replicated(ALL)
    assert placed["again"].parameters["weight"] == everyone
    assert placed["fc1"].parameters["weight"] == placed["fc2"].parameters["weight"] == everyone


def test_reused_batch_norm_replicates_running_statistics() -> None:
    """If only one device updated them, the other copies would become stale."""
    graph = graph_of("tied")
    placed = placements(plan_of(graph, {"norm": One(1)}), graph)
    assert placed["norm"].gives == placed["norm#2"].gives == Replicated(ALL)
    assert "every device computes it" in placed["norm"].note


@pytest.mark.parametrize(
    ("net", "layers", "message"),
    [
        ("two-conv", {"relu": Filter((1, 1, 1, 1))}, "sum to 4, the axis has 5"),
        ("two-conv", {"flatten": Filter((7, 7, 7, 7))}, "sum to 28, the axis has 7"),
        ("concatenation", {"cat": Filter((4, 4, 0, 0))}, "cannot keep a split of its channels"),
    ],
)
def test_strategies_that_do_not_fit_are_refused(net: str, layers: dict[str, Strategy], message: str) -> None:
    """Regression: a ReLU's shares were not compared with its channels, and extra channels were silently lost."""
    graph = graph_of(net)
    with pytest.raises(PlanError, match=message):
        lower(plan_of(graph, layers), graph)


# --- evaluation ------------------------------------------------------------------------------------------------------


@functools.cache
def both_modes(name: str) -> tuple[Graph, Graph]:
    model = nets.build(name)
    x = torch.zeros(2, *nets.shape_of(model), dtype=torch.float64)
    training = trace(model, x)
    return training.graph, trace(model, x, training=False, like=training).graph


@pytest.mark.parametrize("net", nets.NETS)
@pytest.mark.parametrize("name", ["data-by-speed", "master", "model", "hybrid"])
def test_evaluation_runs_on_the_devices_with_the_parameters(net: str, name: str) -> None:
    training, evaluation = both_modes(net)
    plan = by_name(name, net)
    pinned = pin(plan, training, evaluation)
    assert not borrowed(pinned, plan, training, evaluation)
    kept = parameter_layouts(plan, training)
    for step in lower(pinned, evaluation).steps:
        if isinstance(step, ComputeStep) and step.phase == "forward":
            for key, wanted in step.parameters.items():
                have = kept[evaluation[step.layer].parameters[key].key]
                copies = isinstance(have, Replicated | OnOne) and isinstance(wanted, Replicated | OnOne)
                assert wanted == have or (copies and set(_devices(wanted)) <= set(_devices(have)))


def _devices(layout: Replicated | OnOne) -> tuple[int, ...]:
    return layout.devices if isinstance(layout, Replicated) else (layout.device,)


@pytest.mark.parametrize("name", ["dependent-in-training", "resnet"])
def test_evaluation_needs_no_other_layouts_than_training(name: str) -> None:
    assert pin(by_name("data-by-speed", name), *both_modes(name)).layers == {}


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
    assert not borrowed(pinned, plan, training, evaluation)


def test_evaluation_gathers_weights_that_no_device_has_whole() -> None:
    """In evaluation the model is one layer; its weights are split."""
    training = graph_of("two-conv")
    (source,), last = training.inputs, training[training.outputs[0]]
    parameters = {p.key: p for layer in training.layers.values() for p in layer.parameters.values()}
    model = Layer("model", "opaque", (source.name,), last.shape, parameters, per_sample=False)
    evaluation = Graph(training.model, {source.name: source, "model": model}, ("model",))
    plan = by_name("model", "two-conv")
    wanted = borrowed(pin(plan, training, evaluation), plan, training, evaluation)
    assert wanted == {p.key: OnOne(0) for p in evaluation["model"].parameters.values()}
