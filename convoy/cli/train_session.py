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
from convoy.machine.process import handle_signals
from convoy.measure.job_plans import expect_measured
from convoy.plan.plan import Plan
from convoy.plan.presets import AUTO, PLANS
from convoy.planner.knowledge import FleetKnowledge
from convoy.report.measured import remarks
from convoy.report.screen import Screen, Wait
from convoy.runlog.directory import RunDirectory, make_directory, paths_of
from convoy.train.controller import Rebalancer
from convoy.train.loop import Training, fit


@dataclass(frozen=True)
class Job:
    """The inputs of a training on one device. `invitation`: the running job's reply, if this device joins one."""

    run: RunSettings
    group: Group
    screen: Screen
    stack: ExitStack
    invitation: Invitation | None = None


def train_job(job: Job) -> FinishedTraining:
    """Train as one device of the job."""
    settings, group, screen = job.run.settings, job.group, job.screen
    splits = agreed_images(settings, group, screen)
    model, example = build_model(settings, splits), example_of(splits)
    slowdown = settings.slowdowns[group.device] * imposed_slowdown()
    plans = _make_plans(job, model, example, slowdown)
    part = distribute(
        model, plans[0], group, example, slowdown=slowdown, precision=settings.precision,
        cuda_graphs=settings.cuda_graphs,
    )  # fmt: skip
    expect_measured(part, plans.request.fleet.measured)
    own = [str(group.torch_device), os.uname().nodename, torch.get_num_threads()]
    rows = zip(gather(group, "fleet", own), settings.slowdowns, strict=True)
    devices = [
        (f"{name} ({threads} thread{'s' * (threads > 1)})", host, times) for (name, host, threads), times in rows
    ]
    screen.fleet(devices, plans.speeds)
    train, test = build_loaders(settings, splits, part)
    training = build_training(settings, part, train)
    training.report = screen.line
    checkpointer = _checkpointer(job, training)
    done = Progress() if checkpointer is None else checkpointer.progress
    directory = _directory(job)
    reporter = Reporter(job.run, part, plans, devices, screen, directory, train.samples, done.step)
    job.stack.enter_context(reporter)
    reporter.show_plan()
    title = f"{group.devices} device{'s' * (group.devices > 1)}, plan {part.plan.name}"
    samples_done = done.epoch * train.samples + done.batch * settings.batch
    start_s = time.perf_counter()
    with screen.progress(title, settings.epochs, train.samples, samples_done, test.samples) as bar:
        reporter.observe(bar)
        rebalancer = None
        if settings.rebalances:
            rebalancer = Rebalancer(part, training.optimizer, tell=reporter.on_decision, others=plans[1:])
        replan = plans.replanner(rebalancer)
        known = _own_knowledge(job, model, example, slowdown)
        if known is not None and job.invitation is None:
            replan.known = replace(replan.known, speeds=known.speeds, measured=known.measured)
        admission = TrainAdmission(part, splits.fingerprint, replan, reporter)
        members = build_members(admission, training, job.invitation, known)
        with nullcontext() if members is None else handle_signals(members):
            history = fit(training, train, test, settings.epochs, reporter.observers, rebalancer, checkpointer, members)
    usage = partial(reporter.usage, time.perf_counter() - start_s)
    uses = usage() if members is None else members.repeated(usage)
    if members is not None:
        members.close()
    screen.usage(uses, history)
    screen.best(history)
    reporter.on_end(plans[0] if rebalancer is None else rebalancer.autotune.plan, uses)
    trained = [reporter.devices[device] for device in group.ids]
    return FinishedTraining(history, splits, trained, uses, plans[0].inexact, directory)


def _make_plans(job: Job, model: nn.Module, example: Tensor, slowdown: float) -> Plans:
    """Return the plan and its alternatives. The devices are measured if the settings ask for it."""
    settings, group, screen = job.run.settings, job.group, job.screen
    measures = settings.plan == AUTO and settings.fleet is None
    title = "measuring the devices and planning" if measures else "planning"
    if settings.plan != AUTO:
        title = "every device times the model's layers"
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
    if settings.rebalances and len(plans) > 1:
        screen.line(f"{len(plans)} plans are predicted to take nearly as long: training tries each for some steps.")
    return plans


def _checkpointer(job: Job, training: Training) -> Checkpointer | None:
    """Return the checkpointer, if the settings name a folder. Continue from its checkpoint if this is a resumed run."""
    settings = job.run.settings
    if settings.checkpoint is None:
        return None
    checkpointer = Checkpointer(
        settings.checkpoint, training.model, training.optimizer, every=settings.checkpoint_steps, schedule=training.schedule,
        scaler=training.scaler, settings=settings.lasting, tell=lambda line: job.screen.line(f"  {line}"),
    )  # fmt: skip
    job.stack.callback(checkpointer.close)
    if job.invitation is None:
        done = checkpointer.begin(settings.resume)
        torch.manual_seed(settings.seed + done.step)  # dropout must not repeat the first steps' random numbers
    return checkpointer


def _directory(job: Job) -> RunDirectory | None:
    """Return the folder of the run's log, the same on every device, because each may have to continue the log."""
    if job.invitation is None:
        row = from_first(job.group, "directory of the run", lambda: paths_of(make_directory(job.run.settings)))
    else:
        row = job.invitation.offer["directory"]
    return None if row is None else RunDirectory(Path(row[0]), None if row[1] is None else Path(row[1]))


def _own_knowledge(job: Job, model: nn.Module, example: Tensor, slowdown: float) -> FleetKnowledge | None:
    """Measure this device if it joins a job, or is alone and others may join it."""
    settings, invitation = job.run.settings, job.invitation
    if invitation is not None:
        print("measures itself while the others train", flush=True)
        return measured_alone(invitation.offer, settings, model, example, job.group, slowdown)
    if job.group.devices == 1 and settings.listen is not None:
        asked = {"timed": True, "measured": settings.plan == AUTO}
        return measured_alone(asked, settings, model, example, job.group, slowdown)
    return None
