"""Several runs on one page: hand-calculated results and differences."""

import copy
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from convoy import cli
from convoy.errors import InputError
from convoy.report.page import LETTERS, comparison_of, write_comparison
from convoy.runlog.reader import read_log
from tests.report.test_report_page import Elements
from tests.support.run_logs import FLEET, PLAN, RUN, epoch, whole_run, write

Row = dict[str, Any]


def slower() -> list[Row]:
    """Return the run on one host by another plan: twice the step time, one unfinished epoch, no rebalancing."""
    run = copy.deepcopy(RUN)
    run["options"] |= {"plan": "data", "rebalance": False, "batch": 64}
    run["torch"] = "2.12.1"
    plan = copy.deepcopy(PLAN)
    plan["plan"]["name"] = "data"
    rows = [row for row in epoch(0) if row["what"] != "reshare"]
    for row in rows:
        if row["what"] == "step":
            row["s"] *= 2
    return [run, FLEET, plan, *rows]


def compared(tmp_path: Path, *logs: list[Row]) -> str:
    records = [read_log(write(tmp_path / f"run{place}.jsonl", rows)) for place, rows in enumerate(logs)]
    text = comparison_of(records)
    Elements(text)
    return text


def rows_of(text: str, section: str) -> dict[str, list[str]]:
    """Return the table of a section, by its first column."""
    part = text.partition(f'<section id="{section}"')[2].partition("</section>")[0]
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in re.findall(r"<tr>.*?</tr>", part, re.DOTALL)]
    return {row[0]: row[1:] for row in rows if row}


def test_two_runs_share_one_result_table(tmp_path: Path) -> None:
    found = rows_of(compared(tmp_path, whole_run(), slower()), "measures")
    assert found == {
        "plan": ["auto", "data"],
        "devices": ["3", "3"],
        "seconds of a step, median": ["20 ms", "40 ms"],
        "samples/s": ["3,200", "1,600"],
        "limit: sum of solo throughputs": ["7,000", "7,000"],
        "efficiency: samples/s divided by the limit": ["45.7%", "22.9%"],
        "predicted seconds of a step": ["16 ms (-20.0%)", "–"],
        "training loss, last epoch": ["0.5", "1.5"],
        "best test accuracy": ["87.5%", "62.5%"],
        "time to 62.5% test accuracy": ["400 ms", "800 ms"],
        "time so far": ["1.8 s", "800 ms"],
        "steps so far": ["40", "20"],
        "changes of shares": ["1", "0"],
    }


def test_only_differing_settings_are_listed(tmp_path: Path) -> None:
    found = rows_of(compared(tmp_path, whole_run(), slower()), "differences")
    assert found == {"plan": ["auto", "data"], "rebalance": ["true", "false"], "torch": ["2.13.0+cpu", "2.12.1"]}
    assert "Settings, versions and devices are the same." in compared(tmp_path, whole_run(), whole_run())
    other = slower()
    other[1] = copy.deepcopy(FLEET)
    other[1]["devices"][2]["host"] = "attic"
    other[0]["options"]["lr"] = 0.5
    found = rows_of(compared(tmp_path, slower(), other), "differences")
    assert found == {
        "lr": ["–", "0.5"],
        "device 2": ["cpu (2 threads) on lab2, slowed down 4x", "cpu (2 threads) on attic, slowed down 4x"],
    }


def test_curves_are_drawn_over_steps_and_time(tmp_path: Path) -> None:
    """Over time the slower run is the longer one; both begin at the left."""
    text = compared(tmp_path, whole_run(), slower())
    titles = re.findall(r"<figcaption>([^<]*) <", text)
    kinds = ("Training loss", "Test accuracy", "Samples/s")
    assert titles == [f"{kind} over {over}" for kind in kinds for over in ("steps", "time")]
    frames = dict(re.findall(r'aria-label="(Training loss over \w+)".*?data-frame="([^"]*)"', text))
    assert frames["Training loss over steps"].split()[:2] == ["1", "40"]
    left, right = map(float, frames["Training loss over time"].split()[:2])
    assert (left, right) == pytest.approx((0.02, 1.8))


def test_new_runs_and_runs_without_a_plan_are_compared(tmp_path: Path) -> None:
    text = compared(tmp_path, [RUN], [RUN, *(row for row in epoch(0) if row["what"] != "reshare")])
    assert rows_of(text, "measures")["samples/s"] == ["–", "3,200"]
    assert rows_of(text, "measures")["time to – test accuracy"] == ["–", "–"]
    assert text.count("The log has no plan.") == 2


def test_more_runs_than_colours_are_refused(tmp_path: Path) -> None:
    compared(tmp_path, *[whole_run()] * len(LETTERS))
    with pytest.raises(InputError, match="9 runs on one page: at most 8 have colours"):
        compared(tmp_path, *[whole_run()] * 9)


def test_comparison_is_written_to_the_given_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        write(folder / "log.jsonl", whole_run())
    assert write_comparison(folders, tmp_path / "page.html") == tmp_path / "page.html"
    assert "<b>one</b>" in (tmp_path / "page.html").read_text()
    monkeypatch.setattr(sys, "argv", ["convoy", "report", "one", "two/log.jsonl"])
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert not ended.value.code
    assert capsys.readouterr().out == "wrote comparison.html\n"
    assert (tmp_path / "comparison.html").read_bytes() == (tmp_path / "page.html").read_bytes()
