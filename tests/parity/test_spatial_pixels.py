"""Images in tiles: layers that compute each pixel by itself, and those that read along split axes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from convoy.layout.layout import Split, Tiles
from convoy.model.tracing import trace
from convoy.plan.device_program import local_size
from convoy.plan.lower import lower
from convoy.plan.placing import placements
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.steps import ComputeStep, Move, traffic
from convoy.plan.strategy import Spatial
from convoy.plan.text import layer_rows
from convoy.runtime.kernels import tile_arithmetic
from tests.support.spatial_nets import Excitation, PerPixel, PixelGate, difference, spatial


def after_conv(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *layers)


def pixels() -> nn.Module:
    return after_conv(PerPixel(4), PerPixel(4, tokens=True), PixelGate())


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(tuple(range(2, x.dim())))


@pytest.mark.parametrize(
    "layers",
    [
        (nn.AdaptiveAvgPool2d(1),),
        (Mean(),),
        (nn.AdaptiveAvgPool2d((5, 2)), nn.Conv2d(4, 2, 2)),
        (PerPixel(4), Excitation(2, 4, 3)),
    ],
    ids=["pooled output", "mean as output", "cells", "excitation"],
)
def test_averages_of_tiles_are_added(layers: tuple[nn.Module, ...]) -> None:
    torch.manual_seed(1)
    net, x = after_conv(*layers).double(), torch.randn(2, 3, 9, 7, dtype=torch.float64)
    plan = named_plan("spatial", trace(net, x).graph, 2, Speeds((3.0, 2.0, 1.0)))
    assert difference(net, plan, [x, x[:1], x]) < 1e-10


def test_global_pooling_sends_one_number_per_channel() -> None:
    graph = trace(after_conv(nn.AdaptiveAvgPool2d(1)), torch.zeros(1, 3, 90, 70)).graph
    steps = lower(named_plan("spatial", graph, 1, Speeds((3.0, 2.0, 1.0))), graph)
    assert sum(sum(traffic(s, 4).values()) for s in steps.phase("forward") if isinstance(s, Move)) == 4 * 4 * 3 * 2
    (pool,) = (s for s in steps.phase("forward") if isinstance(s, ComputeStep) and s.layer == "1")
    sizes = [local_size(pool, graph["1"], device) for device in range(3)]
    assert sum(size.tile for size in sizes if size is not None) == pytest.approx(1.0)


def test_average_of_half_precision_numbers_does_not_overflow() -> None:
    x = torch.full((1, 1, 300, 300), 2.0, dtype=torch.float16)
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1))
    run = tile_arithmetic(net, trace(net, x), "0", (((0, 1),) * 4, ((0, 1), (0, 1), (0, 300), (0, 300))))
    assert run.call([x], 1).item() == 2.0


def test_plan_table_counts_the_pixels_of_each_device() -> None:
    graph = trace(after_conv(PerPixel(4), nn.AdaptiveAvgPool2d(2)), torch.zeros(1, 3, 9, 7)).graph
    rows = layer_rows(named_plan("spatial", graph, 1, Speeds((3.0, 2.0, 1.0))), graph)
    found = {row.layer: row.parts for row in rows if row.strategy == "spatial"}
    assert found["0"] == found["1.wide"] == found["2"] == ("28", "21", "14")


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
