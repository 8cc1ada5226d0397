"""Whether predictions repeat: one fleet is measured several times, and each time the same plans are predicted.

    python -m benchmarks.repeat [--fleet mixed4] [--times 5] [--net two-conv:150:800 ...] [--budget 40]     # Linux, root

Every repetition measures the wire and each net anew. For each net it tells how far the predictions of one plan lie apart,
(largest - smallest) / median, and what of the measurements makes them differ: the same plan is predicted with all of the first
measurement but one part, which is each repetition's. Writes results/repeat.json.
"""

import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.configurations import AUTO, FLEETS, fleet_named
from benchmarks.hardware import ground
from convoy.comm.group import Group
from convoy.comm.processes import join
from convoy.emulate import rehearse
from convoy.files import write_whole
from convoy.fleet import read_fleet
from convoy.measure.measure_job import MeasureOptions, measure_job
from convoy.model.graph import Graph
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.plan.plan import Plan
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.planner import candidates
from convoy.planner.predict import predict_plan
from convoy.planner.request import PlanRequest
from convoy.simulate.overhead import Overheads
from convoy.simulate.table import DeviceCosts, Measurement

RESULTS = Path(__file__).parent / "results" / "repeat.json"
NETS = ("two-conv:150:800", "resnet:8:16", "resnet18:64")
PLANS = ("data-by-speed", "hybrid", "model")
IMAGE = (3, 32, 32)

OVERHEADS = tuple(Overheads.__dataclass_fields__)
PARTS: Mapping[str, tuple[str, ...]] = {
    "handling": ("update_s_per_entry", *OVERHEADS),
    "jitter": ("jitter_s",),
    "traffic": ("send_s_per_byte", "receive_s_per_byte"),
}
"""Columns of what a device costs beside its layers, by what measures them."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """One net: of each plan, and of each part of the measurements by the first repetition's `auto`, the seconds of a step."""

    net: str
    batch: int
    plans: Mapping[str, tuple[float, ...]]
    parts: Mapping[str, tuple[float, ...]]


def spread(seconds: Sequence[float]) -> float:
    """(largest - smallest) / median."""
    return (max(seconds) - min(seconds)) / statistics.median(seconds)


def repeats(net: str, batch: int, graph: Graph, measured: Sequence[Measurement]) -> Repeats:
    """What plans of the first measurement take by each of them."""
    contexts = [_context(graph, batch, each) for each in measured]
    first = contexts[0]
    fixed = {AUTO: candidates(first)[0].plan} | {name: first.named(name) for name in PLANS}
    plans = {f"{name}, of the first": _steps(plan, contexts) for name, plan in fixed.items()}
    plans[f"{AUTO}, of each"] = tuple(candidates(each)[0].step_s for each in contexts)
    parts = {
        name: _steps(fixed[AUTO], [_context(graph, batch, _with(measured[0], each, name)) for each in measured])
        for name in ("layers", "wire", *PARTS)
    }
    return Repeats(net, batch, plans, parts)


def _context(graph: Graph, batch: int, measured: Measurement) -> PlanRequest:
    return PlanRequest(graph, batch, FleetKnowledge(measured.fleet, given=measured.costs(graph)))


def _steps(plan: Plan, contexts: Sequence[PlanRequest]) -> tuple[float, ...]:
    return tuple(predict_plan(plan, each).step_s for each in contexts)


def _with(first: Measurement, other: Measurement, part: str) -> Measurement:
    """The first measurement with one part of another."""
    if part == "layers":
        return replace(first, layer=other.layer)
    if part == "wire":
        return replace(first, fleet=other.fleet, link=other.link, host=other.host)

    def mixed(a: DeviceCosts, b: DeviceCosts) -> DeviceCosts:
        return replace(a, **{name: getattr(b, name) for name in PARTS[part]})

    return replace(first, device=tuple(map(mixed, first.device, other.device)))


def work(
    group: Group, nets: Sequence[str], batch: int, times: int, budget_s: float, output: Path, keep: Path | None
) -> None:
    """What each device does; the first one predicts and tells."""
    fleet = read_fleet(Path(os.environ["CONVOY_FLEET"]))
    traced = {net: trace(build_net(net, IMAGE, 10), torch.zeros(1, *IMAGE)) for net in nets}
    found: dict[str, list[Measurement]] = {net: [] for net in nets}
    for number in range(times):
        for net in nets:
            model = build_net(net, IMAGE, 10)
            found[net].append(
                measure_job(group, traced[net], model, batch, MeasureOptions(net, fleet=fleet, budget_s=budget_s))
            )
            if group.device == 0:
                print(f"{net}: measured {number + 1} of {times}", flush=True)
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    write_whole(keep / f"{net.replace(':', '-')}.{number + 1}.toml", found[net][-1].to_toml())
    if group.device == 0:
        rows = [repeats(net, batch, traced[net].graph, found[net]) for net in nets]
        write_whole(output, json.dumps(_document(rows), indent=1) + "\n")
        show(rows)
    group.agree("told", "")


def _document(rows: Sequence[Repeats]) -> dict[str, object]:
    words = " ".join(["python -m benchmarks.repeat", *sys.argv[1:]])
    return {"command": words, "ground": asdict(ground()), "nets": [asdict(row) for row in rows]}


def show(rows: Sequence[Repeats]) -> None:
    table = Table(title="Predicted seconds of a step, by each measurement", title_justify="left")
    for name in ("net", "", "seconds", "spread"):
        table.add_column(name)
    for row in rows:
        told = {f"plan {name}": s for name, s in row.plans.items()} | {
            f"only {n} differ": s for n, s in row.parts.items()
        }
        for name, seconds in told.items():
            table.add_row(row.net, name, " ".join(f"{s:.4g}" for s in seconds), f"{spread(seconds):.1%}")
    Console(highlight=False, width=140).print(table)


def main(
    fleet: Annotated[str, typer.Option(help="A fleet of benchmarks/fleets.")] = "mixed4",
    net: Annotated[list[str] | None, typer.Option(help="May be given several times.")] = None,
    batch: int = 64,
    times: Annotated[int, typer.Option(min=2, help="Measurements of each net.")] = 5,
    budget: Annotated[float, typer.Option(min=1.0, help="Seconds of one measurement, about.")] = 40.0,
    limit: Annotated[float, typer.Option(help="Seconds for all, at most.")] = 3600.0,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write (JSON).")] = RESULTS,
    keep: Annotated[Path | None, typer.Option(help="Folder for the fleet file of each measurement.")] = None,
) -> None:
    nets = tuple(net or NETS)
    if "RANK" in os.environ:
        with join(timeout_s=300.0) as group:
            work(group, nets, batch, times, budget, output, keep)
        return
    print(f"about {len(nets) * times * (budget + 10) / 60 + 1:.0f} min", flush=True)
    command = [sys.executable, "-m", "benchmarks.repeat", *sys.argv[1:]]
    raise typer.Exit(rehearse(fleet_named(fleet), command, timeout_s=limit, fleet_path=FLEETS / f"{fleet}.toml"))


if __name__ == "__main__":
    typer.run(main)
