"""`convoy plan --accumulate`: a step of several micro-batches."""

import re
from pathlib import Path
from typing import Any

import pytest

from convoy.cli import plan_verbs
from convoy.errors import PlanError
from convoy.model.nets import graph_of
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.simulate.memory import memory_of
from tests.support.described_fleets import fleet

NET, IMAGE, CLASSES, BATCH = "two-conv:4:6", (1, 8, 8), 10, 64
QUESTION: dict[str, Any] = {"image": "1,8,8", "batch": BATCH}
ROOM = 60_000


@pytest.fixture
def tight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "fleet.toml"
    file.write_text(fleet((1e9, ROOM), (5e8, ROOM)).to_toml())
    return file


def test_micro_batch_count_in_the_refusal_fits(tight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PlanError, match=r"Make a step of (\d+) micro-batches") as caught:
        plan_verbs.plan(NET, tight, **QUESTION)
    wanted = int(re.findall(r"--accumulate (\d+)", str(caught.value))[0])
    plan = tmp_path / "plan.json"
    plan_verbs.plan(NET, tight, output=plan, accumulate=wanted, **QUESTION)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        f"A step of {BATCH} samples is {wanted} micro-batches (--accumulate {wanted}; in Python, model.no_sync())"
        in said
    )
    assert f"--batch {BATCH} --accumulate {wanted} --devices 2" in said
    assert Plan.load(plan).batch == BATCH // wanted
    graph = graph_of(NET, IMAGE, CLASSES)
    needs = memory_of(lower(Plan.load(plan), graph), graph)
    assert max(each.total_bytes for each in needs) <= ROOM


def test_batch_norm_warning_names_micro_batch_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(fleet((1e9, 250_000), (5e8, 250_000)).to_toml())
    plan_verbs.plan("resnet:8:4", file, accumulate=16, **QUESTION)
    assert "with different numbers, since batch norm" in " ".join(capsys.readouterr().out.split())


def test_unequal_micro_batches_are_refused(tight: Path) -> None:
    with pytest.raises(PlanError, match="divides 64"):
        plan_verbs.plan(NET, tight, accumulate=3, **QUESTION)
