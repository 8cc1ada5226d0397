"""Images whose activations fit on no device: `auto` splits them, and the net trains as on one device without a limit."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from convoy.errors import PlanError
from convoy.model.graph import Graph
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import PLANS
from convoy.plan.strategy import Spatial
from convoy.planner.planner import candidates
from convoy.planner.request import PlanRequest
from convoy.simulate.memory import memory_of
from studies.roofline import roofline_costs
from tests.support.described_fleets import asked, fleet
from tests.support.slow import most_slow
from tests.support.spatial_nets import PerPixel, UNet, difference

NETS = {
    "images": (UNet(2, 4).double(), (1, 1, 128, 128)),
    "volumes": (UNet(3, 2).double(), (1, 1, 32, 32, 32)),
    "pixels": (nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), PerPixel(8), nn.Conv2d(8, 1, 1)).double(), (1, 1, 96, 96)),
}
"""By name: a net, and the shape of a batch of one image."""


def request(of: str, limits_mb: tuple[float, ...]) -> PlanRequest:
    """Return the request for a plan of devices of 4, 3 and 2 units of speed with these limits."""
    net, shape = NETS[of]
    devices = fleet(*((rate, int(mb * 1e6)) for rate, mb in zip((4e10, 3e10, 2e10), limits_mb, strict=True)))
    costs = replace(roofline_costs(devices), itemsize=8)
    return asked(trace(net, torch.zeros(shape, dtype=torch.float64)).graph, 1, costs, devices, optimizer="sgd-momentum")


def needs(plan: Plan, graph: Graph) -> list[int]:
    return [each.total_bytes for each in memory_of(lower(plan, graph), graph, itemsize=8)]


@pytest.mark.parametrize(
    ("of", "limits_mb"),
    most_slow(
        2,
        [
            ("images", (2.9, 3.5, 5.0)),
            ("pixels", (3.1, 3.1, 3.1)),
            ("images", (5.0, 5.0, 5.0)),
            ("volumes", (4.5, 4.5, 4.5)),
        ],
    ),
)
def test_image_that_fits_on_no_device_is_split_and_trains_exactly(of: str, limits_mb: tuple[float, ...]) -> None:
    asks, (net, shape) = request(of, limits_mb), NETS[of]
    plan = candidates(asks)[0].plan
    assert all(isinstance(plan.layers[asks.graph.weighted[end].name], Spatial) for end in (0, -1))
    assert all(need <= limit * 1e6 for need, limit in zip(needs(plan, asks.graph), limits_mb, strict=True))
    others = [needs(asks.named(name), asks.graph) for name in PLANS if name != "spatial"]
    assert all(any(need > mb * 1e6 for need, mb in zip(row, limits_mb, strict=True)) for row in others)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert difference(net, plan, [x, x]) < 1e-10


def test_image_too_large_for_the_fleet_is_refused_with_the_missing_bytes() -> None:
    with pytest.raises(PlanError, match=r"d\d needs [\d.]+ MB of 1 MB, [\d.]+ MB too much.*add a device"):
        candidates(request("images", (1.0, 1.0, 1.0)))
