"""The plan as a picture: rows of layers as data flow, each with a box per device as wide as its part."""

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.report.numbers import percent
from convoy.runlog.schema import LayerEntry, PlanLine, ReshareLine

SHOWN_ROWS = 20
"""A net of more rows is shown as stretches of layers with the same shares; the rows are folded."""

LEGIBLE = 0.07
"""A narrower box has no number on it, only in its tooltip."""

COLOURS = 8
"""Devices beyond so many take the same colours again, hatched."""

UNITS = {
    "batch": "samples",
    "filter": "filters",
    "channel": "input channels",
    "copies": "all of it on every device",
    "one": "on one device",
}


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a bar: its look (classes of the style sheet), how wide it is (0 to 1), what stands on it, its tooltip."""

    look: str
    part: float
    text: str
    title: str


@dataclass(frozen=True, slots=True)
class Band:
    """A row of the picture: a layer, and those after it that work where its results lie, on the same parts."""

    lead: LayerEntry
    others: tuple[LayerEntry, ...] = ()

    @property
    def split_by(self) -> str:
        return f"split by {self.lead.strategy}: {UNITS.get(self.lead.strategy, '')}"

    @property
    def sum_bytes(self) -> int:
        return sum(layer.sum_bytes for layer in (self.lead, *self.others))

    @property
    def then(self) -> str:
        """The layers after the first: what they are, or how many and up to which; empty where there are none."""
        if any(layer.flop for layer in self.others):
            return f"and {len(self.others)} more, up to {self.others[-1].kind} {self.others[-1].layer}"
        return f"then {', '.join(layer.kind for layer in self.others)}" if self.others else ""

    def boxes(self, names: Sequence[str], ids: Sequence[int]) -> list[Box]:
        """A box per device that has a part, by the names of the devices and their ids."""
        lead, result = self.lead, []
        for device, part in enumerate(_fractions(lead)):
            count, unit = lead.parts[device], UNITS.get(lead.strategy, lead.strategy)
            words = unit if count == "all" else f"{count} {unit}, {percent(part)}"
            text = f"all on {ids[device]}" if lead.strategy == "one" else count
            look = colour(device) + " copy" * (lead.strategy == "copies")
            title = f"{lead.layer} on device {ids[device]} ({names[device]}): {words}"
            result.append(Box(look, part, text if part >= LEGIBLE else "", title))
        return [box for box in result if box.part]


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


def work_boxes(now: PlanLine | ReshareLine, ids: Sequence[int]) -> list[Box]:
    """All arithmetic of a step."""
    return [
        Box(colour(device), part, percent(part) if part >= 2 * LEGIBLE else "",
            f"device {ids[device]}: {percent(part)} of the arithmetic")
        for device, part in enumerate(now.work) if part
    ]  # fmt: skip


def colour(device: int) -> str:
    """The classes that give a device its colour."""
    return f"d{device % COLOURS}" + " again" * (device >= COLOURS)


def _follows(layer: LayerEntry, lead: LayerEntry, stretches: bool) -> bool:
    free = not (layer.moves or layer.note) and (stretches or not (layer.flop or layer.sum_bytes))
    return free and layer.strategy == lead.strategy and _fractions(layer) == _fractions(lead)


def _fractions(layer: LayerEntry) -> list[float]:
    """How wide the boxes of the devices are."""
    counts = [float(part) if part.isdigit() else float(part == "all") for part in layer.parts]
    return [round(count / (sum(counts) or 1.0), 4) for count in counts]
