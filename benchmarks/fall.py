"""A host falls to a part of its speed in mid-training, and recovers: what rebalancing makes of it, beside the best split.

    python -m benchmarks.fall [--fleet mixed4] [--net two-conv:150:800 --batch 16 ...]     # Linux, root
    python -m benchmarks.fall --net alexnet:4096 --batch 64 --plan hybrid

The fleet is rehearsed. Device 0 changes its own processor quota, as another program that takes processors would. Net by net:

    best      the fallen fleet is measured and planned for, by auto or a plan by name, and settles: what a step can take then
    training  from the plan for the fleet as it is; falls at one step, recovers at another, and is rebalanced all along
    alone     the same plan on the fallen fleet, and nobody does anything

Writes results/fall.json: seconds of all steps, what they are in each stretch, and every change of shares.
"""

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import TensorDataset

from benchmarks.configurations import FLEETS, fleet_named
from benchmarks.hardware import ground
from convoy.api import distribute, loader, make_plan
from convoy.comm.group import Group
from convoy.comm.processes import join
from convoy.emulate import rehearse
from convoy.emulate.cgroups import run_like
from convoy.errors import InputError, unknown_name
from convoy.files import write_whole
from convoy.fleet import read_fleet
from convoy.model.nets import build_net
from convoy.plan.plan import Plan
from convoy.plan.presets import AUTO, PLANS
from convoy.train.controller import Rebalancer
from convoy.train.rebalance import Decision

RESULTS = Path(__file__).parent / "results" / "fall.json"
NETS = ("two-conv:150:800", "alexnet:4096")
BATCHES = (16, 64)
IMAGE, CLASSES = (3, 32, 32), 10

SETTLING = 30
"""Steps in which the best split of the fallen fleet is found, and those of the plan that nobody corrects."""

ANSWER = 5
"""Steps that rebalancing has for its answer."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Steps count from 0; `part` is what is left of the first device's cores; `settling` those of the best split."""

    fall_at: int
    recover_at: int
    steps: int
    part: float
    budget_s: float
    settling: int = SETTLING


@dataclass(frozen=True, slots=True)
class Fallen:
    """One net: seconds of each step, and after which step shares changed, and why."""

    net: str
    batch: int
    setting: Setting
    best_s: tuple[float, ...]
    step_s: tuple[float, ...]
    alone_s: tuple[float, ...]
    changes: tuple[tuple[int, str], ...]
    plan: str = AUTO

    def stretches(self) -> Mapping[str, float]:
        """Median seconds of a step, of each stretch of the training and of what stands beside it."""
        at, fall, back = self.step_s, self.setting.fall_at, self.setting.recover_at
        return {
            "before": statistics.median(at[fall // 2 : fall]),
            "fallen: best split": statistics.median(self.best_s[self.setting.settling // 2 :]),
            "fallen: nobody does anything": statistics.median(self.alone_s[2:]),
            **{f"fallen: step {n + 1}": at[fall + n] for n in range(ANSWER)},
            f"fallen: steps {ANSWER + 1} to {2 * ANSWER}": statistics.median(at[fall + ANSWER : fall + 2 * ANSWER]),
            "fallen: later": statistics.median(at[fall + 2 * ANSWER : back]),
            **{f"recovered: step {n + 1}": at[back + n] for n in range(ANSWER)},
            f"recovered: steps {ANSWER + 1} to {2 * ANSWER}": statistics.median(at[back + ANSWER : back + 2 * ANSWER]),
            "recovered: later": statistics.median(at[back + 2 * ANSWER :]),
        }


class Job:
    """One net on this device of the rehearsed fleet."""

    def __init__(self, group: Group, net: str, batch: int, plan: str, setting: Setting, cores: float) -> None:
        self.group, self.net, self.batch, self.plan, self.setting, self.cores = group, net, batch, plan, setting, cores
        own = torch.Generator().manual_seed(1)
        count = 4 * batch
        x = torch.randn(count, *IMAGE, generator=own)
        self.data = TensorDataset(x, torch.randint(CLASSES, (count,), generator=own))

    def run(self) -> Fallen:
        setting = self.setting
        self._fall(fallen=True)
        best_s, _ = self._trained(self._plan(), setting.settling, {}, follows=True)
        self._fall(fallen=False)
        plan = self._plan()
        turns = {setting.fall_at: True, setting.recover_at: False}
        step_s, changes = self._trained(plan, setting.steps, turns, follows=True)
        self._fall(fallen=True)
        alone_s, _ = self._trained(plan, max(4, setting.settling // 2), {}, follows=False)
        self._fall(fallen=False)
        return Fallen(self.net, self.batch, setting, best_s, step_s, alone_s, changes, self.plan)

    def _fall(self, *, fallen: bool) -> None:
        self.group.agree("the quota", "")
        if self.group.device == 0:
            run_like(self.cores * (self.setting.part if fallen else 1.0))

    def _model(self) -> torch.nn.Module:
        return build_net(self.net, IMAGE, CLASSES, 0)

    def _plan(self) -> Plan:
        return make_plan(
            self.plan, self._model(), torch.zeros(1, *IMAGE), self.batch, self.group, budget_s=self.setting.budget_s
        )

    def _trained(
        self, plan: Plan, steps: int, turns: Mapping[int, bool], *, follows: bool
    ) -> tuple[tuple[float, ...], tuple[tuple[int, str], ...]]:
        """Seconds of each step, the mean over the devices, and the changes of shares.

        Args:
            turns: before which step the host falls (True) or recovers.
        """
        part = distribute(self._model(), plan, self.group, torch.zeros(1, *IMAGE))
        optimizer = torch.optim.SGD(part.parameters(), lr=0.01, momentum=0.9)
        changes: list[tuple[int, str]] = []

        def tell(step: int, decision: Decision) -> None:
            changes.append((step, decision.reason))

        rebalancer = Rebalancer(part, optimizer, tell=tell) if follows else None
        batches, ends = self._endless(loader(self.data, self.batch, part)), [time.perf_counter()]
        for step in range(steps):
            if step in turns and self.group.device == 0:
                run_like(self.cores * (self.setting.part if turns[step] else 1.0))
            x, y = next(batches)
            optimizer.zero_grad()
            F.cross_entropy(part(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if rebalancer is not None:
                rebalancer.step(len(y))
            ends.append(time.perf_counter())
        own = [b - a for a, b in itertools.pairwise(ends)]
        rows = [json.loads(text) for text in self.group.agree("seconds of steps", json.dumps(own))]
        return tuple(statistics.fmean(each) for each in zip(*rows, strict=True)), tuple(changes)

    @staticmethod
    def _endless(batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from batches


def show(rows: Sequence[Fallen]) -> None:
    """As a table, with each stretch beside the best of its fleet."""
    table = Table(title="Median seconds of a step", title_justify="left")
    for name in ("net", "", "seconds", "beside the best"):
        table.add_column(name)
    for row in rows:
        found = row.stretches()
        for name, seconds in found.items():
            best = found["fallen: best split" if name.startswith("fallen") else "before"]
            table.add_row(f"{row.net}, batch {row.batch}, {row.plan}", name, f"{seconds:.3g}", f"{seconds / best:.3f}")
    console = Console(highlight=False, width=140)
    console.print(table)
    for row in rows:
        for step, reason in row.changes:
            console.print(f"{row.net}, after step {step}: {reason}", soft_wrap=True)


def main(
    fleet: Annotated[str, typer.Option(help="A fleet of benchmarks/fleets.")] = "mixed4",
    net: Annotated[list[str] | None, typer.Option(help="May be given several times.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="One for each net.")] = None,
    plan: Annotated[
        list[str] | None, typer.Option(help="One for each net: auto, or a plan by name. Default: auto.")
    ] = None,
    fall_at: int = 40,
    recover_at: int = 120,
    steps: int = 200,
    part: Annotated[float, typer.Option(help="Of the first host's cores, what is left.")] = 1 / 3,
    budget: Annotated[float, typer.Option(help="Seconds of each measuring, two for each net.")] = 40.0,
    settling: Annotated[int, typer.Option(min=4, help="Steps in which the best split settles.")] = SETTLING,
    limit: Annotated[float, typer.Option(help="Seconds for all, at most.")] = 3600.0,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write (JSON).")] = RESULTS,
) -> None:
    nets, batches = tuple(net or NETS), tuple(batch or BATCHES)
    plans = tuple(plan or (AUTO,) * len(nets))
    if not len(nets) == len(batches) == len(plans):
        raise typer.BadParameter(
            f"{len(nets)} nets, {len(batches)} batches, {len(plans)} plans: give a --batch for each --net, and a --plan or none"
        )
    if unknown := [name for name in plans if name not in (*PLANS, AUTO)]:
        raise typer.BadParameter(str(unknown_name("plan", unknown[0], (*PLANS, AUTO))))
    if not (fall_at >= 2 and fall_at + 2 * ANSWER < recover_at and recover_at + 2 * ANSWER < steps):
        raise typer.BadParameter(
            f"a fall at step {fall_at}, recovery at {recover_at} of {steps} steps: give 2 or more, and {2 * ANSWER + 1} between"
        )
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "benchmarks.fall", *sys.argv[1:]]
        raise typer.Exit(rehearse(fleet_named(fleet), command, timeout_s=limit, fleet_path=FLEETS / f"{fleet}.toml"))
    cores = read_fleet(Path(os.environ["CONVOY_FLEET"])).devices[0].cores
    if cores is None:
        raise InputError(f"the first device of {fleet} has no cores: give it a number that a part can be taken of")
    setting = Setting(fall_at, recover_at, steps, part, budget, settling)
    with join(timeout_s=300.0) as group:
        jobs = zip(nets, batches, plans, strict=True)
        rows = [Job(group, name, size, by, setting, cores).run() for name, size, by in jobs]
        if group.device == 0:
            words = " ".join(["python -m benchmarks.fall", *sys.argv[1:]])
            document = {"command": words, "ground": asdict(ground()), "nets": [asdict(row) for row in rows]}
            write_whole(output, json.dumps(document, indent=1) + "\n")
            show(rows)
        group.agree("told", "")


if __name__ == "__main__":
    typer.run(main)
