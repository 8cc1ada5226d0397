"""The benchmarks: configurations, hand-calculated statistics, results and pages."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import score
from benchmarks.configurations import PLAN_NAMES, SETS, Case, Choice, Series, fleet_named, series_of
from benchmarks.drive import Drive, run
from benchmarks.figure import MARKS
from benchmarks.hardware import Ground, ground
from benchmarks.page import Paper, validation_page
from benchmarks.results import FleetResult, NetResult, Row, read_result, still_to_run, write_result
from convoy.errors import DataError, InputError
from convoy.model.nets import build_net

GROUND = Ground("a processor", 2, "Linux 6", "3.11", "2.13", "0.1", "abc")

# --- configurations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETS)
def test_every_configuration_builds(name: str) -> None:
    for series in series_of(name):
        assert fleet_named(series.fleet).devices
        with torch.device("meta"):  # without the hundreds of megabytes
            assert list(build_net(series.net, (3, 32, 32), 10).parameters())
        assert [case.batch for case in series.cases()] == list(series.batches)


def test_unknown_names_list_the_choices() -> None:
    with pytest.raises(InputError, match=r"validtion.*validation"):
        series_of("validtion")
    with pytest.raises(InputError, match=r"moon.*mixed4, straggler2"):
        Choice("smoke", fleets=("moon",)).series()
    with pytest.raises(InputError, match=r"moon.*equal1.*mixed4"):
        fleet_named("moon")
    with pytest.raises(InputError, match=r"ato.*auto.*ddp-even"):
        Series("mixed4", "two-conv:4:8", (8,), ("ato",))
    with pytest.raises(InputError, match="1 or more"):
        Series("mixed4", "two-conv:4:8", (0,))


def test_any_case_can_be_selected_alone() -> None:
    chosen = Choice(None, ("even4",), ("two-conv:500:1500",), (16,), ("master",)).series()
    assert chosen == (Series("even4", "two-conv:500:1500", (16,), ("master",)),)
    assert [case.name for case in chosen[0].cases()] == ["even4.two-conv-500-1500.16"]
    with pytest.raises(InputError, match=r"--fleet, --net and --batch"):
        Choice(None, nets=("two-conv:4:8",)).series()
    with pytest.raises(InputError, match="moon"):
        Choice(None, ("moon",), ("two-conv:4:8",), (16,)).series()


# --- statistics by hand ----------------------------------------------------------------------------------------------


def row(plan: str, predicted_s: float | None, *rounds_s: float, fleet: str = "f", batch: int = 8, **other: Any) -> Row:
    return Row(fleet, "net", batch, plan, other.pop("device", None), predicted_s, other.pop("strategies", {}), 3,
               rounds_s, **other)  # fmt: skip


def test_errors_use_the_median() -> None:
    assert score.error(row("data", 1.1, 1.0, 5.0, 0.9)) == pytest.approx(0.1)
    assert score.error(row("data", 0.5, 1.0, 5.0, 0.9)) == pytest.approx(-0.5)
    with pytest.raises(ValueError, match="has no prediction"):
        score.error(row("ddp-even", None, 1.0))


def test_spread_matches_hand_calculation() -> None:
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


def test_summary_uses_absolute_errors() -> None:
    rows = [row("data", 1.1, 1.0), row("data", 0.7, 1.0), row("data", 1.0, 1.0), row("ddp-even", None, 1.0)]
    found = score.summarise(rows)
    assert found is not None
    assert (found.count, found.median, found.worst) == (3, pytest.approx(0.1), pytest.approx(0.3))
    assert found.mean == pytest.approx(0.4 / 3)
    assert found.mean_signed == pytest.approx(-0.2 / 3)
    assert score.summarise([row("ddp-even", None, 1.0)]) is None


def test_auto_is_compared_with_the_best_convoy_plan() -> None:
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
    assert replace(result, nets={}, command="another", set="another").continues(result)
    assert not replace(result, ground=replace(GROUND, revision="def")).continues(result)
    assert not replace(result, settings={"rounds": 5.0}).continues(result)


def test_only_incomplete_cases_are_run_again(tmp_path: Path) -> None:
    path, result = tmp_path / "f.net.8.json", small_result()
    same, empty = Case("f", "net", 8, ("data", "auto")), replace(result, nets={})
    assert still_to_run(path, empty, same) == same, "there is no file"
    write_result(path, result)
    assert still_to_run(path, empty, same) is None
    assert still_to_run(path, replace(empty, data="CIFAR-10"), same) == same
    # The plans of a case take turns, so that those that were there run again.
    more = still_to_run(path, empty, replace(same, plans=("model", "auto")))
    assert more is not None
    assert more.plans == ("model", "auto", "data", "master")
    unfinished = result.with_net(replace(result.nets["net"], finished=""))
    write_result(path, unfinished)
    assert still_to_run(path, empty, same) == same
    assert unfinished.measured_rows() == ()


def test_page_text_matches_the_numbers() -> None:
    good = validation_page(Paper([small_result()], "figures/validation.png"))
    # Errors 0, 5 % and 0; filter-split: master and auto.
    assert (
        "Mean absolute error of all rows (3): 1.7% (median 0.0%, worst 5.0%, signed mean +1.7%); the target of 5% is met."
        in good
    )
    assert "of the filter-split rows (2): 2.5%" in good
    assert "within 3 % of the best plan's in 100% of 1 cases; the target of 95% is met" in good
    assert (
        "contains 100% of 3 rows; the target of 90% is met. Its factor was calculated from these rows. "
        "Nets below the target: none." in good
    )
    assert "differ by 1.0e-06 at most" in good
    assert "used 4.0% of the machine's processor time at most" in good
    assert (
        "emulated on 2 cores of a processor, Linux 6, Python 3.11, torch 2.13; random images; convoy at abc; 2026-01-01."
        in good
    )
    assert "f (0.5/all core)" in good
    assert "| f | net | 8 | `data` | 1 s | 1 s | +0.0% | 3.0% | 1.5% | 3 x 3 |" in good
    assert "![Predicted against measured](figures/validation.png)" in good
    bad = validation_page(Paper([small_result(scale=2.0)], None))
    assert "Mean absolute error of all rows (3): 49.2%" in bad
    assert "Nets below the target: net 0%." in bad
    assert bad.count("is missed") == 5
    assert "![" not in bad


def a_drive(output: Path, **changed: Any) -> Drive:
    drive = Drive(
        "benchmarks.validate", Choice("smoke", ("mixed4",)), output, None, 5, 0.6, 30, 20, 60, 60, 500, 100
    )  # fmt: skip
    return replace(drive, **changed)


def test_drive_reports_its_command_and_refuses_bad_options(tmp_path: Path) -> None:
    drive = a_drive(tmp_path)
    drive.check()
    assert drive.command() == (
        "python -m benchmarks.validate --set smoke --fleet mixed4 --rounds 5 --round 0.6 --budget 30 --links-budget 20 "
        "--alone 60 --tuning 60 --case-limit 500"
    )
    own = a_drive(tmp_path, choice=Choice(None, ("even4",), ("two-conv:4:8",), (8,), ("auto", "data")))
    assert "validate --fleet even4 --net two-conv:4:8 --batch 8 --plan auto --plan data --rounds" in own.command()
    for changed, words in (
        ({"rounds": 0}, "--rounds 0"),
        ({"limit_s": math.inf}, "limit_s = inf"),
        ({"choice": Choice("smoke", ("moon",))}, "moon"),
        ({"data_dir": tmp_path}, "cifar-10"),
    ):
        with pytest.raises((InputError, DataError), match=words):
            a_drive(tmp_path, **changed).check()


def test_existing_results_are_not_overwritten(tmp_path: Path) -> None:
    """Regression: a restart after a commit overwrote the file and lost hours of results."""
    devices = tuple((device.name, device.cores) for device in fleet_named("mixed4").devices)
    old = FleetResult("smoke", "mixed4", devices, replace(ground(), revision="older"), "c", "random images", {})
    write_result(tmp_path / "mixed4.two-conv-4-8.8.json", old)
    with pytest.raises(InputError, match=r"revision older.*--again"):
        run(a_drive(tmp_path))
    assert read_result(tmp_path / "mixed4.two-conv-4-8.8.json") == old


def test_every_plan_has_its_mark_in_the_figures() -> None:
    assert set(MARKS) == set(PLAN_NAMES)
    assert len(set(MARKS.values())) == len(MARKS)
