"""`make gpu` on a simulated accelerator, or a real one if there is one."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import CASES, GRAPH_CASES, PARTS, Place, Row, found_by, page_of, page_of_none
from convoy.model.nets import graph_of
from tests.conftest import ROOT
from tests.support import sim
from tests.support.model_zoo import make_importable


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sim.COMPILER is None, reason=sim.NEEDS)
def test_every_check_runs_and_passes() -> None:
    argv = [sys.executable, "-m", "benchmarks.gpu"]
    done = subprocess.run(argv, cwd=ROOT, text=True, capture_output=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *found = done.stdout.splitlines()
    assert first.startswith("torch finds no accelerator on this machine") or torch.accelerator.is_available()
    assert {word for line in found for word in line.split() if word in PARTS} == set(PARTS)
    assert any(line.startswith("ok streams") for line in found)


def test_cases_name_nets_that_exist() -> None:
    make_importable()
    for net, side, _ in {*CASES, *GRAPH_CASES}:
        assert graph_of(net, (3, side, side), 10).layers


def test_failed_check_is_a_row_and_the_run_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Place) -> Iterator[Row]:
        yield Row("staging", "before the error", "1")
        raise ValueError("no such net")

    monkeypatch.setitem(gpu.PARTS, "staging", fails)
    rows = list(found_by("staging", Place("cpu", simulated=True, environment={})))
    assert [(row.what, row.good) for row in rows] == [("before the error", None), ("ended by an error", False)]
    assert rows[1].found == "ValueError: no such net"


def test_committed_page_is_from_a_gpu_or_says_none_ran() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert page == page_of_none() or "| part | test | result | as expected |" in page
    assert all(f"| {part} |" in page for part in PARTS)


def test_page_lists_failed_checks() -> None:
    rows = [Row("parity", "float64", "1e-3", good=False), Row("staging", "pinned", "12 GB/s")]
    page = page_of(Place("cpu", simulated=True, environment={}), rows, 12.3)
    assert "| parity | float64 | 1e-3 | **no** |" in page
    assert "| staging | pinned | 12 GB/s |  |" in page
