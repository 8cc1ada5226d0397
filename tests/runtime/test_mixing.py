"""Butterfly mixing (Zhao and Canny): an inexact mode, labelled as such everywhere, that still learns."""

import io
import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import convoy
from convoy.comm.group import Group
from convoy.layout.layout import Replicated
from convoy.model.tracing import trace
from convoy.plan.explain import layer_rows
from convoy.plan.plan import Plan
from convoy.plan.presets import PLANS, Speeds, named_plan
from convoy.plan.strategy import Batch
from convoy.report.screen import Screen
from tests.support import nets
from tests.support.one_device import one_trace
from tests.support.threads import run_on_threads

MIXING = "inexact-butterfly-mixing"
LR = 0.1
STEPS = 25


def scalar_net() -> nn.Module:
    """Return the net y = w x with w = 0.5."""
    linear = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(linear.weight, 0.5)
    return nn.Sequential(linear)


X = (0.3, -1.0, 2.0, 0.7, -0.4, 1.5)
T = (1.0, 2.0, -1.0, 0.5, 3.0, 0.0)


def by_hand(shares: Sequence[int], steps: int) -> list[float]:
    """Every device's w after steps of SGD on mean((w x - t)^2), in plain numbers: what the method's description says.

    In step k the devices i and i XOR 2^(k mod ceil(lg p)) average their weights and their gradients; the gradient is that
    of the mean over the samples of the pair. A device without a partner goes on alone.
    """
    devices = len(shares)
    stages = max(1, (devices - 1).bit_length())
    starts = [sum(shares[:d]) for d in range(devices)]
    w = [0.5] * devices
    for k in range(steps):
        sums = [
            sum(2 * X[i] * (w[d] * X[i] - T[i]) for i in range(starts[d], starts[d] + shares[d]))
            for d in range(devices)
        ]
        new = []
        for d in range(devices):
            partner = d ^ (1 << (k % stages))
            both = [d, partner] if partner < devices else [d]
            samples = sum(shares[b] for b in both)
            gradient = sum(sums[b] for b in both) / samples if samples else 0.0
            new.append(sum(w[b] for b in both) / len(both) - LR * gradient)
        w = new
    return w


def on_threads(shares: tuple[int, ...], steps: int) -> list[tuple[float, float]]:
    """Every device's own w (NaN without samples, which means without a copy), and what it takes for the whole model's."""
    model = scalar_net()
    graph = trace(model, torch.zeros(1, 1).double()).graph
    plan = Plan("data", graph.fingerprint, len(shares), sum(shares), {}, Batch(shares), MIXING)
    x, t = (torch.tensor(v[: sum(shares)], dtype=torch.float64)[:, None] for v in (X, T))
    starts = [sum(shares[:d]) for d in range(len(shares))]

    def work(group: Group) -> tuple[float, float]:
        part = convoy.distribute(model, plan, group, x[:1])
        optimizer = torch.optim.SGD(part.parameters(), lr=LR)
        start = starts[group.device]
        for _ in range(steps):
            optimizer.zero_grad()
            F.mse_loss(part(x[start : start + shares[group.device]], batch=len(x)), t).backward()
            optimizer.step()
        (own,) = part.parameters()
        return own.item() if own.numel() else float("nan"), part.full_state_dict()["0.weight"].item()

    with one_trace():
        return run_on_threads(len(shares), work)


@pytest.mark.parametrize("shares", [(3, 1), (2, 2), (0, 4)])
def test_mixed_weights_after_one_step_by_hand(shares: tuple[int, ...]) -> None:
    """w - lr * d/dw mean((w x - t)^2) over the four samples, worked out by hand: both have mixed with all there is."""
    # Residuals w x - t are -0.85, -2.5, 2.0, -0.15; times 2 x, averaged: (-0.51 + 5.0 + 8.0 - 0.21) / 4 = 3.07.
    expected = 0.5 - LR * 3.07
    assert by_hand(shares, 1) == pytest.approx([expected] * 2, abs=1e-12)
    for own, whole in on_threads(shares, 1):
        assert math.isnan(own) or own == pytest.approx(expected, abs=1e-12)
        assert whole == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("shares", [(2, 1, 3), (1, 2, 3), (0, 2, 4), (0, 0, 6), (2, 1, 1, 2), (1, 1, 1, 1, 2)])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_mixing_follows_the_published_method(shares: tuple[int, ...], steps: int) -> None:
    """Cover any number of devices, some idle; the whole model is the average of the training copies."""
    found = on_threads(shares, steps)
    expected = by_hand([share for share in shares if share], steps)
    assert [own for own, _ in found if not math.isnan(own)] == pytest.approx(expected, abs=1e-12)
    average = sum(expected) / len(expected)
    assert [whole for _, whole in found] == pytest.approx([average] * len(shares), abs=1e-12)


def test_mixing_on_three_devices_differs_from_one() -> None:
    found = on_threads((2, 1, 3), 4)
    owns = [own for own, _ in found]
    assert len({round(own, 9) for own in owns}) == 2, "the last pair has just averaged; the third device was alone"
    one = by_hand((6,), 4)[0]
    assert all(abs(own - one) > 1e-3 for own in owns)
    assert abs(found[0][1] - one) > 1e-6


@pytest.mark.parametrize("devices", [3, 4])
def test_net_learns_with_mixing(devices: int) -> None:
    """A residual net with batch norm learns its 24 images; all devices read the same whole model, which is no device's own."""
    model = nets.build("resnet")
    shape = nets.shape_of(model)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(24, *shape, generator=generator, dtype=torch.float64)
    y = torch.randint(nets.CLASSES, (24,), generator=generator)
    graph = trace(model, x[:2]).graph
    plan = named_plan("data-by-speed", graph, 24, Speeds((2.0, 1.0, 1.0, 1.5)[:devices]), MIXING)

    def work(group: Group) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
        part = convoy.distribute(model, plan, group, x[:2])
        optimizer = torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for own, labels in [
            batch for _ in range(STEPS) for batch in convoy.loader(_Pairs(x, y), 24, part, shuffle=False)
        ]:
            loss = F.cross_entropy(part(own), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        state = convoy.train.full_optimizer_state(part, optimizer)["state"]
        assert state["fc.weight"]["momentum_buffer"].shape == (nets.CLASSES, 8)
        return losses, part.full_state_dict(), dict(part.module.state_dict())

    with one_trace():
        results = run_on_threads(devices, work)
    losses, whole, _ = results[0]
    assert losses[-1] < 0.5 * losses[0]
    assert all(other == losses for other, _, _ in results), "every device sees the loss of the whole batch"
    for key, value in whole.items():
        assert all(torch.equal(other[key], value) for _, other, _ in results)
        copies = torch.stack([own[key].double() for _, _, own in results])
        assert torch.allclose(copies.mean(0), value.double(), rtol=0, atol=1e-12)
    copies = [own["conv1.weight"] for _, _, own in results]
    assert all(not torch.allclose(a, b, atol=1e-6) for i, a in enumerate(copies) for b in copies[:i])
    assert whole["bn1.num_batches_tracked"].item() == STEPS


class _Pairs(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], int(self.y[index])


def test_exact_plan_copies_the_model_without_averaging() -> None:
    """Averaging would round: seven times a seventh of a number is not always the number."""
    model = nets.build("two-conv")
    graph = trace(model, torch.zeros(1, 3, 8, 8).double()).graph
    plan = named_plan("data", graph, 7, Speeds((1.0,) * 7))

    def work(group: Group) -> bool:
        part = convoy.distribute(model, plan, group, torch.zeros(1, 3, 8, 8).double())
        assert isinstance(part.layouts["conv1.weight"], Replicated)
        found, expected = part.full_state_dict(), model.state_dict()
        return all(torch.equal(found[key], expected[key]) for key in expected)

    assert run_on_threads(7, work) == [True] * 7


# ------------------------------------------------------------------------------------------------- it says what it is


@pytest.mark.parametrize("name", sorted(PLANS))
def test_every_plan_supports_mixing_and_is_called_inexact(name: str) -> None:
    graph = trace(nets.build("two-conv"), torch.zeros(1, 3, 8, 8).double()).graph
    speeds = Speeds((2.0, 1.0))
    plan, exact = named_plan(name, graph, 6, speeds, MIXING), named_plan(name, graph, 6, speeds)
    assert not plan.exact
    assert exact.exact
    assert "inexact" in plan.reduce
    texts = []
    for each in (plan, exact):
        screen = Screen(visible=True, console=Console(file=io.StringIO(), width=120))
        screen.plan(each, layer_rows(each, graph), (0.5, 0.5))
        assert isinstance(screen.console.file, io.StringIO)
        texts.append(screen.console.file.getvalue())
    assert "INEXACT: butterfly mixing does not follow the trajectory of one device." in texts[0]
    assert "sums by inexact-butterfly-mixing" in texts[0]
    assert "inexact" not in texts[1].lower()
