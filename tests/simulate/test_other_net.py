"""Measurements of one net correct the prediction for another."""

from dataclasses import replace

import pytest
import torch

from convoy.comm.group import AloneGroup
from convoy.errors import MismatchError
from convoy.measure.measure_job import MeasureOptions, measure_job
from convoy.model.nets import build_net, graph_of
from convoy.model.tracing import trace
from convoy.plan.device_program import whole_size
from convoy.report.measured import remarks
from convoy.simulate.compute import bytes_moved
from convoy.simulate.interval import OF_REPEATS, OTHER_NET
from convoy.simulate.table import Measurement
from tests.support.described_fleets import asked

BATCH, IMAGE = 8, (1, 8, 8)


def reaching(measured: Measurement, **changes: float) -> Measurement:
    return replace(measured, device=tuple(replace(each, **changes) for each in measured.device))


@pytest.fixture(scope="module")
def measured() -> Measurement:
    """Return a measurement, whatever else the machine ran."""
    model = build_net("two-conv:4:6", IMAGE, 10)
    traced = trace(model, torch.zeros(2, *IMAGE))
    with AloneGroup(torch.device("cpu")) as group:
        found = measure_job(group, traced, model, BATCH, MeasureOptions("two-conv:4:6", budget_s=0.5, slice_s=1e-4))
    return reaching(found, other_load=0.0)


def test_achieved_rates_are_stored_in_the_file(measured: Measurement) -> None:
    (device,) = measured.device
    assert 1e6 < device.flop_per_s < 1e13
    assert 1e5 < device.memory_bytes_per_s < 1e13
    assert Measurement.from_toml(measured.to_toml()) == measured


def test_other_net_is_predicted_from_achieved_rates(measured: Measurement) -> None:
    other = graph_of("two-conv:8:16", IMAGE)
    slow, fast = (reaching(measured, flop_per_s=rate, memory_bytes_per_s=1e15) for rate in (1e8, 2e8))
    costs = slow.best_costs(other)
    assert costs.errors.basis == "rates"
    assert costs.errors.alone(0) >= OTHER_NET
    conv = next(layer for layer in other.weighted if layer.kind == "conv")
    size = whole_size(conv, BATCH)
    assert costs.times.seconds(0, conv, "forward", size) == pytest.approx(BATCH * conv.flop / 1e8)
    a, b = (asked(other, 512, each.best_costs(other)).speeds.devices[0] for each in (slow, fast))
    assert b / a == pytest.approx(2, rel=0.15)
    assert costs.overheads == slow._costs_with(costs.times, 4).overheads, "the rest is as it was measured"
    pool = next(layer for layer in other.layers.values() if layer.kind == "pool")
    assert bytes_moved(pool, whole_size(pool, 2), 4) == 2 * bytes_moved(pool, whole_size(pool, 1), 4)


def test_an_older_file_is_refused_for_another_net(measured: Measurement) -> None:
    old = reaching(measured, flop_per_s=0.0)
    with pytest.raises(MismatchError, match="measure this model on this fleet first"):
        old.best_costs(graph_of("two-conv:8:16", IMAGE))


def test_unsteady_times_are_reported_and_widen_the_interval(measured: Measurement) -> None:
    """Regression: `measure` saw 118 % and did not report it."""
    calm = replace(measured, layer=tuple(replace(point, spread=0.1) for point in measured.layer))
    wild = replace(measured, layer=tuple(replace(point, spread=2.36) for point in measured.layer))
    assert remarks(calm) == []
    (told,) = remarks(wild)
    assert "did not repeat" in told
    assert "100% of its step" in told
    low, high = (each._errors().devices[0] for each in (calm, wild))
    assert 1 < low < 1 + 0.1 * OF_REPEATS + 1e-9
    assert high > 1 + 5 * (low - 1)


def test_other_programs_are_reported_and_widen_the_interval(measured: Measurement) -> None:
    beside = reaching(measured, other_load=1.5)
    assert any(
        "Other programs ran during the measurement" in told and "up to 2.5 times as long" in told
        for told in remarks(beside)
    )
    assert beside._errors().devices[0] >= 2.5
    assert beside._errors().step([0.9]) > measured._errors().step([0.9])
