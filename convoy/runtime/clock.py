"""Where a device's time goes: computing or exchanging. And the slow-down that lets one machine play a slower one."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping

import torch

from convoy.machine.accelerator import finish, queued

MOST_QUEUED = 1000
"""So many stretches are kept unread."""


class Clock:
    """Adds up the seconds of one device.

    What an accelerator computes is timed by events in its stream, which are read once they are done: nothing stops for it.

    Attributes:
        slowdown: 1 is this device as it is; 2 makes each layer take twice as long, by sleeping. On a CPU that is twice its
            processor time: a layer that had to share the cores with other processes sleeps less, not more.
        exchange_s: seconds so far in which the host exchanged, or waited for what it was to send.
        device, now: what computes, and what reads the seconds that a slow-down multiplies.
    """

    def __init__(self, torch_device: torch.device, slowdown: float = 1.0) -> None:
        self.slowdown = slowdown
        self.exchange_s = 0.0
        self.device = torch_device
        self.now = time.thread_time if torch_device.type == "cpu" else time.perf_counter
        self._queues = torch_device.type != "cpu"
        self._compute_s = 0.0
        self._layers_s: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._queued: deque[tuple[torch.Event, torch.Event, Mapping[str, float], str]] = deque()

    @property
    def compute_s(self) -> float:
        """Seconds of computing so far; a slow-down counts. An accelerator's are those of what it has done."""
        self._read_events()
        return self._compute_s

    @property
    def layers_s(self) -> Mapping[tuple[str, str], float]:
        """Seconds so far by (layer, phase), forward and backward apart."""
        self._read_events()
        return self._layers_s

    def reset(self) -> None:
        self._compute_s = self.exchange_s = 0.0
        self._layers_s.clear()
        self._queued.clear()

    def compute(self, layer: str, phase: str) -> "Computing | Queued":
        """What happens meanwhile is one layer's arithmetic."""
        return self.stretch({layer: 1.0}, phase)

    def stretch(self, expected_s: Mapping[str, float], phase: str) -> "Computing | Queued":
        """What happens meanwhile is the arithmetic of these layers, told apart in proportion to what each is expected to take.

        The context gives a function to be called where something leaves in between: a slowed device is as late as it would be
        then.
        """
        if self._queues and self.slowdown == 1:
            return Queued(self, expected_s, phase)
        return Computing(self, expected_s, phase)

    def exchange(self) -> "Exchanging":
        return Exchanging(self)

    def queue(self, begin: torch.Event, end: torch.Event, expected_s: Mapping[str, float], phase: str) -> None:
        """Count what the device computes between two events, once it has."""
        self._queued.append((begin, end, expected_s, phase))
        if len(self._queued) > MOST_QUEUED:
            self._read_events()

    def settle(self) -> None:
        """Wait until all that was begun is done and counted."""
        if self._queued:
            self._queued[-1][1].synchronize()
            self._read_events()

    def _read_events(self) -> None:
        while self._queued and self._queued[0][1].query():
            begin, end, expected_s, phase = self._queued.popleft()
            self.add(begin.elapsed_time(end) / 1e3, expected_s, phase)

    def add(self, elapsed_s: float, expected_s: Mapping[str, float], phase: str) -> None:
        """Count seconds of computing."""
        self._compute_s += elapsed_s
        total = sum(expected_s.values())
        for layer, seconds in expected_s.items():
            self._layers_s[layer, phase] += elapsed_s * (seconds / total if total else 1 / len(expected_s))


# Classes, since these are entered for every layer and every exchange: two generators took as long as a small layer.


class Computing:
    """A context in which layers are computed; see `Clock.stretch`."""

    __slots__ = ("_begun", "_clock", "_expected_s", "_lap", "_phase", "_start", "_watched")

    def __init__(self, clock: Clock, expected_s: Mapping[str, float], phase: str) -> None:
        self._clock, self._expected_s, self._phase = clock, expected_s, phase

    def __enter__(self) -> Callable[[], None]:
        clock = self._clock
        self._watched = clock.slowdown > 1.0
        self._start = self._lap = time.perf_counter()
        self._begun = clock.now() if self._watched else 0.0
        return self._end_lap

    def _end_lap(self) -> None:
        if not self._watched:
            return
        clock = self._clock
        finish(clock.device)  # kernels are only queued, and a sleep would run beside them
        wanted_s = (clock.now() - self._begun) * clock.slowdown
        time.sleep(max(0.0, self._lap + wanted_s - time.perf_counter()))
        self._lap, self._begun = time.perf_counter(), clock.now()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        self._end_lap()
        ended = self._lap if self._watched else time.perf_counter()
        self._clock.add(ended - self._start, self._expected_s, self._phase)


class Queued:
    """`Computing` on an accelerator, between two events of its stream."""

    __slots__ = ("_begin", "_clock", "_expected_s", "_phase")

    def __init__(self, clock: Clock, expected_s: Mapping[str, float], phase: str) -> None:
        self._clock, self._expected_s, self._phase = clock, expected_s, phase

    def __enter__(self) -> Callable[[], None]:
        self._begin = queued(self._clock.device, timed=True)
        return _nothing

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._clock.queue(self._begin, queued(self._clock.device, timed=True), self._expected_s, self._phase)


def _nothing() -> None:
    pass


class Exchanging:
    """A context in which messages are begun and waited for."""

    __slots__ = ("_clock", "_start")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._clock.exchange_s += time.perf_counter() - self._start
