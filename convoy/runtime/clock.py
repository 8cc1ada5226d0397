"""Measure how long a device computes and communicates, and emulate a slower device."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping

import torch

from convoy.machine.accelerator import finish, queued

MOST_QUEUED = 1000
"""Number of timed segments on an accelerator after which finished events are read."""


class Clock:
    """A counter of the seconds that one device computes and communicates.

    On an accelerator, events in its stream time the work. They are read after they complete, so the host never waits.

    Attributes:
        slowdown: factor by which sleeping prolongs each layer. On a CPU it multiplies processor time, so that other
            processes on the same cores do not prolong the sleep.
        exchange_s: seconds in which the host communicated, or waited for data to send.
        now: returns the time that the slowdown multiplies: processor time on a CPU, else wall-clock time.
    """

    def __init__(self, torch_device: torch.device, slowdown: float = 1.0) -> None:
        self.slowdown = slowdown
        self.exchange_s = 0.0
        self.device = torch_device
        self.now = time.thread_time if torch_device.type == "cpu" else time.perf_counter
        self._compute_s = 0.0
        self._layers_s: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.queued: deque[tuple[torch.Event, torch.Event, Mapping[str, float], str]] = deque()

    @property
    def compute_s(self) -> float:
        """Compute seconds, including the slowdown. On an accelerator, only finished work counts."""
        self.read_events()
        return self._compute_s

    @property
    def layers_s(self) -> Mapping[tuple[str, str], float]:
        """Seconds by (layer, phase), separately for forward and backward."""
        self.read_events()
        return self._layers_s

    def reset(self) -> None:
        self._compute_s = self.exchange_s = 0.0
        self._layers_s.clear()
        self.queued.clear()

    def compute(self, layer: str, phase: str) -> "Computing | OnStream":
        return self.segment({layer: 1.0}, phase)

    def segment(self, expected_s: Mapping[str, float], phase: str) -> "Computing | OnStream":
        """Return a context that times several layers together and divides the time by their expected seconds.

        It yields a function that sleeps for the slowdown so far. Call that function before sending messages.
        """
        if self.device.type != "cpu" and self.slowdown == 1:
            return OnStream(self, expected_s, phase)
        return Computing(self, expected_s, phase)

    def exchange(self) -> "Exchanging":
        return Exchanging(self)

    def settle(self) -> None:
        """Wait for all queued work, and add its times."""
        if self.queued:
            self.queued[-1][1].synchronize()
            self.read_events()

    def read_events(self) -> None:
        """Add the times of finished work."""
        while self.queued and self.queued[0][1].query():
            begin, end, expected_s, phase = self.queued.popleft()
            self.add(begin.elapsed_time(end) / 1e3, expected_s, phase)

    def add(self, elapsed_s: float, expected_s: Mapping[str, float], phase: str) -> None:
        self._compute_s += elapsed_s
        total = sum(expected_s.values())
        for layer, seconds in expected_s.items():
            self._layers_s[layer, phase] += elapsed_s * (seconds / total if total else 1 / len(expected_s))


# Every layer and exchange enters one of these classes: two generator contexts would take as long as a small layer.


class Computing:
    """A context that times layers by the host's clock; see `Clock.segment`."""

    __slots__ = ("_begun", "_clock", "_expected_s", "_lap", "_phase", "_slowed", "_start")

    def __init__(self, clock: Clock, expected_s: Mapping[str, float], phase: str) -> None:
        self._clock, self._expected_s, self._phase = clock, expected_s, phase

    def __enter__(self) -> Callable[[], None]:
        self._slowed = self._clock.slowdown > 1.0
        self._start = self._lap = time.perf_counter()
        self._begun = self._clock.now() if self._slowed else 0.0
        return self._end_lap

    def _end_lap(self) -> None:
        if not self._slowed:
            return
        clock = self._clock
        finish(clock.device)  # kernels are only queued, and would run during the sleep
        wanted_s = (clock.now() - self._begun) * clock.slowdown
        time.sleep(max(0.0, self._lap + wanted_s - time.perf_counter()))
        self._lap, self._begun = time.perf_counter(), clock.now()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._end_lap()
            ended = self._lap if self._slowed else time.perf_counter()
            self._clock.add(ended - self._start, self._expected_s, self._phase)


class OnStream:
    """A context that times layers on an accelerator by two events in its stream."""

    __slots__ = ("_begin", "_clock", "_expected_s", "_phase")

    def __init__(self, clock: Clock, expected_s: Mapping[str, float], phase: str) -> None:
        self._clock, self._expected_s, self._phase = clock, expected_s, phase

    def __enter__(self) -> Callable[[], None]:
        self._begin = queued(self._clock.device, timed=True)
        return lambda: None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            clock = self._clock
            clock.queued.append((self._begin, queued(clock.device, timed=True), self._expected_s, self._phase))
            if len(clock.queued) > MOST_QUEUED:
                clock.read_events()


class Exchanging:
    __slots__ = ("_clock", "_start")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._clock.exchange_s += time.perf_counter() - self._start
