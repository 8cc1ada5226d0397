"""trace: the user's model is left alone, and wrong examples are refused."""

import threading
from typing import Any

import pytest
import torch

from convoy.errors import InputError
from convoy.model.graph import Graph
from convoy.model.tracing import trace
from tests.support import nets
from tests.support.traced_models import Calls, layers_of, split_in


def test_a_model_in_evaluation_mode_is_traced_in_the_mode_asked_for() -> None:
    model = nets.ResNet().eval()
    assert layers_of(model)["bn1"].statistics
    assert not model.training
    assert not layers_of(model, training=False)["bn1"].statistics


def test_a_module_frozen_by_hand_stays_frozen() -> None:
    layers = layers_of(nets.FrozenNorm())
    assert (layers["frozen"].statistics, layers["live"].statistics) == (False, True)


def test_tracing_works_without_gradients_around_it() -> None:
    with torch.no_grad():
        layers = layers_of(nets.TwoConv())
    assert all(layer.differentiable for layer in layers.values())


def test_other_threads_may_run_models_while_one_is_traced() -> None:
    """torch.fx patches nn.Module for every thread."""
    bystander, x = nets.build("resnet", dtype=torch.float32), torch.zeros(4, 3, 8, 8)
    expected, found, done = bystander(x), list[bool](), threading.Event()

    def run_the_other() -> None:
        while not done.is_set():
            found.append(torch.equal(bystander(x), expected))

    thread = threading.Thread(target=run_the_other)
    thread.start()
    try:
        while len(found) < 20:
            assert list(layers_of(Calls(lambda _, y: y.relu()))) == ["x", "conv", "relu"]
    finally:
        done.set()
        thread.join(30)
    assert all(found)


@pytest.mark.parametrize("example", [[], torch.tensor(1.0), [torch.zeros(2, 3), torch.tensor(0)]])
def test_an_example_is_a_batch(example: Any) -> None:
    with pytest.raises(InputError, match=r"does not run on the example: .* Give one batch"):
        trace(nets.TwoConv(), example)


def test_a_model_that_does_not_run_on_the_example() -> None:
    with pytest.raises(InputError, match="TwoConv does not run on the example"):
        trace(nets.TwoConv(), torch.zeros(2, 3, 9, 20))
    with pytest.raises(InputError, match="TwoConv does not run on the example"):
        trace(nets.TwoConv(), torch.zeros(2, 3, 8, 8, dtype=torch.float64))


@pytest.mark.parametrize("result", [5, None, "text"])
def test_a_model_that_returns_no_tensor_runs_on_every_device(result: object) -> None:
    assert split_in(Calls(lambda *_: result)) == ["conv"]


def test_unknown_layer_names_list_the_known_ones() -> None:
    graph: Graph = trace(nets.TwoConv(), torch.zeros(2, 3, 8, 8)).graph
    with pytest.raises(InputError, match="no layer 'conv9': its layers are x, conv1"):
        graph["conv9"]
