"""What copies of parameters are compared by: a few entries, beside how large the parameter is."""

import math

import pytest
import torch
from convoy.runtime.alike import _some

INF = math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
def test_a_parameter_is_as_large_as_its_root_mean_square(dtype: torch.dtype) -> None:
    size, *entries = _some(torch.tensor([[1, -7], [5, 5]], dtype=dtype))
    assert size == pytest.approx(5.0)
    assert entries == [1.0, -7.0, 5.0, 5.0]


@pytest.mark.parametrize("size", [1e-30, 1e-16, 1e25, 3e38])
def test_numbers_whose_squares_are_none_in_float32_have_a_size(size: float) -> None:
    """Of a size of 0, copies that differ by a rounding would be refused; of an infinite one, none."""
    assert _some(torch.full((4,), size))[0] == pytest.approx(size)


def test_sixteen_bits_are_squared_in_more() -> None:
    assert _some(torch.full((4,), 6e4, dtype=torch.float16))[0] == pytest.approx(6e4, rel=1e-3)


@pytest.mark.parametrize("odd", [math.nan, INF, -INF])
def test_what_is_no_number_has_no_size_and_is_compared_as_zero(odd: float) -> None:
    assert _some(torch.tensor([odd, 1.0])) == [0.0, 0.0, 1.0]


def test_nothing_has_no_size() -> None:
    assert _some(torch.empty(0, 3)) == [0.0]
    assert _some(torch.zeros(3)) == [0.0, 0.0, 0.0, 0.0]


def test_the_places_of_a_large_parameter_lie_in_it() -> None:
    """A copied convolution of 18,750,000 weights ended its training at the first batch, on all devices: index 18750000 is out
    of bounds. float32 rounds places beyond 2^24. The classifier of VGG-16 has 103 million."""
    weights = torch.zeros(1).expand(18_750_000)
    assert _some(weights)[1:] == [0.0] * 4
    assert _some(torch.arange(103.0))[-1] == 102.0, "the last one is among them"
