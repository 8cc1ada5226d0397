"""Runs `convoy train` on one device, from loading images to the last line of the log."""

import os
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from convoy.api import Plans, distribute, make_plans
from convoy.checkpoint import Checkpointer, Progress
from convoy.cli.admitting import TrainAdmission, build_members
from convoy.cli.joining import Invitation, measured_alone
from convoy.cli.reporter import Reporter
from convoy.cli.train_parts import (
    FinishedTraining,
    agreed_images,
    build_loaders,
    build_model,
    build_training,
    example_of,
)  # fmt: skip
from convoy.comm.control_messages import from_first, gather
from convoy.comm.environment import imposed_slowdown
from convoy.comm.group import Group
from convoy.config.run_file import RunSettings
from convoy.config.train_options import Settings
from convoy.machine.process import handle_signals
from convoy.measure.job_plans import expect_measured
from convoy.plan.plan import Plan
from convoy.plan.presets import AUTO, PLANS
from convoy.report.measured import remarks
from convoy.report.screen import Screen, Wait
from convoy.runlog.directory import RunDirectory, make_directory, paths_of
from convoy.train.controller import Rebalancer
from convoy.train.loop import fit


@dataclass(frozen=True)
class Job:
    """A training on one device, as it was started.

    Attributes:
        invitation: the running job's reply, if this device joins one.
    """

    run: RunSettings
    group: Group
    screen: Screen
    stack: ExitStack
    invitation: Invitation | None = None

    @property
    def settings(self) -> Settings:
        return self.run.settings


def train_job(job: Job) -> FinishedTraining:
    """Train as one device of the job."""
    settings, group, screen, stack = job.settings, job.group, job.screen, job.stack
    joins = job.invitation is not None
    splits = agreed_images(settings, group, screen)
    model, example = build_model(settings, splits), example_of(splits)
    slowdown = settings.slowdowns[group.device] * imposed_slowdown()
    plans = _make_plans(settings, group, screen, model, example, slowdown)
    part = distribute(
        model, plans[0], group, example, slowdown=slowdown, precision=settings.precision, compile=settings.compile
    )
    expect_measured(part, plans.request.fleet.measured)
    rows = gather(group, "fleet", [str(group.torch_device), os.uname().nodename, torch.get_num_threads()])
    devices = [
        (f"{device} ({threads} thread{'s' * (threads > 1)})", host, times)
        for (device, host, threads), times in zip(rows, settings.slowdowns, strict=True)
    ]
    screen.fleet(devices, plans.speeds)
    train, test = build_loaders(settings, splits, part)
    training = build_training(settings, part, train)
    training.tell = screen.line
    checkpointer, done = None, Progress()
    if settings.checkpoint is not None:
        checkpointer = Checkpointer(
            settings.checkpoint, part, training.optimizer, every=settings.checkpoint_steps, schedule=training.schedule,
            scaler=training.scaler, settings=settings.lasting, tell=lambda line: screen.line(f"  {line}"),
        )  # fmt: skip
        stack.callback(checkpointer.close)
        if not joins:
            done = checkpointer.begin(settings.resume)
            torch.manual_seed(settings.seed + done.step)  # dropout must not repeat the first steps' random numbers
        done = checkpointer.progress
    if job.invitation is None:
        row = from_first(group, "directory of the run", lambda: paths_of(make_directory(settings)))
    else:
        row = job.invitation.offer["directory"]
    directory = None if row is None else RunDirectory(Path(row[0]), None if row[1] is None else Path(row[1]))
    reporter = Reporter(job.run, part, plans, devices, screen, directory, train.samples, done.step)
    stack.enter_context(reporter)
    reporter.show_plan()
    title = f"{group.devices} device{'s' * (group.devices > 1)}, plan {part.plan.name}"
    samples_done = done.epoch * train.samples + done.batch * settings.batch
    start_s = time.perf_counter()
    with screen.progress(title, settings.epochs, train.samples, samples_done, test.samples) as bar:
        reporter.observe(bar)
        rebalancer = None
        if settings.rebalances:
            if len(plans) > 1:
                screen.line(
                    f"{len(plans)} plans are predicted to take nearly as long: training tries each for some steps."
                )
            rebalancer = Rebalancer(part, training.optimizer, tell=reporter.on_decision, others=plans[1:])
        replan = plans.replanner(rebalancer)
        known = None
        if job.invitation is not None:
            print("measures itself while the others train", flush=True)
            known = measured_alone(job.invitation.offer, settings, model, example, group, slowdown)
        elif group.devices == 1 and settings.listen is not None:
            asked = {"timed": True, "measured": settings.plan == AUTO}
            alone = measured_alone(asked, settings, model, example, group, slowdown)
            replan.known = replace(replan.known, speeds=alone.speeds, measured=alone.measured)
        admission = TrainAdmission(part, splits.fingerprint, replan, reporter)
        members = build_members(admission, training, job.invitation, known)
        with nullcontext() if members is None else handle_signals(members):
            history = fit(training, train, test, settings.epochs, reporter.observers, rebalancer, checkpointer, members)
    usage = partial(reporter.usage, time.perf_counter() - start_s)
    if members is None:
        uses = usage()
    else:
        uses = members.repeated(usage)
        members.close()
    screen.usage(uses, history)
    screen.best(history)
    reporter.on_end(plans[0] if rebalancer is None else rebalancer.autotune.plan, uses)
    trained = [reporter.devices[device] for device in group.ids]
    return FinishedTraining(history, splits, trained, uses, plans[0].inexact, directory)


def _make_plans(
    settings: Settings, group: Group, screen: Screen, model: nn.Module, example: Tensor, slowdown: float
) -> Plans:
    """Return the plan and its alternatives. The devices are measured if the settings ask for it."""
    measures = settings.plan == AUTO and settings.fleet is None
    if settings.plan != AUTO:
        title = "every device times the model's layers"
    else:
        title = "measuring the devices and planning" if measures else "the planner reads the fleet"
    is_quick = settings.speeds is not None or group.devices == 1
    about_s = settings.budget_s if measures else None
    with nullcontext(lambda *_: None) if is_quick else Wait(screen.console, title, about_s) as progress:
        plans = make_plans(
            model, example, settings.micro_batch, group,
            plan=settings.plan if settings.plan in (*PLANS, AUTO) else Plan.load(Path(settings.plan)),
            speeds=settings.speeds, reduce=settings.reduce, wire=settings.wire, slowdown=slowdown,
            budget_s=settings.budget_s, fleet=settings.fleet, precision=settings.precision,
            optimizer=settings.optimizer_state, net=settings.net, micro_batches=settings.accumulate, progress=progress,
        )  # fmt: skip
    measured = plans.request.fleet.measured
    for line in [*plans.notes, *([] if measured is None else remarks(measured))]:
        screen.line(line)
    return plans
