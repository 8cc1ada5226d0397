"""Measures the devices of a job and plans on device 0 (`make_plans`)."""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack, overload

from torch import Tensor, nn

from convoy.comm.control_messages import agree_on_modes, from_first
from convoy.comm.group import Group
from convoy.errors import InputError, PlanError
from convoy.machine.accelerator import random_state_kept
from convoy.measure.device_info import describe_device, fleet_of
from convoy.measure.measure_job import MeasureOptions, measure_job
from convoy.measure.replanner import Replanner
from convoy.measure.speeds import given_speeds, measure_speeds
from convoy.measure.timing import Progress
from convoy.model.tracing import TracedModel, trace
from convoy.plan.plan import Plan
from convoy.plan.presets import AUTO, Speeds, named_plan
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.prediction import check_alone, choice_lines, choose
from convoy.planner.request import PlanOptions, PlanRequest
from convoy.planner.snapshot_cost import SparePrice, spare_price
from convoy.runtime.clock import Clock
from convoy.simulate.interval import Within, around
from convoy.simulate.memory import MemoryLimits
from convoy.train.controller import Rebalancer

BUDGET_S = 20.0
"""Default seconds for measuring, for the plan "auto"."""


class PlansOptions(PlanOptions, total=False):
    """Keyword arguments of `make_plans`: those of `make_plan`, and more for "auto".

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


@dataclass(frozen=True, slots=True)
class Plans(Sequence[Plan]):
    """The best plan, followed by plans that are predicted to be nearly as fast.

    Attributes:
        request: the plans' request, with the knowledge about the devices.
        step_s: each plan's predicted seconds per micro-batch; empty if nothing was predicted.
        spread: for each plan, the factor within which nine of ten measurements lie.
        spare: the cost of snapshots for recovery with the first plan; None if unknown.
    """

    plans: tuple[Plan, ...]
    request: PlanRequest = field(compare=False)
    step_s: tuple[float, ...] = ()
    spread: tuple[float, ...] = ()
    spare: SparePrice | None = None

    @property
    def speeds(self) -> Speeds:
        """Solo throughput of each device in samples/s, or the given speeds."""
        assert self.request.fleet.speeds is not None
        return self.request.fleet.speeds

    def replanner(self, rebalancer: Rebalancer | None = None) -> Replanner:
        """Return a planner for changed devices: `Members(model, optimizer, replan=plans.replanner())`.

        Args:
            rebalancer: corrects measured times.
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
        """Return a plan's predicted seconds per micro-batch; None if it is not one of these plans."""
        return next((step_s for each, step_s in zip(self.plans, self.step_s, strict=False) if each == plan), None)

    def within(self, plan: Plan) -> Within | None:
        """Return the interval that holds nine of ten measured step times; None if the plan is not in `plans`."""
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
    """Return the plan of `make_plan`, and for "auto" also plans that are nearly as fast with fewer messages.

    A `Rebalancer` tries them: `Rebalancer(model, optimizer, others=plans[1:])`. The result also holds the devices' speeds, and
    for "auto" the predicted seconds of a step. Errors: see `make_plan`.

    Args:
        plan: a name, or a plan (for example from a file): then only speeds are measured, and `reduce`, `wire` and
            `outputs` replace the plan's own.
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
        _print(group, options, "every device times the model's layers ...")
        clock, precision = Clock(group.torch_device, options.get("slowdown", 1.0)), options.get("precision", "float32")
        progress = options.get("progress") or (lambda _: None)
        with random_state_kept(group.torch_device):
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
    progress = options.get("progress") or (lambda _: None)
    work = f"planning for {group.devices} devices"
    _print(group, options, f"{work} ..." if file else f"measuring and {work}, about {max(1, round(budget_s))} s ...")

    def read() -> FleetKnowledge:
        if file is not None:
            return FleetKnowledge.of_job(file, request.graph, group.devices, precision)
        emulated = os.environ.get("CONVOY_FLEET")
        described = FleetKnowledge.from_file(Path(emulated)).described if emulated else None
        return FleetKnowledge(described)

    known = FleetKnowledge.from_json(from_first(group, "fleet to measure", lambda: read().to_json()))
    if known.measured is None and group.devices == 1:
        return _alone(group, request, known, slowdown)
    if known.measured is None:
        net = options.get("net") or type(model).__name__
        how = MeasureOptions(net, known.described, budget_s, slowdown=slowdown, precision=precision)
        # Timing draws random numbers, which must not change the script's random state.
        with random_state_kept(group.torch_device):
            measured = measure_job(group, traced, model, request.batch, how, progress)
        group.clear_counters()  # traffic of measuring does not count as training traffic
    else:  # every device keeps the file's times, because any of them may plan later
        measured = known.measured
    request = replace(request, fleet=replace(request.fleet, measured=measured))
    progress("comparing plans")

    def answer() -> dict[str, Any]:
        rows = choose(request)
        found = {"plans": [row.plan.to_json() for row in rows], "step_s": [row.step_s for row in rows]}
        found |= {"spread": [row.spread for row in rows], "speeds": request.speeds.devices}
        return found | {"spare": asdict(spare_price(rows[0], request))}

    # One device plans, so that the other devices' processors do not disturb it.
    row = from_first(group, "automatic plan", answer)
    plans = Plans(
        tuple(Plan.from_json(text, "device 0's plan") for text in row["plans"]),
        replace(request, fleet=replace(request.fleet, speeds=Speeds(tuple(row["speeds"])))),
        tuple(row["step_s"]),
        tuple(row["spread"]),
        SparePrice(**row["spare"] | {name: tuple(row["spare"][name]) for name in ("memory_bytes", "overfull")}),
    )
    first, within = plans[0], plans.within(plans[0])
    _print(group, options, *choice_lines(first, request.graph, plans.speeds, plans.step_s[0], within))
    return plans


def _print(group: Group, options: PlansOptions, *lines: str) -> None:
    """Print to standard error on device 0 of several, unless the caller gave `progress`."""
    for line in lines if options.get("progress") is None and group.device == 0 and group.devices > 1 else ():
        print(f"convoy: {line}", file=sys.stderr, flush=True)


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
