"""Prediction spreads follow from measurements by the stated rule, and hold on data they were not derived from."""

import pytest

from benchmarks.score import Residual, held, inside, spread_of
from convoy.simulate.costs import CPU
from convoy.simulate.interval import SIMULATION
from lab.calibrate import alone, gains, ours_alone, steps

MEASURED = SIMULATION["measured"]


@pytest.mark.parametrize(
    ("residuals", "constant"),
    [
        (list(ours_alone()), CPU.spread),
        (alone("measured"), MEASURED.alone),
        (steps("measured"), MEASURED.step),
        (gains("measured"), MEASURED.gain),
    ],
    ids=["one processor", "one measured processor", "steps", "gains"],
)
def test_spread_matches_the_measurements(residuals: list[Residual], constant: float):
    assert constant - 0.015 < spread_of(residuals) <= constant
    assert inside(residuals, constant) >= 0.9
    assert held(residuals) >= 0.85


@pytest.mark.slow
def test_intervals_of_described_fleets_cover_nine_of_ten():
    described = SIMULATION["described"]
    for residuals, constant in ((steps("described"), described.step), (gains("described"), described.gain)):
        assert constant - 0.015 < spread_of(residuals) <= constant
        assert inside(residuals, constant) >= 0.9
        assert held(residuals) >= 0.85
