"""Prediction intervals follow from the measurements and are the same wherever they are shown."""

import math

import numpy as np
import pytest

from convoy.simulate.interval import OF_REPEATS, SIMULATION, Errors, around, of_repeats, together


def test_independent_causes_add_up_as_squares():
    assert together([]) == 1.0
    assert together([1.3]) == pytest.approx(1.3)
    assert math.log(together([math.exp(0.3), math.exp(0.4)])) == pytest.approx(0.5)


def test_error_of_a_mean_of_five():
    """Check the constant against random samples: the mean without the extremes, as `typical` computes it."""
    rounds = np.sort(np.random.default_rng(0).normal(1.0, 0.05, (20_000, 5)), axis=1)
    off = np.abs(rounds[:, 1:4].mean(axis=1) - 1.0)
    spread = (rounds[:, 4] - rounds[:, 0]).mean()
    assert np.mean(off <= OF_REPEATS * spread) == pytest.approx(0.9, abs=0.015)


def test_error_averages_out_over_layers():
    one, many = of_repeats([(1.0, 0.4)]), of_repeats([(1 / 16, 0.4)] * 16)
    assert one == pytest.approx(1 + 0.4 * OF_REPEATS)
    assert many - 1 == pytest.approx((one - 1) / 4)
    assert of_repeats([]) == of_repeats([(0.0, 1.0)]) == 1.0


def test_interval_weights_devices_and_network_by_time():
    errors = Errors("measured", (1.5, 1.0), 1.2)
    replay = SIMULATION["measured"].step
    assert errors.step([1.0, 0.5]) == pytest.approx(together([replay, 1.5]))
    assert errors.step([0.0, 0.5]) == errors.alone(1)
    half = math.sqrt(math.log(replay) ** 2 + (0.5 * math.log(1.5)) ** 2 + (0.5 * math.log(1.2)) ** 2)
    assert math.log(errors.step([0.5, 0.4])) == pytest.approx(half)


def test_equal_devices_cancel_compute_error():
    """All devices of a kind half as fast as they are described to be, or twice: where all computes, the gain is the same."""
    alike, others = (Errors("described", (1.4, 1.4), kinds=kinds) for kinds in (("a", "a"), ("a", "b")))
    assert alike.gain([1.0, 1.0], 0) == pytest.approx(SIMULATION["described"].gain)
    assert others.gain([1.0, 1.0], 0) == pytest.approx(together([1.4, SIMULATION["described"].gain]))
    assert alike.gain([0.3, 0.3], 0) == pytest.approx(together([1.4**0.7, SIMULATION["described"].gain]))


def test_given_costs_have_no_error():
    assert Errors().step([0.5, 0.7]) == 1.0
    assert around(2.0, 1.0).low == around(2.0, 1.0).high == 2.0
