"""The benchmarks: their configurations, statistics worked out by hand, the page, and a whole small run."""

import itertools
import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import score, validate, worker
from benchmarks.configurations import AUTO, PLAN_NAMES, SETS, Series, fleets_of, series_of
from benchmarks.drive import Drive, run
from benchmarks.figure import MARKS
from benchmarks.hardware import Ground, ground
from benchmarks.page import Paper, validation_page
from benchmarks.quiet import others_share, read, share
from benchmarks.reference import Reference
from benchmarks.results import FleetResult, NetResult, Row, read_result, write_result
from benchmarks.rounds import Turn, run_rounds, timed
from benchmarks.runners import AloneRunner, ConvoyRunner, sgd, train_steps
from benchmarks.score import error, error_at_measured_speed
from benchmarks.worker import WorkerJob, run_fleet
from convoy.data import Images
from convoy.errors import DataError, InputError
from convoy.execute.data import Loader
from convoy.execute.group import AloneGroup, Group
from convoy.execute.threads import run_on_threads
from convoy.fleet import read_fleet
from convoy.named import PLANS, Speeds, named_plan
from convoy.nets import build_net
from convoy.trace import trace
from tests.ranks import on_processes

CPU = torch.device("cpu")
QUICK_S = 1e-4  # of a stretch: these tests look at everything but the precision
GROUND = Ground("a processor", 2, "Linux 6", "3.11", "2.13", "0.1", "abc")

# --- configurations --------------------------------------------------------------------------------------------------


def test_the_validation_covers_what_was_asked_for() -> None:
    rows = [each for series in SETS["validation"] for each in series.configurations()]
    assert len(rows) == len(set(rows)) >= 60
    assert set(fleets_of("validation")) == {"mixed4", "even4", "straggler2", "many8", "mixed4-slow"}
    assert {each.plan for each in rows} == {*PLANS, AUTO}
    nets = {each.net for each in rows if each.fleet == "mixed4"}
    two_conv = {f"two-conv:{sizes}" for sizes in ("50:500", "150:800", "300:1000", "500:1500")}
    assert nets == two_conv | {"alexnet:4096", "resnet:8:16"}


@pytest.mark.parametrize("name", SETS)
def test_every_configuration_can_be_made(name: str) -> None:
    for series in series_of(name):
        devices = len(read_fleet(series.path).devices)
        assert devices > 1
        with torch.device("meta"):  # without the hundreds of megabytes
            assert list(build_net(series.net, (3, 32, 32), 10).parameters())
        assert len(series.configurations()) == len(series.batches) * len(series.plans)


def test_one_net_is_one_series_on_a_fleet() -> None:
    """Results are kept by net."""
    for name, every in SETS.items():
        nets = [(series.fleet, series.net) for series in every]
        assert len(nets) == len(set(nets)), name


def test_wrong_names_are_told_with_the_choices() -> None:
    with pytest.raises(InputError, match=r"validtion.*validation"):
        series_of("validtion")
    with pytest.raises(InputError, match=r"moon.*mixed4, straggler2"):
        series_of("smoke", "moon")
    with pytest.raises(InputError, match=r"ato.*auto.*ddp-even"):
        Series("mixed4", "two-conv:4:8", (8,), ("ato",))
    with pytest.raises(InputError, match="1 or more"):
        Series("mixed4", "two-conv:4:8", (0,))


def test_every_plan_of_convoy_is_drawn() -> None:
    assert set(MARKS) == {*PLANS, AUTO} == set(PLAN_NAMES)


# --- statistics by hand ----------------------------------------------------------------------------------------------


def row(plan: str, predicted_s: float | None, *rounds_s: float, fleet: str = "f", batch: int = 8, **other: Any) -> Row:
    return Row(fleet, "net", batch, plan, other.pop("device", None), predicted_s, other.pop("strategies", {}), 3,
               rounds_s, **other)  # fmt: skip


def test_an_error_is_that_of_the_median() -> None:
    assert score.error(row("data", 1.1, 1.0, 5.0, 0.9)) == pytest.approx(0.1)
    assert score.error(row("data", 0.5, 1.0, 5.0, 0.9)) == pytest.approx(-0.5)
    with pytest.raises(ValueError, match="has no prediction"):
        score.error(row("ddp-even", None, 1.0))


def test_spreads_by_hand() -> None:
    seconds = (1.0, 2.0, 4.0, 3.0, 5.0)
    assert score.full_spread(seconds) == pytest.approx(4 / 3)
    assert score.middle_spread(seconds) == pytest.approx((4 - 2) / 3)
    # Variance (4+1+0+1+4)/4 = 2.5; sqrt(2.5 / 5) = 0.7071; times 1.2533, over 3.
    assert score.standard_error(seconds) == pytest.approx(0.29541, rel=1e-4)
    assert score.middle_spread([2.0]) == 0
    assert math.isinf(score.standard_error([2.0]))
    assert score.percentile([3.0, 1.0, 2.0], 0.5) == 2
    assert score.percentile([1.0, 2.0, 3.0], 0.9) == pytest.approx(2.8)
    assert score.percentile([7.0], 0.9) == 7
    assert score.relative_range([2.0, 1.5, 1.9]) == pytest.approx(0.25)


def test_a_summary_is_of_absolute_errors() -> None:
    rows = [row("data", 1.1, 1.0), row("data", 0.7, 1.0), row("data", 1.0, 1.0), row("ddp-even", None, 1.0)]
    found = score.summarise(rows)
    assert found is not None
    assert (found.count, found.median, found.worst) == (3, pytest.approx(0.1), pytest.approx(0.3))
    assert found.mean == pytest.approx(0.4 / 3)
    assert found.mean_signed == pytest.approx(-0.2 / 3)
    assert score.summarise([row("ddp-even", None, 1.0)]) is None


def test_which_rows_are_filter_split() -> None:
    by_filter, by_batch = {"0": "batch(4,4)", "3": "filter(6,2)"}, {"0": "batch(4,4)"}
    assert score.splits_filters(row("master", 1.0, 1.0))
    assert score.splits_filters(row("model", 1.0, 1.0))
    assert score.splits_filters(row("auto", 1.0, 1.0, strategies=by_filter))
    assert not score.splits_filters(row("auto", 1.0, 1.0, strategies=by_batch))
    assert not score.splits_filters(row("hybrid", 1.0, 1.0, strategies=by_filter))


def test_choices_compare_auto_with_the_best_of_convoys_plans() -> None:
    rows = [
        *(row("auto", 1.0, 1.02), row("data", 1.0, 1.0), row("ddp-even", None, 0.1)),
        *(row("auto", 1.0, 1.0, batch=16), row("data", 1.0, 1.2, batch=16)),
        # 10 % behind, but the medians have standard errors of 1.2533 * 0.1 / sqrt(3) = 7.2 %: 0.1 - 2 * 0.0986 < 0.03.
        *(row("auto", 1.0, 1.0, 1.1, 1.2, fleet="g"), row("data", 1.0, 0.9, 1.0, 1.1, fleet="g")),
        *(row("auto", 1.0, 1.1, 1.1, fleet="h"), row("data", 1.0, 1.0, 1.0, fleet="h")),
        row("auto", 1.0, 1.0, fleet="alone"),
    ]
    found = score.choices(rows)
    assert [(c.fleet, c.batch, c.best) for c in found] == [
        ("f", 8, "data"), ("f", 16, "auto"), ("g", 8, "data"), ("h", 8, "data"),
    ]  # fmt: skip
    assert [c.behind for c in found] == pytest.approx([0.02, 0, 0.1, 0.1])
    assert [c.near for c in found] == [True, True, False, False]
    assert [c.near_within_noise for c in found] == [True, True, True, False]
    errors = [1.2533141 * 0.1 / math.sqrt(3) / median for median in (1.1, 1.0)]
    assert found[2].noise == pytest.approx(math.hypot(*errors))


def test_efficiency_is_throughput_over_the_sum_of_measured_solo_speeds() -> None:
    alone = [row("one-device", 1.0, 2.0, device=0), row("one-device", 1.0, 6.0, device=1)]
    together = row("auto", 1.0, 2.0)
    # 1/2 over 1/2 + 1/6.
    assert score.efficiency(together, [*alone, together]) == pytest.approx(0.75)
    assert score.efficiency(together, [row("one-device", 1.0, 2.0, device=0, batch=16)]) is None


# --- results and page ------------------------------------------------------------------------------------------------


def small_result(scale: float = 1.0) -> FleetResult:
    rows = (
        row("data", 1.0, 1.02 * scale, 1.0 * scale, 0.99 * scale, loss=2.3),
        row("master", 1.05, 1.0 * scale, 1.0 * scale, 1.0 * scale, loss=2.3000023, strategies={"0": "filter(4,4)"}),
        row("auto", 0.9, 0.9 * scale, 0.9 * scale, 0.9 * scale, loss=2.3, strategies={"0": "filter(6,2)"}),
    )
    net = NetResult(
        "net",
        "2026-01-01T00:00:00",
        "2026-01-01T00:01:00",
        "2026-01-01T00:02:00",
        {8: 0.5},
        {8: (1.0, 4.0)},
        rows,
        0.04,
    )
    return FleetResult(
        "smoke", "f", (("a", 0.5), ("b", None)), GROUND, "python -m it", "random images", {"rounds": 3.0}
    ).with_net(net)


def test_a_result_file_reads_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    write_result(path, small_result())
    assert read_result(path) == small_result()
    path.write_text(path.read_text()[:100])
    with pytest.raises(InputError, match="run the benchmark again"):
        read_result(path)


def test_only_results_of_the_same_code_and_settings_are_continued() -> None:
    result = small_result()
    assert replace(result, nets={}, command="another").continues(result)
    assert not replace(result, ground=replace(GROUND, revision="def")).continues(result)
    assert not replace(result, settings={"rounds": 5.0}).continues(result)
    same = Series("f", "net", (8,), ("data", "master", "auto"))
    assert result.holds(same)
    assert not result.holds(replace(same, batches=(8, 16)))
    unfinished = result.with_net(replace(result.nets["net"], finished=""))
    assert not unfinished.holds(same)
    assert unfinished.measured_rows() == ()


def test_the_page_says_what_the_numbers_say() -> None:
    good = validation_page(Paper([small_result()], "figures/validation.png"))
    # Errors 0, 5 % and 0; filter-split: master and auto.
    assert (
        "Mean absolute error over all: 1.7% of 3 rows (median 0.0%, worst 5.0%, with its sign +1.7%); the target of 5% is met."
        in good
    )
    assert "over the filter-split rows: 2.5% of 2 rows" in good
    assert "within 3 % of the best in 100% of 1 cases; the target of 95% is met" in good
    assert "differs by 1.0e-06 at most" in good
    assert "took during the runs: 4.0% of the machine at most" in good
    assert (
        "2 cores of a processor, Linux 6, Python 3.11, torch 2.13, convoy 0.1 at abc; random images; 2026-01-01."
        in good
    )
    assert "f (0.5/all core)" in good
    assert "| f | net | 8 | `data` | 1 s | 1 s | +0.0% | 3.0% | 1.5% | 3 x 3 |" in good
    assert "![Predicted against measured](figures/validation.png)" in good
    bad = validation_page(Paper([small_result(scale=2.0)], None))
    assert "Mean absolute error over all: 49.2% of 3 rows" in bad
    assert bad.count("is missed") == 4
    assert "![" not in bad


def test_the_command_makes_the_page_from_results_alone(tmp_path: Path) -> None:
    write_result(tmp_path / "straggler2.json", small_result())
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    command = ["--set", "smoke", "--page-only", "--output", str(tmp_path), "--page", str(page)]
    assert CliRunner().invoke(cli(), command).exit_code == 0
    assert "# Predicted and measured" in page.read_text()
    empty = CliRunner().invoke(cli(), ["--set", "smoke", "--page-only", "--output", str(page.parent)])
    assert empty.exit_code == 2
    assert "run the benchmark first" in empty.output
    wrong = CliRunner().invoke(cli(), [*command, "--fleet", "moon"])
    assert wrong.exit_code == 2
    assert "straggler2" in wrong.output


def test_a_drive_tells_its_command_and_refuses_what_cannot_be(tmp_path: Path) -> None:
    drive = Drive("benchmarks.validate", "smoke", ("mixed4",), tmp_path, None, 5, 0.6, 30, 20, 60, 60, 100)
    drive.check()
    assert drive.command() == (
        "python -m benchmarks.validate --set smoke --fleet mixed4 --rounds 5 --round 0.6 --budget 30 --links-budget 20 "
        "--alone 60 --tuning 60"
    )
    for wrong, words in (
        (replace(drive, rounds=0), "--rounds 0"),
        (replace(drive, limit_s=math.inf), "limit_s = inf"),
        (replace(drive, fleets=("moon",)), "moon"),
        (replace(drive, data_dir=tmp_path), "cifar-10"),
    ):
        with pytest.raises((InputError, DataError), match=words):
            wrong.check()


def test_measured_hours_are_not_written_over(tmp_path: Path) -> None:
    """A pass over a fleet was lost when it was started again after a commit: other code, so the file began anew."""
    fleet = read_fleet(series_of("smoke", "mixed4")[0].path)
    devices = tuple((device.name, device.cores) for device in fleet.devices)
    old = FleetResult("smoke", "mixed4", devices, replace(ground(), revision="older"), "c", "random images", {})
    write_result(tmp_path / "mixed4.json", old)
    drive = Drive("benchmarks.validate", "smoke", ("mixed4",), tmp_path, None, 5, 0.6, 30, 20, 60, 60, 100)
    with pytest.raises(InputError, match=r"revision older.*--again"):
        run(drive)
    assert read_result(tmp_path / "mixed4.json") == old


def cli() -> Any:
    import typer

    app = typer.Typer()
    app.command()(validate.main)
    return app


def test_the_ground_is_told() -> None:
    here = ground()
    assert here.torch == torch.__version__
    assert here.processor
    assert here.cores >= 1


# --- runners and rounds ----------------------------------------------------------------------------------------------


def images(count: int = 40) -> Images:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=generator)
    return Images(x, torch.arange(count) % 10, 10, (0.5,) * 3, (0.3,) * 3)


def plain_losses(net: str, batch: int, steps: int) -> list[float]:
    model = build_net(net, (3, 8, 8), 10)
    optimizer, batches = sgd(model), iter(Loader(images(), batch))
    return [train_steps(model, optimizer, batches, 1) for _ in range(steps)]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("net", ["two-conv:4:8", "resnet:8:4"])
def test_every_turn_of_a_plan_is_the_run_of_one_device_from_the_start(net: str, plan: str) -> None:
    model = build_net(net, (3, 8, 8), 10)
    graph = trace(model, torch.zeros(1, 3, 8, 8)).graph
    made = named_plan(plan, graph, 8, Speeds((3.0, 1.0)))

    def work(group: Group) -> list[tuple[float | None, float, int]]:
        runner = ConvoyRunner(model, made, group, images(), 8)
        turns = []
        for _ in range(2):
            first = runner.wake()
            second = train_steps(runner._part, runner._optimizer, runner._batches, 1)
            runner.train(2)
            runner.rest()
            turns.append((first, second, sum(p.numel() for p in runner._part.parameters())))
        return turns

    expected = plain_losses(net, 8, 2)
    for turns in run_on_threads(2, work):
        for first, second, kept in turns:
            assert [first, second] == pytest.approx(expected, rel=1e-5)
            assert kept == 0, "a resting runner holds no weights"


def test_one_device_trains_alone_while_the_others_rest() -> None:
    model = build_net("two-conv:4:8", (3, 8, 8), 10)
    runner = AloneRunner(model, images(), 8, step_s=0.1)
    for _ in range(2):
        assert runner.wake() == pytest.approx(plain_losses("two-conv:4:8", 8, 1)[0])
        runner.train(2)
        runner.rest()
    idle = AloneRunner(None, images(), 8, step_s=0.1)
    assert idle.wake() is None
    idle.train(1000)
    slow = AloneRunner(model, images(), 8, step_s=8.0)
    assert slow.wake() is None, "the loss of 2 samples of 8 is not that of the batch"


class Clocked:
    """A runner that takes a known time, and keeps what happened to it."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.story: list[str] = []

    def wake(self) -> float | None:
        self.story.append("wake")
        return None

    def train(self, steps: int) -> None:
        self.story.append(f"train {steps}")
        time.sleep(steps * self.step_s)

    def rest(self) -> None:
        self.story.append("rest")


def test_a_step_is_that_of_the_slowest_device() -> None:
    def work(group: Group) -> float:
        return timed(group, Turn(row("data", 1.0), Clocked(0.05 * group.device)))[0]

    first, second = run_on_threads(2, work)
    assert first == second
    assert 0.05 <= first < 2.0


def test_rounds_go_over_all_configurations_in_turn() -> None:
    story: list[str] = []

    class Telling(Clocked):
        def __init__(self, name: str, step_s: float = 0.0) -> None:
            super().__init__(step_s)
            self.name = name

        def wake(self) -> float | None:
            story.append(self.name)
            return 1.5 if self.name == "a" else None

    # 3 steps of 10 ms are above 1 ms, so c stops after the two rounds that all get.
    turns = [Turn(row("data", 1.0), Telling("a")), Turn(row("model", 1.0), Telling("b"), most_s=60.0)]
    turns.append(Turn(row("one-device", 1.0), Telling("c", 0.01), most_s=0.001))
    rows = run_rounds(AloneGroup(CPU), turns, 3, lambda _: None)
    assert "".join(story) == "abcabcab"
    assert [len(each.rounds_s) for each in rows] == [3, 3, 2]
    assert [each.loss for each in rows] == [1.5, None, None]
    assert rows[2].median_s >= 0.01


def test_what_others_take_is_what_is_left() -> None:
    # Two cores for 10 s, 12 s of them busy, 7 s of those our own.
    assert share(12.0, 7.0, 10.0, 2) == pytest.approx(0.25)
    assert share(6.9, 7.0, 10.0, 2) == 0, "clocks tick in hundredths"
    begin = read()
    end = begin.wall_s + 0.2
    while time.perf_counter() < end:
        pass
    now = read()
    assert now.own_s - begin.own_s > 0
    assert now.busy_s >= begin.busy_s
    assert 0 <= others_share(AloneGroup(CPU), begin) <= 1.1


# --- the worker, on real processes -----------------------------------------------------------------------------------


def worker_job(path: str, name: str = "smoke") -> WorkerJob:
    return WorkerJob(
        set=name, fleet="straggler2", output=Path(path), measurements=Path(path).parent, data_dir=None, rounds=2,
        round_s=0.01, alone_s=1.0, budget_s=0.2, links_budget_s=0.5, tuning_s=0.5, ground=GROUND, command="it",
    )  # fmt: skip


def run_smoke(group: Group, path: str) -> list[str]:
    """Twice, so that the second finds the work of the first; beside the file it leaves what stood there before the runs."""
    said: list[str] = []
    real, measure = worker.run_rounds, worker.measure_job

    def run_rounds_after_a_look(*arguments: Any) -> tuple[Row, ...]:
        if group.device == 0:
            Path(f"{path}.before").write_text(Path(path).read_text())
        return real(*arguments)

    worker.run_rounds = run_rounds_after_a_look
    worker.measure_job = partial(measure, stretch_s=QUICK_S)
    try:
        run_fleet(group, worker_job(path), None, said.append)
        run_fleet(group, worker_job(path), None, said.append)
    finally:
        worker.run_rounds, worker.measure_job = real, measure
    return said


def test_a_whole_run_is_predicted_first_then_measured_then_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "straggler2.json"
    said, _ = on_processes(2, "tests.test_benchmarks:run_smoke", str(path))
    before = read_result(Path(f"{path}.before"))
    (net,) = before.nets.values()
    assert [(r.plan, r.rounds_s) for r in net.rows] == [("data", ()), ("auto", ())]
    assert all(r.predicted_s and r.predicted_s > 0 for r in net.rows)
    assert net.finished == ""
    assert before.measured_rows() == ()

    assert said[-1] == "two-conv:4:8: was done before"
    assert said.count("two-conv:4:8: measuring") == 1
    result = read_result(path)
    rows = result.measured_rows()
    assert [(r.fleet, r.net, r.batch, r.plan) for r in rows] == [
        ("straggler2", "two-conv:4:8", 8, "data"), ("straggler2", "two-conv:4:8", 8, "auto"),
    ]  # fmt: skip
    assert all(len(r.rounds_s) == 2 and min(r.rounds_s) > 0 for r in rows)
    assert all(len(r.drifts) == 2 and min(r.drifts) > 0 for r in rows)
    assert rows[0].loss == pytest.approx(rows[1].loss, rel=1e-5)
    assert rows[0].strategies["*"] == "batch(4,4)"
    assert result.nets["two-conv:4:8"].solo_s[8] > (0, 0)
    assert "two-conv:4:8" in validation_page(Paper([result], None))
    assert (tmp_path / "straggler2.two-conv-4-8.toml").exists()
    predicted = [replace(r, rounds_s=(), drifts=(), loss=None) for r in rows]
    assert predicted == list(net.rows), "the runs change no prediction"


def test_a_round_is_seen_at_the_speed_of_the_measuring() -> None:
    """Predicted 2 s; rounds of 2, 3 and 5 s, on a machine that was 1, 1.5 and 2 times as slow: 2, 2 and 2.5 s then."""
    row = Row("f", "n", 1, "data", None, 2.0, {}, 1, (2.0, 3.0, 5.0), drifts=(1.0, 1.5, 2.0))
    assert (error(row), error_at_measured_speed(row)) == (pytest.approx(-1 / 3), 0.0)
    assert error_at_measured_speed(replace(row, drifts=())) == pytest.approx(-1 / 3)


def test_the_reference_tells_how_much_slower_the_devices_are() -> None:
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
