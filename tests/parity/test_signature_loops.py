"""Whole loops over changing signatures (GAN, resume, reshard, copies), and what they refuse."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from convoy import load_checkpoint, save_checkpoint
from convoy.comm.group import Group
from convoy.errors import InputError, MismatchError
from convoy.model.tracing import trace
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.strategy import Form
from convoy.runtime.module import Distributed
from convoy.runtime.reshard import reshard
from tests.parity.test_signatures import PLANS, Call, check, images, inner, resnet, step
from tests.support.one_device import EXACT, OPTIMIZERS, by_name, in_shares, part
from tests.support.threads import run_on_threads
from tests.support.torch_seed import torch_seed

SPEEDS = Speeds((3.0, 0.0, 2.0))


def generator_and_discriminator() -> tuple[nn.Module, nn.Module]:
    with torch_seed(0):
        up = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(True), nn.Conv2d(6, 3, 3, padding=1)
        )
        down = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.LeakyReLU(0.2, True), nn.Conv2d(6, 1, 3))
    return up.double(), down.double()


def gan(up: nn.Module, down: nn.Module, fake_of: Call, judged: Call, kind: str) -> list[Tensor]:
    """Train like pix2pix: the discriminator is frozen while the generator trains through it."""
    of_up, of_down = OPTIMIZERS[kind](up.parameters()), OPTIMIZERS[kind](down.parameters())
    losses = []
    for i in range(4):
        fake = fake_of(images(i))
        down.requires_grad_(True)
        of_down.zero_grad()
        loss = judged(fake.detach()).square().mean() + (judged(images(i + 50)) - 1).square().mean()
        loss.backward()
        of_down.step()
        down.requires_grad_(False)
        of_up.zero_grad()
        own = (judged(fake) - 1).square().mean()
        own.backward()
        of_up.step()
        losses += [loss.detach(), own.detach()]
    return losses


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_gan_with_requires_grad_toggled_in_each_half_step(plan: str, kind: str) -> None:
    up, down = generator_and_discriminator()
    plans = [named_plan(plan, trace(net, images(0)).graph, 6, SPEEDS) for net in (up, down)]
    references = copy.deepcopy(up), copy.deepcopy(down)
    expected = gan(*references, *references, kind)

    def work(group: Group) -> tuple[list[Tensor], list[dict[str, Tensor]], int]:
        nets = [Distributed(net, p, group, images(0)) for net, p in zip((up, down), plans, strict=True)]
        found = gan(*nets, lambda x: nets[0](x, whole=True), lambda x: nets[1](x, whole=True), kind)
        return found, [net.full_state_dict() for net in nets], len(nets[1]._first_traces | nets[1]._traces)

    for losses, weights, traces in run_on_threads(3, work):
        torch.testing.assert_close(losses, expected, rtol=EXACT, atol=EXACT)
        for found, net in zip(weights, references, strict=True):
            torch.testing.assert_close(found, dict(net.state_dict()), rtol=EXACT, atol=EXACT)
        assert traces == 1  # no module has modes, and toggling needs no trace


def test_resume_with_a_frozen_part(tmp_path: Path) -> None:
    whole, graph = resnet(), trace(resnet(), images(0)).graph

    def trained(model: nn.Module, call: Call, first: int, last: int) -> tuple[torch.optim.Optimizer, list[Tensor]]:
        optimizer, losses = OPTIMIZERS["adamw"](model.parameters()), []
        if first:
            load_checkpoint(tmp_path / str(isinstance(model, Distributed)), model, optimizer)
        for i in range(first, last):
            inner(model).layer1.requires_grad_(i < 2)
            losses.append(step(call, images(i), optimizer))
        return optimizer, losses

    def both(model: nn.Module, again: nn.Module, call: Call, call_again: Call) -> list[Tensor]:
        optimizer, losses = trained(model, call, 0, 3)
        save_checkpoint(tmp_path / str(isinstance(model, Distributed)), model, optimizer)
        return losses + trained(again, call_again, 3, 6)[1]

    expected = both(reference := copy.deepcopy(whole), again := resnet(), reference, again)

    def work(group: Group) -> list[Tensor]:
        nets = [Distributed(whole, named_plan(name, graph, 6, SPEEDS), group, images(0)) for name in PLANS]
        calls = [lambda x, net=net: net(part(net, x), batch=len(x)) for net in nets]
        return both(*nets, *calls)

    for found in run_on_threads(3, work):
        torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


def test_reshard_and_a_deep_copy_after_other_sizes_and_modes() -> None:
    graph = trace(resnet(), images(0)).graph

    def loop(model: nn.Module, call: Call, kind: str) -> list[Tensor]:
        optimizer = OPTIMIZERS[kind](model.parameters())
        inner(model).bn1.eval()
        found = [step(call, images(i, size), optimizer) for i, size in enumerate((8, 12, 8))]
        if isinstance(model, Distributed):
            reshard(model, named_plan("hybrid", graph, 6, Speeds((1.0, 2.0, 1.0))), optimizer)
        found += [step(call, images(i, size), optimizer) for i, size in enumerate((12, 10))]
        average = copy.deepcopy(model).eval()
        with torch.no_grad():
            x = images(7, 12)
            found.append(average(part(average, x), batch=6) if isinstance(average, Distributed) else average(x))
        return found

    check(resnet(), loop, "data-by-speed", "sgd")


@pytest.mark.parametrize("form", ["keep", "free"])
def test_freezing_and_sizes_with_sharded_parameters(form: Form) -> None:
    def loop(model: nn.Module, call: Call, kind: str) -> list[Tensor]:
        optimizer, found = OPTIMIZERS[kind](model.parameters()), []
        for i, size in enumerate((8, 12, 12, 8)):
            inner(model).layer1.requires_grad_(i != 2)
            found.append(step(call, images(i, size), optimizer))
        model.eval()
        with torch.no_grad():
            return [*found, call(images(9, 14))]

    plan = in_shares(by_name("data-by-speed", "resnet", speeds=SPEEDS, batch=6), "resnet", (2, 1, 1), form)
    check(resnet(), loop, plan, "adamw")


def test_what_the_model_cannot_take_is_refused_by_name() -> None:
    model, plan = resnet(), by_name("data", "resnet", speeds=Speeds((1.0, 1.0)), batch=6)

    def work(group: Group) -> None:
        here = Distributed(model, plan, group, images(0))
        with pytest.raises(
            InputError, match=r"for inputs of \(\(1, 8, 8\),\) per sample.*expected input.* to have 3 channels"
        ):
            here(images(0)[:, :1], whole=True)
        with pytest.raises(InputError, match=r"got x of \(3, 8, 8\): .* need \[4\] axes.*x\[None\]"):
            here(images(0)[0], batch=1)
        loss = here(images(0), whole=True).sum()
        here.module.conv1.requires_grad_(False)
        with pytest.raises(InputError, match=r"'conv1.weight' was frozen between a forward pass and its backward"):
            loss.backward()
        here.module.conv1.requires_grad_(group.device == 0)
        with pytest.raises(MismatchError, match=r"device 1 .*has other sizes of inputs, modes.* or requires_grad"):
            here(images(0, samples=4), whole=True)

    run_on_threads(2, work)
