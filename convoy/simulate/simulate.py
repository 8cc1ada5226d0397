"""Simulates a step on devices and links that are only described: when each computes, sends and receives.

This file prices the operations of the device programs in seconds and bytes; `events.py` plays all programs together.
Computations take the seconds of their sizes. Operations around messages take the seconds of their copies, additions and calls
(`overhead.py`); those with no message between them are one piece of work.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from convoy.layout.comm_dtype import narrow_itemsize
from convoy.layout.layout import Layout, held_entries, holds
from convoy.model.graph import Graph, Parameter
from convoy.plan.compile import compile_all
from convoy.plan.device_program import (
    BeginSum,
    Compute,
    DeviceProgram,
    EndSum,
    ExchangeRound,
    FinishSums,
    Fused,
    LocalSize,
    Operation,
    TakeSum,
    Unpack,
    WaitRound,
    WaitSum,
    local_size,
    sizes_in_chunks,
)
from convoy.plan.steps import ComputeStep, StepList
from convoy.simulate.costs import Costs
from convoy.simulate.events import (
    HELD_BYTES,
    Await,
    Begin,
    Event,
    Item,
    Key,
    Mark,
    Program,
    Route,
    Timeline,
    Work,
    play,
)
from convoy.simulate.overhead import NOTHING, Handling, handling_of

__all__ = ["Costs", "Event", "Timeline", "simulate"]

_WAITS = (WaitRound, TakeSum, WaitSum, FinishSums)
_UNHANDLED = (Compute, Fused, ExchangeRound, BeginSum, EndSum, *_WAITS)
"""Operations that copy and add nothing. A tuple: `A | B` would be made anew in each of a planner's 100,000 questions."""

LOSS = "loss"
"""The label of computing the loss."""

LOSS_BYTES = 16
"""One device's sum and count of the loss, in float64."""


def simulate(steps: StepList, graph: Graph, costs: Costs, *, overlap: bool = True) -> Timeline:
    """Simulate one training step.

    Args:
        overlap: False: every device waits for each move and sum where it stands in the list, its senders too, and nothing is
            sent before its receiver is ready; to see what overlap gains.
    """
    return play(programs(steps, graph, costs, overlap=overlap), costs.network, HELD_BYTES if overlap else 0)


def programs(steps: StepList, graph: Graph, costs: Costs, *, overlap: bool = True) -> list[Program]:
    """Return the simulator's program of every device; `overlap` as in `simulate`."""
    labels = {step.id: f"{type(step).__name__} {step.id}" for step in steps.steps}
    kept = _kept(steps, graph)
    return [_Pricer(p, steps, graph, costs, labels).program(kept) for p in compile_all(steps, graph, overlap=overlap)]


def computing_s(steps: StepList, graph: Graph, costs: Costs) -> list[float]:
    """Return the seconds of each device's layers. No step is shorter."""
    total = [0.0] * steps.devices
    for _, device, seconds in _arithmetic(steps, graph, costs):
        total[device] += seconds
    return total


def layers_s(steps: StepList, graph: Graph, costs: Costs) -> dict[str, tuple[float, int]]:
    """For each layer, return the slowest device's forward + backward seconds, and that device."""
    total: dict[tuple[str, int], float] = {}
    for name, device, seconds in _arithmetic(steps, graph, costs):
        total[name, device] = total.get((name, device), 0.0) + seconds
    longest: dict[str, tuple[float, int]] = {}
    for (name, device), seconds in total.items():
        longest[name] = max(longest.get(name, (0.0, device)), (seconds, device))
    return longest


def _arithmetic(steps: StepList, graph: Graph, costs: Costs) -> Iterator[tuple[str, int, float]]:
    """Yield (layer, device, seconds) of all computations."""
    sizes: dict[str, list[tuple[int, LocalSize]]] = {}  # in backward they are what they were in forward
    for step in steps.steps:
        if isinstance(step, ComputeStep):
            layer = graph[step.layer]
            if step.layer not in sizes:
                rows = ((device, local_size(step, layer, device)) for device in range(steps.devices))
                sizes[step.layer] = [(device, size) for device, size in rows if size is not None]
            for device, whole in sizes[step.layer]:
                for size in sizes_in_chunks(whole, step.chunks):
                    yield step.layer, device, costs.times.seconds(device, layer, step.phase, size, step.part)


class _Pricer:
    """Prices the program of one device."""

    def __init__(
        self, program: DeviceProgram, steps: StepList, graph: Graph, costs: Costs, labels: dict[int, str]
    ) -> None:
        self.source, self.steps, self.graph, self.costs, self.labels = program, steps, graph, costs, labels
        self.device = program.device
        self.overhead = costs.overhead(self.device)
        # The calls that begin a gradient sum count where its gradients are joined.
        self.first_calls_s: dict[int, float] = {}
        for operation in program.sums:
            if isinstance(operation, ExchangeRound) and operation.step not in self.first_calls_s:
                self.first_calls_s[operation.step] = self._calls_s(operation)

    def program(self, kept: Sequence[tuple[Layout, Parameter]]) -> Program:
        main: list[Item] = []
        for phase, operations in (("forward", self.source.forward), ("backward", self.source.backward)):
            self.labels[len(self.steps.steps)] = f"end of {phase}"
            main += self._lane(operations)
            if phase == "forward":
                main += self._loss()
            if phase == "forward" and self.steps.joins_losses:
                main += self._join_losses()
        return [*main, *self._finish(kept)], list(self._lane(self.source.sums))

    def _loss(self) -> Iterable[Item]:
        """Yield the loss of this device's outputs, the global batch's or its own, and its gradient."""
        held = [held_entries(v.layout, self.device, v.shape) for v in self.steps.outputs]
        seconds = self.overhead.loss_s(held, self.costs.itemsize)
        if seconds and self.steps.phase("backward"):
            yield Work(len(self.steps.steps) + 1, LOSS, seconds)

    def _join_losses(self) -> Iterable[Item]:
        """Yield the exchange of loss sums and counts: the gradient needs those of all. See `convoy.train.loss`."""
        step, others = len(self.steps.steps) + 1, [d for d in range(self.steps.devices) if d != self.device]
        self.labels[step] = "loss of the whole batch"
        yield from self._work(step, NOTHING, self.overhead.calls_s(2 * len(others)))
        ways = [way for d in others for way in ((self.device, d), (d, self.device))]
        yield Begin(step, 0, self._label(step), {(step, 0, *way): LOSS_BYTES for way in ways})
        yield self._await(step, ("round", step, 0))

    def _calls_s(self, operation: ExchangeRound) -> float:
        return self.overhead.calls_s(len(operation.sends) + len(operation.receives))

    def _lane(self, operations: Sequence[Operation]) -> Iterable[Item]:
        around, around_step, landed = NOTHING, -1, False
        begun: set[int] = set()  # sums whose first calls have been counted
        for operation in operations:
            handled = None if isinstance(operation, _UNHANDLED) else handling_of(operation)
            if handled is not None:
                around, around_step = around + handled, operation.step
                continue
            calls_s = 0.0
            match operation:
                case BeginSum():
                    calls_s = self.first_calls_s.get(operation.step, 0.0)
                case TakeSum():
                    begun.add(operation.step)
                case ExchangeRound():
                    calls_s = 0.0 if operation.step in begun else self._calls_s(operation)
                    begun.discard(operation.step)
            step = around_step if around_step >= 0 else operation.step
            if landed:  # additions of one round, then the calls of the next
                yield from self._work(step, around)
                step, around = operation.step, NOTHING
            yield from self._work(step, around, calls_s)
            around, around_step, landed = NOTHING, -1, isinstance(operation, _WAITS)
            yield from self._item(operation)
        if around_step >= 0:
            yield from self._work(around_step, around)

    def _item(self, operation: Operation) -> Iterable[Item]:
        match operation:
            case Compute():
                if operation.part not in ("statistics", "combine"):  # these are timed with the layer
                    yield self._computation(operation, called=True)
            case Fused():
                yield from self._segment(operation)
            case ExchangeRound():
                yield self._begin(operation)
            case BeginSum(step=step):
                yield Mark(("ready", step, 0))
            case EndSum(step=step):
                yield Mark(("summed", step, 0))
            case WaitRound(step=step, begun=begun, number=number):
                yield self._await(step, ("round", begun, number))
            case TakeSum(step=step):
                yield self._await(step, ("ready", step, 0))
            case WaitSum(step=step, sum=awaited):
                yield self._await(step, ("summed", awaited, 0))
            case FinishSums(step=step, sums=sums):
                yield self._await(step, *(("summed", awaited, 0) for awaited in sums))

    def _await(self, step: int, *keys: Key) -> Await:
        return Await(step, self._label(step), frozenset(keys))

    def _segment(self, fused: Fused) -> Iterable[Item]:
        """Yield the layers of a segment; the Python around them counts once.

        An accelerator that is faster than its host queues layers waits for the host: counted with the first layer.
        """
        called = True
        rest: list[Operation] = []
        waits_s = 0.0
        if self.overhead.queue_s:
            layers = [inner for inner in fused.operations if isinstance(inner, Compute)]
            device_s = sum(self._computation(inner, called=False).seconds for inner in layers)
            waits_s = max(0.0, len(layers) * self.overhead.queue_s - device_s)
        for inner in fused.operations:
            if not isinstance(inner, Compute):
                rest.append(inner)
                continue
            if rest:
                yield from self._lane(rest)
            work = self._computation(inner, called=called)
            yield replace(work, seconds=work.seconds + waits_s) if called else work
            called, rest = False, []
        yield from self._lane(rest)

    def _computation(self, operation: Compute, *, called: bool) -> Work:
        """Return a layer's seconds, and those of the Python around it or around the segment that begins with it."""
        label = f"{operation.layer} {operation.phase}" + ("" if operation.part == "all" else f" {operation.part}")
        layer = self.graph[operation.layer]
        part = operation.part if operation.part in ("input", "weight") else "all"
        seconds = self.costs.times.seconds(self.device, layer, operation.phase, operation.size, part)  # type: ignore[arg-type]
        if called and not self.overhead.queue_s and (operation.rows is None or operation.rows[0] == 0):
            seconds += self.overhead.layer_s / (2 if part == "all" else 4)
        return Work(operation.step, label, seconds, is_layer=True)

    def _begin(self, operation: ExchangeRound) -> Begin:
        sizes: dict[Route, int] = {}
        step, number, itemsize = operation.step, operation.number, self.costs.itemsize
        ways = [(self.device, m.peer, m) for m in operation.sends]
        ways += [(m.peer, self.device, m) for m in operation.receives]
        for sender, receiver, m in ways:
            size = m.size * (narrow_itemsize(itemsize) if m.narrow else itemsize)
            sizes[step, number, sender, receiver] = sizes.get((step, number, sender, receiver), 0) + size
        return Begin(step, number, self._label(step), sizes)

    def _work(self, step: int, around: Handling, calls_s: float = 0.0) -> Iterable[Item]:
        seconds = calls_s + (0.0 if around is NOTHING else self.overhead.handling_s(around, self.costs.itemsize))
        if seconds:
            yield Work(step, f"{self._label(step)} copies", seconds)

    def _label(self, step: int) -> str:
        return self.labels[step]

    def _finish(self, kept: Sequence[tuple[Layout, Parameter]]) -> Iterable[Item]:
        held = [held_entries(how, self.device, p.shape) for how, p in kept if holds(how, self.device)]
        # Gradients that were summed together lie in one tensor; at the end of a step each gets memory of its own.
        copied = [o for o in self.source.backward if isinstance(o, Unpack) and o.copied]
        own = sum((Handling(copied=sum(o.sizes), made=o.sizes) for o in copied), NOTHING)
        # Bytes become floats, which are shifted and scaled where they lie: about as much memory traffic as two copies.
        loaded = Handling(copied=2 * sum(held_entries(v.layout, self.device, v.shape) for v in self.steps.inputs))
        rest_s = self.overhead.step_s + self.overhead.handling_s(own + loaded, self.costs.itemsize)
        update_s = sum(held) * self.costs.update_s(self.device) + len(held) * self.overhead.update_s_per_tensor
        adding = Handling(added=sum(held), made=tuple(held)) if self.steps.adds else NOTHING
        adding_s = self.overhead.handling_s(adding, self.costs.itemsize)
        rows = (adding_s, "gradients added"), (update_s * self.steps.sums, "optimizer"), (rest_s, "batch and loss")
        for seconds, label in rows:
            if seconds:
                yield Work(len(self.steps.steps), label, seconds)


def _kept(steps: StepList, graph: Graph) -> list[tuple[Layout, Parameter]]:
    """Return the trainable parameters and their layouts."""
    kept = {
        parameter.key: (step.parameters[key], parameter)
        for step in steps.phase("forward")
        if isinstance(step, ComputeStep)
        for key, parameter in graph[step.layer].parameters.items()
        if parameter.trainable
    }
    return list(kept.values())
