"""The table of one device: seconds of every layer of a model over samples x filters, and samples x input channels."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from convoy.cost.compute import shape_s
from convoy.model.graph import Graph, Layer
from convoy.model.operation import Operation
from convoy.model.tracing import TracedModel, disable_in_place
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.size import LocalSize, whole_size
from convoy.plan.steps import Compute
from convoy.plan.strategy import One
from convoy.profile.pieces import SharedStatistics, granule, piece
from convoy.profile.timing import ROUNDS, STRETCH_S, Now, Times, device_now, time_piece
from convoy.runtime.clock import Clock

DIVISORS = (16, 8, 4, 2, 1)
POINT_LIMIT_S = 1.5
"""A size that would take longer is not timed: its time follows from the smaller ones (`convoy.cost.compute`)."""


@dataclass(frozen=True, slots=True)
class Point:
    """A size of a layer and its seconds."""

    size: LocalSize
    times: Times


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


class Bench:
    """Times the layers of one model on one device.

    Args:
        traced: the model in training mode; `model` itself, whole and left as it is.
        batch: the global batch, the largest number of samples that is timed.
        clock: its slow-down counts.
        now: reads seconds; None: this process's clock.
        stretch_s: see `time_piece`.
        precision: what the layers compute in; see `convoy.runtime.precision`.
    """

    def __init__(
        self,
        traced: TracedModel,
        model: nn.Module,
        batch: int,
        clock: Clock,
        device: torch.device,
        *,
        now: Now | None = None,
        stretch_s: float = STRETCH_S,
        precision: str = "float32",
    ) -> None:
        self.traced, self.batch, self.clock, self.stretch_s = traced, batch, clock, stretch_s
        self.model = disable_in_place(copy.deepcopy(model)).to(device)
        self.now = now or device_now(device)
        self.precision = precision
        self.wants, self.trained = _wants(traced.graph, batch)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that a step computes, in order."""
        return tuple(self.wants)

    def alike(self) -> dict[str, str]:
        """For each layer the first one that computes the same on tensors of the same shapes: it is timed for both."""
        first: dict[str, str] = {}
        return {name: first.setdefault(self._signature(name), name) for name in self.layers}

    def measure(self, name: str, allowance_s: float, point_limit_s: float = POINT_LIMIT_S) -> list[Point]:
        """Points of one layer, which fill one or two rectangles (see `Axes`).

        Args:
            allowance_s: what the layer may take, roughly; with too little, fewer and smaller sizes are timed.
            point_limit_s: sizes whose single run would take longer are left away.
        """
        layer = self.traced.graph[name]
        whole = whole_size(layer, self.batch)
        full = full_axes(self.traced.graph, layer, self.batch)
        known: dict[LocalSize, Times] = {}
        probe = Axes(full.samples[:1], full.outputs[:1]).sizes(whole)[0]
        known[probe] = self._time(layer, probe)
        guess = Guess(layer, probe, known[probe].both_s)
        middle = LocalSize(_middle(full.samples), _middle(full.outputs), whole.inputs)
        if middle != probe and guess.seconds(middle) < point_limit_s / 4:
            known[middle] = self._time(layer, middle)  # a larger one says more about the largest
            guess = Guess(layer, middle, known[middle].both_s)
        axes = choose_axes(full, whole, guess, allowance_s, point_limit_s, self.stretch_s)
        sizes = axes.sizes(whole)
        if layer.statistics and layer.kind == "batch_norm":
            sizes += [replace(whole, samples=samples, shares_statistics=True) for samples in axes.samples]
        for size in sizes:
            if size not in known:
                known[size] = self._time(layer, size)
        return [Point(size, known[size]) for size in sizes]

    def timing_s(self, seconds: float) -> float:
        """About the seconds that it takes to time what takes `seconds`."""
        return _timing_s(seconds, self.stretch_s)

    def time(self, name: str, size: LocalSize) -> Point:
        """One size of a layer, that lies beside its grid."""
        return Point(size, self._time(self.traced.graph[name], size))

    def _time(self, layer: Layer, size: LocalSize) -> Times:
        # As in training, where autograd is off around the executor and layers that need it turn it on.
        with (
            torch.no_grad(),
            piece(
                self.model, self.traced, layer, size, self.wants[layer.name], backward=layer.name in self.trained,
                precision=self.precision,
            ) as part,
        ):  # fmt: skip
            if size.shares_statistics:
                part = replace(part, run=SharedStatistics(self.model, self.traced, layer))
            return time_piece(part, self.clock, self.now, self.stretch_s)

    def _signature(self, name: str) -> str:
        layer, operation = self.traced.graph[name], self.traced.operations[name]
        if layer.kind == "opaque" or layer.several or layer.kind == "pick":
            return name
        inputs = [(self.traced.graph[i].shape, self.traced.graph[i].dtype) for i in layer.inputs]
        parameters = [(key, p.shape, p.trainable) for key, p in layer.parameters.items()]
        row = (layer.kind, layer.shape, layer.groups, layer.axis, layer.batched, layer.statistics, inputs, parameters)
        return repr((row, self.wants[name], name in self.trained, _call(self.model, operation)))


def _call(model: nn.Module, operation: Operation) -> tuple[str, ...]:
    if operation.call == "module":
        return (repr(model.get_submodule(str(operation.target))),)
    # Where a function has a name of its own; a local one would show its address, and be alike to none.
    target = getattr(operation.target, "__qualname__", operation.target)
    return (operation.call, repr(target), repr(operation.args), repr(dict(operation.kwargs)))


def _wants(graph: Graph, batch: int) -> tuple[dict[str, tuple[bool, ...]], frozenset[str]]:
    """Which inputs of each layer need a gradient, and the layers that one comes to: as a step on one device says."""
    steps = lower(Plan("measure", graph.fingerprint, 1, batch, {}, One(0)), graph).steps
    computes = [step for step in steps if isinstance(step, Compute)]
    wants = {step.layer: step.wants for step in computes if step.phase == "forward"}
    return wants, frozenset(step.layer for step in computes if step.phase == "backward")


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
        return Axes(samples, outputs, _parts(whole.inputs) if layer.groups == 1 else ())
    # Without weights the time follows the entries: a few columns show what is not in proportion.
    return Axes(_every_second(samples), _every_second(outputs))


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
    allowance_s = max(allowance_s, 7 * 2 * ROUNDS * stretch_s)
    for drop in range(len(full.samples) + len(full.outputs)):
        samples = full.samples[: max(1, len(full.samples) - (drop + 1) // 2)]
        outputs = full.outputs[: max(1, len(full.outputs) - drop // 2)]
        # As many filters fewer as input channels: either way the largest point computes the same.
        most = whole.inputs * outputs[-1] / whole.outputs
        inputs = tuple(i for i in full.inputs if i <= most) or full.inputs[:1]
        if guess.seconds(LocalSize(samples[-1], outputs[-1], whole.inputs)) > point_limit_s:
            continue
        for thin in (_every, _every_second, _ends):
            axes = Axes(thin(samples), thin(outputs), _ends(inputs) if thin is _ends else _every_second(inputs))
            if cost_s(axes, whole, guess, stretch_s) <= allowance_s:
                return axes
    return Axes(full.samples[:1], full.outputs[:1])


def cost_s(axes: Axes, whole: LocalSize, guess: Guess, stretch_s: float = STRETCH_S) -> float:
    """About the seconds that timing these sizes takes."""
    return sum(_timing_s(guess.seconds(size), stretch_s) for size in axes.sizes(whole))


def _timing_s(seconds: float, stretch_s: float) -> float:
    return max(2 * ROUNDS * stretch_s, 2.5 * seconds)


def _every(axis: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis)


def _every_second(axis: Sequence[int]) -> tuple[int, ...]:
    """From the last one back, and the first one."""
    return tuple(sorted({*axis[::-1][::2], *axis[:1]}))


def _ends(axis: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({*axis[:1], *axis[-1:]}))


def _middle(axis: Sequence[int]) -> int:
    return axis[len(axis) // 2]


def allowances(graph: Graph, names: Sequence[str], budget_s: float) -> Mapping[str, float]:
    """How the seconds of a whole table are shared out: by points to time and by FLOP."""
    total_flop = sum(graph[name].flop for name in names) or 1
    weight = {name: (6.0 if graph[name].weighted else 1.0) + 30 * graph[name].flop / total_flop for name in names}
    total = sum(weight.values())
    return {name: budget_s * each / total for name, each in weight.items()}
