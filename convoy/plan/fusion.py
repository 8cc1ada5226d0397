"""Fused stretches: layers that a device computes one after another, in forward and backward, with no exchange between them.

Autograd gets such a stretch as one graph, as it would in plain PyTorch. Gradients of parameters are summed over devices
beside it, on the second lane, so a gradient sum does not end a stretch; every other exchange that the device has a part in
does, and so does a wait for one that its first layer does not wait for, and a layer whose backward is split in two so that one
gradient travels while the other is computed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from convoy.layout.layout import holds
from convoy.model.graph import Graph, Layer
from convoy.plan.steps import (
    Compute,
    GatherWeights,
    Move,
    ReturnGradient,
    ShareStatistics,
    Step,
    StepList,
    SumGradients,
    Value,
)

_BESIDE, _AWAITED = (SumGradients, ReturnGradient), (Move, GatherWeights)

SHORTEST = 2
"""Computations in a stretch: one alone gains nothing."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Layers of one device.

    Attributes:
        steps: in forward, in order.
        back: in backward, in order: the steps of those of the layers that have a gradient.
        reads: the values that come from outside, and whether each has a gradient.
        writes: keys of the values that are used outside on this device.
    """

    steps: tuple[Compute, ...]
    back: tuple[Compute, ...]
    reads: Mapping[str, bool]
    writes: tuple[str, ...]


def stretches(steps: StepList, graph: Graph, device: int, takes_part: Callable[[Step], bool]) -> tuple[Stretch, ...]:
    """All fused stretches of a device, in the order of the list.

    Args:
        takes_part: whether the device has anything to do in a step.
    """
    forward = [step for step in steps.phase("forward") if takes_part(step)]
    backward = [step for step in steps.phase("backward") if not isinstance(step, _BESIDE) and takes_part(step)]
    exchanged = {name for step in steps.steps if isinstance(step, ShareStatistics) for name in step.layers}
    exchanged |= {layer.name for layer in graph.layers.values() if layer.alone}
    places = _Backward(backward)
    readers = Counter(value.key for value in steps.outputs)
    for step in forward:
        readers.update({value.key for value in _values_read(step)})
    found = (_stretch(row, places, readers) for row in _rows(forward, places, device, exchanged))
    picks = [layer for layer in graph.layers.values() if layer.kind == "pick"]
    return tuple(each for each in found if not _cuts_apart(each, picks))


class _Backward:
    """Where each layer's steps are in a device's backward, and what each step is the first to wait for."""

    def __init__(self, backward: Sequence[Step]) -> None:
        self.steps = backward
        self.places: dict[str, list[int]] = {}
        self.waits: list[bool] = []
        moves = {step.id for step in backward if isinstance(step, _AWAITED)}
        landed: set[int] = set()
        for place, step in enumerate(backward):
            if isinstance(step, Compute):
                self.places.setdefault(step.layer, []).append(place)
            fresh = moves.intersection(step.after) - landed
            self.waits.append(bool(fresh))
            landed |= fresh


def _rows(
    forward: Sequence[Step], backward: _Backward, device: int, exchanged: set[str]
) -> Iterator[tuple[Compute, ...]]:
    row: list[Compute] = []
    first: int | None = None  # the row's first place in backward
    moves = {step.id for step in forward if isinstance(step, _AWAITED)}
    landed: set[int] = set()
    for step in forward:
        fresh = moves.intersection(step.after) - landed
        landed |= fresh
        fits = (
            isinstance(step, Compute)
            and step.pieces == 1
            and step.layer not in exchanged
            and all(holds(value.layout, device) for value in step.reads)
            # Of a backward in two parts, what the first gives travels during the second.
            and len(backward.places.get(step.layer, [])) <= 1
        )
        places = backward.places.get(step.layer, []) if isinstance(step, Compute) else []
        follows = fits and not fresh and (
            not places or first is None or (places[-1] == first - 1 and not backward.waits[first])
        )  # fmt: skip
        if row and not follows:
            if len(row) >= SHORTEST:
                yield tuple(row)
            row, first = [], None
        if fits and isinstance(step, Compute):
            row.append(step)
            first = places[0] if places else first
    if len(row) >= SHORTEST:
        yield tuple(row)


def _stretch(row: tuple[Compute, ...], backward: _Backward, readers: Counter[str]) -> Stretch:
    """The stretch of a row of layers.

    Args:
        readers: how many forward steps read each value; whoever gets the model's outputs counts as one.
    """
    made = dict.fromkeys(step.writes.key for step in row)
    reads: dict[str, bool] = {}
    inside: Counter[str] = Counter()
    for step in row:
        inside.update({value.key for value in step.reads})
        for value, wanted in zip(step.reads, step.wants, strict=True):
            if value.key not in made:
                reads[value.key] = reads.get(value.key, False) or wanted
    places = sorted(place for step in row for place in backward.places.get(step.layer, ()))
    back = tuple(each for each in (backward.steps[place] for place in places) if isinstance(each, Compute))
    used = tuple(key for key in made if readers[key] > inside[key])
    return Stretch(row, back, reads, used)


def _values_read(step: Step) -> tuple[Value, ...]:
    match step:
        case Compute():
            return step.reads
        case Move():
            return (step.reads,)
        case ShareStatistics():
            return step.reads
    return ()


def _cuts_apart(stretch: Stretch, picks: Sequence[Layer]) -> bool:
    """Whether a layer with several outputs is in the stretch and one that picks from it is not, or the other way round."""
    inside = {step.layer for step in stretch.steps} if picks else set()
    return any((pick.name in inside) != (pick.inputs[0] in inside) for pick in picks)
