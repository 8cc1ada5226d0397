"""Batches folded with another axis (frames, patches, views), with batch norm between: split, with the numbers of one device."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from convoy.model.tracing import trace
from tests.support.beside_one import difference
from tests.support.one_device import EXACT
from tests.support.slow import each_value

FRAMES = (4, 3, 8, 8)
PLANS = [("data-by-speed", (3.0, 2.0, 1.0)), ("hybrid", (3.0, 2.0, 1.0)), ("data-by-speed", (3.0, 0.0, 1.0))]


class Net(nn.Module):
    """A residual block of images between two reshapes."""

    def __init__(self, fold: Callable[[Tensor], Tensor], unfold: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.fold, self.unfold = fold, unfold
        self.stem, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv, self.last = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6, momentum=None, affine=False)
        self.head = nn.Linear(6, 5)

    def block(self, x: Tensor) -> Tensor:
        return F.relu(x + self.last(self.conv(F.relu(self.norm(x), inplace=True))))

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(self.stem(self.fold(x))).mean((2, 3))
        return self.head(self.unfold(y, x))


def frames() -> nn.Module:
    return Net(lambda x: x.flatten(0, 1), lambda y, x: y.view(x.shape[0], x.shape[1], -1).max(1).values)


def patches() -> nn.Module:
    def fold(x: Tensor) -> Tensor:
        return x[:, 0].unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, 4, 4)

    return Net(fold, lambda y, x: y.unflatten(0, (x.shape[0], -1)).sum(1))


class Recomputed(Net):
    def block(self, x: Tensor) -> Tensor:
        return checkpoint(super().block, x, use_reentrant=False)  # type: ignore[no-any-return]


def recomputed() -> nn.Module:
    return Recomputed(lambda x: x.flatten(0, 1), lambda y, x: y.view(*x.shape[:2], -1).mean(1))


def time_first() -> nn.Module:
    return Net(lambda x: x.transpose(0, 1).flatten(0, 1), lambda y, x: y.view(x.shape[1], x.shape[0], -1).mean(0))


def two_views() -> nn.Module:
    return Net(lambda x: torch.cat([x[:, 0], x[:, 1].flip(3)]), lambda y, _x: y.chunk(2)[0] * y.chunk(2)[1])


@pytest.mark.parametrize(("net", "how"), each_value([frames, patches, recomputed, time_first, two_views], PLANS))
def test_folded_batches_train_as_on_one_device(
    net: Callable[[], nn.Module], how: tuple[str, tuple[float, ...]]
) -> None:
    torch.manual_seed(0)
    assert difference(net(), FRAMES, plan=how[0], speeds=how[1], sizes=(6, 2, 5)) < EXACT


@pytest.mark.parametrize("net", [frames, patches])
def test_folded_batches_are_split_by_samples(net: Callable[[], nn.Module]) -> None:
    layers = trace(net(), torch.zeros(2, *FRAMES)).graph.layers
    assert all(layer.per_sample for layer in layers.values())
    assert layers["norm"].kind == layers["last"].kind == "batch_norm"


def test_the_order_of_frames_first_costs_only_the_reshapes() -> None:
    graph = trace(time_first(), torch.zeros(2, *FRAMES)).graph
    assert {name for name, layer in graph.layers.items() if not layer.per_sample} == {"transpose", "view"}
