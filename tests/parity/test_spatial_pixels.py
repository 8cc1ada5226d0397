"""Images in tiles: layers that compute each pixel by itself, and those that read along split axes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from convoy.layout.layout import Split, Tiles
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.placing import placements
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.strategy import Spatial
from tests.support.spatial_nets import PerPixel, PixelGate, difference, spatial


def pixels() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), PerPixel(4), PerPixel(4, tokens=True), PixelGate())


def test_layers_of_single_pixels_stay_in_tiles() -> None:
    graph = trace(pixels(), torch.zeros(1, 3, 9, 7)).graph
    placed = placements(named_plan("spatial", graph, 1, Speeds((3.0, 2.0, 1.0))), graph)
    assert [n for n, p in placed.items() if not isinstance(p.gives, Tiles) and graph[n].kind not in _UNSPLIT] == []


_UNSPLIT = ("input", "parameter")  # kinds of layers


class ChannelsLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(1, -1)


def test_outputs_whose_rows_are_their_second_axis_stay_by_samples() -> None:
    graph = trace(net := nn.Sequential(nn.Conv2d(3, 4, 3), ChannelsLast()), torch.zeros(2, 3, 9, 7)).graph
    plan = spatial(net, torch.zeros(2, 3, 9, 7), 2, Spatial((1, 1)))
    assert isinstance(placements(plan, graph)["movedim"].gives, Tiles)
    assert lower(replace(plan, outputs="where-computed"), graph).outputs[0].layout == Split(0, (1, 1))


@pytest.mark.parametrize("layer", [nn.Linear(7, 5), nn.LayerNorm((4, 9, 7)), nn.BatchNorm2d(9)])
def test_layers_that_read_along_split_axes_give_the_numbers_of_one_device(layer: nn.Module) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), ChannelsLast() if isinstance(layer, nn.BatchNorm2d) else nn.ReLU(), layer
    )
    x = torch.randn(2, 3, 9, 7, dtype=torch.float64)
    assert difference(net.double(), spatial(net, x, 4, Spatial((5, 1, 2, 2), (2, 3), (2, 2))), [x, x]) < 1e-10
