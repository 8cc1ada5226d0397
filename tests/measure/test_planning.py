"""The plan "auto": kept measurements, uncertain times, and the lines that describe the choice."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from convoy.api import Plans, make_plans
from convoy.comm.group import Group
from convoy.measure import planning
from convoy.model.tracing import trace
from convoy.plan.presets import named_plan
from convoy.planner.knowledge import FleetKnowledge
from convoy.simulate.table import Measurement
from tests.support.described_fleets import measured_fleet
from tests.support.threads import run_on_threads

NET = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 5))
X = torch.zeros(2, 2, 8, 8)


class Job:
    """A job of two devices with counted measurements, whose times repeat within `spread`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rates: tuple[float, float] = (1e6, 2e6)) -> None:
        self.spread, self.measurements, self.rates = 0.0, 0, rates
        monkeypatch.setattr(planning, "measure_job", self._measure)

    def _measure(self, group: Group, *_: object) -> Measurement:
        self.measurements += group.device == 0
        found = measured_fleet(trace(NET, X).graph, list(self.rates), 8)
        return replace(found, layer=tuple(replace(point, spread=self.spread) for point in found.layer))

    def plans(self, batch: int = 8) -> Plans:
        first, second = run_on_threads(2, lambda group: make_plans(NET, X, batch, group))
        assert first == second
        assert first.request.fleet == second.request.fleet
        return first


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("CONVOY_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_second_start_uses_kept_times(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    job = Job(monkeypatch)
    first = job.plans()
    (file,) = folder.iterdir()
    again = job.plans()
    assert job.measurements == 1
    assert list(again) == list(first)
    assert str(file) in again.notes[0]
    assert again.request.fleet.measured is not None
    assert again.request.fleet.measured.layer == first.request.fleet.measured.layer  # type: ignore[union-attr]
    job.plans(16)
    assert job.measurements == 2, "another batch takes other times"
    file.write_text('{"measured": "damaged"}')
    job.plans()
    assert job.measurements == 3
    monkeypatch.setenv("CONVOY_CACHE", "")
    job.plans()
    assert job.measurements == 4, "switched off"


def test_kept_measurements_have_a_bounded_size(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    measured = measured_fleet(trace(NET, X).graph, [1e6], 8)
    for key in range(4):
        file = planning.cache_file(key)
        assert file is not None
        planning.keep(file, FleetKnowledge(measured=measured))
        assert planning.load_kept(file).measured == measured
        monkeypatch.setattr(planning, "MOST_BYTES", 2 * file.stat().st_size + 10)
    assert len(list(folder.iterdir())) == 2


def test_cache_lies_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CONVOY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = planning.cache_file(["a net", 8])
    assert found is not None
    assert found.parent == tmp_path / "convoy" / "measured"
    assert planning.load_kept(found).measured is None


def test_uncertain_times_are_measured_again_then_split_by_speed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    job = Job(monkeypatch)
    job.spread = 30.0
    plans = job.plans()
    assert job.measurements == 2
    named = named_plan("data-by-speed", plans.request.graph, 8, plans.speeds)
    assert list(plans) == [named.named("auto")]
    assert "varied too much to choose a plan: the plan is data-by-speed" in plans.notes[0]
    assert not folder.exists(), "such times are not kept"


def test_uncertain_times_of_a_fleet_file_decide_nothing(tmp_path: Path) -> None:
    found = measured_fleet(trace(NET, X).graph, [1e6, 2e6], 8)
    found = replace(found, layer=tuple(replace(point, spread=30.0) for point in found.layer))
    (tmp_path / "fleet.toml").write_text(found.to_toml())
    plans, _ = run_on_threads(2, lambda group: make_plans(NET, X, 8, group, fleet=tmp_path / "fleet.toml"))
    assert "the plan is data-by-speed" in plans.notes[0]


@pytest.mark.parametrize(
    ("rates", "computes"),
    [
        ((1e6, 1e6), ["layers with weights: 1 filter, 1 channel", "device 0 50%, device 1 50%"]),
        ((1e3, 1e9), ["one device is faster than several", "device 1 100%"]),
    ],
)
def test_choice_is_described_in_three_lines(
    rates: tuple[float, float], computes: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Job(monkeypatch, rates).plans()
    _, *said, predicted = capsys.readouterr().err.splitlines()
    assert said == [f"convoy: plan auto: {computes[0]}", f"convoy: arithmetic: {computes[1]}"]
    assert predicted.startswith("convoy: predicted: ")
    assert "samples/s (nine of ten: " in predicted
    assert " alone: " in predicted
