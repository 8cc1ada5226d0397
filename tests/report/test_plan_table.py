"""What `convoy plan` says of layers that are kept whole: the seconds that they cost, and on which device."""

import io
import re
from dataclasses import dataclass

import pytest
import torch
from rich.console import Console

from convoy.cost.costs import Costs
from convoy.cost.network import network_of
from convoy.fleet import Card, Device, Fleet, Host
from convoy.model.graph import Layer
from convoy.model.tracing import trace
from convoy.plan.plan import Plan
from convoy.plan.size import LocalSize, whole_size
from convoy.plan.steps import Part, Phase
from convoy.plan.strategy import Batch
from convoy.planner.predict import PlanningContext, predict_plan
from convoy.report.plans import show_plan
from tests.support import nets

SAMPLE_S = (0.25, 2.0)
"""Of each device: the forward of a sample in a layer that is kept whole. Backward takes three times as long."""


@dataclass(frozen=True)
class Table:
    """Every other layer takes next to nothing."""

    def seconds(self, device: int, layer: Layer, phase: Phase, size: LocalSize, part: Part = "all") -> float:
        times = (1.0 if phase == "forward" else 3.0) * (1.0 if part == "all" else 0.5)
        return SAMPLE_S[device] * size.samples * times * (1.0 if layer.kind == "opaque" else 1e-6)

    def alike(self, device: int) -> int:
        return device

    def least_s(self, device: int, layer: Layer, phase: Phase, batch: int, shared: bool = False) -> float:  # noqa: ARG002
        return self.seconds(device, layer, phase, whole_size(layer, batch))


@pytest.mark.parametrize(
    ("net", "shares", "seconds", "device"),
    [
        ("opaque-per-sample", (6, 2), 16, "slow"),  # 2 x (2 + 6), where the other takes 6 x (0.25 + 0.75)
        ("opaque-per-sample", (7, 1), 8, "slow"),  # 1 x (2 + 6) and 7 x (0.25 + 0.75)
        ("opaque-per-sample", (8, 0), 8, "quick"),
        ("dependent-samples", (6, 2), 8, "quick"),  # all 8 samples on one device: that with the most
    ],
)
def test_what_is_kept_whole_is_told_with_its_seconds_and_its_device(
    net: str, shares: tuple[int, ...], seconds: float, device: str
) -> None:
    devices = (Device("quick", "a", "cpu"), Device("slow", "b", "cpu"))
    fleet = Fleet((Host("a"), Host("b")), devices, Card(1e9, 1e9, 1e-6))
    graph = trace(nets.build(net), torch.zeros(2, 3, 8, 8, dtype=torch.float64)).graph
    context = PlanningContext.of(graph, 8, Costs(Table(), network_of(fleet)), fleet)
    row = predict_plan(Plan("hand", graph.fingerprint, 2, 8, {}, Batch(shares)), context)
    console = Console(file=io.StringIO(), width=300)
    show_plan(console, row, context)
    told = re.findall(r"^\* .*?([\d.]+) s of a step's ([\d.]+) s on (\w+)$", console.file.getvalue(), re.MULTILINE)
    assert told == [(f"{seconds:.3g}", f"{row.step_s:.3g}", device)]
    assert row.step_s == pytest.approx(seconds, rel=0.01)
