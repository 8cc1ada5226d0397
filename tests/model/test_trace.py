"""trace: layers with their kinds, shapes and FLOP; fingerprints; both modes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.errors import InputError
from convoy.model.nets import build_net
from convoy.model.operation import call_operation
from convoy.model.tracing import trace
from tests.support import nets
from tests.support.traced_models import Calls, last, layers_of


def test_two_conv_layer_by_layer() -> None:
    layers = layers_of(nets.TwoConv())
    rows = [(layer.name, layer.kind, layer.inputs, layer.shape, layer.flop) for layer in layers.values()]
    assert rows == [
        ("x", "input", (), (3, 8, 8), 0),
        ("conv1", "conv", ("x",), (5, 8, 8), 2 * 5 * 3 * 5 * 5 * 8 * 8),
        ("relu", "elementwise", ("conv1",), (5, 8, 8), 0),
        ("pool", "pool", ("relu",), (5, 4, 4), 0),
        ("conv2", "conv", ("pool",), (7, 4, 4), 2 * 7 * 5 * 3 * 3 * 4 * 4),
        ("relu_1", "elementwise", ("conv2",), (7, 4, 4), 0),
        ("pool#2", "pool", ("relu_1",), (7, 2, 2), 0),
        ("flatten", "flatten", ("pool#2",), (28,), 0),
        ("fc", "linear", ("flatten",), (5,), 2 * 28 * 5),
    ]
    assert {k: (p.key, p.shape, p.trainable) for k, p in layers["conv2"].parameters.items()} == {
        "weight": ("conv2.weight", (7, 5, 3, 3), True),
        "bias": ("conv2.bias", (7,), True),
    }
    assert (layers["conv2"].channels_out, layers["conv2"].channels_in) == (7, 5)


def test_resnet_kinds_and_joins() -> None:
    layers = layers_of(nets.ResNet())
    kinds = [layer.kind for layer in layers.values()]
    assert kinds.count("conv") == 6
    assert kinds.count("batch_norm") == 6
    assert kinds.count("join") == 2
    assert kinds.count("opaque") == 0
    joins = [layer for layer in layers.values() if layer.kind == "join"]
    # The ReLU is the same module both times; the block's input is what the ReLU before it left.
    assert joins[0].inputs == ("layer1.bn2", "relu")
    assert joins[1].inputs == ("layer2.bn2", "layer2.downsample.1")
    assert layers["layer2.relu#2"].inputs == (joins[1].name,)
    assert all(layer.statistics for layer in layers.values() if layer.kind == "batch_norm")
    assert not any(layer.statistics for layer in layers_of(nets.ResNet(), training=False).values())


def test_grouped_and_depthwise_flop() -> None:
    layers = layers_of(nets.Convolutions())
    assert (layers["grouped"].groups, layers["grouped"].channels_in, layers["grouped"].channels_out) == (2, 6, 8)
    assert layers["grouped"].flop == 2 * 8 * (6 // 2) * 3 * 3 * 8 * 8
    assert layers["strided"].flop == 2 * 6 * 8 * 3 * 3 * 4 * 4
    assert layers["multiplied"].flop == 2 * 10 * 1 * 3 * 3 * 4 * 4
    assert (layers["multiplied"].groups, layers["multiplied"].channels_in) == (5, 5)
    assert layers["valid"].flop == 2 * 6 * 4 * (3 * 2) * (2 * 3)
    assert list(layers["strided"].parameters) == ["weight"]
    assert layers["circular"].kind == "conv"


@pytest.mark.parametrize(
    ("function", "kind", "shape"),
    [
        (lambda _, x: x.view(-1, 256), "flatten", (256,)),
        (lambda _, x: x.reshape((x.shape[0], 256)), "flatten", (256,)),
        (lambda _, x: torch.reshape(x, shape=(-1, 4 * x.size(2) * x.size(3))), "flatten", (256,)),
        (lambda _, x: torch.flatten(x, start_dim=1), "flatten", (256,)),
        (lambda _, x: x.view(x.size()[:2] + (-1,)), "parts", (4, 64)),  # noqa: RUF005
        (lambda _, x: x.flatten(2), "parts", (4, 64)),
        (lambda _, x: x.mean(dim=(-2, -1), keepdim=True), "pool", (4, 1, 1)),
        (lambda _, x: x.mean(1), "parts", (8, 8)),
        (lambda _, x: F.max_pool2d(x, 2), "pool", (4, 4, 4)),
        (lambda _, x: F.max_pool2d(x, 2, return_indices=True)[0], "pick", (4, 4, 4)),
        (lambda _, x: F.softmax(x, dim=1), "parts", (4, 8, 8)),
        (lambda _, x: x + x, "elementwise", (4, 8, 8)),
        (lambda _, x: x + x.relu(), "join", (4, 8, 8)),
        (lambda m, x: m.scale.view(4, 1, 1) * x, "join", (4, 8, 8)),
        (lambda _, x: torch.cat([x, x], -1), "cat", (4, 8, 16)),
        (lambda _, x: x.chunk(2, 1)[-1], "pick", (2, 8, 8)),
        (lambda _, x: torch.stack([x, x], 1), "parts", (2, 4, 8, 8)),
        (lambda _, x: x[:, 1:3], "parts", (2, 8, 8)),
        (lambda _, x: x > 0, "elementwise", (4, 8, 8)),
    ],
)
def test_kinds_of_calls(function: Callable[..., Any], kind: str, shape: tuple[int, ...]) -> None:
    layer = last(function)
    assert (layer.kind, layer.shape, layer.per_sample) == (kind, shape, True)


def test_a_flatten_by_numbers_works_on_shards() -> None:
    """A shard with fewer channels has another width than the 256 in `x.view(-1, 256)`."""
    model = Calls(lambda _, x: x.view(-1, 256))
    traced = trace(model, torch.zeros(2, 3, 8, 8))
    shard = torch.randn(5, 2, 8, 8)
    flat = call_operation(model, traced.operations["view"], [shard], 5)
    assert torch.equal(flat, shard.flatten(1))


def test_parameters_without_a_module() -> None:
    layers = layers_of(nets.Bare())
    scale, mean, view = layers["scale"], layers["mean"], layers["view"]
    assert (scale.kind, scale.batched, scale.shape) == ("parameter", False, (6,))
    assert scale.parameters[""].key == "scale"
    assert scale.parameters[""].trainable
    assert mean.parameters[""].buffer
    assert not mean.trainable
    assert (view.kind, view.batched) == ("opaque", False)
    assert layers["temperature"].shape == ()


def test_shared_parameters_are_found_under_any_name() -> None:
    layers = layers_of(nets.Tied())
    assert {name for name, layer in layers.items() if layer.shared} == {
        *("norm", "norm#2", "again", "again#2", "fc1", "fc2")
    }
    assert layers["fc2"].parameters["weight"].key == "fc1.weight"
    assert layers["fc2"].parameters["bias"].key == "fc2.bias"


def test_chunks_are_picked_one_by_one() -> None:
    graph = trace(nets.Shuffle(), torch.zeros(2, 3, 8, 8)).graph
    cat = graph["cat_1"]
    assert graph["chunk"].several
    assert cat.kind == "cat"
    assert all(graph[name].kind == "pick" for name in cat.inputs)
    for layer in graph.layers.values():
        assert layer.kind == "pick" or not any(graph[name].several for name in layer.inputs)


def test_gradients_stop_where_torch_stops_them() -> None:
    """`with torch.no_grad()` leaves no mark in a trace of torch.fx."""
    layers = layers_of(nets.NoGradient())
    stopped = {name for name, layer in layers.items() if not layer.differentiable}
    # The first call of conv2 is the one under no_grad.
    assert stopped == {"gt", "to", "sigmoid", "conv2", "detach", "detach_1"}
    assert layers["conv2"].trainable == ()
    assert layers["conv2"].parameters["weight"].trainable


def test_two_inputs_and_a_missing_one() -> None:
    class Two(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a.flatten(1) + b

    a, b = torch.zeros(2, 3, 2), torch.zeros(2, 6)
    graph = trace(Two(), (a, b)).graph
    assert [layer.shape for layer in graph.inputs] == [(3, 2), (6,)]
    with pytest.raises(InputError, match=r"Two does not run on the example: .* missing 1 required positional argument"):
        trace(Two(), a)
    with pytest.raises(InputError, match=r"does not run on the example: .* but 4 were given"):
        trace(Two(), (a, b, b))


def test_integer_inputs() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 2))
    layers = dict(trace(model, torch.zeros(2, 3, dtype=torch.long)).graph.layers)
    assert [layer.kind for layer in layers.values()] == ["input", "opaque", "flatten", "linear"]
    assert layers["0"].per_sample
    assert next(iter(layers.values())).dtype == "int64"


def fingerprint(model: nn.Module, dtype: torch.dtype = torch.float32) -> str:
    return trace(model.to(dtype), torch.zeros(2, 3, 8, 8, dtype=dtype)).graph.fingerprint


def test_fingerprints_of_existing_plan_files_stay() -> None:
    known = {"two-conv:50:500": "e84b42332d2be3f5", "resnet18:16": "a79147cb9034ec35", "unet:8": "50bc25fd127105be"}
    found = {
        name: trace(build_net(name, (3, 32, 32), 10), torch.zeros(2, 3, 32, 32)).graph.fingerprint for name in known
    }
    assert found == known


def test_fingerprints() -> None:
    base = fingerprint(nets.TwoConv())
    assert base == fingerprint(nets.TwoConv())  # other weights, same model
    assert base == fingerprint(nets.TwoConv(), torch.float64)
    assert base != fingerprint(nets.TwoConv(first=6))
    assert base != fingerprint(nets.TwoConv(second=8))
    strided = nets.TwoConv()
    strided.conv2.dilation, strided.conv2.padding = (2, 2), (2, 2)
    assert trace(strided, torch.zeros(2, 3, 8, 8)).graph["conv2"].shape == (7, 4, 4)
    frozen = nets.TwoConv()
    frozen.conv1.requires_grad_(False)
    assert base != fingerprint(frozen)
    assert base != trace(nets.TwoConv(), torch.zeros(5, 3, 8, 9)).graph.fingerprint
    assert base == trace(nets.TwoConv(), torch.zeros(5, 3, 8, 8)).graph.fingerprint


def test_evaluation_splits_what_training_splits() -> None:
    """`Average` can be traced in evaluation. Its buffer would become its own layer."""
    model = nets.AroundInner(nets.Average)
    training = trace(model, torch.zeros(2, 3, 8, 8))
    alone = trace(model, torch.zeros(2, 3, 8, 8), training=False)
    beside = trace(model, torch.zeros(2, 3, 8, 8), training=False, like=training)
    assert alone.live is None
    assert [part.path for part in beside.live or ()] == [part.path for part in training.live or ()] == ["conv"]
    whole = trace(nets.OpaqueWhole(), torch.zeros(2, 3, 8, 8))
    assert trace(nets.TwoConv(), torch.zeros(2, 3, 8, 8), like=whole).live == ()
