"""Whether a fleet pays off: the answer, its interval, and what-if questions."""

from dataclasses import replace

import pytest

from convoy.cli.plan_verbs import fleet_on
from convoy.errors import InputError
from convoy.fleet import Device, Fleet, Host, Nic
from convoy.model.graph import Graph
from convoy.model.nets import graph_of
from convoy.plan.device_program import whole_size
from convoy.plan.plan import OutputPlace
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.payoff import Forecast, forecast
from convoy.planner.request import PlanRequest
from convoy.simulate.compute import Roofline
from convoy.simulate.costs import CPU, TF32_GPU, UNKNOWN, described_costs, reached_by

NET = graph_of("two-conv:50:500")


def answer(net: Graph, batch: int, fleet: Fleet, outputs: OutputPlace = "everywhere") -> Forecast:
    return forecast(PlanRequest(net, batch, FleetKnowledge(fleet), outputs=outputs))


def of(on: str, batch: int, link_bytes_per_s: float = 125e6, latency_s: float = 1e-4) -> Forecast:
    return answer(NET, batch, fleet_on(on, link_bytes_per_s, latency_s))


def test_equal_processors_on_a_fast_link_pay():
    found = of("zen5-core,zen5-core", 256, 1.25e9)
    assert found.verdict == "yes"
    assert 1.6 < found.gain <= 2.2
    assert found.best.workers == 2
    assert found.gain_within.low < found.gain < found.gain_within.high
    assert found.best.within.low < found.best.step_s < found.best.within.high
    assert found.from_batch is not None
    assert found.from_batch <= 256
    assert found.from_link is not None
    assert found.from_link <= 1.25e9


def test_local_outputs_pay_where_gathered_ones_do_not():
    """A U-Net's logits of four images, 21 MB, at 1 Gbit/s: sending them costs more than a second device saves."""
    net = graph_of("unet:8", (3, 256, 256), 21)
    fleet = fleet_on("zen5-core,zen5-core", 125e6, 1e-4)
    sent, stays = (answer(net, 4, fleet, outputs=place) for place in ("everywhere", "where-computed"))
    assert stays.best.plan.outputs == "where-computed"
    assert stays.best.workers == 2
    assert stays.best.step_s < sent.best.step_s
    assert stays.from_link is not None
    assert stays.from_link < (sent.from_link or 1e12)
    assert sent.shared is not None
    logits_bytes = 4 * 21 * 256 * 256 * 4
    assert sent.shared.traffic_bytes == stays.best.traffic_bytes + logits_bytes


def test_a_slow_device_far_away_does_not_pay():
    """With a Raspberry Pi next to an H100 at 10 Mbit/s the planner uses the H100 alone and answers no."""
    found = of("h100,raspberry-pi-4", 16, 1.25e6)
    assert (found.verdict, found.best.workers) == ("no", 1)
    assert found.gain < 1
    assert found.gain < found.gain_within.high < 1
    assert found.shared is not None
    assert found.shared.workers > 1
    assert found.request.names[found.fastest] == "h100"


def test_best_plan_may_use_a_subset_of_devices():
    """Regression: a third equal device changed the answer from 0.78 to 0.01 although one device is fastest."""
    graph = graph_of("resnet18:64")
    gains = []
    for on in "rtx3090,rtx3090", "rtx3090,rtx3090,rtx3090":
        found = answer(graph, 16, fleet_on(on, 125e6, 1e-4))
        assert found.best.workers == 1
        gains.append(found.gain)
    assert gains[1] > 0.9 * gains[0]


def test_unknown_device_is_refused_with_a_remedy():
    fleet = Fleet((Host("a"),), (Device("c", "a", "cpu"),))
    with pytest.raises(InputError, match=r"'c' has no speed: set its class .*convoy measure"):
        described_costs(fleet)


def test_interval_is_wider_for_unmeasured_device_classes():
    known, unknown = fleet_on("rtx3090", 1e8, 0.0), fleet_on("apple-m2", 1e8, 0.0)
    assert reached_by(known.devices[0]).spread == TF32_GPU.spread
    laptop = fleet_on("laptop-cpu", 1e8, 0.0)
    assert reached_by(laptop.devices[0]).spread == pytest.approx(CPU.spread**UNKNOWN)
    spreads = [
        described_costs(each).errors.step([0.8]) for each in (fleet_on("zen5-core", 1e8, 0.0), laptop, known, unknown)
    ]
    assert spreads[1] > spreads[0]
    assert spreads[3] > spreads[2]


def test_tensor_cores_apply_to_convolutions_only():
    rate = described_costs(fleet_on("a100", 1e8, 0.0)).times.rates[0]  # type: ignore[attr-defined]
    assert rate.conv_flop_per_s == pytest.approx(156 / 19.49 * rate.flop_per_s)
    conv, linear = (next(layer for layer in NET.weighted if layer.kind == kind) for kind in ("conv", "linear"))
    times = Roofline((replace(rate, bytes_per_s=1e30, call_s=0.0),))
    for layer, flop_per_s in ((conv, rate.conv_flop_per_s), (linear, rate.flop_per_s)):
        assert times.seconds(0, layer, "forward", whole_size(layer, 8)) == pytest.approx(8 * layer.flop / flop_per_s)


def test_fleet_is_read_from_one_line():
    fleet = fleet_on("laptop-cpu, 2x RTX 3060, rtx3090+rtx3090", 125e6, 1e-4)
    assert [device.name for device in fleet.devices] == [
        "core-i7-1165g7", "rtx3060-1", "rtx3060-2", "rtx3090-1", "rtx3090-2"
    ]  # fmt: skip
    assert [device.host for device in fleet.devices] == [f"machine-{n}" for n in (1, 2, 3, 4, 4)]
    assert fleet.network == Nic(125e6, 125e6, 1e-4)


@pytest.mark.parametrize("text", ["", "rtx3060,", "0xrtx3060", "rtx3060+", ",", "999x rtx3060"])
def test_invalid_fleet_line_is_refused(text: str):
    with pytest.raises(InputError, match="--on"):
        fleet_on(text, 125e6, 1e-4)
