"""trace: batch norms whose forward does more than normalise, as timm's do."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.beside_one import difference
from tests.support.one_device import EXACT
from tests.support.traced_models import layers_of


class NormAct(nn.BatchNorm2d):
    """timm's BatchNormAct2d: torch's batch norm by its function, then an activation."""

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__(channels, **options)
        self.act = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
        noted = not self.training or self.track_running_stats
        x = F.batch_norm(
            x, self.running_mean if noted else None, self.running_var if noted else None, self.weight, self.bias,
            self.training or self.running_mean is None, self.momentum, self.eps,
        )  # fmt: skip
        return self.act(x)


def net(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), NormAct(6, **options), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(144, 5)
    )


@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.3, "eps": 0.1}]
)
def test_a_batch_norm_with_an_activation_is_taken_apart(options: dict[str, Any]) -> None:
    layers = layers_of(net(**options))
    assert list(layers)[1:4] == ["0", "1", "1.act"]
    assert layers["1"].kind == "batch_norm"
    assert layers["1"].statistics
    assert layers["1"].parameters.keys() == dict(NormAct(6, **options).named_parameters(recurse=False)).keys() | (
        dict(NormAct(6, **options).named_buffers()).keys()
    )
    assert layers_of(net(**options), training=False)["1"].statistics == ("track_running_stats" in options)


@pytest.mark.parametrize("plan", ["data", "model"])
def test_it_trains_as_on_one_device(plan: str) -> None:
    assert difference(net(), plan=plan) < EXACT
    assert difference(net(track_running_stats=False, affine=False), plan=plan) < EXACT


class OtherMomentum(NormAct):
    """Its function has another momentum than the module."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.7)


def test_a_norm_with_other_numbers_stays_as_it_is() -> None:
    model = net()
    model[1] = OtherMomentum(6)
    assert all(layer.kind != "batch_norm" for layer in layers_of(model).values())
    assert difference(model) < EXACT


class Uncounted(NormAct):
    """It leaves `num_batches_tracked` as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1)


class Counted(NormAct):
    """It counts batches, and normalises in its own way."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)  # type: ignore[union-attr, operator]
        return (x - x.mean((0, 2, 3), keepdim=True)) * self.weight[:, None, None]


class CountedTwice(NormAct):
    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)  # type: ignore[union-attr, operator]
        return super().forward(x)


@pytest.mark.parametrize("norm", [Uncounted, Counted, CountedTwice])
@pytest.mark.parametrize("plan", ["data", "model"])
def test_a_norm_counts_its_batches_as_its_forward_does(norm: type[nn.Module], plan: str) -> None:
    model = net()
    model[1] = norm(6)
    assert difference(model, plan=plan) < EXACT
