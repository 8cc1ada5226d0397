"""Simulates a step: when each device computes, sends and receives.

This file assigns seconds and bytes to the operations of the device programs; `events.py` plays all programs together.
A computation takes the seconds of its size. Operations around messages take the seconds of their copies, additions and calls
(`costs.py`); consecutive ones become one item.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations

from convoy.layout.comm_dtype import narrow_itemsize
from convoy.layout.layout import Layout, held_entries, holds
from convoy.model.graph import Graph, Parameter
from convoy.plan import device_program as ops
from convoy.plan.compile import compile_all
from convoy.plan.device_program import DeviceProgram, LocalSize, Operation, local_size, sizes_in_chunks
from convoy.plan.steps import ComputeStep, Phase, StepList
from convoy.simulate.compute import ComputeTimes
from convoy.simulate.costs import NOTHING, Costs, Handling, handling_of
from convoy.simulate.events import HELD_BYTES, Await, Begin, Item, Key, Mark, Program, Route, Timeline, Work, play
from convoy.simulate.memory import parameters_of

_WAITS = (ops.WaitRound, ops.TakeSum, ops.WaitSum, ops.FinishSums)
_UNHANDLED = (ops.Compute, ops.Fused, ops.ExchangeRound, ops.BeginSum, ops.EndSum, *_WAITS)
"""Operations without copies and additions. A tuple, because a planner's 100,000 calls would build `A | B` again each time."""

LOSS = "loss"
"""The label of computing the loss."""

LOSS_BYTES = 16
"""Bytes of one device's sum and count of the loss, in float64."""


def simulate(steps: StepList, graph: Graph, costs: Costs, *, overlap: bool = True) -> Timeline:
    """Simulate one training step.

    Args:
        overlap: False: all devices, senders included, wait at each move and sum, and no message starts before its receiver
            is ready. Compare both to get the gain from overlap.
    """
    return play(programs(steps, graph, costs, overlap=overlap), costs.network, HELD_BYTES if overlap else 0)


def programs(steps: StepList, graph: Graph, costs: Costs, *, overlap: bool = True) -> list[Program]:
    """Return the simulator's program for every device; `overlap` as in `simulate`."""
    labels = {step.id: f"{type(step).__name__} {step.id}" for step in steps.steps}
    kept = [(layout, parameter) for parameter, layout in parameters_of(steps, graph) if parameter.trainable]
    return [_Pricer(p, steps, graph, costs, labels).program(kept) for p in compile_all(steps, graph, overlap=overlap)]


def layers_s(steps: StepList, graph: Graph, costs: Costs) -> dict[str, tuple[float, int]]:
    """For each layer, return the slowest device's forward + backward seconds, and that device."""
    total: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for name, _, device, seconds in _arithmetic(steps, graph, costs.times):
        total[name][device] += seconds
    return {name: max((seconds, device) for device, seconds in row.items()) for name, row in total.items()}


def seconds_by_phase(steps: StepList, graph: Graph, times: ComputeTimes) -> list[dict[str, float]]:
    """For each device, return its seconds by phase and layer, with keys such as "forward conv1"."""
    rows: list[dict[str, float]] = [defaultdict(float) for _ in range(steps.devices)]
    for name, phase, device, seconds in _arithmetic(steps, graph, times):
        rows[device][f"{phase} {name}"] += seconds
    return [dict(row) for row in rows]


def _arithmetic(steps: StepList, graph: Graph, times: ComputeTimes) -> Iterator[tuple[str, Phase, int, float]]:
    """Yield (layer, phase, device, seconds) of all computations."""
    sizes: dict[str, list[tuple[int, LocalSize]]] = {}  # the same in forward and backward
    for step in steps.steps:
        if isinstance(step, ComputeStep):
            layer = graph[step.layer]
            if step.layer not in sizes:
                rows = ((device, local_size(step, layer, device)) for device in range(steps.devices))
                sizes[step.layer] = [(device, size) for device, size in rows if size is not None]
            for device, whole in sizes[step.layer]:
                for size in sizes_in_chunks(whole, step.chunks):
                    yield step.layer, step.phase, device, times.seconds(device, layer, step.phase, size, step.part)


class _Pricer:
    """A converter of one device's program to the simulator's items, which have seconds and bytes."""

    def __init__(
        self, program: DeviceProgram, steps: StepList, graph: Graph, costs: Costs, labels: dict[int, str]
    ) -> None:
        self.source, self.steps, self.graph, self.costs, self.labels = program, steps, graph, costs, labels
        self.device = program.device
        self.overhead = costs.overhead(self.device)
        # The calls of a gradient sum's first round are charged where its gradients are packed.
        self.first_calls_s: dict[int, float] = {}
        for operation in program.sums:
            if isinstance(operation, ops.ExchangeRound) and operation.step not in self.first_calls_s:
                self.first_calls_s[operation.step] = self._calls_s(operation)

    def program(self, kept: Sequence[tuple[Layout, Parameter]]) -> Program:
        main: list[Item] = []
        for phase, operations in (("forward", self.source.forward), ("backward", self.source.backward)):
            self.labels[len(self.steps.steps)] = f"end of {phase}"
            main += self._lane(operations)
            if phase == "forward":
                main += self._loss()
        return self._behind_host([*main, *self._finish(kept)]), self._behind_host(list(self._lane(self.source.sums)))

    def _behind_host(self, items: list[Item]) -> list[Item]:
        """Where an accelerator's host takes longer than the device between two waits, delay the first of these computations.

        The host runs ahead into the next step, so the computations after the last wait and before the first one are one run.
        """
        if not self.overhead.queue_s:
            return items
        runs: list[list[int]] = [[]]
        for index, item in enumerate(items):
            if isinstance(item, Await):
                runs.append([])
            elif isinstance(item, Work):
                runs[-1].append(index)
        runs[0] += runs.pop() if len(runs) > 1 else []
        for run in filter(None, runs):
            works = [item for index in run if isinstance(item := items[index], Work)]
            device_s = sum(work.seconds for work in works)
            waits_s = self.overhead.joined_s(device_s, sum(work.host_s for work in works)) - device_s
            items[run[0]] = works[0]._replace(seconds=works[0].seconds + waits_s)
        return items

    def _loss(self) -> Iterable[Item]:
        """Yield the items of the loss and its gradient; with local outputs, also the sum of the devices' losses."""
        step = len(self.steps.steps) + 1
        held = [held_entries(v.layout, self.device, v.shape) for v in self.steps.outputs]
        seconds = self.overhead.loss_s(held, self.costs.itemsize, self.steps.batch)
        if seconds and self.steps.phase("backward"):
            yield Work(step, LOSS, seconds)
        if self.steps.joins_losses:
            pairs = permutations(range(self.steps.devices), 2)
            yield from self._round(step, "loss of the global batch", pairs, LOSS_BYTES)

    def _round(self, step: int, label: str, pairs: Iterable[tuple[int, int]], size: int) -> Iterable[Item]:
        """Yield the items of a message of this size between each (sender, receiver)."""
        routes = {(step, 0, *pair): size for pair in pairs if self.device in pair}
        self.labels[step] = label
        yield from self._work(step, NOTHING, self.overhead.calls_s(len(routes)))
        yield Begin(step, 0, label, routes)
        yield self._await(step, ("round", step, 0))

    def _calls_s(self, operation: ops.ExchangeRound) -> float:
        return self.overhead.calls_s(len(operation.sends) + len(operation.receives))

    def _lane(self, operations: Sequence[Operation]) -> Iterable[Item]:
        around, around_step, waited = NOTHING, -1, False
        begun: set[int] = set()  # sums whose first calls have been counted
        for operation in operations:
            handled = None if isinstance(operation, _UNHANDLED) else handling_of(operation)
            if handled is not None:
                around, around_step = around + handled, operation.step
                continue
            calls_s = 0.0
            match operation:
                case ops.BeginSum():
                    calls_s = self.first_calls_s.get(operation.step, 0.0)
                case ops.TakeSum():
                    begun.add(operation.step)
                case ops.ExchangeRound():
                    calls_s = 0.0 if operation.step in begun else self._calls_s(operation)
                    begun.discard(operation.step)
            step = around_step if around_step >= 0 else operation.step
            if waited:  # additions of one round, then the calls of the next
                yield from self._work(step, around)
                step, around = operation.step, NOTHING
            yield from self._work(step, around, calls_s)
            around, around_step, waited = NOTHING, -1, isinstance(operation, _WAITS)
            yield from self._item(operation)
        if around_step >= 0:
            yield from self._work(around_step, around)

    def _item(self, operation: Operation) -> Iterable[Item]:
        match operation:
            case ops.Compute():
                if operation.part not in ("statistics", "combine"):  # these are timed with the layer
                    yield self._computation(operation, called=True)
            case ops.Fused():
                yield from self._segment(operation)
            case ops.ExchangeRound(step=step, number=number):
                sizes: dict[Route, int] = {}
                itemsize = self.costs.itemsize
                messages = [(self.device, m.peer, m) for m in operation.sends]
                messages += [(m.peer, self.device, m) for m in operation.receives]
                for sender, receiver, m in messages:
                    size = m.size * (narrow_itemsize(itemsize) if m.narrow else itemsize)
                    sizes[step, number, sender, receiver] = sizes.get((step, number, sender, receiver), 0) + size
                yield Begin(step, number, self.labels[step], sizes)
            case ops.BeginSum(step=step):
                yield Mark(("ready", step, 0))
            case ops.EndSum(step=step):
                yield Mark(("summed", step, 0))
            case ops.WaitRound(step=step, begun=begun, number=number):
                yield self._await(step, ("round", begun, number))
            case ops.TakeSum(step=step):
                yield self._await(step, ("ready", step, 0))
            case ops.WaitSum(step=step, sum=awaited):
                yield self._await(step, ("summed", awaited, 0))
            case ops.FinishSums(step=step, sums=sums):
                yield self._await(step, *(("summed", awaited, 0) for awaited in sums))

    def _await(self, step: int, *keys: Key) -> Await:
        return Await(step, self.labels[step], frozenset(keys))

    def _segment(self, fused: ops.Fused) -> Iterable[Item]:
        """Yield the layers of a segment. The first layer includes Python's time on a CPU."""
        called = True
        rest: list[Operation] = []
        for inner in fused.operations:
            if not isinstance(inner, ops.Compute):
                rest.append(inner)
                continue
            if rest:
                yield from self._lane(rest)
            yield self._computation(inner, called=called)
            called, rest = False, []
        yield from self._lane(rest)

    def _computation(self, operation: ops.Compute, *, called: bool) -> Work:
        """Return a layer's seconds; with `called`, including the Python time of the layer or of the segment that it begins."""
        label = f"{operation.layer} {operation.phase}" + ("" if operation.part == "all" else f" {operation.part}")
        layer = self.graph[operation.layer]
        part = operation.part if operation.part in ("input", "weight") else "all"
        seconds = self.costs.times.seconds(self.device, layer, operation.phase, operation.size, part)  # type: ignore[arg-type]
        parts, host_s = 1 if part == "all" else 2, 0.0
        if self.overhead.queue_s:
            host_s = self.overhead.queue_s / parts
        elif called and (operation.rows is None or operation.rows[0] == 0):
            host_s = self.overhead.layer_s / 2 / parts
        return self._work_of(operation.step, label, seconds, host_s)

    def _work_of(self, step: int, label: str, seconds: float, host_s: float) -> Work:
        return Work(step, label, seconds, host_s) if self.overhead.queue_s else Work(step, label, seconds + host_s)

    def _work(self, step: int, around: Handling, calls_s: float = 0.0) -> Iterable[Item]:
        seconds = 0.0 if around is NOTHING else self.overhead.handling_s(around, self.costs.itemsize)
        if seconds or calls_s:
            yield self._work_of(step, f"{self.labels[step]} copies", seconds, calls_s)

    def _finish(self, kept: Sequence[tuple[Layout, Parameter]]) -> Iterable[Item]:
        if self.steps.sums and self.overhead.live_bytes and self.steps.devices > 1:
            others = ((0, d) for d in range(1, self.steps.devices))
            yield from self._round(len(self.steps.steps) + 2, "live gradients", others, self.overhead.live_bytes)
        held = [held_entries(how, self.device, p.shape) for how, p in kept if holds(how, self.device)]
        # Gradients that are summed in one flat tensor are copied to separate tensors at the end of a step.
        copied = [o for o in self.source.backward if isinstance(o, ops.Unpack) and o.copied]
        own = sum((Handling(copied=sum(o.sizes), made=o.sizes) for o in copied), NOTHING)
        # Images become floats, normalised in place: about the memory traffic of two copies.
        loaded = Handling(copied=2 * sum(held_entries(v.layout, self.device, v.shape) for v in self.steps.inputs))
        loaded_s = self.overhead.handling_s(own + loaded, self.costs.itemsize)
        update_s = self.steps.sums * sum(held) * self.costs.update_s(self.device)
        tensors_s = self.steps.sums * len(held) * self.overhead.update_s_per_tensor
        adding = Handling(added=sum(held), made=tuple(held)) if self.steps.adds else NOTHING
        adding_s = self.overhead.handling_s(adding, self.costs.itemsize)
        for label, seconds, host_s in (
            ("gradients added", adding_s, 0.0),
            ("optimizer", update_s, tensors_s),
            ("batch and loss", loaded_s, self.overhead.step_s),
        ):
            if seconds or host_s:
                yield self._work_of(len(self.steps.steps), label, seconds, host_s)
