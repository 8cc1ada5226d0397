"""Parity: training by any plan follows the training of one device, number by number (float64, to 1e-10).

Compared on every device after the last step: all weights and buffers, all gradients, the optimizer's state, the loss of
every step, and the outputs in evaluation mode. Each net of `nets.py` has its own way to go wrong; several did.
"""

import copy
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import convoy.plan.lower
import convoy.plan.steps
import convoy.runtime.module
from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.fleet import Device, Fleet, Host, Nic
from convoy.plan.lower import lower
from convoy.plan.presets import PLANS, Speeds
from convoy.plan.steps import SumGradients
from convoy.plan.strategy import Batch
from convoy.planner.planner import candidates
from convoy.planner.prediction import working
from convoy.runtime.module import Distributed
from studies.roofline import roofline_costs
from tests.support import nets
from tests.support.described_fleets import asked
from tests.support.one_device import (
    EXACT,
    OPTIMIZERS,
    TWENTY_STEPS,
    Training,
    by_name,
    check,
    graph_of,
    loss_of,
    mixed,
    on_one,
    part,
)
from tests.support.slow import each_value, most_slow
from tests.support.threads import run_on_threads

SHORT = (10, 3, 10)


SUMS = ("ring", "butterfly", "direct", "star")
BOTH = (True, False)
EVERY_SUM = [(plan, reduce) for reduce in SUMS for plan in PLANS]


@pytest.mark.parametrize(("plan", "reduce"), most_slow(len(PLANS), EVERY_SUM))
def test_twenty_steps_by_every_plan_and_every_sum(plan: str, reduce: str) -> None:
    check(Training("two-conv", TWENTY_STEPS), by_name(plan, "two-conv", reduce))


@pytest.mark.parametrize("net", ["two-conv", "resnet", "mobile"])
def test_the_planners_choice_follows_one_device(net: str) -> None:
    """For slow devices on a fast network, where each of them pays."""
    host = Host("lab", card=Nic(1e10, 1e10, 1e-7))
    rates = (4e8, 3e8, 2e8)
    fleet = Fleet((host,), tuple(
        Device(f"d{d}", "lab", "cpu", peak_flop_per_s=rate, memory_bytes_per_s=rate) for d, rate in enumerate(rates)
    ))  # fmt: skip
    plan = candidates(asked(graph_of(net), 10, roofline_costs(fleet)))[0].plan
    assert working(plan, graph_of(net)) == {0, 1, 2}
    check(Training(net), plan)


@pytest.mark.parametrize(("net", "reduce"), each_value(["two-conv", "resnet", "mobile"], SUMS))
def test_large_gradients_are_summed_where_they_lie_in_segments(
    net: str, reduce: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What megabytes do in earnest, with a few numbers: a bucket for each large gradient, two segments under way."""
    monkeypatch.setattr(convoy.plan.lower, "BUCKET_ENTRIES", 40)
    monkeypatch.setattr(convoy.plan.steps, "SEGMENT_ENTRIES", 16)
    plan = by_name("data-by-speed", net, reduce)
    sums = [s for s in lower(plan, graph_of(net)).steps if isinstance(s, SumGradients)]
    assert {s.alone for s in sums} == {False, True}
    assert {s.schedule.window for s in sums} == {1, 2}
    check(Training(net, SHORT), plan)


@pytest.mark.parametrize(("plan", "net"), each_value([*PLANS], ["resnet", "mobile"]))
def test_batch_norm_over_devices_follows_one_device(plan: str, net: str) -> None:
    check(Training(net), by_name(plan, net, "butterfly"))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("plan", most_slow(1, ["mixed", "data-by-speed", "model", "sharded", "hybrid", "master"]))
@pytest.mark.parametrize("net", [n for n in nets.NETS if n not in ("two-conv", "resnet", "mobile")])
def test_nets_with_something_special(net: str, plan: str) -> None:
    check(Training(net, SHORT), mixed(net) if plan == "mixed" else by_name(plan, net))


def test_the_shares_are_as_uneven_as_intended() -> None:
    assert by_name("data-by-speed", "two-conv").otherwise == Batch((7, 0, 2, 1))
    assert {s.name for s in mixed("resnet").layers.values()} == {"filter", "channel", "batch", "one"}


@pytest.mark.parametrize(("net", "reduce"), each_value(["two-conv", "resnet", "tokens"], SUMS))
def test_every_strategy_in_one_plan_follows_one_device(net: str, reduce: str) -> None:
    check(Training(net, TWENTY_STEPS), mixed(net, reduce))


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


@pytest.mark.parametrize(("plan", "optimizer"), each_value(["data-by-speed", "hybrid", "mixed"], [*OPTIMIZERS]))
def test_optimizers_keep_their_state_piece_by_piece(plan: str, optimizer: str) -> None:
    training = Training("mobile", SHORT * 2, optimizer)
    expected = on_one(training)
    assert all(expected.state.values())
    check(training, mixed("mobile") if plan == "mixed" else by_name(plan, "mobile"))


@pytest.mark.parametrize(
    ("plan", "one_sum", "net", "set_to_none"),
    each_value(["mixed", "data-by-speed", "master"], BOTH, ["resnet", "bare", "opaque-per-sample"], BOTH),
)
def test_gradients_of_two_batches_add_up(plan: str, one_sum: bool, net: str, set_to_none: bool) -> None:
    training = Training(net, (10, 3) * 4, accumulate=2, one_sum=one_sum, set_to_none=set_to_none)
    check(training, mixed(net) if plan == "mixed" else by_name(plan, net))


@pytest.mark.parametrize(
    ("plan", "kind"), each_value(["data-by-speed", "model", "master", "mixed"], [2.0, float("inf"), 1.0, 3.0])
)
def test_clipping_by_the_norm_of_all_gradients(plan: str, kind: float) -> None:
    for net, largest in (("two-conv", 0.01), ("bare", 0.02)):
        training = Training(net, SHORT, clip=(largest, kind))
        assert any(norm > largest for norm in on_one(training).norms)
        check(training, mixed(net) if plan == "mixed" else by_name(plan, net))


def test_a_group_of_threads_traces_a_model_once_in_each_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: every device traced the evaluation mode, a third of the time of all parity tests."""
    spy = Mock(wraps=convoy.runtime.module.trace)
    monkeypatch.setattr("convoy.runtime.module.trace", spy)
    model, x = nets.build("two-conv"), torch.zeros(2, 3, 8, 8, dtype=torch.float64)
    run_on_threads(4, lambda group: Distributed(model, by_name("data", "two-conv"), group, x))
    assert [call.kwargs["training"] for call in spy.call_args_list] == [True, False]


def test_a_gradient_that_is_no_number_shows_in_all() -> None:
    """Python's min and max lose what is not a number: one device clipped to a finite norm, and went on."""
    model = nets.build("two-conv")
    (x, y), *_ = Training("two-conv", (10,)).batches(model)

    def work(group: Group) -> tuple[list[float], bool]:
        here = Distributed(model, by_name("model", "two-conv"), group, x[:2])
        loss_of(here(part(here, x), batch=10), y).backward()
        if group.device == 2:
            here.module.get_parameter("conv1.bias").grad[0] = float("nan")
        here.gradients_changed()
        norms = [float(here.clip_grad_norm_(1.0, kind)) for kind in (2.0, float("inf"))]
        return norms, all(bool(p.grad.isnan().all()) for p in here.parameters() if p.grad is not None)

    for norms, poisoned in run_on_threads(4, work):
        assert all(norm != norm for norm in norms)
        assert poisoned


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

    for found in run_on_threads(4, work):
        for key, parameter in reference.named_parameters():
            assert parameter.grad is not None
            assert torch.allclose(found[key].cpu(), parameter.grad, rtol=EXACT, atol=EXACT), key
