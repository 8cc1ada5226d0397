"""What each device uses while it trains: processor, memory, network, energy. The devices exchange that every few seconds."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]

from convoy.comm.accelerator import allocated_bytes
from convoy.comm.agreement import gather
from convoy.comm.group import Group
from convoy.profile.energy import EnergyMeter, meter_of, once_each
from convoy.runlog.schema import SystemLine
from convoy.train.observer import EpochResult, Observer

EVERY_S = 5.0
"""About the seconds between two lines; it takes the devices some milliseconds each time."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters of a process, and of its host's processor, at one moment."""

    now_s: float
    cores_s: float
    host_busy_s: float
    host_s: float
    sent_bytes: tuple[int, ...]

    @staticmethod
    def of(group: Group) -> "Reading":
        used, host = os.times(), psutil.cpu_times()
        idle_s = host.idle + getattr(host, "iowait", 0.0)
        # Linux counts a guest's time as its host's, too.
        host_s = sum(host) - getattr(host, "guest", 0.0) - getattr(host, "guest_nice", 0.0)
        cores_s = used.user + used.system
        return Reading(time.perf_counter(), cores_s, host_s - idle_s, host_s, tuple(group.sent_bytes))


class Meters(Observer):
    """Tells what all devices used, about every `EVERY_S` and at the end of each epoch. Every device has one.

    Which steps are followed by a line is decided from the pace of device 0, so that all decide alike.

    Args:
        tell: gets the lines, in which `s` counts from the start of this object.
        done: steps that the run has done before.
        read: reads the counters.
        energy: None: the device's own.
    """

    def __init__(
        self,
        group: Group,
        tell: Callable[[SystemLine], None],
        done: int = 0,
        read: Callable[[Group], Reading] = Reading.of,
        energy: EnergyMeter | None = None,
    ) -> None:
        self.group, self.tell, self.read = group, tell, read
        self.process = psutil.Process()
        self.last = read(group)
        self.start_s = self.last.now_s
        self.step, self.told, self.due, self.samples = done, done, done + 1, 0
        self.energy = meter_of(group.torch_device) if energy is None else energy

    def restart(self, step: int) -> None:
        """Begin anew after a step, on other devices."""
        self.last = self.read(self.group)
        self.step, self.told, self.due, self.samples = step, step, step + 1, 0

    def on_step_end(self, step: int, samples: int) -> None:
        self.step, self.samples = step + 1, self.samples + samples
        self.energy.sample()
        if self.step >= self.due:
            self._tell()

    def on_epoch(self, result: EpochResult) -> None:  # noqa: ARG002
        if self.step > self.told:
            self._tell()

    def _tell(self) -> None:
        now, before = self.read(self.group), self.last
        passed_s = max(now.now_s - before.now_s, 1e-9)
        host_s = now.host_s - before.host_s
        # A counter that was cleared meanwhile begins anew.
        sent = [new - old if new >= old else new for new, old in zip(now.sent_bytes, before.sent_bytes, strict=True)]
        own = [
            passed_s, (now.cores_s - before.cores_s) / passed_s,
            min(1.0, max(0.0, (now.host_busy_s - before.host_busy_s) / host_s)) if host_s > 0 else None,
            self.process.memory_info().rss, allocated_bytes(self.group.torch_device), sent,
            self.energy.joules(), self.energy.key, self.energy.source, self.group.strangers,
        ]  # fmt: skip
        rows = gather(self.group, f"meters at step {self.step}", own)
        step_s = rows[0][0] / (self.step - self.told)
        self.last, self.told, self.due = now, self.step, self.step + max(1, math.ceil(EVERY_S / step_s))
        devices, samples, self.samples = range(len(rows)), self.samples, 0
        used = once_each([row[7] for row in rows], [row[8] for row in rows], [row[6] for row in rows])
        self.tell(
            SystemLine(
                step=self.step, s=round(now.now_s - self.start_s, 6),
                cores=tuple(row[1] for row in rows),
                host_processor=tuple(row[2] for row in rows),
                memory_bytes=tuple(row[3] for row in rows),
                accelerator_bytes=tuple(row[4] for row in rows),
                sent_bytes_per_s=tuple(sum(row[5]) / row[0] for row in rows),
                received_bytes_per_s=tuple(sum(row[5][device] / row[0] for row in rows) for device in devices),
                power_w=tuple(j if j is None else j / row[0] for (j, _), row in zip(used, rows, strict=True)),
                joules=tuple(j for j, _ in used),
                joules_by=tuple(by for _, by in used),
                samples=samples,
                strangers=tuple(row[9] for row in rows),
                ids=tuple(self.group.ids),
            )
        )  # fmt: skip
