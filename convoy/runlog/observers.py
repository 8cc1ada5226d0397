"""Observers that measure a training: step times, and each device's time and resources."""

import math
import statistics
import time
from collections.abc import Callable

import psutil  # type: ignore[import-untyped]

from convoy.comm.control_messages import gather
from convoy.comm.group import Group
from convoy.machine.accelerator import allocated_bytes
from convoy.measure.energy_meter import EnergyMeter, meter_of, once_each
from convoy.runlog.reader import MIN_STEPS
from convoy.runlog.schema import SystemLine, UtilizationLine
from convoy.runlog.writer import RunLog
from convoy.runtime.clock import Clock
from convoy.simulate.interval import Within
from convoy.train.record import EpochResult, Evaluation, Observer

SYSTEM_EVERY_S = 5.0  # between two system lines; gathering one takes some milliseconds


class StepTimer(Observer):
    """A timer of steps with `batch` samples, from the end of one step to the end of the next, without evaluations."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.seconds: list[float] = []
        self.last_s: float | None = None
        self._since = 0

    @property
    def counted_s(self) -> list[float]:
        """Seconds of the steps since the last change of plan; of all steps if there are fewer than `MIN_STEPS`."""
        late = self.seconds[self._since :]
        return late if len(late) >= MIN_STEPS else self.seconds

    @property
    def step_s(self) -> float | None:
        """Median seconds of a step; None before the second step."""
        return statistics.median(self.counted_s) if self.seconds else None

    def on_step_end(self, step: int, samples: int) -> None:  # noqa: ARG002
        now_s = time.perf_counter()
        if self.last_s is not None and samples == self.batch:
            self.seconds.append(now_s - self.last_s)
        self.last_s = now_s

    def restart(self) -> None:
        """Start a new average after a change of plan or shares. The step with the change does not count."""
        self._since = len(self.seconds)
        self.last_s = None

    def on_evaluation(self, result: Evaluation) -> None:  # noqa: ARG002
        self.last_s = None

    def on_epoch(self, result: EpochResult) -> None:  # noqa: ARG002
        self.last_s = None

    def compared_with(self, micro_batch_s: float, within: Within, micro_batches: int = 1) -> str:
        """Return a line that compares the measured step with the prediction for a micro-batch."""
        low_s, step_s, high_s = (micro_batches * s for s in (within.low, micro_batch_s, within.high))
        predicted = f"Predicted: {step_s:.3g} s a step (nine of ten: {low_s:.3g} - {high_s:.3g} s)"
        if self.step_s is None:
            return f"{predicted}; too few steps of {self.batch} samples to compare."
        held = "inside" if low_s <= self.step_s <= high_s else "outside"
        return (
            f"{predicted}; measured: {self.step_s:.3g} s, the median of {len(self.counted_s)} steps, {held} the interval; "
            f"the prediction is {step_s / self.step_s - 1:+.1%} off."
        )


class Utilization(Observer):
    """Seconds that this device computes and exchanges per epoch. After each epoch device 0 gathers and logs all devices'.

    A step counts from the end of the previous one. The first step after an evaluation is not counted.
    """

    def __init__(self, group: Group, clock: Clock, log: RunLog | None = None) -> None:
        self.group, self.clock, self.log = group, clock, log
        self.restart()

    def restart(self) -> None:
        self.last: tuple[float, float, float] | None = None
        self.steps, self.sums_s = 0, [0.0, 0.0, 0.0]

    def on_step_end(self, step: int, samples: int) -> None:  # noqa: ARG002
        now = (time.perf_counter(), self.clock.compute_s, self.clock.exchange_s)
        if self.last is not None:
            self.steps += 1
            wall_s, compute_s, exchange_s = (new - old for new, old in zip(now, self.last, strict=True))
            if self.group.torch_device.type != "cpu":
                # On accelerators an exchange also waits for kernels, which counts as computing.
                exchange_s = max(0.0, min(exchange_s, wall_s - compute_s))
            self.sums_s = [a + b for a, b in zip(self.sums_s, (wall_s, compute_s, exchange_s), strict=True)]
        self.last = now

    def on_evaluation(self, result: Evaluation) -> None:  # noqa: ARG002
        self.last = None

    def on_epoch(self, result: EpochResult) -> None:
        rows = gather(self.group, f"busy in epoch {result.epoch}", self.sums_s)
        if self.log is not None:
            wall_s, compute_s, exchange_s = zip(*rows, strict=True)
            self.log.write(
                UtilizationLine(
                    epoch=result.epoch, steps=self.steps, wall_s=wall_s, compute_s=compute_s, exchange_s=exchange_s,
                    ids=tuple(self.group.ids),
                )
            )  # fmt: skip
        self.restart()


class Meters(Observer):
    """Resource meters of all devices, gathered about every `SYSTEM_EVERY_S` and after each epoch. Every device has one.

    Device 0's step time decides after which steps to gather, so that all devices agree. `report` is called with each line.
    `done`: steps before the run was resumed.
    """

    def __init__(
        self, group: Group, report: Callable[[SystemLine], None], done: int = 0, energy: EnergyMeter | None = None
    ) -> None:
        self.group, self.report = group, report
        self.process = psutil.Process()
        self.energy = meter_of(group.torch_device) if energy is None else energy
        self.start_s = time.perf_counter()
        self.restart(done)

    def restart(self, step: int) -> None:
        """Start again after `step` steps, with other devices."""
        self._read_use()
        self.step, self.reported, self.due, self.samples = step, step, step + 1, 0

    def _read_use(self) -> tuple[float, float]:
        """Return the CPU cores that the process used on average since the last call, and its host's load (0 to 1)."""
        self.last_s, self.last_sent = time.perf_counter(), tuple(self.group.sent_bytes)
        return self.process.cpu_percent() / 100, psutil.cpu_percent() / 100

    def on_step_end(self, step: int, samples: int) -> None:
        self.step, self.samples = step + 1, self.samples + samples
        if self.step >= self.due:
            self._report()

    def on_epoch(self, result: EpochResult) -> None:  # noqa: ARG002
        if self.step > self.reported:
            self._report()

    def _report(self) -> None:
        before_s, before_sent = self.last_s, self.last_sent
        own_cores, own_host = self._read_use()
        # If a counter was reset since the last call, it started from zero.
        own_sent = [new - old if new >= old else new for new, old in zip(self.last_sent, before_sent, strict=True)]
        own = [
            max(self.last_s - before_s, 1e-9), own_cores, own_host, self.process.memory_info().rss,
            allocated_bytes(self.group.torch_device), own_sent,
            self.energy.joules(), self.energy.key, self.energy.source, self.group.rejected,
        ]  # fmt: skip
        rows = gather(self.group, f"meters at step {self.step}", own)
        times_s, cores, host, memory, accelerator, sent_by, joules, keys, sources, rejected = zip(*rows, strict=True)
        step_s = times_s[0] / (self.step - self.reported)
        self.reported, self.due = self.step, self.step + max(1, math.ceil(SYSTEM_EVERY_S / step_s))
        used = once_each(keys, sources, joules)
        rates = [[count / s for count in sent] for sent, s in zip(sent_by, times_s, strict=True)]  # from each, to each
        self.report(
            SystemLine(
                step=self.step, s=round(self.last_s - self.start_s, 6), cores=cores, host_processor=host,
                memory_bytes=memory, accelerator_bytes=accelerator, sent_bytes_per_s=tuple(map(sum, rates)),
                received_bytes_per_s=tuple(map(sum, zip(*rates, strict=True))),
                power_w=tuple(j if j is None else j / s for (j, _), s in zip(used, times_s, strict=True)),
                joules=tuple(j for j, _ in used), joules_by=tuple(by for _, by in used),
                samples=self.samples, rejected=rejected, ids=tuple(self.group.ids),
            )
        )  # fmt: skip
        self.samples = 0
