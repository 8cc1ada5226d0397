"""Three accelerators and a CPU: the link rate they need, and the command on simulated ones."""

import re
import subprocess
import sys

import pytest
import torch

from benchmarks.three import IMAGE, NET, PUBLISHED, speedup, wire_for
from convoy.model.nets import graph_of
from tests.conftest import ROOT
from tests.support import sim


def test_link_rate_is_the_lowest_that_reaches_the_published_speedup() -> None:
    graph = graph_of(NET, IMAGE, 10)
    least, most = wire_for(graph, "gtx1080", "data-by-speed", free=True)
    assert least is not None
    assert speedup(graph, "gtx1080", "data-by-speed", least, free=True) >= PUBLISHED
    assert speedup(graph, "gtx1080", "data-by-speed", least / 1.2, free=True) < PUBLISHED < most
    assert wire_for(graph, "gtx1080", "master", free=False)[0] is None, "processors handle every byte, on any wire"


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.skipif(sim.COMPILER is None, reason=sim.NEEDS)
@pytest.mark.skipif(torch.accelerator.is_available(), reason="has an accelerator of its own")
def test_the_command_trains_on_three_simulated_accelerators_and_a_cpu() -> None:
    argv = [sys.executable, "-m", "benchmarks.three", "--net", "two-conv:8:12", "--no-predict"]
    done = subprocess.run(argv, cwd=ROOT, text=True, capture_output=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^measured: `(master|auto|auto, one sample at a time)`, .*, (\S+)$", done.stdout, re.MULTILINE)
    assert [plan for plan, _ in rows] == ["master", "auto", "auto, one sample at a time"], done.stdout
    assert all(float(apart) < 1e-4 for _, apart in rows), "losses are those of one device"
