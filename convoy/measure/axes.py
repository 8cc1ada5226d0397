"""Which sizes of a layer are timed: a grid that fits the time there is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convoy.measure.timing import ROUNDS, STRETCH_S
from convoy.model.graph import Graph, Layer
from convoy.plan.device_program import LocalSize, whole_size
from convoy.plan.strategy import cuts
from convoy.simulate.compute import shape_s

DIVISORS = (16, 8, 4, 2, 1)
ENDS_STRETCHES = 175
"""For the ends of each axis there are so many stretches, whatever time is left: seven sizes of short calls, two and a half
times as long as they should take, since they are chosen for `ROUNDS` and have a short turn first."""

POINT_LIMIT_S = 1.5
"""A size that would take longer is not timed: its time follows from the smaller ones (`convoy.simulate.compute`)."""


@dataclass(frozen=True, slots=True)
class Axes:
    """The sizes of one layer that are timed: samples x outputs (with all inputs), samples x inputs (with all outputs)."""

    samples: tuple[int, ...]
    outputs: tuple[int, ...]
    inputs: tuple[int, ...] = ()

    def sizes(self, whole: LocalSize) -> list[LocalSize]:
        rows = [LocalSize(s, o, whole.inputs) for s in self.samples for o in self.outputs]
        columns = [LocalSize(s, whole.outputs, i) for s in self.samples for i in self.inputs if i < whole.inputs]
        return sorted([*rows, *columns], key=lambda size: size.samples * size.outputs * size.inputs)


@dataclass(frozen=True, slots=True)
class Guess:
    """About the seconds of other sizes of a layer, by one that was timed and a roofline.

    In proportion to the entries alone, a fully connected layer seemed to take sixteen times as long for 64 samples as for
    4, whose time goes into reading the weights: slow devices then timed no more than 4.
    """

    layer: Layer
    known: LocalSize
    known_s: float

    def seconds(self, size: LocalSize) -> float:
        return self.known_s * shape_s(self.layer, size) / shape_s(self.layer, self.known)


def full_axes(graph: Graph, layer: Layer, batch: int) -> Axes:
    """All sizes worth timing: a sixteenth, an eighth, a quarter, a half and the whole of each axis."""
    if not layer.batched:
        return Axes((1,), (whole_size(layer, 1).outputs,))
    whole = whole_size(layer, batch)
    unit = granule(graph, layer)
    # One sample may be too few for statistics, and for Python that halves the batch.
    least = 2 if layer.statistics or layer.kind == "opaque" else 1
    samples = _parts(batch, least)
    if unit is None:
        return Axes(samples, (whole.outputs,))
    outputs = tuple(unit * n for n in _parts(whole.outputs // unit))
    if layer.weighted:
        return Axes(samples, outputs, _parts(whole.inputs) if layer.sums_channels else ())
    # Without weights the time follows the entries: a few columns show what is not in proportion.
    return Axes(_every_second(samples), _every_second(outputs))


def granule(graph: Graph, layer: Layer) -> int | None:
    """A piece of this layer has a multiple of so many outputs; None: no plan splits that axis."""
    if not layer.batched or not layer.shape or layer.shared:
        return None
    cut = next((cut for cut in cuts(graph, layer) if cut.axis == layer.feature_axis), None)
    return None if cut is None else whole_size(layer, 1).outputs // cut.parts


def _parts(whole: int, least: int = 1) -> tuple[int, ...]:
    return tuple(sorted({min(whole, max(least, whole // divisor)) for divisor in DIVISORS}))


def choose_axes(
    full: Axes,
    whole: LocalSize,
    guess: Guess,
    allowance_s: float,
    point_limit_s: float = POINT_LIMIT_S,
    stretch_s: float = STRETCH_S,
) -> Axes:
    """The axes that fit the time; the largest sizes first, then the number of points.

    Samples and channels shrink in turn, so that neither is extrapolated far. For the ends of each axis there is always time
    where they are short: a single small size is mostly overhead, and tells nothing of larger ones.
    """
    least_s = 7 * 2 * ROUNDS * stretch_s
    for drop in range(len(full.samples) + len(full.outputs)):
        samples = full.samples[: max(1, len(full.samples) - (drop + 1) // 2)]
        outputs = full.outputs[: max(1, len(full.outputs) - drop // 2)]
        # As many filters fewer as input channels: either way the largest point computes the same.
        most = whole.inputs * outputs[-1] / whole.outputs
        inputs = tuple(i for i in full.inputs if i <= most) or full.inputs[:1]
        if guess.seconds(LocalSize(samples[-1], outputs[-1], whole.inputs)) > point_limit_s:
            continue
        for thin in (tuple, _every_second, _ends):
            axes = Axes(thin(samples), thin(outputs), _ends(inputs) if thin is _ends else _every_second(inputs))
            # Beside other programs one layer in twenty had no time left but for its smallest sizes: what was concluded from
            # them for the largest was eight times too long.
            within_s = max(allowance_s, ENDS_STRETCHES * stretch_s if thin is _ends else least_s)
            if cost_s(axes, whole, guess, stretch_s) <= within_s:
                return axes
    return Axes(full.samples[:1], full.outputs[:1])


def cost_s(axes: Axes, whole: LocalSize, guess: Guess, stretch_s: float = STRETCH_S) -> float:
    """About the seconds that timing these sizes takes."""
    return sum(timing_s(guess.seconds(size), stretch_s) for size in axes.sizes(whole))


def timing_s(seconds: float, stretch_s: float) -> float:
    """About the seconds that it takes to time what takes `seconds`."""
    return max(2 * ROUNDS * stretch_s, 2.5 * seconds)


def _every_second(axis: Sequence[int]) -> tuple[int, ...]:
    """From the last one back, and the first one."""
    return tuple(sorted({*axis[::-1][::2], *axis[:1]}))


def _ends(axis: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({*axis[:1], *axis[-1:]}))


def allowances(graph: Graph, names: Sequence[str], budget_s: float) -> Mapping[str, float]:
    """How the seconds of a whole table are shared out: by points to time and by FLOP."""
    total_flop = sum(graph[name].flop for name in names) or 1
    weight = {name: (6.0 if graph[name].weighted else 1.0) + 30 * graph[name].flop / total_flop for name in names}
    total = sum(weight.values())
    return {name: budget_s * each / total for name, each in weight.items()}
