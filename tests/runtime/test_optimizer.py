"""Optimizers on shards: exact ones, refused ones, and their full state."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import convoy
from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.model.tracing import trace
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan
from convoy.runtime.module import Distributed
from tests.support.slow import each_value
from tests.support.threads import run_on_threads
from tests.support.torch_seed import torch_seed

SPEEDS = Speeds((3.0, 1.0, 2.0))
EXACT = 1e-10
STEPS = 3

Make = Callable[[Any], Optimizer]


def build() -> nn.Module:
    with torch_seed(5):
        return nn.Sequential(
            nn.Conv2d(2, 5, 3, padding=1, bias=False),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(80, 6),
            nn.Linear(6, 4),
        ).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(6)
    return [
        (torch.randn(n, 2, 4, 4, generator=generator).double(), torch.randint(4, (n,), generator=generator))
        for n in (12, 12, 5)[:STEPS]
    ]


def plan_of(name: str) -> Plan:
    return named_plan(name, trace(build(), torch.zeros(1, 2, 4, 4).double()).graph, 12, SPEEDS)


def train(model: nn.Module, optimizer: Optimizer, forward: Callable[[Tensor], Tensor]) -> None:
    for x, y in batches():

        def loss(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            value = F.cross_entropy(forward(x), y)
            value.backward()
            return value

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(loss)  # calls the model as often as it likes
        else:
            loss()
            optimizer.step()
    assert model.training


def part_of(model: Distributed, x: Tensor) -> Tensor:
    return next(
        iter(convoy.loader(torch.utils.data.TensorDataset(x, torch.zeros(len(x))), len(x), model, shuffle=False))
    )[0]


def train_on_one(make: Make) -> tuple[nn.Module, Optimizer]:
    model = build()
    optimizer = make(model)
    train(model, optimizer, model)
    return model, optimizer


def train_on_many(make: Make, plan: Plan, look: Callable[[Distributed, Optimizer], Any]) -> list[Any]:
    """Return the result of `look` on each device after training."""
    whole = build()  # not in the threads: they share the random numbers of the process

    def work(group: Group) -> Any:
        model = convoy.distribute(whole, plan, group, torch.zeros(1, 2, 4, 4).double())
        optimizer = make(model)
        train(model, optimizer, lambda x: model(part_of(model, x), batch=len(x)))
        return look(model, optimizer)

    return run_on_threads(len(SPEEDS.devices), work, timeout_s=30)


# ------------------------------------------------------------------------------------------------- the state as a whole

STATEFUL: dict[str, Make] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "sgd-plain": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "adamw-two-groups": lambda m: torch.optim.AdamW(
        [
            {"params": [p for n, p in m.named_parameters() if n.startswith("0.")], "lr": 0.02},
            {"params": [p for n, p in m.named_parameters() if not n.startswith("0.")]},
        ],
        lr=0.01,
    ),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.01),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), lr=0.01),
}


@pytest.mark.parametrize(("name", "plan"), each_value([*STATEFUL], ["data-by-speed", "master", "model", "hybrid"]))
def test_full_optimizer_state_matches_one_device(name: str, plan: str) -> None:
    model, optimizer = train_on_one(STATEFUL[name])
    keys = {parameter: key for key, parameter in model.named_parameters()}
    expected = {keys[p]: state for p, state in optimizer.state.items() if state}
    groups = [{**g, "params": [keys[p] for p in g["params"]]} for g in optimizer.param_groups]
    for found in train_on_many(STATEFUL[name], plan_of(plan), convoy.train.full_optimizer_state):
        assert found["param_groups"] == groups
        states = {key: state for key, state in found["state"].items() if state}
        assert states.keys() == expected.keys()
        for key, state in expected.items():
            assert states[key].keys() == state.keys(), key
            for what, value in state.items():
                assert _apart(states[key][what], value) <= EXACT, f"{what} of {key}"


def _apart(found: Any, expected: Any) -> float:
    if expected is None:
        return 0.0 if found is None else float("inf")
    a, b = (torch.as_tensor(each, dtype=torch.float64).cpu() for each in (found, expected))
    return float((a - b).abs().max()) if a.shape == b.shape else float("inf")


# ---------------------------------------------------------------------------------------------------------- the guard


class Scaled(Optimizer):
    """A user-defined elementwise optimizer, which Convoy cannot recognise as such."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(0.1 * p.grad)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name in ("4.weight", "5.weight")]


UNFIT: dict[str, Make] = {
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
    "Muon": lambda m: torch.optim.Muon(matrices(m), lr=0.01),
    "Scaled": lambda m: Scaled(m.parameters()),
}


@pytest.mark.parametrize("plan", ["model", "master", "hybrid"])
@pytest.mark.parametrize("name", UNFIT)
def test_non_elementwise_optimizer_is_refused_on_shards(name: str, plan: str) -> None:
    """The refusal comes before any change and gives a remedy."""
    whole, fitting = build(), plan_of(plan)

    def work(group: Group) -> str:
        model = convoy.distribute(whole, fitting, group, torch.zeros(1, 2, 4, 4).double())
        optimizer = UNFIT[name](model)
        before = {key: value.clone() for key, value in model.named_parameters()}
        with pytest.raises(InputError) as caught:
            optimizer.step(lambda: 0.0)
        assert all(torch.equal(value, before[key]) for key, value in model.named_parameters())
        return str(caught.value)

    for message in run_on_threads(3, work):
        for word in (
            f"{name} is not known",
            "'data', 'data-by-speed'",
            "AdamW",
            "SGD",
            f"convoy.train.ELEMENTWISE.add({name})",
        ):
            assert word in message


@pytest.mark.parametrize("name", UNFIT)
def test_non_elementwise_optimizer_is_allowed_on_copies(name: str) -> None:
    """It then trains as on one device."""
    expected = train_on_one(UNFIT[name])[0].state_dict()
    start = build().state_dict()
    assert not torch.equal(expected["5.weight"], start["5.weight"])
    for found in train_on_many(UNFIT[name], plan_of("data"), lambda model, _: model.full_state_dict()):
        assert all(_apart(found[key], expected[key]) <= EXACT for key in expected)


@pytest.fixture
def _scaled_is_known() -> Iterator[None]:
    convoy.train.ELEMENTWISE.add(Scaled)
    yield
    convoy.train.ELEMENTWISE.discard(Scaled)


@pytest.mark.usefixtures("_scaled_is_known")
def test_user_optimizer_class_can_be_registered() -> None:
    expected = train_on_one(UNFIT["Scaled"])[0].state_dict()
    for found in train_on_many(UNFIT["Scaled"], plan_of("model"), lambda model, _: model.full_state_dict()):
        assert all(_apart(found[key], expected[key]) <= EXACT for key in expected)


def test_subclass_of_a_known_optimizer_is_not_trusted() -> None:
    class Normalised(torch.optim.SGD):
        """An optimizer that first divides by the norm of the whole gradient."""

    whole, fitting = build(), plan_of("model")

    def work(group: Group) -> None:
        model = convoy.distribute(whole, fitting, group, torch.zeros(1, 2, 4, 4).double())
        with pytest.raises(InputError, match="Normalised is not known"):
            Normalised(model.parameters(), lr=0.1).step()

    run_on_threads(3, work)


def test_optimizers_of_ordinary_models_are_left_alone() -> None:
    before = [p.detach().clone() for p in build().parameters()]
    model, _ = train_on_one(UNFIT["LBFGS"])
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
