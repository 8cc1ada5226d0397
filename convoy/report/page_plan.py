"""The plan as a picture of the layers: from top to bottom as data flow, each with a box per device as wide as its part."""

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.report.markup import Markup, joined, tag
from convoy.report.numbers import in_bytes, percent
from convoy.report.page_parts import colour, details, device_key, device_names, missing, section
from convoy.runlog.reader import Record
from convoy.runlog.schema import LayerEntry, MoveEntry, PlanEntry, PlanLine, ReshareLine

SHOWN_ROWS = 20
"""A net of more rows is shown as stretches of layers with the same shares; the rows are folded."""

LEGIBLE = 0.07
"""A narrower box has no number on it, only in its tooltip."""

UNITS = {
    "batch": "samples",
    "filter": "filters",
    "channel": "input channels",
    "copies": "all of it on every device",
    "one": "on one device",
}


@dataclass(frozen=True, slots=True)
class Band:
    """A row of the picture: a layer, and those after it that work where its results lie, on the same parts."""

    lead: LayerEntry
    others: tuple[LayerEntry, ...] = ()


def bands(layers: Sequence[LayerEntry], *, stretches: bool = False) -> list[Band]:
    """The rows of the picture, in order.

    Args:
        stretches: join all neighbours on the same parts, also those that have work or sums of their own.
    """
    result: list[Band] = []
    for layer in layers:
        if result and _follows(layer, result[-1].lead, stretches):
            last = result.pop()
            result.append(Band(last.lead, (*last.others, layer)))
        else:
            result.append(Band(layer))
    return result


def plan_section(record: Record) -> Markup:
    """What the last plan of the run has each device do."""
    if record.plan is None:
        return section("plan", "The plan", missing("The log tells no plan: it was written by an older version."))
    names, plan, last = device_names(record), record.plan.plan, record.changes[-1][1]
    now = last if last.layers else record.plan
    rows = [_row(band, names) for band in bands(now.layers)]
    is_deep = len(rows) > SHOWN_ROWS
    shown = [_row(band, names) for band in bands(now.layers, stretches=True)] if is_deep else rows
    outputs = tag("li", *(_move(move, "for the loss: ") for move in now.outputs), class_="moves")
    warning = tag("p", f"INEXACT: {record.plan.inexact}.", class_="warning") if record.plan.inexact else None
    return section(
        "plan", "The plan", warning, tag("p", _lead(plan, now, changed=now is not record.plan)), device_key(names),
        tag("ol", *shown, outputs, class_="layers"),
        details("Layer by layer", tag("ol", *rows, outputs, class_="layers")) if is_deep else None, _work(now),
    )  # fmt: skip


def _lead(plan: PlanEntry, now: PlanLine | ReshareLine, *, changed: bool) -> str:
    wire = "" if plan.wire == "exact" else f", wire {plan.wire}"
    words = [
        f"Plan {plan.name}: {plan.batch} samples in one pass, sums by {plan.reduce}{wire}. Each row is a layer, each box a "
        "device's part of it; arrows are what travels, in bytes of one pass, there and back; Σ: what travels for sums of "
        "gradients and for statistics of batch norm."
    ]
    if changed:
        words.append("These are the shares at the end; how they came to be is told below.")
    idle = [str(device) for device, part in enumerate(now.work) if not part]
    if idle:
        words.append(
            f"Device{'s' * (len(idle) > 1)} {', '.join(idle)} {'have' if len(idle) > 1 else 'has'} nothing to compute."
        )
    return " ".join(words)


def _follows(layer: LayerEntry, lead: LayerEntry, stretches: bool) -> bool:
    free = not (layer.moves or layer.note) and (stretches or not (layer.flop or layer.sum_bytes))
    return free and layer.strategy == lead.strategy and _fractions(layer) == _fractions(lead)


def _fractions(layer: LayerEntry) -> list[float]:
    """How wide the boxes of the devices are."""
    counts = [float(part) if part.isdigit() else float(part == "all") for part in layer.parts]
    return [round(count / (sum(counts) or 1.0), 4) for count in counts]


def _row(band: Band, names: Sequence[str]) -> Markup:
    lead = band.lead
    title = tag("span", tag("b", lead.kind), " ", tag("code", lead.layer))
    then = tag("span", _then(band), class_="then") if band.others else None
    badge = tag(
        "span", lead.strategy, class_="badge", title=f"split by {lead.strategy}: {UNITS.get(lead.strategy, '')}"
    )
    sum_bytes = sum(layer.sum_bytes for layer in (lead, *band.others))
    sums = tag("span", f"Σ {in_bytes(sum_bytes)}", class_="sum") if sum_bytes else None
    fractions = _fractions(lead)
    boxes = [_box(lead, device, part, names[device]) for device, part in enumerate(fractions) if part]
    note = tag("p", lead.note, class_="note") if lead.note else None
    here = tag(
        "li", tag("div", title, badge, then, sums, class_="head"), tag("div", *boxes, class_="boxes"), note, class_="layer"
    )  # fmt: skip
    return joined(*(tag("li", _move(move), class_="moves") for move in lead.moves), here)


def _then(band: Band) -> str:
    """The layers after the first: what they are, or how many and up to which."""
    last = band.others[-1]
    if any(layer.flop for layer in band.others):
        return f"and {len(band.others)} more, up to {last.kind} {last.layer}"
    return f"then {', '.join(layer.kind for layer in band.others)}"


def _box(layer: LayerEntry, device: int, part: float, name: str) -> Markup:
    count, unit = layer.parts[device], UNITS.get(layer.strategy, layer.strategy)
    words = unit if count == "all" else f"{count} {unit}, {percent(part)}"
    text = (f"all on {device}" if layer.strategy == "one" else count) if part >= LEGIBLE else ""
    kind = " copy" if layer.strategy == "copies" else ""
    return tag(
        "span", text, class_=f"box {colour(device)}{kind}", style=f"flex-grow:{part:g}",
        title=f"{layer.layer} on device {device} ({name}): {words}",
    )  # fmt: skip


def _move(move: MoveEntry, why: str = "") -> Markup:
    size = in_bytes(move.bytes) if move.bytes else "nothing travels"
    return tag("span", f"↓ {why}{move.source} → {move.target} · {size}", class_="move")


def _work(last: PlanLine | ReshareLine) -> Markup | None:
    if not last.work:
        return None
    boxes = [
        tag("span", percent(part) if part >= 2 * LEGIBLE else "", class_=f"box {colour(device)}",
            style=f"flex-grow:{part:g}", title=f"device {device}: {percent(part)} of the arithmetic")
        for device, part in enumerate(last.work) if part
    ]  # fmt: skip
    return tag(
        "div", tag("div", "All arithmetic of a step", class_="head"), tag("div", *boxes, class_="boxes"), class_="work"
    )
