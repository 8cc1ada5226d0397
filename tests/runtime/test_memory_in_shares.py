"""Predicted peak memory with sharded weights, compared with training steps on a slow network.

Sums of gradients run in a thread. Here each runs when the step cannot go on without it, and in the step's own thread, whose
tensors are counted: so every whole gradient that may be there is there.
"""

import gc
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.api import distribute
from convoy.comm.group import Group
from convoy.layout.layout import box
from convoy.model.graph import Graph
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.strategy import Form
from convoy.runtime import executor
from convoy.runtime.exchange import Lane, Slots
from convoy.runtime.gradients import SumLane, Sums, Worker
from convoy.simulate.memory import memory_of
from tests.runtime.test_memory_peak import peak_of
from tests.support.processes import on_processes

BATCH, WIDTH = 16, 1024
EXAMPLE = torch.zeros(2, 3, 16, 16)
TOLERANCE = 0.05


def net() -> nn.Module:
    """Return a net of 21.6 MB of weights, most of them in five Linears of 4.2 MB."""
    linear = [each for _ in range(5) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    first = (nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*first, *linear, nn.Linear(WIDTH, 10))


def planned(form: Form) -> tuple[Plan, Graph]:
    graph = trace(net(), EXAMPLE).graph
    plan = named_plan("sharded", graph, BATCH, Speeds((2.0, 1.0)))
    return replace(plan, sharded={name: replace(kept, form=form) for name, kept in plan.sharded.items()}), graph


class SlowSums(Sums):
    """A stand-in that runs each sum only when it is awaited."""

    def __init__(self, group: Group, lane: SumLane, slots: Slots, worker: Worker) -> None:
        super().__init__(group, lane, slots, worker)
        self._lane = Lane(group, 0, slots)
        self._held: list[tuple[int, Tensor]] = []

    def begin(self, step: int, flat: Tensor) -> None:
        self._ready[step] = flat
        while self._order and self._order[0] in self._ready:
            turn = self._order.pop(0)
            self._held.append((turn, self._ready.pop(turn)))

    def wait(self, step: int) -> None:
        while any(held == step for held, _ in self._held):
            self._run(*self._held.pop(0))

    def finish(self) -> None:
        while self._held:
            self._run(*self._held.pop(0))


def peak_bytes(group: Group, form: Form, name: str) -> int:
    """Return the peak bytes of two training steps."""
    executor.Sums = SlowSums  # type: ignore[misc]  # of this process
    plan, _ = planned(form)
    part = distribute(net(), plan, group, EXAMPLE)
    here = box(part.input_layouts(BATCH)[0], group.device, (BATCH, *EXAMPLE.shape[1:]))
    assert here is not None
    x = torch.randn(tuple(stop - start for start, stop in here))
    made = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]
    optimizer = made(part.parameters(), lr=1e-3)

    def step() -> None:
        gc.collect()
        loss = F.cross_entropy(part(x, batch=BATCH), torch.arange(BATCH) % 10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return peak_of(step, part, optimizer, x)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("form", "optimizer"),
    [
        ("keep", "sgd"),
        ("free", "adam"),
        pytest.param("keep", "adam", marks=SLOW),
        pytest.param("free", "sgd", marks=SLOW),
    ],
)
def test_peak_memory_with_sharded_weights_matches_prediction(form: Form, optimizer: str) -> None:
    plan, graph = planned(form)
    predicted = [each.total_bytes for each in memory_of(lower(plan, graph), graph, optimizer=optimizer)]
    found = on_processes(2, f"{__name__}:peak_bytes", form, optimizer)
    print(form, optimizer, [f"{a / 1e6:.1f} MB, {b / a - 1:+.1%}" for a, b in zip(found, predicted, strict=True)])
    for measured, expected in zip(found, predicted, strict=True):
        assert expected == pytest.approx(measured, rel=TOLERANCE)
