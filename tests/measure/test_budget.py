"""A budget is seconds on the wall: `convoy measure --budget 10` took 50 to 62 s, and one device with nothing to share 14 s.

Clocks are injected: nothing here waits for a real one.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from convoy.api import make_plans
from convoy.comm.group import AloneGroup
from convoy.errors import PlanError
from convoy.measure import planning
from convoy.measure.energy import EnergyMeter
from convoy.measure.job import (
    BESIDE_STRETCHES,
    GRID_PART,
    POINT_STRETCHES,
    POINTS,
    SHORTEST_S,
    MeasureOptions,
    _measure_tables,
    _with_plan_sizes,
    measure_job,
    stretch_of,
)
from convoy.measure.layers import Bench, Point
from convoy.measure.partial import Partial
from convoy.measure.quota import QuotaProbe
from convoy.measure.sizes import SizeToProfile
from convoy.measure.sync_overhead import SyncOverhead
from convoy.measure.timing import STRETCH_S, Times
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.plan.device_program import LocalSize
from convoy.plan.presets import AUTO, PLANS
from convoy.runtime.clock import Clock
from convoy.simulate.noise import QuotaNoise
from convoy.simulate.overhead import Overheads
from convoy.simulate.table import Measurement

CPU = torch.device("cpu")
BATCH = 8


def net() -> nn.Module:
    return build_net("two-conv:4:6", (1, 8, 8), 10)


class Wall:
    """Seconds on a wall that only move when somebody says so."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def __call__(self) -> float:
        return self.time_s


class Waiting(AloneGroup):
    """A group whose other devices take so long to answer."""

    def __init__(self, wall: Wall, waits_s: float) -> None:
        super().__init__(CPU)
        self.wall, self.waits_s, self.waits = wall, waits_s, 0

    def agree(self, topic: str, text: str) -> tuple[str, ...]:
        self.wall.time_s += self.waits_s
        self.waits += 1
        return super().agree(topic, text)


class TimedBench(Bench):
    """Takes so many times what it is allowed, and notes what that was; a size takes a second."""

    def __init__(self, wall: Wall, over: float = 1.0) -> None:
        model = net()
        super().__init__(trace(model, torch.zeros(2, 1, 8, 8)), model, BATCH, Clock(CPU), CPU)
        self.wall, self.over = wall, over
        self.allowed_s: list[float] = []
        self.waited_s = 0.0
        self.sizes = 0

    def measure(self, name: str, allowance_s: float, point_limit_s: float = 0.0) -> list[Point]:  # noqa: ARG002
        self.allowed_s.append(allowance_s)
        self.wall.time_s += self.over * allowance_s
        return [Point(LocalSize(1, 1, 1), Times(1.0, 1.0, 0.0))]

    def unknown(self, name: str) -> list[LocalSize]:  # noqa: ARG002
        return [LocalSize(1, 1, 1)]

    def again(self, name: str, allowance_s: float, wall: Any) -> list[Point]:  # noqa: ARG002
        return self.measure(name, allowance_s)

    def time(self, name: str, size: LocalSize) -> Point:  # noqa: ARG002
        self.sizes += 1
        self.wall.time_s += 1.0
        return Point(size, Times(1.0, 1.0, 0.0))


# --- a table, layer by layer -----------------------------------------------------------------------------------------


def tables_s(over: float, waits_s: float, budget_s: float = 40.0) -> tuple[float, TimedBench]:
    """Seconds on the wall that the tables take."""
    wall = Wall()
    bench = TimedBench(wall, over)
    _measure_tables(
        group := Waiting(wall, waits_s),
        bench,
        Partial(None, {"devices": [0]}),
        budget_s,
        lambda *_: None,
        wall,
        EnergyMeter("none"),
    )
    bench.waited_s = waits_s * group.waits
    return wall.time_s - 100.0, bench


def test_layers_that_take_what_they_may_take_the_budget() -> None:
    seconds, bench = tables_s(over=1.0, waits_s=0.0)
    assert seconds == pytest.approx(40.0)
    assert sum(bench.allowed_s) == pytest.approx(40.0)


def test_what_one_layer_takes_too_long_the_others_have_less() -> None:
    seconds, bench = tables_s(over=3.0, waits_s=0.0)
    late, _ = tables_s(over=1.0, waits_s=0.0)
    assert bench.allowed_s[-1] == 0.0, "nothing is left for the last ones: they are timed at their smallest size"
    assert seconds < 2 * late


def test_waiting_for_a_slower_device_counts() -> None:
    """It did not: with a device that took four times as long, measuring took as much longer than its budget."""
    alone_s = tables_s(over=1.0, waits_s=0.0)[1].allowed_s
    seconds, bench = tables_s(over=1.0, waits_s=4.0)
    assert sum(bench.allowed_s) < 0.7 * sum(alone_s)
    assert seconds - bench.waited_s == pytest.approx(sum(bench.allowed_s))
    assert sum(bench.allowed_s) <= 40.0


# --- the sizes that plans have, and what is measured beside layers ---------------------------------------------------------


def sizes_timed(left_s: float, planning_s: float, monkeypatch: pytest.MonkeyPatch) -> int:
    wall = Wall()
    bench, before = TimedBench(wall), measured()
    wanted = [SizeToProfile(bench.layers[0], LocalSize(n, 1, 1), 1.0) for n in (101, 102, 103, 104)]

    def planned(*_: Any) -> Sequence[Sequence[Any]]:
        wall.time_s += planning_s
        return [wanted]

    monkeypatch.setattr("convoy.measure.job.sizes_to_profile", planned)
    monkeypatch.setattr("convoy.measure.job.timing_s", lambda *_: 1.0)
    _with_plan_sizes(AloneGroup(CPU), bench, before, left_s, wall)
    return bench.sizes


def measured() -> Measurement:
    model = net()
    traced = trace(model, torch.zeros(2, 1, 8, 8))
    return measure_job(AloneGroup(CPU), traced, model, BATCH, MeasureOptions("two-conv", budget_s=0.1, stretch_s=1e-5))


def test_sizes_that_plans_have_are_timed_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning them counts, too."""
    for left_s, planning_s, timed in ((10.0, 0.0, 4), (2.5, 0.0, 2), (2.5, 1.0, 1), (-1.0, 0.0, 0)):
        with monkeypatch.context() as patched:
            assert sizes_timed(left_s, planning_s, patched) == timed


@pytest.mark.parametrize("layers", [4, 20, 60])
@pytest.mark.parametrize("budget_s", [1.0, 7.5, 15.0, 45.0, 600.0])
def test_with_little_time_everything_is_timed_for_less_long(budget_s: float, layers: int) -> None:
    """By fixed stretches of 20 ms, 20 layers took 28 s and the rest 11 s, whatever the budget was."""
    stretch_s = stretch_of(budget_s, layers)
    least_s = stretch_s * (BESIDE_STRETCHES + POINTS * POINT_STRETCHES * layers)
    assert SHORTEST_S <= stretch_s <= STRETCH_S
    assert least_s <= GRID_PART * budget_s * (1 + 1e-9) or stretch_s == SHORTEST_S
    assert stretch_of(10 * budget_s, layers) >= stretch_s


def test_the_whole_job_keeps_to_a_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left for the plans' sizes is what the wall says, not a part of the budget by itself."""
    wall = Wall()
    left: list[float] = []

    def noted(_group: Any, _bench: Any, found: Measurement, left_s: float, _wall: Any) -> Measurement:
        left.append(left_s)
        return found

    monkeypatch.setattr("convoy.measure.job._with_plan_sizes", noted)

    def slow(*_: Any, **__: Any) -> SyncOverhead:
        wall.time_s += 6.0
        return SyncOverhead((0.0,), (1.0,))

    monkeypatch.setattr("convoy.measure.job.measure_sync_overhead", slow)
    model = net()
    traced = trace(model, torch.zeros(2, 1, 8, 8))
    measure_job(
        AloneGroup(CPU), traced, model, BATCH, MeasureOptions("two-conv", budget_s=10.0, stretch_s=1e-5, wall=wall)
    )
    assert left == [pytest.approx(4.0)]


def test_sync_overhead_and_noise_reach_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls three times as dear, on a quarter of a processor."""
    plain = {"step_s": 0.01, "layer_s": 0.02, "round_s": 0.03, "message_s": 0.04}
    monkeypatch.setattr("convoy.measure.job.measure_overheads", lambda *_, **__: Overheads(**plain))
    group, found = AloneGroup(CPU), SyncOverhead((0.1,), (3.0,), (0.5,), (0.0,))
    probe = QuotaProbe(group, (True,), 0.25, (1.0,), rested_s=[0.1])
    monkeypatch.setattr(QuotaProbe, "of", lambda *_: probe)
    monkeypatch.setattr("convoy.measure.job.measure_sync_overhead", lambda *_, **__: found)
    model = net()
    traced = trace(model, torch.zeros(2, 1, 8, 8))
    (costs,) = measure_job(group, traced, model, BATCH, MeasureOptions("two-conv", budget_s=1.0, stretch_s=1e-5)).device
    assert costs.jitter_s == 0.1
    assert costs.noise == QuotaNoise(overlap_delay_s=0.0, rested_s=0.4, burst=4.0)
    assert (costs.step_s, costs.layer_s) == (0.01, 0.02)
    assert (costs.round_s, costs.message_s) == pytest.approx((0.09, 0.12))


# --- one device --------------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("convoy.measure.layers.sampled", "convoy.measure.quota.measure_share"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("one device was measured"))


@pytest.mark.usefixtures("nothing_is_timed")
@pytest.mark.parametrize("name", [*PLANS, AUTO])
def test_one_device_has_nothing_to_share_and_measures_nothing(name: str) -> None:
    """`make_plan("data-by-speed")` took 14 s on one device."""
    plans = make_plans(net(), torch.zeros(2, 1, 8, 8), BATCH, AloneGroup(CPU), plan=name)
    assert (plans[0].name, plans[0].devices, plans[0].batch) == (name, 1, BATCH)
    assert not plans.speeds.measured, "nobody is told a speed that was not measured"


@pytest.mark.usefixtures("nothing_is_timed")
def test_a_net_that_one_device_has_no_room_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    small = planning.describe(CPU, 1.0)
    monkeypatch.setattr(planning, "describe", lambda *_: replace(small, memory_bytes=1000))
    with pytest.raises(PlanError, match=r"fits the devices' memory.* of 0\.001 MB"):
        make_plans(net(), torch.zeros(2, 1, 8, 8), BATCH, AloneGroup(CPU), plan=AUTO)
