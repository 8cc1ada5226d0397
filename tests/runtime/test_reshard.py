"""Resharding in mid-training: the trajectory stays that of one device, to 1e-10 in float64.

Between steps a plan gives way to another: shares at random, idle devices, other strategies. Compared after the last step, on
every device: weights and buffers, gradients, the optimizer's state, every loss, and the outputs in evaluation mode.
"""

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import convoy
from convoy.comm.group import Group
from convoy.errors import InputError, MismatchError, PlanError
from convoy.plan.coupling import coupled_axes, with_units
from convoy.plan.plan import Plan
from convoy.plan.presets import PLANS
from convoy.plan.strategy import Batch, Filter
from convoy.runtime.module import Distributed
from convoy.runtime.reshard import reshard
from tests.support import nets
from tests.support.one_device import (
    EXACT,
    OPTIMIZERS,
    Labelled,
    Record,
    Training,
    assert_same,
    by_name,
    graph_of,
    in_shares,
    loss_of,
    mixed,
    on_one,
    one_trace,
    part,
    waiting,
)
from tests.support.slow import each_value
from tests.support.threads import run_on_threads

SIZES = (10, 10, 3, 10, 10, 3, 10, 10)


def shaken(plan: Plan, net: str, seed: int) -> Plan:
    """Return the same strategies with random shares, as rebalancing could choose them."""
    draw = random.Random(seed)
    for axes in coupled_axes(plan, graph_of(net)):
        cuts = sorted(draw.sample(range(1, sum(axes.units)), len(axes.active) - 1))
        parts = iter([b - a for a, b in zip([0, *cuts], [*cuts, sum(axes.units)], strict=True)])
        plan = with_units(plan, axes, tuple(next(parts) if count else 0 for count in axes.units))
    return plan


def train(
    here: Distributed, training: Training, batches: Sequence[Labelled], plans: Mapping[int, Plan]
) -> tuple[Record, torch.optim.Optimizer]:
    """Train, switching to plans[k] before batch k."""
    record = Record()
    optimizer = OPTIMIZERS[training.optimizer](here.parameters())
    for k, (x, y) in enumerate(batches):
        if k in plans:
            held = list(here.parameters())
            reshard(here, plans[k], optimizer)
            assert all(a is b for a, b in zip(held, here.parameters(), strict=True))
            assert all(p.grad is None or p.grad.shape == p.shape for p in held)
        if k % training.accumulate == 0:
            optimizer.zero_grad(set_to_none=training.set_to_none)
        with waiting(here, training, k):
            loss = loss_of(here(part(here, x), batch=len(x)), y)
            loss.backward()
        record.losses.append(loss.item())
        if (k + 1) % training.accumulate == 0:
            if training.clip is not None:
                record.norms.append(float(here.clip_grad_norm_(*training.clip)))
            optimizer.step()
    return record, optimizer


def check(training: Training, plans: Mapping[int, Plan]) -> None:
    """Train with plans[0] first; every other plan replaces it before its batch."""
    expected, whole = on_one(training), nets.build(training.net)
    batches = training.batches(whole)  # not in the threads: they share the random numbers of the process
    later = {k: plan for k, plan in plans.items() if k}

    def work(group: Group) -> Record:
        here = Distributed(whole, plans[0], group, batches[0][0][:2])
        record, optimizer = train(here, training, batches, later)
        record.weights = here.full_state_dict()
        held = dict(here.named_parameters())
        for key, state in expected.state.items():
            grad = held[key].grad
            record.gradients[key] = here.gather(key, grad if grad is not None else torch.empty_like(held[key]))
            if expected.gradients[key] is None:
                record.gradients[key] = None
            own = optimizer.state.get(held[key], {})
            record.state[key] = {n: here.gather(key, own.get(n, torch.empty_like(held[key]))) for n in state}
        here.eval()
        with torch.no_grad():
            x = batches[0][0]
            outputs = [here(part(here, x[:n].clone()), batch=n) for n in (len(x), 3)]
        record.evaluated = [t for out in outputs for t in (out if isinstance(out, tuple) else (out,))]
        return record

    with one_trace(training.net, training.dtype):
        assert_same(run_on_threads(plans[0].devices, work, timeout_s=30), expected)


def made(plan: str, net: str) -> Plan:
    return mixed(net) if plan == "mixed" else by_name(plan, net)


# ------------------------------------------------------------------------------------------------------- the trajectory


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [
        pytest.param(plan, optimizer, marks=() if optimizer == "adam" or plan == "mixed" else pytest.mark.slow)
        for plan in (*PLANS, "mixed")
        for optimizer in OPTIMIZERS
    ],
)
def test_resharding_every_few_steps_follows_one_device(plan: str, optimizer: str) -> None:
    """Run every plan with one optimizer, and every optimizer with all strategies; slow tests run the rest."""
    first = made(plan, "mobile")
    plans = {
        0: first,
        1: shaken(first, "mobile", 1),
        3: shaken(first, "mobile", 2),
        4: first,
        7: shaken(first, "mobile", 3),
    }
    assert len({p.to_json() for p in plans.values()}) > 1
    check(Training("mobile", SIZES, optimizer), plans)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_sharded_weights_reshard_to_other_layouts(optimizer: str) -> None:
    copies, other = by_name("data-by-speed", "resnet"), by_name("data", "resnet")
    plans = {
        0: in_shares(copies, "resnet", (1, 3, 0, 2)),
        1: in_shares(other, "resnet", (1, 3, 0, 2), "free"),
        2: in_shares(other, "resnet", (0, 1, 5, 1), "free"),
        4: copies,
        5: in_shares(copies, "resnet", (4, 1, 0, 0)),
        6: mixed("resnet"),
        7: in_shares(mixed("resnet"), "resnet", (1, 1, 1, 1), "free"),
    }
    check(Training("resnet", SIZES, optimizer), plans)


@pytest.mark.parametrize(("net", "optimizer"), each_value(["two-conv", "resnet"], [*OPTIMIZERS]))
def test_reshard_from_every_plan_to_every_other(net: str, optimizer: str) -> None:
    """New holders of a layer get its weights and optimizer state; former holders drop theirs."""
    order = ["data-by-speed", "master", "data", "hybrid", "mixed", "model", "data-by-speed"]
    check(Training(net, SIZES, optimizer), {k: made(name, net) for k, name in enumerate(order)})


@pytest.mark.parametrize("net", ["concatenation", "tied", "bare", "frozen", "frozen-norm", "own-norm", "opaque-per-sample",
                                 "auxiliary", "tokens", "no-gradient", "convolutions"])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_special_nets_reshard(net: str) -> None:
    order = ["data-by-speed", "mixed", "model", "master"]
    check(Training(net, SIZES[:5]), {k: made(name, net) for k, name in enumerate(order)})


@pytest.mark.parametrize(("net", "set_to_none"), each_value(["resnet", "bare"], [True, False]))
def test_accumulated_gradients_reshard_too(net: str, set_to_none: bool) -> None:
    """Reshard before batches 1, 3 and 6 of pairs (0, 1), (2, 3), ...: at 1 and 3 gradients are half accumulated."""
    training = Training(net, SIZES, accumulate=2, set_to_none=set_to_none, clip=(0.5, 2.0))
    order = {0: "data-by-speed", 1: "mixed", 3: "master", 6: "hybrid", 7: "model"}
    check(training, {k: made(name, net) for k, name in order.items()})


def test_idle_device_joins_and_another_leaves() -> None:
    graph = graph_of("two-conv")

    def plan(samples: tuple[int, ...], filters: tuple[int, ...]) -> Plan:
        return Plan("by hand", graph.fingerprint, 3, 10, {"conv2": Filter(filters)}, Batch(samples))

    plans = [
        plan((10, 0, 0), (7, 0, 0)),
        plan((4, 6, 0), (3, 0, 4)),
        plan((0, 3, 7), (0, 7, 0)),
        plan((1, 1, 8), (2, 3, 2)),
    ]
    for optimizer in ("adam", "sgd"):
        check(Training("two-conv", SIZES, optimizer), dict(zip((0, 2, 4, 6), plans, strict=True)))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.NAdam(p, lr=0.01),
        lambda p: torch.optim.ASGD(p, lr=0.01),
        lambda p: torch.optim.Rprop(p, lr=0.01),
        lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.01),
    ],
    ids=["nadam", "asgd", "rprop", "amsgrad", "sgd-plain"],
)
def test_optimizer_counters_reshard_too(make: Any) -> None:
    model, training = nets.build("two-conv"), Training("two-conv", SIZES)
    batches = training.batches(model)
    reference = copy.deepcopy(model)
    optimizer = make(reference.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        loss_of(reference(x), y).backward()
        optimizer.step()
    plans = {2: made("master", "two-conv"), 4: made("mixed", "two-conv"), 6: made("model", "two-conv")}

    def work(group: Group) -> dict[str, Tensor]:
        here = Distributed(model, made("data-by-speed", "two-conv"), group, batches[0][0][:2])
        own = make(here.parameters())
        for k, (x, y) in enumerate(batches):
            if k in plans:
                reshard(here, plans[k], own)
            own.zero_grad()
            loss_of(here(part(here, x), batch=len(x)), y).backward()
            own.step()
        return here.full_state_dict()

    for found in run_on_threads(4, work):
        for key, value in reference.state_dict().items():
            assert torch.allclose(found[key], value, rtol=0, atol=EXACT), key


def test_reshard_sends_only_relocated_entries() -> None:
    """By hand, float64: conv1's fifth filter (75 + 1 numbers) goes from device 0 to device 2, with its momentum."""
    graph, model = graph_of("two-conv"), nets.build("two-conv")
    plans = [
        Plan("by hand", graph.fingerprint, 3, 10, {"conv1": Filter(filters)}, Batch((5, 3, 2)))
        for filters in ((5, 0, 0), (4, 0, 1))
    ]
    (x, y), *_ = Training("two-conv", (10,)).batches(model)

    def work(group: Group) -> tuple[list[int], list[int]]:
        here = Distributed(model, plans[0], group, x[:2])
        optimizer = torch.optim.SGD(here.parameters(), lr=0.1, momentum=0.9)
        loss_of(here(part(here, x), batch=10), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        sent = []
        for plan in plans[1], plans[1]:
            group.clear_counters()
            reshard(here, plan, optimizer)
            sent.append(sum(group.sent_bytes))
        return sent, list(here.module.get_parameter("conv1.weight").shape)

    with one_trace("two-conv", torch.float64):
        found = run_on_threads(3, work)
    assert [sent for sent, _ in found] == [[2 * 76 * 8, 0], [0, 0], [0, 0]]
    assert [shape[0] for _, shape in found] == [4, 0, 1]


# ------------------------------------------------------------------------------------------------------------ refusals


def on_three(work: Any) -> list[Any]:
    model = nets.build("two-conv")
    x = torch.zeros(2, 3, 8, 8, dtype=torch.float64)
    plan = Plan("first", graph_of("two-conv").fingerprint, 3, 10, {}, Batch((5, 3, 2)))

    def device(group: Group) -> Any:
        here = convoy.distribute(model, plan, group, x)
        return work(here, group)

    with one_trace("two-conv", torch.float64):
        return run_on_threads(3, device, timeout_s=20)


SPLIT = Plan("second", "", 3, 10, {"conv2": Filter((3, 2, 2))}, Batch((2, 3, 5)))


def split() -> Plan:
    return replace(SPLIT, model=graph_of("two-conv").fingerprint)


def test_different_plans_on_devices_are_refused() -> None:
    def work(here: Distributed, group: Group) -> str:
        before, plan = here.full_state_dict(), here.plan
        other = replace(split(), otherwise=Batch((3, 3, 4))) if group.device == 1 else split()
        with pytest.raises(
            MismatchError, match="device 1 was given another plan to continue with than device 0"
        ) as caught:
            reshard(here, other)
        assert here.plan == plan
        assert all(torch.equal(v, before[k]) for k, v in here.full_state_dict().items())
        return str(caught.value)

    assert all("same script, options and random seeds" in text for text in on_three(work))


def test_reshard_refuses_plans_for_another_model_or_fleet() -> None:
    def work(here: Distributed, _group: Group) -> bool:
        with pytest.raises(PlanError, match="another model"):
            reshard(here, by_name("data", "resnet"))
        with pytest.raises(PlanError, match="is for 4 devices, this job has 3"):
            reshard(here, by_name("data", "two-conv"))
        return here.reshards == 0

    assert on_three(work) == [True] * 3


def test_reshard_refuses_an_optimizer_of_another_model() -> None:
    def work(here: Distributed, _group: Group) -> bool:
        plan = here.plan
        stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        with pytest.raises(InputError, match="SGD works on 2 parameters that this model does not have"):
            reshard(here, split(), stranger)
        return here.plan == plan

    assert on_three(work) == [True] * 3


def test_inexact_optimizer_is_refused_before_resharding() -> None:
    def work(here: Distributed, _group: Group) -> bool:
        optimizer = torch.optim.Adafactor(here.parameters(), lr=0.1)
        reshard(here, replace(here.plan, otherwise=Batch((2, 2, 6))), optimizer)
        with pytest.raises(InputError, match=r"Adafactor is not known .* convoy\.train\.ELEMENTWISE\.add\(Adafactor\)"):
            reshard(here, split(), optimizer)
        return here.plan.otherwise == Batch((2, 2, 6)) and here.module.get_parameter("conv2.weight").shape[0] == 7

    assert on_three(work) == [True] * 3


def test_optimizer_guard_knows_the_new_shards() -> None:
    def work(here: Distributed, _group: Group) -> None:
        optimizer = torch.optim.Adafactor(here.parameters(), lr=0.1)
        reshard(here, split())
        with pytest.raises(InputError, match="Adafactor is not known"):
            optimizer.step()

    on_three(work)


def test_reshard_between_forward_and_backward_is_refused() -> None:
    def work(here: Distributed, _group: Group) -> None:
        x = torch.zeros(10, 3, 8, 8, dtype=torch.float64)
        out = here(part(here, x), batch=10)
        reshard(here, split())
        with pytest.raises(InputError, match="call reshard\\(\\) after backward"):
            out.sum().backward()

    on_three(work)


def test_local_batch_of_the_old_plan_is_refused() -> None:
    def work(here: Distributed, _group: Group) -> None:
        x = torch.zeros(10, 3, 8, 8, dtype=torch.float64)
        old = part(here, x)
        reshard(here, replace(here.plan, otherwise=Batch((1, 1, 8))))
        with pytest.raises(InputError, match="the global batch had 10 samples, and its local batch is"):
            here(old, batch=10)

    on_three(work)


# --------------------------------------------------------------------------------------------------------- on processes
