"""Time planning: RegNetY-400MF over 3 devices, ResNet-50 over 16 and 1,000, and a sweep of 10,000 points.

    python -m benchmarks.planning [--results FILE]

Writes results/planning.json: wall-clock seconds and processor seconds of every run, and their medians. Everything runs in one
process on one thread. Tracing the model is timed apart: it is done once per model, not once per plan.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.hardware import stamp
from convoy.files import write_whole
from convoy.fleet import Device, Fleet, Host, Nic
from convoy.model.graph import Graph
from convoy.model.nets import graph_of
from convoy.model.tracing import trace
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.planner import candidates
from convoy.planner.request import PlanRequest
from lab.lower_bound import lower_bound
from studies.roofline import roofline_costs
from studies.sweep import BASE, PLANS, points_at, sweep

RESULTS = Path(__file__).parent / "results" / "planning.json"
COMMAND = "python -m benchmarks.planning"
CARD = Nic(send_bytes_per_s=1.25e9, receive_bytes_per_s=1.25e9, latency_s=5e-5)


class Bottleneck(nn.Module):
    """A bottleneck block of 1x1, 3x3, 1x1 convolutions, each with batch norm, and a shortcut; the 3x3 has the
    stride."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(channels_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels_in, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x_NCHW)))
        y = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(y)))))
        out: Tensor = self.relu(y + self.shortcut(x_NCHW))
        return out


def resnet50(blocks: Sequence[int] = (3, 4, 6, 3), classes: int = 1000) -> nn.Module:
    """The network of He et al. 2016, table 1, for images of 224x224."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    layers: list[nn.Module] = [*stem]
    channels = 64
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(channels, 64 << stage, 2 if stage and not block else 1))
            channels = 256 << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def _normed(channels_in: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(channels_in, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(out)]


class Excited(nn.Module):
    """Squeeze and excitation: channels weighted by a small net of their means."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        layers = [
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            nn.ReLU(),
            nn.Conv2d(squeezed, channels, 1),
        ]
        self.weight = nn.Sequential(*layers, nn.Sigmoid())

    def forward(self, x_NCHW: Tensor) -> Tensor:
        out: Tensor = x_NCHW * self.weight(x_NCHW)
        return out


class GroupedBottleneck(nn.Module):
    """A bottleneck block with groups of 8 channels in the 3x3, excitation and a shortcut; the 3x3 has the stride."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        grouped = _normed(width, width, 3, stride, width // 8)
        excited = Excited(width, round(channels_in / 4))
        layers = [*_normed(channels_in, width, 1), nn.ReLU(), *grouped, nn.ReLU(), excited, *_normed(width, width, 1)]
        self.layers, self.relu = nn.Sequential(*layers), nn.ReLU()
        same = stride == 1 and channels_in == width
        self.shortcut = nn.Identity() if same else nn.Sequential(*_normed(channels_in, width, 1, stride))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        out: Tensor = self.relu(self.shortcut(x_NCHW) + self.layers(x_NCHW))
        return out


def regnet_y_400mf(classes: int = 1000) -> nn.Module:
    """The network of Radosavovic et al. 2020 with 4.3 million parameters: deep, of short layers, most of them normalised."""
    layers: list[nn.Module] = [*_normed(3, 32, 3, 2), nn.ReLU()]
    channels = 32
    for width, blocks in ((48, 1), (104, 3), (208, 6), (440, 6)):
        for block in range(blocks):
            layers.append(GroupedBottleneck(channels, width, 1 if block else 2))
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def unequal(devices: int, kinds: int, seed: int = 0) -> Fleet:
    """Return a fleet of one device per host with `kinds` speeds up to 100 times apart."""
    rng = random.Random(seed)
    rows = [(rng.uniform(5e10, 5e12), rng.uniform(1e10, 5e11)) for _ in range(kinds)]
    return Fleet(
        tuple(Host(f"h{i}") for i in range(devices)),
        tuple(
            Device(f"d{i}", f"h{i}", "cpu", peak_flop_per_s=rows[i % kinds][0], memory_bytes_per_s=rows[i % kinds][1])
            for i in range(devices)
        ),
        CARD,
    )  # fmt: skip


def three_cores() -> Fleet:
    """Return three processor generations at 1 Gbit/s, close enough that many plans need a replay."""
    rates = {"a": 88e9, "b": 55e9, "c": 33e9}
    devices = (
        Device(f"{n}-cpu", n, "cpu", peak_flop_per_s=rate, memory_bytes_per_s=rate / 8, memory_bytes=8 * 10**9)
        for n, rate in rates.items()
    )
    return Fleet(tuple(Host(name) for name in rates), tuple(devices), Nic(125e6, 125e6, 1e-4))


def plan_once(graph: Graph, fleet: Fleet, batch: int) -> dict[str, Any]:
    """Compute costs, the planner's choice and the lower bound from scratch."""
    costs = roofline_costs(fleet)
    best = candidates(PlanRequest(graph, batch, FleetKnowledge(fleet, given=costs)))[0]
    return {
        "plan": best.plan.name,
        "step_s": best.step_s,
        "least_s": lower_bound(PlanRequest(graph, batch, FleetKnowledge(given=costs))).step_s,
    }


def sweep_once(graph: Graph) -> dict[str, Any]:
    """Evaluate every plan at 10,000 points: 100 batches by 100 bandwidths."""
    batches, links = np.meshgrid(np.arange(8, 808, 8), np.geomspace(1e7, 1e11, 100))
    sweeps = sweep(graph, points_at(BASE, batch=batches.ravel(), link_bytes_per_s=links.ravel()))
    return {"points": len(sweeps[0].points), "plans": len(PLANS)}


def timed(work: Callable[[], dict[str, Any]], repeats: int) -> dict[str, Any]:
    """Run `work` repeatedly and return its times."""
    found: dict[str, Any] = {}
    wall_s, processor_s = [], []
    for _ in range(repeats):
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        found = work()
        wall_s.append(time.perf_counter() - start_s)
        processor_s.append(time.process_time() - start_cpu_s)
    medians = {"median_wall_s": statistics.median(wall_s), "median_processor_s": statistics.median(processor_s)}
    return found | medians | {"wall_s": wall_s, "processor_s": processor_s}


def main(results: Annotated[Path, typer.Option(help="File to write.")] = RESULTS) -> None:
    """Time everything, write the results, print a table."""
    torch.set_num_threads(1)
    images = torch.zeros(2, 3, 224, 224)
    start_s = time.perf_counter()
    graph = trace(resnet50(), images).graph
    trace_s = time.perf_counter() - start_s
    regnet = trace(regnet_y_400mf(), images).graph
    alexnet = graph_of("alexnet:4096")
    three, sixteen, thousand = three_cores(), unequal(16, 16), unequal(1000, 16)
    rows: dict[str, tuple[float, dict[str, Any]]] = {
        "RegNetY-400MF, 3 devices": (2.0, timed(lambda: plan_once(regnet, three, 64), 5)),
        "ResNet-50, 16 unequal devices": (0.5, timed(lambda: plan_once(graph, sixteen, 256), 5)),
        "ResNet-50, 1,000 devices of 16 kinds": (5.0, timed(lambda: plan_once(graph, thousand, 16_000), 3)),
        "sweep of 10,000 points, four plans": (10.0, timed(lambda: sweep_once(alexnet), 5)),
    }
    document = {
        **stamp(COMMAND),
        "trace_resnet50_s": trace_s,
        "layers": len(graph.layers),
        "rows": {name: {"target_s": target, **row} for name, (target, row) in rows.items()},
    }
    write_whole(results, json.dumps(document, indent=1) + "\n")
    table = Table(title="Planning on one core", title_justify="left")
    for name in ("what", "target", "median wall", "median processor"):
        table.add_column(name)
    for name, (target, row) in rows.items():
        aim = f"{target:g} s"
        table.add_row(name, aim, f"{row['median_wall_s']:.2f} s", f"{row['median_processor_s']:.2f} s")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
