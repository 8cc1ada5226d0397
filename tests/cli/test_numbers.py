"""The numbers that `convoy train` prints agree with each other."""

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from convoy.cli.reporter import Reporter
from convoy.report.screen import Screen
from convoy.runlog.observers import StepTimer
from convoy.runlog.schema import DeviceLine
from convoy.train.autotune import is_end
from convoy.train.rebalance import Balancer, Keep, Reshard, observe
from convoy.train.record import EpochResult, Evaluation, History, StepResult
from tests.support.commands import convoy_in_process
from tests.support.one_device import by_name, graph_of


def screen() -> tuple[Screen, io.StringIO]:
    file = io.StringIO()
    return Screen(visible=True, console=Console(file=file, width=200)), file


def cells(text: str) -> list[list[str]]:
    """Return the numbers of a printed table, row by row."""
    return [[c.strip() for c in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]


def test_device_seconds_sum_to_the_title() -> None:
    """Regression: over 18.4 s a device computed 49.7 s and waited 33.1 s, since the title left out the tests."""
    shown, file = screen()
    uses = [
        DeviceLine(
            device=d, slowdown=1.0, speed_share=0.5, work_share=0.5, compute_s=49.7 - d, exchange_s=33.1, sent_bytes=5,
            wall_s=85.0,
        )
        for d in range(2)
    ]  # fmt: skip
    shown.usage(uses, History(epochs=[EpochResult(0, 1.0, 0.5, 18.4, 54.0, 0.1)]))
    text = file.getvalue()
    assert "Devices over 85.0 s: 18.4 s of training, 66.6 s of evaluation" in text
    for row in cells(text):
        assert sum(float(cell.removesuffix(" s")) for cell in row[4:7]) == pytest.approx(85.0)


def test_samples_per_second_excludes_tests_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the bar showed 47 samples/s and the epoch line 231, since the bar counted test time."""
    now_s = 0.0
    monkeypatch.setattr("convoy.report.screen.time.monotonic", lambda: now_s)
    shown, file = screen()
    with shown.progress("three devices", 2, 400, tests=90) as bar:
        for epoch in range(2):
            for step in range(4):
                now_s += 5.0
                bar.on_step(StepResult(0, epoch, 1.0, 100, 0.1))
                if step == 1:
                    now_s += 40.0
                    bar.on_evaluation(Evaluation(epoch, step, 0.5, ends_epoch=False, is_best=False))
            now_s += 100.0
            bar.on_evaluation(Evaluation(epoch, 4, 0.5, ends_epoch=True, is_best=False))
            bar.on_epoch(EpochResult(epoch, 1.0, 0.5, 20.0, 20.0, 0.1))
    text = file.getvalue()
    assert "2 epochs of 400 images, tested on 90" in text
    told = re.findall(r"([\d,.]+) samples/s", text)
    assert len(told) > 3
    assert set(told) == {"20"}


def test_a_run_prints_what_it_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One set of records: samples over seconds is samples/s, the rows add up, and what a limit leaves out is said."""
    log = tmp_path / "log.jsonl"
    argv = ["train", "--net", "two-conv:2:3", "--batch", "32", "--limit", "96", "--epochs", "2", "--devices", "1"]
    assert convoy_in_process(monkeypatch, [*argv, "--log", str(log)]) == 0
    out = capsys.readouterr().out
    assert "2 epochs of 96 images, tested on 360" in out
    epochs = re.findall(r"epoch \d/2: .* ([\d,]+) samples/s, ([\d.]+) s", out)
    assert len(epochs) == 2
    (use,) = [DeviceLine(**row) for row in map(json.loads, log.read_text().splitlines()) if row["what"] == "device"]
    assert use.wall_s is not None
    wall_s, train_s, rest_s = map(
        float, re.findall(r"over ([\d.]+) s: ([\d.]+) s of training, ([\d.]+) s of evaluation", out)[0]
    )
    assert train_s == pytest.approx(sum(float(seconds) for _, seconds in epochs), abs=0.11)
    assert train_s + rest_s == pytest.approx(wall_s, abs=0.11)
    assert wall_s == pytest.approx(use.wall_s, abs=0.06)
    (row,) = [row for row in cells(out) if row[0] == "0" and len(row) == 8]
    assert sum(float(cell.removesuffix(" s")) for cell in row[4:7]) == pytest.approx(wall_s, abs=0.16)
    assert use.compute_s + use.exchange_s <= use.wall_s


def test_current_plan_is_printed_before_its_shares_change() -> None:
    """Regression: the table showed 18/11/27/8, but another plan with 20/14/30/0 had won since."""
    graph = graph_of("two-conv")
    first, second = by_name("master", "two-conv"), by_name("data", "two-conv")

    group = SimpleNamespace(ids=(0, 1, 2, 3))
    part: Any = SimpleNamespace(plan=second, group=group, traced={True: SimpleNamespace(graph=graph)})
    shown, file = screen()
    reporter: Any = SimpleNamespace(screen=shown, part=part, plans=[first], log=None, timer=StepTimer(8))
    Reporter.on_decision(reporter, 7, Reshard(second, (), "autotune: plan 1 0.2 s; now plan 2"))
    assert "Plan" not in file.getvalue()
    chosen = Keep("autotune: plan 1 0.2 s, plan 2 0.1 s a step; plan 2 continues")
    assert is_end(chosen)
    Reporter.on_decision(reporter, 9, chosen)
    table = {row[0]: row[3:7] for row in cells(file.getvalue())}
    state, decision = Balancer.start(second, graph), Keep("nothing yet")  # type: tuple[Balancer, Decision]
    while not isinstance(decision, Reshard):
        state, decision = observe(state, {"conv1": [0.9, 0.1, 0.1, 0.1]})
    begins = re.findall(r"\d+(?:/\d+){3}", decision.reason)[0]
    assert begins == "/".join(table["conv1"]).replace("-", "0")
