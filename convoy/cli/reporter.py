"""Reports a training on one device: screen, log, loggers, meters. If device 0 is lost, its successor continues the log."""

import math
from collections.abc import Sequence
from contextlib import ExitStack

from convoy.comm.control_messages import gather
from convoy.config.run_file import RunSettings
from convoy.config.train_options import key_of
from convoy.errors import ConvoyError
from convoy.measure.planning import Plans
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.text import layer_rows, work_shares
from convoy.report.screen import Screen
from convoy.runlog.directory import RunDirectory, write_files
from convoy.runlog.loggers import Logger, to_mlflow, to_tensorboard, to_wandb
from convoy.runlog.observers import Meters, StepTimer, Utilization
from convoy.runlog.schema import DeviceLine, EndLine, MembersLine, SystemLine
from convoy.runlog.writer import RunLog
from convoy.runtime.module import Distributed
from convoy.train.autotune import is_end
from convoy.train.rebalance import Decision, Reshard
from convoy.train.record import Observer, Observers


class Reporter(ExitStack):
    """The screen, log and loggers of a training on one device. Leaving its context closes both.
    Create it after all checks of the job, because it replaces an older log.

    Args:
        devices: kind, host and slowdown of each; as an attribute, by id.
        directory: of the log, on every device, because each may have to continue it.
        images: training images of an epoch.
        done: steps before the run was resumed.
    """

    def __init__(
        self, run: RunSettings, part: Distributed, plans: Plans, devices: Sequence[tuple[str, str, float]], screen: Screen,
        directory: RunDirectory | None, images: int, done: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.run, self.part, self.plans, self.screen = run, part, plans, screen
        self.directory, self.images = directory, images
        self.devices, self.speeds = dict(enumerate(devices)), dict(enumerate(plans.speeds.devices))
        self.are_measured = plans.speeds.measured
        self.log: RunLog | None = None
        self.loggers: list[Observer] = []
        self.bar = Observer()
        part.clock.reset()
        self.timer, self.utilization = StepTimer(run.settings.batch), Utilization(part.group, part.clock)
        self.meters = Meters(part.group, self.on_system, done)
        self.observers = Observers()
        if screen.visible:
            self._open(done)
        if screen.visible:
            self._log_plan()
            self._predict(plans[0])
            write_files(directory, run.settings, plans[0], plans.request.fleet.measured)
        self.observe(self.bar)

    def _open(self, done: int, *, from_lost: bool = False) -> None:
        """Open the log and the loggers that the settings ask for."""
        settings, show, directory = self.run.settings, self.screen.line, self.directory
        folder = None if directory is None else directory.folder
        if directory is not None:
            self.log = self.enter_context(RunLog(directory.log, done, show, from_lost=from_lost))
            options = settings.model_dump(mode="json") | {"rebalance": settings.rebalances}
            steps = math.ceil(self.images / settings.batch)
            self.log.run(options, sources=dict(self.run.sources), images=self.images, epoch_steps=steps)
        name = None if folder is None else folder.name
        shown = {key_of(name): value for name, value in settings.model_dump(mode="json").items()}
        self.loggers = []
        if settings.tensorboard is not None:
            self.loggers.append(self.enter_context(to_tensorboard(settings.tensorboard, done, show)))
        if settings.wandb is not None:
            self.loggers.append(self.enter_context(to_wandb(settings.wandb, name, shown, folder, show)))
        if settings.mlflow is not None:
            self.loggers.append(self.enter_context(to_mlflow(settings.mlflow, name, shown, show)))
        if settings.page and directory is not None:
            from convoy.report.page import LivePage  # imports jinja2, which only a page needs

            self.loggers.append(LivePage(directory.run, show))

    def observe(self, bar: Observer) -> None:
        """Add the progress bar to the observers."""
        self.bar, self.utilization.log = bar, self.log
        logs = [] if self.log is None else [self.log]
        self.observers.observers = (self.timer, bar, self.utilization, *logs, *self.loggers, self.meters)

    def show_plan(self) -> None:
        """Print each device's share of each layer; with `--explain`, also every step and device program."""
        settings, screen, plan, graph = self.run.settings, self.screen, self.part.plan, self.part.traced[True].graph
        work, count = self._work(), settings.accumulate
        if settings.plan == "auto" and 0 in work:
            idle = ", ".join(str(device) for device, share in enumerate(work) if not share)
            screen.line(f"auto leaves idle: device {idle}. With it steps would take longer.")
        screen.plan(plan, layer_rows(plan, graph), work)
        if settings.explain:
            screen.programs(plan, graph, count)
        if count > 1:
            parts = f"{count} micro-batches of {settings.micro_batch}"
            screen.line(f"A step of {settings.batch} samples has {parts}; gradients are all-reduced in the last.")

    def _work(self) -> Sequence[float]:
        return work_shares(self.part.steps(self.run.settings.micro_batch), self.part.traced[True].graph)

    def _log_plan(self) -> None:
        """Log the devices that train now, and their plan."""
        if self.log is None:
            return
        ids = self.part.group.ids
        solo = [self.speeds[d] if self.are_measured else None for d in ids]
        self.log.fleet([self.devices[d] for d in ids], solo, ids)
        self.log.plan(self.part.plan, self.part.traced[True].graph)

    def _predict(self, plan: Plan, shares_only: bool = False) -> None:
        """Log the prediction for a plan if the devices were measured; `shares_only` as in `PredictionLine`."""
        settings, measured = self.run.settings, self.plans.request.fleet.measured
        if measured is not None and self.log is not None:
            self.log.predict(plan, measured, settings.optimizer_state, settings.accumulate, shares_only)

    def on_decision(self, step: int, decision: Decision) -> None:
        """Print a decision with its reason, and log a change of the plan."""
        self.screen.line(f"  step {step}: {decision.reason}")
        plan, graph = self.part.plan, self.part.traced[True].graph
        if is_end(decision) and plan != self.plans[0]:  # another of several plans has been chosen
            self.screen.plan(plan, layer_rows(plan, graph), work_shares(lower(plan, graph), graph), self.part.group.ids)
        if self.log is not None and isinstance(decision, Reshard):
            self.log.reshard(step, decision)
            self._predict(decision.plan, bool(decision.changes))
        self.timer.restart()

    def on_members(self, step: int, reason: str) -> None:
        """Report that devices left or joined at this step."""
        is_first = self.part.group.device == 0
        self.screen.show(is_first)
        if is_first and self.log is None and self.directory is not None:  # device 0, which wrote the log, is lost
            try:
                self._open(max(1, step), from_lost=True)
            except ConvoyError as error:
                self.screen.line(f"WARNING: {error}; the run continues without a log")
        self.utilization.restart()
        self.meters.restart(step)
        self.timer.restart()
        self.observe(self.bar)
        if self.log is not None:
            self.log.write(MembersLine(step=step, devices=tuple(self.part.group.ids), reason=reason))
            self._log_plan()

    def on_system(self, line: SystemLine) -> None:
        if self.log is not None:
            self.log.write(line)
        for logger in self.loggers:
            if isinstance(logger, Logger):
                logger.on_system(line)

    def usage(self, wall_s: float) -> list[DeviceLine]:
        """Gather per-device usage. Last collective of the run."""
        part, ids, shares = self.part, self.part.group.ids, self._work()
        own = [part.clock.compute_s, part.clock.exchange_s, sum(part.group.sent_bytes), wall_s]
        speeds = [self.speeds[d] for d in ids]
        return [
            DeviceLine(
                device=ids[device], slowdown=self.devices[ids[device]][2],
                speed_share=speeds[device] / sum(speeds), work_share=shares[device],
                compute_s=compute_s, exchange_s=exchange_s, sent_bytes=sent_bytes, wall_s=device_s,
            )
            for device, (compute_s, exchange_s, sent_bytes, device_s) in enumerate(gather(part.group, "use", own))
        ]  # fmt: skip

    def on_end(self, chosen: Plan, uses: Sequence[DeviceLine]) -> None:
        """Compare the prediction with the measurement, and write the last lines of the log."""
        if self.part.cuda_graphs is not None:
            self.screen.line(self.part.cuda_graphs.summary())
        predicted = self.plans.predicted(chosen)
        if predicted is not None and len(uses) == self.plans[0].devices:
            self.screen.line(self.timer.compared_with(*predicted, self.run.settings.accumulate))
        if self.log is not None:
            for use in uses:
                self.log.write(use)
            self.log.write(EndLine(step_s=self.timer.step_s))
