"""Line charts for a page. A drawing scales to any width, its text does not: ticks have relative positions, 0 to 1."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from convoy.report.numbers import AXIS_FORMATS, plain, ticks

WIDTH, HEIGHT = 1000, 400
"""Units of the drawing."""

MAX_POINTS = 600
"""Maximum number of drawn points of a line."""

Point = tuple[float, float]
Tick = tuple[float, str]
"""Relative position and text."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart.

    Attributes:
        look: CSS classes.
        is_smooth: drawn twice: unsmoothed and faint, and smoothed by the slider of the page.
    """

    label: str
    points: Sequence[Point]
    look: str = "main"
    dots: bool = False
    is_smooth: bool = False


@dataclass(frozen=True, slots=True)
class Level:
    """A value to compare with: a horizontal line."""

    label: str
    value: float
    look: str


@dataclass(frozen=True)
class Chart:
    """Curves with axes, and their positions in a template.

    Attributes:
        name: part of element ids, unique on a page.
        span: of the horizontal axis; points outside widen it.
        marks: steps to mark with a numbered line, such as reshards.
        shown: format of the vertical axis, one of `AXIS_FORMATS`.
    """

    name: str
    title: str
    x_label: str
    curves: Sequence[Curve]
    span: Point
    levels: Sequence[Level] = ()
    marks: Sequence[float] = ()
    from_zero: bool = False
    shown: str = "plain"

    @cached_property
    def edges(self) -> tuple[float, float, float, float]:
        """Values at the left, right, lower and upper edge; page.js converts positions to values with them."""
        xs = [x for curve in self.curves for x, _ in curve.points]
        ys = [y for curve in self.curves for _, y in curve.points] + [level.value for level in self.levels]
        left, right = min(*self.span, *xs), max(*self.span, *xs)
        low, high = min(0.0, *ys) if self.from_zero else min(ys), max(ys)
        if high - low < 1e-9 * max(abs(high), 1e-9):  # a straight line
            low, high = (0.0, 2 * high) if high > 0 else (low - 1, high + 1)
        margin = 0.06 * (high - low)
        low, high = low if self.from_zero and low == 0 else low - margin, high + margin
        return left, right if right > left else left + 1, low, high

    def x(self, value: float) -> float:
        left, right, _, _ = self.edges
        return (value - left) / (right - left)

    def y(self, value: float) -> float:
        _, _, low, high = self.edges
        return 1 - (value - low) / (high - low)

    @cached_property
    def lines(self) -> list[Curve]:
        """The curves to draw: thinned, in units of the drawing."""
        lines = []
        for curve in self.curves:
            few = thinned(curve.points)
            if curve.is_smooth and len(few) >= 3:
                lines.append(Curve("", self._placed(few), f"{curve.look} faint"))
                lines.append(Curve(curve.label, self._placed(_means(curve.points)), f"{curve.look} smooth"))
            elif few:
                lines.append(Curve(curve.label, self._placed(few), curve.look, curve.dots or len(few) == 1))
        return lines

    def _placed(self, points: Sequence[Point]) -> list[Point]:
        return [(WIDTH * self.x(x), HEIGHT * self.y(y)) for x, y in points]

    @property
    def legend(self) -> list[tuple[str, str]]:
        """CSS classes and text of each entry."""
        shown = AXIS_FORMATS[self.shown]
        curves = [(f"curve {line.look}", line.label) for line in self.lines if line.label]
        return curves + [(f"level {level.look}", f"{level.label} {shown(level.value)}") for level in self.levels]

    @property
    def ys(self) -> list[Tick]:
        _, _, low, high = self.edges
        return [(self.y(y), AXIS_FORMATS[self.shown](y)) for y in ticks(low, high, 5)]

    @property
    def xs(self) -> list[Tick]:
        left, right, _, _ = self.edges
        whole = self.x_label == "step"
        return [(self.x(x), plain(x)) for x in ticks(left, right, 5) if not whole or x == int(x)]

    @property
    def description(self) -> str:
        """A text description for screen readers."""
        shown = AXIS_FORMATS[self.shown]
        ends = [(curve.label, curve.points[0], curve.points[-1]) for curve in self.curves if curve.points]
        texts = [
            f"{label}: {shown(a)} at {plain(first)}, {shown(b)} at {plain(last)} ({self.x_label})"
            for label, (first, a), (last, b) in ends
        ]
        return "; ".join([*texts, *(f"{level.label}: {shown(level.value)}" for level in self.levels)])


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Return about `MAX_POINTS` points: the lowest and the highest of each neighbourhood, to keep peaks."""
    if len(points) <= MAX_POINTS:
        return points
    result: list[Point] = []
    for near in _neighbourhoods(points, MAX_POINTS // 2):
        result += sorted({min(near, key=lambda point: point[1]), max(near, key=lambda point: point[1])})
    return result


def _means(points: Sequence[Point]) -> Sequence[Point]:
    if len(points) <= MAX_POINTS:
        return points
    return [(near[-1][0], math.fsum(y for _, y in near) / len(near)) for near in _neighbourhoods(points, MAX_POINTS)]


def _neighbourhoods(points: Sequence[Point], count: int) -> Iterator[Sequence[Point]]:
    size = math.ceil(len(points) / count)
    return (points[start : start + size] for start in range(0, len(points), size))
