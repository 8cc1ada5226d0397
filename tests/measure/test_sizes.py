"""Sizes used by plans are timed in addition to the grids, and correct the grids nearby."""

import math
from dataclasses import replace

import pytest
import torch

from convoy.comm.group import Group
from convoy.measure.layer_timer import LayerTimer
from convoy.measure.measure_job import MeasureOptions, measure_job
from convoy.measure.timed_sizes import sizes_of_plans
from convoy.measure.timing import LEAST_KNOWN, Timing
from convoy.model.graph import Layer
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.plan.device_program import LocalSize, local_size
from convoy.plan.lower import lower
from convoy.plan.presets import PLANS, named_plan
from convoy.plan.steps import ComputeStep
from convoy.planner.planner import candidates
from convoy.simulate.compute import Correction, Grid, LayerTimes
from convoy.simulate.costs import Overheads
from convoy.simulate.table import LayerPoint, Measurement, layer_times
from tests.support.described_fleets import asked
from tests.support.threads import run_on_threads

LAYER = trace(build_net("two-conv:4:6", (3, 16, 16), 10), torch.zeros(2, 3, 16, 16)).graph["0"]


def grid(per_entry_s: float) -> Grid:
    """Return a grid in proportion to samples and filters."""
    return Grid((1, 8), (1, 4), tuple(tuple(per_entry_s * s * o for o in (1, 4)) for s in (1, 8)))


def test_a_correction_by_hand() -> None:
    """Timed at 4 samples and 2 filters: 3 times the grid's forward, half of its backward."""
    corrected = Correction(LocalSize(4, 2, 3), forward_s=3.0 * 4 * 2, backward_s=0.5 * 2 * 4 * 2)
    times = LayerTimes(grid(1.0), grid(2.0), corrections=(corrected,))
    assert times.seconds(LAYER, "forward", LocalSize(4, 2, 3)) == pytest.approx(4 * 2 * 3)
    assert times.seconds(LAYER, "backward", LocalSize(4, 2, 3)) == pytest.approx(2 * 4 * 2 / 2)
    assert times.seconds(LAYER, "backward", LocalSize(4, 2, 3), "weight") == pytest.approx(2 * 4 * 2 / 2 / 2)
    # Twice the samples: the grid alone. Between: less than the whole correction.
    assert times.seconds(LAYER, "forward", LocalSize(8, 2, 3)) == pytest.approx(8 * 2)
    away = math.log2(5 / 4)
    assert times.seconds(LAYER, "forward", LocalSize(5, 2, 3)) == pytest.approx(5 * 2 * 3 ** (1 - away))


def test_nearest_correction_is_used() -> None:
    near, far = Correction(LocalSize(4, 4, 3), 2.0 * 16, 1.0), Correction(LocalSize(4, 2, 3), 7.0 * 8, 1.0)
    times = LayerTimes(grid(1.0), grid(1.0), corrections=(far, near))
    away = math.log2(4 / 3)
    assert times.seconds(LAYER, "forward", LocalSize(4, 3, 3)) == pytest.approx(12 * 2 ** (1 - away))


def test_extrapolation_by_hand() -> None:
    """The grid ends at 8 samples with 32 s. This layer does more than ten FLOP for a byte, so in proportion: 16 take 64 s.

    Timed: 32 samples in twice the 128 s that follow. At 16, half way between the grid's edge (1 times) and there (2 times),
    sqrt(2); at 64, three doublings from the edge and one from there, the exponent is 3/4.
    """
    alone = LayerTimes(grid(1.0), grid(1.0))
    assert alone.seconds(LAYER, "forward", LocalSize(16, 4, 3)) == pytest.approx(64)
    times = replace(alone, corrections=(Correction(LocalSize(32, 4, 3), 256.0, 256.0),))
    at = lambda samples: times.seconds(LAYER, "forward", LocalSize(samples, 4, 3))  # noqa: E731
    assert at(8) == pytest.approx(32)
    assert at(16) == pytest.approx(64 * math.sqrt(2))
    assert at(32) == pytest.approx(256)
    assert at(64) == pytest.approx(256 * 2**0.75)


def test_wide_linear_is_not_extrapolated_from_two_small_sizes() -> None:
    """On a device of a fifth of a core there was time for 4 samples and 512 features of a Linear of 4,096; the line
    through them gave 2.3 s for 64 samples, and the planner left the device idle. In training it took about 0.5 s.
    """
    model = build_net("alexnet:4096", (3, 32, 32), 10)
    layer = trace(model, torch.zeros(2, 3, 32, 32)).graph["16"]
    # Milliseconds as they were measured on 21 November 2026, forward and backward together.
    grids = [(4, 256, 4096, 9.23), (4, 512, 4096, 18.38), (4, 4096, 256, 7.58), (4, 4096, 512, 29.93)]
    beside = [(64, 1024, 4096, 112.0), (16, 4096, 4096, 255.4), (64, 265, 4096, 34.4), (4, 4096, 4096, 186.7)]
    rows = [LayerPoint("d", "16", s, o, i, ms / 3e3, ms * 2 / 3e3, 0.0) for s, o, i, ms in grids]
    rows += [LayerPoint("d", "16", s, o, i, ms / 3e3, ms * 2 / 3e3, 0.0, beside=True) for s, o, i, ms in beside]
    times = layer_times(rows)
    whole = LocalSize(64, 4096, 4096)
    assert 0.4 < sum(times.seconds(layer, phase, whole) for phase in ("forward", "backward")) < 0.7


def points(*beside: LayerPoint) -> list[LayerPoint]:
    """Return a grid over filters and one over input channels; each call takes 1 s per filter, sample and channel."""
    sizes = [(s, o, 3) for s in (1, 8) for o in (1, 4)] + [(s, 4, 1) for s in (1, 8)]
    rows = [LayerPoint("d", "0", s, o, i, s * o * i, 2.0 * s * o * i, 0.0) for s, o, i in sizes]
    return [*rows, *beside]


def test_extra_point_does_not_join_the_grid() -> None:
    times = layer_times(points(LayerPoint("d", "0", 4, 2, 3, 48.0, 24.0, 0.0, beside=True)))
    assert times.forward.samples == (1, 8)
    at = [times.seconds(LAYER, phase, LocalSize(4, 2, 3)) for phase in ("forward", "backward")]
    assert at == pytest.approx([48.0, 24.0])
    # Fewer input channels are corrected against their own grid.
    times = layer_times(points(LayerPoint("d", "0", 4, 4, 2, 96.0, 64.0, 0.0, beside=True)))
    assert times.seconds(LAYER, "forward", LocalSize(4, 4, 2)) == pytest.approx(96.0)


def takes_s(layer: Layer, size: LocalSize) -> float:
    """Return seconds that no bilinear grid can follow: a power of the computed entries."""
    entries = size.samples * size.outputs * (size.inputs if layer.weighted else 1)
    return float(1e-6 * entries**0.9)


class Synthetic(LayerTimer):
    def time(self, name: str, size: LocalSize) -> float:
        seconds = takes_s(self.traced.graph[name], size)
        self.timings[name, size] = Timing([seconds] * LEAST_KNOWN, [2 * seconds] * LEAST_KNOWN)
        return 3 * seconds


NET, IMAGE, BATCH = "two-conv:16:32", (3, 16, 16), 16


@pytest.fixture(scope="module")
def measured() -> list[Measurement]:
    model = build_net(NET, IMAGE, 10)
    traced = trace(model, torch.zeros(2, *IMAGE))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("convoy.measure.measure_job.LayerTimer", Synthetic)
        # It trains on one device, and torch's hooks on gradients want a process each for that.
        patch.setattr("convoy.measure.measure_job.measure_overheads", lambda *_: (Overheads(), 0.0))

        def work(group: Group) -> Measurement:
            options = MeasureOptions(NET, budget_s=60.0, links_budget_s=0.5, slice_s=1e-4)
            return measure_job(group, traced, model, BATCH, options)

        return run_on_threads(3, work, timeout_s=60.0)


def by_grids(measured: Measurement) -> Measurement:
    return replace(measured, layer=tuple(point for point in measured.layer if not point.beside))


def test_size_measurements_are_gathered_and_saved(measured: list[Measurement]) -> None:
    assert measured[0] == measured[1] == measured[2]
    assert any(point.beside for point in measured[0].layer)
    assert Measurement.from_toml(measured[0].to_toml()) == measured[0]


def test_timed_plan_sizes_are_exact(measured: list[Measurement]) -> None:
    """In every named plan and auto, each large layer takes the synthetic device's time, not the grid's."""
    graph = trace(build_net(NET, IMAGE, 10), torch.zeros(2, *IMAGE)).graph
    alone = by_grids(measured[0])
    costs, by_grids_costs = measured[0].costs(graph), alone.costs(graph)
    speeds = asked(graph, BATCH, by_grids_costs, alone.fleet).speeds
    plans = [named_plan(name, graph, BATCH, speeds) for name in PLANS]
    plans += [candidates(asked(graph, BATCH, by_grids_costs), simulated=False)[0].plan]
    seen = 0
    for plan in plans:
        for step in lower(plan, graph).phase("forward"):
            if isinstance(step, ComputeStep) and step.layer in ("3", "7") and step.chunks == 1:
                for device in range(3):
                    size = local_size(step, graph[step.layer], device)
                    if size is not None and size.samples and size.tile == 1.0:  # tiles are priced by their area
                        found = costs.times.seconds(device, graph[step.layer], "forward", size)
                        assert found == pytest.approx(takes_s(graph[step.layer], size)), (plan.name, step.layer, size)
                        seen += 1
    assert seen > 15


def test_grid_sizes_and_small_layers_are_not_timed_again(measured: list[Measurement]) -> None:
    graph = trace(build_net(NET, IMAGE, 10), torch.zeros(2, *IMAGE)).graph
    alone = by_grids(measured[0])
    alike = {name: name for name in graph.layers}
    rows = sizes_of_plans(alone, graph, BATCH, alike)
    assert len(rows) == 3
    on_grid = {(p.layer, (p.samples, p.outputs, p.inputs)) for p in alone.layer}
    assert not {(layer, size) for layer, size, _ in rows[0]} & on_grid
    assert [seconds for *_, seconds in rows[0]] == sorted((seconds for *_, seconds in rows[0]), reverse=True)
    # Once timed, nothing of these plans is wanted any more.
    names = [d.name for d in alone.fleet.devices]
    more = [
        LayerPoint(names[d], layer, *size, 1.0, 1.0, 0.0, beside=True)
        for d, each in enumerate(rows)
        for layer, size, _ in each
    ]
    again = sizes_of_plans(replace(alone, layer=alone.layer + tuple(more)), graph, BATCH, alike)
    for device, each in enumerate(again):
        assert not {row[:2] for row in each} & {row[:2] for row in rows[device]}
