"""Three accelerators beside a CPU: what is predicted follows from what is stated; the command runs on simulated ones."""

import re
import subprocess
import sys

import pytest
import torch

from benchmarks.three import BATCH, IMAGE, NET, PUBLISHED, predict, speedup, stated_fleet, wire_for
from convoy.model.nets import graph_of
from studies.roofline import roofline_costs
from tests.conftest import ROOT
from tests.support import sim


def test_the_stated_fleet_takes_alone_what_was_measured_and_can_reach_the_sum_of_its_speeds() -> None:
    graph = graph_of(NET, IMAGE, 10)
    fleet = stated_fleet(8.0, graph)
    found = predict(graph, BATCH, roofline_costs(fleet), fleet)
    assert BATCH / found.fastest == pytest.approx(8.0, rel=0.1)
    assert found.limit == pytest.approx(3.1, rel=0.01)
    assert 1 < found.speedup("master") < found.speedup("auto") <= 3.1 * 1.05


def test_the_wire_is_the_least_that_brings_the_published_speedup() -> None:
    graph = graph_of(NET, IMAGE, 10)
    least, most = wire_for(graph, "gtx1080", "data-by-speed", free=True)
    assert least is not None
    assert speedup(graph, "gtx1080", "data-by-speed", least, free=True) >= PUBLISHED
    assert speedup(graph, "gtx1080", "data-by-speed", least / 1.2, free=True) < PUBLISHED < most
    assert wire_for(graph, "gtx1080", "master", free=False)[0] is None, "processors handle every byte, on any wire"


@pytest.mark.slow
@pytest.mark.skipif(sim.COMPILER is None, reason=sim.NEEDS)
@pytest.mark.skipif(torch.accelerator.is_available(), reason="has an accelerator of its own")
def test_the_command_trains_on_three_simulated_accelerators_and_a_cpu() -> None:
    argv = [sys.executable, "-m", "benchmarks.three", "--net", "two-conv:8:12", "--no-predict"]
    done = subprocess.run(argv, cwd=ROOT, text=True, capture_output=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^measured: `(master|auto)`, .*, (\S+)$", done.stdout, re.MULTILINE)
    assert [plan for plan, _ in rows] == ["master", "auto"], done.stdout
    assert all(float(apart) < 1e-4 for _, apart in rows), "losses are those of one device"
