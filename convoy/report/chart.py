"""Line charts as HTML and SVG that fit any width: the lines stretch, the letters do not."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from convoy.report.markup import Markup, joined, tag
from convoy.report.numbers import plain, ticks

WIDTH, HEIGHT = 1000, 400
"""Of the drawing, in units that stretch."""

MOST_POINTS = 600
"""Of a line; more are drawn as the lowest and highest of their neighbourhood."""

STRIPS = 60
"""Places of a chart that tell their numbers when they are pointed at."""

Point = tuple[float, float]


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
    """What is drawn.

    Attributes:
        name: part of ids, unique on a page.
        span: from where to where on the horizontal axis; points beyond make it wider.
        marks: steps at which something happened, numbered on the drawing.
        shown: a value of the vertical axis in words.
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


def draw(chart: Chart) -> Markup:
    """The chart as a figure. Curves without points are left out; a chart without any says that there is nothing yet."""
    curves = [curve for curve in chart.curves if curve.points]
    if not curves:
        return tag("figure", tag("figcaption", chart.title), tag("p", "Nothing was told of this yet.", class_="none"))
    frame = _Frame.around(curves, chart)
    tall = [_level(frame, level) for level in chart.levels]
    lines = [_line(frame, curve) for curve in curves]
    marks = [
        tag("line", x1=frame.x(at), x2=frame.x(at), y1=0, y2=HEIGHT, class_="mark")
        for at in chart.marks
        if frame.has(at)
    ]
    grid = [tag("line", x1=0, x2=WIDTH, y1=frame.y(y), y2=frame.y(y), class_="grid") for y in frame.y_ticks]
    svg = tag(
        "svg",
        tag("title", chart.title, id=f"{chart.name}-title"),
        tag("desc", _description(chart, curves), id=f"{chart.name}-desc"),
        *grid, *marks, *tall, *lines, *_strips(frame, chart, curves),
        viewbox=f"0 0 {WIDTH} {HEIGHT}", preserve="none", role="img",
        aria_labelledby=f"{chart.name}-title {chart.name}-desc",
    )  # fmt: skip
    numbers = [tag("span", str(n), style=f"left:{frame.x(at) / WIDTH:.2%}") for n, at in enumerate(chart.marks, 1)]
    ys = [tag("span", chart.shown(y), style=f"top:{frame.y(y) / HEIGHT:.2%}") for y in frame.y_ticks]
    xs = [tag("span", plain(x), style=f"left:{frame.x(x) / WIDTH:.2%}") for x in frame.x_ticks]
    return tag(
        "figure",
        tag("figcaption", chart.title, " ", _legend(curves, chart)),
        tag(
            "div",
            tag("div", *ys, class_="ys", aria_hidden="true"),
            tag("div", svg, tag("div", *numbers, class_="numbers"), class_="plot"),
            tag("div", *xs, class_="xs", aria_hidden="true"),
            tag("div", chart.x_label, class_="x-label"),
            class_="axes",
        ),
        class_="chart",
    )


@dataclass(frozen=True, slots=True)
class _Frame:
    """From values to places on the drawing."""

    left: float
    right: float
    low: float
    high: float
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]

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
        right = right if right > left else left + 1
        whole = [x for x in ticks(left, right, 5) if x == int(x)]
        return _Frame(left, right, low, high, whole, ticks(low, high, 5))

    def x(self, value: float) -> float:
        return (value - self.left) / (self.right - self.left) * WIDTH

    def y(self, value: float) -> float:
        return HEIGHT - (value - self.low) / (self.high - self.low) * HEIGHT

    def has(self, x: float) -> bool:
        return self.left <= x <= self.right


def _line(frame: _Frame, curve: Curve) -> Markup:
    places = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in thinned(curve.points)]
    line = tag("polyline", points=" ".join(places), class_=f"curve {curve.look}")
    if not curve.dots and len(places) > 1:
        return line
    return joined(line, tag("path", d="".join(f"M{place}h0" for place in places), class_=f"dots {curve.look}"))


def _level(frame: _Frame, level: Level) -> Markup:
    y = frame.y(level.value)
    return tag("line", x1=0, x2=WIDTH, y1=y, y2=y, class_=f"level {level.look}")


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


def _strips(frame: _Frame, chart: Chart, curves: Sequence[Curve]) -> list[Markup]:
    """Invisible, side by side; each tells the numbers of the place it lies on."""
    by_x = [dict(curve.points) for curve in curves]
    known = sorted(set().union(*by_x))
    chosen = known[:: max(1, math.ceil(len(known) / STRIPS))]
    edges = [0.0, *(frame.x((a + b) / 2) for a, b in itertools.pairwise(chosen)), float(WIDTH)]
    result = []
    for x, (start, end) in zip(chosen, itertools.pairwise(edges), strict=True):
        words = [f"{curve.label} {chart.shown(row[x])}" for curve, row in zip(curves, by_x, strict=True) if x in row]
        title = tag("title", f"{chart.x_label} {plain(x)}: {', '.join(words)}")
        result.append(tag("rect", title, x=start, y=0, width=end - start, height=HEIGHT, class_="strip"))
    return result


def _legend(curves: Sequence[Curve], chart: Chart) -> Markup:
    entries = [(curve.look, "curve", curve.label) for curve in curves]
    entries += [(each.look, "level", f"{each.label} {chart.shown(each.value)}") for each in chart.levels]
    return tag(
        "span",
        *(tag("span", tag("i", class_=f"key {kind} {look}"), text, class_="entry") for look, kind, text in entries),
        class_="legend",
    )


def _description(chart: Chart, curves: Sequence[Curve]) -> str:
    """The chart in words, for those who do not see it."""
    words = []
    for curve in curves:
        (first, a), (last, b) = curve.points[0], curve.points[-1]
        words.append(
            f"{curve.label}: {chart.shown(a)} at {plain(first)}, {chart.shown(b)} at {plain(last)} ({chart.x_label})"
        )
    words += [f"{level.label}: {chart.shown(level.value)}" for level in chart.levels]
    return "; ".join(words)
