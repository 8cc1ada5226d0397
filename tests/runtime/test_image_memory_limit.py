"""An image whose activations exceed the kernel's memory limit of every device trains as on one large device."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from convoy.api import distribute
from convoy.comm.processes import join
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.strategy import Spatial
from convoy.planner.planner import candidates
from convoy.simulate.memory import memory_of
from studies.roofline import roofline_costs
from tests.support.described_fleets import asked, fleet
from tests.support.memory_groups import enter, memory_groups, memory_root
from tests.support.processes import on_processes
from tests.support.spatial_nets import UNet

SHAPES = {2: (1, 1, 512, 512), 3: (1, 1, 40, 64, 64)}
"""By dimensions: a batch of one image. In float64, training takes about 210 and 110 MB of tensors on one device."""

PLANNED_BYTES = {2: 140_000_000, 3: 75_000_000}
"""The limit of each device for plans."""

LIMIT_BYTES = {2: 330_000_000, 3: 750_000_000}
"""The kernel's limit. It also holds Python, and workspaces: float64 convolutions unfold their input."""


def net(dims: int) -> nn.Module:
    torch.manual_seed(3)
    return UNet(dims, 8).double()


def image(dims: int) -> Tensor:
    return torch.randn(SHAPES[dims], dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, x: Tensor, **options: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        model(x, **options).square().mean().backward()
        optimizer.step()


def alone(_device: int, group: str, dims: int) -> bool:
    """Train in plain PyTorch."""
    enter(group)
    train(net(dims), image(dims))
    return True


def together(device: int, groups: list[str], dims: int, plan: str, trained: str) -> tuple[int, float]:
    """Train on one device of the fleet; return the peak bytes of its group and the largest error of its parameters."""
    enter(groups[device])
    with join(timeout_s=60.0) as group:
        part = distribute(net(dims), Plan.from_json(plan), group, image(dims))
        train(part, image(dims), whole=True)
        expected = torch.load(trained, mmap=True, weights_only=True)
        error = max(float((t - expected[key]).abs().max()) for key, t in part.full_state_dict().items())
    names = [Path(groups[device], name) for name in ("memory.max_usage_in_bytes", "memory.peak")]
    return next((int(each.read_text()) for each in names if each.exists()), 0), error


@pytest.mark.slow
@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.skipif(memory_root() is None, reason="this user cannot limit memory: it needs control groups")
def test_image_too_large_for_any_device_trains_as_on_a_large_one(dims: int, tmp_path: Path) -> None:
    root, model = memory_root(), net(dims)
    assert root is not None
    graph = trace(model, image(dims)).graph
    devices = fleet(*((rate, PLANNED_BYTES[dims]) for rate in (4e10, 3e10, 2e10)))
    costs = replace(roofline_costs(devices), itemsize=8)
    plan = candidates(asked(graph, 1, costs, devices))[0].plan
    assert isinstance(plan.layers[graph.weighted[0].name], Spatial)
    train(model, image(dims))
    torch.save(model.state_dict(), tmp_path / "trained.pt")
    with memory_groups(root, 4, LIMIT_BYTES[dims]) as groups:
        names = [str(each) for each in groups]
        assert on_processes(1, f"{__name__}:alone", names[-1], dims, joined=False) == [None], "the limit is too large"
        found = on_processes(
            3,
            f"{__name__}:together",
            names,
            dims,
            plan.to_json(),
            str(tmp_path / "trained.pt"),
            joined=False,
            limit_s=120.0,
        )
    assert None not in found, "a device was killed"
    rows = zip(found, memory_of(lower(plan, graph), graph, itemsize=8), strict=True)
    print([f"{peak / 1e6:.0f} MB, of tensors {row.total_bytes / 1e6:.0f} predicted" for (peak, _), row in rows])
    assert max(error for _, error in found) < 1e-10
