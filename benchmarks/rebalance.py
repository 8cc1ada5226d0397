"""Slow a device down in mid-training: measure how soon the others take over its work and the effect on the loss.

    python -m benchmarks.rebalance [--plan data-by-speed] [--slowdown 2,4,4,8] [--slowed 0] [--steps 160]

Local processes train the same net from the same weights four times, step by step in turns, so that the machine's own moods
fall on all four. results/rebalance.json keeps, per step, seconds, losses and shares:

    undisturbed   nobody is slowed
    left alone    one device is slowed in mid-training, and the shares stay
    rebalanced    the same, and the shares follow
    best split    that device is slow from the start, the plan is made for it, and its shares follow until the others slow down

Also under `convoy emulate fleet.toml -- python -m benchmarks.rebalance ...`, with real links.
"""

import datetime
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
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
from convoy.comm.group import Group
from convoy.comm.processes import join
from convoy.files import write_whole
from convoy.launch.local import launch_local
from convoy.measure.layer_timer import measure_speeds
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.plan.coupling import coupled_axes, shares_of
from convoy.plan.plan import Plan
from convoy.plan.presets import named_plan
from convoy.train.controller import Rebalancer
from convoy.train.rebalance import Reshard

RESULTS = Path(__file__).parent / "results" / "rebalance.json"
CLASSES = 10


@dataclass(frozen=True, slots=True)
class Setting:
    """The training setup; its fields match the options."""

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
    plan: Annotated[str, typer.Option(help="A named plan with shares by speed.")] = "data-by-speed",
    image: Annotated[int, typer.Option(help="Height and width of the images.")] = 32,
    batch: int = 64,
    steps: Annotated[int, typer.Option(help="Steps per training.")] = 260,
    slow_at: Annotated[int, typer.Option(help="Slow the device down before this step.")] = 40,
    slowed: Annotated[int, typer.Option(help="The device to slow down.")] = 0,
    times: Annotated[float, typer.Option(help="Slowdown factor.")] = 2.0,
    slowdown: Annotated[str, typer.Option(help="Slowdown per device that emulates a fleet.")] = "2,4,4,8",
    every: Annotated[int, typer.Option(help="Steps between rebalancing checks.")] = 2,
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
    """Run one device."""
    x = torch.randn(setting.batch * 4, 3, setting.image, setting.image, generator=torch.Generator().manual_seed(1))
    y = torch.randint(CLASSES, (len(x),), generator=torch.Generator().manual_seed(2))
    data = TensorDataset(x, y)
    with join() as group:
        made, best = _plan(setting, group, slow=1.0), _plan(setting, group, slow=setting.times)
        trainings = {
            "undisturbed": Training(setting, group, data, made, slow_at=None),
            "left alone": Training(setting, group, data, made, slow_at=setting.slow_at),
            "rebalanced": Training(setting, group, data, made, slow_at=setting.slow_at, follows=setting.steps),
            "best split": Training(setting, group, data, best, slow_at=0, follows=setting.slow_at),
        }
        for step in range(setting.steps):
            for name, training in trainings.items():
                # A common start: who was late in the turn before is late in none after.
                group.agree(f"step {step} {name}", "")
                training.step()
        runs = {name: training.finished() for name, training in trainings.items()}
        if group.device == 0:
            summary = summarise(runs, setting.slow_at)
            write_whole(output, json.dumps(_document(setting, runs, summary), indent=1) + "\n")
            _show(summary)


def _net(setting: Setting) -> torch.nn.Module:
    return build_net(setting.net, (3, setting.image, setting.image), CLASSES, 0)


def _plan(setting: Setting, group: Group, slow: float) -> Plan:
    """Return the plan for measured speeds; `slow` multiplies the slowed device's times while measuring."""
    factor = setting.slowdown[group.device] * (slow if group.device == setting.slowed else 1.0)
    model = _net(setting)
    traced = trace(model, torch.zeros(1, 3, setting.image, setting.image))
    speeds = measure_speeds(group, traced, model, setting.batch, factor)
    return named_plan(setting.plan, traced.graph, setting.batch, speeds)


class Training:
    """One of the four trainings on this device; see the module.

    Args:
        slow_at: the step before which a device becomes slower; None: never.
        follows: for so many steps its shares follow the devices; then they stay.
    """

    def __init__(
        self,
        setting: Setting,
        group: Group,
        data: TensorDataset,
        plan: Plan,
        *,
        slow_at: int | None,
        follows: int = 0,
    ) -> None:
        self.setting, self.group, self.slow_at, self.run = setting, group, slow_at, Run()
        self.follows = follows
        self.part = distribute(
            _net(setting), plan, group, torch.zeros(1, 3, setting.image, setting.image),
            slowdown=setting.slowdown[group.device],
        )  # fmt: skip
        self.optimizer = torch.optim.SGD(self.part.parameters(), lr=0.01, momentum=0.9)
        self.rebalancer = (
            Rebalancer(self.part, self.optimizer, tell=self._on_decision, every=setting.every) if follows else None
        )
        self.batches = self._endless(data)

    def _on_decision(self, step: int, decision: Reshard) -> None:
        self.run.reshards.append((step, decision.reason))

    def _endless(self, data: TensorDataset) -> Iterator[tuple[Tensor, Tensor]]:
        batches = loader(data, self.setting.batch, self.part)
        while True:
            yield from batches

    def step(self) -> None:
        part, run = self.part, self.run
        if len(run.losses) == self.slow_at and self.group.device == self.setting.slowed:
            part.clock.slowdown *= self.setting.times
        run.shares.append(
            {axes.name: list(shares_of(part.plan, axes)) for axes in coupled_axes(part.plan, part.traced[True].graph)}
        )
        start, before_s = time.perf_counter(), part.clock.compute_s
        images, labels = next(self.batches)
        loss = F.cross_entropy(part(images), labels)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        if self.rebalancer is not None and len(run.losses) < self.follows:
            self.rebalancer.step(len(labels))
        run.losses.append(float(loss.detach()))
        run.step_s.append(time.perf_counter() - start)
        run.compute_s.append(part.clock.compute_s - before_s)

    def finished(self) -> Run:
        """Return the run with the slowest device's seconds of each step."""
        rows = [json.loads(t) for t in self.group.agree("seconds", json.dumps([self.run.step_s, self.run.compute_s]))]
        step_s, compute_s = ([max(each) for each in zip(*(row[i] for row in rows), strict=True)] for i in (0, 1))
        return replace(self.run, step_s=step_s, compute_s=compute_s)


def _document(setting: Setting, runs: dict[str, Run], summary: Summary) -> dict[str, Any]:
    return {
        "command": _command(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__, "convoy": __version__, "ground": asdict(ground()),
        "setting": asdict(setting), "summary": as_json(summary),
        "runs": {name: asdict(run) for name, run in runs.items()},
    }  # fmt: skip


def _command() -> str:
    """Return the command a user types: convoy emulate passes its fleet in CONVOY_FLEET; result paths are local."""
    given = sys.argv[1:]
    for name in ("-o", "--output"):
        if name in given:
            del given[given.index(name) : given.index(name) + 2]
    words = ["python -m benchmarks.rebalance", *given]
    if fleet := os.environ.get("CONVOY_FLEET"):
        words = ["convoy emulate", f"benchmarks/fleets/{Path(fleet).name}", "--", *words]
    return " ".join(words)


def _show(summary: Summary) -> None:
    table = Table(title=f"Median of the last {LATE} steps", title_justify="left")
    for name in ("", "step", "slowest device computes"):
        table.add_column(name, justify="right")
    for name, seconds in summary.step_s.items():
        table.add_row(name, f"{seconds * 1e3:.1f} ms", f"{summary.compute_s[name] * 1e3:.1f} ms")
    console = Console(highlight=False)
    console.print(table)
    for step, reason in summary.reshards:
        console.print(f"step {step}: {reason}", soft_wrap=True)
    back = "never" if summary.back_after is None else f"after {summary.back_after} steps"
    console.print(
        f"Back within 5 % of the best split: {back}; after {ANSWER} steps {summary.of_best:.1%} of its throughput, "
        f"{summary.left_alone:.1%} with the shares left alone. Shares within {summary.swing:.1%} over "
        f"{summary.later_steps} steps later (noise {summary.noise:.1%}). Losses at most {summary.losses_apart:.2g} apart; "
        f"those of another split {summary.losses_apart_by_rounding:.2g}.",
        soft_wrap=True,
    )


if __name__ == "__main__":
    typer.run(main)
