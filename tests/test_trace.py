"""trace: layers, kinds, shapes, FLOP, fingerprints, the reasons of opaque layers, and that the user's model is left alone."""

import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.errors import InputError
from convoy.graph import Graph, Layer
from convoy.trace import call_operation, evaluate, trace, without_in_place
from tests import nets


def layers_of(model: nn.Module, shape: tuple[int, ...] = (3, 8, 8), **options: Any) -> dict[str, Layer]:
    return dict(trace(model, torch.zeros(2, *shape), **options).graph.layers)


class Calls(nn.Module):
    """A model that is one function of its input, and of a few parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.conv(x))


def last(function: Callable[..., Any], **options: Any) -> Layer:
    """The layer that a function of a convolution's output becomes."""
    return list(layers_of(Calls(function), **options).values())[-1]


# --- layers ----------------------------------------------------------------------------------------------------------


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
    assert layers["circular"].kind == "opaque"


@pytest.mark.parametrize(
    ("function", "kind", "shape"),
    [
        (lambda _, x: x.view(x.size(0), -1), "flatten", (256,)),
        (lambda _, x: x.view(-1, 256), "flatten", (256,)),
        (lambda _, x: x.reshape((x.shape[0], 256)), "flatten", (256,)),
        (lambda _, x: torch.reshape(x, shape=(-1, 4 * x.size(2) * x.size(3))), "flatten", (256,)),
        (lambda _, x: torch.flatten(x, start_dim=1), "flatten", (256,)),
        (lambda _, x: x.flatten(-3), "flatten", (256,)),
        (lambda _, x: x.view(x.size()[:2] + (-1,)), "opaque", (4, 64)),  # noqa: RUF005
        (lambda _, x: x.flatten(2), "opaque", (4, 64)),
        (lambda _, x: x.mean([2, 3]), "pool", (4,)),
        (lambda _, x: x.mean(dim=(-2, -1), keepdim=True), "pool", (4, 1, 1)),
        (lambda _, x: x.mean(1), "opaque", (8, 8)),
        (lambda _, x: F.max_pool2d(x, 2), "pool", (4, 4, 4)),
        (lambda _, x: F.max_pool2d(x, 2, return_indices=True)[0], "pick", (4, 4, 4)),
        (lambda _, x: F.softmax(x, dim=1), "opaque", (4, 8, 8)),
        (lambda _, x: x + x, "elementwise", (4, 8, 8)),
        (lambda _, x: 2 - x, "elementwise", (4, 8, 8)),
        (lambda _, x: x + x.relu(), "join", (4, 8, 8)),
        (lambda m, x: m.scale.view(4, 1, 1) * x, "join", (4, 8, 8)),
        (lambda _, x: torch.cat([x, x], -1), "cat", (4, 8, 16)),
        (lambda _, x: x.chunk(2, 1)[-1], "pick", (2, 8, 8)),
        (lambda _, x: torch.stack([x, x], 1), "opaque", (2, 4, 8, 8)),
        (lambda _, x: x[:, 1:3], "opaque", (2, 8, 8)),
        (lambda _, x: x > 0, "opaque", (4, 8, 8)),
    ],
)
def test_kinds_of_calls(function: Callable[..., Any], kind: str, shape: tuple[int, ...]) -> None:
    layer = last(function)
    assert (layer.kind, layer.shape, layer.per_sample) == (kind, shape, True)


def test_the_axis_of_a_concatenation_counts_the_batch() -> None:
    assert last(lambda _, x: torch.cat([x, x], -1)).axis == 3
    assert last(lambda _, x: torch.cat((x, x), dim=1)).axis == 1


def test_a_flatten_by_numbers_works_on_pieces() -> None:
    """The 256 in `x.view(-1, 256)` was called as it stood, on pieces with fewer channels: a crash."""
    model = Calls(lambda _, x: x.view(-1, 256))
    traced = trace(model, torch.zeros(2, 3, 8, 8))
    piece = torch.randn(5, 2, 8, 8)
    flat = call_operation(model, traced.operations["view"], [piece], 5)
    assert torch.equal(flat, piece.flatten(1))


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
    """A function that took all chunks at once was given the tuple where its code had tensors: training crashed."""
    graph = trace(nets.Shuffle(), torch.zeros(2, 3, 8, 8)).graph
    cat = graph["cat_1"]
    assert graph["chunk"].several
    assert cat.kind == "cat"
    assert all(graph[name].kind == "pick" for name in cat.inputs)
    for layer in graph.layers.values():
        assert layer.kind == "pick" or not any(graph[name].several for name in layer.inputs)


def test_gradients_stop_where_torch_stops_them() -> None:
    """`with torch.no_grad()` leaves no mark in a trace of torch.fx, and a mask of truth values was asked for a gradient."""
    layers = layers_of(nets.NoGradient())
    stopped = {name for name, layer in layers.items() if not layer.differentiable}
    # The first call of conv2 is the one under no_grad; what follows a detached tensor has simply nobody to pass it to.
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
    with pytest.raises(InputError, match="more inputs than the 1"):
        trace(Two(), a)
    with pytest.raises(InputError, match="3 inputs, the model takes another number"):
        trace(Two(), (a, b, b))


def test_integer_inputs() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 2))
    layers = dict(trace(model, torch.zeros(2, 3, dtype=torch.long)).graph.layers)
    assert [layer.kind for layer in layers.values()] == ["input", "opaque", "flatten", "linear"]
    assert layers["0"].per_sample
    assert next(iter(layers.values())).dtype == "int64"


# --- what depends on the batch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda _, x: x / x.size(0), "depends on the others"),
        (lambda _, x: x.flip(0), "depends on the others"),
        (lambda _, x: F.softmax(x, 0), "depends on the others"),
        (lambda _, x: x.new_zeros(x.size(0), 4) + torch.arange(x.size(0)).view(-1, 1), ""),
        (lambda _, x: F.batch_norm(x, None, None, training=True), "depends on the others"),
    ],
)
def test_layers_that_look_at_other_samples_run_whole(function: Callable[..., Any], reason: str) -> None:
    whole = [layer for layer in layers_of(Calls(function)).values() if not layer.per_sample]
    assert whole
    assert reason in whole[0].reason


@pytest.mark.parametrize(
    "function",
    [
        lambda _, x: x * (x.size(0) // 2),
        lambda _, x: x * (x.size(0) + 1),
        lambda _, x: x * (x.size(0) > 1),
        lambda m, x: x + (m.scale * x.size(0)).view(4, 1, 1),
        lambda _, x: x - x.mean(0, keepdim=True),
    ],
)
def test_arithmetic_with_the_batch_size_keeps_the_model_whole(function: Callable[..., Any]) -> None:
    """`n // 2` is 1 for both batches of a trace: it became the constant 1 for every batch."""
    graph = trace(Calls(function), torch.zeros(2, 3, 8, 8)).graph
    assert list(graph.layers) == ["input", "model"]
    assert not graph["model"].per_sample


def test_a_first_axis_that_is_not_the_batch_keeps_the_model_whole() -> None:
    graph = trace(Calls(lambda _, x: x.view(x.size(0) * 2, -1).view(x.size(0), -1)), torch.zeros(2, 3, 8, 8)).graph
    assert list(graph.layers) == ["input", "model"]
    assert "first axis of view is not the batch" in graph["model"].reason
    assert graph["model"].per_sample


@pytest.mark.parametrize(
    "function",
    [
        lambda _, x: x.view(x.size(0), x.size(1) * 64),
        lambda _, x: x.view(x.shape[:1] + (-1,)),  # noqa: RUF005 - torch.fx cannot unpack a shape
    ],
)
def test_sizes_that_follow_the_batch_in_proportion_are_no_obstacle(function: Callable[..., Any]) -> None:
    assert last(function).kind == "flatten"


def test_an_opaque_layer_is_judged_in_the_mode_it_runs_in() -> None:
    """It was judged in evaluation mode, where this one is innocent; in training its samples depend on each other."""
    model = nets.DependentSamples(only_training=True)
    training, evaluation = layers_of(model)["centre"], layers_of(model, training=False)["centre"]
    assert not training.per_sample
    assert "depends on the others" in training.reason
    assert evaluation.per_sample


def test_a_layer_that_writes_into_its_buffers_runs_whole() -> None:
    layer = layers_of(nets.Noting())["average"]
    assert (layer.kind, layer.per_sample) == ("opaque", False)
    assert "notes in its buffers" in layer.reason


def test_a_subclass_of_batch_norm_is_no_batch_norm() -> None:
    layer = layers_of(nets.OwnNorms())["norm"]
    assert (layer.kind, layer.per_sample) == ("opaque", False)
    assert "OwnNorm looks at the whole batch" in layer.reason


def test_a_batch_norm_hidden_in_python_runs_whole_until_it_is_frozen() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(x) if float(x.detach().sum()) < 1e9 else x

    model = nn.Sequential(nn.Conv2d(3, 4, 1), Hidden())
    assert "BatchNorm2d looks at the whole batch" in layers_of(model)["1"].reason
    model[1].bn.eval()
    assert layers_of(model)["1"].per_sample


def test_random_layers_are_known() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + (torch.randn_like(x) if self.training and float(x.detach().sum()) < 1e9 else 0)

    layers = layers_of(nets.Dropouts())
    assert {name for name, layer in layers.items() if layer.random} == {"drop2d", "dropout", "drop"}
    assert not any(layer.random for layer in layers_of(nets.Dropouts(), training=False).values())
    noisy = layers_of(nn.Sequential(Noisy()))["0"]
    assert (noisy.random, noisy.per_sample) == (True, True)
    with_dropout = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    opaque = layers_of(nn.Sequential(with_dropout), shape=(3, 8))
    assert all(layer.per_sample for layer in opaque.values())


# --- opaque layers ---------------------------------------------------------------------------------------------------


def test_reasons_name_what_is_opaque_and_why() -> None:
    inner = layers_of(nets.OpaquePerSample())["inner"]
    assert (inner.kind, inner.per_sample, inner.reason) == ("opaque", True, "no rule splits the channels of PerSample")
    assert set(inner.parameters) == {f"{m}.{p}" for m in ("bright", "dark", "never") for p in ("weight", "bias")}
    assert inner.parameters["dark.weight"].key == "inner.dark.weight"
    whole = layers_of(nets.OpaqueWhole())
    assert list(whole) == ["input", "model"]
    assert whole["model"].reason.startswith("torch.fx cannot trace it: ")
    assert whole["model"].per_sample


def test_flop_of_an_opaque_layer_are_counted() -> None:
    class Stubborn(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.detach().sum().item() < 1e9 else x

    assert layers_of(nn.Sequential(Stubborn(3, 4, 1)))["0"].flop == 2 * 4 * 3 * 64


def test_hooks_make_a_layer_opaque() -> None:
    """The executor computes convolutions by itself: what hung on them from outside was left out."""
    layers = layers_of(nets.Hooked())
    assert [(name, layers[name].kind, layers[name].per_sample) for name in ("conv1", "conv2", "fc")] == [
        ("conv1", "opaque", True),
        ("conv2", "opaque", True),
        ("fc", "linear", True),
    ]
    assert "parametrizations.weight.original0" in layers["conv2"].parameters


def test_a_backward_of_ones_own_keeps_the_model_whole() -> None:
    """torch.fx traced through the forward of an autograd.Function: its gradients were those of autograd."""
    graph = trace(nets.OwnBackward(), torch.zeros(2, 3, 8, 8)).graph
    assert list(graph.layers) == ["input", "model"]
    assert graph["model"].reason.startswith("its trace gives other gradients")


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_model_that_cannot_be_copied() -> None:
    model = nn.Sequential(torch.nn.utils.weight_norm(nn.Conv2d(3, 4, 1)))
    with pytest.raises(InputError, match=r"Sequential cannot be copied .*parametrizations has forms"):
        trace(model, torch.zeros(2, 3, 8, 8))


@pytest.mark.parametrize(
    "function",
    [
        lambda _, x: x.view_as(x).relu_() + x,  # a view of x is overwritten: x changes under another name
        lambda _, x: x.zero_(),
        lambda _, x: x.transpose_(2, 3)[:, :, :4],
    ],
)
def test_in_place_work_that_a_trace_cannot_hold_keeps_the_model_whole(function: Callable[..., Any]) -> None:
    assert list(layers_of(Calls(function))) == ["input", "model"]


def test_an_in_place_sum_of_numbers_leaves_the_old_number_alone() -> None:
    def widths(_: nn.Module, x: Tensor) -> Tensor:
        n = x.size(1)
        total = n
        total += 3
        return x.view(x.size(0), n, -1) * total

    traced = trace(model := Calls(widths), torch.zeros(2, 3, 8, 8))
    x = torch.randn(5, 3, 8, 8)
    assert torch.equal(evaluate(model, traced, [x]), model(x))


def test_outputs_keep_their_form() -> None:
    class Forms(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"a": x.relu(), "b": [x, x.relu()]}

    traced = trace(Forms(), torch.zeros(2, 3))
    x = torch.randn(4, 3)
    found = evaluate(Forms(), traced, [x])
    assert torch.equal(found["a"], x.relu())
    assert torch.equal(found["b"][0], x)
    chunks = trace(Calls(lambda _, x: x.chunk(2, 1)), torch.zeros(2, 3, 8, 8))
    assert len(chunks.graph.outputs) == 2


@pytest.mark.parametrize("name", nets.NETS)
def test_a_trace_computes_what_the_model_computes(name: str) -> None:
    """On another batch size than those the trace saw."""
    model = nets.build(name)
    x = torch.randn(7, *nets.shape_of(model), dtype=torch.float64)
    for training in (True, False):
        traced = trace(model, x[:2], training=training)
        expected = copy.deepcopy(model).train(training)(x.clone())
        found = evaluate(without_in_place(copy.deepcopy(model).train(training)), traced, [x])
        first = expected[0] if isinstance(expected, tuple) else expected
        assert torch.allclose(found[0] if isinstance(found, tuple) else found, first, rtol=1e-12, atol=1e-12)


# --- fingerprints ----------------------------------------------------------------------------------------------------


def fingerprint(model: nn.Module, dtype: torch.dtype = torch.float32) -> str:
    return trace(model.to(dtype), torch.zeros(2, 3, 8, 8, dtype=dtype)).graph.fingerprint


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


# --- the user's model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*nets.NETS])
def test_the_model_is_left_as_it_was(name: str) -> None:
    model = nets.build(name)
    next(model.modules()).train()
    model.register_forward_hook(lambda *_: None)
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    attributes = {n: sorted(vars(m)) for n, m in model.named_modules()}
    gradients = [p.grad for p in model.parameters()]
    state, own = torch.get_rng_state(), random.getstate()
    for training in (True, False):
        trace(model, torch.zeros(2, *nets.shape_of(model), dtype=torch.float64), training=training)
    assert torch.equal(state, torch.get_rng_state())
    assert own == random.getstate()
    assert [m.training for m in model.modules()] == modes
    assert {n: sorted(vars(m)) for n, m in model.named_modules()} == attributes
    assert [p.grad for p in model.parameters()] == gradients
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)


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
    """torch.fx patches nn.Module for every thread: another thread's forward ended up in the trace, and failed."""
    bystander, x = nets.build("resnet", dtype=torch.float32), torch.zeros(4, 3, 8, 8)
    expected, found = bystander(x), []

    def run_the_other() -> None:
        try:
            found.append(torch.equal(bystander(x), expected))
        except BaseException as error:
            found.append(error)

    def meanwhile(_: nn.Module, y: Tensor) -> Tensor:
        thread = threading.Thread(target=run_the_other)
        thread.start()
        thread.join(30)
        return y.relu()

    assert list(layers_of(Calls(meanwhile))) == ["x", "conv", "relu"]
    assert found
    assert all(entry is True for entry in found)


# --- examples that cannot be -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", [[], torch.tensor(1.0), [torch.zeros(2, 3), torch.tensor(0)]])
def test_an_example_is_a_batch(example: Any) -> None:
    with pytest.raises(InputError, match="the example must be a batch"):
        trace(nets.TwoConv(), example)


def test_a_model_that_does_not_run_on_the_example() -> None:
    with pytest.raises(InputError, match="TwoConv does not run on the example"):
        trace(nets.TwoConv(), torch.zeros(2, 3, 9, 20))
    with pytest.raises(InputError, match="TwoConv does not run on the example"):
        trace(nets.TwoConv(), torch.zeros(2, 3, 8, 8, dtype=torch.float64))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda _, x: x.sum(), "first axis is not the batch"),
        (lambda *_: 5, "returns int"),
        (lambda _, x: (x, x.size(0)), "returns tuple"),
        (lambda _, x: x.flatten(1) @ x.flatten(1).t(), "first axis is not the batch"),
        (lambda *_: None, "returns NoneType"),
    ],
)
def test_what_a_model_may_not_return(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        trace(Calls(function), torch.zeros(2, 3, 8, 8))


def test_unknown_layer_names_list_the_known_ones() -> None:
    graph: Graph = trace(nets.TwoConv(), torch.zeros(2, 3, 8, 8)).graph
    with pytest.raises(InputError, match="no layer 'conv9': its layers are x, conv1"):
        graph["conv9"]


# --- the same layers in both modes -----------------------------------------------------------------------------------


def test_evaluation_keeps_whole_what_training_keeps_whole() -> None:
    """`Average` can be traced in evaluation. Its buffer would become a layer of its own, with a place of its own."""
    model = nets.Noting()
    training = trace(model, torch.zeros(2, 3, 8, 8))
    alone = trace(model, torch.zeros(2, 3, 8, 8), training=False)
    beside = trace(model, torch.zeros(2, 3, 8, 8), training=False, like=training)
    assert "average" not in alone.graph.layers
    assert beside.graph["average"].kind == "opaque"
    whole = trace(nets.HalfBatch(), torch.zeros(2, 3, 8, 8))
    assert list(trace(nets.TwoConv(), torch.zeros(2, 3, 8, 8), like=whole).graph.layers) == ["input", "model"]
