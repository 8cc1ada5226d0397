"""Input gradients match one device: saliency, adversarial examples, and a GAN as two distributed models."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.comm.group import Group
from convoy.errors import InputError, MismatchError
from convoy.layout.layout import box
from convoy.model.tracing import trace
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan
from convoy.runtime.module import Distributed
from tests.support import nets
from tests.support.one_device import EXACT, UNEVEN, Training, by_name, loss_of, mixed, one_trace, part
from tests.support.slow import each_value
from tests.support.threads import run_on_threads

PLANS = ("data-by-speed", "master", "model", "hybrid", "mixed")
NETS = ("two-conv", "resnet", "auxiliary", "in-place", "opaque-per-sample")


def plan_of(name: str, net: str) -> Plan:
    return mixed(net) if name == "mixed" else by_name(name, net)


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


def all_of(outputs: Any, y: Tensor) -> Tensor:
    """Return a loss that depends on every output."""
    rows = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.stack([loss_of(out, y) for out in rows]).sum()


@pytest.mark.parametrize("whole", [False, True], ids=["in part", "whole"])
@pytest.mark.parametrize(("net", "plan"), each_value(NETS, PLANS))
def test_input_gradients_match_one_device(net: str, plan: str, whole: bool) -> None:
    """Given in part, each device has the gradient of its part; given whole, every device has all of it. What travels is
    what the step list says."""
    model, chosen = nets.build(net), plan_of(plan, net)
    (x, y), *_ = Training(net, (10,)).batches(model)
    reference, x_whole = copy.deepcopy(model), x.clone().requires_grad_()
    all_of(reference(x_whole), y).backward()

    def work(group: Group) -> tuple[list[int], list[int]]:
        here = Distributed(model, chosen, group, x[:2])
        given = (x.clone() if whole else part(here, x).clone()).requires_grad_()
        steps = here.first_variant().program(10, ("whole" if whole else "part",)).steps
        if whole:  # compared once
            here(given.detach(), whole=True)
        group.clear_counters()
        loss = all_of(here(given, whole=True) if whole else here(given, batch=10), y)
        loss.backward()
        sent = list(group.sent_bytes)
        expected = x_whole.grad if whole else part(here, x_whole.grad)
        assert_equal(given.grad, expected)
        for key, parameter in reference.named_parameters():
            shard = here.module.get_parameter(key)
            if parameter.grad is not None:
                grad = shard.grad if shard.grad is not None else torch.empty_like(shard)
                assert_equal(here.gather(key, grad), parameter.grad)
        return sent, [steps.traffic(8)[group.device, peer] for peer in range(group.devices)]

    with one_trace(net, torch.float64):
        for sent, predicted in run_on_threads(4, work, timeout_s=30):
            assert sent == predicted


def test_unneeded_input_gradients_add_no_traffic() -> None:
    model, chosen = nets.build("resnet"), plan_of("hybrid", "resnet")
    (x, y), *_ = Training("resnet", (10,)).batches(model)

    with one_trace("resnet", torch.float64):
        programs = run_on_threads(4, lambda group: _keys(group, model, chosen, x, y))
    assert programs == [[(10, (), "only")]] * 4


def _keys(group: Group, model: nn.Module, plan: Plan, x: Tensor, y: Tensor) -> list[Any]:
    here = Distributed(model, plan, group, x[:2])
    loss_of(here(part(here, x), batch=10), y).backward()
    return list(here.first_variant().programs)


# --- torch.autograd.grad ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["data-by-speed", "mixed"])
def test_autograd_grad_leaves_stored_gradients_unchanged(plan: str) -> None:
    """`autograd.grad(loss, x)` once added to every parameter's .grad; with parameters, torch said that they are not used."""
    model, chosen = nets.build("two-conv"), plan_of(plan, "two-conv")
    (x, y), *_ = Training("two-conv", (10,)).batches(model)
    if plan == "data-by-speed":
        chosen = named_plan(plan, trace(model, x[:2]).graph, 10, Speeds((4.0, 3.0, 2.0, 1.0)))
    x_whole = x.clone().requires_grad_()
    of_x, *of_parameters = torch.autograd.grad(loss_of(model(x_whole), y), [x_whole, *model.parameters()])
    expected = dict(zip((key for key, _ in model.named_parameters()), of_parameters, strict=True))

    def work(group: Group) -> None:
        here = Distributed(model, chosen, group, x[:2])
        given = part(here, x).clone().requires_grad_()
        (found,) = torch.autograd.grad(loss_of(here(given, batch=10), y), given)
        assert_equal(found, part(here, of_x))
        assert all(p.grad is None for p in here.parameters())
        loss, parameters = loss_of(here(part(here, x), batch=10), y), dict(here.named_parameters())
        if plan == "mixed":
            with pytest.raises(InputError, match="not every device has whole"):
                torch.autograd.grad(loss, list(parameters.values()))
            return
        for key, gradient in zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True):
            assert_equal(gradient, expected[key])
        assert all(p.grad is None for p in here.parameters())

    run_on_threads(4, work, timeout_s=30)


def test_second_derivatives_are_refused_by_name() -> None:
    model = nets.build("two-conv")
    (x, y), *_ = Training("two-conv", (10,)).batches(model)

    def work(group: Group) -> None:
        here = Distributed(model, by_name("data-by-speed", "two-conv"), group, x[:2])
        given = part(here, x).clone().requires_grad_()
        with pytest.raises(InputError, match="create_graph=True: a distributed model has first derivatives only"):
            torch.autograd.grad(loss_of(here(given, batch=10), y), given, create_graph=True)

    run_on_threads(4, work)


# --- two models ------------------------------------------------------------------------------------------------------


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.up = nn.Linear(5, 6 * 4 * 4), nn.ConvTranspose2d(6, 3, 2, stride=2)
        self.norm = nn.BatchNorm2d(6)

    def forward(self, z: Tensor) -> Tensor:
        return torch.tanh(self.up(F.relu(self.norm(self.fc(z).view(-1, 6, 4, 4)))))


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 5, 3), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.leaky_relu(self.conv2(F.leaky_relu(self.conv1(x)))).mean((2, 3))).squeeze(1)


def train_gan(g: Any, d: Any, real_of: Any, noise_of: Any, *, rounds: int = 3) -> list[float]:
    """The usual loop, as the tutorial of PyTorch has it."""
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01, betas=(0.5, 0.9), eps=1e-3) for m in (g, d)]
    losses = []
    for k in range(rounds):
        optimizers[1].zero_grad()
        real, fake = d(real_of(k)), g(noise_of(k))
        loss_d = F.softplus(-real).mean() + F.softplus(d(fake.detach())).mean()
        loss_d.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss_g = F.softplus(-d(fake)).mean()
        loss_g.backward()
        optimizers[0].step()
        losses += [loss_d.item(), loss_g.item()]
    return losses


@pytest.mark.parametrize("plan", ["data-by-speed", "master", "model", "hybrid"])
def test_a_gan_as_two_distributed_models_trains_as_on_one_device(plan: str) -> None:
    """Regression: the message advised x.detach(), which stops the generator from learning."""
    torch.manual_seed(3)
    g, d = Generator().double(), Discriminator().double()
    x_KN, z_KN = torch.randn(3, 10, 3, 8, 8).double(), torch.randn(3, 10, 5).double()
    plans = [named_plan(plan, trace(m, e).graph, 10, UNEVEN) for m, e in ((g, z_KN[0]), (d, x_KN[0]))]

    def work(group: Group) -> tuple[list[float], list[dict[str, Tensor]]]:
        here_g = Distributed(g, plans[0], group, z_KN[0])
        here_d = Distributed(d, plans[1], group, x_KN[0])
        here_g.announce(10), here_d.announce(10)
        losses = train_gan(here_g, here_d, lambda k: part(here_d, x_KN[k]), lambda k: part(here_g, z_KN[k]))
        return losses, [here_g.full_state_dict(), here_d.full_state_dict()]

    found = run_on_threads(4, work, timeout_s=60)
    expected = train_gan(g, d, lambda k: x_KN[k], lambda k: z_KN[k])
    for losses, states in found:
        assert_equal(losses, expected)
        for state, model in zip(states, (g, d), strict=True):
            assert_equal(state, model.state_dict())


def test_output_rows_are_not_mistaken_for_a_global_batch() -> None:
    """An output is known by its memory, which its rows share; a device's own rows of it are its part, as of any tensor."""
    torch.manual_seed(3)
    d = Discriminator().double()
    x = torch.randn(10, 3, 8, 8).double()
    echo = nn.Sequential(nn.Conv2d(3, 3, 1)).double()
    plans = [named_plan("data-by-speed", trace(m, x[:2]).graph, 10, UNEVEN) for m in (echo, d)]

    def work(group: Group) -> Tensor:
        first, second = Distributed(echo, plans[0], group, x[:2]), Distributed(d, plans[1], group, x[:2])
        made = first(part(first, x), batch=10).detach()
        (layout,) = second.input_layouts(10)
        here = box(layout, group.device, tuple(made.shape))
        rows = made[slice(*here[0])] if here is not None else made[:0]
        return second(rows, batch=10)  # type: ignore[no-any-return]

    for found in run_on_threads(4, work, timeout_s=30):
        assert_equal(found, d(echo(x)))


def test_differing_global_batches_are_refused() -> None:
    """Each device with a data loader of its own: the outputs would be of one device's images, and the labels of another's."""
    model = nets.build("two-conv")
    plan = by_name("data-by-speed", "two-conv")

    def work(group: Group) -> None:
        here = Distributed(model, plan, group, torch.zeros(2, 3, 8, 8, dtype=torch.float64))
        own = torch.randn(10, 3, 8, 8, generator=torch.Generator().manual_seed(group.device), dtype=torch.float64)
        with pytest.raises(MismatchError, match="device 1 was given another global batch than device 0"):
            here(own, whole=True)

    run_on_threads(4, work)


def test_invalid_local_batch_is_refused_with_remedies() -> None:
    model = nets.build("two-conv")
    plan = named_plan("data-by-speed", trace(model, torch.zeros(2, 3, 8, 8).double()).graph, 10, Speeds((1.0, 1.0)))

    def work(group: Group) -> None:
        here = Distributed(model, plan, group, torch.zeros(2, 3, 8, 8, dtype=torch.float64))
        with pytest.raises(
            InputError, match=r"had 10 samples, and its local batch is \(5, 3, 8, 8\).*model\(x, whole=True\)"
        ):
            here(torch.zeros(10, 3, 8, 8, dtype=torch.float64), batch=10)

    run_on_threads(2, work)
