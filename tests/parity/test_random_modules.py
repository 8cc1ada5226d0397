"""Random modules against plain PyTorch: each is exact, or refused with a clear error; none differs silently.

A net that fails is printed with its seed and its source, as small as it gets. `python -m lab.random_nets.sweep`
tries others.
"""

from collections import Counter

import pytest
import torch

from convoy.runtime.module import Distributed
from lab.random_nets.recipe import Part, Recipe, draw
from lab.random_nets.sweep import BAD
from lab.random_nets.trial import Left, attempt, differences, report, shrunk

NETS, CHUNKS = 5000, 20
COUNTED = ("exact", "refused", *BAD)
"""Not those that plain PyTorch does not train, and those that rounding alone takes elsewhere."""


def try_nets(first: int, count: int) -> Counter[str]:
    """How many nets became what.

    Args:
        first: seed of the first net.
        count: how many.

    Raises:
        AssertionError: some differ silently, or end in an error that is not Convoy's.
    """
    torch.set_num_threads(1)
    counts, failures, seed = Counter[str](), [], first
    while sum(counts[kind] for kind in COUNTED) < count:
        recipe = draw(seed)
        outcome = attempt(recipe, seed)
        counts[outcome.kind] += 1
        if outcome.kind in BAD and len(failures) < 3:
            small = shrunk(recipe, seed, outcome.kind)
            failures.append(report(seed, attempt(small, seed), small))
        seed += 1
    assert not any(counts[kind] for kind in BAD), f"{dict(counts)}\n" + "\n\n".join(failures)
    return counts


def test_a_few_random_modules() -> None:
    counts = try_nets(0, 10)
    assert counts["exact"] >= 5, counts


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_five_thousand_random_modules(chunk: int) -> None:
    counts = try_nets(1000 * (chunk + 1), NETS // CHUNKS)
    assert counts["exact"] >= 0.6 * NETS / CHUNKS, counts
    assert counts["unstable"] <= 0.01 * NETS / CHUNKS, counts


def test_a_seed_gives_the_same_net_again() -> None:
    assert [draw(seed).source() for seed in range(20)] == [draw(seed).source() for seed in range(20)]
    assert len({draw(seed).source() for seed in range(200)}) == 200


def test_a_silent_difference_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A distributed model is made to answer a little more than it should."""
    forward = Distributed.forward
    parts = (Part("activation", 1), Part("plain", 2, (Part("convolution", 3), Part("pool", 4))))
    recipe = Recipe(parts, "images", "logits", 5)
    assert attempt(recipe, 5).kind == "exact"
    monkeypatch.setattr(Distributed, "forward", lambda self, *x, **more: forward(self, *x, **more) * (1 + 1e-9))
    outcome = attempt(recipe, 5)
    assert outcome.kind == "wrong"
    assert "output of step 0" in outcome.what
    assert shrunk(recipe, 5, "wrong").parts == ()
    assert "class Net(nn.Module)" in report(5, outcome, recipe)


EXPECTED = Left({"a": torch.ones(2)}, ["Tensor"])


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (Left({"a": torch.ones(2)}, ["Tensor"]), []),
        (Left({"a": torch.ones(2) + 1e-6}, ["Tensor"]), ["a"]),
        (Left({"a": torch.ones(2).double()}, ["Tensor"]), ["a: torch.float64 (2,) for torch.float32 (2,)"]),
        (Left({"a": torch.tensor([1.0, float("nan")])}, ["Tensor"]), ["a"]),
        (Left({"b": torch.ones(2)}, ["Tensor"]), ["a", "b"]),
        (Left({"a": torch.ones(2)}, ["list"]), ["returns list for Tensor"]),
    ],
)
def test_what_differs_is_named(found: Left, told: list[str]) -> None:
    assert list(differences(found, EXPECTED)) == told
