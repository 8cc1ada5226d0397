"""What each device does in a step, written for the replay: the order of the list, the seconds of its sizes, what it awaits.

As in the executor a move begins where it stands in the list and is awaited by the first step that names it in `after`;
gradients are summed on a lane of their own; around the messages, tensors are cut, copied and added.
"""

from collections.abc import Sequence
from dataclasses import replace

from convoy.cost.costs import Costs
from convoy.cost.overhead import NOTHING, Handling, copy_of, handling, kept_sums, messages
from convoy.model.graph import Graph, Parameter
from convoy.plan.fusion import runs
from convoy.plan.size import LocalSize, local_size
from convoy.plan.steps import (
    Compute,
    Exchange,
    Move,
    ReturnGradient,
    ShareStatistics,
    Step,
    StepList,
    SumGradients,
    Value,
)
from convoy.sharding.comm_dtype import sent_itemsize
from convoy.sharding.layout import Layout, box, entries
from convoy.sharding.redistribute import Round, chunks
from convoy.simulator.events import Await, Begin, Item, Key, Mark, Program, Route, Work


def programs(steps: StepList, graph: Graph, costs: Costs, *, overlap: bool = True) -> list[Program]:
    """The program of every device.

    Args:
        overlap: False: everything is awaited where it stands in the list.
    """
    routes = _Routes(steps, costs.itemsize)
    again = _summed_again(steps)
    inside = {step.id for run in runs(steps, graph) for row in (run.steps, run.back) for step in row[1:]}
    kept = _kept(steps, graph)
    return [_Writer(d, steps, graph, costs, routes, again, inside, overlap).program(kept) for d in range(steps.devices)]


class _Routes:
    """The messages of every round, by the devices that send or receive them: looked up once for all devices."""

    def __init__(self, steps: StepList, itemsize: int) -> None:
        self._of: dict[tuple[int, int], dict[int, dict[Route, int]]] = {}
        for step in steps.steps:
            if not isinstance(step, Compute):
                size = sent_itemsize(step.wire, itemsize)
                for number, transfers in enumerate(step.schedule.rounds):
                    self._of[step.id, number] = self._by_device(step.id, number, transfers, size)

    def of(self, device: int, step: int, number: int) -> dict[Route, int]:
        """Route -> bytes."""
        return self._of[step, number].get(device, {})

    @staticmethod
    def _by_device(step: int, number: int, transfers: Round, itemsize: int) -> dict[int, dict[Route, int]]:
        found: dict[int, dict[Route, int]] = {}
        for t in transfers:
            if t.sender != t.receiver and (n := entries(t.box)):
                route = (step, number, t.sender, t.receiver)
                for device in (t.sender, t.receiver):
                    sizes = found.setdefault(device, {})
                    sizes[route] = sizes.get(route, 0) + n * itemsize
        return found


class _Writer:
    """Writes the program of one device."""

    def __init__(
        self,
        device: int,
        steps: StepList,
        graph: Graph,
        costs: Costs,
        routes: _Routes,
        again: dict[int, list[Value]],
        inside: set[int],
        overlap: bool,
    ) -> None:
        self.device, self.steps, self.graph, self.costs, self.overlap = device, steps, graph, costs, overlap
        self.overhead = costs.overhead(device)
        self.routes, self.again, self.inside = routes, again, inside
        self.main: list[Item] = []
        self.sums: list[Item] = []
        self.under_way: dict[int, list[Key]] = {}  # moves and sums that nobody has awaited yet, by step
        self.landing: dict[Key, float] = {}  # what a round costs when it has arrived

    def program(self, kept: Sequence[tuple[Layout, Parameter]]) -> Program:
        for phase in ("forward", "backward"):
            for step in self.steps.phase(phase):
                self._write(step)
            self._await(list(self.under_way), len(self.steps.steps), f"end of {phase}")
        self._finish(kept)
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

    # --- computing ---------------------------------------------------------------------------------------------------

    def _compute(self, step: Compute) -> None:
        layer = self.graph[step.layer]
        size = local_size(step, layer, self.device)
        if size is None:
            return
        label = f"{step.layer} {step.phase}" + ("" if step.part == "all" else f" {step.part}")
        for number, part in enumerate(sizes_in_pieces(size, step.pieces)):
            if step.pieces > 1:
                self._await_next(step.after, step.id, label)
            else:
                self._await(step.after, step.id, label)
            seconds = self.costs.times.seconds(self.device, layer, step.phase, part, step.part)
            seconds += self._beside(step) if number == 0 else 0.0
            self.main.append(Work(step.id, label, seconds))
        self._await(step.after, step.id, label)
        if step.pieces > 1:
            joined_s = self.overhead.handling_s(copy_of(_held(step.writes, self.device)), self.costs.itemsize)
            self._work(self.main, step, joined_s, f"{label} joined")

    def _beside(self, step: Compute) -> float:
        """Python around a layer or a run of layers, and adding to a gradient what another reader gave before."""
        held = tuple(_held(value, self.device) for value in self.again.get(step.id, []))
        added = Handling(added=sum(held), made=held)
        calls_s = 0.0 if step.id in self.inside else self.overhead.layer_s / (2 if step.part == "all" else 4)
        return calls_s + self.overhead.handling_s(added, self.costs.itemsize)

    def _finish(self, kept: Sequence[tuple[Layout, Parameter]]) -> None:
        boxes = [box(layout, self.device, parameter.shape) for layout, parameter in kept]
        held = [entries(b) for b in boxes if b is not None]
        own = sum((kept_sums(s, self.device) for s in self.steps.steps if isinstance(s, SumGradients)), NOTHING)
        # Bytes become floats, which are shifted and scaled where they lie: about as much memory traffic as two copies.
        loaded = Handling(copied=2 * sum(_held(value, self.device) for value in self.steps.inputs))
        rest_s = self.overhead.step_s + self.overhead.handling_s(own + loaded, self.costs.itemsize)
        update_s = sum(held) * self.costs.update_s(self.device) + len(held) * self.overhead.update_s_per_tensor
        last = len(self.steps.steps)
        for seconds, label in ((update_s, "optimizer"), (rest_s, "batch and loss")):
            if seconds:
                self.main.append(Work(last, label, seconds))

    def _work(self, lane: list[Item], step: Step, seconds: float, label: str) -> None:
        if seconds:
            lane.append(Work(step.id, label, seconds))

    # --- exchanging --------------------------------------------------------------------------------------------------

    def _exchange(self, step: Exchange, *, blocking: bool) -> None:
        if self._takes_part(step):
            self._await(step.after, step.id, _label(step))
        for number, (before_s, after_s) in enumerate(self._around(step)):
            self._work(self.main, step, before_s, f"{_label(step)} copies")
            key = ("round", step.id, number)
            if sizes := self.routes.of(self.device, step.id, number):
                self.main.append(Begin(step.id, number, _label(step), sizes))
                self.landing[key] = after_s
                if blocking:
                    self._land([key], step.id, _label(step))
                else:
                    self.under_way.setdefault(step.id, []).append(key)
            else:
                self._work(self.main, step, after_s, f"{_label(step)} copies")

    def _sum(self, step: SumGradients) -> None:
        """The main lane marks that the gradients are there; the other lane waits for that, and works off the rounds."""
        if self.device not in step.devices:
            return
        ready, summed = ("ready", step.id, 0), ("summed", step.id, 0)
        around = self._around(step)
        label = _label(step)
        self._work(self.main, step, around[0][0] if around else 0.0, f"{label} copies")
        self.main.append(Mark(ready))
        self.sums.append(Await(step.id, label, frozenset([ready])))
        for number, (before_s, _) in enumerate(around):
            if number >= step.schedule.window:
                self._add_round(step, number - step.schedule.window, around)
            self._work(self.sums, step, before_s if number else 0.0, f"{label} calls")
            if sizes := self.routes.of(self.device, step.id, number):
                self.sums.append(Begin(step.id, number, label, sizes))
        for number in range(max(0, len(around) - step.schedule.window), len(around)):
            self._add_round(step, number, around)
        self.sums.append(Mark(summed))
        self.under_way[step.id] = [summed]

    def _add_round(self, step: SumGradients, number: int, around: Sequence[tuple[float, float]]) -> None:
        """A round of a sum has arrived, and is added."""
        if self.routes.of(self.device, step.id, number):
            self.sums.append(Await(step.id, _label(step), frozenset([("round", step.id, number)])))
        self._work(self.sums, step, around[number][1], f"{_label(step)} additions")

    def _around(self, step: Exchange) -> list[tuple[float, float]]:
        """Seconds of the processor before and after the messages of each round."""
        if not self.costs.overheads:  # then thousands of devices can be replayed: none looks at all transfers
            return [(0.0, 0.0)] * len(step.schedule.rounds)
        rounds = []
        counts = messages(step.schedule, self.device)
        for count, (before, after) in zip(counts, handling(step, self.device), strict=True):
            copies_s = [self.overhead.handling_s(each, self.costs.itemsize) for each in (before, after)]
            rounds.append((self.overhead.calls_s(count) + copies_s[0], copies_s[1]))
        return rounds

    def _takes_part(self, step: Exchange) -> bool:
        return any(self.device in (t.sender, t.receiver) for r in step.schedule.rounds for t in r)

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _await(self, steps: Sequence[int], at: int, label: str) -> None:
        self._land([key for step in steps for key in self.under_way.pop(step, [])], at, label)

    def _await_next(self, steps: Sequence[int], at: int, label: str) -> None:
        """The next piece of each move."""
        self._land([self.under_way[step].pop(0) for step in steps if self.under_way.get(step)], at, label)

    def _land(self, keys: Sequence[Key], at: int, label: str) -> None:
        if keys:
            self.main.append(Await(at, label, frozenset(keys)))
            copies_s = sum(self.landing.pop(key, 0.0) for key in keys)
            if copies_s:
                self.main.append(Work(at, f"{label} copies", copies_s))


def _label(step: Step) -> str:
    return f"{type(step).__name__} {step.id}"


def sizes_in_pieces(size: LocalSize, pieces: int) -> list[LocalSize]:
    """What a device computes of a layer at a time."""
    if pieces == 1:
        return [size]
    return [replace(size, samples=stop - start) for start, stop in chunks(size.samples, pieces)]


def _held(value: Value, device: int) -> int:
    """Entries of a value on a device."""
    here = box(value.layout, device, value.shape)
    return 0 if here is None else entries(here)


def _summed_again(steps: StepList) -> dict[int, list[Value]]:
    """For each backward computation, the values whose gradient another reader gave before: it is added to."""
    found: dict[int, list[Value]] = {}
    reached: set[str] = set()
    for step in steps.phase("backward"):
        match step:
            case Move() | ReturnGradient():
                reached.add(step.writes.key)
            case Compute() if step.part != "weight":
                wanted = [value for value, wants in zip(step.reads, step.wants, strict=True) if wants]
                found[step.id] = [value for value in wanted if value.key in reached]
                reached.update(value.key for value in wanted)
    return found


def _kept(steps: StepList, graph: Graph) -> list[tuple[Layout, Parameter]]:
    """Trainable parameters, and how they lie."""
    kept = {
        parameter.key: (step.parameters[key], parameter)
        for step in steps.phase("forward")
        if isinstance(step, Compute)
        for key, parameter in graph[step.layer].parameters.items()
        if parameter.trainable
    }
    return list(kept.values())
