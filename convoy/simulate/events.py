"""Plays the programs of all devices with an event queue, and returns a timeline.

A device has two concurrent lanes: its main program and its gradient sums. A computation occupies its lane; messages do not.
A message starts when its sender is ready, waits for the link's latency, and shares NICs with all other messages. Messages
from one device to another use one connection, one at a time. The system buffers messages: the sender continues at once if a
message fits into the send buffer, and a message may arrive before its receiver asks for it. Messages and computations share
the device's processor. A device enters an exchange late, by its jitter, unless it has just waited.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from convoy.simulate.network import SHARE, Network, rates

Activity = Literal["compute", "send", "receive", "wait"]

HELD_BYTES = 4 << 20
"""The largest message that fits into the send buffer: Linux's maximum, `net.ipv4.tcp_wmem`."""

MAIN, SUMS = 0, 1
"""The lanes of a device."""


class Event(NamedTuple):
    """An activity of one device.

    Attributes:
        step: the step's id in the step list.
        peer: the other device of a message; -1 for computing and waiting.
        size_bytes: bytes of a message.
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
    """The events and seconds of one simulated step.

    Attributes:
        step_s: seconds of the step.
        compute_s: by device, seconds of computing in its main lane, as slowed by traffic.
        exchange_s: by device, seconds that its main lane waited for messages and sums. Exchanges during computing do not count.
    """

    events: tuple[Event, ...]
    step_s: float
    compute_s: tuple[float, ...]
    exchange_s: tuple[float, ...]


# --- items of a lane -------------------------------------------------------------------------------------------------

Key = tuple[str, int, int]
"""A condition on one device: the round ("round", step, number) has finished, or a program has set this `Mark`."""

Route = tuple[int, int, int, int]
"""A message: step, round, sender, receiver."""

Pair = tuple[int, int]
"""Sender and receiver."""


class Work(NamedTuple):
    """A computation that occupies the lane for `seconds`, or longer if the processor is shared.

    Attributes:
        host_s: seconds in which an accelerator's host queues it.
    """

    step: int
    label: str
    seconds: float
    host_s: float = 0.0


class Begin(NamedTuple):
    """The start of a device's messages of one round, with their bytes. The lane continues."""

    step: int
    number: int
    label: str
    bytes_: Mapping[Route, int]


class Await(NamedTuple):
    """A wait of the lane until all these conditions hold on its device."""

    step: int
    label: str
    keys: frozenset[Key]


class Mark(NamedTuple):
    """A signal that makes a condition true on its device."""

    key: Key


Item = Work | Begin | Await | Mark
Program = tuple[list[Item], list[Item]]
"""The two lanes of a device."""


@dataclass(slots=True)
class _Lane:
    """A lane's items, and `at`, the index of the current one.

    Attributes:
        since_s: when the current item began.
        missing: the conditions that the lane waits for.
        left_s: for the current row of computations, the row's seconds left after each one, in reverse order.
    """

    device: int
    items: list[Item]
    at: int = 0
    since_s: float = 0.0
    missing: set[Key] = field(default_factory=set)
    left_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Round:
    """One device's unfinished messages of a round, and the time when the device itself is ready."""

    missing: set[Route]
    ready_s: float


@dataclass(slots=True)
class _Message:
    size: int
    label: str
    ready: int = 0
    ready_s: float = 0.0
    left_bytes: float = 0.0
    start_s: float = 0.0


class _Play:
    """The state of one simulation. Simultaneous events are handled in a fixed order."""

    def __init__(self, programs: Sequence[Program], network: Network, held_bytes: int) -> None:
        self.network, self.held_bytes = network, held_bytes
        self.lanes = [[_Lane(device, items) for items in program] for device, program in enumerate(programs)]
        self.done: list[set[Key]] = [set() for _ in programs]
        self.open: list[dict[Key, _Round]] = [{} for _ in programs]
        self.messages: dict[Route, _Message] = {}
        self.flowing: list[Route] = []
        self.connected: set[Pair] = set()  # pairs of the flowing messages
        self.queued: dict[Pair, deque[Route]] = {}  # messages that wait for an earlier one of the same pair
        self.rate: dict[Route, float] = {}
        # (messages, computing devices) -> bytes/s of each message, the fraction of each processor that they use
        self.shared: dict[tuple[tuple[Pair, ...], frozenset[int]], tuple[list[float], list[float]]] = {}
        self.works: dict[tuple[int, int], float] = {}  # (device, lane) -> seconds left of its row of computations
        self.speed: dict[tuple[int, int], float] = {}
        self.arrived: set[Route] = set()  # messages that arrived before their receivers began the round
        self.starts: list[tuple[float, int, Route]] = []
        self.late: list[tuple[float, int, Key]] = []  # rounds without missing messages, and when their device is ready
        self.ticket = 0
        self.events: list[Event] = []
        self.compute_s, self.exchange_s = [0.0] * len(programs), [0.0] * len(programs)
        self.resumed_s = [0.0] * len(programs)  # end of each device's last wait
        self.now = 0.0
        self.ready: deque[tuple[int, int]] = deque((d, lane) for d in range(len(programs)) for lane in (MAIN, SUMS))

    def run(self) -> Timeline:
        self._walk_ready()
        while self.starts or self.flowing or self.works or self.late:
            self._share()
            times = [queue[0][0] for queue in (self.starts, self.late) if queue]
            times += [self.now + self.messages[r].left_bytes / self.rate[r] for r in self.flowing]
            times += [self.now + left / self.speed[place] for place, left in self.works.items()]
            self._advance(min(times))
            for route in [r for r in self.flowing if self.messages[r].left_bytes <= 1e-6]:
                self._arrived(route)
            for device, number in [p for p, left in self.works.items() if left <= 0.0]:
                del self.works[device, number]
                self._computed(device, number, self.now)
                self.ready.append((device, number))
            while self.starts and self.starts[0][0] <= self.now + 1e-15:
                self._flow(heapq.heappop(self.starts)[2])
            while self.late and self.late[0][0] <= self.now + 1e-15:
                _, device, key = heapq.heappop(self.late)
                self._mark(device, key)
            self._walk_ready()
        end_s = max((event.end_s for event in self.events), default=0.0)
        return Timeline(tuple(self.events), end_s, tuple(self.compute_s), tuple(self.exchange_s))

    # --- time --------------------------------------------------------------------------------------------------------

    def _share(self) -> None:
        """Set the rates of messages and speeds of computations, which are valid until one of them begins or ends."""
        pairs, busy = tuple([route[2:] for route in self.flowing]), frozenset([device for device, _ in self.works])
        # Most exchanges of a step involve the same devices, so cache the rates of each set of messages.
        if (pairs, busy) not in self.shared:
            cost, use = self.network.processor_s_per_byte, [0.0] * len(self.lanes)
            room = [SHARE if device in busy else 1.0 for device in range(len(self.lanes))]
            each: list[float] = rates(self.network, pairs, room).tolist() if pairs else []
            for pair, rate in zip(pairs, each, strict=True):
                for device in pair:
                    use[device] += cost[device] * rate if cost[device] else 0.0
            self.shared[pairs, busy] = each, use
        each, use = self.shared[pairs, busy]
        self.rate = dict(zip(self.flowing, each, strict=True))
        for device, lane in self.works:
            at_once = 2 if (device, MAIN + SUMS - lane) in self.works else 1
            self.speed[device, lane] = (1.0 - use[device]) / at_once

    def _advance(self, time_s: float) -> None:
        passed_s = time_s - self.now
        # Treat less than a picosecond, or less than the clock's resolution, as done: rounding must not stall the queue.
        least_s = max(1e-12, time_s * 1e-14)
        for route in self.flowing:
            message, rate = self.messages[route], self.rate[route]
            message.left_bytes -= passed_s * rate
            if not message.left_bytes >= rate * least_s:
                message.left_bytes = 0.0
        for place, before_s in self.works.items():
            speed = self.speed[place]
            left_s = before_s - passed_s * speed
            self.works[place] = left_s = left_s if left_s > speed * least_s else 0.0
            behind_s = self.lanes[place[0]][place[1]].left_s
            while len(behind_s) > 1 and left_s <= behind_s[-1]:
                self._computed(*place, self.now + (before_s - behind_s.pop()) / speed)
        self.now = time_s

    # --- lanes -------------------------------------------------------------------------------------------------------

    def _walk_ready(self) -> None:
        """Advance every ready lane to its next item that takes time."""
        while self.ready:
            device, number = self.ready.popleft()
            lane = self.lanes[device][number]
            while lane.at < len(lane.items):
                lane.since_s = self.now
                match lane.items[lane.at]:
                    case Work():
                        lane.left_s = self._row_s(lane)
                        self.works[device, number] = lane.left_s.pop()
                        break
                    case Begin() as begin:
                        self._begin(device, number, begin)
                    case Mark(key=key):
                        self._mark(device, key)
                    case Await(keys=keys):
                        lane.missing = set(keys - self.done[device])
                        if lane.missing:
                            break
                lane.at += 1

    def _row_s(self, lane: _Lane) -> list[float]:
        """Return `_Lane.left_s`, followed by the seconds of all these computations."""
        seconds = []
        for work in itertools.islice(lane.items, lane.at, None):
            if not isinstance(work, Work):
                break
            seconds.append(work.seconds)
        return list(itertools.accumulate(reversed(seconds), initial=0.0))

    def _computed(self, device: int, number: int, at_s: float) -> None:
        lane = self.lanes[device][number]
        work = lane.items[lane.at]
        assert isinstance(work, Work)
        if number == MAIN:
            self.compute_s[device] += at_s - lane.since_s
        self.events.append(Event(device, "compute", work.label, lane.since_s, at_s, work.step))
        lane.at += 1
        lane.since_s = at_s

    def _mark(self, device: int, key: Key) -> None:
        """Record that a condition holds, and resume the lanes that have no other condition to wait for."""
        self.done[device].add(key)
        for number, lane in enumerate(self.lanes[device]):
            if key not in lane.missing:
                continue
            lane.missing.discard(key)
            if lane.missing:
                continue
            waited = lane.items[lane.at]
            assert isinstance(waited, Await)
            if number == MAIN and self.now > lane.since_s:
                self.exchange_s[device] += self.now - lane.since_s
                self.events.append(Event(device, "wait", waited.label, lane.since_s, self.now, waited.step))
                self.resumed_s[device] = self.now
            lane.at += 1
            self.ready.append((device, number))

    # --- messages ----------------------------------------------------------------------------------------------------

    def _begin(self, device: int, number: int, begin: Begin) -> None:
        key, ready_s = ("round", begin.step, begin.number), self.now + self._late_s(device, number)
        missing = {route for route in begin.bytes_ if route not in self.arrived}
        self.arrived -= begin.bytes_.keys()
        for route, size in begin.bytes_.items():
            sends = route[2] == device
            if sends and size <= self.held_bytes:
                missing.discard(route)
            if not sends and self.held_bytes:
                continue
            # The sender starts the message; without buffering, both ends must be ready.
            message = self.messages.setdefault(route, _Message(size, begin.label))
            message.ready += 1
            message.ready_s = max(message.ready_s, ready_s)
            if message.ready == (1 if self.held_bytes else 2):
                self.ticket += 1
                start_s = message.ready_s + self.network.latency_s[route[2]][route[3]]
                heapq.heappush(self.starts, (start_s, self.ticket, route))
        self.open[device][key] = _Round(missing, ready_s)
        self._finish_round(device, key)

    def _finish_round(self, device: int, key: Key) -> None:
        """Finish a round once no message is missing and the device itself is ready."""
        if self.open[device][key].missing:
            return
        ready_s = self.open[device].pop(key).ready_s
        if ready_s > self.now:
            heapq.heappush(self.late, (ready_s, device, key))
        else:
            self._mark(device, key)

    def _late_s(self, device: int, number: int) -> float:
        """Return the delay of a device at a round.

        That is the jitter, but at most the time since the device's last wait, minus the current wait. A sum during computing is
        not late.
        """
        if not self.network.jitter_s or (number == SUMS and (device, MAIN) in self.works):
            return 0.0
        lane = self.lanes[device][MAIN]
        worked_until_s = lane.since_s if lane.missing else self.now
        late_s = min(self.network.jitter_s[device], worked_until_s - self.resumed_s[device])
        return max(0.0, late_s - (self.now - worked_until_s))

    def _flow(self, route: Route) -> None:
        # A connection between two devices sends one message at a time.
        if route[2:] in self.connected:
            self.queued.setdefault(route[2:], deque()).append(route)
            return
        self.connected.add(route[2:])
        message = self.messages[route]
        message.left_bytes, message.start_s = float(message.size), self.now
        self.flowing.append(route)

    def _arrived(self, route: Route) -> None:
        message = self.messages.pop(route)
        self.flowing.remove(route)
        self.connected.discard(route[2:])
        if waiting := self.queued.get(route[2:]):
            self._flow(waiting.popleft())
        step, number, sender, receiver = route
        start_s, size = message.start_s, message.size
        self.events.append(Event(sender, "send", message.label, start_s, self.now, step, receiver, size))
        self.events.append(Event(receiver, "receive", message.label, start_s, self.now, step, sender, size))
        key = ("round", step, number)
        if key not in self.open[receiver]:
            self.arrived.add(route)
        for device in (sender, receiver):
            opened = self.open[device].get(key)
            if opened is not None and route in opened.missing:
                opened.missing.discard(route)
                self._finish_round(device, key)


def play(programs: Sequence[Program], network: Network, held_bytes: int = HELD_BYTES) -> Timeline:
    """Simulate the programs of all devices together.

    Args:
        held_bytes: senders continue at once after messages up to this size. 0: a message starts when both ends are ready.
    """
    return _Play(programs, network, held_bytes).run()
