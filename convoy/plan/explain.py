"""A plan in words: who gets which filters and samples, layer by layer, and what one step does, line by line."""

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.layout.layout import Layout, OnOne, Partial, Replicated, Split, box, entries, holds
from convoy.model.graph import Graph
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.steps import (
    ComputeStep,
    GatherStatistics,
    GatherWeights,
    Move,
    ReturnGradient,
    Step,
    StepList,
    SumGradients,
    traffic,
)


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One line of the table of a plan.

    Attributes:
        layer, kind: the layer.
        strategy: "filter", "batch", "channel", "one", "copies" or "follows" with what it keeps.
        parts: how many of these each device computes: samples, filters (or features), input channels; "all" or "-".
        bytes_: what the moves into this layer put on the wire in one step, forward and backward, with its gradient sums.
        note: what a person should know: why a layer is not split, or not as it could be.
    """

    layer: str
    kind: str
    strategy: str
    parts: tuple[str, ...]
    bytes_: int
    note: str


def layer_rows(plan: Plan, graph: Graph, itemsize: int = 4) -> list[LayerRow]:
    """The table of a plan."""
    steps = lower(plan, graph)
    bytes_by_layer = _bytes_by_layer(steps, graph, itemsize)
    rows = []
    for step in steps.phase("forward"):
        if isinstance(step, ComputeStep):
            layer = graph[step.layer]
            name = "one" if isinstance(step.writes.layout, OnOne) else _strategy(step.writes.layout)
            parts = tuple(_part(step.writes.layout, d, step) for d in range(plan.devices))
            rows.append(
                LayerRow(
                    layer.name, layer.kind, name, parts, bytes_by_layer.get(layer.name, 0), step.note or layer.reason
                )
            )
    return rows


MOST_DIFFERENCES = 4
"""Layers of another plan that are named."""


def differences(known: Plan, plan: Plan, graph: Graph) -> str:
    """What a plan does otherwise than a known one, layer by layer, in words."""
    rows = {row.layer: (row.strategy, row.parts) for row in layer_rows(known, graph)}
    other = [
        row
        for row in layer_rows(plan, graph)
        if graph[row.layer].weighted and rows.get(row.layer) != (row.strategy, row.parts)
    ]
    told = [f"{row.layer} by {row.strategy}, {'/'.join(row.parts)}" for row in other[:MOST_DIFFERENCES]]
    told += [f"{len(other) - MOST_DIFFERENCES} layers more"] * (len(other) > MOST_DIFFERENCES)
    if plan.reduce != known.reduce:
        told.append(f"sums by {plan.reduce}")
    return "; ".join(told) or "the same shares, other moves"


def work_shares(steps: StepList, graph: Graph) -> tuple[float, ...]:
    """The fraction of the forward FLOP of a step that each device computes; of the layers where no layer has FLOP."""
    computed = [step for step in steps.phase("forward") if isinstance(step, ComputeStep)]
    flop = [graph[step.layer].flop for step in computed]
    weights = flop if any(flop) else [1] * len(computed)
    work = [
        sum(weight * _fraction(step, device) for weight, step in zip(weights, computed, strict=True))
        for device in range(steps.devices)
    ]
    total = sum(work)
    return tuple(w / total if total else 1 / steps.devices for w in work)


def step_lines(steps: StepList, itemsize: int = 4) -> list[str]:
    """The step list as text, a line each."""
    what = "one step" if steps.micro_batch == "only" else f"the {steps.micro_batch} pass"
    lines = [f"{what} of {steps.batch} samples on {steps.devices} devices"]
    phase = ""
    for step in steps.steps:
        if step.phase != phase:
            phase = step.phase
            lines.append(f"{phase}:")
        lines.append(f"  {step.id:4d}  {_words(step)}{_on_the_wire(step, itemsize)}{_after(step)}")
    return lines


def _words(step: Step) -> str:
    match step:
        case ComputeStep():
            reads = ", ".join(f"{v.layer} {v.layout}" for v in step.reads)
            arrow = (
                f"{reads} -> {step.writes.layout}" if step.phase == "forward" else f"{step.writes.layout} -> {reads}"
            )
            gradient = "" if step.part == "all" else f" ({step.part} gradient)"
            return f"compute  {step.layer}{gradient}: {arrow}" + (f"  [{step.note}]" if step.note else "")
        case Move():
            name = step.reads.layer
            what = "move    " if step.phase == "forward" else "gradient"
            return f"{what} {name}: {step.reads.layout} -> {step.writes.layout}"
        case ReturnGradient():
            return f"gradient {step.writes.key}: from the loss, {step.reads.layout} -> {step.writes.layout}"
        case GatherStatistics():
            names = ", ".join(step.layers)
            return f"share    {names}: {step.entries} numbers of each of {len(step.members)} devices"
        case SumGradients():
            what = "MIX, INEXACT" if step.reduce == "inexact-butterfly-mixing" else f"sum, {step.reduce}"
            what = "sum, into shares" if step.into else what
            return f"{what}: gradients of {len(step.keys)} parameters, {step.shape[0]:,} numbers over {step.devices}"
        case GatherWeights():
            what = f"{len(step.keys)} parameters, {step.shape[0]:,} numbers, for {step.devices}"
            return f"have     {what}, whole since the first pass" if step.held else f"gather   shares of {what}"


def _on_the_wire(step: Step, itemsize: int) -> str:
    if isinstance(step, ComputeStep):
        return ""
    total = sum(traffic(step, itemsize).values())
    rounds = len(step.schedule.rounds)
    wire = "" if step.wire == "exact" else f", {step.wire}"
    return f"  ({total:,} bytes in {rounds} round{'s' * (rounds != 1)}{wire})" if total else "  (nothing travels)"


def _after(step: Step) -> str:
    return f"  after {', '.join(map(str, step.after))}" if step.after else ""


def _strategy(layout: Layout) -> str:
    match layout:
        case Split(0, _):
            return "batch"
        case Split():
            return "filter"
        case Partial():
            return "channel"
        case Replicated():
            return "copies"
    return "one"


def _fraction(step: ComputeStep, device: int) -> float:
    """How much of a layer's arithmetic a device does."""
    if not holds(step.writes.layout, device):
        return 0.0
    # Of a sum over input channels, the part is that of the input.
    value = step.reads[0] if isinstance(step.writes.layout, Partial) else step.writes
    here = box(value.layout, device, value.shape)
    return entries(here) / max(1, entries(tuple((0, n) for n in value.shape))) if here else 0.0


def _part(layout: Layout, device: int, step: ComputeStep) -> str:
    if not holds(layout, device):
        return "-"
    match layout:
        case Split(_, shares):
            return str(shares[device])
        case Partial():
            read = step.reads[0].layout
            return str(read.shares[device]) if isinstance(read, Split) else "all"
    return "all"


def _bytes_by_layer(steps: StepList, graph: Graph, itemsize: int) -> dict[str, int]:
    owner = {p.key: layer.name for layer in graph.layers.values() for p in layer.parameters.values()}
    first_reader = steps.first_readers()
    result: dict[str, int] = {}
    for step in steps.steps:
        if isinstance(step, ComputeStep):
            continue
        total = sum(traffic(step, itemsize).values())
        for name, part in _charged_to(step, total, owner, first_reader):
            result[name] = result.get(name, 0) + part
    return result


def _charged_to(
    step: Step, total: int, owner: dict[str, str], first_reader: dict[str, str]
) -> Sequence[tuple[str, int]]:
    """The layer that makes a step necessary: the reader of a moved value, the owners of summed parameters."""
    match step:
        case Move():
            value = step.writes if step.phase == "forward" else step.reads
            # The last move of all brings the outputs to every device; it counts for the layer that made them.
            return [(first_reader.get(value.key, value.layer), total)]
        case GatherStatistics():
            return [(name, total * n // step.entries) for name, n in zip(step.layers, step.sizes, strict=True)]
        case SumGradients():
            entries_ = sum(step.sizes)
            return [(owner[k], round(total * n / entries_)) for k, n in zip(step.keys, step.sizes, strict=True)]
        case GatherWeights():
            sizes = [sum(shares) for shares in step.shares]
            return [(owner[k], round(total * n / sum(sizes))) for k, n in zip(step.keys, sizes, strict=True)]
    return []
