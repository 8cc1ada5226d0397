"""Line charts of a page. A drawing scales to any width, its text does not: ticks have relative positions, 0 to 1."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from convoy.report.numbers import in_bytes, plain, unit_of

WIDTH, HEIGHT = 1000, 400
"""Units of the drawing."""

MAX_POINTS = 600
"""Maximum number of drawn points of a line."""

FORMATS: Mapping[str, Callable[[float], str]] = {
    "plain": plain,
    "percent": lambda part: f"{100 * part:.4g}%",
    "bytes": lambda value: in_bytes(round(value)) if round(value) else "0",
}
"""Formats of the vertical axis; page.js has the same functions."""

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


@dataclass(frozen=True)
class Chart:
    """Curves with axes, and their positions in a template.

    Attributes:
        name: part of element ids, unique on a page.
        span: first and last step of the horizontal axis; points outside widen it.
        shown: format of the vertical axis, one of `FORMATS`.
    """

    name: str
    title: str
    curves: Sequence[Curve]
    span: Point
    from_zero: bool = False
    shown: str = "plain"

    @cached_property
    def edges(self) -> tuple[float, float, float, float]:
        """Values at the left, right, lower and upper edge; page.js converts positions to values with them."""
        xs, ys = ([point[axis] for curve in self.curves for point in curve.points] for axis in (0, 1))
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
            few = [(WIDTH * self.x(x), HEIGHT * self.y(y)) for x, y in thinned(curve.points)]
            if curve.is_smooth and len(few) >= 3:
                lines += [Curve("", few, f"{curve.look} faint"), Curve(curve.label, few, f"{curve.look} smooth")]
            elif few:
                lines.append(Curve(curve.label, few, curve.look, curve.dots or len(few) == 1))
        return lines

    @property
    def legend(self) -> list[tuple[str, str]]:
        """CSS classes and text of each entry."""
        return [(f"curve {line.look}", line.label) for line in self.lines if line.label]

    @property
    def ys(self) -> list[Tick]:
        _, _, low, high = self.edges
        return [(self.y(y), FORMATS[self.shown](y)) for y in ticks(low, high, 5)]

    @property
    def xs(self) -> list[Tick]:
        left, right, _, _ = self.edges
        return [(self.x(x), plain(x)) for x in ticks(left, right, 5) if x == int(x)]

    @property
    def description(self) -> str:
        """A text description for screen readers."""
        shown = FORMATS[self.shown]
        ends = [(curve.label, curve.points[0], curve.points[-1]) for curve in self.curves if curve.points]
        return "; ".join(
            f"{label}: {shown(a)} at {plain(first)}, {shown(b)} at {plain(last)}"
            for label, (first, a), (last, b) in ends
        )


def time_axis(step_s: float) -> tuple[str, list[Tick]]:
    """Return the unit of the time axis of a step, and its ticks."""
    unit, size = unit_of(step_s)
    return unit, [(at * size / step_s, plain(at, 3)) for at in ticks(0.0, step_s / size, 4)]


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round numbers from `low` to `high`: 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / count
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if (high - low) / (size * factor) <= count + 1.5)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Return about `MAX_POINTS` points: the lowest and the highest of each neighbourhood, to keep peaks."""
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(2 * len(points) / MAX_POINTS)
    near = (points[start : start + size] for start in range(0, len(points), size))
    return [end for some in near for end in sorted({min(some, key=lambda p: p[1]), max(some, key=lambda p: p[1])})]
