"""Parity: training by any plan follows the training of one device, number by number (float64, to 1e-10).

Compared on every device after the last step: all weights and buffers, all gradients, the optimizer's state, the loss of
every step, and the outputs in evaluation mode. Each net of `nets.py` has its own way to go wrong; several did.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convoy.errors import InputError
from convoy.execute.group import Group
from convoy.execute.module import Distributed
from convoy.execute.threads import run_on_threads
from convoy.layout import Replicated
from convoy.lower import lower
from convoy.named import PLANS, Speeds, named_plan
from convoy.plan import Plan
from convoy.shares import even
from convoy.strategy import Batch, Channel, Filter, One
from convoy.trace import trace
from tests import nets
from tests.one_device import (
    EXACT,
    OPTIMIZERS,
    Training,
    assert_same,
    by_name,
    check,
    graph_of,
    loss_of,
    on_many,
    on_one,
    one_trace,
    part,
    traffic_of,
)

SHORT = (10, 3, 10)


def mixed(net: str, reduce: Any = "ring") -> Plan:
    """Every strategy in one plan for four devices, weighted layers in turn; the rest follows, or goes by samples."""
    graph = graph_of(net)
    layers: dict[str, Any] = {}
    for i, layer in enumerate(graph.weighted):
        if layer.shared or layer.groups > 1:
            continue
        out, inner = layer.channels_out, layer.channels_in
        choices = (
            Filter((out - out // 3, 0, out // 3, 0)),
            Channel((0, inner - inner // 2, 0, inner // 2)),
            Batch((1, 2, 3, 4)),
            One(3),
        )
        layers[layer.name] = choices[i % 4]
    return Plan("mixed", graph.fingerprint, 4, 10, layers, Batch((7, 0, 2, 1)), reduce)


# --- the named plans -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", ["ring", "butterfly", "star"])
@pytest.mark.parametrize("plan", [*PLANS])
def test_twenty_steps_by_every_plan_and_every_sum(plan: str, reduce: str) -> None:
    check(Training("two-conv"), by_name(plan, "two-conv", reduce))


@pytest.mark.parametrize("net", ["resnet", "mobile"])
@pytest.mark.parametrize("plan", [*PLANS])
def test_twenty_steps_with_batch_norm(plan: str, net: str) -> None:
    check(Training(net), by_name(plan, net, "butterfly"))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("plan", [*(name for name in PLANS if name != "data"), "mixed"])
@pytest.mark.parametrize("net", [n for n in nets.NETS if n not in ("two-conv", "resnet", "mobile")])
def test_nets_with_something_special(net: str, plan: str) -> None:
    check(Training(net, SHORT), mixed(net) if plan == "mixed" else by_name(plan, net))


def test_the_shares_are_as_uneven_as_intended() -> None:
    assert by_name("data-by-speed", "two-conv").otherwise == Batch((7, 0, 2, 1))
    assert {s.name for s in mixed("resnet").layers.values()} == {"filter", "channel", "batch", "one"}


@pytest.mark.parametrize("reduce", ["ring", "butterfly", "star"])
@pytest.mark.parametrize("net", ["two-conv", "resnet", "tokens"])
def test_twenty_steps_with_every_strategy_at_once(net: str, reduce: str) -> None:
    check(Training(net), mixed(net, reduce))


@pytest.mark.parametrize("devices", [1, 2, 3, 5])
def test_other_numbers_of_devices(devices: int) -> None:
    speeds = Speeds(tuple(float(1 + d) for d in range(devices)))
    for plan in ("data-by-speed", "hybrid"):
        check(Training("mobile", SHORT), by_name(plan, "mobile", "butterfly", speeds))


@pytest.mark.parametrize("plan", [*PLANS])
def test_a_last_batch_of_one_sample(plan: str) -> None:
    check(Training("two-conv", (10, 1, 10, 1, 2)), by_name(plan, "two-conv"))


def test_a_batch_smaller_than_the_fleet_with_one_sample_for_batch_norm() -> None:
    """One sample of 8x8 has 64 values per channel: a batch norm on images takes it, on features not."""
    check(Training("resnet", (10, 1, 3)), by_name("data", "resnet"))
    model = nets.build("signal")

    def one_sample(group: Group) -> str:
        here = Distributed(model, by_name("data", "signal"), group, torch.zeros(2, 3, 16, dtype=torch.float64))
        with pytest.raises(InputError, match="one value per channel"):
            here(part(here, torch.zeros(1, 3, 16, dtype=torch.float64)), batch=1)
        return "refused"

    assert run_on_threads(4, one_sample) == ["refused"] * 4


# --- optimizers, accumulation, clipping ------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS])
@pytest.mark.parametrize("plan", ["data-by-speed", "hybrid", "mixed"])
def test_optimizers_keep_their_state_piece_by_piece(plan: str, optimizer: str) -> None:
    training = Training("mobile", SHORT * 2, optimizer)
    expected = on_one(training)
    assert all(expected.state.values())
    check(training, mixed("mobile") if plan == "mixed" else by_name(plan, "mobile"))


@pytest.mark.parametrize(
    ("net", "set_to_none"), [("resnet", True), ("bare", True), ("bare", False), ("opaque-per-sample", True)]
)
@pytest.mark.parametrize("plan", ["data-by-speed", "master", "mixed"])
def test_gradients_of_two_batches_add_up(plan: str, net: str, set_to_none: bool) -> None:
    training = Training(net, (10, 3) * 4, accumulate=2, set_to_none=set_to_none)
    check(training, mixed(net) if plan == "mixed" else by_name(plan, net))


@pytest.mark.parametrize("kind", [2.0, float("inf"), 1.0, 3.0])
@pytest.mark.parametrize("plan", ["data-by-speed", "model", "master", "mixed"])
def test_clipping_by_the_norm_of_all_gradients(plan: str, kind: float) -> None:
    for net, largest in (("two-conv", 0.01), ("bare", 0.02)):
        training = Training(net, SHORT, clip=(largest, kind))
        assert any(norm > largest for norm in on_one(training).norms)
        check(training, mixed(net) if plan == "mixed" else by_name(plan, net))


def test_a_gradient_that_is_no_number_shows_in_all() -> None:
    """Python's min and max lose what is not a number: one device clipped to a finite norm, and went on."""
    model = nets.build("two-conv")
    (x, y), *_ = Training("two-conv", (10,)).batches(model)

    def work(group: Group) -> tuple[list[float], bool]:
        here = Distributed(model, by_name("model", "two-conv"), group, x[:2])
        loss_of(here(part(here, x), batch=10), y).backward()
        if group.device == 2:
            here.module.get_parameter("conv1.bias").grad[0] = float("nan")
        norms = [float(here.clip_grad_norm_(1.0, kind)) for kind in (2.0, float("inf"))]
        return norms, all(bool(p.grad.isnan().all()) for p in here.parameters() if p.grad is not None)

    with one_trace():
        for norms, poisoned in run_on_threads(4, work):
            assert all(norm != norm for norm in norms)
            assert poisoned


def test_clipping_leaves_small_gradients_alone() -> None:
    check(Training("two-conv", SHORT, clip=(1e6, 2.0)), mixed("two-conv"))


@pytest.mark.parametrize("plan", ["data-by-speed", "mixed"])
def test_two_forward_passes_before_one_backward(plan: str) -> None:
    model, chosen = nets.build("two-conv"), mixed("two-conv") if plan == "mixed" else by_name(plan, "two-conv")
    (xa, ya), (xb, yb) = Training("two-conv", (10, 3)).batches(model)
    reference = copy.deepcopy(model)
    (loss_of(reference(xa), ya) + 2 * loss_of(reference(xb), yb)).backward()

    def work(group: Group) -> dict[str, Tensor]:
        here = Distributed(model, chosen, group, xa[:2])
        first = loss_of(here(part(here, xa), batch=10), ya)
        (first + 2 * loss_of(here(part(here, xb), batch=3), yb)).backward()
        held = dict(here.named_parameters())
        return {k: here.gather(k, p.grad if p.grad is not None else torch.empty_like(p)) for k, p in held.items()}

    with one_trace():
        for found in run_on_threads(4, work):
            for key, parameter in reference.named_parameters():
                assert parameter.grad is not None
                assert torch.allclose(found[key], parameter.grad, rtol=EXACT, atol=EXACT), key


# --- float32, copies, traffic ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [*PLANS, "mixed"])
def test_float32_follows_within_rounding(plan: str) -> None:
    """Sums in another order: a few units in the last place at first, magnified by twenty steps of training."""
    training = Training("two-conv", dtype=torch.float32)
    check(training, mixed("two-conv") if plan == "mixed" else by_name(plan, "two-conv"), 2e-4)


@pytest.mark.parametrize("plan", [*PLANS, "mixed"])
@pytest.mark.parametrize("net", ["resnet", "bare", "opaque-per-sample"])
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
        or not any(isinstance(v, Batch) for v in (chosen.otherwise, *chosen.layers.values()))
        or plan == "model"
    )


@pytest.mark.parametrize("plan", [*PLANS, "mixed"])
@pytest.mark.parametrize("net", ["two-conv", "resnet", "opaque-per-sample", "auxiliary", "tied", "shuffle"])
def test_the_bytes_of_a_step_are_those_the_plan_predicts(net: str, plan: str) -> None:
    chosen = mixed(net, "butterfly") if plan == "mixed" else by_name(plan, net, "star" if plan == "data" else "ring")
    for size in (10, 3):
        assert traffic_of(net, chosen, size) == +lower(chosen, graph_of(net), size).traffic(8)


def test_traffic_by_hand() -> None:
    """data, ring, two devices of equal speed: weights once each way in halves, and the outputs of 5 samples."""
    plan = named_plan("data", graph_of("two-conv"), 10, Speeds((1.0, 1.0)), "ring")
    weights = sum(p.numel() for p in nets.build("two-conv").parameters())
    assert traffic_of("two-conv", plan, 10) == {(0, 1): 8 * (weights + 25), (1, 0): 8 * (weights + 25)}


# --- evaluation ------------------------------------------------------------------------------------------------------


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

        with one_trace():
            for found in run_on_threads(4, work):
                for ours, theirs in zip(found, expected, strict=True):
                    assert torch.allclose(ours, theirs, rtol=EXACT, atol=EXACT), name


@pytest.mark.parametrize("net", ["resnet", "dependent-in-training", "noting", "own-norm"])
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

    def work(group: Group) -> list[float]:
        here = Distributed(model, by_name("data-by-speed", net), group, batches[0][0][:2])
        return train(here, lambda x: here(part(here, x), batch=len(x)))

    with one_trace():
        found = run_on_threads(4, work)
    reference = copy.deepcopy(model)
    expected = train(reference, reference)
    for losses in found:
        assert losses == pytest.approx(expected, rel=EXACT, abs=EXACT)


class PythonAtTheEnd(nets.TwoConv):
    """In evaluation it sorts its rows in Python, which torch.fx cannot follow: then the model is one layer."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.training else torch.stack([row - row.max() for row in y])


def test_an_evaluation_that_is_one_layer() -> None:
    """With whole weights on every device it runs; with split ones no device could, and the message says what to do."""
    model, x = PythonAtTheEnd().double(), torch.randn(8, 3, 8, 8, dtype=torch.float64)
    graph = trace(model, x[:2]).graph
    expected = copy.deepcopy(model).eval()(x)

    def work(group: Group) -> tuple[Tensor, str]:
        whole = Distributed(model, named_plan("data", graph, 8, Speeds((1.0, 1.0))), group, x[:2]).eval()
        split = Distributed(model, named_plan("model", graph, 8, Speeds((1.0, 1.0))), group, x[:2]).eval()
        with pytest.raises(InputError) as caught:
            split(x, batch=8)
        with torch.no_grad():
            return whole(part(whole, x), batch=8), str(caught.value)

    for found, message in run_on_threads(2, work):
        assert torch.allclose(found, expected, rtol=EXACT, atol=EXACT)
        assert "layer 'model' is built so differently from training" in message
        assert "full_state_dict()" in message


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


# --- dropout, two inputs, freezing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [*PLANS])
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


@pytest.mark.parametrize("plan", [*PLANS])
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


def test_freezing_or_thawing_afterwards_is_refused() -> None:
    """Whether a parameter has a gradient is part of the step list. Without the check a thawed one never moved."""
    x = torch.zeros(4, 3, 8, 8, dtype=torch.float64)

    def work(group: Group) -> list[str]:
        messages = []
        for net, key, thaw in (("two-conv", "conv1.weight", False), ("frozen", "net.conv1.weight", True)):
            here = Distributed(nets.build(net), by_name("data", net, speeds=Speeds((1.0, 1.0)), batch=4), group, x[:2])
            here.module.get_parameter(key).requires_grad_(thaw)
            with pytest.raises(InputError) as caught:
                here(part(here, x), batch=4)
            messages.append(str(caught.value))
        return messages

    frozen, thawed = run_on_threads(2, work)[0]
    assert "'conv1.weight' was frozen after distribute()" in frozen
    assert "'net.conv1.weight' was thawed after distribute()" in thawed


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

    with one_trace():
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
    with one_trace():
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


def test_even_shares_are_used_where_no_speed_is_known() -> None:
    assert by_name("data", "two-conv").otherwise == Batch(even(10, 4))
