"""Convoy's plan that shares out samples, beside DistributedDataParallel with the very same shares, in pairs.

    python -m benchmarks.same_shares [--fleet mixed4] [--net NET ...] [--batch 64] [--rounds 12]     # Linux, root

The shares are those of the devices' cores. DDP has PyTorch's own size of buckets, gradients that live in them, and a static
graph; `data-by-speed` stands with each of two ways to sum. In every round each has a turn, one behind the other; what counts is
the ratio within a round; ratios above 1 are Convoy's advantage. Processor time is that of all devices together. Only nets
without batch norm: DDP's is that of each rank.
"""

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.configurations import fleet_named
from benchmarks.ddp import DdpRunner, leave, meet
from benchmarks.hardware import stamp
from benchmarks.runners import ConvoyRunner, Runner
from benchmarks.score import ratio_of_pairs
from benchmarks.tasks import images_of, task_of
from benchmarks.tuning import Setting
from convoy.comm.group import Group
from convoy.comm.job_key import TRUST
from convoy.comm.processes import join
from convoy.emulate import rehearse
from convoy.files import write_whole
from convoy.layout.redistribute import Reduce
from convoy.layout.shares import apportion
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.plan.presets import Speeds, named_plan

NETS = ("two-conv:50:500", "vgg:11:512", "alexnet:1024")
SUMS: tuple[Reduce, ...] = ("ring", "direct")
DDP = "ddp"
LEAST_S, MOST_STEPS = 1.0, 50
"""Of a turn."""

LIMIT_S = 580.0


def runners(group: Group, net: str, batch: int, cores: list[float]) -> dict[str, Runner]:
    """By name; all have the same samples on the same devices."""
    images = images_of(task_of(net), None)
    torch.manual_seed(0)
    model = build_net(net, images.image_shape, images.classes)
    graph = trace(model, torch.zeros(1, *images.image_shape)).graph
    setting = Setting(apportion(batch, cores), static_graph=True)
    found: dict[str, Runner] = {DDP: DdpRunner(model, setting, group.device, images)}
    for reduce in SUMS:
        plan = named_plan("data-by-speed", graph, batch, Speeds(tuple(cores)), reduce=reduce)
        found[reduce] = ConvoyRunner(model, plan, group, images, batch)
    return found


def turn(group: Group, runner: Runner, steps: int | None) -> tuple[float, float, int]:
    """Seconds of a step on the slowest device, processor seconds of a step on all, and the steps of the next turn."""
    gc.collect()
    runner.wake()
    group.agree("a turn begins", "")
    start_s, used_s = time.perf_counter(), time.process_time()
    runner.train(steps or 1)
    own = [(time.perf_counter() - start_s) / (steps or 1), (time.process_time() - used_s) / (steps or 1)]
    rows = [json.loads(text) for text in group.agree("a turn ends", json.dumps(own))]
    runner.rest()
    step_s, used_s = max(row[0] for row in rows), sum(row[1] for row in rows)
    return step_s, used_s, steps or max(2, min(MOST_STEPS, round(LEAST_S / step_s)))


def work(order: Path) -> None:
    """What one device does; device 0 prints a table, and keeps what was found."""
    job = json.loads(order.read_text())
    gc.disable()  # turns collect before they begin
    torch.set_num_threads(1)
    with join("cpu", timeout_s=300.0) as group:
        meet(group)
        begun_s, found = time.monotonic(), []
        for place, net in enumerate(job["nets"]):
            until_s = begun_s + job["limit_s"] * (place + 1) / len(job["nets"])
            found.append({"net": net, **compared(group, net, job["batch"], job["cores"], job["rounds"], until_s)})
        leave()
        if group.device == 0:
            Console(width=120).print(table_of(found, job["fleet"], job["batch"]))
            if job["results"]:
                trusted = " --trusted" if os.environ.get(TRUST) else ""
                command = f"python -m benchmarks.same_shares --fleet {job['fleet']} --batch {job['batch']}{trusted}"
                write_whole(Path(job["results"]), json.dumps({**stamp(command), "nets": found}, indent=1) + "\n")


def compared(
    group: Group, net: str, batch: int, cores: list[float], rounds: int, until_s: float
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round, by runner."""
    every = runners(group, net, batch, cores)
    steps: dict[str, int | None] = dict.fromkeys(every)
    wall: dict[str, list[float]] = {name: [] for name in every}
    used: dict[str, list[float]] = {name: [] for name in every}
    for number in range(rounds + 1):
        # Who was last is first in the next round: what the one before leaves behind meets all of them.
        for name in list(every)[:: 1 if number % 2 else -1]:
            step_s, processor_s, steps[name] = turn(group, every[name], steps[name])
            if number:  # the first only tells how long a step is
                wall[name].append(step_s)
                used[name].append(processor_s)
        late = group.agree("the time", json.dumps(time.monotonic() > until_s))[0]
        if json.loads(late) and number > 2:
            break
    return {"wall_s": wall, "processor_s": used}


def table_of(found: list[dict[str, object]], fleet: str, batch: int) -> Table:
    """Seconds, and Convoy's speed over DDP's."""
    table = Table(title=f"The same shares on {fleet}, batch {batch}", title_justify="left")
    for name in ("net", "rounds", "DDP", *(f"Convoy, {each}" for each in SUMS), "processor: DDP", *SUMS):
        table.add_column(name)
    for each in found:
        wall: dict[str, list[float]] = each["wall_s"]  # type: ignore[assignment]
        used: dict[str, list[float]] = each["processor_s"]  # type: ignore[assignment]
        row = [f"{1e3 * statistics.median(wall[DDP]):.1f} ms"]
        for reduce in SUMS:
            ratio, noise = ratio_of_pairs(wall[DDP], wall[reduce])
            row.append(f"{1e3 * statistics.median(wall[reduce]):.1f} ms: {ratio:.3f} +- {noise:.3f}")
        row += [f"{1e3 * statistics.median(used[name]):.1f} ms" for name in (DDP, *SUMS)]
        table.add_row(str(each["net"]), str(len(wall[DDP])), *row)
    return table


def main(
    fleet: Annotated[str, typer.Option(help="Of `benchmarks/fleets`, or equal1 to equal8.")] = "mixed4",
    net: Annotated[list[str] | None, typer.Option(help="Nets without batch norm.")] = None,
    batch: Annotated[int, typer.Option(min=4)] = 64,
    rounds: Annotated[int, typer.Option(min=3)] = 12,
    limit: Annotated[float, typer.Option(help="Seconds after which no further round begins.")] = 480.0,
    results: Annotated[Path | None, typer.Option(help="File to write.")] = None,
    trusted: Annotated[bool, typer.Option(help="Convoy's tensors not encrypted, as DDP's; else encrypted.")] = False,
    order: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Rehearse the fleet."""
    if order is not None:
        work(order)
        return
    described = fleet_named(fleet)
    if trusted:
        os.environ[TRUST] = "1"  # here: the launcher would hand a key to every device
    job = {
        "fleet": fleet, "nets": net or NETS, "batch": batch, "rounds": rounds, "limit_s": limit,
        "cores": [device.cores or 1.0 for device in described.devices],
        "results": str(results.resolve()) if results else "",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        command = [sys.executable, "-m", "benchmarks.same_shares", "--order", str(path)]
        sys.exit(rehearse(described, command, timeout_s=limit + LIMIT_S / 5))


if __name__ == "__main__":
    typer.run(main)
