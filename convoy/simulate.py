"""Replays a step list on devices and links that exist only as numbers: when each computes, sends and receives.

The replay does what the executor does: every device walks the list in order; a layer takes the seconds of its size; a
round of a move begins on a device when the step before is done, and ends when its messages have left and arrived. A message
starts when both of its ends are ready, waits the link's latency, and shares cards and processors with all others.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from convoy.cost.compute import ComputeTimes
from convoy.cost.network import Network, rates
from convoy.cost.overhead import NOTHING, Exchange, Handling, Overheads, handling, kept_sums, messages
from convoy.cost.size import local_size
from convoy.graph import Graph
from convoy.layout import box, entries
from convoy.steps import Compute, Move, ReturnGradient, Step, StepList, SumGradients, Value
from convoy.transfer import Round

Activity = Literal["compute", "send", "receive", "wait"]


@dataclass(frozen=True, slots=True)
class Event:
    """What one device did for a while.

    Attributes:
        step: id in the step list.
        peer: the other device of a message; -1 for computing and waiting.
        size_bytes: of a message.
    """

    device: int
    activity: Activity
    label: str
    start_s: float
    end_s: float
    step: int
    peer: int = -1
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """One replayed step.

    Attributes:
        step_s: from the first beginning to the last end.
        compute_s, exchange_s: of each device; exchanging includes waiting for the other side.
    """

    events: tuple[Event, ...]
    step_s: float
    compute_s: tuple[float, ...]
    exchange_s: tuple[float, ...]

    @property
    def busiest(self) -> int:
        """The device that computes longest."""
        return self.compute_s.index(max(self.compute_s))


_NO_OVERHEADS = Overheads()


@dataclass(frozen=True, slots=True)
class Costs:
    """Everything a replay needs besides the steps.

    Attributes:
        times: seconds of layers.
        network: the wire.
        itemsize: bytes of one number.
        update_s_per_entry: seconds of each device's optimizer for each parameter entry it keeps.
        overheads: what else each device's processor does; none where nothing was measured.
    """

    times: ComputeTimes
    network: Network
    itemsize: int = 4
    update_s_per_entry: tuple[float, ...] = ()
    overheads: tuple[Overheads, ...] = ()

    def update_s(self, device: int) -> float:
        return self.update_s_per_entry[device] if self.update_s_per_entry else 0.0

    def overhead(self, device: int) -> Overheads:
        return self.overheads[device] if self.overheads else _NO_OVERHEADS


def simulate(steps: StepList, graph: Graph, costs: Costs) -> Timeline:
    """Replay one training step."""
    return _Replay(_programs(steps, graph, costs), costs.network).run()


# --- programs: what each device does, in order -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Work:
    step: int
    label: str
    seconds: float


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A device's part of one round. `messages` are keys into the replay's table of messages."""

    step: int
    label: str
    messages: tuple[tuple[int, int, int, int], ...]
    """(step, round, sender, receiver)"""
    bytes_: Mapping[tuple[int, int, int, int], int]


def _programs(steps: StepList, graph: Graph, costs: Costs) -> list[list[_Work | _Exchange]]:
    """Layers and rounds as the list has them; around them, in `overhead`, what the executor does for them."""
    programs: list[list[_Work | _Exchange]] = [[] for _ in range(steps.devices)]
    overheads = [costs.overhead(device) for device in range(steps.devices)]
    reached: set[str] = set()
    for step in steps.steps:
        if isinstance(step, Compute):
            layer = graph[step.layer]
            again = _summed_again(step, reached)
            for device, program in enumerate(programs):
                size = local_size(step, layer, device)
                if size is not None:
                    seconds = costs.times.seconds(device, layer, step.phase, size)
                    added = _added(again, device)
                    seconds += overheads[device].layer_s / 2 + overheads[device].handling_s(added, costs.itemsize)
                    program.append(_Work(step.id, f"{step.layer} {step.phase}", seconds))
        else:
            if step.phase == "backward" and isinstance(step, Move | ReturnGradient):
                reached.add(step.writes.key)
            # Without overheads thousands of devices can be replayed: then no device looks at all transfers.
            active = range(steps.devices) if costs.overheads else ()
            around = [_around(step, device, overheads[device], costs.itemsize) for device in active]
            for number, transfers in enumerate(step.schedule.rounds):
                _add_work(programs, step, [rounds[number][0] for rounds in around])
                _add_round(programs, step, number, transfers, costs.itemsize)
                _add_work(programs, step, [rounds[number][1] for rounds in around])
    for device, (kept, tensors) in enumerate(_kept_entries(steps, graph)):
        last = len(steps.steps)
        update_s = kept * costs.update_s(device) + tensors * overheads[device].update_s_per_tensor
        if update_s:
            programs[device].append(_Work(last, "optimizer", update_s))
        if rest_s := _rest_s(steps, device, overheads[device], costs.itemsize):
            programs[device].append(_Work(last, "batch and loss", rest_s))
    return programs


def _summed_again(step: Compute, reached: set[str]) -> list[Value]:
    """Values whose gradient another reader gave before: backward adds to what is there. Marks those reached now."""
    if step.phase == "forward":
        return []
    wanted = [value for value, wants in zip(step.reads, step.wants, strict=True) if wants]
    again = [value for value in wanted if value.key in reached]
    reached.update(value.key for value in wanted)
    return again


def _added(values: Sequence[Value], device: int) -> Handling:
    held = tuple(_held(value, device) for value in values)
    return Handling(added=sum(held), made=held)


def _held(value: Value, device: int) -> int:
    """Entries of a value on a device."""
    here = box(value.layout, device, value.shape)
    return 0 if here is None else entries(here)


def _around(step: Exchange, device: int, overhead: Overheads, itemsize: int) -> list[tuple[float, float]]:
    """Seconds of a device's processor before and after the messages of each round of a step."""
    rounds = []
    counts = messages(step.schedule, device)
    for count, (before, after) in zip(counts, handling(step, device), strict=True):
        calls_s = overhead.round_s + (count - 1) * overhead.message_s if count else 0.0
        rounds.append((calls_s + overhead.handling_s(before, itemsize), overhead.handling_s(after, itemsize)))
    return rounds


def _add_work(programs: Sequence[list[_Work | _Exchange]], step: Step, seconds: Sequence[float]) -> None:
    for program, each_s in zip(programs, seconds, strict=False):
        if each_s:
            program.append(_Work(step.id, f"{type(step).__name__} {step.id} copies", each_s))


def _rest_s(steps: StepList, device: int, overhead: Overheads, itemsize: int) -> float:
    """What belongs to no step of the list: the batch, the loss, and memory of their own for gradients summed together."""
    own = sum((kept_sums(s, device) for s in steps.steps if isinstance(s, SumGradients)), NOTHING)
    # Bytes become floats, which are shifted and scaled where they lie: about as much memory traffic as two copies.
    loaded = Handling(copied=2 * sum(_held(value, device) for value in steps.inputs))
    return overhead.step_s + overhead.handling_s(own + loaded, itemsize)


def _kept_entries(steps: StepList, graph: Graph) -> list[tuple[int, int]]:
    """Entries of trainable parameters on each device, and in how many tensors they lie."""
    layouts = {
        parameter.key: (step.parameters[key], parameter)
        for step in steps.phase("forward")
        if isinstance(step, Compute)
        for key, parameter in graph[step.layer].parameters.items()
        if parameter.trainable
    }
    boxes = [[box(layout, d, p.shape) for layout, p in layouts.values()] for d in range(steps.devices)]
    held = [[entries(b) for b in row if b is not None] for row in boxes]
    return [(sum(row), len(row)) for row in held]


def _add_round(
    programs: Sequence[list[_Work | _Exchange]], step: Step, number: int, transfers: Round, itemsize: int
) -> None:
    sizes: dict[tuple[int, int, int, int], int] = {}
    for t in transfers:
        if t.sender != t.receiver and (n := entries(t.box)):
            key = (step.id, number, t.sender, t.receiver)
            sizes[key] = sizes.get(key, 0) + n * itemsize
    label = f"{type(step).__name__} {step.id}"
    for device, program in enumerate(programs):
        own = {key: size for key, size in sizes.items() if device in key[2:]}
        if own:
            program.append(_Exchange(step.id, label, tuple(own), own))


# --- the replay ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Message:
    size: int
    label: str
    ready: int = 0
    ready_s: float = 0.0
    left_bytes: float = 0.0
    start_s: float = 0.0


class _Replay:
    """An event queue over devices and messages. Simultaneous events are handled in a fixed order."""

    def __init__(self, programs: list[list[_Work | _Exchange]], network: Network) -> None:
        self.programs, self.network = programs, network
        count = len(programs)
        self.at = [0] * count
        self.since = [0.0] * count
        self.open: list[set[tuple[int, int, int, int]]] = [set() for _ in range(count)]
        self.messages: dict[tuple[int, int, int, int], _Message] = {}
        self.flowing: list[tuple[int, int, int, int]] = []
        self.rate: dict[tuple[int, int, int, int], float] = {}
        self.queue: list[tuple[float, int, str, tuple[int, ...]]] = []
        self.ticket = 0
        self.events: list[Event] = []
        self.compute_s, self.exchange_s = [0.0] * count, [0.0] * count
        self.now = 0.0

    def run(self) -> Timeline:
        for device in range(len(self.programs)):
            self._begin(device)
        while self.queue or self.flowing:
            self._advance(self._next_time())
            for message in [k for k in self.flowing if self.messages[k].left_bytes <= 1e-6]:
                self._arrived(message)
            while self.queue and self.queue[0][0] <= self.now + 1e-15:
                _, _, what, key = heapq.heappop(self.queue)
                if what == "work":
                    self._worked(key[0])
                else:
                    self._flow((key[0], key[1], key[2], key[3]))
        step_s = max((e.end_s for e in self.events), default=0.0)
        return Timeline(tuple(self.events), step_s, tuple(self.compute_s), tuple(self.exchange_s))

    def _push(self, time_s: float, what: str, key: tuple[int, ...]) -> None:
        self.ticket += 1
        heapq.heappush(self.queue, (time_s, self.ticket, what, key))

    def _next_time(self) -> float:
        times = [self.queue[0][0]] if self.queue else []
        times += [self.now + self.messages[k].left_bytes / self.rate[k] for k in self.flowing]
        return min(times)

    def _advance(self, time_s: float) -> None:
        for key in self.flowing:
            message = self.messages[key]
            message.left_bytes -= (time_s - self.now) * self.rate[key]
            # What takes less than a picosecond more is there: rounding must not hold the queue.
            if not message.left_bytes >= self.rate[key] * 1e-12:
                message.left_bytes = 0.0
        self.now = time_s

    def _begin(self, device: int) -> None:
        """Start the next thing on a device's program."""
        self.since[device] = self.now
        if self.at[device] == len(self.programs[device]):
            return
        match self.programs[device][self.at[device]]:
            case _Work(seconds=seconds):
                self._push(self.now + seconds, "work", (device,))
            case _Exchange() as exchange:
                self.open[device] = set(exchange.messages)
                for name in exchange.messages:
                    message = self.messages.setdefault(name, _Message(exchange.bytes_[name], exchange.label))
                    message.ready += 1
                    if message.ready == 2:
                        self._push(self.now + self.network.latency_s[name[2]][name[3]], "flow", name)

    def _worked(self, device: int) -> None:
        work = self.programs[device][self.at[device]]
        assert isinstance(work, _Work)
        self.compute_s[device] += work.seconds
        self.events.append(Event(device, "compute", work.label, self.since[device], self.now, work.step))
        self.at[device] += 1
        self._begin(device)

    def _flow(self, key: tuple[int, int, int, int]) -> None:
        message = self.messages[key]
        message.left_bytes, message.start_s = float(message.size), self.now
        self.flowing.append(key)
        self._share()

    def _share(self) -> None:
        shared = rates(self.network, [(k[2], k[3]) for k in self.flowing])
        self.rate = dict(zip(self.flowing, map(float, shared), strict=True))

    def _arrived(self, key: tuple[int, int, int, int]) -> None:
        message = self.messages.pop(key)
        self.flowing.remove(key)
        if self.flowing:
            self._share()
        step, _, sender, receiver = key
        self.events.append(
            Event(sender, "send", message.label, message.start_s, self.now, step, receiver, message.size)
        )
        self.events.append(
            Event(receiver, "receive", message.label, message.start_s, self.now, step, sender, message.size)
        )
        for device in (sender, receiver):
            self.open[device].discard(key)
            if not self.open[device]:
                self.exchange_s[device] += self.now - self.since[device]
                self.at[device] += 1
                self._begin(device)
