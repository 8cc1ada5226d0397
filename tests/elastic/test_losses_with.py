"""Training features combined with lost devices: the numbers match one device."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import convoy.runtime.module
from convoy.api import distribute, loader
from convoy.elastic.members import Members
from convoy.model.graph import Graph
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan
from convoy.runtime.module import Distributed
from convoy.runtime.optimizer import WeightAverage
from convoy.runtime.precision import GradScaler
from convoy.train.controller import Rebalancer
from convoy.train.loop import RateCurve, Recipe, Training, build_schedule, fit
from lab.chaos import TIGHT, Case, make_data, make_net, whole_state
from tests.support.losses import Device, Poisoned, with_losses
from tests.support.one_device import OPTIMIZERS, one_trace
from tests.support.torch_seed import torch_seed

CASE = Case(seed=11, devices=3)
EPOCHS = 3


@dataclass(frozen=True)
class Extras:
    """Optional features of a training."""

    optimizer: str = "sgd"
    ema: bool = False
    scales: bool = False
    accumulate: int = 1
    workers: int = 0
    rebalance: bool = False
    others: tuple[str, ...] = ()
    every: int | None = 1


def planned(name: str, graph: Graph, batch: int) -> Plan:
    plan = named_plan(name.removesuffix(", freed"), graph, batch, Speeds((1.0, 1.5, 2.0)))
    if not name.endswith(", freed"):
        return plan
    return replace(plan, sharded={layer: replace(how, form="free") for layer, how in plan.sharded.items()})


def train(here: Device | None, plan: str, extras: Extras) -> tuple[list[float], dict[str, Tensor], Any]:
    """Train by a plan on one of several devices, or alone."""
    with torch_seed(0):
        net, example = make_net(), torch.zeros(2, 2, 8, 8, dtype=torch.float64)
    model: Any = net
    part: Distributed | None = None
    size = CASE.batch // extras.accumulate
    if here is not None:
        graph = convoy.runtime.module.trace(net, example).graph
        plans = [planned(name, graph, size) for name in (plan, *extras.others)]
        model = part = distribute(net, plans[0], here.group, example)
    optimizer = OPTIMIZERS[extras.optimizer](model.parameters())
    data = make_data(CASE)
    train_on = loader(data, size, part, seed=CASE.seed, workers=extras.workers)
    test = loader(data, 8, part, shuffle=False)
    schedule = build_schedule(optimizer, RateCurve("cosine", 18, 2, 1, 0.1))
    kind = Poisoned if extras.scales else Training
    training = kind(
        model, optimizer, Recipe(accumulate=extras.accumulate, clip_norm=1.0), schedule,
        WeightAverage(optimizer, 0.9) if extras.ema else None,
        GradScaler(model, init_scale=8.0, growth_interval=2) if extras.scales else None,
    )  # fmt: skip
    if here is None:
        history = fit(training, train_on, test, EPOCHS)
        state = whole_state(model, optimizer)
    else:
        others = [each for each in (schedule, training.scaler) if each is not None]
        here.members = members = Members(model, optimizer, others=others, every=extras.every)
        rebalancer = Rebalancer(model, optimizer, others=plans[1:]) if extras.rebalance or extras.others else None
        history = fit(training, train_on, test, EPOCHS, rebalancer=rebalancer, members=members)
        state = members.repeated(lambda: whole_state(model, optimizer))
        members.close()
    scale = None if training.scaler is None else training.scaler.state_dict()
    return history.losses, state, [scale, [each.accuracy for each in history.evaluations], training.rate()]


IN_A_STEP, ON_THE_WAY_BACK = {1: (4, 5)}, {0: (7, 11), 1: (7, 40)}
TWICE = {2: (3, 2), 0: (11, 9)}

CASES: dict[str, tuple[Extras, str, dict[int, tuple[int, int]]]] = {
    "averages": (Extras(ema=True), "model", TWICE),
    "averages of shards": (Extras(ema=True, every=3), "sharded", IN_A_STEP),
    "scaled losses": (Extras(scales=True), "model", ON_THE_WAY_BACK),
    "micro-batches of shards, and all else": (
        Extras(ema=True, scales=True, accumulate=4, rebalance=True, every=2), "sharded", {1: (4, 13), 2: (9, 21)},
    ),
    "micro-batches of freed shards": (Extras(ema=True, accumulate=4), "sharded, freed", ON_THE_WAY_BACK),
    "a trial of plans": (Extras(others=("model", "data")), "hybrid", IN_A_STEP),
    "workers of the loader": (Extras(workers=1, every=2), "data-by-speed", IN_A_STEP),
    "tiles of images": (Extras(accumulate=2, rebalance=True), "spatial", TWICE),
    "micro-batches, at the very start": (Extras(accumulate=2, every=2), "data-by-speed", {2: (0, 3)}),
    "images in parts": (Extras(), "spatial", TWICE),
    "images in parts, in backward": (Extras(accumulate=2, every=2), "spatial", ON_THE_WAY_BACK),
    "after the first snapshot": (Extras("adagrad"), "master", {1: (0, 4)}),
    "all of it": (Extras(ema=True, scales=True, accumulate=2, rebalance=True, every=None), "model", TWICE),
}  # fmt: skip


@pytest.mark.parametrize(("extras", "plan", "strikes"), CASES.values(), ids=CASES)
def test_a_loss_changes_no_number(
    extras: Extras, plan: str, strikes: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(extras, plan, strikes, monkeypatch)


def compare(extras: Extras, plan: str, strikes: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare a training that loses devices with one device."""
    losses, state, rest = train(None, plan, extras)
    with one_trace("chaos", torch.float64):
        found = with_losses(monkeypatch, 3, lambda here: train(here, plan, extras), strikes)
    assert found.keys() == {0, 1, 2} - strikes.keys(), "who was to be lost was not"
    for other_losses, other_state, other_rest in found.values():
        assert other_losses == pytest.approx(losses, rel=TIGHT)
        assert other_rest == rest
        assert other_state.keys() == state.keys()
        for key, tensor in state.items():
            assert float((other_state[key].cpu() - tensor).abs().max()) < TIGHT * max(1.0, float(tensor.abs().max())), (
                key
            )
