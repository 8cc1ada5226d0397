"""The cost of a live forward: what it computes outside of the split submodules is measured, predicted and reported."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from convoy.comm.group import AloneGroup
from convoy.measure.layer_timer import LayerTimer
from convoy.measure.measure_job import MeasureOptions, measure_job
from convoy.measure.overhead_probe import measure_live
from convoy.measure.planning import _choice
from convoy.measure.timing import RoundTimer
from convoy.model.tracing import trace
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.planner import candidates
from convoy.planner.prediction import predict_plan
from convoy.planner.request import PlanRequest
from convoy.runtime.clock import Clock
from convoy.simulate.costs import Overheads
from convoy.simulate.table import Measurement
from tests.support.described_fleets import measured_fleet

CPU = torch.device("cpu")
BATCH = 8


class Live(nn.Module):
    """A model that counts its calls, with products before and after the submodule that can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Parameter(torch.eye(6)), nn.Parameter(torch.ones(144, 10))
        self.backbone = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 4, 3, padding=1))
        self.calls = 0

    def forward(self, x: Any) -> Tensor:
        self.calls += 1
        x = torch.stack([*x]) @ (self.before @ self.before)
        return self.backbone(x).flatten(1) @ self.after


def request(live_s_per_sample: tuple[float, ...], live_bytes: int = 0) -> PlanRequest:
    """Return a request for devices of equal FLOP/s that differ in the live forward, with links of 1e9 bytes/s."""
    graph = trace(Live(), torch.zeros(2, 3, 6, 6)).graph
    measured = measured_fleet(graph, [1e7] * len(live_s_per_sample), BATCH)
    rows = zip(measured.device, live_s_per_sample, strict=True)
    measured = replace(
        measured, device=tuple(replace(row, live_s_per_sample=s, live_bytes=live_bytes) for row, s in rows)
    )
    return PlanRequest(graph, BATCH, FleetKnowledge(measured=Measurement.from_toml(measured.to_toml())))


@pytest.mark.parametrize("kind", [torch.stack, list])
def test_only_the_rest_of_the_forward_is_timed(kind: Any) -> None:
    """The clock counts FLOP, by hand: 18 rows times 6 x 6 before the submodule, 144 x 10 after it, 2 FLOP each.

    The first product has the gradient of its weights only, the second one also that of its input. The product of
    weights is the same for any number of samples: an eighth for each, if the example is repeated to the batch.
    """
    model, example = Live(), kind([torch.randn(3, 6, 6), torch.randn(3, 6, 6)])
    traced = trace(model, (example,))
    with FlopCounterMode(display=False) as counter:
        timer = RoundTimer(Clock(CPU), lambda: float(counter.get_total_flops()))
        found = measure_live(Overheads(), LayerTimer(traced, model, BATCH, timer))
    assert found.live_s_per_sample == 2 * (18 * 6 * 6) * 2 + 2 * (144 * 10) * 3 + 2 * (6 * 6 * 6) * 3 / BATCH
    assert found.live_bytes == 4 * (6 * 6 + 144 * 10)
    assert model.calls == 0
    assert torch.equal(model.before, torch.eye(6))


def test_a_measurement_has_the_live_forward() -> None:
    for model, is_live in ((Live(), True), (Live().backbone, False)):
        traced = trace(model, torch.zeros(2, 3, 6, 6))
        found = measure_job(AloneGroup(CPU), traced, model, 4, MeasureOptions("net", budget_s=0.2, slice_s=1e-4))
        assert (found.device[0].live_s_per_sample > 0) is is_live


def test_the_slowest_live_forward_adds_to_a_step() -> None:
    """Both devices have the same layers, so the step waits for the slower one between forward and backward."""
    plain, live = request((0.0, 0.0)), request((1.0, 3.0))
    plan = plain.named("data")
    assert predict_plan(plan, live).step_s == pytest.approx(predict_plan(plan, plain).step_s + 3.0 * BATCH)
    assert [live.alone_s(d) - plain.alone_s(d) for d in (0, 1)] == pytest.approx([1.0 * BATCH, 3.0 * BATCH])
    added_s = [candidates(each, simulated=False)[0].step_s for each in (live, plain)]
    assert added_s[0] - added_s[1] == pytest.approx(3.0 * BATCH)


def test_device_0_sends_the_gradients_outside_of_layers_to_all_others() -> None:
    """Two receivers share its 1e9 bytes/s."""
    plain, live = request((1.0, 3.0, 1.0)), request((1.0, 3.0, 1.0), live_bytes=5 * 10**9)
    plan = plain.named("data")
    assert predict_plan(plan, live).step_s == pytest.approx(predict_plan(plan, plain).step_s + 10.0)
    assert live.alone_s(0) == plain.alone_s(0)


@pytest.mark.parametrize(
    ("live_s", "choice"),
    [((0.01, 0.01), "layers with weights: "), ((0.01, 3.0), "one device is faster than several")],
)
def test_auto_reports_that_a_slow_live_forward_makes_one_device_faster(
    live_s: tuple[float, float], choice: str
) -> None:
    asked = request(live_s)
    head, arithmetic, predicted = _choice(asked, False)["lines"]
    assert head.startswith(f"plan auto: {choice}")
    assert f"; the rest of the forward on each device: up to {max(live_s) * BATCH:.2g} of " in arithmetic
    assert "device 0 alone: " in predicted
    rate, solo = (float(text.split()[0]) for text in (predicted.removeprefix("predicted: "), predicted.split(": ")[-1]))
    assert rate < 1 / max(live_s)
    assert (rate < solo) is (live_s[1] > 1)


def test_a_plain_model_has_no_live_forward_in_the_lines() -> None:
    assert "forward" not in " ".join(_choice(request((0.0, 0.0)), False)["lines"])
