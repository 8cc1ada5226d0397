"""Describe a plan as text: each device's part of each layer, and the step list line by line."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from convoy.layout.layout import Layout, OnOne, Partial, Replicated, Split, Tiles, Windows, held_entries, holders, holds
from convoy.model.graph import Graph
from convoy.plan import steps as st
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.steps import ComputeStep, Step, StepList, traffic


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One line of a plan's table.

    Attributes:
        strategy: "filter", "batch", "channel", "one" or "copies".
        parts: each device's samples, filters (or features) or input channels; "all" or "-".
        bytes_: bytes sent per step for moves into this layer, forward and backward, and for its gradient sums.
        note: why a layer is not split, or not split further.
    """

    layer: str
    kind: str
    strategy: str
    parts: tuple[str, ...]
    bytes_: int
    note: str


_STRATEGIES: Mapping[type[Layout], str] = {
    Split: "filter", Partial: "channel", Replicated: "copies", OnOne: "one", Tiles: "spatial",
    Windows: "spatial",
}  # fmt: skip


def layer_rows(plan: Plan, graph: Graph, itemsize: int = 4) -> list[LayerRow]:
    """Return a plan's table, with one row for each layer."""
    steps = lower(plan, graph)
    sent: Counter[str] = Counter()
    for reader, size in _bytes_by_layer(steps, graph, itemsize):
        sent[reader] += size
    rows = []
    for step in steps.phase("forward"):
        if isinstance(step, ComputeStep):
            layer, value, layout = graph[step.layer], _divided(step), step.writes.layout
            shared = value.layout
            shares = [*map(str, shared.shares)] if isinstance(shared, Split) else ["all"] * plan.devices
            if isinstance(shared, Tiles | Windows):  # positions, because each tile has all channels
                channels = value.shape[-1 if isinstance(shared, Tiles) and shared.channels_last else 1]
                shares = [str(held_entries(shared, d, value.shape) // channels) for d in range(plan.devices)]
            parts = tuple(share if holds(layout, d) else "-" for d, share in enumerate(shares))
            name = "batch" if isinstance(layout, Split) and layout.axis == 0 else _STRATEGIES[type(layout)]
            rows.append(LayerRow(layer.name, layer.kind, name, parts, sent[layer.name], step.note or layer.reason))
    return rows


def _divided(step: ComputeStep) -> st.Value:
    """Return the output of a step; for a partial sum its input, because the sum is split like this."""
    at = step.writes.layout
    return step.reads[0] if isinstance(at, Partial) or (isinstance(at, Windows) and at.sums) else step.writes


def work_shares(steps: StepList, graph: Graph) -> tuple[float, ...]:
    """Return each device's fraction of the forward FLOP. Without FLOP, return its fraction of the layers."""
    computed = [step for step in steps.phase("forward") if isinstance(step, ComputeStep)]
    flop = [graph[step.layer].flop for step in computed]
    weights = flop if any(flop) else [1] * len(computed)
    work = [0.0] * steps.devices
    for weight, step in zip(weights, computed, strict=True):
        value = _divided(step)
        for device in holders(step.writes.layout):
            work[device] += weight * held_entries(value.layout, device, value.shape) / max(1, math.prod(value.shape))
    total = sum(work)
    return tuple(w / total if total else 1 / steps.devices for w in work)


def step_lines(steps: StepList, itemsize: int = 4) -> list[str]:
    """Return the step list as text, one line for each step."""
    what = "one step" if steps.micro_batch == "only" else f"the {steps.micro_batch} micro-batch"
    lines = [f"{what} of {steps.batch} samples on {steps.devices} devices"]
    phase = ""
    for step in steps.steps:
        if step.phase != phase:
            phase = step.phase
            lines.append(f"{phase}:")
        sent = ""
        if not isinstance(step, ComputeStep):
            total, rounds = sum(traffic(step, itemsize).values()), len(step.schedule.rounds)
            wire = "" if step.wire == "exact" else f", {step.wire}"
            sent = (
                f"  ({total:,} bytes in {rounds} round{'s' * (rounds != 1)}{wire})" if total else "  (nothing is sent)"
            )
        after = f"  after {', '.join(map(str, step.after))}" if step.after else ""
        lines.append(f"  {step.id:4d}  {_step_text(step)}{sent}{after}")
    return lines


def _step_text(step: Step) -> str:
    match step:
        case ComputeStep():
            reads, gives = ", ".join(f"{v.layer} {v.layout}" for v in step.reads), str(step.writes.layout)
            arrow = f"{reads} -> {gives}" if step.phase == "forward" else f"{gives} -> {reads}"
            gradient = "" if step.part == "all" else f" ({step.part} gradient)"
            return f"compute  {step.layer}{gradient}: {arrow}" + (f"  [{step.note}]" if step.note else "")
        case st.Move():
            what = "move    " if step.phase == "forward" else "gradient"
            return f"{what} {step.reads.layer}: {step.reads.layout} -> {step.writes.layout}"
        case st.ReturnGradient():
            return f"gradient {step.writes.key}: from the loss, {step.reads.layout} -> {step.writes.layout}"
        case st.GatherStatistics():
            return f"gather   {', '.join(step.layers)}: {step.entries} numbers of each of {len(step.members)} devices"
        case st.SumGradients():
            what = "sum, into shards" if step.into else f"sum, {step.reduce}"
            return f"{what}: gradients of {len(step.keys)} parameters, {step.shape[0]:,} numbers over {step.devices}"
        case st.GatherWeights():
            what = f"{len(step.keys)} parameters, {step.shape[0]:,} numbers, for {step.devices}"
            return f"gather   shards of {what}"


def _bytes_by_layer(steps: StepList, graph: Graph, itemsize: int) -> Iterator[tuple[str, int]]:
    """Yield each exchange's bytes for the layers that need it: the reader of a move, the owners of summed parameters."""
    owner = {p.key: layer.name for layer in graph.layers.values() for p in layer.parameters.values()}
    computes = [step for step in steps.phase("forward") if isinstance(step, ComputeStep)]
    readers = {value.key: step.layer for step in reversed(computes) for value in step.reads}  # the first of each value
    for step in steps.steps:
        total = 0 if isinstance(step, ComputeStep) else sum(traffic(step, itemsize).values())
        match step:
            case st.Move():
                value = step.writes if step.phase == "forward" else step.reads
                # The last move gathers the outputs on every device; it counts for the layer that made them.
                yield readers.get(value.key, value.layer), total
            case st.GatherStatistics():
                yield from ((name, total * n // step.entries) for name, n in zip(step.layers, step.sizes, strict=True))
            case st.SumGradients() | st.GatherWeights():
                sizes = step.sizes if isinstance(step, st.SumGradients) else [sum(shares) for shares in step.shares]
                yield from ((owner[k], round(total * n / sum(sizes))) for k, n in zip(step.keys, sizes, strict=True))
