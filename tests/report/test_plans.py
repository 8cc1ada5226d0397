"""The output of `convoy plan` and `convoy predict`: idle devices, unsplit layers, baselines."""

import io
import re
from dataclasses import dataclass

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from convoy.cli import plan_verbs
from convoy.fleet import Device, Fleet, Host, Nic
from convoy.model.graph import Graph, Layer
from convoy.model.nets import graph_of
from convoy.model.tracing import trace
from convoy.plan.device_program import LocalSize
from convoy.plan.plan import Plan
from convoy.plan.steps import Part, Phase
from convoy.plan.strategy import Batch
from convoy.planner.prediction import predict_plan
from convoy.planner.request import PlanRequest
from convoy.report.plans import show_all
from convoy.simulate.costs import Costs
from convoy.simulate.network import network_of
from studies.roofline import roofline_costs
from tests.support import nets
from tests.support.described_fleets import asked


def two_devices() -> tuple[Graph, PlanRequest]:
    graph = graph_of("two-conv:50:500")
    rates = enumerate((9e9, 3e9))
    devices = (Device(f"d{i}", f"h{i}", "cpu", peak_flop_per_s=rate, memory_bytes_per_s=rate) for i, rate in rates)
    fleet = Fleet((Host("h0"), Host("h1")), tuple(devices), Nic(1e9, 1e9, 1e-4))
    return graph, asked(graph, 16, roofline_costs(fleet), fleet)


SAMPLE_S = (0.25, 2.0)
"""Forward seconds of a sample in a layer that is not split, by device. Backward takes three times as long."""


@dataclass(frozen=True)
class Table:
    """A table in which every other layer takes almost no time."""

    def seconds(self, device: int, layer: Layer, phase: Phase, size: LocalSize, part: Part = "all") -> float:
        times = (1.0 if phase == "forward" else 3.0) * (1.0 if part == "all" else 0.5)
        return SAMPLE_S[device] * size.samples * times * (1.0 if layer.kind == "opaque" else 1e-6)

    def alike(self, device: int) -> int:
        return device


class Centred(nn.Module):
    """A layer that mixes samples, so that one device computes it."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


@pytest.mark.parametrize(
    ("net", "shares", "seconds", "device"),
    [
        ("opaque-per-sample", (6, 2), 16, "slow"),  # 2 x (2 + 6), where the other takes 6 x (0.25 + 0.75)
        ("opaque-per-sample", (7, 1), 8, "slow"),  # 1 x (2 + 6) and 7 x (0.25 + 0.75)
        ("centred", (6, 2), 8, "quick"),  # all 8 samples on one device: that with the most
    ],
)
def test_a_layer_that_is_not_split_is_listed_with_its_seconds_and_device(
    net: str, shares: tuple[int, ...], seconds: float, device: str
) -> None:
    devices = (Device("quick", "a", "cpu"), Device("slow", "b", "cpu"))
    fleet = Fleet((Host("a"), Host("b")), devices, Nic(1e9, 1e9, 1e-6))
    model = nn.Sequential(nn.Conv2d(3, 3, 1), Centred()).double() if net == "centred" else nets.build(net)
    graph = trace(model, torch.zeros(2, 3, 8, 8, dtype=torch.float64)).graph
    context = asked(graph, 8, Costs(Table(), network_of(fleet)), fleet)
    row = predict_plan(Plan("hand", graph.fingerprint, 2, 8, {}, Batch(shares)), context)
    console = Console(file=io.StringIO(), width=300)
    show_all(console, [row], context)
    told = re.findall(r"^\* .*?([\d.]+) s of a step's ([\d.]+) s on (\w+)$", console.file.getvalue(), re.MULTILINE)
    assert told == [(f"{seconds:.3g}", f"{row.step_s:.3g}", device)]
    assert row.step_s == pytest.approx(seconds, rel=0.01)


def test_idle_device_is_busy_with_messages_only() -> None:
    """Regression: it was said to compute 10.7 % of a step."""
    graph, context = two_devices()
    row = predict_plan(Plan("hand", graph.fingerprint, 2, 16, {}, Batch((16, 0))), context)
    console = Console(file=io.StringIO(), width=200)
    show_all(console, [row], context)
    cells = [re.findall(r"[^\s│]+", each) for each in console.file.getvalue().splitlines()]
    assert [line[1] for line in cells if line[:1] in (["d0"], ["d1"])] == ["100.0%", "none"]


def test_further_device_gain_names_its_baseline() -> None:
    """Regression: "without d1: 0.96x" did not name the baseline."""
    _, context = two_devices()
    speeds = context.speeds.devices
    console = Console(file=io.StringIO(), width=200)
    first, second = sorted(range(2), key=lambda device: -speeds[device])
    row = predict_plan(context.named("data"), context)
    show_all(console, [row], context, [(1, speeds[first]), (2, 1.5 * speeds[first])])
    names = context.names
    expected = f"Adding {names[second]}: from 1.00x to 1.50x the throughput of {names[first]} alone.\n"
    assert expected in console.file.getvalue()


def test_a_no_describes_the_best_plan_with_several_devices(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: for a No it printed the parts of a one-device step."""
    monkeypatch.setenv("COLUMNS", "200")
    plan_verbs.predict("resnet:8:16", "laptop-cpu,rtx3060,rtx3090", image="3,32,32", classes=10, batch=256)
    out = capsys.readouterr().out
    assert "Would it pay? No: rtx3090 alone is the fastest" in out
    assert re.search(r"^Best plan with several devices \(convolutions and linear layers\): \d+ ", out, re.M)
