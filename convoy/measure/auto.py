"""Plan `auto` in a running job: measures the devices (or reads a file's times), plans on device 0, tells the others."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, overload

from torch import nn

from convoy.comm.agreement import from_first
from convoy.comm.group import Group
from convoy.errors import InputError, MismatchError, PlanError
from convoy.fleet import Fleet
from convoy.layout.comm_dtype import CommDtype
from convoy.layout.redistribute import Sum
from convoy.measure.anew import Replanner
from convoy.measure.describe import describe, fleet_of
from convoy.measure.job import measure_job
from convoy.measure.progress import Progress
from convoy.measure.speeds import given_speeds
from convoy.model.graph import Graph
from convoy.model.tracing import TracedModel
from convoy.plan.plan import OutputPlace, Plan
from convoy.plan.presets import AUTO, Speeds, named_plan
from convoy.plan.strategy import Batch
from convoy.planner.in_passes import as_memory_asks
from convoy.planner.known import Known
from convoy.planner.predict import PlanningContext, choices, predict_plan, working
from convoy.planner.spare import SparePrice, spare_price
from convoy.runtime.module import Distributed
from convoy.simulate.interval import Interval, around
from convoy.simulate.memory import fewest_passes, memory_of, passes_words, room_of, sees_batch
from convoy.simulate.regrouped import seconds_of_layers
from convoy.simulate.table import Measurement, read_fleet_file
from convoy.train.controller import Rebalancer

BUDGET_S = 20.0

UNCERTAIN = 2.0
"""High over low end of an interval from which on a choice is uncertain: then the devices are measured once more."""

Passes = int | Literal["auto"]
"""So many make a step; auto: one, or as many as memory asks for, each with an equal part of the batch."""


@dataclass(frozen=True, slots=True)
class Plans(Sequence[Plan]):
    """Plans for a job: the one to train by, then those that are predicted to take nearly as long.

    Attributes:
        speeds: samples/s of each device alone, or as they were given.
        step_s: predicted seconds of a step by each plan; empty where nothing was predicted.
        spread: the factor within which nine of ten measurements lie of each of these.
        known: what plans are made of when the devices change.
        passes: so many make a step. Plans are of one of them, and so are seconds, in the mean.
        spare: what it costs to keep the state for the loss of a device, by the first plan; None: that is not known.
    """

    plans: tuple[Plan, ...]
    speeds: Speeds
    step_s: tuple[float, ...] = ()
    spread: tuple[float, ...] = ()
    known: Known | None = field(default=None, compare=False)
    spare: SparePrice | None = None
    passes: int = 1

    @property
    def measured(self) -> Measurement | None:
        """The times that were planned with, for `auto`."""
        return None if self.known is None else self.known.measured

    def anew(self, rebalancer: Rebalancer | None = None) -> Replanner | None:
        """What plans for other devices when these change: `Members(model, optimizer, replan=plans.anew())`.

        Args:
            rebalancer: corrects what was measured.
        """
        return None if self.known is None else Replanner(self.known, rebalancer)

    def __len__(self) -> int:
        return len(self.plans)

    @overload
    def __getitem__(self, index: int) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Plan, ...]: ...
    def __getitem__(self, index: int | slice) -> Plan | tuple[Plan, ...]:
        return self.plans[index]

    def predicted_s(self, plan: Plan) -> float | None:
        """Predicted seconds of a step by one of the plans; None for any other plan."""
        return next((step_s for each, step_s in zip(self.plans, self.step_s, strict=False) if each == plan), None)

    def within(self, plan: Plan) -> Interval | None:
        """What nine of ten measurements of such a step lie between; None for any other plan."""
        rows = zip(self.plans, self.step_s, self.spread, strict=False)
        return next((around(step_s, spread) for each, step_s, spread in rows if each == plan), None)


def choice_lines(plans: Plans, graph: Graph) -> list[str]:
    """Return three lines for a person: what the planner chose, why, and what it predicts against one device."""
    plan, speeds = plans[0], plans.speeds.devices
    fastest = max(range(len(speeds)), key=lambda d: speeds[d])
    used = working(plan, graph)
    names = ", ".join(map(str, sorted(used)))
    lines = [
        f"auto chose device {names} alone: one device is faster than several"
        if len(used) == 1
        else f"auto chose devices {names} of {len(speeds)}, each layer split as its times ask for"
    ]
    lines.append(f"measured alone, samples/s: {', '.join(f'device {d} {s:,.3g}' for d, s in enumerate(speeds))}")
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


def read_times(path: Path, graph: Graph, devices: int, precision: str = "float32") -> tuple[Fleet, Measurement | None]:
    """A fleet file for a job, and what was measured of it if that is in the file.

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


def plan_together(
    group: Group,
    traced: TracedModel,
    model: nn.Module,
    batch: int,
    *,
    net: str,
    fleet: Path | None = None,
    budget_s: float = BUDGET_S,
    slowdown: float = 1.0,
    optimizer: str = "sgd-momentum",
    reduce: Sum | None = None,
    wire: CommDtype = "exact",
    precision: str = "float32",
    passes: Passes = 1,
    outputs: OutputPlace = "everywhere",
    progress: Progress = lambda *_: None,
) -> Plans:
    """The planner's plans for this model on these devices. All devices call it; all get the same. See `convoy.api.make_plans`.

    Where `fleet` holds measured times nothing is measured. Without it, the file that CONVOY_FLEET names (a rehearsal's)
    describes the fleet that is measured.
    """

    def read() -> list[str | None]:
        here, times = None, None
        if fleet is not None:
            here, times = read_times(fleet, traced.graph, group.devices, precision)
        elif rehearsed := os.environ.get("CONVOY_FLEET"):
            here, _ = read_fleet_file(Path(rehearsed))
        return [None if here is None else here.to_toml(), None if times is None else times.to_toml()]

    def measure() -> Measurement:
        described = None if text is None else Fleet.from_toml(text, "device 0's fleet file")
        found = measure_job(
            group, traced, model, batch, net=net, fleet=described,
            budget_s=budget_s, slowdown=slowdown, precision=precision, progress=progress,
        )  # fmt: skip
        group.clear_counters()  # what measuring sent is no part of the training
        return found

    text, times = from_first(group, "fleet to measure", read)
    if times is None and group.devices == 1:
        return _alone(group, traced.graph, batch, text, optimizer, reduce, wire, slowdown, passes, outputs)
    # Every device has the times of a file: any of them may have to plan anew.
    measured = measure() if times is None else Measurement.from_toml(times, "device 0's fleet file")

    def planned(by: Measurement) -> Any:
        progress("the plans that these times allow", 0, 0)
        # One device plans, so that the others' processors stay out of its way; what it says is a plan file.
        return from_first(
            group, "automatic plan",
            lambda: _planned(by, traced.graph, batch, optimizer, reduce, wire, passes, outputs),
        )  # fmt: skip

    row = planned(measured)
    if times is None and row["spread"][0] ** 2 > UNCERTAIN:  # another program disturbed, perhaps
        again = measure()
        if (other := planned(again))["spread"][0] < row["spread"][0]:
            row, measured = other, again
    plans = tuple(Plan.from_json(text, "device 0's plan") for text in row["plans"])
    speeds, sums = Speeds(tuple(row["speeds"])), None if reduce == "inexact-butterfly-mixing" else reduce
    made = int(row["passes"])
    known = Known(AUTO, tuple(range(group.devices)), speeds, measured, optimizer, sums, made)
    every, part, sent, memory, overfull = row["spare"]
    spare = SparePrice(every, part, sent, tuple(memory), tuple(overfull))
    return Plans(plans, speeds, tuple(row["step_s"]), tuple(row["spread"]), known, spare, made)


def _alone(
    group: Group, graph: Graph, batch: int, fleet: str | None, optimizer: str, reduce: Sum | None, wire: CommDtype,
    slowdown: float, passes: Passes, outputs: OutputPlace,
) -> Plans:  # fmt: skip
    """One device has nothing to choose: nothing is measured, and it is only seen to that it has room.

    Raises:
        PlanError: it has not.
    """
    speeds = given_speeds((1.0,), 1)
    plan = replace(named_plan("data", graph, batch, speeds, reduce), name=AUTO, wire=wire, outputs=outputs)
    own = describe(group.torch_device, slowdown)
    beside = max(0, own.process_bytes - 4 * sum(layer.entries for layer in graph.layers.values()))
    given = fleet_of([own]) if fleet is None else Fleet.from_toml(fleet, "the fleet file")
    room = room_of(given, optimizer, [beside])

    def needs(samples: int) -> list[int]:
        return [each.total_bytes for each in memory_of(plan, graph, samples, optimizer=optimizer)]

    fixed = 1 if passes == "auto" else passes
    if not room.excess(needs(batch)):
        return Plans((plan,), speeds, passes=fixed)
    more = fewest_passes(batch, lambda samples: not room.excess(needs(samples)))
    if more is None or passes != "auto" or sees_batch(graph):
        words = "" if more is None else passes_words(graph, fixed * more)
        raise PlanError(room.refusal(graph.model, batch, [needs(batch)], words))
    return Plans((replace(plan, batch=batch // more, otherwise=Batch((batch // more,))),), speeds, passes=more)


def _planned(
    measured: Measurement, graph: Graph, batch: int, optimizer: str, reduce: Sum | None, wire: CommDtype, passes: Passes,
    outputs: OutputPlace,
) -> dict[str, Any]:  # fmt: skip
    """The chosen plan and those worth a trial, as the text of their files, with their predictions."""
    # What mixes is planned as if it summed; it sends weights beside gradients, so it may not fit where that did.
    sums = None if reduce == "inexact-butterfly-mixing" else reduce
    costs, fleet = measured.costs(graph), measured.fleet
    fixed = 1 if passes == "auto" else passes
    context = PlanningContext.of(graph, batch, costs, fleet, optimizer, wire, sums, fixed, outputs)
    if passes == "auto":
        context = as_memory_asks(context)
    tried = choices(context)
    predicted = [predict_plan(each.plan, context) for each in tried]
    plans = [(each.plan, each.step_s, row.spread) for each, row in zip(tried, predicted, strict=True)]
    price = spare_price(predicted[0], context)
    if reduce == "inexact-butterfly-mixing":
        # Copies that differ cannot be handed from plan to plan.
        mixing = predict_plan(replace(plans[0][0], reduce=reduce), context)
        if mixing.overfull:
            raise PlanError(
                f"plan auto with reduce {reduce} overfills {'; '.join(mixing.overfull)}: use a smaller batch or another reduce"
            )
        plans = [(mixing.plan, mixing.step_s, mixing.spread)]
    return {
        "plans": [plan.to_json() for plan, _, _ in plans],
        "step_s": [step_s for _, step_s, _ in plans],
        "spread": [spread for _, _, spread in plans],
        "speeds": context.speeds.devices,
        "passes": context.passes,
        "spare": [price.every, price.part, price.sent_bytes, price.memory_bytes, price.overfull],
    }


def expect_measured(part: Distributed, measured: Measurement | None) -> None:
    """Every device learns what its layers were measured to take: by that, the time of a fused stretch is told apart.

    Args:
        measured: None: nothing was measured, and the layers' arithmetic counts. All devices call it.
    """
    graph = part.traced[True].graph
    steps = part.steps(part.plan.batch)

    def table() -> list[dict[str, float]]:
        if measured is None:
            return [{} for _ in range(part.group.devices)]
        return seconds_of_layers(steps, graph, measured.costs(graph).times, part.group.devices)

    mine = from_first(part.group, "layer times", table)[part.group.device]
    if mine:
        part.expect(lambda layer, phase, _: mine.get(f"{phase} {layer.name}", 0.0))
