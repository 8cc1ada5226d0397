"""trace: an odd call costs its own calls, odd Python its own module; what a trace would lose stays live or is refused."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.model.tracing import trace, trace_model
from convoy.model.tracing.check import check_same
from convoy.plan.presets import Speeds, named_plan
from convoy.runtime.module import Distributed
from tests.support.beside_one import difference, tensors_in
from tests.support.odd_calls import (
    ODD,
    WHOLE,
    Alpha,
    Answer,
    BySize,
    Checkpointed,
    Kept,
    Odd,
    Returns,
    Standardised,
    Teacher,
    WarmUp,
    coordinates,
    deviation,
)
from tests.support.one_device import EXACT, part
from tests.support.threads import run_on_threads
from tests.support.traced_models import layers_of


def net(function: Callable[[Any, Tensor], Tensor], channels: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return Odd(function, channels)


# --- an odd call costs its own calls ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == "lstm" else ()) for n in ODD])
def test_an_odd_call_leaves_the_net_taken_apart(name: str) -> None:
    """The whole net became one layer, with its batch norms on one device."""
    layers = layers_of(net(ODD[name]))
    assert {"body.0", "body.1", "body.3", "body.4", "fc"} <= layers.keys()
    assert all(layer.per_sample for layer in layers.values())
    assert difference(net(ODD[name])) < EXACT


@pytest.mark.parametrize("name", [*WHOLE])
def test_calls_that_look_at_other_samples_run_on_one_device_alone(name: str) -> None:
    layers = layers_of(net(WHOLE[name]))
    whole = [layer for layer in layers.values() if not layer.per_sample]
    assert {layer.kind for layer in whole} == {"opaque"}
    assert {"body.0", "body.1", "fc"} <= layers.keys()
    assert difference(net(WHOLE[name])) < EXACT


def test_minibatch_deviation_and_coordinates() -> None:
    for function in (deviation, coordinates):
        assert {"body.0", "body.1", "fc"} <= layers_of(net(function, 7)).keys()
        assert difference(net(function, 7)) < EXACT


def test_parameters_of_an_odd_call_belong_to_its_layer() -> None:
    layers = layers_of(net(ODD["lstm"]))
    assert {p.key for p in layers["lstm"].parameters.values()} == {
        f"lstm.{k}" for k, _ in nn.LSTM(6, 6).named_parameters()
    }
    assert "rows of the batch" in layers["lstm"].reason


def test_arguments_that_are_not_given_keep_their_defaults() -> None:
    """A forward with an optional or a keyword argument was one layer."""
    assert "body.0" in layers_of(net(lambda _, x: x))


# --- odd Python costs its own module ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in evaluation, as in plain PyTorch
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_checkpointed_blocks_stay_whole_and_learn(reentrant: bool, norm: bool) -> None:
    """With use_reentrant=True the block, and all before it, got no gradient; a batch norm noted once for torch's twice."""
    torch.manual_seed(0)
    model = Kept(Checkpointed(reentrant, norm))
    layers = layers_of(model)
    assert (layers["middle"].kind, layers["middle"].per_sample) == ("opaque", not norm)
    assert layers["middle"].alone == reentrant
    assert "checkpoint" in layers["middle"].reason
    assert {"body.0", "body.1"} <= layers.keys()
    assert difference(model) < EXACT


@pytest.mark.parametrize("middle", [Teacher, WarmUp, BySize])
def test_python_that_a_trace_loses_stays_live(middle: Callable[[], nn.Module]) -> None:
    """A momentum teacher that never moved, a warm-up that never came, a branch on 4 samples taken for 2."""
    torch.manual_seed(0)
    assert layers_of(Kept(middle()))["middle"].kind == "opaque"
    assert difference(Kept(middle()), sizes=(6, 2, 6, 5, 6)) < EXACT
    assert difference(nn.Sequential(Kept(middle())), sizes=(6, 2, 6, 5, 6), plan="model") < EXACT


def test_a_branch_on_the_size_of_the_batch_is_no_business_of_samples() -> None:
    assert not layers_of(Kept(BySize()))["middle"].per_sample


def test_an_embedding_that_renormalises_runs_on_one_device() -> None:
    """Each device renormalised the rows that it met: the copies parted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4, max_norm=0.5), nn.Flatten(), nn.Linear(12, 5))
    layers = dict(trace(model, torch.zeros(2, 3, dtype=torch.long)).graph.layers)
    assert not layers["0"].per_sample
    assert layers["2"].kind == "linear"


def test_false_alarms_of_dependence() -> None:
    """Power iteration was taken for notes of the batch, rounding in standardised weights for dependence: one device."""
    torch.manual_seed(0)
    spectral = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.utils.parametrizations.spectral_norm(nn.Conv2d(6, 6, 3)), nn.Flatten()
    )
    assert all(layer.per_sample for layer in layers_of(spectral).values())
    standardised = Kept(nn.Sequential(Standardised(6, 6, 3, padding=1), nn.GroupNorm(2, 6)))
    assert all(layer.per_sample for layer in layers_of(standardised).values())
    assert difference(standardised) < EXACT


# --- what is changed afterwards --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.middle, "alpha", 2.0),
        lambda m: m.middle.options["beta"].append(3.0),
        lambda m: m.middle.options.update(beta=[2.0]),
        lambda m: setattr(m, "middle", nn.Identity()),
        lambda m: setattr(m.middle, "forward", lambda x: x),
    ],
)
def test_a_change_of_what_the_trace_has_read_is_refused(change: Callable[[Any], None]) -> None:
    """`part.module.alpha = 2` had no effect, and nobody said so."""
    model, x = Kept(Alpha()), torch.randn(4, 3, 8, 8)
    plan = named_plan("data", trace(model, x).graph, 4, Speeds((1.0,)))

    def work(group: Group) -> None:
        here = Distributed(model, plan, group, x)
        here(part(here, x), batch=4)
        change(here.module)
        with pytest.raises(InputError, match="changed after distribute"):
            here(part(here, x), batch=4)

    run_on_threads(1, work)


def test_tracing_leaves_every_random_state_alone() -> None:
    model = Kept(nn.Dropout(0.5))
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    trace(model, torch.zeros(2, 3, 8, 8))
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


# --- what goes in and comes out --------------------------------------------------------------------------------------

FORMS: list[Callable[[Tensor, Tensor], Any]] = [
    Answer,
    lambda a, _: Answer(a),
    lambda a, b: {"logits": a, "features": [b, None]},
    lambda a, b: [a, {"b": (b, None)}],
]


@pytest.mark.parametrize("make", FORMS)
def test_outputs_come_back_in_the_types_of_the_model(make: Callable[[Tensor, Tensor], Any]) -> None:
    """Dataclasses and None were refused; dicts and lists could not be changed."""
    torch.manual_seed(0)
    model, x = Returns(make), torch.randn(4, 3, 8, 8)
    assert "body.0" in layers_of(model)
    expected = model(x)
    plan = named_plan("data", trace(model, x).graph, 4, Speeds((1.0, 1.0)))

    def work(group: Group) -> Any:
        here = Distributed(model, plan, group, x)
        return here(part(here, x), batch=4)

    for found in run_on_threads(2, work):
        assert type(found) is type(expected)
        assert [t.shape for t in tensors_in(found)] == [t.shape for t in tensors_in(expected)]
        if isinstance(found, dict):
            found["more"] = 1
            assert type(found["features"]) is list
        elif isinstance(found, list):
            found.append(1)
    assert difference(Returns(make)) < EXACT


def test_wrapped_models_are_unwrapped() -> None:
    """A torch.compile or DataParallel wrapper cost all parallelism."""
    plain = layers_of(Kept(nn.ReLU()))
    assert layers_of(nn.DataParallel(Kept(nn.ReLU()))).keys() == plain.keys()
    assert layers_of(torch.compile(Kept(nn.ReLU()), backend="eager")).keys() == plain.keys()


def test_an_example_that_is_a_dict_is_refused_with_the_way_out() -> None:
    with pytest.raises(InputError, match="give the inputs as a tuple"):
        trace(Kept(nn.ReLU()), {"x": torch.zeros(2, 3, 8, 8)})  # type: ignore[arg-type]


def test_numbers_out_of_nowhere_are_refused_with_the_line() -> None:
    calls = itertools.count(1)

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1) * next(calls)

    with pytest.raises(InputError, match=r"cannot be distributed.*test_capture\.py:\d+"):
        trace(Counting(), torch.zeros(2, 3, 8, 8))


# --- the cost of capture ---------------------------------------------------------------------------------------------


def test_large_images_are_checked_small() -> None:
    """ResNet-50 took 34 s, because it was run on images of 224 x 224."""

    sides: list[int] = []

    class Watched(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            if not x.is_meta and bool(x.isfinite().all()):
                sides.append(x.shape[-1])
            return super().forward(x)

    model = nn.Sequential(Watched(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    layers = layers_of(model, (3, 256, 256))
    assert layers["0"].shape == (4, 254, 254)
    assert max(sides) == 32


def test_a_second_trace_of_the_same_model_does_not_check_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Kept(nn.Tanh())
    first = layers_of(model)
    monkeypatch.setattr("convoy.model.tracing.trace_model.check_same", None)
    assert layers_of(model) == first
    with pytest.raises(TypeError):
        layers_of(Kept(Alpha(0.25)))


@pytest.mark.parametrize(("layer", "compared"), [(nn.ReLU(inplace=True), 1), (nn.Dropout(0.0), 2)])
def test_a_trace_that_makes_the_same_calls_in_both_modes_is_compared_once(
    layer: nn.Module, compared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout hands on its very input in evaluation, so that what is behind it may be another thing there."""
    calls = []

    def counted(*args: Any, **more: Any) -> Any:
        calls.append(1)
        return check_same(*args, **more)

    monkeypatch.setattr(trace_model, "check_same", counted)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), layer, nn.Flatten())
    trained = trace(model, torch.zeros(2, 3, 9, 9))
    trace(model, torch.zeros(2, 3, 9, 9), training=False, like=trained)
    assert len(calls) == compared
