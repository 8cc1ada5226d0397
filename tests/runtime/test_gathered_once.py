"""Sharded weights are gathered once for all micro-batches of a step, and are never stale."""

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import convoy.plan.lower
from convoy.checkpoint import load_checkpoint, save_checkpoint
from convoy.comm.group import Group
from convoy.errors import ConvoyError, InputError, MismatchError
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.steps import GatherWeights, MicroBatch
from convoy.plan.strategy import Form
from convoy.runtime.module import Distributed
from convoy.runtime.reshard import reshard
from tests.support import nets
from tests.support.in_shares import in_shares
from tests.support.one_device import EXACT, Training, by_name, check, graph_of, loss_of, one_trace, part
from tests.support.slow import most_slow
from tests.support.threads import run_on_threads

SIZES = (10, 3, 10, 1, 10, 6)
SHARES = (1, 3, 0, 2)
"""Of four devices that compute (7, 0, 2, 1) samples: device 1 computes nothing and keeps most, device 2 the other way round."""

PASSES: tuple[MicroBatch, ...] = ("first", "middle", "last")


def plan_of(net: str = "two-conv", form: Form = "keep", shares: tuple[int, ...] = SHARES) -> Plan:
    return in_shares(by_name("data-by-speed", net), net, shares, form)


def gathered_bytes(plan: Plan, net: str, micro_batch: MicroBatch, batch: int = 10) -> int:
    steps = lower(plan, graph_of(net), batch, micro_batch=micro_batch).steps
    return sum(sum(convoy.plan.steps.traffic(s, 8).values()) for s in steps if isinstance(s, GatherWeights))


CASES = itertools.product(["two-conv", "resnet", "mobile"], ["sgd", "adam"], ["keep", "free"])


@pytest.mark.parametrize(("net", "optimizer", "form"), most_slow(7, CASES))
def test_three_micro_batches_train_as_one_device(net: str, form: Form, optimizer: str) -> None:
    """Six unequal micro-batches, one of a single sample, with clipping; some devices only compute or only store."""
    training = Training(net, SIZES, optimizer, accumulate=3, one_sum=True, clip=(0.5, 2.0))
    check(training, plan_of(net, form))


@pytest.mark.parametrize("form", ["keep", "free"])
def test_large_parameters_are_received_in_place(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convoy.plan.lower, "BUCKET_ENTRIES", 40)
    check(Training("mobile", SIZES, accumulate=3, one_sum=True), plan_of("mobile", form))


def test_kept_weights_are_gathered_once_freed_weights_every_micro_batch() -> None:
    kept, freed = plan_of("resnet"), plan_of("resnet", "free")
    once = gathered_bytes(kept, "resnet", "only")
    assert once > 0
    assert [gathered_bytes(kept, "resnet", each) for each in PASSES] == [once, 0, 0]
    assert [gathered_bytes(freed, "resnet", each) for each in PASSES] == [2 * once] * 3


# --- weight changes between micro-batches -----------------------------------------------------------------------------


class Passes:
    """Two micro-batches of one step, on one device or several, with an action in between."""

    def __init__(self, change: Callable[[Any, Any], None], optimizer: Any = None) -> None:
        self.change = change
        self.optimizer = optimizer or (lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        self.model = nets.build("two-conv")
        self.batches = Training("two-conv", (10, 3, 10)).batches(self.model)

    def run(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the weights after a step, and two micro-batches of another one with the change in between."""
        optimizer = self.optimizer(model)
        for number in range(4):
            x, y = self.batches[number % 3]
            several = isinstance(model, Distributed)
            with model.no_sync() if several and number % 2 == 0 else nullcontext():  # type: ignore[operator]
                loss_of(model(part(model, x), batch=len(x)) if several else model(x), y).backward()  # type: ignore[arg-type]
            if number == 2:
                self.change(model, optimizer)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return model.full_state_dict() if isinstance(model, Distributed) else dict(model.state_dict())

    def check(self, plan: Plan | None = None) -> None:
        expected = self.run(copy.deepcopy(self.model))

        def work(group: Group) -> dict[str, Tensor]:
            return self.run(Distributed(self.model, plan or plan_of(), group, self.batches[0][0][:2]))

        with one_trace("two-conv", torch.float64):
            for found in run_on_threads(4, work):
                torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


def halve(model: nn.Module, _optimizer: Any) -> None:
    for p in model.parameters():
        p.data.mul_(0.5)


def test_weights_loaded_between_micro_batches_are_used() -> None:
    with_other_weights = {k: v * 0.5 for k, v in nets.build("two-conv").state_dict().items()}
    Passes(lambda model, _: model.load_state_dict(with_other_weights) and None).check()


def test_reported_manual_weight_changes_are_used() -> None:
    def change(model: nn.Module, optimizer: Any) -> None:
        halve(model, optimizer)
        if isinstance(model, Distributed):
            model.weights_changed()

    Passes(change).check()


def test_checkpoint_loaded_between_micro_batches_is_used(tmp_path: Path) -> None:
    model = nets.build("two-conv")
    (x, y), *_ = Training("two-conv", (10,)).batches(model)

    def work(group: Group) -> None:
        here = Distributed(model, plan_of(), group, x[:2])
        save_checkpoint(tmp_path / "run", here)
        halve(here, None)
        with here.no_sync():
            loss_of(here(part(here, x), batch=10), y).backward()
        load_checkpoint(tmp_path / "run", here)
        here.zero_grad()
        assert loss_of(here(part(here, x), batch=10), y).item() == pytest.approx(loss_of(model(x), y).item(), rel=EXACT)

    with one_trace("two-conv", torch.float64):
        run_on_threads(4, work)


def test_reshard_test_or_failure_between_micro_batches_gathers_again() -> None:
    """All of them gather again, and the last micro-batch is right."""

    def change(model: nn.Module, optimizer: Any) -> None:
        x = torch.ones(4, *nets.shape_of(model), dtype=torch.float64)
        if not isinstance(model, Distributed):
            return
        with pytest.raises(InputError):
            model(x[:, :, :3], whole=True)
        with model.no_sync(), torch.no_grad():
            model(x, whole=True)
        reshard(model, plan_of(shares=(2, 0, 1, 3)), optimizer)
        with model.no_sync(), torch.no_grad():
            model(x, whole=True)
        model.eval()
        model(x, whole=True)
        model.train()

    Passes(change).check()


@pytest.mark.parametrize("entries", [1, 10**6])
@pytest.mark.parametrize("changed", range(3))
def test_unreported_shard_change_is_an_error(changed: int, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that computes and keeps, on one that only keeps, and on all at once; it is the device's own error."""
    monkeypatch.setattr(convoy.plan.lower, "BUCKET_ENTRIES", entries)
    model = nets.build("two-conv")
    (x, y), *_ = Training("two-conv", (10,)).batches(model)

    def work(group: Group) -> None:
        here = Distributed(model, plan_of(), group, x[:2])
        for number in range(2):
            with here.no_sync():
                loss_of(here(part(here, x), batch=10), y).backward()
            if not number and changed in (group.device, 2):
                dict(here.named_parameters())["fc.bias"].data.add_(1e-14)

    with one_trace("two-conv", torch.float64), pytest.raises(ConvoyError) as caught:
        run_on_threads(4, work)
    assert isinstance(caught.value, InputError)
    assert "parameter 'fc.bias' changed between two micro-batches of a step" in str(caught.value)
    assert "weights_changed()" in str(caught.value)


def test_nan_weights_count_as_unchanged() -> None:
    """A diverged training continues as on one device."""
    model = nets.build("two-conv")
    (x, y), *_ = Training("two-conv", (10,)).batches(model)

    def work(group: Group) -> float:
        here = Distributed(model, plan_of(), group, x[:2])
        with torch.no_grad():
            dict(here.named_parameters())["fc.weight"].fill_(float("nan"))
        for _ in range(2):
            with here.no_sync():
                loss = loss_of(here(part(here, x), batch=10), y)
                loss.backward()
        return loss.item()

    with one_trace("two-conv", torch.float64):
        assert all(loss != loss for loss in run_on_threads(4, work))


def test_device_at_another_micro_batch_is_named() -> None:
    model = nets.build("two-conv")
    (x, y), *_ = Training("two-conv", (10,)).batches(model)

    def work(group: Group) -> None:
        here = Distributed(model, plan_of(), group, x[:2])
        with here.no_sync():
            loss_of(here(part(here, x), batch=10), y).backward()
        if group.device == 2:
            here._gathered.held = False
        loss_of(here(part(here, x), batch=10), y).backward()

    with one_trace("two-conv", torch.float64), pytest.raises(ConvoyError) as caught:
        run_on_threads(4, work)
    assert isinstance(caught.value, MismatchError)
    assert "device 2 is on another side of no_sync(), or at another micro-batch of the step, than device 0" in str(
        caught.value
    )


def test_weights_changed_on_one_device_are_an_error() -> None:
    model = nets.build("two-conv")
    (x, y), *_ = Training("two-conv", (10,)).batches(model)

    def work(group: Group) -> None:
        here = Distributed(model, plan_of(), group, x[:2])
        for _ in range(2):  # no comparison is due in what follows
            for number in range(2):
                here._comparisons.calls = 2
                with here.no_sync():
                    loss_of(here(part(here, x), batch=10), y).backward()
                if not number and len(here._comparisons.done) > 1 and group.device == 2:
                    here.weights_changed()

    with one_trace("two-conv", torch.float64), pytest.raises(ConvoyError):
        run_on_threads(4, work, timeout_s=1)
