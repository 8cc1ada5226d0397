"""Prediction spreads follow from measurements by the stated rule, and hold on data they were not derived from."""

import math

import pytest

from benchmarks.score import Residual, held, inside, spread_of
from convoy.simulate.costs import CPU
from convoy.simulate.interval import OTHER_NET, SIMULATION
from lab.calibrate import alone, gains, other_net, ours_alone, steps

MEASURED = SIMULATION["measured"]


@pytest.mark.parametrize(
    ("residuals", "constant"),
    [
        (list(ours_alone()), CPU.spread),
        (alone("measured"), MEASURED.alone),
        (other_net(), OTHER_NET),
        (steps("measured"), MEASURED.step),
        (gains("measured"), MEASURED.gain),
    ],
    ids=["one processor", "one measured processor", "by another net", "steps", "gains"],
)
def test_spread_matches_the_measurements(residuals: list[Residual], constant: float):
    assert constant - 0.015 < spread_of(residuals) <= constant
    assert inside(residuals, constant) >= 0.9
    assert held(residuals) >= 0.85


def test_spread_is_a_high_quantile_of_the_residuals():
    """Of nine residuals take the largest, of nineteen the eighteenth."""
    rows = [Residual("", str(n), math.exp(n / 10), 1.0) for n in range(1, 20)]
    assert spread_of(rows[:9]) == pytest.approx(math.exp(0.9))
    assert spread_of(rows) == pytest.approx(math.exp(1.8))


def test_explained_error_is_subtracted_from_the_residual():
    """The error is 0.5 with 0.3 expected: 0.4 remain, since independent causes add as squares."""
    assert Residual("", "", math.exp(0.5), 1.0, known=math.exp(0.3)).size == pytest.approx(0.4)
    assert Residual("", "", math.exp(0.2), 1.0, known=math.exp(0.3)).size == 0


@pytest.mark.slow
def test_intervals_of_described_fleets_cover_nine_of_ten():
    described = SIMULATION["described"]
    for residuals, constant in ((steps("described"), described.step), (gains("described"), described.gain)):
        assert constant - 0.015 < spread_of(residuals) <= constant
        assert inside(residuals, constant) >= 0.9
        assert held(residuals) >= 0.85
