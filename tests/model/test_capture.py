"""trace: an odd call becomes one layer, odd Python runs on every device; the rest is traced, and changes are refused."""

import itertools
import random
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.model.tracing import trace
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
)
from tests.support.one_device import EXACT, part
from tests.support.threads import run_on_threads
from tests.support.traced_models import layers_of, split_in


def net(function: Callable[[Any, Tensor], Tensor], channels: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return Odd(function, channels)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == "lstm" else ()) for n in ODD])
def test_an_odd_call_becomes_one_layer_and_the_others_stay_apart(name: str) -> None:
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


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in evaluation, as in plain PyTorch
@pytest.mark.parametrize("norm", [False, True])
def test_checkpointed_blocks_are_split_and_learn(norm: bool) -> None:
    """torch's recomputation in backward updates the running statistics of a batch norm a second time."""
    torch.manual_seed(0)
    model = Kept(Checkpointed(norm))
    layers = layers_of(model)
    assert layers["middle.block.conv"].kind == "conv"
    assert layers["middle.block.norm"].recomputed
    assert difference(model) < EXACT


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_run_on_every_device() -> None:
    assert difference(Kept(Checkpointed(reentrant=True))) < EXACT


class WritesThroughData(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:  # keeps it from being traced
            x.data.mul_(0.5)
        return x + 1


def test_hidden_writes_into_inputs_act_as_on_one_device() -> None:
    torch.manual_seed(0)
    assert difference(Kept(WritesThroughData())) < EXACT


def test_a_branch_on_the_batch_size_is_called_live() -> None:
    torch.manual_seed(0)
    assert split_in(Kept(BySize())) == ["body"]
    assert difference(Kept(BySize()), sizes=(6, 2, 6, 5, 6)) < EXACT
    assert difference(nn.Sequential(Kept(BySize())), sizes=(6, 2, 6, 5, 6), plan="model") < EXACT


def test_an_embedding_that_renormalises_runs_on_one_device() -> None:
    """Each device renormalised the rows that it met: the copies parted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4, max_norm=0.5), nn.Flatten(), nn.Linear(12, 5))
    layers = dict(trace(model, torch.zeros(2, 3, dtype=torch.long)).graph.layers)
    assert not layers["0"].per_sample
    assert layers["2"].kind == "linear"


def test_power_iteration_and_rounding_are_no_dependence() -> None:
    torch.manual_seed(0)
    spectral = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.utils.parametrizations.spectral_norm(nn.Conv2d(6, 6, 3)), nn.Flatten()
    )
    assert all(layer.per_sample for layer in layers_of(spectral).values())
    standardised = Kept(nn.Sequential(Standardised(6, 6, 3, padding=1), nn.GroupNorm(2, 6)))
    assert all(layer.per_sample for layer in layers_of(standardised).values())
    assert difference(standardised) < EXACT


@pytest.mark.filterwarnings("ignore:.*spectral_norm:FutureWarning")
def test_torch_hooks_on_weights_do_not_keep_a_layer_from_being_split() -> None:
    """The device without samples calls it, too: each call is a step of the power iteration."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.spectral_norm(nn.Conv2d(3, 6, 3)), nn.Flatten(), nn.Linear(216, 5))
    assert layers_of(model)["0"].per_sample
    assert difference(model, plan="data-by-speed", speeds=(3.0, 0.0, 2.0)) < EXACT


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.middle, "alpha", 2.0),
        lambda m: m.middle.options["beta"].append(3.0),
        lambda m: setattr(m, "middle", nn.Identity()),
        lambda m: setattr(m.middle, "forward", lambda x: x),
        lambda m: setattr(m.middle, "act", lambda x: x + 1),
    ],
)
def test_a_change_of_what_the_trace_has_read_is_refused(change: Callable[[Any], None]) -> None:
    model, x = Kept(Alpha()), torch.randn(4, 3, 8, 8)
    plan = named_plan("data", trace(model, x).graph, 4, Speeds((1.0,)))

    def work(group: Group) -> None:
        here = Distributed(model, plan, group, x)
        here(part(here, x), batch=4)
        change(here.module)
        with pytest.raises(InputError, match="changed after distribute"):
            here(part(here, x), batch=4)

    run_on_threads(1, work)


Pair = namedtuple("Pair", "logits features")
FORMS: list[Callable[[Tensor, Tensor], Any]] = [
    Answer,
    Pair,
    lambda a, _: Answer(a),
    lambda a, b: {"logits": a, "features": [b, None]},
]


@pytest.mark.parametrize("make", FORMS)
def test_outputs_come_back_in_the_types_of_the_model(make: Callable[[Tensor, Tensor], Any]) -> None:
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
    assert difference(Returns(make)) < EXACT


def test_wrapped_models_are_unwrapped() -> None:
    plain = layers_of(Kept(nn.ReLU()))
    assert layers_of(nn.DataParallel(Kept(nn.ReLU()))).keys() == plain.keys()
    assert layers_of(torch.compile(Kept(nn.ReLU()), backend="eager")).keys() == plain.keys()


class Drawing(nn.Module):
    """Takes another branch in one call of twenty, by a generator of its own."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.draw() < 0.05 else x


OWN, COUNTER = np.random.default_rng(0), itertools.count()


def closure() -> Callable[[], float]:
    rng = random.Random(0)
    return lambda: rng.random()


@pytest.mark.parametrize(
    "draw",
    [random.Random(0).random, closure(), lambda: OWN.random(), lambda: next(COUNTER) % 20, random.random],
    ids=["attribute", "closure", "numpy", "counter", "Python's"],
)  # fmt: skip
def test_a_branch_by_a_random_generator_or_a_counter_runs_on_every_device(draw: Callable[[], float]) -> None:
    note = trace(Kept(Drawing(draw)), torch.zeros(2, 3, 8, 8)).note
    assert "of 'middle': its forward reads" in note or "of 'middle': its forward draws random numbers" in note


class Rare(nn.Module):
    """Keeps a count in Python of what does not happen while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.large = 0

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().abs().max()) > 100:
            self.large += 1
        return x / (1 + self.large)


def test_python_state_that_changes_late_is_that_of_one_device() -> None:
    def enlarge(model: Any, step: int) -> None:
        with torch.no_grad():
            model.body[4].weight.mul_(50 if step == 0 else 1)

    torch.manual_seed(0)
    assert difference(Kept(Rare()), after_step=enlarge) < EXACT


@pytest.mark.parametrize(
    "function",
    [
        lambda _, x: x if isinstance(x, Tensor) else x.tanh(),
        lambda _, x: x.tanh() if hasattr(x, "tensors") else x,
    ],
)  # fmt: skip
def test_a_forward_that_asks_what_a_tensor_is_gets_the_answer_of_a_tensor(
    function: Callable[[Any, Tensor], Tensor],
) -> None:
    assert {"body.0"} <= layers_of(net(function)).keys() - {"tanh"} == layers_of(net(function)).keys()
    assert difference(net(function)) < EXACT


@pytest.mark.parametrize(
    "function",
    [
        lambda _, x: x * {"cpu": 1.0}.get(f"{x.device}", 2.0),
        lambda _, x: x * (2.0 if type(x) is Tensor else 1.0),
        lambda _, x: x * (2.0 if torch.is_grad_enabled() else 1.0),
        lambda _, x: x * len(x),
        lambda m, x: x * next(iter(m.parameters())).sum(),
    ],
    ids=["text", "type", "gradients", "length", "parameters in a list"],
)  # fmt: skip
def test_a_module_stays_whole_if_torch_fx_would_lose_something(function: Callable[[Any, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    assert trace(net(function), torch.zeros(2, 3, 8, 8)).live is not None
    assert difference(net(function)) < EXACT


def test_tracing_seeds_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed would seed every accelerator."""
    nets = (net(ODD["gru"]), Kept(BySize()))
    monkeypatch.setattr(torch, "manual_seed", None)
    for each in nets:
        layers_of(each)


class Lazily(nn.Module):
    """Makes a buffer when it is first called."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "grid"):
            self.register_buffer("grid", torch.linspace(0, 1, x.shape[-1]))
        return x * self.grid


def test_a_buffer_that_forward_makes_is_refused_until_it_is_there() -> None:
    model = Kept(Lazily())
    with pytest.raises(InputError, match=r"forward of module 'middle' makes .* call the model once"):
        layers_of(model)
    model(torch.zeros(2, 3, 8, 8))
    assert difference(model) < EXACT


class Films(nn.Module):
    """Moves a channel of each of four frames back in time."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        films, y = x.unflatten(0, (len(x) // 4, 4)), torch.zeros_like(x).unflatten(0, (len(x) // 4, 4))
        y[:, :-1, :1], y[:, :, 1:] = films[:, 1:, :1], films[:, :, 1:]
        return self.fc(y.flatten(0, 1).mean((2, 3)))


class FewShot(nn.Module):
    """Distances between the queries and the means of two classes, each of two images and two queries."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        classes = self.fc(x.mean((2, 3))).view(2, 4, 5)
        return torch.cdist(classes[:, 2:].flatten(0, 1), classes[:, :2].mean(1))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.fc = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 5)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.fc(self.gru(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[1][-1])


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (Films, (torch.randn(8, 3, 4, 4),)),
        (FewShot, (torch.randn(8, 3, 4, 4),)),
        (Packed, (torch.randn(4, 6, 3), torch.tensor([6, 4, 3, 2]))),
    ],
)
def test_a_model_that_takes_no_random_batch_is_called_with_the_example(
    make: Callable[[], nn.Module], inputs: tuple[Tensor, ...]
) -> None:
    torch.manual_seed(0)
    model, samples = make(), len(inputs[0])
    plan = named_plan("data", trace(model, inputs).graph, samples, Speeds((2.0, 1.0)))

    def work(group: Group) -> Tensor:
        here = Distributed(model, plan, group, inputs)
        y = here(*(part(here, x, i) for i, x in enumerate(inputs)), batch=samples)
        y.square().sum().backward()
        return here.gather("fc.weight", here.module.fc.weight.grad)

    model(*inputs).square().sum().backward()
    for found in run_on_threads(2, work):
        torch.testing.assert_close(found, model.fc.weight.grad)


def test_a_model_that_does_not_run_on_its_example_is_refused() -> None:
    model = FewShot()
    with pytest.raises(InputError, match=r"FewShot does not run on the example: shape '\[2, 4, 5\]' is invalid"):
        trace(model, torch.zeros(6, 3, 4, 4))


class Around(nn.Module):
    """A forward that cannot be traced, around a convolution."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.call = nn.Conv2d(3, 3, 3, padding=1), call

    def forward(self, x: Tensor) -> Tensor:
        return x + self.call(self.conv, x) if bool(x.isfinite().all()) else x


def without_gradient(conv: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return conv(x)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in evaluation, as in plain PyTorch
@pytest.mark.parametrize(
    ("call", "split"),
    [
        (lambda conv, x: conv(x), ["conv"]),
        (without_gradient, ["conv"]),
        (lambda conv, x: conv(x) * conv.weight.norm(), []),
        (lambda conv, x: conv(x) + 0 * conv.weight.data.div_(1 + conv.weight.data.norm()).sum(), []),
        (lambda conv, x: checkpoint(conv, x, use_reentrant=False), []),
    ],
    ids=["plain", "without gradient", "weights read", "weights written", "checkpointed"],
)
def test_a_submodule_is_split_if_its_calls_alone_use_its_weights(call: Any, split: list[str]) -> None:
    torch.manual_seed(0)
    assert split_in(Around(call)) == split
    assert difference(nn.Sequential(Around(call), nn.Flatten(), nn.Linear(192, 5)), plan="model") < EXACT
