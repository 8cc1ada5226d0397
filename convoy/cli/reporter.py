"""Reports a training on one device: screen, log, loggers, meters. If device 0 is lost, its successor continues the log."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from convoy.api import Plans
from convoy.cli.job import Job
from convoy.comm.collectives import gather
from convoy.config.settings import key_of
from convoy.elastic.members import Members
from convoy.errors import ConvoyError
from convoy.machine import roster
from convoy.plan.explain import work_shares
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds
from convoy.report.screen import Screen
from convoy.runlog.directory import RunDirectory, RunHeader
from convoy.runlog.loggers import Logger, to_mlflow, to_tensorboard, to_wandb
from convoy.runlog.observers import Meters, StepTimer, Utilization
from convoy.runlog.schema import DeviceLine, EndLine, MembersLine, SystemLine
from convoy.runlog.writer import RunLog
from convoy.runtime.module import Distributed
from convoy.train.observer import Observer, Observers


@dataclass
class Reporter:
    """What reports a training on one device.

    Attributes:
        directory: where the log is; known to every device.
        log, loggers: on device 0 only.
    """

    job: Job
    part: Distributed
    header: RunHeader
    directory: RunDirectory | None
    log: RunLog | None
    loggers: Sequence[Observer]
    observers: Observers
    timer: StepTimer

    @property
    def screen(self) -> Screen:
        return self.job.screen

    def on_members(self, members: Members, reason: str) -> None:
        """Report that other devices train from now on."""
        assert members.generation is not None
        ids, is_first = members.generation.members, self.part.group.device == 0
        self.screen.show(is_first)
        if is_first and self.log is None and self.directory is not None:
            self._continue_log(self.directory, members.steps)
        for observer in self.observers.observers:
            if isinstance(observer, Utilization):
                observer.restart()
                observer.log = self.log
            elif isinstance(observer, Meters):
                observer.restart(members.steps)
        self.timer.restart()
        if self.log is not None:
            header = self.header
            devices = [header.devices[d] for d in ids if d < len(header.devices)]
            solo = tuple(header.speeds.devices[d] for d in ids if d < len(header.speeds.devices))
            self.log.write(MembersLine(step=members.steps, devices=ids, reason=reason))
            if len(devices) == len(ids):
                self.log.fleet(devices, Speeds(solo, measured=header.speeds.measured), ids)
            self.log.plan(self.part.plan, self.part.traced[True].graph)

    def on_system(self, line: SystemLine) -> None:
        if self.log is not None:
            self.log.write(line)
        for logger in self.loggers:
            if isinstance(logger, Logger):
                logger.on_system(line)

    def usage(self, members: Members | None, wall_s: float) -> list[DeviceLine]:
        """Gather per-device usage. Last collective of the run."""

        def gathered() -> list[DeviceLine]:
            part, header, ids = self.part, self.header, ids_of(members, self.job)
            shares = work_shares(part.steps(self.job.settings.pass_batch), part.traced[True].graph)
            row = [part.clock.compute_s, part.clock.exchange_s, sum(self.job.group.sent_bytes), wall_s]
            speeds = [header.speeds.devices[d] for d in ids]
            return [
                DeviceLine(
                    device=ids[device], slowdown=header.devices[ids[device]][2],
                    speed_share=speeds[device] / sum(speeds), work_share=shares[device],
                    compute_s=compute_s, exchange_s=exchange_s, sent_bytes=sent_bytes, wall_s=device_s,
                )
                for device, (compute_s, exchange_s, sent_bytes, device_s) in enumerate(gather(self.job.group, "use", row))
            ]  # fmt: skip

        if members is None:
            return gathered()
        uses = members.repeated(gathered)
        members.close()
        return uses

    def on_end(self, plans: Plans, chosen: Plan, uses: Sequence[DeviceLine]) -> None:
        if self.part.compiler is not None:
            self.screen.lines([self.part.compiler.told()])
        predicted_s, within = plans.predicted_s(chosen), plans.within(chosen)
        if predicted_s is not None and within is not None and len(uses) == plans[0].devices:
            self.screen.lines([self.timer.beside(predicted_s, within, self.job.settings.passes)])
        if self.log is not None:
            for use in uses:
                self.log.write(use)
            self.log.write(EndLine(step_s=self.timer.step_s))

    def _continue_log(self, directory: RunDirectory, step: int) -> None:
        """Take over the log of a lost device 0, or begin one if that log is not on this machine."""
        header, stack = replace(self.header, done=step), self.job.stack
        try:
            self.log = stack.enter_context(RunLog(directory.log, max(1, step), self.screen.line, from_lost=True))
            header.write_run(self.log)
        except ConvoyError as error:
            self.log = None
            self.screen.line(f"WARNING: {error}; the run continues without a log")
        self.loggers = build_loggers(self.job, directory, step)
        logs = [self.log] if self.log is not None else []
        self.observers.observers = (*self.observers.observers, *logs, *self.loggers)


def ids_of(members: Members | None, job: Job) -> tuple[int, ...]:
    """Return which of the devices that began train now."""
    generation = None if members is None else members.generation
    return tuple(range(job.group.devices)) if generation is None else generation.members


def start_reporting(
    job: Job, part: Distributed, plans: Plans, devices: Sequence[tuple[str, str, float]], images: int, done: int
) -> Reporter:
    """Open the log and the loggers. Called once nothing can refuse the job any more: until then an older log stays.

    Args:
        images: training images in an epoch.
        done: steps that were done before, if the run is resumed.
    """
    settings, screen, directory = job.settings, job.screen, job.directory()
    roster.update(run="" if directory is None else str(directory.run.absolute()))
    header = RunHeader(
        job.run, devices, plans.speeds, plans[0], part.traced[True].graph, plans.request.fleet.measured, images,
        math.ceil(images / settings.batch), done,
    )  # fmt: skip
    log = header.open_log(directory, screen.line, job.stack) if directory is not None and screen.visible else None
    loggers = build_loggers(job, directory, done) if screen.visible else []
    logs = [log] if log is not None else []
    observers = Observers(Utilization(job.group, part.clock, log), *logs, *loggers)
    part.clock.reset()
    reporter = Reporter(job, part, header, directory, log, loggers, observers, StepTimer(settings.batch))
    observers.observers = (*observers.observers, Meters(job.group, reporter.on_system, done))
    return reporter


def build_loggers(job: Job, directory: RunDirectory | None, done: int) -> list[Observer]:
    """Return the loggers and the page that the settings want. They are closed with the job."""
    settings, screen, stack = job.settings, job.screen, job.stack
    folder = None if directory is None else directory.folder
    name = None if folder is None else folder.name
    shown = {key_of(name): value for name, value in settings.model_dump(mode="json").items()}
    loggers: list[Logger] = []
    if settings.tensorboard is not None:
        loggers.append(to_tensorboard(settings.tensorboard, done, screen.line))
    if settings.wandb is not None:
        loggers.append(to_wandb(settings.wandb, name, shown, folder, screen.line))
    if settings.mlflow is not None:
        loggers.append(to_mlflow(settings.mlflow, name, shown, screen.line))
    for logger in loggers:
        stack.enter_context(logger)
    if not settings.page or directory is None:
        return [*loggers]
    from convoy.report.page import LivePage  # imports jinja2, which only a page needs

    return [*loggers, LivePage(directory.run, screen.line)]
