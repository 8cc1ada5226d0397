"""A run's log: its location, lines, writing and continuation."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import convoy.cli.train_job  # noqa: F401 - before the first look at open files
from convoy import cli
from convoy.config.run_file import resolve_settings
from convoy.data import load
from convoy.errors import InputError
from convoy.plan.lower import lower
from convoy.plan.text import layer_rows, work_shares
from convoy.report.numbers import seconds
from convoy.report.page import write_report
from convoy.runlog.reader import read_log
from convoy.runlog.schema import EvaluationLine, PlanLine, ReshardLine
from convoy.runlog.writer import RunLog, plan_line
from convoy.train.record import EpochResult, Evaluation, StepResult
from tests.support.one_device import by_name, graph_of
from tests.support.processes import PLACE, on_processes

load("digits")  # imports scikit-learn, likewise

TINY = ["--net", "two-conv:4:6", "--limit", "80", "--batch", "32", "--speeds", "1"]
"""Epochs of three steps: 32, 32, 16."""


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (*PLACE, "CONVOY_DEVICE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CONVOY_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def train(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    """Train in this process and return the exit status."""
    monkeypatch.setattr(sys, "argv", ["convoy", "train", *argv])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def rows_of(log: Path, what: str = "") -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [row for row in rows if what in ("", row["what"])]


# ------------------------------------------------------------------------------------------------------------- where


def test_a_training_makes_a_folder_by_default(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends with the command that makes a page; its settings and its plan can be run again."""
    assert train(monkeypatch, *TINY, "--plan", "master", "--seed", "7") == 0
    (folder,) = runs.iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-\d\d\.\d\d\.\d\d-two-conv-4-6", folder.name)
    assert sorted(path.name for path in folder.iterdir()) == ["log.jsonl", "plan.json", "run.toml"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"A page of this run: convoy report {folder}"
    assert resolve_settings(folder / "run.toml", {}).settings.seed == 7
    again = ["--plan", str(folder / "plan.json"), "--log", str(tmp_path / "again.jsonl")]
    assert train(monkeypatch, *TINY, "--seed", "7", *again) == 0
    one, two = rows_of(folder / "log.jsonl", "step"), rows_of(tmp_path / "again.jsonl", "step")
    assert [row["loss"] for row in one] == [row["loss"] for row in two]
    assert list(runs.iterdir()) == [folder], "--log FILE makes no folder"


def test_log_can_be_disabled(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        assert train(monkeypatch, *TINY, "--log", "none") == 0
    finally:
        monkeypatch.undo()
    assert "convoy report" not in capsys.readouterr().out
    assert not runs.exists()
    assert list(tmp_path.iterdir()) == []


def test_unwritable_folder_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CONVOY_RUNS", str(tmp_path / "file"))
    monkeypatch.setattr("convoy.cli.train_session.fit", lambda *_, **__: pytest.fail("it went on"))
    assert train(monkeypatch, *TINY) == 2
    assert re.search(r"cannot make the folder .*file is no folder; give --log FILE, or", capsys.readouterr().err)


def test_a_resumed_run_continues_its_log(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed within a line, behind its last checkpoint: half a line is dropped, steps done twice count once."""
    folder = tmp_path / "run"
    keeping = [*TINY, "--checkpoint", str(folder), "--checkpoint-steps", "2"]
    assert train(monkeypatch, *keeping, "--epochs", "1") == 0
    assert not runs.exists()
    log = folder / "log.jsonl"
    log.write_text(
        log.read_text() + '{"what": "step", "step": 3, "epoch": 1, "loss": 99.0, "samples": 32, "s": 9.0}\n{"what": "st'
    )
    assert read_log(log).is_cut
    assert train(monkeypatch, *keeping, "--epochs", "2", "--resume") == 0
    assert [row["from_step"] for row in rows_of(log, "run")] == [0, 3]
    record = read_log(log)
    assert [row.step for row in record.steps] == list(range(6))
    assert all(row.loss is not None and row.loss < 9 for row in record.steps)
    assert [epoch.epoch for epoch in record.epochs] == [0, 1]
    assert [each.step for each in record.plans] == [0, 3]


# ------------------------------------------------------------------------------------------------------- which lines


def test_job_log_has_all_data_for_the_page(tmp_path: Path) -> None:
    """On two processes, with a plan that the planner chose: a prediction, its timeline, the fleet it was made for."""
    fleet, folder = tmp_path / "fleet.toml", tmp_path / "run"
    fleet.write_text(on_processes(2, "tests.cli.test_auto:measure_tiny", limit_s=60)[0])
    argv = ["--net", "two-conv:4:6", "--limit", "320", "--batch", "32", "--epochs", "2", "--rebalance"]
    argv += ["--plan", "auto", "--fleet", str(fleet), "--checkpoint", str(folder), "--page"]
    (printed,), silent = on_processes(2, "tests.support.commands:train_all", [argv], joined=False, limit_s=60)
    assert silent == [""]
    files = {path.name for path in folder.iterdir() if path.is_file()}
    assert {"fleet.toml", "log.jsonl", "plan.json", "run.toml"} <= files
    record = read_log(folder / "log.jsonl")
    assert record.end is not None
    assert not record.is_cut
    assert record.fleet is not None
    predicted = record.prediction
    assert predicted is not None
    shown = re.search(r"Predicted: ([\d.e-]+) s a step", printed)
    assert shown is not None
    assert f"{predicted.step_s:.3g}" == shown[1], "the screen and the log tell the same prediction"
    assert predicted.limit_samples_per_s == pytest.approx(sum(row.samples_per_s or 0 for row in record.fleet.devices))
    assert {device for device, *_ in predicted.events} <= {0, 1}
    assert max(event[4] for event in predicted.events) <= predicted.one_pass.s * (1 + 1e-9)
    assert [line.epoch for line in record.utilization] == [0, 1]
    for line in record.utilization:
        assert line.steps == 9
        for device in range(2):
            assert line.wall_s[device] > 0
            assert line.compute_s[device] + line.exchange_s[device] <= line.wall_s[device]
    timed = [s for s in record.seconds if s is not None]
    assert len(timed) == 18, "the first step of each epoch is not timed"
    assert all(0 < s < 60 for s in timed)
    assert {row.lr for row in record.steps} == {0.01}
    assert f"A page of this run: {folder / 'report.html'}" in printed
    text = (folder / "report.html").read_text()
    assert f"a micro-batch takes {seconds(predicted.one_pass.s)}" in text
    assert 'http-equiv="refresh"' not in text, "the run is over"


def test_a_plan_line_has_the_numbers_of_the_plan_table() -> None:
    plan, graph = by_name("hybrid", "two-conv"), graph_of("two-conv")
    line, table = plan_line(plan, graph), layer_rows(plan, graph)
    for row, shown in zip(line.layers, table, strict=True):
        assert (row.layer, row.strategy, row.parts, row.bytes) == (
            shown.layer,
            shown.strategy,
            shown.parts,
            shown.bytes_,
        )
    assert line.work == work_shares(lower(plan, graph), graph)


# ---------------------------------------------------------------------------------------------------- logs of before


def test_a_log_of_an_older_version_is_read(tmp_path: Path) -> None:
    """Written by version 0.1.0 before its lines became models: `data` with other shares, resumed with the planner's choice."""
    path = Path(__file__).with_name("old_log.jsonl")
    record = read_log(path)
    assert [row.step for row in record.steps] == list(range(40))
    assert [epoch.epoch for epoch in record.epochs] == [line.epoch for line in record.utilization] == [0, 1, 2, 3]
    assert [row.step for row in record.evaluations] == [10, 20, 30, 40]
    assert [(each.step, type(each.line)) for each in record.plans] == [(0, PlanLine), (11, ReshardLine), (30, PlanLine)]
    assert [layer.parts for layer in record.reshards[0].layers] == [("90", "38")] * 8
    assert record.plan is not None
    assert record.plan.plan.name == "auto"
    assert record.prediction is record.plans[-1].prediction is not None
    assert record.prediction.step_s == pytest.approx(0.013981265862885587)
    assert record.end is not None
    assert record.end.step_s == pytest.approx(0.0246, abs=1e-4)
    assert record.step_s == pytest.approx(record.end.step_s, rel=1e-3), "the steps of the plan before do not count"
    assert "Finished: 40 of 40 steps." in write_report(path, tmp_path / "page.html").read_text()


def test_the_log_of_a_suspended_device_is_continued_by_another(tmp_path: Path) -> None:
    """Regression: it held the file's lock while suspended, so no log had the others' steps."""
    path = tmp_path / "log"
    with RunLog(path) as stopped:
        stopped.write(EvaluationLine(step=0, epoch=0, accuracy=0.1, best=True))
        with pytest.raises(InputError, match="another run writes the log"):
            RunLog(path, 1)
        with RunLog(path, 1, from_lost=True) as log:
            stopped.write(EvaluationLine(step=7, epoch=0, accuracy=0.1, best=False))
            log.write(EvaluationLine(step=1, epoch=0, accuracy=0.2, best=True))
    assert [line["step"] for line in map(json.loads, path.read_text().splitlines())] == [0, 1]
    assert [each.name for each in tmp_path.iterdir()] == ["log"]


@pytest.mark.parametrize(("place", "why"), [(".", "Is a directory"), ("nowhere/log", "No such file or directory")])
def test_unwritable_log_names_a_remedy(place: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"cannot write the log .*: {why}; give a path in a folder that exists"):
        RunLog(tmp_path / place)


def test_a_diverged_training_still_writes_json(tmp_path: Path) -> None:
    """NaN is not JSON: most readers refuse a line that holds one."""
    with RunLog(tmp_path / "log") as log:
        log.on_step(StepResult(0, 0, float("nan"), 5, 0.5))
        log.on_evaluation(Evaluation(0, 1, 0.1, ends_epoch=True, is_best=True))
        log.on_epoch(EpochResult(0, float("inf"), 0.1, 1.0, 5.0, 0.5))
        log.run({"times": [1.0, float("nan")]}, images=5)
    lines = (tmp_path / "log").read_text().splitlines()
    rows = [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in lines]
    assert rows[0].pop("s") >= 0
    assert rows[:3] == [
        {"what": "step", "step": 0, "epoch": 0, "loss": None, "samples": 5, "lr": 0.5},
        {"what": "evaluation", "step": 1, "epoch": 0, "accuracy": 0.1, "best": True},
        {"what": "epoch", "epoch": 0, "loss": None, "accuracy": 0.1, "train_s": 1.0, "samples_per_s": 5.0, "lr": 0.5},
    ]
    assert rows[3]["options"] == {"times": [1.0, None]}
