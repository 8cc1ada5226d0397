"""Measure the error of predictions for described devices against measurements, ours and published.

    python -m lab.calibrate [--solo-only]

Prints how often the intervals hold, and the factors beside the constants of `convoy.simulate`, which are these numbers: of each
family of devices the spread of trainings of one device; of a device alone, of steps and of gains what the known causes leave
unexplained (`convoy.simulate.interval.REPLAY`). The rule is the same for all: the smallest factor with which nine of ten of n
residuals lie in the interval, the (n + 1) * 0.9-th in size (split conformal prediction). It is also taken from all nets but
one, and tried on that one.
"""

import math
import statistics
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from benchmarks.configurations import AUTO, IN_TURN
from benchmarks.drive import results_in
from benchmarks.results import FleetResult, Row, newest, read_result
from benchmarks.score import Residual, held, inside, spread_of
from convoy.errors import InputError
from convoy.fleet import Device, Fleet, Host, read_fleet
from convoy.fleet.catalogue import device_class
from convoy.model.graph import Graph
from convoy.model.nets import graph_of
from convoy.plan.presets import PLANS
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.planner import candidates
from convoy.planner.prediction import predict_plan
from convoy.planner.request import PlanRequest
from convoy.simulate.costs import CPU, PLAIN_GPU, TF32, TF32_GPU, described_costs
from convoy.simulate.interval import SIMULATION, Basis

FOLDER = Path(__file__).parents[1] / "benchmarks"
FASTER_FROM = "2026-11-24"
"""From this day on our machine was faster than before, up to three times, for reasons that no program on it can see. What is
said of devices that are only described is from the days before; of measured ones, from the latest."""

OUR_CLASS = "zen5-core"
"""What the processors of our fleets are."""


# --- one device ------------------------------------------------------------------------------------------------------


@cache
def _graph(net: str) -> Graph:
    return graph_of(net, (3, 224, 224), 1000) if net.startswith("torchvision:") else graph_of(net)


def _alone(device: Device) -> Fleet:
    return Fleet((Host(device.host),), (device,))


def published() -> Iterator[tuple[str, Residual]]:
    """Return published trainings on one GPU, with the GPU's family."""
    rows = tomllib.loads((FOLDER / "published.toml").read_text(encoding="utf-8"))["row"]
    for row in rows:
        known = device_class(row["class"])
        measured_s = row.get("step_s") or row["batch"] / row["images_per_s"]
        costs = described_costs(_alone(Device.of_class(known, known.name, "host")))
        predicted_s = (
            row["batch"]
            / PlanRequest(
                _graph(f"torchvision:{row['net']}"), row["batch"], FleetKnowledge(given=costs)
            ).speeds.devices[0]
        )
        family = "tf32" if known.architecture in TF32 else "plain"
        yield family, Residual(f"{row['class']} {row['net']} {row['batch']}", row["class"], predicted_s, measured_s)


def described(fleet: str) -> Fleet:
    """Return our fleet as someone would describe it without measuring."""
    read = read_fleet(FOLDER / "fleets" / f"{fleet}.toml")
    devices = []
    for device in read.devices:
        known = device_class(OUR_CLASS).with_cores(device.cores or 1.0)
        devices.append(replace(Device.of_class(known, device.name, device.host), cores=device.cores))
    return replace(read, devices=tuple(devices))


def our_rows(name: str, basis: Basis = "measured") -> list[Row]:
    """The rows of a set of benchmarks on fleets that have a file: the latest of each case; for described fleets those of before
    `FASTER_FROM`."""
    files = {path.stem for path in (FOLDER / "fleets").glob("*.toml")}
    results = FOLDER / "results"
    if basis == "measured":
        found = results_in(results / name)
    else:
        paths = [path for folder in (results, results / "earlier") for path in sorted((folder / name).glob("*.json"))]
        found = newest(_before(read_result(path)) for path in paths)
    return [row for result in found for row in result.measured_rows() if row.fleet in files]


def _before(result: FleetResult) -> FleetResult:
    nets = {name: net for name, net in result.nets.items() if net.finished[:10] < FASTER_FROM}
    return replace(result, nets=nets)


def ours_alone() -> Iterator[Residual]:
    """Return our devices' solo trainings in plain PyTorch."""
    for row in our_rows("bench", "described"):
        if row.plan == IN_TURN and row.device is not None:
            speeds = _speeds(row.fleet, row.net, row.batch)
            yield Residual(f"{row.fleet} {row.net} {row.batch}", row.net, row.batch / speeds[row.device], row.median_s)


def alone(basis: Basis) -> list[Residual]:
    """Return our devices' solo trainings with the known error of their kind."""
    if basis == "described":
        return [replace(each, known=CPU.spread) for each in ours_alone()]
    rows = [row for row in our_rows("bench") if row.plan == IN_TURN and row.predicted_s is not None]
    return [
        Residual(f"{row.fleet} {row.net} {row.batch}", row.net, row.predicted_s or 0.0, row.median_s) for row in rows
    ]


@cache
def _speeds(fleet: str, net: str, batch: int) -> tuple[float, ...]:
    return _context(fleet, net, batch).speeds.devices


# --- fleets ----------------------------------------------------------------------------------------------------------


@cache
def _context(fleet: str, net: str, batch: int) -> PlanRequest:
    of = described(fleet)
    return PlanRequest(_graph(net), batch, FleetKnowledge(of, given=described_costs(of)))


@cache
def _predicted(fleet: str, net: str, batch: int, plan: str) -> tuple[float, float, float]:
    """Return step seconds, the factor of known causes, and the factor relative to the fastest device."""
    context = _context(fleet, net, batch)
    chosen = candidates(context)[0].plan if plan == AUTO else context.named(plan)
    row = predict_plan(chosen, context)
    computes = [seconds / row.step_s for seconds in row.timeline.compute_s]
    errors, simulation = context.costs.errors, SIMULATION["described"]
    step, gain = errors.step(computes), errors.gain(computes, context.speeds.fastest)
    return row.step_s, _without(step, simulation.step), _without(gain, simulation.gain)


def _without(factor: float, cause: float) -> float:
    """Return the factor that remains without one of its independent causes."""
    return math.exp(math.sqrt(max(0.0, math.log(factor) ** 2 - math.log(cause) ** 2)))


def steps(basis: Basis) -> list[Residual]:
    """Return all plans of the validation set; measured fleets as predicted before the first run."""
    found = []
    for row in our_rows("validation", basis):
        name = f"{row.fleet} {row.net} {row.batch} {row.plan}"
        if basis == "described":
            step_s, known, _ = _predicted(row.fleet, row.net, row.batch, row.plan)
            found.append(Residual(name, row.net, step_s, row.median_s, known))
        elif row.predicted_s is not None:
            found.append(Residual(name, row.net, row.predicted_s, row.median_s))
    return found


def gains(basis: Basis) -> list[Residual]:
    """Return each fleet's speedup over its fastest solo device where both were measured."""
    cases: Mapping[tuple[str, str, int], list[Row]] = defaultdict(list)
    for row in our_rows("bench", basis):
        cases[row.fleet, row.net, row.batch].append(row)
    found = []
    for (fleet, net, batch), rows in cases.items():
        alone = [row for row in rows if row.plan == IN_TURN]
        for row in rows:
            if row.plan not in (AUTO, *PLANS) or not alone:
                continue
            if basis == "measured":
                best_s = min(each.predicted_s or math.inf for each in alone)
                step_s, known = row.predicted_s or math.nan, 1.0
            else:
                best_s = batch / max(_speeds(fleet, net, batch))
                step_s, _, known = _predicted(fleet, net, batch, row.plan)
            measured = min(each.median_s for each in alone) / row.median_s
            found.append(Residual(f"{fleet} {net} {batch} {row.plan}", net, best_s / step_s, measured, known))
    return found


def _tell(name: str, residuals: Sequence[Residual], constant: float) -> None:
    mean = math.exp(sum(math.log(each.predicted / each.measured) for each in residuals) / len(residuals))
    wide = math.exp(statistics.median(math.hypot(math.log(each.known), math.log(constant)) for each in residuals))
    print(
        f"{name:<28} {len(residuals):3d} rows: the interval (factor {wide:.2f} in the median) holds "
        f"{inside(residuals, constant):.0%}; made without each net or GPU {held(residuals):.0%}; predicted / measured "
        f"{mean:.2f} in the mean; unexplained {spread_of(residuals):.3f}, constant {constant}"
    )


def main() -> None:
    """Print all tables."""
    families = defaultdict(list)
    try:
        for family, residual in published():
            families[family].append(residual)
        _tell("GPUs, float32", families["plain"], PLAIN_GPU.spread)
        _tell("GPUs, TF32", families["tf32"], TF32_GPU.spread)
    except InputError as error:
        print(f"GPUs: left out, {error}")
    _tell("one processor, described", list(ours_alone()), CPU.spread)
    _tell("one processor, measured", alone("measured"), SIMULATION["measured"].alone)
    if "--solo-only" in sys.argv:
        return
    for basis in ("measured", "described"):
        _tell(f"steps of fleets, {basis}", steps(basis), SIMULATION[basis].step)
        _tell(f"gains of fleets, {basis}", gains(basis), SIMULATION[basis].gain)
    print("Outside, the farthest first:")
    outside = [each for each in steps("measured") if each.size > math.log(SIMULATION["measured"].step)]
    outside += [each for each in steps("described") if each.size > math.log(SIMULATION["described"].step)]
    for each in sorted(outside, key=lambda residual: -residual.size):
        print(f"   {each.what:45s} predicted {each.predicted:8.3f} s, measured {each.measured:8.3f} s")


if __name__ == "__main__":
    main()
