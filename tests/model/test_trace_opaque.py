"""trace: samples that depend on each other, sizes that follow the batch, and modules that stay whole."""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.errors import InputError
from convoy.layout.layout import OnOne
from convoy.model.tracing import disable_in_place, trace
from tests.support import nets
from tests.support.nets import Negative
from tests.support.traced_models import Calls, layers_of, run_traced, split_in


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda _, x: x / x.size(0), "depends on the others"),
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
        lambda _, x: x * (x.size(0) > 1),
        lambda m, x: x + (m.scale * x.size(0)).view(4, 1, 1),
        lambda _, x: x - x.mean(0, keepdim=True),
    ],
)
def test_arithmetic_with_the_batch_size_becomes_one_layer(function: Callable[..., Any]) -> None:
    """`n // 2` is 1 for both batches of a trace, but no constant."""
    *others, odd = trace(Calls(function), torch.zeros(2, 3, 8, 8)).graph.layers.values()
    assert [layer.kind for layer in others] == ["input", "conv"]
    assert (odd.kind, odd.per_sample) == ("opaque", False)


def test_a_first_axis_that_is_not_the_batch_makes_one_layer_of_its_calls() -> None:
    graph = trace(Calls(lambda _, x: x.view(x.size(0) * 2, -1).view(x.size(0), -1)), torch.zeros(2, 3, 8, 8)).graph
    assert list(graph.layers) == ["x", "conv", "view"]
    assert "first axis of view is not the batch" in graph["view"].reason
    assert graph["view"].per_sample


@pytest.mark.parametrize(
    ("net", "name"),
    [(nets.DependentSamples, "centre"), (lambda: nets.AroundInner(nets.Average), "inner"), (nets.OwnNorms, "norm")],
)
def test_a_net_with_python_that_a_trace_cannot_follow_runs_on_every_device(
    net: Callable[[], nn.Module], name: str
) -> None:
    note = trace(net(), torch.zeros(2, *nets.shape_of(net()))).note
    assert "runs on every device" in note
    assert f"because of '{name}': torch.fx cannot trace it" in note


def test_random_layers_are_known() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + (torch.randn_like(x) if self.training and float(x.detach().sum()) < 1e9 else 0)

    layers = layers_of(nets.Dropouts())
    assert {name for name, layer in layers.items() if layer.random} == {"drop2d", "dropout", "drop"}
    assert not any(layer.random for layer in layers_of(nets.Dropouts(), training=False).values())
    assert split_in(nn.Sequential(Noisy())) == []
    with_dropout = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    opaque = layers_of(nn.Sequential(with_dropout), shape=(3, 8))
    assert all(layer.per_sample for layer in opaque.values())


def test_notes_name_what_cannot_be_traced_and_why() -> None:
    note = trace(nets.AroundInner(), torch.zeros(2, 3, 8, 8)).note
    assert "because of 'inner': torch.fx cannot trace it: " in note
    assert "nets.py:" in note
    whole = trace(nets.OpaqueWhole(), torch.zeros(2, *nets.shape_of(nets.OpaqueWhole())))
    assert "the forward of OpaqueWhole runs on every device" in whole.note
    assert "because torch.fx cannot trace it: " in whole.note


def test_arithmetic_that_stays_on_one_device_is_reported() -> None:
    graph = trace(Calls(lambda _, x: x.flatten(1) @ x.flatten(1).T @ x.flatten(1)), torch.zeros(2, 3, 8, 8)).graph
    text = graph.unsplit(dict.fromkeys(graph.layers, OnOne(1)))
    assert "of the arithmetic stays on device 1, because of layer 'getattr_1': the first axis of" in text
    assert trace(nets.Dropouts(), torch.zeros(2, 3, 8, 8)).graph.unsplit({}) == ""


def test_a_module_with_a_hook_is_called_by_every_device() -> None:
    """Its hook must see the global batch. Those of weight_norm see no sample."""
    traced = trace(nets.Hooked(), torch.zeros(2, *nets.shape_of(nets.Hooked())))
    assert [part.path for part in traced.live or ()] == ["conv2"]
    assert "because of 'conv1': it has hooks" in traced.note
    assert "original0" in traced.graph["conv2.parametrizations.weight"].parameters


class Reversed(torch.autograd.Function):
    """Its forward is no operation, so a trace would lose its backward."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(_ctx: Any, g: Tensor) -> Tensor:
        return -g


reverse = Reversed.apply


@pytest.mark.parametrize(
    "function", [lambda _, x: Negative.apply(x), lambda _, x: Reversed.apply(x), lambda _, x: reverse(x)]
)  # fmt: skip
def test_a_forward_with_its_own_backward_is_called_live(function: Callable[..., Any]) -> None:
    """torch.fx would trace through the forward of an autograd.Function: its gradients would be those of autograd."""
    assert split_in(nn.Sequential(nn.Conv2d(3, 3, 1), Calls(function))) == ["1.conv", "0"]


def test_a_forward_that_is_called_directly_is_examined_too() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if torch.is_grad_enabled() else 2 * x

    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Asks()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner.forward(x)

    traced = trace(Calling(), torch.zeros(2, 3, 8, 8))
    assert "its forward reads 'is_grad_enabled'" in traced.note


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_model_that_cannot_be_copied() -> None:
    model = nn.Sequential(torch.nn.utils.weight_norm(nn.Conv2d(3, 4, 1)))
    with pytest.raises(InputError, match=r"Sequential cannot be copied .*parametrizations, which can be copied"):
        trace(model, torch.zeros(2, 3, 8, 8))


@pytest.mark.parametrize(
    "function",
    [
        # A view of x is overwritten: x changes under another name.
        lambda _, x: x.view_as(x).relu_() + x,
        lambda _, x: (x, x.transpose(2, 3).relu_())[0],
        lambda _, x: x.zero_(),
    ],
)
def test_in_place_calls_that_a_trace_would_lose_run_on_every_device(function: Callable[..., Any]) -> None:
    assert split_in(Calls(function)) == ["conv"]


def test_an_in_place_call_without_a_pure_form_is_one_layer_with_what_it_overwrites() -> None:
    found = layers_of(Calls(lambda _, x: x.transpose_(2, 3)[:, :, :4]))
    assert [(name, layer.kind) for name, layer in found.items()] == [("x", "input"), ("conv", "opaque")]


@pytest.mark.parametrize("name", nets.NETS)
def test_a_trace_computes_what_the_model_computes_and_leaves_it_as_it_was(name: str) -> None:
    """On another batch size than those the trace saw."""
    model = nets.build(name)
    x = torch.randn(7, *nets.shape_of(model), dtype=torch.float64)
    next(model.modules()).train()
    model.register_forward_hook(lambda *_: None)
    for training in (True, False):
        with left_as_it_is(model):
            traced = trace(model, x[:2], training=training)
        if traced.live is not None:
            continue  # its own forward runs
        expected = copy.deepcopy(model).train(training)(x.clone())
        found = run_traced(disable_in_place(copy.deepcopy(model).train(training)), traced, [x])
        first = expected[0] if isinstance(expected, tuple) else expected
        assert torch.allclose(found[0] if isinstance(found, tuple) else found, first, rtol=1e-12, atol=1e-12)


@contextmanager
def left_as_it_is(model: nn.Module) -> Iterator[None]:
    """Check state, modes, attributes and gradients of a model, and the random numbers of torch and Python."""
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    attributes = {n: sorted(vars(m)) for n, m in model.named_modules()}
    gradients = [p.grad for p in model.parameters()]
    state, own = torch.get_rng_state(), random.getstate()
    yield
    assert torch.equal(state, torch.get_rng_state())
    assert own == random.getstate()
    assert [m.training for m in model.modules()] == modes
    assert {n: sorted(vars(m)) for n, m in model.named_modules()} == attributes
    assert [p.grad for p in model.parameters()] == gradients
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)


class Sorted(nn.Module):
    """No rule knows it, so it must be run."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sort(x * self.weight if float(self.weight[0]) > 0 else x, 1).values


def test_a_model_without_weights_is_traced_only_where_nothing_must_be_run() -> None:
    """An opaque layer must be run to know how it treats samples."""
    with torch.device("meta"):
        known, unknown = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), Sorted())
    assert [layer.kind for layer in trace(known, torch.zeros(2, 4)).graph.layers.values()] == [
        "input",
        "linear",
        "elementwise",
    ]
    with pytest.raises(InputError, match="give a model with weights"):
        trace(unknown, torch.zeros(2, 4))


@pytest.mark.parametrize(
    "function",
    [lambda _, x: x * (x.abs().amax((1, 2, 3)).max() < 100), lambda _, x: torch.cat([x, x], 0).cummax(0)[0].chunk(2, 0)[0]],
    ids=["a bound that no random number meets", "a running maximum"],
)  # fmt: skip
def test_calls_that_mix_samples_get_the_whole_batch(function: Callable[..., Any]) -> None:
    """The first agrees with its parts on every ordinary batch."""
    assert not all(layer.per_sample for layer in layers_of(Calls(function)).values())
