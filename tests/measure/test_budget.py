"""A measuring budget is wall-clock seconds. Clocks are injected: no test waits for a real one."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import nn

from convoy.api import make_plans
from convoy.comm.group import AloneGroup
from convoy.errors import PlanError
from convoy.measure import measure_job as job
from convoy.measure import planning
from convoy.measure.layer_timer import LayerTimer
from convoy.measure.measure_job import MeasureOptions, measure_job
from convoy.measure.overhead_probe import SyncOverhead
from convoy.measure.timing import RoundTimer, Timing
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.plan.device_program import LocalSize
from convoy.plan.presets import AUTO, PLANS
from convoy.runtime.clock import Clock
from convoy.simulate.costs import Overheads
from convoy.simulate.table import Measurement

CPU = torch.device("cpu")
BATCH = 8


def net() -> nn.Module:
    return build_net("two-conv:4:6", (1, 8, 8), 10)


class Wall:
    """A wall clock that only tests advance."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def __call__(self) -> float:
        return self.time_s


class Waiting(AloneGroup):
    """A group whose other devices reply after this time."""

    def __init__(self, wall: Wall, waits_s: float) -> None:
        super().__init__(CPU)
        self.wall, self.waits_s, self.waits = wall, waits_s, 0

    def agree(self, topic: str, text: str) -> tuple[str, ...]:
        self.wall.time_s += self.waits_s
        self.waits += 1
        return super().agree(topic, text)


class ScriptedTimer(LayerTimer):
    """A timer that takes a multiple of its allowance; one size takes a second."""

    def __init__(self, wall: Wall, over: float = 1.0) -> None:
        model = net()
        super().__init__(trace(model, torch.zeros(2, 1, 8, 8)), model, BATCH, RoundTimer(Clock(CPU)))
        self.wall, self.over = wall, over
        self.allowed_s: list[float] = []

    def turn(self, name: str, allowance_s: float, wall: Any = None) -> None:  # noqa: ARG002
        self.allowed_s.append(allowance_s)
        self.wall.time_s += self.over * allowance_s

    def unknown(self, name: str) -> list[LocalSize]:  # noqa: ARG002
        return [LocalSize(1, 1, 1)]

    def time(self, name: str, size: LocalSize) -> float:
        self.wall.time_s += 1.0
        self.timings[name, size] = Timing([1.0] * 6, [1.0] * 6)
        return 2.0


def grids_s(over: float, waits_s: float) -> tuple[float, list[float], float]:
    """Return the seconds that 40 s of grids take, the allowances of the layers, and the seconds of waiting."""
    wall = Wall()
    layers, group = ScriptedTimer(wall, over), Waiting(wall, waits_s)
    names = list(dict.fromkeys(layers.alike.values()))
    job._time_grids(group, layers, names, 40.0, wall, lambda _: None)
    return wall.time_s - 100.0, layers.allowed_s, waits_s * group.waits


def test_layers_use_the_whole_budget() -> None:
    seconds, allowed_s, _ = grids_s(over=1.0, waits_s=0.0)
    assert seconds == pytest.approx(40.0)
    assert sum(allowed_s) == pytest.approx(40.0)


def test_slow_layer_leaves_less_time_for_the_others() -> None:
    seconds, allowed_s, _ = grids_s(over=3.0, waits_s=0.0)
    assert allowed_s[-1] == 0.0, "the last ones are timed at their smallest size"
    assert seconds < 2 * 40.0


def test_waiting_for_a_slower_device_counts() -> None:
    seconds, allowed_s, waited_s = grids_s(over=1.0, waits_s=4.0)
    assert sum(allowed_s) < 0.7 * 40.0
    assert seconds - waited_s == pytest.approx(sum(allowed_s))


@pytest.mark.parametrize(
    ("left_s", "planning_s", "timed"), [(10.0, 0.0, 4), (2.5, 0.0, 2), (2.5, 1.0, 1), (-1.0, 0.0, 0)]
)
def test_plan_sizes_are_timed_within_the_budget(
    left_s: float, planning_s: float, timed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time to plan them counts, too."""
    wall = Wall()
    layers: Any = ScriptedTimer(wall)
    name = next(iter(layers.alike))
    wanted = [(name, (n, 1, 1), 1.0) for n in (101, 102, 103, 104)]

    def planned(*_: Any) -> Sequence[Sequence[Any]]:
        wall.time_s += planning_s
        return [wanted]

    monkeypatch.setattr(job, "sizes_of_plans", planned)
    monkeypatch.setattr(job, "timing_s", lambda *_: 1.0)
    unused: Any = None
    job._time_plan_sizes(AloneGroup(CPU), layers, unused, left_s, wall)
    assert len(layers.plan_sizes.get(name, [])) == timed


def measured(**options: Any) -> Measurement:
    model = net()
    traced = trace(model, torch.zeros(2, 1, 8, 8))
    return measure_job(AloneGroup(CPU), traced, model, BATCH, MeasureOptions("two-conv", slice_s=1e-5, **options))


def test_plan_sizes_get_the_remaining_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, left = Wall(), []
    monkeypatch.setattr(LayerTimer, "unknown", lambda *_: [])
    monkeypatch.setattr(job, "_time_plan_sizes", lambda *given: left.append(given[3]))

    def slow(*given: Any) -> SyncOverhead:
        wall.time_s += 6.0
        return SyncOverhead((0.0,), tuple(given[3]))

    monkeypatch.setattr(job, "measure_sync", slow)
    measured(budget_s=10.0, wall=wall)
    assert left == [pytest.approx(4.0)]


def test_sync_overhead_reaches_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = Overheads(step_s=0.01, layer_s=0.02, round_s=0.09, message_s=0.12)
    monkeypatch.setattr(job, "measure_sync", lambda *_: SyncOverhead((0.1,), (costs,)))
    (found,) = measured(budget_s=0.3).device
    assert found.jitter_s == 0.1
    assert asdict(costs).items() <= asdict(found).items()


# --- one device --------------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundTimer, "time", lambda *_, **__: pytest.fail("one device was measured"))


@pytest.mark.usefixtures("nothing_is_timed")
@pytest.mark.parametrize("name", [*PLANS, AUTO])
def test_single_device_measures_nothing(name: str) -> None:
    plans = make_plans(net(), torch.zeros(2, 1, 8, 8), BATCH, AloneGroup(CPU), plan=name)
    assert (plans[0].name, plans[0].devices, plans[0].batch) == (name, 1, BATCH)
    assert not plans.speeds.measured


@pytest.mark.usefixtures("nothing_is_timed")
def test_net_too_large_for_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(planning.describe_device(CPU, 1.0), memory_bytes=1000)
    monkeypatch.setattr(planning, "describe_device", lambda *_: small)
    with pytest.raises(PlanError, match=r"fits the devices' memory.* of 0\.001 MB"):
        make_plans(net(), torch.zeros(2, 1, 8, 8), BATCH, AloneGroup(CPU), plan=AUTO)
