"""Timing: quotas, long calls, cold caches, the optimizer, and step time beyond layers."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from convoy.measure import overhead_probe, timing
from convoy.measure.timing import RoundTimer, Timing, Workload
from convoy.runtime.clock import Clock
from convoy.simulate.costs import Overheads

CPU = torch.device("cpu")
QUICK_S = 1e-4


class Processor:
    """A clock that only computing advances; under a quota it computes in bursts and pauses."""

    def __init__(self, quota: float = 1.0, period_s: float = 0.01) -> None:
        self.used_s, self.quota, self.period_s = 0.0037, quota, period_s

    def now(self) -> float:
        burst_s = self.quota * self.period_s
        periods = int(self.used_s / burst_s)
        return periods * self.period_s + (self.used_s - periods * burst_s)


class FakeRun:
    """Arithmetic that takes a given time."""

    def __init__(self, processor: Processor, forward_s: float, backward_s: float) -> None:
        self.processor, self.forward_s, self.backward_s = processor, forward_s, backward_s

    def forward(self, inputs: Sequence[Tensor], batch: int, keep: bool, wants: Sequence[bool]) -> tuple[Any, Any]:  # noqa: ARG002
        self.processor.used_s += self.forward_s
        return None, None

    def backward(self, saved: Any, g: Any, wants: Sequence[bool]) -> Any:  # noqa: ARG002
        self.processor.used_s += self.backward_s


def fake_layer(run: FakeRun, gradient: Any = True) -> Workload:
    return Workload("layer", run, [], 1, (), gradient, 0)


def both_s(timing: Timing, *, steady: bool = False) -> float:
    times = timing.times(steady=steady)
    return times.forward_s + times.backward_s


def timer_of(processor: Processor) -> RoundTimer:
    return RoundTimer(Clock(CPU), processor.now)


@pytest.mark.parametrize("forward_s", [1e-5, 2e-3, 0.07])
@pytest.mark.parametrize(("times_backward", "quota"), [(0.3, 0.5), (3.0, 1.0), (30.0, 0.2)])
def test_bursts_of_a_quota_are_averaged(quota: float, times_backward: float, forward_s: float) -> None:
    """Each phase gets its part of the pauses, even if much shorter than the other one."""
    processor = Processor(quota)
    run = FakeRun(processor, forward_s, times_backward * forward_s)
    times = timer_of(processor).time(fake_layer(run)).times()
    slack = 1e-9 if quota == 1.0 else 0.25
    assert times.forward_s == pytest.approx(forward_s / quota, rel=slack)
    assert times.backward_s == pytest.approx(times_backward * forward_s / quota, rel=slack)
    assert processor.used_s / quota > 0.1


def test_a_long_call_runs_twice_and_the_faster_counts() -> None:
    processor = Processor()
    run = FakeRun(processor, 1.0, 2.0)
    assert both_s(timer_of(processor).time(fake_layer(run))) == pytest.approx(3.0)
    assert processor.used_s == pytest.approx(6.0, abs=0.01)


def test_standard_error_of_a_median_by_hand() -> None:
    """Of nine values 4.5 lie below their median, give or take 1.5: of 0 to 8 it is 4, from 2.5 to 5.5."""
    assert timing.median_error([*map(float, range(8, -1, -1))]) == pytest.approx(1.5 / 4)
    assert timing.median_error([3.0] * 9) == 0.0


def test_steady_clock_uses_median_wall_clock_uses_mean() -> None:
    """A pause that a quota makes is part of a step. On a clock without pauses, longer rounds were disturbed by others."""
    rounds = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0, 9.0, 9.0, 9.0, 9.0]
    sample = Timing(rounds, [0.0] * 12)
    assert sample.times(steady=True).forward_s == 1.0
    assert sample.times().forward_s == pytest.approx((4 * 1.0 + 2 * 9.0) / 6)


def test_layer_is_timed_until_its_error_is_small() -> None:
    processor = Processor()
    layer, timer = fake_layer(FakeRun(processor, 1e-3, 2e-3)), timer_of(processor)
    first = timer.time(layer, rounds=2)
    assert (len(first.rounds_s), first.is_known) == (2, False)
    slow = fake_layer(FakeRun(processor, 5e-3, 10e-3))  # a disturbance: in one turn of four
    for each in (slow, layer, layer):
        assert timer.time(each, first, rounds=2) is first
    assert len(first.rounds_s) >= 8
    assert first.is_known
    assert both_s(first, steady=True) == pytest.approx(3e-3)
    assert first.times(steady=True).spread == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("forward_s", [0.05, 2.0])
def test_rounds_with_memory_growth_are_ignored(monkeypatch: pytest.MonkeyPatch, forward_s: float) -> None:
    """A U-Net's first layer was timed at 11 ms a sample where it takes 0.4: pages for its output had to be filled with zeros
    first, by a kernel on a machine whose memory nobody had touched. The plan's step was predicted twice too long."""
    processor, resident = Processor(), [0]

    class Growing(FakeRun):
        def forward(self, *args: Any) -> tuple[Any, Any]:
            if resident[0] < 3 * timing.FRESH_BYTES:  # the heap is not as large yet as this layer needs it
                resident[0] += timing.FRESH_BYTES
                processor.used_s += 10 * self.forward_s
            return super().forward(*args)

    monkeypatch.setattr(timing, "_resident_bytes", lambda: resident[0])
    layer = replace(fake_layer(Growing(processor, forward_s, 0.01)), held_bytes=timing.HELD_BYTES)
    found = timer_of(processor).time(layer, rounds=2).forward_s
    assert found == pytest.approx([forward_s] * len(found))


def test_growing_process_is_still_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = iter(range(0, 1 << 60, timing.FRESH_BYTES))
    monkeypatch.setattr(timing, "_resident_bytes", lambda: next(resident))
    processor = Processor()
    assert both_s(timer_of(processor).time(fake_layer(FakeRun(processor, 1e-3, 1e-3)))) == pytest.approx(2e-3)


def test_layer_without_gradient_has_no_backward_time() -> None:
    processor = Processor()
    times = timer_of(processor).time(fake_layer(FakeRun(processor, 1e-3, 5.0), gradient=None)).times()
    assert times.backward_s == 0
    assert times.forward_s == pytest.approx(1e-3)


def scripted_overheads(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> tuple[Overheads, float]:
    """Return the overheads of a device with the times of the next two tests."""
    processor = Processor()

    def taking(seconds: Callable[[Any], float]) -> Callable[..., Callable[[], None]]:
        def build(count: Any, *_: Any) -> Callable[[], None]:
            def work() -> None:
                processor.used_s += seconds(count)

            return work

        return build

    for name in ("CORE_BYTES", "PROCESSOR_BYTES", "FRESH_BYTES"):
        monkeypatch.setattr(overhead_probe, name, 1 << 10)
    monkeypatch.setattr(overhead_probe, "_training", taking(lambda n: 0.1 + 0.02 * n))
    monkeypatch.setattr(overhead_probe, "_round", taking(lambda n: 0.001 + 0.0004 * n))
    monkeypatch.setattr(
        overhead_probe, "_optimizer", taking(lambda sizes: 0.008 + 0.003 * len(sizes) + 1e-9 * sum(sizes))
    )
    monkeypatch.setattr(timing, "MOST_CALLS", 2)
    layers = {"flatten": 0.001, "linear": 0.002}
    monkeypatch.setattr(overhead_probe, "_layer_s", lambda kind, *_: layers[kind])
    return overhead_probe.measure_overheads(device, processor.now, 0.02, message_s=0.0007, share=0.5)


def test_overhead_is_step_time_minus_layer_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device whose step takes 100 ms, and 20 for each layer with its two rounds and its two tensors.

    Flatten takes 1 ms, the Linear 2, the optimizer 3 for each tensor. A round takes 1 ms and 0.4 for each peer, of whom each
    sends and is sent a message; the processor takes 0.7 ms for one, of which a latency holds a half. A layer: 20 less the
    Linear's 2, two rounds with one peer (2.8) and two tensors (6).
    """
    found, update_s = scripted_overheads(CPU, monkeypatch)
    assert update_s == pytest.approx(1e-9, rel=1e-3), "without the call, which took ten times as long on a GPU"
    assert found.layer_s == pytest.approx(0.0092)
    assert found.step_s == pytest.approx(0.1 - 0.001 - 0.0092)
    assert found.update_s_per_tensor == pytest.approx(0.003)
    assert found.round_s == pytest.approx(0.001 + 0.0009 - 0.00035)
    assert found.message_s == pytest.approx(0.0007 + 0.0002)


def test_host_of_an_accelerator_queues_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 ms for a convolution, a batch norm and a ReLU with three tensors of 3 ms: 11 for six calls. There are no rounds."""
    found, _ = scripted_overheads(torch.device("meta"), monkeypatch)
    assert found.queue_s == pytest.approx(0.011 / 6)
    assert (found.layer_s, found.step_s) == (0.0, pytest.approx(0.1))


def test_layers_of_an_accelerator_take_the_device_seconds_times_the_slowdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events see 4 ms a call, in 1 of which the device waits for its host. A device slowed 3 times rests in between."""
    processor, slept = Processor(), list[float]()
    monkeypatch.setattr(timing.time, "sleep", slept.append)

    def queued_seconds(_: Any, calls: int, work: Callable[[], object], *_plug: float) -> tuple[float, float]:
        begin_s = processor.used_s
        for _ in range(calls):
            work()
        return processor.used_s - begin_s, 0.0

    monkeypatch.setattr(timing, "queued_seconds", queued_seconds)
    monkeypatch.setattr(timing, "_empty_layer", lambda _: fake_layer(FakeRun(processor, 1e-3, 1e-3)))
    timer = RoundTimer(Clock(torch.device("meta"), 3.0), processor.now)
    times = timer.time(fake_layer(FakeRun(processor, 4e-3, 6e-3))).times()
    assert (times.forward_s, times.backward_s) == pytest.approx((3 * 3e-3, 3 * 5e-3))
    assert sum(slept) == pytest.approx(2 * processor.used_s, rel=0.2), "two thirds of the time"


def test_cache_flush_time_is_excluded() -> None:
    """Reading the clock takes a second and nothing else any: only the work's own reading counts."""
    looks = iter(range(1_000_000))
    cold = timing.ColdCaches(CPU, lambda: float(next(looks)), 1 << 10)
    filled: list[float] = []
    each_s = cold.seconds(lambda: filled.append(float(cold._bytes[0])), slice_s=1e-9)
    assert each_s == [1.0] * timing.COLD_ROUNDS
    assert filled == [
        *map(float, range(timing.COLD_ROUNDS + 1))
    ]  # before the first call that counts, and every later one


def test_accelerator_calls_are_timed_in_batches() -> None:
    """Each call that is waited for takes 1 ms more. Nothing is filled there; 20 ms of calls of 0.5 are waited for once."""
    processor = Processor()

    def waited() -> float:
        processor.used_s += 1e-3
        return processor.used_s

    def work() -> None:
        processor.used_s += 5e-4

    each_s = timing.ColdCaches(torch.device("meta"), waited, timing.CORE_BYTES).seconds(work, 20e-3)
    count = round(20e-3 / 1.5e-3)
    assert each_s == pytest.approx([5e-4 + 1e-3 / count] * len(each_s))


class Filled:
    """A stand-in for the cache-flushing write: each call takes 5 ms."""

    def __init__(self, processor: Processor) -> None:
        self.processor, self.times = processor, 0

    def add_(self, _: float) -> None:
        self.processor.used_s += 5e-3
        self.times += 1


def test_layers_are_timed_with_cold_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ResNet-8's layers took a tenth less in a row of calls, which found all of it in the caches, than in a step.

    Every call has a filling before it, which does not count, and takes of the time that there is: 1 ms forward and 5 ms of
    filling are three calls to a slice of 20, and not twenty.
    """
    processor = Processor()
    cold = timing.ColdCaches(CPU, processor.now, 4)
    filled = Filled(processor)
    monkeypatch.setattr(cold, "_bytes", filled)
    read: list[Tensor] = []
    x, g = torch.ones(2), torch.ones(3)
    monkeypatch.setattr(torch.Tensor, "sum", lambda self: read.append(self))
    timer = RoundTimer(Clock(CPU), processor.now)
    timer.cold = cold
    small = Workload("layer", FakeRun(processor, 1e-3, 2e-3), [x], 1, (), g, timing.CORE_BYTES - 1)
    timer.time(small)
    assert filled.times == 0
    found = timer.time(replace(small, held_bytes=timing.CORE_BYTES))
    assert both_s(found) == pytest.approx(3e-3)
    calls = [sum(each is made for each in read) - 2 for made in (x, g)]  # without two first rounds of a call each way
    assert calls[0] == 3 * len(found.rounds_s)
    assert filled.times == sum(calls) + 2 * 2


def test_overhead_layers_flush_the_caches() -> None:
    """Each layer of a step is followed by a filling of the caches: forward, and backward in two parts."""
    cold = timing.ColdCaches(CPU, timing.device_now(CPU), 1 << 10)
    filled: list[float] = []
    for layers in (1, 4):
        step = overhead_probe._training(layers, CPU, cold)
        before = float(cold._bytes[0])
        step()
        filled.append(float(cold._bytes[0]) - before)
    assert filled[1] - filled[0] == 3 * 3


def test_overheads_of_this_machine_are_positive() -> None:
    found, update_s = overhead_probe.measure_overheads(CPU, timing.device_now(CPU), QUICK_S, message_s=1e-4)
    assert min(asdict(found).values()) >= 0
    assert min(update_s, found.copy_s_per_byte, found.add_s_per_byte) > 0
    assert found.message_s >= 1e-4
