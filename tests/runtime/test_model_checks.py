"""The sampled entries by which parameter copies are compared."""

import math

import pytest
import torch

from convoy.runtime.model_checks import sample_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
def test_a_sample_has_the_largest_magnitude_and_entries(dtype: torch.dtype) -> None:
    assert sample_of(torch.tensor([[1, -7], [5, 5]], dtype=dtype)) == [7.0, 1.0, -7.0, 5.0, 5.0]


def test_nan_and_infinity_count_as_zero() -> None:
    assert sample_of(torch.tensor([math.nan, 1.0])) == [0.0, 0.0, 1.0]
    assert sample_of(torch.tensor([-math.inf, 1.0])) == [0.0, 0.0, 1.0]
    assert sample_of(torch.empty(0, 3)) == [0.0]


def test_sampled_indices_of_a_large_parameter_are_valid() -> None:
    """Regression: float32 rounds indices beyond 2^24, so index 18750000 was out of bounds."""
    weights = torch.zeros(1).expand(18_750_000)
    assert sample_of(weights)[1:] == [0.0] * 4
    assert sample_of(torch.arange(103.0))[-1] == 102.0, "the last one is among them"
