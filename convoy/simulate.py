"""Replays a step list on devices and links that exist only as numbers: when each computes, sends and receives.

The replay does what the executor does: every device walks the list in order; a layer takes the seconds of its size; a move
begins where it stands in the list and is awaited by the first step that names it in `after`; gradients are summed on a lane of
their own. `replay.py` plays the programs that are written here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from convoy.cost.compute import ComputeTimes
from convoy.cost.network import Network
from convoy.cost.size import local_size
from convoy.graph import Graph
from convoy.layout import box, entries
from convoy.replay import Await, Begin, Event, Item, Key, Mark, Program, Route, Timeline, Work, play
from convoy.steps import Compute, Move, ReturnGradient, ShareStatistics, Step, StepList, SumGradients
from convoy.transfer import Round, chunks

__all__ = ["Costs", "Event", "Timeline", "simulate"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Everything a replay needs besides the steps.

    Attributes:
        times: seconds of layers.
        network: the wire.
        itemsize: bytes of one number.
        update_s_per_entry: seconds of each device's optimizer for each parameter entry it keeps.
    """

    times: ComputeTimes
    network: Network
    itemsize: int = 4
    update_s_per_entry: tuple[float, ...] = ()

    def update_s(self, device: int) -> float:
        return self.update_s_per_entry[device] if self.update_s_per_entry else 0.0


def simulate(steps: StepList, graph: Graph, costs: Costs, *, overlap: bool = True) -> Timeline:
    """Replay one training step.

    Args:
        overlap: False: as if every move and sum were awaited where it stands in the list, to see what overlap brings.
    """
    writers = [_Writer(device, steps, graph, costs, overlap) for device in range(steps.devices)]
    return play([writer.program() for writer in writers], costs.network)


class _Writer:
    """Writes the program of one device."""

    def __init__(self, device: int, steps: StepList, graph: Graph, costs: Costs, overlap: bool) -> None:
        self.device, self.steps, self.graph, self.costs, self.overlap = device, steps, graph, costs, overlap
        self.main: list[Item] = []
        self.sums: list[Item] = []
        self.under_way: dict[int, list[Key]] = {}  # moves and sums that nobody has awaited yet, by step

    def program(self) -> Program:
        for phase in ("forward", "backward"):
            for step in self.steps.phase(phase):
                self._write(step)
            self._await(list(self.under_way), len(self.steps.steps), f"end of {phase}")
        self._finish()
        return self.main, self.sums

    def _write(self, step: Step) -> None:
        match step:
            case Compute():
                self._compute(step)
            case SumGradients() if self.overlap and step.reduce != "inexact-butterfly-mixing":
                self._sum(step)
            case Move() if self.overlap and not step.schedule.in_place:
                self._exchange(step, blocking=False)
            case Move() | ReturnGradient() | ShareStatistics() | SumGradients():
                self._exchange(step, blocking=True)

    def _compute(self, step: Compute) -> None:
        layer = self.graph[step.layer]
        size = local_size(step, layer, self.device)
        if size is not None:
            label = f"{step.layer} {step.phase}" + ("" if step.part == "all" else f" {step.part}")
            for start, stop in chunks(size.samples, step.pieces):
                part = size if step.pieces == 1 else replace(size, samples=stop - start)
                if step.pieces > 1:
                    self._await_next(step.after, step.id, label)
                else:
                    self._await(step.after, step.id, label)
                seconds = self.costs.times.seconds(self.device, layer, step.phase, part, step.part)
                self.main.append(Work(step.id, label, seconds))
            self._await(step.after, step.id, label)

    def _exchange(self, step: Move | ReturnGradient | ShareStatistics | SumGradients, *, blocking: bool) -> None:
        if self._takes_part(step):
            self._await(step.after, step.id, _label(step))
        for number, transfers in enumerate(step.schedule.rounds):
            if self._begin(self.main, step, number, transfers):
                key = ("round", step.id, number)
                if blocking:
                    self.main.append(Await(step.id, _label(step), frozenset([key])))
                else:
                    self.under_way.setdefault(step.id, []).append(key)

    def _sum(self, step: SumGradients) -> None:
        """The main lane marks that the gradients are there; the other lane waits for that, and works off the rounds."""
        if self.device not in step.devices:
            return
        ready, summed = ("ready", step.id, 0), ("summed", step.id, 0)
        self.main.append(Mark(ready))
        self.sums.append(Await(step.id, _label(step), frozenset([ready])))
        for number, transfers in enumerate(step.schedule.rounds):
            if self._begin(self.sums, step, number, transfers):
                self.sums.append(Await(step.id, _label(step), frozenset([("round", step.id, number)])))
        self.sums.append(Mark(summed))
        self.under_way[step.id] = [summed]

    def _begin(self, lane: list[Item], step: Step, number: int, transfers: Round) -> bool:
        """Whether this device sends or receives in this round."""
        sizes: dict[Route, int] = {}
        for t in transfers:
            if t.sender != t.receiver and self.device in (t.sender, t.receiver) and (n := entries(t.box)):
                key = (step.id, number, t.sender, t.receiver)
                sizes[key] = sizes.get(key, 0) + n * self.costs.itemsize
        if sizes:
            lane.append(Begin(step.id, number, _label(step), sizes))
        return bool(sizes)

    def _takes_part(self, step: Move | ReturnGradient | ShareStatistics | SumGradients) -> bool:
        return any(self.device in (t.sender, t.receiver) for r in step.schedule.rounds for t in r)

    def _await(self, steps: Sequence[int], at: int, label: str) -> None:
        keys = [key for step in steps if step in self.under_way for key in self.under_way.pop(step)]
        if keys:
            self.main.append(Await(at, label, frozenset(keys)))

    def _await_next(self, steps: Sequence[int], at: int, label: str) -> None:
        """The next piece of each move."""
        keys = [self.under_way[step].pop(0) for step in steps if self.under_way.get(step)]
        if keys:
            self.main.append(Await(at, label, frozenset(keys)))

    def _finish(self) -> None:
        kept = _kept_entries(self.steps, self.graph, self.device)
        if kept and self.costs.update_s_per_entry:
            self.main.append(Work(len(self.steps.steps), "optimizer", kept * self.costs.update_s(self.device)))


def _label(step: Step) -> str:
    return f"{type(step).__name__} {step.id}"


def _kept_entries(steps: StepList, graph: Graph, device: int) -> int:
    """Entries of trainable parameters on a device."""
    layouts = {
        parameter.key: (step.parameters[key], parameter)
        for step in steps.phase("forward")
        if isinstance(step, Compute)
        for key, parameter in graph[step.layer].parameters.items()
        if parameter.trainable
    }
    boxes = [box(layout, device, parameter.shape) for layout, parameter in layouts.values()]
    return sum(entries(b) for b in boxes if b is not None)
