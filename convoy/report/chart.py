"""Line charts for a page: values to places on a drawing that stretches to any width, while its letters do not.

A drawing is `WIDTH` by `HEIGHT` units; ticks and numbers are placed as parts of it, from 0 to 1.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from convoy.report.numbers import plain, ticks

WIDTH, HEIGHT = 1000, 400

MOST_POINTS = 600
"""Of a line; more are drawn as the lowest and highest of their neighbourhood."""

STRIPS = 60
"""Places of a chart that show their numbers when they are pointed at."""

Point = tuple[float, float]
Tick = tuple[float, str]
"""Place and text."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line.

    Attributes:
        look: a class of the style sheet.
        dots: points too.
    """

    label: str
    points: Sequence[Point]
    look: str = "main"
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Level:
    """A value to compare with, as a straight line across."""

    label: str
    value: float
    look: str


@dataclass(frozen=True, slots=True)
class Chart:
    """What is to be drawn.

    Attributes:
        name: part of ids, unique on a page.
        span: from where to where on the horizontal axis; points beyond make it wider.
        marks: steps at which something happened, numbered on the drawing.
        shown: formats a value of the vertical axis.
    """

    name: str
    title: str
    x_label: str
    curves: Sequence[Curve]
    span: tuple[float, float]
    levels: Sequence[Level] = ()
    marks: Sequence[float] = ()
    from_zero: bool = False
    shown: Callable[[float], str] = plain


@dataclass(frozen=True, slots=True)
class Axes:
    """Ticks around a drawing, and numbers upon it."""

    ys: Sequence[Tick]
    xs: Sequence[Tick]
    x_label: str
    numbers: Sequence[Tick]


@dataclass(frozen=True, slots=True)
class Drawing:
    """A chart as a template draws it.

    Attributes:
        lines: of each curve its look, "x,y" of its points, and whether these are drawn as dots too.
        axes: None where there are no lines.
        description: the chart in words, for those who do not see it.
        legend: look and text of each entry.
        marks, levels: places x; places y with their looks.
        strips: start, width and text of each.
    """

    name: str
    title: str
    lines: Sequence[tuple[str, Sequence[str], bool]] = ()
    axes: Axes | None = None
    description: str = ""
    legend: Sequence[tuple[str, str]] = ()
    marks: Sequence[float] = ()
    levels: Sequence[tuple[float, str]] = ()
    strips: Sequence[tuple[float, float, str]] = ()


def draw(chart: Chart) -> Drawing:
    """Place a chart. Curves without points are left out; where all are, the drawing has no lines."""
    curves = [curve for curve in chart.curves if curve.points]
    if not curves:
        return Drawing(chart.name, chart.title)
    frame = _Frame.around(curves, chart)
    shown, marks = chart.shown, [(frame.x(at), str(n)) for n, at in enumerate(chart.marks, 1)]
    legend = [(f"curve {curve.look}", curve.label) for curve in curves]
    legend += [(f"level {each.look}", f"{each.label} {shown(each.value)}") for each in chart.levels]
    ends = [(curve.label, curve.points[0], curve.points[-1]) for curve in curves]
    words = [
        f"{label}: {shown(a)} at {plain(first)}, {shown(b)} at {plain(last)} ({chart.x_label})"
        for label, (first, a), (last, b) in ends
    ]
    words += [f"{level.label}: {shown(level.value)}" for level in chart.levels]
    axes = Axes(
        [(frame.y(y) / HEIGHT, shown(y)) for y in ticks(frame.low, frame.high, 5)],
        [(frame.x(x) / WIDTH, plain(x)) for x in ticks(frame.left, frame.right, 5) if x == int(x)],
        chart.x_label, [(x / WIDTH, text) for x, text in marks],
    )  # fmt: skip
    return Drawing(
        chart.name, chart.title, [_line(frame, curve) for curve in curves], axes, "; ".join(words), legend,
        [x for x, _ in marks if 0 <= x <= WIDTH], [(frame.y(level.value), level.look) for level in chart.levels],
        _strips(frame, chart, curves),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Frame:
    """The values at the edges of a drawing."""

    left: float
    right: float
    low: float
    high: float

    @staticmethod
    def around(curves: Sequence[Curve], chart: Chart) -> "_Frame":
        xs = [x for curve in curves for x, _ in curve.points]
        ys = [y for curve in curves for _, y in curve.points] + [level.value for level in chart.levels]
        left, right = min(*chart.span, *xs), max(*chart.span, *xs)
        low, high = min(0.0, *ys) if chart.from_zero else min(ys), max(ys)
        if high - low < 1e-9 * max(abs(high), 1e-9):  # a straight line
            low, high = (0.0, 2 * high) if high > 0 else (low - 1, high + 1)
        room = 0.06 * (high - low)
        low, high = low if chart.from_zero and low == 0 else low - room, high + room
        return _Frame(left, right if right > left else left + 1, low, high)

    def x(self, value: float) -> float:
        return (value - self.left) / (self.right - self.left) * WIDTH

    def y(self, value: float) -> float:
        return HEIGHT - (value - self.low) / (self.high - self.low) * HEIGHT


def _line(frame: _Frame, curve: Curve) -> tuple[str, Sequence[str], bool]:
    places = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in thinned(curve.points)]
    return curve.look, places, curve.dots or len(places) == 1


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most about `MOST_POINTS` points; of each neighbourhood its lowest and its highest, so that no peak is lost."""
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(2 * len(points) / MOST_POINTS)
    result: list[Point] = []
    for start in range(0, len(points), size):
        near = points[start : start + size]
        ends = {min(near, key=lambda point: point[1]), max(near, key=lambda point: point[1])}
        result += sorted(ends)
    return result


def _strips(frame: _Frame, chart: Chart, curves: Sequence[Curve]) -> list[tuple[float, float, str]]:
    """Invisible, side by side; each shows the numbers of the place it lies on."""
    by_x = [dict(curve.points) for curve in curves]
    known = sorted(set().union(*by_x))
    chosen = known[:: max(1, math.ceil(len(known) / STRIPS))]
    edges = [0.0, *(frame.x((a + b) / 2) for a, b in itertools.pairwise(chosen)), float(WIDTH)]
    result = []
    for x, (start, end) in zip(chosen, itertools.pairwise(edges), strict=True):
        words = [f"{curve.label} {chart.shown(row[x])}" for curve, row in zip(curves, by_x, strict=True) if x in row]
        result.append((start, end - start, f"{chart.x_label} {plain(x)}: {', '.join(words)}"))
    return result
