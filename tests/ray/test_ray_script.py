"""A script under `convoy run --on ray`: the devices of a cluster's nodes, and its losses when a node is lost and one joins."""

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import convoy
from tests.ray.test_ray_train import on_cluster
from tests.support.processes import ROOT

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="needs Ray: pip install 'convoy-train[ray]'")


def on_one_device(steps: int) -> list[float]:
    """Return the losses of tests/support/members_script.py in plain PyTorch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(256, 10)).double()
    images, labels = torch.randn(64, 1, 8, 8, dtype=torch.float64), torch.randint(10, (64,))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    loader = convoy.loader(torch.utils.data.TensorDataset(images, labels), 16)
    losses: list[float] = []
    while len(losses) < steps:
        loader.set_epoch(len(losses) // 4)
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[:steps]


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_script_continues_when_a_node_is_lost_and_another_joins(tmp_path: Path) -> None:
    """Nothing is restarted. Ctrl-C ends all devices."""
    shutil.copy(ROOT / "tests" / "support" / "members_script.py", tmp_path)
    assert on_cluster("script", tmp_path)["status"] == 130
    output = (tmp_path / "output").read_text()
    assert re.search(r"was lost.*; 2 continue after step", output)
    assert re.search(r"joined; 3 continue after step", output)
    rows = [json.loads(found) for found in re.findall(r'\{"step.*?\}', output)]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["loss"] for row in rows] == pytest.approx(on_one_device(len(rows)), abs=1e-10)


@needs_ray
def test_devices_of_a_node_are_its_gpus_or_all_its_cpus() -> None:
    from convoy.ray.script import devices_of

    def node(name: str, alive: bool = True, **resources: float) -> dict[str, Any]:
        return {"NodeID": name, "NodeManagerAddress": "192.0.2.1", "Alive": alive, "Resources": resources}

    nodes = [node("head"), node("small", CPU=3), node("gpus", CPU=9, GPU=2), node("lost", alive=False, CPU=4)]
    found = [(each.node, each.local, each.count, each.cpus, each.gpu) for each in devices_of(nodes)]
    assert found == [("small", 0, 1, 3, False), ("gpus", 0, 2, 4, True), ("gpus", 1, 2, 4, True)]
