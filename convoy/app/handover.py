"""What `convoy train` does when the devices of a training change: the log goes on, and whoever is device 0 now keeps it."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from convoy.elastic.members import Members
from convoy.errors import ConvoyError
from convoy.plan.presets import Speeds
from convoy.report.screen import Screen
from convoy.runlog.directory import RunDirectory, RunHeader
from convoy.runlog.loggers import Logger
from convoy.runlog.observers import Meters, StepTimer, Utilization
from convoy.runlog.schema import MembersLine, SystemLine
from convoy.runlog.writer import RunLog
from convoy.runtime.module import Distributed
from convoy.train.observer import Observer, Observers


@dataclass
class Handover:
    """What tells of a training, on one device.

    Attributes:
        directory: where the log is, known to every device.
        log, loggers: on device 0.
        make_loggers: makes the loggers and the page of a run that has done so many steps.
    """

    part: Distributed
    screen: Screen
    header: RunHeader
    directory: RunDirectory | None
    log: RunLog | None
    loggers: Sequence[Observer]
    observers: Observers
    timer: StepTimer
    stack: ExitStack
    make_loggers: Callable[[int], list[Observer]]

    def carry_over(self, members: Members, reason: str) -> None:
        """The devices have changed: go on telling of those that train now."""
        assert members.generation is not None
        ids, is_first = members.generation.members, self.part.group.device == 0
        self.screen.show(is_first)
        if is_first and self.log is None and self.directory is not None:
            self._take_over(members.steps)
        for observer in self.observers.observers:
            if isinstance(observer, Utilization):
                observer.restart()
                observer.log = self.log
            elif isinstance(observer, Meters):
                observer.restart(members.steps)
        self.timer.restart()
        if self.log is not None:
            devices = [self.header.devices[d] for d in ids if d < len(self.header.devices)]
            speeds = Speeds(
                tuple(self.header.speeds.devices[d] for d in ids if d < len(self.header.speeds.devices)),
                measured=self.header.speeds.measured,
            )
            self.log.write(MembersLine(step=members.steps, devices=ids, reason=reason))
            if len(devices) == len(ids):
                self.log.fleet(devices, speeds, ids)
            self.log.plan(self.part.plan, self.part.traced[True].graph)

    def tell_meters(self, line: SystemLine) -> None:
        if self.log is not None:
            self.log.write(line)
        for logger in self.loggers:
            if isinstance(logger, Logger):
                logger.on_system(line)

    def _take_over(self, step: int) -> None:
        """Device 0 is lost, with the log: this device goes on with it, or begins one where that is not on this machine."""
        assert self.directory is not None
        header = replace(self.header, done=step)
        try:
            self.log = self.stack.enter_context(
                RunLog(self.directory.log, max(1, step), self.screen.line, from_lost=True)
            )
            header.write_run(self.log)
        except ConvoyError as error:
            self.log = None
            self.screen.line(f"WARNING: {error}; the run goes on without a log")
        self.loggers = self.make_loggers(step)
        self.observers.observers = (
            *self.observers.observers,
            *([self.log] if self.log is not None else []),
            *self.loggers,
        )
