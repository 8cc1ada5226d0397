"""Predicted memory compared with real training steps: the peak of live tensor bytes of a process.

The resident memory of a process would count the interpreter, torch's own pages and what malloc keeps for later. So this counts
what torch's allocator gives, workspaces of kernels among them.
"""

import copy
import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from convoy.api import distribute
from convoy.comm.group import Group
from convoy.layout.comm_dtype import CommDtype
from convoy.layout.layout import box
from convoy.model.graph import Graph
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan
from convoy.runtime.module import Distributed
from convoy.simulate.memory import memory_of
from tests.support.allocations import held_bytes, peak_growth_bytes
from tests.support.processes import on_processes

BATCH = 32
TOLERANCE = 0.05
SMALL_BYTES = 64 << 10
"""Statistics of batch norms, outputs of the whole batch."""


def net() -> nn.Module:
    """Return a net of 12.7 MB of weights, most in a Linear, with 14.7 MB of activations at batch 32."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 64, 768), nn.ReLU(), nn.Linear(768, 10)),
    )


def case(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """Return the net for a plan, and the shape of its global batch."""
    if name == "spatial":
        return build_net("unet:4", (3, 384, 384), 4), (1, 3, 384, 384)
    if name == "spatial, strided":
        layers = [(nn.Conv2d(i, o, 3, 2, 1), nn.BatchNorm2d(o), nn.ReLU()) for i, o in ((3, 16), (16, 16), (16, 4))]
        return nn.Sequential(*(each for row in layers for each in row)), (1, 3, 768, 768)
    return net(), (BATCH, 3, 32, 32)


def planned(name: str, devices: int, wire: CommDtype) -> tuple[Plan, Graph]:
    model, shape = case(name)
    graph = trace(model, torch.zeros(shape)).graph
    return replace(named_plan(name.partition(",")[0], graph, shape[0], Speeds((2.0, 1.0)[:devices])), wire=wire), graph


def peak_bytes(group: Group, name: str, wire: CommDtype) -> int:
    """Weights, momentum, and the most that the tensors of two steps take at once, gradients among them."""
    plan, _ = planned(name, group.devices, wire)
    model, shape = case(name)
    part = distribute(model, plan, group, torch.zeros(shape))
    (layout,) = part.input_layouts(shape[0])
    here = box(layout, group.device, shape)
    assert here is not None
    torch.manual_seed(0)
    x = torch.randn(tuple(stop - start for start, stop in here))
    with torch.no_grad():
        y = model(torch.zeros(shape)).argmax(1)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        gc.collect()  # otherwise it is chance when what lies in cycles is freed
        output = part(x, batch=shape[0])  # scripts often hold it until the next step
        loss = nn.functional.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return peak_of(step, part, optimizer, x)


def peak_of(step: Callable[[], None], module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> int:
    """Return the peak bytes of two training steps on input `x`, with weights and the optimizer's state."""
    step()  # the momentum comes with the first
    optimizer.zero_grad()
    gc.collect()
    tensors = [x, *module.parameters(), *(v for row in optimizer.state.values() for v in row.values())]
    if isinstance(module, Distributed):  # what sums receive into (another thread allocates it), and gathered weights
        gathered = module.first_variant().executor.gathered
        tensors += [*gathered.slots._held.values(), *gathered._whole.values()]

    def steps() -> None:
        step()
        step()

    return held_bytes(tensors) + peak_growth_bytes(steps)


def peak_over_plain(group: Group, name: str) -> tuple[int, int]:
    """The most that the tensors of two training steps hold at once: on this device by `data-by-speed`, and in plain PyTorch
    with as many samples."""
    model = build_net(name, (3, 32, 32), 10, seed=0)
    graph = trace(model, torch.zeros(2, 3, 32, 32)).graph
    plan = named_plan("data-by-speed", graph, group.devices * BATCH, Speeds((1.0,) * group.devices))
    part = distribute(copy.deepcopy(model), plan, group, torch.zeros(2, 3, 32, 32))
    part.announce(group.devices * BATCH)
    x = torch.randn(BATCH, 3, 32, 32)

    def peak(module: nn.Module, labels: int) -> int:
        y, optimizer = torch.arange(labels) % 10, torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)

        def step() -> None:
            gc.collect()
            loss = nn.functional.cross_entropy(module(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return peak_of(step, module, optimizer, x)

    return peak(part, group.devices * BATCH), peak(model, BATCH)


@pytest.mark.parametrize("devices", [1, 2])
def test_step_holds_only_pytorchs_memory_plus_messages(devices: int) -> None:
    """Regression: layer by layer, a ResNet held batch norm outputs and kept activations twice."""
    name = "resnet:8:16"
    graph = trace(build_net(name, (3, 32, 32), 10), torch.zeros(2, 3, 32, 32)).graph
    plan = named_plan("data-by-speed", graph, devices * BATCH, Speeds((1.0,) * devices))
    found = on_processes(devices, "tests.runtime.test_memory_peak:peak_over_plain", name)
    for (shared, plain), predicted in zip(found, memory_of(lower(plan, graph), graph), strict=True):
        sums_bytes = predicted.gradients_bytes + predicted.exchange_bytes  # the flat copy, and what is received
        print(devices, f"{shared / 1e6:.2f} MB, plain PyTorch {plain / 1e6:.2f}, {sums_bytes / 1e6:.2f} in sums")
        assert shared <= plain + (sums_bytes if devices > 1 else 0) + SMALL_BYTES


@pytest.mark.parametrize(
    ("name", "devices", "wire"),
    [
        ("data", 1, "exact"), ("data", 2, "exact"), ("hybrid", 2, "exact"), ("model", 2, "exact"),
        ("hybrid", 2, "inexact-bf16"), ("spatial", 2, "exact"), ("spatial, strided", 2, "exact"),
    ],
)  # fmt: skip
def test_peak_memory_of_a_step_matches_prediction(name: str, devices: int, wire: CommDtype) -> None:
    plan, graph = planned(name, devices, wire)
    expected = [each.total_bytes for each in memory_of(lower(plan, graph), graph)]
    found = on_processes(devices, "tests.runtime.test_memory_peak:peak_bytes", name, wire)
    print(name, wire, [f"{a / 1e6:.1f} MB, {b / a - 1:+.1%}" for a, b in zip(found, expected, strict=True)])
    for measured, predicted in zip(found, expected, strict=True):
        assert predicted == pytest.approx(measured, rel=TOLERANCE)
