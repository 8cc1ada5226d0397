"""Parity of another kind: float32, equal copies, the bytes of a step, and evaluation."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convoy.comm.group import Group
from convoy.layout.layout import Replicated
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import PLANS, Speeds, named_plan
from convoy.plan.strategy import Batch
from convoy.runtime.module import Distributed
from tests.support import nets
from tests.support.one_device import (
    EXACT,
    Training,
    by_name,
    check,
    graph_of,
    loss_of,
    mixed,
    one_trace,
    part,
    traffic_of,
)
from tests.support.slow import each_value, most_slow
from tests.support.threads import run_on_threads

SHORT = (10, 3, 10)


@pytest.mark.parametrize("plan", most_slow(2, ["mixed", *reversed(PLANS)]))
def test_float32_follows_within_rounding(plan: str) -> None:
    """Sums in another order: a few units in the last place at first, magnified by twenty steps of training."""
    training = Training("two-conv", dtype=torch.float32)
    check(training, mixed("two-conv") if plan == "mixed" else by_name(plan, "two-conv"), 2e-4)


@pytest.mark.parametrize(("net", "plan"), each_value(["resnet", "bare", "opaque-per-sample"], [*PLANS, "mixed"]))
def test_copies_are_equal_to_the_last_bit_after_every_step(net: str, plan: str) -> None:
    model = nets.build(net, dtype=torch.float32)
    chosen = mixed(net, "butterfly") if plan == "mixed" else by_name(plan, net, "butterfly")
    batches = Training(net, (10, 3, 10, 10, 3, 10), dtype=torch.float32).batches(model)

    def work(group: Group) -> list[dict[str, bytes]]:
        here = Distributed(model, chosen, group, batches[0][0][:2])
        optimizer = torch.optim.Adam(here.parameters(), lr=0.01)
        copies = [k for k, p in here.parameters_by_key.items() if not p.buffer]
        seen = []
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(here(part(here, x), batch=len(x)), y).backward()
            optimizer.step()
            own = {k: here.layouts[k] for k in copies}
            held = {k for k, layout in own.items() if isinstance(layout, Replicated) and group.device in layout.devices}
            seen.append({k: here.module.get_parameter(k).detach().numpy().tobytes() for k in held})
        return seen

    with one_trace(net, torch.float32):
        results = run_on_threads(4, work)
    compared = 0
    for step in zip(*results, strict=True):
        for key in set().union(*step):
            copies_of_key = [device[key] for device in step if key in device]
            assert len(set(copies_of_key)) == 1, key
            compared += len(copies_of_key) - 1
    assert (
        compared
        or chosen.sharded
        or not any(isinstance(v, Batch) for v in (chosen.otherwise, *chosen.layers.values()))
        or plan == "model"
    )


@pytest.mark.parametrize(
    ("net", "plan"),
    each_value(["two-conv", "resnet", "opaque-per-sample", "tied", "auxiliary", "shuffle"], [*PLANS, "mixed"]),
)
def test_the_bytes_of_a_step_are_those_the_plan_predicts(net: str, plan: str) -> None:
    chosen = mixed(net, "butterfly") if plan == "mixed" else by_name(plan, net, "star" if plan == "data" else "ring")
    for size in (10, 3):
        assert traffic_of(net, chosen, size) == +lower(chosen, graph_of(net), size).traffic(8)


def test_traffic_by_hand() -> None:
    """data, ring, two devices of equal speed: weights once each way in halves, and the outputs of 5 samples."""
    plan = named_plan("data", graph_of("two-conv"), 10, Speeds((1.0, 1.0)), "ring")
    weights = sum(p.numel() for p in nets.build("two-conv").parameters())
    assert traffic_of("two-conv", plan, 10) == {(0, 1): 8 * (weights + 25), (1, 0): 8 * (weights + 25)}


def test_dropout_is_off_in_evaluation() -> None:
    model = nets.Dropouts().double()
    x = torch.randn(10, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    graph = trace(model, x[:2]).graph
    expected = [copy.deepcopy(model).eval()(x[:n]) for n in (10, 3)]
    for name in PLANS:
        plan = named_plan(name, graph, 10, Speeds((7.0, 0.0, 2.0, 1.0)))

        def work(group: Group, plan: Plan = plan) -> list[Any]:
            here = Distributed(model, plan, group, x[:2])
            here.eval()
            with torch.no_grad():
                return [here(part(here, x[:n]), batch=n) for n in (10, 3)]

        for found in run_on_threads(4, work):
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.allclose(ours, theirs, rtol=EXACT, atol=EXACT), name


def assert_same_losses(
    train: Callable[[nn.Module, Callable[[Tensor], Any]], list[float]], model: nn.Module, plan: Plan, example: Tensor
) -> None:
    """What `train` gives is on every device what it gives on one; it is handed a model, and what calls it on whole batches."""

    def work(group: Group) -> list[float]:
        here = Distributed(model, plan, group, example)
        return train(here, lambda x: here(part(here, x), batch=len(x)))

    found = run_on_threads(plan.devices, work)
    reference = copy.deepcopy(model)
    expected = train(reference, reference)
    for losses in found:
        assert losses == pytest.approx(expected, rel=EXACT, abs=EXACT)


@pytest.mark.parametrize("net", ["resnet", "dependent-in-training", "average", "own-norm"])
def test_training_goes_on_after_an_evaluation(net: str) -> None:
    model = nets.build(net)
    batches = Training(net, (10, 3, 10)).batches(model)

    def train(here: nn.Module, forward: Callable[[Tensor], Any]) -> list[float]:
        optimizer = torch.optim.SGD(here.parameters(), lr=0.05, momentum=0.9)
        seen = []
        for x, y in batches:
            here.train()
            optimizer.zero_grad()
            loss_of(forward(x), y).backward()
            optimizer.step()
            here.eval()
            with torch.no_grad():
                seen.append(loss_of(forward(x), y).item())
        return seen

    assert_same_losses(train, model, by_name("data-by-speed", net), batches[0][0][:2])


class PythonAtTheEnd(nets.TwoConv):
    """In evaluation it sorts its rows in Python, which torch.fx cannot follow: then the model is one layer."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.training else torch.stack([row - row.max() for row in y])


def test_an_evaluation_that_is_one_layer() -> None:
    """With whole weights on every device it runs; split ones are brought there for it, and are split again afterwards."""
    model, x = PythonAtTheEnd().double(), torch.randn(8, 3, 8, 8, dtype=torch.float64)
    graph = trace(model, x[:2]).graph
    expected = copy.deepcopy(model).eval()(x)

    def work(group: Group) -> list[Tensor]:
        whole = Distributed(model, named_plan("data", graph, 8, Speeds((1.0, 1.0))), group, x[:2]).eval()
        split = Distributed(model, named_plan("model", graph, 8, Speeds((1.0, 1.0))), group, x[:2]).eval()
        before = {key: tuple(p.shape) for key, p in split.named_parameters()}
        assert before != {key: tuple(p.shape) for key, p in model.named_parameters()}
        with torch.no_grad():
            found = [here(part(here, x), batch=8) for here in (whole, split)]
        assert {key: tuple(p.shape) for key, p in split.named_parameters()} == before
        assert not split(part(split, x), batch=8).requires_grad  # its weights are gone after the call
        return [*found, split.train()(part(split, x), batch=8).detach()]

    for found in run_on_threads(2, work):
        for y in found:  # the net is the same in training, but for the sorting
            assert y.shape == expected.shape
        assert torch.allclose(found[0], expected, rtol=EXACT, atol=EXACT)
        assert torch.allclose(found[1], expected, rtol=EXACT, atol=EXACT)
        assert torch.allclose(found[2] - found[2].amax(1, keepdim=True), expected, rtol=EXACT, atol=EXACT)


class CachesInEvaluation(nn.Module):
    """What LeViT's attention does: biases are looked up once for all evaluations, and anew after training."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.biases = nn.Parameter(torch.zeros(4))
        self.register_buffer("places", torch.tensor([0, 1, 1, 2, 3, 3]), persistent=False)
        self.cache: dict[str, Tensor] = {}

    def train(self, mode: bool = True) -> nn.Module:
        self.cache = {}
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.norm(self.fc(x)) + self.biases[self.places]
        if str(x.device) not in self.cache:
            self.cache[str(x.device)] = self.biases[self.places]
        return self.norm(self.fc(x)) + self.cache[str(x.device)]


def test_a_module_that_caches_in_evaluation_is_still_taken_apart_in_training() -> None:
    """LeViT and EfficientFormer could not be evaluated: the module is whole there, and training has its weights in parts."""
    model = nn.Sequential(nn.Linear(5, 6), CachesInEvaluation(), nn.ReLU(), nn.Linear(6, 5)).double()
    batches = [(torch.randn(10, 5, dtype=torch.float64), torch.randint(0, 5, (10,))) for _ in range(3)]
    graph = trace(model, batches[0][0][:2]).graph
    assert graph["1.fc"].kind == "linear"
    plan = named_plan("model", graph, 10, Speeds((2.0, 1.0, 1.0)))

    def train(here: nn.Module, forward: Callable[[Tensor], Any]) -> list[float]:
        optimizer = torch.optim.SGD(here.parameters(), lr=0.1, momentum=0.9)
        seen = []
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(forward(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                here.eval()
                seen += [loss_of(forward(each), y).item() for each in (x, x + 1)]
                here.train()
        return seen

    assert_same_losses(train, model, plan, batches[0][0][:2])


def test_gradients_in_evaluation_mode() -> None:
    """Fine-tuning with everything frozen in its statistics: model.eval(), and then backward."""
    model = nets.build("resnet").eval()
    (x, y), *_ = Training("resnet", (10,)).batches(model)
    reference = copy.deepcopy(model)
    loss_of(reference(x), y).backward()

    def work(group: Group) -> dict[str, Tensor]:
        here = Distributed(model, by_name("data-by-speed", "resnet"), group, x[:2])
        assert not here.training
        loss_of(here(part(here, x), batch=10), y).backward()
        held = dict(here.named_parameters())
        return {k: here.gather(k, p.grad if p.grad is not None else torch.empty_like(p)) for k, p in held.items()}

    for found in run_on_threads(4, work):
        for key, parameter in reference.named_parameters():
            assert parameter.grad is not None
            assert torch.allclose(found[key], parameter.grad, rtol=EXACT, atol=EXACT), key
