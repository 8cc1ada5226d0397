"""Process memory before training: measured with the devices, added to a plan's tensors, reserved by plans."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from convoy.api import distribute
from convoy.comm.group import AloneGroup, Group
from convoy.fleet import Device, Fleet, Host
from convoy.machine.accelerator import process_bytes
from convoy.measure.device_info import DeviceInfo, describe_device, fleet_of
from convoy.measure.measure_job import MeasureOptions, measure_job
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.presets import Speeds, named_plan
from convoy.simulate.memory import MemoryLimits, memory_of
from convoy.simulate.table import Measurement
from tests.support.processes import on_processes

CPU = torch.device("cpu")
BATCH = 16
MB = 1_000_000


def net() -> nn.Module:
    """Return a net of 50 MB of weights, 150 MB with gradients and momentum."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 3600), nn.ReLU(), nn.Linear(3600, 400))


def resident_bytes(group: Group) -> tuple[int, int]:
    """Return resident memory before training without the model, as `measure_job` sees it, and while training."""
    model = net()
    plan = named_plan("data", trace(model, torch.zeros(2, 3, 32, 32)).graph, BATCH, Speeds((1.0, 1.0)))
    before = describe_device(CPU, 1.0).process_bytes - 4 * sum(p.numel() for p in model.parameters())
    part = distribute(model, plan, group, torch.zeros(2, 3, 32, 32))
    del model
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(BATCH // 2, 3, 32, 32), torch.arange(BATCH) % 10
    most = 0
    for _ in range(2):  # the second has what the first made: gradients and momentum
        loss = nn.functional.cross_entropy(part(x, batch=BATCH), y)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        most = max(most, process_bytes(CPU))
        optimizer.step()
    return before, most


def test_resident_memory_is_process_plus_tensors() -> None:
    """Predicted: the memory before training and about 170 MB by the plan. Freed pages are reused."""
    graph = trace(net(), torch.zeros(2, 3, 32, 32)).graph
    plan = named_plan("data", graph, BATCH, Speeds((1.0, 1.0)))
    rows = on_processes(2, "tests.measure.test_process_memory:resident_bytes")
    for (before, most), memory in zip(rows, memory_of(lower(plan, graph), graph), strict=True):
        assert before > 20 * MB
        assert before + memory.total_bytes == pytest.approx(most, rel=0.1)
        assert most > 1.2 * max(before, memory.total_bytes)  # neither of the two would do


def test_process_memory_is_measured_and_stored_in_the_fleet_file(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
    model_bytes = 4 * (12 * 10 + 10)
    monkeypatch.setattr("convoy.measure.device_info.process_bytes", lambda _: 70 * MB + model_bytes)
    with AloneGroup(CPU) as group:
        traced = trace(model, torch.zeros(2, 3, 2, 2))
        measured = measure_job(group, traced, model, 4, MeasureOptions("small", budget_s=0.2, slice_s=1e-4))
    assert measured.device[0].process_bytes == 70 * MB
    assert Measurement.from_toml(measured.to_toml()) == measured
    assert measured.costs(traced.graph).process_bytes == (70 * MB,)
    before = measured.to_toml().replace(", process_bytes = 70000000", "")  # a file from before it was measured
    assert Measurement.from_toml(before).costs(traced.graph).process_bytes == (0,)


def test_devices_of_a_host_share_its_free_memory() -> None:
    """900 MB are free next to two processes of 100 MB each; a limit below a process's memory stays a limit."""
    rows = [DeviceInfo("a", "m", "cpu", 1, 1000 * MB, 1.0, 100 * MB) for _ in range(2)]
    assert [device.memory_bytes for device in fleet_of(rows).devices] == [550 * MB, 550 * MB]
    assert fleet_of([replace(rows[0], memory_bytes=MB)]).devices[0].memory_bytes == MB


def test_plans_may_use_memory_the_process_leaves() -> None:
    fleet = Fleet((Host("a"),), (Device("a-0", "a", "cpu", memory_bytes=100 * MB), Device("a-1", "a", "cpu")))
    room = MemoryLimits.of(fleet, process_bytes=(70 * MB, 70 * MB))
    assert (room.bytes_of(0), room.bytes_of(1)) == (30 * MB, float("inf"))
    assert room.excess([31 * MB, 31 * MB]) == {0: MB}
    (words,) = room.overfull([31 * MB, 31 * MB])
    assert words == "a-0 needs 101 MB (70 MB used by its process before training) of 100 MB, 1 MB too much"
    assert MemoryLimits.of(fleet, process_bytes=(200 * MB, 0)).excess([MB, 0]) == {0: MB - 1}  # no division by nothing
