"""Express a step list as terms that hold for any number of equal devices.

Which computations, moves and sums a named plan makes does not depend on the number of devices, only their sizes do. So the
step list for two devices, made by the same `lower` that training runs, is read once; each step becomes a term that says
what is dealt out by what. `closed_form.py` then gives a term's seconds for arrays of device counts, batches and speeds.

One thing is not seen that way: two splits that are equal for two devices and not for more need a move that is missing here.
Among the named plans only a convolution of a few groups behind filters that do not divide by them has such a pair.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from convoy.errors import InputError
from convoy.layout.collectives import Reduce
from convoy.layout.layout import Layout, OnOne, Replicated, Split
from convoy.model.graph import Graph, Layer
from convoy.plan.device_program import whole_size
from convoy.plan.lower import lower
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.steps import ComputeStep, GatherStatistics, Move, Phase, ReturnGradient, StepList, SumGradients, Value

EVERYONE = 2**62
"""So many units that every device gets some."""


@dataclass(frozen=True, slots=True)
class ByBatch:
    """A split by samples."""


@dataclass(frozen=True, slots=True)
class ByUnits:
    """A split along channels or features, in whole `units` (filters, or groups of them)."""

    units: int


@dataclass(frozen=True, slots=True)
class AtMaster:
    """Placement on the first device, which among equal devices also has the largest share."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies on as many devices as have one of a reader's `units`. Each different reader causes a move."""

    units: tuple[int, ...]


Place = ByBatch | ByUnits | AtMaster | Copies


@dataclass(frozen=True, slots=True)
class Work:
    """A layer's arithmetic, forward or backward.

    Attributes:
        products: 2 for a whole backward, 1 for forward and for one of the two parts of backward.
        place: how its output is dealt out.
        flop: forward FLOP per sample, of the whole layer.
        entries: of the output per sample, of the whole layer.
        read: entries of its inputs per sample; all of them wherever `reads_all`, else the part that it writes.
        weights: entries of its parameters and buffers.
        statistics: a batch norm over the batch.
        batched: False for what has no batch axis.
        weighted: convolution or Linear.
    """

    layer: str
    phase: Phase
    products: int
    place: Place
    flop: int
    entries: int
    read: int
    reads_all: bool
    weights: int
    batched: bool
    weighted: bool
    statistics: bool


@dataclass(frozen=True, slots=True)
class Carry:
    """A move of one value from `source` to `target`, or of its gradient back, which takes as long.

    Attributes:
        entries: per sample; of the whole value where not `batched`.
    """

    source: Place
    target: Place
    entries: int
    batched: bool


@dataclass(frozen=True, slots=True)
class Tell:
    """Synchronised batch norm: each device with samples sends `entries` numbers to every other."""

    entries: int


@dataclass(frozen=True, slots=True)
class Total:
    """An all-reduce of `entries` gradients of copied parameters, over the devices with samples or over all."""

    entries: int
    everyone: bool
    reduce: Reduce


@dataclass(frozen=True, slots=True)
class Trained:
    """Trainable entries and their split, for the optimizer."""

    entries: int
    place: Place


Term = Work | Carry | Tell | Total


@dataclass(frozen=True, slots=True)
class Terms:
    """One training step of one plan, for any number of equal devices."""

    steps: tuple[Term, ...]
    trained: tuple[Trained, ...]


def named_terms(name: str, graph: Graph, reduce: Reduce | None = None) -> Terms:
    """Return the terms of a named plan.

    Raises:
        InputError: unknown plan or reduce.
    """
    # An even batch, so that the two devices of the pattern get equal parts.
    return terms_of(lower(named_plan(name, graph, 64, Speeds((1.0, 1.0)), reduce), graph), graph)


def terms_of(steps: StepList, graph: Graph) -> Terms:
    """Return the terms of a step list for two equal devices.

    Raises:
        InputError: another number of devices, or sums over channels, whose closed form is not known here.
    """
    if steps.devices != 2:
        raise InputError(f"a step list for {steps.devices} devices: the pattern is read from one for 2 equal devices")
    reader = _Reader(steps, graph)
    terms = [term for step in steps.steps for term in reader.terms(step)]
    return Terms(tuple(terms), tuple(reader.trained()))


class _Reader:
    def __init__(self, steps: StepList, graph: Graph) -> None:
        self.steps, self.graph = steps, graph
        self.computes = [s for s in steps.phase("forward") if isinstance(s, ComputeStep)]
        self.units = {layer.name: _units(graph, layer) for layer in graph.layers.values()}
        self.outputs = {value.key for value in steps.outputs}
        self.readers: dict[str, set[int]] = {}
        for step in self.computes:
            for value in step.reads:
                self.readers.setdefault(value.key, set()).add(self._reach(step))

    def terms(self, step: object) -> Sequence[Term]:
        match step:
            case ComputeStep():
                return [self._work(step)]
            case Move(phase="forward"):
                return [self._carry(step.reads, step.writes, step.phase)]
            case Move():
                return [self._carry(step.writes, step.reads, step.phase)]
            case GatherStatistics():
                return [Tell(step.entries)]
            case SumGradients():
                shared = any(self._owner(key).shared or self._owner(key).kind == "parameter" for key in step.keys)
                return [Total(step.shape[0], shared, step.reduce)]
            case ReturnGradient():
                return []
        raise InputError(f"{step!r} has no closed form: use one of the named plans")

    def trained(self) -> Sequence[Trained]:
        found = {}
        for step in self.computes:
            for parameter in self.graph[step.layer].trainable:
                found[parameter.key] = Trained(parameter.entries, self._place(step.writes))
        return list(found.values())

    def _work(self, step: ComputeStep) -> Work:
        layer = self.graph[step.layer]
        weights = sum(p.entries for p in layer.parameters.values())
        place = self._place(step.writes)
        products = 2 if step.phase == "backward" and step.part == "all" else 1
        return Work(
            layer.name,
            step.phase,
            products,
            place,
            layer.flop,
            math.prod(layer.shape),
            layer.input_entries,
            layer.weighted and layer.groups == 1,
            weights,
            layer.batched,
            layer.weighted,
            layer.statistics,
        )

    def _carry(self, source: Value, target: Value, phase: Phase) -> Carry:
        layer = self._layer(source)
        return Carry(self._place(source), self._place(target, phase), math.prod(layer.shape), layer.batched)

    def _place(self, value: Value, phase: Phase = "forward") -> Place:
        layout: Layout = value.layout
        match layout:
            case Split(0, _):
                return ByBatch()
            case Split():
                return ByUnits(self.units[self._layer(value).name])
            case OnOne():
                return AtMaster()
            case Replicated():
                readers = self.readers.get(value.key, set())
                # Every device has the outputs, and with them their whole gradient: nothing comes back from there.
                if not readers or (value.key in self.outputs and phase == "forward"):
                    readers = readers | {EVERYONE}
                return Copies(tuple(sorted(readers)))
        raise InputError(f"{value.key} lies as {layout}: sums over channels have no closed form here; replay the plan")

    def _reach(self, step: ComputeStep) -> int:
        """Return the largest number of devices in a step with a split output."""
        layout = step.writes.layout
        return self.units[step.layer] if isinstance(layout, Split) and layout.axis > 0 else EVERYONE

    def _layer(self, value: Value) -> Layer:
        return self.graph[value.layer]

    def _owner(self, key: str) -> Layer:
        return next(
            layer for layer in self.graph.layers.values() if any(p.key == key for p in layer.parameters.values())
        )


def _units(graph: Graph, layer: Layer) -> int:
    """Return the number of whole units of a layer's channel split: its filters or groups, or those it follows."""
    if layer.weighted:
        return layer.groups if layer.groups > 1 else layer.channels_out
    first = next((name for name in layer.inputs if graph[name].batched), None)
    if layer.kind == "input" or first is None:
        return whole_size(layer, 1).outputs
    return _units(graph, graph[first])
