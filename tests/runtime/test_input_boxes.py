"""Inputs of which each device gets a box: outputs, and gradients of inputs, are those of one device."""

import copy

import pytest
import torch
from torch import Tensor, nn

from convoy.comm.group import Group
from convoy.layout.layout import box
from convoy.plan.strategy import Spatial
from convoy.runtime.module import Distributed
from tests.parity.test_spatial import spatial
from tests.support.nets import UNet
from tests.support.threads import run_on_threads
from tests.support.torch_seed import torch_seed

TILES = Spatial((3, 1, 2))
with torch_seed(1):
    NET = UNet(2).double()


@pytest.mark.parametrize("strategy", [TILES, Spatial((3, 0, 1, 2)), Spatial((3, 1, 2, 2), (0, 2), (2, 2))])
def test_box_cut_by_hand_gets_the_gradient_of_the_box(strategy: Spatial) -> None:
    x = torch.randn(2, 3, 24, 24, dtype=torch.float64)
    plain, whole = copy.deepcopy(NET), x.clone().requires_grad_()
    expected = plain(whole)
    expected.square().mean().backward()
    assert whole.grad is not None

    def work(group: Group) -> None:
        part = Distributed(NET, spatial(NET, x, len(strategy.shares), strategy), group, x)
        here = box(part.input_layouts(2)[0], group.device, tuple(x.shape)) or ((0, 0),)
        spans = tuple(slice(*span) for span in here)
        own = x[spans].clone().requires_grad_()
        y = part(own, batch=2)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-10)
        y.square().mean().backward()
        torch.testing.assert_close(own.grad, whole.grad[spans], rtol=0, atol=1e-10)

    run_on_threads(len(strategy.shares), work)


def test_layer_that_follows_its_input_gets_tiles_without_overlap() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3, padding=1)).double()
    x = torch.randn(2, 3, 9, 7, dtype=torch.float64)
    plan = spatial(model, x, 3, TILES)

    def work(group: Group) -> Tensor:
        part = Distributed(model, plan, group, x)
        layout = part.input_layouts(2)[0]
        assert layout == TILES.tiles(tuple(x.shape))
        return part(x, whole=True).detach()

    for y in run_on_threads(3, work):
        torch.testing.assert_close(y, copy.deepcopy(model)(x), rtol=0, atol=1e-10)
