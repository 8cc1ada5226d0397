"""Models that compute values for each pair of samples, as CLIP does."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.model.tracing import trace
from tests.support.beside_one import difference


class Pairing(nn.Module):
    """Two towers over the same images, and a function of their outputs."""

    def __init__(self, answer: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.images, self.texts, self.scale = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 1), nn.Parameter(torch.tensor(0.5))
        self.answer = answer

    def forward(self, x: Tensor) -> Tensor:
        y, z = (F.normalize(tower(x).mean((2, 3)), dim=1) for tower in (self.images, self.texts))
        return self.answer(y * self.scale.exp(), z)


ANSWERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mixed rows": lambda y, z: (y @ z.t()).softmax(1) @ z,
    "a value per row": lambda y, z: (y @ z.t()).logsumexp(1, keepdim=True),
    "columns": lambda y, _: y.t().cumsum(1).t(),
    "a third axis": lambda y, z: (y[:, None] - z[None]).square().sum(1),
}


@pytest.mark.parametrize("plan", ["data-by-speed", "model"])
@pytest.mark.parametrize("name", ANSWERS)
def test_values_computed_from_pairs_are_those_of_one_device(name: str, plan: str) -> None:
    assert difference(Pairing(ANSWERS[name]), speeds=(3, 0, 2), plan=plan, sizes=(6, 2, 6)) < 1e-10
    graph = trace(Pairing(ANSWERS[name]), torch.zeros(2, 3, 8, 8)).graph
    assert all(layer.per_sample for layer in graph.layers.values() if layer.kind == "conv")


def test_pairs_may_be_a_result() -> None:
    assert difference(Pairing(lambda y, z: y @ z.t()), speeds=(3, 0, 2), sizes=(6, 2, 6)) < 1e-10
