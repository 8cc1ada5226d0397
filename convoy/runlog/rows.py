"""Fills the lines of a log that describe a fleet, a plan and a prediction."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from convoy.model.graph import Graph
from convoy.plan.explain import LayerRow, layer_rows, work_shares
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds
from convoy.plan.steps import Move, StepList, traffic
from convoy.planner.predict import PlanningContext, PlanPrediction
from convoy.runlog.schema import (
    DeviceEntry,
    FleetLine,
    LayerEntry,
    MoveEntry,
    PassEntry,
    PlanEntry,
    PlanLine,
    PredictionLine,
)
from convoy.sharding.layout import Layout, OnOne, Partial, Replicated, Split

OUTPUTS = ""
"""Stands for the loss among the layers that read values."""


def fleet_line(
    devices: Sequence[tuple[str, str, float]], speeds: Speeds, ids: Sequence[int] | None = None
) -> FleetLine:
    """The devices (what each is, its host, its slow-down) with their speeds, where these were measured, and their ids."""
    rows = zip(devices, speeds.devices, strict=True)
    return FleetLine(
        devices=tuple(
            DeviceEntry(name=name, host=host, slowdown=slowdown, samples_per_s=speed if speeds.measured else None)
            for (name, host, slowdown), speed in rows
        ),
        ids=tuple(range(len(devices)) if ids is None else ids),
    )


def plan_line(plan: Plan, graph: Graph) -> PlanLine:
    """A plan and what follows from it."""
    entry = PlanEntry.model_validate_json(plan.to_json())
    return PlanLine(plan=entry, inexact=plan.inexact, **plan_parts(plan, graph))


def plan_parts(plan: Plan, graph: Graph) -> dict[str, Any]:
    """Who computes what, what travels for it in one pass, each device's part of the arithmetic: fields of `PlanLine`."""
    steps = lower(plan, graph)
    moves = _moves(steps)
    layers = tuple(_layer(row, graph, moves) for row in layer_rows(plan, graph))
    return {"layers": layers, "outputs": tuple(moves.get(OUTPUTS, ())), "work": work_shares(steps, graph)}


def prediction_line(
    prediction: PlanPrediction, context: PlanningContext, passes: int, shares_only: bool = False
) -> PredictionLine:
    """What a plan is predicted to reach.

    Args:
        passes: so many make one step.
        shares_only: see `PredictionLine`.
    """
    timeline = prediction.timeline
    return PredictionLine(
        step_s=prediction.step_s * passes,
        samples_per_s=prediction.samples_per_s,
        limit_samples_per_s=sum(context.speeds.devices),
        bound=prediction.bound,
        names=context.names,
        one_pass=PassEntry(s=timeline.step_s, compute_s=timeline.compute_s, exchange_s=timeline.exchange_s),
        events=tuple(
            (e.device, e.activity, e.label, e.start_s, e.end_s, e.peer, e.size_bytes)
            for e in timeline.events
            if e.activity != "wait" and e.end_s > e.start_s
        ),
        spread=min(prediction.spread, 1e12),
        shares_only=shares_only,
        joules_per_image=prediction.energy.image_j if prediction.energy is not None else None,
    )


def _layer(row: LayerRow, graph: Graph, moves: Mapping[str, Sequence[MoveEntry]]) -> LayerEntry:
    """A row of `layer_rows` counts all that travels; what is no move are sums of gradients and batch norm statistics."""
    own = moves.get(row.layer, [])
    moved = sum(move.bytes for move in own)
    moved += sum(move.bytes for move in moves.get(OUTPUTS, []) if move.value == row.layer)
    return LayerEntry(
        layer=row.layer, kind=row.kind, strategy=row.strategy, parts=row.parts, note=row.note,
        flop=graph[row.layer].flop, moves=tuple(own), sum_bytes=row.bytes_ - moved,
    )  # fmt: skip


def _moves(steps: StepList) -> Mapping[str, list[MoveEntry]]:
    """The moves of one pass by the layer that reads the moved value first."""
    readers, size = steps.first_readers(), Counter[str]()
    for step in steps.steps:
        if isinstance(step, Move):
            later = step.writes if step.phase == "forward" else step.reads
            size[later.key] += sum(traffic(step, 4).values())
    result: dict[str, list[MoveEntry]] = {}
    for step in steps.phase("forward"):
        if isinstance(step, Move):
            entry = MoveEntry(
                value=step.reads.layer, source=_words(step.reads.layout),
                target=_words(step.writes.layout), bytes=size[step.writes.key],
            )  # fmt: skip
            result.setdefault(readers.get(step.writes.key, OUTPUTS), []).append(entry)
    return result


def _words(layout: Layout) -> str:
    match layout:
        case Split(0, _):
            return "split by samples"
        case Split(1, _):
            return "split by channels"
        case Split(axis, _):
            return f"split along axis {axis}"
        case Replicated((device,)) | OnOne(device):
            return f"whole on device {device}"
        case Replicated(devices):
            return f"copies on {len(devices)} devices"
        case Partial():
            return "sums to be added"
