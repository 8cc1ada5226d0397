"""Rebalancing in a training: the loader after a change of shares, and a training that rebalances itself.

Seconds are told to the rebalancer by a clock that is made up: nothing here depends on how fast this machine is.
"""

import itertools
import threading
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import convoy
from convoy.comm.group import Group
from convoy.layout.layout import Partial, box, entries
from convoy.plan.plan import Plan
from convoy.plan.steps import ComputeStep
from convoy.plan.strategy import Batch, Channel, Filter, One
from convoy.runtime.module import Distributed
from convoy.runtime.reshard import reshard
from convoy.train.controller import Rebalancer
from convoy.train.loader import Loader
from convoy.train.loop import Training, fit
from convoy.train.rebalance import Keep, Reshard
from convoy.train.record import Evaluation, History, Observer
from tests.support import nets
from tests.support.one_device import EXACT, graph_of, one_trace
from tests.support.threads import run_on_threads

SAMPLES, BATCH, EPOCHS = 67, 20, 9
SLOWED_AT = 16


class Samples(Dataset[tuple[Tensor, int]]):
    """Random images; the first entry of image i is i."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(8)
        self.x = torch.randn(SAMPLES, 3, 8, 8, generator=generator, dtype=torch.float64)
        self.x[:, 0, 0, 0] = torch.arange(SAMPLES)
        self.y = torch.randint(nets.CLASSES, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], int(self.y[index])


def by_samples(shares: tuple[int, ...]) -> Plan:
    return Plan("samples", graph_of("two-conv").fingerprint, len(shares), sum(shares), {}, Batch(shares))


# ---------------------------------------------------------------------------------------------------------- the loader


@pytest.mark.parametrize("workers", [0, 1])
def test_local_batches_follow_a_new_plan(workers: int) -> None:
    model = nets.build("two-conv")
    plans = {1: by_samples((2, 0, 18)), 2: replace(by_samples((7, 7, 6)), layers={"conv1": Filter((2, 2, 1))})}
    whole = [x[:, 0, 0, 0].tolist() for x, _ in Loader(Samples(), BATCH, seed=4)]

    def work(group: Group) -> list[list[float]]:
        here = Distributed(model, by_samples((10, 6, 4)), group, torch.zeros(2, 3, 8, 8, dtype=torch.float64))
        # Worker processes are one device's affair here: four threads that fork at once would be a test of their own.
        loader = Loader(Samples(), BATCH, here, seed=4, workers=workers if group.device == 2 else 0)
        parts = []
        for k, (x, y) in enumerate(loader):
            assert len(y) == len(whole[k])
            parts.append(x[:, 0, 0, 0].tolist())
            if k in plans:
                reshard(here, plans[k])
        return parts

    with one_trace("two-conv", torch.float64):
        found = run_on_threads(3, work)
    cuts = [(0, 10, 16, 20), (0, 10, 16, 20), (0, 2, 2, 20)]
    for k, edges in enumerate(cuts):
        for device, (start, stop) in enumerate(itertools.pairwise(edges)):
            assert found[device][k] == whole[k][start:stop], f"batch {k} on device {device}"
    assert all(parts[3] == whole[3] for parts in found), "a first layer that is split by filter wants copies"
    assert all(len(parts) == 4 for parts in found)


# ---------------------------------------------------------------------------------------------- training that rebalances


@dataclass
class MadeUp:
    """A clock with seconds set by the test. The executors measure with the real one."""

    real: Any
    layers_s: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))

    def settle(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class Teller(Observer):
    """An observer that sets the clock's seconds per layer after every step: the device's share over its speed."""

    def __init__(self, here: Distributed, speeds: list[float]) -> None:
        self.here, self.speed, self.steps = here, speeds[here.group.device], 0

    def on_step_end(self, step: int, samples: int) -> None:  # noqa: ARG002
        for each in self.here.steps(samples).phase("forward"):
            if isinstance(each, ComputeStep):
                part = each.parameters.get("weight") and _part(self.here, each)
                self.here.clock.layers_s[each.layer, "forward"] += 0.25 * (part or 0.0) / self.speed
                self.here.clock.layers_s[each.layer, "backward"] += 0.75 * (part or 0.0) / self.speed
        self.steps += 1
        if self.steps == SLOWED_AT and self.here.group.device == 1:
            self.speed /= 2

    def on_evaluation(self, result: Evaluation) -> None:  # noqa: ARG002
        # An evaluation took its time too; it is no training step.
        self.here.clock.layers_s["conv1", "forward"] += 1000.0 * (1 + self.here.group.device)


def _part(here: Distributed, step: ComputeStep) -> float:
    """Return the device's fraction of a layer: its share of samples or filters."""
    value = step.reads[0] if isinstance(step.writes.layout, Partial) else step.writes
    mine = box(value.layout, here.group.device, value.shape)
    return entries(mine) / torch.Size(value.shape).numel() if mine else 0.0


def train(plan: Plan, every: int = 2) -> list[dict[str, Any]]:
    model = nets.build("two-conv")

    def work(group: Group) -> dict[str, Any]:
        here = convoy.distribute(model, plan, group, torch.zeros(2, 3, 8, 8, dtype=torch.float64))
        here.clock = MadeUp(here.clock)  # type: ignore[assignment]
        loader, test = Loader(Samples(), BATCH, here), Loader(Samples(), BATCH, here, shuffle=False)
        optimizer = torch.optim.Adam(here.parameters(), lr=0.003, eps=1e-3)
        told: list[tuple[int, str]] = []
        rebalancer = Rebalancer(here, optimizer, tell=lambda step, d: told.append((step, d.reason)), every=every)
        history = fit(Training(here, optimizer), loader, test, EPOCHS, Teller(here, [4.0, 4.0, 2.0]), rebalancer)
        assert here.plan == rebalancer.state.plan
        return {"history": history, "told": told, "plan": here.plan, "weights": here.full_state_dict()}

    with one_trace("two-conv", torch.float64):
        return run_on_threads(3, work, timeout_s=30)


@pytest.fixture(scope="module")
def alone() -> tuple[History, dict[str, Tensor]]:
    """Train the same in plain PyTorch."""
    model = nets.build("two-conv")
    loader, test = Loader(Samples(), BATCH), Loader(Samples(), BATCH, shuffle=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003, eps=1e-3)
    return fit(Training(model, optimizer), loader, test, EPOCHS), dict(model.state_dict())


def by_filters() -> Plan:
    layers = {"conv1": Filter((2, 2, 1)), "conv2": Filter((3, 2, 2)), "fc": Channel((12, 8, 8))}
    return Plan("filters", graph_of("two-conv").fingerprint, 3, BATCH, layers, One(0))


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("kind", ["samples", "filters"])
def test_rebalanced_training_matches_one_device(
    kind: str, every: int, alone: tuple[History, dict[str, Tensor]]
) -> None:
    results = train(by_samples((8, 6, 6)) if kind == "samples" else by_filters(), every)
    history, weights = alone
    for found in results:
        assert found["told"] == results[0]["told"]
        assert found["plan"] == results[0]["plan"]
        for key, value in weights.items():
            assert torch.allclose(found["weights"][key], value, rtol=0, atol=EXACT), key
        assert found["history"].losses == pytest.approx(history.losses, abs=EXACT)
    steps = [step for step, _ in results[0]["told"]]
    assert steps == sorted(set(steps))
    assert any(step > SLOWED_AT for step in steps), results[0]["told"]
    if kind == "samples":
        assert results[0]["plan"].otherwise == Batch((10, 5, 5))
        assert steps[0] < SLOWED_AT
        assert "batch 8/6/6 -> 8/8/4 samples: device 2 took" in results[0]["told"][0][1]
    else:
        assert results[0]["plan"].layers["fc"].shares == tuple(4 * n for n in results[0]["plan"].layers["conv2"].shares)


def test_one_small_message_per_device_and_interval() -> None:
    model = nets.build("two-conv")

    def work(group: Group) -> list[int]:
        here = convoy.distribute(model, by_samples((4, 4, 2)), group, torch.zeros(2, 3, 8, 8, dtype=torch.float64))
        rebalancer = Rebalancer(here, every=3)
        sent = []
        for batch in (10, 10, 7, 10, 10):
            group.clear_counters()
            rebalancer.step(batch)
            sent.append(sum(group.sent_bytes))
        assert isinstance(rebalancer.decision, Keep)
        return sent

    with one_trace("two-conv", torch.float64):
        for sent in run_on_threads(3, work):
            assert sent == [0, 0, 0, 2 * 3 * 8 * 8, 0], (
                "two others, three steps, eight layers; 7 is no batch of the plan"
            )


def test_no_device_waits_for_the_slowest_at_the_end_of_a_step() -> None:
    model = nets.build("two-conv")
    first_is_through = threading.Event()
    seen: dict[int, list[Any]] = {0: [], 1: []}

    def work(group: Group) -> None:
        here = convoy.distribute(model, by_samples((4, 4)), group, torch.zeros(2, 3, 8, 8, dtype=torch.float64))
        rebalancer = Rebalancer(here, every=1)
        if group.device == 1:
            assert first_is_through.wait(20), "device 0 still waits for this one"
        rebalancer.step(8)
        first_is_through.set()
        for _ in range(4):
            here.clock.layers_s["conv1", "forward"] += 1.0 + group.device
            rebalancer.step(8)
        seen[group.device] = [rates for each in rebalancer.state.observed for rates in each.rates]

    with one_trace("two-conv", torch.float64):
        run_on_threads(2, work, timeout_s=30)
    assert seen[0] == seen[1]
    assert seen[0] == [(0.25, 0.5)], "the first was not timed, two more are not looked at, and the last still travels"


@pytest.mark.parametrize("plan", ["one", "single"])
def test_plans_without_shares_exchange_nothing(plan: str) -> None:
    model = nets.build("two-conv")
    devices = 2 if plan == "one" else 1
    made = Plan(plan, graph_of("two-conv").fingerprint, devices, 4, {}, One(0) if plan == "one" else Batch((4,)))

    def work(group: Group) -> bool:
        here = convoy.distribute(model, made, group, torch.zeros(2, 3, 8, 8, dtype=torch.float64))
        rebalancer = Rebalancer(here, every=1)
        group.clear_counters()
        for _ in range(3):
            rebalancer.step(4)
        return sum(group.sent_bytes) == 0 and not isinstance(rebalancer.decision, Reshard)

    with one_trace("two-conv", torch.float64):
        assert run_on_threads(devices, work) == [True] * devices
