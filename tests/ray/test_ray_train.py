"""The example for Ray Train on a local cluster of three nodes with 1, 2 and 4 CPUs, beside plain PyTorch."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.support.processes import ROOT

EXAMPLE = ROOT / "examples" / "engines" / "ray"

pytestmark = [
    pytest.mark.slow,  # a minute: Ray starts a cluster
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'convoy-train[ray]'"),
]


def on_cluster(scenario: str, folder: Path) -> dict[str, Any]:
    paths = os.pathsep.join([str(ROOT), str(EXAMPLE)])
    quick = {
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
        "RAY_DEDUP_LOGS": "0",
    }
    call = [sys.executable, str(ROOT / "tests" / "ray" / "cluster_job.py"), scenario, str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= quick | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": paths}
    done = subprocess.run(call, env=environment, cwd=folder, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def on_one_device(epochs: int) -> list[float]:
    """Return the mean loss of each epoch in plain PyTorch."""
    sys.path.insert(0, str(EXAMPLE))
    from train_digits import parts

    model, optimizer, loader = parts(torch.float64)
    means = []
    for _ in range(epochs):
        losses = []
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
    return means


@pytest.mark.parametrize("plan", ["data-by-speed", "hybrid"])
def test_losses_are_those_of_one_device(plan: str, tmp_path: Path) -> None:
    found = on_cluster(plan, tmp_path)
    assert [row["devices"] for row in found["rows"]] == [3, 3]
    assert [row["loss"] for row in found["rows"]] == pytest.approx(on_one_device(2), abs=1e-10)
    seen = [json.loads(path.read_text()) for path in tmp_path.glob("3-*.json")]
    assert sorted(each["threads"] for each in seen) == [1, 2, 4]
    assert not any(each["key in environment"] for each in seen)
    assert found["logs"] > 0
    assert not found["key in logs"]


def test_job_continues_from_the_last_checkpoint_when_nodes_come_and_go(tmp_path: Path) -> None:
    """Three workers, then two, then three again, with the losses of one device."""
    rows = on_cluster("nodes", tmp_path)["rows"]
    devices = [row["devices"] for row in rows]
    assert [now for before, now in zip([0, *devices], devices, strict=False) if now != before] == [3, 2, 3]
    assert [row["epoch"] for row in rows] == list(range(len(rows)))
    assert [row["loss"] for row in rows] == pytest.approx(on_one_device(len(rows)), abs=1e-10)
