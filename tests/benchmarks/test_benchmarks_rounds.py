"""Benchmark rounds: turns, timing, and a whole small run."""

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import worker
from benchmarks.configurations import ALONE, SETS, Case
from benchmarks.hardware import Ground
from benchmarks.page import Paper, validation_page
from benchmarks.predictions import Prediction, Predictions, rows_of
from benchmarks.reference import Reference
from benchmarks.results import Row, Where, read_result
from benchmarks.rounds import Turn, run_rounds
from benchmarks.runners import UNCOUNTED_STEPS, ConvoyRunner, Spent, sgd, train_steps
from benchmarks.worker import WorkerJob, run_fleet
from convoy.comm.group import Group
from convoy.data import Images
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.plan.presets import Speeds, named_plan
from convoy.train.loader import Loader
from tests.support.processes import on_processes
from tests.support.threads import run_on_threads

QUICK_S = 1e-4  # of a stretch: these tests look at everything but the precision
GROUND = Ground("a processor", 2, "Linux 6", "3.11", "2.13", "0.1", "abc")


def row(plan: str, predicted_s: float | None, *rounds_s: float, fleet: str = "f", batch: int = 8, **other: Any) -> Row:
    return Row(fleet, "net", batch, plan, other.pop("device", None), predicted_s, other.pop("strategies", {}), 3,
               rounds_s, **other)  # fmt: skip


# --- runners and rounds ----------------------------------------------------------------------------------------------


def images(count: int = 40) -> Images:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=generator)
    return Images(x, torch.arange(count) % 10, 10, (0.5,) * 3, (0.3,) * 3)


def plain_losses(net: str, batch: int, steps: int) -> list[float]:
    model = build_net(net, (3, 8, 8), 10)
    optimizer, batches = sgd(model), iter(Loader(images(), batch))
    return [train_steps(model, optimizer, batches, 1) for _ in range(steps)]


@pytest.mark.parametrize(("net", "plan"), [("two-conv:4:8", "master"), ("resnet:8:4", "sharded")])
def test_every_turn_of_a_plan_follows_one_device(net: str, plan: str) -> None:
    model = build_net(net, (3, 8, 8), 10)
    graph = trace(model, torch.zeros(1, 3, 8, 8)).graph
    made = named_plan(plan, graph, 8, Speeds((3.0, 1.0)))

    def work(group: Group) -> list[tuple[float | None, float, int]]:
        runner = ConvoyRunner(model, made, group, images(), 8)
        turns = []
        for _ in range(2):
            first = runner.wake()
            next_loss = train_steps(runner._part, runner._optimizer, runner._batches, 1)
            runner.train(2)
            runner.rest()
            turns.append((first, next_loss, sum(p.numel() for p in runner._part.parameters())))
        return turns

    losses = plain_losses(net, 8, UNCOUNTED_STEPS + 1)
    for turns in run_on_threads(2, work):
        for first, next_loss, kept in turns:
            assert [first, next_loss] == pytest.approx([losses[0], losses[-1]], rel=1e-5)
            assert kept == 0, "a resting runner holds no weights"


class Clocked:
    """A runner that takes a known time and records its calls."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.story: list[str] = []

    def wake(self) -> float | None:
        self.story.append("wake")
        return None

    def train(self, steps: int) -> Spent:
        self.story.append(f"train {steps}")
        time.sleep(steps * self.step_s)
        return None

    def rest(self) -> None:
        self.story.append("rest")


def test_concurrent_solo_devices_get_one_row_each() -> None:
    """The slow one takes 2 steps, the fast one 8; each row has its own device's time and loss."""

    class Own(Clocked):
        def wake(self) -> float | None:
            return self.step_s

    def work(group: Group) -> tuple[Row, ...]:
        rows = tuple(replace(row(ALONE, 1.0, device=d), steps=steps) for d, steps in ((0, 2), (1, 8)))
        return run_rounds(group, [Turn(rows, Own((0.04, 0.01)[group.device]))], 2, lambda _: None)

    found, other = run_on_threads(2, work)
    assert found == other
    assert [each.loss for each in found] == [0.04, 0.01]
    assert found[0].median_s >= 0.04 > found[1].median_s >= 0.01


def test_clocks_split_step_time_by_cause() -> None:
    """Three rounds: device 0 computes for one, two and three seconds per step, device 1 for half of that."""

    class Clockwork(Clocked):
        rounds = 0

        def train(self, steps: int) -> tuple[float, float]:
            self.rounds += 1
            return steps * self.rounds * self.step_s, steps * 0.5

    def work(group: Group) -> Row:
        turn = Turn((row("auto", 1.0),), Clockwork((1.0, 0.5)[group.device]))
        return run_rounds(group, [turn], 3, lambda _: None)[0]

    found, _ = run_on_threads(2, work)
    assert found.seen == Where((2.0, 1.0), (0.5, 0.5))


def test_rounds_have_enough_steps_and_solo_devices_run_equally_long() -> None:
    where = Where((0.2, 0.2), (0.1, 0.1))
    plans = {"data": Prediction(a_plan().to_json(), 0.3, where, 0.05, "computing on a")}
    case = Case("f", "net", 8, (ALONE, "one-device", "ddp-even", "data"))
    rows = rows_of(case, Predictions(plans, (0.5, 2.0), 1.0), round_s=1.0)
    found = [(each.plan, each.device, each.predicted_s, each.steps) for each in rows]
    assert found == [
        (ALONE, 0, 0.5, 4), (ALONE, 1, 2.0, 1), ("one-device", 0, 0.5, 2), ("one-device", 1, 2.0, 1),
        ("ddp-even", None, None, 3), ("data", None, 0.3, 4),
    ]  # fmt: skip
    assert (rows[-1].foreseen, rows[-1].card_s, rows[-1].bound) == (where, 0.05, "computing on a")


def a_plan() -> Any:
    graph = trace(build_net("two-conv:4:8", (3, 8, 8), 10), torch.zeros(1, 3, 8, 8)).graph
    return named_plan("data", graph, 8, Speeds((3.0, 1.0)))


# --- the worker, on real processes -----------------------------------------------------------------------------------


SMOKE = "straggler2.two-conv-4-8.8.json"


def worker_job(folder: str, name: str = "smoke") -> WorkerJob:
    series = tuple(each for each in SETS[name] if each.fleet == "straggler2")
    return WorkerJob(
        set=name, fleet="straggler2", series=series, output=Path(folder), measurements=Path(folder) / "measured",
        data_dir=None, rounds=2, round_s=0.01, alone_s=1.0, budget_s=0.2, links_budget_s=0.5, tuning_s=0.5, case_s=60.0,
        ground=GROUND, command="it",
    )  # fmt: skip


def run_smoke(group: Group, folder: str) -> list[str]:
    """Run twice, so that the second run finds the results of the first, and keep the file from before."""
    said: list[str] = []
    real, measure = worker.run_rounds, worker.measure_job

    def run_rounds_after_a_look(*arguments: Any) -> tuple[Row, ...]:
        if group.device == 0:
            (Path(folder) / "before").write_text((Path(folder) / SMOKE).read_text())
        return real(*arguments)

    worker.run_rounds = run_rounds_after_a_look
    worker.measure_job = lambda *given: measure(*given[:-1], replace(given[-1], slice_s=QUICK_S))
    try:
        run_fleet(group, worker_job(folder), None, said.append)
        run_fleet(group, worker_job(folder), None, said.append)
    finally:
        worker.run_rounds, worker.measure_job = real, measure
    return said


def test_run_is_predicted_then_measured_then_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "measured").mkdir()
    said, _ = on_processes(2, "tests.benchmarks.test_benchmarks_rounds:run_smoke", str(tmp_path))
    before = read_result(tmp_path / "before")
    (net,) = before.nets.values()
    assert [(r.plan, r.rounds_s) for r in net.rows] == [("data", ()), ("auto", ())]
    assert all(r.predicted_s and r.predicted_s > 0 for r in net.rows)
    assert net.finished == ""
    assert before.measured_rows() == ()

    assert said[-1] == "two-conv:4:8: was done before"
    assert said.count("two-conv:4:8: measuring") == 1
    result = read_result(tmp_path / SMOKE)
    rows = result.measured_rows()
    assert [(r.fleet, r.net, r.batch, r.plan) for r in rows] == [
        ("straggler2", "two-conv:4:8", 8, "data"), ("straggler2", "two-conv:4:8", 8, "auto"),
    ]  # fmt: skip
    assert all(len(r.rounds_s) == 2 and min(r.rounds_s) > 0 for r in rows)
    assert all(len(r.drifts) == 2 and min(r.drifts) > 0 for r in rows)
    for each in rows:
        assert each.foreseen is not None
        assert each.seen is not None
        assert max(each.foreseen.compute_s) <= each.predicted_s
        assert 0 < max(each.seen.compute_s) < each.rounds_s[0] + each.rounds_s[1]
        assert each.bound
    assert rows[0].loss == pytest.approx(rows[1].loss, rel=1e-5)
    assert rows[0].strategies["*"] == "batch(4,4)"
    assert result.nets["two-conv:4:8"].solo_s[8] > (0, 0)
    assert "two-conv:4:8" in validation_page(Paper([result], None))
    assert (tmp_path / "measured" / "straggler2.two-conv-4-8.toml").exists()
    predicted = [replace(r, rounds_s=(), drifts=(), loss=None, seen=None) for r in rows]
    assert predicted == list(net.rows), "the runs change no prediction"


def test_reference_task_reports_the_slowdown() -> None:
    """A clock on which every look takes 0.25 s: one calculation lies between the looks at 0.25 and 0.5, so it counts 0.5 s.

    The bases are 0.125 and 0.25 s, in the mean of two readings: now it takes 4 and 2 times as long.
    """

    def work(group: Group) -> tuple[list[float], float, float]:
        ticks = itertools.count()
        reference = Reference(group, now=lambda: 0.25 * next(ticks), stretch_s=0.2)
        none = reference.drift()
        found = reference.read()
        reference.rebase([0.0625, 0.125], [0.1875, 0.375])
        return found, none, reference.drift()

    assert run_on_threads(2, work, timeout_s=20.0) == [([0.5, 0.5], 1.0, 3.0)] * 2
