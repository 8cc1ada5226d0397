"""Parity of models that are unlike most: dropout, several inputs, frozen weights, shared memory."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from convoy.comm.group import Group
from convoy.model.tracing import trace
from convoy.plan.plan import Plan
from convoy.plan.presets import PLANS, Speeds, named_plan
from convoy.plan.strategy import Batch, Filter, One
from convoy.runtime.module import Distributed
from tests.support import nets
from tests.support.one_device import (
    EXACT,
    Training,
    assert_same,
    by_name,
    check,
    graph_of,
    loss_of,
    mixed,
    on_many,
    on_one,
    part,
)
from tests.support.slow import most_slow
from tests.support.threads import run_on_threads

SHORT = (10, 3, 10)


@pytest.mark.parametrize("plan", most_slow(2, PLANS))
def test_dropout_trains_and_keeps_copies_equal(plan: str) -> None:
    """The one exception to parity: each device draws for itself. The copies of the weights agree all the same."""
    model = nets.Dropouts().double()
    x = torch.randn(10, 3, 8, 8, dtype=torch.float64)
    y = torch.arange(10) % nets.CLASSES
    graph = trace(model, x[:2]).graph
    chosen = named_plan(plan, graph, 10, Speeds((7.0, 0.0, 2.0, 1.0)))

    def work(group: Group) -> tuple[list[float], dict[str, Tensor]]:
        here = Distributed(model, chosen, group, x[:2])
        optimizer, losses = torch.optim.Adam(here.parameters(), lr=0.01), []
        for size in (10, 3, 10):
            optimizer.zero_grad()
            loss = loss_of(here(part(here, x[:size]), batch=size), y[:size])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, here.full_state_dict()

    results = run_on_threads(4, work)
    for losses, weights in results[1:]:
        assert losses == results[0][0]
        assert all(torch.equal(weights[k], w) for k, w in results[0][1].items())
    assert all(bool(w.isfinite().all()) for w in results[0][1].values())


class Two(nn.Module):
    """Images and a vector per image; the vector scales channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.gate = nn.Linear(4, 6)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        gate = torch.sigmoid(self.gate(v))
        return self.fc((self.conv(x) * gate.view(-1, 6, 1, 1)).mean((2, 3))), gate


@pytest.mark.parametrize("plan", most_slow(2, PLANS))
def test_a_model_of_two_inputs_and_two_outputs(plan: str) -> None:
    torch.manual_seed(0)
    model, x, v = Two().double(), torch.randn(10, 3, 8, 8).double(), torch.randn(10, 4).double()
    graph = trace(model, (x[:2], v[:2])).graph
    chosen = named_plan(plan, graph, 10, Speeds((7.0, 0.0, 2.0, 1.0)))
    reference = copy.deepcopy(model)

    def train(here: nn.Module, forward: Callable[[int], tuple[Tensor, Tensor]]) -> list[float]:
        optimizer, losses = torch.optim.SGD(here.parameters(), lr=0.1, momentum=0.9), []
        for size in (10, 3, 10):
            optimizer.zero_grad()
            out, gate = forward(size)
            loss = out.square().mean() + gate.log().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def work(group: Group) -> list[float]:
        here = Distributed(model, chosen, group, (x[:2], v[:2]))
        return train(here, lambda n: here(part(here, x[:n], 0), part(here, v[:n], 1), batch=n))

    found = run_on_threads(4, work)
    expected = train(reference, lambda n: reference(x[:n], v[:n]))
    for losses in found:
        assert losses == pytest.approx(expected, rel=EXACT, abs=EXACT)


def test_a_batch_norm_called_by_samples_and_whole() -> None:
    """One call's kernel kept the running statistics for its backward; the other call's update counted as a change."""
    graph = graph_of("tied")
    layers = {"stem": Filter((0, 4)), "again": Batch((0, 10)), "fc2": One(0), "head": Filter((0, 5))}
    check(Training("tied", SHORT), Plan("mine", graph.fingerprint, 2, 10, layers, One(0)))


@pytest.mark.parametrize("net", ["resnet", "mobile", "shuffle"])
def test_images_and_weights_with_the_channels_last_in_memory(net: str) -> None:
    model = nets.build(net).to(memory_format=torch.channels_last)
    (x, y), *_ = Training(net, (10,)).batches(model)
    x = x.to(memory_format=torch.channels_last)
    reference = copy.deepcopy(model)
    loss_of(reference(x), y).backward()

    def work(group: Group) -> dict[str, Tensor]:
        here = Distributed(model, mixed(net), group, x[:2])
        loss_of(here(part(here, x), batch=10), y).backward()
        held = dict(here.named_parameters())
        return {k: here.gather(k, p.grad if p.grad is not None else torch.empty_like(p)) for k, p in held.items()}

    for found in run_on_threads(4, work):
        for key, parameter in reference.named_parameters():
            assert parameter.grad is not None
            assert torch.allclose(found[key], parameter.grad, rtol=EXACT, atol=EXACT), key


def test_no_two_gradients_share_their_memory() -> None:
    """`bare` adds two parameters. On a device alone both had one tensor as .grad: clipped twice, accumulated twice."""
    model = nets.build("bare")
    (x, y), *_ = Training("bare", (10,)).batches(model)

    def work(group: Group) -> tuple[int, int]:
        here = Distributed(model, by_name("data", "bare", speeds=Speeds((1.0,))), group, x[:2])
        loss_of(here(x, batch=10), y).backward()
        storages = [p.grad.untyped_storage().data_ptr() for p in here.parameters() if p.grad is not None]
        return len(storages), len(set(storages))

    ((gradients, distinct),) = run_on_threads(1, work)
    assert gradients == distinct == 10


def test_the_test_itself_can_fail() -> None:
    """A difference in the tenth place is found, whatever it sits in."""
    training = Training("resnet", SHORT)
    records = on_many(training, by_name("data", "resnet"))
    expected = on_one(training)
    assert_same(records, expected)
    for tamper in (
        lambda r: r.weights["bn1.running_var"][0].add_(2e-10),
        lambda r: r.state["fc.bias"]["momentum_buffer"][1].add_(2e-10),
        lambda r: r.losses.__setitem__(2, r.losses[2] + 4e-10),
        lambda r: r.gradients["conv1.weight"][0].fill_(float("nan")),
    ):
        broken = copy.deepcopy(records)
        tamper(broken[3])
        with pytest.raises(AssertionError, match="device 3 differs"):
            assert_same(broken, expected)


# --- memory format ---------------------------------------------------------------------------------------------------
