"""Marques' experiment with three GPUs: convolutions of 500 and 1500 filters on three accelerators and a CPU.

    python -m benchmarks.three [--page docs/three.md] [--no-measure] [--no-predict]

Measures simulated accelerators of given speeds (tests/support/sim) in four minutes, and compares the steps with predictions
from a measurement of these devices. This tests plans, exchange and staging end to end, within one machine. Speedups of real
GPUs are predicted from the catalogue.
"""

import itertools
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.gpu import Place, place_of
from benchmarks.hardware import stamp
from benchmarks.page import table
from convoy.cli.plan_verbs import fleet_on
from convoy.errors import InputError
from convoy.files import write_whole
from convoy.fleet import Fleet
from convoy.model.graph import Graph
from convoy.model.nets import graph_of
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.planner import candidates
from convoy.planner.prediction import PlanPrediction, predict_plan
from convoy.planner.request import PlanRequest
from convoy.simulate.costs import Costs, described_costs
from convoy.simulate.events import Timeline
from convoy.simulate.table import read_fleet_file

COMMAND = "python -m benchmarks.three"
PUBLISHED = 2.45
"""Published speedup of three GPUs over one device, 500:1500 filters (Marques, Falcao, Alexandre 2018, abstract)."""

NET = "two-conv:500:1500"
IMAGE = (3, 32, 32)
DEVICES = ("sim:0", "sim:1", "sim:2", "cpu")
SLOWDOWNS = (4.0, 4.0, 4.0, 40.0)
"""Relative to one core. All devices together need less than two cores, so no device waits for another's core."""

BATCH, ALONE_STEPS, STEPS = 8, 3, 6
IN_CHUNKS = "auto, one sample at a time"

CLASSES = ("gtx1080", "rtx3060", "rtx4090")
PROCESSOR = "core-i7-8700k"
REAL_BATCHES = (128, 1024)
LINKS_BITS_PER_S = (10e9, 100e9)
WIDEST_BITS_PER_S = 1e12
LATENCY_S = 5e-5


# --- predicted ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    """Predictions of both plans on one fleet. `limit`: the sum of solo speeds divided by that of the fastest device."""

    master: PlanPrediction
    auto: PlanPrediction
    fastest: float
    limit: float

    def speedup(self, name: str) -> float:
        row: PlanPrediction = getattr(self, name)
        return row.samples_per_s / self.fastest


def predict(graph: Graph, batch: int, costs: Costs, fleet: Fleet) -> Predicted:
    context = PlanRequest(graph, batch, FleetKnowledge(fleet, given=costs))
    best = predict_plan(candidates(context)[0].plan.named("auto"), context)
    speeds = context.speeds.devices
    return Predicted(predict_plan(context.named("master"), context), best, max(speeds), sum(speeds) / max(speeds))


def real_fleet(gpu: str, bits_per_s: float) -> Fleet:
    """Return three machines with one such GPU each, and one with a processor only."""
    return fleet_on(f"3x{gpu},{PROCESSOR}", bits_per_s / 8, LATENCY_S)


def real_costs(fleet: Fleet, *, free: bool) -> Costs:
    """Return catalogue costs; `free` makes processor time and staging per byte zero, leaving only the network."""
    costs = described_costs(fleet)
    nothing = (0.0,) * len(fleet.devices)
    return replace(costs, network=replace(costs.network, processor_s_per_byte=nothing)) if free else costs


def speedup(graph: Graph, gpu: str, plan: str, bits_per_s: float, *, free: bool) -> float:
    """Return the speedup of a plan over one GPU at the larger batch."""
    fleet = real_fleet(gpu, bits_per_s)
    context = PlanRequest(graph, REAL_BATCHES[-1], FleetKnowledge(fleet, given=real_costs(fleet, free=free)))
    made = context.named(plan) if plan != "auto" else candidates(context)[0].plan
    return predict_plan(made, context).samples_per_s / max(context.speeds.devices)


def wire_for(graph: Graph, gpu: str, plan: str, *, free: bool) -> tuple[float | None, float]:
    """Return the lowest link rate (bits/s, within 10 %) at which a plan reaches `PUBLISHED` (None: no rate is enough), and
    its speedup at the highest rate.
    """
    low, high = 1e8, WIDEST_BITS_PER_S
    most = speedup(graph, gpu, plan, high, free=free)
    if most < PUBLISHED:
        return None, most
    while high / low > 1.1:
        middle = math.sqrt(low * high)
        enough = speedup(graph, gpu, plan, middle, free=free) >= PUBLISHED
        low, high = (low, middle) if enough else (middle, high)
    return high, most


def predictions(graph: Graph, say: Callable[[str], None]) -> list[str]:
    """Return Markdown tables of the predictions for real GPUs."""
    rows = []
    for gpu, bits, batch in itertools.product(CLASSES, LINKS_BITS_PER_S, REAL_BATCHES):
        fleet = real_fleet(gpu, bits)
        found = [predict(graph, batch, real_costs(fleet, free=free), fleet) for free in (False, True)]
        speedups = [f"{each.speedup(name):.2f}" for each in found for name in ("master", "auto")]
        rows.append(
            [gpu, f"{bits / 1e9:g}", str(batch), f"{found[0].fastest:,.0f}", *speedups, f"{found[0].limit:.2f}"]
        )
        say(f"predicted: {', '.join(rows[-1])}")
    needs = []
    for gpu in CLASSES:
        wires = [wire_for(graph, gpu, plan, free=free) for free in (False, True) for plan in ("master", "auto")]
        needs.append([gpu, *(f"never: {most:.2f}" if wire is None else f"{wire / 1e9:.2g}" for wire, most in wires)])
        say(f"wire for {PUBLISHED:g}: {', '.join(needs[-1])}")
    plans = ["`master`", "`auto`", "`master`, free", "`auto`, free"]
    return [
        f"The fleet has three machines with one such GPU each and a fourth with only a CPU (`{PROCESSOR}`), from the catalogue "
        f"of device classes. Each has a link to a switch with a latency of {LATENCY_S * 1e6:g} us. The plans' columns give the "
        "speedup over one GPU. Messages go through host memory; *free*: copying and handling bytes takes no time.",
        table(["GPU", "Gbit/s", "batch", "samples/s of one", *plans, "limit"], rows),
        f"The next table gives the slowest link (Gbit/s) with which the fleet is {PUBLISHED:g} times as fast as one GPU, at "
        f"batch {REAL_BATCHES[-1]:,}. *never*: the speedup with {WIDEST_BITS_PER_S / 1e9:,.0f} Gbit/s. At this rate only the "
        "layers that the master computes alone limit it and, unless free, the handling of bytes:",
        table(["GPU", *plans], needs),
    ]


# --- measured on simulated accelerators ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """The printed results of one run.

    Attributes:
        forward_s: seconds per step in which the first device computes the large convolution forward.
    """

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    others: float
    forward_s: float

    @property
    def step_s(self) -> float:
        """Return the median step without the first, which includes initialisation."""
        return statistics.median(self.seconds[1:])


def measured_on(place: Place, net: str) -> tuple[Costs, Fleet]:
    """Return `convoy measure` of the simulated devices at their configured slowdowns."""
    path = Path(place.environment["CONVOY_RUNS"], "fleet.toml")
    _job(place, net, DEVICES, 0, path)
    fleet, measurement = read_fleet_file(path)
    assert measurement is not None
    return measurement.costs(graph_of(net, IMAGE, 10)), fleet


def train(place: Place, net: str, devices: Sequence[str], steps: int, plan: Path | None = None) -> Measured:
    """Run a separate training job.

    Raises:
        InputError: the job failed.
    """
    printed = _job(place, net, devices, steps, *([plan] if plan else []))
    line = next((line for line in printed.splitlines() if "worker {" in line), None)
    if line is None:
        raise InputError(f"training on {', '.join(devices)} printed no seconds: {printed[-500:]}")
    found = json.loads(line[line.index("{") :])
    return Measured(tuple(found["seconds"]), tuple(found["losses"]), found["others"], found["forward_s"])


def _job(place: Place, net: str, devices: Sequence[str], steps: int, *paths: Path) -> str:
    worker = Path(__file__).with_name("three_worker.py")
    argv = [str(worker), net, json.dumps(SLOWDOWNS), str(BATCH), str(steps), *map(str, paths)]
    done = subprocess.run(
        [sys.executable, "-m", "convoy", "run", "--devices", ",".join(devices), *argv], env=place.environment,
        cwd=place.environment["CONVOY_RUNS"], text=True, capture_output=True, timeout=600, check=False,
    )  # fmt: skip
    if done.returncode:
        raise InputError(f"a job on {', '.join(devices)} failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


def measurements(place: Place, net: str, graph: Graph, say: Callable[[str], None]) -> list[str]:
    """Return the Markdown table of measured and predicted values.

    Raises:
        InputError: a training failed, or its losses are not those of one device.
    """
    alone = train(place, net, DEVICES[:1], ALONE_STEPS)
    say(f"measured: {DEVICES[0]} alone {alone.step_s:.3f} s a step")
    costs, fleet = measured_on(place, net)
    found = predict(graph, BATCH, costs, fleet)
    limit = sum(SLOWDOWNS[0] / slowdown for slowdown in SLOWDOWNS)
    say(f"measured: the layers of {net}")
    rows, others = [], [alone.others]
    context = PlanRequest(graph, BATCH, FleetKnowledge(fleet, given=costs))
    single = predict_plan(replace(found.auto.plan, chunks=BATCH), context)
    for name, prediction in (("master", found.master), ("auto", found.auto), (IN_CHUNKS, single)):
        path = Path(place.environment["CONVOY_RUNS"], "plan.json")
        write_whole(path, prediction.plan.to_json())
        run = train(place, net, DEVICES, STEPS, path)
        apart = max(abs(a - b) for a, b in zip(run.losses, alone.losses, strict=False))
        if not apart <= 1e-3:
            raise InputError(f"{name}: losses {run.losses} differ from {alone.losses} of one device by {apart}")
        others.append(run.others)
        rows.append(
            [
                f"`{name}`", f"{run.step_s:.3f} s", f"{prediction.step_s:.3f} s", f"{run.forward_s:.3f} s",
                f"{_forward_s(prediction.timeline):.3f} s", f"{alone.step_s / run.step_s:.2f}",
                f"{prediction.samples_per_s / found.fastest:.2f}", f"{alone.step_s / run.step_s / limit:.0%}", f"{apart:.1e}",
            ]
        )  # fmt: skip
        say(f"measured: {', '.join(rows[-1])}")
    columns = ["plan", "step", "predicted", "convolution 2", "predicted", "speedup", "predicted"]
    columns += ["of the limit", "loss difference from one device"]
    speeds = " : ".join(f"{SLOWDOWNS[0] / slowdown:g}" for slowdown in SLOWDOWNS)
    return [
        f"{', '.join(DEVICES)} with speeds of {speeds}, batch {BATCH}, {STEPS} steps. {DEVICES[0]} alone needs "
        f"{alone.step_s:.3f} s per step; the limit is {limit:.2f} times that speed. "
        f"Other programs used {max(others):.0%} of the machine at most.",
        table(columns, rows),
        f"*Convolution 2* is {DEVICES[0]}'s forward time for its share of this layer. In `{IN_CHUNKS}`, the plan of `auto` "
        f"receives the inputs of this convolution in {BATCH} chunks and starts with the first. Every call of a convolution "
        "reorders its weights, so one call per sample takes a third longer. A roofline does not model this: with predictions "
        "from peaks alone, `auto` chose chunks and was slower than `master`. Measured times include it, because layers are "
        "timed from one sample on.",
    ]


def _forward_s(timeline: Timeline) -> float:
    rows = [e for e in timeline.events if e.device == 0 and e.activity == "compute" and e.label == "3 forward"]
    return sum(e.end_s - e.start_s for e in rows)


# --- all of it ----------------------------------------------------------------------------------------------------------


def main(
    page: Annotated[Path | None, typer.Option(help="Also write this page.")] = None,
    measure: Annotated[bool, typer.Option(help="Train on simulated accelerators.")] = True,
    forecast: Annotated[bool, typer.Option("--predict/--no-predict", help="Predict for real GPUs.")] = True,
    net: Annotated[str, typer.Option(help="The net; a smaller one tests the command.")] = NET,
) -> None:
    """Measure and predict, printing both as they arrive."""
    console = Console(soft_wrap=True, highlight=False)
    graph, made = graph_of(net, IMAGE, 10), stamp(COMMAND)
    measured, predicted = ["Not measured yet."], ["Not predicted."]
    if measure:
        with place_of(None) as place:
            if not place.simulated:
                raise InputError("this machine has an accelerator: hide it (CUDA_VISIBLE_DEVICES=) or run make gpu")
            measured = measurements(place, net, graph, console.print)
    if forecast:
        predicted = predictions(graph, console.print)
    text = page_of(made, measured, predicted)
    if page is not None:
        write_whole(page, text)
        console.print(f"Written: {page}")


def page_of(made: dict[str, Any], measured: Sequence[str], predicted: Sequence[str]) -> str:
    ground = made["ground"]
    return "\n\n".join(
        (
            f"<!-- Made by `{COMMAND}`; do not edit. -->",
            "# Three accelerators next to CPUs",
            f"Marques, Falcao and Alexandre (2018) report a speedup of {PUBLISHED:g} with three GPUs over one device, for two "
            "convolutions of 500 and 1500 filters, with the plan that Convoy calls `master`. They do not say which GPUs and "
            "links they used, how unequal the GPUs were, or which of them was the one device.",
            "## Measured, on simulated accelerators",
            "No GPU was used: simulated accelerators compute on the processor and pause to keep a given speed, as slowed "
            "devices do. Plans, staging and exchange are those of a GPU; messages stay within one machine.",
            *measured,
            "## Predicted, for real GPUs",
            *predicted,
            "## Where and how",
            f"{ground['processor']}, {ground['cores']} cores, Python {ground['python']}, torch {ground['torch']}, convoy "
            f"{ground['convoy']} at {ground['revision'] or 'an unknown revision'}, {made['date'][:10]}.",
            f"```\n{COMMAND}\n```",
        )
    ) + "\n"  # fmt: skip


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
