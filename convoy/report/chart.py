"""Line charts for a page: values to places on a drawing that stretches to any width, while its letters do not.

A drawing is `WIDTH` by `HEIGHT` units; ticks and numbers are placed as parts of it, from 0 to 1.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from convoy.report.numbers import SHOWN, plain, ticks

WIDTH, HEIGHT = 1000, 400

MOST_POINTS = 600
"""Of a line; more are drawn as the lowest and highest of their neighbourhood."""

Point = tuple[float, float]
Tick = tuple[float, str]
"""Place and text."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line.

    Attributes:
        look: classes of the style sheet.
        dots: points too.
        is_smooth: is drawn faint as it is, and as its running mean, which the slider of the page makes smoother.
    """

    label: str
    points: Sequence[Point]
    look: str = "main"
    dots: bool = False
    is_smooth: bool = False


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
        shown: how a value of the vertical axis is written: one of `SHOWN`.
    """

    name: str
    title: str
    x_label: str
    curves: Sequence[Curve]
    span: tuple[float, float]
    levels: Sequence[Level] = ()
    marks: Sequence[float] = ()
    from_zero: bool = False
    shown: str = "plain"


@dataclass(frozen=True, slots=True)
class Axes:
    """Ticks around a drawing, and numbers upon it."""

    ys: Sequence[Tick]
    xs: Sequence[Tick]
    x_label: str
    numbers: Sequence[Tick]


@dataclass(frozen=True, slots=True)
class Line:
    """A curve as it is drawn: "x,y" of its points."""

    label: str
    look: str
    points: Sequence[str]
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Drawing:
    """A chart as a template draws it.

    Attributes:
        axes: None where there are no lines.
        frame: the values at its left, right, lower and upper edge, from which the page's script reads values off the lines.
        description: the chart in words, for those who do not see it.
        legend: look and text of each entry.
        marks, levels: places x; places y with their looks.
    """

    name: str
    title: str
    shown: str = "plain"
    lines: Sequence[Line] = ()
    axes: Axes | None = None
    frame: str = ""
    description: str = ""
    legend: Sequence[tuple[str, str]] = ()
    marks: Sequence[float] = ()
    levels: Sequence[tuple[float, str]] = ()


def draw(chart: Chart) -> Drawing:
    """Place a chart. Curves without points are left out; where all are, the drawing has no lines."""
    curves = [curve for curve in chart.curves if curve.points]
    if not curves:
        return Drawing(chart.name, chart.title)
    frame = _Frame.around(curves, chart)
    shown, marks = SHOWN[chart.shown], [(frame.x(at), str(n)) for n, at in enumerate(chart.marks, 1)]
    lines = [line for curve in curves for line in _lines(frame, curve)]
    legend = [(f"curve {line.look}", line.label) for line in lines if line.label]
    legend += [(f"level {each.look}", f"{each.label} {shown(each.value)}") for each in chart.levels]
    ends = [(curve.label, curve.points[0], curve.points[-1]) for curve in curves]
    words = [
        f"{label}: {shown(a)} at {plain(first)}, {shown(b)} at {plain(last)} ({chart.x_label})"
        for label, (first, a), (last, b) in ends
    ]
    words += [f"{level.label}: {shown(level.value)}" for level in chart.levels]
    whole = chart.x_label == "step"
    axes = Axes(
        [(frame.y(y) / HEIGHT, shown(y)) for y in ticks(frame.low, frame.high, 5)],
        [(frame.x(x) / WIDTH, plain(x)) for x in ticks(frame.left, frame.right, 5) if not whole or x == int(x)],
        chart.x_label, [(x / WIDTH, text) for x, text in marks],
    )  # fmt: skip
    return Drawing(
        chart.name, chart.title, chart.shown, lines, axes,
        " ".join(f"{edge:.9g}" for edge in (frame.left, frame.right, frame.low, frame.high)), "; ".join(words), legend,
        [x for x, _ in marks if 0 <= x <= WIDTH], [(frame.y(level.value), level.look) for level in chart.levels],
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


def _lines(frame: _Frame, curve: Curve) -> list[Line]:
    few = thinned(curve.points)
    if not curve.is_smooth or len(few) < 3:
        return [Line(curve.label, curve.look, _placed(frame, few), curve.dots or len(few) == 1)]
    raw = Line("", f"{curve.look} faint", _placed(frame, few))
    return [raw, Line(curve.label, f"{curve.look} smooth", _placed(frame, means(curve.points)))]


def _placed(frame: _Frame, points: Sequence[Point]) -> list[str]:
    return [f"{frame.x(x):.7g},{frame.y(y):.7g}" for x, y in points]


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most about `MOST_POINTS` points; of each neighbourhood its lowest and its highest, so that no peak is lost."""
    if len(points) <= MOST_POINTS:
        return points
    result: list[Point] = []
    for near in _neighbourhoods(points, MOST_POINTS // 2):
        ends = {min(near, key=lambda point: point[1]), max(near, key=lambda point: point[1])}
        result += sorted(ends)
    return result


def means(points: Sequence[Point]) -> Sequence[Point]:
    """At most `MOST_POINTS` points, the mean of each neighbourhood at its end."""
    if len(points) <= MOST_POINTS:
        return points
    return [(near[-1][0], math.fsum(y for _, y in near) / len(near)) for near in _neighbourhoods(points, MOST_POINTS)]


def _neighbourhoods(points: Sequence[Point], count: int) -> Iterator[Sequence[Point]]:
    size = math.ceil(len(points) / count)
    return (points[start : start + size] for start in range(0, len(points), size))
