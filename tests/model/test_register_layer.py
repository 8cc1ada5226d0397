"""register_layer: a registration is tried when a model is traced, and is part of the fingerprint."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy.errors import InputError, MismatchError
from convoy.model.graph import Cut
from convoy.model.split_rules import MODULES, Call, Known
from convoy.model.tracing import trace
from convoy.plan.presets import Speeds, named_plan
from convoy.runtime.module import Distributed
from tests.support.threads import run_on_threads


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    before = dict(MODULES)
    yield
    MODULES.clear()
    MODULES.update(before)


def _reads_numbers(x: Tensor) -> bool:
    return bool(x.detach().isfinite().all()) is not None  # it decides nothing


class Scale(nn.Module):
    def __init__(self, channels: int = 6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[:, None, None] if _reads_numbers(x) else x


class Centred(nn.Module):
    """Every channel depends on all others."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True) if _reads_numbers(x) else x


class Counting(nn.Module):
    """Computes with its number of channels."""

    def __init__(self, channels: int = 6) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.channels, x.shape[2], x.shape[3]) * 2 if _reads_numbers(x) else x


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.copy_(x.mean())
        return x * 2 if _reads_numbers(x) else x


class ScaledConv(nn.Conv2d):
    """One and a half convolutions."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.5


class OnlyNamedConv(nn.Conv2d):
    """A convolution under another name."""


class AllFilters(nn.Conv2d):
    """The weights of a filter are divided by the length of all of them."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight / self.weight.norm(), self.bias)


def by_filters(call: Call) -> Known:
    return Known("filters", (Cut(1, call.output[1], (None,), {"weight": 0, "bias": 0}),))


X = torch.zeros(2, 3, 8, 8)


def net(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), *layers)


def test_a_registered_layer_can_be_cut() -> None:
    assert trace(net(Scale()), X).live is not None
    before = trace(net(Scale()), X).graph.fingerprint
    convoy.register_layer(Scale, splits="channels", parameters={"weight": 0})
    graph = trace(net(Scale()), X).graph
    assert graph["1"].cuts == (Cut(1, 6, (1,), {"weight": 0}),)
    assert graph["1"].per_sample
    assert graph.fingerprint != before, "a plan made with the rule is refused where the rule is missing"


def test_a_rule_may_be_a_function() -> None:
    def rule(call: Call) -> Known | None:
        return Known("parts", (Cut(2, call.output[2], (2,)),)) if len(call.output) == 4 else None

    convoy.register_layer(Centred, rule)
    assert trace(net(Centred()), X).graph["1"].cuts == (Cut(2, 6, (2,)),)


@pytest.mark.parametrize(
    ("layer", "given", "message"),
    [
        (Centred(), {"splits": "channels"}, "other numbers in parts of axis 1"),
        (Centred(), {"splits": "entries"}, "other numbers in parts of axis 1"),
        (Scale(), {"splits": "channels", "parameters": {}}, "does not run in parts of axis 1"),
        (Scale(), {"splits": "channels", "parameters": {"weight": 1}}, "is not 6 equal parts"),
        (Counting(), {"splits": "channels"}, "parts of axis 1"),
        (Noting(), {"splits": "channels"}, "records the batch in a buffer"),
        (AllFilters(6, 6, 3), {"splits": by_filters}, "other numbers in parts of axis 1"),
        (ScaledConv(6, 6, 3), {"like": nn.Conv2d}, "other numbers as Conv2d computes it"),
    ],
)  # fmt: skip
def test_a_wrong_registration_is_refused(layer: nn.Module, given: dict[str, object], message: str) -> None:
    convoy.register_layer(type(layer), **given)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        trace(net(layer), X)


def test_attributes_follow_the_shard() -> None:
    convoy.register_layer(Counting, splits="channels", attributes=("channels",))
    assert trace(net(Counting()), X).graph["1"].kind == "parts"


def test_a_subclass_that_computes_the_same() -> None:
    convoy.register_layer(OnlyNamedConv, like=nn.Conv2d)
    layer = trace(net(OnlyNamedConv(6, 4, 3, padding=1, padding_mode="reflect")), X).graph["1"]
    assert (layer.kind, layer.sums_channels) == ("conv", True)


def test_what_cannot_be_registered() -> None:
    for given, message in (
        ({"splits": "channels"}, "registered already"),
        ({}, "either splits or like"),
        ({"splits": "rows"}, "unknown splits 'rows': choose one of samples, entries, channels, or a function"),
        ({"like": Centred}, "registered already|must be a registered"),
    ):
        layer = nn.GroupNorm if "already" in message and "splits" in given else Scale
        with pytest.raises(InputError, match=message):
            convoy.register_layer(layer, **given)  # type: ignore[arg-type]


def test_a_device_that_registered_otherwise_is_refused() -> None:
    convoy.register_layer(Scale, splits="channels")
    model = net(Scale(), nn.Flatten(), nn.Linear(216, 5))
    with_rule = trace(model, X)
    plan = named_plan("data", with_rule.graph, 4, Speeds((1.0, 1.0)))

    def work(group: object) -> str:
        with pytest.raises((MismatchError, InputError)) as caught:
            Distributed(model, plan, group, X)  # type: ignore[arg-type]
        return str(caught.value)

    del MODULES[Scale]
    assert all("another model" in message for message in run_on_threads(2, work))


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if _reads_numbers(x) else x


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def test_python_that_treats_samples_alone_may_be_registered() -> None:
    net, x = nn.Sequential(nn.Conv2d(3, 6, 3), Centred()), torch.zeros(2, 3, 8, 8)
    assert trace(net, x).live is not None
    convoy.register_layer(Centred, splits="samples")
    assert (trace(net, x).graph["1"].kind, trace(net, x).graph["1"].per_sample) == ("opaque", True)


@pytest.mark.parametrize(
    ("layer", "why"), [(Mixing, "depends on the others"), (Remembering, "keeps '1.calls' in Python")]
)
def test_a_layer_that_does_not_treat_samples_alone_is_refused(layer: type[nn.Module], why: str) -> None:
    convoy.register_layer(layer, splits="samples")
    with pytest.raises(InputError, match=rf"layer '1' was registered .*{why}"):
        trace(nn.Sequential(nn.Conv2d(3, 6, 3), layer()), torch.zeros(2, 3, 8, 8))
