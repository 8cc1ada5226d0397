"""Several backwards of one forward: `retain_graph=True`, one backward per loss, `torch.autograd.grad` per task."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.model.tracing import trace
from convoy.plan.presets import Speeds, named_plan
from convoy.runtime.module import Distributed
from tests.support.one_device import EXACT, OPTIMIZERS, part
from tests.support.threads import run_on_threads

SIZES = (9, 9, 5)
PLANS = ("data-by-speed", "hybrid", "sharded")


class Tasks(nn.Module):
    """A shared trunk with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.one, self.two = nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x).mean((2, 3))
        return self.one(h), self.two(h)


def losses(outputs: tuple[Tensor, Tensor]) -> list[Tensor]:
    return [F.cross_entropy(y, torch.arange(len(y)) % y.shape[1]) for y in outputs]


def one_backward_each(_model: nn.Module, each: Sequence[Tensor]) -> None:
    each[0].backward(retain_graph=True)
    each[1].backward()


def one_loss_twice(_model: nn.Module, each: Sequence[Tensor]) -> None:
    total = each[0] * 0.5 + each[1]
    total.backward(retain_graph=True)
    total.backward(retain_graph=True)
    each[0].backward()


def projected(model: nn.Module, each: Sequence[Tensor]) -> None:
    """Project conflicting gradients as PCGrad does, and weight the heads by their norms."""
    shared = [p for key, p in model.named_parameters() if "trunk" in key]
    first, second = (torch.autograd.grad(loss, shared, retain_graph=True) for loss in each)
    sum(each[1:], each[0]).backward()
    dot = sum((a * b).sum() for a, b in zip(first, second, strict=True))
    size = sum(b.square().sum() for b in second)
    for p, a, b in zip(shared, first, second, strict=True):
        p.grad = a + b - dot / size * b


def train(
    model: nn.Module, backward: Callable[[nn.Module, Sequence[Tensor]], None], optimizer: str, call: Any
) -> list[Tensor]:
    draws = torch.Generator().manual_seed(5)
    steps, found = OPTIMIZERS[optimizer](model.parameters()), []
    for n in SIZES:
        steps.zero_grad()
        each = losses(call(torch.randn(n, 3, 7, 7, dtype=torch.float64, generator=draws)))
        backward(model, each)
        steps.step()
        found += [loss.detach() for loss in each]
    return found


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("backward", [one_backward_each, one_loss_twice, projected])
def test_several_backwards_train_as_on_one_device(backward: Any, plan: str, optimizer: str) -> None:
    model = Tasks().double()
    example = torch.zeros(2, 3, 7, 7, dtype=torch.float64)
    chosen = named_plan(plan, trace(model, example).graph, SIZES[0], Speeds((3.0, 2.0, 1.0)))
    one = copy.deepcopy(model)
    expected = [*train(one, backward, optimizer, one), *one.state_dict().values()]

    def work(group: Group) -> list[Tensor] | str:
        here = Distributed(model, chosen, group, example)
        try:
            found = train(here, backward, optimizer, lambda x: here(part(here, x), batch=len(x)))
        except InputError as error:
            return str(error)
        return [*found, *here.full_state_dict().values()]

    results = run_on_threads(3, work, timeout_s=60)
    for result in results:
        if backward is projected and plan == "sharded":
            assert "torch.autograd.grad of" in result
            assert "'data-by-speed'" in result
            continue
        for a, b in zip(result, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=EXACT, atol=EXACT)


def test_a_second_backward_without_retain_graph_is_refused() -> None:
    model = Tasks().double()
    example = torch.zeros(2, 3, 7, 7, dtype=torch.float64)
    chosen = named_plan("data", trace(model, example).graph, 4, Speeds((1.0, 1.0)))

    def work(group: Group) -> None:
        here = Distributed(model, chosen, group, example)
        one, two = losses(here(part(here, torch.ones(4, 3, 7, 7).double()), batch=4))
        one.backward()
        with pytest.raises(InputError, match=r"ran twice .* retain_graph=True"):
            two.backward()

    run_on_threads(2, work)
