"""Runs: layers that one device computes alone, one after another, in forward and backward.

Nothing is sent, received, shared or summed between them, and nothing of theirs has to leave early. So the executor hands them
to autograd as one graph, as plain PyTorch would, and a device pays once what Convoy takes for a layer. A device that trains
alone has one run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from convoy.model.graph import Graph
from convoy.plan.steps import Compute, Move, ShareStatistics, Step, StepList
from convoy.sharding.layout import Layout, holders


@dataclass(frozen=True, slots=True)
class Run:
    """Layers of one device.

    Attributes:
        steps: in forward, in order; two at least.
        back: in backward, in order: the steps of those of the layers that have a gradient.
        reads: keys of the values that come from outside, and whether each has a gradient.
        writes: keys of the values that somebody else reads.
        forgets: keys of the run's own values that nobody reads after each step.
    """

    steps: tuple[Compute, ...]
    back: tuple[Compute, ...]
    reads: Mapping[str, bool]
    writes: tuple[str, ...]
    forgets: tuple[tuple[str, ...], ...]

    @property
    def device(self) -> int:
        (device,) = holders(self.steps[0].writes.layout)
        return device


def runs(steps: StepList, graph: Graph) -> tuple[Run, ...]:
    """All runs of a list, in its order."""
    backward = steps.phase("backward")
    place = {step.layer: index for index, step in enumerate(backward) if isinstance(step, Compute)}
    readers = _readers(steps)
    found = [_run(row, backward, place, readers) for row in _rows(steps.phase("forward"), backward, place)]
    return tuple(run for run in found if not _cuts_apart(run, graph))


def _rows(
    forward: tuple[Step, ...], backward: tuple[Step, ...], place: Mapping[str, int]
) -> Iterator[tuple[Compute, ...]]:
    """As many as possible of the steps that follow each other, on one device, in forward and in backward."""
    row: list[Compute] = []
    for step in forward:
        own = step if isinstance(step, Compute) and _is_alone(step, backward, place) else None
        if row and (own is None or not _follows(row, own, place)):
            if len(row) > 1:
                yield tuple(row)
            row = []
        if own is not None:
            row.append(own)
    if len(row) > 1:
        yield tuple(row)


def _is_alone(step: Compute, backward: tuple[Step, ...], place: Mapping[str, int]) -> bool:
    """Whether one device computes a layer from what it holds, and its backward is one step or none."""
    device = _only(step.writes.layout)
    if step.pieces > 1 or device is None or any(device not in holders(value.layout) for value in step.reads):
        return False
    back = backward[place[step.layer]] if step.layer in place else None
    return back is None or (isinstance(back, Compute) and back.part == "all")


def _follows(row: list[Compute], step: Compute, place: Mapping[str, int]) -> bool:
    """Whether a step is on the row's device, and its backward the step before those of the row."""
    at, last = place.get(step.layer), next((place[s.layer] for s in reversed(row) if s.layer in place), None)
    adjoins = at is None or last is None or at == last - 1
    return adjoins and holders(step.writes.layout) == holders(row[-1].writes.layout)


def _only(layout: Layout) -> int | None:
    devices = holders(layout)
    return devices[0] if len(devices) == 1 else None


def _readers(steps: StepList) -> dict[str, set[int]]:
    """By value: the forward steps that read it; -1 stands for the caller."""
    readers: dict[str, set[int]] = {}
    for step in steps.phase("forward"):
        match step:
            case Compute():
                values = step.reads
            case Move() | ShareStatistics():
                values = (step.reads,)
            case _:
                values = ()
        for value in values:
            readers.setdefault(value.key, set()).add(step.id)
    for value in steps.outputs:
        readers.setdefault(value.key, set()).add(-1)
    return readers


def _run(
    row: tuple[Compute, ...], backward: tuple[Step, ...], place: Mapping[str, int], readers: Mapping[str, set[int]]
) -> Run:
    inside, made = {step.id for step in row}, {step.writes.key for step in row}
    reads: dict[str, bool] = {}
    last: dict[str, int] = {}
    for step in row:
        last[step.writes.key] = step.id
        for value, wanted in zip(step.reads, step.wants, strict=True):
            if value.key in made:
                last[value.key] = step.id
            else:
                reads[value.key] = reads.get(value.key, False) or wanted
    writes = tuple(step.writes.key for step in row if readers.get(step.writes.key, set()) - inside)
    forgets = tuple(tuple(k for k, at in last.items() if at == step.id and k not in writes) for step in row)
    back = [backward[place[step.layer]] for step in reversed(row) if step.layer in place]
    return Run(row, tuple(b for b in back if isinstance(b, Compute)), reads, writes, forgets)


def _cuts_apart(run: Run, graph: Graph) -> bool:
    """Whether a layer with several outputs is in the run and one that picks from it is not, or the other way round."""
    inside = {step.layer for step in run.steps}
    picks = (layer for layer in graph.layers.values() if layer.kind == "pick")
    return any((pick.name in inside) != (pick.inputs[0] in inside) for pick in picks)
