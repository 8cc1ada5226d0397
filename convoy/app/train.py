"""What each device of `convoy train` does, from joining to leaving: the public API, with what a person sees and keeps of it."""

import math
import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from convoy.api import Plans, distribute, make_plans
from convoy.app.agreed import agree_on_data, agree_on_settings, devices_of, directory_of, ids_of, uses_of
from convoy.app.build import (
    build_checkpointer,
    build_loaders,
    build_loggers,
    build_members,
    build_rebalancer,
    build_training,
)
from convoy.app.checks import check, check_outputs
from convoy.app.handover import Handover
from convoy.app.inputs import build_model, check_images, check_resume, device_named, example_of, load_images
from convoy.app.joining import (
    Coming,
    JoiningDevices,
    Opening,
    facts_of,
    home_of,
    measured_alone,
    run_of,
)
from convoy.app.telling import planning_title, save_files, show_new_plan, show_plan, teller, write_page
from convoy.checkpoint import Progress
from convoy.comm.agreement import from_first
from convoy.comm.changing import ChangingGroup
from convoy.comm.environment import imposed_slowdown
from convoy.comm.group import AloneGroup, Group
from convoy.comm.processes import join, own_device
from convoy.config.run_file import RunSettings
from convoy.config.settings import Settings
from convoy.data import Splits
from convoy.elastic.entrance import greet
from convoy.elastic.members import Members
from convoy.machine import roster
from convoy.machine.accelerator import limit_memory, set_modes
from convoy.machine.process import watch_parent
from convoy.machine.signals import hearing_signals
from convoy.measure.anew import Replanner, expect_measured
from convoy.plan.explain import work_shares
from convoy.plan.plan import Plan
from convoy.plan.presets import AUTO, PLANS
from convoy.planner.knowledge import FleetKnowledge
from convoy.report.measured import remarks
from convoy.report.screen import Screen
from convoy.runlog.directory import RunDirectory, RunHeader, check_directory
from convoy.runlog.observers import Meters, StepTimer, Utilization
from convoy.runlog.schema import DeviceLine, EndLine
from convoy.runtime.clock import Clock
from convoy.runtime.module import Distributed
from convoy.runtime.precision import UnderAutocast
from convoy.train.controller import Rebalancer
from convoy.train.loader import Loader
from convoy.train.loop import Training, fit
from convoy.train.observer import Observers
from convoy.train.record import History


@dataclass(frozen=True)
class _Done:
    """A training that is over, as one of its devices knows it."""

    history: History
    splits: Splits
    devices: Sequence[tuple[str, str, float]]
    uses: Sequence[DeviceLine]
    inexact: str
    directory: RunDirectory | None


def run_device(run: RunSettings) -> None:
    """What each device of a job does."""
    settings = run.settings
    check(settings)
    set_modes(settings.tf32, settings.deterministic)
    torch.manual_seed(settings.seed)
    with ExitStack() as stack:
        group = stack.enter_context(join(device_named(settings.device_names), timeout_s=settings.timeout_s))
        if settings.listen is not None and group.devices == 1:
            group = ChangingGroup(group)
        agree_on_settings(settings, group)
        home_of(settings, group)  # refuses an address that cannot be, before anything takes long
        if settings.memory is not None:
            limit_memory(group.torch_device, settings.memory[min(group.device, len(settings.memory) - 1)])
        screen = Screen(visible=group.device == 0)
        if group.device == 0:
            check_outputs(settings)
            check_directory(settings)
            if settings.explain:
                screen.settings(run.rows())
        from_first(group, "checkpoint: to resume", lambda: check_resume(settings))
        done = _train(_Job(run, group, screen, stack))
    # The others are free to go while device 0 trains alone beside them.
    if settings.compare and screen.visible:
        _train_alone(settings, done, screen)
    if done.directory is not None and screen.visible:
        folder = done.directory.run
        page = write_page(folder) if settings.page else f"convoy report {shlex.quote(str(folder))}"
        screen.lines([f"A page of this run: {page}"])


def run_newcomer(
    doors: Sequence[tuple[str, int]], device: str | None, here: Mapping[str, Any], accepted: Collection[str] = ()
) -> None:
    """What a device does that comes into a training which runs.

    Args:
        doors: where its devices answer.
        device: to compute on; None: as in a job of one.
        here: settings of this device that are its own, by name.
        accepted: see `run_of`.

    Raises:
        InputError, MismatchError: there is no such training, it does not take this device, or was started by another version.
        DeviceLostError: it has ended, or went on without this device.
    """
    watch_parent()
    entrance, offer = greet(doors)
    run = run_of(offer, {"devices": device or "auto", **here}, accepted)
    settings = run.settings
    check(settings)
    set_modes(settings.tf32, settings.deterministic)
    torch.manual_seed(settings.seed)
    torch_device = own_device(device_named(settings.device_names), 0)
    roster.enter(str(offer["job"]), 0, str(torch_device))
    with ExitStack() as stack:
        group = stack.enter_context(ChangingGroup(AloneGroup(torch_device, settings.timeout_s)))
        _train(_Job(run, group, Screen(visible=False), stack, Coming(entrance, offer)))


@dataclass(frozen=True)
class _Job:
    """A training as it was started on one device."""

    run: RunSettings
    group: Group
    screen: Screen
    stack: ExitStack
    coming: Coming | None = None

    @property
    def settings(self) -> Settings:
        return self.run.settings


def _train(job: _Job) -> _Done:
    """From the images to the last line of the log."""
    group, screen, splits = job.group, job.screen, _images(job)
    model, example = build_model(job.settings, splits), example_of(splits)
    slowdown = job.settings.slowdowns[group.device] * imposed_slowdown()
    plans = _plans(job, model, example, slowdown)
    settings = job.settings
    part = distribute(
        model, plans[0], group, example, slowdown=slowdown, precision=settings.precision, compile=settings.compile
    )
    expect_measured(part, plans.measured)
    devices = devices_of(settings, group)
    screen.fleet(devices, plans.speeds)
    if group.device == 0 and job.coming is None:
        save_files(settings, plans[0])
    show_plan(settings, part, screen)
    loaders = build_loaders(settings, splits, part)
    training = build_training(settings, part, loaders[0])
    keeper = build_checkpointer(settings, training, screen, job.stack, begins=job.coming is None)
    done = keeper.progress if keeper is not None else Progress()
    # Once nothing can refuse the job any more: until then an older log stays as it is.
    here = _handover(job, part, plans, devices, loaders[0], done)

    def measured(offer: dict[str, Any]) -> FleetKnowledge:
        return measured_alone(offer, settings, model, example, group, slowdown)

    title = f"{group.devices} device{'s' * (group.devices > 1)}, plan {part.plan.name}"
    samples, tests = (each.samples for each in loaders)
    start_s = time.perf_counter()
    with screen.progress(
        title, settings.epochs, samples, done.epoch * samples + done.batch * settings.batch, tests
    ) as bar:
        here.observers.observers = (here.timer, bar, *here.observers.observers)
        rebalancer = _rebalancer(job, training, plans, here)
        replan = plans.anew(rebalancer)
        members = _members(job, training, plans, replan, here, splits, measured)
        with nullcontext() if members is None else hearing_signals(members):
            history = fit(training, *loaders, settings.epochs, here.observers, rebalancer, keeper, screen.line, members)
    uses = _uses(job, here, members, time.perf_counter() - start_s)
    ids = ids_of(members, group)
    _tell_end(job, here, plans, plans[0] if rebalancer is None else rebalancer.autotune.plan, history, uses)
    return _Done(history, splits, [here.header.devices[d] for d in ids], uses, plans[0].inexact, here.directory)


def _images(job: _Job) -> Splits:
    """The images, which are the same on every device."""
    splits = load_images(job.settings)
    check_images(job.settings, splits)
    agree_on_data(splits, job.group)
    if splits.notes:
        job.screen.lines([f"  {note}" for note in splits.notes])
    return splits


def _plans(job: _Job, model: nn.Module, example: Tensor, slowdown: float) -> Plans:
    """The plan, and others like it, with what is told while the devices are measured for them."""
    settings, screen = job.settings, job.screen
    quick = settings.speeds is not None or job.group.devices == 1
    about_s = settings.budget_s if settings.plan == AUTO and settings.fleet is None else None
    with nullcontext(lambda *_: None) if quick else screen.working(planning_title(settings), about_s) as tell:
        plans = make_plans(
            model, example, settings.pass_batch, job.group,
            plan=settings.plan if settings.plan in (*PLANS, AUTO) else Plan.load(Path(settings.plan)),
            speeds=settings.speeds, reduce=settings.reduce, wire=settings.wire, slowdown=slowdown,
            budget_s=settings.budget_s, fleet=settings.fleet, precision=settings.precision,
            optimizer=settings.optimizer_state, net=settings.net, micro_batches=settings.passes, progress=tell,
        )  # fmt: skip
    for remark in [] if plans.measured is None else remarks(plans.measured):
        screen.line(remark)
    return plans


def _handover(
    job: _Job, part: Distributed, plans: Plans, devices: Sequence[tuple[str, str, float]], train: Loader, done: Progress
) -> Handover:
    """What tells of the training: the log and its directory, loggers, meters."""
    settings, screen = job.settings, job.screen
    directory = directory_of(settings, job.group, job.coming)
    roster.tell(run="" if directory is None else str(directory.run.absolute()))
    header = RunHeader(
        job.run, devices, plans.speeds, plans[0], part.traced[True].graph, plans.measured, train.samples,
        math.ceil(len(train) / settings.passes), done.step,
    )  # fmt: skip
    log = header.open_log(directory, screen.line, job.stack) if directory is not None and screen.visible else None
    make = partial(build_loggers, settings, directory, screen=screen, stack=job.stack)
    loggers = make(done.step) if screen.visible else []
    observers = Observers(Utilization(job.group, part.clock, log), *([log] if log is not None else []), *loggers)
    part.clock.reset()
    timer = StepTimer(settings.batch)
    here = Handover(part, screen, header, directory, log, loggers, observers, timer, job.stack, make)
    observers.observers = (*observers.observers, Meters(job.group, here.tell_meters, done.step))
    return here


def _rebalancer(job: _Job, training: Training, plans: Plans, here: Handover) -> Rebalancer | None:
    if not job.settings.rebalances:
        return None
    shown = partial(show_new_plan, here.part, plans[0], job.screen)
    tell = teller(job.screen, here.timer, lambda: here.log, here.header.predict, shown)
    return build_rebalancer(here.part, training, plans, tell, job.screen)


def _members(
    job: _Job, training: Training, plans: Plans, replan: Replanner, here: Handover, splits: Splits,
    measured: Callable[[dict[str, Any]], FleetKnowledge],
) -> Members | None:  # fmt: skip
    """What follows the devices of the training, where others may come or these may leave.

    Args:
        measured: what this device finds of itself alone, for a training that tells what it wants.
    """
    settings, part, coming, entrance = job.settings, here.part, job.coming, None
    joining = JoiningDevices(part, splits.fingerprint, replan, here)
    if coming is not None:
        print("measures itself while the others train", flush=True)
        device = here.header.devices[0]
        known = measured(coming.offer)
        facts = facts_of(part, splits.fingerprint, known, f"host {device[1]}, {device[0]}", device)
        entrance = coming.entrance, facts
    elif job.group.devices == 1 and settings.listen is not None:
        known = measured({"timed": True, "measured": settings.plan == AUTO})
        replan.known = replace(replan.known, speeds=known.speeds, measured=known.measured)
    opening = Opening(settings, came=coming is not None)
    members = build_members(settings, training, here, plans, replan, joining, opening, entrance)
    if members is not None:
        opening.tell(members, replan.known, here)
    return members


def _uses(job: _Job, here: Handover, members: Members | None, wall_s: float) -> list[DeviceLine]:
    """What each device did all the while. Here the devices meet for the last time."""
    part = here.part

    def used() -> list[DeviceLine]:
        shares = work_shares(part.steps(job.settings.pass_batch), part.traced[True].graph)
        return uses_of(here, job.group, part, shares, wall_s, ids_of(members, job.group))

    if members is None:
        return used()
    uses = members.repeated(used)
    members.close()
    return uses


def _tell_end(
    job: _Job, here: Handover, plans: Plans, chosen: Plan, history: History, uses: Sequence[DeviceLine]
) -> None:
    screen, timer = job.screen, here.timer
    screen.usage(uses, history)
    screen.best(history)
    if here.part.compiler is not None:
        screen.lines([here.part.compiler.told()])
    predicted_s, within = plans.predicted_s(chosen), plans.within(chosen)
    if predicted_s is not None and within is not None and len(uses) == plans[0].devices:
        screen.lines([timer.beside(predicted_s, within, job.settings.passes)])
    if here.log is not None:
        for use in uses:
            here.log.write(use)
        here.log.write(EndLine(step_s=timer.step_s))


@dataclass
class _Slowed(Training):
    """Training in plain PyTorch on a device that is slowed down as those of the fleet are."""

    clock: Clock = field(kw_only=True)

    def _backward(self, x: Tensor, y: Tensor, part: float) -> Tensor:
        with self.clock.compute("all layers", "forward and backward"):
            return super()._backward(x, y, part)


def _train_alone(settings: Settings, done: _Done, screen: Screen) -> None:
    """The same training by plain PyTorch on one CPU, as slow as the fastest of the fleet: what Convoy must equal."""
    model = UnderAutocast(build_model(settings, done.splits), settings.precision)
    train, test = build_loaders(settings, done.splits, None)
    slowdown = min(slowdown for _, _, slowdown in done.devices)
    training = build_training(settings, model, train)
    slowed = _Slowed(**vars(training), clock=Clock(torch.device("cpu"), slowdown))
    title = "one device, plain PyTorch" + (f", slowed down {slowdown:g}x" if slowdown != 1 else "")
    with screen.progress(title, settings.epochs, train.samples, tests=test.samples) as bar:
        alone = fit(slowed, train, test, settings.epochs, bar, tell=screen.line)
    screen.comparison(done.history, alone, done.devices, done.uses, inexact=done.inexact, precision=settings.precision)
