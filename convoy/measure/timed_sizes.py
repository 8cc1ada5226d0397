"""Chooses the sizes to time: for each layer a grid that fits the time budget, then the exact sizes in the best plans.

A grid reaches from one sample to the global batch, so it is coarse if time is short.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from convoy.errors import PlanError
from convoy.measure.timing import ROUNDS, SLICE_S
from convoy.model.graph import Graph, Layer
from convoy.plan.device_program import LocalSize, local_size, sizes_in_chunks, whole_size
from convoy.plan.lower import lower
from convoy.plan.presets import PLANS
from convoy.plan.steps import ComputeStep, StepList
from convoy.plan.strategy import cuts, tile_cuts
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.planner import candidates
from convoy.planner.request import PlanRequest
from convoy.simulate.costs import Costs
from convoy.simulate.table import Measurement

DIVISORS = (16, 8, 4, 2, 1)
ENDS_SLICES = 175
"""Slices allowed for the ends of each axis, even beyond the budget: seven sizes of short calls, with a margin of 2.5."""

POINT_LIMIT_S = 1.5
"""A size that would take longer is not timed; its time is extrapolated from smaller ones (`convoy.simulate.compute`)."""

CANDIDATES = 3  # sizes of this many best plans are timed, because new times may change their order

LARGE_BYTES, LEAST_ROWS = 64 << 20, 8
"""Of an image with more bytes, in and out of a layer, only some rows are timed, because all of them may fit in no device's
memory. But never fewer rows than these."""

LEAST_FRACTION = 0.01
"""A plan's size is timed only if the layer takes more than this fraction of the device's compute time."""

_Number = TypeVar("_Number", int, float)

Expected = Callable[[LocalSize], float]
"""A function that returns the expected seconds of a size."""


@dataclass(frozen=True, slots=True)
class Axes:
    """The timed sizes of one layer: samples x outputs (with all inputs), and samples x inputs (with all outputs).

    Samples below 1 are tiles of images: their times are not proportional, because small tensors stay in caches.
    """

    samples: tuple[float, ...]
    outputs: tuple[int, ...]
    inputs: tuple[int, ...] = ()

    def sizes(self, whole: LocalSize) -> list[LocalSize]:
        """Return the sizes, small ones first."""
        rows = [replace(whole, outputs=o).with_images(s) for s in self.samples for o in self.outputs]
        columns = [
            replace(whole, inputs=i).with_images(s) for s in self.samples for i in self.inputs if i < whole.inputs
        ]
        return sorted([*rows, *columns], key=lambda size: size.images * size.outputs * size.inputs)


def full_axes(graph: Graph, layer: Layer, batch: int) -> Axes:
    """Return all sizes worth timing: a sixteenth, an eighth, a quarter, a half and the whole of each axis.

    Fractions of one image are parts of its rows.
    """
    if not layer.batched:
        return Axes((1,), (whole_size(layer, 1).outputs,))
    whole = whole_size(layer, batch)
    unit = granule(graph, layer)
    # One sample may be too few for statistics, and for Python code that halves the batch.
    samples: tuple[float, ...] = _fractions(batch, 2 if layer.statistics or layer.kind == "opaque" else 1)
    _, least, most = timed_rows(graph, layer)
    tiles = (batch / divisor for divisor in DIVISORS if least <= batch / divisor < 1)
    samples = tuple(n for n in sorted({*samples, *tiles}) if n <= most) or (most,)
    if unit is None:
        return Axes(samples, (whole.outputs,))
    outputs = tuple(unit * n for n in _fractions(whole.outputs // unit))
    if layer.weighted:
        return Axes(samples, outputs, _fractions(whole.inputs) if layer.sums_channels else ())
    # Without weights the time of whole images is nearly proportional to the entries, so fewer sizes suffice.
    return Axes(samples if samples[0] < 1 else _every_second(samples), _every_second(outputs))


def granule(graph: Graph, layer: Layer) -> int | None:
    """Return the unit in which plans can split a layer's outputs; None if no plan splits them."""
    if not layer.batched or not layer.shape or layer.shared:
        return None
    cut = next((cut for cut in cuts(graph, layer) if cut.axis == layer.feature_axis), None)
    return None if cut is None else whole_size(layer, 1).outputs // cut.parts


def timed_rows(graph: Graph, layer: Layer) -> tuple[int, float, float]:
    """Return the rows of an image that a layer reads, and the least and the most images to time; 0 rows: only whole images."""
    sources = [graph[name] for name in layer.inputs]
    shapes = [source.shape for source in sources if source.batched]
    if len({shape[1:] for shape in shapes}) != 1 or any(source.several for source in sources) or len(shapes[0]) < 2:
        return 0, 1.0, math.inf
    # Not the axis of the outputs, which have sizes of their own.
    cuts_of_tiles = (cut for cut in tile_cuts(graph, layer) if cut.axis != layer.feature_axis)
    by_rows = (cut.parts == shapes[0][1] for cut in cuts_of_tiles if {2} <= {*cut.inputs} <= {2, None})
    if not (layer.windows[0].kind not in ("nearest", "linear", "unshuffle") if layer.windows else any(by_rows)):
        return 0, 1.0, math.inf
    rows, image_bytes = shapes[0][1], 4 * sum(map(math.prod, (*shapes, layer.shape)))
    reach = [(window.kernel - 1) * window.dilation + 1 for window in layer.windows[:1]]
    least = min(1.0, max([LEAST_ROWS, *reach]) / rows)
    return rows, least, math.inf if image_bytes <= LARGE_BYTES else max(least, LARGE_BYTES / image_bytes)


def _fractions(whole: int, least: int = 1) -> tuple[int, ...]:
    return tuple(sorted({min(whole, max(least, whole // divisor)) for divisor in DIVISORS}))


def _every_second(axis: Sequence[_Number]) -> tuple[_Number, ...]:
    """Return every second size, always including the first and the last."""
    return tuple(sorted(set(axis[::-1][::2]) | set(axis[:1])))


def _ends(axis: Sequence[_Number]) -> tuple[_Number, ...]:
    return tuple(sorted(set(axis[:1]) | set(axis[-1:])))


def choose_axes(
    full: Axes, whole: LocalSize, expected_s: Expected, allowance_s: float, slice_s: float = SLICE_S
) -> Axes:
    """Return the axes that fit the time: prefer large sizes, then many sizes.

    Samples and channels shrink in turn, so that neither is extrapolated far. The ends of short axes are always timed: a
    single small size is mostly overhead, and extrapolating from it gave eight times the true seconds.
    """
    for drop in range(len(full.samples) + len(full.outputs)):
        samples = full.samples[: max(1, len(full.samples) - (drop + 1) // 2)]
        outputs = full.outputs[: max(1, len(full.outputs) - drop // 2)]
        # Reduce inputs by the same factor as outputs, so that both largest points compute the same amount.
        most = whole.inputs * outputs[-1] / whole.outputs
        inputs = tuple(i for i in full.inputs if i <= most) or full.inputs[:1]
        if expected_s(replace(whole, outputs=outputs[-1]).with_images(samples[-1])) > POINT_LIMIT_S:
            continue
        for thin in (tuple, _every_second, _ends):
            axes = Axes(thin(samples), thin(outputs), _ends(inputs) if thin is _ends else _every_second(inputs))
            least_s = (ENDS_SLICES if thin is _ends else 7 * 2 * ROUNDS) * slice_s
            if sum(timing_s(expected_s(size), slice_s) for size in axes.sizes(whole)) <= max(allowance_s, least_s):
                return axes
    return Axes(full.samples[:1], full.outputs[:1])


def timing_s(seconds: float, slice_s: float) -> float:
    """Return about how many seconds it takes to time a call that runs for `seconds`."""
    return max(2 * ROUNDS * slice_s, 2.5 * seconds)


def first_allowance_s(graph: Graph, names: Sequence[str], budget_s: float) -> float:
    """Return the seconds of the budget for the first of these layers, by its number of sizes and its FLOP."""
    total_flop = sum(graph[name].flop for name in names) or 1
    weights = [(6.0 if graph[name].weighted else 1.0) + 30 * graph[name].flop / total_flop for name in names]
    return budget_s * weights[0] / sum(weights)


PlanSize = tuple[str, tuple[int, int, int], float]
"""A layer, its samples, outputs and inputs on one device of a plan, and its approximate forward + backward seconds."""


def sizes_of_plans(measured: Measurement, graph: Graph, batch: int, alike: Mapping[str, str]) -> list[list[PlanSize]]:
    """For each device, return the untimed sizes of the named and the best plans, longest first.

    Args:
        measured: the times of the grids.
        alike: for each layer, the equal layer that is timed instead.
    """
    costs = measured.costs(graph)
    known = {(p.device, p.layer, (p.samples, p.outputs, p.inputs)) for p in measured.layer}
    request = PlanRequest(graph, batch, FleetKnowledge(measured=measured, given=costs))
    plans = [request.named(name) for name in PLANS]
    with suppress(PlanError):  # no plan fits the memory; the planner reports it
        # By formula: simulations take seconds on eight devices, and change shares only a little.
        plans += [each.plan for each in candidates(request, simulated=False)[:CANDIDATES]]
    names = [device.name for device in measured.fleet.devices]
    found: list[dict[tuple[str, tuple[int, int, int]], float]] = [{} for _ in names]
    for plan in plans:
        steps = lower(plan, graph)
        for device, name in enumerate(names):
            sizes = _sizes(steps, graph, costs, device, alike)
            least_s = LEAST_FRACTION * sum(seconds for *_, seconds in sizes)
            for layer, size, seconds in sizes:
                if seconds > least_s and (name, layer, size) not in known:
                    found[device].setdefault((layer, size), seconds)
    return [sorted(((*key, s) for key, s in rows.items()), key=lambda row: -row[2]) for rows in found]


def _sizes(steps: StepList, graph: Graph, costs: Costs, device: int, alike: Mapping[str, str]) -> list[PlanSize]:
    found: list[PlanSize] = []
    for step in steps.phase("forward"):
        if not isinstance(step, ComputeStep) or step.layer not in alike:
            continue
        layer = graph[step.layer]
        whole = local_size(step, layer, device)
        *_, most = timed_rows(graph, layer)  # below 1: a whole image may fit in no device's memory
        # Shared statistics depend on samples only, and the grid interpolates those, and tiles.
        if whole is None or not whole.samples or whole.shares_statistics or whole.tile < 1.0 or most < 1.0:
            continue
        unit = granule(graph, layer)
        if whole.outputs < whole_size(layer, 1).outputs and (unit is None or whole.outputs % unit):
            continue  # split along another axis, which is proportional
        for size in {whole, *sizes_in_chunks(whole, step.chunks)}:
            seconds = sum(costs.times.seconds(device, layer, phase, size) for phase in ("forward", "backward"))
            found.append((alike[step.layer], (size.samples, size.outputs, size.inputs), seconds))
    return found
