"""Micro-batches in `no_sync`: one gradient all-reduce per step, the numbers of one device, no silent partial sums."""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy.plan.lower
from convoy.comm.group import Group
from convoy.errors import ConvoyError, InputError, MismatchError
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import PLANS, Speeds
from convoy.plan.steps import MicroBatch, SumGradients
from convoy.plan.strategy import Form
from convoy.runtime.module import Distributed
from convoy.runtime.reshard import reshard
from convoy.train import GradScaler, clip_grad_norm_
from tests.support import nets
from tests.support.one_device import (
    EXACT,
    Training,
    by_name,
    check,
    graph_of,
    in_shares,
    loss_of,
    mixed,
    one_trace,
    part,
)
from tests.support.slow import each_value, most_slow
from tests.support.threads import run_on_threads

SIZES = (10, 3, 10, 1, 10, 6)
DEVICES = 4
SPECIAL = ("tied", "bare", "auxiliary", "opaque-per-sample")


def plan_of(name: str, net: str) -> Plan:
    return mixed(net) if name == "mixed" else by_name(name, net)


@contextmanager
def one_step(net: str = "two-conv") -> Iterator[tuple[nn.Module, list[tuple[Tensor, Tensor]]]]:
    """Return a net and three micro-batches."""
    model = nets.build(net)
    with one_trace(net, torch.float64):
        yield model, Training(net, (10, 3, 10)).batches(model)


def backward(here: nn.Module, x: Tensor, y: Tensor, *, waits: bool = False) -> None:
    if not isinstance(here, Distributed):
        loss_of(here(x), y).backward()
    elif not waits:
        loss_of(here(part(here, x), batch=len(x)), y).backward()
    else:
        with here.no_sync():
            backward(here, x, y)


def assert_gradients(here: Distributed, expected: dict[str, Tensor]) -> None:
    """Check gradients against one device; a device without a shard may have none."""
    held = dict(here.named_parameters())
    for key, p in held.items():
        assert key in expected or p.grad is None or not p.grad.numel(), key
    empty = {key: p if p.grad is None else p.grad for key, p in held.items()}
    found = {key: here.gather(key, empty[key].detach()) for key in expected}
    torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


def gradients_of(model: nn.Module, batches: Any) -> dict[str, Tensor]:
    """Return the gradients summed over all micro-batches on one device."""
    alone = copy.deepcopy(model)
    for x, y in batches:
        backward(alone, x, y)
    return {key: p.grad for key, p in alone.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("plan", "net"),
    [
        *((plan, "two-conv") for plan in [*PLANS, "mixed"]),
        *most_slow(0, [("data-by-speed", net) for net in SPECIAL]),
        *(("mixed", net) for net in SPECIAL),
        ("data", "frozen"),
        ("hybrid", "resnet"),
    ],
)
def test_three_micro_batches_with_one_all_reduce_train_as_one_device(plan: str, net: str) -> None:
    """Use six unequal micro-batches, one of a single sample, and an idle device."""
    check(Training(net, SIZES, "adam", accumulate=3, one_sum=True, clip=(0.5, 2.0)), plan_of(plan, net))


SHARES = (1, 3, 0, 2)
"""Of four devices that compute (7, 0, 2, 1) samples: device 1 computes nothing and keeps most, device 2 the other way round."""


@pytest.mark.parametrize(("net", "form"), most_slow(3, itertools.product(["two-conv", "mobile"], ["keep", "free"])))
def test_micro_batches_of_sharded_weights_train_as_one_device(
    net: str, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some devices only compute or only store; large parameters of the mobile net are received in place."""
    if net == "mobile":
        monkeypatch.setattr(convoy.plan.lower, "BUCKET_ENTRIES", 40)
    training = Training(net, SIZES, "adam", accumulate=3, one_sum=True, clip=(0.5, 2.0))
    check(training, in_shares(by_name("data-by-speed", net), net, SHARES, form))


def test_weights_loaded_between_micro_batches_are_used() -> None:
    with one_step() as (model, batches):
        other = {key: value * 0.5 for key, value in model.state_dict().items()}

        def train(here: nn.Module) -> None:
            backward(here, *batches[0], waits=True)
            here.load_state_dict(other)
            backward(here, *batches[1])

        alone = copy.deepcopy(model)
        train(alone)
        plan = in_shares(by_name("data-by-speed", "two-conv"), "two-conv", SHARES)

        def work(group: Group) -> None:
            here = Distributed(model, plan, group, batches[0][0][:2])
            train(here)
            assert_gradients(here, {key: p.grad for key, p in alone.named_parameters() if p.grad is not None})

        run_on_threads(DEVICES, work)


@pytest.mark.parametrize("plan", ["data-by-speed", "sharded", "model", "mixed"])
def test_traffic_matches_the_step_lists(plan: str) -> None:
    """Gradients of copies are sent in the last micro-batch only; activations and norm statistics in each."""
    chosen, graph = plan_of(plan, "resnet"), graph_of("resnet")
    passes: tuple[MicroBatch, ...] = ("first", "middle", "last")
    lists = [lower(chosen, graph, n, micro_batch=which) for n, which in zip((10, 3, 10), passes, strict=True)]
    predicted = [sum(each.traffic(itemsize=8).values()) for each in lists]
    with one_step("resnet") as (model, batches):

        def work(group: Group) -> list[int]:
            here = Distributed(model, chosen, group, batches[0][0][:2])
            sent = []
            for _ in range(2):  # in the first pass of a kind, devices also compare what must be the same
                sent.clear()
                here.zero_grad()
                for number, (x, y) in enumerate(batches):
                    group.clear_counters()
                    here._comparisons.calls = 2  # no comparison now
                    backward(here, x, y, waits=number < 2)
                    sent.append(sum(group.sent_bytes))
            return sent

        rows = run_on_threads(DEVICES, work)
    assert [sum(each) for each in zip(*rows, strict=True)] == predicted
    summed = [[s for s in each.steps if isinstance(s, SumGradients)] for each in lists]
    assert all(s.into for s in summed[0] + summed[1])
    assert [s.keys for s in (*lists[0].later, *summed[0])] == [s.keys for s in summed[2]]
    assert lists[0].later or plan in ("sharded", "model")


def test_no_sync_after_a_sum_is_refused() -> None:
    with one_step() as (model, batches):

        def work(group: Group) -> None:
            here = Distributed(model, plan_of("data", "two-conv"), group, batches[0][0][:2])
            backward(here, *batches[0])
            with pytest.raises(InputError, match=r"backward in no_sync\(\) after one outside"):
                backward(here, *batches[1], waits=True)

        run_on_threads(DEVICES, work)


@pytest.mark.parametrize(
    ("plan", "last"), each_value(["data", "sharded", "mixed"], ["both", "first output", "second output"])
)
def test_last_micro_batch_sums_all_gradients(plan: str, last: str) -> None:
    """The last micro-batch's loss uses one of two outputs; pending gradients of the other are summed too."""

    def loss(outputs: Any, kind: str) -> Tensor:
        chosen = outputs if kind == "both" else outputs[:1] if kind == "first output" else outputs[1:]
        return sum((out.square().mean() for out in chosen), start=torch.zeros((), dtype=torch.float64))

    with one_step("auxiliary") as (model, ((xa, _), (xb, _), _)):
        alone = copy.deepcopy(model)
        loss(alone(xa), "both").backward()
        loss(alone(xb), last).backward()
        expected = {key: p.grad for key, p in alone.named_parameters() if p.grad is not None}

        def work(group: Group) -> None:
            here = Distributed(model, plan_of(plan, "auxiliary"), group, xa[:2])
            with here.no_sync():
                loss(here(part(here, xa), batch=len(xa)), "both").backward()
            loss(here(part(here, xb), batch=len(xb)), last).backward()
            assert_gradients(here, expected)

        run_on_threads(DEVICES, work)


def test_cleared_gradients_stay_cleared() -> None:
    """Discarded micro-batches leave neither numbers nor gradients of unreached parameters."""
    with one_step("auxiliary") as (model, ((x, _), *_)):

        def work(group: Group) -> None:
            here = Distributed(model, by_name("data", "auxiliary"), group, x[:2])
            with here.no_sync():
                sum(out.sum() for out in here(part(here, x), batch=len(x))).backward()
            here.zero_grad()
            torch.optim.SGD(here.parameters(), lr=0.1).step()
            here(part(here, x), batch=len(x))[0].sum().backward()
            alone = copy.deepcopy(model)
            alone(x)[0].sum().backward()
            for key, p in alone.named_parameters():
                found = dict(here.named_parameters())[key].grad
                assert (found is None) == (p.grad is None), key
                torch.testing.assert_close(found, p.grad, rtol=EXACT, atol=EXACT)

        run_on_threads(DEVICES, work)


def test_parameter_hooks_run_once_with_all_micro_batches() -> None:
    with one_step() as (model, batches):
        expected = gradients_of(model, batches)["conv1.weight"]
        expected = 2 * expected / expected.norm()

        def work(group: Group) -> None:
            plan = by_name("data", "two-conv") if group.devices > 1 else alone
            here = Distributed(model, plan, group, batches[0][0][:2])
            weight, seen = dict(here.named_parameters())["conv1.weight"], []
            weight.register_hook(lambda g: seen.append("gradient") or g / g.norm())  # type: ignore[func-returns-value]

            def double(p: Tensor) -> None:
                seen.append("added")
                p.grad = None if p.grad is None else 2 * p.grad

            weight.register_post_accumulate_grad_hook(double)
            for number, (x, y) in enumerate(batches):
                assert not seen
                backward(here, x, y, waits=number < 2)
            assert seen == ["gradient", "added"]
            torch.testing.assert_close(weight.grad, expected, rtol=EXACT, atol=EXACT)

        alone = by_name("data", "two-conv", speeds=Speeds((1.0,)))
        for devices in (1, DEVICES):
            run_on_threads(devices, work)


def test_optimizer_in_hooks_steps_in_the_last_micro_batch() -> None:
    with one_step() as (model, batches):
        expected = gradients_of(model, batches)

        def work(group: Group) -> None:
            here = Distributed(model, by_name("data", "two-conv"), group, batches[0][0][:2])
            optimizers = {p: torch.optim.SGD([p], lr=0.5) for p in here.parameters()}

            def step(p: Tensor) -> None:
                optimizers[p].step()  # type: ignore[index]
                optimizers[p].zero_grad()  # type: ignore[index]

            for p in here.parameters():
                p.register_post_accumulate_grad_hook(step)
            for number, (x, y) in enumerate(batches):
                backward(here, x, y, waits=number < 2)
            for key, weight in here.full_state_dict().items():
                wanted = model.state_dict()[key] - 0.5 * expected[key]
                torch.testing.assert_close(weight, wanted, rtol=EXACT, atol=EXACT)

        run_on_threads(DEVICES, work)


@pytest.mark.parametrize("plan", ["data", "data-by-speed", "master", "model"])
def test_use_of_partial_gradients_is_refused(plan: str) -> None:
    """Refuse under any plan and on idle devices: a script valid for one plan is valid for all."""
    with one_step() as (model, ((x, y), *_)):

        def work(group: Group) -> None:
            here = Distributed(model, by_name(plan, "two-conv"), group, x[:2])
            optimizer, scaler = torch.optim.SGD(here.parameters(), lr=0.1), GradScaler(here)
            scaler.scale(torch.zeros(()))
            backward(here, x, y, waits=True)
            key, p = next(iter(here.named_parameters()))
            uses: list[Callable[[], object]] = [
                optimizer.step,
                lambda: scaler.unscale_(optimizer),
                lambda: clip_grad_norm_(here, 1.0),
                lambda: here.gather(key, p.grad),  # type: ignore[arg-type]
            ]
            for use in uses:
                with pytest.raises(
                    InputError, match=r"after micro-batches in no_sync\(\), whose gradients .*zero_grad"
                ):
                    use()
            backward(here, x, y)
            assert float(clip_grad_norm_(here, 1.0)) > 0
            optimizer.step()

        run_on_threads(DEVICES, work)


def test_redirected_gradients_are_refused() -> None:
    with one_step() as (model, ((x, y), *_)):

        def work(group: Group) -> None:
            here = Distributed(model, by_name("data", "two-conv"), group, x[:2])
            weight = dict(here.named_parameters())["conv1.weight"]

            def loss() -> Tensor:
                return loss_of(here(part(here, x), batch=len(x)), y)

            with here.no_sync(), pytest.raises(InputError, match=r"whose gradients are not yet summed \(no_sync\)"):
                torch.autograd.grad(loss(), list(here.parameters()))
            here.zero_grad()
            backward(here, x, y, waits=True)
            with pytest.raises(InputError, match=r"torch.autograd.grad, or backward\(inputs=...\)"):
                loss().backward(inputs=[weight])
            here.zero_grad()
            with here.no_sync():
                inside = loss()
            with pytest.raises(InputError, match=r"a forward inside no_sync\(\) and one outside"):
                (inside + loss()).backward()

        run_on_threads(DEVICES, work)


def test_device_that_differs_in_no_sync_is_named() -> None:
    with one_step() as (model, ((x, y), *_)):

        def work(group: Group) -> None:
            here = Distributed(model, by_name("data", "two-conv"), group, x[:2])
            backward(here, x, y, waits=group.device == 2)

        with pytest.raises(ConvoyError) as caught:
            run_on_threads(DEVICES, work)
        assert isinstance(caught.value, MismatchError)
        assert "device 2 has" in str(caught.value)
        assert "another state of no_sync()" in str(caught.value)


def test_reshard_between_unsynced_micro_batches_is_refused() -> None:
    with one_step() as (model, batches):

        def work(group: Group) -> None:
            here = Distributed(model, by_name("data", "two-conv"), group, batches[0][0][:2])
            backward(here, *batches[0], waits=True)
            with pytest.raises(InputError, match=r"reshard\(\) after micro-batches in no_sync"):
                reshard(here, plan_of("mixed", "two-conv"))

        run_on_threads(DEVICES, work)


def test_unsynced_gradient_is_the_local_sum() -> None:
    """As with DistributedDataParallel, the devices' gradients sum to the whole."""
    with one_step() as (model, batches):
        expected = gradients_of(model, batches[:2])["conv1.weight"]

        def work(group: Group) -> Tensor:
            here = Distributed(model, by_name("data", "two-conv"), group, batches[0][0][:2])
            for x, y in batches[:2]:
                backward(here, x, y, waits=True)
            gradient = dict(here.named_parameters())["conv1.weight"].grad
            assert gradient is not None
            return gradient

        parts = run_on_threads(DEVICES, work)
        assert not torch.allclose(parts[0], expected)
        torch.testing.assert_close(torch.stack(parts).sum(0), expected, rtol=EXACT, atol=EXACT)


def test_one_all_reduce_under_autocast_matches_all_micro_batches() -> None:
    """Rounding is the same in each micro-batch; sums are float32."""
    model = nets.build("two-conv", dtype=torch.float32)
    batches = Training("two-conv", (8, 8), dtype=torch.float32).batches(model)

    def work(group: Group) -> None:
        found = []
        for waits in (False, True):
            here = Distributed(model, by_name("data", "two-conv", batch=8), group, batches[0][0][:2])
            for number, (x, y) in enumerate(batches):
                with torch.autocast("cpu", torch.bfloat16):
                    if waits and not number:
                        with here.no_sync():
                            out = here(part(here, x), batch=8)
                    else:
                        out = here(part(here, x), batch=8)
                F.cross_entropy(out, y).backward()
            found.append({key: p.grad for key, p in here.named_parameters()})
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)

    run_on_threads(DEVICES, work)
