"""A device becomes half as fast in mid-training: how soon the others have taken over, and what that does to the loss curve.

    python -m benchmarks.rebalance [--plan data-by-speed] [--slowdown 2,4,4,8] [--slowed 0] [--steps 160]

Local processes train the same net from the same weights four times, and results/rebalance.json keeps, per step, seconds,
losses and shares:

    undisturbed   nobody is slowed
    left alone    one device is slowed in mid-training, and the shares stay
    rebalanced    the same, and the shares follow
    best split    that device is slow from the start, and the plan is made for it

Also under `convoy rehearse fleet.toml -- python -m benchmarks.rebalance ...`, with real links.
"""

import datetime
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import TensorDataset

from benchmarks.hardware import ground
from benchmarks.rebalance_score import ANSWER, LATE, Run, Summary, as_json, summarise
from convoy._version import __version__
from convoy.api import distribute, loader
from convoy.bonds import bonds, shares_of
from convoy.execute.clock import Clock
from convoy.execute.group import Group
from convoy.execute.launch import launch_local
from convoy.execute.module import Distributed
from convoy.execute.processes import join
from convoy.execute.rebalancing import Rebalancer
from convoy.files import write_whole
from convoy.measure.layers import measure_speeds
from convoy.named import named_plan
from convoy.nets import build_net
from convoy.plan import Plan
from convoy.rebalance import Reshare
from convoy.trace import trace

RESULTS = Path(__file__).parent / "results" / "rebalance.json"
CLASSES = 10


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained; field by field the options."""

    net: str
    plan: str
    image: int
    batch: int
    steps: int
    slow_at: int
    slowed: int
    times: float
    slowdown: tuple[float, ...]
    every: int


def main(
    net: Annotated[str, typer.Option(help="two-conv:K1:K2, alexnet:F, resnet:DEPTH:WIDTH.")] = "two-conv:50:500",
    plan: Annotated[str, typer.Option(help="A plan by name that goes by speed.")] = "data-by-speed",
    image: Annotated[int, typer.Option(help="Height and width of the images.")] = 32,
    batch: int = 64,
    steps: Annotated[int, typer.Option(help="Of each training.")] = 260,
    slow_at: Annotated[int, typer.Option(help="The step before which one device becomes slower.")] = 40,
    slowed: Annotated[int, typer.Option(help="Which.")] = 0,
    times: Annotated[float, typer.Option(help="How many times slower it becomes.")] = 2.0,
    slowdown: Annotated[str, typer.Option(help="A factor per device that makes this machine a fleet.")] = "2,4,4,8",
    every: Annotated[int, typer.Option(help="Steps between two looks.")] = 2,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write (JSON).")] = RESULTS,
) -> None:
    if steps < slow_at + ANSWER + LATE:
        raise typer.BadParameter(
            f"--steps {steps}: {LATE} steps are looked at, {ANSWER} after the slow-down; give {slow_at + ANSWER + LATE} or more"
        )
    factors = tuple(float(part) for part in slowdown.split(","))
    setting = Setting(net, plan, image, batch, steps, slow_at, slowed, times, factors, every)
    if "RANK" in os.environ:
        work(setting, output)
        return
    command = (sys.executable, "-m", "benchmarks.rebalance")
    raise typer.Exit(launch_local(sys.argv[1:], ["cpu"] * len(factors), command=command))


def work(setting: Setting, output: Path) -> None:
    """What each device does."""
    x = torch.randn(setting.batch * 4, 3, setting.image, setting.image, generator=torch.Generator().manual_seed(1))
    y = torch.randint(CLASSES, (len(x),), generator=torch.Generator().manual_seed(2))
    data = TensorDataset(x, y)
    with join() as group:
        fit = _trainer(setting, group, data)
        made = _plan(setting, group, slow=1.0)
        runs = {
            "undisturbed": fit(made, slow_at=None, rebalance=False),
            "left alone": fit(made, slow_at=setting.slow_at, rebalance=False),
            "rebalanced": fit(made, slow_at=setting.slow_at, rebalance=True),
            "best split": fit(_plan(setting, group, slow=setting.times), slow_at=0, rebalance=False),
        }
        if group.device == 0:
            summary = summarise(runs, setting.slow_at)
            write_whole(output, json.dumps(_document(setting, runs, summary), indent=1) + "\n")
            _show(summary)


def _net(setting: Setting) -> torch.nn.Module:
    return build_net(setting.net, (3, setting.image, setting.image), CLASSES, 0)


def _plan(setting: Setting, group: Group, slow: float) -> Plan:
    """The plan by measured speeds; `slow`: the device in question is so many times slower while it is measured."""
    factor = setting.slowdown[group.device] * (slow if group.device == setting.slowed else 1.0)
    model = _net(setting)
    traced = trace(model, torch.zeros(1, 3, setting.image, setting.image))
    speeds = measure_speeds(group, traced, model, setting.batch, Clock(group.torch_device, factor))
    return named_plan(setting.plan, traced.graph, setting.batch, speeds)


def _trainer(setting: Setting, group: Group, data: TensorDataset) -> Callable[..., Run]:
    def fit(plan: Plan, *, slow_at: int | None, rebalance: bool) -> Run:
        part = distribute(
            _net(setting), plan, group, torch.zeros(1, 3, setting.image, setting.image),
            slowdown=setting.slowdown[group.device],
        )  # fmt: skip
        optimizer = torch.optim.SGD(part.parameters(), lr=0.01, momentum=0.9)
        run = Run()
        own_s: list[float] = []

        def tell(step: int, decision: Reshare) -> None:
            run.reshares.append((step, decision.reason))

        rebalancer = Rebalancer(part, optimizer, tell=tell, every=setting.every) if rebalance else None
        batches = loader(data, setting.batch, part)
        while len(run.losses) < setting.steps:
            for images, labels in batches:
                if len(run.losses) == slow_at and group.device == setting.slowed:
                    part.clock.slowdown *= setting.times
                run.shares.append(_shares(part))
                own_s.append(_step(part, images, labels, optimizer, rebalancer, run))
                if len(run.losses) == setting.steps:
                    break
        rows = [json.loads(text) for text in group.agree("computing", json.dumps(own_s))]
        run.compute_s = [max(each) for each in zip(*rows, strict=True)]
        return run

    return fit


def _step(
    part: Distributed,
    images: Tensor,
    labels: Tensor,
    optimizer: torch.optim.Optimizer,
    rebalancer: Rebalancer | None,
    run: Run,
) -> float:
    """One step; returns the seconds that this device computed."""
    start, before_s = time.perf_counter(), part.clock.compute_s
    loss = F.cross_entropy(part(images), labels)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    if rebalancer is not None:
        rebalancer.step(len(labels))
    run.losses.append(float(loss.detach()))
    run.step_s.append(time.perf_counter() - start)
    return part.clock.compute_s - before_s


def _shares(part: Distributed) -> dict[str, list[int]]:
    return {bond.name: list(shares_of(part.plan, bond)) for bond in bonds(part.plan, part.traced[True].graph)}


def _document(setting: Setting, runs: dict[str, Run], summary: Summary) -> dict[str, Any]:
    return {
        "command": " ".join(["python -m benchmarks.rebalance", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__, "convoy": __version__, "ground": asdict(ground()),
        "setting": asdict(setting), "summary": as_json(summary),
        "runs": {name: asdict(run) for name, run in runs.items()},
    }  # fmt: skip


def _show(summary: Summary) -> None:
    table = Table(title=f"Median of the last {LATE} steps", title_justify="left")
    for name in ("", "step", "slowest device computes"):
        table.add_column(name, justify="right")
    for name, seconds in summary.step_s.items():
        table.add_row(name, f"{seconds * 1e3:.1f} ms", f"{summary.compute_s[name] * 1e3:.1f} ms")
    console = Console(highlight=False)
    console.print(table)
    for step, reason in summary.reshares:
        console.print(f"step {step}: {reason}", soft_wrap=True)
    back = "never" if summary.back_after is None else f"after {summary.back_after} steps"
    console.print(
        f"Back within 5 % of the best split: {back}; after {ANSWER} steps {summary.of_best:.1%} of its throughput. Shares "
        f"within {summary.swing:.1%} over {summary.later_steps} steps later (noise {summary.noise:.1%}). Losses at most "
        f"{summary.losses_apart:.2g} apart; those of another split {summary.losses_apart_by_rounding:.2g}.",
        soft_wrap=True,
    )


if __name__ == "__main__":
    typer.run(main)
