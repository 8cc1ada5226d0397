"""`convoy simulate --fleet`: one step as a valid Chrome trace, and a plot."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from convoy import cli
from convoy.cli import simulating
from convoy.errors import InputError
from convoy.model.nets import graph_of
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.simulate.costs import described_costs
from convoy.simulate.simulator import simulate
from studies.fleets import make_plan
from tests.planner.test_planner_memory import fleet

NET = "two-conv:4:6"
ROWS = ((4e9, None), (2e9, None), (1e9, None))


@pytest.fixture
def fleet_file(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(fleet(*ROWS).to_toml())
    return path


def trace_of(tmp_path: Path, fleet_file: Path, plan: str) -> list[dict[str, Any]]:
    simulating.simulate(tmp_path, NET, fleet_file, plan, batch=12)
    events: list[dict[str, Any]] = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    return events


@pytest.mark.parametrize("plan", ["auto", "data"])
def test_local_outputs_combine_their_losses(tmp_path: Path, fleet_file: Path, plan: str) -> None:
    for outputs, expected in (("everywhere", False), ("where-computed", True)):
        simulating.simulate(tmp_path, NET, fleet_file, plan, batch=6000, outputs=outputs)
        names = {event["name"] for event in json.loads((tmp_path / "step.json").read_text())["traceEvents"]}
        assert any("loss of the global batch" in name for name in names) == expected
    with pytest.raises(InputError, match="unknown place of outputs 'here'"):
        simulating.simulate(tmp_path, NET, fleet_file, plan, outputs="here")


@pytest.mark.parametrize("plan", ["auto", "hybrid", "model"])
def test_the_trace_keeps_the_formats_rules(tmp_path: Path, fleet_file: Path, plan: str) -> None:
    """Complete events have a name, pid, tid, ts and dur in microseconds; metadata names every process and thread."""
    events = trace_of(tmp_path, fleet_file, plan)
    assert {e["ph"] for e in events} == {"X", "M"}
    named = {(e["name"], e["pid"], e["tid"]): e["args"] for e in events if e["ph"] == "M"}
    for event in events:
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is type(event["tid"]) is int
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] > 0
            assert isinstance(event["args"], dict)
            assert ("thread_name", event["pid"], event["tid"]) in named
        else:
            assert event["name"] in {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
    assert [named["process_name", device, 0]["name"] for device in range(3)] == ["d0", "d1", "d2"]
    for device in range(3):
        rows = [args["name"] for (what, pid, _), args in named.items() if what == "thread_name" and pid == device]
        assert {"compute", "send", "receive"} <= set(rows)


def test_the_trace_is_the_replay_in_microseconds(tmp_path: Path, fleet_file: Path) -> None:
    events = [e for e in trace_of(tmp_path, fleet_file, "hybrid") if e["ph"] == "X"]
    graph, costs = graph_of(NET), described_costs(fleet(*ROWS))
    timeline = simulate(lower(make_plan("hybrid", graph, 12, costs), graph), graph, costs)
    expected = sorted(
        (e.device, e.activity, e.start_s * 1e6, (e.end_s - e.start_s) * 1e6)
        for e in timeline.events
        if e.activity != "wait"
        if e.end_s > e.start_s
    )
    assert sorted((e["pid"], e["cat"], e["ts"], e["dur"]) for e in events) == expected
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(timeline.step_s * 1e6)


def test_plan_file_is_simulated_and_drawn(tmp_path: Path, fleet_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(NET)
    plan = tmp_path / "plan.json"
    plan.write_text(make_plan("model", graph, 12, described_costs(fleet(*ROWS))).to_json())
    assert Plan.load(plan).batch == 12
    out = tmp_path / "deep" / "out"
    arguments = ["simulate", "-o", str(out), "--net", NET, "--fleet", str(fleet_file), "--plan", str(plan)]
    monkeypatch.setattr(sys, "argv", ["convoy", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (0, None)
    assert sorted(path.name for path in out.iterdir()) == ["step.html", "step.json"]
    assert "Predicted step" in (out / "step.html").read_text()


@pytest.mark.parametrize(("plan", "words"), [("automatic", "a plan file"), ("none.json", "cannot read the plan")])
def test_simulate_refuses_bad_steps(tmp_path: Path, fleet_file: Path, plan: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        simulating.simulate(tmp_path / "out", NET, fleet_file, plan)
    assert not (tmp_path / "out").exists()


def test_without_a_fleet_it_names_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: it ran the study, which an installed Convoy does not contain."""
    monkeypatch.setattr(sys, "argv", ["convoy", "simulate", "-o", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "--fleet FILE" in message
    assert "python -m studies DIR [NET]" in message
    assert not (tmp_path / "out").exists()
