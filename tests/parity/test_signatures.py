"""Sizes, modes and `requires_grad` that change while training, against plain PyTorch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.comm.group import Group
from convoy.model.tracing import trace
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan
from convoy.runtime.module import Distributed
from tests.support import nets
from tests.support.one_device import EXACT, OPTIMIZERS, part
from tests.support.slow import each_value
from tests.support.threads import run_on_threads
from tests.support.torch_seed import torch_seed

PLANS = ("data-by-speed", "hybrid")
Call = Callable[[Tensor], Tensor]
Loop = Callable[[nn.Module, Call, str], list[Tensor]]


def images(seed: int, size: int = 8, samples: int = 6) -> Tensor:
    return torch.randn(samples, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inner(model: nn.Module) -> Any:
    return model.module if isinstance(model, Distributed) else model


def check(model: nn.Module, loop: Loop, plan: str | Plan, optimizer: str) -> list[Distributed]:
    """Run a loop on one device and on three, one of them without samples; compare its results and the weights."""
    reference, chosen = copy.deepcopy(model), plan
    if isinstance(chosen, str):
        chosen = named_plan(chosen, trace(model, images(0)).graph, 6, Speeds((3.0, 0.0, 2.0)))
    expected = loop(reference, reference, optimizer)

    def work(group: Group) -> tuple[Distributed, list[Tensor], dict[str, Tensor]]:
        here = Distributed(copy.deepcopy(model), chosen, group, images(0))
        found = loop(here, lambda x: here(part(here, x), batch=len(x)), optimizer)
        here.train()
        return here, found, here.full_state_dict()

    results = run_on_threads(3, work)
    for _, found, weights in results:
        torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(weights, dict(reference.state_dict()), rtol=EXACT, atol=EXACT)
    return [here for here, _, _ in results]


def step(call: Call, x: Tensor, *optimizers: torch.optim.Optimizer) -> Tensor:
    y = call(x)
    loss = y.square().mean() + y.flatten(1)[:, 0].sum()
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.detach()


class Segmenter(nn.Module):
    """Pads odd sizes, as U-Nets do: then the trace has another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.middle, self.up = nn.Conv2d(6, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        if height % 4:
            x = F.pad(x, (0, 0, 0, 4 - height % 4))
        x = F.relu(self.middle(self.down(x)))
        return self.up(F.interpolate(x, scale_factor=2.0))[:, :, :height, :width]


def resnet() -> nn.Module:
    with torch_seed(0):
        return nets.build("resnet")


def segmenter() -> nn.Module:
    with torch_seed(0):
        return Segmenter().double()


@pytest.mark.parametrize(("plan", "make", "optimizer"), each_value(PLANS, [resnet, segmenter], ["sgd", "adamw"]))
def test_training_at_several_image_sizes(make: Callable[[], nn.Module], optimizer: str, plan: str) -> None:
    def loop(model: nn.Module, call: Call, kind: str) -> list[Tensor]:
        own = OPTIMIZERS[kind](model.parameters())
        return [step(call, images(i, size), own) for i, size in enumerate((8, 12, 10, 8, 12, 10))]

    for here in check(make(), loop, plan, optimizer):
        assert len(here._traces) == 2


@pytest.mark.parametrize("plan", PLANS)
def test_evaluation_of_whole_images_after_training_on_crops(plan: str) -> None:
    def loop(model: nn.Module, call: Call, kind: str) -> list[Tensor]:
        own, found = OPTIMIZERS[kind](model.parameters()), []
        for epoch in range(2):
            model.train()
            found += [step(call, images(i + 10 * epoch), own) for i in range(2)]
            model.eval()
            with torch.no_grad():
                found += [call(images(20, size, samples)) for size, samples in ((14, 6), (17, 1))]
        return found

    check(segmenter(), loop, plan, "sgd")


@pytest.mark.parametrize(("plan", "optimizer"), each_value(PLANS, ["adamw", "sgd"]))
def test_freezing_batch_norm_and_layers_and_thawing_them(plan: str, optimizer: str) -> None:
    """A frozen parameter has no gradient, and keeps its momentum; a frozen batch norm its running statistics."""

    def loop(model: nn.Module, call: Call, kind: str) -> list[Tensor]:
        net = inner(model)
        own, found = OPTIMIZERS[kind](model.parameters()), []
        for i in range(8):
            if i == 2:
                net.bn1.eval()
                net.layer1.requires_grad_(False)
            if i == 4:
                net.layer2.bn1.eval()
                net.conv1.requires_grad_(False)
            if i == 6:
                model.train()
                model.requires_grad_(True)
            found.append(step(call, images(i), own))
        return found

    check(resnet(), loop, plan, optimizer)


@pytest.mark.parametrize("plan", PLANS)
def test_thawing_a_backbone_with_add_param_group(plan: str) -> None:
    model = resnet()
    model.requires_grad_(False).get_submodule("fc").requires_grad_(True)

    def loop(model: nn.Module, call: Call, kind: str) -> list[Tensor]:
        own = OPTIMIZERS[kind](inner(model).fc.parameters())
        found = [step(call, images(i), own) for i in range(2)]
        model.requires_grad_(True)
        own.add_param_group({"params": [p for n, p in model.named_parameters() if not n.startswith("fc")], "lr": 0.01})
        return found + [step(call, images(i), own) for i in range(2, 5)]

    check(model, loop, plan, "sgd")
