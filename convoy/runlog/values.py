"""What the log tells of a fleet, a plan and a prediction: values as JSON holds them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from convoy.model.graph import Graph
from convoy.plan.explain import LayerRow, layer_rows, work_shares
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds
from convoy.plan.steps import Compute, Move, StepList, traffic
from convoy.planner.predict import Outlook, Prospect
from convoy.sharding.layout import Layout, OnOne, Partial, Replicated, Split

Fields = dict[str, Any]
"""The fields of one line."""

OUTPUTS = ""
"""Stands for the loss among the readers of values."""


def fleet_fields(devices: Sequence[tuple[str, str, float]], speeds: Speeds, measured: bool) -> Fields:
    """The devices, in order: what each is, on which host, how slowed down; samples/s alone, where that was measured."""
    rows = [
        {"name": name, "host": host, "slowdown": slowdown, "samples_per_s": speed if measured else None}
        for (name, host, slowdown), speed in zip(devices, speeds.devices, strict=True)
    ]
    return {"devices": rows}


def plan_fields(plan: Plan, graph: Graph) -> Fields:
    """Who computes what: a row per layer with what travels for it in one pass, and each device's part of the arithmetic."""
    steps = lower(plan, graph)
    moves = _moves(steps)
    rows = [_layer(row, graph, moves) for row in layer_rows(plan, graph)]
    return {"layers": rows, "outputs": moves.get(OUTPUTS, []), "work": work_shares(steps, graph)}


def prediction_fields(prospect: Prospect, outlook: Outlook, passes: int) -> Fields:
    """What a plan would bring.

    Args:
        passes: so many make one step.
    """
    timeline = prospect.timeline
    events = [
        [e.device, e.activity, e.label, e.start_s, e.end_s, e.peer, e.size_bytes]
        for e in timeline.events
        if e.activity != "wait" and e.end_s > e.start_s
    ]
    return {
        "step_s": prospect.step_s * passes,
        "samples_per_s": prospect.samples_per_s,
        "limit_samples_per_s": sum(outlook.speeds.devices),
        "bound": prospect.bound,
        "names": outlook.names,
        "pass": {"s": timeline.step_s, "compute_s": timeline.compute_s, "exchange_s": timeline.exchange_s},
        "events": events,
    }


def _layer(row: LayerRow, graph: Graph, moves: Mapping[str, Sequence[Fields]]) -> Fields:
    """A layer's row counts all that travels for it; what is no move are sums of gradients and statistics of batch norm."""
    layer, own = graph[row.layer], moves.get(row.layer, [])
    moved = sum(move["bytes"] for move in (*own, *moves.get(OUTPUTS, [])) if move in own or move["value"] == row.layer)
    return {
        "layer": row.layer, "kind": row.kind, "strategy": row.strategy, "parts": row.parts, "note": row.note,
        "flop": layer.flop, "moves": own, "sum_bytes": row.bytes_ - moved,
    }  # fmt: skip


def _moves(steps: StepList) -> Mapping[str, list[Fields]]:
    """By the layer that reads the moved value first: from where to where, with the bytes there and back."""
    readers: dict[str, str] = {}
    size: Counter[str] = Counter()
    for step in steps.steps:
        if isinstance(step, Compute) and step.phase == "forward":
            for value in step.reads:
                readers.setdefault(value.key, step.layer)
        elif isinstance(step, Move):
            later = step.writes if step.phase == "forward" else step.reads
            size[later.key] += sum(traffic(step, 4).values())
    result: dict[str, list[Fields]] = {}
    for step in steps.phase("forward"):
        if isinstance(step, Move):
            row = {
                "value": step.reads.key.partition("@")[0], "from": _words(step.reads.layout),
                "to": _words(step.writes.layout), "bytes": size[step.writes.key],
            }  # fmt: skip
            result.setdefault(readers.get(step.writes.key, OUTPUTS), []).append(row)
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
