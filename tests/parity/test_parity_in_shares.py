"""Parity where weights and optimizer state are kept in unequal shares: number by number as on one device."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import convoy.plan.lower
from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.plan.compile import compile_all
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.steps import GatherWeights, SumGradients
from convoy.plan.strategy import Form
from convoy.runtime.module import Distributed
from tests.support import nets
from tests.support.one_device import (
    OPTIMIZERS,
    Training,
    by_name,
    check,
    graph_of,
    in_shares,
    loss_of,
    mixed,
    on_one,
    part,
    traffic_of,
)
from tests.support.slow import each_value
from tests.support.threads import run_on_threads

SHORT = (10, 3, 10)
SHARES = (1, 3, 0, 2)
"""Of four devices that compute (7, 0, 2, 1) samples: device 1 computes nothing and keeps most, device 2 the other way round."""


FORMS: tuple[Form, ...] = ("keep", "free")


def by_speed(net: str, shares: tuple[int, ...] = SHARES, form: Form = "keep") -> Plan:
    return in_shares(by_name("data-by-speed", net), net, shares, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shares", [SHARES, (0, 1, 0, 0), (1, 1, 1, 1)])
def test_sharded_parameters_follow_one_device(shares: tuple[int, ...], form: Form) -> None:
    check(Training("two-conv"), by_speed("two-conv", shares, form))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(("net", "form"), each_value([*nets.NETS], FORMS))
def test_every_net(net: str, form: Form) -> None:
    check(Training(net, SHORT), by_speed(net, form=form))


@pytest.mark.parametrize("net", ["resnet", "mobile"])
def test_every_strategy_at_once(net: str) -> None:
    plan = in_shares(mixed(net), net, SHARES)
    assert plan.sharded
    check(Training(net, SHORT), plan)


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS])
def test_optimizers_keep_their_state_in_shares(optimizer: str) -> None:
    check(Training("mobile", SHORT * 2, optimizer), by_speed("mobile"))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_two_batches_add_up(set_to_none: bool) -> None:
    check(Training("resnet", (10, 3) * 4, accumulate=2, set_to_none=set_to_none), by_speed("resnet"))


@pytest.mark.parametrize("kind", [2.0, float("inf")])
def test_clipping_by_the_norm_of_all_gradients(kind: float) -> None:
    training = Training("two-conv", SHORT, clip=(0.01, kind))
    assert any(norm > 0.01 for norm in on_one(training).norms)
    check(training, by_speed("two-conv"))


@pytest.mark.parametrize(("net", "form", "entries"), each_value(["two-conv", "resnet", "mobile"], FORMS, [1, 40]))
def test_large_parameters_arrive_where_they_lie(
    net: str, entries: int, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What megabytes do in earnest, with a few numbers: a gathering and a sum for each, nothing copied."""
    monkeypatch.setattr(convoy.plan.lower, "BUCKET_ENTRIES", entries)
    plan = by_speed(net, form=form)
    steps = lower(plan, graph_of(net)).steps
    assert any(step.alone for step in steps if isinstance(step, GatherWeights))
    assert any(step.alone and step.into for step in steps if isinstance(step, SumGradients))
    check(Training(net, SHORT), plan)


@pytest.mark.parametrize("net", ["two-conv", "resnet", "mobile"])
@pytest.mark.parametrize("form", FORMS)
def test_the_bytes_that_are_predicted_are_sent(net: str, form: Form) -> None:
    plan = by_speed(net, form=form)
    steps = lower(plan, graph_of(net))
    sent = traffic_of(net, plan, 10)
    assert sent == steps.traffic(8)
    programs = compile_all(steps, graph_of(net))
    assert sent == {(p.device, peer): n for p in programs for peer, n in p.sent_bytes(8).items()}


@pytest.mark.parametrize("form", FORMS)
def test_a_device_holds_its_share_between_steps(form: Form) -> None:
    model = nets.build("two-conv")
    (x, y), *_ = Training("two-conv", (10,)).batches(model)

    def work(group: Group) -> list[tuple[int, ...]]:
        here = Distributed(model, by_speed("two-conv", form=form), group, x[:2])
        optimizer = torch.optim.Adam(here.parameters())
        loss_of(here(part(here, x), batch=10), y).backward()
        optimizer.step()
        conv2, state = here.module.get_parameter("conv2.weight"), optimizer.state
        assert conv2.grad is not None
        for held in (conv2.grad, state[conv2]["exp_avg"], state[conv2]["exp_avg_sq"]):
            assert held.shape == conv2.shape
            assert held.untyped_storage().nbytes() == conv2.numel() * 8
        whole = here._gathered._whole.values()
        freed = [p.untyped_storage().nbytes() == 0 for p in whole]
        assert all(freed) if form == "free" else not any(freed)
        return [tuple(p.shape) for p in here.parameters()]

    found = run_on_threads(4, work)
    # conv1 5 filters, conv2 7 filters, fc 5 rows, in proportions 1 : 3 : 0 : 2, by largest remainder.
    assert [shapes[2][0] for shapes in found] == [1, 4, 0, 2]
    assert [shapes[0] for shapes in found] == [(1, 3, 5, 5), (2, 3, 5, 5), (0, 3, 5, 5), (2, 3, 5, 5)]


class Sign(torch.optim.SGD):
    """Looks at whole tensors, for all that Convoy knows."""


@pytest.mark.parametrize("make", [Sign, torch.optim.LBFGS, torch.optim.Muon])
def test_optimizers_that_are_not_known_to_go_entry_by_entry_are_refused_by_name(make: type) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, nets.CLASSES, bias=False)).double()
    x, y = torch.randn(10, 3, 8, 8, dtype=torch.float64), torch.zeros(10, dtype=torch.long)

    def work(group: Group) -> str:
        plan = _linear_in_shares(model, x)
        here = Distributed(model, plan, group, x[:2])
        optimizer = make(here.parameters(), lr=0.1)
        loss_of(here(part(here, x), batch=10), y).backward()
        with pytest.raises(InputError) as refused:
            optimizer.step(lambda: torch.zeros(())) if make is torch.optim.LBFGS else optimizer.step()
        return str(refused.value)

    assert all(text.startswith(make.__name__) for text in run_on_threads(2, work))


def _linear_in_shares(model: nn.Module, x: torch.Tensor) -> Plan:
    from convoy.model.tracing import trace
    from convoy.plan.strategy import Batch, Sharding

    graph = trace(model, x[:2]).graph
    plan = Plan("p", graph.fingerprint, 2, 10, {}, Batch((6, 4)))
    return replace(plan, sharded={"1": Sharding((3, 2))})
