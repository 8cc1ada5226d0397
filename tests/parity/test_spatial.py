"""Images split along rows, columns and slices: the numbers of one device, for every layer that reads windows."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from convoy.comm.group import Group
from convoy.errors import PlanError
from convoy.layout.layout import Tiles, Windows
from convoy.model.tracing import trace
from convoy.plan import placing
from convoy.plan.compile import compile_all
from convoy.plan.device_program import Make
from convoy.plan.lower import lower
from convoy.plan.placing import pin, placements
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.steps import Move
from convoy.plan.strategy import Batch, Spatial
from convoy.runtime.kernels import tile_arithmetic
from convoy.runtime.module import Distributed
from tests.support.slow import each_value, most_slow
from tests.support.spatial_nets import Excitation, Joined, PerPixel, PixelGate, difference, random_difference, spatial
from tests.support.threads import run_on_threads


def bottleneck() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, 3, 1, 1)
    )


CASES = {
    "kernel 3, stride 2, padding 1": (nn.Conv2d(3, 4, 3, 2, 1), (9, 7)),
    "even kernel, 'same' padding": (nn.Conv2d(3, 4, 4, padding="same"), (9, 7)),
    "dilation and groups": (nn.Conv2d(4, 6, 3, 1, 2, 2, 2), (9, 7)),
    "reflected padding": (nn.Conv2d(3, 4, 5, 1, 2, padding_mode="reflect"), (9, 7)),
    "replicated padding": (nn.Conv2d(3, 4, 3, 2, 3, padding_mode="replicate"), (9, 7)),
    "circular padding": (nn.Conv2d(3, 4, 3, 1, 1, padding_mode="circular"), (9, 7)),
    "kernel larger than a part": (nn.Conv2d(3, 4, 9, 1, 4), (9, 7)),
    "max pooling in ceil mode": (nn.MaxPool2d(3, 2, 1, ceil_mode=True), (10, 8)),
    "average that counts its padding": (nn.AvgPool2d(3, 2, 1, ceil_mode=True), (10, 8)),
    "average that does not": (nn.AvgPool2d(3, 2, 1, count_include_pad=False), (10, 8)),
    "transposed, odd kernel": (nn.ConvTranspose2d(3, 4, 5, 3, 1, 2), (6, 5)),
    "bilinear resize": (nn.Upsample(scale_factor=2.5, mode="bilinear"), (6, 5)),
    "bilinear resize with aligned corners": (nn.Upsample((11, 4), mode="bilinear", align_corners=True), (6, 5)),
    "nearest resize": (nn.Upsample(scale_factor=1.7), (6, 5)),
    "nearest resize by a factor that is not the inverse of its inverse": (nn.Upsample(scale_factor=0.9), (30, 3)),
    "batch norm, pooling": (bottleneck(), (17, 12)),
    "group norm": (nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3)), (9, 7)),
    "instance norm": (nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), nn.InstanceNorm2d(4, affine=True)), (9, 7)),
    "layer norm and Linears of pixels": (nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), PerPixel(4), nn.Conv2d(4, 3, 3)), (9, 7)),
    "layer norm and Linears of tokens": (nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), PerPixel(4, True)), (9, 7)),
    "mean and maximum over channels": (nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), PixelGate()), (9, 7)),
    "means over images and cells": (nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), Excitation(2, 4, 4)), (9, 7)),
    "adaptive pooling": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d((5, 3)), nn.Conv2d(4, 3, 1)), (9, 7)),
    "pixel shuffle": (nn.Sequential(nn.Conv2d(3, 12, 1), nn.PixelShuffle(2), nn.PReLU(3), nn.Conv2d(3, 3, 3)), (5, 4)),
    "pixel unshuffle": (nn.Sequential(nn.PixelUnshuffle(3), nn.PReLU()), (12, 9)),
    "zero padding and cropping": (nn.ZeroPad2d((2, -1, -1, 4)), (9, 7)),
    "reflection padding": (nn.Sequential(nn.ReflectionPad2d(3), nn.Conv2d(3, 4, 3)), (9, 7)),
    "replication padding": (nn.ReplicationPad2d((0, 2, 6, 1)), (9, 7)),
    "circular padding layer": (nn.CircularPad2d((2, 1, 3, 0)), (9, 7)),
    "one dimension": (nn.Sequential(nn.Conv1d(3, 4, 5, 2, 2), nn.BatchNorm1d(4), nn.MaxPool1d(2)), (23,)),
    "volumes": (nn.Sequential(nn.Conv3d(3, 4, 3, 1, 1), nn.BatchNorm3d(4), nn.AvgPool3d(2)), (8, 5, 6)),
    "volumes, transposed": (nn.Sequential(nn.Conv3d(3, 4, 2, 2), nn.ConvTranspose3d(4, 2, 2, 2)), (8, 5, 6)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "strategy"), each_value([*CASES], [Spatial((3, 0, 1, 2)), Spatial((3, 1, 2, 2), (0, 2), (2, 2))])
)
def test_layer_on_tiles_gives_the_numbers_of_one_device(case: str, strategy: Spatial) -> None:
    layer, shape = CASES[case]
    torch.manual_seed(1)
    channels = next((p.shape[1] for p in layer.parameters() if p.dim() > 1), 3)
    channels = 4 if case == "dilation and groups" else 3 if case.startswith("transposed") else channels
    x = torch.randn(2, channels, *shape, dtype=torch.float64)
    net = nn.Sequential(nn.Conv2d(channels, channels, 1) if len(shape) == 2 else nn.Identity(), layer).double()
    assert difference(net, spatial(net, x, 4, strategy), [x, x]) < 1e-10


@pytest.mark.parametrize("axes", [(2, 3), (3, 2), (0, 3)])
def test_grid_of_tiles_gives_the_numbers_of_one_device(axes: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    net, x = bottleneck().double(), torch.randn(2, 3, 17, 12, dtype=torch.float64)
    assert difference(net, spatial(net, x, 4, Spatial((5, 1, 2, 2), axes, (2, 2))), [x, x[:1], x]) < 1e-10


@pytest.mark.parametrize("seed", most_slow(6, range(212)))
def test_random_net_with_random_cuts_gives_the_numbers_of_one_device(seed: int) -> None:
    """`python -m tests.support.spatial_nets FIRST COUNT` runs more of them."""
    assert random_difference(seed) < 1e-10


@pytest.mark.parametrize("seed", most_slow(12, range(100)))
def test_computed_borders_of_any_width_give_the_numbers_of_one_device(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "MOST_BORDER", math.inf)
    assert random_difference(seed) < 1e-10


def double() -> nn.Module:
    """Return two convolutions with an activation between them, behind one that two layers read."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 1), Joined(nn.Sequential(nn.Conv2d(4, 4, 3, 1, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, 1, 1)), True)
    )


@pytest.mark.parametrize(
    ("rows", "exchanges", "read"),
    [(48, 1, ((0, 26), (22, 38), (34, 48))), (12, 2, ((0, 7), (5, 10), (8, 12)))],
    ids=["wide tiles", "narrow tiles"],
)
def test_narrow_borders_are_computed_instead_of_exchanged(
    rows: int, exchanges: int, read: tuple[tuple[int, int], ...]
) -> None:
    net, x = double().double(), torch.randn(1, 3, rows, 8, dtype=torch.float64)
    plan = spatial(net, x, 3, Spatial((2, 1, 1)))
    moves = [s for s in lower(plan, trace(net, x).graph).phase("forward") if isinstance(s, Move)][:-1]
    assert len(moves) == exchanges
    windows = moves[0].writes.layout
    assert isinstance(windows, Windows)
    assert tuple(b and b[2] for b in windows.boxes) == read
    assert difference(net, plan, [x, x]) < 1e-10


def test_border_is_exchanged_where_computing_it_saves_no_exchange() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(4, 4, 3, 1, 1)
    )
    x = torch.zeros(1, 3, 64, 8)
    placed = placements(spatial(net, x, 2, Spatial((1, 1))), trace(net, x).graph)
    assert [isinstance(placed[name].gives, Tiles) for name in placed] == [False, *[True] * 5]


def test_activation_is_not_kept_a_second_time_with_its_border() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, 1, 1), nn.BatchNorm2d(4))
    x = torch.zeros(1, 3, 64, 8)
    placed = placements(spatial(net, x, 2, Spatial((1, 1))), trace(net, x).graph)
    assert [name for name in placed if isinstance(placed[name].gives, Windows)] == ["2"]


class OneGradient(nn.Module):
    """Adds values that are exchanged with borders, and whose gradients are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(3))
        self.conv, self.last = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = (norm(x * (i + 1)) for i, norm in enumerate(self.norms))
        y: Tensor = self.last(self.conv(a) + b.relu() + c.relu())
        return y


def test_border_gradients_are_added_in_place_unless_another_tensor_shares_the_memory() -> None:
    """Otherwise backward needs a copy of the tile."""
    x = torch.randn(2, 3, 16, 8, dtype=torch.float64)

    def copied(net: nn.Module) -> int:
        graph = trace(net, x).graph
        (program, _) = compile_all(lower(spatial(net, x, 2, Spatial((1, 1))), graph), graph)
        return sum(isinstance(op, Make) and op.zeros for op in program.backward)

    first = nn.Conv2d(3, 3, 1).double()
    assert copied(nn.Sequential(first, nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3, padding=1)).double()) == 0
    net = nn.Sequential(first, OneGradient()).double()
    assert copied(net) == 2
    assert difference(net, spatial(net, x, 2, Spatial((1, 1))), [x, x]) < 1e-10


def test_border_follows_only_the_strategy_of_its_own_layer() -> None:
    net, x = nn.Sequential(*(nn.Conv2d(3, 3, 3, 1, 1) for _ in range(3))), torch.zeros(1, 3, 48, 48)
    plan = spatial(net, x, 2, Spatial((1, 1)))
    plan = replace(plan, layers={**plan.layers, "2": Spatial((1, 1), (3,))})
    assert isinstance(placements(plan, trace(net, x).graph)["1"].gives, Tiles)


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(4), nn.Dropout()])
def test_box_of_an_input_is_the_same_in_training_and_evaluation(layer: nn.Module) -> None:
    """A batch that was loaded in one mode is used in the other; the layer has a border in evaluation only."""
    net = nn.Sequential(nn.Conv2d(3, 4, 1), layer, nn.ReLU(), nn.Conv2d(4, 4, 3, 2))
    x = torch.zeros(1, 3, 32, 8)
    plan = spatial(net, x, 2, Spatial((17, 15)))
    traced = trace(net, x)
    evaluated = trace(net.eval(), x)
    found = [placements(pin(plan, traced.graph, each.graph), each.graph) for each in (traced, evaluated)]
    assert found[0][traced.graph.inputs[0].name].gives == found[1][evaluated.graph.inputs[0].name].gives


def test_group_norm_counts_devices_without_a_part_of_a_smaller_batch() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 3)).double()
    x = torch.randn(2, 3, 6, 5, dtype=torch.float64)
    assert difference(net, spatial(net, x, 2, Spatial((1, 1), (0,))), [x, x[:1], x]) < 1e-10


def test_images_that_shrink_to_nothing_stay_empty() -> None:
    assert math.isnan(random_difference(20743))  # the mean of no entries, as in plain PyTorch


@pytest.mark.parametrize("between", [nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.Dropout()])
def test_statistics_and_random_numbers_are_not_of_borders(between: nn.Module) -> None:
    net, x = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), between, nn.Conv2d(4, 4, 3, 1, 1)), torch.zeros(1, 3, 48, 8)
    placed = placements(spatial(net, x, 3, Spatial((2, 1, 1))), trace(net, x).graph)
    assert isinstance(placed["1"].gives, Tiles)


def test_value_changed_after_a_padded_convolution_read_it_is_refused() -> None:
    net, x = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1)), torch.randn(1, 1, 6, 5)
    box = ((0, 1), (0, 1), (0, 3), (0, 5))
    call = tile_arithmetic(net, trace(net, x), "0", (box, (*box[:2], (0, 4), (0, 5)))).call
    read = (x[:, :, :4].clone().requires_grad_() * 1).contiguous()
    y = call([read], 1)
    read.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


def test_plan_file_keeps_axes_and_grid() -> None:
    net = bottleneck()
    plan = spatial(net, torch.zeros(2, 3, 17, 12), 4, Spatial((5, 1, 2, 2), (2, 3), (2, 2)))
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        (Spatial((1, 1)), "name 2 devices"),
        (Spatial((0, 0, 0)), "are all zero"),
        (Spatial((1, 1, 1), (4,)), r"axes \(4,\): choose from 0 \(the batch\) and 2 to 3"),
        (Spatial((1, 1, 1), (2, 3), (2, 2)), r"a grid \(2, 2\) along the axes \(2, 3\)"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(strategy: Spatial, why: str) -> None:
    plan = spatial(bottleneck(), torch.zeros(2, 3, 17, 12), 3, strategy)
    with pytest.raises(PlanError, match=why):
        plan.check(trace(bottleneck(), torch.zeros(2, 3, 17, 12)).graph)


def test_linear_layer_has_no_tiles() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    graph = trace(net, torch.zeros(2, 3, 2, 2)).graph
    plan = replace(
        named_plan("data", graph, 2, Speeds((1.0, 1.0))), layers={"1": Spatial((1, 1))}, otherwise=Batch((1, 1))
    )
    with pytest.raises(PlanError, match=r"there is no|choose from|only convolutions"):
        plan.check(graph)


class ReturnsInput(nn.Module):
    """Adds the image that it was given to the output, which has its size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.conv(x), x


class ConvolvesRow(nn.Module):
    """Reads a row of an image by a convolution of fewer axes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x[:, :, 0]).unsqueeze(2)


@pytest.mark.parametrize("net", [ReturnsInput, ConvolvesRow])
def test_inputs_that_others_read_differently_are_whole(net: type[nn.Module]) -> None:
    torch.manual_seed(1)
    model, x = net().double(), torch.randn(2, 3, 7, 6, dtype=torch.float64)
    plan = named_plan("spatial", trace(model, x).graph, 2, Speeds((3.0, 2.0)))
    expected = model(x)

    def work(group: Group) -> list[Tensor]:
        found = Distributed(model, plan, group, x)(x, whole=True)
        return [*found] if isinstance(found, tuple) else [found]

    for found in run_on_threads(2, work):
        torch.testing.assert_close(found, [*expected] if isinstance(expected, tuple) else [expected])
