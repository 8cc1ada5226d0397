"""A net whose Adam state exceeds every device's memory limit trains as on one large device.

The limit is the kernel's: a device that takes more is killed.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.api import distribute
from convoy.comm.processes import join
from convoy.fleet import Device, Fleet, Host, Nic
from convoy.layout.layout import box
from convoy.model.graph import Graph
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan
from convoy.planner.planner import candidates
from convoy.simulate.memory import memory_of
from studies.roofline import roofline_costs
from tests.support.described_fleets import asked
from tests.support.memory_groups import enter, memory_groups, memory_root
from tests.support.processes import on_processes
from tests.support.torch_seed import torch_seed

DEVICES, BATCH, STEPS, WIDTH, LAYERS = 4, 8, 3, 1024, 8
LIMIT_BYTES = 170_000_000
OWN_BYTES = 80_000_000
"""Of what the limit allows, left to a device's Python, its connections and the pages of the file of weights."""


def net() -> nn.Module:
    """Return a net of 67 MB of float64 weights: 268 MB with gradients and Adam's two moments."""
    linear = [each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), *linear, nn.Linear(WIDTH, 10)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    numbers = torch.Generator().manual_seed(5)
    draw = [torch.randn(BATCH, 1, 16, 16, generator=numbers, dtype=torch.float64) for _ in range(STEPS)]
    return [(x, torch.arange(BATCH) % 10) for x in draw]


def planned(name: str) -> tuple[Plan, Graph]:
    """Return a plan by `auto` for four unequal devices with little memory, or with all weights sharded and freed
    after use."""
    devices = tuple(
        Device(
            f"d{i}",
            f"h{i}",
            "cpu",
            memory_bytes=LIMIT_BYTES - OWN_BYTES,
            peak_flop_per_s=rate,
            memory_bytes_per_s=rate / 4,
        )
        for i, rate in enumerate((4e10, 2e10, 2e10, 1e10))
    )
    fleet = Fleet(tuple(Host(f"h{i}") for i in range(DEVICES)), devices, Nic(125e6, 125e6, 1e-4))
    with torch.device("meta"):
        graph = trace(net(), torch.zeros(2, 1, 16, 16, dtype=torch.float64)).graph
    if name == "in shares":
        plan = named_plan("sharded", graph, BATCH, Speeds((1.0,) * DEVICES))
        return replace(plan, sharded={key: replace(kept, form="free") for key, kept in plan.sharded.items()}), graph
    costs = replace(roofline_costs(fleet), itemsize=8)
    return candidates(asked(graph, BATCH, costs, fleet, optimizer="adam"))[0].plan, graph


def train(model: nn.Module, *, whole: bool) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x, whole=True) if whole else model(x), y).backward()
        optimizer.step()


def alone(_device: int, group: str) -> bool:
    """Train in plain PyTorch."""
    enter(group)
    train(net(), whole=False)
    return True


def together(device: int, groups: list[str], plan: str, weights: str, trained: str) -> tuple[int, float]:
    """Train on one device of the fleet; return its group's peak bytes and its shards' largest error."""
    enter(groups[device])
    with torch.device("meta"):
        model = net()
    with join(timeout_s=30.0) as group:
        part = distribute(model, Plan.from_json(plan), group, torch.zeros(2, 1, 16, 16, dtype=torch.float64))
        part.load_state_dict(torch.load(weights, mmap=True, weights_only=True))
        train(part, whole=True)
        peak = [Path(groups[device], name) for name in ("memory.max_usage_in_bytes", "memory.peak")]
        peak_bytes = next((int(each.read_text()) for each in peak if each.exists()), 0)
        difference = 0.0
        for key, whole in torch.load(trained, mmap=True, weights_only=True).items():
            here = box(part.layouts[key], device, whole.shape)
            if here is not None:
                shard = part.module.get_parameter(key).detach() - whole[tuple(slice(*span) for span in here)]
                difference = max(difference, float(shard.abs().max()))
    return peak_bytes, difference


@pytest.mark.slow
@pytest.mark.parametrize("name", ["auto", "in shares"])
@pytest.mark.skipif(memory_root() is None, reason="this user cannot limit memory: it needs control groups")
def test_net_too_large_for_any_device_trains_as_on_a_large_one(name: str, tmp_path: Path) -> None:
    root = memory_root()
    assert root is not None
    plan, graph = planned(name)
    predicted = memory_of(lower(plan, graph), graph, optimizer="adam", itemsize=8)
    with torch_seed(6):
        model = net()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    train(model, whole=False)
    torch.save(model.state_dict(), tmp_path / "trained.pt")
    with memory_groups(root, DEVICES + 1, LIMIT_BYTES) as groups:
        names = [str(each) for each in groups]
        assert on_processes(1, f"{__name__}:alone", names[-1], joined=False) == [None], (
            "the limit is too large to show anything"
        )
        found = on_processes(
            DEVICES,
            f"{__name__}:together",
            names,
            plan.to_json(),
            str(tmp_path / "weights.pt"),
            str(tmp_path / "trained.pt"),
            joined=False,
        )
    assert None not in found, "a device was killed"
    rows = zip(found, predicted, strict=True)
    print([f"{peak / 1e6:.0f} MB, of tensors {row.total_bytes / 1e6:.0f} predicted" for (peak, _), row in rows])
    assert max(difference for _, difference in found) < 1e-10
