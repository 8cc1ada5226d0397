"""Memory side effects of a training step."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.api import distribute, loader
from convoy.comm.group import AloneGroup, Group
from convoy.data import Images
from convoy.launch.host_job import memory_environment
from convoy.machine.accelerator import limit_memory
from convoy.measure.layer_timer import measure_speeds
from convoy.measure.planning import make_plans
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.plan.presets import PLANS, Speeds, named_plan
from tests.support.threads import run_on_threads

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def tensors_in_garbage() -> list[torch.Size]:
    """Return the shapes of tensors that only the collector can free."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return [each.shape for each in gc.garbage if isinstance(each, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("net", ["two-conv:4:8", "resnet:8:4"])
def test_step_leaves_no_reference_cycles(net: str, plan: str) -> None:
    """A function inside a function that called itself held every layer's activations in a cycle. Until Python's collector
    came, each step took fresh memory, page by page: a sixth of a step's time, and more than twice the memory."""
    model, example = build_net(net, (3, 8, 8), 10), torch.zeros(2, 3, 8, 8)
    chosen = named_plan(plan, trace(model, example).graph, 8, Speeds((2.0, 1.0)))
    images = Images(torch.zeros(16, 3, 8, 8, dtype=torch.uint8), torch.arange(16) % 10, 10, (0.5,) * 3, (0.3,) * 3)
    found: list[torch.Size] = []

    def work(group: Group) -> None:
        part = distribute(model, chosen, group, example)
        batches = iter(loader(images, 8, part))
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        for step in range(2):
            x, y = next(batches)
            loss = F.cross_entropy(part(x), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            del loss
            group.agree(f"after step {step}", "")
            if group.device == 0:
                if step == 0:  # tracing, and what is built once
                    gc.collect()
                    gc.disable()
                else:
                    found.extend(tensors_in_garbage())
            group.agree(f"go on after step {step}", "")

    gc.freeze()  # the collector shall go over what this test makes, not over all of torch
    try:
        run_on_threads(2, work)
    finally:
        gc.enable()
    assert not found


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="this kernel has no huge pages to give"
)
def test_large_tensors_use_huge_pages() -> None:
    """Every step's gradient of a Linear of 4096 is 64 MB of fresh memory: 16,384 page faults, or 32. In a started device."""
    program = """
import resource, torch, convoy
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.empty(1 << 24).fill_(1.0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    environment = os.environ | memory_environment(os.environ)
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert int(run.stdout) < 4000


def resident_bytes(limit_bytes: float, measures: bool) -> int:
    """Train a U-Net of 55 MB of tensors, and return how much the process's memory grew at its peak.

    Args:
        measures: plan and measure before training.
    """

    def status(name: str) -> int:
        rows = Path("/proc/self/status").read_text().splitlines()
        return next(int(row.split()[1]) << 10 for row in rows if row.startswith(name))

    group = AloneGroup(torch.device("cpu"), 20.0)
    limit_memory(group.torch_device, limit_bytes)
    for side in (16, 256):  # the first loads libraries
        before = status("RssAnon")
        Path("/proc/self/clear_refs").write_text("5")
        model, example = build_net("unet:8", (3, side, side), 10), torch.zeros(1, 3, side, side)
        plan = named_plan("data", trace(model, example).graph, 1, Speeds((1.0,)))
        if measures and side > 16:
            make_plans(model, example, 1, group, plan)
            measure_speeds(group, trace(model, example), model, 1)
        part = distribute(model, plan, group, example)
        for _ in range(3):
            part(example, batch=1).square().mean().backward()
    return status("VmHWM") - status("RssFile") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this kernel does not show a process's peak")
@pytest.mark.parametrize("measures", [False, True])
def test_freed_memory_goes_back_to_the_system_if_memory_is_short(measures: bool) -> None:
    """Regression: malloc kept three times the memory of a step's tensors, which no prediction counts."""

    def run(limit_bytes: float) -> int:
        program = f"from tests.runtime.test_step_memory import resident_bytes as f; print(f({limit_bytes}, {measures}))"
        command, environment = [sys.executable, "-c", program], os.environ | memory_environment(os.environ)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        return int(done.stdout)

    plenty, short = run(1e15), run(80e6)
    print(f"{plenty / 1e6:.0f} MB, {short / 1e6:.0f} if memory is short")
    assert short < 0.8 * plenty
