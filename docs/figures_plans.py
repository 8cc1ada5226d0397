"""The figures of "How plans work": drawn from the step list, the boxes and the transfers that training itself uses.

    python -m docs.figures_plans        # writes docs/figures/plans-*.svg

They agree with the code: a test draws them again and compares.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from convoy.layout.collectives import SUMS, Reduce, Schedule, Transfer, schedule, traffic
from convoy.layout.layout import Box, Layout, OnOne, Partial, Replicated, Split, box, dual, entries
from convoy.layout.shares import apportion
from convoy.model.graph import Graph
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.steps import ComputeStep, Move, StepList
from convoy.plan.strategy import Batch, Channel, Filter, Strategy
from docs.drawing import DEVICE_COLOURS, Drawing, write

FOLDER = Path(__file__).parent / "figures"

SPEEDS = (5.0, 4.0, 2.0, 1.0)
BATCH = 12
ITEMSIZE = 4
SUMMAND = 0.45
"""How much colour a summand has: it is not the tensor yet."""

CONV_1, CONV_2, LINEAR = "0", "3", "7"
"""The weighted layers of the net that is drawn, two-conv:8:16 on images of 1x8x8, by their names."""


def graph() -> Graph:
    """The net of the figures as a graph."""
    return trace(build_net("two-conv:8:16", (1, 8, 8), 10), torch.zeros(2, 1, 8, 8)).graph


def plan(layers: dict[str, Strategy]) -> Plan:
    """These strategies; everything else by batch, in proportion to the speeds."""
    return Plan("drawn", graph().fingerprint, len(SPEEDS), BATCH, layers, Batch(apportion(BATCH, SPEEDS)))


def filters_then_channels() -> StepList:
    """The first convolution by samples, the second by filters, the fully connected layer by the channels it gets."""
    filters = apportion(16, SPEEDS)
    features = tuple(4 * share for share in filters)  # each channel of the last pooling has 2x2 places
    return lower(plan({CONV_2: Filter(filters), LINEAR: Channel(features)}), graph())


def samples_to_features() -> StepList:
    """Both convolutions by samples, the fully connected layer by features."""
    return lower(plan({LINEAR: Channel(apportion(64, SPEEDS))}), graph())


def figures() -> dict[str, Drawing]:
    """Every figure under the name of its file."""
    forward = [step for step in filters_then_channels().phase("forward") if isinstance(step, Move)]
    crossing = [step for step in samples_to_features().phase("forward") if isinstance(step, Move)]
    return {
        "plans-layouts.svg": layouts_figure(),
        "plans-way.svg": way_figure(filters_then_channels()),
        "plans-copies.svg": crossing_figure(forward[0]),
        "plans-channels.svg": crossing_figure(crossing[0]),
        "plans-sums.svg": sums_figure(),
        "plans-tiles.svg": tiles_figure(),
    }


# --- a tensor on a sheet: samples downwards, channels to the right ---------------------------------------------------


class _Sheet:
    """Where a tensor of `shape` is drawn: its first two axes, from (x, y), so many pixels wide and high."""

    def __init__(self, drawing: Drawing, shape: tuple[int, ...], x: float, y: float, width: float, height: float):
        self.drawing, self.shape = drawing, shape
        self.x, self.y, self.width, self.height = x, y, width, height

    def place(self, part: Box) -> tuple[float, float, float, float]:
        (top, bottom), (left, right) = part[0], part[1]
        across, down = self.width / self.shape[1], self.height / self.shape[0]
        return self.x + left * across, self.y + top * down, (right - left) * across, (bottom - top) * down

    def fill(self, part: Box, colours: Sequence[str]) -> None:
        self.drawing.striped(*self.place(part), colours)

    def outline(self) -> None:
        self.drawing.edge(self.x, self.y, self.width, self.height)


def layouts_figure() -> Drawing:
    """What each of four devices holds of one tensor, in each layout."""
    shape, devices = (12, 8), (0, 1, 2, 3)
    rows: list[tuple[Layout, str]] = [
        (Split(0, apportion(12, SPEEDS)), "Split(0, …): some samples, all channels"),
        (Split(1, apportion(8, SPEEDS)), "Split(1, …): some channels of all samples"),
        (Replicated(devices), "Replicated: the whole tensor on each"),
        (OnOne(0), "OnOne(0): the whole tensor on one"),
        (Partial(devices), "Partial: a summand of the whole on each"),
    ]
    drawing = Drawing(720, 40 + 106 * len(rows), "One tensor in five layouts on four devices")
    for device in devices:
        drawing.text(322 + 110 * device, 24, f"device {device}", "strong")
    for row, (layout, meaning) in enumerate(rows):
        top = 36 + 106 * row
        drawing.text(20, top + 38, str(layout), "strong", "start")
        drawing.text(20, top + 56, meaning, "small", "start")
        for device in devices:
            sheet = _Sheet(drawing, shape, 290 + 110 * device, top, 64, 84)
            held = box(layout, device, shape)
            if held is not None:
                drawing.box(*sheet.place(held), DEVICE_COLOURS[device], SUMMAND if isinstance(layout, Partial) else 1.0)
            if isinstance(layout, Partial):
                drawing.text(sheet.x + 32, top + 47, "+", "strong")
            sheet.outline()
            drawing.text(sheet.x + 32, top + 98, f"{entries(held) if held else 0} of 96 numbers", "small")
    return drawing


def way_figure(steps: StepList) -> Drawing:
    """The way of one batch through a net: every layout it comes into, and what travels for it."""
    stations = list(_stations(steps))
    width, gap = 62.0, 56.0
    drawing = Drawing(720, 218, "One batch on its way through a net, from layout to layout")
    for index, (words, layout, shape) in enumerate(stations):
        x = 24 + index * (width + gap)
        _tensor(drawing, layout, shape, x, 84, width, 78)
        for line, text in enumerate(str(layout).replace("(", " (", 1).split(" ")):
            drawing.text(x + width / 2, 186 + 14 * line, text, "strong" if line == 0 else "small")
        if index:
            drawing.arrow(x - gap + 6, 123, x - 4)
            for line, text in enumerate(reversed(words)):
                drawing.text(x - gap / 2, 59 - 13 * line, text, "small")
    return drawing


def _stations(steps: StepList) -> Iterator[tuple[list[str], Layout, tuple[int, ...]]]:
    """(the kinds of layers or the move that led there, layout, shape), wherever a batch comes into another layout."""
    net, layout, kinds = graph(), steps.inputs[0].layout, []
    yield [], layout, steps.inputs[0].shape
    for step in steps.phase("forward"):
        if isinstance(step, ComputeStep):
            kinds.append(net[step.layer].kind)
            if _kind(step.writes.layout) != _kind(layout):
                yield kinds, step.writes.layout, step.writes.shape
                kinds = []
            layout = step.writes.layout
        elif isinstance(step, Move):
            if kinds:
                yield kinds, step.reads.layout, step.reads.shape
            sent = sum(traffic(step.schedule, ITEMSIZE).values())
            yield ["move", f"{sent:,} bytes"], step.writes.layout, step.writes.shape
            layout, kinds = step.writes.layout, []


def _kind(layout: Layout) -> str:
    return f"split {layout.axis}" if isinstance(layout, Split) else type(layout).__name__


def _tensor(drawing: Drawing, layout: Layout, shape: tuple[int, ...], x: float, y: float, w: float, h: float) -> None:
    """A tensor in a layout, all devices together: cut in pieces, or one sheet behind the other."""
    holders = [(d, part) for d in range(len(SPEEDS)) if (part := box(layout, d, shape)) is not None]
    if isinstance(layout, Split):
        sheet = _Sheet(drawing, shape, x, y, w, h)
        for device, part in holders:
            sheet.fill(part, [DEVICE_COLOURS[device]])
        sheet.outline()
        return
    for index, (device, _) in reversed(list(enumerate(holders))):
        off = 5.0 * index
        sheet = _Sheet(drawing, shape, x + off, y - off, w - 15, h)
        drawing.box(sheet.x, sheet.y, sheet.width, sheet.height, DEVICE_COLOURS[device])
        sheet.outline()
    if isinstance(layout, Partial):
        drawing.text(x + (w - 15) / 2, y + h / 2 + 5, "+", "strong")


# --- one move, device by device --------------------------------------------------------------------------------------


def crossing_figure(step: Move) -> Drawing:
    """One move and its way back: what each device holds before and after, in the colours of the devices it came from."""
    shape = step.reads.shape
    back = Move(step.id, "backward", step.writes, step.reads, step.reduce)
    drawing = Drawing(
        720, 652, f"A batch crosses from {step.reads.layout} to {step.writes.layout}, and its gradient back"
    )
    places = f" of {'x'.join(map(str, shape[2:]))}" if len(shape) > 2 else ""
    across = "features" if len(shape) == 2 else "channels"
    size = f"a tensor of {shape[0]} samples (downwards) and {shape[1]} {across}{places} (to the right)"
    _crossing(drawing, 14, f"Forward: {size}", step.reads.layout, step.writes.layout, step.schedule)
    source, target = dual(back.reads.layout), dual(back.writes.layout)
    _crossing(drawing, 336, "Backward: its gradient goes the same way back", source, target, back.schedule)
    return drawing


def _crossing(drawing: Drawing, top: float, title: str, src: Layout, dst: Layout, move: Schedule) -> None:
    sent = traffic(move, ITEMSIZE)
    drawing.text(20, top + 16, title, "strong", "start")
    drawing.text(20, top + 82, str(src), "strong", "start")
    drawing.text(20, top + 218, str(dst), "strong", "start")
    total = (
        f"{sum(sent.values()):,} bytes in {len(sent)} messages, {len(move.rounds)} round{'s' * (len(move.rounds) > 1)}"
    )
    drawing.text(20, top + 150, total, "small", "start")
    largest = max(sent.values(), default=1)
    for (sender, receiver), size in sorted(sent.items()):
        ends = (330 + 110 * sender, top + 122, 330 + 110 * receiver, top + 176)
        drawing.line(*ends, DEVICE_COLOURS[sender], 0.8 + 4.2 * size / largest)
    for device in range(len(SPEEDS)):
        before = _Sheet(drawing, move.shape, 290 + 110 * device, top + 34, 80, 84)
        held = box(src, device, move.shape)
        if held is not None:
            drawing.box(*before.place(held), DEVICE_COLOURS[device], SUMMAND if isinstance(src, Partial) else 1.0)
        before.outline()
        after = _Sheet(drawing, move.shape, 290 + 110 * device, top + 180, 80, 84)
        for part, senders in _arrivals(move, device).items():
            after.fill(part, [DEVICE_COLOURS[sender] for sender in senders])
        after.outline()
        out = sum(n for (sender, _), n in sent.items() if sender == device)
        into = sum(n for (_, receiver), n in sent.items() if receiver == device)
        drawing.text(before.x + 40, top + 30, f"device {device}", "small")
        drawing.text(before.x + 40, top + 279, f"sent {out:,}", "small")
        drawing.text(before.x + 40, top + 292, f"received {into:,}", "small")


def _arrivals(move: Schedule, device: int) -> dict[Box, list[int]]:
    """Box -> the devices whose numbers lie there afterwards; several where they are added."""
    found: dict[Box, list[int]] = defaultdict(list)
    for transfers in move.rounds:
        for t in transfers:
            if t.receiver == device:
                found[t.box].append(t.sender)
    return found


# --- a sum, round by round -------------------------------------------------------------------------------------------


def sums_figure(n: int = 120_000) -> Drawing:
    """How four summands become four copies of their sum, by each collective."""
    devices = tuple(range(len(SPEEDS)))
    names: list[Reduce] = [name for name in SUMS if not name.startswith("inexact")]  # type: ignore[misc]
    plans = {name: schedule(Partial(devices), Replicated(devices), (n,), name) for name in names}
    lines = sum(len(each.rounds) for each in plans.values())
    drawing = Drawing(
        720, 40 + 24 * lines + 34 * len(plans), "A sum over four devices: ring, butterfly, direct and star"
    )
    for device in devices:
        drawing.text(290 + 120 * device, 22, f"device {device} receives", "small")
    top = 40.0
    for name, each in plans.items():
        busiest = max(sum(entries(t.box) for r in each.rounds for t in r if t.sender == d) for d in devices)
        drawing.text(20, top + 14, name, "strong", "start")
        drawing.text(20, top + 30, f"{len(each.rounds)} rounds; busiest card:", "small", "start")
        drawing.text(20, top + 44, f"{busiest / n:g} times the tensor", "small", "start")
        for number, transfers in enumerate(each.rounds, start=1):
            drawing.text(212, top + 13, f"{number}", "small", "end")
            _round(drawing, top, transfers, devices, n)
            top += 24
        top += 34
        if name != names[-1]:
            drawing.rule(20, top - 22, 700, top - 22)
    return drawing


def _round(drawing: Drawing, top: float, transfers: Sequence[Transfer], devices: Sequence[int], n: int) -> None:
    """What every device gets in one round: a bar for the tensor, the part that comes in the colour of its sender."""
    for device in devices:
        x, width = 240 + 120 * device, 100.0
        arriving: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        for t in transfers:
            if t.receiver == device:
                arriving[t.box[0]].append(t)
        for (start, stop), parts in arriving.items():
            place = (x + width * start / n, top + 2, width * (stop - start) / n, 14)
            drawing.striped(*place, [DEVICE_COLOURS[t.sender] for t in parts])
            if parts[0].adds:
                drawing.text(place[0] + place[2] / 2, top + 13.5, "+")
        drawing.edge(x, top + 2, width, 14)


# --- an image in tiles ----------------------------------------------------------------------------------------------


def tiles_figure(side: int = 96) -> Drawing:
    """Draw the rows of an image, and of the outputs of two strided convolutions, that each of four devices has."""
    net = nn.Sequential(*(nn.Conv2d(channels, 8, 7, 2, 3) for channels in (3, 8)))
    traced = trace(net, torch.zeros(1, 3, side, side)).graph
    steps = lower(named_plan("spatial", traced, 1, Speeds(SPEEDS)), traced)
    computed = [step for step in steps.phase("forward") if isinstance(step, ComputeStep)]
    held = [steps.inputs[0], *(step.writes for step in computed if traced[step.layer].kind == "conv")]
    titles = ("image", "first convolution", "second convolution")
    drawing = Drawing(720, 330, "An image and the outputs of two convolutions, in tiles of rows on four devices")
    for column, (value, title) in enumerate(zip(held, titles, strict=True)):
        rows, extent = value.shape[2], 200.0
        left = 20.0 + 235 * column
        drawing.text(left + extent / 2, 22, f"{title}: {rows} rows", "strong")
        for device, colour in enumerate(DEVICE_COLOURS):
            place = box(value.layout, device, value.shape)
            if place is None:
                continue
            first, last = place[2]
            top, bar = 36 + 240 * first / rows, left + extent / 4 * device
            drawing.box(bar, top, extent / 4 - 6, 240 * (last - first) / rows, colour)
            drawing.text(bar + extent / 8 - 3, 292, f"device {device}", "small")
            drawing.text(bar + extent / 8 - 3, 308, f"{last - first} rows", "small")
        drawing.edge(left, 36, extent - 6, 240)
    return drawing


if __name__ == "__main__":
    for path in write(FOLDER, figures()):
        print(path)
