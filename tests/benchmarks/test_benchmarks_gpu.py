"""What `make gpu` shows, on a simulated accelerator where there is no real one."""

import subprocess
import sys

import pytest
import torch

from benchmarks.gpu import PARTS, Place, Row, page_of, page_of_none
from tests.conftest import ROOT
from tests.support import sim


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sim.COMPILER is None, reason=sim.NEEDS)
def test_every_part_runs_and_finds_nothing_that_is_not_as_it_should_be() -> None:
    argv = [sys.executable, "-m", "benchmarks.gpu"]
    done = subprocess.run(argv, cwd=ROOT, text=True, capture_output=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *found = done.stdout.splitlines()
    assert first.startswith("No accelerator that torch can use is here") or torch.accelerator.is_available()
    assert {word for line in found for word in line.split() if word in PARTS} == set(PARTS)
    assert any(line.startswith("ok streams") for line in found)


def test_the_committed_page_is_of_a_gpu_or_says_that_none_has_run() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert page == page_of_none() or "| part | what | found | as it should be |" in page
    assert all(f"| {part} |" in page for part in PARTS)


def test_the_page_says_what_is_not_as_it_should_be() -> None:
    rows = [Row("parity", "float64", "1e-3", good=False), Row("staging", "pinned", "12 GB/s")]
    page = page_of(Place("cpu", simulated=True, environment={}), rows, 12.3)
    assert "| parity | float64 | 1e-3 | **no** |" in page
    assert "| staging | pinned | 12 GB/s |  |" in page
