"""Models that return a value for each pair of samples, as CLIP does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.model.tracing import trace
from tests.support.beside_one import difference


class Pairing(nn.Module):
    """Two towers over the same images, and what a function makes of what they give."""

    def __init__(self, answer: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.images, self.texts, self.scale = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 1), nn.Parameter(torch.tensor(0.5))
        self.answer = answer

    def forward(self, x: Tensor) -> Any:
        y, z = (F.normalize(tower(x).mean((2, 3)), dim=1) for tower in (self.images, self.texts))
        return self.answer(y * self.scale.exp(), z)


def clip(y: Tensor, z: Tensor) -> dict[str, Tensor]:
    pairs = y @ z.t()
    return {"images": pairs, "texts": pairs.t()}


def deciding(y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    return (y if float(y.detach().sum()) < 1 else y * 2), torch.cdist(y, z)


ANSWERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "clip": clip,
    "alone": lambda y, z: y @ z.t(),
    "beside rows, with a third axis": lambda y, z: (y, y[:, None] - z[None]),
    "columns": lambda y, _: y.t(),
    "of a model that is one layer": deciding,
}


@pytest.mark.parametrize("plan", ["data-by-speed", "model", "master"])
@pytest.mark.parametrize("name", ANSWERS)
def test_pairs_are_those_of_one_device(name: str, plan: str) -> None:
    assert difference(Pairing(ANSWERS[name]), speeds=(3, 0, 2), plan=plan, sizes=(6, 2, 6)) < 1e-10


def test_only_what_makes_the_pairs_is_on_one_device() -> None:
    layers = trace(Pairing(clip), torch.zeros(2, 3, 8, 8)).graph.layers.values()
    assert {layer.batch_axes for layer in layers if not layer.batched and layer.kind == "pick"} == {(0, 1)}
    assert all(layer.per_sample for layer in layers if layer.kind == "conv")
    assert [layer.batch_shape(7) for layer in layers if layer.batch_axes] == [(7, 7)] * 2
