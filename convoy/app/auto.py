"""`auto` in a running job: measure the devices together (or take a file's times), plan on one of them, tell the others."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from convoy.comm.agreement import from_first
from convoy.comm.group import Group
from convoy.cost.measurement import Measurement, read_fleet_file
from convoy.errors import InputError, MismatchError, PlanError
from convoy.fleet import Fleet
from convoy.model.graph import Graph
from convoy.model.tracing import TracedModel
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds
from convoy.planner.planner import Candidate
from convoy.planner.predict import Outlook, choices, prospect
from convoy.profile.job import Progress, measure_job
from convoy.sharding.comm_dtype import CommDtype
from convoy.sharding.redistribute import Sum

BUDGET_S = 20.0
LINKS_PART = 0.25
"""The part of the budget that goes to the wire."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The planner's choice for a job.

    Attributes:
        step_s: predicted seconds of a step.
        speeds: samples/s of each device alone.
        others: the plans that are worth a trial beside it.
        measured: the times that were planned with; None on the other devices.
    """

    plan: Plan
    step_s: float
    speeds: Speeds
    others: tuple[Candidate, ...] = ()
    measured: Measurement | None = None

    def predicted_s(self, plan: Plan) -> float | None:
        """Predicted seconds of a step by the choice or one of the others; None for any other plan."""
        rows = [Candidate(self.plan, self.step_s), *self.others]
        return next((row.step_s for row in rows if row.plan == plan), None)


def read_times(path: Path, graph: Graph, devices: int, precision: str = "float32") -> tuple[Fleet, Measurement | None]:
    """A fleet file for a job: what was measured of it, where that stands there too.

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


def choose(
    group: Group,
    traced: TracedModel,
    model: nn.Module,
    batch: int,
    *,
    net: str,
    file: Path | None = None,
    described: Path | None = None,
    budget_s: float = BUDGET_S,
    slowdown: float = 1.0,
    optimizer: str = "sgd-momentum",
    reduce: Sum | None = None,
    wire: CommDtype = "exact",
    precision: str = "float32",
    progress: Progress = lambda *_: None,
) -> Chosen:
    """The planner's plan for this model on these devices. All devices call it; all get the same value.

    Args:
        net: the model's name, for people.
        file: a fleet file. Where it holds measured times nothing is measured. Only device 0 reads it.
        described: a fleet file of which only the description counts, whatever was measured of it before.
        budget_s: about the seconds that measuring may take.
        slowdown: this device plays one that is so many times slower.
        optimizer: whose state counts as memory, a name of `convoy.cost.memory.OPTIMIZERS`.
        reduce: how sums are made; None: as the planner says.
        wire: in which numbers tensors travel.
        precision: what the layers compute in; see `convoy.runtime.precision`.

    Raises:
        InputError, MismatchError: a file that cannot be used, or is of another fleet, model or precision; a precision that
            a device or the model does not have.
        PlanError: no plan fits the devices' memory.
        DeviceLostError: a device did not answer.
    """
    first = group.device == 0
    fleet, measured, known = _known(group, traced.graph, file, described, precision)
    if not known:
        measured = measure_job(
            group, traced, model, batch, net=net, fleet=fleet, budget_s=budget_s * (1 - LINKS_PART),
            links_budget_s=budget_s * LINKS_PART, slowdown=slowdown, precision=precision,
            progress=progress,
        )  # fmt: skip
        group.clear_counters()  # what measuring sent is no part of the training
    # One device plans, so that the others' processors stay out of its way; what it says is a plan file.

    def planned() -> dict[str, Any]:
        assert measured is not None
        return _planned(measured, traced.graph, batch, optimizer, reduce, wire)

    row = from_first(group, "automatic plan", planned)
    best, *others = (Candidate(Plan.from_json(text, "device 0's plan"), step_s) for text, step_s in row["plans"])
    return Chosen(best.plan, best.step_s, Speeds(tuple(row["speeds"])), tuple(others), measured if first else None)


def _known(
    group: Group, graph: Graph, file: Path | None, described: Path | None, precision: str
) -> tuple[Fleet | None, Measurement | None, bool]:
    """The fleet to measure (None: as the devices describe themselves); on device 0 a file's times; whether it has any."""
    found: list[Measurement] = []

    def read() -> list[object]:
        fleet = None
        if file is not None:
            fleet, measured = read_times(file, graph, group.devices, precision)
            found.extend([measured] if measured is not None else [])
        elif described is not None:
            fleet, _ = read_fleet_file(described)
        return [None if fleet is None or found else fleet.to_toml(), bool(found)]

    text, known = from_first(group, "fleet to measure", read)
    fleet = None if text is None else Fleet.from_toml(text, "device 0's fleet file")
    return fleet, found[0] if found else None, known


def _planned(
    measured: Measurement, graph: Graph, batch: int, optimizer: str, reduce: Sum | None, wire: CommDtype
) -> dict[str, Any]:
    """The chosen plan and those worth a trial, as the text of their files, with their predictions."""
    # What mixes is planned as if it summed; it sends weights beside gradients, so it may not fit where that did.
    sums = None if reduce == "inexact-butterfly-mixing" else reduce
    outlook = Outlook.of(graph, batch, measured.costs(graph), measured.fleet, optimizer, wire, sums)
    plans = [(each.plan, each.step_s) for each in choices(outlook)]
    if reduce == "inexact-butterfly-mixing":
        # Copies that differ cannot be handed from plan to plan.
        mixing = prospect(replace(plans[0][0], reduce=reduce), outlook)
        if mixing.overfull:
            raise PlanError(
                f"plan auto with reduce {reduce} overfills {'; '.join(mixing.overfull)}: use a smaller batch or another reduce"
            )
        plans = [(mixing.plan, mixing.step_s)]
    rows = [(plan.to_json(), step_s) for plan, step_s in plans]
    return {"plans": rows, "speeds": outlook.speeds.devices}
