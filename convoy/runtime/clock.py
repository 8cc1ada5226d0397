"""Where a device's time goes: computing or exchanging. And the slow-down that lets one machine play a slower one."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from convoy.comm.environment import finish


class Clock:
    """Adds up the seconds of one device.

    Attributes:
        slowdown: 1 is this device as it is; 2 makes each layer take twice as long, by sleeping. On a CPU that is twice its
            processor time: a layer that had to share the cores with other processes sleeps less, not more.
        compute_s, exchange_s: seconds so far; the slow-down counts as computing.
        layers_s: seconds so far by (layer, phase), forward and backward apart.
        waits: on a GPU, wait for each layer's kernels: without it, what is timed is only their queueing.
    """

    def __init__(self, torch_device: torch.device, slowdown: float = 1.0) -> None:
        self.slowdown = slowdown
        self.waits = False
        self.compute_s = 0.0
        self.exchange_s = 0.0
        self.layers_s: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._device = torch_device
        self._now = time.thread_time if torch_device.type == "cpu" else time.perf_counter

    def reset(self) -> None:
        self.compute_s = self.exchange_s = 0.0
        self.layers_s.clear()

    @contextmanager
    def compute(self, layer: str, phase: str) -> Iterator[None]:
        """What happens meanwhile is one layer's arithmetic."""
        with self.stretch({layer: 1.0}, phase):
            yield

    @contextmanager
    def stretch(self, expected_s: Mapping[str, float], phase: str) -> Iterator[Callable[[], None]]:
        """What happens meanwhile is the arithmetic of these layers, told apart in proportion to what each is expected to take.

        Yields:
            a function to be called where something leaves in between: a slowed device is as late as it would be then.
        """
        watched = self.waits or self.slowdown > 1.0
        start = lap = time.perf_counter()
        begun = self._now() if watched else 0.0

        def end_lap() -> None:
            nonlocal lap, begun
            if not watched:
                return
            finish(self._device)  # kernels are only queued, and a sleep would run beside them
            if self.slowdown > 1.0:
                wanted_s = (self._now() - begun) * self.slowdown
                time.sleep(max(0.0, lap + wanted_s - time.perf_counter()))
            lap, begun = time.perf_counter(), self._now()

        yield end_lap
        end_lap()
        elapsed, total = (lap if watched else time.perf_counter()) - start, sum(expected_s.values())
        self.compute_s += elapsed
        for layer, seconds in expected_s.items():
            self.layers_s[layer, phase] += elapsed * (seconds / total if total else 1 / len(expected_s))

    @contextmanager
    def exchange(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.exchange_s += time.perf_counter() - start
