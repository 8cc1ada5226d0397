"""Measures the devices of a job, and plans on device 0.

Measurements are cached in the user's cache folder, or in the folder CONVOY_CACHE. If CONVOY_CACHE is empty, nothing is cached.
"""

import hashlib
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from convoy._version import __version__
from convoy.comm.control_messages import agree_on_modes, from_first, gather
from convoy.comm.group import Group
from convoy.errors import InputError, PlanError
from convoy.files import parse_json, read_text, write_whole
from convoy.machine.accelerator import hardware_name, modes, random_state_kept, spare_memory
from convoy.measure.device_info import DeviceInfo, describe_device, fit, fleet_of, host_indices, quota_cores
from convoy.measure.job_plans import Plans
from convoy.measure.layer_timer import measure_speeds
from convoy.measure.measure_job import MeasureOptions, measure_job
from convoy.measure.timing import Progress
from convoy.model.tracing import Example, TracedModel, trace
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import AUTO, Speeds, named_plan
from convoy.plan.text import layer_rows, work_shares
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.prediction import check_alone, choose, predict_plan
from convoy.planner.request import PlanOptions, PlanRequest
from convoy.simulate.memory import MemoryLimits

__all__ = ["Plans", "PlansOptions", "make_plans"]

BUDGET_S = 20.0
"""Default seconds for measuring, for the plan "auto"."""

UNCERTAIN = 2.0
"""A prediction is too uncertain to choose a plan if the high end of its interval exceeds this multiple of the low end."""

MOST_BYTES = 32 << 20  # size of the cache; the oldest measurements are removed

FALLBACK = "data-by-speed"  # the plan if the predictions are too uncertain


class PlansOptions(PlanOptions, total=False):
    """Keyword arguments of `make_plans`: those of `make_plan`, and some for "auto".

    Attributes:
        optimizer: "sgd", "sgd-momentum" or "adam"; its state counts as memory.
        net: the model's name in messages and files; None: its class name.
        micro_batches: the number of micro-batches of `batch` samples per step (see `Distributed.no_sync`).
        progress: called with the name of each stage; None: device 0 prints progress to standard error.
    """

    optimizer: str
    net: str | None
    micro_batches: int
    progress: Progress | None


def make_plans(
    model: nn.Module,
    example: Example,
    batch: int,
    group: Group,
    plan: str | Plan = AUTO,
    **options: Unpack[PlansOptions],
) -> Plans:
    """Return the plan of `make_plan`, and for "auto" also plans that are nearly as fast with fewer messages.

    A `Rebalancer` tries them: `Rebalancer(model, optimizer, others=plans[1:])`. The result also holds the devices' speeds, and
    for "auto" the predicted seconds of a step. Errors: see `make_plan`.

    Args:
        plan: a name, or a plan (for example from a file): then only speeds are measured, and the options `reduce`, `wire`
            and `outputs` override the plan's values.
        options: see `PlansOptions`.
    """
    known_options = PlansOptions.__optional_keys__
    if unknown := set(options) - known_options:
        raise TypeError(f"unknown option {min(unknown)!r}: choose from {', '.join(sorted(known_options))}")
    if batch < 1:
        raise PlanError(f"a batch of {batch}: a batch holds one sample at least; give 1 or more")
    if getattr(group, "entrance", None) is not None:
        # A joining device gets the job's plan on admission; until then it is alone.
        plan, options = "data", {**options, "speeds": None, "fleet": None, "reduce": None, "wire": None}
    agree_on_modes(group)  # fails early, before measuring
    traced = trace(model, example)
    entries = batch * sum(layer.input_entries for layer in traced.graph.layers.values()) // group.devices
    spare_memory(4 * entries, group.torch_device)  # before measuring, because malloc keeps what it once took
    if not traced.graph.layers and not isinstance(plan, Plan):  # nothing to split, and nothing to measure
        plan, options = "data", {**options, "speeds": [1.0] * group.devices}
    request = PlanRequest(
        traced.graph, batch, FleetKnowledge(ids=tuple(range(group.devices))), None if isinstance(plan, Plan) else plan,
        options.get("optimizer", "sgd-momentum"), options.get("wire") or "exact", options.get("reduce"),
        options.get("outputs") or "everywhere", options.get("micro_batches", 1),
    )  # fmt: skip
    given = options.get("speeds")
    if plan == AUTO:
        if given is not None:
            raise InputError(
                "speeds with the plan auto: it needs the times of every layer; leave speeds out, or name a plan"
            )
        return _auto(group, traced, model, request, options)
    if isinstance(plan, Plan) and plan.batch != batch:
        raise PlanError(f"the plan {plan.name} is for a batch of {plan.batch}, not {batch}: make a new plan")

    def made(by: Speeds) -> Plan:
        return plan if isinstance(plan, Plan) else named_plan(plan, traced.graph, batch, by, request.reduce)

    speeds = given_speeds((1.0,) * group.devices if given is None else given, group.devices)
    made(speeds).check(traced.graph, group.devices)  # fails early, before measuring
    if given is None and group.devices > 1:
        _print(group, options, "every device times the model's layers ...")
        slowdown, precision = options.get("slowdown", 1.0), options.get("precision", "float32")
        progress = options.get("progress") or (lambda _: None)
        # Timing draws random numbers, which must not change the script's random state.
        with random_state_kept(group.torch_device):
            speeds = measure_speeds(group, traced, model, batch, slowdown, precision, progress)
    found = made(speeds)
    found = replace(
        found, reduce=options.get("reduce") or found.reduce, wire=options.get("wire") or found.wire,
        outputs=options.get("outputs") or found.outputs,
    )  # fmt: skip
    return Plans((found,), replace(request, fleet=replace(request.fleet, speeds=speeds)))


def given_speeds(numbers: Sequence[float], devices: int) -> Speeds:
    """Return speeds given by the user instead of measured ones.

    Raises:
        InputError: not one positive number per device.
    """
    if len(numbers) != devices or any(not 0 < n < math.inf for n in numbers):
        raise InputError(
            f"speeds {','.join(f'{n:g}' for n in numbers)}: give one positive number for each of the {devices} devices, "
            "e.g. --speeds 4,2,1,1"
        )
    return Speeds(tuple(float(n) for n in numbers), measured=False)


def _print(group: Group, options: PlansOptions, *lines: str) -> None:
    """Print to standard error on device 0 if there are several devices and the caller gave no `progress`."""
    for line in lines if options.get("progress") is None and group.device == 0 and group.devices > 1 else ():
        print(f"convoy: {line}", file=sys.stderr, flush=True)


def _auto(group: Group, traced: TracedModel, model: nn.Module, request: PlanRequest, options: PlansOptions) -> Plans:
    """Measure the devices unless their times are known; plan on device 0; send the plans to all.

    Only one device plans, because devices that share a machine would slow each other. If the times vary too much, they are
    measured once more; if they still do, the plan is `FALLBACK`.
    """
    progress, budget_s = options.get("progress") or (lambda _: None), options.get("budget_s", BUDGET_S)
    known, path = known_fleet(group, request, repr(model), options)
    if known.measured is None and group.devices == 1:
        return _alone(group, request, known, options.get("slowdown", 1.0))
    measured, notes = known.measured, list[str]()
    if measured is not None and path is not None:
        notes.append(f"times of {measured.date[:10]} from {path}; set CONVOY_CACHE= to measure again")
    how = MeasureOptions(
        options.get("net") or type(model).__name__, known.described, budget_s, slowdown=options.get("slowdown", 1.0),
        precision=options.get("precision", "float32"),
    )  # fmt: skip
    for falls_back in (False, True):
        if known.measured is None:
            _print(group, options, f"measuring {group.devices} devices, about {max(1, round(budget_s))} s ...")
            with random_state_kept(group.torch_device):
                measured = measure_job(group, traced, model, request.batch, how, progress)
            group.clear_counters()  # traffic of measuring does not count as training traffic
        # Every device keeps the times, because any of them may plan later.
        request = replace(request, fleet=replace(request.fleet, measured=measured))
        progress("comparing plans")
        row = from_first(group, "automatic plan", lambda: _choice(request, falls_back or known.measured is not None))  # noqa: B023
        if row["is_certain"] or known.measured is not None:
            break
    if not row["is_certain"]:
        does = f"the plan is {FALLBACK}" if row["fell_back"] else "this plan may be slow"
        notes.append(f"the measured times varied too much to choose a plan: {does}; end other programs on the devices")
    elif path is not None and known.measured is None and group.device == 0:
        keep(path, FleetKnowledge(measured=measured))
    _print(group, options, *row["lines"], *notes)
    return Plans(
        tuple(Plan.from_json(text, "device 0's plan") for text in row["plans"]),
        replace(request, fleet=replace(request.fleet, speeds=Speeds(tuple(row["speeds"])))),
        tuple(row["step_s"]), tuple(row["spread"]),
        tuple(notes),
    )  # fmt: skip


def _choice(request: PlanRequest, falls_back: bool) -> dict[str, Any]:
    """Return the chosen plans with their predictions, and lines that describe the first, as JSON values.

    Args:
        falls_back: choose `FALLBACK` if the times are too uncertain and this plan fits the memory.
    """
    rows = choose(request)
    first, fell_back = rows[0], False
    is_certain = first.within.high <= UNCERTAIN * first.within.low
    if falls_back and not is_certain:
        simple = predict_plan(request.named(FALLBACK).named(AUTO), request)
        if fell_back := not simple.overfull:
            rows, first = [simple], simple
    speeds, fastest = request.speeds.devices, request.speeds.fastest
    work = work_shares(lower(first.plan, request.graph), request.graph)
    busy = [f"device {device} {share:.0%}" for device, share in enumerate(work) if share > 0]
    found = Counter(row.strategy for row in layer_rows(first.plan, request.graph) if request.graph[row.layer].weighted)
    splits = f"layers with weights: {', '.join(f'{count} {strategy}' for strategy, count in found.most_common())}"
    rates = (first.samples_per_s, request.batch / first.within.high, request.batch / first.within.low, speeds[fastest])
    is_slower = len(busy) == 1 < len(work) or first.samples_per_s < speeds[fastest]
    live_s = request.batch * max((each.live_s_per_sample for each in request.costs.overheads), default=0.0)
    rest = f"; the rest of the forward on each device: up to {live_s:.2g} of {first.step_s:.2g} s" if live_s else ""
    rate, low, high, solo = (f"{float(f'{each:.3g}'):,.10g}" for each in rates)
    return {
        "plans": [row.plan.to_json() for row in rows], "step_s": [row.step_s for row in rows],
        "spread": [row.spread for row in rows], "speeds": speeds,
        "is_certain": is_certain, "fell_back": fell_back,
        "lines": [
            f"plan auto: {'one device is faster than several' if is_slower else splits}",
            f"arithmetic: {', '.join(busy)}{rest}",
            f"predicted: {rate} samples/s (nine of ten: {low} - {high}); device {fastest} alone: {solo}",
        ],
    }  # fmt: skip


def _alone(group: Group, request: PlanRequest, known: FleetKnowledge, slowdown: float) -> Plans:
    """Return the plan of a single device, without measuring.

    Raises:
        PlanError: it does not fit the device's memory.
    """
    speeds = given_speeds((1.0,), 1)
    plan = named_plan("data", request.graph, request.batch, speeds, request.reduce)
    plan = replace(plan, name=AUTO, wire=request.wire, outputs=request.outputs)
    own = describe_device(group.torch_device, slowdown)
    process_bytes = max(0, own.process_bytes - 4 * sum(layer.entries for layer in request.graph.layers.values()))
    check_alone(request, plan, MemoryLimits.of(known.described or fleet_of([own]), [process_bytes]))
    return Plans((plan,), replace(request, fleet=replace(request.fleet, speeds=speeds)))


def known_fleet(
    group: Group, request: PlanRequest, model: str, options: PlanOptions
) -> tuple[FleetKnowledge, Path | None]:
    """Return device 0's knowledge of the fleet, and the cache file of its measurement (None: no cache).

    Without a fleet file, CONVOY_FLEET names the description of an emulated fleet to measure.

    Args:
        model: the model's modules as text. Cached times are only valid for the same model, batch, devices and versions.

    Raises:
        InputError, MismatchError: see `FleetKnowledge.of_job` and `fit`.
    """
    file, precision, device = options.get("fleet"), options.get("precision", "float32"), group.torch_device
    own = describe_device(device, options.get("slowdown", 1.0))
    rows = gather(group, "machines", [asdict(own), hardware_name(device), quota_cores(), modes()])

    def read() -> list[Any]:
        if file is not None:
            return [FleetKnowledge.of_job(file, request.graph, group.devices, precision).to_json(), None]
        emulated = os.environ.get("CONVOY_FLEET")
        described = FleetKnowledge.from_file(Path(emulated)).described if emulated else None
        infos = [DeviceInfo(**info) for info, *_ in rows]
        fleet = fleet_of(infos) if described is None else fit(described, infos)
        devices = [[info.name, info.kind, info.cores, info.slowdown] for info in infos]
        key = [
            request.graph.fingerprint, [layer.dtype for layer in request.graph.layers.values()], model, request.batch,
            precision, options.get("budget_s"), devices, [row[1:] for row in rows], host_indices(fleet),
            described and described.to_toml(), str(torch.__version__), __version__,
        ]  # fmt: skip
        path = None if group.devices == 1 else cache_file(key)
        measured = None if path is None else load_kept(path).measured
        if measured is not None:  # other programs may use more memory now
            pairs = zip(measured.fleet.devices, fleet.devices, strict=True)
            now = tuple(replace(old, memory_bytes=new.memory_bytes) for old, new in pairs)
            measured = replace(measured, fleet=replace(measured.fleet, devices=now))
        return [FleetKnowledge(described, measured).to_json(), path and str(path)]

    row, path = from_first(group, "fleet to measure", read)
    return FleetKnowledge.from_json(row), None if path is None else Path(path)


def cache_file(key: object) -> Path | None:
    """Return the cache file for a key, a JSON value with everything that times depend on; None without a cache."""
    folder = os.environ.get("CONVOY_CACHE")
    if folder is None:
        root = Path(os.environ.get("XDG_CACHE_HOME", ""))
        try:
            folder = str((root if root.is_absolute() else Path.home() / ".cache") / "convoy" / "measured")
        except RuntimeError:  # no home directory
            return None
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return Path(folder) / f"{name}.json" if folder else None


def load_kept(path: Path) -> FleetKnowledge:
    """Return the cached measurement, or empty knowledge if the file is missing or invalid."""
    with suppress(InputError, ValueError, TypeError, KeyError):
        return FleetKnowledge.from_json(parse_json(read_text(path, "the measurement", "")))
    return FleetKnowledge()


def keep(path: Path, known: FleetKnowledge) -> None:
    """Cache a measurement, and remove the oldest ones beyond `MOST_BYTES`. Do nothing if the folder cannot be written."""
    with suppress(InputError, OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(known.to_json()))
        kept_bytes = 0
        for each in sorted(path.parent.glob("*.json"), key=lambda each: -each.stat().st_mtime):
            kept_bytes += each.stat().st_size
            if kept_bytes > MOST_BYTES:
                each.unlink()
