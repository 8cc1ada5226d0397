"""Prices device programs: from operations to the seconds and bytes that the simulator plays.

Computations take the seconds of their sizes. Operations around messages take those of their copies, additions and calls, as
`simulate/overhead.py` has them; what follows each other without a message is one piece of work.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from convoy.layout.comm_dtype import narrow_itemsize
from convoy.layout.layout import Layout, held_entries, holds
from convoy.model.graph import Graph, Parameter
from convoy.plan.compile import compile_all
from convoy.plan.device_program import (
    Compute,
    DeviceProgram,
    Fused,
    Operation,
    Receive,
    Send,
    Signal,
    Unpack,
    Wait,
)
from convoy.plan.size import LocalSize, local_size, sizes_in_chunks
from convoy.plan.steps import Compute as ComputeStep
from convoy.plan.steps import StepList
from convoy.simulate.costs import Costs
from convoy.simulate.events import Await, Begin, Item, Mark, Program, Route, Work
from convoy.simulate.overhead import NOTHING, Handling, handling_of

_MESSAGES = (Send, Receive)
_UNHANDLED = (Compute, Fused, Wait, Signal, *_MESSAGES)
"""Of these, copies and additions are not asked. A tuple is made once, `Send | Receive` in every question: a planner asks a
hundred thousand times."""

LOSS = "loss"
"""The label of computing it."""

LOSS_BYTES = 16
"""Of one device's part of a loss: its sum and what it counts, in float64."""


def programs(steps: StepList, graph: Graph, costs: Costs, *, overlap: bool = True) -> list[Program]:
    """What the simulator plays for every device.

    Args:
        overlap: False: everything is awaited where it stands in the list.
    """
    labels = {step.id: f"{type(step).__name__} {step.id}" for step in steps.steps}
    kept = _kept(steps, graph)
    return [_Pricer(p, steps, graph, costs, labels).program(kept) for p in compile_all(steps, graph, overlap=overlap)]


def computing_s(steps: StepList, graph: Graph, costs: Costs) -> list[float]:
    """Of each device, the arithmetic of its layers: no step is shorter."""
    total = [0.0] * steps.devices
    for _, device, seconds in _arithmetic(steps, graph, costs):
        total[device] += seconds
    return total


def layers_s(steps: StepList, graph: Graph, costs: Costs) -> dict[str, tuple[float, int]]:
    """Of each layer the seconds of forward and backward together, on the device that it takes the longest, and that device."""
    total: dict[tuple[str, int], float] = {}
    for name, device, seconds in _arithmetic(steps, graph, costs):
        total[name, device] = total.get((name, device), 0.0) + seconds
    longest: dict[str, tuple[float, int]] = {}
    for (name, device), seconds in total.items():
        longest[name] = max(longest.get(name, (0.0, device)), (seconds, device))
    return longest


def _arithmetic(steps: StepList, graph: Graph, costs: Costs) -> Iterator[tuple[str, int, float]]:
    """(layer, device, seconds) of everything that is computed."""
    sizes: dict[str, list[tuple[int, LocalSize]]] = {}  # in backward they are what they were in forward
    for step in steps.steps:
        if isinstance(step, ComputeStep):
            layer = graph[step.layer]
            if step.layer not in sizes:
                rows = ((device, local_size(step, layer, device)) for device in range(steps.devices))
                sizes[step.layer] = [(device, size) for device, size in rows if size is not None]
            for device, whole in sizes[step.layer]:
                for size in sizes_in_chunks(whole, step.pieces):
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
        for place, operation in enumerate(program.sums):
            if isinstance(operation, _MESSAGES) and operation.step not in self.first_calls_s:
                self.first_calls_s[operation.step] = self.overhead.calls_s(len(_messages(program.sums, place)))

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
        """The loss of the outputs that this device has, all of the batch or its samples, and their gradient."""
        held = [held_entries(v.layout, self.device, v.shape) for v in self.steps.outputs]
        seconds = self.overhead.loss_s(held, self.costs.itemsize)
        if seconds and self.steps.phase("backward"):
            yield Work(len(self.steps.steps) + 1, LOSS, seconds)

    def _join_losses(self) -> Iterable[Item]:
        """A device's sum and count for every other one; the gradient needs those of all. See `convoy.train.loss`."""
        step, others = len(self.steps.steps) + 1, [d for d in range(self.steps.devices) if d != self.device]
        self.labels[step] = "loss of the whole batch"
        yield from self._work(step, NOTHING, self.overhead.calls_s(2 * len(others)))
        ways = [way for d in others for way in ((self.device, d), (d, self.device))]
        yield Begin(step, 0, self._label(step), {(step, 0, *way): LOSS_BYTES for way in ways})
        yield Await(step, self._label(step), frozenset({("round", step, 0)}))

    def _lane(self, operations: Sequence[Operation]) -> Iterable[Item]:
        around, around_step, landed = NOTHING, -1, False
        begun: set[int] = set()  # sums whose first calls have been counted
        place = 0
        while place < len(operations):
            operation = operations[place]
            handled = None if isinstance(operation, _UNHANDLED) else handling_of(operation)
            if handled is not None:
                around, around_step = around + handled, operation.step
                place += 1
                continue
            messages = _messages(operations, place) if isinstance(operation, _MESSAGES) else []
            calls_s = 0.0 if messages and messages[0].step in begun else self.overhead.calls_s(len(messages))
            if isinstance(operation, Signal):
                calls_s = self.first_calls_s.get(operation.step, 0.0) if operation.event[0] == "ready" else 0.0
            elif isinstance(operation, Wait) and operation.events[0][0] == "ready":
                begun.add(operation.step)
            elif messages:
                begun.discard(messages[0].step)
            step = around_step if around_step >= 0 else operation.step
            if landed:  # additions of one round, then the calls of the next
                yield from self._work(step, around)
                step, around = operation.step, NOTHING
            yield from self._work(step, around, calls_s)
            around, around_step, landed = NOTHING, -1, isinstance(operation, Wait)
            if messages:
                yield self._begin(messages)
                place += len(messages)
                continue
            yield from self._item(operation)
            place += 1
        if around_step >= 0:
            yield from self._work(around_step, around)

    def _item(self, operation: Operation) -> Iterable[Item]:
        match operation:
            case Compute():
                if operation.part not in ("statistics", "combine"):  # these are timed with the layer
                    yield self._computation(operation, called=True)
            case Fused():
                yield from self._stretch(operation)
            case Wait():
                yield Await(operation.step, self._label(operation.step), frozenset(operation.events))
            case Signal():
                yield Mark(operation.event)

    def _stretch(self, fused: Fused) -> Iterable[Item]:
        """Its layers one after another; the Python around them is paid once.

        Where an accelerator takes less than its host takes to queue them, it waits for the host: counted with the first.
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
        """A layer's seconds; with those of the Python around it, or around the stretch that begins with it."""
        label = f"{operation.layer} {operation.phase}" + ("" if operation.part == "all" else f" {operation.part}")
        layer = self.graph[operation.layer]
        part = operation.part if operation.part in ("input", "weight") else "all"
        seconds = self.costs.times.seconds(self.device, layer, operation.phase, operation.size, part)  # type: ignore[arg-type]
        if called and not self.overhead.queue_s and (operation.rows is None or operation.rows[0] == 0):
            seconds += self.overhead.layer_s / (2 if part == "all" else 4)
        return Work(operation.step, label, seconds, is_layer=True)

    def _begin(self, messages: Sequence[Send | Receive]) -> Begin:
        sizes: dict[Route, int] = {}
        step, number = messages[0].step, messages[0].number
        for m in messages:
            ends = (self.device, m.peer) if isinstance(m, Send) else (m.peer, self.device)
            size = m.size * (narrow_itemsize(self.costs.itemsize) if m.narrow else self.costs.itemsize)
            sizes[step, number, *ends] = sizes.get((step, number, *ends), 0) + size
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


def _messages(operations: Sequence[Operation], place: int) -> list[Send | Receive]:
    """The messages that begin together here."""
    found: list[Send | Receive] = []
    while place < len(operations) and isinstance(operation := operations[place], _MESSAGES):
        if found and (operation.step, operation.number) != (found[0].step, found[0].number):
            break
        found.append(operation)
        place += 1
    return found


def _kept(steps: StepList, graph: Graph) -> list[tuple[Layout, Parameter]]:
    """Trainable parameters, and how they lie."""
    kept = {
        parameter.key: (step.parameters[key], parameter)
        for step in steps.phase("forward")
        if isinstance(step, ComputeStep)
        for key, parameter in graph[step.layer].parameters.items()
        if parameter.trainable
    }
    return list(kept.values())
