"""Plan `auto` in a job: devices are measured, one plans, and all train like one device."""

import copy
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from convoy.api import Plans, distribute, make_plan, make_plans
from convoy.cli import plan_verbs
from convoy.comm.group import Group
from convoy.errors import InputError, MismatchError
from convoy.layout.layout import local_shape
from convoy.measure.measure_job import MeasureOptions, measure_job
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.planner.prediction import working
from convoy.runlog.observers import StepTimer
from convoy.simulate.interval import around
from convoy.simulate.memory import memory_of
from convoy.simulate.table import Measurement
from tests.support.commands import QUIET, TINY, assert_close, results
from tests.support.processes import on_processes
from tests.support.threads import run_on_threads

BATCH = 12
QUESTION: dict[str, Any] = {"net": "two-conv:4:6", "image": "1,8,8", "batch": 32}
SHAPE = (3, 8, 8)


def _net() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 16, 5)]
    return nn.Sequential(*layers).double()


NET = _net()
"""Made once: threads that each seeded and drew would take numbers from one another."""


def net() -> nn.Module:
    return copy.deepcopy(NET)


def example() -> torch.Tensor:
    return torch.zeros(2, *SHAPE, dtype=torch.float64)


@pytest.fixture(scope="module")
def measured() -> Measurement:
    """Measure two processes briefly."""
    return Measurement.from_toml(on_processes(2, "tests.cli.test_auto:measure", limit_s=100)[0])


def measure(group: Group) -> str:
    model = net()
    times = {"budget_s": 0.5, "links_budget_s": 0.2, "slice_s": 0.002}
    return measure_job(group, trace(model, example()), model, BATCH, MeasureOptions("small", **times)).to_toml()


def timed(measured: Measurement, *factors: float) -> Measurement:
    """Return the same fleet with layer times proportional to layer size; network time is negligible."""
    names = [device.name for device in measured.fleet.devices]
    rows = []
    for p in measured.layer:
        seconds = 1e-5 * p.samples * p.outputs * p.inputs * factors[names.index(p.device)]
        rows.append(replace(p, forward_s=seconds, backward_s=2 * seconds))
    return replace(measured, layer=tuple(rows))


def trained(group: Group, plan: Plan) -> list[torch.Tensor]:
    """Return the weights after four steps of one batch each."""
    part = distribute(net(), plan, group, example())
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        x, y = batch(step)
        (layout,) = part.input_layouts(BATCH)
        mine = piece(x, layout, group.device)
        loss = nn.functional.cross_entropy(part(mine, batch=BATCH), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return list(part.full_state_dict().values())


def piece(x: torch.Tensor, layout: Any, device: int) -> torch.Tensor:
    from convoy.layout.layout import box

    here = box(layout, device, tuple(x.shape))
    if here is None:
        return x.new_empty(local_shape(layout, device, tuple(x.shape)))
    return x[tuple(slice(start, stop) for start, stop in here)].contiguous()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, *SHAPE, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 5, (BATCH,), generator=generator)


def alone() -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        x, y = batch(step)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return list(model.state_dict().values())


def assert_like_one_device(weights: list[torch.Tensor]) -> None:
    for found, expected in zip(weights, alone(), strict=True):
        assert (found - expected).abs().max() < 1e-10


@pytest.mark.parametrize(("factors", "workers"), [((1.0, 1.5), {0, 1}), ((1.0, 1e3), {0}), ((1e3, 1.0), {1})])
def test_measured_times_decide_which_devices_work(
    measured: Measurement, tmp_path: Path, factors: tuple[float, float], workers: set[int]
) -> None:
    """Slow layers with a fast network: both work. A far slower device gets no work but still joins."""
    file = tmp_path / "fleet.toml"
    file.write_text(timed(measured, *factors).to_toml())
    graph = trace(net(), example()).graph

    def work(group: Group) -> tuple[Plan, list[torch.Tensor]]:
        # Only device 0 has the file.
        own = file if group.device == 0 else tmp_path / "nowhere.toml"
        plan = make_plan("auto", net(), example(), BATCH, group, fleet=own)
        return plan, trained(group, plan)

    rows = run_on_threads(2, work)
    assert rows[0][0] == rows[1][0]
    last = graph.outputs[0]
    # The outputs go to everybody, so the last layer may be summed over devices whatever they compute.
    assert workers <= working(rows[0][0], graph)
    batchwise = [s.shares for name, s in rows[0][0].layers.items() if name != last and hasattr(s, "shares")]
    for shares in batchwise:
        assert {d for d, n in enumerate(shares) if n} <= workers
    for _, weights in rows:
        assert_like_one_device(weights)


def refused(file: Path, devices: int, model: nn.Module, x: torch.Tensor) -> None:
    run_on_threads(devices, lambda group: make_plans(model, x, BATCH, group, fleet=file))


def test_a_file_of_another_fleet_or_model_is_refused(measured: Measurement, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(measured.to_toml())
    with pytest.raises(InputError, match=r"has 2 devices, this job has 3: start 2 devices"):
        refused(file, 3, net(), example())
    other = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5)).double()
    with pytest.raises(MismatchError, match="measure this model"):
        refused(file, 2, other, example())
    with pytest.raises(InputError, match="cannot read the fleet"):
        refused(tmp_path / "none.toml", 2, net(), example())
    file.write_text(replace(measured, precision="bf16").to_toml())
    with pytest.raises(
        MismatchError, match=r"in bf16, this job computes in float32.* measure with --precision float32"
    ):
        refused(file, 2, net(), example())


def test_emulated_hosts_measure_the_fleet_of_their_file(
    measured: Measurement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`convoy emulate` names its fleet file in CONVOY_FLEET: for scripts of four lines as for `convoy train`. Its times, if it
    has any, are of another day."""
    (tmp_path / "fleet.toml").write_text(measured.to_toml())
    monkeypatch.setenv("CONVOY_FLEET", str(tmp_path / "fleet.toml"))
    described = []

    def measure(*given: Any) -> Measurement:
        [options] = [each for each in given if isinstance(each, MeasureOptions)]
        assert options.fleet is not None
        described.append([device.name for device in options.fleet.devices])
        return timed(measured, 1.0, 1.5)

    monkeypatch.setattr("convoy.measure.planning.measure_job", measure)
    plans = run_on_threads(2, lambda group: make_plan("auto", net(), example(), BATCH, group))
    assert plans[0] == plans[1]
    assert described
    assert all(names == [device.name for device in measured.fleet.devices] for names in described)


def test_step_times_skip_partial_and_first_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps end at 10, 11, 13 (a small batch), 14, 17: whole ones took 1, 1 and 3 s; the first of an epoch is not known."""
    ends = iter([10.0, 11.0, 13.0, 14.0, 17.0, 30.0, 32.0])
    monkeypatch.setattr("convoy.runlog.observers.time.perf_counter", lambda: next(ends))
    timer = StepTimer(8)
    assert timer.step_s is None
    for samples in (8, 8, 4, 8, 8):
        timer.on_step_end(0, samples)
    assert timer.seconds == [1.0, 1.0, 3.0]
    timer.on_epoch(None)  # type: ignore[arg-type]
    timer.on_step_end(5, 8)
    timer.on_step_end(5, 8)
    assert timer.step_s == 1.5
    told = timer.compared_with(0.9, around(0.9, 1.5), 2)
    assert "measured: 1.5 s, the median of 4 steps, inside the interval; the prediction is +20.0% off" in told
    assert "nine of ten: 1.2 - 2.7 s" in told
    assert "outside the interval" in timer.compared_with(1.8, around(1.8, 1.1))


def test_all_devices_try_the_same_plans_planners_choice_first(
    measured: Measurement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "convoy.planner.prediction.REACH", 1e3
    )  # any plan with fewer messages: here the fastest device alone at least
    monkeypatch.setattr("convoy.measure.planning.UNCERTAIN", 1e9)  # the links were measured on a busy machine
    file = tmp_path / "fleet.toml"
    file.write_text(timed(measured, 1.0, 1.5).to_toml())

    def work(group: Group) -> tuple[Plans, Plan]:
        plans = make_plans(net(), example(), BATCH, group, fleet=file)
        return plans, make_plan("auto", net(), example(), BATCH, group, fleet=file)

    (plans, plan), (others, other) = run_on_threads(2, work)
    assert len(plans) > 1
    assert plans == others
    assert plans.request.fleet == others.request.fleet, "any device may have to plan anew"
    assert plans.request.fleet.measured is not None
    assert plan == other == plans[0]
    assert plans.predicted(plans[0]) == (plans.step_s[0], around(plans.step_s[0], plans.spread[0]))
    for index, each in enumerate(plans[1:], 1):
        predicted = plans.predicted(each)
        assert predicted is not None
        assert predicted[0] == plans.step_s[index] > plans.step_s[0]
        assert each.name == "auto"
    assert plans.predicted(replace(plan, batch=BATCH + 1)) is None


def measure_tiny(group: Group) -> str:
    """Measure the net of `tests.support.commands.TINY` on digits."""
    model = build_net("two-conv:4:6", (1, 8, 8), 10)
    traced = trace(model, torch.zeros(1, 1, 8, 8))
    times = {"budget_s": 0.5, "links_budget_s": 0.2, "slice_s": 0.002}
    return measure_job(group, traced, model, 32, MeasureOptions("two-conv:4:6", **times)).to_toml()


def assert_trains(tmp_path: Path, *options: str) -> None:
    plan = tmp_path / "plan.json"
    options = ("--devices", "2", "--plan", "auto", "--compare", "--save-plan", str(plan), *options)
    command = [sys.executable, "-m", "convoy", "train", *TINY, "--epochs", "2", *options]
    done = subprocess.run(command, cwd=tmp_path, env=QUIET, capture_output=True, text=True, timeout=110)
    assert (done.stderr, done.returncode) == ("", 0)
    together, alone_ = results(done.stdout)[:2], results(done.stdout)[2:]
    assert_close(together, alone_)
    assert "Plan auto: batch 32" in done.stdout
    assert re.search(
        r"Predicted: \S+ s a step \(nine of ten: \S+ - \S+ s\); measured: \S+ s, the median of 2", done.stdout
    )
    assert Plan.load(plan).devices == 2


@pytest.fixture(scope="module")
def tiny() -> Measurement:
    return Measurement.from_toml(on_processes(2, "tests.cli.test_auto:measure_tiny", limit_s=100)[0])


def test_forecast_marks_plans_that_do_not_fit(
    tiny: Measurement, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device 0's memory is limited to its receive buffers; both devices have watts."""
    monkeypatch.setenv("COLUMNS", "200")  # in 80 a long number elsewhere breaks the heading that is looked for
    first, second = tiny.fleet.devices
    devices = (
        replace(first, memory_bytes=20_000, idle_w=1.0, busy_w=9.0),
        replace(second, memory_bytes=10**9, idle_w=1.0, busy_w=2.0),
    )
    tables = tuple(replace(table, process_bytes=0) for table in tiny.device)
    file, plan = tmp_path / "fleet.toml", tmp_path / "plan.json"
    file.write_text(replace(tiny, fleet=replace(tiny.fleet, devices=devices), device=tables).to_toml())
    plan_verbs.plan(fleet=file, output=plan, **QUESTION)
    said = capsys.readouterr().out
    assert f"! data does not fit: {first.name} needs" in said
    assert "! auto" not in said
    assert "Plan auto, each device in a step" in said
    assert "J/image" in said
    saved = Plan.load(plan)
    graph = trace(build_net("two-conv:4:6", (1, 8, 8), 10), torch.zeros(1, 1, 8, 8)).graph
    assert memory_of(lower(saved, graph), graph)[0].total_bytes <= 20_000


def test_forecast_uses_the_wire_format(tiny: Measurement, tmp_path: Path) -> None:
    """`convoy plan --wire bf16` predicts every plan with it, and writes it to the file."""
    file, plan = tmp_path / "fleet.toml", tmp_path / "plan.json"
    file.write_text(tiny.to_toml())
    plan_verbs.plan(fleet=file, output=plan, wire="bf16", **QUESTION)
    assert Plan.load(plan).wire == "inexact-bf16"
    with pytest.raises(InputError, match="unknown wire format 'fp8'"):
        plan_verbs.plan(fleet=file, wire="fp8", **QUESTION)
    plan_verbs.plan(fleet=file, output=plan, outputs="where-computed", **QUESTION)
    assert Plan.load(plan).outputs == "where-computed"


@pytest.mark.slow
def test_command_trains_with_plan_auto(tmp_path: Path) -> None:
    assert_trains(tmp_path, "--slowdown", "1,3", "--budget", "1")
