"""make_plans: measures the devices of a job, and lets device 0 plan."""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

from torch import Tensor, nn

from convoy.comm.collectives import agree_on_modes, from_first
from convoy.comm.group import Group
from convoy.errors import InputError, MismatchError, PlanError
from convoy.fleet import Fleet
from convoy.layout.comm_dtype import CommDtype
from convoy.layout.redistribute import Sum
from convoy.machine.accelerator import random_state_kept
from convoy.measure.anew import Replanner
from convoy.measure.describe import describe, fleet_of
from convoy.measure.job import MeasureOptions, measure_job
from convoy.measure.progress import Progress, to_stderr
from convoy.measure.speeds import given_speeds, measure_speeds, timing_s
from convoy.model.graph import Graph
from convoy.model.tracing import TracedModel, trace
from convoy.plan.plan import OutputPlace, Plan
from convoy.plan.presets import AUTO, Speeds, named_plan
from convoy.planner.choose import check_alone, choose
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.predict import working
from convoy.planner.request import PlanRequest
from convoy.planner.spare import SparePrice
from convoy.runtime.clock import Clock
from convoy.simulate.interval import Interval, around
from convoy.simulate.memory import room_of
from convoy.simulate.table import Measurement, read_fleet_file
from convoy.train.controller import Rebalancer

BUDGET_S = 20.0
"""Default seconds for measuring, for the plan "auto"."""

UNCERTAIN = 2.0
"""If the high end of an interval is above this multiple of its low end, the user is told."""


class PlanOptions(TypedDict, total=False):
    """Keyword arguments of `make_plan` and `prepare`.

    Attributes:
        speeds: one number per device; None: every device times the model's layers first, which takes seconds.
        reduce: "ring", "butterfly", "direct", "star", or "inexact-butterfly-mixing"; None: the usual one of the plan.
        wire: "exact" (None: the same), or "inexact-bf16": activations and gradients are sent as bfloat16, in half the bytes.
        outputs: "everywhere" (None: the same, or the plan's own): the model returns all outputs, on every device;
            "where-computed": each device returns those of its samples, for `convoy.loss`, and none is sent.
        precision: in which the layers will compute, as for `distribute`: they are timed in it.
        slowdown: emulate a device that is slower by this factor.
        budget_s: for "auto", about the seconds that measuring may take.
        fleet: for "auto", a file that `convoy measure` wrote for this model, in place of measuring. Only device 0 reads it.
    """

    speeds: Sequence[float] | None
    reduce: Sum | None
    wire: CommDtype | None
    outputs: OutputPlace | None
    precision: str
    slowdown: float
    budget_s: float
    fleet: Path | None


class PlansOptions(PlanOptions, total=False):
    """Keyword arguments of `make_plans`: those of `make_plan`, and more for "auto".

    Attributes:
        optimizer: whose state counts as memory: "sgd", "sgd-momentum" or "adam".
        net: the model's name in messages and files; None: that of its class.
        micro_batches: the number of micro-batches of `batch` samples per step (see `Distributed.no_sync`).
        progress: called with what is measured, how much is done, and how much there is; None: device 0 prints it to
            standard error.
    """

    optimizer: str
    net: str | None
    micro_batches: int
    progress: Progress | None


@dataclass(frozen=True, slots=True)
class Plans(Sequence[Plan]):
    """The plan to train by, then those that are predicted to take nearly as long.

    Attributes:
        request: for which they were made, with what is known of the devices.
        step_s: predicted seconds of a micro-batch by each plan; empty if nothing was predicted.
        spread: the factor within which nine of ten measurements of each lie.
        spare: the cost of snapshots for recovery, by the first plan; None if it is not known.
    """

    plans: tuple[Plan, ...]
    request: PlanRequest = field(compare=False)
    step_s: tuple[float, ...] = ()
    spread: tuple[float, ...] = ()
    spare: SparePrice | None = None

    @property
    def speeds(self) -> Speeds:
        """Samples/s of each device alone, or as they were given."""
        assert self.request.fleet.speeds is not None
        return self.request.fleet.speeds

    @property
    def measured(self) -> Measurement | None:
        """The times that were planned with, for `auto`."""
        return self.request.fleet.measured

    def anew(self, rebalancer: Rebalancer | None = None) -> Replanner:
        """Return a planner for other devices: `Members(model, optimizer, replan=plans.anew())`.

        Args:
            rebalancer: corrects what was measured.
        """
        return Replanner(self.request, rebalancer)

    def __len__(self) -> int:
        return len(self.plans)

    @overload
    def __getitem__(self, index: int) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Plan, ...]: ...
    def __getitem__(self, index: int | slice) -> Plan | tuple[Plan, ...]:
        return self.plans[index]

    def predicted_s(self, plan: Plan) -> float | None:
        """Return the predicted seconds of a micro-batch by one of the plans; None for any other plan."""
        return next((step_s for each, step_s in zip(self.plans, self.step_s, strict=False) if each == plan), None)

    def within(self, plan: Plan) -> Interval | None:
        """Return the interval of nine of ten measurements of it; None for any other plan."""
        rows = zip(self.plans, self.step_s, self.spread, strict=False)
        return next((around(step_s, spread) for each, step_s, spread in rows if each == plan), None)


def make_plans(
    model: nn.Module,
    example: Tensor | Sequence[Tensor],
    batch: int,
    group: Group,
    plan: str | Plan = AUTO,
    **options: Unpack[PlansOptions],
) -> Plans:
    """Return the plan of `make_plan`, and for "auto" those that are predicted to take nearly as long with fewer messages.

    A `Rebalancer` tries them: `Rebalancer(model, optimizer, others=plans[1:])`. The result also holds the devices' speeds, and
    for "auto" the predicted seconds of a step. Errors: see `make_plan`.

    Args:
        plan: a name; or a plan, as from a file: then only speeds are measured, and `reduce`, `wire` and `outputs` replace
            its own.
        options: see `PlansOptions`.
    """
    known_options = PlansOptions.__optional_keys__
    if unknown := set(options) - known_options:
        raise TypeError(f"unknown option {min(unknown)!r}: choose of {', '.join(sorted(known_options))}")
    if batch < 1:
        raise PlanError(f"a batch of {batch}: a batch holds one sample at least; give 1 or more")
    if getattr(group, "entrance", None) is not None:
        # It joins a job that has a plan: until it is admitted, it is alone.
        plan, options = "data", {**options, "speeds": None, "fleet": None, "reduce": None, "wire": None}
    agree_on_modes(group)  # before the seconds of measuring
    traced = trace(model, example)
    request = PlanRequest(
        traced.graph, batch, FleetKnowledge(ids=tuple(range(group.devices))), None if isinstance(plan, Plan) else plan,
        options.get("optimizer", "sgd-momentum"), options.get("wire") or "exact", options.get("reduce"),
        options.get("outputs") or "everywhere", options.get("micro_batches", 1),
    )  # fmt: skip
    if plan == AUTO:
        return _auto(group, traced, model, request, options)
    if isinstance(plan, Plan) and plan.batch != batch:
        raise PlanError(f"the plan {plan.name} is for a batch of {plan.batch}, not {batch}: make a new plan")

    def made(by: Speeds) -> Plan:
        return plan if isinstance(plan, Plan) else named_plan(plan, traced.graph, batch, by, request.reduce)

    speeds = options.get("speeds")
    known = given_speeds((1.0,) * group.devices if speeds is None else speeds, group.devices)
    made(known).check(traced.graph, group.devices)  # before the seconds of measuring
    if speeds is None and group.devices > 1:
        progress = options.get("progress") or to_stderr(
            group, "every device times the model's layers", timing_s(traced.graph)
        )
        with random_state_kept(group.torch_device):
            clock, precision = (
                Clock(group.torch_device, options.get("slowdown", 1.0)),
                options.get("precision", "float32"),
            )
            known = measure_speeds(group, traced, model, batch, clock, precision, progress)
    found = made(known)
    found = replace(
        found, reduce=options.get("reduce") or found.reduce, wire=options.get("wire") or found.wire,
        outputs=options.get("outputs") or found.outputs,
    )  # fmt: skip
    return Plans((found,), replace(request, fleet=replace(request.fleet, speeds=known)))


def _auto(group: Group, traced: TracedModel, model: nn.Module, request: PlanRequest, options: PlansOptions) -> Plans:
    """Measure the devices, or read a file's times; plan on device 0; send the plans to all.

    Without a file, CONVOY_FLEET names the description of an emulated fleet to measure.
    """
    if options.get("speeds") is not None:
        raise InputError(
            "speeds with the plan auto: it needs the times of every layer; leave speeds out, or name a plan"
        )
    file, budget_s = options.get("fleet"), options.get("budget_s", BUDGET_S)
    precision, slowdown = options.get("precision", "float32"), options.get("slowdown", 1.0)
    progress = options.get("progress")
    by_script = progress is None
    if progress is None and file is not None:
        progress = to_stderr(group, f"planning for {group.devices} devices")
    elif progress is None:
        progress = to_stderr(group, f"measuring {group.devices} devices and planning for them", budget_s)

    def read() -> list[str | None]:
        here, times = None, None
        if file is not None:
            here, times = _read_times(file, request.graph, group.devices, precision)
        elif emulated := os.environ.get("CONVOY_FLEET"):
            here, _ = read_fleet_file(Path(emulated))
        return [None if here is None else here.to_toml(), None if times is None else times.to_toml()]

    text, times = from_first(group, "fleet to measure", read)
    described = None if text is None else Fleet.from_toml(text, "device 0's fleet file")
    if times is None and group.devices == 1:
        return _alone(group, request, described, slowdown)
    if times is None:
        net = options.get("net") or type(model).__name__
        how = MeasureOptions(net, described, budget_s, slowdown=slowdown, precision=precision)
        # Timing draws random numbers; the script's must stay those of one device.
        with random_state_kept(group.torch_device):
            measured = measure_job(group, traced, model, request.batch, how, progress)
        group.clear_counters()  # what measuring sent is no part of the training
    else:  # every device gets the times of a file: any of them may have to plan again
        measured = Measurement.from_toml(times, "device 0's fleet file")
    request = replace(request, fleet=replace(request.fleet, measured=measured))
    progress("the plans that these times allow", 0, 0)

    def answer() -> dict[str, Any]:
        choice = choose(request)
        plans = [plan.to_json() for plan in choice.plans]
        return asdict(replace(choice, plans=())) | {"plans": plans, "speeds": request.speeds.devices}

    # One device plans, so that the other devices' processors do not disturb it.
    row = from_first(group, "automatic plan", answer)
    price = row["spare"]
    plans = Plans(
        tuple(Plan.from_json(text, "device 0's plan") for text in row["plans"]),
        replace(request, fleet=replace(request.fleet, speeds=Speeds(tuple(row["speeds"])))),
        tuple(row["step_s"]),
        tuple(row["spread"]),
        SparePrice(**price | {name: tuple(price[name]) for name in ("memory_bytes", "overfull")}),
    )
    if by_script and group.devices > 1 and group.device == 0:
        for line in _choice_lines(plans, request.graph):
            print(f"convoy: {line}", file=sys.stderr, flush=True)
    return plans


def _alone(group: Group, request: PlanRequest, described: Fleet | None, slowdown: float) -> Plans:
    """Return the only plan of one device, without measuring.

    Raises:
        PlanError: it does not fit the device's memory.
    """
    speeds = given_speeds((1.0,), 1)
    plan = named_plan("data", request.graph, request.batch, speeds, request.reduce)
    plan = replace(plan, name=AUTO, wire=request.wire, outputs=request.outputs)
    own = describe(group.torch_device, slowdown)
    process_bytes = max(0, own.process_bytes - 4 * sum(layer.entries for layer in request.graph.layers.values()))
    check_alone(request, plan, room_of(described or fleet_of([own]), request.optimizer, [process_bytes]))
    return Plans((plan,), replace(request, fleet=replace(request.fleet, speeds=speeds)))


def _read_times(path: Path, graph: Graph, devices: int, precision: str) -> tuple[Fleet, Measurement | None]:
    """Return the fleet of a file for a job, and its measurement if it has one.

    Raises:
        InputError: the file cannot be used, or has another number of devices.
        MismatchError: measured with another model, or in another precision.
    """
    fleet, measured = read_fleet_file(path)
    if len(fleet.devices) != devices:
        raise InputError(
            f"--fleet {path} has {len(fleet.devices)} devices, this job has {devices}: start as many devices, or give the "
            "fleet file of these"
        )
    if measured is not None:
        measured.costs(graph)
        if measured.precision != precision:
            raise MismatchError(
                f"--fleet {path} was measured in {measured.precision}, this job computes in {precision}, which takes other "
                f"times: measure with --precision {precision}, or leave --fleet out"
            )
    return fleet, measured


def _choice_lines(plans: Plans, graph: Graph) -> list[str]:
    """Return lines for a person: the planner's choice, the measured speeds, and the prediction."""
    plan, speeds, fastest = plans[0], plans.speeds.devices, plans.speeds.fastest
    used = working(plan, graph)
    names = ", ".join(map(str, sorted(used)))
    lines = [
        f"auto chose device {names} alone: one device is faster than several"
        if len(used) == 1
        else f"auto chose devices {names} of {len(speeds)}, each layer split as its times ask for",
        f"measured alone, samples/s: {', '.join(f'device {d} {s:,.3g}' for d, s in enumerate(speeds))}",
    ]
    if (step_s := plans.predicted_s(plan)) and (within := plans.within(plan)):
        gain = plan.batch / step_s / speeds[fastest]
        lines.append(
            f"predicted: {step_s:.3g} s a step (nine of ten: {within.low:.3g} - {within.high:.3g}), {gain:.2f} times as fast "
            f"as device {fastest} alone"
        )
        if within.high > UNCERTAIN * within.low:
            lines.append(
                "these times varied much: end what else runs on the devices, or name a plan such as data-by-speed"
            )
    return lines
